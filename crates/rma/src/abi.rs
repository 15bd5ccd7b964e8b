//! libfabric's binary interface, as far as it is used: layouts of its structures and numbers of its flags, as its
//! manual pages document them for version 1.17. Later versions keep them for who asks for that version; structures
//! grow at their ends. Those that this crate makes itself are as large as the largest known version has them.

use std::ffi::{c_char, c_int, c_void};

/// The version of the interface that is asked for: 1.17.
pub const VERSION: u32 = (1 << 16) | 17;

pub const FI_MSG: u64 = 1 << 1;
pub const FI_RMA: u64 = 1 << 2;
pub const FI_READ: u64 = 1 << 8;
pub const FI_WRITE: u64 = 1 << 9;
pub const FI_RECV: u64 = 1 << 10;
pub const FI_SEND: u64 = 1 << 11;
pub const FI_REMOTE_READ: u64 = 1 << 12;
pub const FI_REMOTE_WRITE: u64 = 1 << 13;
pub const FI_TRANSMIT: u64 = FI_SEND;
pub const FI_DELIVERY_COMPLETE: u64 = 1 << 28;
pub const FI_SOURCE: u64 = 1 << 57;
pub const FI_CONTEXT: u64 = 1 << 59;
pub const FI_CONTEXT2: u64 = 1 << 52;
pub const FI_RX_CQ_DATA: u64 = 1 << 56;

pub const FI_MR_LOCAL: c_int = 1 << 2;
pub const FI_MR_VIRT_ADDR: c_int = 1 << 4;
pub const FI_MR_ALLOCATED: c_int = 1 << 5;
pub const FI_MR_PROV_KEY: c_int = 1 << 6;
pub const FI_MR_ENDPOINT: c_int = 1 << 9;

pub const FI_EP_RDM: c_int = 3;
pub const FI_THREAD_DOMAIN: c_int = 3;
pub const FI_AV_TABLE: c_int = 2;
pub const FI_CQ_FORMAT_CONTEXT: c_int = 1;
pub const FI_WAIT_NONE: c_int = 0;
pub const FI_WAIT_FD: c_int = 3;
pub const FI_GETWAIT: c_int = 5;
pub const FI_ENABLE: c_int = 6;

pub const FI_EAGAIN: isize = libc::EAGAIN as isize;
/// An entry of a completion queue's errors is to be read.
pub const FI_EAVAIL: isize = 259;

#[repr(C)]
pub struct Fid {
    pub class: usize,
    pub context: *mut c_void,
    pub ops: *const FidOps,
}

#[repr(C)]
pub struct FidOps {
    pub size: usize,
    pub close: Option<unsafe extern "C" fn(*mut Fid) -> c_int>,
    pub bind: Option<unsafe extern "C" fn(*mut Fid, *mut Fid, u64) -> c_int>,
    pub control: Option<unsafe extern "C" fn(*mut Fid, c_int, *mut c_void) -> c_int>,
}

#[repr(C)]
pub struct TxAttr {
    pub caps: u64,
    pub mode: u64,
    pub op_flags: u64,
    pub msg_order: u64,
    pub comp_order: u64,
    pub inject_size: usize,
    pub size: usize,
    pub iov_limit: usize,
    pub rma_iov_limit: usize,
    pub tclass: u32,
}

#[repr(C)]
pub struct EpAttr {
    pub kind: c_int,
    pub protocol: u32,
    pub protocol_version: u32,
    pub max_msg_size: usize,
}

#[repr(C)]
pub struct DomainAttr {
    pub domain: *mut c_void,
    pub name: *mut c_char,
    pub threading: c_int,
    pub control_progress: c_int,
    pub data_progress: c_int,
    pub resource_mgmt: c_int,
    pub av_type: c_int,
    pub mr_mode: c_int,
    pub mr_key_size: usize,
}

#[repr(C)]
pub struct FabricAttr {
    pub fabric: *mut c_void,
    pub name: *mut c_char,
    pub prov_name: *mut c_char,
    pub prov_version: u32,
    pub api_version: u32,
}

