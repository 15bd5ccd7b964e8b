//! What a function's user mapped, and the files it is in: kept so that another process can map the
//! same.
//!
//! A file is kept once, however many mappings lead to it, and no longer than one of them. A user
//! that maps more files than are kept cannot have its function saved: descriptors are few, and no
//! user of ours has more than some pieces of memory.

use std::collections::BTreeMap;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::sync::{Arc, Weak};

use rackbus_memory::Access;

use crate::state::{MappingState, SaveError};

/// Files that are kept for a function.
const FILES: usize = 64;

/// Which file, opened for what.
type Identity = (u64, u64, u32);

#[derive(Debug)]
enum Behind {
    Nothing,
    Kept(Arc<OwnedFd>, u64),
    NotKept,
}

#[derive(Debug)]
struct Mapping {
    length: u64,
    access: Access,
    behind: Behind,
}

/// All mappings of a function.
#[derive(Debug, Default)]
pub(crate) struct Mapped {
    mappings: BTreeMap<u64, Mapping>,
    files: Vec<(Identity, Weak<OwnedFd>)>,
}

impl Mapped {
    /// The user mapped this.
    pub fn insert(
        &mut self,
        iova: u64,
        length: u64,
        access: Access,
        memory: Option<(BorrowedFd<'_>, u64)>,
    ) {
        let behind = match memory {
            None => Behind::Nothing,
            Some((fd, offset)) => match self.keep(fd) {
                Some(file) => Behind::Kept(file, offset),
                None => Behind::NotKept,
            },
        };
        self.mappings.insert(iova, Mapping { length, access, behind });
    }

    fn keep(&mut self, fd: BorrowedFd<'_>) -> Option<Arc<OwnedFd>> {
        let stat = rustix::fs::fstat(fd).ok()?;
        let flags = rustix::fs::fcntl_getfl(fd).ok()?;
        let identity = (stat.st_dev, stat.st_ino, flags.bits());
        self.files.retain(|(_, file)| file.strong_count() > 0);
        let known = self.files.iter().find(|(known, _)| *known == identity);
        if let Some(file) = known.and_then(|(_, file)| file.upgrade()) {
            return Some(file);
        }
        if self.files.len() >= FILES {
            return None;
        }
        let file = Arc::new(fd.try_clone_to_owned().ok()?);
        self.files.push((identity, Arc::downgrade(&file)));
        Some(file)
    }

    /// The user took this mapping away.
    pub fn remove(&mut self, iova: u64) {
        self.mappings.remove(&iova);
    }

    /// It took all of them away.
    pub fn clear(&mut self) {
        *self = Mapped::default();
    }

    /// The memory is gone; the mappings stay.
    pub fn drop_memory(&mut self) {
        self.mappings.values_mut().for_each(|mapping| mapping.behind = Behind::Nothing);
        self.files.clear();
    }

    /// All of it, with its files appended to `descriptors`.
    pub fn save(&self, descriptors: &mut Vec<OwnedFd>) -> Result<Vec<MappingState>, SaveError> {
        let mut numbers: Vec<(*const OwnedFd, u32)> = Vec::new();
        let mut states = Vec::with_capacity(self.mappings.len());
        for (iova, mapping) in &self.mappings {
            let memory = match &mapping.behind {
                Behind::Nothing => None,
                Behind::NotKept => return Err(SaveError::TooManyFiles(FILES)),
                Behind::Kept(file, offset) => {
                    let known = numbers.iter().find(|(known, _)| *known == Arc::as_ptr(file));
                    let number = match known {
                        Some((_, number)) => *number,
                        None => {
                            let number = u32::try_from(descriptors.len()).unwrap_or(u32::MAX);
                            descriptors.push(file.try_clone()?);
                            numbers.push((Arc::as_ptr(file), number));
                            number
                        }
                    };
                    Some((number, *offset))
                }
            };
            states.push(MappingState {
                iova: *iova,
                length: mapping.length,
                read: mapping.access.contains(Access::READ),
                write: mapping.access.contains(Access::WRITE),
                memory,
            });
        }
        Ok(states)
    }
}
