//! Which register an offset of BAR 0 is.

use super::map;

/// A register, or a part of a table, and where it begins.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Register {
    Control,
    Base(usize),
    Limit(usize),
    Status,
    Disabled,
    Misses,
    Scratchpad(usize),
    Vector(usize),
    Doorbell(u32),
    PeerScratchpad(usize),
    PeerStatus,
    PeerDisabled,
    /// Keeps what is written.
    Kept(usize),
    Table(usize),
}

/// Registers that keep what is written: offset and width.
pub(super) const KEPT: [(u64, u64); 9] = [
    (map::OUTBOUND, 8),
    (map::OUTBOUND + 0x08, 8),
    (map::OUTBOUND + 0x10, 8),
    (map::OUTBOUND + 0x18, 8),
    (map::OUTBOUND + 0x20, 8),
    (map::PEER_COMMAND, 2),
    (map::PEER_BARS, 8),
    (map::PEER_BARS + 0x08, 8),
    (map::PEER_BARS + 0x10, 8),
];
pub(super) const TABLE_WORDS: usize = map::MSIX_VECTORS as usize * 4;

impl Register {
    /// The register with the byte at `offset`, where it begins, and its width.
    pub fn at(offset: u64) -> Option<(Register, u64, u64)> {
        let array = |first: u64, width: u64, count: u64| {
            let index = offset.checked_sub(first)? / width;
            (index < count).then(|| (usize::try_from(index).unwrap_or(0), first + index * width))
        };
        let pads = map::SCRATCHPAD_COUNT as u64;
        let one = |register, first, width| {
            (first..first + width).contains(&offset).then_some((register, first, width))
        };
        one(Register::Control, map::CONTROL, 4)
            .or_else(|| one(Register::Base(0), map::INBOUND, 8))
            .or_else(|| one(Register::Limit(0), map::INBOUND + 0x08, 8))
            .or_else(|| one(Register::Base(1), map::INBOUND + 0x10, 8))
            .or_else(|| one(Register::Limit(1), map::INBOUND + 0x18, 8))
            .or_else(|| one(Register::Status, map::STATUS, 8))
            .or_else(|| one(Register::Disabled, map::DISABLED, 8))
            .or_else(|| one(Register::Misses, map::MISSES, 2))
            .or_else(|| one(Register::PeerStatus, map::PEER_STATUS, 8))
            .or_else(|| one(Register::PeerDisabled, map::PEER_DISABLED, 8))
            .or_else(|| {
                let (index, at) = array(map::SCRATCHPADS, 4, pads)?;
                Some((Register::Scratchpad(index), at, 4))
            })
            .or_else(|| {
                let (index, at) = array(map::VECTORS, 1, map::MSIX_VECTORS.into())?;
                Some((Register::Vector(index), at, 1))
            })
            .or_else(|| {
                let (index, at) = array(map::PEER_DOORBELLS, 4, map::DOORBELLS.into())?;
                Some((Register::Doorbell(u32::try_from(index).ok()?), at, 4))
            })
            .or_else(|| {
                let (index, at) = array(map::PEER_SCRATCHPADS, 4, pads)
                    .or_else(|| array(map::PEER_SCRATCHPADS_EM, 4, pads))?;
                Some((Register::PeerScratchpad(index), at, 4))
            })
            .or_else(|| {
                let index = KEPT.iter().position(|(at, width)| (*at..at + width).contains(&offset));
                index.map(|index| (Register::Kept(index), KEPT[index].0, KEPT[index].1))
            })
            .or_else(|| {
                let (index, at) = array(map::MSIX_TABLE, 4, TABLE_WORDS as u64)?;
                Some((Register::Table(index), at, 4))
            })
    }
}
