//! `rackbus accel`: accelerators that were borrowed, what they cost, and experiments with them.

mod experiment;
mod level;
mod list;
mod profile;
mod run;

use rackbus_driver::AccelError;
use rackbus_pci::vfio_user::ClientError;
use rustix::io::Errno;

use crate::Common;
use crate::output::{Failure, Output};

/// Accelerators: what there is, operations on one that was borrowed and its service level, what operations cost.
#[derive(Debug, clap::Args)]
pub struct Args {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, clap::Subcommand)]
enum Command {
    List(list::Args),
    Run(run::Args),
    Level(level::Args),
    Profile(profile::Args),
    Experiment(experiment::Args),
}

impl Args {
    pub async fn run(&self, common: &Common, output: &Output) -> Result<(), Failure> {
        match &self.command {
            Command::List(args) => args.run(common, output).await,
            Command::Run(args) => args.run(common, output).await,
            Command::Level(args) => args.run(common, output).await,
            Command::Profile(args) => args.run(output),
            Command::Experiment(args) => args.run(output),
        }
    }
}

/// What an accelerator did not do, and what to do about it.
fn failed(error: AccelError) -> Failure {
    let remedy = match &error {
        AccelError::Operation { .. } => "correct the input, the key or the operation",
        AccelError::Request(_) => "send smaller messages",
        AccelError::Client(ClientError::Refused(Errno::BUSY)) => {
            "another program uses it, one at a time can: wait for that, or borrow another one"
        }
        _ => "see `rackbus leases`, and borrow it anew",
    };
    Failure::new(error.to_string(), remedy)
}
