//! Both ends against a peer that is played by hand: frames pass, and what breaks the protocol ends the conversation.

use std::collections::{BTreeMap, VecDeque};
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::sync::Arc;

use rackbus_fabric::rack::Rack;
use rackbus_link::shm::ShmLink;
use rackbus_net::{MacAddress, PortOptions, PortQueueId, PortSource};

use super::super::NetworkService;
use super::super::messages::{ReceiverMessage, SenderMessage};
use super::super::peers::AskingNode;
use super::*;

const FUNCTION: &str = "alpha/nic0.vf1";

/// A connection whose other end is a test.
#[derive(Debug, Clone)]
struct Played {
    to: Arc<Mutex<VecDeque<u8>>>,
    from: Arc<Mutex<Vec<u8>>>,
    /// Bytes that it takes at a time.
    takes: usize,
    /// It is over behind what was said.
    ends: bool,
    socket: Arc<UnixStream>,
}

impl Played {
    fn new() -> Played {
        Played::that_takes(usize::MAX)
    }

    fn that_takes(takes: usize) -> Played {
        let (socket, _) = UnixStream::pair().unwrap();
        let socket = Arc::new(socket);
        Played { to: Arc::default(), from: Arc::default(), takes, ends: false, socket }
    }

    fn say(&self, head: Head, behind: &[u8]) {
        let mut to = self.to.lock().unwrap();
        to.extend(head.as_bytes());
        to.extend(behind);
    }

    fn message(&self, message: &impl Serialize) {
        let text = encode(message);
        let length = (text.len() as u32).into();
        self.say(Head { length, kind: kind::MESSAGE, ..Head::default() }, &text);
    }

    fn frame(&self, ring: u64, bytes: &[u8]) {
        let length = (bytes.len() as u32).into();
        self.say(Head { length, kind: kind::FRAME, ring: ring.into(), ..Head::default() }, bytes);
    }

    /// What came, and what was behind each.
    fn heard(&self) -> Vec<(Head, Vec<u8>)> {
        let bytes = std::mem::take(&mut *self.from.lock().unwrap());
        let (mut rest, mut all) = (&bytes[..], Vec::new());
        while let Ok((head, behind)) = Head::read_from_prefix(rest) {
            let has = [kind::MESSAGE, kind::FRAME].contains(&head.kind);
            let (own, others) = behind.split_at(if has { head.length.get() as usize } else { 0 });
            all.push((head, own.to_vec()));
            rest = others;
        }
        all
    }
}

