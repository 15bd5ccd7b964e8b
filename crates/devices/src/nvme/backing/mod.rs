//! Where a drive's data lives. The controller turns every command into a few [`MediumRequest`]s.
//!
//! A request is first *attempted* without waiting, on memory resolved just now. Only when that
//! would block is it *started*: then the backing holds the mappings ([`PinnedSlice`]) until it
//! has finished, and the controller looks for finished requests in its poll loop.

mod durability;
mod file;
mod memory;
mod null;
mod open;
mod shared;
mod system;
mod uring;
mod vectored;
mod zeroing;

#[cfg(test)]
pub(super) mod parts {
    //! What tests put together in other ways.
    pub use super::file::FileBacking;
    pub use super::memory::ZERO_PIECE;
    pub use super::system::{Call, FileQueue};
    pub use super::uring::{Uring, UringOperation};
    pub use super::vectored::FileAccess;
}

use std::os::fd::{BorrowedFd, OwnedFd};

use rackbus_memory::{DmaSlice, PinnedSlice};
use rackbus_pci::Health;
use rackbus_spec::nvme::Status;

use super::config::{BackingConfig, NvmeConfig, NvmeError};

pub use shared::{FilePart, SharedFile};

/// One piece of work on the data; `B` is the form of the buffers. All ranges were checked against
/// [`Backing::capacity`].
#[derive(Debug)]
pub enum MediumRequest<B> {
    /// Fill the buffers from `offset` on.
    Read {
        /// First byte of the data.
        offset: u64,
        /// The memory that the data goes to.
        into: B,
    },
    /// Store the buffers from `offset` on.
    Write {
        /// First byte of the data.
        offset: u64,
        /// Where it comes from.
        from: B,
        /// Done only when the data survives a loss of power.
        durable: bool,
    },
    /// Done when everything written before survives a loss of power.
    Flush,
    /// Make `length` bytes from `offset` read as zeroes.
    Zero {
        /// Offset of the first byte on the drive.
        offset: u64,
        /// How many bytes read as zeroes.
        length: u64,
        /// The space may be given back.
        deallocate: bool,
    },
}

/// Why the medium failed a request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum MediaError {
    /// The data cannot be read.
    Read,
    /// The data cannot be written.
    Write,
    /// There is no space left for it.
    NoSpace,
    /// The medium may not be written.
    ReadOnly,
    /// The host's buffer could not be reached.
    Buffer,
    /// Data could not be made durable, now or since the medium was opened.
    NotDurable,
    /// It was given up before it was done.
    Aborted,
    /// The node that has the medium is lost.
    Unreachable,
}

impl From<MediaError> for Status {
    fn from(error: MediaError) -> Status {
        match error {
            MediaError::Read => Status::UNRECOVERED_READ,
            MediaError::Write => Status::WRITE_FAULT,
            MediaError::NoSpace => Status::CAPACITY_EXCEEDED,
            MediaError::ReadOnly => Status::WRITE_PROTECTED.do_not_retry(),
            MediaError::Buffer => Status::DATA_TRANSFER_ERROR,
            // To try again is no use: the system has forgotten what it could not write.
            MediaError::NotDurable => Status::WRITE_FAULT.do_not_retry(),
            MediaError::Aborted => Status::ABORT_REQUESTED,
            MediaError::Unreachable => Status::INTERNAL_ERROR,
        }
    }
}

/// The result of doing a request at once, without waiting for the medium.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum InlineResult {
    /// It is done, well or badly.
    Done(Result<(), MediaError>),
    /// It cannot be done without waiting: start it.
    WouldBlock,
}

/// A started request that has finished: the tag it was started with, and its result.
pub type RequestResult = (u32, Result<(), MediaError>);

/// A place for data. Its ranges are in bytes.
pub trait Backing: Send {
    /// How many bytes it holds.
    fn capacity(&self) -> u64;

    /// Whether written data needs a flush to survive a loss of power.
    fn volatile_cache(&self) -> bool;

