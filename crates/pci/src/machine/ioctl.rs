//! Requests to VFIO: the parts of the kernel's interface that take `ioctl`.
//!
//! Source: Linux, `include/uapi/linux/vfio.h`.
#![allow(unsafe_code)] // system calls that no library has

use std::ffi::{CString, c_void};
use std::fs::File;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, RawFd};

use rackbus_memory::{Event, SharedMemory};
use rackbus_spec::vfio_user::{DeviceInfo, IrqInfo, IrqSet, IrqSetFlags, RegionInfo};
use rustix::io::Errno;
use rustix::ioctl::{Ioctl, IoctlOutput, Opcode, ioctl, opcode};
use zerocopy::{FromBytes, FromZeros, Immutable, IntoBytes};

/// Numbers of requests, all of VFIO's type `;` and without a direction.
mod request {
    pub const GET_API_VERSION: u8 = 100;
    pub const SET_IOMMU: u8 = 102;
    pub const GROUP_GET_STATUS: u8 = 103;
    pub const GROUP_SET_CONTAINER: u8 = 104;
    pub const GROUP_GET_DEVICE_FD: u8 = 106;
    pub const DEVICE_GET_INFO: u8 = 107;
    pub const DEVICE_GET_REGION_INFO: u8 = 108;
    pub const DEVICE_GET_IRQ_INFO: u8 = 109;
    pub const DEVICE_SET_IRQS: u8 = 110;
    pub const DEVICE_RESET: u8 = 111;
    pub const IOMMU_MAP_DMA: u8 = 113;
}

/// `VFIO_GROUP_FLAGS_VIABLE`.
const VIABLE: u32 = 1;
/// `VFIO_DMA_MAP_FLAG_READ` and `VFIO_DMA_MAP_FLAG_WRITE`.
const READ_WRITE: u32 = 3;

/// `struct vfio_group_status`.
#[derive(FromBytes, IntoBytes, Immutable)]
#[repr(C)]
struct GroupStatus {
    argsz: u32,
    flags: u32,
}

/// `struct vfio_iommu_type1_dma_map`.
#[derive(FromBytes, IntoBytes, Immutable)]
#[repr(C)]
struct DmaMap {
    argsz: u32,
    flags: u32,
    vaddr: u64,
    iova: u64,
    size: u64,
}

/// What goes with a request.
enum Argument<'a> {
    Number(usize),
    /// A structure that says its own size first, and nothing of this process' memory but itself.
    Structure(&'a mut [u8]),
}

struct Call<'a>(u8, Argument<'a>);

// SAFETY: what the kernel reads and writes is the structure, whose size it is told in its first field
// (`structure`), or which has a size that the request fixes (`set_container`, `device`).
unsafe impl Ioctl for Call<'_> {
    type Output = i32;
    const IS_MUTATING: bool = true;

    fn opcode(&self) -> Opcode {
        opcode::none(b';', self.0)
    }

    fn as_ptr(&mut self) -> *mut c_void {
        match &mut self.1 {
            Argument::Number(number) => std::ptr::without_provenance_mut(*number),
            Argument::Structure(bytes) => bytes.as_mut_ptr().cast(),
        }
    }

    unsafe fn output_from_ptr(output: IoctlOutput, _: *mut c_void) -> rustix::io::Result<i32> {
        Ok(output)
    }
}

fn number(fd: BorrowedFd<'_>, request: u8, argument: usize) -> rustix::io::Result<i32> {
    // SAFETY: these requests take a number, or nothing.
    unsafe { ioctl(fd, Call(request, Argument::Number(argument))) }
}

/// A request with a structure that begins with its own size, which is written here.
fn structure(fd: BorrowedFd<'_>, request: u8, bytes: &mut [u8]) -> rustix::io::Result<i32> {
    let size = u32::try_from(bytes.len()).map_err(|_| Errno::INVAL)?;
    bytes.get_mut(..4).ok_or(Errno::INVAL)?.copy_from_slice(&size.to_ne_bytes());
    // SAFETY: the kernel reads and writes no more than the size says.
    unsafe { ioctl(fd, Call(request, Argument::Structure(bytes))) }
}

fn ask<T: FromBytes + IntoBytes>(
    fd: BorrowedFd<'_>,
    request: u8,
    mut value: T,
) -> rustix::io::Result<T> {
    structure(fd, request, value.as_mut_bytes())?;
    Ok(value)
}

