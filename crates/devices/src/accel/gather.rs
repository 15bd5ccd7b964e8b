//! A message's memory: ranges of a tenant's, one after the other, as the function reached them when it
//! took the descriptor.

use rackbus_memory::{DmaSlice, PinnedSlice};

/// Pieces of memory that are used as one.
#[derive(Debug, Default)]
pub struct Gather {
    /// Each with its place in the whole.
    pieces: Vec<(usize, PinnedSlice)>,
    length: usize,
}

impl Gather {
    /// Adds a piece behind those that there are.
    pub fn push(&mut self, piece: PinnedSlice) {
        let length = piece.get().len();
        self.pieces.push((self.length, piece));
        self.length += length;
    }

    /// Bytes of all pieces together.
    pub fn len(&self) -> usize {
        self.length
    }

    /// Copies from `offset` on into all of `out`, as far as there is something.
    pub fn read(&self, offset: usize, out: &mut [u8]) {
        let mut done = 0;
        self.each(offset, out.len(), |piece, from, count| {
            if let Some(part) = piece.get().part(from, count) {
                done += part.copy_to(&mut out[done..done + count]);
            }
        });
    }

    /// Copies all of `data` to `offset` and on, as far as there is room.
    pub fn write(&self, offset: usize, data: &[u8]) {
        let mut done = 0;
        self.each(offset, data.len(), |piece, from, count| {
            if let Some(part) = piece.get().part(from, count) {
                done += part.copy_from(&data[done..done + count]);
            }
        });
    }

    /// Copies from the beginning on into all of `place`, as far as there is something.
    pub fn copy_to(&self, place: DmaSlice<'_>) {
        let mut done = 0;
        self.each(0, place.len(), |piece, from, count| {
            if let (Some(part), Some(to)) = (piece.get().part(from, count), place.part(done, count))
            {
                to.copy_from_slice(part);
            }
            done += count;
        });
    }

    /// Copies all of `place` to the beginning and on, as far as there is room.
    pub fn copy_from(&self, place: DmaSlice<'_>) {
        let mut done = 0;
        self.each(0, place.len(), |piece, from, count| {
            if let (Some(part), Some(from)) =
                (piece.get().part(from, count), place.part(done, count))
            {
                part.copy_from_slice(from);
            }
            done += count;
        });
    }

    /// Zeroes up to `end`.
    pub fn clear(&self, end: usize) {
        self.each(0, end, |piece, from, count| {
            if let Some(part) = piece.get().part(from, count) {
                part.fill(0);
            }
        });
    }

    fn each(
        &self,
        offset: usize,
        length: usize,
        mut visit: impl FnMut(&PinnedSlice, usize, usize),
    ) {
        let end = offset.saturating_add(length).min(self.length);
        let first = self.pieces.partition_point(|(start, _)| *start <= offset).saturating_sub(1);
        let mut at = offset;
        for (start, piece) in &self.pieces[first.min(self.pieces.len())..] {
            if at >= end {
                break;
            }
            let from = at - start;
            let count = (piece.get().len() - from).min(end - at);
            visit(piece, from, count);
            at += count;
        }
    }
}
