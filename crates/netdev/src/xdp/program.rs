//! The program that hands frames to sockets.

use std::io;
use std::os::fd::{AsRawFd, BorrowedFd, OwnedFd};

use crate::bpf::{Instruction, bpf, instruction, load, made};

/// Commands of bpf(2), which <linux/bpf.h> defines.
const MAP_CREATE: libc::c_int = 0;
const MAP_UPDATE_ELEM: libc::c_int = 2;
const LINK_CREATE: libc::c_int = 28;

/// Kinds of maps, programs and places where programs are attached.
const MAP_TYPE_XSKMAP: u32 = 17;
const PROG_TYPE_XDP: u32 = 6;
const ATTACH_XDP: u32 = 37;

/// What the program answers for a frame of a queue without a socket: it takes its usual way.
const XDP_PASS: i32 = 2;
/// The helper function `bpf_redirect_map`.
const REDIRECT_MAP: i32 = 51;
/// Where the number of the receive queue is in `struct xdp_md`.
const QUEUE: i16 = 16;

/// `return bpf_redirect_map(map, context->rx_queue_index, XDP_PASS)`.
fn instructions(map: libc::c_int) -> [Instruction; 6] {
    [
        // r2 = *(u32 *)(r1 + QUEUE)
        instruction(0x61, 0x12, QUEUE, 0),
        // r1 = the map of this descriptor, in two halves
        instruction(0x18, 0x11, 0, map),
        instruction(0, 0, 0, 0),
        // r3 = XDP_PASS
        instruction(0xb7, 0x03, 0, XDP_PASS),
        instruction(0x85, 0, 0, REDIRECT_MAP),
        instruction(0x95, 0, 0, 0),
    ]
}

/// The attributes of the commands that are used (`union bpf_attr`), each with zeroes behind.
#[repr(C, align(8))]
#[derive(Default)]
struct MapCreate {
    kind: u32,
    key_bytes: u32,
    value_bytes: u32,
    entries: u32,
    rest: [u64; 8],
}

#[repr(C, align(8))]
#[derive(Default)]
struct MapUpdate {
    map: u32,
    padding: u32,
    key: u64,
    value: u64,
    flags: u64,
}

#[repr(C, align(8))]
#[derive(Default)]
struct LinkCreate {
    program: u32,
    interface: u32,
    attach: u32,
    flags: u32,
    rest: [u64; 4],
}

/// The program, its map, and where it is attached.
#[derive(Debug)]
pub struct XdpProgram {
    map: OwnedFd,
    program: OwnedFd,
    link: Option<OwnedFd>,
}

impl XdpProgram {
    /// Loads it, for an interface with so many receive queues.
    pub fn load(queues: u32) -> io::Result<XdpProgram> {
        let create = MapCreate {
            kind: MAP_TYPE_XSKMAP,
            key_bytes: 4,
            value_bytes: 4,
            entries: queues,
            ..MapCreate::default()
        };
        // SAFETY: the attributes are those of the command and name no memory.
        let map = unsafe { made(bpf(MAP_CREATE, &create)) }?;
        let code = instructions(map.as_raw_fd());
        let program = load(PROG_TYPE_XDP, ATTACH_XDP, b"rackbus_uplink\0\0", &code)?;
        Ok(XdpProgram { map, program, link: None })
    }

    /// Frames of a receive queue go to this socket.
    pub fn hand_over(&self, queue: u32, socket: BorrowedFd<'_>) -> io::Result<()> {
        let value = socket.as_raw_fd() as u32;
        let update = MapUpdate {
            map: self.map.as_raw_fd() as u32,
            key: (&raw const queue) as u64,
            value: (&raw const value) as u64,
            ..MapUpdate::default()
        };
        // SAFETY: the kernel reads four bytes of the key and of the value, as the map was made with.
        match unsafe { bpf(MAP_UPDATE_ELEM, &update) } {
            0 => Ok(()),
            _ => Err(io::Error::last_os_error()),
        }
    }

    /// Runs it for each frame of the interface, until this is dropped.
    pub fn attach(&mut self, interface: libc::c_int) -> io::Result<()> {
        let create = LinkCreate {
            program: self.program.as_raw_fd() as u32,
            interface: interface as u32,
            attach: ATTACH_XDP,
            ..LinkCreate::default()
        };
        // SAFETY: the attributes are those of the command and name no memory.
        self.link = Some(unsafe { made(bpf(LINK_CREATE, &create)) }?);
        Ok(())
    }
}
