//! Shared memory between processes that die: killed during a copy or a connect, stopped,
//! or cut off with their node. Who is left is told in bounded time, lives on, and can begin again;
//! nothing is left over.

mod support;

use std::os::unix::process::CommandExt;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use rackbus_attach::{
    AttachError, ConnectionChange, Location, Mapping, Refusal, SegmentAccess, SegmentEntry,
    SegmentEvent, SegmentKind, SegmentOptions, Session,
};
use support::segments::answered;
use support::{PATIENCE, Process, Rack};

const HOSTS: &str = "name = \"lab\"\n[hosts.alpha]\n[hosts.beta]\n[hosts.gamma]\n";
const ALPHA: u32 = 4;
const SIZE: u64 = 64 << 20;
/// How many milliseconds a connect may take that is answered, whatever the answer is.
const LIMIT: u32 = 20_000;
/// Bounded time: far above what it takes, far below what one would call hanging.
const SOON: Option<Duration> = Some(Duration::from_secs(30));

fn session(rack: &Rack, host: &str) -> Session {
    Session::open(&Location { run_dir: rack.run_dir(), host: host.to_owned() }).unwrap()
}

/// Another process on a host, which is this test binary in one of the [`part`]s.
struct Other(Child);

impl Other {
    fn start(rack: &Rack, host: &str, part: &str) -> Other {
        Other(Other::command(rack, host, part).spawn().unwrap())
    }

    fn command(rack: &Rack, host: &str, part: &str) -> Command {
        let mut command = Command::new(std::env::current_exe().unwrap());
        command
            .args(["--exact", "part", "--ignored", "--nocapture", "--quiet"])
            .env("RACKBUS_RUN_DIR", rack.run_dir())
            .env("RACKBUS_HOST", host)
            .env("PART", part)
            .stdin(Stdio::null())
            .stdout(Stdio::null());
        command
    }

    /// Ends it as a crash would; returns when it is gone.
    fn kill(self) {}

    fn signal(&self, signal: rustix::process::Signal) {
        Process::of(rustix::process::Pid::from_child(&self.0)).signal(signal);
    }
}

impl Drop for Other {
    fn drop(&mut self) {
        self.0.kill().unwrap();
        self.0.wait().unwrap();
    }
}

/// What the other process does, until it is killed.
#[test]
#[ignore = "a part of the other tests, which start it"]
fn part() {
    let Ok(part) = std::env::var("PART") else { return };
    let place = |name| std::env::var_os(name).unwrap_or_default();
    let (run_dir, host) = (place("RACKBUS_RUN_DIR"), place("RACKBUS_HOST"));
    let location = Location { run_dir: run_dir.into(), host: host.into_string().unwrap() };
    let session = Session::open(&location);
    match part.as_str() {
        "owner" => {
            let session = session.unwrap();
            let segment = session.create_segment(&SegmentOptions::shared(7, SIZE)).unwrap();
            let mapping = segment.map(0, SIZE).unwrap();
            segment.set_available().unwrap();
            copy_for_ever(&mapping);
        }
        "connector" => {
            let session = session.unwrap();
            let remote = answered(|| session.connect(ALPHA, 7, LIMIT)).unwrap();
            copy_for_ever(&remote.map(0, SIZE).unwrap());
        }
        "connecting" => {
            let session = session.unwrap();
            loop {
                let remote = answered(|| session.connect(ALPHA, 7, LIMIT)).unwrap();
                remote.map(0, 4096).unwrap().whole().fill(1);
            }
        }
        "cramped" => {
            let session = session.unwrap();
            threads_have_started(&session);
            let pages = std::fs::read_to_string("/proc/self/statm").unwrap();
            let used: u64 = pages.split(' ').next().unwrap().parse().unwrap();
            let most = Some(used * 4096 + (64 << 20));
            let limit = rustix::process::Rlimit { current: most, maximum: most };
            rustix::process::setrlimit(rustix::process::Resource::As, limit).unwrap();
            for _ in 0..1000 {
                // It is there, and there is no place for it in this process: the room is free for the next.
                let error = session.allocate(SIZE * 2).map(drop).unwrap_err();
                assert!(!matches!(error, AttachError::Refused(_)), "{error}");
            }
        }
        "stranger" => {
            // Neither does it believe somebody else's folder, nor is it let in by the node.
            let believes = Location::from_environment().is_ok();
            std::process::exit(if session.is_err() && !believes { 0 } else { 1 });
        }
        other => panic!("no part {other}"),
    }
}

