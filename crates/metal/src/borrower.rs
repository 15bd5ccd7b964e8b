//! The kernel module's device file, `/dev/rackbus`: borrowing, returning, and what is known of borrowed functions.
//!
//! Source: `kernel/include/uapi/linux/rackbus.h`, whose structures these are; a test compares them.

#![allow(unsafe_code)] // ioctls: each has the structure that the kernel module expects

mod binding;

use std::fs::File;
use std::io::Read;
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::fs::OpenOptionsExt;
use std::time::{Duration, Instant};

use rackbus_vfio::PciAddress;
use rustix::fs::OFlags;
use rustix::io::Errno;
use rustix::ioctl::{Opcode, Updater, ioctl, opcode};

use crate::error::MetalError;
pub use binding::{bind, reopen};

/// Where the module is reached.
pub const PATH: &str = "/dev/rackbus";
const API_VERSION: u32 = 1;
const NAME_BYTES: usize = 64;
const VECTORS: usize = 32;
const MOST_FUNCTIONS: usize = 64;
const GROUP: u8 = 0xbc;
const FORCE: u32 = 1;
/// How long a link may take to come up, a lender to reset a function for its last user, and between two looks.
const LINK_UP: Duration = Duration::from_secs(3);
const RESET: Duration = Duration::from_secs(5);
const AGAIN: Duration = Duration::from_millis(50);

#[repr(C)]
#[derive(Debug, Clone, Copy, Default)]
struct Address {
    domain: u32,
    bus: u8,
    devfn: u8,
    reserved: u16,
}

impl From<PciAddress> for Address {
    fn from(address: PciAddress) -> Address {
        let devfn = address.device << 3 | address.function;
        Address { domain: address.domain, bus: address.bus, devfn, reserved: 0 }
    }
}

impl From<Address> for PciAddress {
    fn from(address: Address) -> PciAddress {
        PciAddress {
            domain: address.domain,
            bus: address.bus,
            device: address.devfn >> 3,
            function: address.devfn & 7,
        }
    }
}

#[repr(C)]
struct RawBorrow {
    ntb: Address,
    offset: u64,
    epoch: u64,
    vectors: u32,
    flags: u32,
    name: [u8; NAME_BYTES],
    handle: u32,
    domain: u32,
}

#[repr(C)]
struct RawReturn {
    handle: u32,
    flags: u32,
    timeout_ms: u32,
    reserved: u32,
}

#[repr(C)]
struct RawLost {
    handle: u32,
    reserved: u32,
}

#[repr(C)]
struct RawList {
    capacity: u32,
    total: u32,
    handles: u64,
}

#[repr(C)]
struct RawStatus {
    handle: u32,
    state: u32,
    reason: u32,
    domain: u32,
    ntb: Address,
    offset: u64,
    epoch: u64,
    dma_base: u64,
    dma_size: u64,
    vectors: u32,
    silent_ms: u32,
    removal_ms: u32,
    reserved: u32,
    name: [u8; NAME_BYTES],
    heartbeats: u64,
    heartbeats_missed: u64,
    writes_forwarded: u64,
    writes_lost: u64,
    writes_refused: u64,
    waits_late: u64,
    resets: u64,
    dma_refused: u64,
    interrupts_stray: u64,
    interrupts: [u64; VECTORS],
}

const VERSION_GET: Opcode = opcode::read::<u32>(GROUP, 0);
const BORROW: Opcode = opcode::read_write::<RawBorrow>(GROUP, 1);
const RETURN: Opcode = opcode::write::<RawReturn>(GROUP, 2);
const LOST: Opcode = opcode::write::<RawLost>(GROUP, 3);
const LIST: Opcode = opcode::read_write::<RawList>(GROUP, 4);
const STATUS: Opcode = opcode::read_write::<RawStatus>(GROUP, 5);

/// What is borrowed, and from where.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct WantedFunction {
    /// The NTB, which is bound to the module.
    pub ntb: PciAddress,
    /// Offset of the control area in its window 1.
    pub offset: u64,
    /// The lease's epoch, which the lender's control area must have.
    pub epoch: u64,
    /// A name for the kernel's messages, of up to 63 bytes.
    pub name: String,
    /// Interrupts that the function may have; `None` for the module's own choice.
    pub vectors: Option<u32>,
}

