//! Lending and shared memory over a link that delays, refuses and loses conversations: another link than the
//! shared-memory one, under the same nodes. Whatever it does, a user gets its answer or an error that says why,
//! what was acknowledged is found later, and a function that is returned is offered again.
//!
//! `RACKBUS_SEED` chooses other faults.

mod common;

use std::collections::BTreeMap;
use std::path::Path;
use std::time::{Duration, Instant};

use common::Rack;
use common::lossy::Faults;
use common::segments::{ALPHA, BETA, GAMMA, Hosts};
use rackbus_attach::{AttachError, Mapping, Refusal, SegmentAccess, SegmentOptions};
use rackbus_control::ControlClientError;
use rackbus_control::api::{BorrowRequest, Isolation, Lease};
use rackbus_driver::{Drive, DriveError, DriveOptions};
use rackbus_seeds::Random;

const RACK: &str = "name = \"test\"\n[hosts.alpha.devices.nvme0]\nkind = \"nvme\"\nsize = \"1 MiB\"\n\
                    backing = \"memory\"\n[hosts.beta]\n[hosts.gamma]\n";

/// Far above what anything here takes: beyond it, it hangs.
const PATIENCE: Duration = Duration::from_secs(60);

/// What a user knows of the blocks: the version that was acknowledged last, and those that were tried after
/// it and may have been written or not.
#[derive(Debug, Default)]
struct Promises(BTreeMap<u64, (u8, Vec<u8>)>);

impl Promises {
    fn check(&self, lba: u64, block: &[u8]) {
        let (acknowledged, tried) = self.0.get(&lba).cloned().unwrap_or_default();
        // A write is of whole blocks.
        assert!(block.iter().all(|byte| *byte == block[0]), "block {lba} is old in part");
        let known = block[0] == acknowledged || tried.contains(&block[0]);
        assert!(known, "block {lba} is {}: not {acknowledged} nor one of {tried:?}", block[0]);
    }

    /// Uses a drive until it fails or enough was done; the error.
    fn work(&mut self, socket: &Path, random: &mut Random) -> Option<String> {
        let mut attempt = || -> Result<(), DriveError> {
            let mut drive = Drive::open(socket, DriveOptions { depth: 4, data: 1 << 16 })?;
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
            Err(ControlClientError::Refused(error)) => {
                let known = ["held", "returning", "silent", "failed"];
                assert!(known.contains(&error.code.as_str()), "{error:?}");
                assert!(!error.error.is_empty() && !error.remedy.is_empty());
            }
            Err(error) => panic!("{error}"),
        }
        assert!(begun.elapsed() < PATIENCE, "the drive does not come back");
    }
}

fn seed() -> u64 {
    let seed = std::env::var("RACKBUS_SEED").ok().and_then(|seed| seed.parse().ok());
    let seed = seed.unwrap_or(1);
    println!("RACKBUS_SEED={seed}");
    seed
}

async fn within<T>(what: &str, task: impl Future<Output = T>) -> T {
    let outcome = tokio::time::timeout(PATIENCE, task).await;
    outcome.unwrap_or_else(|_| panic!("{what} hangs"))
}

#[tokio::test(flavor = "multi_thread")]
async fn lending_holds_over_a_link_that_loses_conversations() {
    let seed = seed();
    let faults = Faults::new(seed);
    let rack = Rack::start_over(RACK, |inner| faults.link(inner)).await;
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
            Ok(_) | Err(ControlClientError::Refused(_)) => {}
            Err(error) => panic!("{error}"),
        }
    }
    let injected = faults.end();
    println!("{failed} users failed, {whole} did not, {injected} conversations were lost");
    assert!(failed > 0 && whole > 0 && injected > 0, "the link has no faults, or nothing else");

    let lease = within("borrowing at the end", borrow(&rack, false)).await;
    let socket = lease.socket.clone().unwrap();
    let check = tokio::task::spawn_blocking(move || {
        let mut drive = Drive::open(Path::new(&socket), DriveOptions::default()).unwrap();
        let mut block = vec![0; 512];
        for lba in 0..16 {
            drive.read(lba, &mut block).unwrap();
            promises.check(lba, &block);
        }
    });
    within("reading at the end", check).await.unwrap();
    within("returning at the end", rack.client.give_back(lease.lease)).await.unwrap();
}

/// What may become of a call over a link that loses conversations: it is done, or the other host did not
/// answer.
fn done_or_unanswered<T>(outcome: Result<T, AttachError>) -> Option<T> {
    match outcome {
        Ok(done) => Some(done),
        Err(AttachError::Refused(Refusal::NotResponding | Refusal::NoSuchSegment)) => None,
        Err(error) => panic!("{error}"),
    }
}

fn word(mapping: &Mapping) -> u64 {
    mapping.whole().read_obj(0).unwrap()
}

#[test]
fn shared_memory_holds_over_a_link_that_loses_conversations() {
    let faults = Faults::new(seed());
    let hosts = Hosts::start(|inner| faults.link(inner));
    let [alpha, beta, gamma] = [ALPHA, BETA, GAMMA].map(|node| hosts.session(node));
    let segment = alpha.create_segment(&SegmentOptions::shared(7, 4096)).unwrap();
    segment.set_available().unwrap();
    let mine = segment.map(0, 8).unwrap();
    let (mut connected, mut unanswered, mut revoked) = (0, 0, 0);
    for round in 1..=200_u64 {
        mine.whole().write_obj(0, &round).unwrap();
        let session = if round % 2 == 0 { &beta } else { &gamma };
        let Some(remote) = done_or_unanswered(session.connect(ALPHA, 7, 1000)) else {
            unanswered += 1;
            continue;
        };
        // It may have been lost since.
        let Ok(theirs) = remote.map(0, 8) else {
            unanswered += 1;
            continue;
        };
        connected += 1;
        if word(&theirs) == round {
            theirs.whole().write_obj(0, &(round << 32)).unwrap();
            let seen = word(&mine);
            // It is one memory, as long as nobody took it away.
            assert!(seen == round << 32 || word(&theirs) != seen, "round {round}: {seen:#x}");
        }
        if round % 5 == 0 {
            // Done means that nothing new is seen there, whatever became of the conversation.
            let outcome = alpha.set_share(7..=7, Some(session.node()), SegmentAccess::None);
            if done_or_unanswered(outcome).is_some() {
                revoked += 1;
                mine.whole().write_obj(0, &!round).unwrap();
                assert_ne!(word(&theirs), !round, "round {round}: memory that was taken away");
            }
            alpha.set_share(7..=7, Some(session.node()), SegmentAccess::Write).unwrap();
        }
    }
    let injected = faults.end();
    println!(
        "{connected} connected, {unanswered} not answered, {revoked} revoked, {injected} lost"
    );
    assert!(connected > 0 && unanswered > 0 && revoked > 0 && injected > 0);

    // Nothing is left of what was lost.
    let begun = Instant::now();
    while !alpha.segments().unwrap()[0].connections.is_empty() {
        assert!(begun.elapsed() < PATIENCE, "connections are left that nobody has");
        std::thread::sleep(Duration::from_millis(1));
    }
    let begun = Instant::now();
    let remote = loop {
        match beta.connect(ALPHA, 7, 1000) {
            // Within the time that a node gives another one, which a busy machine may need for something else.
            Err(AttachError::Refused(Refusal::NotResponding)) if begun.elapsed() < PATIENCE => {}
            connected => break connected.unwrap(),
        }
    };
    let theirs = remote.map(0, 8).unwrap();
    theirs.whole().write_obj(0, &9_u64).unwrap();
    assert_eq!(word(&mine), 9);
}
