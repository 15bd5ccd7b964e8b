//! One host's side against another one that says each message when the test wants it to.

use rackbus_memory::Packets;
use rackbus_segment::Objects;

use super::super::objects::Store;
use super::*;

const SIZE: u64 = 4096;
struct Side {
    far: Arc<Far>,
    store: Store,
    _owner: Packets,
}

const REPLICA: Link = (Way::ToOwner, Handle(1));

impl Side {
    fn new() -> Side {
        let far = Far::new(Effects::default()).unwrap();
        let (ours, owner) = Packets::pair().unwrap();
        far.begin(Way::ToOwner, Outbox::new(Arc::new(ours)));
        Side { far, store: Store::default(), _owner: owner }
    }

    fn add(&mut self, link: Link) -> Arc<Object> {
        let id = self.store.memory(SIZE).unwrap();
        let object = self.store.get(id).unwrap().clone();
        self.far.add_memory(link, object.clone(), (SIZE, true));
        object
    }
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
    side.far.end(Way::ToOwner);
    assert!(!side.far.flush_connection(REPLICA.1));
}