/// A function that was borrowed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize)]
pub struct Borrowed {
    /// By which it is returned; never used again.
    pub handle: u32,
    /// The PCI domain that it is alone in, as device 00.0 of bus 0.
    pub domain: u32,
}

/// How a borrowed function is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize)]
#[serde(rename_all = "lowercase")]
pub enum BorrowedState {
    /// In use, or free to be used.
    Borrowed,
    /// Its driver is releasing it.
    Returning,
    /// Its driver is releasing it, and the device is gone.
    Losing,
    /// It is gone; what is left is to be returned.
    Lost,
    /// It went away after its return took too long.
    Returned,
    /// This program does not know the word that the module uses.
    Unknown,
}

/// What the module knows of a function.
#[derive(Debug, Clone, PartialEq, Eq, serde::Serialize)]
pub struct ModuleStatus {
    /// By which it is returned.
    pub handle: u32,
    /// The name that it was borrowed by.
    pub name: String,
    /// Whether it is in use, going or gone.
    pub state: BorrowedState,
    /// Why it was lost, in words.
    pub reason: Option<&'static str>,
    /// The PCI domain in which the kernel shows the function.
    pub domain: u32,
    /// The NTB of this host that it is behind.
    pub ntb: PciAddress,
    /// Offset of its control area.
    pub offset: u64,
    /// The lease's epoch, which the lender's control area must have.
    pub epoch: u64,
    /// What the function adds to a physical address of this host's to reach that memory.
    pub dma_base: u64,
    /// Bytes of this host's physical memory that it reaches so, from address 0 on.
    pub dma_size: u64,
    /// Interrupts that it has.
    pub vectors: u32,
    /// Milliseconds since the lender's heartbeat was seen to change.
    pub silent_ms: u32,
    /// Milliseconds that its removal took, of one that was lost.
    pub removal_ms: u32,
    /// Looks at the heartbeat, and those that found it as before.
    pub heartbeats: u64,
    /// Of those, how many found it as it was before.
    pub heartbeats_missed: u64,
    /// Writes to configuration space that were passed on, that found no room, and that the lender refused.
    pub writes_forwarded: u64,
    /// Of those, how many found no room in the ring.
    pub writes_lost: u64,
    /// Of those, how many the lender refused.
    pub writes_refused: u64,
    /// Times that bus mastering was not on when its driver went on.
    pub waits_late: u64,
    /// How often the function was reset.
    pub resets: u64,
    /// DMA addresses outside of the window, which were refused.
    pub dma_refused: u64,
    /// Interrupts, those that came while there should be none, and by vector.
    pub interrupts_stray: u64,
    /// How many came, by vector.
    pub interrupts: Vec<u64>,
}

/// The kernel module's device file, `/dev/rackbus`.
#[derive(Debug)]
pub struct Module {
    file: File,
}

fn refused<T>(what: impl Into<String>) -> impl FnOnce(Errno) -> Result<T, MetalError> {
    move |errno| Err(MetalError::Refused { what: what.into(), errno })
}

impl Module {
    /// Opens the kernel module's device file.
    ///
    /// # Errors
    /// When it is not loaded, not ours to open, or of another version.
    pub fn open() -> Result<Module, MetalError> {
        let flags = i32::try_from(OFlags::NONBLOCK.bits()).unwrap_or(0);
        let file = File::options().read(true).write(true).custom_flags(flags).open(PATH);
        let file = file.map_err(MetalError::NoModule)?;
        let module = Module { file };
        let mut version = 0u32;
        module.call::<VERSION_GET, u32>(&mut version).or_else(refused("asking for its version"))?;
        match version {
            API_VERSION => Ok(module),
            other => Err(MetalError::Version(other)),
        }
    }

    fn call<const OPCODE: Opcode, T>(&self, value: &mut T) -> Result<(), Errno> {
        // SAFETY: the callers' structures are those that the module reads and writes for the opcode, which has their
        // size in it; the only pointer in any of them is that of `list`, to memory that outlives the call.
        unsafe { ioctl(&self.file, Updater::<OPCODE, T>::new(value)) }
    }

