//! Time-sharing in a rack of real processes: programs of three hosts take turns on one drive, each with data of its own
//! there; some are killed, some do not release it, and the control plane is restarted.

mod support;

use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use rackbus_control::shares::{Share, ShareState};
use rackbus_driver::{Drive, DriveError, DriveOptions};
use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;
use support::{PATIENCE, Rack, pattern};

const RACK: &str = "name = \"lab\"\n[control]\nlease_ttl = \"15 s\"\nreturn_grace = \"2 s\"\n\
    [hosts.alpha.devices.nvme0]\nkind = \"nvme\"\nsize = \"16 MiB\"\nbacking = \"file\"\n\
    [hosts.beta]\n[hosts.gamma]\n[hosts.delta]\n";

/// Tells the test binary that it is a borrower: the file that it notes its progress in.
const NOTES: &str = "RACKBUS_TEST_NOTES";
/// Which part of the drive is its own.
const REGION: &str = "RACKBUS_TEST_REGION";
/// How many turns it takes until its work is done.
const TURNS: usize = 2;
/// Blocks of 4 KiB in a region.
const BLOCKS: u64 = 64;

/// What a block of a region has after so many rounds.
fn block(region: u64, round: u64, block: u64) -> Vec<u8> {
    pattern(region << 32 | round << 8 | block, 4096)
}

/// A line for each turn and each round that is on the drive.
fn notes(path: &Path) -> Vec<String> {
    let text = std::fs::read_to_string(path).unwrap_or_default();
    text.lines().map(str::to_owned).collect()
}

fn note(path: &Path, line: &str) {
    use std::io::Write as _;
    let file = std::fs::File::options().create(true).append(true).open(path);
    writeln!(file.unwrap(), "{line}").unwrap();
}

/// In a process of its own: a turn of a borrower. It finds in its region what it wrote there in its turns before, and
/// writes on until it is ended by the signal that says that its turn is over.
#[test]
fn borrower() {
    let Some(file) = std::env::var_os(NOTES).map(PathBuf::from) else { return };
    let region: u64 = std::env::var(REGION).unwrap().parse().unwrap();
    let socket = std::env::var_os("RACKBUS_SOCKET").unwrap();
    let before = notes(&file);
    note(&file, "turn");
    let mut drive =
        Drive::open(Path::new(&socket), DriveOptions { depth: 4, data: 1 << 20 }).unwrap();
    let done = before.iter().filter(|line| *line != "turn").count() as u64;
    let lba = |at: u64| (region * BLOCKS + at) * 8;
    let mut data = vec![0; 4096];
    for at in 0..BLOCKS {
        drive.read(lba(at), &mut data).unwrap();
        // The round that was not noted any more may have begun.
        let known = match done {
            0 => data == vec![0; 4096] || data == block(region, 1, at),
            _ => data == block(region, done, at) || data == block(region, done + 1, at),
        };
        assert!(known, "region {region}: block {at} is not as of round {done}");
    }
    let turns = before.iter().filter(|line| *line == "turn").count();
    if turns >= TURNS {
        return;
    }
    for round in done + 1.. {
        for at in 0..BLOCKS {
            drive.write(lba(at), &block(region, round, at), false).unwrap();
        }
        drive.flush().unwrap();
        note(&file, "round");
    }
}

/// A turn that is not used within half of this is taken back, and who has three of these in a row has no more: a program
/// on a busy machine is to have begun by then. The test ends each turn long before.
const SLICE: &str = "20s";

/// Has a borrower take turns for `host`.
fn run(rack: &Rack, host: &str, region: u64, folder: &Path) -> Child {
    let notes = folder.join(host);
    let program = std::env::current_exe().unwrap();
    let program = program.to_str().unwrap();
    let args = ["share", "run", "alpha/nvme0", "--for", host, "--slice", SLICE, "--grace", "3s"];
    let program = ["--", program, "--exact", "borrower", "--nocapture", "--test-threads", "1"];
    let mut command: Command = rack.command(&[&args[..], &program[..]].concat());
    command.env(NOTES, notes).env(REGION, region.to_string());
    command.stdout(Stdio::null()).stderr(Stdio::inherit()).spawn().unwrap()
}

/// Has each turn end as soon as its program has been seen at work in it, until `is_done`: it is asked to release the drive
/// then, in the middle of what it does, as at the end of its slice. `ended` counts these turns.
fn end_turns(
    rack: &Rack,
    folder: &Path,
    ended: &mut HashMap<String, usize>,
    mut is_done: impl FnMut() -> bool,
) {
    let client = rack.client();
    while !is_done() {
        let shares = rack.block(client.shares()).unwrap();
        for share in shares.into_iter().filter(|it| it.state == ShareState::Turn) {
            let notes = notes(&folder.join(&share.borrower));
            let turns = notes.iter().filter(|line| *line == "turn").count();
            let ended = ended.entry(share.borrower).or_default();
            // The last notes may be of the turn before.
            if turns > *ended && notes.last().is_some_and(|line| line == "round") {
                // An error means that it is over by itself.
                *ended += usize::from(rack.block(client.give_turn_back(share.share)).is_ok());
            }
        }
        // What a program notes is in a file, which is no event of the rack's.
        std::thread::sleep(Duration::from_millis(5));
    }
}

