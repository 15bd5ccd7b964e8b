//! What the user of a physical function sees of its configuration space (pure).
//!
//! The kernel shows a function's BARs as the user's own, and keeps what would break the machine from being
//! written. What is left to do here: capabilities that are the machine's business are not shown (virtual
//! functions, translation of addresses by the function itself), whether messages are enabled is what the user
//! wrote, and not what the kernel made of it, and the MSI-X table is the user's own, which the kernel does not
//! show to anybody.
//!
//! Source: PCI Express Base Specification 6.0, sections 7.6.3 (extended capabilities), 7.7.1 (MSI) and 7.7.2
//! (MSI-X).

use std::ops::Range;

use rackbus_spec::pcie::{capability, header, msi, msix};
use rackbus_vfio::InterruptIndex;
use serde::{Deserialize, Serialize};

/// Where the extended capabilities begin.
const EXTENDED: usize = 0x100;
/// Extended capabilities that are not shown (PCI code and ID assignment, section 3).
const HIDDEN: [u16; 7] = [
    0x0e, // alternative routing-ID interpretation
    0x0f, // address translation services
    0x10, // single-root I/O virtualization
    0x13, // page requests
    0x15, // resizable BARs
    0x1b, // process address space identifiers
    0x24, // resizable BARs of virtual functions
];
/// The bits of MSI-X's control word that are the user's.
const MSIX_BITS: u16 = msix::CONTROL_ENABLE | msix::CONTROL_MASK_ALL;
/// More entries than a list of capabilities can have; one that is longer goes in a circle.
const MOST: usize = 1024;

/// Where the MSI-X table is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Table {
    bar: u8,
    offset: u64,
    bytes: u64,
}

/// What the user wrote to the control words of MSI and MSI-X.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct MessageControl {
    /// Whether MSI is enabled.
    msi_on: bool,
    /// Whether MSI-X is enabled, and all of it masked.
    msix_bits: u16,
}

/// A byte of the MSI-X table that a function has not.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct NoTableByte(pub u32);

/// The user's view of configuration space and of the MSI-X table.
#[derive(Debug)]
pub struct ShownConfiguration {
    /// What reads as zeroes and takes no writes; the first four bytes of a hidden capability lead to the next.
    hidden: Vec<Range<usize>>,
    msi: Option<usize>,
    msix: Option<usize>,
    control: MessageControl,
    table: Option<Table>,
    bytes: Vec<u8>,
}

impl ShownConfiguration {
    /// Of a function with this configuration space.
    pub fn of(config: &[u8]) -> ShownConfiguration {
        let capabilities = capabilities(config);
        let find = |id| capabilities.iter().find(|(found, _)| *found == id).map(|(_, at)| *at);
        let msix = find(capability::MSIX);
        let table = msix.map(|at| {
            let control = word(config, at + usize::from(msix::CONTROL));
            let place = double(config, at + usize::from(msix::TABLE));
            let vectors = u64::from(control & (msix::MAX_VECTORS - 1)) + 1;
            let (bar, offset) = ((place & 7) as u8, u64::from(place & !7));
            Table { bar, offset, bytes: vectors * msix::ENTRY_SIZE }
        });
        let bytes = vec![0; table.map_or(0, |table| table.bytes as usize)];
        let (hidden, msi) = (hidden(config), find(capability::MSI));
        ShownConfiguration { hidden, msi, msix, control: MessageControl::default(), table, bytes }
    }

    /// Makes what was read at `offset` what the user sees.
    pub fn read(&self, offset: u64, data: &mut [u8]) {
        let Ok(offset) = usize::try_from(offset) else { return };
        let mut put = |at: usize, change: &dyn Fn(u8) -> u8| {
            let byte = at.checked_sub(offset).and_then(|index| data.get_mut(index));
            byte.into_iter().for_each(|byte| *byte = change(*byte));
        };
        for range in &self.hidden {
            // An identifier that nobody looks for, no version, and the way to the next.
            (range.start..range.start + 2).for_each(|at| put(at, &|_| 0));
            put(range.start + 2, &|byte| byte & 0xf0);
            (range.start + 4..range.end).for_each(|at| put(at, &|_| 0));
        }
        if let Some(at) = self.msi {
            let on = u8::from(self.control.msi_on);
            put(at + usize::from(msi::CONTROL), &|byte| (byte & !1) | on);
        }
        if let Some(at) = self.msix {
            let bits = (self.control.msix_bits >> 8) as u8;
            put(at + usize::from(msix::CONTROL) + 1, &|byte| (byte & 0x3f) | bits);
        }
    }

