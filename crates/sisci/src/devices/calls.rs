//! Borrowing, returning, connecting and mapping.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};

use rackbus_attach::RemoteSegment;
use rackbus_attach::devices::DeviceError;

use super::{DeviceRange, DeviceUse, Mapped, ReachedSegment, SciDevice, code, devices};
use crate::constants::errors::*;
use crate::constants::*;
use crate::error::{Code, SciResult, check_adapter, check_flags, explain, fail};
use crate::handles::{HandleKind, RawHandle, find};
use crate::library::Child;
use crate::local::SciLocalSegment;
use crate::remote::{self, SciRemoteSegment};

/// Says how far a program that borrows trusts lenders: `strict` gives them no memory of this host's.
const ISOLATION: &str = "RACKBUS_ISOLATION";

pub(super) fn borrow(sd: RawHandle, fdid: u64, flags: u32) -> SciResult<RawHandle> {
    // A device is lent to one at a time, with the flag and without.
    check_flags(flags, SCI_FLAG_EXCLUSIVE)?;
    let child = Child::of(sd)?;
    let strict = match std::env::var(ISOLATION).as_deref() {
        Err(_) | Ok("" | "shared") => false,
        Ok("strict") => true,
        Ok(other) => {
            explain(format_args!("{ISOLATION} is {other:?}; it is `shared` or `strict`"));
            return fail(SCI_ERR_ILLEGAL_PARAMETER);
        }
    };
    let borrowed = devices()?.borrow(fdid, strict).map_err(|error| code("borrow", error))?;
    let (maps, connections) = (Mutex::default(), AtomicUsize::new(0));
    Ok(SciDevice::table().add(|_| SciDevice { borrowed, maps, connections, child }))
}

pub(super) fn give_back(handle: RawHandle, flags: u32) -> SciResult<()> {
    check_flags(flags, 0)?;
    let device = find::<SciDevice>(handle)?;
    if device.connections.load(Ordering::Acquire) > 0 || !device.maps().is_empty() {
        return fail(SCI_ERR_BUSY);
    }
    let device = SciDevice::table().take(handle).ok_or(Code(SCI_ERR_ILLEGAL_PARAMETER))?;
    device.borrowed.give_back().map_err(|error| code("return", error))
}

/// The memory of a device that a program wants to connect to.
pub(super) struct DeviceSegmentTarget {
    pub(super) id: u32,
    pub(super) kind: u32,
}

pub(super) fn connect(
    handle: RawHandle,
    target: &DeviceSegmentTarget,
    flags: u32,
) -> SciResult<RawHandle> {
    if flags & SCI_FLAG_USE_CALLBACK != 0 {
        // Nothing happens to a device's memory that its next use does not say.
        return fail(SCI_ERR_FLAG_NOT_IMPLEMENTED);
    }
    check_flags(flags, 0)?;
    let device = find::<SciDevice>(handle)?;
    let segment = match target.kind {
        SCI_MEMTYPE_BAR => {
            let bar = u8::try_from(target.id).map_err(|_| Code(SCI_ERR_NO_SUCH_SEGMENT))?;
            device.borrowed.connect_bar(bar)
        }
        SCI_MEMTYPE_PRIVATE | SCI_MEMTYPE_SHARED => device.borrowed.connect_segment(target.id),
        _ => return fail(SCI_ERR_ILLEGAL_PARAMETER),
    };
    let segment = segment.map_err(|error| code("connect", error))?;
    Ok(add(segment, &device))
}

fn add(segment: RemoteSegment, device: &Arc<SciDevice>) -> RawHandle {
    remote::add_of_device(segment, device.child.again(), DeviceUse::of(device))
}

pub(super) fn connect_by_path(
    handle: RawHandle,
    target: &DeviceSegmentTarget,
    adapter: u32,
    flags: u32,
) -> SciResult<RawHandle> {
    check_adapter(adapter)?;
    connect(handle, target, flags & !SCI_FLAG_SPECIFY_PATH)
}

pub(super) fn connect_memory(
    sd: RawHandle,
    adapter: u32,
    device: RawHandle,
    (number, reserved): (u32, u32),
    flags: u32,
) -> SciResult<RawHandle> {
    check_flags(flags, SCI_FLAG_BAR)?;
    check_adapter(adapter)?;
    drop(Child::of(sd)?);
    if reserved != 0 {
        return fail(SCI_ERR_ILLEGAL_PARAMETER);
    }
    connect(device, &DeviceSegmentTarget { id: number, kind: SCI_MEMTYPE_BAR }, 0)
}

