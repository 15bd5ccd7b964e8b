//! Two tenants on one engine: what each gets, and what both get together.

use std::sync::Arc;
use std::time::{Duration, Instant};

use rackbus_devices::accel::{EnginePool, PoolOptions};
use rackbus_driver::accel::{Accel, AccelOptions, MessageWork};
use rackbus_qos::{ServiceLevel, TenantId};
use rackbus_spec::accel::{Descriptor, Operation};

use super::queue::{failed, function};
use crate::BenchError;
use crate::machine::{CLIENT_CPU, pin, unpin};

/// What a tenant sends: an operation, and a message that it always has under way many times.
#[derive(Debug, Clone)]
pub struct Sends {
    operation: Operation,
    message: Vec<u8>,
}

const DEPTH: u16 = 64;

/// Megabytes each second of the minimum that is measured.
pub const PROMISED: f64 = 10.0;

fn sends(operation: Operation, message: Vec<u8>) -> Sends {
    Sends { operation, message }
}

fn noise(size: usize) -> Vec<u8> {
    let mut state = 1u64;
    let next = || {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
        (state >> 56) as u8
    };
    std::iter::repeat_with(next).take(size).collect()
}

/// Tenants that pay the same, by what they send.
pub fn pairs() -> Vec<(&'static str, [Sends; 2])> {
    let deflate = Operation::Deflate;
    let equal = sends(deflate, vec![0; 16 << 10]);
    vec![
        ("the same", [equal.clone(), equal]),
        ("noise and zeroes", [sends(deflate, noise(64 << 10)), sends(deflate, vec![0; 64 << 10])]),
        (
            "64 KiB and 4 KiB",
            [
                sends(Operation::Sha3_512, vec![0; 64 << 10]),
                sends(Operation::Sha3_512, vec![0; 4 << 10]),
            ],
        ),
    ]
}

/// A tenant with all of its messages described.
struct Tenant {
    accel: Accel,
    descriptor: Descriptor,
}

impl Tenant {
    fn new(
        pool: &Arc<EnginePool>,
        number: u32,
        level: Option<&ServiceLevel>,
        sends: &Sends,
    ) -> Result<Tenant, BenchError> {
        let options = AccelOptions { depth: 2 * DEPTH, data: 1 << 20, ..AccelOptions::default() };
        let accel = function(pool, number, level, options)?;
        let descriptor = describe(&accel, sends, 0)?;
        Ok(Tenant { accel, descriptor })
    }

    /// Fills the queue and takes what has come.
    fn go_on(&mut self) -> Result<(), BenchError> {
        while self.accel.under_way(0) < DEPTH.into() {
            self.accel.push(0, &self.descriptor).map_err(failed)?;
        }
        self.accel.ring(0).map_err(failed)?;
        while self.accel.poll(0).map_err(failed)?.is_some() {}
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
    let room = length + length / 4 + 1024;
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

/// Engine time of the first tenant over that of the second.
///
/// # Errors
/// When an operation fails.
pub fn shaped(of: &[Sends; 2], time: Duration) -> Result<f64, BenchError> {
    let pool = EnginePool::new(PoolOptions::default());
    let first = Tenant::new(&pool, 1, None, &of[0])?;
    let tenants = [first, Tenant::new(&pool, 2, None, &of[1])?];
    let [first, second] = together(&pool, tenants, time)?;
    Ok(first[0] as f64 / second[0].max(1) as f64)
}

/// The same of a device that does their messages in turn, as one queue has them.
///
/// # Errors
/// When an operation fails.
pub fn in_turn(of: &[Sends; 2], time: Duration) -> Result<f64, BenchError> {
    let mut costs = [0u64; 2];
    alternate(of, time, |kind, engine_ns| costs[kind] += u64::from(engine_ns))?;
    Ok(costs[0] as f64 / costs[1].max(1) as f64)
}

/// Thousands of operations each second of two equal tenants together.
///
/// # Errors
/// When an operation fails.
pub fn both(time: Duration) -> Result<f64, BenchError> {
    let pool = EnginePool::new(PoolOptions::default());
    let (_, of) = pairs().swap_remove(0);
    let first = Tenant::new(&pool, 1, None, &of[0])?;
    let tenants = [first, Tenant::new(&pool, 2, None, &of[1])?];
    let [first, second] = together(&pool, tenants, time)?;
    Ok((first[2] + second[2]) as f64 / time.as_secs_f64() / 1e3)
}

/// Thousands of the same operations each second by one queue, that nothing shapes.
///
/// # Errors
/// When an operation fails.
pub fn alone(time: Duration) -> Result<f64, BenchError> {
    let (_, of) = pairs().swap_remove(0);
    let mut done = 0u64;
    alternate(&of, time, |_, _| done += 1)?;
    Ok(done as f64 / time.as_secs_f64() / 1e3)
}

/// Sends messages of both kinds in turn by one queue for a time, and tells the engine time of each.
fn alternate(
    of: &[Sends; 2],
    time: Duration,
    mut ended: impl FnMut(usize, u32),
) -> Result<(), BenchError> {
    let pool = EnginePool::new(PoolOptions::default());
    let options = AccelOptions { depth: 2 * DEPTH, data: 2 << 20, ..AccelOptions::default() };
    let mut accel = function(&pool, 1, None, options)?;
    let mut descriptors = [describe(&accel, &of[0], 0)?, describe(&accel, &of[1], 512 << 10)?];
    for (id, descriptor) in (0..).zip(&mut descriptors) {
        descriptor.id = id;
    }
    pin(CLIENT_CPU);
    let (begun, mut sent) = (Instant::now(), 0usize);
    while begun.elapsed() < time {
        while accel.under_way(0) < (2 * DEPTH).into() {
            accel.push(0, &descriptors[sent % 2]).map_err(failed)?;
            sent += 1;
        }
        accel.ring(0).map_err(failed)?;
        while let Some(completion) = accel.poll(0).map_err(failed)? {
            ended(usize::from(completion.id).min(1), completion.value);
        }
    }
    unpin();
    Ok(())
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
