//! Features (NVM Express base 1.4, sections 5.13, 5.21): settings that the host may read and
//! change. None is saveable: a drive that is lent keeps nothing of one borrower for the next, so
//! the saved value of each is its default.

use rackbus_pci::RestoreError;
use rackbus_spec::nvme::Status;
use rackbus_spec::nvme::features::{
    self as fid, AsyncEventConfig, FeatureCapabilities, InterruptCoalescing, InterruptVectorConfig,
    NumberOfQueues, TemperatureThreshold,
};
use serde::{Deserialize, Serialize};

use super::interrupts::VECTORS;
use super::saved::{bits, require};

/// I/O submission queues, and I/O completion queues, that a host may create.
pub const IO_QUEUES: u16 = 31;
/// The warning threshold in kelvin, 70 °C.
pub const WARNING_TEMPERATURE: u16 = 343;
/// The critical threshold in kelvin, 80 °C.
pub const CRITICAL_TEMPERATURE: u16 = 353;

/// Error Recovery: Deallocated or Unwritten Logical Block Error Enable (section 5.21.1.5).
const DULBE: u32 = 1 << 16;

/// The current values of the features that can be set.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Features {
    arbitration: u32,
    over_temperature: u16,
    under_temperature: u16,
    error_recovery: u32,
    write_cache: bool,
    #[serde(with = "bits")]
    queues: NumberOfQueues,
    #[serde(with = "bits")]
    coalescing: InterruptCoalescing,
    uncoalesced: u32,
    atomicity: u32,
    #[serde(with = "bits")]
    events: AsyncEventConfig,
    host_id: [u8; 16],
}

impl Default for Features {
    fn default() -> Self {
        Features {
            arbitration: 0,
            over_temperature: WARNING_TEMPERATURE,
            under_temperature: 0,
            error_recovery: 0,
            write_cache: true,
            queues: NumberOfQueues::new().with_nsq(IO_QUEUES - 1).with_ncq(IO_QUEUES - 1),
            coalescing: InterruptCoalescing::new(),
            // The admin queue's vector.
            uncoalesced: 1,
            atomicity: 0,
            events: AsyncEventConfig::new(),
            host_id: [0; 16],
        }
    }
}

const INVALID: Status = Status::INVALID_FIELD.do_not_retry();

/// What Get Features with select "supported capabilities" says of `feature`; `None` for one that
/// does not exist. A drive without a volatile cache has no Volatile Write Cache feature.
pub fn supported(feature: u8, volatile_cache: bool) -> Option<FeatureCapabilities> {
    let changeable = FeatureCapabilities::new().with_changeable(true);
    match feature {
        fid::ERROR_RECOVERY => Some(changeable.with_namespace_specific(true)),
        fid::VOLATILE_WRITE_CACHE => volatile_cache.then_some(changeable),
        fid::ARBITRATION
        | fid::POWER_MANAGEMENT
        | fid::TEMPERATURE_THRESHOLD
        | fid::NUMBER_OF_QUEUES
        | fid::INTERRUPT_COALESCING
        | fid::INTERRUPT_VECTOR_CONFIG
        | fid::WRITE_ATOMICITY
        | fid::ASYNC_EVENT_CONFIG
        | fid::HOST_IDENTIFIER => Some(changeable),
        _ => None,
    }
}

impl Features {
    /// Whether values that were saved can be.
    ///
    /// # Errors
    /// When they grant queues that there are not.
    pub fn check(&self) -> Result<(), RestoreError> {
        let granted = self.queues.nsq().max(self.queues.ncq());
        require(granted < IO_QUEUES, "the number of queues")
    }

