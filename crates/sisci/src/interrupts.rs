//! Interrupts and data interrupts, received and sent.
//!
//! One with a callback has a thread of its own, which waits and calls. Removing it waits until a
//! call that is under way has returned and the thread is gone, unless it is that call that removes
//! it.

mod exports;

use std::ffi::c_void;
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;

use rackbus_attach::{
    BROADCAST_NODE, DataInterrupt, Interrupt, InterruptError, MAX_DATA, RemoteDataInterrupt,
    RemoteInterrupt,
};
use rackbus_memory::threads;

use crate::calling::Calling;
use crate::constants::errors::*;
use crate::constants::*;
use crate::error::{Code, SciResult, check_adapter, check_flags, fail, put};
use crate::forks::HeldLock;
use crate::handles::{HandleKind, RawHandle, find, kind};
use crate::library::{Child, node_id};
use crate::local::{Argument, CANCEL, LateHandle, duration, late};

pub use exports::*;

/// Called when an interrupt was triggered (`sci_cb_interrupt_t`).
pub type InterruptCallback = Option<unsafe extern "C" fn(*mut c_void, RawHandle, u32) -> u32>;
/// Called with the data of an interrupt (`sci_cb_data_interrupt_t`).
pub type DataCallback =
    Option<unsafe extern "C" fn(*mut c_void, RawHandle, *mut c_void, u32, u32) -> u32>;

impl From<InterruptError> for Code {
    fn from(error: InterruptError) -> Code {
        Code(match error {
            InterruptError::TimedOut => SCI_ERR_TIMEOUT,
            InterruptError::Gone => SCI_ERR_CANCELLED,
            InterruptError::Unreachable => SCI_ERR_NOT_CONNECTED,
            InterruptError::Unconfirmed => SCI_ERR_NODE_NOT_RESPONDING,
            InterruptError::Full | InterruptError::BufferTooShort(_) => SCI_ERR_NOSPC,
            InterruptError::TooLong => SCI_ERR_OUT_OF_RANGE,
        })
    }
}

/// The thread that calls the program for an interrupt.
#[derive(Debug)]
struct Caller {
    calling: Arc<Calling>,
    thread: Mutex<Option<JoinHandle<()>>>,
}

impl Caller {
    /// Starts it: `work` calls through what it is given, and returns when the interrupt is removed.
    fn start(work: impl FnOnce(&Calling) + Send + 'static) -> SciResult<Caller> {
        let calling = Arc::<Calling>::default();
        let gate = calling.clone();
        let thread = threads::spawn("rackbus interrupt", move || work(&gate));
        let thread = Mutex::new(Some(thread.map_err(|_| Code(SCI_ERR_SYSTEM))?));
        Ok(Caller { calling, thread })
    }

    /// Ends it, once the interrupt is removed: when this returns, nobody is called and the thread
    /// is gone, unless it is that thread that ends it.
    fn end(&self) {
        self.calling.end();
        let thread = self.thread.lock().unwrap_or_else(PoisonError::into_inner).take();
        if let Some(thread) = thread.filter(|it| it.thread().id() != std::thread::current().id()) {
            // It does not panic; if it did, the panic hook has reported it.
            let _ = thread.join();
        }
    }
}

/// A local interrupt (`sci_local_interrupt_t`).
#[derive(Debug)]
pub struct LocalInterrupt {
    interrupt: Arc<Interrupt>,
    caller: Option<Caller>,
    _child: Child,
}
kind!(LocalInterrupt, 7);

/// A remote interrupt (`sci_remote_interrupt_t`).
#[derive(Debug)]
pub struct RemotePlain {
    interrupt: RemoteInterrupt,
    _child: Child,
}
kind!(RemotePlain, 8);

/// A local data interrupt (`sci_local_data_interrupt_t`).
#[derive(Debug)]
pub struct LocalData {
    interrupt: Arc<DataInterrupt>,
    caller: Option<Caller>,
    _child: Child,
}
kind!(LocalData, 9);

/// A remote data interrupt (`sci_remote_data_interrupt_t`).
#[derive(Debug)]
pub struct RemoteData {
    interrupt: RemoteDataInterrupt,
    _child: Child,
}
kind!(RemoteData, 10);

/// The number that a program asks for.
///
/// # Safety
/// `number` is null or leads to a number.
unsafe fn wanted(number: *const u32, flags: u32) -> SciResult<Option<u32>> {
    if flags & SCI_FLAG_FIXED_INTNO == 0 {
        return Ok(None);
    }
    match number.is_null() {
        true => fail(SCI_ERR_ILLEGAL_PARAMETER),
        // SAFETY: as the caller says.
        false => Ok(Some(unsafe { number.read_unaligned() })),
    }
}

fn int_error(error: rackbus_attach::AttachError) -> Code {
    match error.into() {
        Code(SCI_ERR_SEGMENTID_USED) => Code(SCI_ERR_INTNO_USED),
        other => other,
    }
}

