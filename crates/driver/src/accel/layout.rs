//! Where everything is in the memory that driver and function share, and how descriptors name it.

use rackbus_memory::SharedMemory;
use rackbus_spec::accel::{COMPLETION_SIZE, DESCRIPTOR_SIZE, SEGMENTS, SglEntry};

use super::AccelError;
use super::ring::entries;
use crate::device::DmaAddresses;

const PAGE: usize = 4096;
/// What needs to be in one piece is not across a boundary of huge pages: elsewhere they are apart.
const HUGE_PAGE: usize = 2 << 20;

/// Where a message is, as a descriptor says it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct MessageSpan {
    /// The address of the data, or of its list.
    pub address: u64,
    /// Segments of the list; 0 where `address` is the data's.
    pub segments: u16,
    /// Bytes of the data.
    pub length: u32,
}

/// Bytes that a context is made of at most.
pub const CONTEXT: usize = 16 << 10;

/// The shared memory: the page of shadow doorbells, the rings, a page for each of two lists, what a context is
/// made of, the data.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct AccelLayout {
    /// Offsets of each queue pair's rings.
    pub rings: Vec<(usize, usize)>,
    lists: usize,
    pub context: usize,
    pub data: usize,
    pub length: usize,
}

impl AccelLayout {
    pub fn new(queues: u16, depth: u16, data: usize) -> AccelLayout {
        let mut end = PAGE;
        let mut take = |bytes: usize| {
            let bytes = bytes.next_multiple_of(PAGE);
            if end % HUGE_PAGE + bytes > HUGE_PAGE {
                end = end.next_multiple_of(HUGE_PAGE);
            }
            let at = end;
            end += bytes;
            at
        };
        let entries = entries(depth) as usize;
        let mut rings = || (take(entries * DESCRIPTOR_SIZE), take(entries * COMPLETION_SIZE));
        let rings = (0..queues).map(|_| rings()).collect();
        let (lists, context) = (take(2 * PAGE), take(CONTEXT));
        AccelLayout {
            rings,
            lists,
            context,
            data: end,
            length: end + data.max(1).next_multiple_of(PAGE),
        }
    }

    /// The offset of the driver's own list for an input, or an output.
    pub fn list(&self, output: bool) -> usize {
        self.lists + if output { PAGE } else { 0 }
    }
}

/// The memory at `offset`, where it is in one piece.
pub fn span(
    addresses: &DmaAddresses,
    offset: usize,
    length: usize,
) -> Result<MessageSpan, AccelError> {
    let bytes =
        u32::try_from(length).map_err(|_| AccelError::Request("the message is too large"))?;
    // A message of no bytes has an address anyway.
    match addresses.at(offset) {
        Some((address, run)) if run >= length => {
            Ok(MessageSpan { address, segments: 0, length: bytes })
        }
        Some(_) => {
            Err(AccelError::Request("the message is in several pieces; write a list of them"))
        }
        None if length == 0 => Ok(MessageSpan { address: 0, segments: 0, length: 0 }),
        None => Err(AccelError::Request("the message is not in the memory for data")),
    }
}

/// Writes the list of these ranges (offset and length each) at offset `at`, where there is room for `most`
/// segments; they become more segments where the function reaches one in several pieces.
pub fn list(
    memory: &SharedMemory,
    addresses: &DmaAddresses,
    (at, most): (usize, usize),
    ranges: impl Iterator<Item = (usize, usize)>,
) -> Result<MessageSpan, AccelError> {
    let too_large = || AccelError::Request("the message is too large");
    let outside = || AccelError::Request("the message is not in the memory for data");
    let (mut count, mut total) = (0, 0usize);
    for (mut offset, mut length) in ranges {
        total = total.checked_add(length).ok_or_else(too_large)?;
        while length > 0 {
            let (address, run) = addresses.at(offset).ok_or_else(outside)?;
            let part = run.min(length);
            if count >= most.min(SEGMENTS) {
                return Err(AccelError::Request("the message has too many segments"));
            }
            let bytes = u32::try_from(part).map_err(|_| too_large())?;
            let segment = SglEntry { address, length: bytes, reserved: 0 };
            memory
                .whole()
                .write_obj(at + count * size_of::<SglEntry>(), &segment)
                .ok_or_else(outside)?;
            (offset, length) = (offset + part, length - part);
            count += 1;
        }
    }
    if count == 0 {
        return Err(AccelError::Request("a list has at least one byte"));
    }
    let (address, run) = addresses.at(at).ok_or_else(outside)?;
    if run < count * size_of::<SglEntry>() {
        return Err(AccelError::Request("the list is not in one piece"));
    }
    let length = u32::try_from(total).map_err(|_| too_large())?;
    Ok(MessageSpan { address, segments: count as u16, length })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_must_be_in_one_piece_is_inside_of_a_huge_page() {
        for (queues, depth) in [(1, 1), (8, 32), (8, 1000), (7, 4095)] {
            let layout = AccelLayout::new(queues, depth, 4 << 20);
            let entries = entries(depth) as usize;
            let lists = [false, true].map(|output| (layout.list(output), PAGE));
            let mut taken = vec![(0, PAGE), lists[0], lists[1], (layout.context, CONTEXT)];
            for (submission, completion) in &layout.rings {
                taken.push((*submission, entries * DESCRIPTOR_SIZE));
                taken.push((*completion, entries * COMPLETION_SIZE));
            }
            taken.sort_unstable();
            for pair in taken.windows(2) {
                assert!(pair[0].0 + pair[0].1 <= pair[1].0, "{pair:x?} overlap");
            }
            for (at, length) in taken {
                assert!(at % PAGE == 0 && at % HUGE_PAGE + length <= HUGE_PAGE, "{at:#x}");
                assert!(at + length <= layout.data);
            }
            assert_eq!(layout.length, layout.data + (4 << 20));
        }
    }
}
