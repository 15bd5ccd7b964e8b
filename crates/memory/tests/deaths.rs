//! Locks and barriers between real processes that are killed while they hold them or wait.
//!
//! Each process is this test program again ([`one_party`]), with the memory and what to do in its
//! environment. The parent does what a node does: it finds a child dead, and declares it.
#![cfg(not(loom))]

use std::fs::OpenOptions;
use std::num::NonZeroU32;
use std::os::fd::{AsFd, AsRawFd};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use rackbus_memory::lock::{LockOwner, Locked, SharedBarrier, SharedMutex};
use rackbus_memory::{Access, Event, Region, SharedMemory};
use rustix::event::{PollFd, PollFlags};
use rustix::time::Timespec;

const BYTES: usize = 64 << 10;
const MUTEX_AT: usize = 0;
const BARRIER_AT: usize = 4096;
/// What the mutex protects: who is inside, and two numbers that are equal outside.
const INSIDE_AT: usize = 20 << 10;
const FIRST_AT: usize = INSIDE_AT + 8;
const SECOND_AT: usize = INSIDE_AT + 16;
/// The phase each party of the barrier is in, a number each.
const PHASES_AT: usize = 24 << 10;

const PARTIES: u32 = 4;
const PHASES: u32 = 60;
const LONG: Option<Duration> = Some(Duration::from_secs(60));

fn owner(id: u32, generation: u32) -> LockOwner {
    LockOwner { id: NonZeroU32::new(id).unwrap(), generation }
}

fn event() -> Event {
    Event::new().unwrap()
}

/// One process' view of the memory.
struct View {
    region: Arc<Region>,
    me: LockOwner,
}

impl View {
    fn get(&self, at: usize) -> u64 {
        self.region.whole().load_u64(at, Ordering::SeqCst).unwrap()
    }

    fn set(&self, at: usize, value: u64) {
        self.region.whole().store_u64(at, value, Ordering::SeqCst).unwrap();
    }

    fn mutex(&self) -> SharedMutex {
        SharedMutex::new(self.region.clone(), MUTEX_AT, event(), self.me).unwrap()
    }

    fn parties() -> Vec<LockOwner> {
        (1..=PARTIES).map(|id| owner(id, 0)).collect()
    }

    fn barrier(&self) -> SharedBarrier {
        let region = self.region.clone();
        SharedBarrier::new(region, BARRIER_AT, event(), &View::parties(), self.me).unwrap()
    }

    /// Locks and unlocks; dies during a change after `turns` of them.
    fn count(&self, turns: u64) {
        let mutex = self.mutex();
        for turn in 0.. {
            let locked = mutex.lock(LONG).unwrap();
            let broken = self.get(INSIDE_AT) != 0;
            let died = matches!(locked, Locked::OwnerDied(_));
            // Who dies inside leaves its mark; nobody else is there, and nobody dies unnoticed.
            assert!(died || !broken, "two processes were inside");
            if died {
                self.set(SECOND_AT, self.get(FIRST_AT));
            }
            assert_eq!(self.get(FIRST_AT), self.get(SECOND_AT));
            self.set(INSIDE_AT, self.me.id.get().into());
            self.set(FIRST_AT, self.get(FIRST_AT) + 1);
            if turn == turns {
                die();
            }
            self.set(SECOND_AT, self.get(SECOND_AT) + 1);
            assert_eq!(self.get(INSIDE_AT), u64::from(self.me.id.get()));
            self.set(INSIDE_AT, 0);
            drop(locked.guard());
        }
    }

    /// Passes all phases, or dies before it arrives at the end of phase `last`.
    fn pass(&self, last: u32) {
        let mut barrier = self.barrier();
        for phase in 1..=PHASES {
            let mine = PHASES_AT + 8 * self.me.id.get() as usize;
            self.set(mine, phase.into());
            if phase == last {
                die();
            }
            let alive = barrier.wait(LONG).unwrap();
            let there = |id: u32| self.get(PHASES_AT + 8 * id as usize) >= u64::from(phase);
            let arrived = (1..=PARTIES).filter(|id| there(*id)).count();
            assert!(arrived >= alive, "phase {phase}: {arrived} of {alive} were there");
        }
    }
}

/// Ends this process as a crash would: nothing is unlocked, nothing is dropped.
fn die() -> ! {
    let _ = rustix::process::kill_process(rustix::process::getpid(), rustix::process::Signal::KILL);
    unreachable!("the signal cannot be blocked")
}

/// A child's side of the tests below; nothing when no parent has started it.
#[test]
fn one_party() {
    let Ok(what) = std::env::var("RACKBUS_TEST_PARTY") else { return };
    let words: Vec<&str> = what.split(' ').collect();
    let number = |at: usize| words[at].parse::<u32>().unwrap();
    let file = OpenOptions::new().read(true).write(true).open(words[0]).unwrap();
    let both = Access::READ | Access::WRITE;
    let region = Arc::new(Region::map(file.as_fd(), 0, BYTES as u64, both).unwrap());
    let view = View { region, me: owner(number(2), number(3)) };
    match words[1] {
        "count" => view.count(number(4).into()),
        _ => view.pass(number(4)),
    }
}

