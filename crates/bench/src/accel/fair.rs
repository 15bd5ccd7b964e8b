//! Two tenants on one engine: what each gets, and what both get together.

use std::sync::Arc;
use std::time::{Duration, Instant};

use rackbus_devices::accel::{EnginePool, PoolOptions};
use rackbus_driver::accel::{Accel, AccelOptions, MessageWork};
use rackbus_qos::{ServiceLevel, Shaping, TenantId};
use rackbus_spec::accel::{Descriptor, Operation};

use super::direct;
use super::queue::{failed, function};
use crate::BenchError;
use crate::machine::{CLIENT_CPU, pin, unpin};

/// What a tenant sends: an operation, and a message that it always has under way many times in each of its queue pairs.
#[derive(Debug, Clone)]
pub struct Sends {
    operation: Operation,
    message: Vec<u8>,
    queues: u16,
}

/// Descriptors under way in a queue pair.
const DEPTH: u16 = 64;
/// The same of messages that are done within a microsecond: a shaped tenant needs some slices of work waiting.
const TINY_DEPTH: u16 = 1024;

/// Megabytes each second of the minimum that is measured.
pub const PROMISED: f64 = 10.0;

fn sends(operation: Operation, message: Vec<u8>) -> Sends {
    Sends { operation, message, queues: 1 }
}

fn noise(size: usize) -> Vec<u8> {
    let mut state = 1u64;
    let next = || {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
        (state >> 56) as u8
    };
    std::iter::repeat_with(next).take(size).collect()
}

/// Bytes of a message before it is compressed.
const MESSAGE: usize = 16 << 10;

/// Tenants that pay the same, by what they send.
pub fn pairs() -> Vec<(&'static str, [Sends; 2])> {
    let (deflate, sha3) = (Operation::Deflate, Operation::Sha3_512);
    let page = sends(sha3, vec![0; 4 << 10]);
    let packed = direct::message(Operation::Inflate, MESSAGE);
    vec![
        ("the same", equal()),
        ("noise and zeroes", [sends(deflate, noise(64 << 10)), sends(deflate, vec![0; 64 << 10])]),
        ("64 KiB and 4 KiB", [sends(sha3, vec![0; 64 << 10]), page.clone()]),
        ("64 KiB and 64 B", [sends(sha3, vec![0; 64 << 10]), sends(sha3, vec![0; 64])]),
        ("4 queue pairs and 1", [Sends { queues: 4, ..page.clone() }, page]),
        (
            "compression and decompression",
            [sends(deflate, noise(MESSAGE)), sends(Operation::Inflate, packed)],
        ),
    ]
}

/// Two tenants that send the same.
fn equal() -> [Sends; 2] {
    let one = sends(Operation::Deflate, vec![0; 16 << 10]);
    [one.clone(), one]
}

/// A tenant with all of its messages described.
struct Tenant {
    accel: Accel,
    descriptor: Descriptor,
    queues: usize,
    depth: u32,
}

impl Sends {
    fn depth(&self) -> u16 {
        if self.message.len() < 1024 { TINY_DEPTH } else { DEPTH }
    }
}

impl Tenant {
    fn new(
        pool: &Arc<EnginePool>,
        number: u32,
        level: Option<&ServiceLevel>,
        sends: &Sends,
    ) -> Result<Tenant, BenchError> {
        let (queues, depth) = (sends.queues, sends.depth());
        let options = AccelOptions { queues, depth, data: 1 << 20, ..AccelOptions::default() };
        let accel = function(pool, number, level, options)?;
        let descriptor = describe(&accel, sends, 0)?;
        Ok(Tenant { accel, descriptor, queues: queues.into(), depth: depth.into() })
    }

    /// Fills the queues and takes what has come.
    fn go_on(&mut self) -> Result<(), BenchError> {
        for queue in 0..self.queues {
            while self.accel.under_way(queue) < self.depth {
                self.accel.push(queue, &self.descriptor).map_err(failed)?;
            }
            self.accel.ring(queue).map_err(failed)?;
            while let Some(completion) = self.accel.poll(queue).map_err(failed)? {
                if completion.status != 0 {
                    let status = completion.status;
                    return Err(BenchError::Peer(format!("it ended with status {status}")));
                }
            }
        }
        Ok(())
    }
}

