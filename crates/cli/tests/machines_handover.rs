//! Nodes on machines of their own, restarted in place while a drive is borrowed between them: its user gets no error, and
//! finds what was acknowledged.

mod support;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use rackbus_control::api::Lease;
use rackbus_driver::Drive;
use serde_json::Value;
use support::machines::{Machine, Machines};
use support::{PATIENCE, open, pattern};

/// Nothing is lost for as long as `hold`, and a lease does not end while a node goes on.
const RACK: &str = r#"
name = "lab"

[hosts.alpha.devices.nvme0]
kind = "nvme"
size = "16 MiB"
backing = "file"

[hosts.alpha.devices.nvme1]
kind = "nvme"
size = "16 MiB"
backing = "memory"

[hosts.beta]
"#;

/// Blocks of 4 KiB that a load uses.
const BLOCKS: u64 = 256;

/// A driver that writes, flushes and verifies without a break.
struct Load {
    rounds: Arc<AtomicU64>,
    stop: Arc<AtomicBool>,
    thread: JoinHandle<(Drive, Vec<u64>)>,
}

fn verify(drive: &mut Drive, written: &[u64], block: u64) {
    let mut data = vec![0; 4096];
    drive.read(block * 8, &mut data).unwrap();
    let seed = written[block as usize];
    let holds = seed == 0 || data == pattern(seed, 4096);
    assert!(holds, "block {block} does not hold what was acknowledged");
}

impl Load {
    fn start(lease: &Lease) -> Load {
        let mut drive = open(lease);
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
                verify(&mut drive, &written, round * 13 % BLOCKS);
                if round % 17 == 0 {
                    drive.flush().unwrap();
                }
                count.store(round, Ordering::Relaxed);
            }
            (drive, written)
        });
        Load { rounds, stop, thread }
    }

    /// Waits until `more` further rounds are done.
    fn progress(&self, more: u64, machines: &[&Machine]) {
        let wanted = self.rounds.load(Ordering::Relaxed) + more;
        let deadline = Instant::now() + PATIENCE;
        let logs = || machines.iter().map(|it| it.log()).collect::<Vec<_>>().join("\n---\n");
        while self.rounds.load(Ordering::Relaxed) < wanted {
            assert!(!self.thread.is_finished(), "the driver noticed: {}", logs());
            assert!(Instant::now() < deadline, "the driver waits for ever: {}", logs());
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    /// Ends it; all blocks hold what was written last.
    fn finish(self) -> Drive {
        self.stop.store(true, Ordering::Relaxed);
        let (mut drive, written) = self.thread.join().unwrap();
        (0..BLOCKS).for_each(|block| verify(&mut drive, &written, block));
        drive
    }
}

/// Restarts the node of a machine; its row.
fn restart(machine: &mut Machine, host: &str) -> Value {
    let id = machine.process().id();
    let rows = machine.json(&["restart", host]);
    assert_eq!(machine.process().id(), id);
    assert!(machine.process().try_wait().unwrap().is_none(), "it has ended: {}", machine.log());
    rows[0].clone()
}

#[test]
fn a_driver_notices_nothing_when_lender_and_borrower_are_restarted() {
    let rack = Machines::start(RACK);
    let [mut alpha, mut beta] = ["alpha", "beta"].map(|host| rack.joined(host));
    for drive in ["alpha/nvme0", "alpha/nvme1"] {
        let lease = beta.borrow(drive, "beta");
        let load = Load::start(&lease);
        load.progress(50, &[&alpha, &beta]);
        for _ in 0..5 {
            let row = restart(&mut beta, "beta");
            assert_eq!(row["in_use"], 1, "{row}");
            load.progress(20, &[&alpha, &beta]);
            let row = restart(&mut alpha, "alpha");
            assert_eq!(row["in_use"], 1, "{row}");
            load.progress(20, &[&alpha, &beta]);
        }
        drop(load.finish());
        // The next user finds a drive, and the lease is the same.
        open(&lease).read(0, &mut [0; 512]).unwrap();
        beta.json(&["return", &lease.lease.to_string()]);
        rack.wait(|rack| rack.function(drive)["state"] == "offered");
    }
}
