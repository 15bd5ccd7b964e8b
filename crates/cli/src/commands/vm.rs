//! `rackbus vm`: virtual machines with borrowed functions.

mod fabric;
mod leases;
mod memory;
mod moving;
mod run;
mod running;

use std::path::PathBuf;

use clap::Subcommand;
use rackbus_control::ControlClient;
use rackbus_vm::agent::LONGEST_LIMIT;
use rackbus_vm::registry::NameClaim;
use rackbus_vm::spec::DEFAULT_SPARE_PORTS;
use rackbus_vm::{GuestRelease, VmError, VmRecord, registry};

use crate::Common;
use crate::commands::borrow::Trust;
use crate::output::{Failure, Output};
use crate::paths::find_run_dir;
use memory::{MemoryArgs, add_memory, remove_memory};
use run::{own_args, run_vm};
use running::{add, exec, list, remove, stop};

/// Run virtual machines with borrowed devices.
#[derive(Debug, clap::Args)]
#[command(after_help = "Examples:
  rackbus vm run --host beta --borrow alpha/nvme0             a Debian guest, on this terminal
  rackbus vm run --host beta --name db --detach --disk db.qcow2 -- -nic user
  rackbus vm add db alpha/nvme0                               plug a drive in while it runs
  rackbus vm run --host beta --name web --max-memory 4G --detach
  rackbus vm add web --memory 512M                            and rackbus vm remove web memory0
  rackbus vm exec vm1 -- nvme list
  rackbus vm move vm1 --to gamma                              switched off, and on again at gamma
  rackbus vm run --host beta --name vm1 --fabric              share memory with the rack: rackbus guest --help
  eval \"qemu-system-x86_64 $(rackbus vm args --host beta --borrow alpha/nvme0) …\"")]
pub struct Args {
    #[command(subcommand)]
    command: VmCommand,
}

#[derive(Debug, Subcommand)]
enum VmCommand {
    /// Boot a VM on a host with borrowed functions plugged in
    Run(RunArgs),
    /// Borrow functions and print the QEMU arguments for a VM that you start yourself
    Args(OwnArgs),
    /// List the VMs that run
    List,
    /// Switch a VM off and return what it borrowed
    Stop(StopArgs),
    /// Move a VM to another host, with its functions: it is switched off and started there
    Move(moving::MoveArgs),
    /// Run a command in a prepared guest
    Exec(ExecArgs),
    /// Borrow a function and plug it into a running VM, or plug in memory
    Add(AddArgs),
    /// Unplug a function from a running VM and return it, or unplug memory
    Remove(RemoveArgs),
}

/// Arguments of `rackbus vm run`.
#[derive(Debug, clap::Args)]
struct RunArgs {
    /// The host that the VM runs on
    #[arg(long)]
    host: String,
    /// A function to borrow for it, as HOST/DEVICE; may be repeated
    #[arg(long, value_name = "FUNCTION")]
    borrow: Vec<String>,
    /// A drive to borrow for it and to boot from, as HOST/DEVICE: by UEFI, from its EFI system partition
    #[arg(long, value_name = "FUNCTION", conflicts_with_all = ["guest", "kernel", "disk"])]
    boot: Option<String>,
    /// A composition to borrow for it, whole or not at all
    #[arg(long, value_name = "NAME")]
    composition: Option<String>,
    #[command(flatten)]
    trust: Trust,
    /// The VM's name [default: vm1, vm2, ...]
    #[arg(long)]
    name: Option<String>,
    #[command(flatten)]
    memory: MemoryArgs,
    /// How many virtual processors the guest has
    #[arg(long, default_value_t = 1)]
    cpus: u32,
    /// Free ports for functions that are plugged in later
    #[arg(long, default_value_t = DEFAULT_SPARE_PORTS)]
    spare_ports: u8,
    /// A prepared guest: bookworm (Linux 6.1), trixie (Linux 6.12) or trixie-backports (Linux 7) [default: trixie]
    #[arg(long, conflicts_with_all = ["kernel", "disk"])]
    guest: Option<GuestRelease>,
    /// A kernel of your own
    #[arg(long, conflicts_with = "disk")]
    kernel: Option<PathBuf>,
    /// The initial RAM file system for it
    #[arg(long, requires = "kernel")]
    initrd: Option<PathBuf>,
    /// The command line for it
    #[arg(long, requires = "kernel", default_value = "console=ttyS0")]
    append: String,
    /// A disk image of your own to boot from (raw, or qcow2 when it is named so)
    #[arg(long)]
    disk: Option<PathBuf>,
    /// Show functions with MSI-X although this QEMU cannot unplug such ones: they stay until the VM
    /// ends, whatever becomes of their lender
    #[arg(long)]
    msix: bool,
    /// Share memory with the rack from inside of the guest, which is this host of the rack file; without
    /// a name the one that has the VM's
    #[arg(long, value_name = "HOST", num_args = 0..=1, require_equals = true, default_missing_value = "")]
    fabric: Option<String>,
    /// Leave the VM running and return
    #[arg(long)]
    detach: bool,
    /// More arguments for QEMU
    #[arg(last = true, value_name = "QEMU ARGUMENTS")]
    extra: Vec<String>,
}

