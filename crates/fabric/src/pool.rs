//! The global memory pool: what the hosts export, in one 64-bit address space of the rack.
//!
//! It is Marlin's map (2014, section 3.1 and figure 2), as each machine there sees it. Addresses
//! are dealt out in *slots*, each as large as the largest host's memory rounded up to a power of
//! two, as the window of an NTB is. The first slot is nobody's: there each host's own memory lies, which
//! it reaches directly. Then each host has one, in the rack file's order, and what it exports
//! begins with it. With hosts of 32 GiB the first one, the management host, is at 32 GiB, and the
//! `i`-th after it at `64 GiB + (i - 1) * 32 GiB`.
//!
//! Slots are sized by what hosts have, not by what they export, so that exporting more moves nobody.
//! [`Extents`] says which pages of one host's export are given.

use std::collections::BTreeMap;

use crate::rack::{PAGE, Rack};

/// The exported memory of a rack's hosts.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MemoryPool {
    slot: u64,
    hosts: Vec<Exported>,
}

/// What one host exports.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Exported {
    /// Name of the host whose memory the part is.
    pub host: String,
    /// Its SISCI node id.
    pub node_id: u32,
    /// Where its memory begins in the rack's address space.
    pub base: u64,
    /// How much of it is exported, in bytes.
    pub size: u64,
}

impl MemoryPool {
    /// The pool of a rack.
    pub fn of(rack: &Rack) -> MemoryPool {
        let largest = rack.hosts.iter().map(|host| host.memory).max().unwrap_or(0);
        // At most 64 TiB by 16382 hosts: below 2^60.
        let slot = largest.max(PAGE).next_power_of_two();
        let exported = |(host, nth): (&crate::rack::Host, u64)| Exported {
            host: host.name.clone(),
            node_id: host.node_id,
            base: nth * slot,
            size: host.export,
        };
        MemoryPool { slot, hosts: rack.hosts.iter().zip(1..).map(exported).collect() }
    }

    /// What each host exports, in the order of their addresses.
    pub fn hosts(&self) -> &[Exported] {
        &self.hosts
    }

    /// What the host of that name exports.
    pub fn host(&self, name: &str) -> Option<&Exported> {
        self.hosts.iter().find(|exported| exported.host == name)
    }

    /// Whose memory is at `address`, and how many bytes from that memory's beginning; `None` where
    /// nobody exports any.
    pub fn resolve(&self, address: u64) -> Option<(&Exported, u64)> {
        let nth = (address / self.slot).checked_sub(1)?;
        let exported = self.hosts.get(usize::try_from(nth).ok()?)?;
        let offset = address % self.slot;
        (offset < exported.size).then_some((exported, offset))
    }

    /// The address of the byte at `offset` of what `host` exports; `None` when it exports none
    /// there.
    pub fn address(&self, host: &str, offset: u64) -> Option<u64> {
        let exported = self.host(host)?;
        (offset < exported.size).then(|| exported.base + offset)
    }
}

/// Which pages of a host's export are given and which are free.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Extents {
    size: u64,
    /// The free ranges: by beginning, each one's length. None touches another.
    free: BTreeMap<u64, u64>,
}

impl Extents {
    /// All of `size` bytes free; what is left after the last whole page is never given.
    pub fn new(size: u64) -> Extents {
        let size = size - size % PAGE;
        Extents { size, free: (size > 0).then_some((0, size)).into_iter().collect() }
    }

    /// Bytes that are free, in however many pieces.
    pub fn free_bytes(&self) -> u64 {
        self.free.values().sum()
    }

    /// Takes the first free range that has room for `size` bytes, rounded up to whole pages, and
    /// says where it begins; `None` when there is none, or nothing is asked for.
    pub fn allocate(&mut self, size: u64) -> Option<u64> {
        let size = size.checked_next_multiple_of(PAGE).filter(|size| *size > 0)?;
        let (start, length) = self.free.iter().find(|(_, length)| **length >= size)?;
        let (start, length) = (*start, *length);
        self.free.remove(&start);
        if length > size {
            self.free.insert(start + size, length - size);
        }
        Some(start)
    }

    /// Gives `size` bytes from `offset` on back, rounded up to whole pages. They may be a part of
    /// what was taken at once, or several such ranges together. False, and nothing is changed, when
    /// they are not all taken.
    pub fn free(&mut self, offset: u64, size: u64) -> bool {
        let Some(length) = size.checked_next_multiple_of(PAGE) else { return false };
        let Some(end) = offset.checked_add(length) else { return false };
        let before = self.free.range(..end).next_back().map(|(start, length)| (*start, *length));
        let touches = before.is_some_and(|(start, length)| start + length > offset);
        if !offset.is_multiple_of(PAGE) || length == 0 || end > self.size || touches {
            return false;
        }
        let (mut start, mut length) = (offset, length);
        if let Some(after) = self.free.remove(&end) {
            length += after;
        }
        if let Some((first, free)) = before.filter(|(first, free)| first + free == offset) {
            (start, length) = (first, length + free);
        }
        self.free.insert(start, length);
        true
    }
}
