//! Where records lie in a ring of frames, and how they are published and given back.
//!
//! A ring is lines of 64 bytes. A record is as many lines, one behind the other, as it needs, and never goes
//! around the ring's end. Its first word is its *mark*: the record's length, and the place that it was written
//! for. The receiver polls the mark of the next record and nothing else, so a record costs it no other line of
//! the sender's than the record's own. What lies in a ring's lines from before could look like a mark, and part
//! of it was chosen by whoever sent a frame: so before a record is published, the mark behind it is cleared.
//!
//! Records are announced in batches: of the records that were written since the last announcement, the first gets
//! its mark last, so the receiver sees none of them before, and then all. While it keeps up with its sender, the lines
//! that both touch travel between their processors once for a batch, and not once for each record.
//!
//! Places count lines for ever. The sender keeps its own; of the receiver's, the *credit*, it keeps what it saw
//! last, and looks again only when there seems to be no room. The receiver publishes it in large steps, and when
//! it has found the ring empty.

use crate::sync::{AtomicU64, Ordering};

/// The length of no record: the rest of the ring up to its end is left out.
const SKIP: u32 = u32::MAX;

/// Parts of the ring that are given back in one step.
const STEPS: u64 = 8;

/// How far the receiver is, on a line of its own.
#[derive(Debug, Default)]
#[repr(C, align(64))]
pub(crate) struct Credit(AtomicU64);

/// The lines of a ring as both sides see them: the mark of each, by its index.
pub(crate) trait Marks {
    fn mark(&self, line: usize) -> &AtomicU64;
}

/// The other side does not keep to the protocol.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Broken;

/// The mark of a record at a place; never zero.
fn mark(place: u64, length: u32) -> u64 {
    // The lower half of the place: no two that a ring holds at once have the same.
    u64::from(place as u32) << 32 | u64::from(length)
}

/// Where a record goes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct RecordPlace {
    /// What the receiver polls: there the record is announced, if it is not there itself.
    from: u64,
    at: u64,
}

/// How far the sender has written, and how far it knows that the receiver is.
#[derive(Debug)]
pub(crate) struct SenderMarks {
    lines: u64,
    at: u64,
    credit_seen: u64,
    /// The first record that is not announced, and its length.
    held: Option<(RecordPlace, u32)>,
}

impl SenderMarks {
    /// The sender of an empty ring of so many lines: a power of two.
    pub fn new(lines: usize) -> SenderMarks {
        SenderMarks { lines: lines as u64, at: 0, credit_seen: 0, held: None }
    }

    /// Where a record of so many lines goes; `None` while there is no room.
    #[inline]
    pub fn room(&mut self, credit: &Credit, lines: usize) -> Result<Option<RecordPlace>, Broken> {
        let lines = lines as u64;
        let left = self.lines - self.at % self.lines;
        let skipped = if lines > left { left } else { 0 };
        // With the line behind it, whose mark is cleared.
        let end = self.at + skipped + lines + 1;
        if end - self.credit_seen > self.lines {
            let credit = credit.0.load(Ordering::Acquire);
            // It only grows, and never beyond what was sent.
            if credit < self.credit_seen || credit > self.at {
                return Err(Broken);
            }
            self.credit_seen = credit;
            if end - credit > self.lines {
                return Ok(None);
            }
        }
        Ok(Some(RecordPlace { from: self.at, at: self.at + skipped }))
    }

    /// The line that a place is at.
    #[inline]
    pub fn line(&self, place: RecordPlace) -> usize {
        (place.at % self.lines) as usize
    }

    /// Adds a record that was written there to those that the next [announcement](SenderMarks::announce) is of.
    #[inline]
    pub fn add(&mut self, marks: &impl Marks, place: RecordPlace, lines: usize, length: u32) {
        let next = place.at + lines as u64;
        marks.mark((next % self.lines) as usize).store(0, Ordering::Relaxed);
        match self.held {
            None => self.held = Some((place, length)),
            Some(_) => self.mark(marks, place, length),
        }
        self.at = next;
    }

