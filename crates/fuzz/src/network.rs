//! What the node of another machine says about the rack's network: rings are asked for, opened and closed, frames come for
//! them, and windows are given back, as bytes over a connection.
//!
//! Whatever it says, its frames reach only ports that it may send to, and come as frames that there can be; when it is gone,
//! the next one is served, and a port can be opened anew. A panic of a thread that speaks to it is one of the target.

use std::collections::BTreeMap;
use std::io::Write;
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::net::UnixStream;
use std::sync::{Arc, Condvar, Mutex};

use rackbus_fabric::FabricHandle;
use rackbus_fabric::rack::Rack;
use rackbus_link::{
    Connect, Conversation, Hello, IncomingConnection, LinkError, Purpose, VERSIONS,
};
use rackbus_memory::{
    Carrier, HandleRef, Handles, PacketStream, SharedMemory, Stream, StreamError,
};
use rackbus_net::port::{MAX_FRAME, MIN_FRAME};
use rackbus_net::{MacAddress, NetworkPort, Offload, PortOptions, PortSource, Stations};
use rackbus_node::NetworkService;

use crate::input::Input;

const FUNCTION: &str = "alpha/nic0.vf1";
/// Valid messages and parts of them, for the fuzzer to put together.
pub const WORDS: &[&str] = &[
    "{\"open\":{\"request\":1,\"from\":\"beta\",\"lane\":0,\"to\":\"alpha/nic0.vf1\"}}",
    "{\"opened\":{\"request\":1,\"ring\":1}}",
    "{\"refused\":{\"request\":1,\"reason\":\"\"}}",
    "{\"close\":{\"ring\":1}}",
    "{\"closed\":{\"ring\":1}}",
    "\"lane\":15",
    "18446744073709551615",
    "\"beta/nic0.vf1\"",
    "\"alpha\"",
];

/// What heads are of.
const MESSAGE: u8 = 1;
const FRAME: u8 = 2;
const CREDIT: u8 = 3;
const LOOK: u8 = 4;
const SEEN: u8 = 5;
/// Bytes that a peer says at most.
const MOST: usize = 4 << 20;

/// Before everything that is said: a length, what follows, a header, and a ring.
fn head(kind: u8, length: u32, header: &[u8], ring: u64) -> Vec<u8> {
    let mut known = [0; 10];
    known[..header.len().min(10)].copy_from_slice(&header[..header.len().min(10)]);
    [&length.to_le_bytes()[..], &[kind, 0], &known, &ring.to_le_bytes()].concat()
}

fn message(text: &str) -> Vec<u8> {
    [head(MESSAGE, text.len() as u32, &[], 0), text.as_bytes().to_vec()].concat()
}

/// The stations of the rack, as every node knows them.
fn rack() -> (Rack, BTreeMap<String, PortOptions>) {
    let text = "name = \"lab\"\n[network]\nmtu = 9000\nqueues = 2\n[hosts.alpha.devices.nic0]\nkind = \"nic\"\n\
                functions = 1\n[hosts.beta.devices.nic0]\nkind = \"nic\"\nfunctions = 1\n";
    let (rack, _) = rackbus_devices::class::parse_rack("rack.toml", text).expect("it is right");
    let names = [FUNCTION, "beta/nic0.vf1"].map(str::to_owned);
    (rack, names.into_iter().map(|name| (name, PortOptions::default())).collect())
}

fn mac(name: &str) -> MacAddress {
    let (rack, ports) = rack();
    Stations::of(&rack, &ports).named(name).expect("it is one of them").1.mac
}

/// When a peer has said all, and whether who heard it panicked.
#[derive(Debug, Default)]
struct End(Mutex<Option<bool>>, Condvar);

impl End {
    fn say(&self, panicked: bool) {
        self.0.lock().expect("nobody panics with it").get_or_insert(panicked);
        self.1.notify_all();
    }

    fn wait(&self) {
        let mut said = self.0.lock().expect("nobody panics with it");
        while said.is_none() {
            said = self.1.wait(said).expect("nobody panics with it");
        }
        assert!(*said == Some(false), "who spoke to the peer panicked");
    }
}

/// A peer that says what it is to say, in pieces, and takes so many bytes at a time.
#[derive(Debug, Clone)]
struct Peer {
    said: Arc<Mutex<(Vec<u8>, usize)>>,
    pieces: usize,
    takes: usize,
    end: Arc<End>,
    /// Always readable: who waits is told at once that there is more.
    socket: Arc<UnixStream>,
    _other: Arc<UnixStream>,
}

