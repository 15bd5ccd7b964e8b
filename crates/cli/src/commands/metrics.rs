//! `rackbus metrics`: what the control plane or a node counts, for Prometheus.

use rackbus_control::Client;
use serde_json::json;

use crate::Common;
use crate::commands::named_host;
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
        let run_dir = find_run_dir(common)?;
        let socket = match &self.host {
            None => rackbus_node::control_socket(&run_dir),
            Some(host) => {
                let rack = running(&run_dir)?.rack()?;
                run_dir.join(&named_host(&rack, host)?.name).join(rackbus_node::metrics::SOCKET)
            }
        };
        let text = Client::new(&socket).metrics().await?;
        output.result(&json!({ "host": self.host, "text": text }), |o| o.line(text.trim_end()));
        Ok(())
    }
}
