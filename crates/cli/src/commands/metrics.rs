//! `rackbus metrics`: what the control plane or a node counts, for Prometheus.

use rackbus_control::ControlClient;
use serde_json::json;

use crate::Common;
use crate::commands::{client, named_host};
use crate::output::{Failure, Output};
use crate::paths::{find_run_dir, running};

/// Print the metrics of the control plane, or of a host's node, in Prometheus' text format. A
/// Prometheus scrapes them by itself where the rack was started with `rackbus up --metrics`.
#[derive(Debug, clap::Args)]
#[command(after_help = "Examples:
  rackbus metrics            of the control plane: leases, functions, hosts, its store
  rackbus metrics alpha      of alpha's node: its functions, link and shared memory")]
pub struct Args {
    /// The host whose node is asked.
    host: Option<String>,
}

impl Args {
    pub async fn run(&self, common: &Common, output: &Output) -> Result<(), Failure> {
        let client = match &self.host {
            None => client(common).await?,
            Some(host) => {
                let run_dir = find_run_dir(common)?;
                let rack = running(&run_dir)?.rack()?;
                let host = &named_host(&rack, host)?.name;
                ControlClient::new(&run_dir.join(host).join(rackbus_node::metrics::SOCKET))
            }
        };
        let text = client.metrics().await?;
        output.result(&json!({ "host": self.host, "text": text }), |o| o.line(text.trim_end()));
        Ok(())
    }
}
