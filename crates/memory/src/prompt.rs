//! Threads that somebody waits for, and that do little: they run as soon as they are woken.
#![allow(unsafe_code)] // a system call that no library has

/// `struct sched_attr` of `sched_setattr(2)`, as its first version had it.
#[repr(C)]
struct SchedAttr {
    size: u32,
    policy: u32,
    flags: u64,
    nice: i32,
    priority: u32,
    runtime: u64,
    deadline: u64,
    period: u64,
}

/// How long the thread runs at a time, in nanoseconds: the least that Linux takes.
const SLICE: u64 = 100_000;

/// Asks that this thread gets little time at once, but soon: programs that poll memory may have every processor,
/// and what they wait for comes by this thread. Linux 6.12 and newer; elsewhere nothing changes.
pub fn run_promptly() {
    let attr = SchedAttr {
        size: size_of::<SchedAttr>() as u32,
        policy: 0,
        flags: 0,
        nice: 0,
        priority: 0,
        runtime: SLICE,
        deadline: 0,
        period: 0,
    };
    // SAFETY: the structure is read, for this thread; it is as large as it says.
    unsafe { libc::syscall(libc::SYS_sched_setattr, 0, std::ptr::from_ref(&attr), 0) };
}
