//! Operations through a queue pair, as many as possible.

use std::sync::Arc;
use std::time::{Duration, Instant};

use rackbus_devices::accel::profile::PATTERNS;
use rackbus_devices::accel::{Accelerator, EnginePool, PoolOptions};
use rackbus_driver::InThreadFunction;
use rackbus_driver::accel::{Accel, AccelOptions, MessageWork};
use rackbus_qos::{ServiceLevel, TenantId};
use rackbus_spec::accel::{Descriptor, Operation};

use super::direct::KEY;
use crate::BenchError;

/// A function of `pool` in this thread, with its level.
pub fn function(
    pool: &Arc<EnginePool>,
    tenant: u32,
    level: Option<&ServiceLevel>,
    options: AccelOptions,
) -> Result<Accel, BenchError> {
    let failed = |error: &dyn std::fmt::Display| BenchError::Peer(error.to_string());
    let model = Accelerator::new(pool, TenantId(tenant), level, 1).map_err(|e| failed(&e))?;
    Accel::start(Box::new(InThreadFunction::new(Box::new(model))), options).map_err(|e| failed(&e))
}

/// A queue pair with work for it.
pub struct LoadedQueuePair {
    accel: Accel,
    depth: u32,
    /// By place: the descriptors that follow each other there.
    places: Vec<Vec<Descriptor>>,
    /// By place: which of them is under way.
    under_way: Vec<usize>,
}

/// Where a place's input and outputs are.
fn stride(input: usize, room: usize) -> usize {
    (input + room).next_multiple_of(4096)
}

impl LoadedQueuePair {
    /// The operations as one descriptor each time.
    ///
    /// # Errors
    /// When the function cannot be used.
    pub fn new(
        operations: &[Operation],
        message: &[u8],
        room: usize,
        depth: u16,
    ) -> Result<LoadedQueuePair, BenchError> {
        let mut queue = LoadedQueuePair::empty(stride(message.len(), room), depth)?;
        let stages = queue.stages(operations)?;
        for place in 0..usize::from(depth) {
            let at = place * stride(message.len(), room);
            let output = at + message.len().next_multiple_of(64);
            queue.put(at, message);
            let room = room - (output - at - message.len());
            let descriptor = queue.describe(&stages, (at, message.len()), (output, room))?;
            queue.places.push(vec![descriptor]);
        }
        Ok(queue)
    }

    /// The operations one after the other, each on what came out of the one before.
    ///
    /// # Errors
    /// When the function cannot be used.
    pub fn calls(
        operations: &[Operation],
        message: &[u8],
        room: usize,
        depth: u16,
    ) -> Result<LoadedQueuePair, BenchError> {
        let each = stride(message.len(), room) * operations.len();
        let mut queue = LoadedQueuePair::empty(each, depth)?;
        let stages = queue.stages(operations)?;
        for place in 0..usize::from(depth) {
            let mut at = place * each;
            queue.put(at, message);
            let mut input = message.len();
            let mut descriptors = Vec::new();
            for stage in &stages {
                let output = at + input.next_multiple_of(64);
                let descriptor =
                    queue.describe(std::slice::from_ref(stage), (at, input), (output, room))?;
                descriptors.push(descriptor);
                // What comes out is always the same: how much, the first time tells.
                input = queue.once(&descriptor)?;
                at = output;
            }
            queue.places.push(descriptors);
        }
        Ok(queue)
    }

    fn empty(each: usize, depth: u16) -> Result<LoadedQueuePair, BenchError> {
        let pool = EnginePool::new(PoolOptions::default());
        let data = each * usize::from(depth) + (64 << 10);
        let accel =
            function(&pool, 1, None, AccelOptions { depth, data, ..AccelOptions::default() })?;
        Ok(LoadedQueuePair {
            accel,
            depth: depth.into(),
            places: Vec::new(),
            under_way: Vec::new(),
        })
    }