/// Arguments of `rackbus vm args`.
#[derive(Debug, clap::Args)]
struct OwnArgs {
    /// The host that the VM runs on
    #[arg(long)]
    host: String,
    /// A function to borrow for it, as HOST/DEVICE; may be repeated
    #[arg(long, value_name = "FUNCTION", required_unless_present = "fabric")]
    borrow: Vec<String>,
    /// Share memory with the rack from inside of the guest, which is this host of the rack file
    #[arg(long, value_name = "HOST")]
    fabric: Option<String>,
    #[command(flatten)]
    trust: Trust,
    /// Keep the functions lent when the QEMU that uses them ends, for the next one that you start with the same arguments
    #[arg(long)]
    keep: bool,
    /// The group that they are borrowed for, whose functions reach each other's memory by DMA, except with strict isolation
    /// [default: one of their own]
    #[arg(long, value_name = "NAME")]
    group: Option<String>,
    #[command(flatten)]
    memory: MemoryArgs,
    /// Show functions with MSI-X: a QEMU that cannot unplug such ones (up to 11.1) keeps them until
    /// it ends, whatever becomes of their lender
    #[arg(long)]
    msix: bool,
}

/// Arguments of `rackbus vm stop`.
#[derive(Debug, clap::Args)]
struct StopArgs {
    /// The VM, by the name that `rackbus vm list` shows
    name: String,
    /// End it at once, as a power cut would
    #[arg(long)]
    kill: bool,
}

/// Arguments of `rackbus vm exec`.
#[derive(Debug, clap::Args)]
struct ExecArgs {
    /// The VM, by the name that `rackbus vm list` shows
    name: String,
    /// Stop the command after this many seconds
    #[arg(long, default_value_t = 60, value_parser = clap::value_parser!(u64).range(1..=LONGEST_LIMIT.as_secs()))]
    seconds: u64,
    /// The command and its arguments, run by bash
    #[arg(last = true, required = true)]
    command: Vec<String>,
}

/// Arguments of `rackbus vm add`.
#[derive(Debug, clap::Args)]
#[command(after_help = "Examples:
  rackbus vm add db alpha/nvme0
  rackbus vm add db alpha/nvme0 --isolation strict
  rackbus vm add db --memory 512M           of a VM that was started with --max-memory")]
struct AddArgs {
    /// The VM, by the name that `rackbus vm list` shows
    name: String,
    /// The function, as HOST/DEVICE
    #[arg(required_unless_present = "memory")]
    function: Option<String>,
    /// Plug in memory instead: 128M or a multiple of that, within the --max-memory that the VM was started with
    #[arg(long, value_name = "SIZE", value_parser = memory::size, conflicts_with_all = ["function", "isolation", "placement"])]
    memory: Option<u32>,
    #[command(flatten)]
    trust: Trust,
}

/// Arguments of `rackbus vm remove`.
#[derive(Debug, clap::Args)]
#[command(after_help = "Examples:
  rackbus vm remove db alpha/nvme0
  rackbus vm remove db memory0              what `rackbus vm add db --memory` named so")]
struct RemoveArgs {
    /// The VM, by the name that `rackbus vm list` shows
    name: String,
    /// The function, as HOST/DEVICE, or memory by the name that `rackbus vm add --memory` gave it
    #[arg(value_name = "FUNCTION|MEMORY")]
    what: String,
}

/// What every one of them needs.
struct Context<'a> {
    client: ControlClient,
    run_dir: PathBuf,
    output: &'a Output,
}

impl Args {
    pub async fn run(&self, common: &Common, output: &Output) -> Result<(), Failure> {
        let run_dir = find_run_dir(common)?;
        let client = ControlClient::new(&rackbus_node::control_socket(&run_dir));
        let context = Context { client, run_dir, output };
        match &self.command {
            VmCommand::Run(args) => run_vm(args, &context).await,
            VmCommand::Args(args) => own_args(args, &context).await,
            VmCommand::List => list(&context),
            VmCommand::Stop(args) => stop(args, &context).await,
            VmCommand::Move(args) => moving::move_vm(args, &context).await,
            VmCommand::Exec(args) => exec(args, &context),
            VmCommand::Add(args) => match (&args.function, args.memory) {
                (Some(function), _) => add(&args.name, function, args.trust, &context).await,
                (None, memory) => add_memory(&args.name, memory.unwrap_or(0), &context).await,
            },
            VmCommand::Remove(args) if args.what.contains('/') => {
                remove(&args.name, &args.what, &context).await
            }
            VmCommand::Remove(args) => remove_memory(&args.name, &args.what, &context),
        }
    }
}

