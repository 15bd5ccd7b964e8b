//! The device over queues in memory, without QEMU: what a guest's driver and a node may do to it.

use std::sync::mpsc::Receiver;

use rackbus_memory::packets::MAX_PACKET;
use rackbus_memory::{AdaptiveSpin, Packets, SharedMemory, StreamError};
use rackbus_segment::Handle;
use rackbus_segment::guest::GuestChannel;
use rackbus_segment::message::{Connected, ConnectionChange, Reply, SessionEvent, decode, encode};
use rustix::net::{
    AddressFamily, SocketAddrUnix, SocketFlags, SocketType, bind, listen, socket_with,
};
use vhost_user_backend::VhostUserBackend;
use vm_memory::{Bytes, GuestAddress, GuestAddressSpace};
use vmm_sys_util::epoll::EventSet;

use super::backend::QUEUE_SIZE;
use super::sessions::MOST_THREADS;
use super::*;
use crate::state::DescriptorKind;

/// Where the queue's parts are in the guest's memory; a request and the room for its answer for each head.
const TABLE: u64 = 0x1000;
const AVAILABLE: u64 = 0x4000;
const USED: u64 = 0x5000;
const REQUESTS: u64 = 0x1_0000;
const ANSWERS: u64 = 0x10_0000;
const ROOM: u32 = 256;

const QUEUE: usize = 1;
const CONTROL: u64 = 2;

/// A guest's driver with one queue for requests, and the device.
struct Driver {
    memory: GuestMemoryAtomic<GuestMemoryMmap>,
    vrings: Vec<VringRwLock>,
    device: Arc<Device>,
    backend: Backend,
    posted: u16,
    _jobs: Receiver<WindowJob>,
}

impl Driver {
    fn new() -> Driver {
        Driver::of_node("/nowhere".into())
    }

    /// With the node's socket there.
    fn of_node(node: PathBuf) -> Driver {
        let ranges = [(GuestAddress(0), 2 << 20)];
        let memory = GuestMemoryMmap::<()>::from_ranges(&ranges).unwrap();
        let memory = GuestMemoryAtomic::new(memory);
        let start: Arc<standby::StartStandby> =
            Arc::new(|_| Err(std::io::ErrorKind::Unsupported.into()));
        let helper = StandbyStart { socket: "/nowhere".into(), node, start };
        let (jobs, jobs_to_do) = std::sync::mpsc::channel();
        let parts = (DeviceParts::new(Core::new(WINDOW)), Ledger::new().unwrap());
        let device = Arc::new(Device::new(helper, parts, jobs, &memory, false).unwrap());
        let backend = Backend::new(device.clone(), memory.clone());
        let vring = || VringRwLock::new(memory.clone(), QUEUE_SIZE as u16).unwrap();
        let vrings = vec![vring(), vring()];
        let queue = &vrings[QUEUE];
        queue.set_queue_size(QUEUE_SIZE as u16);
        queue.set_queue_info(TABLE, AVAILABLE, USED).unwrap();
        queue.set_queue_ready(true);
        queue.set_enabled(true);
        Driver { memory, vrings, device, backend, posted: 0, _jobs: jobs_to_do }
    }

    fn write(&self, at: u64, bytes: &[u8]) {
        self.memory.memory().write_slice(bytes, GuestAddress(at)).unwrap();
    }

    /// Puts a request at a head, which is even: its answer goes to the entry behind that.
    fn post(&mut self, head: u16, code: u32, node: u64, arguments: &[u8]) {
        let mut bytes = ((40 + arguments.len()) as u32).to_le_bytes().to_vec();
        bytes.extend(code.to_le_bytes());
        bytes.extend([u64::from(head), node].into_iter().flat_map(u64::to_le_bytes));
        bytes.extend([0_u32, 0, 1, 0].into_iter().flat_map(u32::to_le_bytes));
        bytes.extend(arguments);
        let request = REQUESTS + u64::from(head) * 0x1000;
        self.write(request, &bytes);
        let entry = |at: u64, length: u32, flags: u16, next: u16| {
            let mut entry = [at.to_le_bytes(), u64::from(length).to_le_bytes()].concat();
            entry[12..14].copy_from_slice(&flags.to_le_bytes());
            entry[14..].copy_from_slice(&next.to_le_bytes());
            entry
        };
        let place = TABLE + u64::from(head) * 16;
        self.write(place, &entry(request, bytes.len() as u32, 1, head + 1));
        self.write(place + 16, &entry(ANSWERS + u64::from(head) * u64::from(ROOM), ROOM, 2, 0));
        self.announce(head);
    }