/// Returns when both threads of the session have their stacks: a limit on the process' memory would
/// end a thread that only begins.
fn threads_have_started(session: &Session) {
    let (called, was_called) = std::sync::mpsc::channel();
    let options = SegmentOptions::shared(9, 4096);
    let callback = Box::new(move |_| called.send(()).is_ok());
    let segment = session.create_segment_watched(&options, Some(callback)).unwrap();
    segment.set_available().unwrap();
    drop(answered(|| session.connect(ALPHA, 9, LIMIT)).unwrap());
    was_called.recv().unwrap();
}

fn copy_for_ever(mapping: &Mapping) {
    let bytes = vec![7_u8; 1 << 20];
    loop {
        for at in (0..mapping.len()).step_by(bytes.len()) {
            mapping.whole().part(at, bytes.len()).unwrap().copy_from(&bytes);
        }
    }
}

/// Connects as soon as the segment is there.
fn connect(session: &Session) -> rackbus_attach::RemoteSegment {
    let begun = Instant::now();
    loop {
        match answered(|| session.connect(ALPHA, 7, LIMIT)) {
            Ok(remote) => return remote,
            Err(AttachError::Refused(Refusal::NoSuchSegment)) => {}
            Err(error) => panic!("{error}"),
        }
        assert!(begun.elapsed() < PATIENCE, "the segment does not come");
        std::thread::yield_now();
    }
}

/// Copies out of a mapping on a thread of its own until the guard is dropped.
struct Copying {
    stop: std::sync::Arc<std::sync::atomic::AtomicBool>,
    thread: Option<std::thread::JoinHandle<u64>>,
}

impl Copying {
    fn of(mapping: Mapping) -> Copying {
        let stop = std::sync::Arc::new(std::sync::atomic::AtomicBool::new(false));
        let end = stop.clone();
        let copy = move || {
            let mut bytes = vec![0; mapping.len()];
            let mut rounds = 0;
            loop {
                mapping.whole().copy_to(&mut bytes);
                mapping.whole().copy_from(&bytes);
                rounds += 1;
                if end.load(std::sync::atomic::Ordering::Relaxed) {
                    return rounds;
                }
            }
        };
        Copying { stop, thread: Some(std::thread::spawn(copy)) }
    }

    fn finish(mut self) -> u64 {
        self.stop.store(true, std::sync::atomic::Ordering::Relaxed);
        self.thread.take().unwrap().join().unwrap()
    }
}

#[test]
fn an_owner_that_is_killed_is_missed_and_can_be_replaced() {
    let rack = Rack::up(HOSTS);
    let beta = session(&rack, "beta");
    let owner = Other::start(&rack, "alpha", "owner");
    let remote = connect(&beta);
    let mapping = remote.map(0, SIZE).unwrap();
    while mapping.whole().read_obj::<u64>(0).unwrap() == 0 {}
    let copying = Copying::of(mapping.clone());
    owner.kill();
    assert_eq!(remote.watch().wait(SOON), Some(SegmentEvent::Remote(ConnectionChange::Lost)));
    assert!(copying.finish() > 0);
    let again = session(&rack, "alpha").create_segment(&SegmentOptions::shared(7, SIZE));
    again.unwrap();
}

#[test]
fn a_connector_that_is_killed_is_told_to_the_owner() {
    let rack = Rack::up(HOSTS);
    let alpha = session(&rack, "alpha");
    let segment = alpha.create_segment(&SegmentOptions::shared(7, SIZE)).unwrap();
    segment.set_available().unwrap();
    let mapping = segment.map(0, SIZE).unwrap();
    for _ in 0..5 {
        let connector = Other::start(&rack, "beta", "connector");
        assert!(matches!(segment.watch().wait(SOON), Some(SegmentEvent::Connected(8))));
        while mapping.whole().read_obj::<u64>(0).unwrap() == 0 {}
        connector.kill();
        assert_eq!(segment.watch().wait(SOON), Some(SegmentEvent::Disconnected(8)));
        mapping.whole().fill(0);
    }
}

fn entry(session: &Session) -> SegmentEntry {
    session.segments().unwrap().into_iter().find(|entry| entry.id == 7).unwrap()
}

#[test]
fn memory_that_a_process_has_no_place_for_is_given_back() {
    let rack = Rack::up(HOSTS);
    let mut cramped = Other::command(&rack, "alpha", "cramped").spawn().unwrap();
    assert!(cramped.wait().unwrap().success());
    // As much as there is, afterwards.
    drop(session(&rack, "alpha").allocate(SIZE * 2).unwrap());
}

