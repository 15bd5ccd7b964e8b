//! A drive of another machine, whose connection is lost again and again while it is used.

mod support;

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use rackbus_control::api::Lease;
use rackbus_driver::Drive;
use rackbus_driver::accel::{Accel, AccelOptions, MessageWork};
use rackbus_spec::accel::Operation;
use rustix::process::{Pid, Signal};
use support::machines::{Machine, Machines};
use support::relay::{Passage, Relay};
use support::{PATIENCE, Process, open};

const RACK: &str = r#"
name = "lab"

[control]
lease_ttl = "15 s"
return_grace = "500 ms"

[link]
hold = "4 s"

[hosts.alpha.devices.nvme0]
kind = "nvme"
size = "16 MiB"
backing = "file"

[hosts.beta]
"#;

/// Blocks of the part that is written, and of one operation.
const BLOCKS: u64 = 4096;
const EACH: u64 = 32;

/// Beta with alpha's drive, through a relay.
struct Borrowed {
    rack: Machines,
    alpha: Machine,
    beta: Machine,
    relay: Relay,
    lease: Lease,
}

fn borrow() -> Borrowed {
    borrow_from(RACK)
}

fn borrow_from(file: &str) -> Borrowed {
    borrow_function(file, "alpha/nvme0")
}

fn borrow_function(file: &str, function: &str) -> Borrowed {
    let rack = Machines::start(file);
    let listen = format!("127.0.0.1:{}", support::machines::free_port());
    let relay = Relay::start(listen.clone());
    let mut alpha = rack.machine("alpha");
    let advertised = ["--advertise", &relay.address()];
    rack.node_at(&mut alpha, "alpha", &listen, &advertised, Some(&rack.token("alpha")));
    let beta = rack.joined("beta");
    let lease = beta.borrow(function, "beta");
    Borrowed { rack, alpha, beta, relay, lease }
}

/// Writes and reads blocks, and knows what each was last written with.
struct Checked {
    drive: Drive,
    written: Vec<u8>,
    round: u64,
}

impl Checked {
    fn new(drive: Drive) -> Checked {
        let mut checked = Checked { drive, written: vec![0; BLOCKS as usize], round: 0 };
        for at in (0..BLOCKS).step_by(256) {
            checked.drive.write(at, &[0; 256 * 512], false).unwrap();
        }
        checked
    }

    /// One write, and one read of other blocks; now and then a flush.
    fn step(&mut self) {
        self.round += 1;
        let random = |salt: u64| {
            let mixed = (self.round + salt).wrapping_mul(0x9e37_79b9_7f4a_7c15);
            (mixed >> 20) % (BLOCKS - EACH)
        };
        let (at, other, value) = (random(1), random(1 << 32), self.round as u8);
        self.drive.write(at, &[value; EACH as usize * 512], false).unwrap();
        self.written[at as usize..(at + EACH) as usize].fill(value);
        self.check(other, EACH);
        if self.round.is_multiple_of(64) {
            self.drive.flush().unwrap();
        }
    }

    fn check(&mut self, at: u64, count: u64) {
        let mut read = vec![0; count as usize * 512];
        self.drive.read(at, &mut read).unwrap();
        for (block, expected) in read.chunks(512).zip(&self.written[at as usize..]) {
            assert!(block.iter().all(|byte| byte == expected), "round {}", self.round);
        }
    }

    fn check_all(&mut self) {
        for at in (0..BLOCKS).step_by(256) {
            self.check(at, 256);
        }
    }
}

/// Held for much longer than silence takes to be noticed, also on a busy machine.
fn borrow_held_for_long() -> Borrowed {
    borrow_from(&RACK.replace("hold = \"4 s\"", "hold = \"20 s\""))
}

