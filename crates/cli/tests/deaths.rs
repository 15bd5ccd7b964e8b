//! Processes killed with `kill -9` while a drive is in use: what continues, and what ends.

mod support;

use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use rackbus_control::api::{DeviceState, Lease, LeaseStage, Placement};
use rackbus_driver::{Drive, DriveOptions};
use rustix::process::Signal;
use support::{Rack, THREE_HOSTS, open, socket, with_leases_of};

/// The time to live of leases where a test waits for it.
const TTL: Duration = Duration::from_secs(2);

/// A rack with such leases.
fn with_short_leases() -> Rack {
    Rack::up(&with_leases_of("2 s", THREE_HOSTS))
}

/// A thread that writes and reads without pause; what it has done, and how it ended.
struct Load {
    done: Arc<AtomicU64>,
    stop: Arc<AtomicBool>,
    thread: std::thread::JoinHandle<Result<(), String>>,
}

impl Load {
    fn start(socket: PathBuf) -> Load {
        let (done, stop) = (Arc::new(AtomicU64::new(0)), Arc::new(AtomicBool::new(false)));
        let (count, end) = (done.clone(), stop.clone());
        let thread = std::thread::spawn(move || {
            let mut drive =
                Drive::open(&socket, DriveOptions::default()).map_err(|e| e.to_string())?;
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
        let deadline = Instant::now() + Duration::from_secs(60);
        while self.done.load(Ordering::Relaxed) < wanted {
            assert!(!self.thread.is_finished(), "the load ended");
            assert!(Instant::now() < deadline, "the load stalls");
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
    let mut rack = with_short_leases();
    let lease = rack.borrow("alpha/nvme1", "beta");
    let load = Load::start(socket(&lease).to_owned());
    for _ in 0..2 {
        load.progress(100);
        rack.process(None).crash();
        assert!(rack.bad(1, &["leases"]).contains("does not answer"));
        // Twice the lease's time to live: nobody could renew it.
        let begun = Instant::now();
        while begun.elapsed() < TTL * 2 {
            load.progress(100);
        }
        rack.restart(None);
        let known = rack.wait_lease(lease.lease, LeaseStage::Active);
        assert_eq!((known.epoch, &known.borrower), (lease.epoch, &lease.borrower));
        rack.wait_up(&["alpha", "beta", "gamma"]);
    }
    load.progress(100);
    load.finish().unwrap();
    // The returned control plane is heard and obeyed.
    assert!(rack.give_back(&lease).returned);
}

#[test]
fn a_frozen_control_plane_ends_no_lease() {
    let rack = with_short_leases();
    let lease = rack.borrow("alpha/nvme1", "beta");
    let load = Load::start(socket(&lease).to_owned());
    for _ in 0..2 {
        load.progress(100);
        let control = rack.process(None);
        control.signal(Signal::STOP);
        // Twice the lease's time to live: the nodes renewed, and were not heard.
        let begun = Instant::now();
        while begun.elapsed() < TTL * 2 {
            load.progress(100);
        }
        control.signal(Signal::CONT);
        // A whole time to live after it woke, everything that follows from it has been decided.
        let begun = Instant::now();
        while begun.elapsed() < TTL.mul_f64(1.2) {
            load.progress(10);
        }
        let known = rack.block(rack.client().lease(lease.lease)).unwrap();
        assert_eq!(known.stage, LeaseStage::Active, "{known:?}");
    }
    load.finish().unwrap();
    // Awake, it ends the leases of the dead as usual.
    rack.process(Some("beta")).crash();
    let ended = rack.wait_lease(lease.lease, LeaseStage::Ended);
    assert!(ended.reason.unwrap().contains("expired"));
}

#[test]
fn a_borrower_that_dies_is_revoked_and_the_drive_offered_again() {
    let rack = with_short_leases();
    let lease = rack.borrow("alpha/nvme1", "beta");
    let load = Load::start(socket(&lease).to_owned());
    load.progress(100);
    rack.process(Some("beta")).crash();
    assert!(load.thread.join().unwrap().is_err(), "its user lost the drive");
    rack.wait_device("alpha/nvme1", DeviceState::Offered);
    let incident = rack.block(rack.client().status()).unwrap().incidents.remove(0);
    assert!(incident.reason.unwrap().contains("expired"));
    let next = rack.borrow("alpha/nvme1", "gamma");
    assert_eq!(next.epoch, lease.epoch + 1);
    open(&next).read(0, &mut [0; 512]).unwrap();
}

/// Flushed data survives the lender: it is on the medium when the flush is acknowledged (I5).
/// With strict isolation the controller is the borrower's: its driver sees a device that was pulled
/// out anyway, and what was acknowledged as durable is there when the lender is back. The
/// lender's node never had memory of the driver's.
#[test]
fn a_front_at_the_borrower_outlives_its_medium_and_shares_no_memory() {
    let mut rack = Rack::up(THREE_HOSTS);
    let strict = ["borrow", "alpha/nvme1", "--for", "beta", "--isolation", "strict"];
    let lease: Lease = serde_json::from_value(rack.json(&strict)).unwrap();
    assert_eq!(lease.placement, Placement::Borrower);
    let mut drive = open(&lease);
    drive.write(8 * 1000, &[7; 4096], true).unwrap();
    assert!(rack.process(Some("beta")).has_memory("nvme-driver"));
    assert!(!rack.process(Some("alpha")).has_memory("nvme-driver"));
    drop(drive);
    let load = Load::start(socket(&lease).to_owned());
    load.progress(100);
    rack.process(Some("alpha")).crash();
    let failed = load.thread.join().unwrap().unwrap_err();
    assert!(!failed.is_empty());
    rack.restart(Some("alpha"));
    rack.wait_up(&["alpha", "beta", "gamma"]);
    rack.wait_lease(lease.lease, LeaseStage::Ended);
    let lease = rack.borrow("alpha/nvme1", "gamma");
    let mut block = [0; 4096];
    let mut drive = open(&lease);
    drive.read(8 * 1000, &mut block).unwrap();
    assert_eq!(block, [7; 4096]);
    // The front is at the lender now, and so is the memory that it works with.
    assert!(rack.process(Some("alpha")).has_memory("nvme-driver"));
}

#[test]
fn acknowledged_data_survives_the_lender() {
    let mut rack = Rack::up(THREE_HOSTS);
    for round in 1..=3u8 {
        let lease = rack.borrow("alpha/nvme1", "beta");
        let mut drive = open(&lease);
        for block in 0..64u64 {
            drive.write(block * 8, &[round; 4096], block % 2 == 0).unwrap();
        }
        drive.flush().unwrap();
        rack.process(Some("alpha")).crash();
        drop(drive);
        rack.restart(Some("alpha"));
        rack.wait_device("alpha/nvme1", DeviceState::Offered);
        let lease = rack.borrow("alpha/nvme1", "gamma");
        let mut drive = open(&lease);
        let mut data = vec![0; 4096];
        for block in 0..64u64 {
            drive.read(block * 8, &mut data).unwrap();
            assert_eq!(data, [round; 4096], "round {round}, block {block}");
        }
        drop(drive);
        rack.give_back(&lease);
    }
}
