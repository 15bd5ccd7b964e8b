//! The memory of VMs: how much they start with, and what is plugged in and unplugged while they run.

use std::time::Duration;

use rackbus_fabric::rack::format_size;
use rackbus_vm::spec::{DEFAULT_MEMORY_MIB, check_memory};
use rackbus_vm::{Vm, VmError, VmRecord};
use serde_json::json;

use super::leases::leases_of;
use super::running::described;
use super::{Context, all, hold};
use crate::commands::named_host;
use crate::output::Failure;
use crate::paths::running;

/// How long the QEMU of another VM may take for each step of saying what is plugged into that.
const ANSWER: Duration = Duration::from_secs(1);

/// How much memory a VM has, and may have later.
#[derive(Debug, clap::Args)]
pub(super) struct MemoryArgs {
    /// Guest memory, which is shared with lenders: 512M, 2G
    #[arg(long, value_name = "SIZE", value_parser = size, default_value_t = DEFAULT_MEMORY_MIB)]
    pub memory: u32,
    /// How much memory it may have when more is plugged in while it runs: 4G. Without it nothing can be plugged in
    #[arg(long, value_name = "SIZE", value_parser = size)]
    pub max_memory: Option<u32>,
    /// Have all of its memory from the beginning, and not as the guest first uses it: for a physical function, whose
    /// lender pins all of it while QEMU waits
    #[arg(long)]
    pub prealloc: bool,
}

impl MemoryArgs {
    /// Whether a VM can have it on that host, now and later.
    pub(super) fn check(&self, context: &Context<'_>, host: &str) -> Result<(), Failure> {
        check_host(context, host, self.memory.max(self.max_memory.unwrap_or(0)))?;
        check_memory(self.memory, self.max_memory)
            .map_err(|error| Failure::usage(error.to_string(), "see `rackbus vm run --help`"))
    }
}

/// A size as people write it, in MiB.
pub(super) fn size(text: &str) -> Result<u32, String> {
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

/// Whether the rack has such a host: its name becomes a folder's.
///
/// A VM's memory is lent to the functions that it borrows, and a host lends no more than it has: one that is
/// too large would be refused by the first function that it maps, when it runs already.
pub(super) fn check_host(
    context: &Context<'_>,
    host: &str,
    memory_mib: u32,
) -> Result<(), Failure> {
    let rack = running(&context.run_dir)?.rack()?;
    let host = named_host(&rack, host)?;
    let memory = u64::from(memory_mib) << 20;
    if host.memory_stated && memory > host.memory {
        let (asked, there) = (format_size(memory), format_size(host.memory));
        let error = format!(
            "the VM would have {asked} of memory, and {} has {there} by the rack file",
            host.name
        );
        let remedy = "run it with less --memory and --max-memory, or correct the rack file";
        return Err(Failure::usage(error, remedy));
    }
    Ok(())
}

/// What is plugged into a VM beside that which it started with, MiB.
///
/// # Errors
/// When its QEMU does not answer.
pub(super) fn plugged_mib(record: &VmRecord) -> Result<u32, VmError> {
    let plugged = Vm::attach(record.clone()).plugged_memory()?;
    Ok(plugged.iter().fold(0, |sum, it| sum.saturating_add(it.mib)))
}

/// Plugs memory into a VM that runs.
pub(super) async fn add_memory(name: &str, mib: u32, context: &Context<'_>) -> Result<(), Failure> {
    let (record, _claim) = hold(context, name)?;
    check_room(context, &record.host, mib, "stop another VM of that host, or plug in less")?;
    check_functions(context, &record).await?;
    let added = Vm::attach(record.clone()).add_memory(mib)?;
    let value = json!({"plugged": added, "vm": described(&record)});
    context.output.result(&value, |o| {
        o.line(&format!(
            "{mib} MiB are plugged into VM {name} as {}; its guest uses them when they are online",
            added.id
        ));
    });
    Ok(())
}

/// Whether the host has so much more memory for its VMs; `remedy` says what to do where not. QEMU ends when a lender refuses
/// memory that is mapped: the host lends no more than the rack file says that it has, to all of its VMs together.
pub(super) fn check_room(
    context: &Context<'_>,
    host: &str,
    mib: u32,
    remedy: &str,
) -> Result<(), Failure> {
    let rack = running(&context.run_dir)?.rack()?;
    let host = named_host(&rack, host)?;
    if !host.memory_stated {
        return Ok(());
    }
    let vms = all(context)?;
    let there = vms.iter().filter(|vm| vm.host == host.name);
    let mut silent = Vec::new();
    let has: u64 = there.map(|vm| u64::from(counted_mib(vm, &mut silent))).sum();
    if (has + u64::from(mib)) << 20 <= host.memory {
        return Ok(());
    }
    let error = format!(
        "the VMs of {} have {has} MiB of memory, and {mib} MiB more are over the {} that it has by the rack file",
        host.name,
        format_size(host.memory)
    );
    match silent.is_empty() {
        true => Err(Failure::new(error, remedy)),
        false => {
            let silent = silent.join(", ");
            let error =
                format!("{error}; {silent} did not answer, and is counted as it may be at most");
            Err(Failure::new(error, format!("try again, or {remedy}")))
        }
    }
}

/// The memory of a VM, MiB. One whose QEMU stands still, or serves somebody else, is not waited for: it may have all that it
/// was given room for, and is named in `silent`.
fn counted_mib<'a>(vm: &'a VmRecord, silent: &mut Vec<&'a str>) -> u32 {
    let most = vm.spec().ok().and_then(|spec| spec.max_memory_mib);
    let Some(most) = most else { return vm.memory_mib };
    match Vm::attach(vm.clone()).plugged_memory_within(ANSWER) {
        Ok(plugged) => plugged.iter().fold(vm.memory_mib, |sum, it| sum.saturating_add(it.mib)),
        Err(_) => {
            silent.push(&vm.name);
            most
        }
    }
}

