//! One host's side against another one that says each message when the test wants it to.

use std::sync::{OnceLock, Weak, mpsc};
use std::time::Instant;

use rackbus_memory::packets::MAX_PACKET;
use rackbus_memory::{AdaptiveSpin, PacketStream, Packets};
use rackbus_segment::Objects;
use rackbus_segment::message::{LockOperation, Refusal, decode};

use super::super::locks::BegunFlushes;
use super::super::objects::ObjectStore;
use super::*;

mod copying;
mod landing;
mod moves;
mod senders;

const SIZE: u64 = 4096;
/// How long a message may take that has to come, and that must not come.
const COMES: Duration = Duration::from_secs(60);
const COMES_NOT: Duration = Duration::from_millis(100);

/// The other side of one conversation.
struct Peer {
    packets: Packets,
    outbox: Arc<LetterQueue>,
}

impl Peer {
    fn new() -> Peer {
        let (ours, packets) = Packets::pair().unwrap();
        Peer { packets, outbox: LetterQueue::new(Arc::new(ours)) }
    }

    fn receive(&self, limit: Duration) -> Option<CarriedMessage<'static>> {
        let (mut buffer, mut spin) = (vec![0; MAX_PACKET], AdaptiveSpin::default());
        let packet = PacketStream::receive(
            &self.packets,
            &mut buffer,
            &mut spin,
            Some(Instant::now() + limit),
        );
        // A message borrows its bytes, and tests keep it.
        let bytes: &'static [u8] = Box::leak(buffer[..packet.ok()?.length].into());
        Some(decode(bytes).expect("a message of this protocol"))
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
    /// Connections whose memory was said to be complete.
    complete: Arc<Mutex<Vec<Handle>>>,
    /// What was answered of moves.
    settled: mpsc::Receiver<ConnectorMessage>,
    /// What processes were kept from, each time that something took effect.
    hidden: Arc<Mutex<Vec<Vec<ConnectionRange>>>>,
}

const REPLICA: ConnectionKey = (FarConversation::ToOwner, Handle(1));
const HOME: ConnectionKey = (FarConversation::ToConnector, Handle(2));

impl Far {
    /// Copies all of a copy, and waits for it, as a session does.
    fn copy(self: &Arc<Self>, to: Handle, bytes: Vec<u8>, part: CopyPart) -> Result<(), Refusal> {
        let until = Instant::now() + PATIENCE;
        let begun = self.begin_copy(to, bytes, part)?;
        let flush = begun.wait(until).ok_or(Refusal::NotResponding)?;
        self.end_copy(to, flush, until)
    }
}

impl Side {
    fn new() -> Side {
        Side::with_limit(LIMIT)
    }

    fn with_limit(limit: Duration) -> Side {
        Side::of(limit, &Arc::default())
    }

    fn of(limit: Duration, passing: &Arc<FlushTargets>) -> Side {
        let complete: Arc<Mutex<Vec<Handle>>> = Arc::default();
        let heard = complete.clone();
        let complete_by = move |connection| heard.lock().unwrap().push(connection);
        let (answer, settled) = mpsc::channel();
        let asked: Arc<OnceLock<Weak<Far>>> = Arc::default();
        let asks = asked.clone();
        let answer_by = move |said| {
            // As the service does, to say what follows.
            if let Some(far) = asks.get().and_then(Weak::upgrade) {
                far.has(FarConversation::ToConnector);
            }
            answer.send(said).unwrap();
        };
        let hidden: Arc<Mutex<Vec<Vec<ConnectionRange>>>> = Arc::default();
        let hides = hidden.clone();
        let hide_by = move |ranges: &[ConnectionRange], effect: &dyn Fn() -> Applied| {
            hides.lock().unwrap().push(ranges.to_vec());
            effect()
        };
        let host = FarHost::new(hide_by, complete_by, answer_by, SenderSlots::new(2));
        let far = Far::new(EffectsLock::default(), limit, passing.clone(), host).unwrap();
        asked.set(Arc::downgrade(&far)).unwrap();
        passing.add(&far);
        let (owner, connector) = (Peer::new(), Peer::new());
        far.begin(FarConversation::ToOwner, owner.outbox.clone());
        far.begin(FarConversation::ToConnector, connector.outbox.clone());
        let store = ObjectStore::default();
        Side { far, store, owner, connector, complete, settled, hidden }
    }

