//! The socket of a process' requests to its node, which answers them in their order. A request
//! whose answer tells nothing is not waited for: its answer is taken in before a later one's.

use std::os::fd::{BorrowedFd, OwnedFd};
use std::time::{Duration, Instant};

use rackbus_memory::descriptors::keep_room;
use rackbus_memory::packets::MAX_PACKET;
use rackbus_memory::{AdaptiveSpin, Packets};
use rackbus_segment::message::{Reply, Request, decode, encode};

use crate::session::AttachError;

/// How long the node may take for an answer: longer than it gives other nodes.
const ANSWER: Duration = Duration::from_secs(15);

/// Answers that may be owed. What was posted fits the socket, and a program that only posts waits
/// for its node at last.
const MOST_OWED: usize = 16;

/// The socket of requests.
#[derive(Debug)]
pub(crate) struct Line {
    pub packets: Packets,
    buffer: Vec<u8>,
    spin: AdaptiveSpin,
    /// Answers to what was posted that have not been taken in.
    owed: usize,
}

impl Line {
    pub(crate) fn new(packets: Packets) -> Line {
        let (buffer, spin) = (vec![0; MAX_PACKET], AdaptiveSpin::new(1_000, 50_000));
        Line { packets, buffer, spin, owed: 0 }
    }

    /// Sends a request whose answer the caller does not need: that the node has done it, or that it
    /// had ended already. It comes before whatever is asked later.
    pub(crate) fn post(&mut self, request: &Request) -> Result<(), AttachError> {
        if self.owed == MOST_OWED {
            self.answer()?;
            self.owed -= 1;
        }
        self.packets.send(&encode(request), &[]).map_err(AttachError::Gone)?;
        self.owed += 1;
        Ok(())
    }

    /// Asks the node; what it answers, with the descriptors beside it.
    pub(crate) fn call(
        &mut self,
        request: &Request,
        fds: &[BorrowedFd<'_>],
    ) -> Result<(Reply, Vec<OwnedFd>), AttachError> {
        let (reply, fds, lost) = self.ask(request, fds)?;
        if lost {
            // What was made is of no use without what came beside it.
            if let Some(end) = ending(&reply) {
                self.ask(&end, &[])?;
            }
            return Err(AttachError::NoDescriptors);
        }
        Ok((reply, fds))
    }

    fn ask(
        &mut self,
        request: &Request,
        fds: &[BorrowedFd<'_>],
    ) -> Result<(Reply, Vec<OwnedFd>, bool), AttachError> {
        self.packets.send(&encode(request), fds).map_err(AttachError::Gone)?;
        while self.owed > 0 {
            self.answer()?;
            self.owed -= 1;
        }
        self.answer()
    }

    /// Takes in the next answer; with its descriptors, and whether some were lost.
    fn answer(&mut self) -> Result<(Reply, Vec<OwnedFd>, bool), AttachError> {
        let deadline = Instant::now().checked_add(ANSWER);
        let packet = match self.packets.receive(&mut self.buffer, &mut self.spin, deadline) {
            Ok(packet) => packet,
            Err(cause) => {
                // An answer that came later would be taken for another request's.
                self.packets.shut_down();
                return Err(AttachError::Gone(cause));
            }
        };
        packet.fds.iter().for_each(keep_room);
        let reply = self.buffer.get(..packet.length).and_then(decode);
        Ok((reply.ok_or(AttachError::Protocol)?, packet.fds, packet.lost))
    }
}

/// The request that ends what a reply tells of.
fn ending(reply: &Reply) -> Option<Request> {
    Some(match *reply {
        Reply::Created { segment, .. } => Request::Remove { segment },
        Reply::Connected(ref connected) => Request::Disconnect { connection: connected.connection },
        Reply::Interrupt { interrupt, .. } => Request::RemoveInterrupt { interrupt },
        Reply::Extent { extent, .. } => Request::Free { extent },
        Reply::Pages { connection, .. } => Request::Disconnect { connection },
        _ => return None,
    })
}
