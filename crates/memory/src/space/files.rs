//! The files that a function's memory is in: kept so that another process can map the same.
//!
//! A file is kept once, however many mappings lead to it, and no longer than one of them. A user
//! that maps more files than are kept cannot have its function saved: descriptors are few, and no
//! user of ours has more than some pieces of memory.

use std::os::fd::OwnedFd;
use std::sync::{Arc, Weak};

use rackbus_fabric::{LentMemory, ObjectKey};

use crate::handle::{MemoryHandle, is_of_device};

/// Files that are kept for a function.
pub const KEPT_FILES: usize = 64;

/// Which file, opened for what.
type Identity = (ObjectKey, u32);

/// What is known of the memory that a mapping leads to.
#[derive(Debug, Clone)]
pub enum Behind {
    /// Its owner gave none, or it is gone.
    Nothing,
    /// Memory from this offset of a file that is kept.
    Kept(Arc<OwnedFd>, ObjectKey, u64),
    /// The same of one that is not.
    NotKept(ObjectKey, u64),
}

impl Behind {
    /// Whether it is a device's memory, whose file is none of a memory's.
    pub fn is_of_device(&self) -> bool {
        match self {
            Behind::Nothing => false,
            Behind::Kept(_, object, _) | Behind::NotKept(object, _) => is_of_device(*object),
        }
    }

    /// Whether it is `memory`.
    pub(super) fn is(&self, memory: Option<&MemoryHandle>) -> bool {
        let memory = memory.map(|memory| (memory.object(), memory.offset()));
        match self {
            Behind::Nothing => memory.is_none(),
            Behind::Kept(_, object, offset) | Behind::NotKept(object, offset) => {
                memory == Some((*object, *offset))
            }
        }
    }
}

/// The files of one function.
#[derive(Debug, Default)]
pub(super) struct Files(Vec<(Identity, Weak<OwnedFd>)>);

impl Files {
    /// Keeps the file of `memory`, if there is room.
    pub fn keep(&mut self, memory: &MemoryHandle) -> Behind {
        let (object, offset) = (memory.object(), memory.offset());
        let not_kept = Behind::NotKept(object, offset);
        let Ok(flags) = rustix::fs::fcntl_getfl(memory.file()) else { return not_kept };
        let identity = (object, flags.bits());
        self.0.retain(|(_, file)| file.strong_count() > 0);
        let known = self.0.iter().find(|(known, _)| *known == identity);
        if let Some(file) = known.and_then(|(_, file)| file.upgrade()) {
            return Behind::Kept(file, object, offset);
        }
        if self.0.len() >= KEPT_FILES {
            return not_kept;
        }
        self.0.push((identity, Arc::downgrade(memory.file())));
        Behind::Kept(memory.file().clone(), object, offset)
    }
}