fn try_open(socket: &Path) -> Result<Drive, DriveError> {
    Drive::open(socket, DriveOptions { depth: 4, data: 1 << 20 })
}

fn shares(rack: &Rack) -> Vec<Share> {
    serde_json::from_value(rack.json(&["share", "list"])).unwrap()
}

fn share(rack: &Rack, args: &[&str]) -> Share {
    serde_json::from_value(rack.json(&[&["share"], args].concat())).unwrap()
}

/// Waits until a share is as it should be.
fn wait(rack: &Rack, share: u64, ready: impl Fn(&Share) -> bool) -> Share {
    rack.wait(async |client| {
        let shares = client.shares().await.ok()?;
        shares.into_iter().find(|it| it.share == share && ready(it))
    })
}

/// Opens the drive in a turn of a share, at the turn's socket or at `path`; the turn. On a busy machine, one may be taken
/// back before it is opened.
fn open_in_a_turn(rack: &Rack, share: u64, path: Option<&Path>) -> (Share, Drive) {
    loop {
        let turn = wait(rack, share, |it| it.state == ShareState::Turn);
        let last = turn.lease;
        match try_open(path.unwrap_or(Path::new(turn.socket.as_ref().unwrap()))) {
            Ok(drive) => return (turn, drive),
            Err(error) => {
                println!("{error}: {turn:?}");
                wait(rack, share, |it| it.state != ShareState::Turn || it.lease != last);
            }
        }
    }
}

/// All events, as soon as `text` is in so many of them: they are stored some time after what they tell of can be seen.
fn wait_for_events(rack: &Rack, text: &str, count: usize) -> Vec<String> {
    let begun = Instant::now();
    loop {
        let events = rack.json(&["events", "--last", "2000"]);
        let told = |event: &Value| event["text"].as_str().unwrap().to_owned();
        let events: Vec<String> = events.as_array().unwrap().iter().map(told).collect();
        if events.iter().filter(|event| event.contains(text)).count() >= count {
            return events;
        }
        assert!(begun.elapsed() < PATIENCE, "{text}: {events:#?}{}", rack.logs());
    }
}

#[test]
fn three_programs_take_turns_on_one_drive_and_find_their_own_data_there() {
    let rack = Rack::up(RACK);
    let folder = tempfile::tempdir().unwrap();
    let hosts = ["beta", "gamma", "delta"];
    let borrowers = hosts.iter().zip(0..);
    let mut borrowers: Vec<Child> =
        borrowers.map(|(host, region)| run(&rack, host, region, folder.path())).collect();
    // All three are in the ring; nobody gets the drive beside it.
    rack.wait(async |client| {
        let turns = client.devices().await.ok()?.remove(0).turns?;
        (turns.shares == 3).then_some(())
    });
    let refused = rack.bad(1, &["borrow", "alpha/nvme0", "--for", "beta"]);
    assert!(refused.contains("lent in turns to 3 who share it"), "{refused}");
    let other = rack.bad(1, &["share", "join", "alpha/nvme0", "--for", "beta", "--slice", "1s"]);
    assert!(other.contains("are of 20000 ms already"), "{other}");
    let shown = rack.good(&["devices", "alpha/nvme0"]);
    assert!(shown.contains("3 take turns of 20"), "{shown}");
    let page = rack.good(&["metrics"]);
    assert!(page.contains("rackbus_shares{function=\"alpha/nvme0\"} 3"), "{page}");
    let mut ended = HashMap::new();
    end_turns(&rack, folder.path(), &mut ended, || {
        let turns = rack.block(rack.client().devices()).unwrap().remove(0).turns;
        turns.is_some_and(|turns| turns.handovers > 0)
    });
    let is_over = |child: &mut Child| child.try_wait().unwrap().is_some();
    end_turns(&rack, folder.path(), &mut ended, || borrowers.iter_mut().all(is_over));
    for child in borrowers {
        let ended = child.wait_with_output().unwrap();
        assert!(ended.status.success(), "{:?}{}", ended.status, rack.logs());
    }
    for host in hosts {
        let notes = notes(&folder.path().join(host));
        let rounds = notes.iter().filter(|line| *line == "round").count();
        assert!(rounds > 0, "{host} wrote nothing: {notes:?}");
        // A turn may be over just when its program has noted it: then it takes another one.
        assert!(notes.len() - rounds > TURNS, "{host}: {notes:?}");
    }
    assert_eq!(shares(&rack), []);
    let events = wait_for_events(&rack, "takes no more turns on alpha/nvme0", 3);
    let told = |text: &str| events.iter().filter(|event| event.contains(text)).count();
    assert!(told("handed over in ") >= 3, "{events:#?}");
    assert!(told(" is over: ") >= 3, "{events:#?}");
    for of_each_lease in
        ["is being lent", "can use", "is asked to release", "offered again", "what lease"]
    {
        assert_eq!(told(of_each_lease), 0, "the events of the shares tell it: {events:#?}");
    }
    assert_eq!(told("takes no more turns on alpha/nvme0"), 3, "{events:#?}");
    // It is available again as usual.
    rack.give_back(&rack.borrow("alpha/nvme0", "beta"));
}

