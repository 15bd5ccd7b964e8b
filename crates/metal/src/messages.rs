//! What an interrupt of a modelled function does, by its entry in the MSI-X table (pure).
//!
//! The table is the borrower's to write, as a device's own is: an entry says where a message goes, and what it says.
//! A message leads to the borrower's local APICs or nowhere, whatever the entry says.
//! Source: PCIe base 6.0, sections 7.7.2.6 to 7.7.2.9.

use std::ops::Range;

/// Bit of an entry's last word: its messages are held back.
pub const MASKED: u32 = 1;

/// What is done with an interrupt.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum MsiEffect {
    /// A word to be stored, so many bytes into the range that leads to the borrower's local APICs.
    Store {
        /// Offset in that range.
        offset: u64,
        /// The message's data, 32 bits as they are in the entry.
        data: u32,
    },
    /// It is masked: pending until it is not.
    Pending,
    /// Its address is none where messages go.
    Nowhere,
}

/// What is done with an interrupt whose entry is `entry`: address, its upper half, data, control. `interrupts` are the
/// addresses that lead to the borrower's local APICs.
pub fn message([low, high, data, control]: [u32; 4], interrupts: &Range<u64>) -> MsiEffect {
    if control & MASKED != 0 {
        return MsiEffect::Pending;
    }
    let address = u64::from(low) | u64::from(high) << 32;
    let inside = interrupts.contains(&address) && interrupts.end - address >= 4;
    match address.is_multiple_of(4) && inside {
        true => MsiEffect::Store { offset: address - interrupts.start, data },
        false => MsiEffect::Nowhere,
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const APICS: Range<u64> = 0x1_0000_0000..0x1_0010_0000;

    #[test]
    fn a_message_goes_where_its_entry_says() {
        assert_eq!(
            message([0xff0, 1, 33, 0], &APICS),
            MsiEffect::Store { offset: 0xff0, data: 33 }
        );
        assert_eq!(message([0xff0, 1, 33, 1], &APICS), MsiEffect::Pending);
        for (low, high) in [(0xff0, 0), (0xff2, 1), (0x10_0000, 1), (u32::MAX, u32::MAX)] {
            assert_eq!(
                message([low, high, 33, 0], &APICS),
                MsiEffect::Nowhere,
                "{low:#x} {high:#x}"
            );
        }
    }

    proptest! {
        /// Whatever the borrower writes into its table, what is stored lies inside of the range, aligned.
        #[test]
        fn a_message_never_leaves_the_range(
            entry in any::<[u32; 4]>(),
            near in any::<bool>(),
            start in 0u64..1 << 40,
            length in 0u64..1 << 24,
        ) {
            let range = start..start + length;
            let mut entry = entry;
            if near {
                let address = start.wrapping_add(u64::from(entry[0]) % (length + 8)).wrapping_sub(4);
                (entry[0], entry[1]) = (address as u32, (address >> 32) as u32);
            }
            if let MsiEffect::Store { offset, data } = message(entry, &range) {
                prop_assert!(offset + 4 <= length && (start + offset).is_multiple_of(4));
                prop_assert_eq!(data, entry[2]);
                prop_assert_eq!(entry[3] & 1, 0);
            }
        }
    }
}