    /// The value of a feature that fits in a dword.
    ///
    /// # Errors
    /// Invalid Field for a feature or a selection in `cdw11` that does not exist.
    pub fn get(&self, feature: u8, cdw11: u32) -> Result<u32, Status> {
        Ok(match feature {
            fid::ARBITRATION => self.arbitration,
            fid::POWER_MANAGEMENT => 0,
            fid::TEMPERATURE_THRESHOLD => {
                let asked = TemperatureThreshold::from(cdw11);
                let value = match (asked.tmpsel(), asked.thsel()) {
                    (0, 0) => self.over_temperature,
                    (0, 1) => self.under_temperature,
                    _ => return Err(INVALID),
                };
                u32::from(value)
            }
            fid::ERROR_RECOVERY => self.error_recovery,
            fid::VOLATILE_WRITE_CACHE => u32::from(self.write_cache),
            fid::NUMBER_OF_QUEUES => self.queues.into(),
            fid::INTERRUPT_COALESCING => self.coalescing.into(),
            fid::INTERRUPT_VECTOR_CONFIG => {
                let vector = InterruptVectorConfig::from(cdw11).iv();
                if vector >= VECTORS {
                    return Err(INVALID);
                }
                let exempt = self.uncoalesced & 1 << vector != 0;
                InterruptVectorConfig::new().with_iv(vector).with_cd(exempt).into()
            }
            fid::WRITE_ATOMICITY => self.atomicity,
            fid::ASYNC_EVENT_CONFIG => self.events.into(),
            _ => return Err(INVALID),
        })
    }

    /// Changes a feature that fits in a dword; returns dword 0 of the completion.
    ///
    /// # Errors
    /// Invalid Field for a feature or value that does not exist.
    pub fn set(&mut self, feature: u8, cdw11: u32) -> Result<u32, Status> {
        match feature {
            fid::ARBITRATION => self.arbitration = cdw11,
            // There is one power state, 0.
            fid::POWER_MANAGEMENT if cdw11 & 0x1f == 0 => {}
            fid::TEMPERATURE_THRESHOLD => {
                let asked = TemperatureThreshold::from(cdw11);
                match (asked.tmpsel(), asked.thsel()) {
                    (0 | 0xf, 0) => self.over_temperature = asked.tmpth(),
                    (0 | 0xf, 1) => self.under_temperature = asked.tmpth(),
                    _ => return Err(INVALID),
                }
            }
            fid::ERROR_RECOVERY if cdw11 & DULBE == 0 => self.error_recovery = cdw11 & 0xffff,
            fid::VOLATILE_WRITE_CACHE => self.write_cache = cdw11 & 1 != 0,
            fid::NUMBER_OF_QUEUES => return self.set_queues(NumberOfQueues::from(cdw11)),
            fid::INTERRUPT_COALESCING => {
                self.coalescing = InterruptCoalescing::from(cdw11 & 0xffff);
            }
            fid::INTERRUPT_VECTOR_CONFIG => {
                let config = InterruptVectorConfig::from(cdw11);
                if config.iv() >= VECTORS {
                    return Err(INVALID);
                }
                let bit = 1 << config.iv();
                self.uncoalesced =
                    if config.cd() { self.uncoalesced | bit } else { self.uncoalesced & !bit };
            }
            fid::WRITE_ATOMICITY => self.atomicity = cdw11 & 1,
            fid::ASYNC_EVENT_CONFIG => {
                let smart = AsyncEventConfig::from(cdw11).smart();
                self.events = AsyncEventConfig::new().with_smart(smart);
            }
            _ => return Err(INVALID),
        }
        Ok(0)
    }

    fn set_queues(&mut self, asked: NumberOfQueues) -> Result<u32, Status> {
        // Section 5.21.1.7: FFFFh is not allowed.
        if asked.nsq() == u16::MAX || asked.ncq() == u16::MAX {
            return Err(INVALID);
        }
        self.queues = NumberOfQueues::new()
            .with_nsq(asked.nsq().min(IO_QUEUES - 1))
            .with_ncq(asked.ncq().min(IO_QUEUES - 1));
        Ok(self.queues.into())
    }

    /// The host identifier, 16 bytes.
    pub fn host_id(&self) -> [u8; 16] {
        self.host_id
    }

    /// Sets the host identifier.
    pub fn set_host_id(&mut self, id: [u8; 16]) {
        self.host_id = id;
    }

