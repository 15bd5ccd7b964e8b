//! `librackbus_accel.so`: driving a borrowed accelerator from C.
//!
//! The header, which is the documentation, is `include/rackbus_accel.h`. This is translation only: pointers
//! are checked and copied from, errors become numbers and a line of text, and all else is
//! [`rackbus_driver::accel`]. A panic ends in an error, never in the program's frames.

mod error;
mod types;

use std::ffi::{CStr, c_char, c_int, c_uint, c_void};
use std::path::Path;
use std::time::Duration;

use rackbus_driver::FunctionPlace;
use rackbus_driver::accel::{
    Accel, AccelOptions, DriveRange, DriveSource, FinishedRequest, MessageWork, SourceError,
    Submitter,
};
use rackbus_spec::accel::{Operation, OperationStatus};

use error::{CallFailure, INVALID, OPEN, attempt, invalid};
pub use types::{
    rackbus_accel_completion, rackbus_accel_info, rackbus_accel_options, rackbus_accel_request,
    rackbus_accel_segment,
};

/// How long an access to registers may take.
const LIMIT: Duration = Duration::from_secs(10);
/// What is usual where options say 0.
const SEGMENTS: u16 = 16;

/// A function in use, which C knows by its address.
#[allow(non_camel_case_types)]
#[derive(Debug)]
pub struct rackbus_accel(Submitter);

/// What a pointer leads to, unless it is null.
///
/// # Safety
/// It is null, or leads to a `T` that nobody changes meanwhile.
unsafe fn checked<'a, T>(pointer: *const T, what: &str) -> Result<&'a T, CallFailure> {
    if !pointer.is_aligned() {
        return Err(invalid(format!("{what} is not aligned")));
    }
    // SAFETY: as the caller promises.
    unsafe { pointer.as_ref() }.ok_or_else(|| invalid(format!("{what} is NULL")))
}

/// The same, to be changed.
///
/// # Safety
/// It is null, or leads to a `T` that nobody else uses meanwhile.
unsafe fn checked_mut<'a, T>(pointer: *mut T, what: &str) -> Result<&'a mut T, CallFailure> {
    if !pointer.is_aligned() {
        return Err(invalid(format!("{what} is not aligned")));
    }
    // SAFETY: as the caller promises.
    unsafe { pointer.as_mut() }.ok_or_else(|| invalid(format!("{what} is NULL")))
}

/// `count` values from `pointer` on, which may be null where there are none.
///
/// # Safety
/// It is null, or leads to as many `T` that nobody changes meanwhile.
unsafe fn several<'a, T>(
    pointer: *const T,
    count: usize,
    what: &str,
) -> Result<&'a [T], CallFailure> {
    if count == 0 {
        return Ok(&[]);
    }
    // SAFETY: as the caller promises.
    unsafe { checked(pointer, what) }?;
    if count > isize::MAX as usize / size_of::<T>().max(1) {
        return Err(invalid(format!("{what} has too many")));
    }
    // SAFETY: as the caller promises; no longer than memory can be.
    Ok(unsafe { std::slice::from_raw_parts(pointer, count) })
}

/// Text that ends with a zero.
///
/// # Safety
/// It is null, or leads to such text.
unsafe fn text<'a>(pointer: *const c_char, what: &str) -> Result<&'a str, CallFailure> {
    // SAFETY: as the caller promises.
    unsafe { checked(pointer, what) }?;
    // SAFETY: not null, and as the caller promises.
    let text = unsafe { CStr::from_ptr(pointer) };
    text.to_str().map_err(|_| invalid(format!("{what} is not UTF-8")))
}

/// Opens a function by `start`, and puts it where `out` leads to.
///
/// # Safety
/// `options` is null or leads to options, `out` is null or leads to a pointer.
unsafe fn open(
    options: *const rackbus_accel_options,
    out: *mut *mut rackbus_accel,
    start: impl FnOnce(AccelOptions) -> Result<Accel, rackbus_driver::AccelError>,
) -> Result<c_int, CallFailure> {
    // SAFETY: as the caller promises.
    let out = unsafe { checked_mut(out, "accel") }?;
    *out = std::ptr::null_mut();
    let mut chosen = AccelOptions::default();
    let mut segments = SEGMENTS;
    if !options.is_null() {
        // SAFETY: as the caller promises.
        let asked = unsafe { checked(options, "options") }?;
        segments = if asked.segments == 0 { segments } else { asked.segments };
        chosen = asked.chosen()?;
    }
    let opened = Submitter::start(chosen, segments, start);
    let opened = opened.map_err(|error| CallFailure::of(error, OPEN))?;
    *out = Box::into_raw(Box::new(rackbus_accel(opened)));
    Ok(0)
}

