//! `rackbus-bench`: measures an area and prints its rows. `make bench` runs it.

use std::process::ExitCode;

use clap::Parser;
use rackbus_bench::{BenchCommand, run};
use rackbus_memory::wiping::WipingAllocator;

/// What is measured has the allocator that `rackbus` has.
#[global_allocator]
static ALLOCATOR: WipingAllocator = WipingAllocator;

#[derive(Parser)]
#[command(about = "Measures rackbus against the machine's limits and other systems")]
struct Arguments {
    #[command(subcommand)]
    command: BenchCommand,
}

fn main() -> ExitCode {
    match run(Arguments::parse().command, &[], false) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("rackbus-bench: {error}");
            ExitCode::FAILURE
        }
    }
}
