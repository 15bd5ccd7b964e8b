//! A borrower that floods its ring, a function that is paused for another process, and one that is isolated.

mod isolated;

use std::os::fd::BorrowedFd;
use std::sync::Arc;
use std::time::Duration;

use super::*;
use crate::device::{BarMap, LentBars};
use crate::plan::WindowRoom;
use crate::room::LentRoom;
use crate::saved::SavedDevice;
use crate::window::{CONSUMER, ENTRIES, PRODUCER};

const EPOCH: u64 = 7;
const WINDOW: u64 = 1 << 20;
const RESET: Duration = Duration::from_millis(20);

/// A device whose resets take their time, or do not end while it hangs; how many it was asked for, and how many until its end
/// began.
struct SlowDevice {
    hangs: Arc<AtomicBool>,
    resets: Arc<AtomicU64>,
    at_end: Arc<AtomicU64>,
    broken: Arc<AtomicBool>,
}

impl WindowDevice for SlowDevice {
    fn name(&self) -> String {
        "slow".to_owned()
    }

    fn cut(&self) -> bool {
        self.at_end.store(self.resets.load(Ordering::Relaxed), Ordering::Relaxed);
        false
    }

    fn set_master(&self, _on: bool) -> Result<(), MetalError> {
        Ok(())
    }

    fn set_device_control(&self, _bits: u16) -> Result<(), MetalError> {
        Ok(())
    }

    fn reset(&self) -> Result<(), MetalError> {
        self.resets.fetch_add(1, Ordering::Relaxed);
        std::thread::sleep(RESET);
        while self.hangs.load(Ordering::Relaxed) {
            std::thread::yield_now();
        }
        Ok(())
    }

    fn trouble(&self) -> Option<&'static str> {
        self.broken.load(Ordering::Relaxed).then_some("it is broken")
    }

    fn alarm(&self) -> Option<BorrowedFd<'_>> {
        None
    }

    fn save(&self) -> std::io::Result<SavedDevice> {
        Err(std::io::ErrorKind::Unsupported.into())
    }
}

struct NoRanges;

impl LentBars for NoRanges {
    fn end_bars(&mut self) -> Result<(), MetalError> {
        Ok(())
    }

    fn lend_bars(&mut self, _bars: Vec<BarMap>) -> Result<(), MetalError> {
        Ok(())
    }
}

impl LentRanges for NoRanges {
    fn ranges(&self) -> Vec<(u64, u64)> {
        Vec::new()
    }
}

/// A lent device whose borrower keeps its ring full of resets, until `stop`.
struct Flooded {
    function: Arc<ControlledFunction>,
    resets: Arc<AtomicU64>,
    at_end: Arc<AtomicU64>,
    broken: Arc<AtomicBool>,
    hangs: Arc<AtomicBool>,
    stop: Arc<AtomicBool>,
    threads: Vec<std::thread::JoinHandle<()>>,
}

fn flooded() -> Flooded {
    let (resets, broken) = (Arc::<AtomicU64>::default(), Arc::<AtomicBool>::default());
    let at_end = Arc::<AtomicU64>::default();
    let hangs = Arc::<AtomicBool>::default();
    let device = SlowDevice {
        hangs: hangs.clone(),
        resets: resets.clone(),
        at_end: at_end.clone(),
        broken: broken.clone(),
    };
    let lent = (Box::new(device) as _, Box::new(NoRanges) as _, ControlArea::new().unwrap());
    let writable = Writable { msix_control: 0, device_control: 0 };
    let lost = Box::new(|_: &str| ());
    let function = ControlledFunction::assemble(lent, writable, (0, EPOCH, WINDOW), lost).unwrap();
    let function = Arc::new(function);
    let stop = Arc::<AtomicBool>::default();
    let (borrower, stopped) = (function.clone(), stop.clone());
    let flood = move || {
        let [_, (_, ring, _)] = borrower.area.parts();
        let ring = ring.whole();
        let mut producer = 0u32;
        while !stopped.load(Ordering::Relaxed) {
            let consumer = ring.load_u32(CONSUMER, Ordering::Acquire).unwrap();
            while producer.wrapping_sub(consumer) < RING_ENTRIES {
                let at = ENTRIES + 16 * (producer % RING_ENTRIES) as usize;
                ring.write_obj(at, &[producer, 2, 0, EPOCH as u32]);
                producer += 1;
            }
            ring.store_u32(PRODUCER, producer, Ordering::Release);
            std::thread::yield_now();
        }
    };
    let serving = function.clone();
    let threads = vec![std::thread::spawn(flood), std::thread::spawn(move || serving.serve())];
    Flooded { function, resets, at_end, broken, hangs, stop, threads }
}

