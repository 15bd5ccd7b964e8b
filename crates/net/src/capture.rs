//! Captured frames as a file for Wireshark and its like: pcapng (draft-ietf-opsawg-pcapng), little endian.

use rackbus_memory::frames::FRAME_HEADER;

/// What a capture is told of a frame: whether it was sent or received, and when on the queue's clock.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Captured {
    /// Whether the port sent it.
    pub sent: bool,
    /// When it did, or received it.
    pub time_ns: u64,
}

impl Captured {
    /// As the header of a ring.
    pub fn to_header(self) -> [u8; FRAME_HEADER] {
        let mut header = [0; FRAME_HEADER];
        header[0] = u8::from(self.sent);
        header[2..].copy_from_slice(&self.time_ns.to_le_bytes());
        header
    }

    /// From the header of a ring.
    pub fn from_header(header: [u8; FRAME_HEADER]) -> Captured {
        let [sent, _, time @ ..] = header;
        Captured { sent: sent != 0, time_ns: u64::from_le_bytes(time) }
    }
}

/// The kind of the captured link: Ethernet frames (`LINKTYPE_ETHERNET`).
const ETHERNET: u16 = 1;

const SECTION_HEADER: u32 = 0x0a0d_0d0a;
const BYTE_ORDER: u32 = 0x1a2b_3c4d;
const INTERFACE: u32 = 1;
const PACKET: u32 = 6;

/// Codes of options in blocks; [`END`] ends a block's list.
const END: u16 = 0;
const HARDWARE: u16 = 2;
const NAME: u16 = 2;
const RESOLUTION: u16 = 9;
const FLAGS: u16 = 2;
const USER_APPLICATION: u16 = 4;

/// What a file begins with: of frames of one port.
pub fn begin(port: &str) -> Vec<u8> {
    let mut head = Vec::new();
    head.extend(BYTE_ORDER.to_le_bytes());
    head.extend([1, 0, 0, 0]);
    // The section's length is not known.
    head.extend(u64::MAX.to_le_bytes());
    option(&mut head, HARDWARE, b"Ethernet over PCIe");
    option(&mut head, USER_APPLICATION, b"rackbus net capture");
    option(&mut head, END, &[]);
    let mut interface = Vec::new();
    interface.extend(u32::from(ETHERNET).to_le_bytes());
    interface.extend(0u32.to_le_bytes());
    option(&mut interface, NAME, port.as_bytes());
    // Nanoseconds.
    option(&mut interface, RESOLUTION, &[9]);
    option(&mut interface, END, &[]);
    let mut file = block(SECTION_HEADER, &head);
    file.extend(block(INTERFACE, &interface));
    file
}

/// A frame at `time_ns` since 1970, of which `bytes` were captured; `sent` by the port, or received.
pub fn packet(time_ns: u64, sent: bool, bytes: &[u8]) -> Vec<u8> {
    let mut body = Vec::with_capacity(bytes.len() + 48);
    body.extend(0u32.to_le_bytes());
    body.extend(((time_ns >> 32) as u32).to_le_bytes());
    body.extend((time_ns as u32).to_le_bytes());
    let length = u32::try_from(bytes.len()).unwrap_or(u32::MAX);
    body.extend(length.to_le_bytes());
    body.extend(length.to_le_bytes());
    padded(&mut body, bytes);
    let direction = if sent { 2u32 } else { 1 };
    option(&mut body, FLAGS, &direction.to_le_bytes());
    option(&mut body, END, &[]);
    block(PACKET, &body)
}

fn block(kind: u32, body: &[u8]) -> Vec<u8> {
    let length = u32::try_from(body.len() + 12).unwrap_or(u32::MAX).to_le_bytes();
    [&kind.to_le_bytes(), &length, body, &length].concat()
}

fn option(to: &mut Vec<u8>, code: u16, value: &[u8]) {
    to.extend(code.to_le_bytes());
    to.extend(u16::try_from(value.len()).unwrap_or(u16::MAX).to_le_bytes());
    padded(to, value);
}

fn padded(to: &mut Vec<u8>, bytes: &[u8]) {
    to.extend(bytes);
    to.extend(&[0; 3][..bytes.len().next_multiple_of(4) - bytes.len()]);
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The blocks of a file: kind and body.
    fn blocks(mut file: &[u8]) -> Vec<(u32, &[u8])> {
        let word = |at: &[u8]| u32::from_le_bytes(at[..4].try_into().unwrap());
        let mut all = Vec::new();
        while !file.is_empty() {
            let length = word(&file[4..]) as usize;
            assert!(length.is_multiple_of(4));
            assert_eq!(word(&file[length - 4..]) as usize, length);
            all.push((word(file), &file[8..length - 4]));
            file = &file[length..];
        }
        all
    }

    #[test]
    fn a_file_is_blocks_that_are_padded_and_say_their_length_twice() {
        let mut file = begin("alpha/nic0.vf1");
        file.extend(packet(0x1_0000_0002, true, &[7; 61]));
        file.extend(packet(5, false, &[]));
        let blocks = blocks(&file);
        let kinds: Vec<u32> = blocks.iter().map(|(kind, _)| *kind).collect();
        assert_eq!(kinds, [SECTION_HEADER, INTERFACE, PACKET, PACKET]);
        let body = blocks[2].1;
        assert_eq!(body[..20], [0, 0, 0, 0, 1, 0, 0, 0, 2, 0, 0, 0, 61, 0, 0, 0, 61, 0, 0, 0]);
        assert_eq!(body[20..84], [[7; 61].as_slice(), &[0; 3]].concat());
        // The direction: outbound.
        assert_eq!(body[84..], [2, 0, 4, 0, 2, 0, 0, 0, 0, 0, 0, 0]);
    }
}
