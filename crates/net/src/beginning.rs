//! The beginning of a frame, by which is decided who receives it: read once where its sender may change it.

use rackbus_memory::DmaSlice;

use crate::ethernet::{EthernetHeader, IPV6};
use crate::ipv6;
use crate::switch::HEAD;

/// Bytes of a transport header that are looked at.
const TRANSPORT: usize = 20;

/// How many bytes are to be looked at of a frame of `length` bytes that begins with `head`: [`HEAD`] of them, and all where
/// its headers go on behind these.
pub(crate) fn looked_at(head: &[u8], length: usize) -> usize {
    let start = &head[..head.len().min(HEAD)];
    if length <= HEAD || !goes_on(start) { length.min(HEAD) } else { length }
}

/// Whether what begins so is an IPv6 packet whose other headers leave no room for its transport's.
fn goes_on(start: &[u8]) -> bool {
    let Some(header) = EthernetHeader::read(start).filter(|it| it.kind == IPV6) else {
        return false;
    };
    let packet = &start[header.length..];
    let fits = |upper: ipv6::Upper| upper.at + TRANSPORT <= packet.len();
    ipv6::has_extensions(packet) && !ipv6::upper(packet).is_some_and(fits)
}

/// What was read of a frame.
#[derive(Debug)]
pub(crate) enum Beginning {
    /// The first bytes, so many of them.
    Short([u8; HEAD], usize),
    /// The whole frame, whose headers are longer than that.
    Long(Vec<u8>),
}

impl Beginning {
    /// Reads what is to be looked at of a frame.
    #[inline]
    pub fn of(parts: &[DmaSlice<'_>]) -> Beginning {
        let mut head = [0; HEAD];
        let read = copy(parts, &mut head);
        let length = parts.iter().map(DmaSlice::len).sum();
        match looked_at(&head[..read], length) {
            wanted if wanted <= read => Beginning::Short(head, read),
            wanted => Beginning::long(parts, wanted),
        }
    }

    #[cold]
    fn long(parts: &[DmaSlice<'_>], wanted: usize) -> Beginning {
        // What was read before is not looked at any more: it may have changed since.
        let mut bytes = vec![0; wanted];
        copy(parts, &mut bytes);
        Beginning::Long(bytes)
    }

    /// The bytes that were read.
    pub fn bytes(&self) -> &[u8] {
        match self {
            Beginning::Short(head, read) => &head[..*read],
            Beginning::Long(bytes) => bytes,
        }
    }
}

/// Fills `into` from the parts in order; how far.
#[inline]
fn copy(parts: &[DmaSlice<'_>], into: &mut [u8]) -> usize {
    let mut read = 0;
    for part in parts {
        read += part.copy_to(&mut into[read..]);
    }
    read
}

#[cfg(test)]
mod tests {
    use rackbus_memory::SharedMemory;

    use super::*;

    /// A frame of TCP with options for its destination before it, of 8 bytes and so many times 8 more.
    fn frame(units: u8) -> Vec<u8> {
        let mut frame = [&[2; 12][..], &IPV6.to_be_bytes(), &[0; 40]].concat();
        frame[14 + 6] = 60;
        frame.extend([6, units, 1, 4, 0, 0, 0, 0]);
        frame.extend(vec![0; 8 * usize::from(units)]);
        frame.extend([7; 1000]);
        frame
    }

    #[test]
    fn more_is_looked_at_only_where_headers_go_on() {
        let memory = SharedMemory::create("frame", 8192).unwrap();
        for (units, short) in [(0, true), (5, true), (6, false), (7, false), (200, false)] {
            let frame = frame(units);
            assert_eq!(looked_at(&frame, frame.len()) == HEAD, short, "{units}");
            memory.whole().copy_from(&frame);
            // In two parts, of which the first ends within the headers.
            let (first, second) =
                (memory.whole().part(0, 60), memory.whole().part(60, frame.len() - 60));
            let read = Beginning::of(&[first.unwrap(), second.unwrap()]);
            let expected = if short { &frame[..HEAD] } else { &frame[..] };
            assert_eq!(read.bytes(), expected, "{units}");
        }
        for length in [0, 13, 60, HEAD, 4000] {
            assert_eq!(looked_at(&[2; 4000][..length], length), length.min(HEAD));
        }
    }
}
