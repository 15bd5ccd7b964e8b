//! A link to an owner's node that says that it is on another machine, and is the test's.

use std::os::unix::net::UnixStream;
use std::sync::{Arc, Mutex};
use std::time::Instant;

use rackbus_link::{Connect, Conversation, Hello, LinkError};
use rackbus_memory::packets::{MAX_PACKET, Packet};
use rackbus_memory::{
    AdaptiveSpin, HandleRef, Handles, PacketStream, Packets, Stream, StreamError,
};
use rackbus_segment::message::{
    CarriedMessage, ConnectorMessage, OwnerMessage, PeerReply, Question, StandIn, decode, encode,
};

/// What an owner says to a question.
type Answer = fn(&Question) -> Option<(PeerReply, Vec<StandIn>)>;

/// Answers as it is told to, and tells that there is nothing in the memory of its segments.
pub struct Elsewhere {
    answer: Answer,
    /// What it was asked.
    asked: Arc<Mutex<Vec<ConnectorMessage>>>,
}

impl Elsewhere {
    pub fn new(answer: Answer) -> Arc<Elsewhere> {
        Arc::new(Elsewhere { answer, asked: Arc::default() })
    }

    pub fn asked(&self) -> Vec<ConnectorMessage> {
        self.asked.lock().unwrap().clone()
    }
}

impl Connect for Elsewhere {
    fn address(&self, host: &str) -> String {
        host.to_owned()
    }

    fn connect(&self, _: &str, _: &Hello) -> Result<Arc<dyn Conversation>, LinkError> {
        let (ours, theirs) = Packets::pair().unwrap();
        let (answer, asked) = (self.answer, self.asked.clone());
        std::thread::spawn(move || be_owner(&theirs, answer, &asked));
        let (stream, _) = UnixStream::pair().unwrap();
        Ok(Arc::new(Carried { stream, packets: Arc::new(Far(ours)) }))
    }
}

/// Hears a connector's node until that is gone.
fn be_owner(packets: &Packets, answer: Answer, asked: &Mutex<Vec<ConnectorMessage>>) {
    let (mut buffer, mut spin) = (vec![0; MAX_PACKET], AdaptiveSpin::default());
    let send = |carried: &CarriedMessage<'_>| {
        // Whoever is gone is noticed by receiving.
        let _ = packets.send(&encode(carried), &[]);
    };
    while let Ok(packet) = packets.receive(&mut buffer, &mut spin, None) {
        let heard = decode(&buffer[..packet.length]).expect("a message of this protocol");
        let CarriedMessage::Said { message, .. } = heard else { continue };
        let ask: ConnectorMessage = decode(&message).expect("a connector's message");
        asked.lock().unwrap().push(ask.clone());
        let ConnectorMessage::Question { request, connection, what } = ask else { continue };
        let Some((reply, given)) = answer(&what) else { continue };
        let memory = matches!(given[..], [StandIn::Memory { .. }]);
        let tell = encode(&OwnerMessage::Answer { request, answer: Ok(reply) });
        let given = (!given.is_empty()).then_some((connection, given));
        send(&CarriedMessage::Said { message: tell.into(), given });
        if memory {
            let (runs, data) = (Vec::new(), Vec::new().into());
            let (batch, last, held) = (1, true, false);
            send(&CarriedMessage::Stores { connection, batch, last, held, runs, data });
        }
    }
}

/// Packets that no memory goes along with.
#[derive(Debug)]
struct Far(Packets);

impl PacketStream for Far {
    fn send(&self, message: &[u8], handles: &[HandleRef<'_>]) -> Result<(), StreamError> {
        assert!(handles.is_empty(), "a handle for another machine");
        PacketStream::send(&self.0, message, handles)
    }

    fn receive(
        &self,
        buffer: &mut [u8],
        spin: &mut AdaptiveSpin,
        deadline: Option<Instant>,
    ) -> Result<Packet, StreamError> {
        PacketStream::receive(&self.0, buffer, spin, deadline)
    }

    fn wait_sendable(&self) {
        PacketStream::wait_sendable(&self.0);
    }

    fn shut_down(&self) {
        PacketStream::shut_down(&self.0);
    }

    fn passes_memory(&self) -> bool {
        false
    }
}

/// A conversation that is one of packets already.
struct Carried {
    stream: UnixStream,
    packets: Arc<Far>,
}

impl Conversation for Carried {
    fn offer_packets(&self) -> Result<Arc<dyn PacketStream>, StreamError> {
        Ok(self.packets.clone())
    }

    fn take_packets(&self) -> Result<Arc<dyn PacketStream>, StreamError> {
        Err(StreamError::Closed)
    }
}

impl Stream for Carried {
    fn send(&self, parts: &[&[u8]], handles: &[HandleRef<'_>]) -> Result<(), StreamError> {
        self.stream.send(parts, handles)
    }

    fn receive(&self, buffer: &mut [u8], handles: &mut Handles) -> Result<(), StreamError> {
        self.stream.receive(buffer, handles)
    }

    fn wait_closed(&self) {
        self.stream.wait_closed();
    }

    fn is_closed(&self) -> bool {
        self.stream.is_closed()
    }

    fn shut_down(&self) {
        Stream::shut_down(&self.stream);
    }
}
