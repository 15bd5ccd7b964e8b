//! A virtual machine with two borrowed drives, of two hosts, which is killed, frozen, stopped and started anew, on any host, while
//! everything else is disturbed as well. It starts with both, or has one plugged in and unplugged while it runs. What
//! its guest was told is written is there for the guest of the next. Some have a third drive and memory of another host
//! besides, and move data from the one to the other by peer-to-peer (`peers`).

mod peers;

use std::fmt::Write as _;
use std::path::PathBuf;
use std::sync::atomic::Ordering;
use std::time::Duration;

use rackbus_driver::{Drive, DriveOptions};
use rackbus_e2e::soak::{BLOCK, DriveModel};
use rackbus_e2e::{CheckFailure, Guest, RackProcesses, Result, ensure, programs};
use rackbus_seeds::Random;
use rustix::process::{Pid, Signal, kill_process};

use crate::{HOSTS, MACHINE_DRIVES, Soak};

pub use peers::{PEER_DRIVE, PEER_MEMORY};

/// Blocks that guests use, each written by a command of its own.
const BLOCKS: usize = 16;
/// How long a command in the guest may take: the functions of nodes that stall answer late.
const COMMAND: Duration = Duration::from_secs(20);
/// Digits of a value in a block, one line of text.
const DIGITS: usize = 15;

/// What of its functions a machine has found to fail, or does not have.
#[derive(Debug, Default)]
struct Unusable {
    drives: [bool; MACHINE_DRIVES.len()],
    peers: bool,
}

/// What was done with virtual machines.
#[derive(Debug, Default)]
pub struct MachineTally {
    started: usize,
    killed: usize,
    frozen: usize,
    plugged: usize,
    unplugged: usize,
    written: usize,
    read: usize,
    moved: usize,
}

impl MachineTally {
    /// A line for people that says what the machine did.
    pub fn describe(&self) -> String {
        let MachineTally { started, killed, frozen, plugged, unplugged, written, read, moved } =
            self;
        format!(
            "{started} VMs, {killed} killed, {frozen} frozen, {plugged} drives plugged in while they ran and \
             {unplugged} unplugged, {written} writes and {read} reads in them, {moved} times moved by peer-to-peer"
        )
    }
}

/// One machine after the other.
pub struct Machines<'a> {
    soak: &'a Soak,
    random: Random,
    /// What each drive must hold.
    models: [DriveModel; MACHINE_DRIVES.len()],
    /// Counts machines, and is the epoch of each in the models.
    life: u64,
    value: u64,
    done: MachineTally,
    /// The disk with the program for peer-to-peer.
    programs: PathBuf,
}