    fn announce(&mut self, head: u16) {
        let at = AVAILABLE + 4 + u64::from(self.posted) % QUEUE_SIZE as u64 * 2;
        self.write(at, &head.to_le_bytes());
        self.posted = self.posted.wrapping_add(1);
        self.write(AVAILABLE + 2, &self.posted.to_le_bytes());
    }

    fn kick(&self) {
        self.backend.handle_event(QUEUE as u16, EventSet::IN, &self.vrings, 0).unwrap();
    }

    /// How many requests were answered.
    fn answered(&self) -> u16 {
        self.memory.memory().read_obj(GuestAddress(USED + 2)).unwrap()
    }

    /// QEMU has the queue stopped, as it asks for where it would continue.
    fn stop(&self) {
        self.vrings[QUEUE].set_queue_ready(false);
        self.backend.stop_vring(QUEUE as u32).unwrap();
    }

    /// Jobs of QEMU's that are not done.
    fn jobs(&self) -> usize {
        self.device.lock().kept.core.jobs().count()
    }

    /// A session, opened with this head, whose conversations end in these sockets.
    fn session(&mut self, head: u16) -> (u64, Packets, Packets) {
        self.post(head, 14, CONTROL, &[0; 8]);
        // What it leads to is done here, and not by a thread that connects.
        let mut inner = self.device.lock();
        let token = inner.kept.core.next_token();
        let chain =
            self.vrings[QUEUE].get_mut().get_queue_mut().pop_descriptor_chain(self.memory.memory());
        let chain = chain.unwrap();
        let (room, bytes) = (chains::room(&chain), chains::read(&chain));
        let queue = QUEUE as u8;
        let request = QueuedRequest { queue, head, room: room.clone(), answer: None };
        self.device.chains.wait(token, &self.vrings[QUEUE], &request);
        let record = JournalRecord::Request { now: now(), queue, head, room, bytes };
        let actions = self.device.record(&mut inner, &record, Vec::new());
        let [GuestAction::Connect { session }] = actions[..] else { panic!("{actions:?}") };
        drop(inner);
        let ((calls, node_calls), (events, node_events)) =
            (Packets::pair().unwrap(), Packets::pair().unwrap());
        let page = SharedMemory::reserve("page", 4096).unwrap();
        let (_, theirs) = Packets::pair().unwrap();
        let kind = DescriptorKind::Memory { size: 4096, write: true };
        let beside = vec![calls.into(), events.into(), theirs.into(), page];
        self.device.act_with(&JournalRecord::Connected { session, page: kind }, beside);
        (session, node_calls, node_events)
    }
}

/// A request that QEMU has to do something for, so that it waits: to remove no mappings.
const REMOVE: (u32, [u8; 4]) = (49, [0; 4]);

#[test]
fn a_head_whose_request_is_not_answered_is_posted_once() {
    let mut driver = Driver::new();
    let (code, nothing) = REMOVE;
    driver.post(0, code, CONTROL, &nothing);
    driver.post(2, code, CONTROL, &nothing);
    driver.kick();
    assert_eq!((driver.device.chains.count(), driver.jobs(), driver.answered()), (2, 2, 0));
    for _ in 0..1000 {
        driver.announce(0);
        driver.announce(60_000);
        driver.kick();
        assert_eq!((driver.device.chains.count(), driver.jobs()), (2, 2));
    }
    // What it had posted before is answered; nothing else is looked at any more.
    driver.device.act(&JournalRecord::Unmapped);
    assert_eq!(driver.answered(), 1);
    driver.kick();
    assert_eq!(driver.jobs(), 1);
    // It is reset, and so is its driver.
    driver.stop();
    driver.write(AVAILABLE, &[0; 4]);
    driver.write(USED, &[0; 4]);
    let base = [10_u32, 1, 8, QUEUE as u32, 0].into_iter().flat_map(u32::to_le_bytes).collect();
    driver.device.record_only(&JournalRecord::Frontend { message: base }, Vec::new());
    driver.posted = 0;
    let queue = &driver.vrings[QUEUE];
    queue.set_queue_next_avail(0);
    queue.set_queue_next_used(0);
    queue.set_queue_ready(true);
    driver.post(0, code, CONTROL, &nothing);
    driver.kick();
    assert_eq!(driver.device.chains.count(), 1);
}

#[test]
fn a_head_that_is_no_entry_of_its_queue_is_not_taken() {
    let mut driver = Driver::new();
    driver.announce(QUEUE_SIZE as u16);
    driver.kick();
    assert_eq!((driver.device.chains.count(), driver.answered()), (0, 0));
    assert_eq!(driver.device.lock().kept.core.requests(QUEUE as u8).count(), 0);
}

