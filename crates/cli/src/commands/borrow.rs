//! `rackbus borrow`: takes a function for a host.

use std::time::Duration;

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
  rackbus borrow alpha/nvme0 --for beta --wait=10min         as soon as others have returned it
  rackbus borrow alpha/nvme0 --for beta --json | jq -r .socket")]
pub struct Args {
    /// The device, HOST/DEVICE.
    device: String,
    /// The host that shall have it.
    #[arg(long = "for", value_name = "HOST")]
    host: String,
    #[command(flatten)]
    trust: Trust,
    /// Wait so long while others have it; without a time, a day. Who waits gets it in turn.
    #[arg(long, value_name = "TIME", num_args = 0..=1, require_equals = true, default_missing_value = "1day",
        value_parser = humantime::parse_duration)]
    wait: Option<Duration>,
    /// Of those who wait, the greatest priority comes first, from 0 to 255.
    #[arg(long, value_name = "NUMBER", default_value_t = 0)]
    priority: u8,
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
        let wait_ms = self.wait.map(|wait| u64::try_from(wait.as_millis()).unwrap_or(u64::MAX));
        let request = BorrowRequest {
            wait_ms,
            priority: self.priority,
            ..self.trust.request(&self.device, &self.host)
        };
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
