//! Configuration space of a function, driven by a table of fields.
//!
//! Each field of the table says where it is, what it holds after reset and which of its bits software may
//! change; everything else reads as zero and ignores writes. Writes that mean something beyond
//! the bits (bus mastering, reset, power state, interrupt enables) are reported as [`Effects`]
//! for the endpoint to act on: the table itself does nothing.
//!
//! Source: PCI Express Base Specification 6.0, chapter 7.

use rackbus_spec::pcie::{
    CONFIG_SPACE_SIZE, CONVENTIONAL_CONFIG_SIZE, Command, StatusRegister, bar, capability, express,
    header, msi, msix, pm,
};
use rackbus_spec::virtio;

use crate::function::{Bar, FunctionInfo, VendorCapability};
use crate::interrupts::Mode;

/// The BAR that holds MSI-X table and pending bits, where the function has no other use for it.
pub const MSIX_BAR: u8 = 4;
const PAGE: u64 = 4096;
const PM_AT: u16 = 0x40;
const EXPRESS_AT: u16 = 0x50;
const MSIX_AT: u16 = 0x90;
const MSI_AT: u16 = 0xa0;
/// Where a function's own capabilities begin: without MSI, in its place.
const VENDOR_AT: u16 = 0xb0;
const SERIAL_AT: u16 = 0x100;

/// Where a function has its MSI-X table and the pending bits, both in one BAR.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct MsixPlace {
    /// The BAR that has the structure, 0 to 5.
    pub bar: u8,
    /// Offset of the table in it, a multiple of 8.
    pub table: u32,
    /// Offset of the pending bits, a multiple of 8.
    pub pba: u32,
}

impl MsixPlace {
    /// In [`MSIX_BAR`], which holds nothing else.
    pub fn alone(vectors: u16) -> MsixPlace {
        let (_, pba) = msix_layout(vectors);
        MsixPlace { bar: MSIX_BAR, table: 0, pba: halves(pba)[0] }
    }

    /// Where the MSI-X structure of `info` is: [alone](MsixPlace::alone), or in the upper half of BAR 0 where the function
    /// has a BAR of its own with the structure's number.
    pub fn of(info: &FunctionInfo) -> MsixPlace {
        let is = |index: u8| move |bar: &&Bar| bar.index == index;
        let first = info.bars.iter().find(is(0)).map(|bar| bar.size);
        match (info.bars.iter().any(|bar| is(MSIX_BAR)(&bar)), first) {
            (true, Some(size)) => {
                let (_, pba) = msix_layout(info.msix_vectors);
                let table = size / 2;
                MsixPlace { bar: 0, table: halves(table)[0], pba: halves(table + pba)[0] }
            }
            _ => MsixPlace::alone(info.msix_vectors),
        }
    }
}

/// One field of configuration space: up to four bytes, little endian.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Field {
    offset: u16,
    bytes: u8,
    reset: u32,
    /// Bits that a write changes.
    writable: u32,
}

const fn ro(offset: u16, bytes: u8, reset: u32) -> Field {
    Field { offset, bytes, reset, writable: 0 }
}

const fn rw(offset: u16, bytes: u8, reset: u32, writable: u32) -> Field {
    Field { offset, bytes, reset, writable }
}

/// What a write means beyond the bits it changed.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Effects {
    /// The command register changed, or the power state that overrides it.
    pub command: bool,
    /// How interrupts go changed: message control of MSI or MSI-X.
    pub interrupts: bool,
    /// A function-level reset was asked for, in the capability or by leaving D3hot.
    pub reset: bool,
}

/// A function's 4 KiB of configuration space.
#[derive(Debug, Clone)]
pub struct ConfigSpace {
    fields: Vec<Field>,
    msi_vectors: u16,
    /// Where the capability is that reaches BARs.
    access_at: Option<u16>,
    bytes: Box<[u8; CONFIG_SPACE_SIZE]>,
    writable: Box<[u8; CONFIG_SPACE_SIZE]>,
}

impl ConfigSpace {
    /// The space of `info`, as after reset, with the MSI-X table in a BAR of its own.
    pub fn new(info: &FunctionInfo) -> Self {
        ConfigSpace::with(info, MsixPlace::alone(info.msix_vectors), &[])
    }

