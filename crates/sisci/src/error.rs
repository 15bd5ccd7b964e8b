//! From this library's errors to the API's numbers.

use std::fmt::Display;

use rackbus_attach::{AttachError, Refusal};
use rackbus_memory::HandleError;
use rackbus_memory::region::RegionError;

use crate::constants::errors::*;

/// An error's number, as programs know it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Code(pub u32);

/// The result of an operation of this library.
pub type SciResult<T> = Result<T, Code>;

impl From<AttachError> for Code {
    fn from(error: AttachError) -> Code {
        Code(match error {
            AttachError::NoNode { .. } | AttachError::Gone(_) => SCI_ERR_NO_LINK_ACCESS,
            AttachError::Forked => SCI_ERR_NOT_INITIALIZED,
            AttachError::Handles(HandleError::Unfit { .. }) => SCI_ERR_SYSTEM,
            AttachError::Protocol | AttachError::Handles(_) => SCI_ERR_INCONSISTENT_VERSIONS,
            AttachError::Region(RegionError::OutOfFile { .. }) => SCI_ERR_OUT_OF_RANGE,
            AttachError::Region(RegionError::NotReplaceable(_)) => SCI_ERR_ILLEGAL_ADDRESS,
            AttachError::Region(_) | AttachError::System { .. } => SCI_ERR_SYSTEM,
            AttachError::Busy => SCI_ERR_BUSY,
            AttachError::NoDescriptors => SCI_ERR_NOSPC,
            AttachError::NoMemory => SCI_ERR_ILLEGAL_OPERATION,
            AttachError::OutOfRange { .. } => SCI_ERR_OUT_OF_RANGE,
            AttachError::Misplaced => SCI_ERR_OFFSET_ALIGNMENT,
            AttachError::ReadOnly | AttachError::ReadOnlyInGuest(_) => SCI_ERR_ACCESS,
            AttachError::Window(_) => SCI_ERR_NO_LINK_ACCESS,
            AttachError::Refused(refusal) => return refusal.into(),
        })
    }
}

impl From<Refusal> for Code {
    fn from(refusal: Refusal) -> Code {
        Code(match refusal {
            Refusal::Version => SCI_ERR_INCONSISTENT_VERSIONS,
            Refusal::NoSuchSegment => SCI_ERR_NO_SUCH_SEGMENT,
            Refusal::NoSuchInterrupt => SCI_ERR_NO_SUCH_INTNO,
            Refusal::InUse => SCI_ERR_SEGMENTID_USED,
            Refusal::Size | Refusal::OtherSize { .. } => SCI_ERR_SIZE_ALIGNMENT,
            Refusal::NoSpace { .. } | Refusal::TooMany(_) => SCI_ERR_NOSPC,
            Refusal::System(_) => SCI_ERR_SYSTEM,
            Refusal::Stale => SCI_ERR_ILLEGAL_PARAMETER,
            Refusal::Denied => SCI_ERR_CONNECTION_REFUSED,
            Refusal::NoSuchNode => SCI_ERR_NO_SUCH_NODEID,
            Refusal::NotResponding => SCI_ERR_NODE_NOT_RESPONDING,
            Refusal::Illegal(_) => SCI_ERR_ILLEGAL_OPERATION,
            Refusal::Busy | Refusal::DeviceInUse(_) => SCI_ERR_BUSY,
            Refusal::NoSuchDevice => SCI_ERR_NO_SUCH_FDID,
            Refusal::NotLent(_) => SCI_ERR_NOT_SUPPORTED,
        })
    }
}

/// Tells a person what an error's number does not say. Where nobody can read it that is no error of the call's: `eprintln`
/// would panic when writing fails, and a panic in a function of C ends the program. Its lock would be held for ever in a
/// fork of the process, if another thread wrote meanwhile.
pub(crate) fn explain(reason: impl Display) {
    let line = format!("libsisci: {reason}\n");
    // SAFETY: the bytes are there for as long as the call lasts.
    let _ = unsafe { libc::write(libc::STDERR_FILENO, line.as_ptr().cast(), line.len()) };
}

/// The error that a program finds as `code`.
pub(crate) fn fail<T>(code: u32) -> SciResult<T> {
    Err(Code(code))
}

/// Tells a program how its call ended; the result where it went well.
///
/// # Safety
/// `error` is null or can be written to.
pub(crate) unsafe fn finish<T>(error: *mut u32, outcome: SciResult<T>) -> Option<T> {
    let (code, value) = match outcome {
        Ok(value) => (SCI_ERR_OK, Some(value)),
        Err(Code(code)) => (code, None),
    };
    // SAFETY: as the caller says.
    unsafe { put(error, code) };
    value
}

/// Writes a result where a program wants it.
///
/// # Safety
/// `place` is null or can be written to.
pub(crate) unsafe fn put<T>(place: *mut T, value: T) {
    if !place.is_null() {
        // SAFETY: the caller says that it can be written to; programs need not align it.
        unsafe { place.write_unaligned(value) };
    }
}

/// Refuses to make what a program has no place for the handle of: nobody could ever end it.
pub(crate) fn check_place<T>(place: *const T) -> SciResult<()> {
    match place.is_null() {
        true => fail(SCI_ERR_ILLEGAL_PARAMETER),
        false => Ok(()),
    }
}

/// Refuses flags that are not among `known`.
pub(crate) fn check_flags(flags: u32, known: u32) -> SciResult<()> {
    match flags & !known {
        0 => Ok(()),
        _ => fail(SCI_ERR_ILLEGAL_FLAG),
    }
}

/// There is one adapter in each host, number 0.
pub(crate) fn check_adapter(adapter: u32) -> SciResult<()> {
    match adapter {
        0 => Ok(()),
        1..64 => fail(SCI_ERR_NO_SUCH_ADAPTERNO),
        _ => fail(SCI_ERR_ILLEGAL_ADAPTERNO),
    }
}
