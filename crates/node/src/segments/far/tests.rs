//! One host's side against another one that says each message when the test wants it to.

use std::time::Instant;

use rackbus_memory::packets::MAX_PACKET;
use rackbus_memory::{AdaptiveSpin, PacketStream, Packets, Producer};
use rackbus_segment::Objects;
use rackbus_segment::message::{DATA_SLOTS, decode};

use super::super::objects::ObjectStore;
use super::*;

const SIZE: u64 = 4096;
/// How long a message may take that has to come, and that must not come.
const COMES: Duration = Duration::from_secs(60);
const COMES_NOT: Duration = Duration::from_millis(100);

/// The other side of one conversation.
struct Peer {
    packets: Packets,
    outbox: Arc<Outbox>,
}

impl Peer {
    fn new() -> Peer {
        let (ours, packets) = Packets::pair().unwrap();
        Peer { packets, outbox: Outbox::new(Arc::new(ours)) }
    }

    fn receive(&self, limit: Duration) -> Option<CarriedMessage<'static>> {
        let (mut buffer, mut spin) = (vec![0; MAX_PACKET], AdaptiveSpin::default());
        let packet = PacketStream::receive(
            &self.packets,
            &mut buffer,
            &mut spin,
            Some(Instant::now() + limit),
        );
        Some(decode(&buffer[..packet.ok()?.length]).expect("a message of this protocol"))
    }

    fn next(&self) -> CarriedMessage<'static> {
        self.receive(COMES).expect("a message")
    }
}

struct Side {
    far: Arc<Far>,
    store: ObjectStore,
    owner: Peer,
    connector: Peer,
}

const REPLICA: ConnectionKey = (FarConversation::ToOwner, Handle(1));
const HOME: ConnectionKey = (FarConversation::ToConnector, Handle(2));

impl Side {
    fn new() -> Side {
        Side::with_limit(LIMIT)
    }

    fn with_limit(limit: Duration) -> Side {
        let far = Far::new(EffectsLock::default(), limit).unwrap();
        let (owner, connector) = (Peer::new(), Peer::new());
        far.begin(FarConversation::ToOwner, owner.outbox.clone());
        far.begin(FarConversation::ToConnector, connector.outbox.clone());
        Side { far, store: ObjectStore::default(), owner, connector }
    }

    fn add(&mut self, link: ConnectionKey) -> Arc<Object> {
        let id = self.store.memory(SIZE).unwrap();
        let object = self.store.get(id).unwrap().clone();
        self.far.add_memory(link, object.clone(), (SIZE, true));
        object
    }

    fn hear(&self, way: FarConversation, carried: CarriedMessage<'_>) {
        let outbox = match way {
            FarConversation::ToOwner => &self.owner.outbox,
            FarConversation::ToConnector => &self.connector.outbox,
        };
        self.far.hear((way, outbox), carried, |_, effect| effect()).unwrap();
    }
}

/// Stores of the other side to the first bytes.
fn stores(link: ConnectionKey, batch: u64, held: bool) -> CarriedMessage<'static> {
    let (runs, data) = (vec![(0, 8)], Cow::Owned(vec![3; 8]));
    CarriedMessage::Stores { connection: link.1, batch, last: true, held, runs, data }
}

fn store(object: &Object, bytes: &[u8]) {
    object.region().unwrap().whole().copy_from(bytes);
}

#[test]
fn a_flush_of_a_connection_that_was_lost_fails() {
    let mut side = Side::new();
    let memory = side.add(REPLICA);
    assert!(side.far.flush_connection(REPLICA.1), "nothing was stored");
    store(&memory, &[1; 8]);
    side.far.end(FarConversation::ToOwner);
    assert!(!side.far.flush_connection(REPLICA.1));
}

/// With memory in both ways that is the same on both sides, and nothing under way.
fn settled(side: &mut Side) -> (Arc<Object>, Arc<Object>) {
    let (replica, home) = (side.add(REPLICA), side.add(HOME));
    // A home tells all that it has at first.
    assert!(matches!(side.connector.next(), CarriedMessage::Stores { batch: 1, last: true, .. }));
    side.hear(HOME.0, CarriedMessage::Applied { connection: HOME.1, batch: 1 });
    (replica, home)
}

#[test]
fn a_batch_that_took_effect_is_answered_behind_those_that_were_taken_before() {
    let mut side = Side::new();
    let (replica, home) = settled(&mut side);
    let effects = side.far.effects.clone();
    let both = effects.write().unwrap();
    store(&replica, &[1; 8]);
    store(&home, &[2; 8]);
    drop(both);
    assert!(matches!(side.owner.next(), CarriedMessage::Stores { last: true, held: true, .. }));
    // The connector's store comes after the home's batch was taken, and before it is sent.
    side.hear(HOME.0, stores(HOME, 1, false));
    assert_eq!(side.connector.receive(COMES_NOT), None, "overtakes the batch");
    side.hear(REPLICA.0, CarriedMessage::Held { connection: REPLICA.1, batch: 1 });
    assert!(matches!(side.connector.next(), CarriedMessage::Stores { batch: 2, last: true, .. }));
    assert_eq!(side.connector.next(), CarriedMessage::Applied { connection: HOME.1, batch: 1 });
}

