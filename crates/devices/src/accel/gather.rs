//! A message's memory: ranges of a tenant's, one after the other, as the function reached them when it
//! took the descriptor. They are held as long as the operation is under way, or borrowed while the function's own thread
//! does it.

use rackbus_memory::{DmaSlice, PinnedPieces, PinnedSlice, Revoker};

/// A message's memory, in one piece or more.
pub trait MessageMemory {
    /// Bytes of all pieces together.
    fn len(&self) -> usize;

    /// Visits what there is of `length` bytes from `offset` on, in order.
    fn each(&self, offset: usize, length: usize, visit: impl FnMut(DmaSlice<'_>));

    /// Copies from `offset` on into all of `out`, as far as there is something.
    #[inline]
    fn read(&self, offset: usize, out: &mut [u8]) {
        let mut done = 0;
        self.each(offset, out.len(), |part| done += part.copy_to(&mut out[done..]));
    }

    /// Copies all of `data` to `offset` and on, as far as there is room.
    #[inline]
    fn write(&self, offset: usize, data: &[u8]) {
        let mut done = 0;
        self.each(offset, data.len(), |part| done += part.copy_from(&data[done..]));
    }

    /// The `length` bytes from `offset` on, where they are in one piece. They may be used until this thread does something
    /// else.
    fn piece(&self, offset: usize, length: usize) -> Option<DmaSlice<'_>>;

    /// Visits `length` bytes of another message from `offset` on, each part with the same part of this one, as far as there
    /// is something and room.
    fn each_of(
        &self,
        offset: usize,
        length: usize,
        from: &impl MessageMemory,
        mut visit: impl FnMut(DmaSlice<'_>, DmaSlice<'_>),
    ) {
        let mut at = offset;
        from.each(offset, length, |source| {
            let mut done = 0;
            self.each(at, source.len(), |to| {
                if let Some(part) = source.part(done, to.len()) {
                    visit(part, to);
                }
                done += to.len();
            });
            at += source.len();
        });
    }

    /// Copies `length` bytes of another message to the same place of this one, as far as there is something and room.
    fn copy_at(&self, offset: usize, length: usize, from: &impl MessageMemory) {
        self.each_of(offset, length, from, |source, to| {
            to.copy_from_slice(source);
        });
    }

    /// Asks the processor to bring `length` bytes from `offset` on near.
    fn prefetch(&self, offset: usize, length: usize) {
        self.each(offset, length, |part| part.prefetch());
    }

    /// The same for bytes that are to be written.
    fn prefetch_write(&self, offset: usize, length: usize) {
        self.each(offset, length, |part| part.prefetch_write());
    }

    /// Zeroes up to `end`.
    fn clear(&self, end: usize) {
        self.each(0, end, |part| part.fill(0));
    }

    /// Zeroes what an operation on so many bytes of input could have put out, as its message was found not to be authentic:
    /// neither that nor what was here before may be taken for it.
    fn clear_unauthentic(&self, input_length: usize) {
        self.clear(self.len().min(input_length));
    }
}

/// Memory that is borrowed: it is used before anything can be mapped otherwise, by a thread that has asked whether its
/// user is there and does nothing else until it is done.
impl MessageMemory for DmaSlice<'_> {
    #[inline]
    fn len(&self) -> usize {
        DmaSlice::len(self)
    }

    #[inline]
    fn each(&self, offset: usize, length: usize, mut visit: impl FnMut(DmaSlice<'_>)) {
        let count = length.min(DmaSlice::len(self).saturating_sub(offset));
        if count > 0
            && let Some(part) = self.part(offset, count)
        {
            visit(part);
        }
    }

    #[inline]
    fn piece(&self, offset: usize, length: usize) -> Option<DmaSlice<'_>> {
        self.part(offset, length)
    }
}

/// Pieces of memory that are used as one.
#[derive(Debug, Default)]
pub struct Gather {
    /// Most have one piece, and take no memory of their own then.
    first: Option<PinnedSlice>,
    /// The others, each with its place in the whole.
    rest: Vec<(usize, PinnedSlice)>,
    length: usize,
    /// Of the memory's user. A thread that is an engine stalls with its host as well, and asks for itself before each
    /// access.
    revoker: Option<Revoker>,
}

impl Gather {
    /// Pieces that are taken away by `revoker`.
    pub fn of(revoker: &Revoker) -> Gather {
        Gather { revoker: Some(revoker.clone()), ..Gather::default() }
    }

