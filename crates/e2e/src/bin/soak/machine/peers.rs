//! Peer-to-peer in a machine: a program of the guest's has one of its drives read into memory of another host, and write
//! from it. It compares what came, which counts where the memory function is still there afterwards.

use rackbus_e2e::programs::{self, OTHER_BYTES};
use rackbus_e2e::{Guest, Result, ensure};

use super::COMMAND;

/// The drive, whose content is nobody's: no kernel driver has it while the program does.
pub const PEER_DRIVE: &str = "beta/nvme7";
/// The memory, and its bytes, by which the guest knows the function.
pub const PEER_MEMORY: &str = "gamma/ram2";
const MEMORY_BYTES: u64 = 2 << 20;

/// Makes the guest's program and both functions ready. False where the guest or a function does not do it.
pub fn prepare(guest: &mut Guest) -> bool {
    let (unpack, serial) = (programs::unpack("/dev/vdb"), PEER_DRIVE.replace('/', "-"));
    let script = format!(
        "{unpack} && echo 1 >/proc/sys/vm/nr_hugepages && \
         for try in $(seq 100); do \
         at=$(grep -l '^{serial} *$' /sys/class/nvme/nvme*/serial) && break; sleep 0.05; done && \
         drive=$(basename $(readlink -f $(dirname $at)/device)) && \
         echo $drive >/tmp/drive && echo $drive >/sys/bus/pci/devices/$drive/driver/unbind && \
         for at in $(dirname /sys/bus/pci/devices/*/resource2); do \
         [ $(stat -c %s $at/resource2) = {MEMORY_BYTES} ] && basename $at >/tmp/target; done; \
         echo 1 >/sys/bus/pci/devices/$(cat /tmp/target)/enable"
    );
    guest.vm().exec(&script, COMMAND).is_ok_and(|output| output.ok())
}

/// Has the drive read into the memory, and write from it. False where the guest or a function does not do it.
///
/// # Errors
/// When other bytes come.
pub fn move_both_ways(guest: &mut Guest) -> Result<bool> {
    let script = "/tmp/programs/run peer $(cat /tmp/drive) $(cat /tmp/target) 2 move";
    let Ok(output) = guest.vm().exec(script, COMMAND) else { return Ok(false) };
    let said = String::from_utf8_lossy(&output.stderr);
    ensure!(!said.contains(OTHER_BYTES), "VM {}, by peer-to-peer: {said}", guest.name());
    Ok(output.ok())
}
