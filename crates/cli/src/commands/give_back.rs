//! `rackbus return`: gives a function back.

use crate::Common;
use crate::commands::client;
use crate::output::{Failure, Output};

/// Return a borrowed device. A VM that uses it is asked to release it first. Comes back when the
/// device is reset, scrubbed and offered again.
#[derive(Debug, clap::Args)]
#[command(after_help = "Examples:
  rackbus return 3
  rackbus return alpha/nvme0")]
pub struct Args {
    /// The lease's number, as `rackbus leases` lists it, or the device that is lent.
    #[arg(value_name = "LEASE|HOST/DEVICE", value_parser = meant)]
    lease: Meant,
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
        let lease = client.give_back(lease).await?;
        output.result(&lease, |o| {
            let (number, function) = (lease.lease, &lease.function);
            o.line(&format!("lease {number} is over; {function} is offered again"));
        });
        Ok(())
    }
}
