//! A front's end of the exchange with the node that has its medium: what every class does in the same way when it
//! sends operations, takes answers, and finds that nobody answers any more.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use rackbus_memory::exchange::session::SessionSide;
use rackbus_memory::exchange::{ExchangeLayout, MESSAGE_BYTES};
use rackbus_memory::{
    Carried, Exchange, ExchangeError, ExchangeHandles, InheritedEnd, PinnedSlice,
};
use zerocopy::{FromBytes, Immutable, IntoBytes};

use crate::lost::Lost;

/// The exchange, and whether the node at its other end still serves the medium.
#[derive(Debug)]
pub(crate) struct FrontExchange {
    exchange: Exchange,
    lost: Lost,
    /// Sent, and not rung for.
    unrung: bool,
    /// What an earlier life left is still to be told. Until then its answers are left where they are.
    untold: bool,
}

impl FrontExchange {
    /// Over what the other node offered.
    ///
    /// # Errors
    /// [`ExchangeError`] when that is not fit.
    pub(crate) fn join(
        handles: ExchangeHandles,
        layout: ExchangeLayout,
        lost: Lost,
    ) -> Result<FrontExchange, ExchangeError> {
        Ok(FrontExchange::new(Exchange::join(handles, layout)?, lost))
    }

    /// Over what `carried` carries; `name` names it in the log.
    ///
    /// # Errors
    /// [`ExchangeError`] when there is no memory for it.
    pub(crate) fn carried(
        name: &'static str,
        carried: Carried,
        layout: ExchangeLayout,
        lost: Lost,
    ) -> Result<FrontExchange, ExchangeError> {
        Ok(FrontExchange::new(Exchange::carried(name, carried, layout)?, lost))
    }

    fn new(exchange: Exchange, lost: Lost) -> FrontExchange {
        FrontExchange { exchange, lost, unrung: false, untold: false }
    }

    /// Where an earlier life of the front is gone on with: nothing is received until the front
    /// [has been told](FrontExchange::set_told) what that left.
    ///
    /// # Errors
    /// As [`join`](FrontExchange::join).
    pub(crate) fn again(
        end: InheritedEnd,
        layout: ExchangeLayout,
        lost: Lost,
    ) -> Result<FrontExchange, ExchangeError> {
        let exchange = Exchange::again(SessionSide::Asks, end, layout)?;
        Ok(FrontExchange { untold: true, ..FrontExchange::new(exchange, lost) })
    }

    /// The front knows what an earlier life left.
    pub(crate) fn set_told(&mut self) {
        self.untold = false;
    }

    /// Whether the front is still to be told what an earlier life left.
    #[inline]
    pub(crate) fn is_untold(&self) -> bool {
        self.untold
    }

    /// Sends a question, with so many bytes of data of a tag, if any. The other node hears of it with the next
    /// [`ring`](FrontExchange::ring).
    #[inline]
    pub(crate) fn send(&mut self, ask: &(impl IntoBytes + Immutable), data: Option<(u32, usize)>) {
        // There is room for one question of each tag, unless the other side spoilt the ring: then no answer comes,
        // and the conversation has ended.
        if self.exchange.send(ask.as_bytes(), data).is_err() {
            self.exchange.close();
        }
        self.unrung = true;
    }

    /// Tells the other node of what was sent since the last time.
    #[inline]
    pub(crate) fn ring(&mut self) {
        if std::mem::take(&mut self.unrung) {
            self.exchange.ring();
        }
    }

    /// The next answer, if there is one. One that is none ends the exchange.
    #[inline]
    pub(crate) fn receive<A: FromBytes>(&mut self) -> Option<A> {
        if self.untold {
            return None;
        }
        let mut message = [0; MESSAGE_BYTES];
        let length = self.exchange.receive(&mut message)?;
        let answer = message.get(..length).and_then(|bytes| A::read_from_bytes(bytes).ok());
        if answer.is_none() {
            self.break_off();
        }
        answer
    }

    /// Ends the exchange: the other node sent what it must not. Its data could be anybody's.
    pub(crate) fn break_off(&self) {
        tracing::warn!("the medium's node violates the protocol and is disconnected");
        self.exchange.close();
    }

    /// Whether nobody answers any more. Who ends the exchange is lost, whether or not the node lives.
    pub(crate) fn is_lost(&self) -> bool {
        if self.exchange.is_closed() && !self.lost.get() {
            tracing::warn!("the medium is no longer served, although its node is up");
            self.lost.give_up();
        }
        self.lost.get()
    }

    /// Counts the node as lost, and ends the conversation with it.
    pub(crate) fn give_up(&self) {
        self.lost.give_up();
    }

    /// Ends the exchange for both sides: nothing is sent from its places for data any more.
    pub(crate) fn close(&self) {
        if !self.exchange.is_closed() {
            self.exchange.close();
        }
    }

    /// The first `length` bytes of the place for data of `tag`; `None` when it has not so many.
    #[inline]
    pub(crate) fn data(&self, tag: u32, length: usize) -> Option<PinnedSlice> {
        self.exchange.data(tag, length)
    }

    /// As [`Exchange::rest`]: false when there is a message already.
    pub(crate) fn rest(&mut self) -> bool {
        self.exchange.rest()
    }

    /// What another process needs to go on with this end, as [`Exchange::pass_on`].
    ///
    /// # Errors
    /// When there are no descriptors left.
    pub(crate) fn pass_on(&mut self) -> std::io::Result<Vec<OwnedFd>> {
        self.exchange.pass_on()
    }

    /// Goes on here after all with what was [passed on](FrontExchange::pass_on).
    pub(crate) fn take_back(&mut self) {
        self.exchange.take_back();
    }

    /// Readable when there is an answer. None once the node is lost: it has the event, too, and may have made one
    /// that stays readable.
    pub(crate) fn wake_fd(&self) -> Option<BorrowedFd<'_>> {
        (!self.lost.get()).then(|| self.exchange.as_fd())
    }

    /// The event of the exchange, to be waited for.
    pub(crate) fn as_fd(&self) -> BorrowedFd<'_> {
        self.exchange.as_fd()
    }
}
