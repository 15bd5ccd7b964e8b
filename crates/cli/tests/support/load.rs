//! A driver that writes, flushes and verifies without a break, while something happens to the rack.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use rackbus_control::api::Lease;
use rackbus_driver::{Drive, DriveOptions};

use super::{PATIENCE, pattern, socket};

/// Blocks of 4 KiB that a load uses.
const BLOCKS: u64 = 512;

/// Each block that it reads holds what was last acknowledged there.
pub struct Load {
    rounds: Arc<AtomicU64>,
    stop: Arc<AtomicBool>,
    thread: JoinHandle<(Drive, Vec<u64>)>,
}

impl Load {
    pub fn start(lease: &Lease) -> Load {
        let mut drive = Drive::open(socket(lease), DriveOptions::default()).unwrap();
        let (rounds, stop) = (Arc::new(AtomicU64::new(0)), Arc::new(AtomicBool::new(false)));
        let (count, end) = (rounds.clone(), stop.clone());
        let thread = std::thread::spawn(move || {
            // The seed of what each block holds; 0: not written.
            let mut written = vec![0; BLOCKS as usize];
            for round in 1u64.. {
                if end.load(Ordering::Relaxed) {
                    break;
                }
                let block = round * 7 % BLOCKS;
                drive.write(block * 8, &pattern(round, 4096), round % 11 == 0).unwrap();
                written[block as usize] = round;
                let other = round * 13 % BLOCKS;
                verify(&mut drive, &written, other);
                if round % 17 == 0 {
                    drive.flush().unwrap();
                }
                count.store(round, Ordering::Relaxed);
            }
            (drive, written)
        });
        Load { rounds, stop, thread }
    }

    /// Waits until `more` further rounds are done; `logs` tells what became of the rack where they are not.
    pub fn progress(&self, more: u64, logs: impl Fn() -> String) {
        let wanted = self.rounds.load(Ordering::Relaxed) + more;
        let deadline = Instant::now() + PATIENCE;
        while self.rounds.load(Ordering::Relaxed) < wanted {
            assert!(!self.thread.is_finished(), "the driver noticed{}", logs());
            assert!(Instant::now() < deadline, "the driver waits for ever{}", logs());
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    /// Ends it; all blocks hold what was written last.
    pub fn finish(self) -> Drive {
        self.stop.store(true, Ordering::Relaxed);
        let (mut drive, written) = self.thread.join().unwrap();
        (0..BLOCKS).for_each(|block| verify(&mut drive, &written, block));
        drive
    }
}

fn verify(drive: &mut Drive, written: &[u64], block: u64) {
    let mut data = vec![0; 4096];
    drive.read(block * 8, &mut data).unwrap();
    let expected = match written[block as usize] {
        0 => return,
        seed => pattern(seed, 4096),
    };
    assert!(data == expected, "block {block} does not hold what was acknowledged");
}
