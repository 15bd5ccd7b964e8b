//! How many mappings a function, and all functions of a process together, may have.

use std::sync::OnceLock;
use std::sync::atomic::{AtomicUsize, Ordering};

use super::MapError;

/// Mappings that all functions of this process have, beside the one that each may have in any case.
static MAPPED: AtomicUsize = AtomicUsize::new(0);

/// One of the mappings that the process may have.
#[derive(Debug)]
pub(super) struct MappingSlot;

impl MappingSlot {
    /// Takes a slot, if the process has not reached its limit.
    ///
    /// # Errors
    /// [`MapError::Exhausted`].
    pub fn take() -> Result<MappingSlot, MapError> {
        let most = Limits::get().process;
        let free = |mapped| (mapped < most).then_some(mapped + 1);
        match MAPPED.fetch_update(Ordering::Relaxed, Ordering::Relaxed, free) {
            Ok(_) => Ok(MappingSlot),
            Err(_) => Err(MapError::Exhausted(most)),
        }
    }
}

impl Drop for MappingSlot {
    fn drop(&mut self) {
        MAPPED.fetch_sub(1, Ordering::Relaxed);
    }
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