/// Opens the function at a vfio-user socket.
///
/// # Safety
/// As the header says.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rackbus_accel_open_socket(
    path: *const c_char,
    options: *const rackbus_accel_options,
    accel: *mut *mut rackbus_accel,
) -> c_int {
    attempt(|| {
        // SAFETY: as the header says.
        let path = unsafe { text(path, "path") }?;
        // SAFETY: as the header says.
        unsafe { open(options, accel, |options| Accel::open(Path::new(path), LIMIT, options)) }
    })
}

/// Opens the function at a PCI address of this machine, or the only one.
///
/// # Safety
/// As the header says.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rackbus_accel_open_pci(
    address: *const c_char,
    options: *const rackbus_accel_options,
    accel: *mut *mut rackbus_accel,
) -> c_int {
    attempt(|| {
        let address = match address.is_null() {
            true => only()?,
            // SAFETY: as the header says.
            false => unsafe { text(address, "address") }?.to_owned(),
        };
        // SAFETY: as the header says.
        unsafe { open(options, accel, |options| Accel::open_pci(&address, options)) }
    })
}

/// The address of the only accelerator of this machine.
fn only() -> Result<String, CallFailure> {
    let mut found = Accel::find().map_err(|error| CallFailure::of(error, OPEN))?;
    match (found.len(), found.pop()) {
        (1, Some(address)) => Ok(address),
        (0, _) => Err(CallFailure::new(OPEN, "this machine has no accelerator; borrow one for it")),
        _ => Err(invalid("this machine has several accelerators: name an address".to_owned())),
    }
}

/// Gives a function back.
///
/// # Safety
/// It is null, or came from an open and was not closed.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rackbus_accel_close(accel: *mut rackbus_accel) {
    attempt(|| {
        if !accel.is_null() {
            // SAFETY: `open` made it of a box, and it is closed once.
            drop(unsafe { Box::from_raw(accel) });
        }
        Ok(0)
    });
}

/// The text of this thread's last failure.
#[unsafe(no_mangle)]
pub extern "C" fn rackbus_accel_error() -> *const c_char {
    error::last()
}

/// A status in words.
#[unsafe(no_mangle)]
pub extern "C" fn rackbus_accel_status_text(status: u32) -> *const c_char {
    error::status_text(status).as_ptr()
}

/// What a function says of itself.
///
/// # Safety
/// As the header says.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rackbus_accel_get_info(
    accel: *const rackbus_accel,
    info: *mut rackbus_accel_info,
) -> c_int {
    attempt(|| {
        // SAFETY: as the header says.
        let (accel, info) = unsafe { (checked(accel, "accel")?, checked_mut(info, "info")?) };
        let (from, data) = (accel.0.info(), accel.0.data_size() as u64);
        let operations = from.operations.iter().fold(0u64, |bits, of| bits | 1 << *of as u8);
        *info = rackbus_accel_info {
            queues: from.queues,
            contexts: from.contexts,
            largest: from.largest,
            reserved: 0,
            operations,
            data,
        };
        Ok(0)
    })
}

/// The memory for data.
///
/// # Safety
/// As the header says.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rackbus_accel_data(accel: *const rackbus_accel) -> *mut c_void {
    let mut at = std::ptr::null_mut();
    attempt(|| {
        // SAFETY: as the header says.
        let accel = unsafe { checked(accel, "accel") }?;
        let data = accel.0.data(0, accel.0.data_size());
        at = data.map_or(at, |data| data.as_ptr().cast());
        Ok(0)
    });
    at
}

