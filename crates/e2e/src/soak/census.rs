//! What processes of a rack have open, before a soak and after it: nothing may have been kept.

use std::fs;
use std::path::Path;
use std::time::{Duration, Instant};

use rustix::process::Pid;

use crate::{CheckFailure, Result};

/// Descriptors other than sockets that a process may have more than when it was started: of what is just ending.
const SPARE_DESCRIPTORS: usize = 8;
/// Sockets that it may have more, for each process of the rack: who asks it keeps some connections for the next questions,
/// and others are just ending.
const SPARE_SOCKETS: usize = 4;

/// What a process has open.
#[derive(Debug)]
pub struct Census {
    #[allow(dead_code, reason = "a failure shows it")]
    role: String,
    /// Those that are no sockets.
    descriptors: usize,
    sockets: usize,
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
        let is_socket = |entry: fs::DirEntry| {
            let leads_to = fs::read_link(entry.path()).unwrap_or_default();
            leads_to.to_string_lossy().starts_with("socket:")
        };
        let (sockets, others): (Vec<bool>, Vec<bool>) =
            fs::read_dir(format!("{own}/fd"))?.flatten().map(is_socket).partition(|it| *it);
        let (sockets, descriptors) = (sockets.len(), others.len());
        let maps = fs::read_to_string(format!("{own}/maps"))?;
        let memory = maps.lines().filter(|line| line.contains("memfd:")).count();
        let (role, processes) = (role.to_owned(), processes(folder)?);
        Ok(Census { role, descriptors, sockets, memory, processes })
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
                || now.sockets > fresh.sockets + SPARE_SOCKETS * fresh.processes
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
