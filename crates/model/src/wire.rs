//! What a PCIe link costs: how long bytes take on it, and how many bytes a packet is.
//!
//! Sources: PCI Express Base Specification 6.0, sections 2.2 (TLP headers), 3.5 (DLLPs), 4.2
//! (framing and encoding); what is an estimate is called one.

use rackbus_fabric::TopologyLink;

use crate::time::Time;

/// Bytes of a memory request's header with a 64-bit address (specification 2.2.4.1: 4 DW).
pub const REQUEST_HEADER: u32 = 16;
/// Bytes of a memory request's header with an address below 4 GiB (specification 2.2.4.1: 3 DW, which
/// requests for such addresses must have).
pub const LOW_REQUEST_HEADER: u32 = 12;
/// Bytes of a completion's header (specification 2.2.9: 3 DW).
pub const COMPLETION_HEADER: u32 = 12;
/// Bytes that frame a TLP up to Gen5: start and sequence number, LCRC and end (Gen1 and 2:
/// 1 + 2 + 4 + 1; Gen3 to 5: a 4-byte STP token with the sequence number in it, and 4 of LCRC).
const FRAMING: u32 = 8;
/// Bytes of a DLLP with its framing (specification 3.5: 6, and 2 to frame it).
pub const DLLP: u32 = 8;
/// A flow-control unit of data (specification 2.6.1).
pub const CREDIT_BYTES: u32 = 16;

/// Generation and lanes of what joins parts where no link is written.
pub const AMPLE: (u8, u8) = (5, 16);

/// Fixed point: fractions of a picosecond per byte, and of a byte of DLLPs.
const FRACTION: u32 = 16;

/// Bytes of a slot of a CXL flit: what the header of a request, of a write with data, of data that comes back
/// or of a write's response takes. Several short ones may share a slot; each has its own here.
pub const CXL_SLOT: u32 = 16;

/// Bytes of DLLPs, or of what a CXL message causes, for packets: fractions of a byte where there is one DLLP for several.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Dllps(u64);

impl Dllps {
    /// A link that sends none beside its packets: flits carry their own, and tests leave them out.
    pub const NONE: Dllps = Dllps(0);

    /// DLLPs of so many bytes for each packet, with no fraction to carry on.
    pub const fn whole(bytes: u32) -> Dllps {
        Dllps((bytes as u64) << FRACTION)
    }

    /// A packet's part of a DLLP for each so many packets; none where that is 0.
    fn each(packets: u32) -> Dllps {
        Dllps(Dllps::whole(DLLP).0.checked_div(u64::from(packets)).unwrap_or(0))
    }

    /// How many bytes they are.
    pub fn bytes(self) -> f64 {
        self.0 as f64 / f64::from(1u32 << FRACTION)
    }

    /// What is left when so many bytes of them have been sent.
    pub fn after(self, sent: u64) -> Dllps {
        Dllps(self.0.saturating_sub(sent << FRACTION))
    }

    /// Takes the whole bytes, and leaves what is less than one.
    pub fn take(&mut self) -> u32 {
        let whole = self.0 >> FRACTION;
        self.0 -= whole << FRACTION;
        whole as u32
    }
}

impl std::ops::Add for Dllps {
    type Output = Dllps;
    fn add(self, other: Dllps) -> Dllps {
        Dllps(self.0 + other.0)
    }
}

/// A link's speed, one way.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Wire {
    /// Picoseconds per byte, times 2^16.
    per_byte: u64,
    /// Bytes around header and payload of each TLP.
    framing: u32,
}

impl Wire {
    /// The wire of a link. What joins parts inside of a chip, or without the file saying how, is as wide as
    /// the widest link of today ([`AMPLE`]): packets wait and take turns there as anywhere.
    pub fn of(link: TopologyLink) -> Wire {
        match link {
            TopologyLink::Internal => Wire::pcie(AMPLE.0, AMPLE.1),
            TopologyLink::Pcie { generation, lanes } => Wire::pcie(generation, lanes),
        }
    }

    /// The DLLPs that a packet causes the other way, when there is one for each so many packets, or none where that
    /// is 0. Flits carry acknowledgements and credits in bytes of their own (specification 6.0, 4.2.3).
    pub fn dllps(self, acknowledge_every: u32, update_every: u32) -> Dllps {
        match self.framing {
            0 => Dllps::NONE,
            _ => Dllps::each(acknowledge_every) + Dllps::each(update_every),
        }
    }

