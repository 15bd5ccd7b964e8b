//! Memory that is plugged into a VM while it runs, and unplugged again: a DIMM each, as shared with lenders as what the VM
//! has from the start. QEMU tells the borrowed functions of it, so they reach it as soon as the guest uses it.

use std::time::Duration;

use serde::Serialize;
use serde_json::{Value, json};

use crate::machine::UNPLUG;
use crate::spec::{MEMORY_BLOCK_MIB, memory_backend};
use crate::{Acceleration, Qmp, Result, Vm, VmError};

/// Memory that was plugged into a VM.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct PluggedMemory {
    /// Its name, which is QEMU's id of the device: `memory0`.
    pub id: String,
    /// Its size in MiB.
    pub mib: u32,
    /// Where the guest has it: its first physical address.
    pub address: u64,
}

impl Vm {
    /// What of memory is plugged in beside that which the VM started with.
    ///
    /// # Errors
    /// When QEMU does not answer.
    pub fn plugged_memory(&self) -> Result<Vec<PluggedMemory>> {
        plugged(&mut self.record().qmp()?)
    }

    /// The same, where its QEMU is not waited for longer than `limit` to accept, to greet, and to answer each.
    ///
    /// # Errors
    /// When it does not answer until then.
    pub fn plugged_memory_within(&self, limit: Duration) -> Result<Vec<PluggedMemory>> {
        plugged(&mut self.record().qmp_within(limit)?)
    }

    /// Plugs in memory. Its guest finds it some milliseconds later, and uses it when it is set online there.
    ///
    /// # Errors
    /// When the VM was started without room for it, or QEMU refuses: then with its reason.
    pub fn add_memory(&mut self, mib: u32) -> Result<PluggedMemory> {
        let record = self.record();
        let Some(most) = record.spec()?.max_memory_mib else {
            return Err(VmError::FixedMemory(record.name.clone()));
        };
        if mib == 0 || !mib.is_multiple_of(MEMORY_BLOCK_MIB) {
            let error = format!(
                "{mib} MiB cannot be plugged in: guests take multiples of {MEMORY_BLOCK_MIB}M"
            );
            return Err(VmError::Invalid(error));
        }
        let mut qmp = record.qmp()?;
        let there = plugged(&mut qmp)?;
        let has = there.iter().fold(record.memory_mib, |sum, it| sum.saturating_add(it.mib));
        if mib > most.saturating_sub(has) {
            let error = format!(
                "{mib} MiB are too many for the VM '{}': it has {has} MiB and was started with --max-memory {most}M",
                record.name
            );
            return Err(VmError::Invalid(error));
        }
        let (id, is_new) = choose(&backends(&mut qmp)?, &there, mib);
        let backend = backend_id(&id);
        if is_new {
            qmp.command("object-add", &memory_backend(&backend, mib, None)?)?;
        }
        let device = json!({"driver": "pc-dimm", "id": id, "memdev": backend});
        if let Err(error) = qmp.command("device_add", &device) {
            if is_new {
                // Nobody has used it. What QEMU says of the device is what matters.
                let _ = qmp.command("object-del", &json!({"id": backend}));
            }
            return Err(error);
        }
        let added = plugged(&mut qmp)?.into_iter().find(|it| it.id == id);
        added.ok_or_else(|| VmError::Protocol {
            peer: "QEMU",
            detail: format!("{id} is not among the memory devices"),
        })
    }

    /// Unplugs memory: asks the guest, and waits until it has moved elsewhere what it keeps there.
    ///
    /// # Errors
    /// When there is none of that name, or the guest does not release it in time: it keeps it then.
    pub fn remove_memory(&self, id: &str) -> Result<()> {
        // QEMU's translator (11.1) keeps what it has translated of memory that is gone, and runs it when other memory is in
        // its place: programs of the guest crash then. So that memory is kept, for the next that is plugged in.
        let keeps = self.record().accel == Acceleration::Tcg.name();
        // Others who ask QEMU have their turn meanwhile.
        match self.hot_remove(id, UNPLUG) {
            // The guest released it before, and QEMU did not answer then.
            Err(VmError::Refused { message, .. }) if !keeps && message.contains("not found") => {}
            removed => removed?,
        }
        if keeps {
            return Ok(());
        }
        self.record().qmp()?.command("object-del", &json!({"id": backend_id(id)})).map(drop)
    }
}

