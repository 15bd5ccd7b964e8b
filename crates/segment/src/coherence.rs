//! Memory that two machines keep the same by messages: what of it was stored to here, what goes to the other
//! side and when, and what of the other side's stores takes effect here.
//!
//! A connection between machines has memory at both ends: the segment itself, its *home*, and a *replica* at the
//! connector. Each end has a [`ConnectionWindow`], which knows by a *shadow* what the other end has, or will have when it
//! has applied what is under way. What differs from it was stored here since; only those bytes are sent.
//!
//! *Order.* What is compared is a snapshot: memory as it was at one moment, or as it would have been had some stores
//! come later, never with a store but without one that came before it in its program. All that differs in a snapshot
//! is one *batch*, and a batch takes effect as a whole. The next snapshot is taken when the last batch has taken
//! effect. So no store takes effect before those that came before it.
//!
//! *Two sides that store to the same bytes.* The home decides: a replica's stores take effect there in the order of
//! their arrival, after what was stored there before. A replica whose batch is under way keeps its own bytes
//! against what the home says meanwhile, because the home says it of a time before that batch: it will have the
//! replica's bytes, as the replica has. Bytes that one side did not store to are the other's, also in one word.
//!
//! *Copies.* Who copies many bytes to a place knows that he does. Such a range is told without being compared, in the batch
//! of a snapshot that is taken behind it: so what was stored before the copy is there before any of its bytes. Its own
//! bytes have no order among each other, as those of a DMA engine: a peer need not keep anybody from them while they take
//! effect, and what follows of a long copy is a batch without a snapshot. Such batches do not wait for each other
//! ([`MOST_UNDER_WAY`]): they take effect in their order, and the next snapshot is taken when all of them have.
//!
//! *Bounds.* One batch with stores is under way each way, and has each byte once, in rising order, and one range that was
//! copied; behind it are some that have one such range and no stores. So a peer can make this side hold as much as that many
//! times the segment's size of it, and no more.

mod shadow;
mod stores;
#[cfg(test)]
mod tests;

use std::borrow::Cow;
use std::collections::VecDeque;
use std::ops::Range;

use shadow::{Shadow, differences};
pub use stores::{Batch, BatchPart, CopiedPart, Stores};

/// Bytes of the pieces that memory is compared in.
pub const PAGE: usize = 4096;

/// Batches that are under way at a time each way, at most: behind the first, those that go on with a copy.
pub const MOST_UNDER_WAY: usize = 4;

/// Which end of a connection it is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ConnectionSide {
    /// The segment's own memory.
    Home,
    /// The memory that stands for it at the connector.
    Replica,
}

/// What a peer sent that makes no sense. Its conversation ends.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum Violation {
    /// A batch that is not the next one, or an answer to one that is not under way.
    #[error("batch {0} is not the one that is due")]
    Number(u64),
    /// Stores outside of the memory, that overlap, or that go back.
    #[error("stores that are not inside of the memory, one after the other")]
    Place,
    /// Another number of bytes than the stores have.
    #[error("stores with other bytes than theirs")]
    Length,
    /// Stores by somebody who may only load.
    #[error("stores to memory that may only be loaded from")]
    ReadOnly,
}

/// One end of a connection's memory. See the module's documentation.
#[derive(Debug)]
pub struct ConnectionWindow {
    side: ConnectionSide,
    size: u64,
    /// Whether the replica may be stored to.
    write: bool,
    shadow: Shadow,
    /// Number of the last batch that was sent.
    sent: u64,
    /// Of those that have not taken effect, the number, and where the stores are.
    under_way: VecDeque<(u64, Vec<(u64, u32)>)>,
    /// Number of the last batch that came, all of it.
    heard: u64,
    /// What has come of the next one.
    arriving: Arrived,
    /// What has come, all of each batch, and has not taken effect: by the numbers.
    staged: VecDeque<(u64, Arrived)>,
}

/// What came of a batch.
#[derive(Debug, Default)]
struct Arrived {
    stores: Stores,
    copied: Stores,
}

impl ConnectionWindow {
    /// Of memory of `size` bytes, all zeroes at the replica; `write` says whether that may be stored to.
    pub fn new(side: ConnectionSide, size: u64, write: bool) -> ConnectionWindow {
        ConnectionWindow {
            side,
            size,
            write,
            shadow: Shadow::default(),
            sent: 0,
            under_way: VecDeque::new(),
            heard: 0,
            arriving: Arrived::default(),
            staged: VecDeque::new(),
        }
    }

    /// Size of the memory in bytes.
    pub fn size(&self) -> u64 {
        self.size
    }

    /// Whether what is stored here goes to the other side.
    pub fn tells(&self) -> bool {
        self.side == ConnectionSide::Home || self.write
    }

    /// Whether a batch is under way: the next snapshot waits for it.
    pub fn is_waiting(&self) -> bool {
        !self.under_way.is_empty()
    }

