//! The controller registers (NVM Express base 1.4, section 3.1) as a table of dwords.
//!
//! A driver may access a register with 4 bytes, or two neighbouring ones with 8; anything else
//! reads as zero and writes nothing. What a write to CC means is decided by the controller, which
//! gets the [`RegisterEffect`].

use rackbus_spec::nvme::VERSION_1_4;
use rackbus_spec::nvme::registers::{self as offset, Aqa, Cap, Cc, Cmbmsc, Csts, Pmrmsc};
use serde::{Deserialize, Serialize};

use super::saved::{bits, is_unset};
use super::{buffer, persistent};

/// Most entries a queue may have.
pub const MAX_QUEUE_ENTRIES: u16 = 4096;
/// Doorbells are `4 << DOORBELL_STRIDE` = 64 bytes apart, a cache line each: neither side's
/// stores disturb what the other polls. 32 queue pairs then fill exactly the one page that a
/// shadow doorbell buffer has (section 5.7).
pub const DOORBELL_STRIDE: u8 = 4;
/// Largest memory page size that CC.MPS may select: `4096 << 4`.
const MAX_PAGE_SHIFT: u8 = 4;

/// What a register write asks of the controller.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RegisterEffect {
    /// Nothing beyond the stored value.
    None,
    /// CC was written; this is its old value.
    Configuration(Cc),
    /// The interrupt mask was written; this is its old value.
    InterruptMask(u32),
    /// CMBMSC was written: the controller memory buffer was turned on, moved or turned off.
    Buffer,
    /// PMRCTL or PMRMSC was written: the persistent memory region was turned on, moved or turned off.
    Persistent,
}

#[derive(Clone, Copy)]
enum Dword {
    CapLow,
    CapHigh,
    Version,
    MaskSet,
    MaskClear,
    Configuration,
    Status,
    QueueAttributes,
    SubmissionLow,
    SubmissionHigh,
    CompletionLow,
    CompletionHigh,
    BufferLocation,
    BufferSize,
    BufferControlLow,
    BufferControlHigh,
    BufferStatus,
    RegionCapabilities,
    RegionControl,
    RegionStatus,
    RegionBaseLow,
    RegionBaseHigh,
}

const TABLE: [(u64, Dword); 22] = [
    (offset::CAP, Dword::CapLow),
    (offset::CAP + 4, Dword::CapHigh),
    (offset::VS, Dword::Version),
    (offset::INTMS, Dword::MaskSet),
    (offset::INTMC, Dword::MaskClear),
    (offset::CC, Dword::Configuration),
    (offset::CSTS, Dword::Status),
    (offset::AQA, Dword::QueueAttributes),
    (offset::ASQ, Dword::SubmissionLow),
    (offset::ASQ + 4, Dword::SubmissionHigh),
    (offset::ACQ, Dword::CompletionLow),
    (offset::ACQ + 4, Dword::CompletionHigh),
    (offset::CMBLOC, Dword::BufferLocation),
    (offset::CMBSZ, Dword::BufferSize),
    (offset::CMBMSC, Dword::BufferControlLow),
    (offset::CMBMSC + 4, Dword::BufferControlHigh),
    (offset::CMBSTS, Dword::BufferStatus),
    (offset::PMRCAP, Dword::RegionCapabilities),
    (offset::PMRCTL, Dword::RegionControl),
    (offset::PMRSTS, Dword::RegionStatus),
    (offset::PMRMSC, Dword::RegionBaseLow),
    (offset::PMRMSC + 4, Dword::RegionBaseHigh),
];

fn find(offset: u64) -> Option<Dword> {
    TABLE.iter().find(|(at, _)| *at == offset).map(|(_, dword)| *dword)
}

