//! The functions as programs call them.

use super::calls::{self, DeviceSegmentTarget};
use super::{DeviceRange, Ignored, SciDevice, info};
use crate::constants::errors::SCI_ERR_NOT_SUPPORTED;
use crate::constants::layout::SciDeviceInfo;
use crate::error::{SciResult, check_flags, check_place, fail, finish, put};
use crate::handles::{RawHandle, find};
use crate::remote::RemoteCallback;

api! {
    /// The ids of the rack's devices; how many of them were filled in. With no room to fill in, how many there are.
    fn SCIGetDeviceList(
        sd: RawHandle,
        fdids: *mut u64,
        max: usize,
        filter: *const SciDeviceInfo,
        flags: u32,
        error: *mut u32,
    ) -> usize {
        // SAFETY: a program's filter is null or a structure that is plain data; it need not be aligned.
        let filter = (!filter.is_null()).then(|| unsafe { filter.read_unaligned() });
        // SAFETY: as the caller says.
        let Some(all) = (unsafe { finish(error, info::list(sd, filter.as_ref(), flags)) }) else {
            return 0;
        };
        if fdids.is_null() {
            return all.len();
        }
        let filled = all.len().min(max);
        for (at, fdid) in all.into_iter().take(filled).enumerate() {
            // SAFETY: there is room for `max` ids.
            unsafe { put(fdids.add(at), fdid) };
        }
        filled
    }

    /// Borrows the device with fabric device ID `fdid` for this session, until it is returned or the session ends.
    fn SCIBorrowDevice(sd: RawHandle, device: *mut RawHandle, fdid: u64, flags: u32, error: *mut u32) {
        // SAFETY: as the caller says.
        unsafe {
            let borrowed = check_place(device).and_then(|()| calls::borrow(sd, fdid, flags));
            if let Some(handle) = finish(error, borrowed) {
                put(device, handle);
            }
        }
    }

    /// Returns a borrowed device. Answers when it is offered again, or its lender has not said so for some seconds.
    fn SCIReturnDevice(device: RawHandle, flags: u32, error: *mut u32) {
        // SAFETY: as the caller says.
        unsafe { finish(error, calls::give_back(device, flags)) };
    }

    /// A device is lent to one at a time.
    fn SCIReleaseExclusiveBorrow(device: RawHandle, flags: u32, error: *mut u32) {
        let refused: SciResult<()> = check_flags(flags, 0)
            .and_then(|()| find::<SciDevice>(device))
            .and_then(|_| fail(SCI_ERR_NOT_SUPPORTED));
        // SAFETY: as the caller says.
        unsafe { finish(error, refused) };
    }

    /// The id of a borrowed device.
    fn SCIGetFabricDeviceId(device: RawHandle) -> u64 {
        find::<SciDevice>(device).map_or(0, |device| device.borrowed.entry().fdid)
    }

    /// Connects to a BAR of a device, or to memory that was made for it.
    fn SCIConnectDeviceSegment(
        device: RawHandle,
        segment: *mut RawHandle,
        id: u32,
        kind: u32,
        _callback: RemoteCallback,
        _argument: Ignored,
        flags: u32,
        error: *mut u32,
    ) {
        // SAFETY: as the caller says.
        unsafe {
            let target = DeviceSegmentTarget { id, kind };
            let connected =
                check_place(segment).and_then(|()| calls::connect(device, &target, flags));
            if let Some(handle) = finish(error, connected) {
                put(segment, handle);
            }
        }
    }

    /// The same by way of an adapter.
    fn SCIConnectDeviceSegmentPath(
        device: RawHandle,
        segment: *mut RawHandle,
        id: u32,
        kind: u32,
        adapter: u32,
        _callback: RemoteCallback,
        _argument: Ignored,
        flags: u32,
        error: *mut u32,
    ) {
        // SAFETY: as the caller says.
        unsafe {
            let target = DeviceSegmentTarget { id, kind };
            let connected = check_place(segment)
                .and_then(|()| calls::connect_by_path(device, &target, adapter, flags));
            if let Some(handle) = finish(error, connected) {
                put(segment, handle);
            }
        }
    }

    /// Connects to a BAR of a device.
    fn SCIConnectDeviceMemory(
        sd: RawHandle,
        segment: *mut RawHandle,
        adapter: u32,
        device: RawHandle,
        number: u32,
        reserved: u32,
        flags: u32,
        error: *mut u32,
    ) {
        // SAFETY: as the caller says.
        unsafe {
            let which = (number, reserved);
            let connected = check_place(segment)
                .and_then(|()| calls::connect_memory(sd, adapter, device, which, flags));
            if let Some(handle) = finish(error, connected) {
                put(segment, handle);
            }
        }
    }

    /// Makes memory for a device.
    fn SCICreateDeviceSegment(
        device: RawHandle,
        id: u32,
        size: usize,
        kind: u32,
        hints: u32,
        flags: u32,
        error: *mut u32,
    ) {
        // SAFETY: as the caller says.
        unsafe { finish(error, calls::create_segment(device, (id, size), (kind, hints), flags)) };
    }

    /// Lets a device reach a part of a local segment.
    fn SCIMapLocalSegmentForDevice(
        segment: RawHandle,
        adapter: u32,
        device: RawHandle,
        address: *mut u64,
        offset: usize,
        size: usize,
        flags: u32,
        error: *mut u32,
    ) {
        // SAFETY: as the caller says.
        unsafe {
            let wanted = DeviceRange { offset, size };
            let mapped = calls::map_local(segment, adapter, device, &wanted, flags);
            if let Some(at) = finish(error, mapped) {
                put(address, at);
            }
        }
    }

    /// Lets a device reach a part of a remote segment, or of another device's BAR.
    fn SCIMapRemoteSegmentForDevice(
        segment: RawHandle,
        device: RawHandle,
        address: *mut u64,
        offset: usize,
        size: usize,
        flags: u32,
        error: *mut u32,
    ) {
        // SAFETY: as the caller says.
        unsafe {
            let wanted = DeviceRange { offset, size };
            if let Some(at) = finish(error, calls::map_remote(segment, device, &wanted, flags)) {
                put(address, at);
            }
        }
    }

    /// Takes a local segment from a device.
    fn SCIUnmapLocalSegmentForDevice(
        segment: RawHandle,
        adapter: u32,
        device: RawHandle,
        flags: u32,
        error: *mut u32,
    ) {
        // SAFETY: as the caller says.
        unsafe { finish(error, calls::unmap_local(segment, adapter, device, flags)) };
    }

    /// Takes a remote segment from a device.
    fn SCIUnmapRemoteSegmentForDevice(
        segment: RawHandle,
        device: RawHandle,
        flags: u32,
        error: *mut u32,
    ) {
        // SAFETY: as the caller says.
        unsafe { finish(error, calls::unmap_remote(segment, device, flags)) };
    }
}