    /// Takes note of a write; the parts of it that go to the function, each where it begins.
    pub fn write<'d>(&mut self, offset: u64, data: &'d [u8]) -> Vec<(u64, &'d [u8])> {
        let Ok(first) = usize::try_from(offset) else { return Vec::new() };
        let byte = |at: usize| at.checked_sub(first).and_then(|index| data.get(index)).copied();
        if let Some(low) = self.msi.and_then(|at| byte(at + usize::from(msi::CONTROL))) {
            self.control.msi_on = u16::from(low) & msi::CONTROL_ENABLE != 0;
        }
        if let Some(high) = self.msix.and_then(|at| byte(at + usize::from(msix::CONTROL) + 1)) {
            self.control.msix_bits = u16::from(high) << 8 & MSIX_BITS;
        }
        let passes =
            |index: &usize| !self.hidden.iter().any(|range| range.contains(&(first + index)));
        let mut parts = Vec::new();
        let mut at = 0;
        while at < data.len() {
            let end = (at..data.len()).find(|index| !passes(index)).unwrap_or(data.len());
            if at < end {
                parts.push((offset + at as u64, &data[at..end]));
            }
            at = end.max(at + 1);
        }
        parts
    }

    /// The kind of messages that the user enabled.
    pub fn enabled(&self) -> Option<InterruptIndex> {
        match (self.control.msix_bits & msix::CONTROL_ENABLE != 0, self.control.msi_on) {
            (true, _) => Some(InterruptIndex::Msix),
            (false, true) => Some(InterruptIndex::Msi),
            (false, false) => None,
        }
    }

    /// Makes what was read from a BAR what the user sees.
    pub fn read_bar(&self, bar: u8, offset: u64, data: &mut [u8]) {
        for (index, at) in self.in_table(bar, offset, data.len()) {
            data[index] = self.bytes[at];
        }
    }

    /// Takes note of a write to a BAR. The kernel keeps it from the function's own table.
    pub fn write_bar(&mut self, bar: u8, offset: u64, data: &[u8]) {
        for (index, at) in self.in_table(bar, offset, data.len()) {
            self.bytes[at] = data[index];
        }
    }

    /// The bytes of an access that are in the table: where in the access, and where in the table.
    fn in_table(&self, bar: u8, offset: u64, length: usize) -> Vec<(usize, usize)> {
        let Some(table) = self.table.filter(|table| table.bar == bar) else { return Vec::new() };
        let place = |index: &usize| {
            let at = offset.checked_add(*index as u64)?.checked_sub(table.offset)?;
            (at < table.bytes).then_some((*index, at as usize))
        };
        (0..length).filter_map(|index| place(&index)).collect()
    }

    /// What of the parts of a BAR that can be mapped is not a page of the MSI-X table.
    pub fn mappable(&self, bar: u8, areas: &[(u64, u64)]) -> Vec<(u64, u64)> {
        const PAGE: u64 = 4096;
        let Some(table) = self.table.filter(|table| table.bar == bar) else {
            return areas.to_vec();
        };
        let first = table.offset / PAGE * PAGE;
        let end = (table.offset + table.bytes).next_multiple_of(PAGE);
        let cut = |(offset, length): &(u64, u64)| {
            let last = offset + length;
            let before = (*offset, first.clamp(*offset, last) - offset);
            let after = (end.clamp(*offset, last), last - end.clamp(*offset, last));
            [before, after]
        };
        let parts = areas.iter().flat_map(cut);
        parts.filter(|(_, length)| *length > 0).collect()
    }

    /// As after a reset.
    pub fn reset(&mut self) {
        self.control = MessageControl::default();
        self.bytes.fill(0);
    }

    /// What the user wrote, for a process that goes on with it: the control words, and the bytes of the table that are not
    /// zero with their places.
    pub fn written(&self) -> (MessageControl, Vec<(u32, u8)>) {
        let bytes = (0..).zip(&self.bytes).filter(|(_, byte)| **byte != 0);
        (self.control, bytes.map(|(at, byte)| (at, *byte)).collect())
    }

    /// The same function, of which its user [wrote](ShownConfiguration::written) this.
    ///
    /// # Errors
    /// When the table has no such byte.
    pub fn with_written(
        self,
        control: MessageControl,
        table: &[(u32, u8)],
    ) -> Result<ShownConfiguration, NoTableByte> {
        let mut bytes = self.bytes;
        for (at, byte) in table {
            let slot = usize::try_from(*at).ok().and_then(|at| bytes.get_mut(at));
            *slot.ok_or(NoTableByte(*at))? = *byte;
        }
        let control = MessageControl { msix_bits: control.msix_bits & MSIX_BITS, ..control };
        Ok(ShownConfiguration { bytes, control, ..self })
    }
}

