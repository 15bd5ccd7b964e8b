//! `rackbus borrow`: takes a function for a host.

use rackbus_control::api::{BorrowRequest, Isolation, Placement};

use crate::Common;
use crate::commands::client;
use crate::output::{Failure, Output};

/// Borrow a device for a host. Prints the vfio-user socket by which QEMU (or any vfio-user
/// client) on that host uses it.
#[derive(Debug, clap::Args)]
#[command(after_help = "Examples:
  rackbus borrow alpha/nvme0 --for beta
  rackbus borrow alpha/nvme0 --for beta --isolation strict   alpha gets none of beta's memory
  rackbus borrow alpha/nvme0 --for beta --json | jq -r .socket")]
pub struct Args {
    /// The device, HOST/DEVICE.
    device: String,
    /// The host that shall have it.
    #[arg(long = "for", value_name = "HOST")]
    host: String,
    #[command(flatten)]
    trust: Trust,
}

/// How far the borrower trusts the lender.
#[derive(Debug, Clone, Copy, Default, clap::Args)]
pub struct Trust {
    /// `strict`: the lender gets no memory of the borrower's; the device's controller then runs at the
    /// borrower.
    #[arg(long, value_enum, default_value_t = IsolationName::Shared, value_name = "HOW")]
    isolation: IsolationName,
    /// Where the device's controller runs; without it, where the isolation needs it.
    #[arg(long, value_enum, value_name = "WHERE")]
    placement: Option<PlacementName>,
}

#[derive(Debug, Clone, Copy, Default, clap::ValueEnum)]
enum IsolationName {
    #[default]
    Shared,
    Strict,
}

#[derive(Debug, Clone, Copy, clap::ValueEnum)]
enum PlacementName {
    Lender,
    Borrower,
}

impl Trust {
    /// Asks for `device` on `host`, with that much trust.
    pub fn request(self, device: &str, host: &str) -> BorrowRequest {
        BorrowRequest {
            isolation: match self.isolation {
                IsolationName::Shared => Isolation::Shared,
                IsolationName::Strict => Isolation::Strict,
            },
            placement: self.placement.map(|placement| match placement {
                PlacementName::Lender => Placement::Lender,
                PlacementName::Borrower => Placement::Borrower,
            }),
            ..BorrowRequest::new(device, host)
        }
    }
}

impl Args {
    pub async fn run(&self, common: &Common, output: &Output) -> Result<(), Failure> {
        let request = self.trust.request(&self.device, &self.host);
        let lease = client(common)?.borrow_as(&request).await?;
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