fn called<F>(callback: Option<F>, flags: u32) -> SciResult<Option<F>> {
    match (flags & SCI_FLAG_USE_CALLBACK, callback) {
        (0, _) => Ok(None),
        (_, Some(call)) => Ok(Some(call)),
        (_, None) => fail(SCI_ERR_ILLEGAL_PARAMETER),
    }
}

fn create(
    sd: RawHandle,
    number: Option<u32>,
    (callback, argument): (InterruptCallback, Argument),
    flags: u32,
) -> SciResult<(RawHandle, u32)> {
    let known = SCI_FLAG_USE_CALLBACK
        | SCI_FLAG_FIXED_INTNO
        | SCI_FLAG_SHARED_INT
        | SCI_FLAG_COUNTING_INT
        | SCI_FLAG_SHARE_EXTERNAL;
    check_flags(flags, known)?;
    let call = called(callback, flags)?;
    let child = Child::of(sd)?;
    let shared = flags & SCI_FLAG_SHARED_INT != 0;
    let counting = flags & SCI_FLAG_COUNTING_INT != 0;
    let interrupt =
        Arc::new(child.session().create_interrupt(number, shared, counting).map_err(int_error)?);
    let number = interrupt.number();
    let handle = LateHandle::default();
    let (own_interrupt, known) = (interrupt.clone(), handle.clone());
    let caller = call.map(|call| {
        Caller::start(move |calling| {
            while own_interrupt.wait(None).is_ok() {
                let own = late(&known);
                // SAFETY: the program gave its function for this.
                let answer = calling.during(|| unsafe { call(argument.get(), own, SCI_ERR_OK) });
                if answer.is_none_or(|answer| answer == CANCEL) {
                    return;
                }
            }
        })
    });
    let caller = caller.transpose()?;
    let raw = LocalInterrupt::table().add(|_| LocalInterrupt { interrupt, caller, _child: child });
    // Set once, here.
    let _ = handle.set(raw.addr());
    Ok((raw, number))
}

fn remove(handle: RawHandle, flags: u32) -> SciResult<()> {
    check_flags(flags, 0)?;
    let Some(local) = LocalInterrupt::table().take(handle) else {
        return fail(SCI_ERR_ILLEGAL_PARAMETER);
    };
    local.end();
    Ok(())
}

impl LocalInterrupt {
    fn end(&self) {
        self.interrupt.remove();
        if let Some(caller) = &self.caller {
            caller.end();
        }
    }
}

fn wait(handle: RawHandle, timeout: u32, flags: u32) -> SciResult<()> {
    check_flags(flags, 0)?;
    let local = find::<LocalInterrupt>(handle)?;
    if local.caller.is_some() {
        return fail(SCI_ERR_ILLEGAL_OPERATION);
    }
    let interrupt = local.interrupt.clone();
    // Its removal is what ends the wait.
    drop(local);
    Ok(interrupt.wait(duration(timeout))?)
}

fn connect(
    sd: RawHandle,
    node: u32,
    adapter: u32,
    number: u32,
    limit: (u32, u32),
) -> SciResult<RawHandle> {
    let (timeout, flags) = limit;
    check_flags(flags, 0)?;
    check_adapter(adapter)?;
    let child = Child::of(sd)?;
    let node = node_id(child.session(), node)?;
    let interrupt = child.session().connect_interrupt(node, number, timeout)?;
    Ok(RemotePlain::table().add(|_| RemotePlain { interrupt, _child: child }))
}

fn trigger(handle: RawHandle, flags: u32) -> SciResult<()> {
    check_flags(flags, 0)?;
    posted(find::<RemotePlain>(handle)?.interrupt.trigger())
}

/// A trigger is a posted write: its sender does not learn whether anybody is there, only that the
/// host is not, or that it did not answer in time.
fn posted(sent: Result<(), InterruptError>) -> SciResult<()> {
    match sent {
        Ok(()) | Err(InterruptError::Gone) => Ok(()),
        Err(error) => Err(error.into()),
    }
}

fn create_data(
    sd: RawHandle,
    number: Option<u32>,
    (callback, argument): (DataCallback, Argument),
    flags: u32,
) -> SciResult<(RawHandle, u32)> {
    check_flags(flags, SCI_FLAG_USE_CALLBACK | SCI_FLAG_FIXED_INTNO | SCI_FLAG_BROADCAST)?;
    let call = called(callback, flags)?;
    let child = Child::of(sd)?;
    let interrupt = Arc::new(child.session().create_data_interrupt(number).map_err(int_error)?);
    let number = interrupt.number();
    let handle = LateHandle::default();
    let (own_interrupt, known) = (interrupt.clone(), handle.clone());
    let caller = call.map(|call| {
        Caller::start(move |calling| {
            let mut buffer = vec![0_u8; MAX_DATA as usize];
            while let Ok(length) = own_interrupt.receive(&mut buffer, None) {
                let (own, data) = (late(&known), buffer.as_mut_ptr().cast());
                let length = u32::try_from(length).unwrap_or(MAX_DATA);
                // SAFETY: the program gave its function for this; the data is there until it
                // returns.
                let answer = calling
                    .during(|| unsafe { call(argument.get(), own, data, length, SCI_ERR_OK) });
                if answer.is_none_or(|answer| answer == CANCEL) {
                    return;
                }
            }
        })
    });
    let caller = caller.transpose()?;
    let raw = LocalData::table().add(|_| LocalData { interrupt, caller, _child: child });
    // Set once, here.
    let _ = handle.set(raw.addr());
    Ok((raw, number))
}