/// What a tenant sends, put where `at` says.
fn describe(accel: &Accel, sends: &Sends, at: usize) -> Result<Descriptor, BenchError> {
    let length = sends.message.len();
    if let Some(to) = accel.data(at, length) {
        to.copy_from(&sends.message);
    }
    let stages = [(sends.operation, 0)];
    let work = MessageWork { stages: &stages, ..MessageWork::default() };
    // What is not compressible becomes a little longer, and what is compressed as long as it was.
    let whole = if sends.operation == Operation::Inflate { MESSAGE } else { length };
    let room = whole + whole / 4 + 1024;
    accel.describe(&work, (at, length), (at + (128 << 10), room)).map_err(failed)
}

/// Has both tenants send for a time, after a tenth of it, from this thread: engine time, bytes in and operations of
/// each.
fn together(
    pool: &Arc<EnginePool>,
    mut tenants: [Tenant; 2],
    time: Duration,
) -> Result<[[u64; 3]; 2], BenchError> {
    pin(CLIENT_CPU);
    let used = || {
        [1, 2].map(|number| {
            let usage = pool.usage(TenantId(number)).unwrap_or_default();
            [usage.engine_ns, usage.ingress, usage.operations]
        })
    };
    let mut send = |time: Duration| {
        let begun = Instant::now();
        while begun.elapsed() < time {
            tenants.iter_mut().try_for_each(Tenant::go_on)?;
        }
        Ok::<_, BenchError>(())
    };
    let sent = send(time / 10).and_then(|()| {
        let before = used();
        send(time)?;
        let after = used();
        Ok([0, 1].map(|nth| [0, 1, 2].map(|of| after[nth][of] - before[nth][of])))
    });
    unpin();
    sent
}

/// Has two tenants send to a device for a time: engine time, bytes in and operations of each.
fn measured(
    of: &[Sends; 2],
    shaping: Shaping,
    time: Duration,
) -> Result<[[u64; 3]; 2], BenchError> {
    let pool = EnginePool::new(PoolOptions { shaping, ..PoolOptions::default() });
    let first = Tenant::new(&pool, 1, None, &of[0])?;
    let tenants = [first, Tenant::new(&pool, 2, None, &of[1])?];
    together(&pool, tenants, time)
}

/// Engine time of the first tenant over that of the second, of a device that shapes or one that does not.
///
/// # Errors
/// When an operation fails.
pub fn ratio(of: &[Sends; 2], shaping: Shaping, time: Duration) -> Result<f64, BenchError> {
    let [first, second] = measured(of, shaping, time)?;
    Ok(first[0] as f64 / second[0].max(1) as f64)
}

/// Thousands of operations each second of two equal tenants together.
///
/// # Errors
/// When an operation fails.
pub fn both(shaping: Shaping, time: Duration) -> Result<f64, BenchError> {
    let [first, second] = measured(&equal(), shaping, time)?;
    Ok((first[2] + second[2]) as f64 / time.as_secs_f64() / 1e3)
}

/// Megabytes each second that a tenant gets which was promised [`PROMISED`], beside a flood of others' long messages.
///
/// # Errors
/// When an operation fails.
pub fn minimum(time: Duration) -> Result<f64, BenchError> {
    let pool = EnginePool::new(PoolOptions::default());
    let text = format!("deflate {PROMISED} MB/s max {PROMISED} MB/s message 16KiB");
    let level: ServiceLevel = text.parse().map_err(|error| BenchError::Peer(format!("{error}")))?;
    let victim = sends(Operation::Deflate, vec![0; 16 << 10]);
    let flood = sends(Operation::Deflate, noise(64 << 10));
    let first = Tenant::new(&pool, 1, Some(&level), &victim)?;
    let tenants = [first, Tenant::new(&pool, 2, None, &flood)?];
    let [first, _] = together(&pool, tenants, time)?;
    Ok(first[1] as f64 / time.as_secs_f64() / 1e6)
}
