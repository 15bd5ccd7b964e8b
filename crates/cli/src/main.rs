#![forbid(unsafe_code)]
//! `rackbus`: every command of the rack in one binary.
//!
//! Each command is a file in [`commands`]; what they share is where things are ([`paths`]), how
//! they speak to people and programs ([`output`]), processes ([`process`]), and racks whose control plane is on
//! another machine ([`contexts`], [`remote`]).

mod commands;
mod contexts;
mod log;
mod output;
mod paths;
mod process;
mod remote;
mod shell;
mod size;

use clap::{CommandFactory, FromArgMatches, Parser, Subcommand};
use commands::*;
use output::{Failure, Output};
use rackbus_memory::wiping::WipingAllocator;

/// Text that engines of an accelerator free is wiped.
#[global_allocator]
static ALLOCATOR: WipingAllocator = WipingAllocator;

/// One PCIe bus for the whole rack: any host uses any PCIe device of the rack as if it were local.
#[derive(Debug, Parser)]
#[command(name = "rackbus", version, propagate_version = true, after_help = EXAMPLES)]
struct Cli {
    #[command(flatten)]
    common: Common,
    #[command(subcommand)]
    command: Command,
}

const EXAMPLES: &str = "Examples:
  rackbus up examples/demo/rack.toml        start the rack on this machine
  rackbus devices                           what there is to borrow
  rackbus borrow alpha/nvme0 --for beta     borrow a drive; prints its vfio-user socket
  rackbus return 1                          give it back
  rackbus vm run --host beta --borrow alpha/nvme0   boot a VM with it
  rackbus net up                            join the hosts by a network through the fabric's memory
  rackbus restart --all                     go on with this version of rackbus, nothing returned
  rackbus down                              stop the rack

Exit codes: 0 done, 1 failed, 2 wrong usage.";

/// What every command takes.
#[derive(Debug, Clone, clap::Args)]
struct Common {
    /// Print JSON for programs instead of tables for people.
    #[arg(long, global = true)]
    json: bool,
    /// The rack's name, when several run on this machine.
    #[arg(long, global = true, value_name = "NAME")]
    rack: Option<String>,
    /// The rack's run directory (sockets, process ids, logs).
    #[arg(long, global = true, value_name = "DIR", env = paths::RUN_DIR)]
    run_dir: Option<std::path::PathBuf>,
    /// The rack of this context, which `rackbus login` made; `local` for the rack of this machine.
    #[arg(long, global = true, value_name = "NAME", env = contexts::CONTEXT)]
    context: Option<String>,
}

/// Each command's arguments are declared when it is the one that was called: to declare those of all took longer
/// than many commands do.
#[derive(Debug, Subcommand)]
#[command(defer = true)]
enum Command {
    Up(up::Args),
    Down(down::Args),
    Restart(restart::Args),
    Status(status::Args),
    Devices(devices::Args),
    Borrow(borrow::Args),
    Return(give_back::Args),
    Lend(lend::Args),
    Offer(offer::Args),
    Withdraw(withdraw::Args),
    Composition(composition::Args),
    Share(share::Args),
    Leases(leases::Args),
    Events(events::Args),
    Top(top::Args),
    Metrics(metrics::Args),
    Path(path::Args),
    Reach(reach::Args),
    #[command(name = "node-id")]
    NodeId(node_id::Args),
    Mem(mem::Args),
    Net(net::Args),
    On(on::Args),
    Vm(vm::Args),
    Guest(guest::Args),
    Accel(accel::Args),
    Model(model::Args),
    Bench(bench::Args),
    Completions(completions::Args),
    Token(token::Args),
    Login(login::Args),
    Whoami(whoami::Args),
    Context(context::Args),
    Certificates(certificates::Args),
    Revoke(revoke::Args),
    Testbed(testbed::Args),
    Ntb(ntb::Args),
    Metal(metal::Args),
    Node(node::Args),
    Control(control::Args),
}

