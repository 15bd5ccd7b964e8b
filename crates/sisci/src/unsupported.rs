//! What only hardware could do: the documented error, and nothing else.
//!
//! `SCI_ERR_NOT_SUPPORTED` says that no setting changes that; handles are left as they were.

use std::ffi::c_void;

use crate::constants::errors::*;
use crate::constants::layout::SciAddress;
use crate::dma::DmaCallback;
use crate::error::{SciResult, fail, finish};
use crate::handles::RawHandle;
use crate::interrupts::InterruptCallback;

/// Tells a program that what it asks for needs hardware.
///
/// # Safety
/// `error` is null or can be written to.
unsafe fn refuse(error: *mut u32) {
    let outcome: SciResult<()> = fail(SCI_ERR_NOT_SUPPORTED);
    // SAFETY: as the caller says.
    unsafe { finish(error, outcome) };
}

/// Defines functions that refuse.
macro_rules! unsupported {
    ($($(#[$meta:meta])* fn $name:ident($($arg:ident: $type:ty),*) $(-> $ret:ty = $value:expr)?;)*) => {
        api! {$(
            $(#[$meta])*
            fn $name($($arg: $type,)* error: *mut u32) $(-> $ret)? {
                $(let _ = $arg;)*
                // SAFETY: as the caller says.
                unsafe { refuse(error) };
                $($value)?
            }
        )*}
    };
}

unsupported! {
    /// Memory at a bus address of this host.
    fn SCIAttachPhysicalMemory(address: u64, memory: *mut c_void, bus: u32, size: usize, segment: RawHandle, flags: u32);
    /// An interrupt that an adapter makes of a store.
    fn SCIRegisterInterruptFlag(adapter: u32, interrupt: *mut RawHandle, segment: RawHandle, offset: usize, callback: InterruptCallback, argument: *mut c_void, flags: u32);
    /// See [`SCIRegisterInterruptFlag`].
    fn SCIEnableConditionalInterrupt(interrupt: RawHandle, flags: u32);
    /// See [`SCIRegisterInterruptFlag`].
    fn SCIDisableConditionalInterrupt(interrupt: RawHandle, flags: u32);
    /// See [`SCIRegisterInterruptFlag`].
    fn SCIGetConditionalInterruptTrigCounter(interrupt: RawHandle, counter: *mut u32, flags: u32);
    /// Memory at an address of the interconnect.
    fn SCIConnectSCISpace(sd: RawHandle, adapter: u32, segment: *mut RawHandle, address: SciAddress, size: usize, flags: u32);
    /// A transfer from a raw bus address.
    fn SCIphDmaEnqueue(queue: RawHandle, size: u32, address: u64, node: u32, high: u32, low: u32, flags: u32);
    /// See [`SCIphDmaEnqueue`]. Answers `SCI_DMAQUEUE_ERROR`.
    fn SCIphDmaStart(queue: RawHandle, callback: DmaCallback, argument: *mut c_void, flags: u32) -> u32 = 5;
    /// A register of another host's adapter.
    fn SCIGetCSRRegister(sd: RawHandle, adapter: u32, node: u32, offset: u32, flags: u32) -> u32 = 0;
    /// A register of another host's adapter.
    fn SCISetCSRRegister(sd: RawHandle, adapter: u32, node: u32, offset: u32, value: u32, flags: u32);
    /// A register of this host's adapter.
    fn SCIGetLocalCSR(sd: RawHandle, adapter: u32, offset: u32, flags: u32) -> u32 = 0;
    /// A register of this host's adapter.
    fn SCISetLocalCSR(sd: RawHandle, adapter: u32, offset: u32, value: u32, flags: u32);
    /// An adapter's right to be reached by a PCIe requester.
    fn SCIRegisterPCIeRequester(sd: RawHandle, adapter: u32, bus: u32, function: u32, flags: u32);
    /// An adapter's right to be reached by a PCIe requester.
    fn SCIUnregisterPCIeRequester(sd: RawHandle, adapter: u32, bus: u32, function: u32, flags: u32);
}
