//! The conversations with the node, two for each process of the guest.

use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;

use rackbus_memory::doorbell::DOORBELL_BYTES;
use rackbus_memory::packets::{MAX_PACKET, Packet};
use rackbus_memory::{
    Access, AdaptiveSpin, Doorbell, Packets, PeerEvent, Region, SharedMemory, StreamError,
};
use rackbus_segment::guest::Place;
use rustix::fs::{FileType, OFlags};

use super::{Device, Held};
use crate::state::{Kind, Received};

/// Bytes of the page that proves that stores are seen on both sides.
const PAGE: u64 = 4096;

/// A session's sockets.
#[derive(Debug)]
pub(super) struct Conversation {
    calls: Arc<Packets>,
    events: Arc<Packets>,
    /// The node's end of the events, which goes along with the first request.
    theirs: Option<OwnedFd>,
}

impl Conversation {
    pub(super) fn send(&mut self, place: Place, message: &[u8]) -> Result<(), StreamError> {
        if place == Place::Events {
            return self.events.send(message, &[]);
        }
        let theirs = self.theirs.take();
        let beside: Vec<_> = theirs.iter().map(|fd| fd.as_fd()).collect();
        self.calls.send(message, &beside)
    }

    pub(super) fn shut_down(&self) {
        self.calls.shut_down();
        self.events.shut_down();
    }
}

/// What a descriptor of the node's is; `line` is the memory before it in the message.
fn take_in(fd: OwnedFd, line: Option<&Held>) -> (Kind, Held) {
    let other = (Kind::Other, Held::Other);
    let Ok(stat) = rustix::fs::fstat(&fd) else { return other };
    if FileType::from_raw_mode(stat.st_mode) == FileType::RegularFile {
        let write = rustix::fs::fcntl_getfl(&fd)
            .is_ok_and(|flags| flags.intersection(OFlags::RWMODE) == OFlags::RDWR);
        let kind = Kind::Memory { size: u64::try_from(stat.st_size).unwrap_or(0), write };
        return (kind, Held::Memory(Arc::new(fd)));
    }
    let Some(Held::Memory(line)) = line else { return other };
    let both = Access::READ | Access::WRITE;
    let region = Region::map(line.as_fd(), 0, DOORBELL_BYTES as u64, both);
    let bell = region.ok().zip(PeerEvent::new(fd).ok());
    match bell.and_then(|(region, event)| Doorbell::new(Arc::new(region), 0, event)) {
        Some(bell) => (Kind::Bell, Held::Bell(Arc::new(bell))),
        None => other,
    }
}

impl Device {
    /// Connects to the node, and hears what it says in a session until that ends, on threads of its own.
    pub(super) fn connect(self: &Arc<Self>, session: u64) {
        let device = self.clone();
        let talk = move || match device.reach(session) {
            Ok(Some((calls, events))) => device.converse(session, &calls, events),
            Ok(None) => {}
            Err(error) => {
                tracing::info!(%error, node = %device.node.display(), "no node for the guest");
                device.act(|state, _| state.connected(session, None).1);
            }
        };
        if let Err(error) = std::thread::Builder::new().name("session".into()).spawn(talk) {
            tracing::error!(%error, "a process of the guest was refused: no thread for it");
            self.act(|state, _| state.connected(session, None).1);
        }
    }

    /// The two sockets, unless the session is over already.
    fn reach(
        self: &Arc<Self>,
        session: u64,
    ) -> std::io::Result<Option<(Arc<Packets>, Arc<Packets>)>> {
        let calls = Arc::new(Packets::connect(&self.node)?);
        let (events, theirs) = Packets::pair()?;
        let events = Arc::new(events);
        let page = SharedMemory::reserve("rackbus proof", PAGE).map_err(std::io::Error::other)?;
        let mut inner = self.lock();
        let kind = Kind::Memory { size: PAGE, write: true };
        let (number, actions) = inner.state.connected(session, Some(kind));
        if let Some(number) = number {
            inner.held.insert(number, Held::Memory(Arc::new(page)));
            let theirs = Some(theirs.into());
            let (calls, events) = (calls.clone(), events.clone());
            inner.sessions.insert(session, Conversation { calls, events, theirs });
        }
        self.perform(inner, actions);
        Ok(number.map(|_| (calls, events)))
    }

    fn converse(self: &Arc<Self>, session: u64, calls: &Arc<Packets>, events: Arc<Packets>) {
        let device = self.clone();
        let heard = events.clone();
        let listen = move || device.hear(session, Place::Events, &heard);
        let listening = std::thread::Builder::new().name("session's events".into()).spawn(listen);
        if listening.is_ok() {
            self.hear(session, Place::Calls, calls);
        }
        calls.shut_down();
        events.shut_down();
    }

    /// Hears what the node says until it says nothing more: then the session is over.
    fn hear(self: &Arc<Self>, session: u64, place: Place, packets: &Packets) {
        let (mut buffer, mut spin) = (vec![0; MAX_PACKET], AdaptiveSpin::new(0, 20_000));
        while let Ok(packet) = packets.receive(&mut buffer, &mut spin, None) {
            let Packet { length, fds, lost } = packet;
            let Some(message) = buffer.get(..length) else { break };
            let mut taken: Vec<(Kind, Held)> = Vec::with_capacity(fds.len());
            for fd in fds {
                let it = take_in(fd, taken.last().map(|(_, held)| held));
                taken.push(it);
            }
            let objects = taken.iter().map(|(kind, _)| *kind).collect();
            let mut inner = self.lock();
            let (numbers, actions) =
                inner.state.received(session, place, Received { message, objects, lost });
            for (number, (_, held)) in numbers.into_iter().zip(taken) {
                if let Held::Bell(bell) = &held
                    && let Err(error) = self.bells.listen(number, bell)
                {
                    tracing::error!(%error, "an interrupt is heard late");
                }
                inner.held.insert(number, held);
            }
            self.perform(inner, actions);
        }
        self.act(|state, _| state.over(session));
    }
}
