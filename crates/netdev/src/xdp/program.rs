//! The program that hands frames to sockets, by the system call bpf(2): no compiler and no library is needed for five
//! instructions.

use std::io;
use std::mem::size_of;
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd};

/// Commands of bpf(2), which <linux/bpf.h> defines.
const MAP_CREATE: libc::c_int = 0;
const MAP_UPDATE_ELEM: libc::c_int = 2;
const PROG_LOAD: libc::c_int = 5;
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

/// An instruction (`struct bpf_insn`).
#[repr(C)]
#[derive(Clone, Copy)]
struct Instruction {
    code: u8,
    /// The source register in the upper half, the destination in the lower one.
    registers: u8,
    offset: i16,
    value: i32,
}

const fn instruction(code: u8, registers: u8, offset: i16, value: i32) -> Instruction {
    Instruction { code, registers, offset, value }
}

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
struct ProgramLoad {
    kind: u32,
    count: u32,
    instructions: u64,
    license: u64,
    log_level: u32,
    log_bytes: u32,
    log: u64,
    kernel_version: u32,
    flags: u32,
    name: [u8; 16],
    interface: u32,
    attach: u32,
    rest: [u64; 8],
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
        let load = ProgramLoad {
            kind: PROG_TYPE_XDP,
            count: code.len() as u32,
            instructions: code.as_ptr() as u64,
            license: c"MIT".as_ptr() as u64,
            name: *b"rackbus_uplink\0\0",
            attach: ATTACH_XDP,
            ..ProgramLoad::default()
        };
        // SAFETY: the kernel reads instructions and license, which are there as long as the call lasts.
        let program = unsafe { made(bpf(PROG_LOAD, &load)) }?;
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

/// Makes the system call `bpf` (bpf(2)).
///
/// # Safety
/// The attributes are those of the command, and what addresses in them lead to is as the command says.
unsafe fn bpf<T>(command: libc::c_int, attributes: &T) -> libc::c_long {
    // SAFETY: the attributes are readable for their length; the rest says the caller.
    unsafe { libc::syscall(libc::SYS_bpf, command, std::ptr::from_ref(attributes), size_of::<T>()) }
}

/// A descriptor that a call made.
///
/// # Safety
/// It is the outcome of a call that makes one, and nobody else has it.
unsafe fn made(outcome: libc::c_long) -> io::Result<OwnedFd> {
    match libc::c_int::try_from(outcome) {
        // SAFETY: the descriptor was made just now, says the caller.
        Ok(fd) if fd >= 0 => Ok(unsafe { OwnedFd::from_raw_fd(fd) }),
        _ => Err(io::Error::last_os_error()),
    }
}
