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
//! *Bounds.* One batch is under way each way, and has each byte once, in rising order: a peer can make this side
//! hold as much as the segment's size of it, and no more.

use std::collections::BTreeMap;
use std::ops::Range;

/// Bytes of the pieces that memory is compared in.
pub const PAGE: usize = 4096;

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

/// Stores, each in its place, in rising order, without a byte in common.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Stores {
    /// Offset of the first byte of each, and how many follow it, itself included.
    places: Vec<(u64, u32)>,
    data: Vec<u8>,
}

impl Stores {
    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.places.is_empty()
    }

    /// How many bytes are stored.
    pub fn bytes(&self) -> usize {
        self.data.len()
    }

    /// Each store: where it begins, and its bytes.
    pub fn iter(&self) -> impl Iterator<Item = (u64, &[u8])> {
        let mut from = 0;
        self.places.iter().map(move |(offset, length)| {
            let start = from;
            from += *length as usize;
            (*offset, &self.data[start..from])
        })
    }

    /// Adds one behind the others; what follows the last one directly is one with it.
    fn push(&mut self, offset: u64, bytes: &[u8]) {
        let length = u32::try_from(bytes.len()).unwrap_or(u32::MAX);
        match self.places.last_mut() {
            Some((last, count))
                if *last + u64::from(*count) == offset && count.checked_add(length).is_some() =>
            {
                *count += length;
            }
            _ => self.places.push((offset, length)),
        }
        self.data.extend_from_slice(bytes);
    }
}

/// Stores that take effect as a whole.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Batch {
    number: u64,
    stores: Stores,
}

/// A part of a batch, as it fits into a message.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct BatchPart<'a> {
    /// Number of the batch.
    pub batch: u64,
    /// Whether it is the last one.
    pub last: bool,
    /// Where the stores are: offset and number of bytes.
    pub places: Vec<(u64, u32)>,
    /// The bytes of all ranges, one after the other.
    pub data: &'a [u8],
}

impl Batch {
    /// The batch's number; each side counts its own.
    pub fn number(&self) -> u64 {
        self.number
    }

    /// The ranges and bytes that the batch changes.
    pub fn stores(&self) -> &Stores {
        &self.stores
    }

    /// Cut into parts, in order, each of at most `most` bytes with what their places take, 12 each.
    pub fn parts(&self, most: usize) -> Vec<BatchPart<'_>> {
        const PLACE: usize = 12;
        let most = most.max(PLACE + 1);
        let mut parts = Vec::new();
        let (mut places, mut size, mut start, mut end) = (Vec::new(), 0, 0, 0);
        for (offset, length) in &self.stores.places {
            let (mut offset, mut left) = (*offset, *length as usize);
            while left > 0 {
                if size + PLACE >= most {
                    let places = std::mem::take(&mut places);
                    let data = &self.stores.data[start..end];
                    parts.push(BatchPart { batch: self.number, last: false, places, data });
                    (size, start) = (0, end);
                }
                let count = left.min(most - size - PLACE);
                places.push((offset, count as u32));
                (size, end) = (size + PLACE + count, end + count);
                (offset, left) = (offset + count as u64, left - count);
            }
        }
        let data = &self.stores.data[start..end];
        parts.push(BatchPart { batch: self.number, last: true, places, data });
        parts
    }
}

/// What is known of the other side's memory: pages that have something else than zeroes.
#[derive(Debug, Default)]
struct Shadow(BTreeMap<u64, Box<[u8; PAGE]>>);

static ZEROES: [u8; PAGE] = [0; PAGE];

impl Shadow {
    fn page(&self, page: u64) -> &[u8; PAGE] {
        self.0.get(&page).map_or(&ZEROES, |bytes| bytes)
    }

    fn set(&mut self, offset: u64, bytes: &[u8]) {
        let (mut offset, mut rest) = (offset, bytes);
        while !rest.is_empty() {
            let within = (offset % PAGE as u64) as usize;
            let (now, later) = rest.split_at(rest.len().min(PAGE - within));
            let page = self.0.entry(offset / PAGE as u64).or_insert_with(|| Box::new(ZEROES));
            page[within..within + now.len()].copy_from_slice(now);
            if now.iter().all(|byte| *byte == 0) && **page == ZEROES {
                self.0.remove(&(offset / PAGE as u64));
            }
            (offset, rest) = (offset + now.len() as u64, later);
        }
    }
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
    /// Where its stores are, until it has taken effect.
    under_way: Option<Vec<(u64, u32)>>,
    /// Number of the last batch that came, all of it.
    heard: u64,
    /// What has come of the next one.
    arriving: Stores,
    /// What has come, all of it, and has not taken effect.
    staged: Option<Stores>,
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
            under_way: None,
            heard: 0,
            arriving: Stores::default(),
            staged: None,
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

