//! What an IOMMU refused, as the kernel logs it: the only place where it tells.
//!
//! The kernel leaves lines out when there are many of them at once, so there may have been more than are read.

use std::fs::File;
use std::io::{self, Read};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::OpenOptionsExt;

use rustix::fs::{OFlags, SeekFrom, seek};
use rustix::io::Errno;

use crate::facts::PciAddress;

/// The kernel's log, in which IOMMU drivers report faults.
const LOG: &str = "/dev/kmsg";
/// Bytes of a record at most (Linux, `Documentation/ABI/testing/dev-kmsg`).
const RECORD: usize = 8192;
/// Bit of AMD's flags: a write (AMD I/O virtualization specification, section 2.5.3).
const AMD_WRITE: u64 = 1 << 5;

/// An access of a function to what nobody mapped for it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct IommuFault {
    /// The function, of which the domain may not be told.
    pub requester: PciAddress,
    /// Where it wanted to.
    pub iova: u64,
    /// Whether it wanted to write.
    pub write: bool,
}

impl std::fmt::Display for IommuFault {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let kind = if self.write { "write" } else { "read" };
        write!(f, "DMA {kind} by {} at {:#x}: not mapped", self.requester, self.iova)
    }
}

impl IommuFault {
    /// Reads a line of the kernel's log, as Intel's and AMD's IOMMUs have them.
    pub fn parse(line: &str) -> Option<IommuFault> {
        intel(line).or_else(|| amd(line))
    }

    /// Whether the function is the one at `address`.
    pub fn is_of(&self, address: PciAddress) -> bool {
        PciAddress { domain: 0, ..self.requester } == PciAddress { domain: 0, ..address }
    }
}

/// What stands between two texts.
fn between<'t>(text: &'t str, before: &str, after: &[char]) -> Option<&'t str> {
    let rest = &text[text.find(before)? + before.len()..];
    Some(&rest[..rest.find(after).unwrap_or(rest.len())])
}

fn number(text: &str) -> Option<u64> {
    u64::from_str_radix(text.trim_start_matches("0x"), 16).ok()
}

/// `DMAR: [DMA Write NO_PASID] Request device [05:00.0] fault addr 0x1000 [fault reason 0x05] …`
fn intel(line: &str) -> Option<IommuFault> {
    let kind = between(line, "DMAR: [DMA ", &[']'])?;
    let requester = between(line, "equest device [", &[']'])?.parse().ok()?;
    let iova = number(between(line, "fault addr ", &[' '])?)?;
    Some(IommuFault { requester, iova, write: kind.starts_with("Write") })
}

/// `AMD-Vi: Event logged [IO_PAGE_FAULT device=0000:05:00.0 domain=0x000a address=0x1000 flags=0x0020]`
fn amd(line: &str) -> Option<IommuFault> {
    let event = between(line, "AMD-Vi: Event logged [IO_PAGE_FAULT", &['\n'])?;
    let value = |key| between(event, key, &[' ', ']']);
    let requester = value("device=")?.parse().ok()?;
    let flags = number(value("flags=")?)?;
    Some(IommuFault { requester, iova: number(value("address=")?)?, write: flags & AMD_WRITE != 0 })
}

/// Reads the faults that are logged from now on.
#[derive(Debug)]
pub struct FaultLog(File);

impl FaultLog {
    /// Opens the kernel's log at its end.
    ///
    /// # Errors
    /// When this process may not read it.
    pub fn open() -> io::Result<FaultLog> {
        let flags = OFlags::NONBLOCK.bits().cast_signed();
        let file = File::options().read(true).custom_flags(flags).open(LOG)?;
        seek(&file, SeekFrom::End(0))?;
        Ok(FaultLog(file))
    }

    /// The log from where another process has read it, by its descriptor.
    pub fn inherited(log: OwnedFd) -> FaultLog {
        FaultLog(log.into())
    }

    /// What was logged since the last time.
    pub fn read(&self) -> Vec<IommuFault> {
        let mut found = Vec::new();
        let mut record = [0; RECORD];
        loop {
            match (&self.0).read(&mut record) {
                Ok(length @ 1..) => {
                    let text = String::from_utf8_lossy(&record[..length]);
                    found.extend(IommuFault::parse(&text));
                }
                // Records were overwritten before they were read: the next one is there.
                Err(error) if error.raw_os_error() == Some(Errno::PIPE.raw_os_error()) => {}
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                _ => return found,
            }
        }
    }
}

impl AsFd for FaultLog {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn faults_of_both_vendors_are_read() {
        let line = "3,511,55983101,-;DMAR: [DMA Write NO_PASID] Request device [05:00.0] fault addr \
                    0x1000000000 [fault reason 0x05] PTE Write access is not set\n";
        let fault = IommuFault::parse(line).unwrap();
        assert_eq!((fault.iova, fault.write), (1 << 36, true));
        assert!(fault.is_of("0001:05:00.0".parse().unwrap()));
        assert!(!fault.is_of("05:00.1".parse().unwrap()));
        assert_eq!(fault.to_string(), "DMA write by 0000:05:00.0 at 0x1000000000: not mapped");
        let line = "6,1,2,-;nvme 0000:41:00.0: AMD-Vi: Event logged [IO_PAGE_FAULT device=0000:41:00.0 \
                    domain=0x001c address=0xfffd0000 flags=0x0000]\n";
        let fault = IommuFault::parse(line).unwrap();
        assert_eq!((fault.iova, fault.write), (0xfffd_0000, false));
    }

    #[test]
    fn lines_of_other_kinds_and_broken_ones_are_no_faults() {
        for line in [
            "",
            "DMAR: DRHD: handling fault status reg 2",
            "DMAR: [DMA Write NO_PASID] Request device [05:00] fault addr 0x10",
            "DMAR: [DMA Write NO_PASID] Request device [05:00.0] fault addr",
            "AMD-Vi: Event logged [IO_PAGE_FAULT device=",
            "AMD-Vi: Event logged [IO_PAGE_FAULT device=05:00.0 address=0x flags=0x]",
        ] {
            assert_eq!(IommuFault::parse(line), None, "{line}");
        }
    }
}
