//! The front: a BAR whose bytes another node has.

use std::os::fd::{BorrowedFd, OwnedFd};
use std::time::{Duration, Instant};

use rackbus_memory::{Carried, Event, ExchangeError, InheritedEnd, ticks};
use rackbus_pci::{
    Bus, Function, FunctionInfo, ModelState, Operations, ResetKind, RestoreError, SaveError, Work,
};

use super::super::CLASS;
use super::super::accesses::{AccessCounts, AccessKind};
use super::super::function::{Described, MemoryState, VERSION, info};
use super::{Answer, Ask, LAYOUT, TAG, kind};
use crate::class::FrontError;
use crate::front_exchange::FrontExchange;
use crate::lost::Lost;

/// How long an access waits for its answer before the other node counts as lost. A user cannot be told in any other
/// way, and waits meanwhile.
const PATIENCE: Duration = Duration::from_secs(5);
/// Between two looks whether the other node is lost.
const LOOK: Duration = Duration::from_millis(50);

/// Memory that another node has, as a function.
#[derive(Debug)]
pub struct RemoteMemory {
    info: FunctionInfo,
    described: Described,
    exchange: FrontExchange,
    accesses: AccessCounts,
}

impl RemoteMemory {
    /// The front of what another node described, whose accesses `carried` carries.
    ///
    /// # Errors
    /// [`FrontError`].
    pub fn carried(
        description: &str,
        carried: Carried,
        lost: Lost,
    ) -> Result<RemoteMemory, FrontError> {
        let exchange = |lost| FrontExchange::carried("memory-front", carried, LAYOUT, lost);
        RemoteMemory::with_exchange(description, || exchange(lost))
    }

    /// The same where an earlier life of it is gone on with, which is restored next.
    ///
    /// # Errors
    /// As [`carried`](RemoteMemory::carried).
    pub fn again(
        description: &str,
        end: InheritedEnd,
        lost: Lost,
    ) -> Result<RemoteMemory, FrontError> {
        RemoteMemory::with_exchange(description, || FrontExchange::again(end, LAYOUT, lost))
    }

    fn with_exchange(
        description: &str,
        exchange: impl FnOnce() -> Result<FrontExchange, ExchangeError>,
    ) -> Result<RemoteMemory, FrontError> {
        let described = Described::read(description)?;
        Ok(RemoteMemory::over(described, exchange()?))
    }

    /// Over an exchange with the node that has what is described.
    pub(super) fn over(described: Described, exchange: FrontExchange) -> RemoteMemory {
        let accesses = AccessCounts::default();
        RemoteMemory { info: info(&described, None), described, exchange, accesses }
    }

    /// Asks and waits; whether it was done.
    fn ask(&mut self, kind: u8, offset: u64, length: usize) -> bool {
        if self.exchange.is_lost() || self.exchange.is_untold() {
            return false;
        }
        let (offset, bytes) = (offset.into(), (length as u32).into());
        let data = (kind == kind::WRITE).then_some((TAG, length));
        self.exchange.send(&Ask { offset, length: bytes, kind, spare: [0; 3] }, data);
        self.exchange.ring();
        let begun = Instant::now();
        loop {
            if let Some(answer) = self.exchange.receive::<Answer>() {
                return answer.done.get() == 1;
            }
            if self.exchange.is_lost() {
                return false;
            }
            if begun.elapsed() > PATIENCE {
                tracing::warn!(
                    "the node that has the memory of a function does not answer; it counts as lost"
                );
                self.exchange.give_up();
                self.exchange.close();
                return false;
            }
            if self.exchange.rest() {
                Event::wait_any(&[self.exchange.as_fd()], Some(LOOK.as_nanos() as u64));
            }
        }
    }
}

impl Function for RemoteMemory {
    fn info(&self) -> &FunctionInfo {
        &self.info
    }

    fn operations(&self) -> Operations {
        self.accesses.operations()
    }

    fn bar_read(&mut self, _bus: &Bus<'_>, _bar: u8, offset: u64, data: &mut [u8]) {
        let (begun, length, mut all_done) = (ticks::now(), data.len(), true);
        for (at, part) in
            (offset..).step_by(LAYOUT.data_bytes).zip(data.chunks_mut(LAYOUT.data_bytes))
        {
            let done = self.ask(kind::READ, at, part.len());
            match self.exchange.data(TAG, part.len()).filter(|_| done) {
                Some(place) => {
                    place.get().copy_to(part);
                }
                None => {
                    part.fill(0xff);
                    all_done = false;
                }
            }
        }
        self.accesses.count(AccessKind::Read, length, all_done, begun);
    }

    fn bar_write(&mut self, _bus: &Bus<'_>, _bar: u8, offset: u64, data: &[u8]) {
        let begun = ticks::now();
        let mut parts = (offset..).step_by(LAYOUT.data_bytes).zip(data.chunks(LAYOUT.data_bytes));
        let all_done = parts.all(|(at, part)| {
            if let Some(place) = self.exchange.data(TAG, part.len()) {
                place.get().copy_from(part);
            }
            self.ask(kind::WRITE, at, part.len())
        });
        if !all_done {
            tracing::error!("a store into memory of another machine was lost");
        }
        self.accesses.count(AccessKind::Write, data.len(), all_done, begun);
    }

    /// Memory keeps its content when it is reset; it has no other state.
    fn reset(&mut self, _bus: &Bus<'_>, _kind: ResetKind) {}

    fn poll(&mut self, _bus: &Bus<'_>) -> Work {
        // An answer that nobody waits for is none that there can be.
        if self.exchange.receive::<Answer>().is_some() {
            self.exchange.break_off();
        }
        // Which ends the conversation, too.
        self.exchange.is_lost();
        Work::Asleep(None)
    }

    fn park(&mut self, _bus: &Bus<'_>) -> bool {
        let quiet = self.exchange.rest();
        quiet || self.exchange.is_lost() || self.exchange.is_untold()
    }

    fn wake_fd(&self) -> Option<BorrowedFd<'_>> {
        self.exchange.wake_fd()
    }

    fn quiesce(&mut self, _bus: &Bus<'_>) {}

    fn save(&mut self, _bus: &Bus<'_>) -> Result<(ModelState, Vec<OwnedFd>), SaveError> {
        let files = self.exchange.pass_on()?;
        let state = MemoryState::of(&self.described);
        Ok((ModelState::new(CLASS, VERSION, &state)?, files))
    }

    fn take_back(&mut self) {
        self.exchange.take_back();
    }

    fn restore(&mut self, _bus: &Bus<'_>, state: &ModelState) -> Result<(), RestoreError> {
        let state: MemoryState = state.read(CLASS, VERSION)?;
        state.is_of(&self.described)?;
        self.exchange.set_told();
        Ok(())
    }
}
