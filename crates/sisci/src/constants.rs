//! The numbers of the SISCI API, the same as in the C headers (`tests/headers.rs` compares them).
//!
//! Names are the API's, so that one word finds a constant everywhere; the headers describe them.
//! [`errors`] has the error codes and what they mean, [`layout`] the structures programs hand over,
//! [`exported`] the constants as data for programs that were built elsewhere.
// Each constant has its description in the headers.
#![allow(missing_docs)]

pub mod errors;
pub mod exported;
pub mod layout;

/// Hands every flag, query and limit to a macro, as `NAME = value;` each.
macro_rules! for_each_constant {
    ($each:ident) => {
        $each! {
            // a timeout, in milliseconds everywhere, that never comes
            SCI_INFINITE_TIMEOUT = 0xffff_ffff;
            // node id of the host that the program runs on
            SCI_LOCAL_HOST = 0xffff_fffe;
            // most bytes of one data interrupt's message; the name is rackbus's own
            SCI_MAX_DATA_INTERRUPT_LENGTH = 1024;
            // SCIOpen
            SCI_FLAG_THREAD_SAFE = 0x0000_0001;
            // what creates, connects or starts something
            SCI_FLAG_USE_CALLBACK = 0x0000_0001;
            // SCICreateSegment
            SCI_FLAG_EMPTY = 0x0000_0002;
            SCI_FLAG_PRIVATE = 0x0000_0004;
            SCI_FLAG_DMA_GLOBAL = 0x0000_0040;
            SCI_FLAG_ALLOW_UNICAST = 0x0000_0080;
            SCI_FLAG_PHYSICAL = 0x0000_1000;
            SCI_FLAG_BROADCAST = 0x0004_0000;
            SCI_FLAG_AUTO_ID = 0x2000_0000;
            // SCIPrepareSegment
            SCI_FLAG_DMA_SOURCE_ONLY = 0x0000_0008;
            // SCIRemoveSegment
            SCI_FLAG_FORCE_REMOVE = 0x0000_0020;
            // SCISetSegmentUnavailable
            SCI_FLAG_FORCE_DISCONNECT = 0x0000_0001;
            SCI_FLAG_NOTIFY = 0x0000_0002;
            // SCIAttachPhysicalMemory
            SCI_FLAG_CUDA_BUFFER = 0x0000_2000;
            SCI_FLAG_SCIF_BUFFER = 0x0000_4000;
            // SCIRegisterSegmentMemory
            SCI_FLAG_LOCK_USER_MEM = 0x0000_0400;
            // SCIConnectSegment
            SCI_FLAG_ASYNCHRONOUS_CONNECT = 0x0000_0002;
            // SCIMapLocalSegment, SCIMapRemoteSegment
            SCI_FLAG_FIXED_MAP_ADDR = 0x0000_0001;
            SCI_FLAG_READONLY_MAP = 0x0000_0002;
            SCI_FLAG_LOCK_OPERATION = 0x0000_0004;
            SCI_FLAG_CONDITIONAL_INTERRUPT_MAP = 0x0000_0008;
            SCI_FLAG_UNCONDITIONAL_DATA_INTERRUPT_MAP = 0x0000_0010;
            SCI_FLAG_READ_PREFETCH_AGGR_HOLD_MAP = 0x0000_0020;
            SCI_FLAG_READ_PREFETCH_NO_HOLD_MAP = 0x0000_0040;
            SCI_FLAG_IO_MAP_IOSPACE = 0x0000_0080;
            SCI_FLAG_DMOVE_MAP = 0x0000_0100;
            SCI_FLAG_WRITES_DISABLE_GATHER_MAP = 0x0000_0200;
            SCI_FLAG_DISABLE_128_BYTES_PACKETS = 0x0000_0400;
            SCI_FLAG_NO_MEMORY_LOOPBACK = 0x0000_0800;
            SCI_FLAG_NO_MEMORY_LOOPBACK_MAP = 0x0000_0800;
            SCI_FLAG_SHARED_MAP = 0x0000_2000;
            SCI_FLAG_WRITE_BACK_CACHE_MAP = 0x0800_0000;
            // SCICreateMapSequence
            SCI_FLAG_FAST_BARRIER = 0x0000_0001;
            // SCICheckSequence
            SCI_FLAG_NO_FLUSH = 0x0000_0001;
            SCI_FLAG_NO_STORE_BARRIER = 0x0000_0002;
            // SCIFlush
            SCI_FLAG_FLUSH_CPU_BUFFERS_ONLY = 0x0000_0001;
            FLUSH_CPU_BUFFERS_ONLY = 0x0000_0001;
            // SCIMemCpy
            SCI_FLAG_BLOCK_READ = 0x0000_0001;
            SCI_FLAG_ERROR_CHECK = 0x0000_0002;
            // SCICacheSync
            SCI_FLAG_CACHE_FLUSH = 0x0010_0000;
            SCI_FLAG_CACHE_INVALIDATE = 0x0020_0000;
            // SCIStartDmaTransfer and its kin
            SCI_FLAG_DMA_WAIT = 0x0000_0004;
            SCI_FLAG_DMA_READ = 0x0000_0010;
            SCI_FLAG_DMA_SYSDMA = 0x0000_0100;
            SCI_FLAG_DMA_USER_MEM = 0x0000_0200;
            SCI_FLAG_DMA_ADAPTER = 0x0000_0800;
            // 1.x: SCIEnqueueDMATransfer
            SCI_FLAG_DMA_POST = 0x0000_1000;
            SCI_FLAG_DMA_RESET = 0x0000_2000;
            // SCICreateDMAQueue
            SCI_FLAG_DMA_PHDMA = 0x0000_0020;
            // SCIRequestDMAChannel
            SCI_FLAG_DMA_CHANNEL_SHARED = 0x0000_0001;
            SCI_DMA_CHANNEL_ID_DONTCARE = 0xffff_ffff;
            // SCICreateInterrupt, SCICreateDataInterrupt
            SCI_FLAG_FIXED_INTNO = 0x0000_0002;
            SCI_FLAG_SHARED_INT = 0x0000_0004;
            SCI_FLAG_COUNTING_INT = 0x0000_0020;
            SCI_FLAG_SHARE_EXTERNAL = 0x0000_0040;
            // SCIRegisterInterruptFlag
            SCI_FLAG_CONDITIONAL_INTERRUPT = 0x0000_0008;
            // SCIRegisterPCIeRequester
            SCI_FLAG_PCIE_REQUESTER_GLOBAL = 0x0000_0001;
            // borrowed devices (SmartIO); the last two are names of older programs
            SCI_FLAG_EXCLUSIVE = 0x0100_0000;
            SCI_FLAG_DEVICE_SIDE_ONLY = 0x0200_1000;
            SCI_FLAG_LOCAL_ONLY = 0x0200_2000;
            SCI_FLAG_DEVICE_PREFER_BANDWIDTH = 0x0400_0001;
            SCI_FLAG_HOST_PREFER_BANDWIDTH = 0x0400_0002;
            SCI_FLAG_SPECIFY_PATH = 0x1000_0000;
            SCI_FLAG_SPECIFY_SLOT = 0x2000_0000;
            SCI_FLAG_BAR = 0x0040_0000;
            SCI_FLAG_SHARED = 0x0080_0000;
            // which memory a device segment is, and how it will be used
            SCI_MEMTYPE_BAR = 0x0000_0001;
            SCI_MEMTYPE_PRIVATE = 0x0000_0002;
            SCI_MEMTYPE_SHARED = 0x0000_0004;
            SCI_MEMACCESS_DEVICE_READ = 0x0000_0001;
            SCI_MEMACCESS_DEVICE_WRITE = 0x0000_0002;
            SCI_MEMACCESS_HOST_READ = 0x0000_0004;
            SCI_MEMACCESS_HOST_WRITE = 0x0000_0008;
            SCI_MEMACCESS_MULTIHOST_READ = 0x0000_0014;
            SCI_MEMACCESS_MULTIHOST_WRITE = 0x0000_0018;
            SCI_MEMACCESS_P2P_READ = 0x0000_0021;
            SCI_MEMACCESS_P2P_WRITE = 0x0000_0022;
            // SCIQuery: commands
            SCI_Q_VENDORID = 1;
            SCI_Q_API = 2;
            SCI_Q_SISCI_DRIVER_VERSION = 3;
            SCI_Q_ADAPTER = 4;
            SCI_Q_SYSTEM = 5;
            SCI_Q_DMA = 6;
            SCI_Q_LOCAL_SEGMENT = 7;
            SCI_Q_REMOTE_SEGMENT = 8;
            SCI_Q_MAP = 9;
            SCI_Q_DEVICE = 10;
            // SCI_Q_ADAPTER: data points to an unsigned int
            SCI_Q_ADAPTER_SERIAL_NUMBER = 0x100;
            SCI_Q_ADAPTER_CARD_TYPE = 0x101;
            SCI_Q_ADAPTER_NODEID = 0x102;
            SCI_Q_ADAPTER_CONFIGURED = 0x103;
            SCI_Q_ADAPTER_DMA_MTU = 0x104;
            SCI_Q_ADAPTER_MCAST_MAX_GROUPS = 0x105;
            SCI_Q_ADAPTER_BDF = 0x106;
            SCI_Q_ADAPTER_NUMBER_OF_LINKS = 0x107;
            // the same, about the link of portNo. Speed is a PCIe generation, times are in seconds
            SCI_Q_ADAPTER_LINK_OPERATIONAL = 0x120;
            SCI_Q_ADAPTER_LINK_WIDTH = 0x121;
            SCI_Q_ADAPTER_LINK_SPEED = 0x122;
            SCI_Q_ADAPTER_LINK_UPTIME = 0x123;
            SCI_Q_ADAPTER_LINK_DOWNTIME = 0x124;
            SCI_Q_ADAPTER_LINK_CABLE_INSERTED = 0x125;
            SCI_Q_ADAPTER_LINK_ENABLED = 0x126;
            SCI_Q_ADAPTER_LINK_PARTNER_PORT_NO = 0x127;
            // the same, of the 1.x API
            SCI_Q_ADAPTER_DMA_SIZE_ALIGNMENT = 0x140;
            SCI_Q_ADAPTER_DMA_OFFSET_ALIGNMENT = 0x141;
            SCI_Q_ADAPTER_SUGGESTED_MIN_DMA_SIZE = 0x142;
            SCI_Q_ADAPTER_SUGGESTED_MIN_BLOCK_SIZE = 0x143;
            SCI_Q_ADAPTER_NUMBER_OF_STREAMS = 0x144;
            SCI_Q_ADAPTER_STREAM_BUFFER_SIZE = 0x145;
            SCI_Q_ADAPTER_HW_LINK_STATUS_IS_OK = 0x146;
            SCI_Q_ADAPTER_NUMBER = 0x147;
            SCI_Q_ADAPTER_INSTANCE_NUMBER = 0x148;
            SCI_Q_ADAPTER_FIRMWARE_OK = 0x149;
            SCI_Q_ADAPTER_CONNECTED_TO_SWITCH = 0x14a;
            SCI_Q_ADAPTER_LOCAL_SWITCH_TYPE = 0x14b;
            SCI_Q_ADAPTER_LOCAL_SWITCH_PORT_NUMBER = 0x14c;
            SCI_Q_ADAPTER_CONNECTED_TO_EXPECTED_SWITCH_PORT = 0x14d;
            SCI_Q_ADAPTER_ATT_PAGE_SIZE = 0x14e;
            SCI_Q_ADAPTER_ATT_NUMBER_OF_ENTRIES = 0x14f;
            SCI_Q_ADAPTER_ATT_AVAILABLE_ENTRIES = 0x150;
            SCI_Q_ADAPTER_PHYS_MEM_NODEID = 0x151;
            SCI_Q_ADAPTER_PHYS_MBX_NODEID = 0x152;
            SCI_Q_ADAPTER_PHYS_LINK_PORT_NODEID = 0x153;
            SCI_Q_ADAPTER_SCI_LINK_FREQUENCY = 0x154;
            SCI_Q_ADAPTER_B_LINK_FREQUENCY = 0x155;
            SCI_Q_ADAPTER_IO_BUS_FREQUENCY = 0x156;
            // SCI_Q_SYSTEM: data points to an unsigned int
            SCI_Q_SYSTEM_HOSTBRIDGE = 0x200;
            SCI_Q_SYSTEM_WRITE_POSTING_ENABLED = 0x201;
            SCI_Q_SYSTEM_WRITE_COMBINING_ENABLED = 0x202;
            SCI_Q_SYSTEM_CPU_CACHE_LINE_SIZE = 0x203;
            // the host bridge is not one that the 1.x API knew
            HOSTBRIDGE_UNKNOWN = 0;
            // SCI_Q_DMA: data points to an unsigned int, to a sci_dma_capabilities_t
            SCI_Q_DMA_AVAILABLE = 0x300;
            SCI_Q_DMA_CAPABILITIES = 0x301;
            // SCI_Q_LOCAL_SEGMENT and SCI_Q_REMOTE_SEGMENT: data.ioaddr is filled in
            SCI_Q_LOCAL_SEGMENT_IOADDR = 0x400;
            SCI_Q_LOCAL_SEGMENT_PHYS_ADDR = 0x401;
            SCI_Q_LOCAL_SEGMENT_VIRTUAL_KERNEL_ADDR = 0x402;
            SCI_Q_REMOTE_SEGMENT_IOADDR = 0x500;
            // SCI_Q_MAP: data is filled in
            SCI_Q_MAP_MAPPED_TO_LOCAL_TARGET = 0x600;
            SCI_Q_MAP_QUERY_REMOTE_MAPPED_TO_LOCAL_TARGET = 0x601;
            SCI_Q_MAP_IOADDR = 0x602;
            SCI_Q_MAP_PHYS_ADDR = 0x603;
            // SCI_Q_DEVICE: data points to a sci_smartio_device_info_t
            SCI_Q_DEVICE_INFO = 0x700;
            // dis_types.h
            DIS_DMA_MAX_VECLEN = 256;
            DIS_NODEID_LIST_LENGTH = 8;
            DIS_BROADCAST_NODEID_GROUP_ALL = 252;
        }
    };
}
pub(crate) use for_each_constant;