    /// Whether writes may rest in a volatile cache.
    #[inline]
    pub fn write_cache(&self) -> bool {
        self.write_cache
    }

    /// Lets writes rest in a volatile cache, or not.
    pub fn set_write_cache(&mut self, on: bool) {
        self.write_cache = on;
    }

    /// Whether an I/O submission queue (or completion queue) identifier is one of those granted.
    pub fn grants(&self, qid: u16, completion: bool) -> bool {
        let last = if completion { self.queues.ncq() } else { self.queues.nsq() };
        (1..=last + 1).contains(&qid)
    }

    /// Interrupt Coalescing, and the vectors that are exempt from it.
    #[inline]
    pub fn coalescing(&self) -> (InterruptCoalescing, u32) {
        (self.coalescing, self.uncoalesced)
    }

    /// Whether `kelvin` is beyond a threshold.
    pub fn is_temperature_beyond(&self, kelvin: u16) -> bool {
        kelvin >= self.over_temperature || kelvin <= self.under_temperature
    }

    /// The critical warnings that raise an event.
    pub fn smart_events(&self) -> u8 {
        self.events.smart()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_supported_dword_feature_reads_back_what_was_set() {
        let cases = [
            (fid::ARBITRATION, 0x0102_0304),
            (fid::ERROR_RECOVERY, 0x55),
            (fid::VOLATILE_WRITE_CACHE, 0),
            (fid::INTERRUPT_COALESCING, 0x0a08),
            (fid::INTERRUPT_VECTOR_CONFIG, 5 | 1 << 16),
            (fid::WRITE_ATOMICITY, 1),
            (fid::ASYNC_EVENT_CONFIG, 0x1f),
        ];
        let mut features = Features::default();
        for (feature, value) in cases {
            assert_eq!(features.set(feature, value), Ok(0), "{feature:#x}");
            assert_eq!(features.get(feature, value), Ok(value), "{feature:#x}");
            assert!(supported(feature, true).unwrap().changeable(), "{feature:#x}");
        }
    }

    #[test]
    fn values_that_do_not_exist_are_refused_and_change_nothing() {
        let mut features = Features::default();
        for (feature, value) in [
            (fid::POWER_MANAGEMENT, 1),
            (fid::ERROR_RECOVERY, DULBE),
            (fid::TEMPERATURE_THRESHOLD, 3 << 16),
            (fid::TEMPERATURE_THRESHOLD, 2 << 20),
            (fid::NUMBER_OF_QUEUES, 0xffff),
            (fid::INTERRUPT_VECTOR_CONFIG, u32::from(VECTORS)),
            (0x03, 0),
            (0xff, 0),
        ] {
            assert_eq!(features.set(feature, value), Err(INVALID), "{feature:#x} {value:#x}");
        }
        assert_eq!(features, Features::default());
    }

    #[test]
    fn the_number_of_queues_is_what_was_asked_at_most_what_there_is() {
        let mut features = Features::default();
        assert_eq!(features.set(fid::NUMBER_OF_QUEUES, 3 | 1 << 16), Ok(3 | 1 << 16));
        assert!(features.grants(4, false) && !features.grants(5, false));
        assert!(features.grants(2, true) && !features.grants(3, true) && !features.grants(0, true));
        let most = u32::from(IO_QUEUES - 1);
        assert_eq!(features.set(fid::NUMBER_OF_QUEUES, 0xfffe_fffe), Ok(most | most << 16));
    }

    #[test]
    fn thresholds_have_a_side() {
        let mut features = Features::default();
        assert!(!features.is_temperature_beyond(300));
        features.set(fid::TEMPERATURE_THRESHOLD, 290).unwrap();
        assert!(features.is_temperature_beyond(300));
        features.set(fid::TEMPERATURE_THRESHOLD, 400).unwrap();
        let under = TemperatureThreshold::new().with_tmpth(310).with_thsel(1);
        features.set(fid::TEMPERATURE_THRESHOLD, under.into()).unwrap();
        assert!(features.is_temperature_beyond(300));
    }
}