    /// Whether a batch that was sent has taken effect at the other side.
    pub fn has_applied(&self, batch: u64) -> bool {
        self.under_way.front().is_none_or(|(oldest, _)| *oldest > batch)
    }

    /// Number of the last batch that was sent, and of the last one that came.
    pub fn numbers(&self) -> (u64, u64) {
        (self.sent, self.heard)
    }

    /// What the other side has of a page, or will have: whole pages, beyond the end of the memory zeroes.
    pub fn known(&self, page: u64) -> &[u8; PAGE] {
        self.shadow.page(page)
    }

    /// Each of `pages`, in order, with what is [known](ConnectionWindow::known) of it: sooner than one by one.
    pub fn each_known(&self, pages: Range<u64>) -> impl Iterator<Item = (u64, &[u8; PAGE])> {
        self.shadow.each(pages)
    }

    /// The pages among `pages` of which the other side has something else than zeroes, or will have.
    pub fn known_pages(&self, pages: Range<u64>) -> impl Iterator<Item = u64> {
        self.shadow.pages(pages)
    }

    /// Takes a snapshot of the pages that differ (`pages`, by their numbers, in rising order), of which the last
    /// one may be shorter, as a batch to send: also an empty one. `None` while one is under way, or when nothing
    /// is told.
    pub fn collect<'a>(
        &mut self,
        pages: impl IntoIterator<Item = (u64, &'a [u8])>,
    ) -> Option<Batch> {
        self.collect_with(pages, (0, Vec::new()))
    }

    /// The same behind a copy of bytes to an offset, which are inside of the memory, and at most 2^32 - 1: they are
    /// told whether they differ or not. What `pages` have in their place is not looked at.
    pub fn collect_with<'a>(
        &mut self,
        pages: impl IntoIterator<Item = (u64, &'a [u8])>,
        (offset, bytes): (u64, Vec<u8>),
    ) -> Option<Batch> {
        if self.is_waiting() || !self.tells() {
            return None;
        }
        let copied = Stores::of(offset, bytes);
        let mut stores = Stores::default();
        for (page, bytes) in pages {
            let before = self.shadow.page(page);
            differences(before, bytes, |at, run| {
                let at = page * PAGE as u64 + at as u64;
                outside(&copied.places, (at, run), |offset, bytes| stores.push(offset, bytes));
            });
        }
        Some(self.sent_batch(stores, copied))
    }

    /// A batch that goes on with a copy, as [`collect_with`](ConnectionWindow::collect_with) makes it without pages, behind
    /// those that are under way: at most [`MOST_UNDER_WAY`] together.
    pub fn go_on_with(&mut self, (offset, bytes): (u64, Vec<u8>)) -> Option<Batch> {
        let has_room = self.under_way.len() < MOST_UNDER_WAY && self.tells();
        has_room.then(|| self.sent_batch(Stores::default(), Stores::of(offset, bytes)))
    }

    fn sent_batch(&mut self, stores: Stores, copied: Stores) -> Batch {
        for (offset, bytes) in stores.iter().chain(copied.iter()) {
            self.shadow.set(offset, bytes);
        }
        self.sent += 1;
        let mut places: Vec<(u64, u32)> =
            stores.places.iter().chain(&copied.places).copied().collect();
        places.sort_unstable();
        self.under_way.push_back((self.sent, places));
        Batch { number: self.sent, stores, copied }
    }

    /// A part of a batch has come; whether it was the last one, so that the batch can
    /// [take effect](ConnectionWindow::take_effect).
    ///
    /// # Errors
    /// [`Violation`].
    pub fn hear(
        &mut self,
        batch: u64,
        last: bool,
        places: &[(u64, u32)],
        data: &[u8],
    ) -> Result<bool, Violation> {
        self.is_due(batch)?;
        if !self.staged.is_empty() {
            // Only copies go on behind what has not taken effect.
            return Err(Violation::Number(batch));
        }
        if !self.arriving.copied.is_empty() {
            // What was copied comes last.
            return Err(Violation::Place);
        }
        let mut rest = data;
        for (offset, length) in places {
            let after = self.arriving.stores.places.last();
            let after = after.map_or(0, |(offset, length)| offset + u64::from(*length));
            let end = offset.checked_add(u64::from(*length));
            if *length == 0 || *offset < after || end.is_none_or(|end| end > self.size) {
                return Err(Violation::Place);
            }
            let (bytes, later) =
                rest.split_at_checked(*length as usize).ok_or(Violation::Length)?;
            self.arriving.stores.push(*offset, bytes);
            rest = later;
        }
        if !rest.is_empty() {
            return Err(Violation::Length);
        }
        Ok(self.came(batch, last))
    }

