//! `rackbus return`: gives a function back.

use std::time::Duration;

use crate::Common;
use crate::commands::client;
use crate::output::{Failure, Output};

/// Return a borrowed device. A VM that uses it is asked to release it first, and loses it when it does not in time. Comes
/// back when the device is reset, scrubbed and offered again.
#[derive(Debug, clap::Args)]
#[command(after_help = "Examples:
  rackbus return 3
  rackbus return alpha/nvme0
  rackbus return alpha/nvme0 --within 2min
  rackbus return alpha/nvme0 --force")]
pub struct Args {
    /// The lease's number, as `rackbus leases` lists it, or the device that is lent.
    #[arg(value_name = "LEASE|HOST/DEVICE", value_parser = meant)]
    lease: Meant,
    /// Take it after this time from a VM that has not released it, instead of after the rack's `return_grace`: at most 10
    /// minutes. Of a device that is being returned already, the time can be made shorter.
    #[arg(long, value_name = "TIME", value_parser = humantime::parse_duration)]
    within: Option<Duration>,
    /// Take it at once: as `--within 0s`.
    #[arg(long, conflicts_with = "within")]
    force: bool,
}

/// How a lease is named.
#[derive(Debug, Clone)]
enum Meant {
    Lease(u64),
    Function(String),
}

fn meant(text: &str) -> Result<Meant, String> {
    match text.parse() {
        Ok(lease) => Ok(Meant::Lease(lease)),
        Err(_) if text.contains('/') => Ok(Meant::Function(text.to_owned())),
        Err(_) => Err("it is the number of a lease or HOST/DEVICE".to_owned()),
    }
}

impl Args {
    pub async fn run(&self, common: &Common, output: &Output) -> Result<(), Failure> {
        let client = client(common).await?;
        let lease = match &self.lease {
            Meant::Lease(lease) => *lease,
            Meant::Function(function) => {
                let leases = client.leases(false).await?;
                let found = leases.iter().find(|lease| lease.function == *function);
                let found = found.ok_or_else(|| {
                    Failure::new(format!("{function} is lent to nobody"), "see `rackbus leases`")
                })?;
                found.lease
            }
        };
        let within = if self.force { Some(Duration::ZERO) } else { self.within };
        let lease = match within {
            Some(within) => client.give_back_within(lease, within).await?,
            None => client.give_back(lease).await?,
        };
        output.result(&lease, |o| {
            let (number, function) = (lease.lease, &lease.function);
            o.line(&format!("lease {number} is over; {function} is offered again"));
        });
        Ok(())
    }
}
