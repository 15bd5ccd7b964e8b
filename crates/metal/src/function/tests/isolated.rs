//! A function that is isolated for a user of its borrower's VFIO.

use std::collections::BTreeSet;

use super::*;
use crate::device::not_lendable;
use crate::isolated::IsolatedMapping;
use crate::window::{MAPPING, RESULT};

/// What a device was told.
#[derive(Default)]
struct DeviceRecord {
    isolated: bool,
    mapped: BTreeSet<u64>,
    /// It refuses what it is told next.
    fails: bool,
    /// Its memory is taken away from it at once, as a model's is.
    cuts: bool,
    resets: u32,
    /// When bus mastering was turned off, and when the borrower's window ended.
    stopped: Option<Instant>,
    ended: Option<Instant>,
}

struct IsolatingDevice(Arc<Mutex<DeviceRecord>>);

impl WindowDevice for IsolatingDevice {
    fn name(&self) -> String {
        "isolating".to_owned()
    }

    fn cut(&self) -> bool {
        let mut record = locked(&self.0);
        if record.cuts {
            record.stopped = Some(Instant::now());
        }
        record.cuts
    }

    fn set_master(&self, on: bool) -> Result<(), MetalError> {
        let mut record = locked(&self.0);
        if !record.cuts {
            record.stopped = (!on).then(Instant::now);
        }
        Ok(())
    }

    fn set_device_control(&self, _bits: u16) -> Result<(), MetalError> {
        Ok(())
    }

    fn reset(&self) -> Result<(), MetalError> {
        locked(&self.0).resets += 1;
        Ok(())
    }

    fn most_mappings(&self) -> u32 {
        3
    }

    fn may_isolate(&self) -> Result<(), MappingRefusal> {
        if locked(&self.0).fails { Err(MappingRefusal::Busy) } else { Ok(()) }
    }

    fn isolate(&self, on: bool, bars: &mut dyn LentBars) -> Result<(), MetalError> {
        let mut record = locked(&self.0);
        if record.fails {
            return Err(not_lendable("isolating", "it is broken"));
        }
        bars.end_bars()?;
        assert_ne!(record.isolated, on);
        record.isolated = on;
        record.mapped.clear();
        bars.lend_bars(Vec::new())
    }

    fn map(&self, mapping: &IsolatedMapping) -> Result<(), MappingRefusal> {
        let mut record = locked(&self.0);
        assert!(record.isolated);
        if record.fails {
            return Err(MappingRefusal::Failed);
        }
        assert!(record.mapped.insert(mapping.iova));
        Ok(())
    }

    fn unmap(&self, mapping: &IsolatedMapping) -> Result<(), MetalError> {
        let mut record = locked(&self.0);
        if record.fails {
            return Err(not_lendable("isolating", "it does not end a mapping"));
        }
        assert!(record.mapped.remove(&mapping.iova));
        Ok(())
    }

    fn trouble(&self) -> Option<&'static str> {
        None
    }

    fn alarm(&self) -> Option<BorrowedFd<'_>> {
        None
    }

    fn save(&self) -> std::io::Result<SavedDevice> {
        Err(std::io::ErrorKind::Unsupported.into())
    }
}

/// A borrower that asks by the ring, and the device that is lent to it.
struct Asking {
    function: ControlledFunction,
    device: Arc<Mutex<DeviceRecord>>,
    producer: u32,
}

const ISOLATE: u32 = 4;
const MAP: u32 = 5;
const RELEASE: u32 = 3;

/// What is mapped for a borrower, which notes when that ends.
struct NotedRanges(Arc<Mutex<DeviceRecord>>);

impl LentBars for NotedRanges {
    fn end_bars(&mut self) -> Result<(), MetalError> {
        Ok(())
    }

    fn lend_bars(&mut self, _bars: Vec<BarMap>) -> Result<(), MetalError> {
        Ok(())
    }
}

impl LentRanges for NotedRanges {
    fn ranges(&self) -> Vec<(u64, u64)> {
        Vec::new()
    }
}

impl Drop for NotedRanges {
    fn drop(&mut self) {
        locked(&self.0).ended = Some(Instant::now());
    }
}