    /// The same of what was copied: bytes that follow those of the part before.
    ///
    /// # Errors
    /// [`Violation`].
    pub fn hear_copied<'a>(
        &mut self,
        batch: u64,
        last: bool,
        offset: u64,
        data: impl Into<Cow<'a, [u8]>>,
    ) -> Result<bool, Violation> {
        let data = data.into();
        self.is_due(batch)?;
        let copied = &self.arriving.copied;
        let next = copied.places.first().map(|(at, count)| at + u64::from(*count));
        let end = offset.checked_add(data.len() as u64);
        let length = u32::try_from(copied.data.len() + data.len());
        if data.is_empty()
            || length.is_err()
            || next.is_some_and(|next| next != offset)
            || end.is_none_or(|end| end > self.size)
            || is_in_any(&self.arriving.stores.places, offset..offset + data.len() as u64)
        {
            return Err(Violation::Place);
        }
        match data {
            // All of a long copy at once: it is not copied again.
            Cow::Owned(data) if copied.is_empty() => {
                self.arriving.copied = Stores::of(offset, data);
            }
            data => self.arriving.copied.push(offset, &data),
        }
        Ok(self.came(batch, last))
    }

    /// Whether parts of this batch may come now.
    fn is_due(&self, batch: u64) -> Result<(), Violation> {
        if batch != self.heard + 1 || self.staged.len() == MOST_UNDER_WAY {
            return Err(Violation::Number(batch));
        }
        match self.side == ConnectionSide::Home && !self.write {
            true => Err(Violation::ReadOnly),
            false => Ok(()),
        }
    }

    /// A part has come: the last one of its batch, perhaps, which it says.
    fn came(&mut self, batch: u64, last: bool) -> bool {
        if last {
            self.heard = batch;
            self.staged.push_back((batch, std::mem::take(&mut self.arriving)));
        }
        last
    }

    /// The range that nobody is to see in part when what came takes effect, which is without what was copied: its first byte,
    /// and how many bytes.
    pub fn staged_range(&self) -> Option<(u64, u64)> {
        // Those behind the first have only copies.
        let places = &self.staged.front()?.1.stores.places;
        let (first, last) = (places.first()?, places.last()?);
        Some((first.0, last.0 + u64::from(last.1) - first.0))
    }

    /// Whether something that was copied takes effect with what came.
    pub fn has_copied(&self) -> bool {
        self.staged.iter().any(|(_, staged)| !staged.copied.is_empty())
    }

    /// The next batch that came takes effect now: its number, and what is to be stored here, as a whole and before the next
    /// snapshot, before the other side is told that it took effect.
    pub fn take_effect(&mut self) -> Option<(u64, Stores)> {
        let (batch, Arrived { stores, copied }) = self.staged.pop_front()?;
        let stores = self.without_own(stores).with(self.without_own(copied));
        for (offset, bytes) in stores.iter() {
            self.shadow.set(offset, bytes);
        }
        Some((batch, stores))
    }

    /// The other side says that a batch took effect there.
    ///
    /// # Errors
    /// [`Violation::Number`] when it is not the oldest that is under way.
    pub fn applied(&mut self, batch: u64) -> Result<(), Violation> {
        if self.under_way.front().is_none_or(|(oldest, _)| *oldest != batch) {
            return Err(Violation::Number(batch));
        }
        // What came before this answer is from before the batch, whenever it takes effect.
        for (number, Arrived { stores, copied }) in std::mem::take(&mut self.staged) {
            let (stores, copied) = (self.without_own(stores), self.without_own(copied));
            self.staged.push_back((number, Arrived { stores, copied }));
        }
        self.under_way.pop_front();
        Ok(())
    }

    /// At a replica: without the bytes that are under way from here.
    fn without_own(&self, stores: Stores) -> Stores {
        if self.side == ConnectionSide::Home {
            return stores;
        }
        let places = self.under_way.iter().map(|(_, places)| places);
        places.filter(|own| !own.is_empty()).fold(stores, |stores, own| {
            let mut others = Stores::default();
            for store in stores.iter() {
                outside(own, store, |offset, bytes| others.push(offset, bytes));
            }
            others
        })
    }
}

/// Whether a range, which is not at the end of all numbers, has a byte of `places`, which are in rising order.
fn is_in_any(places: &[(u64, u32)], range: Range<u64>) -> bool {
    let first = places.partition_point(|(at, count)| at + u64::from(*count) <= range.start);
    places.get(first).is_some_and(|(at, _)| *at < range.end)
}

/// Calls `found` for each run of bytes of a store that is in none of `places`, which are in rising order.
fn outside<'a>(
    places: &[(u64, u32)],
    (offset, bytes): (u64, &'a [u8]),
    mut found: impl FnMut(u64, &'a [u8]),
) {
    let end = offset + bytes.len() as u64;
    let mut from = offset;
    let first = places.partition_point(|(at, count)| at + u64::from(*count) <= offset);
    for (at, count) in places[first..].iter().take_while(|(at, _)| *at < end) {
        if *at > from {
            found(from, &bytes[(from - offset) as usize..(at - offset) as usize]);
        }
        from = from.max(at + u64::from(*count));
    }
    if from < end {
        found(from, &bytes[(from - offset) as usize..]);
    }
}
