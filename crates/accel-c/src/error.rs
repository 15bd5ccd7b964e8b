//! Errors: a number for the program, and a line of text for people.

use std::cell::RefCell;
use std::ffi::{CStr, CString, c_char, c_int};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::LazyLock;

use rackbus_driver::AccelError;
use rackbus_driver::accel::SourceError;
use rackbus_spec::accel::STATUSES;

pub const INVALID: c_int = -1;
pub const OPEN: c_int = -2;
pub const FULL: c_int = -3;
pub const OPERATION: c_int = -4;
pub const LOST: c_int = -5;
pub const MEMORY: c_int = -6;
pub const NO_ANSWER: c_int = -7;
pub const INTERNAL: c_int = -8;
pub const ENDED: c_int = -9;

/// Why a call failed.
#[derive(Debug)]
pub struct CallFailure {
    code: c_int,
    text: String,
}

impl CallFailure {
    pub fn new(code: c_int, text: &str) -> CallFailure {
        CallFailure { code, text: text.to_owned() }
    }

    /// The driver's error; `lost` is the number of one that has to do with the function's end of the line.
    pub fn of(error: AccelError, lost: c_int) -> CallFailure {
        let code = match &error {
            AccelError::Client(_) | AccelError::Device(_) | AccelError::Unsupported(_) => lost,
            AccelError::Memory(_) => MEMORY,
            AccelError::Request(_) => INVALID,
            AccelError::Full => FULL,
            AccelError::Operation { .. } => OPERATION,
            AccelError::TimedOut => NO_ANSWER,
        };
        CallFailure { code, text: error.to_string() }
    }
}

impl From<SourceError> for CallFailure {
    fn from(error: SourceError) -> CallFailure {
        let text = error.to_string();
        let code = match error {
            SourceError::Accel(error) => return error.into(),
            SourceError::Drive(_) => LOST,
            SourceError::Read { .. } | SourceError::Message { .. } => OPERATION,
            SourceError::Request(_) => INVALID,
            SourceError::Ended => ENDED,
        };
        CallFailure { code, text }
    }
}

impl From<AccelError> for CallFailure {
    fn from(error: AccelError) -> CallFailure {
        CallFailure::of(error, LOST)
    }
}

pub fn invalid(text: String) -> CallFailure {
    CallFailure { code: INVALID, text }
}

thread_local! {
    static LAST: RefCell<CString> = RefCell::default();
}

/// The text of this thread's last failure.
pub fn last() -> *const c_char {
    LAST.with_borrow(|text| text.as_ptr())
}

/// Does what a function of the library does, and says how it ended.
pub fn attempt(call: impl FnOnce() -> Result<c_int, CallFailure>) -> c_int {
    // What was half done when it panicked is the caller's to close, and checked by the driver as always.
    let outcome = catch_unwind(AssertUnwindSafe(call));
    let failure = match outcome {
        Ok(Ok(value)) => return value,
        Ok(Err(failure)) => failure,
        Err(_) => CallFailure::new(INTERNAL, "a defect of the library; please report it"),
    };
    let text = CString::new(failure.text.replace('\0', " ")).unwrap_or_default();
    LAST.set(text);
    failure.code
}

/// A status in words.
pub fn status_text(status: u32) -> &'static CStr {
    static TEXTS: LazyLock<Vec<CString>> = LazyLock::new(|| {
        STATUSES.iter().map(|status| CString::new(status.to_string()).unwrap_or_default()).collect()
    });
    TEXTS.get(status as usize).map_or(c"no such status", |text| text.as_c_str())
}