    /// The same with the MSI-X table at a place of the function's choice, and with registers of its own beside
    /// those that PCI defines: offset, bytes and value, read-only to software.
    pub fn with(info: &FunctionInfo, msix: MsixPlace, own: &[(u16, u8, u32)]) -> Self {
        let mut fields = fields(info, msix);
        fields.extend(own.iter().map(|(offset, bytes, value)| ro(*offset, *bytes, *value)));
        let access_at = vendor_capabilities(&mut fields, info);
        let mut writable = Box::new([0; CONFIG_SPACE_SIZE]);
        for field in &fields {
            put(&mut writable[..], field, field.writable);
        }
        let bytes = Box::new([0; CONFIG_SPACE_SIZE]);
        let msi_vectors = info.msi_vectors;
        let mut space = ConfigSpace { fields, msi_vectors, access_at, bytes, writable };
        space.reset();
        space
    }

    /// Everything back to its value after reset.
    pub fn reset(&mut self) {
        self.bytes.fill(0);
        for field in &self.fields {
            put(&mut self.bytes[..], field, field.reset);
        }
    }

    /// The device itself changes what software reads at `offset`, until the next reset.
    pub fn set(&mut self, offset: u16, value: &[u8]) {
        let at = usize::from(offset);
        if let Some(bytes) = self.bytes.get_mut(at..at + value.len()) {
            bytes.copy_from_slice(value);
        }
    }

    /// Reads `data.len()` bytes at `offset`; what lies beyond the space reads as ones.
    /// `interrupt` is the level of the INTx pin, which the status register shows.
    pub fn read(&self, offset: u64, data: &mut [u8], interrupt: bool) {
        let status = u64::from(header::STATUS);
        for (at, byte) in (offset..).zip(data.iter_mut()) {
            *byte = match usize::try_from(at).ok().and_then(|at| self.bytes.get(at)) {
                Some(value) if at == status && interrupt => {
                    value | StatusRegister::INTERRUPT_STATUS.bits().to_le_bytes()[0]
                }
                Some(value) => *value,
                None => 0xff,
            };
        }
    }

    /// Writes `data` at `offset`, as far as the fields there allow.
    pub fn write(&mut self, offset: u64, data: &[u8]) -> Effects {
        let before = (self.command(), self.power_state(), self.mode());
        let mut flr = false;
        let flr_byte = u64::from(EXPRESS_AT + express::DEVICE_CONTROL + 1);
        for (at, value) in (offset..).zip(data) {
            let Some(index) = usize::try_from(at).ok().filter(|i| *i < CONFIG_SPACE_SIZE) else {
                break;
            };
            // The bit that starts a function-level reset acts and never stays.
            flr |= at == flr_byte && value & express::DEVCTL_INITIATE_FLR.to_le_bytes()[1] != 0;
            let mask = self.writable[index];
            self.bytes[index] = (self.bytes[index] & !mask) | (value & mask);
        }
        // A state that the function does not have (section 7.5.2.2): the write is dropped as far as the state goes.
        if !matches!(self.power_state(), 0 | pm::PMCSR_STATE) {
            let at = usize::from(PM_AT + pm::PMCSR);
            self.bytes[at] =
                (self.bytes[at] & !pm::PMCSR_STATE.to_le_bytes()[0]) | before.1.to_le_bytes()[0];
        }
        let left_d3 = before.1 == pm::PMCSR_STATE && self.power_state() == 0;
        Effects {
            command: before.0 != self.command() || before.1 != self.power_state(),
            interrupts: before.2 != self.mode(),
            reset: flr || left_d3,
        }
    }

    /// The BAR and the offset in it that an access of `length` bytes at `offset` reaches through a capability; `None`
    /// for all others.
    pub fn reaches(&self, offset: u64, length: usize) -> Option<(u8, u64)> {
        let at = self.access_at?;
        let field = |field: usize| {
            let at = usize::from(at) + field;
            u32::from_le_bytes([0, 1, 2, 3].map(|byte| self.bytes[at + byte]))
        };
        let wanted = field(virtio::capability::STRUCTURE_LENGTH);
        let place = field(virtio::capability::OFFSET);
        let data = u64::from(at) + virtio::capability::ACCESS_DATA as u64;
        let fits = matches!(wanted, 1 | 2 | 4) && wanted as usize == length;
        (fits && offset == data && place.is_multiple_of(wanted))
            .then(|| (self.bytes[usize::from(at) + virtio::capability::BAR], place.into()))
    }

