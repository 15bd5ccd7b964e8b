//! `rackbus borrow`: takes a function for a host.

use crate::Common;
use crate::commands::client;
use crate::output::{Failure, Output};

/// Borrow a device for a host. Prints the vfio-user socket by which QEMU (or any vfio-user
/// client) on that host uses it.
#[derive(Debug, clap::Args)]
#[command(after_help = "Examples:
  rackbus borrow alpha/nvme0 --for beta
  rackbus borrow alpha/nvme0 --for beta --json | jq -r .socket")]
pub struct Args {
    /// The device, HOST/DEVICE.
    device: String,
    /// The host that shall have it.
    #[arg(long = "for", value_name = "HOST")]
    host: String,
}

impl Args {
    pub async fn run(&self, common: &Common, output: &Output) -> Result<(), Failure> {
        let lease = client(common)?.borrow(&self.device, &self.host).await?;
        output.result(&lease, |o| {
            let socket = lease.socket.as_deref().unwrap_or_default();
            o.line(&format!(
                "lease {}: {} is lent to {}",
                lease.lease, lease.function, lease.borrower
            ));
            o.line(&format!("socket {socket}"));
        });
        Ok(())
    }
}
