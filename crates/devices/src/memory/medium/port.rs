//! The end that has the bytes. The front is hostile: a question is copied out once and checked.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use rackbus_memory::exchange::MESSAGE_BYTES;
use rackbus_memory::exchange::session::SessionSide;
use rackbus_memory::{Carried, Exchange, ExchangeError, InheritedEnd};
use rackbus_pci::{Bus, Health, Work};
use zerocopy::{FromBytes, IntoBytes};

use super::super::span::MemorySpan;
use super::{Answer, Ask, LAYOUT, TAG, kind};

/// Questions that are answered in one poll.
const TURN: usize = 16;

/// Serves memory to one front.
#[derive(Debug)]
pub struct MemoryPort {
    exchange: Exchange,
    /// It was saved, and nothing happened since: somebody else continues with the exchange.
    saved: bool,
    buffer: Vec<u8>,
}

impl MemoryPort {
    /// To a front whose accesses `carried` carries.
    ///
    /// # Errors
    /// When memory or descriptors cannot be had.
    pub fn carried(carried: Carried) -> Result<MemoryPort, ExchangeError> {
        Ok(MemoryPort::over(Exchange::carried("memory-medium", carried, LAYOUT)?))
    }

    /// Goes on where an earlier one was saved.
    ///
    /// # Errors
    /// As [`carried`](MemoryPort::carried).
    pub fn again(end: InheritedEnd) -> Result<MemoryPort, ExchangeError> {
        let mut port = MemoryPort::over(Exchange::again(SessionSide::Answers, end, LAYOUT)?);
        // The front may rest until it hears of what was answered here.
        port.exchange.ring();
        Ok(port)
    }

    pub(super) fn over(exchange: Exchange) -> MemoryPort {
        MemoryPort { exchange, saved: false, buffer: vec![0; LAYOUT.data_bytes] }
    }

    /// What another process needs to go on with it.
    ///
    /// # Errors
    /// When there are no descriptors left.
    pub fn save(&mut self) -> std::io::Result<Vec<OwnedFd>> {
        self.exchange.ring();
        let files = self.exchange.pass_on()?;
        self.saved = true;
        Ok(files)
    }

    /// Goes on here after all with what was [saved](MemoryPort::save).
    pub fn take_back(&mut self) {
        self.saved = false;
        self.exchange.take_back();
    }

    /// Answers what is asked.
    pub fn poll(&mut self, span: &MemorySpan, health: &Health, bus: &Bus<'_>) -> Work {
        self.saved = false;
        let mut message = [0; MESSAGE_BYTES];
        for nth in 0..TURN {
            let received = self.exchange.receive(&mut message);
            let Some(length) = received.filter(|_| !self.exchange.is_closed()) else {
                return self.after(nth);
            };
            bus.user.before_access();
            if bus.dma.revoker().is_revoked() {
                // It was given up while this host stood still: what it asked for is not done.
                self.exchange.close();
                return Work::Asleep(None);
            }
            let ask = message.get(..length).and_then(|bytes| Ask::read_from_bytes(bytes).ok());
            if !ask.is_some_and(|ask| self.take(span, health, &ask)) {
                tracing::warn!("a front violates the protocol and is disconnected");
                self.exchange.close();
            }
        }
        self.after(TURN)
    }

    fn after(&mut self, done: usize) -> Work {
        if done > 0 {
            self.exchange.ring();
            return Work::Done;
        }
        match self.exchange.is_closed() {
            true => Work::Asleep(None),
            false => Work::Idle,
        }
    }

    /// Does what is asked; false when it is nothing that there can be.
    fn take(&mut self, span: &MemorySpan, health: &Health, ask: &Ask) -> bool {
        let (offset, length) = (ask.offset.get(), ask.length.get() as usize);
        let is_inside = offset.checked_add(length as u64).is_some_and(|end| end <= span.length());
        let Some(place) = self.exchange.data(TAG, length).filter(|_| is_inside && length > 0)
        else {
            return false;
        };
        let bytes = &mut self.buffer[..length];
        let done = match ask.kind {
            kind::READ => {
                let done = span.read(offset, bytes);
                place.get().copy_from(bytes);
                done
            }
            kind::WRITE => {
                place.get().copy_to(bytes);
                span.write(offset, bytes)
            }
            _ => return false,
        };
        if let Err(error) = &done {
            tracing::error!(%error, "an access to memory of a front on another machine failed");
            if ask.kind == kind::WRITE {
                health.fail(&format!("a store was lost: {error}"));
            }
        }
        let answer = Answer { done: u32::from(done.is_ok()).into() };
        let data = (ask.kind == kind::READ && done.is_ok()).then_some((TAG, length));
        self.exchange.send(answer.as_bytes(), data).is_ok()
    }

    /// Ends it: the front hears no more.
    pub fn end(&mut self) {
        if !self.saved {
            self.exchange.close();
        }
    }

    /// Whoever polls is about to sleep; false when there is something to do.
    pub fn rest(&mut self) -> bool {
        self.exchange.rest() || self.exchange.is_closed()
    }

    /// Readable when there is something to do.
    pub fn wake_fd(&self) -> Option<BorrowedFd<'_>> {
        (!self.exchange.is_closed()).then(|| self.exchange.as_fd())
    }
}
