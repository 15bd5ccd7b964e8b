//! Lending over a link that delays, refuses and loses conversations: another link than the shared-memory
//! one, under the same nodes. Whatever it does, a user gets its answer or an error that says why, what was
//! acknowledged is found later, and a function that is returned is offered again.
//!
//! The faults are drawn from a seed; `RACKBUS_SEED` chooses another one. Threads run as they like, so a seed
//! repeats the faults that each conversation has, not the whole run.

mod common;

use std::collections::BTreeMap;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use common::Rack;
use rackbus_control::ClientError;
use rackbus_control::api::{BorrowRequest, Isolation, Lease};
use rackbus_driver::{Drive, DriveError, Options};
use rackbus_link::shm::ShmLink;
use rackbus_link::{Caller, Connect, Hello, Incoming, Link, LinkError, Listener};
use rackbus_memory::{Stream, StreamError};
use rackbus_seeds::Random;

const RACK: &str = "name = \"test\"\n[hosts.alpha.devices.nvme0]\nkind = \"nvme\"\nsize = \"1 MiB\"\n\
                    backing = \"memory\"\n[hosts.beta]\n[hosts.gamma]\n";

/// Far above what anything here takes: beyond it, it hangs.
const PATIENCE: Duration = Duration::from_secs(60);

/// What all conversations of a rack have in common.
#[derive(Debug)]
struct Faults {
    random: Mutex<Random>,
    /// Nothing is delayed, refused or lost any more.
    over: AtomicBool,
    /// Conversations that were refused or lost.
    injected: AtomicU64,
}

impl Faults {
    fn draw<T>(&self, draw: impl FnOnce(&mut Random) -> T) -> Option<T> {
        let over = self.over.load(Ordering::Relaxed);
        (!over).then(|| draw(&mut self.random.lock().unwrap()))
    }

    /// A conversation that is as it is drawn: some are lost after a few messages.
    fn conversation(self: &Arc<Self>, inner: Arc<dyn Stream>) -> Arc<dyn Stream> {
        let drawn = self.draw(|random| {
            let left = random.chance(50).then(|| random.below(120) as u64);
            (left, random.fork())
        });
        let Some((left, random)) = drawn else { return inner };
        let left = AtomicU64::new(left.unwrap_or(u64::MAX));
        Arc::new(Conversation { inner, left, random: Mutex::new(random), faults: self.clone() })
    }
}

/// A conversation of the link.
struct Conversation {
    inner: Arc<dyn Stream>,
    /// Messages that still go through.
    left: AtomicU64,
    random: Mutex<Random>,
    faults: Arc<Faults>,
}

impl Conversation {
    /// A message is to go through: it is delayed, or lost with the conversation.
    fn pass(&self) -> Result<(), StreamError> {
        if self.faults.over.load(Ordering::Relaxed) {
            return Ok(());
        }
        let one_less = |left: u64| left.checked_sub(1);
        if self.left.fetch_update(Ordering::Relaxed, Ordering::Relaxed, one_less).is_err() {
            self.faults.injected.fetch_add(1, Ordering::Relaxed);
            self.inner.shut_down();
            return Err(StreamError::Closed);
        }
        let mut random = self.random.lock().unwrap();
        if random.chance(5) {
            std::thread::sleep(Duration::from_micros(random.below(2_000) as u64));
        }
        Ok(())
    }
}