impl Command {
    /// Whether it asks a control plane and waits for the answer, and does nothing beside that. One thread is enough
    /// then, and quicker: to make others and to wake them takes longer than all that they would do.
    fn only_asks(&self) -> bool {
        matches!(
            self,
            Command::Status(_)
                | Command::Devices(_)
                | Command::Borrow(_)
                | Command::Return(_)
                | Command::Offer(_)
                | Command::Withdraw(_)
                | Command::Composition(_)
                | Command::Share(_)
                | Command::Leases(_)
                | Command::Events(_)
                | Command::Metrics(_)
                | Command::Path(_)
                | Command::Reach(_)
                | Command::Whoami(_)
                | Command::Token(_)
                | Command::Certificates(_)
                | Command::Revoke(_)
        )
    }
}

impl Cli {
    /// What the command line says; ends the process with clap's own exit codes where it asks for help or the version
    /// (0) or is wrong (2).
    fn of_command_line() -> Cli {
        // What clap prints of the commands (what each is for, which one was meant) needs all of them declared.
        Cli::try_parse().unwrap_or_else(|_| {
            let mut declared = Cli::command();
            declared.build();
            Cli::from_arg_matches(&declared.get_matches()).unwrap_or_else(|error| error.exit())
        })
    }
}

fn main() -> std::process::ExitCode {
    let cli = Cli::of_command_line();
    let output = Output::new(cli.common.json);
    let mut threads = match cli.command.only_asks() {
        true => tokio::runtime::Builder::new_current_thread(),
        false => tokio::runtime::Builder::new_multi_thread(),
    };
    let outcome = match threads.enable_all().build() {
        Ok(runtime) => runtime.block_on(run(&cli, &output)),
        Err(cause) => Err(Failure::new(format!("no threads: {cause}"), "free some resources")),
    };
    output.finish(outcome)
}

async fn run(cli: &Cli, output: &Output) -> Result<(), Failure> {
    let common = &cli.common;
    match &cli.command {
        Command::Up(args) => args.run(common, output).await,
        Command::Down(args) => args.run(common, output).await,
        Command::Restart(args) => args.run(common, output).await,
        Command::Status(args) => args.run(common, output).await,
        Command::Devices(args) => args.run(common, output).await,
        Command::Borrow(args) => args.run(common, output).await,
        Command::Return(args) => args.run(common, output).await,
        Command::Lend(args) => args.run(output),
        Command::Offer(args) => args.run(common, output).await,
        Command::Withdraw(args) => args.run(common, output).await,
        Command::Composition(args) => args.run(common, output).await,
        Command::Share(args) => args.run(common, output).await,
        Command::Leases(args) => args.run(common, output).await,
        Command::Events(args) => args.run(common, output).await,
        Command::Top(args) => args.run(common, output).await,
        Command::Metrics(args) => args.run(common, output).await,
        Command::Path(args) => args.run(common, output).await,
        Command::Reach(args) => args.run(common, output).await,
        Command::NodeId(args) => args.run(common, output),
        Command::Mem(args) => args.run(common, output),
        Command::Net(args) => args.run(common, output).await,
        Command::On(args) => args.run(common),
        Command::Vm(args) => args.run(common, output).await,
        Command::Guest(args) => args.run(common, output).await,
        Command::Accel(args) => args.run(common, output).await,
        Command::Model(args) => args.run(common, output).await,
        Command::Bench(args) => args.run(output),
        Command::Completions(args) => args.run(output),
        Command::Token(args) => args.run(common, output).await,
        Command::Login(args) => args.run(common, output).await,
        Command::Whoami(args) => args.run(common, output).await,
        Command::Context(args) => args.run(common, output),
        Command::Certificates(args) => args.run(common, output).await,
        Command::Revoke(args) => args.run(common, output).await,
        Command::Testbed(args) => args.run(output).await,
        Command::Ntb(args) => args.run(output).await,
        Command::Metal(args) => args.run(output).await,
        Command::Node(args) => args.run(common).await,
        Command::Control(args) => args.run(common, output).await,
    }
}

#[cfg(test)]
mod tests {
    #[test]
    fn what_engines_free_in_this_program_is_wiped() {
        assert!(rackbus_memory::wiping::is_installed());
    }
}
