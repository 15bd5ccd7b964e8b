//! What is sent between two ends of a connection's memory: stores in their places, batches of them, and the parts that fit
//! into messages.

/// Stores, each in its place, in rising order, without a byte in common.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Stores {
    /// Offset of the first byte of each, and how many follow it, itself included.
    pub(super) places: Vec<(u64, u32)>,
    pub(super) data: Vec<u8>,
}

impl Stores {
    /// One store, or none where there are no bytes.
    pub(super) fn of(offset: u64, data: Vec<u8>) -> Stores {
        let length = u32::try_from(data.len()).unwrap_or(u32::MAX);
        let places = if data.is_empty() { Vec::new() } else { vec![(offset, length)] };
        Stores { places, data }
    }

    /// Both together, which have no byte in common, in rising order.
    pub(super) fn with(self, others: Stores) -> Stores {
        if self.is_empty() {
            return others;
        }
        if others.is_empty() {
            return self;
        }
        let mut both: Vec<(u64, &[u8])> = self.iter().chain(others.iter()).collect();
        both.sort_by_key(|(offset, _)| *offset);
        let mut all = Stores::default();
        both.into_iter().for_each(|(offset, bytes)| all.push(offset, bytes));
        all
    }

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
    pub(super) fn push(&mut self, offset: u64, bytes: &[u8]) {
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

/// Stores that take effect as a whole, and what was copied, which does so with them, but in no order.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Batch {
    pub(super) number: u64,
    pub(super) stores: Stores,
    /// A range without a byte in common with the stores, or nothing.
    pub(super) copied: Stores,
}

/// A part of what was copied: bytes that follow those of the part before it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CopiedPart<'a> {
    /// Number of the batch.
    pub batch: u64,
    /// Whether it is the last one of the batch.
    pub last: bool,
    /// Offset of its first byte.
    pub offset: u64,
    /// The bytes from there on, at least one.
    pub data: &'a [u8],
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

    /// The ranges and bytes that the batch changes, without what was copied.
    pub fn stores(&self) -> &Stores {
        &self.stores
    }

    /// Where all that was copied is, and its bytes; nothing where nothing was.
    pub fn copied(&self) -> Option<(u64, &[u8])> {
        self.copied.iter().next()
    }

    /// The memory that has what was copied.
    pub fn into_copied(self) -> Vec<u8> {
        self.copied.data
    }

    /// What was copied, cut into parts in order, each of 1 to `most` bytes and no fewer than they need be, about as long as each
    /// other: while one is decrypted, the next is sent. They come behind the [others](Batch::parts).
    pub fn copied_parts(&self, most: usize) -> impl Iterator<Item = CopiedPart<'_>> {
        let (offset, _) = self.copied.places.first().copied().unwrap_or_default();
        let all = self.copied.data.len();
        let length = all.div_ceil(all.div_ceil(most.max(1)).max(1)).max(1);
        self.copied.data.chunks(length).enumerate().map(move |(nth, data)| {
            let at = nth * length;
            let (last, offset) = (at + data.len() == all, offset + at as u64);
            CopiedPart { batch: self.number, last, offset, data }
        })
    }

    /// The stores cut into parts, in order, each of at most `most` bytes with what their places take, 12 each. None of
    /// them is the last one of a batch with something copied, and where that is all, there are none.
    pub fn parts(&self, most: usize) -> Vec<BatchPart<'_>> {
        const PLACE: usize = 12;
        let most = most.max(PLACE + 1);
        let mut parts = Vec::new();
        if self.stores.is_empty() && !self.copied.is_empty() {
            return parts;
        }
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
        parts.push(BatchPart { batch: self.number, last: self.copied.is_empty(), places, data });
        parts
    }
}
