//! The socket of a process' requests to its node, which answers them in their order. A request
//! whose answer tells nothing is not waited for: its answer is taken in before a later one's.

use std::sync::Arc;
use std::time::{Duration, Instant};

use rackbus_memory::packets::{MAX_PACKET, Packet};
use rackbus_memory::{AdaptiveSpin, HandleRef, Handles, PacketStream, StreamError};
use rackbus_segment::message::{Reply, SessionRequest, decode, encode};

use crate::session::AttachError;

/// How long the node may take for an answer: longer than it gives other nodes.
const ANSWER: Duration = Duration::from_secs(15);

/// Answers that may be owed. What was posted fits the socket, and a program that only posts waits
/// for its node at last.
const MOST_OWED: usize = 16;

/// The socket to the node for requests: one caller at a time sends and waits.
#[derive(Debug)]
pub(crate) struct RequestSocket {
    pub packets: Arc<dyn PacketStream>,
    buffer: Vec<u8>,
    spin: AdaptiveSpin,
    /// Answers to what was posted that have not been taken in.
    owed: usize,
}

impl RequestSocket {
    pub(crate) fn new(packets: Arc<dyn PacketStream>) -> RequestSocket {
        let (buffer, spin) = (vec![0; MAX_PACKET], AdaptiveSpin::new(1_000, 50_000));
        RequestSocket { packets, buffer, spin, owed: 0 }
    }

    /// Sends a request whose answer the caller does not need: that the node has done it, or that it
    /// had ended already. It comes before whatever is asked later.
    pub(crate) fn post(&mut self, request: &SessionRequest) -> Result<(), AttachError> {
        if self.owed == MOST_OWED {
            self.take_owed()?;
        }
        let request = encode(request);
        let owed = self.with_room(|packets| packets.post(&request))?;
        self.owed += usize::from(owed);
        Ok(())
    }

    /// Asks the node; what it answers, with what came beside it.
    pub(crate) fn call(
        &mut self,
        request: &SessionRequest,
        handles: &[HandleRef<'_>],
    ) -> Result<(Reply, Handles), AttachError> {
        let (reply, beside, lost) = self.ask(request, handles)?;
        if lost {
            // What was made is of no use without what came beside it.
            if let Some(end) = ending(&reply) {
                self.ask(&end, &[])?;
            }
            return Err(AttachError::NoDescriptors);
        }
        Ok((reply, beside))
    }

    fn ask(
        &mut self,
        request: &SessionRequest,
        handles: &[HandleRef<'_>],
    ) -> Result<(Reply, Handles, bool), AttachError> {
        let request = encode(request);
        self.with_room(|packets| packets.send(&request, handles))?;
        while self.owed > 0 {
            self.take_owed()?;
        }
        let packet = self.answer()?;
        let reply = self.buffer.get(..packet.length).and_then(decode);
        Ok((reply.ok_or(AttachError::Protocol)?, packet.handles, packet.lost))
    }

    /// Sends a request whose answer is taken by [`finish`](RequestSocket::finish), in the order of sending; until then nothing
    /// else is asked. A few at a time, as the socket has room for.
    pub(crate) fn begin(&mut self, request: &SessionRequest) -> Result<(), AttachError> {
        while self.owed > 0 {
            self.take_owed()?;
        }
        let request = encode(request);
        self.with_room(|packets| packets.send(&request, &[]))
    }

    /// Takes in the answer to what was [begun](RequestSocket::begin) first.
    pub(crate) fn finish(&mut self) -> Result<Reply, AttachError> {
        let packet = self.answer()?;
        self.buffer.get(..packet.length).and_then(decode).ok_or(AttachError::Protocol)
    }

    /// Nobody waits for the answers to so many requests that were begun.
    pub(crate) fn give_up(&mut self, begun: usize) {
        self.owed += begun;
    }

    /// Sends when the node has room for it: one that has none now is there all the same.
    fn with_room<T>(
        &mut self,
        send: impl Fn(&dyn PacketStream) -> Result<T, StreamError>,
    ) -> Result<T, AttachError> {
        let begun = Instant::now();
        loop {
            match send(&*self.packets) {
                Err(StreamError::TimedOut) if begun.elapsed() < ANSWER => {}
                sent => return sent.map_err(AttachError::Gone),
            }
            match self.owed {
                0 => std::thread::sleep(Duration::from_millis(1)),
                _ => self.take_owed()?,
            }
        }
    }

    /// Takes in an answer that is owed, whatever it says.
    fn take_owed(&mut self) -> Result<(), AttachError> {
        self.answer()?;
        self.owed -= 1;
        Ok(())
    }

    /// Takes in the next answer.
    fn answer(&mut self) -> Result<Packet, AttachError> {
        let deadline = Instant::now().checked_add(ANSWER);
        let packet = self.packets.receive(&mut self.buffer, &mut self.spin, deadline);
        let packet = packet.map_err(|cause| {
            // An answer that came later would be taken for another request's.
            self.packets.shut_down();
            AttachError::Gone(cause)
        })?;
        packet.handles.keep_room();
        Ok(packet)
    }
}

/// The request that ends what a reply tells of.
pub(crate) fn ending(reply: &Reply) -> Option<SessionRequest> {
    Some(match *reply {
        Reply::Created { segment, .. } => SessionRequest::Remove { segment },
        Reply::Connected(ref connected) => {
            SessionRequest::Disconnect { connection: connected.connection }
        }
        Reply::Interrupt { interrupt, .. } => SessionRequest::RemoveInterrupt { interrupt },
        Reply::Extent { extent, .. } => SessionRequest::Free { extent },
        Reply::Pages { connection, .. } => SessionRequest::Disconnect { connection },
        _ => return None,
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use rackbus_memory::Packets;
    use rackbus_segment::Handle;

    /// The content of answers that nobody needs does not matter: the next answer is the next request's.
    #[test]
    fn an_owed_answer_that_is_none_is_not_taken_for_the_next_one() {
        let (own, node) = Packets::pair().unwrap();
        let mut line = RequestSocket::new(Arc::new(own));
        let request = SessionRequest::Disconnect { connection: Handle(1) };
        line.post(&request).unwrap();
        node.send(&[0xff; 3], &[]).unwrap();
        node.send(&encode(&Reply::Done), &[]).unwrap();
        assert_eq!(line.call(&request, &[]).unwrap().0, Reply::Done);
        node.send(&encode(&Reply::Started { ticket: Handle(2) }), &[]).unwrap();
        let (reply, _) = line.call(&request, &[]).unwrap();
        assert_eq!(reply, Reply::Started { ticket: Handle(2) });
    }
}