impl Peer {
    fn new(said: Vec<u8>, choice: u8) -> Peer {
        let (socket, mut other) = UnixStream::pair().expect("there are descriptors");
        other.write_all(&[0]).expect("it is open");
        Peer {
            said: Arc::new(Mutex::new((said, 0))),
            pieces: [1 << 20, 5000, 57][usize::from(choice) % 3],
            takes: [1 << 20, 100][usize::from(choice / 3) % 2],
            end: Arc::default(),
            socket: Arc::new(socket),
            _other: Arc::new(other),
        }
    }
}

impl Carrier for Peer {
    fn send(&mut self, bytes: &[u8]) -> Result<usize, StreamError> {
        // Every other time.
        let some = std::mem::take(&mut self.takes);
        let count = bytes.len().min(some);
        if some == 0 {
            self.takes = 1 << 20;
        }
        Ok(count)
    }

    fn flush(&mut self) -> Result<bool, StreamError> {
        Ok(true)
    }

    fn receive(&mut self, buffer: &mut [u8]) -> Result<usize, StreamError> {
        let (said, at) = &mut *self.said.lock().expect("nobody panics with it");
        let rest = &said[*at..];
        if rest.is_empty() && !buffer.is_empty() {
            return Err(StreamError::Closed);
        }
        let count = rest.len().min(buffer.len()).min(self.pieces);
        buffer[..count].copy_from_slice(&rest[..count]);
        *at += count;
        Ok(count)
    }

    fn socket(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }

    fn shut_down(&self) {
        self.end.say(std::thread::panicking());
    }
}

impl Stream for Peer {
    fn send(&self, _parts: &[&[u8]], _handles: &[HandleRef<'_>]) -> Result<(), StreamError> {
        Ok(())
    }

    fn receive(&self, _buffer: &mut [u8], _handles: &mut Handles) -> Result<(), StreamError> {
        Err(StreamError::Closed)
    }

    fn wait_closed(&self) {}

    fn is_closed(&self) -> bool {
        true
    }

    fn shut_down(&self) {}
}

impl Conversation for Peer {
    fn offer_packets(&self) -> Result<Arc<dyn PacketStream>, StreamError> {
        Err(StreamError::Closed)
    }

    fn take_packets(&self) -> Result<Arc<dyn PacketStream>, StreamError> {
        Err(StreamError::Closed)
    }

    fn carrier(&self) -> Option<Box<dyn Carrier>> {
        Some(Box::new(self.clone()))
    }
}

/// Connects to one peer, once.
#[derive(Debug)]
struct Once(Mutex<Option<Peer>>);

impl Connect for Once {
    fn address(&self, host: &str) -> String {
        host.to_owned()
    }