impl<'a> Machines<'a> {
    pub fn new(soak: &'a Soak, random: Random, programs: PathBuf) -> Machines<'a> {
        let (models, done) = Default::default();
        Machines { soak, random, models, life: 0, value: 0, done, programs }
    }

    /// Starts machines and ends them until it is told to stop, and then one that nobody disturbs, in which all is there.
    ///
    /// # Errors
    /// What is wrong in a guest.
    pub fn run(mut self) -> Result<MachineTally> {
        while !self.soak.load.stop.load(Ordering::Relaxed) {
            self.life += 1;
            let host = HOSTS[self.random.below(HOSTS.len())];
            let name = format!("soak{}", self.life);
            let later = self.random.chance(50);
            let drives = if later { &MACHINE_DRIVES[1..] } else { &MACHINE_DRIVES[..] };
            let peers = self.random.chance(50);
            let Ok(mut guest) = self.start(&name, host, drives, peers) else {
                // Its host or one of its drives is not available now.
                std::thread::sleep(Duration::from_millis(200));
                continue;
            };
            self.done.started += 1;
            let lived = match guest.booted() {
                Ok(()) => self.live_with(&mut guest, host, later, peers),
                Err(_) => Ok(()),
            };
            self.end(guest);
            lived?;
        }
        self.last()?;
        Ok(self.done)
    }

    /// Starts a machine with these drives, and with the functions for peer-to-peer, if it is to have them.
    fn start(&self, name: &str, host: &str, drives: &[&str], peers: bool) -> Result<Guest> {
        let more = if peers { &[PEER_DRIVE, PEER_MEMORY][..] } else { &[] };
        let disk = programs::qemu_arguments(&self.programs);
        let disk: Vec<&str> = ["--"].into_iter().chain(disk.iter().map(String::as_str)).collect();
        let functions = [drives, more].concat();
        Guest::start_with(&self.soak.rack, name, host, "trixie", &functions, &disk)
    }

    /// Uses what a machine that has booted was started with.
    fn live_with(&mut self, guest: &mut Guest, host: &str, later: bool, peers: bool) -> Result<()> {
        let peers = peers && peers::prepare(guest) && self.move_both_ways(guest)?;
        let mut unusable = Unusable { peers: !peers, ..Unusable::default() };
        match later {
            true => self.live_with_hot_add(guest, host, &mut unusable),
            false => self.live(guest, &mut unusable),
        }
    }

    /// Moves data by peer-to-peer; false when the guest, or a function, does not do it.
    fn move_both_ways(&mut self, guest: &mut Guest) -> Result<bool> {
        let moved = peers::move_both_ways(guest)?;
        self.done.moved += usize::from(moved);
        Ok(moved)
    }

    /// Plugs the first drive in while the machine runs, uses it and unplugs it, a few times.
    fn live_with_hot_add(
        &mut self,
        guest: &mut Guest,
        host: &str,
        unusable: &mut Unusable,
    ) -> Result<()> {
        for _ in 0..1 + self.random.below(3) {
            let name = guest.name().to_owned();
            let asked = ["borrow", MACHINE_DRIVES[0], "--for", host, "--vm", &name, "--wait=2s"];
            let Ok(lease) = self.soak.rack.json(&asked) else { return Ok(()) };
            self.soak.load.leases.fetch_add(1, Ordering::Relaxed);
            self.done.plugged += 1;
            let number = lease["lease"].as_u64().unwrap_or(0);
            // Nobody else returns it while the machine uses it; where that cannot, it is returned like all others.
            let lived = self.live(guest, unusable);
            let within = if self.random.chance(30) { "0s" } else { "2s" };
            match self.soak.rack.json(&["return", &number.to_string(), "--within", within]) {
                Ok(_) => self.done.unplugged += 1,
                Err(_) => self.soak.load.owe(number),
            }
            lived?;
            if guest.wait_drives(1).is_err() {
                return Ok(());
            }
            self.life += 1;
        }
        Ok(())
    }

    /// Uses the drives that a machine has, until it is ended or has lost all of them. A drive that fails is not used
    /// again by that machine: what it was told last may take effect late.
    fn live(&mut self, guest: &mut Guest, unusable: &mut Unusable) -> Result<()> {
        let rounds = 1 + self.random.below(30);
        for _ in 0..rounds {
            if !unusable.peers && self.random.chance(20) {
                unusable.peers = !self.move_both_ways(guest)?;
            }
            // One that was plugged in just now may come later than another.
            let mut drives = present(guest);
            drives.retain(|drive| !unusable.drives[*drive]);
            if drives.is_empty() || self.soak.load.stop.load(Ordering::Relaxed) {
                return Ok(());
            }
            let drive = drives[self.random.below(drives.len())];
            unusable.drives[drive] = !self.operate(guest, drive)?;
        }
        Ok(())
    }

    /// Writes or reads a block of a drive; false when the guest, or its drive, does not do it.
    fn operate(&mut self, guest: &mut Guest, drive: usize) -> Result<bool> {
        let block = self.random.below(BLOCKS);
        match self.random.below(10) {
            0 => {
                let script = self.write(drive, block);
                Ok(self.freeze(guest, &script))
            }
            1..6 => {
                let script = self.write(drive, block);
                let (value, said) = (self.value, guest.vm().exec(&script, COMMAND));
                let acknowledged = said.is_ok_and(|output| output.ok());
                if acknowledged {
                    self.models[drive].written(self.life, block, value);
                    self.done.written += 1;
                }
                Ok(acknowledged)
            }
            _ => match guest.vm().exec(&read(drive, block), COMMAND) {
                Ok(output) if output.ok() => {
                    self.check(drive, block, &output.text())?;
                    Ok(true)
                }
                _ => Ok(false),
            },
        }
    }

    /// A script that writes a new value to a block of a drive.
    fn write(&mut self, drive: usize, block: usize) -> String {
        self.value += 1;
        // A machine that follows another is the newest.
        self.models[drive].begin(self.life, block, self.value);
        write(drive, block, self.value)
    }

    /// The machine is stopped for a moment during a write, which nobody waits for.
    fn freeze(&mut self, guest: &mut Guest, script: &str) -> bool {
        let Some(process) = process(guest) else { return false };
        let Ok(running) = guest.begin(script, COMMAND) else { return false };
        let frozen = kill_process(process, Signal::STOP).is_ok();
        let most_ms = if self.random.chance(30) { 3500 } else { 500 };
        std::thread::sleep(Duration::from_millis(self.random.below(most_ms) as u64));
        let thawed = kill_process(process, Signal::CONT).is_ok();
        self.done.frozen += 1;
        frozen && thawed && running.wait().is_ok_and(|output| output.ok())
    }

    /// Ends a machine, by its own shutdown or during a write.
    fn end(&mut self, mut guest: Guest) {
        if self.random.chance(40) {
            let name = guest.name().to_owned();
            if guest.stop(&self.soak.rack).is_err() {
                // Its host's node does not answer; the process is ended anyway.
                kill(&self.soak.rack, &name);
            }
            return;
        }
        let drive = self.random.below(MACHINE_DRIVES.len());
        let block = self.random.below(BLOCKS);
        let script = self.write(drive, block);
        let running = guest.begin(&script, COMMAND);
        std::thread::sleep(Duration::from_millis(self.random.below(30) as u64));
        guest.vm().kill();
        self.done.killed += 1;
        drop(running);
    }

    /// A machine in a rack that is left alone: everything is there, and works, and its drive can be plugged in anew.
    fn last(&mut self) -> Result<()> {
        self.life += 1;
        let rack = &self.soak.rack;
        let start = |_: &RackProcesses| self.start("last", "gamma", &MACHINE_DRIVES, true).ok();
        let mut guest = rack.wait("a last VM starts", Duration::from_secs(60), start)?;
        self.done.started += 1;
        guest.booted()?;
        guest.wait_drives(MACHINE_DRIVES.len() + 1)?;
        ensure!(peers::prepare(&mut guest), "the last VM has nothing for peer-to-peer");
        ensure!(self.move_both_ways(&mut guest)?, "the last VM's drive reaches no memory");
        guest.wait_drives(MACHINE_DRIVES.len())?;
        let mut written = [0; MACHINE_DRIVES.len()];
        for (drive, written) in written.iter_mut().enumerate() {
            for block in 0..BLOCKS {
                let text = guest.run(&read(drive, block))?;
                self.check(drive, block, &text)?;
            }
            let script = self.write(drive, 0);
            guest.run(&script)?;
            *written = self.value;
            self.models[drive].written(self.life, 0, self.value);
            self.done.written += 1;
        }
        rack.json(&["return", MACHINE_DRIVES[0]])?;
        guest.wait_drives(1)?;
        rack.json(&["borrow", MACHINE_DRIVES[0], "--for", "gamma", "--vm", "last"])?;
        guest.wait_drives(MACHINE_DRIVES.len())?;
        let text = guest.run(&read(0, 0))?;
        self.check(0, 0, &text)?;
        guest.stop(rack)?;
        for (function, value) in MACHINE_DRIVES.into_iter().zip(written) {
            let (lease, socket) = rack.borrow(function, "alpha")?;
            let mut drive = Drive::open(&socket, DriveOptions::default())?;
            let mut data = vec![0; BLOCK];
            drive.read(0, &mut data)?;
            let found = String::from_utf8_lossy(&data[..DIGITS]).into_owned();
            ensure!(found == digits(value), "{function}: the last VM wrote {value}, found {found}");
            drop(drive);
            rack.give_back(lease)?;
        }
        Ok(())
    }

    /// What a guest has read is what was written.
    fn check(&mut self, drive: usize, block: usize, text: &str) -> Result<()> {
        let function = MACHINE_DRIVES[drive];
        let wrong =
            |error: String| CheckFailure(format!("{function} in VM {}: {error}", self.life));
        let found = match text.trim() {
            zeroes if zeroes.len() == BLOCK && zeroes.bytes().all(|it| it == b'0') => 0,
            digits if digits.len() == DIGITS => {
                digits.parse().map_err(|_| wrong(format!("block {block} holds {digits}")))?
            }
            parts => return Err(wrong(format!("block {block} holds parts of writes: {parts}"))),
        };
        self.models[drive].found(self.life, block, found).map_err(wrong)?;
        self.done.read += 1;
        Ok(())
    }
}

/// A value as a line of a block.
fn digits(value: u64) -> String {
    let mut text = String::new();
    // Writing to a string does not fail.
    let _ = write!(text, "{value:0DIGITS$}");
    text
}

/// The drives that a machine has now, as places in [`MACHINE_DRIVES`]: waits for one. None where none comes, or its agent
/// does not answer.
fn present(guest: &mut Guest) -> Vec<usize> {
    let script = "for try in $(seq 200); do \
                  ls /dev/nvme*n1 >/dev/null 2>&1 && exec cat /sys/class/nvme/nvme*/serial; sleep 0.05; done; exit 1";
    let said = guest.vm().exec(script, COMMAND);
    let serials = said.map(|output| output.text()).unwrap_or_default();
    let has = |drive: &usize| serials.lines().any(|line| line.trim() == serial(*drive));
    (0..MACHINE_DRIVES.len()).filter(has).collect()
}

/// A drive's serial number is made of its name.
fn serial(drive: usize) -> String {
    MACHINE_DRIVES[drive].replace('/', "-")
}

/// The beginning of a script: the file of a drive, which is known by its serial number, that of its name.
fn find(drive: usize) -> String {
    let serial = serial(drive);
    format!(
        "at=$(dirname $(grep -l '^{serial} *$' /sys/class/nvme/nvme*/serial | head -n 1)) && \
         drive=/dev/$(basename $at/nvme*n1) && [ -b \"$drive\" ]"
    )
}

/// `nocreat`: a drive that is lost after it was looked for must not become a file in the guest's `/dev`, which takes
/// the write and forgets it with the guest.
fn write(drive: usize, block: usize, value: u64) -> String {
    let (line, find) = (digits(value), find(drive));
    format!(
        "{find} && yes {line} | head -c {BLOCK} | dd of=$drive bs={BLOCK} seek={block} count=1 \
         iflag=fullblock oflag=direct conv=nocreat,notrunc,fsync status=none"
    )
}

/// Each different line of a block; bytes that are zero are digits, so that a part of zeroes is a line of its own.
fn read(drive: usize, block: usize) -> String {
    let find = find(drive);
    format!(
        "{find} && dd if=$drive of=/tmp/block bs={BLOCK} skip={block} count=1 iflag=direct status=none && \
         tr '\\000' 0 </tmp/block | sort -u"
    )
}

fn process(guest: &mut Guest) -> Option<Pid> {
    Pid::from_raw(i32::try_from(guest.vm().record().pid).ok()?)
}

/// Ends a machine by its record.
fn kill(rack: &RackProcesses, name: &str) {
    for host in HOSTS {
        if let Ok(record) = rackbus_vm::registry::find(rack.run_dir(), host, name) {
            Guest::attach(record).vm().kill();
        }
    }
}