impl Asking {
    fn new() -> Asking {
        let device = Arc::<Mutex<DeviceRecord>>::default();
        let lent = (
            Box::new(IsolatingDevice(device.clone())) as _,
            Box::new(NotedRanges(device.clone())) as _,
            ControlArea::new().unwrap(),
        );
        let writable = Writable { msix_control: 0, device_control: 0 };
        let lost = Box::new(|_: &str| ());
        let function = ControlledFunction::assemble(lent, writable, (0, EPOCH, WINDOW), lost);
        Asking { function: function.unwrap(), device, producer: 0 }
    }

    /// What the lender answers; `None` where it takes the function away.
    fn ask(&mut self, kind: u32, value: u32) -> Option<u32> {
        let [_, (_, ring, _)] = self.function.area.parts();
        let ring = ring.whole();
        ring.store_u32(MAPPING + RESULT, u32::MAX, Ordering::Relaxed);
        ring.write_obj(
            ENTRIES + 16 * self.producer as usize,
            &[self.producer, kind, value, EPOCH as u32],
        );
        self.producer += 1;
        ring.store_u32(PRODUCER, self.producer, Ordering::Release);
        match self.function.serve_some() {
            ServeOutcome::Ended => None,
            _ => ring.load_u32(MAPPING + RESULT, Ordering::Acquire),
        }
    }

    fn map(&mut self, on: bool, [iova, address, pages]: [u64; 3]) -> Option<u32> {
        let words = [iova * 4096, address * 4096, pages * 4096, 3];
        let [_, (_, ring, _)] = self.function.area.parts();
        ring.whole().write_obj(MAPPING, &words);
        self.ask(MAP, on.into())
    }

    fn mapped(&self) -> Vec<u64> {
        locked(&self.device).mapped.iter().map(|iova| iova / 4096).collect()
    }
}

#[test]
fn an_isolated_function_reaches_what_is_mapped_and_nothing_else() {
    let mut asking = Asking::new();
    let invalid = Some(MappingRefusal::Invalid.errno());
    assert_eq!(asking.map(true, [0, 0, 1]), invalid, "it is not isolated");
    assert_eq!(asking.map(false, [0, 0, 1]), invalid);
    assert_eq!(asking.ask(ISOLATE, 0), invalid);
    assert_eq!(asking.ask(ISOLATE, 1), Some(0));
    assert_eq!(asking.ask(ISOLATE, 1), invalid, "it is already");
    assert_eq!(asking.map(true, [0, 8, 2]), Some(0));
    assert_eq!(asking.map(true, [1, 0, 1]), Some(MappingRefusal::Taken.errno()));
    assert_eq!(asking.map(true, [2, 255, 2]), Some(MappingRefusal::Beyond.errno()));
    assert_eq!(asking.map(true, [2, 255, 1]), Some(0));
    assert_eq!(asking.map(false, [0, 8, 1]), Some(MappingRefusal::NotMapped.errno()), "a half");
    assert_eq!(asking.map(false, [0, 8, 2]), Some(0));
    assert_eq!(asking.mapped(), [2]);
    // It may be mapped again, and the mapping that the device refuses is none.
    locked(&asking.device).fails = true;
    assert_eq!(asking.map(true, [0, 8, 2]), Some(MappingRefusal::Failed.errno()));
    locked(&asking.device).fails = false;
    assert_eq!(asking.map(true, [0, 8, 2]), Some(0));
    assert_eq!(asking.map(true, [9, 8, 2]), Some(0));
    assert_eq!(asking.map(true, [16, 8, 2]), Some(MappingRefusal::TooMany.errno()));
    assert_eq!(asking.ask(ISOLATE, 0), Some(0));
    assert!(asking.mapped().is_empty() && !locked(&asking.device).isolated);
    assert_eq!(asking.ask(ISOLATE, 1), Some(0));
    assert_eq!(asking.map(true, [0, 8, 2]), Some(0), "nothing is left of before");
}

#[test]
fn what_is_released_is_isolated_no_more() {
    let mut asking = Asking::new();
    assert_eq!(asking.ask(ISOLATE, 1), Some(0));
    assert_eq!(asking.map(true, [0, 8, 2]), Some(0));
    let before = locked(&asking.device).resets;
    asking.ask(RELEASE, 0).unwrap();
    assert!(asking.mapped().is_empty() && !locked(&asking.device).isolated);
    assert_eq!(locked(&asking.device).resets, before, "isolating it resets it");
    assert!(asking.function.is_released());
    asking.ask(RELEASE, 0).unwrap();
    assert_eq!(locked(&asking.device).resets, before + 1);
}