    fn add(&mut self, link: ConnectionKey) -> Arc<Object> {
        let id = self.store.memory(SIZE).unwrap();
        let object = self.store.get(id).unwrap().clone();
        self.far.add_memory(link, object.clone(), (SIZE, true));
        object
    }

    /// What stands for a data interrupt.
    fn line(&mut self) -> InterruptParts {
        let store = &mut self.store;
        let made = [store.line(LinePart::Doorbell), store.event(), store.line(LinePart::Ring)];
        let [bell, event, ring] = made.map(|id| store.get(id.unwrap()).unwrap().clone());
        InterruptParts { bell, event, ring: Some(ring) }
    }

    fn hear(&self, way: FarConversation, carried: CarriedMessage<'_>) {
        let outbox = match way {
            FarConversation::ToOwner => &self.owner.outbox,
            FarConversation::ToConnector => &self.connector.outbox,
        };
        self.far.hear((way, outbox), carried).unwrap();
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

/// Once each repetition waited for another look, which began when the one before it was given up.
#[test]
fn what_is_repeated_before_it_publishes_waits_for_the_flush_that_was_begun() {
    let mut side = Side::new();
    settled(&mut side);
    let (mut begun, place) = (BegunFlushes::default(), (REPLICA.1, 64));
    let [first, other] = [1, 2].map(|attempt| LockOperation::Release { attempt });
    let effects = side.far.effects.clone();
    let none_looks = effects.write().unwrap();
    assert!(!begun.flush(place, &first, &side.far, COMES_NOT));
    assert!(!begun.flush(place, &first, &side.far, COMES_NOT));
    assert_eq!(side.far.lock().flushes.wanted(), 1);
    drop(none_looks);
    assert!(begun.flush(place, &first, &side.far, COMES));
    assert_eq!(side.far.lock().flushes.wanted(), 1);
    // Something else, and the same once more, are behind what was stored before them.
    assert!(begun.flush(place, &other, &side.far, COMES));
    assert!(begun.flush(place, &other, &side.far, COMES));
    assert_eq!(side.far.lock().flushes.wanted(), 3);
}

/// With memory in both ways that is the same on both sides, and nothing under way.
fn settled(side: &mut Side) -> (Arc<Object>, Arc<Object>) {
    let (replica, home) = (side.add(REPLICA), side.add(HOME));
    // A home tells all that it has at first.
    assert!(matches!(side.connector.next(), CarriedMessage::Stores { batch: 1, last: true, .. }));
    side.hear(HOME.0, CarriedMessage::Applied { connection: HOME.1, batch: 1 });
    (replica, home)
}

/// What was stored to the home is on its way to the connector, and waited for.
fn batch_under_way(side: &Side) {
    assert!(matches!(side.connector.next(), CarriedMessage::Stores { batch: 2, last: true, .. }));
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
    assert_eq!(
        side.connector.next(),
        CarriedMessage::AppliedAlone { connection: HOME.1, batch: 1 }
    );
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
    assert_eq!(
        other.connector.next(),
        CarriedMessage::AppliedAlone { connection: HOME.1, batch: 1 }
    );
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
fn messages_of_a_replaced_conversation_are_ignored() {
    let mut side = Side::new();
    settled(&mut side);
    let former = std::mem::replace(&mut side.connector, Peer::new());
    side.far.end(FarConversation::ToConnector);
    side.far.begin(FarConversation::ToConnector, side.connector.outbox.clone());
    let held = CarriedMessage::Held { connection: HOME.1, batch: 1 };
    let heard = side.far.hear((FarConversation::ToConnector, &former.outbox), held);
    assert!(heard.is_err());
    assert_eq!(side.far.lock().held, 0);
}

/// Whoever has the segments' lock asks these while memory is read, which takes as long as there is much of it.
#[test]
fn asking_for_the_home_of_memory_does_not_wait_for_its_readers() {
    let mut side = Side::new();
    settled(&mut side);
    // Whoever looks has looked.
    assert!(side.far.flush());
    let pair = side.far.memory(HOME).unwrap();
    let object = pair.object();
    let reading = pair.lock();
    let far = side.far.clone();
    let asking = std::thread::spawn(move || {
        assert!(far.has_memory(&object));
        far.resume(HOME);
    });
    let begun = Instant::now();
    while !asking.is_finished() {
        assert!(begun.elapsed() < COMES, "it waits");
        std::thread::yield_now();
    }
    asking.join().unwrap();
    drop(reading);
}

/// Each has three seconds, and a process waits fifteen for its node.
#[test]
fn a_flush_to_many_machines_that_stand_still_takes_no_longer_than_to_one() {
    let mut sides: Vec<Side> = (0..6).map(|_| Side::new()).collect();
    let fars: Vec<Arc<Far>> = sides
        .iter_mut()
        .map(|side| {
            store(&settled(side).0, &[1; 8]);
            side.far.clone()
        })
        .collect();
    let begun = std::time::Instant::now();
    assert!(!flush_all(&fars));
    let took = begun.elapsed();
    assert!((PATIENCE..2 * PATIENCE).contains(&took), "{took:?}");
}

#[test]
fn a_flush_is_passed_on_where_further_machines_have_the_memory() {
    let mut side = Side::new();
    let replica = side.add(REPLICA);
    let flush = |far: &Arc<Far>| {
        let far = far.clone();
        std::thread::spawn(move || far.flush())
    };
    // The home alone has it.
    store(&replica, &[1; 8]);
    let flushing = flush(&side.far);
    assert!(matches!(side.owner.next(), CarriedMessage::Stores { batch: 1, last: true, .. }));
    side.hear(REPLICA.0, CarriedMessage::AppliedAlone { connection: REPLICA.1, batch: 1 });
    assert!(flushing.join().unwrap());
    store(&replica, &[2; 8]);
    let flushing = flush(&side.far);
    assert!(matches!(side.owner.next(), CarriedMessage::Stores { batch: 2, last: true, .. }));
    side.hear(REPLICA.0, CarriedMessage::Applied { connection: REPLICA.1, batch: 2 });
    assert_eq!(side.owner.next(), CarriedMessage::PassOn { number: 1 });
    assert!(!flushing.is_finished(), "the third machine has it not");
    side.hear(REPLICA.0, CarriedMessage::PassedOn { number: 1 });
    assert!(flushing.join().unwrap());
    // What was not asked for is no answer.
    let way = (REPLICA.0, &side.owner.outbox);
    let again = CarriedMessage::PassedOn { number: 1 };
    assert!(side.far.hear(way, again).is_err());
}

#[test]
fn a_home_passes_a_flush_on_when_the_others_have_all_of_it() {
    let passing = Arc::default();
    let (mut beta, gamma) = (Side::of(LIMIT, &passing), Side::of(LIMIT, &passing));
    let (_, home) = settled(&mut beta);
    gamma.far.add_memory(HOME, home, (SIZE, true));
    assert!(matches!(gamma.connector.next(), CarriedMessage::Stores { batch: 1, .. }));
    beta.hear(HOME.0, stores(HOME, 1, false));
    assert_eq!(beta.connector.next(), CarriedMessage::Applied { connection: HOME.1, batch: 1 });
    beta.hear(HOME.0, CarriedMessage::PassOn { number: 1 });
    assert_eq!(beta.connector.receive(COMES_NOT), None, "gamma has it not");
    let way = (HOME.0, &beta.connector.outbox);
    let more = CarriedMessage::PassOn { number: 2 };
    assert!(beta.far.hear(way, more).is_err(), "one at a time");
    gamma.hear(HOME.0, CarriedMessage::Applied { connection: HOME.1, batch: 1 });
    assert!(matches!(gamma.connector.next(), CarriedMessage::Stores { batch: 2, .. }));
    assert_eq!(beta.connector.receive(COMES_NOT), None, "gamma has not applied it");
    gamma.hear(HOME.0, CarriedMessage::Applied { connection: HOME.1, batch: 2 });
    assert_eq!(beta.connector.next(), CarriedMessage::PassedOn { number: 1 });
    // Who is gone is not waited for.
    store(&beta.far.memory(HOME).unwrap().object(), &[9; 8]);
    assert!(matches!(beta.connector.next(), CarriedMessage::Stores { batch: 2, .. }));
    beta.hear(HOME.0, CarriedMessage::Applied { connection: HOME.1, batch: 2 });
    beta.hear(HOME.0, CarriedMessage::PassOn { number: 2 });
    gamma.far.end(FarConversation::ToConnector);
    gamma.far.end(FarConversation::ToOwner);
    assert_eq!(beta.connector.next(), CarriedMessage::PassedOn { number: 2 });
}

#[test]
fn a_home_passes_a_flush_on_to_another_process_of_the_same_machine() {
    let passing = Arc::default();
    let mut beta = Side::of(LIMIT, &passing);
    let (_, home) = settled(&mut beta);
    let other = (FarConversation::ToConnector, Handle(3));
    beta.far.add_memory(other, home, (SIZE, true));
    assert!(matches!(beta.connector.next(), CarriedMessage::Stores { batch: 1, .. }));
    beta.hear(HOME.0, CarriedMessage::Applied { connection: other.1, batch: 1 });
    beta.hear(HOME.0, stores(HOME, 1, false));
    assert_eq!(beta.connector.next(), CarriedMessage::Applied { connection: HOME.1, batch: 1 });
    assert!(matches!(beta.connector.next(), CarriedMessage::Stores { batch: 2, .. }));
    beta.hear(HOME.0, CarriedMessage::PassOn { number: 1 });
    assert_eq!(beta.connector.receive(COMES_NOT), None, "the other process has it not");
    beta.hear(HOME.0, CarriedMessage::Applied { connection: other.1, batch: 2 });
    assert_eq!(beta.connector.next(), CarriedMessage::PassedOn { number: 1 });
}

#[test]
fn a_home_that_waits_for_another_ones_passing_on_passes_on_meanwhile() {
    let passing = Arc::default();
    let (mut beta, mut gamma) = (Side::of(LIMIT, &passing), Side::of(LIMIT, &passing));
    let (_, home) = settled(&mut beta);
    gamma.far.add_memory(HOME, home, (SIZE, true));
    assert!(matches!(gamma.connector.next(), CarriedMessage::Stores { batch: 1, .. }));
    gamma.hear(HOME.0, CarriedMessage::Applied { connection: HOME.1, batch: 1 });
    // What is stored here to gamma's memory, gamma is to pass on; and gamma waits for beta, which waits for this host.
    let replica = gamma.add(REPLICA);
    store(&replica, &[1; 8]);
    let far = gamma.far.clone();
    let flushing = std::thread::spawn(move || far.flush());
    assert!(matches!(gamma.owner.next(), CarriedMessage::Stores { batch: 1, last: true, .. }));
    gamma.hear(REPLICA.0, CarriedMessage::Applied { connection: REPLICA.1, batch: 1 });
    assert_eq!(gamma.owner.next(), CarriedMessage::PassOn { number: 1 });
    beta.hear(HOME.0, CarriedMessage::PassOn { number: 1 });
    let passed_on = beta.connector.receive(Duration::from_secs(10));
    assert_eq!(passed_on, Some(CarriedMessage::PassedOn { number: 1 }));
    gamma.hear(REPLICA.0, CarriedMessage::PassedOn { number: 1 });
    let _ = flushing.join().unwrap();
}

#[test]
fn what_gives_a_lock_is_said_behind_what_was_stored_before() {
    let mut side = Side::new();
    let (_, home) = settled(&mut side);
    store(&home, &[1; 8]);
    side.far.say_behind_stores(FarConversation::ToConnector, &[9]);
    batch_under_way(&side);
    assert_eq!(side.connector.receive(COMES_NOT), None, "it is not there");
    // Other answers do not wait with it.
    side.far.say(FarConversation::ToConnector, &[8], None);
    let said = |message| CarriedMessage::Said { message: Cow::Owned(vec![message]), given: None };
    assert_eq!(side.connector.next(), said(8));
    side.hear(HOME.0, CarriedMessage::Applied { connection: HOME.1, batch: 2 });
    assert_eq!(side.connector.next(), said(9));
}

#[test]
fn a_node_that_asks_on_and_applies_nothing_is_disconnected() {
    let mut side = Side::new();
    let (_, home) = settled(&mut side);
    store(&home, &[1; 8]);
    batch_under_way(&side);
    for _ in 0..MOST {
        side.far.say_behind_stores(FarConversation::ToConnector, &[9]);
    }
    assert!(!side.connector.outbox.is_given_up());
    side.far.say_behind_stores(FarConversation::ToConnector, &[9]);
    assert!(side.connector.outbox.is_given_up());
    assert_eq!(side.far.lock().closing.len(), MOST);
}

#[test]
fn memory_is_told_behind_the_answer_that_gives_it() {
    let mut side = Side::new();
    let (_, home) = settled(&mut side);
    // Something is to be said first, and waits.
    store(&home, &[1; 8]);
    batch_under_way(&side);
    let ended = (FarConversation::ToConnector, Handle(4));
    side.add(ended);
    assert!(side.far.close(ended, &[9]));
    let begun = (FarConversation::ToConnector, Handle(3));
    let given = vec![StandIn::Memory { size: SIZE, write: true }];
    side.far.say(FarConversation::ToConnector, &[7], Some((begun.1, given.clone())));
    side.add(begun);
    assert!(side.far.close(begun, &[8]), "ends at once");
    assert_eq!(side.connector.receive(COMES_NOT), None, "of a connection that it does not know");
    side.hear(HOME.0, CarriedMessage::Applied { connection: HOME.1, batch: 2 });
    let said = |message, given| CarriedMessage::Said { message: Cow::Owned(vec![message]), given };
    // What ends is told once more, all that it has.
    assert!(matches!(side.connector.next(), CarriedMessage::Stores { batch: 1, last: true, .. }));
    side.hear(HOME.0, CarriedMessage::Applied { connection: ended.1, batch: 1 });
    assert_eq!(side.connector.next(), said(9, None));
    assert_eq!(side.connector.next(), said(7, Some((begun.1, given))));
    let CarriedMessage::Stores { connection, batch: 1, .. } = side.connector.next() else {
        panic!("not what it is at first")
    };
    assert_eq!(connection, begun.1);
    side.hear(HOME.0, CarriedMessage::Applied { connection, batch: 1 });
    assert_eq!(side.connector.next(), said(8, None));
}

#[test]
fn stores_to_memory_that_is_complete_now_do_not_come_behind_later_ones() {
    let mut side = Side::new();
    let (flag, _) = settled(&mut side);
    let effects = side.far.effects.clone();
    let applying = effects.write().unwrap();
    side.far.kick();
    while side.far.lock().now {
        std::thread::yield_now();
    }
    // The thread that looks waits for what takes effect, most likely.
    std::thread::sleep(COMES_NOT);
    // Memory is complete by that, and its process stores to it first.
    let begun = (FarConversation::ToOwner, Handle(3));
    let data = side.add(begun);
    store(&data, &[1; 8]);
    store(&flag, &[2; 8]);
    drop(applying);
    let CarriedMessage::Stores { connection, held, .. } = side.owner.next() else { panic!() };
    assert_eq!((connection, held), (REPLICA.1, true), "takes effect alone");
}

/// Once the end of one conversation let what was to be said in the other be said too soon.
#[test]
fn what_is_said_behind_stores_is_so_when_another_conversation_ends() {
    let mut side = Side::new();
    let (replica, home) = settled(&mut side);
    // A look notes that a connection to the owner ends, and waits for what it has sent.
    let effects = side.far.effects.clone();
    let applying = effects.write().unwrap();
    assert!(side.far.close(REPLICA, &[7]));
    store(&home, &[1; 8]);
    drop((replica, applying));
    batch_under_way(&side);
    side.far.end(FarConversation::ToOwner);
    // What is stored now it has not seen.
    store(&home, &[2; 8]);
    side.far.say_behind_stores(FarConversation::ToConnector, &[9]);
    side.hear(HOME.0, CarriedMessage::Applied { connection: HOME.1, batch: 2 });
    assert!(matches!(side.connector.next(), CarriedMessage::Stores { batch: 3, last: true, .. }));
    side.hear(HOME.0, CarriedMessage::Applied { connection: HOME.1, batch: 3 });
    let last = CarriedMessage::Said { message: Cow::Owned(vec![9]), given: None };
    assert_eq!(side.connector.next(), last);
}

/// Once it was waited for in the conversation that had begun instead, which was then ended.
#[test]
fn what_is_held_in_a_conversation_that_was_replaced_is_not_waited_for() {
    let mut side = Side::with_limit(COMES);
    let (replica, home) = settled(&mut side);
    let effects = side.far.effects.clone();
    let both = effects.write().unwrap();
    store(&replica, &[1; 8]);
    store(&home, &[2; 8]);
    drop(both);
    assert!(matches!(side.owner.next(), CarriedMessage::Stores { last: true, held: true, .. }));
    side.owner = Peer::new();
    side.far.end(FarConversation::ToOwner);
    side.far.begin(FarConversation::ToOwner, side.owner.outbox.clone());
    assert!(matches!(side.connector.next(), CarriedMessage::Stores { batch: 2, last: true, .. }));
    assert_eq!(side.owner.receive(COMES_NOT), None, "of another conversation");
    assert!(!side.owner.outbox.is_given_up());
}
