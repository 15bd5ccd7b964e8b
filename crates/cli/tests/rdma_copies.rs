//! Copies into memory of another machine, whose bytes move beside the link by libfabric's providers `tcp` and `shm`.

mod support;

use std::cell::Cell;
use std::time::{Duration, Instant};

use rackbus_attach::{Location, RemoteSegment, SegmentOptions, Session};
use rackbus_memory::DmaSlice;
use rustix::process::{Pid, Signal};
use support::libfabric::is_here;
use support::machines::{Machine, Machines};
use support::segments::answered;
use support::{PATIENCE, Process};

const RACK: &str = r#"
name = "lab"

[link]
rdma = "tcp"

[hosts.alpha]
memory = "64 MiB"

[hosts.beta]
memory = "64 MiB"
"#;

const SIZE: u64 = 5 << 20;

fn session(machine: &Machine, host: &str) -> Session {
    let location = Location { run_dir: machine.run_dir(), host: host.to_owned() };
    Session::open(&location).unwrap()
}

fn pattern(seed: u32) -> Vec<u8> {
    (0..SIZE as u32).map(|n| ((n ^ seed).wrapping_mul(2_654_435_761) >> 11) as u8).collect()
}

/// Copies all of these to the begin of the segment.
fn copy(remote: &RemoteSegment, bytes: &[u8]) {
    let source = |from: usize, to: DmaSlice<'_>| {
        let part = &bytes[from..bytes.len().min(from + to.len())];
        to.copy_from(part);
        part.len()
    };
    let carried = remote.carry(0, (&source, bytes.len()), &|| false);
    assert!(carried.expect("it is on another machine").unwrap());
}

/// How many bytes a host has copied to others, by the link and by a lane.
fn copied(machine: &Machine, host: &str) -> [u64; 2] {
    let page = String::from_utf8(machine.run(&["metrics", host]).stdout).unwrap();
    ["link", "lane"].map(|by| {
        let name = format!("rackbus_copied_to_machines_bytes_total{{by=\"{by}\"}} ");
        let line = page.lines().find_map(|line| line.strip_prefix(&name));
        line.unwrap_or_else(|| panic!("{page}")).parse().unwrap()
    })
}

#[test]
fn copies_to_another_machine_move_beside_the_link_by_tcp() {
    copies_move_beside_the_link("tcp");
}

#[test]
fn copies_to_another_machine_move_beside_the_link_by_shared_memory() {
    copies_move_beside_the_link("shm");
}

fn copies_move_beside_the_link(provider: &str) {
    if !is_here() {
        return;
    }
    let rack = Machines::start(&RACK.replace("\"tcp\"", &format!("{provider:?}")));
    let [mut alpha, beta] = ["alpha", "beta"].map(|host| rack.joined(host));
    for round in 0..2 {
        let (owner, program) = (session(&alpha, "alpha"), session(&beta, "beta"));
        let segment = owner.create_segment(&SegmentOptions::shared(9, SIZE)).unwrap();
        let home = segment.map(0, SIZE).unwrap();
        segment.set_available().unwrap();
        let remote = answered(|| program.connect(owner.node(), 9, 20_000)).unwrap();
        let far = remote.map(0, SIZE).unwrap();
        let (before, seed) = (copied(&beta, "beta"), Cell::new(0));
        // The first ones go over the link, and ask for the lane.
        rack.wait(|_| {
            seed.set(seed.get() + 1);
            let bytes = pattern(seed.get());
            copy(&remote, &bytes);
            let mut there = vec![0; SIZE as usize];
            home.whole().copy_to(&mut there);
            assert!(there == bytes, "copy {} of round {round}", seed.get());
            copied(&beta, "beta")[1] > before[1]
        });
        let [by_link, by_lane] = copied(&beta, "beta");
        copy(&remote, &pattern(99));
        assert_eq!(copied(&beta, "beta"), [by_link, by_lane + SIZE], "all of it goes by the lane");
        // What is stored before a copy, and behind it, is there when it is flushed, and nothing of the copy is stored again.
        far.whole().part(0, 8).unwrap().copy_from(&[1; 8]);
        remote.flush().unwrap();
        let mut expected = pattern(99);
        expected[..8].fill(1);
        let mut there = vec![0; SIZE as usize];
        home.whole().copy_to(&mut there);
        assert!(there == expected);
        if round == 0 {
            // Its node is killed, and the next one gives memory anew.
            drop((segment, home, owner));
            alpha.crash();
            rack.wait(|rack| rack.state_of("alpha") == "down");
            rack.node(&mut alpha, "alpha", None);
        }
    }
}

/// A segment of alpha's, to which a program of beta's copies by the lane.
fn with_lane<T>(
    (rack, alpha, beta): (&Machines, &Machine, &Machine),
    then: impl FnOnce(&RemoteSegment, &dyn Fn() -> Vec<u8>) -> T,
) -> T {
    let (owner, program) = (session(alpha, "alpha"), session(beta, "beta"));
    let segment = owner.create_segment(&SegmentOptions::shared(9, SIZE)).unwrap();
    let home = segment.map(0, SIZE).unwrap();
    segment.set_available().unwrap();
    let remote = answered(|| program.connect(owner.node(), 9, 20_000)).unwrap();
    let before = copied(beta, "beta")[1];
    rack.wait(|_| {
        copy(&remote, &pattern(0));
        copied(beta, "beta")[1] > before
    });
    let there = || {
        let mut there = vec![0; SIZE as usize];
        home.whole().copy_to(&mut there);
        there
    };
    then(&remote, &there)
}