#[test]
fn connectors_killed_while_they_connect_leave_nothing() {
    let rack = Rack::up(HOSTS);
    let alpha = session(&rack, "alpha");
    let segment = alpha.create_segment(&SegmentOptions::shared(7, 4096)).unwrap();
    segment.set_available().unwrap();
    for round in 0..20 {
        let connecting = Other::start(&rack, "beta", "connecting");
        // During some connect.
        for _ in 0..=round {
            segment.watch().wait(SOON).unwrap();
        }
        connecting.kill();
    }
    let begun = Instant::now();
    while !entry(&alpha).connections.is_empty() {
        assert!(begun.elapsed() < PATIENCE, "{:?}", entry(&alpha));
        std::thread::yield_now();
    }
}

#[test]
fn a_node_that_is_killed_is_missed_on_both_sides_and_can_be_replaced() {
    let mut rack = Rack::up(HOSTS);
    let (alpha, beta) = (session(&rack, "alpha"), session(&rack, "beta"));
    let segment = alpha.create_segment(&SegmentOptions::shared(7, SIZE)).unwrap();
    segment.set_available().unwrap();
    let remote = connect(&beta);
    let copying = Copying::of(remote.map(0, SIZE).unwrap());
    rack.process(Some("alpha")).crash();
    for change in [ConnectionChange::NotOperational, ConnectionChange::Lost] {
        assert_eq!(remote.watch().wait(SOON), Some(SegmentEvent::Remote(change)));
    }
    assert!(copying.finish() > 0);
    assert!(matches!(
        beta.connect(ALPHA, 7, LIMIT),
        Err(AttachError::Refused(Refusal::NotResponding))
    ));
    // The owner lives, knows it, and cannot go on before it attaches anew.
    assert!(matches!(segment.set_available(), Err(AttachError::Gone(_))));
    // A thread of its session hears of it.
    let begun = Instant::now();
    while !alpha.is_gone() {
        assert!(begun.elapsed() < PATIENCE, "the session does not end");
        std::thread::yield_now();
    }
    rack.restart(Some("alpha"));
    rack.wait_up(&["alpha"]);
    let alpha = session(&rack, "alpha");
    let segment = alpha.create_segment(&SegmentOptions::shared(7, SIZE)).unwrap();
    segment.set_available().unwrap();
    connect(&beta);
}

#[test]
fn a_process_that_does_not_answer_cannot_hold_up_a_revocation() {
    let rack = Rack::up(HOSTS);
    let (alpha, beta) = (session(&rack, "alpha"), session(&rack, "beta"));
    let owner = Other::start(&rack, "alpha", "owner");
    let remote = connect(&beta);
    let mapping = remote.map(0, SIZE).unwrap();
    owner.signal(rustix::process::Signal::STOP);
    let begun = Instant::now();
    alpha.set_share(7..=7, Some(8), SegmentAccess::None).unwrap();
    assert!(begun.elapsed() < PATIENCE);
    assert_eq!(remote.watch().wait(SOON), Some(SegmentEvent::Remote(ConnectionChange::Revoked)));
    assert_eq!(mapping.whole().read_obj::<u64>(0), Some(0));
    owner.signal(rustix::process::Signal::CONT);
    // Cut off as it was, it is not the owner of the number any more.
    alpha.create_segment(&SegmentOptions::shared(7, SIZE)).unwrap();
    owner.kill();
}

#[test]
fn the_rack_file_and_the_command_line_say_who_may_use_what() {
    let rules =
        "[[share]]\nhost = \"alpha\"\nsegments = \"7\"\nwith = [\"beta\"]\naccess = \"write\"\n";
    let rack = Rack::up(&format!("{HOSTS}{rules}"));
    let (alpha, beta) = (session(&rack, "alpha"), session(&rack, "beta"));
    let segment = alpha.create_segment(&SegmentOptions::shared(7, 4096)).unwrap();
    segment.set_available().unwrap();
    let refused = answered(|| session(&rack, "gamma").connect(ALPHA, 7, LIMIT));
    assert!(matches!(refused, Err(AttachError::Refused(Refusal::Denied))));
    let remote = answered(|| beta.connect(ALPHA, 7, LIMIT)).unwrap();
    let listed = rack.json(&["mem", "segments", "alpha"]);
    assert_eq!(listed[0]["segment"], 7);
    assert_eq!(listed[0]["connected"], serde_json::json!(["beta"]));

    rack.good(&["mem", "share", "alpha", "0-0x10", "--with", "gamma", "--access", "read"]);
    assert!(!answered(|| session(&rack, "gamma").connect(ALPHA, 7, LIMIT)).unwrap().writable());
    rack.good(&["mem", "share", "alpha", "7", "--with", "beta", "--access", "none"]);
    assert_eq!(remote.watch().wait(SOON), Some(SegmentEvent::Remote(ConnectionChange::Revoked)));
    assert!(answered(|| beta.connect(ALPHA, 7, LIMIT)).is_err());
    rack.bad(2, &["mem", "segments", "delta"]);
}

