//! Two hosts' links through a bridge whose windows lead into memory of this process.

use std::net::TcpListener;
use std::os::fd::AsFd;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use rackbus_memory::packets::MAX_PACKET;
use rackbus_memory::{AdaptiveSpin, Event, Handles, Stream};

use super::layout::{SLOTS, SlotWord};
use super::protocol::SILENCE;
use super::*;
use crate::shm::ShmLink;
use cable::Cable;

#[path = "../../tests/common/cable.rs"]
mod cable;
mod faults;
mod revoked;

const HOSTS: [&str; 2] = ["alpha", "beta"];
const LIMIT: Duration = Duration::from_secs(20);

/// Two hosts that a bridge joins.
struct Pair {
    /// The links behind, in a folder.
    behind: [Arc<dyn Link>; 2],
    _folder: tempfile::TempDir,
    /// Where alpha listens, if by TCP.
    listener: Option<TcpListener>,
    revocations: [Revocations; 2],
    cable: Cable,
    links: [Option<NtbLink>; 2],
}

impl Pair {
    fn new() -> Pair {
        let folder = tempfile::tempdir().unwrap();
        for host in HOSTS {
            std::fs::create_dir(folder.path().join(host)).unwrap();
        }
        let behind = HOSTS
            .map(|_| -> Arc<dyn Link> { Arc::new(ShmLink::new("demo", folder.path(), HOSTS)) });
        Pair::before(behind, folder, None, Default::default())
    }

    fn before(
        behind: [Arc<dyn Link>; 2],
        folder: tempfile::TempDir,
        listener: Option<TcpListener>,
        revocations: [Revocations; 2],
    ) -> Pair {
        let (cable, links) = (Cable::new(), [None, None]);
        let mut pair = Pair { behind, _folder: folder, listener, revocations, cable, links };
        pair.start(0);
        pair.start(1);
        pair.wait_until(|status| status.up);
        pair
    }

    fn start(&mut self, end: usize) {
        let bridges = [(HOSTS[1 - end].to_owned(), self.cable.opening(end))];
        let link = NtbLink::new(self.behind[end].clone(), "demo", HOSTS[end], bridges).unwrap();
        self.links[end] = Some(link.with_revocations(self.revocations[end].clone()));
    }

    fn link(&self, end: usize) -> &NtbLink {
        self.links[end].as_ref().unwrap()
    }

    fn status(&self, end: usize) -> BridgeStatus {
        self.link(end).bridges().remove(0)
    }