    /// A PCIe link of a generation (1 to 6) and lanes (1 to 16, 32 counts as wide as it is).
    pub fn pcie(generation: u8, lanes: u8) -> Wire {
        let lanes = u64::from(lanes.max(1));
        // Picoseconds per byte and lane, times 2^16: transfer rate and encoding.
        let lane = match generation {
            0 | 1 => 4_000 << FRACTION,           // 2.5 GT/s, 8b/10b
            2 => 2_000 << FRACTION,               // 5 GT/s, 8b/10b
            3 => (1_015_625 << FRACTION) / 1_000, // 8 GT/s, 128b/130b
            4 => (1_015_625 << FRACTION) / 2_000, // 16 GT/s
            5 => (1_015_625 << FRACTION) / 4_000, // 32 GT/s
            _ => (125 << FRACTION) * 256 / 236,   // 64 GT/s; 236 of a flit's 256 bytes carry TLPs
        };
        // A flit carries sequence number and CRC for all TLPs in it.
        let framing = if generation < 6 { FRAMING } else { 0 };
        Wire { per_byte: lane / lanes, framing }
    }

    /// A link that carries CXL in flits: of 68 bytes with four slots of 16 (CXL 1.1 to 3.x, 3.0 section 4.2),
    /// or at 64 GT/s of 256 bytes with fifteen slots (section 4.3). Sequence numbers and CRC are in the flits.
    pub fn cxl(generation: u8, lanes: u8) -> Wire {
        let wire = Wire::pcie(generation.min(5), lanes);
        let per_byte = match generation {
            6.. => ((125 << FRACTION) / u64::from(lanes.max(1))) * 256 / 240,
            _ => wire.per_byte * 68 / 64,
        };
        Wire { per_byte, framing: 0 }
    }

    /// How long `bytes` take, rounded up to a picosecond.
    pub fn time(self, bytes: u32) -> Time {
        Time::from_ps((u64::from(bytes) * self.per_byte).div_ceil(1 << FRACTION))
    }

    /// How many whole bytes fit in a span.
    pub fn bytes_in(self, span: Time) -> u64 {
        (span.ps() << FRACTION) / self.per_byte
    }

    /// Bytes on the wire of a TLP with this header and payload.
    pub fn packet(self, header: u32, payload: u32) -> u32 {
        self.framing + header + payload
    }

    /// Bytes of packets, headers and framing included, per second; encoding is taken off.
    pub fn rate(self) -> f64 {
        1e12 * f64::from(1u32 << FRACTION) / self.per_byte as f64
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rates_are_the_standards() {
        let cases =
            [(1, 1, 0.25e9), (2, 8, 4.0e9), (3, 8, 7.8769e9), (3, 16, 15.754e9), (5, 16, 63.015e9)];
        for (generation, lanes, rate) in cases {
            let ours = Wire::pcie(generation, lanes).rate();
            assert!((ours / rate - 1.0).abs() < 1e-4, "Gen{generation} x{lanes}: {ours}");
        }
    }

    #[test]
    fn flits_carry_acknowledgements_and_credits_in_bytes_of_their_own() {
        assert_eq!(Wire::pcie(5, 16).dllps(2, 2), Dllps::whole(8));
        assert_eq!(Wire::pcie(5, 16).dllps(4, 2), Dllps::whole(6));
        assert_eq!(Wire::pcie(6, 16).dllps(1, 1), Dllps::NONE);
        assert_eq!(Wire::pcie(5, 16).dllps(0, 0), Dllps::NONE);
    }

    /// One of 8 bytes for three packets is 2.67 for each, and not 2; one for 64 is not none.
    #[test]
    fn what_dllps_cost_a_packet_is_no_whole_number() {
        for every in 1..=64 {
            let bytes = Wire::pcie(5, 16).dllps(every, every).bytes();
            assert!((bytes - 16.0 / f64::from(every)).abs() < 1e-4, "{every}: {bytes}");
        }
        let (mut owed, mut sent) = (Dllps::NONE, 0);
        for _ in 0..300 {
            owed = owed + Wire::pcie(5, 16).dllps(3, 3);
            sent += owed.take();
        }
        assert!((1599..=1600).contains(&sent), "{sent}");
        assert_eq!(Dllps::whole(9).after(4), Dllps::whole(5));
    }

    #[test]
    fn a_packet_of_64_bytes_is_88_on_the_wire() {
        let wire = Wire::pcie(2, 8);
        assert_eq!(wire.packet(REQUEST_HEADER, 64), 88);
        assert_eq!(wire.time(88), Time::from_ns(22));
        assert_eq!(wire.bytes_in(Time::from_ns(22)), 88);
    }
}
