//! A drive's medium as a front elsewhere uses it: what goes through the exchange between the node
//! that has the drive's blocks and the node that runs its controller.
//!
//! An operation is a [`MediumRequest`](super::backing::MediumRequest) whose buffer is the place for data of its
//! tag. Both messages fit a cache line.

mod port;
mod remote;
mod zero_parts;

pub(super) use port::DrivePort;
use remote::RemoteBacking;

use rackbus_memory::{Carried, ExchangeHandles, ExchangeLayout, Handles, InheritedEnd};
use serde::{Deserialize, Serialize};
use zerocopy::little_endian::{U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

use super::backing::MediaError;
use super::buffer::MemoryBuffer;
use super::config::{BackingConfig, NvmeConfig, NvmeError};
use super::controller::Nvme;
use super::identify::MAX_TRANSFER;
use super::persistent::PersistentRegion;
use crate::class::FrontError;
use crate::lost::Lost;

/// The name of the class.
pub const CLASS: &str = "nvme";

/// Operations under way at a time. Others wait at the front.
const TAGS: u32 = 64;

/// Data that either end moves, more or less, before it tells of it and looks for what came meanwhile: the other end, and
/// the driver behind it, work on what is done while the rest is moved. Two parts of this size are in a processor's own
/// cache together.
const TURN_BYTES: u64 = 256 << 10;

/// Of the exchange between the two ends.
pub const LAYOUT: ExchangeLayout = ExchangeLayout { tags: TAGS, data_bytes: MAX_TRANSFER as usize };

/// What a front needs to know of the drive.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct DriveDescription {
    /// Bytes that the drive has, whole blocks.
    pub size: u64,
    /// Logical block size in bytes.
    pub block_size: u32,
    /// Serial number, up to 20 printable ASCII characters.
    pub serial: String,
    /// Model number, up to 40 printable ASCII characters.
    pub model: String,
    /// Whether written data needs a flush to survive a loss of power.
    pub volatile_cache: bool,
    /// Bytes of the controller memory buffer, which is where the front is; 0 for none.
    #[serde(default, skip_serializing_if = "is_none")]
    pub buffer: u64,
    /// Bytes of the persistent memory region, whose file is the lender's; 0 for none.
    #[serde(default, skip_serializing_if = "is_none")]
    pub persistent: u64,
}

fn is_none(bytes: &u64) -> bool {
    *bytes == 0
}

impl DriveDescription {
    /// The drive that a front shows.
    pub fn config(&self) -> NvmeConfig {
        NvmeConfig {
            block_size: self.block_size,
            backing: BackingConfig::Null,
            model: self.model.clone(),
            buffer: self.buffer,
            persistent: self.persistent,
            ..NvmeConfig::memory(self.size, &self.serial)
        }
    }
}

/// Makes the controller of a drive whose blocks another node has; `lost` says when it is gone.
///
/// # Errors
/// [`FrontError`].
pub fn front(description: &str, mut handles: Handles, lost: Lost) -> Result<Nvme, FrontError> {
    let description: DriveDescription = serde_json::from_str(description)?;
    let exchange = ExchangeHandles::take(&mut handles)?;
    front_with(RemoteBacking::new(description, exchange, lost)?, handles)
}

/// The same where `carried` carries the operations.
///
/// # Errors
/// [`FrontError`].
pub fn front_carried(description: &str, carried: Carried, lost: Lost) -> Result<Nvme, FrontError> {
    let description: DriveDescription = serde_json::from_str(description)?;
    front_with(RemoteBacking::carried(description, carried, lost)?, Handles::new())
}

/// The same where an earlier life of the controller is gone on with.
///
/// # Errors
/// [`FrontError`].
pub fn front_again(description: &str, end: InheritedEnd, lost: Lost) -> Result<Nvme, FrontError> {
    let description: DriveDescription = serde_json::from_str(description)?;
    let InheritedEnd { mut files, session } = end;
    let own = InheritedEnd::file_count(session.is_some());
    let mut memory = files.split_off(files.len().min(own));
    let remote = RemoteBacking::again(description, InheritedEnd { files, session }, lost)?;
    let config = remote.description().config();
    let region = memory.split_off(usize::from(config.buffer > 0).min(memory.len()));
    let buffer = memory.pop().map(|file| MemoryBuffer::again(file, config.buffer));
    let buffer = buffer.transpose().map_err(|error| unfit(error.into()))?;
    around(&config, remote, buffer, Handles::of_descriptors(region))
}

