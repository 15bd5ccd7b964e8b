//! What an interrupt of a modelled function does, by its entry in the MSI-X table (pure).
//!
//! The table is the borrower's to write, as a device's own is: an entry says where a message goes, and what it says.
//! A message leads to the borrower's local APICs or nowhere, whatever the entry says.
//! Source: PCIe base 6.0, sections 7.7.2.6 to 7.7.2.9.

use std::ops::Range;

use crate::isolated::MAPPED_MSI;
use crate::plan::WindowPlan;
use crate::window::MSI_SIZE;

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

/// By which addresses messages lead to the borrower's local APICs.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ApicWindow {
    /// The addresses, as entries have them.
    pub addresses: Range<u64>,
    /// Where the first of them leads in the range in which messages are stored, in bytes.
    pub offset: u64,
}

impl ApicWindow {
    /// Those of a function that reaches all of the lender's window 1.
    pub fn whole(plan: &WindowPlan) -> ApicWindow {
        ApicWindow { addresses: plan.interrupts.clone(), offset: 0 }
    }

    /// Those of one that is isolated, which reaches the local APICs alone; `None` where window 1 has not all of them.
    pub fn isolated(plan: &WindowPlan) -> Option<ApicWindow> {
        let offset = plan.local_apics()?;
        Some(ApicWindow { addresses: MAPPED_MSI..MAPPED_MSI + MSI_SIZE, offset })
    }
}

/// What is done with an interrupt whose entry is `entry`: address, its upper half, data, control. `interrupts` are the
/// addresses that lead to the borrower's local APICs.
pub fn message([low, high, data, control]: [u32; 4], interrupts: &ApicWindow) -> MsiEffect {
    if control & MASKED != 0 {
        return MsiEffect::Pending;
    }
    let address = u64::from(low) | u64::from(high) << 32;
    let ApicWindow { addresses, offset } = interrupts;
    let inside = addresses.contains(&address) && addresses.end - address >= 4;
    match address.is_multiple_of(4) && inside {
        true => MsiEffect::Store { offset: offset + (address - addresses.start), data },
        false => MsiEffect::Nowhere,
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const APICS: ApicWindow = ApicWindow { addresses: 0x1_0000_0000..0x1_0010_0000, offset: 0 };

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

    #[test]
    fn messages_of_an_isolated_function_reach_the_local_apics_by_other_addresses_alone() {
        let plan = WindowPlan::new(64 << 20, 64 << 20, 512 << 20).unwrap();
        let (whole, isolated) = (ApicWindow::whole(&plan), ApicWindow::isolated(&plan).unwrap());
        let entry = |address: u64| [address as u32, (address >> 32) as u32, 33, 0];
        let stored = |offset| MsiEffect::Store { offset, data: 33 };
        let apics = 0xfee0_0000 - 0xfc00_0000;
        for at in [0, 0x1000, MSI_SIZE - 4] {
            let address = plan.msi_base() + at;
            assert_eq!(message(entry(address), &whole), stored(apics + at));
            assert_eq!(message(entry(address), &isolated), MsiEffect::Nowhere);
            assert_eq!(message(entry(MAPPED_MSI + at), &isolated), stored(apics + at));
            assert_eq!(message(entry(MAPPED_MSI + at), &whole), MsiEffect::Nowhere);
        }
        for beside in [MAPPED_MSI - 4, MAPPED_MSI + MSI_SIZE] {
            assert_eq!(message(entry(beside), &isolated), MsiEffect::Nowhere);
        }
        let small = WindowPlan::new(64 << 20, 512 << 10, 512 << 20).unwrap();
        assert_eq!(ApicWindow::isolated(&small), None);
    }

    proptest! {
        /// Whatever the borrower writes into its table, what is stored lies inside of the range, aligned.
        #[test]
        fn a_message_never_leaves_the_range(
            entry in any::<[u32; 4]>(),
            near in any::<bool>(),
            start in 0u64..1 << 40,
            length in 0u64..1 << 24,
            offset in 0u64..1 << 24,
        ) {
            let range = ApicWindow { addresses: start..start + length, offset };
            let mut entry = entry;
            if near {
                let address = start.wrapping_add(u64::from(entry[0]) % (length + 8)).wrapping_sub(4);
                (entry[0], entry[1]) = (address as u32, (address >> 32) as u32);
            }
            if let MsiEffect::Store { offset: to, data } = message(entry, &range) {
                let at = to - offset;
                prop_assert!(at + 4 <= length && (start + at).is_multiple_of(4));
                prop_assert_eq!(data, entry[2]);
                prop_assert_eq!(entry[3] & 1, 0);
            }
        }
    }
}