/// QEMU ends, too, when nobody answers for a function that is plugged in: one whose lease is over is such a one.
async fn check_functions(context: &Context<'_>, record: &VmRecord) -> Result<(), Failure> {
    let plugged = Vm::attach(record.clone()).functions()?;
    if plugged.is_empty() {
        return Ok(());
    }
    let leases = leases_of(context, record).await?;
    let over = plugged.iter().find(|it| leases.iter().all(|lease| lease.function != it.function));
    let Some(over) = over else { return Ok(()) };
    let error = format!(
        "VM {} has {}, which is not borrowed any more: its QEMU would end when its memory changes",
        record.name, over.function
    );
    Err(Failure::new(error, "have the guest release it, or stop the VM"))
}

/// Unplugs memory from a VM that runs.
pub(super) fn remove_memory(name: &str, id: &str, context: &Context<'_>) -> Result<(), Failure> {
    let (record, _claim) = hold(context, name)?;
    let vm = Vm::attach(record.clone());
    let there = vm.plugged_memory()?;
    if !there.iter().any(|it| it.id == id) {
        let ids: Vec<&str> = there.iter().map(|it| it.id.as_str()).collect();
        let ids = if ids.is_empty() { "none".to_owned() } else { ids.join(", ") };
        let error = format!("VM {name} has no plugged memory {id}");
        return Err(Failure::new(
            error,
            format!("of memory that can be unplugged it has {ids}; a function is HOST/DEVICE"),
        ));
    }
    vm.remove_memory(id).map_err(|error| {
        Failure::new(
            format!("the guest of VM {name} keeps {id}: {error}"),
            "in Linux only memory that was set online as online_movable is sure to be released; see `dmesg` there",
        )
    })?;
    let value = json!({"vm": name, "unplugged": id});
    context.output.result(&value, |o| o.line(&format!("{id} is unplugged from VM {name}")));
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::size;

    #[test]
    fn sizes_and_words() {
        assert_eq!(size("512M"), Ok(512));
        assert_eq!(size("2 GiB"), Ok(2048));
        assert!(size("1T").is_err() && size("").is_err() && size("9999999G").is_err());
    }
}