    /// Borrows a function: it appears in this host's PCI tree, and its driver binds to it before this returns.
    ///
    /// # Errors
    /// When the module refuses: with what to do.
    pub fn borrow(&self, wanted: &WantedFunction) -> Result<Borrowed, MetalError> {
        let bytes = wanted.name.as_bytes();
        if bytes.len() >= NAME_BYTES || bytes.contains(&0) {
            return Err(MetalError::Name(wanted.name.clone()));
        }
        let mut name = [0; NAME_BYTES];
        name[..bytes.len()].copy_from_slice(bytes);
        let mut raw = RawBorrow {
            ntb: wanted.ntb.into(),
            offset: wanted.offset,
            epoch: wanted.epoch,
            vectors: wanted.vectors.unwrap_or(0),
            flags: 0,
            name,
            handle: 0,
            domain: 0,
        };
        let what = || format!("borrowing {}", wanted.name);
        let begun = Instant::now();
        loop {
            match self.call::<BORROW, _>(&mut raw) {
                Ok(()) => break,
                // The link takes a moment to come up, after both sides have enabled it.
                Err(Errno::NOLINK) if begun.elapsed() < LINK_UP => std::thread::sleep(AGAIN),
                // So does the lender, to carry out what the last user asked for.
                Err(Errno::AGAIN) if begun.elapsed() < LINK_UP + RESET => {
                    std::thread::sleep(AGAIN);
                }
                Err(errno) => return refused(what())(errno),
            }
        }
        Ok(Borrowed { handle: raw.handle, domain: raw.domain })
    }

    /// Returns a function: its driver releases it, and it disappears. With `force`, also while it is mounted.
    ///
    /// # Errors
    /// When there is none, it is in use, or its driver does not release it in time.
    pub fn give_back(&self, handle: u32, force: bool, limit: Duration) -> Result<(), MetalError> {
        let flags = if force { FORCE } else { 0 };
        let timeout_ms = u32::try_from(limit.as_millis()).unwrap_or(u32::MAX);
        let mut raw = RawReturn { handle, flags, timeout_ms, reserved: 0 };
        let what = || format!("returning function {handle}");
        self.call::<RETURN, _>(&mut raw).or_else(|errno| refused(what())(errno))
    }

    /// Says that a function's lender is gone.
    ///
    /// # Errors
    /// When there is no such function.
    pub fn lost(&self, handle: u32) -> Result<(), MetalError> {
        let mut raw = RawLost { handle, reserved: 0 };
        let what = || format!("losing function {handle}");
        self.call::<LOST, _>(&mut raw).or_else(|errno| refused(what())(errno))
    }

    /// How many changes of states there were so far. Nothing is to be read any more until there is another.
    pub fn changes(&self) -> u64 {
        let mut count = [0; 8];
        match (&self.file).read(&mut count) {
            Ok(8) => u64::from_ne_bytes(count),
            _ => 0,
        }
    }

    /// The handles of all functions that are borrowed, in order.
    ///
    /// # Errors
    /// When the module refuses.
    pub fn handles(&self) -> Result<Vec<u32>, MetalError> {
        let mut handles = [0u32; MOST_FUNCTIONS];
        let at = handles.as_mut_ptr() as u64;
        let mut raw = RawList { capacity: MOST_FUNCTIONS as u32, total: 0, handles: at };
        self.call::<LIST, _>(&mut raw).or_else(refused("listing borrowed functions"))?;
        let found = (raw.total as usize).min(MOST_FUNCTIONS);
        Ok(handles[..found].to_vec())
    }

    /// What is known of a function.
    ///
    /// # Errors
    /// When there is none.
    pub fn status(&self, handle: u32) -> Result<ModuleStatus, MetalError> {
        // SAFETY: integers only, of which zeroes are values.
        let mut raw: RawStatus = unsafe { std::mem::zeroed() };
        raw.handle = handle;
        let what = || format!("looking at function {handle}");
        self.call::<STATUS, _>(&mut raw).or_else(|errno| refused(what())(errno))?;
        Ok(ModuleStatus::of(&raw))
    }
}

/// Readable when some function's state has changed since it was read.
impl AsFd for Module {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.file.as_fd()
    }
}