#[test]
fn nothing_is_written_to_the_memory_of_a_vm_that_is_stopped() {
    let mut driver = Driver::new();
    let (code, nothing) = REMOVE;
    driver.post(0, code, CONTROL, &nothing);
    driver.kick();
    // The answer comes between the two steps by which QEMU has a queue stopped.
    driver.vrings[QUEUE].set_queue_ready(false);
    driver.device.act(&JournalRecord::Unmapped);
    assert_eq!(driver.answered(), 0);
    driver.stop();
    // A kick from before is heard only now.
    driver.kick();
    assert!(driver.device.inherited.lock().unwrap()[QUEUE]);
    assert_eq!((driver.answered(), driver.device.chains.count()), (0, 0));
    // So is one by a ring that is not enabled yet.
    driver.vrings[QUEUE].set_enabled(false);
    driver.vrings[QUEUE].set_queue_ready(true);
    driver.kick();
    assert_eq!(driver.answered(), 0);
    // It was not reset, and goes on.
    driver.vrings[QUEUE].set_enabled(true);
    driver.kick();
    assert_eq!((driver.answered(), driver.device.chains.count()), (1, 0));
    assert!(!driver.device.inherited.lock().unwrap()[QUEUE]);
}

/// Receives until there is nothing more; true when that is because the other end is shut down.
fn ends(packets: &Packets) -> bool {
    let (mut buffer, mut spin) = (vec![0; MAX_PACKET], AdaptiveSpin::new(0, 0));
    loop {
        let soon = std::time::Instant::now() + std::time::Duration::from_millis(10);
        match packets.receive(&mut buffer, &mut spin, Some(soon)) {
            Ok(_) => {}
            Err(StreamError::TimedOut) => return false,
            Err(_) => return true,
        }
    }
}

#[test]
fn a_node_that_takes_no_messages_is_told_that_the_session_is_over() {
    let mut driver = Driver::new();
    let (session, calls, events) = driver.session(0);
    assert_eq!(driver.answered(), 1);
    let mut write = [session, 0].into_iter().flat_map(u64::to_le_bytes).collect::<Vec<_>>();
    let message = [7; 1024];
    write.extend([1024_u32, 0, 0, 0, 0, 0].into_iter().flat_map(u32::to_le_bytes));
    write.extend(message);
    let mut sent = 0;
    while driver.device.lock().kept.core.state.phases().1 == [session] {
        driver.post(0, 16, CONTROL, &write);
        driver.kick();
        sent += 1;
        assert!(sent < 10_000, "a socket has no bound");
    }
    assert!(ends(&calls) && ends(&events));
}

/// What the guest's process has still to read in a conversation.
fn heard(driver: &Driver, session: u64, place: GuestChannel) -> u64 {
    driver.device.lock().kept.core.state.received_count(session, place)
}

/// A process that serves ends at each step of hearing a message; its successor hears each message once.
#[test]
fn a_message_of_the_nodes_is_heard_once_where_another_process_goes_on() {
    let mut driver = Driver::new();
    let (session, _calls, events) = driver.session(0);
    let device = driver.device.clone();
    let (slot, own) = {
        let inner = device.lock();
        (inner.kept.core.state.slot(session).unwrap(), inner.kept.sessions[&session].events.clone())
    };
    let says = |text: &[u8]| events.send(text, &[]).unwrap();
    let received = |text: &[u8]| JournalRecord::Received {
        session,
        events: true,
        message: text.to_vec(),
        kinds: Vec::new(),
        lost: false,
    };
    let mut buffer = vec![0; MAX_PACKET];
    // It ends before it has recorded the message.
    says(b"first");
    assert!(device.take_up_sockets(session));
    assert_eq!(own.peek(&mut buffer).unwrap().length, b"first".len());
    // After that, and before it has taken it off, with another behind.
    device.act(&received(b"first"));
    says(b"other one");
    assert!(device.take_up_sockets(session));
    assert_eq!(own.peek(&mut buffer).unwrap().length, b"other one".len());
    // While it was taking it off: it has done that, or it cannot be told.
    device.act(&received(b"other one"));
    device.ledger.taken_off(slot, (session, GuestChannel::Events), 1, true);
    assert!(!device.take_up_sockets(session));
    own.discard();
    assert!(device.take_up_sockets(session));
    // And then the thread of the process that goes on.
    says(b"third");
    let heard_all = std::thread::scope(|scope| {
        let hears = scope.spawn(|| device.hear((session, slot), GuestChannel::Events, &own));
        for text in [b"a".as_slice(), b"b", b"c"] {
            says(text);
        }
        while heard(&driver, session, GuestChannel::Events) < 6 {
            std::thread::yield_now();
        }
        let left_over = device.take_up_sockets(session);
        events.shut_down();
        hears.join().unwrap();
        left_over
    });
    assert!(heard_all);
    assert_eq!(own.peek(&mut buffer).unwrap_err(), StreamError::Closed);
}

