//! What one end of a connection's memory knows of the other, and how it is compared with what is here.

use std::collections::BTreeMap;
use std::ops::Range;

use super::PAGE;

/// What is known of the other side's memory: pages that have something else than zeroes.
#[derive(Debug, Default)]
pub(super) struct Shadow(BTreeMap<u64, Box<[u8; PAGE]>>);

static ZEROES: [u8; PAGE] = [0; PAGE];

impl Shadow {
    /// All bytes of a page.
    pub(super) fn page(&self, page: u64) -> &[u8; PAGE] {
        self.0.get(&page).map_or(&ZEROES, |bytes| bytes)
    }

    /// Each of `pages`, in order, with all its bytes.
    pub(super) fn each(&self, pages: Range<u64>) -> impl Iterator<Item = (u64, &[u8; PAGE])> {
        let mut known = self.0.range(pages.clone()).peekable();
        pages.map(move |page| {
            let bytes = known.next_if(|(at, _)| **at == page);
            (page, bytes.map_or(&ZEROES, |(_, bytes)| &**bytes))
        })
    }

    /// Those of `pages` that have something else than zeroes.
    pub(super) fn pages(&self, pages: Range<u64>) -> impl Iterator<Item = u64> {
        self.0.range(pages).map(|(page, _)| *page)
    }

    /// Notes bytes from an offset.
    pub(super) fn set(&mut self, offset: u64, bytes: &[u8]) {
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

/// Calls `found` for each run of bytes of `now` that differ from those of `before`.
pub(super) fn differences(before: &[u8; PAGE], now: &[u8], mut found: impl FnMut(usize, &[u8])) {
    let now = &now[..now.len().min(PAGE)];
    let mut at = 0;
    while at < now.len() {
        // A word at a time where nothing differs, which is most of it.
        let words = (before[at..].chunks_exact(8)).zip(now[at..].chunks_exact(8));
        at += 8 * words.take_while(|(before, now)| before == now).count();
        let Some(differs) = (at..now.len()).find(|at| before[*at] != now[*at]) else { return };
        let end = run_end(before, now, differs);
        found(differs, &now[differs..end]);
        at = end;
    }
}

/// Where the run of differing bytes ends that has begun at `from`.
fn run_end(before: &[u8; PAGE], now: &[u8], from: usize) -> usize {
    const ONES: u64 = u64::from_ne_bytes([1; 8]);
    let word = |bytes: &[u8]| bytes.try_into().map_or(0, u64::from_ne_bytes);
    // A word at a time where all of its bytes differ: then none is zero of what is in one and not in the other.
    let differ = |(before, now): &(&[u8], &[u8])| {
        let both = word(before) ^ word(now);
        both.wrapping_sub(ONES) & !both & (ONES << 7) == 0
    };
    let words = before[from..].chunks_exact(8).zip(now[from..].chunks_exact(8));
    let from = from + 8 * words.take_while(differ).count();
    (from..now.len()).find(|at| before[*at] == now[*at]).unwrap_or(now.len())
}
