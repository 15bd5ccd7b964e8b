//! `SCIQuery`: what the library, the adapter, the copy engine and segments are.

use std::ffi::c_void;

use crate::constants::errors::*;
use crate::constants::layout::{
    DmaCapabilities, QueryAdapter, QueryDma, QueryHandle, QueryString, QuerySystem,
};
use crate::constants::*;
use crate::error::{SciResult, check_adapter, fail, finish, put};
use crate::handles::find;
use crate::library::session;
use crate::local::SciLocalSegment;
use crate::maps::Map;
use crate::remote::SciRemoteSegment;

/// Copy channels that a program may ask for by number.
pub(crate) const DMA_CHANNELS: u32 = 4;

/// Reads what a program hands over; it need not be aligned.
///
/// # Safety
/// `data` is null or leads to a `T`.
unsafe fn read<T: Copy>(data: *const c_void) -> SciResult<T> {
    match data.is_null() {
        true => fail(SCI_ERR_ILLEGAL_PARAMETER),
        // SAFETY: as the caller says; a `T` is plain data.
        false => Ok(unsafe { data.cast::<T>().read_unaligned() }),
    }
}

/// # Safety
/// `data` is null or leads to the structure of `command`.
unsafe fn query(command: u32, data: *mut c_void, flags: u32) -> SciResult<()> {
    // SAFETY: as the caller says, for each of the commands.
    unsafe {
        match command {
            SCI_Q_VENDORID => text(&read(data)?, "rackbus"),
            SCI_Q_API => text(&read(data)?, concat!("rackbus SISCI ", env!("CARGO_PKG_VERSION"))),
            SCI_Q_SISCI_DRIVER_VERSION => text(&read(data)?, env!("CARGO_PKG_VERSION")),
            SCI_Q_ADAPTER => adapter(&read(data)?),
            SCI_Q_SYSTEM => system(&read(data)?),
            SCI_Q_DMA => dma(&read(data)?, flags),
            SCI_Q_LOCAL_SEGMENT | SCI_Q_REMOTE_SEGMENT | SCI_Q_MAP => handle(data),
            SCI_Q_DEVICE => crate::devices::query(&read(data)?),
            _ => fail(SCI_ERR_ILLEGAL_QUERY),
        }
    }
}

/// # Safety
/// `query.str` is null or has room for `query.length` bytes.
unsafe fn text(query: &QueryString, text: &str) -> SciResult<()> {
    let room = usize::try_from(query.length).unwrap_or(0);
    if query.str.is_null() || room <= text.len() {
        return fail(SCI_ERR_ILLEGAL_PARAMETER);
    }
    // SAFETY: there is room for the text and its end.
    unsafe {
        std::ptr::copy_nonoverlapping(text.as_ptr(), query.str.cast(), text.len());
        put(query.str.add(text.len()), 0);
    }
    Ok(())
}

/// # Safety
/// `query.data` is null or leads to what the subcommand is answered with.
unsafe fn adapter(query: &QueryAdapter) -> SciResult<()> {
    check_adapter(query.adapter)?;
    if query.data.is_null() {
        return fail(SCI_ERR_ILLEGAL_PARAMETER);
    }
    let answer: u32 = match query.subcommand {
        SCI_Q_ADAPTER_NODEID => session()?.node(),
        // Each host has a number; it has no other serial number.
        SCI_Q_ADAPTER_SERIAL_NUMBER => session()?.node(),
        SCI_Q_ADAPTER_CARD_TYPE | SCI_Q_ADAPTER_CONFIGURED | SCI_Q_ADAPTER_NUMBER_OF_LINKS => 1,
        SCI_Q_ADAPTER_LINK_OPERATIONAL
        | SCI_Q_ADAPTER_HW_LINK_STATUS_IS_OK
        | SCI_Q_ADAPTER_FIRMWARE_OK
        | SCI_Q_ADAPTER_LINK_CABLE_INSERTED
        | SCI_Q_ADAPTER_LINK_ENABLED => u32::from(!session()?.is_gone()),
        SCI_Q_ADAPTER_NUMBER | SCI_Q_ADAPTER_INSTANCE_NUMBER => 0,
        SCI_Q_ADAPTER_MCAST_MAX_GROUPS => u32::MAX,
        SCI_Q_ADAPTER_DMA_SIZE_ALIGNMENT | SCI_Q_ADAPTER_DMA_OFFSET_ALIGNMENT => 1,
        SCI_Q_ADAPTER_SUGGESTED_MIN_DMA_SIZE | SCI_Q_ADAPTER_SUGGESTED_MIN_BLOCK_SIZE => 4096,
        SCI_Q_ADAPTER_DMA_MTU | SCI_Q_ADAPTER_ATT_PAGE_SIZE => 4096,
        SCI_Q_ADAPTER_BDF => {
            // Programs point this one at two bytes. There is no PCI function behind it.
            // SAFETY: as the caller says.
            unsafe { put(query.data.cast::<u16>(), 0) };
            return Ok(());
        }
        // Facts of an adapter's hardware that no hardware is there to tell.
        SCI_Q_ADAPTER_LINK_WIDTH..=SCI_Q_ADAPTER_LINK_PARTNER_PORT_NO
        | SCI_Q_ADAPTER_NUMBER_OF_STREAMS..=SCI_Q_ADAPTER_IO_BUS_FREQUENCY => {
            return fail(SCI_ERR_NOT_SUPPORTED);
        }
        _ => return fail(SCI_ERR_ILLEGAL_QUERY),
    };
    // SAFETY: as the caller says.
    unsafe { put(query.data.cast::<u32>(), answer) };
    Ok(())
}

