//! Copies by a channel of the copy engine: what a submission costs, what bandwidth is left of a
//! thread's own, and what batching, combining and several channels gain (Marlin, Table 1).

use std::collections::VecDeque;
use std::time::Duration;

use rackbus_memory::SharedMemory;
use rackbus_memory::copy::{
    Channel, CopyEngine, CopyEngineOptions, CopyLocation, Ticket, Transaction, TransactionState,
};

use super::copy::{memory, plain, walk};
use super::{Bench, rate};
use crate::machine::{CLIENT_CPU, SERVER_CPU, pin};
use crate::nvme::ClientLoad;
use crate::{BenchError, raw};

/// A queue that does nothing, one request at a time.
const NULL: ClientLoad = ClientLoad { bytes: 4096, depth: 1, write: false, random: false };

/// Transactions that are submitted while one is waited for.
const AHEAD: usize = 4;

/// What Table 1 of the paper copies: 10,000 pages.
const PAGES: usize = 10_000;
const PAGE: usize = 4096;
/// Pieces of a batched transaction, there and here.
const BATCH: usize = 256;
/// Bytes of 32 pages, which are combined there.
const COMBINED: usize = 32 * PAGE;

/// A configuration of the paper's.
#[derive(Clone, Copy)]
struct Configuration {
    channels: usize,
    pieces: usize,
    merging: usize,
}

impl Bench<'_> {
    pub(super) fn channels(&mut self) -> Result<(), BenchError> {
        let (time, again) = (self.settings.time, self.settings.again.clone());
        let engine = engine(1)?;
        let channel = &engine.channels()[0];
        let (from, to) = memory(64 << 20)?;
        self.pairs(
            "channel 8 B, submitted to seen",
            "null queue",
            "us",
            || Ok(1e6 / round_trips(time, channel, &from, &to)),
            || Ok(1e6 / raw::run(&again, &NULL, true, time)?),
        )?;
        for (name, bytes) in
            [("64 KiB", 64 << 10), ("1 MiB", 1 << 20), ("4 MiB", 4 << 20), ("16 MiB", 16 << 20)]
        {
            self.pairs(
                &format!("channel {name}"),
                "memcpy by the same processor",
                "GB/s",
                || Ok(queued(time, channel, &from, &to, bytes)),
                || {
                    pin(SERVER_CPU);
                    Ok(walk(time, bytes, 0, |at| plain(&from, &to, at, bytes)))
                },
            )?;
        }
        self.configurations()
    }

    /// Marlin's four configurations, each against the first.
    fn configurations(&mut self) -> Result<(), BenchError> {
        let time = self.settings.time;
        let (from, to) = memory(PAGES * PAGE)?;
        let one = engine(1)?;
        let baseline = Configuration { channels: 1, pieces: 1, merging: 0 };
        let cases = [
            ("pages, several channels", Configuration { channels: 2, ..baseline }),
            ("pages, batched", Configuration { pieces: BATCH, ..baseline }),
            ("pages, combined", Configuration { channels: 1, pieces: BATCH, merging: COMBINED }),
        ];
        for (name, configuration) in cases {
            if !name.contains(&self.settings.only) {
                continue;
            }
            if self.processors <= configuration.channels {
                self.report.left_out(name, "each channel and the submitter need a processor");
                continue;
            }
            let engine = engine(configuration.channels)?;
            self.pairs(
                name,
                "a transaction a page, one by one",
                "GB/s",
                || Ok(pages(time, &engine, configuration, &from, &to)),
                || Ok(pages(time, &one, baseline, &from, &to)),
            )?;
        }
        Ok(())
    }
}

fn engine(channels: usize) -> Result<CopyEngine, BenchError> {
    let cpus = (SERVER_CPU..SERVER_CPU + channels).collect();
    let options = CopyEngineOptions { channels, cpus, ..CopyEngineOptions::default() };
    CopyEngine::start("bench-copy", &options).map_err(BenchError::io("starting the copy engine"))
}

fn transaction(from: &SharedMemory, to: &SharedMemory, at: usize, bytes: usize) -> Transaction {
    let (source, destination) =
        (CopyLocation::shared(from.region(), at), CopyLocation::shared(to.region(), at));
    Transaction::of(source, destination, bytes).expect("inside")
}

/// Waits without ever sleeping: waking a sleeper is a system call of the channel's.
fn poll(ticket: &Ticket) {
    while ticket.poll() == TransactionState::Posted {
        std::hint::spin_loop();
    }
}

/// Small copies per second, each waited for by polling.
fn round_trips(time: Duration, channel: &Channel, from: &SharedMemory, to: &SharedMemory) -> f64 {
    pin(CLIENT_CPU);
    rate(time, 64, || {
        for _ in 0..64 {
            poll(&channel.submit(transaction(from, to, 0, 8)));
        }
    })
}

/// Gigabytes per second of copies of which some are always submitted.
fn queued(
    time: Duration,
    channel: &Channel,
    from: &SharedMemory,
    to: &SharedMemory,
    bytes: usize,
) -> f64 {
    pin(CLIENT_CPU);
    let mut ahead: VecDeque<Ticket> = VecDeque::new();
    let rate = rate(time, 1, || {
        ahead.push_back(channel.submit(transaction(from, to, 0, bytes)));
        if ahead.len() > AHEAD
            && let Some(ticket) = ahead.pop_front()
        {
            poll(&ticket);
        }
    });
    rate * bytes as f64 / 1e9
}

/// Gigabytes per second of copying all pages.
fn pages(
    time: Duration,
    engine: &CopyEngine,
    configuration: Configuration,
    from: &SharedMemory,
    to: &SharedMemory,
) -> f64 {
    let Configuration { channels, pieces, merging } = configuration;
    pin(CLIENT_CPU);
    let rate = rate(time, 1, || {
        let mut under_way: Vec<Option<Ticket>> = (0..channels).map(|_| None).collect();
        for (number, first) in (0..PAGES).step_by(pieces).enumerate() {
            let mut list = Transaction::new().merging_up_to(merging);
            for page in first..(first + pieces).min(PAGES) {
                let source = CopyLocation::shared(from.region(), page * PAGE);
                let destination = CopyLocation::shared(to.region(), page * PAGE);
                list.add(source, destination, PAGE).expect("inside");
            }
            // Each channel has one transaction at a time, as the paper's.
            let which = number % channels;
            if let Some(ticket) = under_way[which].take() {
                ticket.wait(None);
            }
            under_way[which] = Some(engine.channels()[which].submit(list));
        }
        for ticket in under_way.into_iter().flatten() {
            ticket.wait(None);
        }
    });
    rate * (PAGES * PAGE) as f64 / 1e9
}
