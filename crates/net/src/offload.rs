//! What the sender of a frame leaves to others: a checksum to be computed, a large segment to be cut.
//!
//! The layout is that of the header that virtio devices and TAP interfaces have before each frame
//! (virtio 1.2, section 5.1.6, `struct virtio_net_hdr`), little endian, without its number of buffers. Within a
//! rack it goes along with the frame, so that a large segment is one message from end to end.

use zerocopy::byteorder::little_endian::U16;
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

/// Bits of [`Offload::flags`]: the checksum is to be computed from [`Offload::csum_start`] on.
pub const NEEDS_CSUM: u8 = 1;
/// Bits of [`Offload::flags`]: the checksums were verified.
pub const DATA_VALID: u8 = 2;

/// Values of [`Offload::gso_type`] without [`GSO_ECN`]: the frame is not to be cut.
pub const GSO_NONE: u8 = 0;
/// Cut as TCP over IPv4.
pub const GSO_TCPV4: u8 = 1;
/// Cut as UDP over IPv4 by fragments (legacy).
pub const GSO_UDP: u8 = 3;
/// Cut as TCP over IPv6.
pub const GSO_TCPV6: u8 = 4;
/// Cut as UDP datagrams.
pub const GSO_UDP_L4: u8 = 5;
/// Added to a type: the TCP segment has congestion bits set.
pub const GSO_ECN: u8 = 0x80;

/// Pieces that a frame is cut into at most: more would be work for others out of proportion. The longest frame in pieces
/// of 36 bytes has fewer: what is left of the least segment that Linux lets a connection have (`TCP_MIN_SND_MSS`, 48)
/// beside timestamps.
const MOST_PIECES: usize = 2048;

/// Bytes of the header.
pub const OFFLOAD_BYTES: usize = size_of::<Offload>();

/// What is left to do to a frame. Whoever hands one to a kernel or a driver has checked it with
/// [`Offload::is_sound`].
#[derive(
    Debug,
    Clone,
    Copy,
    PartialEq,
    Eq,
    Default,
    FromBytes,
    IntoBytes,
    Immutable,
    KnownLayout,
    Unaligned,
)]
#[repr(C)]
pub struct Offload {
    /// What is known of the checksum: [`NEEDS_CSUM`] or [`DATA_VALID`].
    pub flags: u8,
    /// How the frame is to be cut.
    pub gso_type: u8,
    /// Bytes of all headers of a frame that is to be cut: a hint.
    pub hdr_len: U16,
    /// Bytes of payload in each piece.
    pub gso_size: U16,
    /// Where the checksum begins to count, from the frame's first byte.
    pub csum_start: U16,
    /// Where the checksum goes, from `csum_start`.
    pub csum_offset: U16,
}

impl Offload {
    /// Whether what it asks for lies in a frame of `length` bytes and is known.
    pub fn is_sound(&self, length: usize) -> bool {
        let known = matches!(
            self.gso_type & !GSO_ECN,
            GSO_NONE | GSO_TCPV4 | GSO_UDP | GSO_TCPV6 | GSO_UDP_L4
        );
        let end = usize::from(self.csum_start.get()) + usize::from(self.csum_offset.get()) + 2;
        let checksum = self.flags & NEEDS_CSUM == 0 || end <= length;
        let cut = match self.gso_type {
            GSO_NONE => true,
            // Congestion bits of nothing that is to be cut.
            GSO_ECN => false,
            // Of none there would be no end.
            _ => length <= MOST_PIECES * usize::from(self.gso_size.get()),
        };
        known && checksum && cut && self.flags & !(NEEDS_CSUM | DATA_VALID) == 0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_checksum_lies_in_the_frame_and_a_cut_has_a_size() {
        assert!(Offload::default().is_sound(0));
        let checksum = Offload {
            flags: NEEDS_CSUM,
            csum_start: 34.into(),
            csum_offset: 16.into(),
            ..Offload::default()
        };
        assert!(checksum.is_sound(52));
        assert!(!checksum.is_sound(51));
        let cut = Offload { gso_type: GSO_TCPV4 | GSO_ECN, gso_size: 1448.into(), ..checksum };
        assert!(cut.is_sound(64_000));
        assert!(!Offload { gso_size: 0.into(), ..cut }.is_sound(64_000));
        // A few datagrams of 32 bytes, segments of a connection whose least one has timestamps.
        let datagrams = Offload { gso_type: GSO_UDP_L4, gso_size: 32.into(), ..checksum };
        assert!(datagrams.is_sound(42 + 32 * 64));
        assert!(Offload { gso_size: 36.into(), ..cut }.is_sound(65_535 + 18));
        assert!(!Offload { gso_size: 16.into(), ..cut }.is_sound(64_000));
        assert!(!Offload { gso_type: 2, ..cut }.is_sound(64_000));
        assert!(!Offload { flags: 8, ..cut }.is_sound(64_000));
    }
}