/// Defines a constant for each pair, and a table of all of them by name.
macro_rules! define {
    ($table:ident; $($name:ident = $value:expr;)*) => {
        $(pub const $name: u32 = $value;)*

        /// All of these, by name.
        pub const $table: &[(&str, u32)] = &[$((stringify!($name), $name)),*];
    };
}

/// Defines the flags, queries and limits.
macro_rules! define_constants {
    ($($constant:tt)*) => { define! { CONSTANTS; $($constant)* } };
}
for_each_constant!(define_constants);

// The enumerators of the C enums, but for the errors.
define! {
    ENUMERATORS;
    // sci_segment_cb_reason_t
    SCI_CB_CONNECT = 1;
    SCI_CB_DISCONNECT = 2;
    SCI_CB_NOT_OPERATIONAL = 3;
    SCI_CB_OPERATIONAL = 4;
    SCI_CB_LOST = 5;
    // sci_callback_action_t
    SCI_CALLBACK_CANCEL = 1;
    SCI_CALLBACK_CONTINUE = 2;
    // sci_dma_queue_state_t
    SCI_DMAQUEUE_IDLE = 0;
    SCI_DMAQUEUE_GATHER = 1;
    SCI_DMAQUEUE_POSTED = 2;
    SCI_DMAQUEUE_DONE = 3;
    SCI_DMAQUEUE_ABORTED = 4;
    SCI_DMAQUEUE_ERROR = 5;
    // sci_sequence_status_t
    SCI_SEQ_OK = 0;
    SCI_SEQ_RETRIABLE = 1;
    SCI_SEQ_NOT_RETRIABLE = 2;
    SCI_SEQ_PENDING = 3;
    // sci_dma_type_t
    SCI_DMA_TYPE_DONTCARE = 1;
    SCI_DMA_TYPE_ADAPTER = 2;
    SCI_DMA_TYPE_GLOBAL = 3;
    SCI_DMA_TYPE_SYSTEM = 4;
    SCI_DMA_TYPE_TRANSPARENT = 5;
    // dis_virt_adapter_t
    DIS_VIRT_ADAPTER_UNKNOWN = 0;
    DIS_VIRT_ADAPTER_RACKBUS = 1;
}
