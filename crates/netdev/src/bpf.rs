//! Programs of the kernel's virtual machine, by the system call bpf(2): no compiler and no library is needed for a few
//! instructions.
//!
//! Sources: Linux, `include/uapi/linux/bpf.h`; RFC 9669, the instruction set.
#![allow(unsafe_code)] // a system call that no library has

use std::io;
use std::mem::size_of;
use std::os::fd::{FromRawFd, OwnedFd};

const PROG_LOAD: libc::c_int = 5;

/// An instruction (`struct bpf_insn`).
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Instruction {
    code: u8,
    /// The source register in the upper half, the destination in the lower one.
    registers: u8,
    offset: i16,
    value: i32,
}

pub(crate) const fn instruction(code: u8, registers: u8, offset: i16, value: i32) -> Instruction {
    Instruction { code, registers, offset, value }
}

/// The attributes of `PROG_LOAD` (`union bpf_attr`), with zeroes behind.
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

/// Loads a program of a kind (`BPF_PROG_TYPE_*`), which is attached where `attach` says (`BPF_*`, 0 where its kind says
/// it). The name ends with zeroes.
///
/// # Errors
/// The system's: `PermissionDenied` without the right to, or a program that the kernel finds unsafe.
pub(crate) fn load(
    kind: u32,
    attach: u32,
    name: &[u8; 16],
    code: &[Instruction],
) -> io::Result<OwnedFd> {
    let load = ProgramLoad {
        kind,
        count: code.len() as u32,
        instructions: code.as_ptr() as u64,
        license: c"MIT".as_ptr() as u64,
        name: *name,
        attach,
        ..ProgramLoad::default()
    };
    // SAFETY: the kernel reads instructions and license, which are there as long as the call lasts.
    unsafe { made(bpf(PROG_LOAD, &load)) }
}

/// Makes the system call `bpf` (bpf(2)).
///
/// # Safety
/// The attributes are those of the command, and what addresses in them lead to is as the command says.
pub(crate) unsafe fn bpf<T>(command: libc::c_int, attributes: &T) -> libc::c_long {
    // SAFETY: the attributes are readable for their length; the rest says the caller.
    unsafe { libc::syscall(libc::SYS_bpf, command, std::ptr::from_ref(attributes), size_of::<T>()) }
}

/// A descriptor that a call made.
///
/// # Safety
/// It is the outcome of a call that makes one, and nobody else has it.
pub(crate) unsafe fn made(outcome: libc::c_long) -> io::Result<OwnedFd> {
    match libc::c_int::try_from(outcome) {
        // SAFETY: the descriptor was made just now, says the caller.
        Ok(fd) if fd >= 0 => Ok(unsafe { OwnedFd::from_raw_fd(fd) }),
        _ => Err(io::Error::last_os_error()),
    }
}
