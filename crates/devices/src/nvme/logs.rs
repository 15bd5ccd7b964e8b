//! Log pages (NVM Express base 1.4, section 5.14.1): what the controller remembers of its work.

use std::collections::VecDeque;

use rackbus_pci::RestoreError;
use rackbus_spec::nvme::command::{AdminOpcode, IoOpcode};
use rackbus_spec::nvme::log::{
    CommandsSupported, EFFECT_LOGICAL_BLOCK_CHANGE, EFFECT_SUPPORTED, ErrorEntry, FirmwareSlot,
    SmartHealth,
};
use rackbus_spec::nvme::{Sqe, Status};
use serde::{Deserialize, Serialize};
use zerocopy::{FromZeros, IntoBytes, transmute};

use super::saved::{Words, require};

/// Entries of the Error Information log: ELPE + 1.
pub const ERROR_ENTRIES: usize = 64;
/// The composite temperature in kelvin: the drive has no thermometer, this is room temperature.
pub const TEMPERATURE: u16 = 298;
/// Parameter Error Location: none given.
const NO_LOCATION: u16 = 0xffff;
/// A data unit of the SMART log: a thousand times 512 bytes.
const DATA_UNIT: u64 = 512_000;
const NS_PER_HOUR: u64 = 3_600_000_000_000;

/// Counters and past errors.
#[derive(Debug, Default)]
pub struct Logs {
    errors: VecDeque<ErrorEntry>,
    error_count: u64,
    bytes_read: u64,
    bytes_written: u64,
    reads: u64,
    writes: u64,
    media_errors: u64,
    since_ns: u64,
    /// How long the drive was on before `since_ns`, in other processes.
    earlier_ns: u64,
}

/// Logs that were saved.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct LogState {
    /// Entries of the error log, the newest first.
    errors: Vec<Words>,
    error_count: u64,
    bytes_read: u64,
    bytes_written: u64,
    reads: u64,
    writes: u64,
    media_errors: u64,
    on_ns: u64,
}

impl LogState {
    /// The logs, which go on at `now_ns`.
    ///
    /// # Errors
    /// When there are more errors than are kept.
    pub fn restore(self, now_ns: u64) -> Result<Logs, RestoreError> {
        require(self.errors.len() <= ERROR_ENTRIES, "too many entries of the error log")?;
        let errors = self.errors.into_iter().map(|words| transmute!(words));
        Ok(Logs {
            errors: errors.collect(),
            error_count: self.error_count,
            bytes_read: self.bytes_read,
            bytes_written: self.bytes_written,
            reads: self.reads,
            writes: self.writes,
            media_errors: self.media_errors,
            since_ns: now_ns,
            earlier_ns: self.on_ns,
        })
    }
}

/// What was read and written: bytes read, bytes written, commands of each.
pub type Traffic = [u64; 4];

impl Logs {
    /// Empty logs; the power-on time counts from `now_ns`.
    pub fn new(now_ns: u64) -> Self {
        Logs { since_ns: now_ns, ..Logs::default() }
    }

    /// The logs as a value, to be restored by [`LogState::restore`].
    pub fn save(&self, now_ns: u64) -> LogState {
        LogState {
            errors: self.errors.iter().map(|entry| transmute!(*entry)).collect(),
            error_count: self.error_count,
            bytes_read: self.bytes_read,
            bytes_written: self.bytes_written,
            reads: self.reads,
            writes: self.writes,
            media_errors: self.media_errors,
            on_ns: self.on_ns(now_ns),
        }
    }

    fn on_ns(&self, now_ns: u64) -> u64 {
        now_ns.saturating_sub(self.since_ns).saturating_add(self.earlier_ns)
    }

    /// What was counted of reads and writes.
    pub fn traffic(&self) -> Traffic {
        [self.bytes_read, self.bytes_written, self.reads, self.writes]
    }

    /// Takes the counters back to what they were.
    pub fn set_traffic(&mut self, traffic: Traffic) {
        [self.bytes_read, self.bytes_written, self.reads, self.writes] = traffic;
    }

    /// A read or compare moved `bytes`.
    #[inline]
    pub fn count_read(&mut self, bytes: u64) {
        self.reads = self.reads.wrapping_add(1);
        self.bytes_read = self.bytes_read.wrapping_add(bytes);
    }

    /// A write moved `bytes`.
    #[inline]
    pub fn count_write(&mut self, bytes: u64) {
        self.writes = self.writes.wrapping_add(1);
        self.bytes_written = self.bytes_written.wrapping_add(bytes);
    }

