//! `rackbus vm`: virtual machines with borrowed functions.

mod fabric;
mod leases;
mod moving;

use std::io::Write as _;
use std::path::PathBuf;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use clap::Subcommand;
use rackbus_control::Client;
use rackbus_control::api::Lease;
use rackbus_fabric::rack::format_size;
use rackbus_vm::spec::{DEFAULT_MEMORY_MIB, DEFAULT_SPARE_PORTS, own_vm_args};
use rackbus_vm::{
    Assets, Boot, Console, FunctionSpec, Guest, Interrupts, Record, Vm, VmError, VmSpec, registry,
};
use serde_json::{Value, json};

use rustix::process::Pid;

use crate::Common;
use crate::commands::borrow::Trust;
use crate::commands::named_host;
use crate::output::{Cell, Failure, Output};
use crate::paths::{find_run_dir, running};
use crate::process::{self, EndRequests};
use fabric::Helper;
use leases::{
    borrow_all, borrow_composition, function, give_back, give_back_all, leases_at, leases_of, show,
};

/// Run virtual machines with borrowed devices.
#[derive(Debug, clap::Args)]
#[command(after_help = "Examples:
  rackbus vm run --host beta --borrow alpha/nvme0             a Debian guest, on this terminal
  rackbus vm run --host beta --name db --detach --disk db.qcow2 -- -nic user
  rackbus vm add db alpha/nvme0                               plug a drive in while it runs
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
    /// Borrow a function and plug it into a running VM
    Add(AddArgs),
    /// Unplug a function from a running VM and return it
    Remove(PlugArgs),
}

/// `rackbus vm run`.
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
    /// Guest memory: 512M, 2G
    #[arg(long, value_name = "SIZE", value_parser = memory, default_value_t = DEFAULT_MEMORY_MIB)]
    memory: u32,
    /// Virtual processors
    #[arg(long, default_value_t = 1)]
    cpus: u32,
    /// Free ports for functions that are plugged in later
    #[arg(long, default_value_t = DEFAULT_SPARE_PORTS)]
    spare_ports: u8,
    /// A prepared guest: bookworm (Linux 6.1) or trixie (Linux 6.12) [default: trixie]
    #[arg(long, conflicts_with_all = ["kernel", "disk"])]
    guest: Option<Guest>,
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
    /// Leave the VM running and come back
    #[arg(long)]
    detach: bool,
    /// More arguments for QEMU
    #[arg(last = true, value_name = "QEMU ARGUMENTS")]
    extra: Vec<String>,
}

/// `rackbus vm args`.
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
    /// The group that they are borrowed for, whose functions reach each other's memory by DMA [default: one
    /// of their own]
    #[arg(long, value_name = "NAME")]
    group: Option<String>,
    /// Guest memory, which must be shared with the lender: 512M, 2G
    #[arg(long, value_name = "SIZE", value_parser = memory, default_value_t = DEFAULT_MEMORY_MIB)]
    memory: u32,
    /// Show functions with MSI-X: a QEMU that cannot unplug such ones (up to 11.1) keeps them until
    /// it ends, whatever becomes of their lender
    #[arg(long)]
    msix: bool,
}

/// `rackbus vm stop`.
#[derive(Debug, clap::Args)]
struct StopArgs {
    /// The VM's name
    name: String,
    /// End it at once, as a power cut would
    #[arg(long)]
    kill: bool,
}

/// `rackbus vm exec`.
#[derive(Debug, clap::Args)]
struct ExecArgs {
    /// The VM's name
    name: String,
    /// Stop the command after this many seconds
    #[arg(long, default_value_t = 60)]
    seconds: u64,
    /// The command and its arguments, run by bash
    #[arg(last = true, required = true)]
    command: Vec<String>,
}

/// `rackbus vm add`.
#[derive(Debug, clap::Args)]
struct AddArgs {
    #[command(flatten)]
    plug: PlugArgs,
    #[command(flatten)]
    trust: Trust,
}

/// `rackbus vm add` and `rackbus vm remove`.
#[derive(Debug, clap::Args)]
struct PlugArgs {
    /// The VM's name
    name: String,
    /// The function, as HOST/DEVICE
    function: String,
}

