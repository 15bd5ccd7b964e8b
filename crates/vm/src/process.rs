//! A process of this machine by a name that is no other one's, also later: for who hears of it from somebody else.

use std::fmt;
use std::os::unix::fs::MetadataExt;
use std::str::FromStr;

use crate::registry::birth;

/// A process by its id, when it began, and where ids mean that.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ProcessName {
    /// Its id in that namespace.
    pub process: u32,
    /// When it began, in the kernel's ticks since it started.
    pub birth: u64,
    /// A number of the namespace that the id is of, which another machine's has not, nor this one's after it was started anew.
    pub namespace: u64,
}

/// What is not a [`ProcessName`].
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("`{0}` names no process; write ID.BIRTH.NAMESPACE, three numbers")]
pub struct BadProcessName(pub String);

/// Numbers the namespace of this process' ids. By itself the first one has the same number on every machine.
fn own_namespace() -> Option<u64> {
    let of_machine = std::fs::metadata("/proc/self/ns/pid").ok()?.ino();
    let boot = std::fs::read_to_string("/proc/sys/kernel/random/boot_id").ok()?;
    let digits: String = boot.chars().filter(char::is_ascii_hexdigit).take(16).collect();
    Some(of_machine ^ u64::from_str_radix(&digits, 16).ok()?)
}

impl ProcessName {
    /// The name of this process; `None` where the system does not say when it began.
    #[must_use]
    pub fn own() -> Option<ProcessName> {
        let process = std::process::id();
        Some(ProcessName { process, birth: birth(process)?, namespace: own_namespace()? })
    }

    /// Whether its id means the same process here.
    #[must_use]
    pub fn is_known_here(&self) -> bool {
        own_namespace() == Some(self.namespace)
    }
}

impl fmt::Display for ProcessName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{}.{}", self.process, self.birth, self.namespace)
    }
}

impl FromStr for ProcessName {
    type Err = BadProcessName;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let bad = || BadProcessName(text.to_owned());
        let numbers = text.split('.').map(|part| part.parse().ok()).collect::<Option<Vec<u64>>>();
        match numbers.as_deref() {
            Some([process, birth, namespace]) => Ok(ProcessName {
                process: u32::try_from(*process).map_err(|_| bad())?,
                birth: *birth,
                namespace: *namespace,
            }),
            _ => Err(bad()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_process_is_found_by_its_name() {
        let own = ProcessName::own().expect("this process runs");
        assert!(own.is_known_here());
        assert_eq!(own.to_string().parse(), Ok(own));
        assert!(!ProcessName { namespace: own.namespace ^ 1, ..own }.is_known_here());
        // As the first namespace of another machine is numbered by its kernel.
        assert!(!ProcessName { namespace: 0xefff_fffc, ..own }.is_known_here());
        let longest = ProcessName { process: u32::MAX, birth: u64::MAX, namespace: u64::MAX };
        assert!(longest.to_string().len() <= 64, "it is no name of the API's");
        for bad in ["", "1", "1.2", "1.2.3.4", "1.x.3", "4294967296.2.3", "-1.2.3"] {
            assert_eq!(bad.parse::<ProcessName>(), Err(BadProcessName(bad.to_owned())));
        }
    }
}
