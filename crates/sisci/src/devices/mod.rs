//! Devices of the rack (SmartIO): listed, borrowed, their registers connected to, and memory mapped for them.

mod calls;
mod exports;
mod info;

use std::ffi::c_void;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use rackbus_attach::NodeAddress;
use rackbus_attach::devices::{BorrowedDevice, DeviceError, DeviceMapping, Devices};

use crate::constants::errors::*;
use crate::error::{Code, SciResult, explain, fail};
use crate::forks::HeldLock;
use crate::handles::{HandleKind, kind};
use crate::library::{Child, session};
use crate::local::SciLocalSegment;
use crate::remote::SciRemoteSegment;

pub(crate) use info::query;

/// A borrowed device (`sci_smartio_device_t`).
#[derive(Debug)]
pub struct SciDevice {
    borrowed: BorrowedDevice,
    /// Memory that it reaches.
    maps: Mutex<Vec<Mapped>>,
    /// Connections to its memory.
    connections: AtomicUsize,
    child: Child,
}
kind!(SciDevice, 13);

/// A connection to memory of a device, which is not returned before it.
#[derive(Debug)]
pub(crate) struct DeviceUse(Arc<SciDevice>);

impl DeviceUse {
    fn of(device: &Arc<SciDevice>) -> DeviceUse {
        device.connections.fetch_add(1, Ordering::AcqRel);
        DeviceUse(device.clone())
    }
}

impl Drop for DeviceUse {
    fn drop(&mut self) {
        self.0.connections.fetch_sub(1, Ordering::AcqRel);
    }
}

/// A part of a segment that a device reaches.
#[derive(Debug)]
struct Mapped {
    /// Before the segment: it is reached no more when that may go.
    _mapping: DeviceMapping,
    of: ReachedSegment,
}

/// The segment that a device reaches a part of; it is not removed, or disconnected, meanwhile.
#[derive(Debug)]
enum ReachedSegment {
    Local(Arc<SciLocalSegment>),
    Remote(Arc<SciRemoteSegment>),
}

impl ReachedSegment {
    fn mapped(&self) -> &AtomicUsize {
        match self {
            ReachedSegment::Local(local) => &local.mapped,
            ReachedSegment::Remote(remote) => &remote.mapped,
        }
    }

    fn is(&self, other: &ReachedSegment) -> bool {
        match (self, other) {
            (ReachedSegment::Local(one), ReachedSegment::Local(other)) => Arc::ptr_eq(one, other),
            (ReachedSegment::Remote(one), ReachedSegment::Remote(other)) => Arc::ptr_eq(one, other),
            _ => false,
        }
    }
}

impl Mapped {
    fn new(mapping: DeviceMapping, of: ReachedSegment) -> Mapped {
        of.mapped().fetch_add(1, Ordering::AcqRel);
        Mapped { _mapping: mapping, of }
    }
}

impl Drop for Mapped {
    fn drop(&mut self) {
        self.of.mapped().fetch_sub(1, Ordering::AcqRel);
    }
}

impl SciDevice {
    fn maps(&self) -> MutexGuard<'_, Vec<Mapped>> {
        self.maps.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The rack's devices, for this process and the session that it has now.
/// Never held while they are opened, which may take many seconds: a fork waits for it.
static DEVICES: Mutex<Option<(u64, Devices)>> = Mutex::new(None);

fn devices() -> SciResult<Devices> {
    let session = session()?;
    let number = session.holder().session.0;
    let current = |devices: &Option<(u64, Devices)>| {
        devices.as_ref().filter(|(of, _)| *of == number).map(|(_, devices)| devices.clone())
    };
    let lock = || DEVICES.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some(devices) = current(&lock()) {
        return Ok(devices);
    }
    let place = NodeAddress::from_environment().map_err(|error| {
        explain(error);
        Code(SCI_ERR_NO_LINK_ACCESS)
    })?;
    let opened = Devices::open(&session, place).map_err(|error| code("devices", error))?;
    let mut devices = lock();
    // Another thread may have opened them at the same time, and been first.
    if let Some(first) = current(&devices) {
        return Ok(first);
    }
    *devices = Some((number, opened.clone()));
    Ok(opened)
}

/// The number of an error; where numbers say too little, the reason is printed, with what was tried.
fn code(what: &str, error: DeviceError) -> Code {
    let text = error.to_string();
    let (code, tell) = match error {
        DeviceError::Attach(error) => {
            let tell = matches!(
                &error,
                rackbus_attach::AttachError::Refused(
                    rackbus_attach::Refusal::NotLent(_) | rackbus_attach::Refusal::DeviceInUse(_),
                )
            );
            (Code::from(error), tell)
        }
        DeviceError::Gone => (Code(SCI_ERR_NOT_CONNECTED), false),
        DeviceError::Device(_) | DeviceError::Unreached => (Code(SCI_ERR_SYSTEM), true),
        DeviceError::InGuest | DeviceError::NotMemory(_) | DeviceError::NoPeer(_) => {
            (Code(SCI_ERR_NOT_SUPPORTED), true)
        }
        DeviceError::NoBar(_) | DeviceError::NoSuchSegment(_) => {
            (Code(SCI_ERR_NO_SUCH_SEGMENT), false)
        }
        DeviceError::SegmentInUse(_) => (Code(SCI_ERR_SEGMENTID_USED), false),
        DeviceError::NoAddress => (Code(SCI_ERR_NOSPC), false),
    };
    if tell {
        // The API has numbers only; this says what to do.
        explain(format_args!("{what}: {text}"));
    }
    code
}

/// What a program asks a device to reach.
struct DeviceRange {
    offset: usize,
    size: usize,
}

impl DeviceRange {
    fn range(&self) -> SciResult<(u64, u64)> {
        match self.size {
            0 => fail(SCI_ERR_SIZE_ALIGNMENT),
            size => Ok((self.offset as u64, size as u64)),
        }
    }
}

/// Returns every device of the process.
pub(crate) fn end_all() {
    for device in SciDevice::table().clear() {
        device.maps().clear();
        // The node ends what it is not told to end.
        let _ = device.borrowed.give_back();
    }
    drop(DEVICES.lock().unwrap_or_else(PoisonError::into_inner).take());
}

/// The locks of it all, held while the process forks.
pub(crate) fn hold() -> Vec<Option<HeldLock>> {
    vec![SciDevice::table().hold(), crate::forks::hold_mutex(&DEVICES)]
}

/// What a fork has of its parent's.
pub(crate) fn forget_all() {
    std::mem::forget(SciDevice::table().clear());
    std::mem::forget(DEVICES.lock().unwrap_or_else(PoisonError::into_inner).take());
}

/// A program's pointer that nothing is done with.
type Ignored = *mut c_void;
