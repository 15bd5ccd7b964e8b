//! vhost-user-blk through the `blkio` crate: the polling client of qemu-storage-daemon.
#![allow(unsafe_code)] // `blkio` reports completions in uninitialised memory

use std::mem::MaybeUninit;
use std::path::Path;
use std::time::{Duration, Instant};

use blkio::{Blkio, Blkioq, Completion, MemoryRegion, ReqFlags};

use crate::BenchError;
use crate::machine::{CLIENT_CPU, pin};
use crate::nvme::ClientLoad;

const BATCH: usize = 64;

fn failed(error: blkio::Error) -> BenchError {
    BenchError::Peer(format!("blkio: {}", error.message()))
}

/// Runs `load` against the vhost-user-blk server at `socket` for about `time`; returns operations
/// per second. The client polls for completions, or with `sleep` is woken for them.
///
/// # Errors
/// When the server refuses or a request fails.
pub fn run(
    socket: &Path,
    load: &ClientLoad,
    size: u64,
    time: Duration,
    sleep: bool,
) -> Result<f64, BenchError> {
    pin(CLIENT_CPU);
    let mut blkio = Blkio::new("virtio-blk-vhost-user").map_err(failed)?;
    blkio.set_str("path", &socket.display().to_string()).map_err(failed)?;
    blkio.connect().map_err(failed)?;
    let mut started = blkio.start().map_err(failed)?;
    let length = usize::from(load.depth) * load.bytes;
    let memory = blkio.alloc_mem_region(length).map_err(failed)?;
    blkio.map_mem_region(&memory).map_err(failed)?;
    let queue = started.queues.first_mut();
    let queue = queue.ok_or_else(|| BenchError::Peer("blkio: no queue".to_owned()))?;
    queue.set_completion_fd_enabled(sleep);
    drive(queue, &memory, load, size, time, usize::from(sleep))
}

fn drive(
    queue: &mut Blkioq,
    memory: &MemoryRegion,
    load: &ClientLoad,
    size: u64,
    time: Duration,
    least: usize,
) -> Result<f64, BenchError> {
    let mut next = load.offsets(size);
    let mut free: Vec<usize> = (0..usize::from(load.depth)).collect();
    let (mut done, mut counted, mut start) = (0u64, None, Instant::now());
    loop {
        while let Some(slot) = free.pop() {
            let buffer = (memory.addr + slot * load.bytes) as *mut u8;
            match load.write {
                true => queue.write(next(), buffer, load.bytes, slot, ReqFlags::empty()),
                false => queue.read(next(), buffer, load.bytes, slot, ReqFlags::empty()),
            }
        }
        while free.is_empty() {
            let mut completions = [const { MaybeUninit::<Completion>::uninit() }; BATCH];
            let count = queue.do_io(&mut completions, least, None, None).map_err(failed)?;
            for completion in &completions[..count] {
                // SAFETY: `do_io` filled the first `count`.
                let completion = unsafe { completion.assume_init_ref() };
                if completion.ret != 0 {
                    return Err(BenchError::Peer(format!("blkio: error {}", completion.ret)));
                }
                free.push(completion.user_data);
            }
        }
        done += free.len() as u64;
        let elapsed = start.elapsed();
        match counted {
            None if elapsed >= time / 10 => (counted, start) = (Some(done), Instant::now()),
            Some(from) if elapsed >= time => {
                return Ok((done - from) as f64 / elapsed.as_secs_f64());
            }
            _ => {}
        }
    }
}