/// Threads of sessions are counted; this many are said to be there.
fn set_threads(driver: &Driver, count: usize) {
    driver.device.threads.0.store(count, Ordering::SeqCst);
}

#[test]
fn a_session_whose_events_nobody_can_hear_is_over() {
    let mut driver = Driver::new();
    let (session, calls, events) = driver.session(0);
    set_threads(&driver, MOST_THREADS);
    driver.device.converse(session);
    assert_eq!(driver.device.lock().kept.core.state.phases(), (vec![], vec![]));
    assert!(ends(&calls) && ends(&events));
    assert_eq!(driver.device.threads.0.load(Ordering::SeqCst), MOST_THREADS);
}

/// A node that stands still has a queue of connections that is full.
#[test]
fn a_node_that_stands_still_is_not_waited_for_without_an_end() {
    let path = std::env::temp_dir().join(format!("rackbus-still-{}", std::process::id()));
    let still = socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None);
    let still = still.unwrap();
    bind(&still, &SocketAddrUnix::new(&path).unwrap()).unwrap();
    listen(&still, 0).unwrap();
    let _queued = Packets::connect(&path).unwrap();
    let mut driver = Driver::of_node(path.clone());
    // One more thread may be started, and none beyond it.
    set_threads(&driver, MOST_THREADS - 1);
    driver.post(0, 14, CONTROL, &[0; 8]);
    driver.post(2, 14, CONTROL, &[0; 8]);
    driver.kick();
    assert_eq!(driver.answered(), 1);
    while driver.answered() < 2 {
        std::thread::sleep(std::time::Duration::from_millis(10));
    }
    let error = |head: u64| -> i32 {
        let place = GuestAddress(ANSWERS + head * u64::from(ROOM) + 4);
        driver.memory.memory().read_obj(place).unwrap()
    };
    assert_eq!((error(0), error(2)), (-107, -107));
    while driver.device.threads.0.load(Ordering::SeqCst) != MOST_THREADS - 1 {
        std::thread::yield_now();
    }
    let _ = std::fs::remove_file(&path);
}

/// Memory whose owner has ended is released by the process that serves and by its standby, when it is too much.
#[test]
fn memory_that_has_ended_is_kept_up_to_a_bound_in_both_processes() {
    let mut driver = Driver::new();
    let (session, _calls, _events) = driver.session(0);
    let core = encode(&driver.device.lock().kept.core);
    let mut standby = DeviceParts::new(decode(&core).unwrap());
    let size = WINDOW / 2 + 4096;
    let mut happens = |record: JournalRecord, memory: Option<OwnedFd>| {
        let beside = |memory: &Option<OwnedFd>| -> Vec<OwnedFd> {
            memory.iter().map(|it| it.try_clone().unwrap()).collect()
        };
        let outcome = standby.take(&record, beside(&memory));
        standby.release(&outcome.actions);
        driver.device.act_with(&record, beside(&memory));
        let sorted = |parts: &DeviceParts| {
            let memory = parts.held.iter().filter(|(_, it)| matches!(it, KeptFile::Memory(_)));
            memory.map(|(number, _)| *number).collect::<std::collections::BTreeSet<_>>()
        };
        (sorted(&driver.device.lock().kept), sorted(&standby))
    };
    let mut held = Vec::new();
    for connection in 0..3 {
        let memory = SharedMemory::reserve("segment", size).unwrap();
        let connection = Handle(connection);
        let connected = Connected { connection, size, write: true, address: None };
        let message = encode(&Reply::Connected(connected));
        let kinds = vec![DescriptorKind::Memory { size, write: true }];
        let record =
            JournalRecord::Received { session, events: false, message, kinds, lost: false };
        held.push(happens(record, Some(memory)).1);
    }
    let mut now = held[2].clone();
    for connection in [1, 0, 2] {
        let change = ConnectionChange::Removed;
        let connection = Handle(connection);
        let message = encode(&SessionEvent::Remote { connection, change });
        let record = JournalRecord::Received {
            session,
            events: true,
            message,
            kinds: Vec::new(),
            lost: false,
        };
        let (serving, follows) = happens(record, None);
        // The standby was not told of the page that was there before.
        assert_eq!(serving.difference(&follows).count(), 1);
        assert!(follows.is_subset(&now));
        now = follows;
    }
    // Those that ended first and second are gone.
    assert_eq!(now, held[2].difference(&held[1]).copied().collect());
}
