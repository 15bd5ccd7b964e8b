//! Network devices (section 5.1).

use zerocopy::byteorder::little_endian::U16;
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

/// Device type of a network device, which makes its PCI device id.
pub const DEVICE_TYPE: u16 = 1;
/// Class code: Ethernet controller (PCI Code and ID Assignment Specification 1.15, section 1.3).
pub const CLASS_CODE: [u8; 3] = [0x02, 0x00, 0x00];

/// Feature bits (section 5.1.3).
pub mod feature {
    /// The device completes checksums.
    pub const CSUM: u64 = 1 << 0;
    /// The driver takes frames whose checksum is not complete.
    pub const GUEST_CSUM: u64 = 1 << 1;
    /// What the driver takes can be changed.
    pub const CTRL_GUEST_OFFLOADS: u64 = 1 << 2;
    /// The device says how long packets may be.
    pub const MTU: u64 = 1 << 3;
    /// The device has an address.
    pub const MAC: u64 = 1 << 5;
    /// The driver takes large TCP segments over IPv4.
    pub const GUEST_TSO4: u64 = 1 << 7;
    /// The driver takes large TCP segments over IPv6.
    pub const GUEST_TSO6: u64 = 1 << 8;
    /// The driver takes large TCP segments with congestion bits.
    pub const GUEST_ECN: u64 = 1 << 9;
    /// The driver takes UDP that is to be fragmented.
    pub const GUEST_UFO: u64 = 1 << 10;
    /// The device takes large TCP segments over IPv4.
    pub const HOST_TSO4: u64 = 1 << 11;
    /// The device takes large TCP segments over IPv6.
    pub const HOST_TSO6: u64 = 1 << 12;
    /// The device takes large TCP segments with congestion bits.
    pub const HOST_ECN: u64 = 1 << 13;
    /// The device takes UDP that is to be fragmented.
    pub const HOST_UFO: u64 = 1 << 14;
    /// A frame may lie in several receive buffers.
    pub const MRG_RXBUF: u64 = 1 << 15;
    /// The configuration has the link's status.
    pub const STATUS: u64 = 1 << 16;
    /// There is a control queue.
    pub const CTRL_VQ: u64 = 1 << 17;
    /// Receive modes can be set.
    pub const CTRL_RX: u64 = 1 << 18;
    /// VLANs can be filtered.
    pub const CTRL_VLAN: u64 = 1 << 19;
    /// More receive modes can be set.
    pub const CTRL_RX_EXTRA: u64 = 1 << 20;
    /// The driver can be asked to announce itself.
    pub const GUEST_ANNOUNCE: u64 = 1 << 21;
    /// There are several pairs of queues.
    pub const MQ: u64 = 1 << 22;
    /// The address can be set.
    pub const CTRL_MAC_ADDR: u64 = 1 << 23;
    /// The driver takes large UDP messages over IPv4.
    pub const GUEST_USO4: u64 = 1 << 54;
    /// The driver takes large UDP messages over IPv6.
    pub const GUEST_USO6: u64 = 1 << 55;
    /// The device takes large UDP messages.
    pub const HOST_USO: u64 = 1 << 56;
    /// The configuration has speed and duplex.
    pub const SPEED_DUPLEX: u64 = 1 << 63;

    /// What the driver takes, which [`CTRL_GUEST_OFFLOADS`] changes (section 5.1.6.5.6).
    pub const GUEST_OFFLOADS: u64 =
        GUEST_CSUM | GUEST_TSO4 | GUEST_TSO6 | GUEST_ECN | GUEST_UFO | GUEST_USO4 | GUEST_USO6;
}

/// Device configuration (section 5.1.4): offsets.
pub mod config {
    /// 6 bytes: the address.
    pub const MAC: u64 = 0;
    /// 16 bits: [`LINK_UP`] and [`ANNOUNCE`].
    pub const STATUS: u64 = 6;
    /// 16 bits: pairs of queues at most.
    pub const MAX_PAIRS: u64 = 8;
    /// 16 bits: bytes of the longest packet that the network carries.
    pub const MTU: u64 = 10;
    /// 32 bits: megabits per second.
    pub const SPEED: u64 = 12;
    /// 8 bits: 1 for full duplex, 0 for half.
    pub const DUPLEX: u64 = 16;
    /// Bytes that are used here.
    pub const SIZE: u64 = 17;

    /// Status: the link is up.
    pub const LINK_UP: u16 = 1;
    /// Status: the driver is to announce itself.
    pub const ANNOUNCE: u16 = 2;
    /// Speed: the device does not know it.
    pub const SPEED_UNKNOWN: u32 = 0xffff_ffff;
    /// Duplex: both ends send at once.
    pub const DUPLEX_FULL: u8 = 1;
}

/// The header before each frame (section 5.1.6).
#[derive(
    Debug,
    Clone,
    Copy,
    Default,
    PartialEq,
    Eq,
    FromBytes,
    IntoBytes,
    Immutable,
    KnownLayout,
    Unaligned,
)]
#[repr(C)]
pub struct NetHeader {
    /// 1: the checksum is to be computed; 2: it was verified.
    pub flags: u8,
    /// How the frame is to be cut.
    pub gso_type: u8,
    /// Bytes of all headers of a frame that is to be cut.
    pub hdr_len: U16,
    /// Bytes of payload in each piece.
    pub gso_size: U16,
    /// Where the checksum begins to count.
    pub csum_start: U16,
    /// Where the checksum goes, from there.
    pub csum_offset: U16,
    /// Buffers that a received frame lies in.
    pub num_buffers: U16,
}

/// Bytes of the header before each frame (section 5.1.6), with the number of buffers.
pub const HEADER_SIZE: usize = 12;
/// Offset of the number of buffers in it, 16 bits.
pub const HEADER_BUFFERS: usize = 10;

/// Commands of the control queue (section 5.1.6.5): class and command.
pub mod control {
    /// The last byte: done.
    pub const OK: u8 = 0;
    /// The last byte: refused.
    pub const ERROR: u8 = 1;

    /// Receive modes, one byte each: every unicast frame.
    pub const PROMISCUOUS: (u8, u8) = (0, 0);
    /// 1 takes every multicast frame, 0 those that the table has.
    pub const ALL_MULTICAST: (u8, u8) = (0, 1);
    /// Every unicast frame, again.
    pub const ALL_UNICAST: (u8, u8) = (0, 2);
    /// 1 drops multicast frames, whatever the other modes say.
    pub const NO_MULTICAST: (u8, u8) = (0, 3);
    /// 1 drops frames for one address, whatever the other modes say.
    pub const NO_UNICAST: (u8, u8) = (0, 4);
    /// 1 drops broadcast frames.
    pub const NO_BROADCAST: (u8, u8) = (0, 5);
    /// Two tables of addresses: unicast, multicast.
    pub const MAC_TABLE_SET: (u8, u8) = (1, 0);
    /// The device's own address, 6 bytes.
    pub const MAC_SET: (u8, u8) = (1, 1);
    /// Adds a VLAN, 16 bits.
    pub const VLAN_ADD: (u8, u8) = (2, 0);
    /// Takes a VLAN away.
    pub const VLAN_DELETE: (u8, u8) = (2, 1);
    /// The driver has announced itself.
    pub const ANNOUNCE_ACK: (u8, u8) = (3, 0);
    /// How many pairs of queues are used, 16 bits.
    pub const PAIRS_SET: (u8, u8) = (4, 0);
    /// What the driver takes, 64 bits.
    pub const GUEST_OFFLOADS_SET: (u8, u8) = (5, 0);
}
