//! Copies to another host: by the copy engine to pages that were opened, and by the copy service
//! (Marlin's CMMC) to an area that was registered; each against the engine between plain memory.

use std::collections::VecDeque;
use std::sync::Arc;

use rackbus_attach::{Copier, Signal, SubmittedWrite};
use rackbus_memory::Region;
use rackbus_memory::copy::{
    Channel, CopyEngine, CopyEngineOptions, CopyLocation, Ticket, Transaction, TransactionState,
};

use super::pio::batch;
use super::plain::Plain;
use super::{Bench, size, typical};
use crate::BenchError;
use crate::machine::{CLIENT_CPU, SERVER_CPU, pin};

const SIZES: [usize; 4] = [64 << 10, 1 << 20, 4 << 20, 16 << 20];

/// Copies that are submitted while one is waited for.
const AHEAD: usize = 4;

impl Bench<'_> {
    pub(super) fn copies(&mut self) -> Result<(), BenchError> {
        let time = self.settings.time;
        let options = CopyEngineOptions { cpus: vec![SERVER_CPU], ..CopyEngineOptions::default() };
        let engine =
            CopyEngine::start("bench", &options).map_err(BenchError::io("starting an engine"))?;
        let channel = &engine.channels()[0];
        for bytes in SIZES {
            let case = format!("copy {} to opened pages", size(bytes));
            if !self.wanted(&case) {
                continue;
            }
            let (alpha, beta) = (&self.hosts.alpha, &self.hosts.beta);
            let (source, target) = (beta.allocate(bytes as u64)?, alpha.allocate(bytes as u64)?);
            target.open(0, bytes as u64, beta.node(), true)?;
            let remote = beta.map_pages(target.address(), bytes as u64)?;
            source.mapping().whole().fill(1);
            remote.mapping().whole().fill(1);
            let (from, to) = (Plain::new(bytes)?, Plain::new(bytes)?);
            let gb = bytes as f64 / 1e9;
            let mut copied = |from: &Arc<Region>, to: &Arc<Region>| {
                let mut ahead = VecDeque::new();
                let copy =
                    typical(time, batch(bytes), || queue(channel, (from, to), bytes, &mut ahead))?;
                for ticket in ahead {
                    ended(&ticket)?;
                }
                Ok(gb / copy)
            };
            let copied = std::cell::RefCell::new(&mut copied);
            self.pairs(
                (&case, "the same engine between plain memory", "GB/s"),
                || (copied.borrow_mut())(source.mapping().region(), remote.mapping().region()),
                || (copied.borrow_mut())(from.region(), to.region()),
            )?;
            self.pairs(
                (&case, "memcpy by the engine's processor", "GB/s"),
                || (copied.borrow_mut())(source.mapping().region(), remote.mapping().region()),
                || {
                    pin(SERVER_CPU);
                    let copied = to.walk(&from, bytes, time, batch(bytes));
                    pin(CLIENT_CPU);
                    Ok(gb / copied?)
                },
            )?;
        }
        Ok(())
    }
}

impl Bench<'_> {
    pub(super) fn areas(&mut self) -> Result<(), BenchError> {
        let time = self.settings.time;
        let options = CopyEngineOptions { cpus: vec![SERVER_CPU], ..CopyEngineOptions::default() };
        let engine =
            CopyEngine::start("bench", &options).map_err(BenchError::io("starting an engine"))?;
        let (channel, copier) = (&engine.channels()[0], Copier::start(&options)?);
        for bytes in SIZES {
            let case = format!("CMMC {}", size(bytes));
            if !self.wanted(&case) {
                continue;
            }
            let (alpha, beta) = (&self.hosts.alpha, &self.hosts.beta);
            let (source, area) = (beta.allocate(bytes as u64)?, alpha.export_area(bytes as u64)?);
            let handle = beta.register_area(area.key())?;
            source.mapping().whole().fill(1);
            area.mapping().whole().fill(1);
            let (from, to) = (Plain::new(bytes)?, Plain::new(bytes)?);
            let gb = bytes as f64 / 1e9;
            let failed = |error: rackbus_attach::CopyError| BenchError::Peer(error.to_string());
            self.pairs(
                (&case, "the same engine between plain memory", "GB/s"),
                || {
                    let mut ahead = VecDeque::new();
                    let copy = typical(time, batch(bytes), || {
                        let source = (source.mapping(), 0);
                        let writing = copier.write(&handle, 0, source, bytes, Signal::None);
                        ahead.push_back(writing.map_err(failed)?);
                        match ahead.len() > AHEAD {
                            true => ahead.pop_front().map_or(Ok(()), polled),
                            false => Ok(()),
                        }
                    })?;
                    ahead.into_iter().try_for_each(polled)?;
                    Ok(gb / copy)
                },
                || {
                    let mut ahead = VecDeque::new();
                    let plain = (from.region(), to.region());
                    let copy =
                        typical(time, batch(bytes), || queue(channel, plain, bytes, &mut ahead))?;
                    ahead.iter().try_for_each(ended)?;
                    Ok(gb / copy)
                },
            )?;
        }
        Ok(())
    }
}

/// Waits for a write as the other side waits: by polling.
fn polled(writing: SubmittedWrite<'_>) -> Result<(), BenchError> {
    while !writing.is_over() {
        std::hint::spin_loop();
    }
    writing.finish().map_err(|error| BenchError::Peer(error.to_string()))
}

/// Submits a copy; waits for the oldest when enough are submitted.
fn queue(
    channel: &Channel,
    (from, to): (&Arc<Region>, &Arc<Region>),
    bytes: usize,
    ahead: &mut VecDeque<Ticket>,
) -> Result<(), BenchError> {
    let copy = Transaction::of(CopyLocation::shared(from, 0), CopyLocation::shared(to, 0), bytes);
    ahead.push_back(channel.submit(copy.map_err(|error| BenchError::Peer(error.to_string()))?));
    match ahead.len() > AHEAD {
        true => ahead.pop_front().map_or(Ok(()), |ticket| ended(&ticket)),
        false => Ok(()),
    }
}

fn ended(ticket: &Ticket) -> Result<(), BenchError> {
    loop {
        match ticket.poll() {
            TransactionState::Posted => std::hint::spin_loop(),
            TransactionState::Done => return Ok(()),
            other => return Err(BenchError::Peer(format!("a copy ended as {other:?}"))),
        }
    }
}
