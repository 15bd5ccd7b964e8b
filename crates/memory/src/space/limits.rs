//! How many mappings a function, and all functions of a process together, may have, and how much of the process' addresses.
//!
//! One page of memory may be mapped any number of times, so what a user lends bounds neither.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};

use super::MapError;

/// Bytes of addresses that the mappings of a function may take: 8 TiB.
const FUNCTION_BYTES: u64 = 1 << 43;
/// The same of all functions together: a quarter of what Linux gives a process on x86-64.
const PROCESS_BYTES: u64 = 1 << 45;

/// Mappings that all functions of this process have, beside the one that each may have in any case.
static MAPPED: AtomicU64 = AtomicU64::new(0);
/// Bytes of addresses that the mappings counted in [`MAPPED`] take.
static MAPPED_BYTES: AtomicU64 = AtomicU64::new(0);

/// One of the mappings that the process may have.
#[derive(Debug)]
pub(super) struct MappingSlot {
    length: u64,
    /// Bytes of the function's mappings.
    function: Arc<AtomicU64>,
    /// It is counted with those of other functions.
    is_shared: bool,
}

impl MappingSlot {
    /// Takes a slot for so many bytes, if neither the process nor the function, whose bytes are counted by `function`, has
    /// reached its limit. Its `first` one is there whatever other functions have.
    ///
    /// # Errors
    /// [`MapError::Exhausted`] and [`MapError::TooManyBytes`].
    pub fn take(
        length: u64,
        function: &Arc<AtomicU64>,
        first: bool,
    ) -> Result<MappingSlot, MapError> {
        if !add(function, length, FUNCTION_BYTES) {
            return Err(MapError::TooManyBytes(FUNCTION_BYTES));
        }
        let mut slot = MappingSlot { length, function: function.clone(), is_shared: false };
        if first {
            return Ok(slot);
        }
        let most = Limits::get().process;
        if !add(&MAPPED, 1, most as u64) {
            return Err(MapError::Exhausted(most));
        }
        if !add(&MAPPED_BYTES, length, PROCESS_BYTES) {
            MAPPED.fetch_sub(1, Ordering::Relaxed);
            return Err(MapError::TooManyBytes(PROCESS_BYTES));
        }
        slot.is_shared = true;
        Ok(slot)
    }
}

impl Drop for MappingSlot {
    fn drop(&mut self) {
        self.function.fetch_sub(self.length, Ordering::Relaxed);
        if self.is_shared {
            MAPPED.fetch_sub(1, Ordering::Relaxed);
            MAPPED_BYTES.fetch_sub(self.length, Ordering::Relaxed);
        }
    }
}

/// Adds to a counter what does not take it beyond `most`; whether it did.
fn add(counter: &AtomicU64, amount: u64, most: u64) -> bool {
    let sum = |has: u64| has.checked_add(amount).filter(|sum| *sum <= most);
    counter.fetch_update(Ordering::Relaxed, Ordering::Relaxed, sum).is_ok()
}

/// How many mappings there may be. The system has a limit for each process
/// (`vm.max_map_count`), which its threads, heap and files need as well: beyond it nothing works.
#[derive(Debug, Clone, Copy)]
struct Limits {
    process: usize,
    function: usize,
}

impl Limits {
    fn get() -> Limits {
        static LIMITS: OnceLock<Limits> = OnceLock::new();
        *LIMITS.get_or_init(|| Limits::from(system_mappings()))
    }

    /// Half of what the system allows is for functions, beside one for each of them, and of that an eighth for each.
    fn from(max_map_count: usize) -> Limits {
        let process = (max_map_count / 2).max(64);
        Limits { process, function: (process / 8).clamp(64, 65_535) }
    }
}

/// The mappings that the system lets this process have, of whatever sort (`vm.max_map_count`).
pub fn system_mappings() -> usize {
    let text = std::fs::read_to_string("/proc/sys/vm/max_map_count");
    text.ok().and_then(|text| text.trim().parse().ok()).unwrap_or(65_530)
}

/// The most mappings a function may have; the vfio-user server advertises it as `max_dma_maps`.
pub fn max_mappings() -> usize {
    Limits::get().function
}
