//! What software has programmed into a function's configuration space: where it decodes its BARs, and
//! whether it may master the bus. Read from the bytes themselves, so that it is told of any function,
//! whoever runs it.
//!
//! Source: PCI Express Base Specification 6.0, sections 7.5.1.1.3 (command), 7.5.1.2.1 (BARs) and 7.5.2.2
//! (power management).

use rackbus_fabric::peer::Programmed;
use rackbus_spec::pcie::{Command, bar, capability, header, pm};

/// Bytes of configuration space that [`programmed`] looks at: those of a conventional function.
pub const LOOKED_AT: usize = 256;
/// A BAR that is of I/O space, which is not decoded here.
const IO_SPACE: u32 = 1;
/// A list of capabilities has no more entries than fit; a longer one goes in a circle.
const MOST_CAPABILITIES: usize = 48;

/// What `config`, the first [`LOOKED_AT`] bytes of a configuration space, says. A function that does not
/// answer, whose bytes are all ones, decodes nothing.
pub fn programmed(config: &[u8]) -> Programmed {
    let space = Space(config);
    let awake = space.u16(header::VENDOR_ID) != u16::MAX && space.power_state() == 0;
    let command = Command::from_bits_retain(if awake { space.u16(header::COMMAND) } else { 0 });
    let mut found =
        Programmed { masters_bus: command.contains(Command::BUS_MASTER), ..Programmed::default() };
    if !command.contains(Command::MEMORY_SPACE) {
        return found;
    }
    let mut index = 0;
    while index < 6 {
        let low = space.bar(index);
        let wide = low & (IO_SPACE | bar::TYPE_64BIT) == bar::TYPE_64BIT;
        let high = if wide { space.bar(index + 1) } else { 0 };
        let address = u64::from(high) << 32 | u64::from(low & !bar::FLAGS_MASK);
        if low & IO_SPACE == 0 && address != 0 {
            found.bars.insert(index, address);
        }
        index += if wide { 2 } else { 1 };
    }
    found
}

/// Bytes of a configuration space; those that are missing read as ones.
struct Space<'a>(&'a [u8]);

impl Space<'_> {
    fn byte(&self, at: u16) -> u8 {
        self.0.get(usize::from(at)).copied().unwrap_or(u8::MAX)
    }

    fn u16(&self, at: u16) -> u16 {
        u16::from_le_bytes([self.byte(at), self.byte(at + 1)])
    }

    /// The BAR of this number; the one after the last is empty.
    fn bar(&self, index: u8) -> u32 {
        let at = header::BAR0 + 4 * u16::from(index);
        match index {
            0..6 => u32::from(self.u16(at)) | u32::from(self.u16(at + 2)) << 16,
            _ => 0,
        }
    }

    /// 0 is D0, also of a function that knows no other.
    fn power_state(&self) -> u16 {
        let mut at = self.byte(header::CAPABILITIES_POINTER);
        for _ in 0..MOST_CAPABILITIES {
            if at < 0x40 {
                break;
            }
            let at16 = u16::from(at);
            if self.byte(at16) == capability::POWER_MANAGEMENT {
                return self.u16(at16 + pm::PMCSR) & pm::PMCSR_STATE;
            }
            at = self.byte(at16 + 1);
        }
        0
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use super::*;
    use crate::config::ConfigSpace;
    use crate::function::{Bar, FunctionInfo};

    const BUS_MASTER: u8 = 4;
    const MEMORY: u8 = 2;

    /// A function with a 32-bit BAR 0 and a 64-bit BAR 2.
    fn space() -> ConfigSpace {
        let bar = |index, is_64bit| {
            let prefetchable = is_64bit;
            Bar { index, size: 0x4000, is_64bit, prefetchable, mappable: None }
        };
        ConfigSpace::new(&FunctionInfo {
            vendor_id: 0x1b36,
            device_id: 0x10,
            subsystem_vendor_id: 0x1af4,
            subsystem_id: 0x1100,
            revision: 2,
            class: [1, 8, 2],
            bars: vec![bar(0, false), bar(2, true)],
            msix_vectors: 1,
            msi_vectors: 0,
            vendor: Vec::new(),
            serial: 1,
        })
    }

    fn look(space: &ConfigSpace) -> Programmed {
        let mut bytes = [0; LOOKED_AT];
        space.read(0, &mut bytes, false);
        programmed(&bytes)
    }

    #[test]
    fn bars_are_decoded_where_they_are_programmed_while_memory_space_is_on() {
        let mut space = space();
        assert_eq!(look(&space), Programmed::default(), "as after reset");
        space.write(0x10, &0xfe00_0000_u32.to_le_bytes());
        space.write(0x18, &0x38_0000_4000_u64.to_le_bytes());
        assert_eq!(look(&space), Programmed::default(), "memory space is off");
        space.write(4, &[MEMORY | BUS_MASTER, 0]);
        let bars = BTreeMap::from([(0, 0xfe00_0000), (2, 0x38_0000_4000)]);
        assert_eq!(look(&space), Programmed { masters_bus: true, bars });
        space.write(0x10, &[0; 4]);
        assert_eq!(look(&space).bars, BTreeMap::from([(2, 0x38_0000_4000)]));
        // D3hot: neither requests nor answers.
        space.write(0x44, &[3]);
        assert_eq!(look(&space), Programmed::default());
        space.write(0x44, &[0]);
        space.write(4, &[BUS_MASTER, 0]);
        assert_eq!(look(&space), Programmed { masters_bus: true, bars: BTreeMap::new() });
        space.reset();
        assert_eq!(look(&space), Programmed::default());
    }

    #[test]
    fn absent_or_malformed_programming_decodes_nothing() {
        assert_eq!(programmed(&[0xff; LOOKED_AT]), Programmed::default());
        assert_eq!(programmed(&[]), Programmed::default());
        // Capabilities that lead in a circle, an I/O BAR, a 64-bit BAR that has no second half.
        let mut bytes = [0; LOOKED_AT];
        bytes[usize::from(header::CAPABILITIES_POINTER)] = 0x40;
        bytes[0x41] = 0x40;
        bytes[4] = MEMORY;
        bytes[0x10..0x14].copy_from_slice(&0xc001_u32.to_le_bytes());
        bytes[0x24..0x28].copy_from_slice(&0x1000_0004_u32.to_le_bytes());
        assert_eq!(programmed(&bytes).bars, BTreeMap::from([(5, 0x1000_0000)]));
    }
}
