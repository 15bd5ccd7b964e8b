//! `rackbus return`: gives a function back.

use crate::Common;
use crate::commands::client;
use crate::output::{Failure, Output};

/// Return a borrowed device. A VM that uses it is asked to let go first. Comes back when the
/// device is reset, scrubbed and offered again.
#[derive(Debug, clap::Args)]
#[command(after_help = "Example:
  rackbus return 3")]
pub struct Args {
    /// The lease's number, as `rackbus leases` lists it.
    lease: u64,
}

impl Args {
    pub async fn run(&self, common: &Common, output: &Output) -> Result<(), Failure> {
        let lease = client(common).await?.give_back(self.lease).await?;
        output.result(&lease, |o| {
            let (number, function) = (lease.lease, &lease.function);
            o.line(&format!("lease {number} is over; {function} is offered again"));
        });
        Ok(())
    }
}