/// The values of the registers.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct NvmeRegisters {
    /// CC, Controller Configuration: what the host has set.
    #[serde(with = "bits")]
    pub cc: Cc,
    /// CSTS, Controller Status: what the host reads.
    #[serde(with = "bits")]
    pub csts: Csts,
    /// Interrupt mask, a bit for each vector; it has no effect with MSI-X.
    pub interrupt_mask: u32,
    /// AQA, Admin Queue Attributes: the sizes of both admin queues.
    #[serde(with = "bits")]
    pub aqa: Aqa,
    /// Admin Submission Queue Base Address.
    pub asq: u64,
    /// Admin Completion Queue Base Address.
    pub acq: u64,
    /// Controller Memory Buffer Memory Space Control, as its number.
    #[serde(default)]
    pub cmbmsc: u64,
    /// Bytes of the controller memory buffer, which belongs to the drive and not to its state; 0 without one.
    #[serde(skip)]
    pub buffer: u64,
    /// PMRCTL.EN: the driver uses the persistent memory region.
    #[serde(default, skip_serializing_if = "is_unset")]
    pub pmr_enabled: bool,
    /// Persistent Memory Region Memory Space Control, as its number.
    #[serde(default, skip_serializing_if = "is_unset")]
    pub pmrmsc: u64,
    /// The persistent memory region, which belongs to the drive and not to its state.
    #[serde(skip)]
    pub region: Option<persistent::PmrStatus>,
}

/// The capabilities (section 3.1.1), with a controller memory buffer or without, and the same of a persistent memory region.
pub fn capabilities(buffer: bool, region: bool) -> Cap {
    Cap::new()
        .with_mqes(MAX_QUEUE_ENTRIES - 1)
        .with_cqr(true)
        .with_to(20)
        .with_dstrd(DOORBELL_STRIDE)
        .with_css(1)
        .with_mpsmax(MAX_PAGE_SHIFT)
        .with_cmbs(buffer)
        .with_pmrs(region)
}

fn set_low(value: &mut u64, low: u32) {
    *value = *value & !0xffff_ffff | u64::from(low);
}

fn set_high(value: &mut u64, high: u32) {
    *value = *value & 0xffff_ffff | u64::from(high) << 32;
}

/// Base addresses of the admin queues are page aligned; the lower bits are reserved
/// (sections 3.1.9 and 3.1.10).
const BASE_RESERVED: u32 = 0xfff;
/// Of the lower half of PMRMSC: all below the base but CMSE (section 3.1.23).
const REGION_RESERVED: u32 = 0xffd;
/// Of the lower half of CMBMSC: all between CMSE and the base (section 3.1.16).
const BUFFER_RESERVED: u32 = 0xffc;

impl NvmeRegisters {
    /// A driver reads at `offset`.
    pub fn read(&self, offset: u64, data: &mut [u8]) {
        if !matches!(data.len(), 4 | 8) || !offset.is_multiple_of(4) {
            return;
        }
        for (offset, out) in (offset..).step_by(4).zip(data.chunks_exact_mut(4)) {
            let value = find(offset).map_or(0, |dword| self.dword(dword));
            out.copy_from_slice(&value.to_le_bytes());
        }
    }

    /// A driver writes at `offset`; `changed` hears of each dword that means something.
    pub fn write(
        &mut self,
        offset: u64,
        data: &[u8],
        mut changed: impl FnMut(&mut Self, RegisterEffect),
    ) {
        if !matches!(data.len(), 4 | 8) || !offset.is_multiple_of(4) {
            return;
        }
        for (offset, bytes) in (offset..).step_by(4).zip(data.as_chunks::<4>().0) {
            if let Some(dword) = find(offset) {
                let change = self.set_dword(dword, u32::from_le_bytes(*bytes));
                if change != RegisterEffect::None {
                    changed(self, change);
                }
            }
        }
    }

    fn dword(&self, dword: Dword) -> u32 {
        let cap = u64::from(capabilities(self.buffer > 0, self.region.is_some()));
        let control = self.buffer_control();
        match dword {
            Dword::CapLow => cap as u32,
            Dword::CapHigh => (cap >> 32) as u32,
            Dword::Version => VERSION_1_4,
            Dword::MaskSet | Dword::MaskClear => self.interrupt_mask,
            Dword::Configuration => self.cc.into(),
            Dword::Status => self.csts.into(),
            Dword::QueueAttributes => self.aqa.into(),
            Dword::SubmissionLow => self.asq as u32,
            Dword::SubmissionHigh => (self.asq >> 32) as u32,
            Dword::CompletionLow => self.acq as u32,
            Dword::CompletionHigh => (self.acq >> 32) as u32,
            // Section 3.1.16: what there is shows when the driver asks for it.
            Dword::BufferLocation if control.cre() => buffer::location().into(),
            Dword::BufferSize if control.cre() => buffer::extent(self.buffer).into(),
            Dword::BufferLocation | Dword::BufferSize => 0,
            Dword::BufferControlLow => self.cmbmsc as u32,
            Dword::BufferControlHigh => (self.cmbmsc >> 32) as u32,
            Dword::BufferStatus => buffer::is_base_invalid(control, self.buffer).into(),
            Dword::RegionCapabilities if self.region.is_some() => persistent::capabilities().into(),
            Dword::RegionControl => self.pmr_enabled.into(),
            Dword::RegionStatus => {
                self.region.map_or(0, |region| self.region_control().status(region).into())
            }
            Dword::RegionCapabilities => 0,
            Dword::RegionBaseLow => self.pmrmsc as u32,
            Dword::RegionBaseHigh => (self.pmrmsc >> 32) as u32,
        }
    }

