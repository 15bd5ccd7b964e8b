//! Operations that are in flight when their function is revoked, for each class that has a model: with the front at its
//! lender, and with it at a borrower over each link. None of them takes effect at the lender after the revocation has
//! returned, and each ends at the borrower (I4).

#[path = "../common/mod.rs"]
mod common;
mod hosts;
mod users;

use std::path::Path;
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::thread::JoinHandle;
use std::time::Instant;

use common::links::LinkKind;
use hosts::{Hosts, OpenLease};
use rackbus_devices::memory::BAR;
use rackbus_driver::net::Net;
use rackbus_lease::Placement;
use rackbus_pci::vfio_user::Client;
use rackbus_rma::{LIBRARY_ENV, Library};
use rackbus_spec::vfio_user::region;
use rackbus_spec::virtio::net::NetHeader;
use users::{PATIENCE, User, WRITTEN};

const RACK: &str = r#"
name = "test"

[hosts.alpha.devices.nvme0]
kind = "nvme"
size = "1 MiB"
backing = "memory"

[hosts.alpha.devices.file0]
kind = "nvme"
size = "1 MiB"
backing = "file"

[hosts.alpha.devices.slow0]
kind = "nvme"
size = "1 MiB"
backing = "memory"
rate = "10 MB/s"

[hosts.alpha.devices.accel0]
kind = "accelerator"
functions = 2

[hosts.alpha.devices.nic0]
kind = "nic"
functions = 2
queues = 1
mac = "02:00:00:00:00:01"
rate = "16 Mbit/s"

[hosts.alpha.devices.ram0]
kind = "memory"
size = "1 MiB"

[hosts.beta]
[hosts.gamma]
"#;

/// Revokes functions of a class while they are in use, in a round of this number, and has the next user look.
type RevocationRound = fn(&Hosts, u8);

const CLASSES: [(&str, RevocationRound); 4] =
    [("nvme", drives), ("accelerator", accelerator), ("nic", card), ("memory", memory)];

/// Rounds with each class; every other one the borrower ends its lease itself before.
const ROUNDS: u8 = 4;

/// What the next user writes; the former ones write [their round's](mark).
const OTHER: u8 = 0xee;
/// How often it looks, and how many frames it sends.
const LOOKS: usize = 20;
/// How many messages it has an accelerator compress.
const REQUESTS: usize = 4;

/// What a user writes in a round.
fn mark(round: u8) -> u8 {
    1 + round
}

/// A user of beta's that keeps operations in flight.
struct InUse {
    lease: OpenLease,
    round: u8,
    ended: Receiver<()>,
    user: JoinHandle<()>,
}

impl InUse {
    /// Lends `device` to beta, and returns when an operation of its user's has ended and others are in flight.
    fn begin(hosts: &Hosts, device: &'static str, user: User, round: u8) -> InUse {
        let lease = hosts.lend(device, "beta");
        let (begun, begins) = channel();
        let (end, ended) = channel();
        let socket = lease.socket.clone();
        let user = std::thread::spawn(move || {
            user(&socket, mark(round), begun);
            let _ = end.send(());
        });
        let since = Instant::now();
        loop {
            let ended = begins.recv_timeout(PATIENCE);
            ended.unwrap_or_else(|_| panic!("{device} does nothing in round {round}"));
            if hosts.are_joined(device, "beta") {
                break;
            }
            assert!(since.elapsed() < PATIENCE, "{device} has no lane");
        }
        InUse { lease, round, ended, user }
    }

    /// Takes the function back.
    fn revoke(self, hosts: &Hosts) -> Revoked {
        match self.round % 2 {
            0 => hosts.revoke(&self.lease),
            _ => hosts.give_back(&self.lease, "beta"),
        }
        Revoked { ended: self.ended, user: self.user }
    }
}

/// The user after its function was revoked.
struct Revoked {
    ended: Receiver<()>,
    user: JoinHandle<()>,
}

impl Revoked {
    /// Waits until all that it had in flight has ended.
    fn ends(self) {
        let waited = self.ended.recv_timeout(PATIENCE);
        assert!(waited != Err(RecvTimeoutError::Timeout), "operations hang at the borrower");
        self.user.join().unwrap();
    }
}

/// Lends `device` to gamma after beta's use of it, has it used, and takes it back.
fn lent_next(hosts: &Hosts, device: &'static str, next: impl FnOnce(&Path)) {
    let lease = hosts.lend(device, "gamma");
    next(&lease.socket);
    hosts.revoke(&lease);
}

/// What the next user writes stays. One drive does what it is asked at once, one has its data in a file, and one is
/// limited, so that most of what is in flight waits for its turn.
fn drives(hosts: &Hosts, round: u8) {
    for device in ["nvme0", "file0", "slow0"] {
        let revoked = InUse::begin(hosts, device, users::of_drive, round).revoke(hosts);
        lent_next(hosts, device, |socket| {
            let mut drive = users::open_drive(socket);
            let written = vec![OTHER; WRITTEN];
            drive.write(0, &written, false).unwrap();
            let mut found = vec![0; WRITTEN];
            for _ in 0..LOOKS {
                drive.read(0, &mut found).unwrap();
                assert!(found == written, "{device} is written in round {round}");
            }
        });
        revoked.ends();
    }
}