    /// Whether a batch is under way: the next one waits for it.
    pub fn is_waiting(&self) -> bool {
        self.under_way.is_some()
    }

    /// Number of the last batch that was sent, and of the last one that came.
    pub fn numbers(&self) -> (u64, u64) {
        (self.sent, self.heard)
    }

    /// What the other side has of a page, or will have: whole pages, beyond the end of the memory zeroes.
    pub fn known(&self, page: u64) -> &[u8; PAGE] {
        self.shadow.page(page)
    }

    /// The pages among `pages` of which the other side has something else than zeroes, or will have.
    pub fn known_pages(&self, pages: Range<u64>) -> impl Iterator<Item = u64> {
        self.shadow.0.range(pages).map(|(page, _)| *page)
    }

    /// Takes a snapshot of the pages that differ (`pages`, by their numbers, in rising order), of which the last
    /// one may be shorter, as a batch to send: also an empty one. `None` while one is under way, or when nothing
    /// is told.
    pub fn collect<'a>(
        &mut self,
        pages: impl IntoIterator<Item = (u64, &'a [u8])>,
    ) -> Option<Batch> {
        if self.is_waiting() || !self.tells() {
            return None;
        }
        let mut stores = Stores::default();
        for (page, bytes) in pages {
            let before = self.shadow.page(page);
            differences(before, bytes, |at, run| stores.push(page * PAGE as u64 + at as u64, run));
        }
        for (offset, bytes) in stores.iter() {
            self.shadow.set(offset, bytes);
        }
        self.sent += 1;
        self.under_way = Some(stores.places.clone());
        Some(Batch { number: self.sent, stores })
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
        if batch != self.heard + 1 || self.staged.is_some() {
            return Err(Violation::Number(batch));
        }
        if self.side == ConnectionSide::Home && !self.write {
            return Err(Violation::ReadOnly);
        }
        let mut rest = data;
        for (offset, length) in places {
            let after = self.arriving.places.last();
            let after = after.map_or(0, |(offset, length)| offset + u64::from(*length));
            let end = offset.checked_add(u64::from(*length));
            if *length == 0 || *offset < after || end.is_none_or(|end| end > self.size) {
                return Err(Violation::Place);
            }
            let (bytes, later) =
                rest.split_at_checked(*length as usize).ok_or(Violation::Length)?;
            self.arriving.push(*offset, bytes);
            rest = later;
        }
        if !rest.is_empty() {
            return Err(Violation::Length);
        }
        if last {
            self.heard = batch;
            self.staged = Some(std::mem::take(&mut self.arriving));
        }
        Ok(last)
    }

    /// The range that what came changes when it takes effect: its first byte, and how many bytes.
    pub fn staged_range(&self) -> Option<(u64, u64)> {
        let places = &self.staged.as_ref()?.places;
        let (first, last) = (places.first()?, places.last()?);
        Some((first.0, last.0 + u64::from(last.1) - first.0))
    }

    /// What came takes effect now: its number, and what is to be stored here, as a whole and before the next
    /// snapshot, before the other side is told that it took effect.
    pub fn take_effect(&mut self) -> Option<(u64, Stores)> {
        let stores = self.staged.take()?;
        let stores = self.without_own(stores);
        for (offset, bytes) in stores.iter() {
            self.shadow.set(offset, bytes);
        }
        Some((self.heard, stores))
    }

    /// The other side says that a batch took effect there.
    ///
    /// # Errors
    /// [`Violation::Number`] when it is not under way.
    pub fn applied(&mut self, batch: u64) -> Result<(), Violation> {
        if self.under_way.is_none() || batch != self.sent {
            return Err(Violation::Number(batch));
        }
        // What came before this answer is from before the batch, whenever it takes effect.
        self.staged = self.staged.take().map(|stores| self.without_own(stores));
        self.under_way = None;
        Ok(())
    }

    /// At a replica: without the bytes that are under way from here.
    fn without_own(&self, stores: Stores) -> Stores {
        let own = match (self.side, &self.under_way) {
            (ConnectionSide::Replica, Some(own)) if !own.is_empty() => own,
            _ => return stores,
        };
        let mut others = Stores::default();
        for (offset, bytes) in stores.iter() {
            let end = offset + bytes.len() as u64;
            let mut from = offset;
            let first = own.partition_point(|(at, count)| at + u64::from(*count) <= offset);
            for (at, count) in own[first..].iter().take_while(|(at, _)| *at < end) {
                if *at > from {
                    others.push(from, &bytes[(from - offset) as usize..(at - offset) as usize]);
                }
                from = from.max(at + u64::from(*count));
            }
            if from < end {
                others.push(from, &bytes[(from - offset) as usize..]);
            }
        }
        others
    }
}

