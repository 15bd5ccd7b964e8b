//! The socket of a process' requests to its node: each is answered before the next one is sent.

use std::os::fd::{BorrowedFd, OwnedFd};
use std::time::{Duration, Instant};

use rackbus_memory::descriptors::keep_room;
use rackbus_memory::packets::MAX_PACKET;
use rackbus_memory::{AdaptiveSpin, Packets};
use rackbus_segment::message::{Reply, Request, decode, encode};

use crate::session::AttachError;

/// How long the node may take for an answer: longer than it gives other nodes.
const ANSWER: Duration = Duration::from_secs(15);

/// The socket of requests.
#[derive(Debug)]
pub(crate) struct Line {
    pub packets: Packets,
    buffer: Vec<u8>,
    spin: AdaptiveSpin,
}

impl Line {
    pub(crate) fn new(packets: Packets) -> Line {
        Line { packets, buffer: vec![0; MAX_PACKET], spin: AdaptiveSpin::new(1_000, 50_000) }
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
