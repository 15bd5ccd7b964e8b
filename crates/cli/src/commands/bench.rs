//! `rackbus bench`: what lending costs on this machine.

use crate::output::{Failure, Output};

/// Measure what lending costs on this machine, against its own limits and other systems.
#[derive(Debug, clap::Args)]
#[command(after_help = "Examples:
  rackbus bench nvme                       all cases of the lent NVMe drive
  rackbus bench nvme --only 'qd1 memory'   some of them
  rackbus bench lending                    peer-to-peer between functions of two lenders
  rackbus bench memory                     segments and interrupts between two hosts
  rackbus bench model                      how fast the timing model simulates
  rackbus bench nvme --low-latency         with /dev/cpu_dma_latency held at 0 (as root)")]
pub struct Args {
    #[command(subcommand)]
    command: rackbus_bench::BenchCommand,
}

impl Args {
    pub fn run(&self, output: &Output) -> Result<(), Failure> {
        rackbus_bench::run(self.command.clone(), &["bench"], output.is_json()).map_err(|error| {
            Failure::new(error.to_string(), "run it again on a quiet machine, or with --only")
        })
    }
}
