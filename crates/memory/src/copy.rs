//! The copy engine: memory copied by threads of its own, while the submitter does something else.
//!
//! What a DMA engine in a switch is between hosts (Marlin's HRDMA, section 5.1 of its paper), this
//! is between processes that map the same memory. A [`Transaction`] is a scatter-gather list; a
//! [`Channel`] carries transactions out one after the other; an [`CopyEngine`] has several channels.
//! What makes it fast there makes it fast here:
//!
//! * *batching*: many pieces are one transaction, and many transactions one submission;
//! * *combining*: pieces that continue from each other are copied as one;
//! * *channels*: independent transactions are under way at the same time.
//!
//! A busy channel and its submitter exchange two cache lines for a transaction and make no system
//! call. An idle channel sleeps.

pub(crate) mod bytes;
mod cache;
mod channel;
mod choice;
pub(crate) mod pages;
mod published;
mod queue;
mod stream;
mod ticket;
mod transaction;

use std::thread::JoinHandle;

use crate::spin::AdaptiveSpin;

pub use bytes::{copy as copy_bytes, own_caches};
pub use channel::{Channel, Statistics};
pub use pages::calibrate;
pub use published::{published, read_published};
pub use ticket::{CopyFailure, Ticket, TransactionState};
pub use transaction::{CopyLocation, CopyPiece, PieceError, Transaction, TransferParties};

/// How an engine is set up.
#[derive(Debug, Clone)]
pub struct CopyEngineOptions {
    /// Its channels; at least one.
    pub channels: usize,
    /// How long a channel without work looks for some before it sleeps.
    pub spin: AdaptiveSpin,
    /// Processors to pin the channels to, in turn; none lets the system choose.
    pub cpus: Vec<usize>,
}

impl Default for CopyEngineOptions {
    /// One channel that runs anywhere.
    fn default() -> Self {
        CopyEngineOptions { channels: 1, spin: AdaptiveSpin::default(), cpus: Vec::new() }
    }
}

/// Channels that copy. Dropping it ends them: what waits or is under way is aborted.
#[derive(Debug)]
pub struct CopyEngine {
    channels: Vec<Channel>,
    threads: Vec<JoinHandle<()>>,
}

impl CopyEngine {
    /// Starts the channels' threads, named after `name`.
    ///
    /// # Errors
    /// When the system has no threads left.
    pub fn start(name: &str, options: &CopyEngineOptions) -> std::io::Result<CopyEngine> {
        let mut engine = CopyEngine { channels: Vec::new(), threads: Vec::new() };
        for index in 0..options.channels.max(1) {
            let cpu = options.cpus.get(index % options.cpus.len().max(1)).copied();
            let name = format!("{name}-{index}");
            let (channel, thread) = Channel::start(name, options.spin.clone(), cpu)?;
            engine.channels.push(channel);
            engine.threads.push(thread);
        }
        Ok(engine)
    }

    /// The channels, in the order of their numbers.
    pub fn channels(&self) -> &[Channel] {
        &self.channels
    }

    /// The channel with the least bytes to copy.
    pub fn least_busy(&self) -> &Channel {
        let least = self.channels.iter().min_by_key(|channel| channel.backlog());
        least.expect("an engine has a channel")
    }
}

impl Drop for CopyEngine {
    fn drop(&mut self) {
        self.channels.iter().for_each(Channel::stop);
        for thread in self.threads.drain(..) {
            // A channel's thread does not panic; if it did, the panic hook has reported it.
            let _ = thread.join();
        }
    }
}

#[cfg(test)]
mod tests;