/// The version of the interface: 0 is the one there is.
pub fn api_version(container: &File) -> rustix::io::Result<i32> {
    number(container.as_fd(), request::GET_API_VERSION, 0)
}

/// Whether nothing of the group is used by drivers of the kernel's.
pub fn is_viable(group: &File) -> rustix::io::Result<bool> {
    let ask_status = GroupStatus { argsz: 0, flags: 0 };
    let status = ask(group.as_fd(), request::GROUP_GET_STATUS, ask_status)?;
    Ok(status.flags & VIABLE != 0)
}

/// Puts a group into a container.
pub fn set_container(group: &File, container: &File) -> rustix::io::Result<()> {
    let mut fd: RawFd = container.as_raw_fd();
    let argument = Argument::Structure(fd.as_mut_bytes());
    // SAFETY: the request takes a pointer to a descriptor, and copies it.
    unsafe { ioctl(group.as_fd(), Call(request::GROUP_SET_CONTAINER, argument)) }.map(drop)
}

/// Chooses the kind of IOMMU.
pub fn set_iommu(container: &File, kind: usize) -> rustix::io::Result<()> {
    number(container.as_fd(), request::SET_IOMMU, kind).map(drop)
}

/// The function of this address, which resets it.
pub fn device(group: &File, address: &str) -> rustix::io::Result<File> {
    let mut name = CString::new(address).map_err(|_| Errno::INVAL)?.into_bytes_with_nul();
    let argument = Argument::Structure(&mut name);
    // SAFETY: the request takes a pointer to a string that ends with a zero, and reads it.
    let fd = unsafe { ioctl(group.as_fd(), Call(request::GROUP_GET_DEVICE_FD, argument)) }?;
    // SAFETY: a new descriptor, which nobody else has.
    Ok(unsafe { File::from_raw_fd(fd) })
}

/// What the function can do.
pub fn device_info(device: &File) -> rustix::io::Result<DeviceInfo> {
    ask(device.as_fd(), request::DEVICE_GET_INFO, DeviceInfo::new_zeroed())
}

/// A region of the function.
pub fn region_info(device: &File, index: u32) -> rustix::io::Result<RegionInfo> {
    let ask_region = RegionInfo { index, ..RegionInfo::new_zeroed() };
    ask(device.as_fd(), request::DEVICE_GET_REGION_INFO, ask_region)
}

/// How many vectors an interrupt index has.
pub fn irq_count(device: &File, index: u32) -> rustix::io::Result<u32> {
    let ask_irq = IrqInfo { index, ..IrqInfo::new_zeroed() };
    Ok(ask(device.as_fd(), request::DEVICE_GET_IRQ_INFO, ask_irq)?.count)
}

/// Function-level reset.
pub fn reset(device: &File) -> rustix::io::Result<()> {
    number(device.as_fd(), request::DEVICE_RESET, 0).map(drop)
}

/// Wires the first vectors of an interrupt index to `events`. Where there are fewer: how many.
pub fn wire(device: &File, index: u32, events: &[Event]) -> rustix::io::Result<Result<(), u32>> {
    let count = u32::try_from(events.len()).map_err(|_| Errno::INVAL)?;
    let flags = IrqSetFlags::DATA_EVENTFD | IrqSetFlags::ACTION_TRIGGER;
    let set = IrqSet { argsz: 0, flags: flags.bits(), index, start: 0, count };
    let mut bytes = set.as_bytes().to_vec();
    for event in events {
        bytes.extend_from_slice(&event.as_fd().as_raw_fd().to_ne_bytes());
    }
    match structure(device.as_fd(), request::DEVICE_SET_IRQS, &mut bytes)? {
        0 => Ok(Ok(())),
        fewer => Ok(Err(fewer.unsigned_abs())),
    }
}

/// Lets the functions of a container reach `memory` from `iova` on.
pub fn map(container: &File, iova: u64, memory: &SharedMemory) -> rustix::io::Result<()> {
    let (vaddr, size) = (memory.whole().as_ptr() as u64, memory.len() as u64);
    let mut map = DmaMap { argsz: 0, flags: READ_WRITE, vaddr, iova, size };
    // What the function writes there is nobody's reference: shared memory is reached by raw copies only. The
    // kernel keeps the pages for as long as the container is open.
    structure(container.as_fd(), request::IOMMU_MAP_DMA, map.as_mut_bytes()).map(drop)
}
