//! The structures of the header.

use rackbus_driver::accel::AccelOptions;
use rackbus_spec::accel::STAGES;

use crate::error::{CallFailure, invalid};

/// How to use a function; 0 is as usual.
#[allow(non_camel_case_types)]
#[derive(Debug, Clone, Copy)]
#[repr(C)]
pub struct rackbus_accel_options {
    /// How many queue pairs of the function are used.
    pub queues: u16,
    /// Requests under way in each.
    pub depth: u16,
    /// Segments of a message at most.
    pub segments: u16,
    /// 1: who waits never sleeps.
    pub polled: u16,
    /// Bytes of memory for data.
    pub data: u64,
}

impl rackbus_accel_options {
    /// As the driver has them.
    pub(crate) fn chosen(&self) -> Result<AccelOptions, CallFailure> {
        let usual = AccelOptions::default();
        let or = |given: u16, usual: u16| if given == 0 { usual } else { given };
        let data = match usize::try_from(self.data) {
            Ok(0) => usual.data,
            Ok(data) if data <= 1 << 40 => data,
            _ => return Err(invalid("there is no memory for so much data".to_owned())),
        };
        if self.polled > 1 {
            return Err(invalid("polled is 0 or 1".to_owned()));
        }
        Ok(AccelOptions {
            queues: or(self.queues, usual.queues),
            depth: or(self.depth, usual.depth),
            data,
            interrupts: self.polled == 0,
        })
    }
}

/// What a function says of itself.
#[allow(non_camel_case_types)]
#[derive(Debug, Clone, Copy)]
#[repr(C)]
pub struct rackbus_accel_info {
    /// Queue pairs that it has.
    pub queues: u32,
    /// How many contexts the function keeps at most.
    pub contexts: u32,
    /// Bytes of a message at most.
    pub largest: u32,
    /// Must be 0: later versions may give it a meaning.
    pub reserved: u32,
    /// Bit N: operation N is available.
    pub operations: u64,
    /// Bytes of memory for data.
    pub data: u64,
}

/// A part of the memory for data.
#[allow(non_camel_case_types)]
#[derive(Debug, Clone, Copy)]
#[repr(C)]
pub struct rackbus_accel_segment {
    /// Its first byte, counted from the beginning of the memory for data.
    pub offset: u64,
    /// How many bytes it has.
    pub length: u64,
}

/// What the function is asked to do with a message.
#[allow(non_camel_case_types)]
#[derive(Debug, Clone, Copy)]
#[repr(C)]
pub struct rackbus_accel_request {
    /// What its completion has, too.
    pub token: u64,
    /// The operations; 0 behind the last.
    pub operations: [u8; STAGES],
    /// The context of each; 0 for none.
    pub contexts: [u16; STAGES],
    /// Bytes of the input that are authenticated only.
    pub associated: u32,
    /// Nonce or first counter block.
    pub nonce: [u8; 16],
    /// Where the input is.
    pub input: *const rackbus_accel_segment,
    /// Where the output goes.
    pub output: *const rackbus_accel_segment,
    /// How many segments `input` points to.
    pub input_segments: u32,
    /// How many segments `output` points to.
    pub output_segments: u32,
}

/// A request that has ended.
#[allow(non_camel_case_types)]
#[derive(Debug, Clone, Copy)]
#[repr(C)]
pub struct rackbus_accel_completion {
    /// What the request is known by.
    pub token: u64,
    /// The status of its completion, as the interface numbers them.
    pub status: u32,
    /// Bytes that came out.
    pub output: u32,
    /// Engine time that it took.
    pub engine_ns: u32,
    /// Must be 0: later versions may give it a meaning.
    pub reserved: u32,
}
