//! `rackbus withdraw`: a device leaves the running rack.

use rackbus_control::offers::SectionState;

use crate::Common;
use crate::commands::{client, offer};
use crate::output::{Failure, Output};

/// Take a device out of the rack, without a restart.
#[derive(Debug, clap::Args)]
#[command(after_help = "Examples:
  rackbus withdraw alpha/nvme2
  rackbus withdraw alpha/nvme2 --force       ends the leases of its functions first, in order

What the device holds stays where it is: a drive's file, for example.")]
pub struct Args {
    /// The device, HOST/NAME, with all of its functions.
    device: String,
    /// End the leases of its functions first: their users are asked to release them, and lose them after `return_grace`.
    #[arg(long)]
    force: bool,
}

impl Args {
    pub async fn run(&self, common: &Common, output: &Output) -> Result<(), Failure> {
        let Some((host, device)) = self.device.split_once('/') else {
            let error = format!("`{}` is no device", self.device);
            return Err(Failure::usage(error, "write HOST/NAME, for example alpha/nvme2"));
        };
        let device = client(common).await?.withdraw(host, device, self.force).await?;
        let what = match device.state {
            SectionState::Withdrawn => "out of the rack",
            _ => "out of the rack; its host's node releases it when it is back",
        };
        offer::show(&device, what, output)
    }
}