impl ModuleStatus {
    fn of(raw: &RawStatus) -> ModuleStatus {
        let length = raw.name.iter().position(|byte| *byte == 0).unwrap_or(NAME_BYTES);
        let vectors = (raw.vectors as usize).min(VECTORS);
        ModuleStatus {
            handle: raw.handle,
            name: String::from_utf8_lossy(&raw.name[..length]).into_owned(),
            state: match raw.state {
                1 => BorrowedState::Borrowed,
                2 => BorrowedState::Returning,
                3 => BorrowedState::Losing,
                4 => BorrowedState::Lost,
                5 => BorrowedState::Returned,
                _ => BorrowedState::Unknown,
            },
            reason: match raw.reason {
                0 => None,
                1 => Some("the NTB's link is down"),
                2 => Some("the lender's heartbeat stalled"),
                3 => Some("the lender took it away"),
                4 => Some("the lender is not reached"),
                5 => Some("this host's node said so"),
                6 => Some("the NTB was unbound"),
                7 => Some("the lender did not say in time what the function reaches"),
                _ => Some("a reason that this program does not know"),
            },
            domain: raw.domain,
            ntb: raw.ntb.into(),
            offset: raw.offset,
            epoch: raw.epoch,
            dma_base: raw.dma_base,
            dma_size: raw.dma_size,
            vectors: raw.vectors,
            silent_ms: raw.silent_ms,
            removal_ms: raw.removal_ms,
            heartbeats: raw.heartbeats,
            heartbeats_missed: raw.heartbeats_missed,
            writes_forwarded: raw.writes_forwarded,
            writes_lost: raw.writes_lost,
            writes_refused: raw.writes_refused,
            waits_late: raw.waits_late,
            resets: raw.resets,
            dma_refused: raw.dma_refused,
            interrupts_stray: raw.interrupts_stray,
            interrupts: raw.interrupts[..vectors].to_vec(),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::process::Command;

    use super::*;

    /// The numbers of the requests have the structures' sizes in them; the module is compiled from the header.
    #[test]
    fn requests_and_structures_are_those_of_the_kernel_module() {
        let include = concat!(env!("CARGO_MANIFEST_DIR"), "/../../kernel/include/uapi");
        let dir = tempfile::tempdir().unwrap();
        let (source, program) = (dir.path().join("uapi.c"), dir.path().join("uapi"));
        let text = r#"
            #include <stddef.h>
            #include <stdio.h>
            #include "linux/rackbus.h"
            #define S(field) (unsigned long)offsetof(struct rackbus_status, field)
            int main(void) {
                printf("%lu %lu %lu %lu %lu %lu ", (unsigned long)RACKBUS_VERSION_GET, (unsigned long)RACKBUS_BORROW,
                    (unsigned long)RACKBUS_RETURN, (unsigned long)RACKBUS_LOST, (unsigned long)RACKBUS_LIST,
                    (unsigned long)RACKBUS_STATUS);
                printf("%lu %lu %lu %lu %lu ", S(ntb), S(epoch), S(vectors), S(name), S(interrupts));
                printf("%lu %lu\n", (unsigned long)offsetof(struct rackbus_borrow, name),
                    (unsigned long)offsetof(struct rackbus_borrow, handle));
                return 0;
            }
        "#;
        std::fs::write(&source, text).unwrap();
        let mut cc = Command::new("cc");
        cc.arg("-I").arg(include).arg(&source).arg("-o").arg(&program);
        assert!(cc.status().expect("a C compiler").success());
        let output = Command::new(&program).output().unwrap();
        let found: Vec<u64> = String::from_utf8(output.stdout)
            .unwrap()
            .split_whitespace()
            .map(|word| word.parse().unwrap())
            .collect();
        let requests = [VERSION_GET, BORROW, RETURN, LOST, LIST, STATUS].map(u64::from);
        let places = [
            std::mem::offset_of!(RawStatus, ntb),
            std::mem::offset_of!(RawStatus, epoch),
            std::mem::offset_of!(RawStatus, vectors),
            std::mem::offset_of!(RawStatus, name),
            std::mem::offset_of!(RawStatus, interrupts),
            std::mem::offset_of!(RawBorrow, name),
            std::mem::offset_of!(RawBorrow, handle),
        ];
        let places = places.map(|place| place as u64);
        assert_eq!(found, [&requests[..], &places].concat());
    }
}