    /// Value of the command register.
    pub fn command(&self) -> Command {
        Command::from_bits_retain(self.u16(header::COMMAND))
    }

    /// Whether the function answers memory accesses: memory space is enabled and it is in D0.
    pub fn answers_memory(&self) -> bool {
        self.power_state() == 0 && self.command().contains(Command::MEMORY_SPACE)
    }

    /// Whether the function may issue requests: bus mastering is enabled and it is in D0.
    pub fn masters_bus(&self) -> bool {
        self.power_state() == 0 && self.command().contains(Command::BUS_MASTER)
    }

    /// The kind of interrupts that the driver enabled. Both kinds of message at once are not
    /// allowed (section 7.7); MSI-X counts then.
    pub fn mode(&self) -> Mode {
        let msi_control = self.u16(MSI_AT + msi::CONTROL);
        if self.u16(MSIX_AT + msix::CONTROL) & msix::CONTROL_ENABLE != 0 {
            Mode::Msix
        } else if msi_control & msi::CONTROL_ENABLE != 0 {
            let enabled = (msi_control & msi::CONTROL_ENABLED_MASK) >> msi::ENABLED_SHIFT;
            // More than the function has is reserved.
            Mode::Msi { vectors: (1 << enabled).min(self.msi_vectors) }
        } else {
            Mode::Pin
        }
    }

    /// What software has set, as far as it is not zero.
    pub(crate) fn save(&self) -> Vec<(u16, u8)> {
        let set = self.bytes.iter().zip(self.writable.iter()).map(|(byte, mask)| byte & mask);
        crate::state::sparse(&set.collect::<Vec<u8>>())
    }

    /// As it was when it was saved. Nothing but what software may set is taken over.
    pub(crate) fn restore(&mut self, saved: &[(u16, u8)]) {
        self.reset();
        for (byte, mask) in self.bytes.iter_mut().zip(self.writable.iter()) {
            *byte &= !mask;
        }
        for (at, value) in saved {
            let at = usize::from(*at);
            if let (Some(byte), Some(mask)) = (self.bytes.get_mut(at), self.writable.get(at)) {
                *byte |= value & mask;
            }
        }
    }

    fn power_state(&self) -> u16 {
        self.u16(PM_AT + pm::PMCSR) & pm::PMCSR_STATE
    }

    fn u16(&self, offset: u16) -> u16 {
        let at = usize::from(offset);
        u16::from_le_bytes([self.bytes[at], self.bytes[at + 1]])
    }
}

/// Size of the BAR that holds `vectors` table entries and, on the page after them, the pending
/// bits; and where those bits begin.
pub fn msix_layout(vectors: u16) -> (u64, u64) {
    let pba = (u64::from(vectors) * msix::ENTRY_SIZE).next_multiple_of(PAGE);
    ((pba + PAGE).next_power_of_two(), pba)
}

fn put(bytes: &mut [u8], field: &Field, value: u32) {
    let at = usize::from(field.offset);
    let width = usize::from(field.bytes);
    bytes[at..at + width].copy_from_slice(&value.to_le_bytes()[..width]);
}

