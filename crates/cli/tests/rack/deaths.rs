//! Processes killed with `kill -9` while a drive is in use: what goes on, what ends, and how soon.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use crate::common::{Rack, socket};
use rackbus_driver::{Drive, Options};
use rackbus_pci::vfio_user::Client;

/// A thread that writes and reads without pause; what it has done, and how it ended.
struct Load {
    done: Arc<AtomicU64>,
    stop: Arc<AtomicBool>,
    thread: std::thread::JoinHandle<Result<(), String>>,
}

impl Load {
    fn start(socket: std::path::PathBuf) -> Load {
        let (done, stop) = (Arc::new(AtomicU64::new(0)), Arc::new(AtomicBool::new(false)));
        let (count, end) = (done.clone(), stop.clone());
        let thread = std::thread::spawn(move || {
            let mut drive = Drive::open(&socket, Options::default()).map_err(|e| e.to_string())?;
            let mut block = vec![0; 4096];
            for round in 0u64.. {
                if end.load(Ordering::Relaxed) {
                    return Ok(());
                }
                let lba = round % 1000 * 8;
                drive.write(lba, &vec![round as u8; 4096], false).map_err(|e| e.to_string())?;
                drive.read(lba, &mut block).map_err(|e| e.to_string())?;
                assert_eq!(block, vec![round as u8; 4096], "round {round}");
                count.store(round + 1, Ordering::Relaxed);
            }
            Ok(())
        });
        Load { done, stop, thread }
    }

    /// Waits until `more` further rounds are done.
    fn progress(&self, more: u64) {
        let wanted = self.done.load(Ordering::Relaxed) + more;
        let deadline = Instant::now() + Duration::from_secs(20);
        while self.done.load(Ordering::Relaxed) < wanted {
            assert!(!self.thread.is_finished(), "the load ended");
            assert!(Instant::now() < deadline, "the load stands still");
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    fn finish(self) -> Result<(), String> {
        self.stop.store(true, Ordering::Relaxed);
        self.thread.join().unwrap()
    }
}

#[test]
fn without_the_control_plane_everything_goes_on() {
    let rack = Rack::up();
    let lease = rack.borrow("alpha/nvme0", "beta");
    let load = Load::start(socket(&lease));
    for _ in 0..3 {
        load.progress(100);
        rack.kill("control");
        load.progress(100);
        assert!(rack.fails(1, &["leases"]).contains("does not answer"));
        // Longer than the lease's time to live: nobody could renew it.
        let begun = Instant::now();
        while begun.elapsed() < Duration::from_millis(1200) {
            load.progress(100);
        }
        rack.start("control");
        let leases = rack.wait("the control plane", |rack| {
            let output = rack.run(&["leases", "--json"]);
            serde_json::from_slice::<serde_json::Value>(&output.stdout)
                .ok()
                .filter(|v| v.is_array())
        });
        assert_eq!((&leases[0]["lease"], &leases[0]["stage"]), (&lease["lease"], &"active".into()));
    }
    load.finish().unwrap();
    // The returned control plane is heard and obeyed.
    rack.wait("the nodes", |rack| {
        let hosts = rack.json(&["status"])["hosts"].clone();
        hosts.as_array()?.iter().all(|host| host["state"] == "up").then_some(())
    });
    rack.ok(&["return", &lease["lease"].to_string()]);
}

#[test]
fn a_borrower_that_dies_is_revoked_and_the_drive_offered_again() {
    let rack = Rack::up();
    let lease = rack.borrow("alpha/nvme0", "beta");
    let load = Load::start(socket(&lease));
    load.progress(100);
    rack.kill("beta");
    assert!(load.thread.join().unwrap().is_err(), "its user lost the drive");
    rack.wait("the lease to expire", |rack| {
        (rack.state_of("alpha/nvme0")? == "offered").then_some(())
    });
    let status = rack.json(&["status"]);
    let reason = status["incidents"][0]["reason"].as_str().unwrap().to_owned();
    assert!(reason.contains("expired"), "{reason}");
    let lease = rack.borrow("alpha/nvme0", "gamma");
    assert_eq!(lease["epoch"], 2);
    let mut drive = Drive::open(&socket(&lease), Options::default()).unwrap();
    let mut block = [0; 512];
    drive.read(0, &mut block).unwrap();
}

#[test]
fn a_lender_that_dies_leaves_all_ones_and_a_reason() {
    let rack = Rack::up();
    let mut times = Vec::new();
    for round in 1..=5u64 {
        let lease = rack.borrow("alpha/nvme0", "beta");
        let client = Client::connect(&socket(&lease), Duration::from_secs(5)).unwrap();
        client.write(7, 4, &6u16.to_le_bytes()).unwrap();
        let mut version = [0; 4];
        client.read(0, 8, &mut version).unwrap();
        assert_eq!(version, 0x0001_0400u32.to_le_bytes());
        rack.kill("alpha");
        let begun = Instant::now();
        while version != [0xff; 4] {
            client.read(0, 8, &mut version).unwrap();
        }
        times.push(begun.elapsed());
        // Configuration space is gone, too; writes go nowhere and nothing hangs.
        client.read(7, 0, &mut version).unwrap();
        assert_eq!(version, [0xff; 4]);
        client.write(0, 0x14, &[0; 4]).unwrap();
        rack.wait("the reason", |rack| {
            let incidents = rack.json(&["status"])["incidents"].clone();
            let reason = incidents[0]["reason"].as_str()?.to_owned();
            (incidents.as_array()?.len() as u64 == round && reason.contains("its lender was lost"))
                .then_some(())
        });
        rack.start("alpha");
        rack.wait("the drive", |rack| (rack.state_of("alpha/nvme0")? == "offered").then_some(()));
    }
    times.sort();
    println!("all ones after {times:?}");
    assert!(times[2] < Duration::from_millis(1), "all ones after {times:?}");
}

/// Flushed data survives the lender: it is on the medium when the flush is acknowledged (I5).
#[test]
fn acknowledged_data_survives_the_lender() {
    let rack = Rack::up();
    for round in 1..=3u8 {
        let lease = rack.borrow("alpha/nvme0", "beta");
        let mut drive = Drive::open(&socket(&lease), Options::default()).unwrap();
        for block in 0..64u64 {
            drive.write(block * 8, &[round; 4096], block % 2 == 0).unwrap();
        }
        drive.flush().unwrap();
        rack.kill("alpha");
        drop(drive);
        rack.start("alpha");
        rack.wait("the drive", |rack| (rack.state_of("alpha/nvme0")? == "offered").then_some(()));
        let lease = rack.borrow("alpha/nvme0", "gamma");
        let mut drive = Drive::open(&socket(&lease), Options::default()).unwrap();
        let mut data = vec![0; 4096];
        for block in 0..64u64 {
            drive.read(block * 8, &mut data).unwrap();
            assert_eq!(data, [round; 4096], "round {round}, block {block}");
        }
        drop(drive);
        rack.ok(&["return", &lease["lease"].to_string()]);
    }
}
