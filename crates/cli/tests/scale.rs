//! Shared memory in numbers: hundreds of processes, thousands of segments, and sizes from a byte to
//! tens of gibibytes.

mod support;

use std::io::{BufRead, BufReader, Write};
use std::os::unix::fs::MetadataExt;
use std::process::{Child, ChildStdout, Command, Stdio};
use std::time::Instant;

use rackbus_attach::{
    AttachError, Location, Mapping, RemoteSegment, SegmentAccess, SegmentOptions, Session,
};
use rustix::process::{Resource, getrlimit, setrlimit};
use support::segments::answered;
use support::{PATIENCE, Rack};

const HOSTS: &str = "name = \"lab\"\n[hosts.alpha]\nmemory = \"64 GiB\"\n[hosts.beta]\n";
/// The hosts and their node ids.
const NODES: [(&str, u32); 2] = [("alpha", 4), ("beta", 8)];
const ALPHA: u32 = NODES[0].1;
const BETA: u32 = NODES[1].1;
/// Descriptors that most systems let a process have at first.
const FEW: u64 = 1024;
/// More than the tests need of what the system allows at most.
const NEEDED: u64 = 8192;
/// The processes, and the segments that each of them has.
const CROWD: u32 = 200;
const EACH: u32 = 20;
/// Segments of one process, and connections to them.
const PLENTY: u32 = 3000;
/// How many milliseconds a connect may take that is answered, whatever the answer is.
const LIMIT: u32 = 30_000;
const KIB: u64 = 1 << 10;
const GIB: u64 = 1 << 30;

/// A rack whose processes begin with few descriptors, and whose nodes talk with each other.
struct Lab {
    rack: Rack,
    /// One on each host, for as long as the rack lives.
    sessions: [Session; 2],
    /// What the nodes had before the test began.
    before: [(usize, usize); 2],
}

fn lab() -> Lab {
    let hard = getrlimit(Resource::Nofile).maximum;
    assert!(hard.is_none_or(|hard| hard >= NEEDED), "`ulimit -Hn` is to be {NEEDED} at least");
    let rack = Rack::described(HOSTS);
    let file = rack.file();
    let up = rack.command(&["up", &file]);
    let mut limited = Command::new("sh");
    limited
        .args(["-c", "ulimit -Sn \"$0\" && exec \"$@\"", &FEW.to_string()])
        .arg(up.get_program())
        .args(up.get_args())
        .envs(up.get_envs().filter_map(|(name, value)| Some((name, value?))));
    assert!(limited.status().unwrap().success(), "{}", rack.logs());
    let sessions = NODES.map(|(host, _)| {
        let session =
            Session::open(&Location { run_dir: rack.run_dir(), host: host.to_owned() }).unwrap();
        assert!(
            NODES.iter().all(|(_, node)| answered(|| session.connect(*node, 7, LIMIT)).is_err())
        );
        session
    });
    let before = possessions(&rack);
    Lab { rack, sessions, before }
}

/// What the nodes have: descriptors, threads.
fn possessions(rack: &Rack) -> [(usize, usize); 2] {
    NODES.map(|(host, _)| {
        let pid = rack.process(Some(host)).pid.as_raw_pid();
        let count = |what: &str| std::fs::read_dir(format!("/proc/{pid}/{what}")).unwrap().count();
        (count("fd"), count("task"))
    })
}

impl Lab {
    /// The segments of all hosts.
    fn segments(&self) -> usize {
        self.sessions.each_ref().map(|session| session.segments().unwrap().len()).iter().sum()
    }

    /// Waits until the nodes have no more than they had before (a thread that had nothing to do may have ended), and
    /// no segments.
    fn await_nothing_left(&self) {
        let begun = Instant::now();
        loop {
            let now = possessions(&self.rack);
            let no_more = |(now, before): (&(usize, usize), &(usize, usize))| {
                now.0 <= before.0 && now.1 <= before.1
            };
            if now.iter().zip(&self.before).all(no_more) {
                break;
            }
            assert!(begun.elapsed() < PATIENCE, "{:?} before, {now:?} after", self.before);
            std::thread::yield_now();
        }
        assert_eq!(self.segments(), 0);
    }
}

/// Another process, which is this test binary in one of the [`part`]s. They go step by step.
struct Other {
    child: Child,
    lines: BufReader<ChildStdout>,
}