    /// Adds a piece behind those that there are.
    pub fn push(&mut self, piece: PinnedSlice) {
        let length = piece.get().len();
        match self.first {
            None => self.first = Some(piece),
            Some(_) => self.rest.push((self.length, piece)),
        }
        self.length += length;
    }

    /// Adds a range behind those that there are.
    pub fn append(&mut self, range: PinnedPieces) {
        let (first, rest) = range.into_parts();
        self.push(first);
        rest.into_iter().for_each(|(_, piece)| self.push(piece));
    }

    /// Copies from the beginning on into all of `place`, as far as there is something.
    pub fn copy_to(&self, place: DmaSlice<'_>) {
        place.copy_at(0, place.len(), self);
    }

    /// Copies all of `place` to the beginning and on, as far as there is room.
    pub fn copy_from(&self, place: DmaSlice<'_>) {
        self.copy_at(0, place.len(), &place);
    }
}

impl MessageMemory for Gather {
    fn len(&self) -> usize {
        self.length
    }

    fn each(&self, offset: usize, length: usize, mut visit: impl FnMut(DmaSlice<'_>)) {
        let Some(first) = &self.first else { return };
        if let Some(revoker) = &self.revoker {
            revoker.before_access();
        }
        let end = offset.saturating_add(length).min(self.length);
        let mut at = offset;
        let mut within = |start: usize, piece: &PinnedSlice| {
            let piece = piece.get();
            let from = at - start;
            let count = piece.len().saturating_sub(from).min(end.saturating_sub(at));
            if count > 0
                && let Some(part) = piece.part(from, count)
            {
                visit(part);
                at += count;
            }
            at < end
        };
        if !within(0, first) || self.rest.is_empty() {
            return;
        }
        let next = self.rest.partition_point(|(start, _)| *start <= offset).saturating_sub(1);
        for (start, piece) in &self.rest[next..] {
            if !within(*start, piece) {
                break;
            }
        }
    }

    fn piece(&self, offset: usize, length: usize) -> Option<DmaSlice<'_>> {
        let first = self.first.as_ref()?;
        if let Some(revoker) = &self.revoker {
            revoker.before_access();
        }
        first.get().part(offset, length)
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::net::UnixStream;
    use std::sync::Arc;

    use rackbus_fabric::Lending;
    use rackbus_memory::{Access, DmaSpace, SharedMemory, ticks};

    use super::*;

    /// Invariant I4 after a stall: an engine's thread finds out by itself that the memory may be somebody else's.
    #[test]
    fn what_an_engine_puts_out_after_its_host_stalled_does_not_reach_a_user_who_left() {
        let memory = SharedMemory::create("user", 0x1000).unwrap();
        let mut space = DmaSpace::new();
        space.set_master(true);
        let access = Access::READ | Access::WRITE;
        let lent = Lending::alone().lend(0, 0x1000, access, Some(memory.handle(0)));
        space.map(lent.unwrap()).unwrap();
        let (conversation, user) = UnixStream::pair().unwrap();
        space.revoker().used_by(Some(Arc::new(conversation)));
        let mut gather = Gather::of(space.revoker());
        gather.append(space.pin_pieces(0, 0x1000, access).unwrap());
        gather.write(0, &[1; 16]);
        drop(user);
        let begun = ticks::now();
        while !ticks::is_gap(begun, ticks::now()) {
            std::thread::yield_now();
        }
        gather.write(0, &[2; 16]);
        let mut found = [0; 16];
        memory.whole().copy_to(&mut found);
        assert_eq!(found, [1; 16]);
    }
}