/// Keeps a key, or patterns.
///
/// # Safety
/// As the header says.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rackbus_accel_create_context(
    accel: *mut rackbus_accel,
    operation: c_uint,
    data: *const c_void,
    length: usize,
    context: *mut u16,
) -> c_int {
    attempt(|| {
        // SAFETY: as the header says.
        let (accel, data, context) = unsafe {
            (
                checked_mut(accel, "accel")?,
                several(data.cast::<u8>(), length, "data")?,
                checked_mut(context, "context")?,
            )
        };
        *context = accel.0.create_context(named(operation)?, data)?;
        Ok(0)
    })
}

/// Destroys a context, whose keys are wiped.
///
/// # Safety
/// As the header says.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rackbus_accel_destroy_context(
    accel: *mut rackbus_accel,
    context: u16,
) -> c_int {
    attempt(|| {
        // SAFETY: as the header says.
        unsafe { checked_mut(accel, "accel") }?.0.destroy_context(context)?;
        Ok(0)
    })
}

fn named(operation: c_uint) -> Result<Operation, CallFailure> {
    let known = u8::try_from(operation).ok().and_then(Operation::from_number);
    known.ok_or_else(|| invalid(format!("there is no operation {operation}")))
}

/// The operations of a request, each with its context.
fn stages(request: &rackbus_accel_request) -> Result<Vec<(Operation, u16)>, CallFailure> {
    let given = request.operations.iter().zip(request.contexts).take_while(|(of, _)| **of != 0);
    let stages = given.map(|(of, context)| Ok((named((*of).into())?, context)));
    stages.collect()
}

/// The ranges of a message.
///
/// # Safety
/// The pointer is null or leads to as many segments.
unsafe fn ranges(
    segments: *const rackbus_accel_segment,
    count: u32,
    what: &str,
) -> Result<Vec<(usize, usize)>, CallFailure> {
    if count as usize > rackbus_spec::accel::SEGMENTS {
        return Err(invalid(format!("{what} has more than 256 segments")));
    }
    // SAFETY: as the caller promises.
    let segments = unsafe { several(segments, count as usize, what) }?;
    let range = |segment: &rackbus_accel_segment| {
        let (offset, length) = (segment.offset.try_into(), segment.length.try_into());
        let outside = || invalid(format!("{what} is not in the memory for data"));
        Ok((offset.map_err(|_| outside())?, length.map_err(|_| outside())?))
    };
    segments.iter().map(range).collect()
}

/// Puts a request into a queue.
///
/// # Safety
/// As the header says.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rackbus_accel_submit(
    accel: *mut rackbus_accel,
    queue: c_uint,
    request: *const rackbus_accel_request,
) -> c_int {
    attempt(|| {
        // SAFETY: as the header says.
        let (accel, request) =
            unsafe { (checked_mut(accel, "accel")?, checked(request, "request")?) };
        let stages = stages(request)?;
        let rackbus_accel_request { nonce, associated, token, .. } = *request;
        // SAFETY: as the header says.
        let (input, output) = unsafe {
            (
                ranges(request.input, request.input_segments, "input")?,
                ranges(request.output, request.output_segments, "output")?,
            )
        };
        let work = MessageWork { stages: &stages, nonce, associated };
        accel.0.submit(queue as usize, &work, (&input, &output), token)?;
        Ok(0)
    })
}

/// Tells the function of what was put into a queue.
///
/// # Safety
/// As the header says.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rackbus_accel_ring(accel: *mut rackbus_accel, queue: c_uint) -> c_int {
    attempt(|| {
        // SAFETY: as the header says.
        unsafe { checked_mut(accel, "accel") }?.0.ring(queue as usize)?;
        Ok(0)
    })
}

/// The next request of a queue that has ended.
///
/// # Safety
/// As the header says.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rackbus_accel_poll(
    accel: *mut rackbus_accel,
    queue: c_uint,
    completion: *mut rackbus_accel_completion,
) -> c_int {
    attempt(|| {
        // SAFETY: as the header says.
        let accel = unsafe { checked_mut(accel, "accel") }?;
        // SAFETY: as the header says.
        let completion = unsafe { checked_mut(completion, "completion") }?;
        Ok(told(accel.0.poll(queue as usize)?, completion))
    })
}

