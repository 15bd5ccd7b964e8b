//! Two hosts of a rack, and a session on each.

use std::path::Path;

use rackbus_attach::{AttachError, LocalSegment, Location, Mapping, SegmentOptions, Session};

use crate::BenchError;
use crate::rack::BenchRack;

const RACK: &str =
    "name = \"bench\"\n[hosts.alpha]\nmemory = \"8 GiB\"\n[hosts.beta]\nmemory = \"8 GiB\"\n";

/// See the module's documentation. The client's thread is on `beta`, the other one on `alpha`.
pub struct HostPair {
    /// A program on the host alpha.
    pub alpha: Session,
    /// A program on the host beta.
    pub beta: Session,
    next: u32,
    _rack: BenchRack,
}

/// A segment as its owner has it, and as the other host maps it.
pub struct SharedSegment {
    /// The segment as its owner has mapped it.
    pub local: Mapping,
    /// The same segment as the other host has mapped it.
    pub remote: Mapping,
    _segment: LocalSegment,
    _connection: rackbus_attach::RemoteSegment,
}

impl HostPair {
    /// Starts the rack; `None` when there is no `rackbus` to start it with.
    ///
    /// # Errors
    /// When it does not come up.
    pub fn start(dir: &Path) -> Result<Option<HostPair>, BenchError> {
        let Some(rack) = BenchRack::start(dir, RACK)? else { return Ok(None) };
        let session = |host: &str| {
            Session::open(&Location { run_dir: rack.run_dir(), host: host.to_owned() })
        };
        let (alpha, beta) = (session("alpha")?, session("beta")?);
        Ok(Some(HostPair { alpha, beta, next: 1, _rack: rack }))
    }

    /// A segment of alpha's of `bytes`, all of it touched.
    ///
    /// # Errors
    /// [`AttachError`].
    pub fn segment(&mut self, bytes: usize) -> Result<(LocalSegment, Mapping), AttachError> {
        let owner = self.alpha.clone();
        self.segment_of(&owner, bytes)
    }

    fn segment_of(
        &mut self,
        owner: &Session,
        bytes: usize,
    ) -> Result<(LocalSegment, Mapping), AttachError> {
        self.next += 1;
        let segment = owner.create_segment(&SegmentOptions::shared(self.next, bytes as u64))?;
        segment.set_available()?;
        let local = segment.map(0, bytes as u64)?;
        local.whole().fill(1);
        Ok((segment, local))
    }

    /// A segment of alpha's, mapped by beta.
    ///
    /// # Errors
    /// [`AttachError`].
    pub fn on_alpha(&mut self, bytes: usize) -> Result<SharedSegment, AttachError> {
        let (owner, user) = (self.alpha.clone(), self.beta.clone());
        self.shared(&owner, &user, bytes)
    }

    /// A segment of beta's, mapped by alpha.
    ///
    /// # Errors
    /// [`AttachError`].
    pub fn on_beta(&mut self, bytes: usize) -> Result<SharedSegment, AttachError> {
        let (owner, user) = (self.beta.clone(), self.alpha.clone());
        self.shared(&owner, &user, bytes)
    }

    fn shared(
        &mut self,
        owner: &Session,
        user: &Session,
        bytes: usize,
    ) -> Result<SharedSegment, AttachError> {
        let (segment, local) = self.segment_of(owner, bytes)?;
        let connection = user.connect(owner.node(), segment.id(), 1_000)?;
        let remote = connection.map(0, bytes as u64)?;
        // Its pages are in this mapping from now on.
        remote.whole().fill(1);
        Ok(SharedSegment { local, remote, _segment: segment, _connection: connection })
    }
}
