//! Split virtqueues (section 2.7) and packed ones (section 2.8).

use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

/// Bits of a descriptor's flags.
pub mod flags {
    /// Another descriptor of the chain follows.
    pub const NEXT: u16 = 1;
    /// The device writes the buffer.
    pub const WRITE: u16 = 2;
    /// The buffer is a table of descriptors.
    pub const INDIRECT: u16 = 4;
    /// Of a packed ring: equals the driver's wrap counter when the descriptor is available.
    pub const AVAIL: u16 = 1 << 7;
    /// Of a packed ring: equals the device's wrap counter when it is used.
    pub const USED: u16 = 1 << 15;
}

/// Bytes of a descriptor of either kind.
pub const DESCRIPTOR_SIZE: usize = 16;
/// The largest queue (sections 2.7 and 2.8.10.1).
pub const MAX_QUEUE_SIZE: u16 = 32_768;

/// A descriptor of a split ring or of an indirect table of one (section 2.7.5).
#[derive(
    Debug, Clone, Copy, Default, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout,
)]
#[repr(C)]
pub struct SplitDescriptor {
    /// Address of the buffer.
    pub address: u64,
    /// Bytes that the buffer has room for.
    pub length: u32,
    /// Who uses the buffer, and whether another follows: bits of [`flags`].
    pub flags: u16,
    /// The next one where the flags say so.
    pub next: u16,
}

/// A descriptor of a packed ring (section 2.8.13).
#[derive(
    Debug, Clone, Copy, Default, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout,
)]
#[repr(C)]
pub struct PackedDescriptor {
    /// Where the buffer begins.
    pub address: u64,
    /// Bytes of it; of a used one, how many were written.
    pub length: u32,
    /// The driver's name for the buffer.
    pub id: u16,
    /// Who uses the buffer and who has it now: bits of [`flags`].
    pub flags: u16,
}

impl PackedDescriptor {
    /// It as two words of memory. Stored from registers, it does not wait for earlier stores, as a descriptor does that is
    /// put together in memory and loaded from there as a whole.
    #[inline]
    pub fn words(&self) -> [u64; 2] {
        let PackedDescriptor { address, length, id, flags } = *self;
        let rest = u64::from(length) | u64::from(id) << 32 | u64::from(flags) << 48;
        [address.to_le(), rest.to_le()]
    }
}

/// Offset of the flags in a packed descriptor.
pub const PACKED_FLAGS: usize = 14;

/// The available and the used ring of a split queue (sections 2.7.6 and 2.7.8).
pub mod split {
    /// Offset of the flags, 16 bits, in both.
    pub const FLAGS: usize = 0;
    /// Offset of the index, 16 bits, in both.
    pub const INDEX: usize = 2;
    /// Offset of the entries in both.
    pub const RING: usize = 4;
    /// Bytes of an entry of the available ring.
    pub const AVAILABLE_SIZE: usize = 2;
    /// Bytes of an entry of the used ring: identifier and length.
    pub const USED_SIZE: usize = 8;
    /// Flag of the available ring: the driver wants no interrupts.
    pub const NO_INTERRUPT: u16 = 1;
    /// Flag of the used ring: the device wants no notifications.
    pub const NO_NOTIFY: u16 = 1;

    /// Bytes of the available ring, with the event index.
    pub const fn available_bytes(size: u16) -> usize {
        RING + AVAILABLE_SIZE * size as usize + 2
    }

    /// Bytes of the used ring, with the event index.
    pub const fn used_bytes(size: u16) -> usize {
        RING + USED_SIZE * size as usize + 2
    }
}

/// The event suppression structures of a packed queue (section 2.8.14).
pub mod event {
    /// Offset of the descriptor's place and wrap counter, 16 bits.
    pub const PLACE: usize = 0;
    /// Offset of the flags, 16 bits.
    pub const FLAGS: usize = 2;
    /// Bytes of the structure.
    pub const SIZE: usize = 4;
    /// Flags: events are wanted.
    pub const ENABLE: u16 = 0;
    /// Flags: no events are wanted.
    pub const DISABLE: u16 = 1;
    /// Flags: an event is wanted for a descriptor.
    pub const DESCRIPTOR: u16 = 2;
    /// The bit of the place that is the wrap counter.
    pub const WRAP: u16 = 1 << 15;
}

/// Whether continuing from `old` to `new` passes `event` (section 2.7.7.2).
pub const fn passes(event: u16, new: u16, old: u16) -> bool {
    new.wrapping_sub(event).wrapping_sub(1) < new.wrapping_sub(old)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_event_is_passed_by_who_uses_its_entry() {
        assert!(passes(5, 6, 5) && passes(5, 9, 4));
        assert!(!passes(6, 6, 5) && !passes(4, 6, 5));
        assert!(passes(0xffff, 0, 0xffff) && passes(0, 2, 0xfffe));
        assert!(!passes(5, 5, 5));
    }
}
