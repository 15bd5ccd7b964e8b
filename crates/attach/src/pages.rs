//! Memory in the rack's address space: one host's process allocates it, opens pages to another
//! host, and closes them again; the other host's processes reach them by their address.

use std::sync::Arc;

use rackbus_memory::{Access, AsHandle, Handles, Region};
use rackbus_segment::Handle;
use rackbus_segment::message::{NodeId, Reply, SessionRequest};

use crate::events::Watch;
use crate::memory::{MappedMemory, Mapping};
use crate::registry::Watched;
use crate::session::{AttachError, Session};

/// Memory of this process that has a place in the rack's address space. It ends when it is
/// dropped; whoever maps pages of it that are open reads what they held last, until it unmaps them.
#[derive(Debug)]
pub struct Extent {
    session: Session,
    handle: Handle,
    address: u64,
    mapping: Mapping,
    memory: Arc<MappedMemory>,
}

impl Session {
    /// Allocates `size` bytes, in whole pages of 4096, of this host's export.
    ///
    /// # Errors
    /// [`AttachError::Refused`] when so much is not left, or the size is not of whole pages.
    pub fn allocate(&self, size: u64) -> Result<Extent, AttachError> {
        let (made, reply, mut handles) = self.make(&SessionRequest::Allocate { size })?;
        let Reply::Extent { extent: handle, address } = reply else {
            return Err(AttachError::Protocol);
        };
        let file = handles.resource()?;
        let memory = MappedMemory::new(Some(file), true, size);
        let mapping = memory.map((0, size), None, false)?;
        // Its pages move one by one: the file as a whole is never mapped again, hence no size.
        let watched = Watched { memory: Arc::downgrade(&memory), ..Watched::default() };
        self.registry().watch(handle, watched, self);
        made.claim();
        Ok(Extent { session: self.clone(), handle, address, mapping, memory })
    }

    /// Reaches `length` bytes at an address of the rack, which some host's process has opened to
    /// this host. Whole pages, made of ranges as they were opened.
    ///
    /// # Errors
    /// [`AttachError::Refused`]: nobody opened them to this host, or they are not there.
    pub fn map_pages(&self, address: u64, length: u64) -> Result<RemotePages, AttachError> {
        let (reply, handles) = self.call(&SessionRequest::MapPages { address, length })?;
        let Reply::Pages { connection: handle, lengths, write } = reply else {
            return Err(AttachError::Protocol);
        };
        let watch = Watch::new(None);
        let watched = Watched { watch: Arc::downgrade(&watch), ..Watched::default() };
        self.registry().watch(handle, watched, self);
        let held = ConnectionGuard { session: self.clone(), handle };
        if !write && self.in_guest() {
            // Only the guest's own kernel would keep a process from storing.
            return Err(AttachError::ReadOnly);
        }
        let region = pieces(&lengths, handles, write)?;
        Ok(RemotePages { _held: held, mapping: Mapping::new(Arc::new(region)), write, watch })
    }
}

/// One mapping of several pieces of memory, one after the other.
fn pieces(lengths: &[u64], mut handles: Handles, write: bool) -> Result<Region, AttachError> {
    let access = if write { Access::READ | Access::WRITE } else { Access::READ };
    let total = lengths.iter().try_fold(0_u64, |sum, length| sum.checked_add(*length));
    let region = Region::reserve(total.ok_or(AttachError::Protocol)?, access)?;
    let mut at = 0;
    for length in lengths {
        region.adopt(at, *length, handles.resource()?.as_handle(), 0)?;
        at += length;
    }
    handles.finish()?;
    Ok(region)
}

impl Extent {
    /// Its first byte in the rack's address space.
    pub fn address(&self) -> u64 {
        self.address
    }

    /// The memory, mapped for good.
    pub fn mapping(&self) -> &Mapping {
        &self.mapping
    }

    /// Opens pages to one host, to be read, or written as well. What they hold stays.
    ///
    /// # Errors
    /// [`AttachError::Refused`]: the range is not of whole pages inside, or some are open already.
    pub fn open(
        &self,
        offset: u64,
        length: u64,
        node: NodeId,
        write: bool,
    ) -> Result<(), AttachError> {
        let extent = self.handle;
        self.session.done(&SessionRequest::OpenPages { extent, offset, length, node, write })
    }

    /// Closes pages, as they were opened. When this returns nobody else reads or writes them,
    /// whatever mapping of them it keeps.
    ///
    /// # Errors
    /// [`AttachError::Refused`] when they are not open.
    pub fn close(&self, offset: u64, length: u64) -> Result<(), AttachError> {
        self.session.done(&SessionRequest::ClosePages { extent: self.handle, offset, length })
    }
}

impl Drop for Extent {
    fn drop(&mut self) {
        let request = SessionRequest::Free { extent: self.handle };
        // A node that is gone has ended it already.
        let _ = self.session.give_back(self.handle, &self.memory, &request);
    }
}

/// Pages of another host's process. The connection ends when it is dropped.
#[derive(Debug)]
pub struct RemotePages {
    _held: ConnectionGuard,
    mapping: Mapping,
    write: bool,
    watch: Arc<Watch>,
}

/// A connection to be ended.
#[derive(Debug)]
struct ConnectionGuard {
    session: Session,
    handle: Handle,
}

impl Drop for ConnectionGuard {
    fn drop(&mut self) {
        self.session.registry().forget(self.handle);
        self.session.disconnect(self.handle);
    }
}

impl RemotePages {
    /// The borrowed pages, mapped in this process.
    pub fn mapping(&self) -> &Mapping {
        &self.mapping
    }

    /// Whether stores are allowed.
    pub fn writable(&self) -> bool {
        self.write
    }

    /// What happens to them: closed (`Revoked`), freed (`Removed`), or their process or its host gone (`Lost`).
    pub fn watch(&self) -> &Arc<Watch> {
        &self.watch
    }
}

impl Drop for RemotePages {
    fn drop(&mut self) {
        self.watch.end();
    }
}
