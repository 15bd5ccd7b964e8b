//! What is simulated: an endpoint, as it is or with a policy that rackbus once had.

use rackbus_fabric::{BarPlace, Lending};
use rackbus_memory::{Access, DmaSpace, MemoryHandle};
use rackbus_pci::Endpoint;
use rackbus_pci::endpoint::FunctionRegion;

use super::files::PAGE;
use super::probe::Probe;
use super::schedule::Range;

/// Which policy the subject has.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Policy {
    Current,
    /// Truncated memory took the mappings away, while the record of the loans had them still: the range was
    /// refused until the conversation ended.
    UnmapsTruncated,
    /// To map the same again was refused.
    RefusesTheSame,
    /// What is revoked was taken away by the function's thread, when it came to that.
    RevokesByTheFunction,
}

pub struct Subject {
    endpoint: Endpoint,
    policy: Policy,
    /// Under the first old policy, the ranges of loans by their record.
    record: Vec<Range>,
    /// Under the last, that the function's thread has yet to revoke.
    revoking: bool,
}

impl Subject {
    pub fn new(policy: Policy, lending: Lending) -> Subject {
        let mut endpoint = Endpoint::new(Probe::new());
        endpoint.begin(lending, None);
        Subject { endpoint, policy, record: Vec::new(), revoking: false }
    }

    pub fn dma(&self) -> &DmaSpace {
        self.endpoint.dma()
    }

    /// What no policy changes.
    pub fn endpoint(&mut self) -> &mut Endpoint {
        &mut self.endpoint
    }

    /// Begins a conversation with another user, who lends by this.
    pub fn begin(&mut self, lending: Lending) {
        self.endpoint.scrub();
        self.record.clear();
        self.endpoint.begin(lending, None);
    }

    /// Whether a range is mapped from now on.
    pub fn map(&mut self, range: Range, access: Access, memory: Option<MemoryHandle>) -> bool {
        let (iova, length) = (range.first * PAGE, range.pages * PAGE);
        let same = self.dma().has(iova, length, access, memory.as_ref());
        let refused = match self.policy {
            Policy::UnmapsTruncated => !same && self.record.iter().any(|it| it.meets(range)),
            Policy::RefusesTheSame => same,
            Policy::Current | Policy::RevokesByTheFunction => false,
        };
        let lent = memory.is_some() && !same;
        let mapped = !refused && self.endpoint.map(iova, length, access, memory).is_ok();
        if mapped && lent {
            self.record.push(range);
        }
        mapped
    }

    pub fn unmap(&mut self, range: Range) -> bool {
        let unmapped = self.endpoint.unmap(range.first * PAGE, range.pages * PAGE).is_ok();
        if unmapped {
            self.record.retain(|it| !it.meets(range));
        }
        unmapped
    }

    pub fn unmap_all(&mut self) -> usize {
        self.record.clear();
        self.endpoint.unmap_all()
    }

    pub fn drop_memory(&mut self) {
        self.record.clear();
        self.endpoint.drop_memory();
    }

    pub fn open(&mut self, range: Range, place: BarPlace, memory: MemoryHandle) -> bool {
        let (iova, length) = (range.first * PAGE, range.pages * PAGE);
        self.endpoint.open_window(iova, length, Access::all(), place, memory).is_ok()
    }

    pub fn close(&mut self, range: Range) -> bool {
        self.endpoint.close_window(range.first * PAGE, range.pages * PAGE).is_ok()
    }

    pub fn notice(&mut self) {
        if std::mem::take(&mut self.revoking) {
            self.dma().revoker().revoke();
        }
        if self.policy == Policy::UnmapsTruncated && self.dma().truncated() {
            self.endpoint.unmap_all();
            self.endpoint.reset();
            return;
        }
        self.endpoint.check_memory();
    }

    pub fn revoke(&mut self) {
        if self.policy == Policy::RevokesByTheFunction {
            self.revoking = true;
            return;
        }
        self.dma().revoker().revoke();
    }

    pub fn set_master(&mut self, on: bool) {
        let command = if on { 6 } else { 2 };
        self.endpoint.write(FunctionRegion::Config, 4, &[command, 0]).unwrap();
    }
}
