//! `rackbus metrics`: what the control plane or a node counts, for Prometheus. Where they may be served without TLS
//! is decided here, too.

use std::net::SocketAddr;

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

/// Refuses an address at which other machines would read metrics: these are served there without TLS, to everybody who
/// reaches it, and name hosts and functions.
///
/// # Errors
/// Wrong usage, where `address` is not one of this machine alone.
pub fn check_address(address: Option<SocketAddr>) -> Result<(), Failure> {
    match address.filter(|address| !address.ip().to_canonical().is_loopback()) {
        None => Ok(()),
        Some(address) => Err(Failure::usage(
            format!("metrics at {address} would be open to everybody who reaches it"),
            "name an address of this machine alone, as 127.0.0.1:9470; other machines read \
             https://CONTROL:7420/metrics with a reader's certificate",
        )),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn metrics_without_tls_are_for_this_machine_alone() {
        assert!(check_address(None).is_ok());
        for own in ["127.0.0.1:9470", "127.3.2.1:1", "[::1]:9470", "[::ffff:127.0.0.1]:9470"] {
            assert!(check_address(Some(own.parse().unwrap())).is_ok(), "{own}");
        }
        for open in ["0.0.0.0:9470", "10.0.0.1:9470", "[::]:9470", "[fd00::1]:9470"] {
            let refused = check_address(Some(open.parse().unwrap())).unwrap_err();
            assert!(refused.usage && refused.error.contains(open), "{refused:?}");
        }
    }
}
