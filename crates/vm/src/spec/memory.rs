//! The memory of a VM as QEMU is told of it: what the VM starts with, and how much may be plugged in later.

use std::path::Path;

use serde_json::{Value, json};

use super::text;
use crate::{Result, VmError};

/// Linux on x86 takes memory in whole blocks of this size, MiB; what is plugged in and is no multiple of it, its kernel
/// does not use.
pub const MEMORY_BLOCK_MIB: u32 = 128;

/// How often memory can be plugged into a VM before some of it is unplugged.
const SLOTS: u8 = 16;

/// The most that QEMU is asked for, MiB: half of what a processor of 40 address bits reaches, since holes and the
/// alignment of what is plugged in take addresses as well.
const MOST_MIB: u32 = 1 << 19;

/// Checks the memory that a VM is to start with and, if there is one, the bound of what it may have later.
///
/// # Errors
/// When QEMU could not take it: with what to give instead.
pub fn check_memory(mib: u32, max_mib: Option<u32>) -> Result<()> {
    if !(128..=MOST_MIB).contains(&mib) {
        return Err(VmError::Invalid(format!("memory of {mib} MiB: give 128M to 512G")));
    }
    match max_mib {
        Some(max) if !(mib..=MOST_MIB).contains(&max) => Err(VmError::Invalid(format!(
            "at most {max} MiB of memory: give --max-memory from {mib}M, which the VM starts with, to 512G"
        ))),
        _ => Ok(()),
    }
}

/// The value of QEMU's option `-m`. Without room for more there are no slots, which QEMU would refuse.
pub(super) fn size_option(mib: u32, max_mib: Option<u32>) -> String {
    match max_mib {
        Some(max) if max > mib => format!("{mib}M,slots={SLOTS},maxmem={max}M"),
        _ => format!("{mib}M"),
    }
}

/// The object that is the memory of a VM, or a part of it: shared, so that a lender can map it.
pub(crate) fn backend(id: &str, mib: u32, file: Option<&Path>) -> Result<Value> {
    let size = u64::from(mib) << 20;
    let mut memory = json!({"id": id, "size": size, "share": true});
    match file {
        None => memory["qom-type"] = json!("memory-backend-memfd"),
        Some(file) => {
            memory["qom-type"] = json!("memory-backend-file");
            memory["mem-path"] = json!(text(file)?);
        }
    }
    Ok(memory)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn there_are_slots_only_where_there_is_room() {
        assert_eq!(size_option(512, None), "512M");
        assert_eq!(size_option(512, Some(512)), "512M");
        assert_eq!(size_option(512, Some(4096)), "512M,slots=16,maxmem=4096M");
    }

    #[test]
    fn bounds_are_refused_with_what_to_give() {
        assert!(check_memory(512, None).is_ok() && check_memory(512, Some(512)).is_ok());
        let refused = |mib, max| check_memory(mib, max).expect_err("refused").to_string();
        assert!(refused(64, None).contains("128M to 512G"));
        assert!(refused(512, Some(256)).contains("from 512M"));
        assert!(refused(512, Some(MOST_MIB + 1)).contains("512G"));
    }
}
