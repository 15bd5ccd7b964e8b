//! A VM is started: its functions are borrowed, and QEMU gets its arguments.

use std::path::Path;
use std::time::{SystemTime, UNIX_EPOCH};

use rackbus_control::api::Lease;
use rackbus_vm::spec::{check_name, own_vm_args};
use rackbus_vm::{
    Assets, Boot, Console, FunctionSpec, InterruptChoice, Vm, VmError, VmRecord, VmSpec, lasting,
    registry,
};
use rustix::process::Pid;
use serde_json::json;

use super::fabric::GuestHelper;
use super::leases::{
    VmBorrowing, borrow_all, borrow_composition, composed_functions, function, give_back_all,
    interrupted, show, this_process,
};
use super::memory::{MemoryArgs, check_room};
use super::running::described;
use super::{Context, OwnArgs, RunArgs, claim, free_name, joined};
use crate::output::Failure;
use crate::process::{self, EndRequests};

pub(super) async fn run_vm(args: &RunArgs, context: &Context<'_>) -> Result<(), Failure> {
    args.memory.check(context, &args.host)?;
    if let Some(name) = &args.name {
        let refused = |error: VmError| Failure::usage(error.to_string(), "choose another --name");
        check_name(name).map_err(refused)?;
    }
    let options = spec(args, args.name.as_deref().unwrap_or("vm"), &[], context);
    let refused = |error: VmError| Failure::usage(error.to_string(), "see `rackbus vm run --help`");
    options.check_options(functions_of(args).len()).map_err(refused)?;
    let remedy = "stop another VM of that host, or run this one with less --memory";
    check_room(context, &args.host, args.memory.memory, remedy)?;
    // From before anything is borrowed: whoever ends this command gets nothing left behind.
    let mut requests = EndRequests::listen();
    if let Some(name) = &args.composition {
        let composed = composed_functions(context, &args.host, name, &mut requests).await?;
        options.check_options(functions_of(args).len() + composed).map_err(refused)?;
    }
    let leases = borrow(args, context, &mut requests).await?;
    let launched = match show(&leases, args.msix).await {
        Ok(()) => launch(args, &leases, context).await,
        Err(failure) => Err(failure),
    };
    let launched = match launched {
        Ok(mut vm) if args.detach && requests.is_asked().await => {
            joined(tokio::task::spawn_blocking(move || vm.kill()).await)?;
            Err(interrupted())
        }
        launched => launched,
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
        let VmRecord { name, host, pid, accel, .. } = &record;
        context.output.result(&described(&record), |o| {
            o.line(&format!("VM {name} runs on {host} with {with} (process {pid}, {accel})"));
        });
        return Ok(());
    }
    let VmRecord { name, host, .. } = &record;
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

/// The functions that are borrowed for the VM by their names, not as part of a composition.
fn functions_of(args: &RunArgs) -> Vec<String> {
    [args.boot.as_slice(), &args.borrow].concat()
}

/// Borrows all that the VM is to have, or nothing; what it boots from is the first of them.
async fn borrow(
    args: &RunArgs,
    context: &Context<'_>,
    requests: &mut EndRequests,
) -> Result<Vec<Lease>, Failure> {
    let composed = match &args.composition {
        Some(name) => borrow_composition(context, name, requests).await?,
        None => Vec::new(),
    };
    let borrowing = VmBorrowing {
        host: &args.host,
        trust: args.trust,
        group: args.composition.as_deref(),
        starter: this_process(),
    };
    match borrow_all(context, &functions_of(args), &borrowing, requests).await {
        Ok(mut leases) => {
            leases.extend(composed);
            Ok(leases)
        }
        Err(failure) => {
            give_back_all(context, &composed).await;
            Err(failure)
        }
    }
}

/// Starts the VM, under a name that is free when the user gave none.
async fn launch(args: &RunArgs, leases: &[Lease], context: &Context<'_>) -> Result<Vm, Failure> {
    loop {
        // No other VM of this machine takes the name until this one is found by it.
        let (name, _claim) = match &args.name {
            Some(name) => (name.clone(), claim(context, name)?),
            None => free_name(context)?,
        };
        let mut spec = spec(args, &name, leases, context);
        let helper = match &args.fabric {
            Some(asked) => {
                let guest = super::fabric::identity(&context.run_dir, asked, (&args.host, &name))?;
                let vm = (args.host.as_str(), name.as_str());
                Some(GuestHelper::start(&context.run_dir, vm, &guest, false)?)
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
                helper.into_iter().for_each(GuestHelper::keep);
                return Ok(vm);
            }
        }
    }
}

pub(super) fn spec(args: &RunArgs, name: &str, leases: &[Lease], context: &Context<'_>) -> VmSpec {
    // It may be started again from elsewhere.
    let whole =
        |path: &std::path::PathBuf| std::path::absolute(path).unwrap_or_else(|_| path.clone());
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
    (spec.memory_mib, spec.max_memory_mib) = (args.memory.memory, args.memory.max_memory);
    spec.prealloc = args.memory.prealloc;
    spec.cpus = args.cpus;
    spec.spare_ports = args.spare_ports;
    spec.functions = leases.iter().filter_map(function).collect();
    spec.console = if args.detach { Console::Socket } else { Console::Terminal };
    spec.extra = args.extra.clone();
    if !spec.extra.is_empty() {
        spec.folder = std::env::current_dir().ok();
    }
    spec
}

/// The name of a group that nobody else has.
fn new_group() -> String {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    format!("vm-args-{}-{}", std::process::id(), now.as_micros())
}

pub(super) async fn own_args(args: &OwnArgs, context: &Context<'_>) -> Result<(), Failure> {
    args.memory.check(context, &args.host)?;
    let group = args.group.clone().unwrap_or_else(new_group);
    let mut requests = EndRequests::listen();
    let group = Some(group.as_str());
    let borrowing = VmBorrowing { host: &args.host, trust: args.trust, group, starter: None };
    let leases = borrow_all(context, &args.borrow, &borrowing, &mut requests).await?;
    let arguments = match arguments(args, &leases, context) {
        Ok(_) if requests.is_asked().await => Err(interrupted()),
        outcome => outcome,
    };
    let arguments = match arguments {
        Ok((arguments, helper)) => {
            helper.into_iter().for_each(GuestHelper::keep);
            arguments
        }
        Err(failure) => {
            give_back_all(context, &leases).await;
            return Err(failure);
        }
    };
    for Lease { lease, socket, .. } in &leases {
        let is_noted = |socket: &String| lasting::ends_with_user(Path::new(socket));
        context.output.progress(&match socket.as_ref().is_some_and(is_noted) {
            false => format!("when no VM uses it any more: rackbus return {lease}"),
            true => format!(
                "lease {lease} ends with your QEMU; if you start none: rackbus return {lease}"
            ),
        });
    }
    let quoted: Vec<String> = arguments.iter().map(|a| crate::shell::quote(a)).collect();
    let value = json!({"arguments": arguments, "leases": leases});
    context.output.result(&value, |o| o.line(&quoted.join(" ")));
    Ok(())
}

/// The arguments of a QEMU that somebody starts, with what was borrowed for it, and the helper that they name.
fn arguments(
    args: &OwnArgs,
    leases: &[Lease],
    context: &Context<'_>,
) -> Result<(Vec<String>, Option<GuestHelper>), Failure> {
    let functions: Vec<FunctionSpec> = leases.iter().filter_map(function).collect();
    if !args.keep {
        let here = functions.iter().filter(|function| {
            // Where the host is another machine, so is the QEMU, and what is printed is taken there.
            function.socket.parent().is_some_and(Path::is_dir)
        });
        here.map(|function| &*function.socket).try_for_each(lasting::end_with_user)?;
    }
    if args.msix {
        // Nothing is known of that QEMU.
        functions.iter().try_for_each(|f| InterruptChoice::MsixKept.note(&f.socket))?;
    }
    let helper = match &args.fabric {
        Some(asked) => {
            let guest = super::fabric::identity(&context.run_dir, asked, (&args.host, asked))?;
            Some(GuestHelper::start(&context.run_dir, (&args.host, "own"), &guest, true)?)
        }
        None => None,
    };
    let socket = helper.as_ref().map(|helper| helper.socket.as_path());
    let MemoryArgs { memory, max_memory, prealloc } = args.memory;
    Ok((own_vm_args(memory, max_memory, prealloc, &functions, socket), helper))
}