#[test]
fn what_came_while_memory_was_moved_takes_effect_after_it() {
    let mut side = Side::new();
    let (_, home) = settled(&mut side);
    side.far.memory(HOME).unwrap().pause();
    side.hear(HOME.0, stores(HOME, 1, false));
    assert_eq!(side.connector.receive(COMES_NOT), None, "takes effect during a move");
    // Who reads what hosts have in common is not waited for by who ends the move, but by what takes effect.
    let effects = side.far.effects.clone();
    let reading = effects.read().unwrap();
    side.far.resume(HOME);
    assert_eq!(side.connector.receive(COMES_NOT), None, "takes effect during a snapshot");
    drop(reading);
    assert_eq!(side.connector.next(), CarriedMessage::Applied { connection: HOME.1, batch: 1 });
    let mut bytes = [0; 8];
    home.region().unwrap().whole().part(0, 8).unwrap().copy_to(&mut bytes);
    assert_eq!(bytes, [3; 8]);
}

#[test]
fn what_is_held_takes_effect_when_the_conversation_it_is_held_for_is_lost() {
    let mut side = Side::new();
    let (replica, home) = settled(&mut side);
    let effects = side.far.effects.clone();
    let both = effects.write().unwrap();
    store(&replica, &[1; 8]);
    store(&home, &[2; 8]);
    drop(both);
    assert!(matches!(side.owner.next(), CarriedMessage::Stores { last: true, held: true, .. }));
    side.hear(REPLICA.0, CarriedMessage::Held { connection: REPLICA.1, batch: 1 });
    assert!(matches!(side.connector.next(), CarriedMessage::Stores { batch: 2, last: true, .. }));
    side.far.end(FarConversation::ToConnector);
    assert_eq!(side.owner.next(), CarriedMessage::Release);
    // And the one who is told so lets it take effect.
    let mut other = Side::new();
    settled(&mut other);
    other.hear(HOME.0, stores(HOME, 1, true));
    assert_eq!(other.connector.next(), CarriedMessage::Held { connection: HOME.1, batch: 1 });
    other.hear(HOME.0, CarriedMessage::Release);
    assert_eq!(other.connector.next(), CarriedMessage::Applied { connection: HOME.1, batch: 1 });
}

#[test]
fn a_node_that_applies_nothing_is_disconnected() {
    let mut side = Side::with_limit(COMES_NOT);
    let replica = side.add(REPLICA);
    store(&replica, &[1; 8]);
    assert!(matches!(side.owner.next(), CarriedMessage::Stores { last: true, .. }));
    let (mut buffer, mut spin) = (vec![0; MAX_PACKET], AdaptiveSpin::default());
    let over = PacketStream::receive(&side.owner.packets, &mut buffer, &mut spin, None);
    assert!(matches!(over, Err(rackbus_memory::StreamError::Closed)), "{over:?}");
    assert!(side.owner.outbox.is_given_up());
}

#[test]
fn a_sender_whose_owner_takes_nothing_ends_all_the_same() {
    let mut side = Side::new();
    let line = |store: &mut ObjectStore| {
        let made = [store.line(LinePart::Doorbell), store.event(), store.line(LinePart::Ring)];
        made.map(|id| store.get(id.unwrap()).unwrap().clone())
    };
    let [bell, event, ring] = line(&mut side.store);
    let line = InterruptParts { bell, event, ring: Some(ring) };
    assert!(side.far.add_sender(REPLICA.1, &line));
    let mut process =
        Producer::new(line.ring.as_ref().unwrap().region().unwrap(), 0, bells::RING).unwrap();
    let doorbell = line.doorbell().unwrap();
    // More than the owner has room for.
    for _ in 0..2 * DATA_SLOTS {
        while process.push(&[7]).is_err() {
            std::thread::yield_now();
        }
        doorbell.ring();
    }
    for _ in 0..DATA_SLOTS {
        assert!(matches!(side.owner.next(), CarriedMessage::Message { .. }));
    }
    assert!(side.far.close(REPLICA, &[9]), "is said behind what was sent");
    // There is room for one more meanwhile, which is heard.
    side.hear(REPLICA.0, CarriedMessage::Taken { connection: REPLICA.1 });
    assert!(matches!(side.owner.next(), CarriedMessage::Message { .. }));
    let last = CarriedMessage::Said { message: Cow::Owned(vec![9]), given: None };
    assert_eq!(side.owner.next(), last);
    assert!(!side.far.has_connection(REPLICA.1));
}

#[test]
fn a_flush_waits_for_memory_that_is_being_moved() {
    let mut side = Side::new();
    let (_, home) = settled(&mut side);
    assert!(side.far.flush());
    let memory = side.far.memory(HOME).unwrap();
    memory.pause();
    store(&home, &[1; 8]);
    let far = side.far.clone();
    let flushing = std::thread::spawn(move || far.flush());
    assert_eq!(side.connector.receive(COMES_NOT), None);
    assert!(!flushing.is_finished(), "what was stored is not there");
    side.far.resume(HOME);
    assert!(matches!(side.connector.next(), CarriedMessage::Stores { batch: 2, last: true, .. }));
    side.hear(HOME.0, CarriedMessage::Applied { connection: HOME.1, batch: 2 });
    assert!(flushing.join().unwrap());
}

#[test]
fn messages_of_a_replaced_conversation_are_ignored() {
    let mut side = Side::new();
    settled(&mut side);
    let former = std::mem::replace(&mut side.connector, Peer::new());
    side.far.end(FarConversation::ToConnector);
    side.far.begin(FarConversation::ToConnector, side.connector.outbox.clone());
    let held = CarriedMessage::Held { connection: HOME.1, batch: 1 };
    let heard =
        side.far.hear((FarConversation::ToConnector, &former.outbox), held, |_, effect| effect());
    assert!(heard.is_err());
    assert_eq!(side.far.lock().held, 0);
}
