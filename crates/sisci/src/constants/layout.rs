//! The structures that programs hand over, laid out as C does on 64-bit hosts.
//!
//! They lie in the program's memory: pointers in them are not to be trusted, only passed on.

use std::ffi::{c_char, c_int, c_void};
use std::mem::{offset_of, size_of};

/// An address on a host's I/O bus.
pub type SciIoAddr = u64;

/// `sci_address_t`: an address in the global space of the 1.x hardware.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct SciAddress {
    pub node_id: u16,
    pub offset_high: u16,
    pub offset_low: u32,
}

/// `dis_dma_vec_t`: one piece of a vector for the copy engine, in bytes.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct DmaVecElement {
    pub size: u32,
    pub local_offset: u32,
    pub remote_offset: u32,
    pub flags: u32,
}

/// `sci_query_string_t`: where a text goes, and how many bytes fit.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct QueryString {
    pub str: *mut c_char,
    pub length: u32,
}

/// What a program asks of an adapter, and its answer (`sci_query_adapter_t`).
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct QueryAdapter {
    pub adapter: u32,
    pub port: u32,
    pub subcommand: u32,
    pub data: *mut c_void,
}

/// What a program asks of the system, and its answer (`sci_query_system_t`).
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct QuerySystem {
    pub subcommand: u32,
    pub data: *mut c_void,
}

/// What a program asks of the DMA engine, and its answer (`sci_query_dma_t`).
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct QueryDma {
    pub adapter: u32,
    pub subcommand: u32,
    pub data: *mut c_void,
}

/// `sci_query_local_segment_t`, `sci_query_remote_segment_t` and `sci_query_map_t`, which differ in
/// what the handle is of.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct QueryHandle {
    pub handle: *mut c_void,
    pub subcommand: u32,
    pub data: u64,
}

/// What a program asks of a device, and its answer (`sci_smartio_query_device_t`).
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct QueryDevice {
    pub fdid: u64,
    pub subcommand: u32,
    pub data: *mut c_void,
}

/// `sci_dma_capabilities_t`: sizes and alignments in bytes; `support_*` are 0 or 1.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct DmaCapabilities {
    pub num_channels: u32,
    pub max_transfer_size: u32,
    pub max_vector_length: u32,
    pub support_mem2io: u32,
    pub support_io2mem: u32,
    pub support_io2io: u32,
    pub min_align_bytes: u32,
    pub suggested_align_bytes: u32,
}

/// `sci_smartio_device_info_t`: a device that can be borrowed.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct SciDeviceInfo {
    pub fdid: u64,
    pub pci_device_id: u16,
    pub pci_vendor_id: u16,
    pub pci_class: u32,
    pub pci_subsystem_device_id: u16,
    pub pci_subsystem_vendor_id: u16,
    pub pci_serial_number: u64,
    pub remote_bdf: u16,
    pub local_bdf: u16,
    pub adapter: u32,
    pub node_id: u32,
    pub physical_slot: c_int,
    pub user_name: [c_char; 64],
    pub uuid: [c_char; 37],
}

// What `tests/c/headers.c` says of the C structures.
const _: () = {
    assert!(size_of::<SciAddress>() == 8);
    assert!(size_of::<DmaVecElement>() == 16);
    assert!(size_of::<QueryString>() == 16 && offset_of!(QueryString, length) == 8);
    assert!(size_of::<QueryAdapter>() == 24 && offset_of!(QueryAdapter, data) == 16);
    assert!(size_of::<QuerySystem>() == 16 && offset_of!(QuerySystem, data) == 8);
    assert!(size_of::<QueryDma>() == 16 && offset_of!(QueryDma, data) == 8);
    assert!(size_of::<QueryHandle>() == 24 && offset_of!(QueryHandle, data) == 16);
    assert!(size_of::<QueryDevice>() == 24 && offset_of!(QueryDevice, data) == 16);
    assert!(size_of::<DmaCapabilities>() == 32);
    assert!(size_of::<SciDeviceInfo>() == 152);
    assert!(offset_of!(SciDeviceInfo, pci_serial_number) == 24);
    assert!(offset_of!(SciDeviceInfo, physical_slot) == 44);
    assert!(offset_of!(SciDeviceInfo, user_name) == 48);
    assert!(offset_of!(SciDeviceInfo, uuid) == 112);
};