/// The process that makes the memory and outlives its children.
struct Parent {
    memory: SharedMemory,
    view: View,
}

impl Parent {
    fn new() -> Parent {
        let memory = SharedMemory::create("deaths", BYTES as u64).unwrap();
        let view = View { region: memory.region().clone(), me: owner(99, 0) };
        Parent { memory, view }
    }

    fn start(&self, what: &str, me: LockOwner, number: u32) -> Child {
        let fd = self.memory.as_fd().as_raw_fd();
        let path = format!("/proc/{}/fd/{fd}", std::process::id());
        let party = format!("{path} {what} {} {} {number}", me.id, me.generation);
        Command::new(std::env::current_exe().unwrap())
            .args(["one_party", "--exact", "--nocapture"])
            .env("RACKBUS_TEST_PARTY", party)
            .stdout(Stdio::null())
            .spawn()
            .unwrap()
    }
}

/// Waits until one of them ends by itself; which one.
fn first_to_end(children: &[(LockOwner, Child)]) -> usize {
    let ended: Vec<_> = children
        .iter()
        .map(|(_, child)| {
            let pid = rustix::process::Pid::from_child(child);
            rustix::process::pidfd_open(pid, rustix::process::PidfdFlags::NONBLOCK).unwrap()
        })
        .collect();
    let begun = Instant::now();
    loop {
        let fds: Vec<_> = ended.iter().map(AsFd::as_fd).collect();
        Event::wait_any(&fds, Some(1_000_000_000));
        let gone = fds.iter().position(|fd| {
            let mut poll = [PollFd::from_borrowed_fd(*fd, PollFlags::IN)];
            rustix::event::poll(&mut poll, Some(&Timespec::default())).unwrap() > 0
        });
        if let Some(index) = gone {
            return index;
        }
        assert!(begun.elapsed() < LONG.unwrap(), "nobody gets on");
    }
}

#[test]
fn a_mutex_outlives_its_holders() {
    const DEATHS: u32 = 24;
    let parent = Parent::new();
    let mutex = parent.view.mutex();
    let start = |me: LockOwner, turns| (me, parent.start("count", me, turns));
    let mut children: Vec<(LockOwner, Child)> = (1..=3).map(|id| start(owner(id, 0), 20)).collect();
    let mut inside = 0;
    for death in 0..DEATHS {
        // One dies by itself, with the lock; the next one is killed, wherever it is.
        let index = if death % 2 == 0 { first_to_end(&children) } else { death as usize % 3 };
        let (me, mut child) = children.remove(index);
        if death % 2 == 1 {
            child.kill().unwrap();
        }
        let status = child.wait().unwrap();
        assert!(status.code().is_none(), "killed, not failed: {status}");
        inside += u32::from(mutex.declare_dead(me));
        assert!(!mutex.declare_dead(me));
        children.push(start(owner(me.id.get(), me.generation + 1), 20 + death * 37 % 60));
    }
    assert!(inside >= DEATHS / 2, "{inside}");
    for (me, mut child) in children {
        child.kill().unwrap();
        child.wait().unwrap();
        mutex.declare_dead(me);
    }
    drop(mutex.lock(LONG).unwrap().guard());
    // Half a change at most is left of each who died inside.
    let (first, second) = (parent.view.get(FIRST_AT), parent.view.get(SECOND_AT));
    assert!(first - second <= 1 && second > 100, "{first} {second}");
}

#[test]
fn a_barrier_goes_on_without_the_dead() {
    let parent = Parent::new();
    // Two go all the way, one dies on the way, one before its first phase.
    let last = [u32::MAX, 1, PHASES / 2, u32::MAX];
    let children: Vec<Child> =
        (1..=PARTIES).map(|id| parent.start("pass", owner(id, 0), last[id as usize - 1])).collect();
    let event = event();
    let region = parent.memory.region().clone();
    let parties = View::parties();
    // The node is no party; any party's end will do to declare with.
    let barrier = SharedBarrier::new(region, BARRIER_AT, event, &parties, parties[0]).unwrap();
    let mut children: Vec<_> = parties.iter().copied().zip(children).collect();
    children.sort_by_key(|(me, _)| last[me.id.get() as usize - 1]);
    for (me, mut child) in children {
        let status = child.wait().unwrap();
        let dies = last[me.id.get() as usize - 1] != u32::MAX;
        assert_eq!(status.success(), !dies, "{me:?}: {status}");
        if dies {
            assert!(barrier.declare_dead(me));
        }
    }
}