fn memory(text: &str) -> Result<u32, String> {
    let (digits, unit) =
        text.split_at(text.find(|c: char| !c.is_ascii_digit()).unwrap_or(text.len()));
    let factor = match unit.trim().to_ascii_uppercase().as_str() {
        "" | "M" | "MIB" => 1,
        "G" | "GIB" => 1024,
        _ => return Err("write it as 512M or 2G".into()),
    };
    let number: u32 = digits.parse().map_err(|_| "write it as 512M or 2G".to_owned())?;
    number.checked_mul(factor).ok_or_else(|| "at most 1048576M".into())
}

/// What every one of them needs.
struct Context<'a> {
    client: Client,
    run_dir: PathBuf,
    output: &'a Output,
}

impl Args {
    pub async fn run(&self, common: &Common, output: &Output) -> Result<(), Failure> {
        let run_dir = find_run_dir(common)?;
        let client = Client::new(&rackbus_node::control_socket(&run_dir));
        let context = Context { client, run_dir, output };
        match &self.command {
            VmCommand::Run(args) => run_vm(args, &context).await,
            VmCommand::Args(args) => own_args(args, &context).await,
            VmCommand::List => list(&context),
            VmCommand::Stop(args) => stop(args, &context).await,
            VmCommand::Move(args) => moving::move_vm(args, &context).await,
            VmCommand::Exec(args) => exec(args, &context),
            VmCommand::Add(args) => add(&args.plug, args.trust, &context).await,
            VmCommand::Remove(args) => remove(args, &context).await,
        }
    }
}

impl From<VmError> for Failure {
    fn from(error: VmError) -> Self {
        let remedy = match &error {
            VmError::NotSetUp { .. } => "run `make setup` in rackbus' source, or scripts/setup",
            VmError::NoSuchVm { .. } => "see `rackbus vm list`",
            VmError::Exists(_) => "stop it with `rackbus vm stop`, or choose another --name",
            VmError::NoFreePort(_) => "start the VM with more --spare-ports",
            VmError::Ended { .. } => "correct what QEMU says",
            _ => "see qemu.log and console.log in the VM's folder",
        };
        Failure::new(error.to_string(), remedy)
    }
}

async fn run_vm(args: &RunArgs, context: &Context<'_>) -> Result<(), Failure> {
    check_host(context, &args.host, args.memory)?;
    // From before anything is borrowed: whoever ends this command gets nothing left behind.
    let mut requests = EndRequests::listen();
    let mut leases = match &args.composition {
        Some(name) => borrow_composition(context, &args.host, name).await?,
        None => Vec::new(),
    };
    let group = args.composition.as_deref();
    // What it boots from is its first function.
    let functions = [args.boot.as_slice(), &args.borrow].concat();
    match borrow_all(context, &args.host, &functions, args.trust, group).await {
        Ok(mut others) => {
            std::mem::swap(&mut leases, &mut others);
            leases.extend(others);
        }
        Err(failure) => {
            give_back_all(context, &leases).await;
            return Err(failure);
        }
    }
    let launched = match show(&leases, args.msix).await {
        Ok(()) => launch(args, &leases, context).await,
        Err(failure) => Err(failure),
    };
    let vm = match launched {
        Ok(vm) => vm,
        Err(failure) => {
            give_back_all(context, &leases).await;
            return Err(failure);
        }
    };
    let record = vm.record().clone();
    if args.detach {
        let functions: Vec<&str> = leases.iter().map(|l| l.function.as_str()).collect();
        let with = if functions.is_empty() { "nothing".to_owned() } else { functions.join(", ") };
        let Record { name, host, pid, accel, .. } = &record;
        context.output.result(&described(&record), |o| {
            o.line(&format!("VM {name} runs on {host} with {with} (process {pid}, {accel})"));
        });
        return Ok(());
    }
    let Record { name, host, .. } = &record;
    context.output.progress(&format!("VM {name} runs on {host} until its guest powers off"));
    let mut ended = tokio::task::spawn_blocking(move || vm.wait());
    let outcome = tokio::select! {
        outcome = &mut ended => joined(outcome)?.map_err(Failure::from),
        () = requests.wait() => {
            let pid = i32::try_from(record.pid).ok().and_then(Pid::from_raw);
            let asked = record.clone();
            let end = move || pid.filter(|_| asked.alive()).into_iter().for_each(process::end);
            joined(tokio::task::spawn_blocking(end).await)?;
            // How it ended is known: as it was asked to. What is left of it goes.
            let _ = joined(ended.await)?;
            Vm::attach(record).kill();
            Err(Failure::new("interrupted", "the VM has ended; start another one"))
        }
    };
    give_back_all(context, &leases).await;
    outcome
}