#[test]
fn operations_under_way_go_on_when_connections_break() {
    let Borrowed { rack, beta, relay, lease, alpha: _alpha } = borrow_held_for_long();
    let mut drive = Checked::new(open(&lease));
    let breaks = 20;
    let connections = relay.taken();
    let steps = AtomicU64::new(0);
    std::thread::scope(|scope| {
        let breaking = scope.spawn(|| {
            for nth in 1..=breaks {
                std::thread::sleep(Duration::from_millis(20));
                relay.kill();
                let (begun, before) = (Instant::now(), steps.load(Ordering::Relaxed));
                // On a busy machine none carries anything within 20 ms. A driver that gets nothing done for seconds gives up: so
                // every other one is broken only when it has carried what was under way.
                let carried = || nth % 2 == 0 || steps.load(Ordering::Relaxed) > before + 1;
                let is_back = || relay.taken() >= connections + nth && carried();
                while !is_back() && begun.elapsed() < PATIENCE {
                    std::thread::sleep(Duration::from_millis(1));
                }
            }
        });
        while !breaking.is_finished() {
            drive.step();
            steps.fetch_add(1, Ordering::Relaxed);
        }
    });
    (0..100).for_each(|_| drive.step());
    drive.check_all();
    assert!(relay.taken() >= connections + breaks, "it was not connected anew");
    // The rack knows of it.
    rack.wait(|rack| {
        let link = &rack.function("alpha/nvme0")["front"]["link"];
        // One that is killed before it carries the session is no resumption.
        link["resumed"].as_u64() >= Some(1) && link["lost_ms"].is_null()
    });
    // Events are stored some time after what they tell of can be seen.
    let told = "the link to alpha/nvme0 was lost and resumed";
    rack.wait(|_| beta.json(&["events"]).to_string().contains(told));
}

/// The driver gives a command up after ten seconds: none is kept waiting for longer than this.
const STALL: Duration = Duration::from_secs(5);

/// Has the drive's user wait from `stall` until `go_on`, which comes when the rack says that `trouble` is what it waits for.
/// Again where a busy machine takes too long to say so.
fn stall_until_it_is_told(
    rack: &Machines,
    drive: &mut Checked,
    trouble: &str,
    stall: impl Fn(),
    go_on: impl Fn() + Sync,
) {
    let begun = Instant::now();
    let is_told = || {
        let device = rack.function("alpha/nvme0");
        device["front"]["trouble"].as_str().is_some_and(|told| told.contains(trouble))
    };
    let mut was_told = false;
    while !was_told {
        assert!(begun.elapsed() < PATIENCE, "nobody says {trouble}: {}", rack.control.log());
        stall();
        let stalled = Instant::now();
        std::thread::scope(|scope| {
            let waiting = scope.spawn(|| {
                let mut was_told = is_told();
                while !was_told && stalled.elapsed() < STALL {
                    std::thread::sleep(Duration::from_millis(20));
                    was_told = is_told();
                }
                go_on();
                was_told
            });
            (0..20).for_each(|_| drive.step());
            was_told = waiting.join().unwrap();
        });
    }
}

#[test]
fn what_no_connection_carries_is_held_and_goes_on() {
    let Borrowed { rack, beta: _beta, relay, lease, alpha: _alpha } = borrow_held_for_long();
    let mut drive = Checked::new(open(&lease));
    for passage in [Passage::Closed, Passage::Silent, Passage::SilentBack] {
        let stall = || {
            relay.set(passage);
            if passage == Passage::Closed {
                relay.kill();
            }
        };
        // Who has the drive waits, and the rack says for what.
        let trouble = "the link to alpha is lost";
        stall_until_it_is_told(&rack, &mut drive, trouble, stall, || relay.set(Passage::Open));
        rack.wait(|rack| rack.function("alpha/nvme0")["front"]["trouble"].is_null());
    }
    drive.check_all();
}

