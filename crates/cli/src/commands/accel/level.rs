//! `rackbus accel level`: another service level for a lease that is in use.

use rackbus_control::ControlClient;

use crate::Common;
use crate::commands::client;
use crate::output::{Failure, Output};

/// Change the service level of a lease while it is used. Its user notices nothing but the rate. A level that cannot
/// be kept is refused with what would fit, and the one before stays in force.
#[derive(Debug, clap::Args)]
#[command(after_help = "Examples:
  rackbus accel level 1 'aes256gcm 6 Gbit/s'
  rackbus accel level alpha/accel0.vf1 'zstd 20 kop/s max 40 kop/s'
  rackbus accel level 1 none                  what a lease without a level has")]
pub struct Args {
    /// The lease's number, or the function that it has.
    #[arg(value_name = "LEASE-OR-FUNCTION")]
    lease: String,
    /// The service level, as for `rackbus borrow --accel`; `none` for what a lease without a level has.
    level: String,
}

impl Args {
    pub async fn run(&self, common: &Common, output: &Output) -> Result<(), Failure> {
        let client = client(common).await?;
        let number = match self.lease.parse() {
            Ok(number) => number,
            Err(_) => lease_of(&client, &self.lease).await?,
        };
        let level = Some(self.level.trim()).filter(|level| *level != "none");
        let lease = client.change_level(number, level).await?;
        output.result(&lease, |o| {
            let level = lease
                .level
                .as_deref()
                .map_or("no level of its own".into(), |level| format!("`{level}`"));
            o.line(&format!(
                "lease {number}: {} has {level} of {}",
                lease.borrower, lease.function
            ));
        });
        Ok(())
    }
}

/// The lease that has a function.
async fn lease_of(client: &ControlClient, function: &str) -> Result<u64, Failure> {
    let mut devices = client.devices().await?;
    devices.retain(|device| device.function == function);
    match devices.first().map(|device| device.lease) {
        Some(Some(lease)) => Ok(lease),
        Some(None) => {
            let remedy = "borrow it with the level: rackbus borrow --accel LEVEL --for HOST";
            Err(Failure::new(format!("nobody has {function}"), remedy))
        }
        None => {
            let error = format!("there is no function {function}");
            Err(Failure::new(error, "`rackbus accel list` shows them"))
        }
    }
}