/// Starts the VM, under a name that is free when the user gave none.
async fn launch(args: &RunArgs, leases: &[Lease], context: &Context<'_>) -> Result<Vm, Failure> {
    loop {
        let name = match args.name.clone() {
            Some(name) if all(context)?.iter().any(|vm| vm.name == name) => {
                return Err(VmError::Exists(name).into());
            }
            Some(name) => name,
            None => free_name(context)?,
        };
        let mut spec = spec(args, &name, leases, context);
        let helper = match &args.fabric {
            Some(asked) => {
                let guest = fabric::identity(&context.run_dir, asked, &name)?;
                let vm = (args.host.as_str(), name.as_str());
                Some(Helper::start(&context.run_dir, vm, &guest, false)?)
            }
            None => None,
        };
        spec.fabric = helper.as_ref().map(|helper| helper.socket.clone());
        let start = move || Vm::launch(&Assets::of_user(), &spec);
        match joined(tokio::task::spawn_blocking(start).await)? {
            // Somebody else took the free name in between.
            Err(VmError::Exists(_)) if args.name.is_none() => tokio::task::yield_now().await,
            outcome => {
                let vm = outcome?;
                helper.into_iter().for_each(Helper::keep);
                return Ok(vm);
            }
        }
    }
}

/// What a thread of its own did.
fn joined<T>(outcome: Result<T, tokio::task::JoinError>) -> Result<T, Failure> {
    outcome.map_err(|error| Failure::new(format!("a thread failed: {error}"), "try again"))
}

/// Whether the rack has such a host: its name becomes a folder's.
///
/// A VM's memory is lent to the functions that it borrows, and a host lends no more than it has: one that is
/// too large would be refused by the first function that it maps, when it runs already.
fn check_host(context: &Context<'_>, host: &str, memory_mib: u32) -> Result<(), Failure> {
    let rack = running(&context.run_dir)?.rack()?;
    let host = named_host(&rack, host)?;
    let memory = u64::from(memory_mib) << 20;
    if host.memory_stated && memory > host.memory {
        let (asked, there) = (format_size(memory), format_size(host.memory));
        let error = format!(
            "the VM would have {asked} of memory, and {} has {there} by the rack file",
            host.name
        );
        return Err(Failure::usage(error, "run it with less --memory, or correct the rack file"));
    }
    Ok(())
}

fn spec(args: &RunArgs, name: &str, leases: &[Lease], context: &Context<'_>) -> VmSpec {
    // It may be started again from elsewhere.
    let whole = |path: &PathBuf| std::path::absolute(path).unwrap_or_else(|_| path.clone());
    let boot = match (&args.kernel, &args.disk) {
        _ if args.boot.is_some() => Boot::Firmware,
        (Some(kernel), _) => Boot::Kernel {
            kernel: whole(kernel),
            initrd: args.initrd.as_ref().map(whole),
            append: args.append.clone(),
        },
        (None, Some(disk)) => Boot::Disk(whole(disk)),
        (None, None) => Boot::Guest(args.guest.unwrap_or_default()),
    };
    let dir = registry::vms_dir(&context.run_dir, &args.host).join(name);
    let mut spec = VmSpec::new(name, &dir, boot);
    spec.memory_mib = args.memory;
    spec.cpus = args.cpus;
    spec.spare_ports = args.spare_ports;
    spec.functions = leases.iter().filter_map(function).collect();
    spec.console = if args.detach { Console::Socket } else { Console::Terminal };
    spec.extra = args.extra.clone();
    spec
}

/// The name of a group that nobody else has.
fn new_group() -> String {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    format!("vm-args-{}-{}", std::process::id(), now.as_micros())
}

async fn own_args(args: &OwnArgs, context: &Context<'_>) -> Result<(), Failure> {
    check_host(context, &args.host, args.memory)?;
    let group = args.group.clone().unwrap_or_else(new_group);
    let leases = borrow_all(context, &args.host, &args.borrow, args.trust, Some(&group)).await?;
    let functions: Vec<FunctionSpec> = leases.iter().filter_map(function).collect();
    if args.msix {
        // Nothing is known of that QEMU.
        functions.iter().try_for_each(|f| Interrupts::MsixKept.note(&f.socket))?;
    }
    let helper = match &args.fabric {
        Some(asked) => {
            let guest = fabric::identity(&context.run_dir, asked, asked)?;
            Some(Helper::start(&context.run_dir, (&args.host, "own"), &guest, true)?)
        }
        None => None,
    };
    let socket = helper.as_ref().map(|helper| helper.socket.as_path());
    let arguments = own_vm_args(args.memory, &functions, socket);
    helper.into_iter().for_each(Helper::keep);
    let numbers: Vec<String> = leases.iter().map(|l| l.lease.to_string()).collect();
    for number in numbers {
        context.output.progress(&format!("when the VM has ended: rackbus return {number}"));
    }
    let quoted: Vec<String> = arguments.iter().map(|a| quote(a)).collect();
    let value = json!({"arguments": arguments, "leases": leases});
    context.output.result(&value, |o| o.line(&quoted.join(" ")));
    Ok(())
}