    /// The operations with the contexts that they take.
    fn stages(&mut self, operations: &[Operation]) -> Result<Vec<(Operation, u16)>, BenchError> {
        let mut stage = |operation: &Operation| {
            let context = match operation {
                Operation::Aes256Ctr | Operation::Aes256GcmSeal | Operation::Aes256GcmOpen => {
                    self.accel.create_context(*operation, &KEY)
                }
                Operation::RegexScan => self.accel.create_context(*operation, PATTERNS),
                _ => Ok(0),
            };
            context.map(|context| (*operation, context)).map_err(failed)
        };
        operations.iter().map(&mut stage).collect()
    }

    fn put(&self, at: usize, message: &[u8]) {
        if let Some(to) = self.accel.data(at, message.len()) {
            to.copy_from(message);
        }
    }

    fn describe(
        &self,
        stages: &[(Operation, u16)],
        input: (usize, usize),
        output: (usize, usize),
    ) -> Result<Descriptor, BenchError> {
        self.accel
            .describe(&MessageWork { stages, ..MessageWork::default() }, input, output)
            .map_err(failed)
    }

    /// Does one descriptor; bytes that came out.
    fn once(&mut self, descriptor: &Descriptor) -> Result<usize, BenchError> {
        self.accel.push(0, descriptor).map_err(failed)?;
        self.accel.ring(0).map_err(failed)?;
        let completion = self.accel.wait(0).map_err(failed)?;
        match completion.status {
            0 => Ok(completion.output as usize),
            status => Err(BenchError::Peer(format!("an operation ended with status {status}"))),
        }
    }

    /// What comes out of the first descriptor of the first place.
    ///
    /// # Errors
    /// When the operation fails.
    #[cfg(test)]
    pub fn output_once(&mut self) -> Result<Vec<u8>, BenchError> {
        let descriptor = self.places[0][0];
        let mut out = vec![0; self.once(&descriptor)?];
        let at = (descriptor.output - self.accel.address(0)) as usize;
        if let Some(from) = self.accel.data(at, out.len()) {
            from.copy_to(&mut out);
        }
        Ok(out)
    }

    /// Whole rounds each second, with all places under way.
    ///
    /// # Errors
    /// When an operation fails.
    pub fn rate(&mut self, time: Duration) -> Result<f64, BenchError> {
        self.under_way = vec![0; self.places.len()];
        for place in 0..self.places.len() {
            self.push(place)?;
        }
        self.accel.ring(0).map_err(failed)?;
        let (mut begun, mut done, mut warm) = (Instant::now(), 0u64, true);
        loop {
            let mut looks = 0u32;
            while looks < 256 {
                looks += 1;
                while let Some(completion) = self.accel.poll(0).map_err(failed)? {
                    if completion.status != 0 {
                        let status = completion.status;
                        return Err(BenchError::Peer(format!("it ended with status {status}")));
                    }
                    let place = usize::from(completion.id);
                    self.under_way[place] = (self.under_way[place] + 1) % self.places[place].len();
                    done += u64::from(self.under_way[place] == 0);
                    self.push(place)?;
                }
                self.accel.ring(0).map_err(failed)?;
            }
            let elapsed = begun.elapsed();
            if warm && elapsed >= time / 10 {
                (begun, done, warm) = (Instant::now(), 0, false);
            } else if !warm && elapsed >= time {
                let rate = done as f64 / elapsed.as_secs_f64();
                self.drain()?;
                return Ok(rate);
            }
        }
    }

    fn push(&mut self, place: usize) -> Result<(), BenchError> {
        let descriptor = self.places[place][self.under_way[place]];
        let descriptor = Descriptor { id: place as u16, ..descriptor };
        self.accel.push(0, &descriptor).map_err(failed)
    }

    fn drain(&mut self) -> Result<(), BenchError> {
        debug_assert!(self.accel.under_way(0) <= self.depth);
        while self.accel.under_way(0) > 0 {
            self.accel.wait(0).map_err(failed)?;
        }
        Ok(())
    }
}

pub fn failed(error: rackbus_driver::AccelError) -> BenchError {
    BenchError::Peer(error.to_string())
}
