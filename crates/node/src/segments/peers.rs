//! Other hosts' nodes: the conversation in which this host's processes connect to theirs, and the
//! one in which theirs connect to this host's.

use std::os::fd::AsFd;
use std::sync::Arc;

use rackbus_link::{Hello, Incoming, LinkError, Service, VERSION};
use rackbus_memory::packets::{MAX_PACKET, Packet};
use rackbus_memory::{AdaptiveSpin, Packets, StreamError};
use rackbus_segment::NodeId;
use rackbus_segment::message::decode;

use super::outbox::Outbox;
use super::{Owner, Segments, State};

impl Segments {
    /// Connects to an owner's node on a thread of its own, which then hears what it says.
    pub(super) fn dial(self: &Arc<Self>, state: &State, node: NodeId) {
        let name = state.hosts.iter().find(|(id, _)| *id == node).map(|(_, name)| name.clone());
        let service = self.clone();
        let talk = move || {
            let Some(name) = name else { return };
            match service.reach(&name) {
                Ok(outbox) => service.hear_owner(node, outbox),
                Err(error) => tracing::info!(%error, "segments of another host are out of reach"),
            }
            service.owner_lost(node);
        };
        if let Err(error) = std::thread::Builder::new().name("owner".into()).spawn(talk) {
            tracing::error!(%error, "another host is out of reach: no thread for it");
        }
    }

    fn reach(&self, name: &str) -> Result<Arc<Outbox>, LinkError> {
        let hello = Hello {
            version: VERSION,
            rack: self.rack.clone(),
            from: self.host.clone(),
            to: name.to_owned(),
            service: Service::Segments,
        };
        let address = self.run_dir.join(name).join("link.sock").display().to_string();
        let stream = self.link.connect(&address, &hello)?;
        let broken = |cause| LinkError::Broken { peer: name.to_owned(), cause };
        let (ours, theirs) =
            Packets::pair().map_err(|_| broken(StreamError::TooManyDescriptors))?;
        stream.send(&[&[0]], &[theirs.as_fd()]).map_err(broken)?;
        Ok(Outbox::new(ours))
    }

    /// Says what waits to be said, and hears until the node is gone.
    fn hear_owner(self: &Arc<Self>, node: NodeId, outbox: Arc<Outbox>) {
        {
            // Under the lock, so that nothing that is said now comes before what waits.
            let mut state = self.lock();
            let before = state.owners.insert(node, Owner::Here(outbox.clone()));
            if let Some(Owner::Dialling(waiting)) = before {
                waiting.into_iter().for_each(|letter| outbox.send(letter));
            }
        }
        let (mut buffer, mut spin) = (vec![0; MAX_PACKET], AdaptiveSpin::new(0, 50_000));
        while let Ok(packet) =
            outbox.packets().receive(&mut buffer, &mut spin, None).and_then(Packet::whole)
        {
            let Some(tell) = buffer.get(..packet.length).and_then(decode) else {
                tracing::warn!(node, "a node that makes no sense is not listened to any more");
                return;
            };
            let attached = Segments::take_in(&mut self.lock(), packet.fds);
            let taken = attached.clone();
            self.ask(|directory, now, objects| directory.told(now, node, tell, attached, objects));
            let mut state = self.lock();
            taken.into_iter().for_each(|it| state.store.forget(it.object));
        }
    }

    fn owner_lost(self: &Arc<Self>, node: NodeId) {
        self.lock().owners.remove(&node);
        self.ask(|directory, _, objects| directory.owner_gone(node, objects));
    }

    /// Hears a connector's node until it is gone. The caller has a thread for it.
    pub fn attend(self: &Arc<Self>, incoming: Incoming) {
        let from = incoming.hello.from.clone();
        let known = self.lock().hosts.iter().find(|(_, name)| *name == from).map(|(node, _)| *node);
        let Some(node) = known else {
            return incoming.refuse(&format!("the rack has no host {from}"));
        };
        let Ok(stream) = incoming.accept() else { return };
        let mut fds = Vec::new();
        if stream.receive(&mut [0], &mut fds).is_err() {
            return;
        }
        let Some(Ok(packets)) = fds.into_iter().next().map(Packets::from_peer) else { return };
        drop(stream);
        let outbox = Outbox::new(packets);
        let before = self.lock().connectors.insert(node, outbox.clone());
        if let Some(before) = before {
            // The node started anew before its former life was noticed to be over.
            before.packets().shut_down();
            self.ask(|directory, _, objects| directory.connector_gone(node, objects));
        }
        let (mut buffer, mut spin) = (vec![0; MAX_PACKET], AdaptiveSpin::new(0, 50_000));
        while let Ok(packet) =
            outbox.packets().receive(&mut buffer, &mut spin, None).and_then(Packet::whole)
        {
            let Some(ask) = buffer.get(..packet.length).and_then(decode) else {
                tracing::warn!(node, "a node that makes no sense is not listened to any more");
                break;
            };
            self.ask(|directory, now, objects| directory.asked(now, node, ask, objects));
        }
        outbox.packets().shut_down();
        let mut state = self.lock();
        if state.connectors.get(&node).is_some_and(|it| Arc::ptr_eq(it, &outbox)) {
            state.connectors.remove(&node);
            drop(state);
            self.ask(|directory, _, objects| directory.connector_gone(node, objects));
        }
    }
}