#[repr(C)]
pub struct Info {
    pub next: *mut Info,
    pub caps: u64,
    pub mode: u64,
    pub addr_format: u32,
    pub src_addrlen: usize,
    pub dest_addrlen: usize,
    pub src_addr: *mut c_void,
    pub dest_addr: *mut c_void,
    pub handle: *mut Fid,
    pub tx_attr: *mut TxAttr,
    pub rx_attr: *mut c_void,
    pub ep_attr: *mut EpAttr,
    pub domain_attr: *mut DomainAttr,
    pub fabric_attr: *mut FabricAttr,
    pub nic: *mut c_void,
}

#[repr(C)]
pub struct FidFabric {
    pub fid: Fid,
    pub ops: *const FabricOps,
    pub api_version: u32,
}

/// A function that is not used.
pub type Unused = *const c_void;

#[repr(C)]
pub struct FabricOps {
    pub size: usize,
    pub domain: Option<
        unsafe extern "C" fn(*mut FidFabric, *mut Info, *mut *mut FidDomain, *mut c_void) -> c_int,
    >,
    pub passive_ep: Unused,
    pub eq_open: Unused,
    pub wait_open: Unused,
    pub trywait: Option<unsafe extern "C" fn(*mut FidFabric, *mut *mut Fid, c_int) -> c_int>,
}

#[repr(C)]
pub struct FidDomain {
    pub fid: Fid,
    pub ops: *const DomainOps,
    pub mr: *const MrOps,
}

#[repr(C)]
pub struct DomainOps {
    pub size: usize,
    pub av_open: Option<
        unsafe extern "C" fn(*mut FidDomain, *mut AvAttr, *mut *mut Av, *mut c_void) -> c_int,
    >,
    pub cq_open: Option<
        unsafe extern "C" fn(*mut FidDomain, *mut CqAttr, *mut *mut Cq, *mut c_void) -> c_int,
    >,
    pub endpoint:
        Option<unsafe extern "C" fn(*mut FidDomain, *mut Info, *mut *mut Ep, *mut c_void) -> c_int>,
}

/// Registers: the domain, the memory and its length, access, offset, the key that is wanted, flags.
pub type RegisterFn = unsafe extern "C" fn(
    *mut Fid,
    *const c_void,
    usize,
    u64,
    u64,
    u64,
    u64,
    *mut *mut Mr,
    *mut c_void,
) -> c_int;

#[repr(C)]
pub struct MrOps {
    pub size: usize,
    pub reg: Option<RegisterFn>,
}

#[repr(C)]
pub struct Mr {
    pub fid: Fid,
    pub mem_desc: *mut c_void,
    pub key: u64,
}

#[repr(C)]
pub struct AvAttr {
    pub kind: c_int,
    pub rx_ctx_bits: c_int,
    pub count: usize,
    pub ep_per_node: usize,
    pub name: *const c_char,
    pub map_addr: *mut c_void,
    pub flags: u64,
}

#[repr(C)]
pub struct Av {
    pub fid: Fid,
    pub ops: *const AvOps,
}

#[repr(C)]
pub struct AvOps {
    pub size: usize,
    pub insert: Option<
        unsafe extern "C" fn(*mut Av, *const c_void, usize, *mut u64, u64, *mut c_void) -> c_int,
    >,
}

#[repr(C)]
pub struct CqAttr {
    pub size: usize,
    pub flags: u64,
    pub format: c_int,
    pub wait_obj: c_int,
    pub signaling_vector: c_int,
    pub wait_cond: c_int,
    pub wait_set: *mut c_void,
}

#[repr(C)]
pub struct Cq {
    pub fid: Fid,
    pub ops: *const CqOps,
}

#[repr(C)]
pub struct CqOps {
    pub size: usize,
    pub read: Option<unsafe extern "C" fn(*mut Cq, *mut c_void, usize) -> isize>,
    pub readfrom: Unused,
    pub readerr: Option<unsafe extern "C" fn(*mut Cq, *mut CqErrEntry, u64) -> isize>,
    pub sread: Unused,
    pub sreadfrom: Unused,
    pub signal: Unused,
    pub strerror: Option<
        unsafe extern "C" fn(*mut Cq, c_int, *const c_void, *mut c_char, usize) -> *const c_char,
    >,
}

