//! Huge pages for a test. A system has none unless somebody reserves them, which takes root; whether there are any is
//! decided here, so that a test which has them may expect its mappings to be made.

use std::fs::File;
use std::path::Path;

/// Bytes of each of these pages.
pub const HUGE_PAGE: u64 = 2 << 20;

const POOL: &str = "/sys/kernel/mm/hugepages/hugepages-2048kB";

/// Huge pages of 2 MiB that no other test takes. The system has as many as before when this is dropped.
#[derive(Debug)]
pub struct HugePages {
    /// Of the pool, from the tests of other processes.
    _lock: File,
    /// How many the system had, where more were reserved for this.
    before: Option<u64>,
}

fn number_in(file: &str) -> Option<u64> {
    std::fs::read_to_string(Path::new(POOL).join(file)).ok()?.trim().parse().ok()
}

/// Pages that nobody has, nor was promised.
fn free() -> u64 {
    let promised = number_in("resv_hugepages").unwrap_or(0);
    number_in("free_hugepages").unwrap_or(0).saturating_sub(promised)
}

fn set(count: u64) -> std::io::Result<()> {
    std::fs::write(Path::new(POOL).join("nr_hugepages"), count.to_string())
}

impl HugePages {
    /// So many pages, which the system has or reserves. `None`, and a line on standard error that says why, where it has no
    /// hugetlbfs, where this user may not reserve any, or where the kernel found no memory for them.
    pub fn reserve(count: u64) -> Option<HugePages> {
        let none = |why: &str| {
            eprintln!("not tested: {why}");
            None
        };
        let Ok(lock) = File::open(Path::new(POOL).join("nr_hugepages")) else {
            return none("the system has no hugetlbfs");
        };
        if lock.lock().is_err() {
            return none("huge pages cannot be kept from other tests");
        }
        let mut pages = HugePages { _lock: lock, before: None };
        if free() < count {
            let before = number_in("nr_hugepages").unwrap_or(0);
            if let Err(error) = set(before + count) {
                return none(&format!("huge pages cannot be reserved: {error}"));
            }
            pages.before = Some(before);
        }
        if free() < count {
            return none("the system has no memory for huge pages");
        }
        Some(pages)
    }
}

impl Drop for HugePages {
    fn drop(&mut self) {
        if let Some(before) = self.before {
            // Whoever could set it may still; else more pages than before stay, and nothing is wrong.
            let _ = set(before);
        }
    }
}