fn list(context: &Context<'_>) -> Result<(), Failure> {
    let vms: Vec<Value> = all(context)?.iter().map(described).collect();
    context.output.result(&vms, |o| {
        let text = |value: &Value| value.as_str().map_or_else(|| value.to_string(), str::to_owned);
        let rows = vms.iter().map(|vm| {
            let functions = vm["functions"].as_array().into_iter().flatten();
            let functions: Vec<String> = functions.map(|f| text(&f["function"])).collect();
            let mut row: Vec<Cell> =
                ["vm", "host", "process"].iter().map(|key| text(&vm[*key]).into()).collect();
            row.push(format!("{} MiB", vm["memory_mib"]).into());
            row.extend(["accel", "boot"].iter().map(|key| Cell::from(text(&vm[*key]))));
            row.push(functions.join(", ").into());
            row
        });
        let head = ["vm", "host", "process", "memory", "accel", "boot", "functions"];
        o.table(&head, rows.collect());
    });
    Ok(())
}

async fn stop(args: &StopArgs, context: &Context<'_>) -> Result<(), Failure> {
    let record = find(context, &args.name)?;
    // What it uses is asked before it ends, and returned after: nobody needs to let go then.
    let used = match args.kill {
        // Neither its guest nor the control plane needs to answer for that.
        true => match leases_at(context, &record.noted()?).await {
            Ok(used) => used,
            Err(failure) => {
                let error = failure.error;
                context.output.progress(&format!("what it borrowed is not returned: {error}"));
                Vec::new()
            }
        },
        false => leases_of(context, &record).await?,
    };
    let mut vm = Vm::attach(record);
    if args.kill {
        vm.kill();
    } else {
        vm.shutdown()?;
    }
    let mut returned = Vec::new();
    for lease in &used {
        returned.push(give_back(context, lease.lease).await?);
    }
    let functions: Vec<&str> = used.iter().map(|l| l.function.as_str()).collect();
    let value = json!({"vm": args.name, "returned": returned});
    context.output.result(&value, |o| match functions.len() {
        0 => o.line(&format!("VM {} stopped", args.name)),
        _ => o.line(&format!("VM {} stopped, {} returned", args.name, functions.join(", "))),
    });
    Ok(())
}

fn exec(args: &ExecArgs, context: &Context<'_>) -> Result<(), Failure> {
    let mut vm = Vm::attach(find(context, &args.name)?);
    let command = match args.command.as_slice() {
        // One argument is a script; more are a command with its arguments.
        [script] => script.clone(),
        words => words.iter().map(|w| quote(w)).collect::<Vec<_>>().join(" "),
    };
    let output = vm.exec(&command, Duration::from_secs(args.seconds))?;
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    let value = json!({
        "status": output.status, "stdout": text(&output.stdout), "stderr": text(&output.stderr),
    });
    context.output.result(&value, |_| {
        // A reader that has gone away needs no words.
        let _ = std::io::stdout().write_all(&output.stdout);
        let _ = std::io::stderr().write_all(&output.stderr);
    });
    // The command's exit status is this one's, as with ssh.
    std::process::exit(output.status)
}

async fn add(args: &PlugArgs, trust: Trust, context: &Context<'_>) -> Result<(), Failure> {
    let record = find(context, &args.name)?;
    let functions = std::slice::from_ref(&args.function);
    let leases = borrow_all(context, &record.host, functions, trust, None).await?;
    let mut vm = Vm::attach(record);
    if let Err(failure) = show(&leases, false).await {
        give_back_all(context, &leases).await;
        return Err(failure);
    }
    for function in leases.iter().filter_map(function) {
        if let Err(error) = vm.hot_add(&function.name, &function.socket) {
            give_back_all(context, &leases).await;
            return Err(error.into());
        }
    }
    context.output.result(&described(vm.record()), |o| {
        o.line(&format!("{} is plugged into VM {}", args.function, args.name));
    });
    Ok(())
}