impl Stream for Conversation {
    fn send(&self, parts: &[&[u8]], fds: &[BorrowedFd<'_>]) -> Result<(), StreamError> {
        self.pass()?;
        self.inner.send(parts, fds)
    }

    fn receive(&self, buffer: &mut [u8], fds: &mut Vec<OwnedFd>) -> Result<(), StreamError> {
        self.inner.receive(buffer, fds)?;
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

    fn connect(&self, address: &str, hello: &Hello) -> Result<Arc<dyn Stream>, LinkError> {
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
    fn accept(&self) -> std::io::Result<Box<dyn Caller>> {
        let caller = self.inner.accept()?;
        Ok(Box::new(LossyCaller { inner: caller, faults: self.faults.clone() }))
    }
}

struct LossyCaller {
    inner: Box<dyn Caller>,
    faults: Arc<Faults>,
}

impl Caller for LossyCaller {
    fn hear(self: Box<Self>) -> Option<Incoming> {
        let Incoming { hello, stream } = self.inner.hear()?;
        Some(Incoming { hello, stream: self.faults.conversation(stream) })
    }
}

/// What a user knows of the blocks: the version that was acknowledged last, and those that were tried after
/// it and may have been written or not.
#[derive(Debug, Default)]
struct Promises(BTreeMap<u64, (u8, Vec<u8>)>);

impl Promises {
    fn check(&self, lba: u64, block: &[u8]) {
        let (acknowledged, tried) = self.0.get(&lba).cloned().unwrap_or_default();
        // A write is of whole blocks.
        assert!(block.iter().all(|byte| *byte == block[0]), "block {lba} is torn");
        let known = block[0] == acknowledged || tried.contains(&block[0]);
        assert!(known, "block {lba} is {}: not {acknowledged} nor one of {tried:?}", block[0]);
    }

    /// Uses a drive until it fails or enough was done; the error.
    fn work(&mut self, socket: &Path, random: &mut Random) -> Option<String> {
        let mut attempt = || -> Result<(), DriveError> {
            let mut drive = Drive::open(socket, Options { depth: 4, data: 1 << 16 })?;
            let mut block = vec![0; 512];
            for _ in 0..40 {
                let lba = random.below(16) as u64;
                if random.chance(50) {
                    drive.read(lba, &mut block)?;
                    self.check(lba, &block);
                    continue;
                }
                let version = random.next() as u8;
                self.0.entry(lba).or_default().1.push(version);
                drive.write(lba, &vec![version; 512], random.chance(30))?;
                self.0.insert(lba, (version, Vec::new()));
            }
            Ok(())
        };
        attempt().err().map(|error| error.to_string())
    }
}

/// Borrows the drive, which may still be on its way back from its last user.
async fn borrow(rack: &Rack, strict: bool) -> Lease {
    let isolation = if strict { Isolation::Strict } else { Isolation::default() };
    let request = BorrowRequest { isolation, ..BorrowRequest::new("alpha/nvme0", "beta") };
    let begun = Instant::now();
    loop {
        match rack.client.borrow_as(&request).await {
            Ok(lease) => return lease,
            Err(ClientError::Refused(error)) => {
                let known = ["held", "returning", "silent", "failed"];
                assert!(known.contains(&error.code.as_str()), "{error:?}");
                assert!(!error.error.is_empty() && !error.remedy.is_empty());
            }
            Err(error) => panic!("{error}"),
        }
        assert!(begun.elapsed() < PATIENCE, "the drive does not come back");
    }
}

async fn within<T>(what: &str, task: impl Future<Output = T>) -> T {
    let outcome = tokio::time::timeout(PATIENCE, task).await;
    outcome.unwrap_or_else(|_| panic!("{what} hangs"))
}

#[tokio::test(flavor = "multi_thread")]
async fn lending_holds_over_a_link_that_loses_conversations() {
    let seed = std::env::var("RACKBUS_SEED").ok().and_then(|seed| seed.parse().ok());
    let seed = seed.unwrap_or(1);
    println!("RACKBUS_SEED={seed}");
    let faults = Arc::new(Faults {
        random: Mutex::new(Random(seed)),
        over: AtomicBool::new(false),
        injected: AtomicU64::new(0),
    });
    let link = |inner| Arc::new(Lossy { inner, faults: faults.clone() }) as Arc<dyn Link>;
    let rack = Rack::start_over(RACK, link).await;
    let mut random = Random(seed ^ 0x5eed);
    let mut promises = Promises::default();
    let (mut failed, mut whole) = (0, 0);
    for round in 0..30 {
        let lease = within("borrowing", borrow(&rack, round % 2 == 1)).await;
        let socket = lease.socket.clone().unwrap();
        let mut own = random.fork();
        let work = tokio::task::spawn_blocking(move || {
            let error = promises.work(Path::new(&socket), &mut own);
            (promises, error)
        });
        let error;
        (promises, error) = within("a user", work).await.unwrap();
        match error {
            None => whole += 1,
            Some(error) => {
                println!("round {round}: {error}");
                // It was not let in, or was left behind; the socket carries a number only.
                let reasons = ["No such device", "its lender is gone", "its lender may be gone"];
                assert!(reasons.iter().any(|reason| error.contains(reason)), "{error}");
                failed += 1;
            }
        }
        // A lease whose lender was lost may have ended by itself.
        match within("returning", rack.client.give_back(lease.lease)).await {
            Ok(_) | Err(ClientError::Refused(_)) => {}
            Err(error) => panic!("{error}"),
        }
    }
    let injected = faults.injected.load(Ordering::Relaxed);
    println!("{failed} users failed, {whole} did not, {injected} conversations were lost");
    assert!(failed > 0 && whole > 0 && injected > 0, "the link has no faults, or nothing else");

    faults.over.store(true, Ordering::Relaxed);
    let lease = within("borrowing at the end", borrow(&rack, false)).await;
    let socket = lease.socket.clone().unwrap();
    let check = tokio::task::spawn_blocking(move || {
        let mut drive = Drive::open(Path::new(&socket), Options::default()).unwrap();
        let mut block = vec![0; 512];
        for lba in 0..16 {
            drive.read(lba, &mut block).unwrap();
            promises.check(lba, &block);
        }
    });
    within("reading at the end", check).await.unwrap();
    within("returning at the end", rack.client.give_back(lease.lease)).await.unwrap();
}
