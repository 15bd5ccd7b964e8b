//! The rings in this host's memory: made for a sender, lent to its host, and taken back.

use std::sync::{Arc, Weak};

use rackbus_fabric::{Access, AddressTarget, LentMemory, Loan};
use rackbus_memory::frames::FrameEvents;
use rackbus_memory::{
    AsHandle, Event, FrameReceiver, FrameSender, HandleRef, PeerEvent, Region, SharedMemory,
};
use rackbus_net::port_queue::{LAYOUT, PortQueueHandle};
use rackbus_net::{News, PortQueueId};

use super::peers::AskingNode;
use super::{Shared, State};

/// Rings between two queues that have ended, and that their receiver has not taken all of, at most. A node that has one
/// after the other opened for a receiver that is stopped would take all memory and descriptors otherwise.
const MOST_LEFT: usize = 4;

/// A ring in this host's memory.
pub(super) struct Ring {
    pub from: PortQueueId,
    pub to: usize,
    /// The queue that takes out of it.
    receiver: PortQueueHandle,
    /// The node that has its sender; `None` for one of this host's.
    pub asker: Option<Arc<AskingNode>>,
    /// There as long as somebody in this process uses it.
    memory: Weak<Region>,
    _loan: Option<Loan>,
}

/// A ring that has ended, and that its receiver may not have taken all of.
pub(super) struct EndedRing {
    from: PortQueueId,
    to: usize,
    memory: Weak<Region>,
}

/// A ring that was made, and what leads to it.
pub(super) struct MadeRing {
    pub number: u64,
    pub sender: FrameSender,
    ends: RingEnds,
}

impl MadeRing {
    /// What leads a sender elsewhere to it, as it goes beside the message that says that it was made.
    pub fn beside(&self) -> [HandleRef<'_>; 3] {
        let RingEnds { memory, frames, room } = &self.ends;
        [memory.as_handle(), frames.as_handle(), room.as_handle()]
    }
}

/// The memory of a ring, and its events for frames and for room.
struct RingEnds {
    memory: SharedMemory,
    frames: PeerEvent,
    room: PeerEvent,
}

impl State {
    /// Makes a ring in this host's memory for what `from` sends to the station `to` of this host; `asker` is the
    /// node of `from`. What it had before in its place ends.
    ///
    /// # Errors
    /// Why there is none.
    pub(super) fn make_ring(
        &mut self,
        shared: &Shared,
        asker: Option<Arc<AskingNode>>,
        from: PortQueueId,
        to: usize,
    ) -> Result<MadeRing, String> {
        let down = || format!("{} is down", shared.stations.all()[to].name);
        let port = self.ports.get(&to).ok_or_else(down)?;
        // Each queue has rings of its own, which are memory and descriptors of this process.
        let queues = shared.queues_of(from.station);
        if from.number >= queues {
            let name = &shared.stations.all()[from.station].name;
            return Err(format!("{name} has no queue {}, it has {queues}", from.number));
        }
        let port_queue = usize::from(from.number) % port.queues.len().max(1);
        let receiver = port.queues.get(port_queue).cloned().ok_or_else(down)?;
        let before = self.rings.iter().find(|(_, ring)| ring.from == from && ring.to == to);
        if let Some(number) = before.map(|(number, _)| *number) {
            self.end_ring(number);
        }
        self.ended_rings.retain(|ring| ring.memory.strong_count() > 0);
        let left = self.ended_rings.iter().filter(|ring| ring.from == from && ring.to == to);
        if left.count() >= MOST_LEFT {
            let name = &shared.stations.all()[to].name;
            return Err(format!("{name} has not taken what came by {MOST_LEFT} rings before"));
        }
        let NewRing { ends, sender, receiver: taking } =
            NewRing::make().map_err(|it| it.to_string())?;
        let has_memory = asker.as_ref().is_some_and(|asker| asker.has_memory());
        let loan = if has_memory { self.lend(shared, from, &ends.memory)? } else { None };
        self.next_ring += 1;
        let number = self.next_ring;
        receiver.tell(News::Incoming(from, number, taking));
        let memory = Arc::downgrade(ends.memory.region());
        self.rings.insert(number, Ring { from, to, receiver, asker, memory, _loan: loan });
        Ok(MadeRing { number, sender, ends })
    }

    /// Lends the memory of a ring to the host of its sender.
    fn lend(
        &self,
        shared: &Shared,
        from: PortQueueId,
        memory: &SharedMemory,
    ) -> Result<Option<Loan>, String> {
        let bytes = memory.whole().len() as u64;
        let sender = &shared.stations.all()[from.station].host;
        let unknown = || "the fabric does not know both hosts".to_owned();
        let fabric = self.fabric.as_ref().ok_or_else(unknown)?;
        let ends = fabric.host(sender).zip(fabric.host(&shared.host));
        let (requester, owner) = ends.ok_or_else(unknown)?;
        let handle = memory.handle(0);
        let target = AddressTarget::Lent { object: handle.object(), offset: 0 };
        let access = Access::READ | Access::WRITE;
        fabric.share(requester, owner, bytes, access, target).map(Some).map_err(|it| it.to_string())
    }

    /// A ring's sender or receiver is gone: both are told, and the memory is lent no more.
    pub(super) fn end_ring(&mut self, number: u64) {
        let Some(ring) = self.rings.remove(&number) else { return };
        ring.receiver.tell(News::Ended(number));
        self.ended_rings.push(EndedRing { from: ring.from, to: ring.to, memory: ring.memory });
        match &ring.asker {
            Some(asker) => asker.ring_closed(number),
            None => {
                if let Some(sender) = self.port_queue(ring.from) {
                    // What lies in it is lost where its receiver is gone. One that is replaced has no sender any more.
                    sender.tell(News::Gone(ring.to));
                }
            }
        }
    }
}

/// A ring that nobody has used yet.
struct NewRing {
    ends: RingEnds,
    sender: FrameSender,
    receiver: FrameReceiver,
}

impl NewRing {
    fn make() -> std::io::Result<NewRing> {
        let bytes = LAYOUT.bytes().expect("it is a ring that can be") as u64;
        let memory = SharedMemory::create("rackbus-net", bytes).map_err(std::io::Error::other)?;
        let [frames, room] = [Event::new()?, Event::new()?].map(PeerEvent::from);
        let events = || {
            let (frames, room) = (frames.try_clone()?, room.try_clone()?);
            Ok::<_, std::io::Error>(FrameEvents { frames, room })
        };
        let region = memory.region();
        let receiver = FrameReceiver::new(region.clone(), events()?, LAYOUT);
        let ends = receiver.zip(FrameSender::new(region.clone(), events()?, LAYOUT));
        let (receiver, sender) = ends.expect("the memory is as long as the layout");
        Ok(NewRing { ends: RingEnds { memory, frames, room }, sender, receiver })
    }
}

/// Both ends of a ring whose frames go on to another machine.
pub(super) fn ring_of_this_machine() -> std::io::Result<(FrameSender, FrameReceiver)> {
    let NewRing { sender, receiver, .. } = NewRing::make()?;
    Ok((sender, receiver))
}
