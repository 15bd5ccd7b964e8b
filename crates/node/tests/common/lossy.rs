//! A link that delays, refuses and loses conversations, over the shared-memory one. What happens to a
//! conversation is drawn from a seed; threads run as they like, so a seed repeats the faults that each
//! conversation has, not the whole run.

use std::os::fd::BorrowedFd;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use rackbus_link::shm::ShmLink;
use rackbus_link::{
    Caller, Connect, Conversation, Hello, IncomingConnection, Link, LinkError, Listener,
};
use rackbus_memory::packets::Packet;
use rackbus_memory::{AdaptiveSpin, HandleRef, Handles, PacketStream, Stream, StreamError};
use rackbus_seeds::Random;

/// What all conversations of a rack have in common.
#[derive(Debug)]
pub struct Faults {
    random: Mutex<Random>,
    /// Nothing is delayed, refused or lost any more.
    over: AtomicBool,
    /// Conversations that were refused or lost.
    injected: AtomicU64,
}

impl Faults {
    /// Faults that `seed` decides.
    pub fn new(seed: u64) -> Arc<Faults> {
        Arc::new(Faults {
            random: Mutex::new(Random(seed)),
            over: AtomicBool::new(false),
            injected: AtomicU64::new(0),
        })
    }

    /// A host's link with these faults, over another one.
    pub fn link(self: &Arc<Self>, inner: ShmLink) -> Arc<dyn Link> {
        Arc::new(Lossy { inner, faults: self.clone() })
    }

    /// From now on nothing is delayed, refused or lost; how many conversations were.
    pub fn end(&self) -> u64 {
        self.over.store(true, Ordering::Relaxed);
        self.injected.load(Ordering::Relaxed)
    }

    fn draw<T>(&self, draw: impl FnOnce(&mut Random) -> T) -> Option<T> {
        let over = self.over.load(Ordering::Relaxed);
        (!over).then(|| draw(&mut self.random.lock().unwrap()))
    }

    /// A conversation that is as it is drawn: some are lost after a few messages.
    fn conversation(self: &Arc<Self>, inner: Arc<dyn Conversation>) -> Arc<dyn Conversation> {
        match self.lifetime(50) {
            Some(lifetime) => Arc::new(LossyConversation { inner, lifetime, faults: self.clone() }),
            None => inner,
        }
    }

    /// The same of packets. Hosts keep such a conversation as long as it lasts: all of them are lost.
    fn packets(self: &Arc<Self>, inner: Arc<dyn PacketStream>) -> Arc<dyn PacketStream> {
        match self.lifetime(100) {
            Some(lifetime) => Arc::new(LossyPackets { inner, lifetime }),
            None => inner,
        }
    }

    /// `lost` of a hundred conversations end by themselves.
    fn lifetime(self: &Arc<Self>, lost: u64) -> Option<Lifetime> {
        self.draw(|random| {
            let left = random.chance(lost).then(|| random.below(120) as u64);
            Lifetime {
                left: AtomicU64::new(left.unwrap_or(u64::MAX)),
                random: Mutex::new(random.fork()),
                faults: self.clone(),
            }
        })
    }
}

/// How long a conversation lasts, and which of its messages are delayed.
#[derive(Debug)]
struct Lifetime {
    /// Messages that still go through.
    left: AtomicU64,
    random: Mutex<Random>,
    faults: Arc<Faults>,
}

impl Lifetime {
    /// A message is to go through; false when it is lost, with the conversation.
    fn pass(&self) -> bool {
        if self.faults.over.load(Ordering::Relaxed) {
            return true;
        }
        let one_less = |left: u64| left.checked_sub(1);
        let passes = self.left.fetch_update(Ordering::Relaxed, Ordering::Relaxed, one_less).is_ok();
        if !passes {
            self.faults.injected.fetch_add(1, Ordering::Relaxed);
        }
        passes
    }

    fn is_drawn(&self, percent: u64) -> bool {
        !self.faults.over.load(Ordering::Relaxed) && self.random.lock().unwrap().chance(percent)
    }

    /// Sleeps for up to 2 ms before some of the messages.
    fn delay(&self) {
        if self.is_drawn(5) {
            let micros = self.random.lock().unwrap().below(2_000) as u64;
            std::thread::sleep(Duration::from_micros(micros));
        }
    }
}

/// A conversation of the link.
struct LossyConversation {
    inner: Arc<dyn Conversation>,
    lifetime: Lifetime,
    faults: Arc<Faults>,
}