/// What is stored by the next user stays.
fn memory(hosts: &Hosts, round: u8) {
    let revoked = InUse::begin(hosts, "ram0", users::of_memory, round).revoke(hosts);
    lent_next(hosts, "ram0", |socket| {
        let user = Client::connect(socket, PATIENCE).unwrap();
        user.write(region::CONFIG, 4, &2u16.to_le_bytes()).unwrap();
        let (mut found, pieces) = ([1; 4096], || (0..WRITTEN as u64).step_by(4096));
        for at in pieces() {
            user.read(BAR.into(), at, &mut found).unwrap();
            assert!(found == [0; 4096], "the memory is not empty in round {round}");
            user.write(BAR.into(), at, &[OTHER; 4096]).unwrap();
        }
        for at in (0..LOOKS).flat_map(|_| pieces()) {
            user.read(BAR.into(), at, &mut found).unwrap();
            assert!(found == [OTHER; 4096], "the memory is written in round {round}");
        }
    });
    revoked.ends();
}

/// What engines do for the former user is over: nothing is added to it while they work for another function, and the
/// next user of the same function is given what it asks for and nothing else.
fn accelerator(hosts: &Hosts, round: u8) {
    let revoked = InUse::begin(hosts, "accel0.vf1", users::of_accelerator, round).revoke(hosts);
    let taken = || {
        let report = hosts.report("accel0.vf1");
        let done = report.operations.values().map(|counts| counts.done).sum::<u64>();
        (done, report.shaping["ingress_bytes"])
    };
    let before = taken();
    let requests = REQUESTS as u64;
    for (device, more) in [("accel0.vf2", 0), ("accel0.vf1", requests)] {
        lent_next(hosts, device, |socket| {
            let mut accel = users::open_accelerator(socket);
            for _ in 0..REQUESTS {
                let request = users::long_request(&accel);
                accel.push(0, &request).unwrap();
            }
            accel.ring(0).unwrap();
            for _ in 0..REQUESTS {
                assert_eq!(accel.wait(0).unwrap().status, 0, "{device} in round {round}");
            }
        });
        let expected = (before.0 + more, before.1 + more * users::MESSAGE as u64);
        assert_eq!(taken(), expected, "engines work for a former user in round {round}");
    }
    revoked.ends();
}

/// What the former user sent comes before what the next one sends, or not at all.
fn card(hosts: &Hosts, round: u8) {
    let receiver = hosts.lend("nic0.vf2", "gamma");
    let mut receives = users::open_card(&receiver.socket);
    let (former, own) = (users::frame(mark(round)), users::frame(OTHER));
    let (mut frame, begun) = (Vec::new(), Instant::now());
    let in_use = InUse::begin(hosts, "nic0.vf1", users::of_card, round);
    while receives.receive(0, &mut frame).unwrap().is_none() {
        assert!(begun.elapsed() < PATIENCE, "no frame comes in round {round}");
        receives.wait(0, PATIENCE);
    }
    assert!(frame == former);
    let revoked = in_use.revoke(hosts);
    let mut owns = 0;
    lent_next(hosts, "nic0.vf1", |socket| {
        let (mut sends, begun) = (users::open_card(socket), Instant::now());
        while owns < LOOKS {
            assert!(begun.elapsed() < PATIENCE, "no frame comes after round {round}");
            send(&mut sends, &own);
            receives.wait(0, PATIENCE);
            while receives.receive(0, &mut frame).unwrap().is_some() {
                owns += usize::from(frame == own);
                assert!(frame == own || (frame == former && owns == 0), "in round {round}");
            }
        }
    });
    revoked.ends();
    drop(receives);
    hosts.revoke(&receiver);
}

/// Sends a frame, which may be lost.
fn send(card: &mut Net, frame: &[u8]) {
    card.send(0, &NetHeader::default(), frame).unwrap();
    card.flush(0).unwrap();
}

fn all_classes(kind: LinkKind, provider: Option<&str>, placement: Placement) {
    let hosts = Hosts::start(RACK, kind, provider, placement);
    for (class, revoke_in_flight) in CLASSES {
        let begun = Instant::now();
        (0..ROUNDS).for_each(|round| revoke_in_flight(&hosts, round));
        println!("{class} over {kind:?}: {:?}", begun.elapsed());
    }
}

#[test]
fn operations_in_flight_end_before_a_revocation_returns_with_the_front_at_the_lender() {
    all_classes(LinkKind::Shm, None, Placement::Lender);
}

#[test]
fn operations_in_flight_end_before_a_revocation_returns_on_one_machine() {
    all_classes(LinkKind::Shm, None, Placement::Borrower);
}

#[test]
fn operations_in_flight_end_before_a_revocation_returns_between_machines() {
    all_classes(LinkKind::Tcp, None, Placement::Borrower);
}

/// Where there is libfabric, data move beside the link.
#[test]
fn operations_in_flight_end_before_a_revocation_returns_beside_a_lane() {
    match Library::load() {
        Ok(_) => all_classes(LinkKind::Tcp, Some("tcp"), Placement::Borrower),
        Err(error) if std::env::var_os(LIBRARY_ENV).is_some() => panic!("{error}"),
        Err(error) => println!("left out: {error}"),
    }
}

/// A new class is added to the table above.
#[test]
fn every_class_that_has_a_state_is_revoked_in_flight() {
    let known = CLASSES.map(|(class, _)| class);
    for (class, _) in rackbus_devices::class::state_versions() {
        assert!(known.contains(&class), "{class} is not revoked with operations in flight");
    }
}
