//! Machines that stand for hosts, joined by one bridge in software that was built with this program.

use std::path::Path;

use rackbus_vm::BareMetalMachine;
use rackbus_vm::metal::{BridgeProcess, MemoryFiles};

use crate::rack::beside;
use crate::{Result, ensure};

/// The names of the machines of a bridge that is alone.
pub const ENDS: [&str; 2] = ["a", "b"];

/// Starts a bridge whose sockets are in `dir`, between two machines named as [`ENDS`], with more options of
/// `rackbus ntb`.
///
/// # Errors
/// When it does not start: with what it wrote.
pub fn start_bridge(dir: &Path, options: &[&str]) -> Result<BridgeProcess> {
    Ok(BridgeProcess::start(&beside("rackbus")?, ENDS, &MemoryFiles::new()?, dir, options)?)
}

/// The PCI address of a machine's bridge.
///
/// # Errors
/// When it has none.
pub fn bridge_address(machine: &mut BareMetalMachine) -> Result<String> {
    let address = machine.run("lspci -D -d 8086:201c | cut -d' ' -f1")?;
    ensure!(!address.is_empty(), "{}: no function 8086:201c", machine.name());
    Ok(address)
}