#[repr(C)]
pub struct CqErrEntry {
    pub op_context: *mut c_void,
    pub flags: u64,
    pub len: usize,
    pub buf: *mut c_void,
    pub data: u64,
    pub tag: u64,
    pub olen: usize,
    pub err: c_int,
    pub prov_errno: c_int,
    pub err_data: *mut c_void,
    pub err_data_size: usize,
    /// Of version 2 on.
    pub src_addr: u64,
}

#[repr(C)]
pub struct Ep {
    pub fid: Fid,
    pub ops: Unused,
    pub cm: *const CmOps,
    pub msg: Unused,
    pub rma: *const RmaOps,
    pub tagged: Unused,
    pub atomic: Unused,
    pub collective: Unused,
}

#[repr(C)]
pub struct CmOps {
    pub size: usize,
    pub setname: Unused,
    pub getname: Option<unsafe extern "C" fn(*mut Fid, *mut c_void, *mut usize) -> c_int>,
}

/// Moves: the endpoint, local memory and its length, its descriptor, the peer, its address and key, the context.
pub type MoveFn = unsafe extern "C" fn(
    *mut Ep,
    *mut c_void,
    usize,
    *mut c_void,
    u64,
    u64,
    u64,
    *mut c_void,
) -> isize;

#[repr(C)]
pub struct RmaOps {
    pub size: usize,
    pub read: Option<MoveFn>,
    pub readv: Unused,
    pub readmsg: Unused,
    pub write: Option<MoveFn>,
}

#[cfg(test)]
mod tests {
    use std::mem::{offset_of, size_of};

    use super::*;

    /// What a C program says that includes the headers of the Debian packages libfabric-dev 1.17.0 and 2.1.0.
    #[test]
    fn layouts_are_those_of_the_headers() {
        assert_eq!(size_of::<Info>(), 120);
        assert_eq!(size_of::<TxAttr>(), 80);
        assert_eq!(size_of::<FabricAttr>(), 32);
        assert_eq!(size_of::<Fid>(), 24);
        assert_eq!(size_of::<FidFabric>(), 40);
        assert_eq!(size_of::<FidDomain>(), 40);
        assert_eq!(size_of::<Mr>(), 40);
        assert_eq!(size_of::<Ep>(), 80);
        assert_eq!((size_of::<Cq>(), size_of::<CqOps>()), (32, 64));
        assert_eq!((size_of::<CqAttr>(), size_of::<AvAttr>(), size_of::<Av>()), (40, 48, 32));
        // 80 before version 2.
        assert_eq!(size_of::<CqErrEntry>(), 88);
        assert_eq!(offset_of!(CqErrEntry, src_addr), 80);
        assert_eq!(offset_of!(Info, addr_format), 24);
        assert_eq!(offset_of!(Info, src_addr), 48);
        assert_eq!(offset_of!(Info, tx_attr), 72);
        assert_eq!(offset_of!(Info, domain_attr), 96);
        assert_eq!(offset_of!(Info, fabric_attr), 104);
        assert_eq!(offset_of!(TxAttr, op_flags), 16);
        assert_eq!(offset_of!(EpAttr, max_msg_size), 16);
        assert_eq!(offset_of!(DomainAttr, threading), 16);
        assert_eq!(offset_of!(DomainAttr, data_progress), 24);
        assert_eq!(offset_of!(DomainAttr, av_type), 32);
        assert_eq!(offset_of!(DomainAttr, mr_mode), 36);
        assert_eq!(offset_of!(DomainAttr, mr_key_size), 40);
        assert_eq!(offset_of!(FabricAttr, prov_name), 16);
        assert_eq!(offset_of!(FidOps, control), 24);
        assert_eq!(offset_of!(FabricOps, trywait), 40);
        assert_eq!(offset_of!(DomainOps, cq_open), 16);
        assert_eq!(offset_of!(DomainOps, endpoint), 24);
        assert_eq!(offset_of!(CmOps, getname), 16);
        assert_eq!((offset_of!(RmaOps, read), offset_of!(RmaOps, write)), (8, 32));
        assert_eq!((offset_of!(Ep, cm), offset_of!(Ep, rma)), (32, 48));
        assert_eq!((offset_of!(CqOps, readerr), offset_of!(CqOps, strerror)), (24, 56));
        assert_eq!((offset_of!(CqErrEntry, err), offset_of!(CqErrEntry, prov_errno)), (56, 60));
        assert_eq!(offset_of!(AvOps, insert), 8);
    }
}