fn word(config: &[u8], at: usize) -> u16 {
    config.get(at..at + 2).map_or(0, |bytes| u16::from_le_bytes([bytes[0], bytes[1]]))
}

fn double(config: &[u8], at: usize) -> u32 {
    u32::from(word(config, at)) | u32::from(word(config, at + 2)) << 16
}

/// The capabilities of the conventional list: identifier and place.
fn capabilities(config: &[u8]) -> Vec<(u8, usize)> {
    let byte = |at: usize| config.get(at).copied().unwrap_or(0);
    let mut found = Vec::new();
    let mut at = usize::from(byte(header::CAPABILITIES_POINTER.into()) & !3);
    while at >= 0x40 && found.len() < 48 {
        found.push((byte(at), at));
        at = usize::from(byte(at + 1) & !3);
    }
    found
}

/// The extended capabilities that are not shown, each up to the next one.
fn hidden(config: &[u8]) -> Vec<Range<usize>> {
    let mut all = Vec::new();
    let mut at = EXTENDED;
    while at >= EXTENDED && at + 4 <= config.len() && all.len() < MOST {
        let head = double(config, at);
        if head == 0 || head == u32::MAX {
            break;
        }
        all.push((head as u16, at));
        at = (head >> 20) as usize & !3;
    }
    let end = |at: usize| all.iter().map(|(_, next)| *next).filter(|next| *next > at).min();
    let range = |at: usize| at..end(at).unwrap_or(config.len()).max(at + 4);
    all.iter().filter(|(id, _)| HIDDEN.contains(id)).map(|(_, at)| range(*at)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// MSI at 0x40, MSI-X at 0x60 with 4 vectors at 0x1ff0 of BAR 3; errors at 0x100, virtual functions at 0x140,
    /// a serial number at 0x180.
    fn config() -> Vec<u8> {
        let mut config = vec![0; 4096];
        config[usize::from(header::CAPABILITIES_POINTER)] = 0x40;
        config[0x40..0x44].copy_from_slice(&[capability::MSI, 0x60, 0x80, 0]);
        config[0x60..0x64].copy_from_slice(&[capability::MSIX, 0, 3, 0]);
        config[0x64..0x68].copy_from_slice(&0x1ff3u32.to_le_bytes());
        for (at, id, next) in [(0x100, 1, 0x140), (0x140, 0x10, 0x180), (0x180, 3, 0u32)] {
            let head = next << 20 | 1 << 16 | id;
            config[at..at + 4].copy_from_slice(&head.to_le_bytes());
            config[at + 4..at + 16].fill(0xab);
        }
        config
    }

    fn read(shown: &ShownConfiguration, config: &[u8], at: usize, count: usize) -> Vec<u8> {
        let mut data = config[at..at + count].to_vec();
        shown.read(at as u64, &mut data);
        data
    }

    #[test]
    fn what_is_the_machines_business_is_hidden_and_the_list_goes_on_behind_it() {
        let config = config();
        let mut shown = ShownConfiguration::of(&config);
        let head = read(&shown, &config, 0x140, 4);
        assert_eq!(u32::from_le_bytes(head.try_into().unwrap()), 0x180 << 20);
        assert_eq!(read(&shown, &config, 0x144, 12), [0; 12]);
        assert_eq!(read(&shown, &config, 0x100, 16), config[0x100..0x110]);
        assert_eq!(read(&shown, &config, 0x180, 16), config[0x180..0x190]);
        let data = [1; 8];
        assert!(shown.write(0x148, &data).is_empty());
        assert_eq!(shown.write(0x13c, &data), [(0x13c, &data[..4])]);
        assert_eq!(shown.write(0x17c, &data), [(0x180, &data[4..])]);
        assert_eq!(shown.write(0x10, &data), [(0x10, &data[..])]);
    }

    #[test]
    fn a_user_sees_the_messages_that_it_enabled() {
        let mut config = config();
        let mut shown = ShownConfiguration::of(&config);
        // The kernel enabled them to wire them.
        config[0x63] |= 0x80;
        assert_eq!(read(&shown, &config, 0x62, 2), [3, 0]);
        shown.write(0x62, &0xc003u16.to_le_bytes());
        assert_eq!(read(&shown, &config, 0x60, 4), [capability::MSIX, 0, 3, 0xc0]);
        assert_eq!(shown.enabled(), Some(InterruptIndex::Msix));
        shown.write(0x63, &[0]);
        assert_eq!(shown.enabled(), None);
        shown.write(0x42, &0x81u16.to_le_bytes());
        assert_eq!(shown.enabled(), Some(InterruptIndex::Msi));
        assert_eq!(read(&shown, &config, 0x42, 1), [0x81]);
        shown.reset();
        assert_eq!(shown.enabled(), None);
    }

    #[test]
    fn the_table_is_the_users_own_and_its_pages_are_not_mapped() {
        let mut shown = ShownConfiguration::of(&config());
        let areas = [(0, 0x8000)];
        assert_eq!(shown.mappable(3, &areas), [(0, 0x1000), (0x3000, 0x5000)]);
        assert_eq!(shown.mappable(0, &areas), areas);
        assert!(shown.mappable(3, &[(0x1000, 0x1000)]).is_empty());
        let mut data = [0xff; 8];
        shown.write_bar(3, 0x1fec, &[1, 2, 3, 4, 5, 6, 7, 8]);
        shown.read_bar(3, 0x1fec, &mut data);
        assert_eq!(data, [0xff, 0xff, 0xff, 0xff, 5, 6, 7, 8]);
        shown.read_bar(3, u64::MAX - 3, &mut data);
        shown.write_bar(0, 0x1ff0, &[9; 4]);
        shown.read_bar(3, 0x1ff0, &mut data[..4]);
        assert_eq!(data[..4], [5, 6, 7, 8]);
    }

    #[test]
    fn what_a_user_wrote_is_shown_by_the_process_that_goes_on() {
        let mut before = ShownConfiguration::of(&config());
        before.write(0x62, &0xc003u16.to_le_bytes());
        before.write_bar(3, 0x1ff4, &[1, 0, 3, 4]);
        let (control, table) = before.written();
        assert_eq!(table, [(4, 1), (6, 3), (7, 4)]);
        let after = ShownConfiguration::of(&config()).with_written(control, &table).unwrap();
        assert_eq!(after.enabled(), Some(InterruptIndex::Msix));
        assert_eq!(read(&after, &config(), 0x62, 2), [3, 0xc0]);
        let mut data = [9; 8];
        after.read_bar(3, 0x1ff0, &mut data);
        assert_eq!(data, [0, 0, 0, 0, 1, 0, 3, 4]);
        let other = ShownConfiguration::of(&config()).with_written(control, &[(64, 1)]);
        assert_eq!(other.unwrap_err(), NoTableByte(64));
    }

    #[test]
    fn lists_that_go_in_a_circle_or_out_of_the_space_end() {
        let mut config = config();
        config[0x61] = 0x40;
        config[0x140..0x144].copy_from_slice(&(0x100u32 << 20 | 0x10010).to_le_bytes());
        let shown = ShownConfiguration::of(&config);
        assert_eq!(read(&shown, &config, 0x144, 4), [0; 4]);
        for length in [0, 64, 0x62, 0x102, 256] {
            ShownConfiguration::of(&config[..length]);
        }
        ShownConfiguration::of(&[0xff; 4096]);
    }
}