/// The table: header, power management, PCI Express, MSI-X, MSI, serial number.
fn fields(info: &FunctionInfo, msix: MsixPlace) -> Vec<Field> {
    let [base, sub, interface] = info.class;
    let command = Command::MEMORY_SPACE
        | Command::BUS_MASTER
        | Command::PARITY_ERROR_RESPONSE
        | Command::SERR_ENABLE
        | Command::INTERRUPT_DISABLE;
    let mut table = vec![
        ro(header::VENDOR_ID, 2, info.vendor_id.into()),
        ro(header::DEVICE_ID, 2, info.device_id.into()),
        rw(header::COMMAND, 2, 0, command.bits().into()),
        ro(header::STATUS, 2, StatusRegister::CAPABILITIES_LIST.bits().into()),
        ro(header::REVISION_ID, 1, info.revision.into()),
        ro(header::CLASS_CODE, 3, u32::from_le_bytes([interface, sub, base, 0])),
        rw(header::CACHE_LINE_SIZE, 1, 0, 0xff),
        ro(header::HEADER_TYPE, 1, 0),
        ro(header::SUBSYSTEM_VENDOR_ID, 2, info.subsystem_vendor_id.into()),
        ro(header::SUBSYSTEM_ID, 2, info.subsystem_id.into()),
        ro(header::CAPABILITIES_POINTER, 1, PM_AT.into()),
        rw(header::INTERRUPT_LINE, 1, 0, 0xff),
        ro(header::INTERRUPT_PIN, 1, 1),
    ];
    info.bars.iter().for_each(|bar| bar_fields(&mut table, bar));
    let own_at = if info.vendor.is_empty() { 0 } else { own_capabilities_at(info) };
    let next = if info.msi_vectors == 0 { own_at } else { MSI_AT };
    capabilities(&mut table, info.msix_vectors, msix, next);
    if let Some(capable) = info.msi_vectors.checked_ilog2() {
        msi_capability(&mut table, capable, own_at);
    }
    serial_number(&mut table, info.serial);
    table
}

fn bar_fields(table: &mut Vec<Field>, bar: &Bar) {
    let offset = header::BAR0 + 4 * u16::from(bar.index);
    let mut flags = 0;
    if bar.is_64bit {
        flags |= bar::TYPE_64BIT;
    }
    if bar.prefetchable {
        flags |= bar::PREFETCHABLE;
    }
    let [low, high] = halves(!(bar.size - 1));
    table.push(rw(offset, 4, flags, low & !bar::FLAGS_MASK));
    if bar.is_64bit {
        table.push(rw(offset + 4, 4, 0, high));
    }
}

/// Those of every function; `next` is where the one after them is, or 0.
fn capabilities(table: &mut Vec<Field>, vectors: u16, place: MsixPlace, next: u16) {
    // A link of our own invention: 8 GT/s, four lanes; software only displays it.
    const SPEED: u32 = 3;
    const WIDTH: u32 = 4 << express::LINK_WIDTH_SHIFT;
    let device = express::DEVCAP_ROLE_BASED_ERRORS | express::DEVCAP_FLR | express::DEVCAP_MPS_256;
    let bir = u32::from(place.bar);
    let msix_writable = msix::CONTROL_ENABLE | msix::CONTROL_MASK_ALL;
    table.extend([
        ro(PM_AT, 1, capability::POWER_MANAGEMENT.into()),
        ro(PM_AT + 1, 1, EXPRESS_AT.into()),
        ro(PM_AT + pm::PMC, 2, pm::PMC_VERSION.into()),
        rw(PM_AT + pm::PMCSR, 2, 0, pm::PMCSR_STATE.into()),
        ro(EXPRESS_AT, 1, capability::PCI_EXPRESS.into()),
        ro(EXPRESS_AT + 1, 1, MSIX_AT.into()),
        ro(EXPRESS_AT + express::CAPABILITIES, 2, express::VERSION_2.into()),
        ro(EXPRESS_AT + express::DEVICE_CAPABILITIES, 4, device),
        rw(
            EXPRESS_AT + express::DEVICE_CONTROL,
            2,
            express::DEVCTL_DEFAULT.into(),
            u32::from(!express::DEVCTL_INITIATE_FLR),
        ),
        ro(EXPRESS_AT + express::LINK_CAPABILITIES, 4, SPEED | WIDTH),
        rw(EXPRESS_AT + express::LINK_CONTROL, 2, 0, 0x01c3),
        ro(EXPRESS_AT + express::LINK_STATUS, 2, SPEED | WIDTH),
        ro(EXPRESS_AT + express::DEVICE_CAPABILITIES_2, 4, 0),
        rw(EXPRESS_AT + express::DEVICE_CONTROL_2, 2, 0, express::DEVCTL2_WRITABLE.into()),
        ro(EXPRESS_AT + express::LINK_CAPABILITIES_2, 4, 0b1110),
        ro(EXPRESS_AT + express::LINK_CONTROL_2, 2, SPEED),
        ro(MSIX_AT, 1, capability::MSIX.into()),
        ro(MSIX_AT + 1, 1, next.into()),
        rw(MSIX_AT + msix::CONTROL, 2, u32::from(vectors) - 1, msix_writable.into()),
        ro(MSIX_AT + msix::TABLE, 4, place.table | bir),
        ro(MSIX_AT + msix::PBA, 4, place.pba | bir),
    ]);
}

