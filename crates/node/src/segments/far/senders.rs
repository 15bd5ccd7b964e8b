//! The connector's ends of interrupts of other machines, in a bounded number: each has a thread here, and mappings, of which
//! the system lets a process have so many only. An owner has few of them, and others beside it do not.

use std::borrow::Cow;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use rackbus_memory::space::system_mappings;
use rackbus_segment::Handle;
use rackbus_segment::message::{CarriedMessage, Refusal};

use super::bells::{BellMessage, BellSender, InterruptParts};
use super::{End, Far, FarConversation};

/// Mappings of one: the stack of its thread and what guards that, the doorbell, and the ring of a data interrupt.
const MAPPINGS: usize = 4;
/// The part of the system's mappings that is for these. Functions have half of them, and a process needs some itself.
const PART: usize = 4;

/// How many there are, of all that a node may have.
#[derive(Debug)]
pub struct SenderSlots {
    most: usize,
    taken: AtomicUsize,
}

/// One of them, until it is dropped.
#[derive(Debug)]
struct SenderSlot(Arc<SenderSlots>);

impl SenderSlots {
    /// Slots for `most` interrupts at a time, plain ones and those with data together.
    pub fn new(most: usize) -> Arc<SenderSlots> {
        Arc::new(SenderSlots { most, taken: AtomicUsize::new(0) })
    }

    /// As many as go with what the system allows.
    pub fn of_system() -> Arc<SenderSlots> {
        SenderSlots::new((system_mappings() / PART / MAPPINGS).max(64))
    }

    fn take(self: &Arc<Self>) -> Result<SenderSlot, Refusal> {
        let one_more = |taken: usize| (taken < self.most).then_some(taken + 1);
        match self.taken.fetch_update(Ordering::Relaxed, Ordering::Relaxed, one_more) {
            Ok(_) => Ok(SenderSlot(self.clone())),
            Err(_) => Err(Refusal::TooMany(u32::try_from(self.most).unwrap_or(u32::MAX))),
        }
    }
}

impl Drop for SenderSlot {
    fn drop(&mut self) {
        self.0.taken.fetch_sub(1, Ordering::Relaxed);
    }
}

impl Far {
    /// A connection has something at this end that stands for an interrupt: a thread says what is rung there, when
    /// what was stored before has taken effect.
    ///
    /// # Errors
    /// When the node has as many as it may, it cannot be mapped, or there is no thread for it.
    pub fn add_sender(
        self: &Arc<Self>,
        connection: Handle,
        line: &InterruptParts,
    ) -> Result<(), Refusal> {
        let slot = self.host.senders.take()?;
        let unmapped = || Refusal::System("an interrupt's memory cannot be mapped".to_owned());
        let sender = BellSender::new(line).ok_or_else(unmapped)?;
        let (far, hearing) = (self.clone(), sender.clone());
        let way = FarConversation::ToOwner;
        let hear = move || {
            let _slot = slot;
            let say = |said| match said {
                BellMessage::Rung(count) => {
                    far.lock().send(way, &CarriedMessage::Rung { connection, count });
                }
                BellMessage::Message(data) => {
                    let data = Cow::Owned(data);
                    far.lock().send(way, &CarriedMessage::Message { connection, data });
                }
            };
            // Who is too slow for what was stored before hears the interrupt anyway.
            let before = || {
                let _ = far.flush();
            };
            hearing.hear(before, say);
            let mut state = far.lock();
            // Not before: what the owner says of the connection is heard until now.
            state.ends.remove(&(way, connection));
            if let (Some(last), Some(outbox)) = (hearing.take_last(), state.ways.get(&way)) {
                outbox.send(last);
            }
        };
        let started = std::thread::Builder::new().name("far interrupt".into()).spawn(hear);
        started.map_err(|error| Refusal::System(format!("no thread for an interrupt: {error}")))?;
        self.lock().ends.insert((way, connection), End::Sender(sender));
        Ok(())
    }
}