impl LossyConversation {
    fn pass(&self) -> Result<(), StreamError> {
        if !self.lifetime.pass() {
            self.inner.shut_down();
            return Err(StreamError::Closed);
        }
        self.lifetime.delay();
        Ok(())
    }
}

impl Conversation for LossyConversation {
    fn offer_packets(&self) -> Result<Arc<dyn PacketStream>, StreamError> {
        Ok(self.faults.packets(self.inner.offer_packets()?))
    }

    fn take_packets(&self) -> Result<Arc<dyn PacketStream>, StreamError> {
        Ok(self.faults.packets(self.inner.take_packets()?))
    }
}

/// A conversation of packets: whoever sends never waits, but may have to try again.
#[derive(Debug)]
struct LossyPackets {
    inner: Arc<dyn PacketStream>,
    lifetime: Lifetime,
}

impl PacketStream for LossyPackets {
    fn send(&self, message: &[u8], handles: &[HandleRef<'_>]) -> Result<(), StreamError> {
        if self.lifetime.is_drawn(10) {
            return Err(StreamError::TimedOut);
        }
        if !self.lifetime.pass() {
            self.inner.shut_down();
            return Err(StreamError::Closed);
        }
        self.inner.send(message, handles)
    }

    fn receive(
        &self,
        buffer: &mut [u8],
        spin: &mut AdaptiveSpin,
        deadline: Option<Instant>,
    ) -> Result<Packet, StreamError> {
        let packet = self.inner.receive(buffer, spin, deadline)?;
        self.lifetime.delay();
        Ok(packet)
    }

    fn wait_sendable(&self) {
        self.inner.wait_sendable();
    }

    fn shut_down(&self) {
        self.inner.shut_down();
    }
}

impl Stream for LossyConversation {
    fn send(&self, parts: &[&[u8]], handles: &[HandleRef<'_>]) -> Result<(), StreamError> {
        self.pass()?;
        self.inner.send(parts, handles)
    }

    fn receive(&self, buffer: &mut [u8], handles: &mut Handles) -> Result<(), StreamError> {
        self.inner.receive(buffer, handles)?;
        self.pass()
    }

    fn wait_closed(&self) {
        self.inner.wait_closed();
    }

    fn is_closed(&self) -> bool {
        self.inner.is_closed()
    }

    fn shut_down(&self) {
        self.inner.shut_down();
    }
}

/// A host's link: both sides of its conversations have faults of their own.
struct Lossy {
    inner: ShmLink,
    faults: Arc<Faults>,
}

impl Connect for Lossy {
    fn address(&self, host: &str) -> String {
        // An address is the link's own: nobody else can read it.
        format!("lossy:{host}")
    }

    fn connect(&self, address: &str, hello: &Hello) -> Result<Arc<dyn Conversation>, LinkError> {
        let host = address.strip_prefix("lossy:").expect("an address of this link");
        if self.faults.draw(|random| random.chance(15)) == Some(true) {
            self.faults.injected.fetch_add(1, Ordering::Relaxed);
            let cause = std::io::ErrorKind::TimedOut.into();
            return Err(LinkError::Unreachable { address: address.to_owned(), cause });
        }
        let stream = self.inner.connect(&self.inner.address(host), hello)?;
        Ok(self.faults.conversation(stream))
    }
}

impl Link for Lossy {
    fn listen(&self, host: &str) -> std::io::Result<Box<dyn Listener>> {
        let inner = self.inner.listen(host)?;
        Ok(Box::new(LossyListener { inner, faults: self.faults.clone() }))
    }
}

struct LossyListener {
    inner: Box<dyn Listener>,
    faults: Arc<Faults>,
}

impl Listener for LossyListener {
    fn accept_arrived(&self) -> std::io::Result<Option<Box<dyn Caller>>> {
        let lossy = |inner| Box::new(LossyCaller { inner, faults: self.faults.clone() }) as _;
        Ok(self.inner.accept_arrived()?.map(lossy))
    }

    fn arrival(&self) -> BorrowedFd<'_> {
        self.inner.arrival()
    }
}

struct LossyCaller {
    inner: Box<dyn Caller>,
    faults: Arc<Faults>,
}

impl Caller for LossyCaller {
    fn hear(self: Box<Self>) -> Option<IncomingConnection> {
        let IncomingConnection { hello, version, stream } = self.inner.hear()?;
        Some(IncomingConnection { hello, version, stream: self.faults.conversation(stream) })
    }
}