#[test]
fn a_multicast_group_is_listed_with_its_members() {
    let rack = Rack::up(HOSTS);
    let options = SegmentOptions { kind: SegmentKind::Group, ..SegmentOptions::shared(3, 8192) };
    let sessions = ["alpha", "beta"].map(|host| session(&rack, host));
    let _members = sessions.each_ref().map(|session| session.create_segment(&options).unwrap());
    let listed = rack.json(&["mem", "segments", "alpha"]);
    let group = &listed[0];
    assert_eq!((&group["segment"], &group["group"]), (&3.into(), &true.into()), "{listed}");
    assert_eq!(group["connected"], serde_json::json!(["alpha", "beta"]));
    assert!(rack.good(&["mem", "segments", "alpha"]).contains("group"));
}

/// What a node has: descriptors, threads.
fn possessions(rack: &Rack, host: &str) -> (usize, usize) {
    let pid = rack.process(Some(host)).pid.as_raw_pid();
    let count = |what: &str| std::fs::read_dir(format!("/proc/{pid}/{what}")).unwrap().count();
    (count("fd"), count("task"))
}

#[test]
fn nothing_is_left_after_a_thousand_rounds() {
    let rack = Rack::up(HOSTS);
    let beta = session(&rack, "beta");
    let round = |number: u32| {
        // A session that ends without a word is what a killed process is to its node; some
        // rounds kill a real one.
        if number.is_multiple_of(100) {
            let owner = Other::start(&rack, "alpha", "owner");
            let remote = connect(&beta);
            owner.kill();
            assert_eq!(
                remote.watch().wait(SOON),
                Some(SegmentEvent::Remote(ConnectionChange::Lost))
            );
            return;
        }
        let alpha = session(&rack, "alpha");
        let segment = alpha.create_segment(&SegmentOptions::shared(7, 1 << 20)).unwrap();
        segment.set_available().unwrap();
        let interrupt = alpha.create_data_interrupt(Some(7)).unwrap();
        let remote = connect(&beta);
        let sender = answered(|| beta.connect_data_interrupt(ALPHA, 7, LIMIT)).unwrap();
        sender.send(b"round").unwrap();
        interrupt.receive(&mut [0; 8], SOON).unwrap();
        remote.map(0, 1 << 20).unwrap().whole().fill(1);
        alpha.close();
        assert_eq!(remote.watch().wait(SOON), Some(SegmentEvent::Remote(ConnectionChange::Lost)));
    };
    // The nodes' conversation with each other stays.
    assert!(answered(|| beta.connect(ALPHA, 7, LIMIT)).is_err());
    let now = || ["alpha", "beta"].map(|host| possessions(&rack, host));
    let before = now();
    (1..=1_000).for_each(round);
    let begun = Instant::now();
    // Fewer are right: a thread of the runtime that had nothing to do has ended.
    let more = |now: [(usize, usize); 2]| {
        now.iter().zip(&before).any(|(now, before)| now.0 > before.0 || now.1 > before.1)
    };
    while more(now()) {
        assert!(begun.elapsed() < PATIENCE, "{before:?} before, {:?} after", now());
        std::thread::yield_now();
    }
    assert!(session(&rack, "alpha").segments().unwrap().is_empty());
}

#[test]
fn another_users_process_is_not_let_in() {
    if !rustix::process::getuid().is_root() {
        support::not_tested("only root can be somebody else");
        return;
    }
    let rack = Rack::up(HOSTS);
    // As if the folders were open to everybody: the node itself asks whose the process is.
    let open = |path: &std::path::Path, mode: u32| {
        let all = std::os::unix::fs::PermissionsExt::from_mode(mode);
        std::fs::set_permissions(path, all).unwrap();
    };
    let run = rack.run_dir();
    // Entered by everybody; a folder that others can change is no rack's any more.
    for path in [run.parent().unwrap(), &run, &run.join("alpha")] {
        open(path, 0o755);
    }
    open(&run.join("alpha/segments.sock"), 0o777);
    let binary = run.join("binary");
    std::fs::copy(std::env::current_exe().unwrap(), &binary).unwrap();
    open(&binary, 0o755);
    let mut command = Command::new(&binary);
    command
        .args(["--exact", "part", "--ignored", "--quiet"])
        .env_clear()
        .env("RACKBUS_RUN_DIR", &run)
        .env("RACKBUS_HOST", "alpha")
        .env("PART", "stranger")
        .current_dir("/")
        .stdout(Stdio::null())
        .uid(65_534)
        .gid(65_534);
    assert!(command.status().unwrap().success(), "a stranger was let in");
    session(&rack, "alpha");
}