    /// Waits until both ends are as they are wanted.
    fn wait_until(&self, wanted: impl Fn(&BridgeStatus) -> bool) {
        let begun = Instant::now();
        while !(0..2).all(|end| wanted(&self.status(end))) {
            assert!(begun.elapsed() < LIMIT, "{:?}", self.status(0));
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    /// Waits until one end is as it is wanted.
    fn wait_for_end(&self, end: usize, wanted: impl Fn(&BridgeStatus) -> bool) {
        let begun = Instant::now();
        while !wanted(&self.status(end)) {
            assert!(begun.elapsed() < LIMIT, "{:?}", self.status(end));
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    /// A conversation that beta begins with alpha: alpha's stream, and beta's.
    fn meet(&self, hello: &Hello) -> [Arc<dyn Conversation>; 2] {
        self.meeting(hello).unwrap()
    }

    /// The same, which alpha may refuse.
    fn meeting(&self, hello: &Hello) -> Result<[Arc<dyn Conversation>; 2], LinkError> {
        let listener = match &self.listener {
            Some(tcp) => {
                let tcp = ResourceHandle::of_descriptor(tcp.try_clone().unwrap().into());
                self.link(0).listen_on("alpha", tcp).unwrap()
            }
            None => self.link(0).listen("alpha").unwrap(),
        };
        let hear = std::thread::spawn(move || {
            listener.accept().unwrap().hear().map(|it| it.accept().unwrap())
        });
        let address = self.link(1).locate("alpha").unwrap();
        let ours = self.link(1).connect(&address, hello);
        let theirs = hear.join().unwrap();
        let ours = ours?;
        Ok([theirs.unwrap(), ours])
    }
}

fn hello(service: Purpose) -> Hello {
    let (rack, from, to) = ("demo".into(), "beta".into(), "alpha".into());
    Hello { versions: VERSIONS, rack, from, to, service }
}

/// What takes a window or a session is not for the NTB.
fn function() -> Purpose {
    Purpose::Function { device: "nvme0".into(), lease: 3, epoch: 7 }
}

fn exchange(streams: &[Arc<dyn Conversation>; 2], bytes: &[u8]) {
    for (from, to) in [(0, 1), (1, 0)] {
        let mut received = vec![0; bytes.len()];
        std::thread::scope(|scope| {
            scope.spawn(|| streams[from].send(&[&bytes[..1], &bytes[1..]], &[]).unwrap());
            streams[to].receive(&mut received, &mut Handles::new()).unwrap();
        });
        assert!(received == bytes);
    }
}

fn pattern(length: usize) -> Vec<u8> {
    (0..length).map(|at| (at * 31 + at / 253) as u8).collect()
}

#[test]
fn bytes_pass_through_the_memory_of_both_hosts_in_either_direction() {
    let pair = Pair::new();
    let streams = pair.meet(&hello(Purpose::Segments));
    for length in [1, 3, 4, 5, 4096, 100_001] {
        exchange(&streams, &pattern(length));
    }
    // Neither is told of handles that lead nowhere there.
    let (socket, _other) = UnixStream::pair().unwrap();
    assert!(streams[0].send(&[&[1]], &[Stream::handle(&socket).unwrap()]).is_err());
    let [alpha, beta] = [pair.status(0), pair.status(1)];
    assert_eq!((alpha.conversations, beta.conversations), ([0, 1], [1, 0]));
    assert!(alpha.bytes[0] > 100_000 && beta.bytes[0] > 100_000, "{alpha:?}");
    assert_eq!((alpha.violations, beta.violations), (0, 0));
    // The end of one is that of the other.
    streams[1].shut_down();
    streams[0].wait_closed();
    assert_eq!(streams[0].receive(&mut [0], &mut Handles::new()), Err(StreamError::Closed));
}

#[test]
fn whole_messages_pass_and_a_reader_that_takes_none_is_not_waited_for() {
    let pair = Pair::new();
    let [theirs, ours] = pair.meet(&hello(Purpose::Segments));
    let (theirs, ours) = (theirs.take_packets().unwrap(), ours.offer_packets().unwrap());
    assert!(!ours.passes_memory());
    let mut spin = AdaptiveSpin::default();
    let mut buffer = vec![0; MAX_PACKET];
    let deadline = || Some(Instant::now() + LIMIT);
    for length in [1, 100, MAX_PACKET] {
        theirs.send(&pattern(length), &[]).unwrap();
        let packet = ours.receive(&mut buffer, &mut spin, deadline()).unwrap();
        assert_eq!(buffer[..packet.length], pattern(length));
    }
    let mut sent = 0;
    while ours.send(&pattern(MAX_PACKET), &[]).is_ok() {
        sent += 1;
        assert!(sent < 10_000, "a peer that takes nothing has no bound");
    }
    for _ in 0..sent {
        let packet = theirs.receive(&mut buffer, &mut spin, deadline()).unwrap();
        assert!(buffer[..packet.length] == pattern(MAX_PACKET));
    }
    ours.wait_sendable();
    ours.send(&[7], &[]).unwrap();
    assert_eq!(theirs.receive(&mut buffer, &mut spin, deadline()).unwrap().length, 1);
    drop(ours);
    let end = theirs.receive(&mut buffer, &mut spin, deadline()).map(|packet| packet.length);
    assert_eq!(end, Err(StreamError::Closed));
}

#[test]
fn what_is_carried_waits_for_room_and_arrives() {
    let pair = Pair::new();
    let streams = pair.meet(&hello(Purpose::Network));
    let [mut theirs, mut ours] = streams.each_ref().map(|stream| stream.carrier().unwrap());
    let all = pattern(3 << 20);
    let (mut sent, mut received) = (0, Vec::<u8>::new());
    let mut buffer = vec![0; 10_000];
    let begun = Instant::now();
    while received.len() < all.len() {
        sent += ours.send(&all[sent..]).unwrap();
        assert!(ours.flush().unwrap());
        let count = theirs.receive(&mut buffer).unwrap();
        received.extend(&buffer[..count]);
        assert!(begun.elapsed() < LIMIT);
    }
    assert!(received == all);
    ours.shut_down();
    Event::wait_any(&[theirs.socket()], None);
    // What was carried may go on by another conversation.
    let end = theirs.receive(&mut buffer);
    assert_eq!(end, Err(StreamError::Socket(rustix::io::Errno::CONNRESET)));
}

#[test]
fn functions_go_by_the_link_behind() {
    let pair = Pair::new();
    let streams = pair.meet(&hello(function()));
    exchange(&streams, b"hello");
    assert_eq!(pair.status(1).conversations, [0, 0]);
    // One that comes through the NTB all the same is refused, and so is whoever claims to be another host.
    let stranger = Hello { from: "gamma".into(), ..hello(Purpose::Segments) };
    for (wrong, said) in
        [(hello(function()), "by TCP"), (stranger, "leads to beta, and not to gamma")]
    {
        let listener = pair.link(0).listen("alpha").unwrap();
        let hear = std::thread::spawn(move || listener.accept().unwrap().hear().is_none());
        let socket = pair.link(1).ends["alpha"].begin().unwrap();
        let stream = NtbConversation::new(socket).unwrap();
        send_frame(&stream, &wrong).unwrap();
        let reply: HelloReply = receive_frame(&stream).unwrap().unwrap();
        assert!(
            matches!(&reply, HelloReply::Refused(reason) if reason.contains(said)),
            "{reply:?}"
        );
        assert!(hear.join().unwrap());
    }
}

#[test]
fn a_host_that_dies_is_noticed_within_a_second_and_is_there_again_when_it_lives() {
    let mut pair = Pair::new();
    for dead in [0, 1] {
        let streams = pair.meet(&hello(Purpose::Segments));
        exchange(&streams, b"hello");
        let [alpha, beta] = streams;
        let lives = if dead == 0 { beta } else { alpha };
        // Nothing is said, as by a process that was killed.
        pair.cable.silent[dead].store(true, Ordering::Relaxed);
        let begun = Instant::now();
        lives.wait_closed();
        assert!(begun.elapsed() < SILENCE + Duration::from_millis(250), "{:?}", begun.elapsed());
        let hello = hello(Purpose::Segments);
        if dead == 0 {
            let error = pair.link(1).connect("", &hello).err().unwrap().to_string();
            assert!(error.contains("not there, at the other end of the NTB"), "{error}");
        }
        pair.links[dead] = None;
        pair.cable.silent[dead].store(false, Ordering::Relaxed);
        pair.start(dead);
        pair.wait_until(|status| status.up);
        exchange(&pair.meet(&hello), &pattern(10_000));
        assert_eq!(pair.status(1 - dead).losses, 1);
    }
}

#[test]
fn an_ntb_that_was_reset_is_opened_anew() {
    let pair = Pair::new();
    let streams = pair.meet(&hello(Purpose::Segments));
    pair.cable.works.store(false, Ordering::Relaxed);
    streams.iter().for_each(|stream| stream.wait_closed());
    pair.wait_until(|status| status.up);
    exchange(&pair.meet(&hello(Purpose::Segments)), b"again");
}

/// Bytes may be missing before those that come then.
#[test]
fn what_comes_after_the_link_was_cut_is_given_to_nobody() {
    let pair = Pair::new();
    for end in [0, 1] {
        let streams = pair.meet(&hello(Purpose::Segments));
        exchange(&streams, b"whole");
        pair.cable.cut[end].store(true, Ordering::Relaxed);
        // The conversation may be over before that, too.
        let _ = streams[1 - end].send(&[b"rest"], &[]);
        let end = streams[end].receive(&mut [0; 1], &mut Handles::new());
        assert_eq!(end, Err(StreamError::Closed));
        streams.iter().for_each(|stream| stream.wait_closed());
        pair.wait_until(|status| status.up);
    }
    exchange(&pair.meet(&hello(Purpose::Segments)), b"again");
    assert_eq!([pair.status(0).violations, pair.status(1).violations], [0, 0]);
}

#[test]
fn a_sleeping_end_is_woken_by_a_doorbell() {
    let pair = Pair::new();
    let streams = pair.meet(&hello(Purpose::Segments));
    let slept = |end: usize, before: u64| {
        let begun = Instant::now();
        while pair.status(end).sleeps == before {
            assert!(begun.elapsed() < LIMIT);
            std::thread::sleep(Duration::from_millis(1));
        }
    };
    slept(0, 0);
    for _ in 0..10 {
        let before = pair.status(0).sleeps;
        streams[1].send(&[&[7]], &[]).unwrap();
        streams[0].receive(&mut [0], &mut Handles::new()).unwrap();
        slept(0, before);
    }
    let [alpha, beta] = [pair.status(0), pair.status(1)];
    assert!(alpha.doorbells[1] >= 5 && beta.doorbells[0] >= 5, "{alpha:?} {beta:?}");
}

/// Each connects again and again without a word, so that somebody of it is always there.
#[test]
fn connections_through_the_ntb_keep_those_of_the_link_behind_not_waiting() {
    let pair = Pair::new();
    let inner = pair.behind[0].listen("alpha").unwrap();
    let behind_waits = inner.handle().unwrap().as_descriptor().try_clone_to_owned().unwrap();
    let listener = pair.link(0).listening(inner).unwrap();
    let begin = || {
        let socket = pair.link(1).ends["alpha"].begin().ok();
        socket.map(|socket| NtbConversation::new(socket).unwrap())
    };
    let open: Vec<_> = (0..SLOTS / 2).filter_map(|_| begin()).collect();
    pair.wait_until(|status| status.conversations.iter().sum::<u64>() == open.len() as u64);
    let address = pair.behind[1].address("alpha");
    let (behind, said) = (pair.behind[1].clone(), hello(Purpose::Segments));
    let connected = std::thread::spawn(move || behind.connect(&address, &said).map(drop));
    Event::wait_any(&[behind_waits.as_fd()], None);
    // Those that came through the NTB are all there; the other one is heard long before the last of them.
    let heard = (0..open.len()).find_map(|_| {
        let caller = listener.accept().unwrap();
        (!caller.is_slow()).then(|| caller.hear().unwrap().accept().unwrap())
    });
    assert!(heard.is_some());
    connected.join().unwrap().unwrap();
}

/// A node that waited with its hand on the gate could not be restarted.
#[test]
fn a_listener_whose_caller_somebody_else_has_taken_waits_for_nobody() {
    let pair = Pair::new();
    let behind = pair.behind[0].listen("alpha").unwrap();
    let again = behind.handle().unwrap().as_descriptor().try_clone_to_owned().unwrap();
    let again = pair.behind[0].listen_on("alpha", ResourceHandle::of_descriptor(again)).unwrap();
    let listeners = [behind, again].map(|inner| pair.link(0).listening(inner).unwrap());
    let arrivals = listeners.each_ref().map(|listener| listener.arrival());
    let is_there = |arrival| Event::wait_any(&[arrival], Some(LIMIT.as_nanos() as u64));
    let none = |at: usize| listeners[at].accept_arrived().unwrap().is_none();
    assert!(none(0) && none(1), "nobody has come");

    let through = pair.link(1).ends["alpha"].begin().unwrap();
    assert!(arrivals.into_iter().all(is_there));
    assert!(listeners[0].accept_arrived().unwrap().unwrap().is_slow());
    assert!(none(1) && none(0), "the other one has it");

    let address = pair.behind[1].address("alpha");
    let (link, said) = (pair.behind[1].clone(), hello(Purpose::Segments));
    let connected = std::thread::spawn(move || link.connect(&address, &said).map(drop));
    assert!(arrivals.into_iter().all(is_there));
    let caller = listeners[1].accept_arrived().unwrap().unwrap();
    assert!(none(0) && none(1), "the other one has it");
    caller.hear().unwrap().accept().unwrap();
    connected.join().unwrap().unwrap();
    drop(through);
}

#[test]
fn conversations_are_as_many_as_there_are_places() {
    let pair = Pair::new();
    let begin = || NtbConversation::new(pair.link(1).ends["alpha"].begin().unwrap()).unwrap();
    let mut open: Vec<_> = (0..SLOTS / 2).map(|_| begin()).collect();
    pair.wait_until(|status| status.conversations.iter().sum::<u64>() == SLOTS as u64 / 2);
    // One more ends at once; those that are there do not.
    begin().wait_closed();
    assert!(open.iter().all(|stream| !stream.is_closed()));
    open.pop();
    let begun = Instant::now();
    while begin().receive(&mut [0], &mut Handles::new()) == Err(StreamError::Closed) {
        assert!(begun.elapsed() < LIMIT, "a place is not given back");
    }
}

/// A store through an NTB may take as long as its cable likes.
#[test]
fn conversations_can_be_wanted_while_one_is_begun_through_the_bridge() {
    let pair = Pair::new();
    let (end, heads) = (pair.link(1).ends["alpha"].clone(), pair.cable.layout.heads().0);
    let (tell, told) = std::sync::mpsc::channel();
    let (wanting, is_first) = (end.clone(), std::sync::atomic::AtomicBool::new(true));
    let set = pair.cable.before_store.set(Box::new(move |from, at| {
        if from == 1 && at >= heads && is_first.swap(false, Ordering::Relaxed) {
            // On another thread: a lock that is held fails this test instead of stopping it.
            let (wanting, (said, heard)) = (wanting.clone(), std::sync::mpsc::channel());
            std::thread::spawn(move || said.send(wanting.begin().is_ok()));
            let _ = tell.send(heard.recv_timeout(LIMIT / 2));
        }
    }));
    assert!(set.is_ok());
    let _socket = end.begin().unwrap();
    assert_eq!(told.recv_timeout(LIMIT).unwrap(), Ok(true));
}

#[test]
fn what_a_peer_stores_that_makes_no_sense_ends_that_conversation_alone() {
    let pair = Pair::new();
    let [one, other] = [(); 2].map(|()| pair.meet(&hello(Purpose::Segments)));
    exchange(&one, b"one");
    exchange(&other, b"other");
    // beta's slots are the odd ones; the second of them is the other conversation's.
    let at = pair.cable.layout.word(3, SlotWord::Put) as usize;
    pair.cable.place(0).arena.whole().store_u32(at, u32::MAX / 2, Ordering::Release).unwrap();
    other[0].wait_closed();
    other[1].wait_closed();
    exchange(&one, b"still");
    assert_eq!(pair.status(0).violations, 1);
}