const BACKEND: &str = "-pages";

/// QEMU's id of what backs the memory with this name.
fn backend_id(id: &str) -> String {
    format!("{id}{BACKEND}")
}

/// Which memory to plug in, and whether it is to be made first: one of that size that was plugged in before, or another one.
fn choose(backends: &[(String, u64)], plugged: &[PluggedMemory], mib: u32) -> (String, bool) {
    let is_idle = |id: &str| plugged.iter().all(|it| it.id != id);
    let fits = |(id, size): &&(String, u64)| *size == u64::from(mib) << 20 && is_idle(id);
    if let Some((id, _)) = backends.iter().find(fits) {
        return (id.clone(), false);
    }
    let mut ids = (0..).map(|number: u32| format!("memory{number}"));
    let free = ids.find(|id| is_idle(id) && backends.iter().all(|(known, _)| known != id));
    (free.unwrap_or_default(), true)
}

/// The names of what was made to be plugged in, whether it is or not, and their sizes in bytes.
fn backends(qmp: &mut Qmp) -> Result<Vec<(String, u64)>> {
    let all = qmp.command("query-memdev", &json!({}))?;
    let ours = |backend: &Value| {
        let id = backend["id"].as_str()?.strip_suffix(BACKEND)?;
        Some((id.to_owned(), backend["size"].as_u64()?))
    };
    Ok(all.as_array().into_iter().flatten().filter_map(ours).collect())
}

fn plugged(qmp: &mut Qmp) -> Result<Vec<PluggedMemory>> {
    let devices = qmp.command("query-memory-devices", &json!({}))?;
    Ok(devices.as_array().into_iter().flatten().filter_map(memory_of).collect())
}

/// A DIMM as `query-memory-devices` describes it.
fn memory_of(device: &Value) -> Option<PluggedMemory> {
    let data = &device["data"];
    Some(PluggedMemory {
        id: data["id"].as_str()?.to_owned(),
        mib: u32::try_from(data["size"].as_u64()? >> 20).ok()?,
        address: data["addr"].as_u64()?,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_that_was_unplugged_is_taken_again_by_its_size() {
        let backends = [("memory0".to_owned(), 128 << 20), ("memory1".to_owned(), 256 << 20)];
        let plugged = |id: &str, mib| PluggedMemory { id: id.into(), mib, address: 0 };
        let none = Vec::new();
        assert_eq!(choose(&[], &none, 128), ("memory0".into(), true));
        assert_eq!(choose(&backends, &none, 256), ("memory1".into(), false));
        assert_eq!(choose(&backends, &none, 512), ("memory2".into(), true));
        let there = [plugged("memory1", 256)];
        assert_eq!(choose(&backends, &there, 256), ("memory2".into(), true));
        assert_eq!(choose(&backends, &there, 128), ("memory0".into(), false));
    }

    #[test]
    fn a_dimm_is_known_by_its_description() {
        // As QEMU 11.1 gives it.
        let device = json!({"type": "dimm", "data": {"memdev": "/objects/memory0-pages",
            "hotplugged": true, "addr": 4_294_967_296_u64, "hotpluggable": true,
            "size": 268_435_456, "slot": 0, "node": 0, "id": "memory0"}});
        let known = PluggedMemory { id: "memory0".into(), mib: 256, address: 1 << 32 };
        assert_eq!(memory_of(&device), Some(known));
        assert_eq!(memory_of(&json!({"type": "dimm"})), None);
    }
}