/// Who uses memory that is made for a device.
const HINTS: u32 = SCI_MEMACCESS_DEVICE_READ
    | SCI_MEMACCESS_DEVICE_WRITE
    | SCI_MEMACCESS_HOST_READ
    | SCI_MEMACCESS_HOST_WRITE
    | SCI_MEMACCESS_MULTIHOST_READ
    | SCI_MEMACCESS_MULTIHOST_WRITE
    | SCI_MEMACCESS_P2P_READ
    | SCI_MEMACCESS_P2P_WRITE;

/// The part of a flag that only one of two flags has.
const DEVICE_SIDE: u32 = SCI_FLAG_DEVICE_SIDE_ONLY & !SCI_FLAG_LOCAL_ONLY;

pub(super) fn create_segment(
    handle: RawHandle,
    (id, size): (u32, usize),
    (kind, hints): (u32, u32),
    flags: u32,
) -> SciResult<()> {
    let known = SCI_FLAG_DEVICE_SIDE_ONLY
        | SCI_FLAG_LOCAL_ONLY
        | SCI_FLAG_DEVICE_PREFER_BANDWIDTH
        | SCI_FLAG_HOST_PREFER_BANDWIDTH;
    check_flags(flags, known)?;
    let device = find::<SciDevice>(handle)?;
    if !matches!(kind, SCI_MEMTYPE_PRIVATE | SCI_MEMTYPE_SHARED) || hints & !HINTS != 0 {
        return fail(SCI_ERR_ILLEGAL_PARAMETER);
    }
    if flags & DEVICE_SIDE != 0 {
        // The API has numbers only; this says what to do.
        explain(
            "memory of the device's host is not given to a borrower; leave \
             SCI_FLAG_DEVICE_SIDE_ONLY out, or connect to a segment that a process there offers",
        );
        return fail(SCI_ERR_NOT_SUPPORTED);
    }
    let made = device.borrowed.create_segment(id, size as u64);
    made.map_err(|error| code("create", error))
}

pub(super) fn map_local(
    segment: RawHandle,
    adapter: u32,
    device: RawHandle,
    wanted: &DeviceRange,
    flags: u32,
) -> SciResult<u64> {
    check_flags(flags, 0)?;
    check_adapter(adapter)?;
    let (local, device) = (find::<SciLocalSegment>(segment)?, find::<SciDevice>(device)?);
    let range = wanted.range()?;
    let mapping = local.map_for(&device.borrowed, range);
    keep(&device, mapping, ReachedSegment::Local(local))
}

pub(super) fn map_remote(
    segment: RawHandle,
    device: RawHandle,
    wanted: &DeviceRange,
    flags: u32,
) -> SciResult<u64> {
    check_flags(flags, 0)?;
    let (remote, device) = (find::<SciRemoteSegment>(segment)?, find::<SciDevice>(device)?);
    let range = wanted.range()?;
    let connected = remote.segment()?;
    if remote.lost() {
        return fail(SCI_ERR_NOT_CONNECTED);
    }
    let mapping = device.borrowed.map_remote(connected, range);
    keep(&device, mapping, ReachedSegment::Remote(remote.clone()))
}

fn keep(
    device: &SciDevice,
    mapping: Result<rackbus_attach::devices::DeviceMapping, DeviceError>,
    of: ReachedSegment,
) -> SciResult<u64> {
    let mapping = mapping.map_err(|error| code("map", error))?;
    let address = mapping.address();
    device.maps().push(Mapped::new(mapping, of));
    Ok(address)
}

pub(super) fn unmap_local(
    segment: RawHandle,
    adapter: u32,
    device: RawHandle,
    flags: u32,
) -> SciResult<()> {
    check_flags(flags, 0)?;
    check_adapter(adapter)?;
    unmap(&*find::<SciDevice>(device)?, &ReachedSegment::Local(find::<SciLocalSegment>(segment)?))
}

pub(super) fn unmap_remote(segment: RawHandle, device: RawHandle, flags: u32) -> SciResult<()> {
    check_flags(flags, 0)?;
    unmap(&*find::<SciDevice>(device)?, &ReachedSegment::Remote(find::<SciRemoteSegment>(segment)?))
}

/// Takes every part of a segment from a device that it reaches.
fn unmap(device: &SciDevice, of: &ReachedSegment) -> SciResult<()> {
    let mut maps = device.maps();
    let before = maps.len();
    let (gone, left): (Vec<_>, Vec<_>) = maps.drain(..).partition(|mapped| mapped.of.is(of));
    *maps = left;
    let none = maps.len() == before;
    drop(maps);
    drop(gone);
    match none {
        true => fail(SCI_ERR_ILLEGAL_OPERATION),
        false => Ok(()),
    }
}
