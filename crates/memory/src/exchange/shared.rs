//! An end of an exchange in memory that both sides have mapped.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use rackbus_fabric::Access;

use super::{ExchangeError, ExchangeHandles, ExchangeLayout, MESSAGE_BYTES, place, unfit};
use crate::doorbell::{DOORBELL_BYTES, Doorbell};
use crate::event::Event;
use crate::peer_event::PeerEvent;
use crate::region::{Region, SharedMemory};
use crate::ring::{Consumer, Producer, PushError};
use crate::slice::PinnedSlice;

/// One end of an exchange in shared memory.
#[derive(Debug)]
pub(super) struct SharedEnd {
    incoming: Consumer,
    outgoing: Producer,
    heard: Doorbell,
    rung: Doorbell,
    region: Arc<Region>,
    memory: OwnedFd,
    layout: ExchangeLayout,
    data: usize,
    /// Its doorbell: 0 for who answers.
    own: usize,
    /// Another process has this end now.
    passed_on: AtomicBool,
}

impl SharedEnd {
    /// Makes one, for the side that answers.
    ///
    /// # Errors
    /// [`ExchangeError`].
    pub(super) fn create(
        name: &str,
        layout: ExchangeLayout,
    ) -> Result<(SharedEnd, ExchangeHandles), ExchangeError> {
        let places = layout.places().ok_or_else(|| unfit(layout))?;
        let memory = SharedMemory::create(name, places.total as u64)?;
        let events = [Event::new()?, Event::new()?].map(PeerEvent::from);
        let copies = [events[0].try_clone()?, events[1].try_clone()?];
        let handles = ExchangeHandles { memory: memory.descriptor()?, events: copies };
        let (region, memory) = (memory.region().clone(), memory.descriptor()?);
        Ok((SharedEnd::with_region(region, memory, events, layout, 0)?, handles))
    }

    /// The other end, for the side that asks; also where another process had it before.
    ///
    /// # Errors
    /// [`ExchangeError`].
    pub(super) fn join(
        handles: ExchangeHandles,
        layout: ExchangeLayout,
    ) -> Result<SharedEnd, ExchangeError> {
        SharedEnd::of(handles, layout, 1)
    }

    /// The end of the side that answers, which another process had.
    ///
    /// # Errors
    /// [`ExchangeError`].
    pub(super) fn resume(
        handles: ExchangeHandles,
        layout: ExchangeLayout,
    ) -> Result<SharedEnd, ExchangeError> {
        SharedEnd::of(handles, layout, 0)
    }

    fn of(
        handles: ExchangeHandles,
        layout: ExchangeLayout,
        own: usize,
    ) -> Result<SharedEnd, ExchangeError> {
        let places = layout.places().ok_or_else(|| unfit(layout))?;
        let access = Access::READ | Access::WRITE;
        let region = Region::map(handles.memory.as_fd(), 0, places.total as u64, access)?;
        SharedEnd::with_region(Arc::new(region), handles.memory, handles.events, layout, own)
    }

    /// What another process needs to continue with this end, between two messages of this side. Dropping
    /// this end then ends nothing.
    ///
    /// # Errors
    /// When the process has no descriptors left.
    pub(super) fn pass_on(&self) -> std::io::Result<ExchangeHandles> {
        let [heard, rung] = [&self.heard, &self.rung].map(|bell| bell.event().try_clone());
        let events = if self.own == 0 { [heard?, rung?] } else { [rung?, heard?] };
        let memory = self.memory.try_clone()?;
        self.passed_on.store(true, Ordering::Relaxed);
        Ok(ExchangeHandles { memory, events })
    }

    /// Goes on here after all.
    pub(super) fn take_back(&mut self) {
        *self.passed_on.get_mut() = false;
    }

    /// The end that hears doorbell `own`: 0 for who answers.
    fn with_region(
        region: Arc<Region>,
        memory: OwnedFd,
        [first, second]: [PeerEvent; 2],
        layout: ExchangeLayout,
        own: usize,
    ) -> Result<SharedEnd, ExchangeError> {
        let parts = layout.places().and_then(|places| {
            let first = Doorbell::new(region.clone(), 0, first)?;
            let second = Doorbell::new(region.clone(), DOORBELL_BYTES, second)?;
            let (heard, rung) = if own == 0 { (first, second) } else { (second, first) };
            let incoming = Consumer::new(region.clone(), places.rings[own], places.ring)?;
            let outgoing = Producer::new(region.clone(), places.rings[1 - own], places.ring)?;
            Some((heard, rung, incoming, outgoing, places.data))
        });
        let (heard, rung, incoming, outgoing, data) = parts.ok_or_else(|| unfit(layout))?;
        let passed_on = AtomicBool::new(false);
        Ok(SharedEnd {
            incoming,
            outgoing,
            heard,
            rung,
            region,
            memory,
            layout,
            data,
            own,
            passed_on,
        })
    }

    /// Puts a message in, behind all others. The other side hears of it with the next
    /// [`ring`](SharedEnd::ring).
    ///
    /// # Errors
    /// [`PushError`], and nothing was put in.
    #[inline]
    pub(super) fn send(&mut self, message: &[u8]) -> Result<(), PushError> {
        self.outgoing.push(message)
    }

    /// Tells the other side to look.
    #[inline]
    pub(super) fn ring(&self) {
        self.rung.ring();
    }

    /// Takes the next message out, if there is one; its length.
    #[inline]
    pub(super) fn receive(&mut self, message: &mut [u8; MESSAGE_BYTES]) -> Option<usize> {
        self.incoming.pop(message)
    }

    /// Arranges that the next ring makes the descriptor ([`AsFd`]) readable; false when there is a
    /// message already, or nothing will come any more.
    pub(super) fn rest(&mut self) -> bool {
        self.heard.disarm();
        let armed = self.heard.arm(self.heard.count());
        // After it: what was sent before rings nobody.
        armed && self.incoming.is_empty()
    }

    /// The first `length` bytes of the place for data of `tag`; `None` when it has not so many.
    pub(super) fn data(&self, tag: u32, length: usize) -> Option<PinnedSlice> {
        place(&self.region, self.layout, self.data, tag, length)
    }

    /// Ends it for both sides.
    pub(super) fn close(&self) {
        self.heard.close();
        self.rung.close();
    }

    /// Whether either side ended it, or its memory is gone.
    #[inline]
    pub(super) fn is_closed(&self) -> bool {
        self.heard.is_closed()
    }
}

impl Drop for SharedEnd {
    fn drop(&mut self) {
        if !*self.passed_on.get_mut() {
            self.close();
        }
    }
}

impl AsFd for SharedEnd {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.heard.as_fd()
    }
}
