//! Processes of this host: how they attach, and what becomes of them.

use std::os::fd::AsFd;
use std::sync::{Arc, PoisonError};

use rackbus_memory::packets::{MAX_PACKET, Packet};
use rackbus_memory::{AdaptiveSpin, Gate, GatePassage, Handles, PacketListener, Packets};
use rackbus_segment::SessionId;
use rackbus_segment::message::{Notice, Refusal, Reply, SessionRequest, decode, encode};
use rustix::process::getuid;

use super::copies::SessionCopies;
use super::devices::Borrowing;
use super::locks::BegunFlushes;
use super::outbox::{Letter, LetterQueue};
use super::{Segments, Session};
use crate::sequencer::essential_thread;

impl Segments {
    pub(super) fn listen(
        self: &Arc<Self>,
        listener: PacketListener,
        gate: Gate,
    ) -> std::io::Result<()> {
        let service = self.clone();
        let accept = move || {
            loop {
                let passage = gate.enter_when_readable(listener.as_fd());
                match listener.accept() {
                    Ok(packets) => service.welcome(packets, passage),
                    Err(error) => {
                        tracing::error!(%error, "no process can attach");
                        std::thread::sleep(std::time::Duration::from_millis(50));
                    }
                }
            }
        };
        essential_thread("segments", accept)
    }

    /// Only processes of the node's own user, or root's, are listened to: the kernel says whose
    /// they are.
    fn welcome(self: &Arc<Self>, packets: Packets, passage: GatePassage) {
        match packets.peer_user() {
            Ok(user) if user == getuid() || user.is_root() => {}
            Ok(user) => {
                tracing::warn!(user = user.as_raw(), "a process of another user was refused");
                return;
            }
            Err(error) => {
                tracing::warn!(%error, "the process that wants to attach cannot be identified");
                return;
            }
        }
        let service = self.clone();
        let serve = move || service.serve(packets, passage);
        if let Err(error) = std::thread::Builder::new().name("session".into()).spawn(serve) {
            tracing::error!(%error, "a process was refused: cannot start a thread for it");
        }
    }

    /// Who is let in is counted when `passage` ends: nothing of it could be passed on.
    fn serve(self: &Arc<Self>, packets: Packets, passage: GatePassage) {
        let calls = LetterQueue::new(Arc::new(packets));
        let id = {
            let mut state = self.lock();
            let Some(id) = state.numbers.next() else {
                tracing::error!(
                    "a process was refused: no session number is left, restart the node"
                );
                return;
            };
            state.sessions.insert(id, Session { calls: calls.clone(), events: None });
            id
        };
        drop(passage);
        let mut borrowing = self.devices.get().map(|devices| Borrowing::new(devices.clone(), id));
        let (mut begun, mut copies) = (BegunFlushes::default(), SessionCopies::default());
        let (mut buffer, mut spin) = (vec![0; MAX_PACKET], AdaptiveSpin::new(1_000, 50_000));
        while let Ok(packet) =
            calls.packets().receive(&mut buffer, &mut spin, None).and_then(Packet::whole)
        {
            let Some(request) = buffer.get(..packet.length).and_then(decode::<SessionRequest>)
            else {
                tracing::warn!(
                    session = id.0,
                    "a process sent a malformed request and is disconnected"
                );
                break;
            };
            if matches!(request, SessionRequest::Hello { .. })
                && !self.hear_events(id, packet.handles)
            {
                break;
            }
            if let SessionRequest::Flush { keeper } = request
                && !self.flush(id, keeper)
            {
                let refused = Reply::Refused(Refusal::NotResponding);
                calls.send(Letter { bytes: encode(&refused), handles: Vec::new() });
                continue;
            }
            if let SessionRequest::Lock { keeper, request } = &request
                && let Some(refusal) = self.before_lock(id, *keeper, request, &mut begun)
            {
                let refused = Reply::Refused(refusal);
                calls.send(Letter { bytes: encode(&refused), handles: Vec::new() });
                continue;
            }
            if let Some(letter) = self.answer_aside((id, &request), &mut borrowing, &mut copies) {
                calls.send(letter);
                continue;
            }
            self.ask(|directory, now, objects| directory.request(now, id, request, objects));
        }
        drop(borrowing);
        let mut state = self.lock();
        if let Some(session) = state.sessions.remove(&id) {
            session.shut_down();
        }
        drop(state);
        self.hiding.forget(id);
        self.channels.lock().unwrap_or_else(PoisonError::into_inner).end(id);
        self.ask(|directory, now, objects| directory.closed(now, id, objects));
    }

    /// The answer to what the directory does not decide: about devices, and about copies to other machines.
    fn answer_aside(
        &self,
        (id, request): (SessionId, &SessionRequest),
        borrowing: &mut Option<Borrowing>,
        copies: &mut SessionCopies,
    ) -> Option<Letter> {
        if !self.has_greeted(id) {
            return None;
        }
        let borrowed = borrowing.as_mut().and_then(|it| it.answer(request)).map(|it| (it, None));
        let (reply, beside) = borrowed.or_else(|| copies.answer(self, id, request))?;
        Some(Letter { bytes: encode(&reply), handles: beside.into_iter().collect() })
    }

    /// Whether the session has begun: with its hello came where it hears events.
    fn has_greeted(&self, id: SessionId) -> bool {
        self.lock().sessions.get(&id).is_some_and(|session| session.events.is_some())
    }

    /// Takes the socket for events that comes with a hello; false when there is none. Behind it may come the memory that
    /// the process' channels count in.
    fn hear_events(self: &Arc<Self>, id: SessionId, mut handles: Handles) -> bool {
        let packets = match handles.packets() {
            Ok(packets) => packets,
            Err(error) => {
                tracing::warn!(%error, "a process that begins a session is not listened to");
                return false;
            }
        };
        let counts = handles.memory(0).ok();
        let events = LetterQueue::new(Arc::new(packets));
        match self.lock().sessions.get_mut(&id) {
            Some(session) if session.events.is_none() => session.events = Some(events.clone()),
            _ => return false,
        }
        if let Some(memory) = counts {
            let mut channels = self.channels.lock().unwrap_or_else(PoisonError::into_inner);
            if let Err(error) = channels.begin(id, memory) {
                tracing::warn!(session = id.0, %error, "what a process copies is not counted");
            }
        }
        let service = self.clone();
        let listen = move || {
            let (mut buffer, mut spin) = (vec![0; MAX_PACKET], AdaptiveSpin::new(0, 20_000));
            while let Ok(packet) =
                events.packets().receive(&mut buffer, &mut spin, None).and_then(Packet::whole)
            {
                let Some(notice) = buffer.get(..packet.length).and_then(decode) else { break };
                if let Notice::Hidden { turn } = notice {
                    service.hiding.hidden(turn, id);
                    continue;
                }
                service.ask(|directory, now, objects| directory.noticed(now, id, notice, objects));
            }
        };
        std::thread::Builder::new().name("session's notices".into()).spawn(listen).is_ok()
    }
}