#[test]
fn what_is_held_for_too_long_fails_and_the_function_is_gone() {
    let Borrowed { rack, relay, lease, beta, alpha: _alpha } = borrow();
    let mut drive = open(&lease);
    drive.write(0, &[7; 4096], false).unwrap();
    // Before the connection is lost, so that a machine that is slow here makes the time longer and not shorter.
    let begun = Instant::now();
    relay.set(Passage::Closed);
    relay.kill();
    let failed = drive.read(0, &mut [0; 4096]).unwrap_err();
    let held = begun.elapsed();
    assert!(
        (Duration::from_secs(3)..Duration::from_secs(9)).contains(&held),
        "{failed} after {held:?}"
    );
    drop(drive);
    rack.wait(|_| beta.json(&["leases"]).as_array().is_some_and(Vec::is_empty));
    // Its lender has released it, and lends it again.
    relay.set(Passage::Open);
    rack.wait(|rack| rack.function("alpha/nvme0")["state"] == "offered");
    let lease = beta.borrow("alpha/nvme0", "beta");
    let mut read = [0; 4096];
    open(&lease).read(0, &mut read).unwrap();
    assert_eq!(read, [7; 4096]);
}

#[test]
fn nodes_that_stall_for_a_while_lose_nothing() {
    // The front holds longer than the driver waits.
    let mut borrowed = borrow_held_for_long();
    let mut drive = Checked::new(open(&borrowed.lease));
    let [alpha, beta] = [&mut borrowed.alpha, &mut borrowed.beta]
        .map(|machine| Process::of(Pid::from_child(machine.process())));
    // The lender's, until its borrower takes the link for lost; then the borrower's, for about as long as that takes on a
    // machine with nothing else to do.
    let stall = || alpha.signal(Signal::STOP);
    stall_until_it_is_told(&borrowed.rack, &mut drive, "", stall, || alpha.signal(Signal::CONT));
    beta.signal(Signal::STOP);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            std::thread::sleep(Duration::from_secs(3));
            beta.signal(Signal::CONT);
        });
        (0..20).for_each(|_| drive.step());
    });
    drive.check_all();
}

/// Each operation of an accelerator is done once, and each context made once, however often the connection breaks.
#[test]
fn operations_of_an_accelerator_go_on_when_connections_break() {
    let file = RACK.replace("hold = \"4 s\"", "hold = \"20 s\"").replace(
        "[hosts.alpha.devices.nvme0]\nkind = \"nvme\"\nsize = \"16 MiB\"\nbacking = \"file\"",
        "[hosts.alpha.devices.accel0]\nkind = \"accelerator\"\nfunctions = 1",
    );
    let Borrowed { beta, relay, lease, alpha: _alpha, rack: _rack } =
        borrow_function(&file, "alpha/accel0.vf1");
    let mut accel =
        Accel::open(support::socket(&lease), PATIENCE, AccelOptions::default()).unwrap();
    let message: Vec<u8> = (0..300_000).map(|n: u32| (n.wrapping_mul(n) / 7 % 251) as u8).collect();
    let hash = MessageWork { stages: &[(Operation::Sha256, 0)], ..MessageWork::default() };
    let expected = accel.run(&hash, &message, 32).unwrap();
    let breaks = 10;
    let connections = relay.taken();
    let mut made = Vec::new();
    for nth in 0..breaks {
        let broken = relay.taken();
        relay.kill();
        while relay.taken() == broken {
            made.push(accel.create_context(Operation::Aes256Ctr, &[nth as u8; 32]).unwrap());
            assert_eq!(accel.run(&hash, &message, 32).unwrap(), expected, "after {nth} breaks");
            accel.destroy_context(made.pop().unwrap()).unwrap();
        }
    }
    // None that nobody knows of was made on the way.
    let handle = accel.create_context(Operation::Aes256Ctr, &[1; 32]).unwrap();
    assert_eq!(handle, 1, "contexts were made twice");
    assert!(relay.taken() >= connections + breaks);
    drop(accel);
    beta.json(&["return", &lease.lease.to_string()]);
}
