//! What a lender acknowledged survives its death (invariant I5): it is killed during
//! writes, and everything that was flushed, or written with FUA, or merely completed, is there.

use std::collections::BTreeSet;
use std::io::{BufRead, BufReader};
use std::path::Path;
use std::process::{Child, Command, Stdio};

use rackbus_driver::{Drive, DriveError, DriveOptions};
use rackbus_spec::nvme::IoOpcode;
use tempfile::TempDir;

/// Commands in flight when the lender dies.
const DEPTH: u16 = 8;
const BLOCK: usize = 4096;

fn lend(image: &Path, socket: &Path) -> Child {
    let mut command = Command::new(env!("CARGO_BIN_EXE_rackbus-bench"));
    command.arg("lender").arg("--file").arg(image).arg("--socket").arg(socket);
    let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
    let mut line = String::new();
    BufReader::new(child.stdout.take().unwrap()).read_line(&mut line).unwrap();
    assert_eq!(line.trim(), "ready");
    child
}

/// The block that round `generation` writes at `lba`; before the first there are zeroes.
fn content(lba: u64, generation: u64) -> Vec<u8> {
    let word = if generation == 0 { 0 } else { (lba << 32 | generation) ^ MIX };
    word.to_le_bytes().repeat(BLOCK / 8)
}

const MIX: u64 = 0x5bd1_e995_97f4_a7c1;

/// The rounds that the words of a block are of.
fn written(lba: u64, block: &[u8]) -> BTreeSet<u64> {
    let words = block.as_chunks::<8>().0.iter();
    words.map(|word| u64::from_le_bytes(*word) ^ MIX ^ lba << 32).collect()
}

#[test]
fn acknowledged_writes_survive_the_lender_being_killed() {
    let dir = TempDir::new().unwrap();
    let (image, socket) = (dir.path().join("image"), dir.path().join("drive.sock"));
    let mut acknowledged = [0u64; 64];
    for generation in 1..=5u64 {
        let mut lender = lend(&image, &socket);
        let mut drive = Drive::open(&socket, DriveOptions { depth: DEPTH, data: 1 << 20 }).unwrap();
        for (lba, last) in (0..).zip(&acknowledged) {
            let mut found = vec![0; BLOCK];
            drive.read(lba, &mut found).unwrap();
            // Later writes that were not acknowledged may be there or not.
            assert!(
                (*last..generation).any(|written| content(lba, written) == found),
                "block {lba} in round {generation} holds {:?} instead of {last}",
                written(lba, &found)
            );
        }
        for lba in 0..16 {
            drive.write(lba, &content(lba, generation), lba % 2 == 0).unwrap();
            acknowledged[lba as usize] = generation;
        }
        drive.flush().unwrap();
        kill_under_load(&mut drive, &mut lender, generation, &mut acknowledged);
        lender.wait().unwrap();
        let gone = Drive::open(&socket, DriveOptions::default());
        assert!(matches!(gone, Err(DriveError::Client(_))), "{gone:?}");
    }
}

/// Writes blocks 16 to 63 with several in flight and kills the lender after some.
fn kill_under_load(
    drive: &mut Drive,
    lender: &mut Child,
    generation: u64,
    acknowledged: &mut [u64; 64],
) {
    let buffers: Vec<_> =
        (0..usize::from(DEPTH)).map(|slot| drive.buffer(slot * BLOCK, BLOCK).unwrap()).collect();
    let (queue, device, _) = drive.parts();
    let mut blocks = [0u64; DEPTH as usize];
    let mut free: Vec<usize> = (0..usize::from(DEPTH)).collect();
    let mut next = 16u64;
    let stop = 16 + 8 * generation;
    while next < stop {
        while next < stop
            && let Some(slot) = free.pop()
        {
            queue.data(buffers[slot]).unwrap().copy_from(&content(next, generation));
            let fua = next.is_multiple_of(3);
            let id = queue.submit(IoOpcode::Write, next, 1, buffers[slot], fua).unwrap();
            blocks[usize::from(id)] = next << 8 | slot as u64;
            next += 1;
        }
        queue.ring(device).unwrap();
        while let Some(done) = queue.poll(device).unwrap() {
            assert!(done.status.is_success());
            let entry = blocks[usize::from(done.id)];
            acknowledged[(entry >> 8) as usize] = generation;
            free.push((entry & 0xff) as usize);
        }
        std::hint::spin_loop();
    }
    lender.kill().unwrap();
}