    /// Does `request` now if it can be done without waiting.
    fn attempt(&mut self, request: &MediumRequest<&[DmaSlice<'_>]>) -> InlineResult;

    /// The data at `offset` will be read very soon.
    fn prefetch(&self, _offset: u64, _length: usize) {}

    /// The part that works in the background; none when attempts always succeed.
    fn background(&mut self) -> Option<&mut dyn Background>;

    /// Readable when background work has finished.
    fn wake_fd(&self) -> Option<BorrowedFd<'_>> {
        None
    }

    /// Whether data could not be made durable since the medium was opened: flushes fail, until
    /// [`reload`](Backing::reload).
    fn has_failed(&self) -> bool {
        false
    }

    /// The same for whoever looks from elsewhere.
    fn health(&self) -> Health {
        Health::default()
    }

    /// Whether the system has ended all that it was asked for, whether or not anybody has looked at the answers.
    fn is_settled(&mut self) -> bool {
        true
    }

    /// What whoever opens the medium after this process needs of it.
    ///
    /// # Errors
    /// When the process has no descriptors left.
    fn descriptors(&mut self) -> std::io::Result<Vec<OwnedFd>> {
        Ok(Vec::new())
    }

    /// Nobody has opened it by its [descriptors](Backing::descriptors): it goes on here.
    fn take_back(&mut self) {}

    /// Operations that another node still does for this drive, by their numbers there: whoever goes on with
    /// the medium waits for them before it begins any of its own.
    fn under_way_elsewhere(&self) -> Vec<u32> {
        Vec::new()
    }

    /// An earlier life of the drive left these [under way](Backing::under_way_elsewhere). False when they
    /// cannot be.
    fn expect(&mut self, numbers: &[u32]) -> bool {
        numbers.is_empty()
    }

    /// The medium has failed in an earlier life of the drive: as [`has_failed`](Backing::has_failed).
    fn inherit_failure(&mut self) {}

    /// Opens the medium anew if it has failed: what is read from now on is what it holds. Nothing
    /// that was started and not aborted may be under way.
    ///
    /// # Errors
    /// [`MediaError::NotDurable`] when that is not possible; it goes on failing then.
    fn reload(&mut self) -> Result<(), MediaError> {
        Ok(())
    }
}

/// The part of a backing that works while the engine does something else.
pub trait Background {
    /// Starts `request`; it is on its way after the next [`submit`](Background::submit).
    fn start(&mut self, tag: u32, request: MediumRequest<Vec<PinnedSlice>>);

    /// Sends off what was started.
    fn submit(&mut self);

    /// Whether the next look at what has finished does a piece of what was started: that look is work, also where
    /// nothing finishes in it.
    fn works_in_looks(&self) -> bool {
        false
    }

    /// Appends what has finished, without waiting.
    fn reap(&mut self, finished: &mut Vec<RequestResult>);

    /// Waits until something that was started has come further, if anything was, and appends what
    /// has finished.
    fn wait(&mut self, finished: &mut Vec<RequestResult>);

    /// Whether buffers of the host are, or will be, used by what was started.
    fn has_buffers(&self) -> bool;

    /// How the request that was started with `tag` ended, where it has moved its data and is only
    /// not reported yet because others are answered with it. Its buffers are used no more.
    fn outcome(&self, _tag: u32) -> Option<Result<(), MediaError>> {
        None
    }

    /// Gives up what was started: what has not begun is dropped, what has is waited for, except
    /// that flushes may continue. Nothing of it is reported any more. On return no buffer of the host
    /// is used, and no data changes.
    fn abort(&mut self);

    /// Clears [`Backing::wake_fd`]; true when something has finished since the last reap.
    fn rearm(&mut self) -> bool;
}

/// Opens the backing that `config` names.
///
/// # Errors
/// [`NvmeError`] when the memory, file or device cannot be obtained.
pub fn open(config: &NvmeConfig) -> Result<Box<dyn Backing>, NvmeError> {
    Ok(match &config.backing {
        BackingConfig::Memory => Box::new(memory::MemoryBacking::new(config.size)?),
        BackingConfig::Null => Box::new(null::NullBacking::new(config.size)),
        BackingConfig::File(_) | BackingConfig::Part(_) => {
            Box::new(file::FileBacking::open(open_file(config)?)?)
        }
    })
}

/// The file of a drive that has one, and its part of it.
fn open_file(config: &NvmeConfig) -> Result<open::OpenedFile, NvmeError> {
    match &config.backing {
        BackingConfig::File(path) => open::open(path, config.size, config.block_size),
        BackingConfig::Part(part) => part.open(),
        BackingConfig::Memory | BackingConfig::Null => {
            Err(NvmeError::Config("it has no file".to_owned()))
        }
    }
}

/// How many descriptors a backing that `config` names gives to whoever opens it next.
pub fn descriptor_count(config: &NvmeConfig) -> usize {
    match config.backing {
        BackingConfig::Memory | BackingConfig::File(_) | BackingConfig::Part(_) => 1,
        BackingConfig::Null => 0,
    }
}

/// Opens the backing that `config` names after another process had it, which gave `descriptors` for
/// it. What was acknowledged there is kept to.
///
/// # Errors
/// As [`open`](open()), and when the descriptors are not what the medium needs.
pub fn open_again(
    config: &NvmeConfig,
    descriptors: Vec<OwnedFd>,
) -> Result<Box<dyn Backing>, NvmeError> {
    match &config.backing {
        BackingConfig::Memory => match descriptors.into_iter().next() {
            Some(memory) => Ok(Box::new(memory::MemoryBacking::again(config.size, memory)?)),
            None => Err(NvmeError::Config("its memory was not passed on".to_owned())),
        },
        BackingConfig::Null => open(config),
        BackingConfig::File(path) | BackingConfig::Part(FilePart { path, .. }) => {
            let witness = descriptors.into_iter().next();
            let opened = open_file(config)?;
            Ok(Box::new(file::FileBacking::open_again(opened, path, witness)?))
        }
    }
}