    /// What the driver says of the controller memory buffer.
    pub fn buffer_control(&self) -> Cmbmsc {
        Cmbmsc::from(self.cmbmsc)
    }

    /// What the driver says of the persistent memory region.
    pub fn region_control(&self) -> persistent::PmrControl {
        persistent::PmrControl { enabled: self.pmr_enabled, space: Pmrmsc::from(self.pmrmsc) }
    }

    fn set_dword(&mut self, dword: Dword, value: u32) -> RegisterEffect {
        // Section 3.1.8 to 3.1.10: the admin queue registers are set while CC.EN is 0.
        let settable = !self.cc.en();
        match dword {
            Dword::BufferControlLow if self.buffer > 0 => {
                set_low(&mut self.cmbmsc, value & !BUFFER_RESERVED);
                return RegisterEffect::Buffer;
            }
            Dword::BufferControlHigh if self.buffer > 0 => {
                set_high(&mut self.cmbmsc, value);
                return RegisterEffect::Buffer;
            }
            Dword::RegionControl if self.region.is_some() => {
                self.pmr_enabled = value & 1 != 0;
                return RegisterEffect::Persistent;
            }
            Dword::RegionBaseLow if self.region.is_some() => {
                set_low(&mut self.pmrmsc, value & !REGION_RESERVED);
                return RegisterEffect::Persistent;
            }
            Dword::RegionBaseHigh if self.region.is_some() => {
                set_high(&mut self.pmrmsc, value);
                return RegisterEffect::Persistent;
            }
            Dword::CapLow | Dword::CapHigh | Dword::Version | Dword::Status => {}
            Dword::MaskSet => {
                let new = self.interrupt_mask | value;
                return RegisterEffect::InterruptMask(std::mem::replace(
                    &mut self.interrupt_mask,
                    new,
                ));
            }
            Dword::MaskClear => {
                let new = self.interrupt_mask & !value;
                return RegisterEffect::InterruptMask(std::mem::replace(
                    &mut self.interrupt_mask,
                    new,
                ));
            }
            Dword::Configuration => {
                let old = std::mem::replace(&mut self.cc, Cc::from(value));
                return RegisterEffect::Configuration(old);
            }
            Dword::QueueAttributes if settable => self.aqa = Aqa::from(value),
            Dword::SubmissionLow if settable => set_low(&mut self.asq, value & !BASE_RESERVED),
            Dword::SubmissionHigh if settable => set_high(&mut self.asq, value),
            Dword::CompletionLow if settable => set_low(&mut self.acq, value & !BASE_RESERVED),
            Dword::CompletionHigh if settable => set_high(&mut self.acq, value),
            _ => {}
        }
        RegisterEffect::None
    }

    /// Whether CC and the admin queue registers allow the controller to start (section 7.6.1):
    /// the NVM command set, round robin, a supported page size, admin queues of two entries or
    /// more.
    pub fn can_enable(&self) -> bool {
        self.cc.css() == 0
            && self.cc.ams() == 0
            && self.cc.mps() <= MAX_PAGE_SHIFT
            && self.aqa.asqs() >= 1
            && self.aqa.acqs() >= 1
    }