/// # Safety
/// `query.data` is null or leads to a `u32`.
unsafe fn system(query: &QuerySystem) -> SciResult<()> {
    if query.data.is_null() {
        return fail(SCI_ERR_ILLEGAL_PARAMETER);
    }
    let answer: u32 = match query.subcommand {
        SCI_Q_SYSTEM_HOSTBRIDGE => HOSTBRIDGE_UNKNOWN,
        SCI_Q_SYSTEM_WRITE_POSTING_ENABLED | SCI_Q_SYSTEM_WRITE_COMBINING_ENABLED => 1,
        SCI_Q_SYSTEM_CPU_CACHE_LINE_SIZE => 64,
        _ => return fail(SCI_ERR_ILLEGAL_QUERY),
    };
    // SAFETY: as the caller says.
    unsafe { put(query.data.cast::<u32>(), answer) };
    Ok(())
}

/// # Safety
/// `query.data` is null or leads to what the subcommand is answered with.
unsafe fn dma(query: &QueryDma, flags: u32) -> SciResult<()> {
    check_adapter(query.adapter)?;
    if query.data.is_null() {
        return fail(SCI_ERR_ILLEGAL_PARAMETER);
    }
    // One engine, whatever it is asked as.
    if !matches!(flags, 0 | SCI_FLAG_DMA_ADAPTER | SCI_FLAG_DMA_GLOBAL | SCI_FLAG_DMA_SYSDMA) {
        return fail(SCI_ERR_ILLEGAL_FLAG);
    }
    // SAFETY: as the caller says.
    unsafe {
        match query.subcommand {
            SCI_Q_DMA_AVAILABLE => put(query.data.cast::<u32>(), 1),
            SCI_Q_DMA_CAPABILITIES => put(
                query.data.cast(),
                DmaCapabilities {
                    num_channels: DMA_CHANNELS,
                    max_transfer_size: u32::MAX,
                    max_vector_length: DIS_DMA_MAX_VECLEN,
                    support_mem2io: 1,
                    support_io2mem: 1,
                    support_io2io: 0,
                    min_align_bytes: 1,
                    suggested_align_bytes: 64,
                },
            ),
            _ => return fail(SCI_ERR_ILLEGAL_QUERY),
        }
    }
    Ok(())
}

/// Segments and mappings. What is asked is told by the subcommand: programs mix the commands up.
///
/// # Safety
/// `data` is null or leads to a [`QueryHandle`].
unsafe fn handle(data: *mut c_void) -> SciResult<()> {
    // SAFETY: as the caller says.
    let mut query: QueryHandle = unsafe { read(data) }?;
    let address = |address: Option<u64>| address.map_or_else(|| fail(SCI_ERR_NOT_AVAILABLE), Ok);
    query.data = match query.subcommand {
        SCI_Q_LOCAL_SEGMENT_IOADDR | SCI_Q_LOCAL_SEGMENT_PHYS_ADDR => {
            address(find::<SciLocalSegment>(query.handle)?.address())?
        }
        SCI_Q_LOCAL_SEGMENT_VIRTUAL_KERNEL_ADDR => return fail(SCI_ERR_NOT_SUPPORTED),
        SCI_Q_REMOTE_SEGMENT_IOADDR => {
            address(find::<SciRemoteSegment>(query.handle)?.segment()?.address())?
        }
        SCI_Q_MAP_IOADDR | SCI_Q_MAP_PHYS_ADDR => find::<Map>(query.handle)?.address(),
        SCI_Q_MAP_MAPPED_TO_LOCAL_TARGET | SCI_Q_MAP_QUERY_REMOTE_MAPPED_TO_LOCAL_TARGET => {
            u64::from(find::<Map>(query.handle)?.is_local())
        }
        _ => return fail(SCI_ERR_ILLEGAL_QUERY),
    };
    // SAFETY: as the caller says.
    unsafe { put(data.cast(), query) };
    Ok(())
}

api! {
    /// Asks for a fact.
    fn SCIQuery(command: u32, data: *mut c_void, flags: u32, error: *mut u32) {
        // SAFETY: as the caller says.
        unsafe { finish(error, query(command, data, flags)) };
    }
}