async fn remove(args: &PlugArgs, context: &Context<'_>) -> Result<(), Failure> {
    let record = find(context, &args.name)?;
    let used = leases_of(context, &record).await?;
    let Some(lease) = used.iter().find(|l| l.function == args.function) else {
        let have: Vec<&str> = used.iter().map(|l| l.function.as_str()).collect();
        let have = if have.is_empty() { "none".to_owned() } else { have.join(", ") };
        let error = format!("VM {} has no {}", args.name, args.function);
        return Err(Failure::new(error, format!("it has {have}")));
    };
    let name = &args.name;
    let socket = PathBuf::from(lease.socket.clone().unwrap_or_default());
    if Interrupts::noted(&socket) == Interrupts::MsixKept {
        let error = format!(
            "{} has MSI-X, and the QEMU of VM {name} ends when it is unplugged",
            lease.function
        );
        return Err(Failure::new(error, format!("stop the VM: rackbus vm stop {name}")));
    }
    // Returning a lease takes the function out of its VM first.
    let returned = give_back(context, lease.lease).await?;
    if !record.alive() {
        let error = format!("VM {name} ended; {} is returned", args.function);
        return Err(Failure::new(error, "its guest or its QEMU ended it; start it again"));
    }
    if Vm::attach(record.clone()).functions()?.iter().any(|plugged| plugged.socket == socket) {
        let error = format!(
            "the guest of VM {name} did not let go of {}: it is returned, and what the guest has is an absent device",
            args.function
        );
        return Err(Failure::new(
            error,
            "the guest lets go when it has booted, or has ended what uses the device",
        ));
    }
    context.output.result(&json!({"vm": args.name, "returned": returned}), |o| {
        o.line(&format!("{} is unplugged from VM {} and returned", args.function, args.name));
    });
    Ok(())
}

/// The VMs of all hosts.
fn all(context: &Context<'_>) -> Result<Vec<Record>, Failure> {
    let mut found = Vec::new();
    let Ok(hosts) = std::fs::read_dir(&context.run_dir) else { return Ok(found) };
    for host in hosts.flatten().filter(|h| h.path().join("vms").is_dir()) {
        found.extend(registry::list(&context.run_dir, &host.file_name().to_string_lossy())?);
    }
    found.sort_by(|a, b| a.name.cmp(&b.name));
    Ok(found)
}

fn find(context: &Context<'_>, name: &str) -> Result<Record, Failure> {
    let found = all(context)?.into_iter().find(|vm| vm.name == name);
    let error = || format!("no VM named '{name}' runs");
    found.ok_or_else(|| Failure::new(error(), "see `rackbus vm list`"))
}

fn free_name(context: &Context<'_>) -> Result<String, Failure> {
    let taken: Vec<String> = all(context)?.into_iter().map(|vm| vm.name).collect();
    let mut names = (1u32..).map(|n| format!("vm{n}"));
    let free = names.find(|n| !taken.contains(n));
    free.ok_or_else(|| Failure::new("no free VM name", "give one with --name"))
}

/// A VM as programs see it.
fn described(record: &Record) -> Value {
    let plugged = Vm::attach(record.clone()).functions().unwrap_or_default();
    let functions: Vec<Value> = plugged
        .iter()
        .map(|p| json!({"function": p.function, "device": p.id, "socket": p.socket}))
        .collect();
    json!({
        "vm": record.name, "host": record.host, "process": record.pid,
        "started": record.started, "memory_mib": record.memory_mib, "cpus": record.cpus,
        "accel": record.accel, "boot": record.boot, "fabric": record.fabric, "folder": record.dir, "functions": functions,
    })
}

/// A word as a shell takes it back.
fn quote(word: &str) -> String {
    let plain = |c: char| c.is_ascii_alphanumeric() || "-_./=,:+@%".contains(c);
    if !word.is_empty() && word.chars().all(plain) {
        return word.to_owned();
    }
    format!("'{}'", word.replace('\'', "'\\''"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_and_words() {
        assert_eq!(memory("512M"), Ok(512));
        assert_eq!(memory("2 GiB"), Ok(2048));
        assert!(memory("1T").is_err() && memory("").is_err() && memory("9999999G").is_err());
        assert_eq!(quote("a=b"), "a=b");
        assert_eq!(quote("it's"), "'it'\\''s'");
        assert_eq!(quote(""), "''");
    }
}