    /// Shows the receiver all records that were added. False when there are none that it has not been shown.
    #[inline]
    pub fn announce(&mut self, marks: &impl Marks) -> bool {
        let Some((place, length)) = self.held.take() else { return false };
        self.mark(marks, place, length);
        true
    }

    #[inline]
    fn mark(&self, marks: &impl Marks, place: RecordPlace, length: u32) {
        let index = |place: u64| (place % self.lines) as usize;
        // The receiver that sees this mark sees the record, the cleared mark behind it, and what was added after it.
        marks.mark(index(place.at)).store(mark(place.at, length), Ordering::Release);
        if place.from != place.at {
            marks.mark(index(place.from)).store(mark(place.from, SKIP), Ordering::Release);
        }
    }

    /// Lines that the receiver has not given back.
    pub fn used(&self, credit: &Credit) -> usize {
        self.at.saturating_sub(credit.0.load(Ordering::Relaxed)).min(self.lines) as usize
    }

    /// Announced records that the receiver has not given back: a few more than it has not taken, for it gives back in
    /// large steps. It can write all of it, so it can make them less, and not more than there are lines.
    pub fn unread(
        &self,
        marks: &impl Marks,
        credit: &Credit,
        lines_of: impl Fn(u32) -> Option<usize>,
    ) -> u64 {
        let mut at = credit.0.load(Ordering::Acquire);
        let mut records = 0;
        if at < self.credit_seen {
            return records;
        }
        while at < self.at {
            let line = (at % self.lines) as usize;
            let left = self.lines - line as u64;
            let found = marks.mark(line).load(Ordering::Acquire);
            let length = Some(found as u32).filter(|_| (found >> 32) as u32 == at as u32);
            let Some(length) = length else { break };
            if length == SKIP {
                at += left;
                continue;
            }
            let Some(lines) = lines_of(length).filter(|lines| *lines as u64 <= left) else { break };
            at += lines as u64;
            records += 1;
        }
        records
    }
}

/// How far the receiver has read, and what it has told the sender of that.
#[derive(Debug)]
pub(crate) struct ReceiverMarks {
    lines: u64,
    at: u64,
    credit: u64,
}

impl ReceiverMarks {
    /// The receiver of an empty ring of so many lines: a power of two.
    pub fn new(lines: usize) -> ReceiverMarks {
        ReceiverMarks { lines: lines as u64, at: 0, credit: 0 }
    }

    /// The line of the next record, and its length; `None` when there is none. `lines_of` says how many lines a
    /// record of a length has, unless there is no such record.
    #[inline]
    pub fn next(
        &mut self,
        marks: &impl Marks,
        lines_of: impl Fn(u32) -> Option<usize>,
    ) -> Result<Option<(usize, u32)>, Broken> {
        for _ in 0..2 {
            let line = (self.at % self.lines) as usize;
            let found = marks.mark(line).load(Ordering::Acquire);
            if found == 0 {
                return Ok(None);
            }
            if (found >> 32) as u32 != self.at as u32 {
                return Err(Broken);
            }
            let left = self.lines - line as u64;
            match found as u32 {
                SKIP => self.at += left,
                length => {
                    let lines = lines_of(length).ok_or(Broken)?;
                    return if lines as u64 <= left {
                        Ok(Some((line, length)))
                    } else {
                        Err(Broken)
                    };
                }
            }
        }
        // Twice to the end with nothing between.
        Err(Broken)
    }

    /// Releases the next record, of so many lines. True when the sender is to be told.
    #[inline]
    pub fn release(&mut self, credit: &Credit, lines: usize) -> bool {
        self.at += lines as u64;
        self.at - self.credit >= self.lines / STEPS && self.settle(credit)
    }

    /// Publishes all that was released. True when there was something to publish.
    #[inline]
    pub fn settle(&mut self, credit: &Credit) -> bool {
        let news = self.at != self.credit;
        if news {
            self.credit = self.at;
            credit.0.store(self.at, Ordering::Release);
        }
        news
    }
}
