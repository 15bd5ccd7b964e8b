//! TAP devices with several queues, whose frames come with what is left to do to
//! them (`IFF_VNET_HDR`), so that one large segment is one frame. A program chooses the queue of each frame (`steering`),
//! so that those of a flow stay in order.
//!
//! Source of the numbers: Linux, `include/uapi/linux/if_tun.h`.
#![allow(unsafe_code)] // system calls that no library has

mod steering;

use std::io;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};

use rustix::fs::{Mode, OFlags};
use rustix::ioctl::{IntegerSetter, Setter, ioctl, opcode};

/// Where TAP devices are made.
const DEVICE: &str = "/dev/net/tun";

const IFF_TAP: u16 = 0x0002;
const IFF_MULTI_QUEUE: u16 = 0x0100;
const IFF_NO_PI: u16 = 0x1000;
const IFF_VNET_HDR: u16 = 0x4000;

/// What may be left to us: checksums, and segmentation of TCP over IPv4 and IPv6.
const OFFLOADS: u32 = 0x01 | 0x02 | 0x04 | 0x08;
/// And of UDP, from Linux 6.2 on.
const UDP_OFFLOADS: u32 = 0x20 | 0x40;

const NAME_BYTES: usize = 16;

/// `struct ifreq`, as far as `TUNSETIFF` reads it.
#[repr(C)]
struct Request {
    name: [u8; NAME_BYTES],
    flags: u16,
    rest: [u8; 22],
}

/// Opens the queues of an interface, which is made where there is none of that name, in the network namespace of
/// the calling thread. It is there for as long as one of them is open. Those that are several are to be
/// [steered](steer).
///
/// # Errors
/// What the system says.
pub fn open(name: &str, queues: u16) -> io::Result<Vec<OwnedFd>> {
    (0..queues).map(|_| open_queue(name)).collect()
}

/// Has the queue of each frame chosen by its flow, for the interface that has this one. Otherwise the kernel moves flows
/// from one queue to another, and their frames come out of order.
///
/// # Errors
/// What the system says: `PermissionDenied` without the right to load a program.
pub fn steer(queue: &OwnedFd) -> io::Result<()> {
    let program = steering::program()?;
    let number = program.as_raw_fd();
    // SAFETY: the request reads a descriptor's number; the interface keeps what that leads to.
    let set = unsafe { Setter::<{ opcode::read::<i32>(b'T', 224) }, i32>::new(number) };
    // SAFETY: as above.
    Ok(unsafe { ioctl(queue.as_fd(), set) }?)
}

fn open_queue(name: &str) -> io::Result<OwnedFd> {
    let flags = OFlags::RDWR | OFlags::NONBLOCK | OFlags::CLOEXEC;
    let named = |cause: io::Error| io::Error::new(cause.kind(), format!("{DEVICE}: {cause}"));
    let queue =
        rustix::fs::open(DEVICE, flags, Mode::empty()).map_err(|cause| named(cause.into()))?;
    let mut request = Request { name: [0; NAME_BYTES], flags: 0, rest: [0; 22] };
    request.flags = IFF_TAP | IFF_NO_PI | IFF_VNET_HDR | IFF_MULTI_QUEUE;
    // The last byte stays zero.
    let bytes = name.as_bytes();
    let length = bytes.len().min(NAME_BYTES - 1);
    request.name[..length].copy_from_slice(&bytes[..length]);
    // SAFETY: the request takes a `struct ifreq`, and copies it.
    let set = unsafe { Setter::<{ opcode::write::<i32>(b'T', 202) }, Request>::new(request) };
    // SAFETY: as above.
    unsafe { ioctl(queue.as_fd(), set) }?;
    if offload(&queue, OFFLOADS | UDP_OFFLOADS).is_err() {
        offload(&queue, OFFLOADS)?;
    }
    Ok(queue)
}

/// Tells the interface what its reader takes, bits `TUN_F_*` (`TUNSETOFFLOAD`).
fn offload(queue: &OwnedFd, offloads: u32) -> io::Result<()> {
    let number = offloads as usize;
    // SAFETY: the request takes a number.
    let set = unsafe { IntegerSetter::<{ opcode::write::<u32>(b'T', 208) }>::new_usize(number) };
    // SAFETY: as above.
    Ok(unsafe { ioctl(queue.as_fd(), set) }?)
}

#[cfg(test)]
mod tests;
