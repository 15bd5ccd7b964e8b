//! The bound: what two processors could do at best if a drive were nothing but a copy.
//!
//! A 64-byte entry and a doorbell in shared memory, one process that polls the doorbell and copies
//! between a 128 MiB store and the other's buffer, a 16-byte completion that the other one polls.
//! No checks, no protocol.
#![allow(unsafe_code)] // the bound has no bounds checks; both processes are this program

use std::io::{BufRead, BufReader};
use std::os::fd::{AsFd, AsRawFd};
use std::process::{Child, Stdio};
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use rackbus_memory::{Access, Region, SharedMemory};

use crate::BenchError;
use crate::machine::{CLIENT_CPU, RestartCommand, SERVER_CPU, pin};
use crate::nvme::ClientLoad;

/// Bytes of the store.
pub const STORE: usize = 128 << 20;
const RING: usize = 256;
const HEAD: usize = 64 << 10;

#[repr(C, align(64))]
struct Line(AtomicU64);

#[derive(Clone, Copy)]
#[repr(C, align(64))]
struct Entry {
    write: u64,
    offset: u64,
    length: u64,
    buffer: u64,
    rest: [u64; 4],
}

#[repr(C, align(16))]
struct Completion {
    phase: AtomicU32,
    id: u32,
    rest: u64,
}

#[repr(C)]
struct Shared {
    doorbell: Line,
    head: Line,
    entries: [Entry; RING],
    completions: [Completion; RING],
}
const _: () = assert!(size_of::<Shared>() <= HEAD);

/// Where the server finds the shared memory: a descriptor it inherits.
const FD: &str = "RACKBUS_BENCH_RAW_FD";

/// The polling process: serves until it is killed.
///
/// # Errors
/// When it was not started by [`run`].
pub fn serve(null: bool) -> Result<(), BenchError> {
    let fd = std::env::var(FD).map_err(|_| BenchError::Peer(format!("{FD} is not set")))?;
    let file = std::fs::OpenOptions::new()
        .read(true)
        .write(true)
        .open(format!("/proc/self/fd/{fd}"))
        .map_err(BenchError::io("opening the shared memory"))?;
    let length = file.metadata().map_err(BenchError::io("sizing the shared memory"))?.len();
    let region = Region::map(file.as_fd(), 0, length, Access::READ | Access::WRITE)?;
    let store = SharedMemory::create("raw-store", STORE as u64)?;
    store.whole().fill(1);
    pin(SERVER_CPU);
    println!("ready");
    let base = region.whole().as_ptr();
    // SAFETY: `run` made the memory at least `HEAD` bytes long and page aligned.
    unsafe { poll(base.cast::<Shared>(), base.add(HEAD), store.whole().as_ptr(), null) }
}

/// # Safety
/// The pointers lead to a `Shared`, to the client's buffers and to a store of [`STORE`] bytes; the
/// client asks for nothing outside of them.
unsafe fn poll(shared: *mut Shared, buffers: *mut u8, store: *mut u8, null: bool) -> ! {
    let mut head = 0u64;
    loop {
        // SAFETY: as promised; what both sides write are atomics, entries belong to whoever the
        // doorbell says.
        unsafe {
            let mut tail;
            loop {
                tail = (*shared).doorbell.0.load(Ordering::Acquire);
                if tail != head {
                    break;
                }
            }
            while head < tail {
                let slot = head as usize % RING;
                let entry = (&raw const (*shared).entries[slot]).read();
                if !null {
                    let host = buffers.add(entry.buffer as usize);
                    let data = store.add(entry.offset as usize);
                    let (from, to) = if entry.write != 0 { (host, data) } else { (data, host) };
                    std::ptr::copy_nonoverlapping(from, to, entry.length as usize);
                }
                head += 1;
                let completion = &raw mut (*shared).completions[slot];
                (*completion).id = entry.rest[0] as u32;
                (*completion).phase.store(head as u32, Ordering::Release);
            }
        }
    }
}

/// A server process, ended when dropped.
struct Server(Child);

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Runs `load` for about `time`; returns operations per second.
///
/// # Errors
/// When the server process cannot be started.
pub fn run(
    again: &RestartCommand,
    load: &ClientLoad,
    null: bool,
    time: Duration,
) -> Result<f64, BenchError> {
    let depth = usize::from(load.depth);
    let length = HEAD + depth * load.bytes;
    let memory = SharedMemory::create("raw-bound", length as u64)?;
    memory.whole().fill(0);
    let inherited = memory.descriptor().map_err(BenchError::io("sharing memory"))?;
    rustix::io::fcntl_setfd(&inherited, rustix::io::FdFlags::empty())
        .map_err(|errno| BenchError::io("sharing memory")(errno.into()))?;
    let mut command = again.command("raw-server")?;
    command.args(null.then_some("--null"));
    command.env(FD, inherited.as_raw_fd().to_string()).stdout(Stdio::piped());
    let mut server = Server(command.spawn().map_err(BenchError::io("starting the raw server"))?);
    if let Some(out) = server.0.stdout.take() {
        let mut line = String::new();
        BufReader::new(out).read_line(&mut line).map_err(BenchError::io("the raw server"))?;
    }
    pin(CLIENT_CPU);
    let shared = memory.whole().as_ptr().cast::<Shared>();
    // SAFETY: the memory is page aligned, zeroed, and longer than `Shared`; the server touches
    // what `poll` says.
    Ok(unsafe { client(shared, load, time) })
}

/// # Safety
/// `shared` leads to zeroed memory that a server polls.
unsafe fn client(shared: *mut Shared, load: &ClientLoad, time: Duration) -> f64 {
    let depth = u64::from(load.depth);
    let mut next = load.offsets(STORE as u64);
    let (mut sent, mut done) = (0u64, 0u64);
    let warm_up = time / 10;
    let mut start = Instant::now();
    let mut counted = None;
    loop {
        // SAFETY: as promised; the slot at `sent` was completed a ring ago.
        unsafe {
            while sent - done < depth {
                let entry = Entry {
                    write: u64::from(load.write),
                    offset: next(),
                    length: load.bytes as u64,
                    buffer: (sent % depth) * load.bytes as u64,
                    rest: [sent, 0, 0, 0],
                };
                (&raw mut (*shared).entries[sent as usize % RING]).write(entry);
                sent += 1;
                (*shared).doorbell.0.store(sent, Ordering::Release);
            }
            let completion = &raw const (*shared).completions[done as usize % RING];
            done += 1;
            while (*completion).phase.load(Ordering::Acquire) != done as u32 {}
        }
        if done.is_multiple_of(256) || load.bytes > 65536 {
            let elapsed = start.elapsed();
            match counted {
                None if elapsed >= warm_up => {
                    counted = Some(done);
                    start = Instant::now();
                }
                Some(from) if elapsed >= time => {
                    return (done - from) as f64 / elapsed.as_secs_f64();
                }
                _ => {}
            }
        }
    }
}