fn front_with(remote: RemoteBacking, region: Handles) -> Result<Nvme, FrontError> {
    let config = remote.description().config();
    let buffer = (config.buffer > 0).then(|| MemoryBuffer::new(config.buffer));
    let buffer = buffer.transpose().map_err(|error| unfit(error.into()))?;
    around(&config, remote, buffer, region)
}

/// The controller at the borrower; `region` leads to the persistent memory region, which is the lender's.
fn around(
    config: &NvmeConfig,
    remote: RemoteBacking,
    buffer: Option<MemoryBuffer>,
    mut region: Handles,
) -> Result<Nvme, FrontError> {
    let size = config.persistent;
    let memory = (size > 0).then(|| PersistentRegion::elsewhere(&mut region, size));
    let memory = memory.transpose().map_err(unfit)?;
    region.finish()?;
    Nvme::with_memory(config, Box::new(remote), buffer, memory).map_err(unfit)
}

fn unfit(error: NvmeError) -> FrontError {
    FrontError::Device(std::io::Error::other(error))
}

/// What an [`Ask`] asks for.
mod kind {
    pub const READ: u8 = 1;
    pub const WRITE: u8 = 2;
    pub const FLUSH: u8 = 3;
    pub const ZERO: u8 = 4;
}

/// Of a write: durable. Of zeroing: the space may be given back.
const FLAG: u8 = 1;

/// A question: do this.
#[derive(Debug, Clone, Copy, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
struct Ask {
    tag: U32,
    kind: u8,
    flags: u8,
    reserved: [u8; 2],
    offset: U64,
    length: U64,
}

/// An [`Ask`] that is to be done again.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct AskState {
    tag: u32,
    kind: u8,
    flags: u8,
    offset: u64,
    length: u64,
}

impl From<&Ask> for AskState {
    fn from(ask: &Ask) -> AskState {
        let Ask { tag, kind, flags, reserved: _, offset, length } = *ask;
        AskState { tag: tag.get(), kind, flags, offset: offset.get(), length: length.get() }
    }
}

impl From<&AskState> for Ask {
    fn from(state: &AskState) -> Ask {
        let AskState { tag, kind, flags, offset, length } = *state;
        let (tag, offset, length) = (tag.into(), offset.into(), length.into());
        Ask { tag, kind, flags, reserved: [0; 2], offset, length }
    }
}

/// A port that another process goes on with. Data of what is done again is where the front put it,
/// and changes only when that is answered.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct DrivePortState {
    asks: Vec<AskState>,
    /// The front is not listened to any more.
    over: bool,
}

/// An answer: it is done, with this result.
#[derive(Debug, Clone, Copy, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
struct Answer {
    tag: U32,
    result: U32,
}

/// The numbers of results; 0 is success.
const RESULTS: [MediaError; 7] = [
    MediaError::Read,
    MediaError::Write,
    MediaError::NoSpace,
    MediaError::ReadOnly,
    MediaError::Buffer,
    MediaError::NotDurable,
    MediaError::Aborted,
];

fn number(result: Result<(), MediaError>) -> u32 {
    let Err(error) = result else { return 0 };
    let place = RESULTS.iter().position(|it| *it == error);
    // What has no number is a failure of what was asked anyway.
    place.map_or(RESULTS.len() as u32 + 1, |place| place as u32 + 1)
}

fn result(number: u32) -> Result<(), MediaError> {
    match number.checked_sub(1) {
        None => Ok(()),
        Some(place) => Err(RESULTS.get(place as usize).copied().unwrap_or(MediaError::Unreachable)),
    }
}

#[cfg(test)]
mod tests;
