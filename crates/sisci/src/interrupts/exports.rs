//! The functions of interrupts, as programs call them.

use std::ffi::{c_char, c_void};

use super::*;
use crate::error::{check_place, finish, put};

api! {
    /// Makes an interrupt that others trigger by its number.
    fn SCICreateInterrupt(
        sd: RawHandle,
        interrupt: *mut RawHandle,
        adapter: u32,
        number: *mut u32,
        callback: InterruptCallback,
        argument: *mut c_void,
        flags: u32,
        error: *mut u32,
    ) {
        // SAFETY: as the caller says.
        unsafe {
            let made = check_place(interrupt)
                .and_then(|()| check_adapter(adapter))
                .and_then(|()| wanted(number, flags))
                .and_then(|number| create(sd, number, (callback, Argument(argument)), flags));
            if let Some((handle, chosen)) = finish(error, made) {
                put(interrupt, handle);
                put(number, chosen);
            }
        }
    }

    /// The same; its name is for nobody here.
    fn SCICreateNamedInterrupt(
        sd: RawHandle,
        interrupt: *mut RawHandle,
        adapter: u32,
        number: *mut u32,
        _name: *const c_char,
        callback: InterruptCallback,
        argument: *mut c_void,
        flags: u32,
        error: *mut u32,
    ) {
        // SAFETY: as the caller says.
        unsafe {
            SCICreateInterrupt(sd, interrupt, adapter, number, callback, argument, flags, error);
        }
    }

    /// Removes an interrupt; who is connected can trigger it no more.
    fn SCIRemoveInterrupt(interrupt: RawHandle, flags: u32, error: *mut u32) {
        // SAFETY: as the caller says.
        unsafe { finish(error, remove(interrupt, flags)) };
    }

    /// Waits for an interrupt.
    fn SCIWaitForInterrupt(interrupt: RawHandle, timeout: u32, flags: u32, error: *mut u32) {
        // SAFETY: as the caller says.
        unsafe { finish(error, wait(interrupt, timeout, flags)) };
    }

    /// Connects to an interrupt.
    fn SCIConnectInterrupt(
        sd: RawHandle,
        interrupt: *mut RawHandle,
        node: u32,
        adapter: u32,
        number: u32,
        timeout: u32,
        flags: u32,
        error: *mut u32,
    ) {
        // SAFETY: as the caller says.
        unsafe {
            let made = check_place(interrupt)
                .and_then(|()| connect(sd, node, adapter, number, (timeout, flags)));
            if let Some(handle) = finish(error, made) {
                put(interrupt, handle);
            }
        }
    }

    /// Disconnects from an interrupt.
    fn SCIDisconnectInterrupt(interrupt: RawHandle, flags: u32, error: *mut u32) {
        // SAFETY: as the caller says.
        unsafe { finish(error, disconnect::<RemotePlain>(interrupt, flags)) };
    }

    /// Triggers an interrupt of another host, or of this one.
    fn SCITriggerInterrupt(interrupt: RawHandle, flags: u32, error: *mut u32) {
        // SAFETY: as the caller says.
        unsafe { finish(error, trigger(interrupt, flags)) };
    }

    /// Makes a data interrupt.
    fn SCICreateDataInterrupt(
        sd: RawHandle,
        interrupt: *mut RawHandle,
        adapter: u32,
        number: *mut u32,
        callback: DataCallback,
        argument: *mut c_void,
        flags: u32,
        error: *mut u32,
    ) {
        // SAFETY: as the caller says.
        unsafe {
            let made = check_place(interrupt)
                .and_then(|()| check_adapter(adapter))
                .and_then(|()| wanted(number, flags))
                .and_then(|number| create_data(sd, number, (callback, Argument(argument)), flags));
            if let Some((handle, chosen)) = finish(error, made) {
                put(interrupt, handle);
                put(number, chosen);
            }
        }
    }

    /// Removes a data interrupt.
    fn SCIRemoveDataInterrupt(interrupt: RawHandle, flags: u32, error: *mut u32) {
        // SAFETY: as the caller says.
        unsafe { finish(error, remove_data(interrupt, flags)) };
    }

    /// Takes the oldest message.
    fn SCIWaitForDataInterrupt(
        interrupt: RawHandle,
        data: *mut c_void,
        length: *mut u32,
        timeout: u32,
        flags: u32,
        error: *mut u32,
    ) {
        // SAFETY: as the caller says.
        unsafe { finish(error, wait_data(interrupt, (data.cast(), length), timeout, flags)) };
    }

    /// Connects to a data interrupt.
    fn SCIConnectDataInterrupt(
        sd: RawHandle,
        interrupt: *mut RawHandle,
        node: u32,
        adapter: u32,
        number: u32,
        timeout: u32,
        flags: u32,
        error: *mut u32,
    ) {
        // SAFETY: as the caller says.
        unsafe {
            let made = check_place(interrupt)
                .and_then(|()| connect_data(sd, node, adapter, number, (timeout, flags)));
            if let Some(handle) = finish(error, made) {
                put(interrupt, handle);
            }
        }
    }

    /// Disconnects from a data interrupt.
    fn SCIDisconnectDataInterrupt(interrupt: RawHandle, flags: u32, error: *mut u32) {
        // SAFETY: as the caller says.
        unsafe { finish(error, disconnect::<RemoteData>(interrupt, flags)) };
    }

    /// Triggers an interrupt with a message of `length` bytes.
    fn SCITriggerDataInterrupt(
        interrupt: RawHandle,
        data: *mut c_void,
        length: u32,
        flags: u32,
        error: *mut u32,
    ) {
        // SAFETY: as the caller says.
        unsafe { finish(error, trigger_data(interrupt, data.cast(), length, flags)) };
    }
}