impl From<VmError> for Failure {
    fn from(error: VmError) -> Self {
        let remedy = match &error {
            VmError::NotSetUp { .. } => "run `make setup` in rackbus' source, or scripts/setup",
            VmError::NoSuchVm { .. } => "see `rackbus vm list`",
            VmError::Exists(_) => "stop it with `rackbus vm stop`, or choose another --name",
            VmError::FixedMemory(_) => "for example `rackbus vm run --max-memory 4G`",
            VmError::NoFreePort(_) => "start the VM with more --spare-ports",
            VmError::AgentBusy(_) => "wait until one of them has ended",
            VmError::NotAsked { .. } => {
                "try again, or end it as a power cut would: `rackbus vm stop --kill`"
            }
            VmError::Ended { .. } => "correct what QEMU says",
            _ => "see qemu.log and console.log in the VM's folder",
        };
        Failure::new(error.to_string(), remedy)
    }
}

/// What a thread of its own did.
fn joined<T>(outcome: Result<T, tokio::task::JoinError>) -> Result<T, Failure> {
    outcome.map_err(|error| Failure::new(format!("a thread failed: {error}"), "try again"))
}

/// The VMs of all hosts.
fn all(context: &Context<'_>) -> Result<Vec<VmRecord>, Failure> {
    let mut found = Vec::new();
    let Ok(hosts) = std::fs::read_dir(&context.run_dir) else { return Ok(found) };
    for host in hosts.flatten().filter(|h| h.path().join("vms").is_dir()) {
        found.extend(registry::list(&context.run_dir, &host.file_name().to_string_lossy())?);
    }
    found.sort_by(|a, b| a.name.cmp(&b.name));
    Ok(found)
}

fn find(context: &Context<'_>, name: &str) -> Result<VmRecord, Failure> {
    let found = all(context)?.into_iter().find(|vm| vm.name == name);
    let error = || format!("no VM named '{name}' runs");
    found.ok_or_else(|| Failure::new(error(), "see `rackbus vm list`"))
}

/// A VM that runs, and its name: for as long as that is held, nobody moves the VM or starts it.
fn hold(context: &Context<'_>, name: &str) -> Result<(VmRecord, NameClaim), Failure> {
    let claim = match NameClaim::of_rack(&context.run_dir, name) {
        Ok(claim) => claim,
        Err(VmError::Exists(_)) => {
            let error = format!("VM '{name}' is just being started, moved or stopped");
            let remedy = "try again when that is done; a `vm move` that still waits can be ended";
            return Err(Failure::new(error, remedy));
        }
        Err(error) => return Err(error.into()),
    };
    Ok((find(context, name)?, claim))
}

/// Takes a name for a VM, of which there is none in the rack and nobody begins one.
fn claim(context: &Context<'_>, name: &str) -> Result<NameClaim, Failure> {
    let claim = NameClaim::of_rack(&context.run_dir, name)?;
    match all(context)?.iter().any(|vm| vm.name == name) {
        true => Err(VmError::Exists(name.to_owned()).into()),
        false => Ok(claim),
    }
}

fn free_name(context: &Context<'_>) -> Result<(String, NameClaim), Failure> {
    for name in (1u32..).map(|n| format!("vm{n}")) {
        match NameClaim::of_rack(&context.run_dir, &name) {
            Ok(claim) if !all(context)?.iter().any(|vm| vm.name == name) => {
                return Ok((name, claim));
            }
            Ok(_) | Err(VmError::Exists(_)) => {}
            Err(error) => return Err(error.into()),
        }
    }
    Err(Failure::new("no free VM name", "give one with --name"))
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;

    #[derive(Debug, Parser)]
    struct Line {
        #[command(flatten)]
        exec: ExecArgs,
    }

    #[test]
    fn a_command_in_a_guest_may_take_a_second_to_a_year() {
        let parse = |seconds: &str| {
            Line::try_parse_from(["exec", "vm1", "--seconds", seconds, "--", "true"])
        };
        for taken in ["1", "31536000"] {
            assert_eq!(parse(taken).unwrap().exec.seconds.to_string(), taken);
        }
        for refused in ["0", "31536001", "18446744073709551615"] {
            assert_eq!(parse(refused).unwrap_err().exit_code(), 2, "{refused}");
        }
    }
}