    fn connect(&self, address: &str, _hello: &Hello) -> Result<Arc<dyn Conversation>, LinkError> {
        let peer = self.0.lock().expect("nobody panics with it").take();
        let cause = std::io::ErrorKind::ConnectionRefused.into();
        let refused = || LinkError::Unreachable { address: address.to_owned(), cause };
        peer.map(|peer| Arc::new(peer) as Arc<dyn Conversation>).ok_or_else(refused)
    }
}

fn alpha(peer: Option<Peer>) -> NetworkService {
    let (rack, ports) = rack();
    NetworkService::new(&rack, &ports, "alpha", Arc::new(Once(Mutex::new(peer))), true)
}

/// What a peer says: well-formed pieces, mostly, of which the input chooses.
fn script(input: &mut Input<'_>) -> Vec<u8> {
    let mut said = Vec::new();
    while !input.is_empty() && said.len() < MOST {
        match input.u8() % 8 {
            0 => said.extend(message(WORDS[usize::from(input.u8()) % 5])),
            1 => {
                let text = input.short();
                said.extend(head(MESSAGE, text.len() as u32, &[], 0));
                said.extend(text);
            }
            2 | 3 => {
                let (ring, length) = (u64::from(input.u8() & 7), input.number() as usize);
                let length = length.min(MAX_FRAME + 1);
                let choice = input.u8();
                let offload = if choice & 1 != 0 { input.bytes(10) } else { &[] };
                said.extend(head(FRAME, length as u32, offload, ring));
                let to = if choice & 2 != 0 { FUNCTION } else { "beta" };
                let from = if choice & 4 != 0 { "beta/nic0.vf1" } else { "beta" };
                let mut frame = [&mac(to).0[..], &mac(from).0, &[0x88, 0xb5]].concat();
                frame.resize(length, choice);
                said.extend(frame);
            }
            4 => {
                let (frames, bytes) = (input.number() as u32, input.number() as u32);
                said.extend(head(CREDIT, bytes, &frames.to_le_bytes(), u64::from(input.u8() & 7)));
            }
            5 => said.extend(head(LOOK, 0, &[], 0)),
            6 => said.extend(head(SEEN, 0, &[], 0)),
            _ => said.extend(input.short()),
        }
    }
    said
}

/// The node of beta asks for rings and sends frames.
fn attend(network: &NetworkService, said: Vec<u8>, choice: u8) {
    let hello = Hello {
        versions: VERSIONS,
        rack: "lab".to_owned(),
        from: "beta".to_owned(),
        to: "alpha".to_owned(),
        service: Purpose::Network,
    };
    let stream = Arc::new(Peer::new(said, choice));
    network.attend(IncomingConnection { hello, version: 1, stream });
}

/// Takes all frames that have come; how many.
fn take(port: &mut dyn NetworkPort) -> usize {
    let mut count = 0;
    while let Some(frame) = port.next() {
        let length = frame.bytes.len();
        assert!((MIN_FRAME..=MAX_FRAME).contains(&length), "a frame of {length} bytes");
        assert!(frame.offload.is_sound(length), "{:?} of {length} bytes", frame.offload);
        let source: [u8; 6] = frame.bytes.read_obj(6).expect("it is long enough");
        let known = ["beta", "beta/nic0.vf1"].map(|name| mac(name).0);
        assert!(known.contains(&source), "a frame from {source:?}");
        port.consume();
        count += 1;
    }
    count
}

fn receive(input: &mut Input<'_>, choice: u8) {
    let network = alpha(None);
    let mut port = network.port(FUNCTION).expect("nobody has it");
    port.attend(choice & 1 != 0);
    attend(&network, script(input), choice / 2);
    take(&mut *port);
    drop(port);
    // The next one is served.
    let mut port = network.port(FUNCTION).expect("nobody has it any more");
    port.attend(true);
    let open = |number: u64, queue: u8| {
        message(&format!(
            "{{\"open\":{{\"request\":{number},\"from\":\"beta\",\"lane\":{queue},\"to\":\"{FUNCTION}\"}}}}"
        ))
    };
    let frame = [&mac(FUNCTION).0[..], &mac("beta").0, &[0x88, 0xb5], &[1; 86]].concat();
    let mut said = [open(1, 0), open(2, 1)].concat();
    // Rings are numbered from 1 on, and no more than the input can have asked for were before.
    for ring in 0..MOST as u64 / 32 {
        said.extend(head(FRAME, frame.len() as u32, &[], ring + 1));
        said.extend(&frame);
        if said.len() > MOST {
            break;
        }
    }
    attend(&network, said, 0);
    assert_eq!(take(&mut *port), 2, "a frame for each of two rings");
}

fn send(input: &mut Input<'_>, choice: u8) {
    let peer = Peer::new(script(input), choice);
    let end = peer.end.clone();
    let network = alpha(Some(peer));
    let fabric = FabricHandle::of_hosts(["alpha", "beta"]).expect("they have names");
    network.start(fabric).expect("there are threads");
    let mut port = network.port(FUNCTION).expect("nobody has it");
    let memory = SharedMemory::create("frame", 4096).expect("there is memory");
    let frame = memory.whole().part(0, 100).expect("it is inside");
    frame.write_obj(0, &mac("beta").0);
    frame.write_obj(6, &mac(FUNCTION).0);
    frame.write_obj(12, &[0x88u8, 0xb5]);
    port.send(Offload::default(), &[frame]);
    end.wait();
    for _ in 0..3 {
        port.send(Offload::default(), &[frame]);
        port.flush();
    }
    take(&mut *port);
}

/// Which end is tried, and how, then what is said.
pub fn run(data: &[u8]) {
    let mut input = Input::new(data);
    let choice = input.u8();
    match choice & 1 {
        0 => receive(&mut input, choice / 2),
        _ => send(&mut input, choice / 2),
    }
}

/// Nodes that say what they should.
pub fn seeds() -> Vec<Vec<u8>> {
    let frame = |ring: u8, length: u8| vec![2, ring, length, 2];
    let asks = [
        vec![2, 0, 0],
        frame(1, 100),
        frame(1, 60),
        vec![5],
        frame(1, 200),
        vec![0, 3, 0, 0],
        frame(2, 90),
    ];
    let answers = [vec![1, 0, 1, 4, 0, 0, 1, 6, 5, 0, 4], vec![4, 1, 122, 1]];
    let refuses = vec![1, 0, 2, 6];
    let large = [vec![14, 0, 0], [3, 1, 0xe8, 0x28, 0x23, 2].repeat(40)];
    vec![asks.concat(), answers.concat(), refuses, large.concat()]
}
