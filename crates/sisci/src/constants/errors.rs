//! What can go wrong, as numbers (`sci_error_t`) and as text (`SCIGetErrorString`).

use std::ffi::CStr;

/// The bit that every error has.
pub const SISCI_ERR_MASK: u32 = 0x4000_0000;
/// The call did what it was to do.
pub const SCI_ERR_OK: u32 = 0;
/// The name of [`SCI_ERR_NO_SUCH_SEGMENT`]'s number where interrupts are spoken of.
pub const SCI_ERR_NO_SUCH_INTNO: u32 = SCI_ERR_NO_SUCH_SEGMENT;

/// An error's number, name and meaning.
#[derive(Debug, Clone, Copy)]
pub struct ErrorText {
    /// The number, mask included.
    pub code: u32,
    /// The name as in the headers.
    pub name: &'static str,
    /// One line for people.
    pub text: &'static CStr,
}

/// Defines an error for each line, and the table of them.
macro_rules! errors {
    ($($name:ident = $code:expr, $text:expr;)*) => {
        $(pub const $name: u32 = $code | SISCI_ERR_MASK;)*

        /// Every error, by code.
        pub const ERRORS: &[ErrorText] = &[
            ErrorText { code: SCI_ERR_OK, name: "SCI_ERR_OK", text: c"Success" },
            $(ErrorText { code: $name, name: stringify!($name), text: $text }),*
        ];
    };
}

errors! {
    SCI_ERR_BUSY = 0x900, c"Still in use: remove, unmap or disconnect what uses it first";
    SCI_ERR_FLAG_NOT_IMPLEMENTED = 0x901, c"A flag is known but not implemented";
    SCI_ERR_ILLEGAL_FLAG = 0x902, c"A flag is not one of this function's";
    SCI_ERR_NOSPC = 0x904, c"No room left for it";
    SCI_ERR_API_NOSPC = 0x905, c"No room left for it in the library";
    SCI_ERR_HW_NOSPC = 0x906, c"No room left for it in the hardware";
    SCI_ERR_NOT_IMPLEMENTED = 0x907, c"Not implemented";
    SCI_ERR_ILLEGAL_ADAPTERNO = 0x908, c"Such an adapter number cannot be";
    SCI_ERR_NO_SUCH_ADAPTERNO = 0x909, c"This host has no adapter of that number";
    SCI_ERR_TIMEOUT = 0x90A, c"It did not happen in time";
    SCI_ERR_OUT_OF_RANGE = 0x90B, c"Offset and size lead out of the memory";
    SCI_ERR_NO_SUCH_SEGMENT = 0x90C, c"No such segment or interrupt is available there";
    SCI_ERR_ILLEGAL_NODEID = 0x90D, c"Such a node id cannot be";
    SCI_ERR_CONNECTION_REFUSED = 0x90E, c"The other host refused the connection";
    SCI_ERR_SEGMENT_NOT_CONNECTED = 0x90F, c"The segment is not connected";
    SCI_ERR_SIZE_ALIGNMENT = 0x910, c"The size is zero or not aligned as it must be";
    SCI_ERR_OFFSET_ALIGNMENT = 0x911, c"The offset or address is not aligned as it must be";
    SCI_ERR_ILLEGAL_PARAMETER = 0x912, c"A parameter or handle is not valid";
    SCI_ERR_MAX_ENTRIES = 0x913, c"More entries than the queue has room for";
    SCI_ERR_SEGMENT_NOT_PREPARED = 0x914, c"The segment was not prepared";
    SCI_ERR_ILLEGAL_ADDRESS = 0x915, c"The address cannot be used";
    SCI_ERR_ILLEGAL_OPERATION = 0x916, c"Not possible in this state";
    SCI_ERR_ILLEGAL_QUERY = 0x917, c"No such query or subcommand";
    SCI_ERR_SEGMENTID_USED = 0x918, c"This host already has a segment of that id";
    SCI_ERR_SYSTEM = 0x919, c"The operating system refused; the log of the node says why";
    SCI_ERR_CANCELLED = 0x91A, c"What was waited for was removed";
    SCI_ERR_NOT_CONNECTED = 0x91B, c"Not connected";
    SCI_ERR_NOT_AVAILABLE = 0x91C, c"Not available";
    SCI_ERR_INCONSISTENT_VERSIONS = 0x91D, c"Library and node are of different versions";
    SCI_ERR_COND_INT_RACE_PROBLEM = 0x91E, c"An interrupt may have come meanwhile";
    SCI_ERR_OVERFLOW = 0x91F, c"More than the counter holds";
    SCI_ERR_NOT_INITIALIZED = 0x920, c"SCIInitialize was not called, or failed";
    SCI_ERR_ACCESS = 0x921, c"Access denied";
    SCI_ERR_NOT_SUPPORTED = 0x922, c"Not supported";
    SCI_ERR_DEPRECATED = 0x923, c"No longer supported";
    SCI_ERR_DMA_NOT_AVAILABLE = 0x924, c"No such DMA engine";
    SCI_ERR_DMA_DISABLED = 0x925, c"The DMA engine is switched off";
    SCI_ERR_NO_SUCH_FDID = 0x926, c"No device has that fabric device id";
    SCI_ERR_INTNO_USED = 0x927, c"This host already has an interrupt of that number";
    SCI_ERR_NO_SUCH_NODEID = 0xA00, c"The rack has no host of that node id";
    SCI_ERR_NODE_NOT_RESPONDING = 0xA02, c"The other host does not answer";
    SCI_ERR_NO_REMOTE_LINK_ACCESS = 0xA04, c"The other host cannot be reached";
    SCI_ERR_NO_LINK_ACCESS = 0xA05, c"This host reaches no other";
    SCI_ERR_TRANSFER_FAILED = 0xA06, c"A transfer failed: not all bytes arrived";
    SCI_ERR_EWOULD_BLOCK = 0xA07, c"It would have to wait";
    SCI_ERR_SEMAPHORE_COUNT_EXCEEDED = 0xA08, c"A semaphore's count is at its limit";
    SCI_ERR_IRQL_ILLEGAL = 0xA09, c"Not possible at this interrupt level";
    SCI_ERR_REMOTE_BUSY = 0xB00, c"The other host is busy with it";
    SCI_ERR_LOCAL_BUSY = 0xB01, c"This host is busy with it";
    SCI_ERR_ALL_BUSY = 0xB02, c"Both hosts are busy with it";
}

/// What an error means; for a number that is none, a text that says so.
#[must_use]
pub fn text(code: u32) -> &'static CStr {
    ERRORS.iter().find(|error| error.code == code).map_or(c"Unknown error", |error| error.text)
}