impl Carrier for Played {
    fn send(&mut self, bytes: &[u8]) -> Result<usize, StreamError> {
        // What it takes at a time has room when all of that was heard.
        let mut from = self.from.lock().unwrap();
        let count = bytes.len().min(self.takes.saturating_sub(from.len()));
        from.extend(&bytes[..count]);
        Ok(count)
    }
    fn flush(&mut self) -> Result<bool, StreamError> {
        Ok(true)
    }
    fn receive(&mut self, buffer: &mut [u8]) -> Result<usize, StreamError> {
        let mut to = self.to.lock().unwrap();
        if self.ends && to.is_empty() {
            return Err(StreamError::Closed);
        }
        let count = buffer.len().min(to.len());
        for (place, byte) in buffer.iter_mut().zip(to.drain(..count)) {
            *place = byte;
        }
        Ok(count)
    }
    fn socket(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
    fn shut_down(&self) {}
}

/// The network of alpha, which has a function.
fn network() -> NetworkService {
    let text = "name = \"t\"\n[network]\nmtu = 9000\n[hosts.alpha.devices.nic0]\nkind = \"nic\"\n\
                functions = 1\n[hosts.beta]\n";
    let (rack, _) = rackbus_devices::class::parse_rack("rack.toml", text).unwrap();
    let rack: Rack = rack;
    let ports = BTreeMap::from([(FUNCTION.to_owned(), PortOptions::default())]);
    let link = ShmLink::new("t", std::path::Path::new("/nowhere"), ["alpha", "beta"]);
    NetworkService::new(&rack, &ports, "alpha", Arc::new(link), true)
}

fn receiving(network: &NetworkService) -> (Played, ReceivingEnd) {
    let played = Played::new();
    let outbox = Arc::new(MessageQueue::new().unwrap());
    let asker = Arc::new(AskingNode::on_another_machine("beta".to_owned(), outbox.clone()));
    network.0.meet(&asker);
    let end =
        ReceivingEnd::new(&network.0, asker, Box::new(played.clone()), outbox, Instant::now());
    (played, end)
}

/// A frame of beta's for the function.
fn frame(network: &NetworkService, to: MacAddress, length: usize) -> Vec<u8> {
    let (_, beta) = network.0.stations.named("beta").unwrap();
    let mut frame = [&to.0[..], &beta.mac.0, &[0x88, 0xb5]].concat();
    frame.resize(length, 7);
    frame
}

fn open(played: &Played, end: &mut ReceivingEnd) -> u64 {
    ask(played, end).expect("it is refused")
}

/// Asks for a ring; its number, or why there is none.
fn ask(played: &Played, end: &mut ReceivingEnd) -> Result<u64, String> {
    let (from, to) = ("beta".to_owned(), FUNCTION.to_owned());
    played.message(&SenderMessage::Open { request: 5, from, queue: 0, to });
    end.turn(Instant::now()).unwrap();
    let messages = played.heard().into_iter().filter(|(head, _)| head.kind == kind::MESSAGE);
    let answers = messages.map(|(_, text)| match serde_json::from_slice(&text).unwrap() {
        ReceiverMessage::Opened { request: 5, ring } => Some(Ok(ring)),
        ReceiverMessage::Refused { request: 5, reason } => Some(Err(reason)),
        ReceiverMessage::Closed { .. } => None,
        other => panic!("{other:?}"),
    });
    answers.flatten().next().expect("it is answered")
}

#[test]
fn what_comes_for_a_ring_is_put_into_it_and_its_window_given_back() {
    let network = network();
    let mut port = network.port(FUNCTION).unwrap();
    port.attend(true);
    let (played, mut end) = receiving(&network);
    let ring = open(&played, &mut end);
    let sent = frame(&network, port.mac(), 9000);
    let (mut came, mut credit, mut frames) = (0, 0, 0);
    for round in 0..600 {
        played.frame(ring, &sent);
        played.say(Head { kind: kind::LOOK, ..Head::default() }, &[]);
        end.turn(Instant::now()).unwrap();
        // It takes nothing for a while: what has no room waits, within the window.
        while round > 150 && port.next().is_some() {
            port.consume();
            came += 1;
        }
        for (head, _) in played.heard() {
            match head.kind {
                kind::CREDIT => {
                    credit += head.length.get() as usize;
                    frames += u32::from_le_bytes(head.header[..4].try_into().unwrap());
                }
                kind::SEEN => {}
                other => panic!("{other}"),
            }
        }
        assert!((round + 1) * cost(sent.len()) - credit <= WINDOW);
    }
    assert_eq!(came, 600);
    assert!(frames > 500 && credit == frames as usize * cost(sent.len()));
}

#[test]
fn a_sender_that_breaks_the_protocol_is_disconnected() {
    let open_of = |from: &str| SenderMessage::Open {
        request: 1,
        from: from.to_owned(),
        queue: 0,
        to: FUNCTION.to_owned(),
    };
    let cases: [fn(&Played, u64); 6] = [
        |played, _| played.say(Head { kind: 9, ..Head::default() }, &[]),
        |played, _| played.say(Head { kind: kind::CREDIT, ..Head::default() }, &[]),
        |played, ring| played.frame(ring, &vec![0; MAX_FRAME + 1]),
        |played, ring| played.frame(ring, &[]),
        |played, _| {
            let length = (MAX_MESSAGE as u32 + 1).into();
            played.say(Head { length, kind: kind::MESSAGE, ..Head::default() }, &[]);
        },
        // More than the window, to a receiver that takes nothing.
        |played, ring| (0..2 * WINDOW / 60_000 + 2).for_each(|_| played.frame(ring, &[0; 60_000])),
    ];
    for (nth, breaks) in cases.into_iter().enumerate() {
        let network = network();
        let _port = network.port(FUNCTION).unwrap();
        let (played, mut end) = receiving(&network);
        let ring = open(&played, &mut end);
        breaks(&played, ring);
        let over = (0..40).find_map(|_| end.turn(Instant::now()).err());
        assert!(matches!(over, Some(Over::Violation)), "case {nth}: {over:?}");
    }
    // A station of another host is refused, and nothing else.
    let network = network();
    let _port = network.port(FUNCTION).unwrap();
    let (played, mut end) = receiving(&network);
    played.message(&open_of("alpha"));
    end.turn(Instant::now()).unwrap();
    let said = String::from_utf8(played.heard().remove(0).1).unwrap();
    assert!(said.contains("refused") && said.contains("beta has no port alpha"), "{said}");
    // So is what is for a ring that there is not.
    played.frame(77, &[0; 100]);
    end.turn(Instant::now()).unwrap();
}

#[test]
fn a_receiver_that_gives_back_what_it_has_not_is_disconnected() {
    let network = network();
    let station = |name: &str| network.0.stations.named(name).unwrap().0;
    let (from, to) = (PortQueueId { station: station(FUNCTION), number: 0 }, station("beta"));
    let sending = || {
        let (played, outbox) = (Played::new(), Arc::new(MessageQueue::new().unwrap()));
        let carrier = Box::new(played.clone());
        let mut end = SendingEnd::new(&network.0, "beta", carrier, outbox, Instant::now());
        let ring = end.open(3, (from, to)).unwrap();
        (played, end, ring)
    };
    let (played, mut end, mut ring) = sending();
    let cost_of = cost(500);
    for _ in 0..3000 {
        let _ = ring.send(&[0; FRAME_HEADER], &[1; 500], &[]);
        ring.flush();
        end.turn(Instant::now()).unwrap();
    }
    let sent = played.heard().len();
    assert_eq!(sent, WINDOW / cost_of, "as many as the window has");
    let credit = |frames: u32, bytes: usize| {
        let mut head = Head { kind: kind::CREDIT, ring: 3.into(), ..Head::default() };
        head.length = (bytes as u32).into();
        head.header[..4].copy_from_slice(&frames.to_le_bytes());
        head
    };
    played.say(credit(2, 2 * cost_of), &[]);
    end.turn(Instant::now()).unwrap();
    end.turn(Instant::now()).unwrap();
    assert_eq!(played.heard().len(), 2, "as many as were given back");
    // All frames, and not their bytes: it would never rest.
    played.say(credit(sent as u32, 0), &[]);
    assert!(matches!(end.turn(Instant::now()), Err(Over::Violation)));
    for head in [credit(1, WINDOW + 1), credit(WINDOW as u32, 0), Head { kind: 9, ..credit(0, 0) }]
    {
        let (played, mut end, _ring) = sending();
        played.say(head, &[]);
        assert!(matches!(end.turn(Instant::now()), Err(Over::Violation)));
    }
}

/// The connection never takes all that there is: what it took is forgotten nevertheless.
#[test]
fn a_slow_connection_holds_no_more_than_is_on_its_way() {
    let mut wire = Wire::new(Box::new(Played::new()), Instant::now());
    let most = wire.out.capacity();
    for _ in 0..1000 {
        let played = Played::that_takes(GATHERED / 2);
        wire.carrier = Box::new(played);
        while wire.has_room() {
            wire.put(&Head { kind: kind::LOOK, ..Head::default() });
        }
        wire.give().unwrap();
        assert!(!wire.out.is_empty() && wire.out.len() <= 2 * most, "{}", wire.out.len());
    }
    assert!(wire.out.capacity() <= 2 * most);
}

#[test]
fn what_came_before_the_end_of_a_connection_is_put_in() {
    let network = network();
    let mut port = network.port(FUNCTION).unwrap();
    port.attend(true);
    let (mut played, mut end) = receiving(&network);
    let ring = open(&played, &mut end);
    played.ends = true;
    end.wire.carrier = Box::new(played.clone());
    (0..3).for_each(|_| played.frame(ring, &frame(&network, port.mac(), 60)));
    assert!((0..3).any(|_| matches!(end.turn(Instant::now()), Err(Over::Lost(_)))));
    drop(end);
    for _ in 0..3 {
        assert!(port.next().is_some());
        port.consume();
    }
}

/// Each ring has memory and descriptors of this process until it is empty.
#[test]
fn a_node_has_few_rings_to_a_receiver_that_stands_still() {
    let network = network();
    let mut port = network.port(FUNCTION).unwrap();
    port.attend(true);
    let (played, mut end) = receiving(&network);
    let sent = frame(&network, port.mac(), 60);
    let mut opened = 0;
    for _ in 0..50 {
        if let Ok(ring) = ask(&played, &mut end) {
            opened += 1;
            played.frame(ring, &sent);
            end.turn(Instant::now()).unwrap();
        }
    }
    assert!((2..10).contains(&opened), "{opened} rings");
    assert!(ask(&played, &mut end).unwrap_err().contains("has not taken what came"));
    let mut came = 0;
    while port.next().is_some() {
        port.consume();
        came += 1;
    }
    assert_eq!(came, opened, "in their order, and none is lost");
    open(&played, &mut end);
}

/// As each costs a thread and its memory.
#[test]
fn a_host_is_heard_by_its_newest_connection_alone() {
    let network = network();
    let _port = network.port(FUNCTION).unwrap();
    let mut ends: Vec<_> = (0..3).map(|_| receiving(&network)).collect();
    let (played, mut newest) = ends.pop().unwrap();
    for (_, end) in &mut ends {
        assert!(matches!(end.turn(Instant::now()), Err(Over::Ended)));
    }
    open(&played, &mut newest);
}
