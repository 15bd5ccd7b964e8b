//! Loads and stores through a mapped segment of another host, against `memcpy` on a plain mapping.

use std::hint::black_box;
use std::time::Duration;

use rackbus_attach::{Mapping, Signal};

use super::plain::Plain;
use super::{Bench, size, typical};
use crate::BenchError;

/// What single accesses cost.
const SMALL: [usize; 5] = [4, 8, 64, 256, 512];
/// Bytes that each of the large copies moves.
const LARGE: [usize; 5] = [1 << 10, 4 << 10, 64 << 10, 1 << 20, 16 << 20];
const PAGE: usize = 4096;
/// What is walked through, so that nothing of it is in a cache.
const COLD: usize = 1 << 30;

impl Bench<'_> {
    pub(super) fn pio(&mut self) -> Result<(), BenchError> {
        let time = self.settings.time;
        let largest = LARGE[LARGE.len() - 1];
        let segment = self.hosts.on_alpha(largest)?;
        let plain = Plain::new(largest)?;
        let mut data = vec![3; largest + PAGE];
        // Half a page away from where the segments begin: a load whose address ends as that of a
        // store before it waits for nothing on many processors.
        let skew = (PAGE + PAGE / 2 - data.as_ptr() as usize % PAGE) % PAGE;
        for bytes in SMALL.into_iter().chain(LARGE) {
            let (batch, part) = (batch(bytes), &mut data[skew..skew + bytes]);
            let (write, read) = (format!("write {}", size(bytes)), format!("read {}", size(bytes)));
            self.moved(
                (&write, bytes),
                || writes(&segment.remote, part, time, batch),
                || plain.writes(part, time, batch),
            )?;
            // Two loops read to the same place in turns.
            let place = std::cell::RefCell::new(part);
            self.moved(
                (&read, bytes),
                || reads(&segment.remote, &mut place.borrow_mut(), time, batch),
                || plain.reads(&mut place.borrow_mut(), time, batch),
            )?;
        }
        self.puts()?;
        self.cold()
    }

    /// Writes to an area of another host's, by its handle (CMMC), against a bare copy.
    fn puts(&mut self) -> Result<(), BenchError> {
        let time = self.settings.time;
        let case = format!("put {}", size(PAGE));
        if !self.wanted(&case) {
            return Ok(());
        }
        let area = self.hosts.alpha.export_area(PAGE as u64)?;
        let handle = self.hosts.beta.register_area(area.key())?;
        let plain = Plain::new(PAGE)?;
        let mut data = vec![3; 2 * PAGE + PAGE / 2];
        let skew = (PAGE + PAGE / 2 - data.as_ptr() as usize % PAGE) % PAGE;
        let part = &mut data[skew..skew + PAGE];
        let failed = |error: rackbus_attach::CopyError| BenchError::Peer(error.to_string());
        self.moved(
            (&case, PAGE),
            || {
                typical(time, batch(PAGE), || {
                    handle.write(0, black_box(part), Signal::None).map_err(failed)
                })
            },
            || plain.writes(part, time, batch(PAGE)),
        )
    }

    /// A row of what moving `bytes` at a time costs, or how much it moves.
    fn moved(
        &mut self,
        (case, bytes): (&str, usize),
        mut ours: impl FnMut() -> Result<f64, BenchError>,
        mut bare: impl FnMut() -> Result<f64, BenchError>,
    ) -> Result<(), BenchError> {
        if bytes < LARGE[0] {
            let what = (case, "memcpy", "ns added");
            return self.related(what, || Ok(ours()? * 1e9), || Ok(bare()? * 1e9), |a, b| a - b);
        }
        let gb = bytes as f64 / 1e9;
        self.pairs((case, "memcpy", "GB/s"), || Ok(gb / ours()?), || Ok(gb / bare()?))
    }

    /// Large copies between memory that is in no cache.
    fn cold(&mut self) -> Result<(), BenchError> {
        let time = self.settings.time;
        let cases =
            [4 << 20, 16 << 20].map(|bytes| (format!("write {}, cold", size(bytes)), bytes));
        if !cases.iter().any(|(case, _)| self.wanted(case)) {
            return Ok(());
        }
        let segment = self.hosts.on_alpha(COLD)?;
        let (plain, source) = (Plain::new(COLD)?, Plain::new(COLD)?);
        for (case, bytes) in cases {
            let gb = bytes as f64 / 1e9;
            self.pairs(
                (&case, "memcpy", "GB/s"),
                || Ok(gb / walk(&segment.remote, &source, bytes, time)?),
                || Ok(gb / plain.walk(&source, bytes, time, 1)?),
            )?;
        }
        Ok(())
    }
}

/// Copies between two looks at the clock, which itself costs as much as a small one.
pub fn batch(bytes: usize) -> u64 {
    ((2 << 20) / bytes as u64).clamp(1, 8192)
}

/// A range that a case moves.
fn outside() -> BenchError {
    BenchError::Peer("a case is larger than its segment".to_owned())
}

/// Seconds of writing `data` to the mapping's beginning.
pub fn writes(to: &Mapping, data: &[u8], time: Duration, batch: u64) -> Result<f64, BenchError> {
    let whole = to.whole();
    typical(time, batch, || {
        whole.part(0, black_box(data.len())).ok_or_else(outside)?.copy_from(data);
        Ok(())
    })
}

fn reads(from: &Mapping, out: &mut [u8], time: Duration, batch: u64) -> Result<f64, BenchError> {
    let whole = from.whole();
    typical(time, batch, || {
        whole.part(0, black_box(out.len())).ok_or_else(outside)?.copy_to(out);
        Ok(())
    })
}

/// Seconds of copying `length` bytes from `source`, walking through both.
fn walk(to: &Mapping, source: &Plain, length: usize, time: Duration) -> Result<f64, BenchError> {
    let (to, from) = (to.whole(), source.region().whole());
    let bytes = to.len().min(from.len());
    let mut at = 0;
    typical(time, 1, || {
        let from = from.part(at, black_box(length)).ok_or_else(outside)?;
        to.part(at, length).ok_or_else(outside)?.copy_from_slice(from);
        at = if at + 2 * length > bytes { 0 } else { at + length };
        Ok(())
    })
}