    /// The memory page size that CC.MPS selects, in bytes.
    pub fn page_size(&self) -> u64 {
        4096 << self.cc.mps().min(MAX_PAGE_SHIFT)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read4(registers: &NvmeRegisters, offset: u64) -> u32 {
        let mut data = [0; 4];
        registers.read(offset, &mut data);
        u32::from_le_bytes(data)
    }

    #[test]
    fn only_four_and_eight_byte_accesses_count() {
        let mut registers = NvmeRegisters::default();
        for length in [1, 2, 3, 5, 16] {
            let mut data = vec![0; length];
            registers.read(offset::VS, &mut data);
            assert!(data.iter().all(|byte| *byte == 0), "{length} bytes");
            registers.write(offset::AQA, &vec![0xff; length], |_, _| panic!("no change expected"));
        }
        let mut unaligned = [0; 4];
        registers.read(offset::VS + 2, &mut unaligned);
        assert_eq!(unaligned, [0; 4]);
        assert_eq!(u32::from(registers.aqa), 0);
        assert_eq!(read4(&registers, offset::VS), VERSION_1_4);
    }

    #[test]
    fn eight_byte_accesses_span_two_dwords() {
        let mut registers = NvmeRegisters::default();
        registers.write(offset::ASQ, &0x1234_5678_9abc_d000u64.to_le_bytes(), |_, _| {});
        assert_eq!(registers.asq, 0x1234_5678_9abc_d000);
        registers.write(offset::ACQ + 4, &7u32.to_le_bytes(), |_, _| {});
        assert_eq!(registers.acq, 7 << 32);
        let mut cap = [0; 8];
        registers.read(offset::CAP, &mut cap);
        assert_eq!(u64::from_le_bytes(cap), u64::from(capabilities(false, false)));
        let mut seen = Vec::new();
        let both = [0xf0u32.to_le_bytes(), 1u32.to_le_bytes()].concat();
        registers.write(offset::INTMC, &both, |_, change| seen.push(change));
        assert_eq!(
            seen,
            [RegisterEffect::InterruptMask(0), RegisterEffect::Configuration(Cc::new())]
        );
    }

    #[test]
    fn admin_queue_registers_hold_still_while_enabled() {
        let mut registers = NvmeRegisters { asq: 0x1000, ..NvmeRegisters::default() };
        registers.cc.set_en(true);
        registers.write(offset::ASQ, &[0xff; 8], |_, _| {});
        registers.write(offset::AQA, &[0xff; 4], |_, _| {});
        assert_eq!((registers.asq, u32::from(registers.aqa)), (0x1000, 0));
        registers.write(offset::CAP, &[0; 8], |_, _| panic!("read only"));
        assert_eq!(
            read4(&registers, offset::CAP + 4),
            (u64::from(capabilities(false, false)) >> 32) as u32
        );
    }

    /// Section 3.1.16, and the order in which drivers look.
    #[test]
    fn a_buffer_is_seen_when_it_is_asked_for() {
        let mut without = NvmeRegisters::default();
        without.write(offset::CMBMSC, &[0xff; 8], |_, _| panic!("there is none"));
        assert_eq!((read4(&without, offset::CMBSZ), read4(&without, offset::CMBMSC)), (0, 0));
        let mut registers = NvmeRegisters { buffer: 1 << 20, ..NvmeRegisters::default() };
        assert!(Cap::from(u64::from(read4(&registers, offset::CAP + 4)) << 32).cmbs());
        assert_eq!((read4(&registers, offset::CMBLOC), read4(&registers, offset::CMBSZ)), (0, 0));
        let mut changes = 0;
        registers.write(offset::CMBMSC, &1u64.to_le_bytes(), |_, _| changes += 1);
        assert_eq!(read4(&registers, offset::CMBSZ) >> 8, 1 << 4 | 2);
        assert_eq!(read4(&registers, offset::CMBLOC) & 7, u32::from(buffer::BAR));
        let beyond = 0xffff_ffff_ffff_ffffu64.to_le_bytes();
        registers.write(offset::CMBMSC, &beyond, |_, _| changes += 1);
        assert_eq!((read4(&registers, offset::CMBSTS), registers.cmbmsc, changes), (1, !0xffc, 4));
        registers.write(offset::CMBMSC, &0x1_0000_0003u64.to_le_bytes(), |_, _| {});
        assert_eq!(read4(&registers, offset::CMBSTS), 0);
    }
}
