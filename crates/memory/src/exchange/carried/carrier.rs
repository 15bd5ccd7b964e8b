//! What carries the messages of an exchange to another process.

use std::os::fd::BorrowedFd;

use super::CarriedSession;
use crate::exchange::lane::CarriedLane;
use crate::exchange::session::SessionSide;
use crate::stream::StreamError;

/// Carries bytes to another process and back, in order. Nothing waits.
pub trait Carrier: Send + std::fmt::Debug {
    /// Takes as many of `bytes` as can be sent before long; 0 when the other side has to take some before.
    ///
    /// # Errors
    /// [`StreamError`]; the connection is of no more use.
    fn send(&mut self, bytes: &[u8]) -> Result<usize, StreamError>;

    /// Sends what it has taken, as far as that goes now; true when nothing of it is left.
    ///
    /// # Errors
    /// As [`send`](Carrier::send).
    fn flush(&mut self) -> Result<bool, StreamError>;

    /// Receives what is there, into the beginning of `buffer`; 0 when there is nothing.
    ///
    /// # Errors
    /// [`StreamError::Closed`] when the other side [said](Carrier::finish) that nothing comes any more, and as
    /// [`send`](Carrier::send).
    fn receive(&mut self, buffer: &mut [u8]) -> Result<usize, StreamError>;

    /// Readable when something came, writable when something can be sent.
    fn socket(&self) -> BorrowedFd<'_>;

    /// Ends the connection in both directions. What is carried may go on by another one.
    fn shut_down(&self);

    /// The same, and tells the other side, as far as that goes now, that nothing continues.
    fn finish(&self) {
        self.shut_down();
    }
}

/// What carries the messages of an exchange: a connection, and the session that goes on by others.
#[derive(Debug)]
pub struct Carried {
    /// The connection that the session begins with.
    pub carrier: Box<dyn Carrier>,
    /// The session, to which others are given.
    pub session: CarriedSession,
    /// Which side of it this is.
    pub side: SessionSide,
    /// What moves data beside the connection, where both sides have one.
    pub lane: Option<CarriedLane>,
}