/// Nothing of it overwrites what the program stores afterwards.
#[test]
fn a_copy_that_is_stopped_ends_when_all_that_was_begun_of_it_is_there() {
    if !is_here() {
        return;
    }
    let rack = Machines::start(RACK);
    let [alpha, beta] = ["alpha", "beta"].map(|host| rack.joined(host));
    with_lane((&rack, &alpha, &beta), |remote, there| {
        let (bytes, asked) = (pattern(5), Cell::new(0));
        let source = |from: usize, to: DmaSlice<'_>| to.copy_from(&bytes[from..]);
        let stop = || asked.replace(asked.get() + 1) > 0;
        let carried = remote.carry(0, (&source, bytes.len()), &stop);
        assert!(!carried.expect("it is on another machine").unwrap());
        assert!(there() == bytes, "of the last turn, one part is made");
    });
}

/// The owner's node stands still while a copy moves, for longer than the lane waits.
#[test]
fn a_copy_whose_lane_is_lost_while_it_moves_goes_over_the_link() {
    if !is_here() {
        return;
    }
    let rack = Machines::start(RACK);
    let [mut alpha, beta] = ["alpha", "beta"].map(|host| rack.joined(host));
    let id = Pid::from_raw(alpha.process().id() as i32).unwrap();
    let node = Process::of(id);
    with_lane((&rack, &alpha, &beta), |remote, there| {
        let [by_link, by_lane] = copied(&beta, "beta");
        node.signal(Signal::STOP);
        std::thread::scope(|scope| {
            let copying = scope.spawn(|| copy(remote, &pattern(77)));
            let begun = Instant::now();
            while !beta.log().contains("an RDMA lane is lost") {
                assert!(begun.elapsed() < PATIENCE, "{}", beta.log());
                std::thread::sleep(Duration::from_millis(5));
            }
            node.signal(Signal::CONT);
            copying.join().unwrap();
        });
        assert!(there() == pattern(77));
        copy(remote, &pattern(78));
        assert!(there() == pattern(78));
        assert_eq!(copied(&beta, "beta"), [by_link + 2 * SIZE, by_lane], "nothing lands any more");
    });
}

/// Objects of the kernel that a process polls and signals by (`eventpoll`, `eventfd`), of which a lane has several.
/// Sockets are left out: a process that has just started has not yet made the connections that it keeps.
fn event_objects(machine: &mut Machine) -> usize {
    let folder = format!("/proc/{}/fd", machine.process().id());
    let of =
        |entry: std::io::Result<std::fs::DirEntry>| std::fs::read_link(entry.unwrap().path()).ok();
    let names = std::fs::read_dir(folder).unwrap().filter_map(of);
    names.filter(|name| name.to_string_lossy().starts_with("anon_inode:")).count()
}

#[test]
fn a_node_that_is_restarted_in_place_leaves_no_lane_for_copies_open() {
    if !is_here() {
        return;
    }
    let rack = Machines::start(RACK);
    let [mut alpha, mut beta] = ["alpha", "beta"].map(|host| rack.joined(host));
    let mut counts = Vec::new();
    for round in 0..3 {
        with_lane((&rack, &alpha, &beta), |_, _| ());
        for (host, machine) in [("alpha", &mut alpha), ("beta", &mut beta)] {
            // Not while the programs' sessions have not ended.
            rack.wait(|_| machine.command(&["restart", host]).output().unwrap().status.success());
            if round == 0 {
                counts.push(event_objects(machine));
            } else if round == 2 {
                // One that a request to the control plane needs goes by itself.
                let (before, begun) = (counts.remove(0), Instant::now());
                while event_objects(machine) > before {
                    assert!(
                        begun.elapsed() < PATIENCE,
                        "{host}: {before} event objects, then more are left"
                    );
                    std::thread::sleep(Duration::from_millis(20));
                }
            }
        }
    }
}

#[test]
fn copies_go_over_the_link_where_a_host_has_no_provider() {
    if !is_here() {
        return;
    }
    let rack = Machines::start(&RACK.replace("\"tcp\"", "\"nothing\""));
    let [alpha, beta] = ["alpha", "beta"].map(|host| rack.joined(host));
    let (owner, program) = (session(&alpha, "alpha"), session(&beta, "beta"));
    let segment = owner.create_segment(&SegmentOptions::shared(9, SIZE)).unwrap();
    let home = segment.map(0, SIZE).unwrap();
    segment.set_available().unwrap();
    let remote = answered(|| program.connect(owner.node(), 9, 20_000)).unwrap();
    for seed in 1..4 {
        copy(&remote, &pattern(seed));
    }
    let mut there = vec![0; SIZE as usize];
    home.whole().copy_to(&mut there);
    assert!(there == pattern(3));
    assert_eq!(copied(&beta, "beta"), [3 * SIZE, 0]);
}
