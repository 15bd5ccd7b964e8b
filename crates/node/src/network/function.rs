//! The port of a function, which the function's engine drives: a queue of the network that gives up what nobody takes.

use std::os::fd::BorrowedFd;
use std::sync::Arc;

use rackbus_memory::DmaSlice;
use rackbus_net::{Cause, Frame, MacAddress, NetworkPort, Offload, PortQueue, SendOutcome};

use super::Shared;

/// The port of a function; it is closed when this is dropped.
pub(super) struct FunctionPort {
    port_queue: PortQueue,
    /// Its function takes frames.
    attended: bool,
    station: usize,
    shared: Arc<Shared>,
}

/// Frames that are given up at once, at most: what comes meanwhile is given up later.
const GIVEN_UP: usize = 4096;

impl FunctionPort {
    /// The port of `station`, whose queue this is.
    pub(super) fn new(port_queue: PortQueue, station: usize, shared: Arc<Shared>) -> FunctionPort {
        FunctionPort { port_queue, attended: false, station, shared }
    }

    /// Drops what has come, for nobody takes it. Rings that have ended go with that.
    fn give_up(&mut self) {
        for _ in 0..GIVEN_UP {
            if self.port_queue.next().is_none() {
                break;
            }
            self.port_queue.consume();
            self.port_queue.handle().counters().drops.count(Cause::Down);
        }
    }
}

impl Drop for FunctionPort {
    fn drop(&mut self) {
        self.shared.close_port(self.station);
    }
}

impl NetworkPort for FunctionPort {
    fn mac(&self) -> MacAddress {
        self.port_queue.mac()
    }

    fn mtu(&self) -> u16 {
        self.port_queue.mtu()
    }

    fn is_up(&self) -> bool {
        self.port_queue.is_up()
    }

    fn attend(&mut self, on: bool) {
        self.attended = on;
        // What came before is not for who attends now.
        self.give_up();
    }

    fn send(&mut self, offload: Offload, parts: &[DmaSlice<'_>]) -> SendOutcome {
        self.port_queue.send(offload, parts)
    }

    fn flush(&mut self) {
        self.port_queue.flush();
    }

    fn next(&mut self) -> Option<Frame<'_>> {
        self.port_queue.next()
    }

    fn consume(&mut self) {
        self.port_queue.consume();
    }

    fn park(&mut self) -> bool {
        if !self.attended {
            self.give_up();
        }
        self.port_queue.park()
    }

    fn unpark(&mut self) {
        self.port_queue.unpark();
    }

    fn wake_fd(&self) -> BorrowedFd<'_> {
        self.port_queue.wake_fd()
    }
}