/// A host that has lost a function did not release it: it does so when it borrows it again, in the same epoch and ring.
#[test]
fn what_is_borrowed_again_after_a_loss_begins_as_at_first() {
    let mut asking = Asking::new();
    assert_eq!(asking.ask(ISOLATE, 1), Some(0));
    for place in 0..3 {
        assert_eq!(asking.map(true, [place, 8 * place, 1]), Some(0));
    }
    // Nothing comes of the borrower for a while, and what is mapped stays.
    asking.function.beat(7);
    assert!(matches!(asking.function.serve_some(), ServeOutcome::All));
    assert_eq!(asking.mapped(), [0, 1, 2]);
    asking.ask(RELEASE, 0).unwrap();
    assert!(asking.mapped().is_empty() && !locked(&asking.device).isolated);
    let invalid = Some(MappingRefusal::Invalid.errno());
    assert_eq!(asking.map(true, [0, 0, 1]), invalid, "it reaches the window");
    assert!(!asking.function.is_released(), "it is used again");
    assert_eq!(asking.ask(ISOLATE, 1), Some(0));
    assert_eq!(asking.map(true, [0, 16, 3]), Some(0));
    assert_eq!(asking.mapped(), [0]);
}

/// Its borrower's kernel gives memory to others when it has seen that it is revoked, and then that its area is gone.
#[test]
fn an_isolated_function_is_shown_as_revoked_after_it_was_stopped() {
    for cuts in [false, true] {
        let mut asking = Asking::new();
        locked(&asking.device).cuts = cuts;
        assert_eq!(asking.ask(ISOLATE, 1), Some(0));
        asking.function.end();
        let (stopped, ended) = {
            let record = locked(&asking.device);
            (record.stopped.unwrap(), record.ended.unwrap())
        };
        assert!(ended.duration_since(stopped) >= SHOWN_REVOKED, "cut at once: {cuts}");
        assert!(!asking.function.area.is_ready(EPOCH));
    }
}

#[test]
fn a_function_that_cannot_have_the_window_again_is_shown_as_revoked() {
    let mut asking = Asking::new();
    locked(&asking.device).cuts = true;
    assert_eq!(asking.ask(ISOLATE, 1), Some(0));
    assert_eq!(asking.map(true, [0, 8, 2]), Some(0));
    locked(&asking.device).fails = true;
    assert_eq!(asking.ask(ISOLATE, 0), None);
    assert!(asking.function.status().trouble.is_some());
    asking.function.end();
    let record = locked(&asking.device);
    let shown = record.ended.unwrap().duration_since(record.stopped.unwrap());
    assert!(shown >= SHOWN_REVOKED, "{shown:?}");
}

#[test]
fn an_isolated_function_is_not_passed_on() {
    let mut asking = Asking::new();
    let limit = Duration::from_secs(60);
    assert!(!asking.function.is_isolated());
    assert_eq!(asking.ask(ISOLATE, 1), Some(0));
    assert!(asking.function.is_isolated());
    let refused = asking.function.pause(limit).unwrap_err();
    assert!(matches!(refused, MetalError::Isolated(_)), "{refused}");
    assert_eq!(asking.map(true, [0, 8, 2]), Some(0), "it goes on");
    // While a mapping is being made, nobody waits for it who asks.
    let making = locked(&asking.function.isolated);
    assert!(asking.function.is_isolated());
    drop(making);
    assert_eq!(asking.ask(ISOLATE, 0), Some(0));
    assert!(!asking.function.is_isolated());
    asking.function.pause(limit).unwrap();
}

#[test]
fn a_device_that_cannot_do_it_refuses_or_is_taken_away() {
    let mut asking = Asking::new();
    locked(&asking.device).fails = true;
    assert_eq!(asking.ask(ISOLATE, 1), Some(MappingRefusal::Busy.errno()), "nothing has changed");
    locked(&asking.device).fails = false;
    assert_eq!(asking.ask(ISOLATE, 1), Some(0));
    assert_eq!(asking.map(true, [0, 8, 2]), Some(0));
    // Memory that may be reached still, when it is somebody else's.
    locked(&asking.device).fails = true;
    assert_eq!(asking.map(false, [0, 8, 2]), None);
    assert!(asking.function.status().trouble.is_some());
    let mut asking = Asking::new();
    assert_eq!(asking.ask(ISOLATE, 1), Some(0));
    locked(&asking.device).fails = true;
    assert_eq!(asking.ask(ISOLATE, 0), None);
}
