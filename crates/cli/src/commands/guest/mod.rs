//! `rackbus guest`: memory shared with the rack from inside of virtual machines.

mod install;
mod serve;
mod ssh;

use clap::Subcommand;

use crate::Common;
use crate::output::{Failure, Output};

/// Share memory with the rack from inside of virtual machines.
#[derive(Debug, clap::Args)]
#[command(after_help = "Examples:
  rackbus vm run --host alpha --name vm1 --fabric --detach   a guest that is the host vm1 of the rack file
  rackbus guest install vm1                          libsisci.so for its programs, and the mount
  rackbus vm exec vm1 -- /opt/DIS/bin/scipp -server  they run as on a host
  rackbus guest install --ssh root@guest             the same in a guest that is reached by SSH
  rackbus guest install --print                      what to do in any other guest")]
pub struct Args {
    #[command(subcommand)]
    command: GuestCommand,
}

#[derive(Debug, Subcommand)]
enum GuestCommand {
    /// Put the library into a running guest, and mount what it finds the rack by
    Install(install::Args),
    /// Serve a VM's device, until the VM ends
    #[command(hide = true)]
    Serve(serve::Args),
}

impl Args {
    pub async fn run(&self, common: &Common, output: &Output) -> Result<(), Failure> {
        match &self.command {
            GuestCommand::Install(args) => args.run(common, output),
            GuestCommand::Serve(args) => args.run(common).await,
        }
    }
}
