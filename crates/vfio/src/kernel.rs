//! Requests to VFIO: the parts of the kernel's interface that take `ioctl`.
//!
//! Source: Linux, `include/uapi/linux/vfio.h`.
#![allow(unsafe_code)] // system calls that no library has

use std::ffi::{CString, c_void};
use std::fs::File;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, RawFd};

use rackbus_memory::Access;
use rackbus_spec::vfio_user::{DeviceInfo, IrqInfo, IrqSet, IrqSetFlags, RegionInfo};
use rustix::io::Errno;
use rustix::ioctl::{Ioctl, IoctlOutput, Opcode, ioctl, opcode};
use zerocopy::{FromBytes, FromZeros, Immutable, IntoBytes, KnownLayout};

/// Numbers of requests, all of VFIO's type `;` and without a direction.
mod request {
    pub const GET_API_VERSION: u8 = 100;
    pub const CHECK_EXTENSION: u8 = 101;
    pub const SET_IOMMU: u8 = 102;
    pub const GROUP_GET_STATUS: u8 = 103;
    pub const GROUP_SET_CONTAINER: u8 = 104;
    pub const GROUP_GET_DEVICE_FD: u8 = 106;
    pub const DEVICE_GET_INFO: u8 = 107;
    pub const DEVICE_GET_REGION_INFO: u8 = 108;
    pub const DEVICE_GET_IRQ_INFO: u8 = 109;
    pub const DEVICE_SET_IRQS: u8 = 110;
    pub const DEVICE_RESET: u8 = 111;
    pub const DEVICE_GET_PCI_HOT_RESET_INFO: u8 = 112;
    pub const DEVICE_PCI_HOT_RESET: u8 = 113;
    pub const IOMMU_GET_INFO: u8 = 112;
    pub const IOMMU_MAP_DMA: u8 = 113;
    pub const IOMMU_UNMAP_DMA: u8 = 114;
}

/// The kind of IOMMU: `VFIO_TYPE1v2_IOMMU`.
pub const TYPE1_V2: usize = 3;
/// All functions of the group can be given to a user (`VFIO_GROUP_FLAGS_VIABLE`).
const VIABLE: u32 = 1;
/// What the function may do by a mapping (`VFIO_DMA_MAP_FLAG_READ` and `VFIO_DMA_MAP_FLAG_WRITE`).
const MAP_READ: u32 = 1;
const MAP_WRITE: u32 = 2;
/// The capability that lists usable addresses (`VFIO_IOMMU_TYPE1_INFO_CAP_IOVA_RANGE`).
const CAP_IOVA_RANGE: u16 = 1;
/// The most that the kernel is asked for of one structure.
const MOST: usize = 64 << 10;

/// Answer to `VFIO_GROUP_GET_STATUS` (`struct vfio_group_status`).
#[derive(FromBytes, IntoBytes, Immutable)]
#[repr(C)]
struct GroupStatus {
    argsz: u32,
    flags: u32,
}

/// Argument of `VFIO_IOMMU_MAP_DMA` (`struct vfio_iommu_type1_dma_map`).
#[derive(FromBytes, IntoBytes, Immutable)]
#[repr(C)]
struct DmaMap {
    argsz: u32,
    flags: u32,
    vaddr: u64,
    iova: u64,
    size: u64,
}

/// Argument of `VFIO_IOMMU_UNMAP_DMA` (`struct vfio_iommu_type1_dma_unmap`).
#[derive(FromBytes, IntoBytes, Immutable)]
#[repr(C)]
struct DmaUnmap {
    argsz: u32,
    flags: u32,
    iova: u64,
    size: u64,
}

/// Answer to `VFIO_IOMMU_GET_INFO`, before its capabilities (`struct vfio_iommu_type1_info`).
#[derive(FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
struct IommuInfo {
    argsz: u32,
    flags: u32,
    page_sizes: u64,
    cap_offset: u32,
    pad: u32,
}

/// `struct vfio_pci_hot_reset_info`, and `struct vfio_pci_hot_reset`, before what follows them.
#[derive(FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
struct HotReset {
    argsz: u32,
    flags: u32,
    count: u32,
}

/// `struct vfio_pci_dependent_device`: a function that a reset of the bus resets too.
#[derive(Debug, Clone, Copy, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct Dependent {
    /// Number of its IOMMU group, which the caller must have open.
    pub group: u32,
    /// Its PCI domain, the first part of its address.
    pub segment: u16,
    /// Its PCI bus, the second part of its address.
    pub bus: u8,
    /// Its device and function.
    pub devfn: u8,
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