impl Other {
    fn start(rack: &Rack, host: &str, part: &str, number: u32) -> Other {
        let mut child = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "part", "--ignored", "--nocapture", "--quiet"])
            .env("RACKBUS_RUN_DIR", rack.run_dir())
            .env("RACKBUS_HOST", host)
            .env("PART", part)
            .env("NUMBER", number.to_string())
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let lines = BufReader::new(child.stdout.take().unwrap());
        Other { child, lines }
    }

    /// Waits until it has made a step.
    fn await_step(&mut self) {
        let mut line = String::new();
        while line.trim_end() != STEP {
            line.clear();
            assert!(self.lines.read_line(&mut line).unwrap() > 0, "it ended");
        }
    }

    /// Lets it make the next one.
    fn go_on(&mut self) {
        self.child.stdin.as_mut().unwrap().write_all(b"\n").unwrap();
    }
}

impl Drop for Other {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// What a process says when it has made a step.
const STEP: &str = "made a step";

/// In a [`part`]: says so, and waits until it is to continue.
fn step() {
    println!("\n{STEP}");
    std::io::stdin().read_line(&mut String::new()).unwrap();
}

/// What the other processes do, until they are killed.
#[test]
#[ignore = "a part of the other tests, which start it"]
fn part() {
    let Ok(part) = std::env::var("PART") else { return };
    let number = std::env::var("NUMBER").unwrap().parse().unwrap();
    match part.as_str() {
        "one of the crowd" => one_of_the_crowd(number),
        "plenty" => plenty(),
        "without room" => without_room(),
        other => panic!("no part {other}"),
    }
}

/// A process' host in the crowd.
fn host_of(number: u32) -> (&'static str, u32) {
    NODES[number as usize % NODES.len()]
}

fn word(mapping: &Mapping, at: usize) -> u32 {
    mapping.whole().read_obj(at).unwrap()
}

fn set_word(mapping: &Mapping, at: usize, value: u32) {
    mapping.whole().part(at, 4).unwrap().copy_from(&value.to_le_bytes());
}

/// Has segments, is connected to one of each of the next processes, and reads what they say.
fn one_of_the_crowd(number: u32) {
    let session = Session::open(&Location::from_environment().unwrap()).unwrap();
    let own: Vec<_> = (0..EACH)
        .map(|n| {
            let id = number * EACH + n;
            let segment = session.create_segment(&SegmentOptions::shared(id, 4 * KIB)).unwrap();
            let mapping = segment.map(0, 4 * KIB).unwrap();
            set_word(&mapping, 0, id);
            segment.set_available().unwrap();
            (segment, mapping)
        })
        .collect();
    step();
    let connections: Vec<(RemoteSegment, Mapping)> = (0..EACH)
        .map(|n| {
            let other = (number + n + 1) % CROWD;
            let id = other * EACH + n;
            let remote = answered(|| session.connect(host_of(other).1, id, LIMIT)).unwrap();
            let mapping = remote.map(0, 4 * KIB).unwrap();
            assert_eq!(word(&mapping, 0), id);
            set_word(&mapping, 4092, id ^ number);
            (remote, mapping)
        })
        .collect();
    step();
    for (n, (segment, mapping)) in (0..EACH).zip(&own) {
        let connector = (number + CROWD - n - 1) % CROWD;
        assert_eq!(word(mapping, 4092), segment.id() ^ connector);
    }
    assert_eq!(connections.len(), own.len());
    step();
}

#[test]
fn two_hundred_processes_share_four_thousand_segments_and_leave_nothing() {
    let lab = lab();
    let mut crowd: Vec<Other> = (0..CROWD)
        .map(|number| Other::start(&lab.rack, host_of(number).0, "one of the crowd", number))
        .collect();
    for _ in ["has segments", "is connected"] {
        crowd.iter_mut().for_each(Other::await_step);
        crowd.iter_mut().for_each(Other::go_on);
    }
    crowd.iter_mut().for_each(Other::await_step);
    assert_eq!(lab.segments(), (CROWD * EACH) as usize);
    crowd.iter_mut().for_each(|other| other.child.kill().unwrap());
    drop(crowd);
    lab.await_nothing_left();
}

/// Has many segments and, on another host, as many connections to them, all of them mapped.
fn plenty() {
    let hard = getrlimit(Resource::Nofile).maximum;
    let few = rustix::process::Rlimit { current: Some(FEW), maximum: hard };
    setrlimit(Resource::Nofile, few).unwrap();
    let [here, there] = NODES.map(|(host, _)| {
        let run_dir = Location::from_environment().unwrap().run_dir;
        Session::open(&Location { run_dir, host: host.to_owned() }).unwrap()
    });
    assert_eq!(getrlimit(Resource::Nofile).current, Some(FEW), "raised without need");
    let shared: Vec<_> = (0..PLENTY)
        .map(|id| {
            let segment = here.create_segment(&SegmentOptions::shared(id, KIB)).unwrap();
            let mapping = segment.map(0, KIB).unwrap();
            set_word(&mapping, 0, id);
            segment.set_available().unwrap();
            let remote = answered(|| there.connect(ALPHA, id, LIMIT)).unwrap();
            let reached = remote.map(0, KIB).unwrap();
            (segment, mapping, remote, reached)
        })
        .collect();
    for (segment, mapping, _, reached) in &shared {
        assert_eq!(word(reached, 0), segment.id());
        set_word(reached, 1020, !segment.id());
        assert_eq!(word(mapping, 1020), !segment.id());
    }
    step();
}

#[test]
fn a_process_has_three_thousand_segments_and_as_many_connections() {
    let lab = lab();
    let mut other = Other::start(&lab.rack, "alpha", "plenty", 0);
    other.await_step();
    assert_eq!(lab.segments(), PLENTY as usize);
    drop(other);
    lab.await_nothing_left();
}

/// Makes segments until it may have no more descriptors; loses none of those that it has.
fn without_room() {
    let few = rustix::process::Rlimit { current: Some(64), maximum: Some(64) };
    setrlimit(Resource::Nofile, few).unwrap();
    let session = Session::open(&Location::from_environment().unwrap()).unwrap();
    let make = |id| session.create_segment(&SegmentOptions::shared(id, KIB));
    let mut made = Vec::new();
    let refused = loop {
        match make(made.len() as u32) {
            Ok(segment) => made.push(segment),
            Err(error) => break error,
        }
    };
    assert!(matches!(refused, AttachError::NoDescriptors), "{refused}");
    let id = made.len() as u32;
    assert_eq!(session.segments().unwrap().len(), made.len());
    made.iter().for_each(|segment| segment.set_available().unwrap());
    assert!(matches!(
        answered(|| session.connect(ALPHA, 0, LIMIT)),
        Err(AttachError::NoDescriptors)
    ));
    made.pop();
    // With room again, the number that could not be obtained is free.
    made.push(make(id).unwrap());
    step();
}

#[test]
fn a_process_without_room_for_descriptors_keeps_what_it_has() {
    let lab = lab();
    let mut other = Other::start(&lab.rack, "alpha", "without room", 0);
    other.await_step();
    assert!(lab.segments() > 16);
    drop(other);
    lab.await_nothing_left();
}

/// Bytes that a host's node keeps in segments: what is really there, not what it may become.
fn kept(rack: &Rack, host: &str) -> u64 {
    let pid = rack.process(Some(host)).pid.as_raw_pid();
    let mut files = std::collections::HashMap::new();
    for entry in std::fs::read_dir(format!("/proc/{pid}/fd")).unwrap() {
        let path = entry.unwrap().path();
        // Some descriptors are gone again by now.
        let (Ok(name), Ok(file)) = (std::fs::read_link(&path), std::fs::metadata(&path)) else {
            continue;
        };
        if name.to_string_lossy().contains("rackbus segment") {
            files.insert(file.ino(), file.blocks() * 512);
        }
    }
    files.values().sum()
}

#[test]
fn segments_of_any_size_are_shared_and_taken_away() {
    let lab = lab();
    let [alpha, beta] = &lab.sessions;
    for (id, size) in (7..).zip([1, 4, 4095, 4097, 32 * GIB]) {
        let segment = alpha.create_segment(&SegmentOptions::shared(id, size)).unwrap();
        segment.set_available().unwrap();
        let mapping = segment.map(0, size).unwrap();
        let remote = answered(|| beta.connect(ALPHA, id, LIMIT)).unwrap();
        assert_eq!(remote.size(), size);
        assert!(remote.map(0, size + 1).is_err() && remote.map(size, 1).is_err());
        let reached = remote.map(0, size).unwrap();
        let places = [0, size / 2, size - 1].map(|at| usize::try_from(at).unwrap());
        let byte = |mapping: &Mapping, at| mapping.whole().read_obj::<u8>(at).unwrap();
        for at in places {
            reached.whole().part(at, 1).unwrap().copy_from(&[7]);
        }
        assert_eq!(places.map(|at| byte(&mapping, at)), [7; 3], "{size} bytes");
        let begun = Instant::now();
        alpha.set_share(id..=id, Some(BETA), SegmentAccess::None).unwrap();
        assert!(begun.elapsed() < PATIENCE);
        // The owner keeps its bytes, who was connected has none, and nothing in between was filled.
        assert_eq!(places.map(|at| byte(&mapping, at)), [7; 3], "{size} bytes");
        assert_eq!(places.map(|at| byte(&reached, at)), [0; 3], "{size} bytes");
        let (kept, huge_pages) = (kept(&lab.rack, "alpha"), 3 << 21);
        assert!((1..=huge_pages).contains(&kept), "{size} bytes take {kept}");
        mapping.whole().part(places[2], 1).unwrap().copy_from(&[8]);
        assert_eq!(byte(&mapping, places[2]), 8);
        assert_eq!(byte(&reached, places[2]), 0);
    }
}
