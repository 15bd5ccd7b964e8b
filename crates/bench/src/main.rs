//! `rackbus-bench`: measures an area and prints its rows. `make bench` runs it.

use std::process::ExitCode;

use clap::Parser;
use rackbus_bench::{BenchCommand, run};

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