#[test]
fn a_program_that_does_not_release_it_loses_the_function_and_owes_the_time() {
    let rack = Rack::up(RACK);
    // It has its turn for six seconds, and is asked for as long as a busy machine may take to look. A turn is to be used
    // within three.
    let join = |host| ["join", "alpha/nvme0", "--for", host, "--slice", "6s", "--grace", "7s"];
    let stubborn = share(&rack, &join("beta"));
    let (_, mut lost) = open_in_a_turn(&rack, stubborn.share, None);
    lost.write(0, &[7; 4096], true).unwrap();
    let other = share(&rack, &join("gamma"));
    assert_eq!(other.slice_ms, 6000);
    // It is asked first.
    wait(&rack, stubborn.share, |it| it.state == ShareState::Asked);
    let (next, mut drive) = open_in_a_turn(&rack, other.share, None);
    assert!(next.handovers >= 1, "{next:?}");
    let owes = wait(&rack, stubborn.share, |it| it.state == ShareState::Waiting);
    assert!(owes.allowance_ms <= -100, "{owes:?}");
    lost.read(0, &mut [0; 4096]).expect_err("it reaches a function that others have");
    let mut data = [0; 4096];
    drive.read(0, &mut data).unwrap();
    assert_eq!(data, [7; 4096], "what was acknowledged");
    // Who is done early gives back by releasing it.
    drop(drive);
    let has_another = |it: &Share| match it.turns {
        0 => false,
        1 => it.state == ShareState::Turn,
        _ => true,
    };
    wait(&rack, stubborn.share, has_another);
    let given = rack.json(&["share", "leave", &stubborn.share.to_string()]);
    assert_eq!(given["borrower"], "beta");
    let refused = rack.bad(1, &["share", "yield", &stubborn.share.to_string()]);
    assert!(refused.contains("there is no share"), "{refused}");
}

#[test]
fn turns_that_nobody_uses_end_and_a_restarted_control_plane_goes_on_with_the_ring() {
    let mut rack = Rack::up(RACK);
    // A turn is to be used within three seconds.
    let join = |host| ["join", "alpha/nvme0", "--for", host, "--slice", "6s", "--weight", "2"];
    let used = share(&rack, &join("gamma"));
    // A path of the share's leads to each turn's socket.
    let path = rack.run_dir().join(format!("gamma/functions/share-{}.sock", used.share));
    let (turn, drive) = open_in_a_turn(&rack, used.share, Some(&path));
    let unused = share(&rack, &join("beta"));
    drop(drive);
    wait(&rack, unused.share, |it| it.state == ShareState::Turn);
    rack.process(None).crash();
    rack.restart(None);
    rack.wait_up(&["alpha", "beta", "gamma", "delta"]);
    let numbers: Vec<u64> = shares(&rack).iter().map(|it| it.share).collect();
    assert!(numbers.contains(&used.share), "{numbers:?}");
    // Nobody is at beta: after some turns it leaves. At gamma each turn is used, and given back.
    let (mut last, mut opened) = (turn.lease, 0);
    let next_turn = |last: Option<u64>| {
        rack.wait(async |client| {
            let shares = client.shares().await.ok()?;
            let is_left = !shares.iter().any(|it| it.share == unused.share);
            let ours = shares.into_iter().find(|it| it.share == used.share);
            assert!(ours.is_some(), "gamma takes no more turns");
            let turn = ours.filter(|it| it.state == ShareState::Turn && it.lease != last);
            (is_left || turn.is_some()).then_some(turn.filter(|_| !is_left))
        })
    };
    while let Some(turn) = next_turn(last) {
        last = turn.lease;
        // A busy machine may come too late for one of them.
        opened += usize::from(try_open(&path).is_ok());
    }
    assert!(opened > 0, "no turn of gamma's could be used{}", rack.logs());
    wait_for_events(&rack, "nobody used its last 3 turns", 1);
}

/// Who ends `share run` ends its program in order: it has asked the drive for something, and may have data to write.
#[test]
fn a_program_is_asked_to_end_when_what_runs_it_is() {
    let rack = Rack::up(RACK);
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("notes");
    let script =
        r#"trap 'echo asked >>"$0"; exit' TERM; echo turn >"$0"; while :; do sleep 0.01; done"#;
    let args = ["share", "run", "alpha/nvme0", "--for", "beta", "--slice", "1min"];
    let program = ["--", "sh", "-c", script, file.to_str().unwrap()];
    let mut running = rack.command(&[&args[..], &program[..]].concat()).spawn().unwrap();
    let begun = Instant::now();
    while notes(&file).is_empty() {
        assert!(begun.elapsed() < PATIENCE, "the program was not started");
        std::thread::sleep(Duration::from_millis(5));
    }
    kill_process(Pid::from_child(&running), Signal::INT).unwrap();
    assert_eq!(running.wait().unwrap().code(), Some(1));
    assert_eq!(notes(&file), ["turn", "asked"]);
    assert_eq!(shares(&rack), []);
}