    /// A command failed. `sqe` is the command where it is still known.
    pub fn record(&mut self, sq_id: u16, cid: u16, status: Status, sqe: Option<&Sqe>) {
        self.error_count = self.error_count.saturating_add(1);
        if status.sct() == 2 && status.code() != Status::COMPARE_FAILURE {
            self.media_errors = self.media_errors.saturating_add(1);
        }
        if self.errors.len() == ERROR_ENTRIES {
            self.errors.pop_back();
        }
        self.errors.push_front(ErrorEntry {
            error_count: self.error_count,
            sq_id,
            cid,
            status: status.0 << 1,
            parameter_location: NO_LOCATION,
            lba: if sq_id > 0 { sqe.map_or(0, Sqe::slba) } else { 0 },
            nsid: sqe.map_or(0, |sqe| sqe.nsid),
            ..ErrorEntry::default()
        });
    }

    /// The Error Information log: the newest entry first, all entries there can be.
    pub fn error_information(&self) -> Vec<u8> {
        let mut page = vec![0; ERROR_ENTRIES * size_of::<ErrorEntry>()];
        for (slot, entry) in page.chunks_exact_mut(size_of::<ErrorEntry>()).zip(&self.errors) {
            slot.copy_from_slice(entry.as_bytes());
        }
        page
    }

    /// The SMART / Health Information log.
    pub fn smart_health(&self, now_ns: u64, critical_warning: u8) -> SmartHealth {
        let wide = |value: u64| [value, 0];
        SmartHealth {
            critical_warning,
            temperature: TEMPERATURE,
            available_spare: 100,
            spare_threshold: 10,
            data_units_read: wide(self.bytes_read.div_ceil(DATA_UNIT)),
            data_units_written: wide(self.bytes_written.div_ceil(DATA_UNIT)),
            host_reads: wide(self.reads),
            host_writes: wide(self.writes),
            power_cycles: wide(1),
            power_on_hours: wide(self.on_ns(now_ns) / NS_PER_HOUR),
            media_errors: wide(self.media_errors),
            error_entries: wide(self.error_count),
            ..SmartHealth::new_zeroed()
        }
    }
}

/// The Firmware Slot Information log: one slot, which cannot be written.
pub fn firmware_slot(revision: [u8; 8]) -> FirmwareSlot {
    let mut page = FirmwareSlot::new_zeroed();
    page.active = 1;
    page.revisions[0] = revision;
    page
}

/// Admin commands that the controller executes.
pub const ADMIN_COMMANDS: [AdminOpcode; 11] = [
    AdminOpcode::DeleteSq,
    AdminOpcode::CreateSq,
    AdminOpcode::GetLogPage,
    AdminOpcode::DeleteCq,
    AdminOpcode::CreateCq,
    AdminOpcode::Identify,
    AdminOpcode::Abort,
    AdminOpcode::SetFeatures,
    AdminOpcode::GetFeatures,
    AdminOpcode::AsyncEventRequest,
    AdminOpcode::DoorbellBufferConfig,
];

/// The Commands Supported and Effects log.
pub fn commands_supported() -> CommandsSupported {
    let mut page = CommandsSupported::new_zeroed();
    for opcode in ADMIN_COMMANDS {
        page.admin[usize::from(opcode as u8)] = EFFECT_SUPPORTED;
    }
    for opcode in [IoOpcode::Flush, IoOpcode::Read, IoOpcode::Compare, IoOpcode::Verify] {
        page.io[usize::from(opcode as u8)] = EFFECT_SUPPORTED;
    }
    for opcode in [IoOpcode::Write, IoOpcode::WriteZeroes, IoOpcode::DatasetManagement] {
        page.io[usize::from(opcode as u8)] = EFFECT_SUPPORTED | EFFECT_LOGICAL_BLOCK_CHANGE;
    }
    page
}

#[cfg(test)]
mod tests {
    use super::*;
    use zerocopy::FromBytes;

    #[test]
    fn the_error_log_keeps_the_newest() {
        let mut logs = Logs::new(0);
        for cid in 0..100 {
            logs.record(1, cid, Status::LBA_OUT_OF_RANGE, None);
        }
        let page = logs.error_information();
        let newest = ErrorEntry::read_from_prefix(&page).unwrap().0;
        let oldest = ErrorEntry::read_from_suffix(&page).unwrap().1;
        assert_eq!(({ newest.error_count }, { newest.cid }), (100, 99));
        assert_eq!(({ oldest.error_count }, { oldest.cid }), (37, 36));
        assert_eq!({ newest.status }, 0x80 << 1);
        assert_eq!({ logs.smart_health(0, 0).error_entries }, [100, 0]);
    }

    #[test]
    fn data_units_are_thousands_of_sectors_rounded_up() {
        let mut logs = Logs::new(0);
        logs.count_read(512);
        logs.count_write(512_001);
        logs.record(1, 1, Status::UNRECOVERED_READ, None);
        logs.record(1, 2, Status::COMPARE_FAILURE, None);
        let smart = logs.smart_health(2 * NS_PER_HOUR, 0);
        assert_eq!({ smart.data_units_read }, [1, 0]);
        assert_eq!({ smart.data_units_written }, [2, 0]);
        assert_eq!({ smart.power_on_hours }, [2, 0]);
        assert_eq!({ smart.media_errors }, [1, 0]);
    }
}
