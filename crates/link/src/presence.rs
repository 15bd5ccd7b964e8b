//! Which process is whose node, as the kernel knows it: a node holds a lock on a file for as long as
//! it lives, and the kernel says who does. What is in the file does not count.
//!
//! These locks belong to a process, and end when it closes the file once, by whatever descriptor: a
//! process does not look at files that it holds itself.

use std::fs::File;
use std::path::{Path, PathBuf};

use rustix::process::{Flock, FlockType, Pid, getpid};

/// The file that the node of `host` holds.
pub fn node_file(run_dir: &Path, host: &str) -> PathBuf {
    run_dir.join(host).join("node.pid")
}

/// The living process that holds `file`, other than this one.
pub fn holder(file: &Path) -> Option<Pid> {
    let file = File::open(file).ok()?;
    let wanted = Flock::from(FlockType::WriteLock);
    rustix::process::fcntl_getlk(&file, &wanted).ok()??.pid
}

/// Whether `process` is the node of the host `from`, which is one of those that are known. The process
/// that plays several hosts itself is all of them.
pub(crate) fn speaks_for(run_dir: &Path, known: &[String], from: &String, process: Pid) -> bool {
    process == getpid()
        || (known.contains(from) && holder(&node_file(run_dir, from)) == Some(process))
}
