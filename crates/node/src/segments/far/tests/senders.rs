//! The connector's ends of interrupts: how many there are, and how they end.

use rackbus_memory::Producer;
use rackbus_segment::message::{DATA_SLOTS, Refusal};

use super::*;

/// Each has a thread and mappings of this process.
#[test]
fn a_node_has_so_many_senders_and_no_more() {
    let mut side = Side::new();
    let line = side.line();
    let add = |far: &Arc<Far>, nth| far.add_sender(Handle(nth), &line);
    assert_eq!([1, 2].map(|nth| add(&side.far, nth)), [Ok(()), Ok(())]);
    assert_eq!(add(&side.far, 3), Err(Refusal::TooMany(2)));
    side.far.forget((FarConversation::ToOwner, Handle(1)));
    // Its thread has ended a little later.
    let begun = Instant::now();
    while let Err(refusal) = add(&side.far, 4) {
        assert!(begun.elapsed() < COMES, "{refusal}");
        std::thread::yield_now();
    }
}

#[test]
fn a_sender_whose_owner_takes_nothing_ends_all_the_same() {
    let mut side = Side::new();
    let line = side.line();
    side.far.add_sender(REPLICA.1, &line).unwrap();
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