/// The next request of a queue that has ended, waited for.
///
/// # Safety
/// As the header says.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rackbus_accel_wait(
    accel: *mut rackbus_accel,
    queue: c_uint,
    milliseconds: c_uint,
    completion: *mut rackbus_accel_completion,
) -> c_int {
    attempt(|| {
        // SAFETY: as the header says.
        let accel = unsafe { checked_mut(accel, "accel") }?;
        // SAFETY: as the header says.
        let completion = unsafe { checked_mut(completion, "completion") }?;
        let limit = Duration::from_millis(milliseconds.into());
        Ok(told(accel.0.wait_for(queue as usize, limit)?, completion))
    })
}

/// Writes what has ended, if anything has: 1 or 0.
fn told(finished: Option<FinishedRequest>, to: &mut rackbus_accel_completion) -> c_int {
    let Some(FinishedRequest { token, status, output, engine_ns }) = finished else { return 0 };
    let status = status as u32;
    *to = rackbus_accel_completion { token, status, output, engine_ns, reserved: 0 };
    1
}

/// Does a request's operations on a whole message, and waits.
///
/// # Safety
/// As the header says.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rackbus_accel_run(
    accel: *mut rackbus_accel,
    request: *const rackbus_accel_request,
    input: *const c_void,
    length: usize,
    output: *mut c_void,
    room: usize,
    written: *mut usize,
) -> c_int {
    attempt(|| {
        // SAFETY: as the header says.
        let (accel, request) =
            unsafe { (checked_mut(accel, "accel")?, checked(request, "request")?) };
        // SAFETY: as the header says.
        let (input, written) = unsafe {
            (several(input.cast::<u8>(), length, "input")?, checked_mut(written, "written")?)
        };
        *written = 0;
        if output.is_null() && room > 0 {
            return Err(invalid("output is NULL".to_owned()));
        }
        let stages = stages(request)?;
        let (nonce, associated) = (request.nonce, request.associated);
        let work = MessageWork { stages: &stages, nonce, associated };
        let result = accel.0.run(&work, input, room)?;
        if !result.is_empty() {
            // SAFETY: no more came out than there is room for, as the program says; the two are apart, for
            // the result is ours.
            unsafe { std::ptr::copy_nonoverlapping(result.as_ptr(), output.cast(), result.len()) };
        }
        *written = result.len();
        Ok(0)
    })
}

/// What is called with each result.
#[allow(non_camel_case_types)]
pub type rackbus_accel_each =
    Option<unsafe extern "C" fn(*mut c_void, u64, *const c_void, usize) -> c_int>;

/// What a drive has.
///
/// # Safety
/// As the header says.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rackbus_accel_run_drive(
    accel: *mut rackbus_accel,
    request: *const rackbus_accel_request,
    drive: *const c_char,
    offset: u64,
    length: u64,
    message: usize,
    each: rackbus_accel_each,
    argument: *mut c_void,
) -> c_int {
    attempt(|| {
        // SAFETY: as the header says.
        let (accel, request) =
            unsafe { (checked_mut(accel, "accel")?, checked(request, "request")?) };
        // SAFETY: as the header says.
        let drive = unsafe { text(drive, "drive") }?;
        let each = each.ok_or_else(|| invalid("each is NULL".to_owned()))?;
        let stages = stages(request)?;
        let (nonce, associated) = (request.nonce, request.associated);
        let work = MessageWork { stages: &stages, nonce, associated };
        let (accel, room) = accel.0.parts();
        let usual = DriveSource::usual_message(accel, &stages);
        let message = if message == 0 { usual } else { message };
        let mut source = DriveSource::open(accel, &FunctionPlace::named(drive), message)?;
        let outcome =
            source.run(accel, room, &work, DriveRange { offset, length }, |at, result| {
                // SAFETY: as the header says; the result is there until it returns.
                let said = unsafe { each(argument, at, result.as_ptr().cast(), result.len()) };
                if said == 0 { Ok(()) } else { Err(SourceError::Ended) }
            });
        // What failed first is what matters.
        let closed = source.close(accel);
        outcome?;
        closed?;
        Ok(0)
    })
}

const _: () = assert!(OperationStatus::Success as u8 == 0 && INVALID < 0);