/// Where the capabilities of the function's own begin.
fn own_capabilities_at(info: &FunctionInfo) -> u16 {
    if info.msi_vectors == 0 { MSI_AT } else { VENDOR_AT }
}

/// The function's own capabilities, as many as fit; returns where the one is that reaches BARs.
fn vendor_capabilities(table: &mut Vec<Field>, info: &FunctionInfo) -> Option<u16> {
    const HEAD: u16 = 3;
    let mut access_at = None;
    let mut at = own_capabilities_at(info);
    let end = |at: u16, own: &VendorCapability| {
        let length = own.body.len().checked_add(usize::from(HEAD))?;
        let end = usize::from(at).checked_add(length)?.next_multiple_of(4);
        u16::try_from(end).ok().filter(|end| usize::from(*end) <= CONVENTIONAL_CONFIG_SIZE)
    };
    let mut rest = info.vendor.iter().peekable();
    while let Some(own) = rest.next() {
        let Some(next_at) = end(at, own) else { break };
        let next = rest.peek().filter(|next| end(next_at, next).is_some()).map_or(0, |_| next_at);
        let length = own.body.len() as u32 + u32::from(HEAD);
        table.extend([
            ro(at, 1, capability::VENDOR.into()),
            ro(at + 1, 1, next.into()),
            ro(at + 2, 1, length),
        ]);
        let body = (at + HEAD..).zip(&own.body);
        table.extend(body.map(|(at, byte)| ro(at, 1, (*byte).into())));
        if own.access {
            use virtio::capability as cap;
            access_at = Some(at);
            table.extend([
                rw(at + cap::BAR as u16, 1, 0, 0xff),
                rw(at + cap::OFFSET as u16, 4, 0, !0),
                rw(at + cap::STRUCTURE_LENGTH as u16, 4, 0, !0),
            ]);
        }
        at = next_at;
    }
    access_at
}

/// MSI with two to the power of `capable` vectors; `next` as above.
fn msi_capability(table: &mut Vec<Field>, capable: u32, next: u16) {
    let control = u32::from(msi::CONTROL_64BIT) | capable << msi::CAPABLE_SHIFT;
    let writable = msi::CONTROL_ENABLE | msi::CONTROL_ENABLED_MASK;
    table.extend([
        ro(MSI_AT, 1, capability::MSI.into()),
        ro(MSI_AT + 1, 1, next.into()),
        rw(MSI_AT + msi::CONTROL, 2, control, writable.into()),
        rw(MSI_AT + msi::ADDRESS, 4, 0, !0b11),
        rw(MSI_AT + msi::ADDRESS + 4, 4, 0, !0),
        rw(MSI_AT + msi::DATA, 2, 0, 0xffff),
    ]);
}

fn serial_number(table: &mut Vec<Field>, serial: u64) {
    const VERSION_1: u32 = 1 << 16;
    let [low, high] = halves(serial);
    table.extend([
        ro(SERIAL_AT, 4, u32::from(capability::EXT_SERIAL_NUMBER) | VERSION_1),
        ro(SERIAL_AT + 4, 4, low),
        ro(SERIAL_AT + 8, 4, high),
    ]);
}

/// The low and the high 32 bits.
fn halves(value: u64) -> [u32; 2] {
    let b = value.to_le_bytes();
    [u32::from_le_bytes([b[0], b[1], b[2], b[3]]), u32::from_le_bytes([b[4], b[5], b[6], b[7]])]
}

#[cfg(test)]
mod tests;
