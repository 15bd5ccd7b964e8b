//! VMs that run: listed, stopped, asked, and given functions.

use std::io::Write as _;
use std::path::PathBuf;
use std::time::Duration;

use rackbus_control::api::BorrowRequest;
use rackbus_vm::{InterruptChoice, Vm, VmRecord};
use serde_json::{Value, json};

use super::leases::{give_back, give_back_all, interrupted, leases_at, leases_of};
use super::{Context, ExecArgs, StopArgs, all, find, hold};
use crate::commands::borrow::Trust;
use crate::output::{Cell, Failure};
use crate::process::{EndRequests, Undertaking};

/// How long a QEMU that answers no more may take to be gone.
const ENDS: Duration = Duration::from_secs(5);

pub(super) fn list(context: &Context<'_>) -> Result<(), Failure> {
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

pub(super) async fn stop(args: &StopArgs, context: &Context<'_>) -> Result<(), Failure> {
    // A move would take the guest's end for what it has asked for, and start it elsewhere.
    let (record, _claim) = hold(context, &args.name)?;
    // What it uses is asked before it ends, and returned after: nobody needs to release it then.
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
    let switched_off = if args.kill {
        vm.kill();
        false
    } else {
        vm.shutdown()?
    };
    let ended = match switched_off || args.kill {
        true => "stopped",
        false => "was ended, as its guest did not switch itself off in time",
    };
    let mut returned = Vec::new();
    for lease in &used {
        returned.push(give_back(context, lease.lease).await?);
    }
    let functions: Vec<&str> = used.iter().map(|l| l.function.as_str()).collect();
    let value = json!({"vm": args.name, "switched_off": switched_off, "returned": returned});
    context.output.result(&value, |o| match functions.len() {
        0 => o.line(&format!("VM {} {ended}", args.name)),
        _ => o.line(&format!("VM {} {ended}, {} returned", args.name, functions.join(", "))),
    });
    Ok(())
}

pub(super) fn exec(args: &ExecArgs, context: &Context<'_>) -> Result<(), Failure> {
    let mut vm = Vm::attach(find(context, &args.name)?);
    let command = crate::shell::command(&args.command);
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

pub(super) async fn add(
    name: &str,
    function_name: &str,
    trust: Trust,
    context: &Context<'_>,
) -> Result<(), Failure> {
    let (record, _claim) = hold(context, name)?;
    let request = BorrowRequest {
        vm: Some(name.to_owned()),
        ..trust.request_for_vm(function_name, &record.host)?
    };
    let mut requests = EndRequests::listen();
    // The VM's node plugs it in.
    match requests.unless_asked(context.client.borrow_as(&request)).await {
        Undertaking::Done(borrowed) => drop(borrowed?),
        Undertaking::DoneLate(borrowed) => {
            give_back_all(context, &borrowed.into_iter().collect::<Vec<_>>()).await;
            return Err(interrupted());
        }
        // The control plane takes back what nobody waits for.
        Undertaking::GivenUp => return Err(interrupted()),
    }
    context.output.result(&described(&record), |o| {
        o.line(&format!("{function_name} is plugged into VM {name}"));
    });
    Ok(())
}

pub(super) async fn remove(
    name: &str,
    function: &str,
    context: &Context<'_>,
) -> Result<(), Failure> {
    let (record, _claim) = hold(context, name)?;
    let used = leases_of(context, &record).await?;
    let Some(lease) = used.iter().find(|l| l.function == function) else {
        let have: Vec<&str> = used.iter().map(|l| l.function.as_str()).collect();
        let have = if have.is_empty() { "none".to_owned() } else { have.join(", ") };
        let error = format!("VM {name} has no {function}");
        return Err(Failure::new(error, format!("it has {have}")));
    };
    let socket = PathBuf::from(lease.socket.clone().unwrap_or_default());
    if InterruptChoice::noted(&socket) == InterruptChoice::MsixKept {
        let error = format!(
            "{} has MSI-X, and the QEMU of VM {name} ends when it is unplugged",
            lease.function
        );
        return Err(Failure::new(error, format!("stop the VM: rackbus vm stop {name}")));
    }
    // Returning a lease takes the function out of its VM first.
    let returned = give_back(context, lease.lease).await?;
    let plugged = match Vm::attach(record.clone()).functions() {
        Ok(plugged) if record.alive() => plugged,
        Err(error) if !record.ends_within(ENDS) => return Err(error.into()),
        _ => {
            let error = format!("VM {name} ended; {function} is returned");
            return Err(Failure::new(error, "its guest or its QEMU ended it; start it again"));
        }
    };
    if plugged.iter().any(|plugged| plugged.socket == socket) {
        let error = format!(
            "the guest of VM {name} did not release {function}: it is returned, and what the guest has is an absent device"
        );
        return Err(Failure::new(
            error,
            "the guest releases it when it has booted, or has ended what uses the device",
        ));
    }
    context.output.result(&json!({"vm": name, "returned": returned}), |o| {
        o.line(&format!("{function} is unplugged from VM {name} and returned"));
    });
    Ok(())
}

/// A VM as programs see it.
pub(super) fn described(record: &VmRecord) -> Value {
    let vm = Vm::attach(record.clone());
    let plugged = vm.functions();
    // One that does not answer is not waited for twice.
    let memory = match &plugged {
        Ok(_) => vm.plugged_memory().unwrap_or_default(),
        Err(_) => Vec::new(),
    };
    let plugged = plugged.unwrap_or_default();
    let memory_mib = memory.iter().fold(record.memory_mib, |sum, it| sum.saturating_add(it.mib));
    let functions: Vec<Value> = plugged
        .iter()
        .map(|p| json!({"function": p.function, "device": p.id, "socket": p.socket}))
        .collect();
    json!({
        "vm": record.name, "host": record.host, "process": record.pid,
        "started": record.started, "memory_mib": memory_mib, "plugged_memory": memory, "cpus": record.cpus,
        "accel": record.accel, "boot": record.boot, "fabric": record.fabric, "folder": record.dir, "functions": functions,
    })
}