impl LocalData {
    fn end(&self) {
        self.interrupt.remove();
        if let Some(caller) = &self.caller {
            caller.end();
        }
    }
}

fn remove_data(handle: RawHandle, flags: u32) -> SciResult<()> {
    check_flags(flags, 0)?;
    let Some(local) = LocalData::table().take(handle) else {
        return fail(SCI_ERR_ILLEGAL_PARAMETER);
    };
    local.end();
    Ok(())
}

/// Takes a message into `data`; its length, also where it did not fit.
///
/// # Safety
/// `data` has room for as many bytes as `length` says, or both are null.
unsafe fn wait_data(
    handle: RawHandle,
    (data, length): (*mut u8, *mut u32),
    timeout: u32,
    flags: u32,
) -> SciResult<()> {
    check_flags(flags, 0)?;
    let local = find::<LocalData>(handle)?;
    if local.caller.is_some() {
        return fail(SCI_ERR_ILLEGAL_OPERATION);
    }
    let interrupt = local.interrupt.clone();
    drop(local);
    if length.is_null() {
        return fail(SCI_ERR_ILLEGAL_PARAMETER);
    }
    // SAFETY: as the caller says.
    let room = unsafe { length.read_unaligned() } as usize;
    let mut empty = [];
    let buffer = match data.is_null() {
        true => &mut empty[..],
        // SAFETY: as the caller says.
        false => unsafe { std::slice::from_raw_parts_mut(data, room) },
    };
    let received = interrupt.receive(buffer, duration(timeout));
    let bytes = match received {
        Ok(bytes) | Err(InterruptError::BufferTooShort(bytes)) => bytes,
        Err(error) => return Err(error.into()),
    };
    // SAFETY: as the caller says.
    unsafe { put(length, u32::try_from(bytes).unwrap_or(u32::MAX)) };
    Ok(received.map(drop)?)
}

fn connect_data(
    sd: RawHandle,
    node: u32,
    adapter: u32,
    number: u32,
    limit: (u32, u32),
) -> SciResult<RawHandle> {
    let (timeout, flags) = limit;
    check_flags(flags, SCI_FLAG_BROADCAST)?;
    check_adapter(adapter)?;
    let child = Child::of(sd)?;
    let node = match flags & SCI_FLAG_BROADCAST {
        0 => node_id(child.session(), node)?,
        _ => BROADCAST_NODE,
    };
    let interrupt = child.session().connect_data_interrupt(node, number, timeout)?;
    Ok(RemoteData::table().add(|_| RemoteData { interrupt, _child: child }))
}

/// # Safety
/// `data` is `length` bytes.
unsafe fn trigger_data(
    handle: RawHandle,
    data: *const u8,
    length: u32,
    flags: u32,
) -> SciResult<()> {
    check_flags(flags, SCI_FLAG_BROADCAST)?;
    let remote = find::<RemoteData>(handle)?;
    if length == 0 || length > MAX_DATA {
        return fail(SCI_ERR_OUT_OF_RANGE);
    }
    if data.is_null() {
        return fail(SCI_ERR_ILLEGAL_ADDRESS);
    }
    // SAFETY: as the caller says.
    let message = unsafe { std::slice::from_raw_parts(data, length as usize) };
    posted(remote.interrupt.send(message))
}

fn disconnect<T: HandleKind>(handle: RawHandle, flags: u32) -> SciResult<()> {
    check_flags(flags, 0)?;
    T::table().take(handle).map(drop).ok_or(Code(SCI_ERR_ILLEGAL_PARAMETER))
}

/// Ends every interrupt of the process.
pub(crate) fn end_all() {
    drop(RemotePlain::table().clear());
    drop(RemoteData::table().clear());
    LocalInterrupt::table().clear().iter().for_each(|local| local.end());
    LocalData::table().clear().iter().for_each(|local| local.end());
}

/// The locks of it all, held while the process forks.
pub(crate) fn hold() -> Vec<Option<HeldLock>> {
    vec![
        LocalInterrupt::table().hold(),
        RemotePlain::table().hold(),
        LocalData::table().hold(),
        RemoteData::table().hold(),
    ]
}

/// What a fork has of its parent's.
pub(crate) fn forget_all() {
    std::mem::forget(LocalInterrupt::table().clear());
    std::mem::forget(RemotePlain::table().clear());
    std::mem::forget(LocalData::table().clear());
    std::mem::forget(RemoteData::table().clear());
}