/// Asks with as much room as the answer says that it needs.
fn ask_all(fd: BorrowedFd<'_>, request: u8, head: &[u8]) -> rustix::io::Result<Vec<u8>> {
    let mut room = 512;
    loop {
        let mut bytes = head.to_vec();
        bytes.resize(room, 0);
        let outcome = structure(fd, request, &mut bytes);
        let needed = u32::read_from_prefix(&bytes).map_or(0, |(size, _)| size) as usize;
        match outcome {
            Ok(_) | Err(Errno::NOSPC) if needed > room && needed <= MOST => room = needed,
            Err(Errno::NOSPC) if room < MOST => room *= 2,
            Ok(_) => return Ok(bytes),
            Err(errno) => return Err(errno),
        }
    }
}

/// Whether the kernel speaks this interface, with IOMMUs of this kind.
pub fn has_iommu(container: &File, kind: usize) -> rustix::io::Result<bool> {
    let version = number(container.as_fd(), request::GET_API_VERSION, 0)?;
    Ok(version == 0 && number(container.as_fd(), request::CHECK_EXTENSION, kind)? > 0)
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

/// The ranges of addresses that a container can map, first and last of each; none where the kernel does not say.
pub fn iova_ranges(container: &File) -> rustix::io::Result<Vec<(u64, u64)>> {
    let ask_info = IommuInfo { argsz: 0, flags: 0, page_sizes: 0, cap_offset: 0, pad: 0 };
    let answer = ask_all(container.as_fd(), request::IOMMU_GET_INFO, ask_info.as_bytes())?;
    Ok(ranges(&answer))
}

/// The ranges that an answer of the kernel's has among its capabilities.
fn ranges(answer: &[u8]) -> Vec<(u64, u64)> {
    let u32_at = |at: usize| Some(u32::from_ne_bytes(answer.get(at..at + 4)?.try_into().ok()?));
    let u64_at = |at: usize| Some(u64::from_ne_bytes(answer.get(at..at + 8)?.try_into().ok()?));
    let mut at = u32_at(std::mem::offset_of!(IommuInfo, cap_offset)).unwrap_or(0) as usize;
    // A list that went in a circle would have more than these.
    for _ in 0..16 {
        let (Some(id), Some(next)) = (u32_at(at).filter(|_| at > 0), u32_at(at + 4)) else { break };
        if id as u16 == CAP_IOVA_RANGE {
            let count = u32_at(at + 8).unwrap_or(0) as usize;
            let range =
                |index| Some((u64_at(at + 16 + 16 * index)?, u64_at(at + 24 + 16 * index)?));
            return (0..count).map_while(range).collect();
        }
        at = next as usize;
    }
    Vec::new()
}

/// The function of this address.
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

/// A region of the function, with its capabilities behind it.
pub fn region_info(device: &File, index: u32) -> rustix::io::Result<(RegionInfo, Vec<u8>)> {
    let ask_region = RegionInfo { index, ..RegionInfo::new_zeroed() };
    let bytes = ask_all(device.as_fd(), request::DEVICE_GET_REGION_INFO, ask_region.as_bytes())?;
    let (info, _) = RegionInfo::read_from_prefix(&bytes).map_err(|_| Errno::INVAL)?;
    Ok((info, bytes))
}

/// How many vectors an interrupt index has.
pub fn irq_info(device: &File, index: u32) -> rustix::io::Result<IrqInfo> {
    let ask_irq = IrqInfo { index, ..IrqInfo::new_zeroed() };
    ask(device.as_fd(), request::DEVICE_GET_IRQ_INFO, ask_irq)
}

/// Wires vectors of an interrupt index from `start` on; `None` takes a vector's wire away.
pub fn wire(
    device: &File,
    (index, start): (u32, u32),
    action: IrqSetFlags,
    fds: &[Option<BorrowedFd<'_>>],
) -> rustix::io::Result<()> {
    let count = u32::try_from(fds.len()).map_err(|_| Errno::INVAL)?;
    let flags = (IrqSetFlags::DATA_EVENTFD | action).bits();
    let set = IrqSet { argsz: 0, flags, index, start, count };
    let mut bytes = set.as_bytes().to_vec();
    for fd in fds {
        let number = fd.as_ref().map_or(-1, AsRawFd::as_raw_fd);
        bytes.extend_from_slice(&number.to_ne_bytes());
    }
    match structure(device.as_fd(), request::DEVICE_SET_IRQS, &mut bytes)? {
        0 => Ok(()),
        // There are not so many vectors for this function; this is how many.
        _ => Err(Errno::NOSPC),
    }
}

/// Another change of interrupts, which takes no data.
pub fn set_irqs(
    device: &File,
    index: u32,
    (start, count): (u32, u32),
    action: IrqSetFlags,
) -> rustix::io::Result<()> {
    let flags = (IrqSetFlags::DATA_NONE | action).bits();
    let mut set = IrqSet { argsz: 0, flags, index, start, count };
    structure(device.as_fd(), request::DEVICE_SET_IRQS, set.as_mut_bytes()).map(drop)
}

/// Resets the function by whatever of its own ways the kernel takes.
pub fn reset(device: &File) -> rustix::io::Result<()> {
    number(device.as_fd(), request::DEVICE_RESET, 0).map(drop)
}

/// The functions that a reset of the bus resets.
pub fn dependents(device: &File) -> rustix::io::Result<Vec<Dependent>> {
    let head = HotReset { argsz: 0, flags: 0, count: 0 };
    let request = request::DEVICE_GET_PCI_HOT_RESET_INFO;
    let mut room = 64;
    loop {
        let mut bytes = head.as_bytes().to_vec();
        bytes.resize(size_of::<HotReset>() + room * size_of::<Dependent>(), 0);
        let outcome = structure(device.as_fd(), request, &mut bytes);
        let count = HotReset::read_from_prefix(&bytes).map_or(0, |(head, _)| head.count) as usize;
        match outcome {
            Err(Errno::NOSPC) if count > room && count <= 4096 => room = count,
            Err(errno) => return Err(errno),
            Ok(_) => {
                let list = bytes[size_of::<HotReset>()..].chunks_exact(size_of::<Dependent>());
                let read = |bytes| Dependent::read_from_bytes(bytes).ok();
                return Ok(list.take(count).filter_map(read).collect());
            }
        }
    }
}

/// Resets the function's bus; `groups` are those of all functions on it.
pub fn hot_reset(device: &File, groups: &[BorrowedFd<'_>]) -> rustix::io::Result<()> {
    let count = u32::try_from(groups.len()).map_err(|_| Errno::INVAL)?;
    let mut bytes = HotReset { argsz: 0, flags: 0, count }.as_bytes().to_vec();
    for group in groups {
        bytes.extend_from_slice(&group.as_raw_fd().to_ne_bytes());
    }
    structure(device.as_fd(), request::DEVICE_PCI_HOT_RESET, &mut bytes).map(drop)
}

/// Lets the functions of a container reach `length` bytes of this process' memory at `address` from `iova` on.
///
/// What is there must be memory that nobody has a reference into, such as memory that is shared with other
/// processes or registers: functions write to it. The kernel keeps its pages until it is unmapped, also when
/// this process unmaps them.
pub fn map(
    container: &File,
    iova: u64,
    (address, length): (usize, u64),
    access: Access,
) -> rustix::io::Result<()> {
    let mut flags = 0;
    flags |= if access.contains(Access::READ) { MAP_READ } else { 0 };
    flags |= if access.contains(Access::WRITE) { MAP_WRITE } else { 0 };
    let mut map = DmaMap { argsz: 0, flags, vaddr: address as u64, iova, size: length };
    structure(container.as_fd(), request::IOMMU_MAP_DMA, map.as_mut_bytes()).map(drop)
}

/// Takes the mappings inside of a range away; on return nothing is reached through them. How many bytes they were.
pub fn unmap(container: &File, iova: u64, length: u64) -> rustix::io::Result<u64> {
    let unmap = DmaUnmap { argsz: 0, flags: 0, iova, size: length };
    Ok(ask(container.as_fd(), request::IOMMU_UNMAP_DMA, unmap)?.size)
}

/// Takes all mappings away, whoever made them. An IOMMU of type 1, version 2, unmaps all that lies inside of a range,
/// however long it is; no length is that of all addresses.
pub fn unmap_all(container: &File) -> rustix::io::Result<()> {
    const HALF: u64 = 1 << 63;
    [0, HALF].into_iter().try_for_each(|iova| unmap(container, iova, HALF).map(drop))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranges_are_found_behind_other_capabilities() {
        let mut answer = IommuInfo { argsz: 0, flags: 2, page_sizes: 4096, cap_offset: 24, pad: 0 }
            .as_bytes()
            .to_vec();
        let header = |id: u16, next: u32| {
            let mut bytes = id.to_ne_bytes().to_vec();
            bytes.extend(1u16.to_ne_bytes());
            bytes.extend(next.to_ne_bytes());
            bytes
        };
        answer.extend(header(3, 40));
        answer.extend([9; 8]);
        answer.extend(header(CAP_IOVA_RANGE, 0));
        answer.extend(2u32.to_ne_bytes());
        answer.extend([0; 4]);
        for value in [0, 0xfedf_ffff, 0xfef0_0000u64, (1 << 39) - 1] {
            answer.extend(value.to_ne_bytes());
        }
        assert_eq!(ranges(&answer), [(0, 0xfedf_ffff), (0xfef0_0000, (1 << 39) - 1)]);
        // What is cut off is left out, and a list that goes in a circle ends.
        assert_eq!(ranges(&answer[..answer.len() - 1]), [(0, 0xfedf_ffff)]);
        answer[28..32].copy_from_slice(&24u32.to_ne_bytes());
        assert!(ranges(&answer).is_empty());
        assert!(ranges(&[]).is_empty());
    }
}