/// Calls `found` for each run of bytes of `now` that differ from those of `before`.
fn differences(before: &[u8; PAGE], now: &[u8], mut found: impl FnMut(usize, &[u8])) {
    let now = &now[..now.len().min(PAGE)];
    let mut at = 0;
    while at < now.len() {
        // A word at a time where nothing differs, which is most of it.
        let words = (before[at..].chunks_exact(8)).zip(now[at..].chunks_exact(8));
        at += 8 * words.take_while(|(before, now)| before == now).count();
        let Some(differs) = (at..now.len()).find(|at| before[*at] != now[*at]) else { return };
        let end = (differs..now.len()).find(|at| before[*at] == now[*at]).unwrap_or(now.len());
        found(differs, &now[differs..end]);
        at = end;
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const SIZE: u64 = 2 * PAGE as u64 + 99;

    fn home(write: bool) -> ConnectionWindow {
        ConnectionWindow::new(ConnectionSide::Home, SIZE, write)
    }

    fn pages(memory: &[u8]) -> Vec<(u64, &[u8])> {
        memory.chunks(PAGE).enumerate().map(|(page, bytes)| (page as u64, bytes)).collect()
    }

    proptest! {
        #[test]
        fn exactly_what_was_stored_is_sent_however_it_is_cut(
            stores in prop::collection::vec((0..SIZE as usize, any::<u8>()), 0..60),
            most in 0_usize..200,
        ) {
            let mut memory = vec![0; SIZE as usize];
            let mut here = home(true);
            let mut there = ConnectionWindow::new(ConnectionSide::Replica, SIZE, true);
            let mut replica = vec![0; SIZE as usize];
            for half in [&stores[..stores.len() / 2], &stores[stores.len() / 2..]] {
                let before = memory.clone();
                half.iter().for_each(|(at, value)| memory[*at] = *value);
                let differ = (0..memory.len()).filter(|at| memory[*at] != before[*at]).count();
                let batch = here.collect(pages(&memory)).unwrap();
                prop_assert_eq!(batch.stores().bytes(), differ);
                prop_assert!(here.collect(pages(&memory)).is_none(), "one is under way");
                let parts = batch.parts(most);
                for (nth, part) in parts.iter().enumerate() {
                    prop_assert_eq!(part.last, nth + 1 == parts.len());
                    let whole = there.hear(part.batch, part.last, &part.places, part.data).unwrap();
                    prop_assert_eq!(whole, part.last);
                    let taken = there.take_effect().map(|(_, stores)| stores);
                    prop_assert_eq!(taken.is_some(), part.last);
                    for (at, bytes) in taken.iter().flat_map(Stores::iter) {
                        replica[at as usize..at as usize + bytes.len()].copy_from_slice(bytes);
                    }
                }
                prop_assert_eq!(&replica, &memory);
                let used = pages(&memory).into_iter().filter(|(_, bytes)| bytes.iter().any(|it| *it != 0));
                prop_assert!(here.known_pages(0..u64::MAX).eq(used.map(|(page, _)| page)));
                here.applied(batch.number()).unwrap();
            }
        }

        #[test]
        fn whatever_a_peer_says_it_stays_inside(
            said in prop::collection::vec(
                (0_u64..4, any::<bool>(), prop::collection::vec((0_u64..SIZE + 9, 0_u32..40), 0..4), 0_usize..90),
                0..20,
            ),
        ) {
            let mut window = home(true);
            for (batch, last, places, length) in said {
                let heard = window.hear(batch, last, &places, &vec![7; length]);
                let taken = window.take_effect().map(|(_, stores)| stores);
                for (at, bytes) in taken.iter().flat_map(Stores::iter) {
                    prop_assert!(at + bytes.len() as u64 <= SIZE);
                }
                prop_assert!(window.arriving.bytes() as u64 <= SIZE);
                if heard.is_err() {
                    return Ok(());
                }
            }
        }
    }

    #[test]
    fn malformed_messages_are_refused() {
        type Case = (u64, &'static [(u64, u32)], &'static [u8], Violation);
        let cases: [Case; 7] = [
            (2, &[], &[], Violation::Number(2)),
            (0, &[], &[], Violation::Number(0)),
            (1, &[(SIZE, 1)], &[1], Violation::Place),
            (1, &[(u64::MAX, 2)], &[1, 2], Violation::Place),
            (1, &[(5, 2), (6, 1)], &[1, 2, 3], Violation::Place),
            (1, &[(5, 2)], &[1], Violation::Length),
            (1, &[(5, 2)], &[1, 2, 3], Violation::Length),
        ];
        for (batch, places, data, violation) in cases {
            assert_eq!(home(true).hear(batch, true, places, data), Err(violation), "{places:?}");
        }
        assert_eq!(home(false).hear(1, true, &[(0, 1)], &[1]), Err(Violation::ReadOnly));
        assert_eq!(home(true).applied(1), Err(Violation::Number(1)));
        assert!(
            ConnectionWindow::new(ConnectionSide::Replica, SIZE, false).collect([]).is_none(),
            "it only loads"
        );
    }
}