impl Flooded {
    fn until(&self, what: &str, holds: impl Fn() -> bool) {
        let begun = Instant::now();
        while !holds() {
            assert!(begun.elapsed() < Duration::from_secs(20), "{what}");
            std::thread::yield_now();
        }
    }

    fn until_served(&self) {
        self.until("nothing is served", || self.resets.load(Ordering::Relaxed) >= 3);
    }

    /// Stops both threads, and says how often the device was reset.
    fn stop(self) -> u64 {
        self.function.end();
        self.stop.store(true, Ordering::Relaxed);
        self.threads.into_iter().for_each(|thread| thread.join().unwrap());
        self.resets.load(Ordering::Relaxed)
    }
}

#[test]
fn a_borrower_that_keeps_its_ring_full_does_not_hold_off_the_end() {
    let flooded = flooded();
    flooded.until_served();
    flooded.function.end();
    let at_end = flooded.at_end.load(Ordering::Relaxed);
    let after = flooded.resets.load(Ordering::Relaxed);
    // One that begins at this moment, and the end's own.
    assert!(after - at_end <= 2, "{} resets", after - at_end);
    assert_eq!(flooded.stop(), after, "nothing is carried out after the end");
}

#[test]
fn nothing_is_carried_out_while_it_is_paused_and_nothing_is_passed_over() {
    let flooded = flooded();
    flooded.until_served();
    flooded.function.pause(Duration::from_secs(60)).unwrap();
    let before = flooded.resets.load(Ordering::Relaxed);
    std::thread::sleep(3 * RESET);
    assert_eq!(flooded.resets.load(Ordering::Relaxed), before);
    flooded.function.go_on();
    flooded.until("it does not go on", || flooded.resets.load(Ordering::Relaxed) >= before + 2);
    assert_eq!(flooded.function.status().refused, 0);
    flooded.stop();
}

/// Everybody else waits for whoever pauses it.
#[test]
fn a_device_that_hangs_is_not_paused_and_goes_on_when_it_answers() {
    let flooded = flooded();
    flooded.until_served();
    flooded.hangs.store(true, Ordering::Relaxed);
    let paused = flooded.function.pause(3 * RESET);
    assert!(matches!(paused, Err(MetalError::Late(_))), "{paused:?}");
    let before = flooded.resets.load(Ordering::Relaxed);
    flooded.hangs.store(false, Ordering::Relaxed);
    flooded.until("it does not go on", || flooded.resets.load(Ordering::Relaxed) > before + 2);
    flooded.stop();
}

#[test]
fn nothing_is_saved_of_a_device_that_hangs_at_its_end() {
    let flooded = flooded();
    flooded.until_served();
    flooded.function.pause(Duration::from_secs(60)).unwrap();
    let before = flooded.resets.load(Ordering::Relaxed);
    flooded.hangs.store(true, Ordering::Relaxed);
    let function = flooded.function.clone();
    let end = std::thread::spawn(move || function.end());
    flooded.until("it does not end", || flooded.resets.load(Ordering::Relaxed) > before);
    let place = LentRoom::new(WindowRoom::new(1 << 20)).take(&[]).unwrap();
    assert!(flooded.function.save(&place).unwrap().is_none());
    flooded.hangs.store(false, Ordering::Relaxed);
    end.join().unwrap();
    flooded.stop();
}

#[test]
fn trouble_is_seen_while_the_ring_is_kept_full() {
    let flooded = flooded();
    flooded.until_served();
    flooded.broken.store(true, Ordering::Relaxed);
    flooded.until("nobody looks", || flooded.function.status().trouble.is_some());
    flooded.stop();
}
