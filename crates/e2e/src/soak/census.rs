//! What processes of a rack have open, before a soak and after it: nothing may have been kept.

use std::fs;
use std::path::Path;
use std::time::{Duration, Instant};

use rustix::process::Pid;

use crate::{CheckFailure, Result};

/// Descriptors that a node may have more than when it was started: connections that are just ending.
const SPARE_DESCRIPTORS: usize = 8;

/// What a process has open.
#[derive(Debug)]
pub struct Census {
    #[allow(dead_code, reason = "a failure shows it")]
    role: String,
    descriptors: usize,
    /// Mappings of memory files.
    memory: usize,
    /// Processes of the rack, the same for all roles: nodes, and what they and users have started.
    processes: usize,
}

impl Census {
    /// What the process of `role` has open. Processes with `folder` among their arguments, or something in it, are the
    /// rack's.
    ///
    /// # Errors
    /// When the process has ended.
    pub fn of(role: &str, process: Pid, folder: &Path) -> Result<Census> {
        let own = format!("/proc/{}", process.as_raw_pid());
        let descriptors = fs::read_dir(format!("{own}/fd"))?.count();
        let maps = fs::read_to_string(format!("{own}/maps"))?;
        let memory = maps.lines().filter(|line| line.contains("memfd:")).count();
        Ok(Census { role: role.to_owned(), descriptors, memory, processes: processes(folder)? })
    }
}

/// How many processes have a folder, or something in it, among their arguments.
fn processes(folder: &Path) -> Result<usize> {
    let folder = folder.display().to_string();
    // Not one whose name begins with the same letters.
    let ends = ["\0", "/"].map(|end| format!("{folder}{end}"));
    let of_rack = |entry: fs::DirEntry| {
        let arguments = fs::read(entry.path().join("cmdline")).unwrap_or_default();
        let arguments = String::from_utf8_lossy(&arguments).into_owned();
        ends.iter().any(|end| arguments.contains(end))
    };
    Ok(fs::read_dir("/proc")?.flatten().filter_map(|entry| of_rack(entry).then_some(())).count())
}

/// No process has kept what it did not have at first.
///
/// # Errors
/// What there is more of than at first, 10 s after this was asked.
pub fn check_census(fresh: &[Census], now: impl Fn() -> Result<Vec<Census>>) -> Result<()> {
    let begun = Instant::now();
    loop {
        let now = now()?;
        let grown = fresh.iter().zip(&now).find(|(fresh, now)| {
            now.descriptors > fresh.descriptors + SPARE_DESCRIPTORS
                || now.memory > fresh.memory
                || now.processes > fresh.processes
        });
        match grown {
            None => return Ok(()),
            // What ended just now may still be closing.
            Some(_) if begun.elapsed() < Duration::from_secs(10) => {
                std::thread::sleep(Duration::from_millis(100));
            }
            Some((fresh, now)) => {
                return Err(CheckFailure(format!(
                    "more is open than at first: {fresh:?}, now {now:?}"
                )));
            }
        }
    }
}
