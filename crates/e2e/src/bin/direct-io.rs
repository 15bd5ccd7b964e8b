#![forbid(unsafe_code)]
//! A program for guests: direct I/O of a drive whose buffers are in a given range of the guest's physical memory.
//!
//! Usage: `direct-io DEVICE FIRST BYTES`, as root. The drive writes what is in one buffer, and reads it into another one;
//! with direct I/O it does so by DMA, from and to the buffers' own pages. Where these are is asked of the kernel before
//! and after, as it may move pages: all must be among the BYTES bytes from the physical address FIRST on.

use std::fs::File;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::process::ExitCode;

use rackbus_e2e::{Result, ensure};
use rustix::fs::OFlags;

const PAGE: usize = 4096;
/// Bytes of each buffer.
const LENGTH: usize = 16 << 20;
/// Bytes of one read or write.
const PART: usize = 1 << 20;

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let [device, first, bytes] = &arguments[..] else { return usage() };
    let (Ok(first), Ok(bytes)) = (first.parse(), bytes.parse()) else { return usage() };
    match run(device, first, bytes) {
        Ok(text) => {
            println!("{text}");
            ExitCode::SUCCESS
        }
        Err(error) => {
            eprintln!("direct-io: {error}");
            ExitCode::FAILURE
        }
    }
}

fn usage() -> ExitCode {
    eprintln!("usage: direct-io DEVICE FIRST BYTES");
    ExitCode::from(2)
}

fn run(device: &str, first: u64, bytes: u64) -> Result<String> {
    let direct = OFlags::DIRECT.bits().cast_signed();
    let drive = File::options().read(true).write(true).custom_flags(direct).open(device)?;
    let mut memory = vec![0; 2 * LENGTH + PAGE];
    let skipped = memory.as_ptr().align_offset(PAGE);
    let (from, to) = memory[skipped..skipped + 2 * LENGTH].split_at_mut(LENGTH);
    // Other bytes in each run, so that what an earlier one left on the drive is not taken for them.
    let seed = std::process::id().wrapping_mul(0x9e37_79b9);
    for (word, place) in (seed..).zip(from.chunks_exact_mut(4)) {
        place.copy_from_slice(&word.wrapping_mul(0x85eb_ca6b).to_le_bytes());
    }
    to.fill(0xee);
    for buffer in [&*from, &*to] {
        within(buffer, first, bytes)?;
    }
    for (at, part) in (0..).step_by(PART).zip(from.chunks_exact(PART)) {
        drive.write_all_at(part, at)?;
    }
    for (at, part) in (0..).step_by(PART).zip(to.chunks_exact_mut(PART)) {
        drive.read_exact_at(part, at)?;
    }
    for buffer in [&*from, &*to] {
        within(buffer, first, bytes)?;
    }
    ensure!(from == to, "other bytes were read than were written");
    Ok(format!("{LENGTH} bytes each way, all pages within {bytes} bytes from {first:#x} on"))
}

/// Whether all pages of the buffer are in that range of physical memory.
fn within(buffer: &[u8], first: u64, bytes: u64) -> Result<()> {
    // See proc_pid_pagemap(5): 8 bytes for each page; bit 63 is set when it is in memory, bits 0 to 54 are its number.
    let map = File::open("/proc/self/pagemap")?;
    let page = buffer.as_ptr().addr() / PAGE;
    let mut entries = vec![0; buffer.len() / PAGE * 8];
    map.read_exact_at(&mut entries, page as u64 * 8)?;
    for entry in entries.chunks_exact(8) {
        let entry = entry.iter().rev().fold(0u64, |sum, byte| sum << 8 | u64::from(*byte));
        let address = (entry & ((1 << 55) - 1)) * PAGE as u64;
        let there = entry >> 63 == 1 && address.checked_sub(first).is_some_and(|at| at < bytes);
        ensure!(there, "a page is at {address:#x}, not within {bytes} bytes from {first:#x} on");
    }
    Ok(())
}
