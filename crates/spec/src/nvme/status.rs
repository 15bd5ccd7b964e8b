//! Status codes (section 4.6.1).

use std::fmt;

/// The 15-bit Status Field of a completion (section 4.6.1): SC in bits 7:0, SCT in bits 10:8,
/// CRD in bits 12:11, More in bit 13, Do Not Retry in bit 14.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct Status(pub u16);

const fn generic(sc: u16) -> Status {
    Status(sc)
}
const fn specific(sc: u16) -> Status {
    Status(0x100 | sc)
}
const fn media(sc: u16) -> Status {
    Status(0x200 | sc)
}

macro_rules! statuses {
    ($($(#[$doc:meta])* $name:ident = $value:expr, $text:literal;)*) => {
        impl Status {
            $($(#[$doc])* pub const $name: Status = $value;)*

            /// The specification's name of this status, or "unknown status".
            pub const fn name(self) -> &'static str {
                $(if self.code().0 == Self::$name.0 { return $text; })*
                "unknown status"
            }
        }
    };
}

statuses! {
    /// Generic 00h (section 4.6.1.2.1).
    SUCCESS = generic(0x00), "successful completion";
    /// Generic 01h (section 4.6.1.2.1).
    INVALID_OPCODE = generic(0x01), "invalid command opcode";
    /// Generic 02h (section 4.6.1.2.1).
    INVALID_FIELD = generic(0x02), "invalid field in command";
    /// Generic 04h (section 4.6.1.2.1).
    DATA_TRANSFER_ERROR = generic(0x04), "data transfer error";
    /// Generic 06h (section 4.6.1.2.1).
    INTERNAL_ERROR = generic(0x06), "internal error";
    /// Generic 07h (section 4.6.1.2.1).
    ABORT_REQUESTED = generic(0x07), "command abort requested";
    /// Generic 08h (section 4.6.1.2.1).
    ABORTED_SQ_DELETION = generic(0x08), "command aborted due to SQ deletion";
    /// Generic 0Bh (section 4.6.1.2.1).
    INVALID_NAMESPACE = generic(0x0b), "invalid namespace or format";
    /// Generic 0Ch (section 4.6.1.2.1).
    COMMAND_SEQUENCE_ERROR = generic(0x0c), "command sequence error";
    /// Generic 0Dh (section 4.6.1.2.1).
    INVALID_SGL_SEGMENT = generic(0x0d), "invalid SGL segment descriptor";
    /// Generic 0Eh (section 4.6.1.2.1).
    INVALID_SGL_COUNT = generic(0x0e), "invalid number of SGL descriptors";
    /// Generic 0Fh (section 4.6.1.2.1).
    DATA_SGL_LENGTH_INVALID = generic(0x0f), "data SGL length invalid";
    /// Generic 11h (section 4.6.1.2.1).
    SGL_TYPE_INVALID = generic(0x11), "SGL descriptor type invalid";
    /// Generic 12h (section 4.6.1.2.1).
    INVALID_USE_OF_BUFFER = generic(0x12), "invalid use of controller memory buffer";
    /// Generic 13h (section 4.6.1.2.1).
    PRP_OFFSET_INVALID = generic(0x13), "PRP offset invalid";
    /// Generic 20h (section 4.6.1.2.1).
    WRITE_PROTECTED = generic(0x20), "namespace is write protected";
    /// Generic 80h, NVM command set (section 4.6.1.2.1).
    LBA_OUT_OF_RANGE = generic(0x80), "LBA out of range";
    /// Generic 81h, NVM command set (section 4.6.1.2.1).
    CAPACITY_EXCEEDED = generic(0x81), "capacity exceeded";
    /// Command specific 00h (section 4.6.1.2.2).
    COMPLETION_QUEUE_INVALID = specific(0x00), "completion queue invalid";
    /// Command specific 01h (section 4.6.1.2.2).
    INVALID_QUEUE_ID = specific(0x01), "invalid queue identifier";
    /// Command specific 02h (section 4.6.1.2.2).
    INVALID_QUEUE_SIZE = specific(0x02), "invalid queue size";
    /// Command specific 03h (section 4.6.1.2.2).
    ABORT_LIMIT_EXCEEDED = specific(0x03), "abort command limit exceeded";
    /// Command specific 05h (section 4.6.1.2.2).
    AER_LIMIT_EXCEEDED = specific(0x05), "asynchronous event request limit exceeded";
    /// Command specific 08h (section 4.6.1.2.2).
    INVALID_INTERRUPT_VECTOR = specific(0x08), "invalid interrupt vector";
    /// Command specific 09h (section 4.6.1.2.2).
    INVALID_LOG_PAGE = specific(0x09), "invalid log page";
    /// Command specific 0Ch (section 4.6.1.2.2).
    INVALID_QUEUE_DELETION = specific(0x0c), "invalid queue deletion";
    /// Command specific 0Dh (section 4.6.1.2.2).
    FEATURE_NOT_SAVEABLE = specific(0x0d), "feature identifier not saveable";
    /// Command specific 0Eh (section 4.6.1.2.2).
    FEATURE_NOT_CHANGEABLE = specific(0x0e), "feature not changeable";
    /// Command specific 0Fh (section 4.6.1.2.2).
    FEATURE_NOT_NAMESPACE_SPECIFIC = specific(0x0f), "feature not namespace specific";
    /// Media 80h (section 4.6.1.2.3).
    WRITE_FAULT = media(0x80), "write fault";
    /// Media 81h (section 4.6.1.2.3).
    UNRECOVERED_READ = media(0x81), "unrecovered read error";
    /// Media 85h (section 4.6.1.2.3).
    COMPARE_FAILURE = media(0x85), "compare failure";
}

impl Status {
    const MORE: u16 = 1 << 13;
    const DNR: u16 = 1 << 14;

    /// This status with Do Not Retry set: the same command will fail again.
    #[must_use]
    pub const fn do_not_retry(self) -> Status {
        Status(self.0 | Self::DNR)
    }

    /// This status with More set: the Error Information log has an entry for it.
    #[must_use]
    pub const fn more(self) -> Status {
        Status(self.0 | Self::MORE)
    }

    /// Whether Do Not Retry is set.
    pub const fn is_do_not_retry(self) -> bool {
        self.0 & Self::DNR != 0
    }

    /// The status code type and code alone, for comparing with the constants.
    #[must_use]
    pub const fn code(self) -> Status {
        Status(self.0 & 0x7ff)
    }

    /// Whether the command completed without error.
    pub const fn is_success(self) -> bool {
        self.code().0 == 0
    }

    /// Status Code Type: 0 generic, 1 command specific, 2 media and data integrity.
    pub const fn sct(self) -> u8 {
        (self.0 >> 8 & 7) as u8
    }

    /// Status Code, whose meaning depends on the type.
    pub const fn sc(self) -> u8 {
        self.0 as u8
    }
}

impl fmt::Debug for Status {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

impl fmt::Display for Status {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} (SCT {}h, SC {:02X}h)", self.name(), self.sct(), self.sc())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn flags_do_not_hide_the_code() {
        let status = Status::COMPARE_FAILURE.do_not_retry().more();
        assert_eq!(status.code(), Status::COMPARE_FAILURE);
        assert!(status.is_do_not_retry() && !status.is_success());
        assert_eq!(status.to_string(), "compare failure (SCT 2h, SC 85h)");
        assert_eq!(Status(0x7ff).name(), "unknown status");
    }
}
