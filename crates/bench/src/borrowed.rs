//! Borrowed drives: through two nodes against the same drive at its lender's own socket, eight in one driver thread against
//! one, and how long borrowing, returning and revoking take while another drive is busy.

use std::cell::RefCell;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use rackbus_driver::{Drive, DriveBuffer, DriveError};
use rackbus_spec::nvme::IoOpcode;

use crate::lent;
use crate::machine::{CLIENT_CPU, Regime, pin, unpin};
use crate::nvme::{ClientLoad, DATA, Settings};
use crate::rack::BenchRack;
use crate::raw::STORE;
use crate::report::Case;
use crate::{BenchError, Report};

/// Drives that one thread drives.
const DRIVES: usize = 8;
/// Commands under way in all drives of the thread together.
const DEPTH: usize = 32;
/// Bytes of an operation where drives are driven together.
const BLOCK: usize = 4096;
/// Blocks that are read of each of them: of the one that is driven alone as many as of all, so that caches hold as much.
const PART: u64 = (STORE / BLOCK / DRIVES) as u64;

const READ_1: ClientLoad = ClientLoad::new(BLOCK, 1, false, true);
const SEQUENTIAL_8: ClientLoad = ClientLoad::new(128 << 10, 8, false, false);

/// A rack in which `alpha` has eight drives, which `beta` borrows.
fn rack_file() -> String {
    let drive = |at: usize| {
        let mib = if at < 2 { STORE >> 20 } else { 64 };
        format!(
            "[hosts.alpha.devices.nvme{at}]\nkind = \"nvme\"\nsize = \"{mib} MiB\"\nbacking = \"memory\"\n\
             block_size = 4096\n"
        )
    };
    let drives: String = (0..DRIVES).map(drive).collect();
    format!("name = \"bench\"\n{drives}[hosts.beta]\n")
}

/// Runs all cases and adds their rows to `report`.
///
/// # Errors
/// When rackbus itself fails.
pub fn run(settings: &Settings, regime: &Regime, report: &mut Report) -> Result<(), BenchError> {
    report.note(&format!("borrowed drives: regime {}", regime.name()));
    // What is started is not to inherit where this thread was put.
    unpin();
    let Some(rack) = BenchRack::start(&settings.dir, &rack_file())? else {
        report.left_out("lending", "the rackbus binary is not beside this one");
        return Ok(());
    };
    through_nodes(&rack, settings, report)?;
    together(&rack, settings, report)?;
    under_load(&rack, settings, report)
}

fn case<'a>(
    settings: &Settings,
    case: &'a str,
    peer_name: &'a str,
    unit: &'static str,
) -> Case<'a> {
    Case { area: "lending", case, peer_name, unit, runs: settings.runs }
}

/// Operations a second of a drive that `host` borrows for this run.
fn rate(
    rack: &BenchRack,
    host: &str,
    load: &ClientLoad,
    time: Duration,
) -> Result<f64, BenchError> {
    unpin();
    let lease = rack.borrow_for(host, &["alpha/nvme0"])?;
    let mut drive = lent::open(&lease.socket, DATA)?;
    let rate = lent::run(&mut drive, load, time)?;
    drop(drive);
    unpin();
    rack.give_back(&lease)?;
    Ok(rate)
}

/// The same drive and engine: borrowed by another host, and by its own.
fn through_nodes(
    rack: &BenchRack,
    settings: &Settings,
    report: &mut Report,
) -> Result<(), BenchError> {
    let (peer, time) = ("at its lender's own socket", settings.time);
    let name = "borrowed: 4k read qd1 memory";
    if name.contains(&settings.only) {
        report.compare(
            case(settings, name, peer, "ns added"),
            || Ok(1e9 / rate(rack, "beta", &READ_1, time)?),
            || Ok(1e9 / rate(rack, "alpha", &READ_1, time)?),
            |borrowed, own| borrowed - own,
        )?;
    }
    let name = "borrowed: 128k sequential qd8 memory";
    if name.contains(&settings.only) {
        let gigabytes = |rate: f64| rate * SEQUENTIAL_8.bytes as f64 / 1e9;
        report.compare(
            case(settings, name, peer, "GB/s"),
            || Ok(gigabytes(rate(rack, "beta", &SEQUENTIAL_8, time)?)),
            || Ok(gigabytes(rate(rack, "alpha", &SEQUENTIAL_8, time)?)),
            |borrowed, own| borrowed / own,
        )?;
    }
    Ok(())
}

/// A drive of several that one thread drives.
struct DrivenDrive {
    drive: Drive,
    free: Vec<DriveBuffer>,
    /// Which buffer a command uses, by its identifier.
    by_id: Vec<Option<DriveBuffer>>,
    /// What the block that is read next is found by.
    next: u64,
    /// How many blocks are read, from the first one on.
    blocks: u64,
}

impl DrivenDrive {
    fn new(mut drive: Drive, depth: usize) -> Result<DrivenDrive, BenchError> {
        let free = (0..depth).map(|slot| drive.buffer(slot * BLOCK, BLOCK));
        let missing = DriveError::Request("the drive was opened with less data");
        let free = free.collect::<Option<Vec<_>>>().ok_or(missing)?;
        let by_id = vec![None; drive.parts().0.depth()];
        Ok(DrivenDrive { drive, free, by_id, next: 1, blocks: PART })
    }

    /// Sends what there are buffers for, and takes what has completed; how many that is.
    fn turn(&mut self, refill: bool) -> Result<u64, BenchError> {
        let (queue, device, _) = self.drive.parts();
        while refill && let Some(buffer) = self.free.pop() {
            self.next = self.next.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            let lba = (self.next >> 20) % self.blocks;
            let id = queue.submit(IoOpcode::Read, lba, 1, buffer, false)?;
            self.by_id[usize::from(id)] = Some(buffer);
        }
        queue.ring(device)?;
        let mut done = 0;
        while let Some(completed) = queue.poll(device)? {
            if !completed.status.is_success() {
                let (command, status) = ("read", completed.status);
                return Err(DriveError::Command { command, status }.into());
            }
            self.free.extend(self.by_id[usize::from(completed.id)].take());
            done += 1;
        }
        device.progress();
        Ok(done)
    }
}

/// Thousands of reads a second of all drives together, by this thread.
fn drive_all(drives: &mut [DrivenDrive], time: Duration) -> Result<f64, BenchError> {
    pin(CLIENT_CPU);
    let (mut begun, mut counted, mut done) = (Instant::now(), false, 0);
    let rate = loop {
        for driven in &mut *drives {
            done += driven.turn(true)?;
        }
        let elapsed = begun.elapsed();
        if !counted && elapsed >= time / 10 {
            (begun, counted, done) = (Instant::now(), true, 0);
        } else if counted && elapsed >= time {
            break done as f64 / elapsed.as_secs_f64() / 1e3;
        }
    };
    for driven in drives {
        while driven.drive.parts().0.in_flight() > 0 {
            driven.turn(false)?;
        }
    }
    unpin();
    Ok(rate)
}

/// Eight drives in one thread against one, with as many commands under way.
fn together(rack: &BenchRack, settings: &Settings, report: &mut Report) -> Result<(), BenchError> {
    let name = "8 functions in one thread, 4k read";
    if !name.contains(&settings.only) {
        return Ok(());
    }
    let mut leases = Vec::new();
    let mut drives = Vec::new();
    for at in 0..DRIVES {
        let lease = rack.borrow(&[&format!("alpha/nvme{at}")])?;
        let mut drive = lent::open(&lease.socket, DATA)?;
        let (block, blocks) = (vec![0x5a; 1 << 20], drive.info().blocks);
        for lba in (0..blocks).step_by(block.len() / BLOCK) {
            drive.write(lba, &block, false)?;
        }
        leases.push(lease);
        // The first is the one that is driven alone.
        let depth = if at == 0 { DEPTH } else { DEPTH / DRIVES };
        drives.push(DrivenDrive::new(drive, depth)?);
    }
    let spare = drives[0].free.split_off(DEPTH / DRIVES);
    let (drives, spare) = (RefCell::new(drives), RefCell::new(spare));
    report.compare(
        case(settings, name, "one function, as many commands", "kIOPS"),
        || drive_all(&mut drives.borrow_mut(), settings.time),
        || {
            let one = &mut drives.borrow_mut()[..1];
            one[0].free.append(&mut spare.borrow_mut());
            one[0].blocks = PART * DRIVES as u64;
            let rate = drive_all(one, settings.time)?;
            *spare.borrow_mut() = one[0].free.split_off(DEPTH / DRIVES);
            one[0].blocks = PART;
            Ok(rate)
        },
        |eight, one| eight / one,
    )?;
    drop(drives);
    leases.iter().try_for_each(|lease| rack.give_back(lease))
}

/// Milliseconds of what is done with `alpha/nvme0`.
fn milliseconds(begun: Instant) -> f64 {
    begun.elapsed().as_secs_f64() * 1e3
}

/// From the request to the first block that is read, and from the return until it is offered again.
fn borrow_and_return(rack: &BenchRack) -> Result<[f64; 2], BenchError> {
    let mut block = vec![0; BLOCK];
    let begun = Instant::now();
    let lease = rack.borrow(&["alpha/nvme0"])?;
    let mut drive = lent::open(&lease.socket, DATA)?;
    drive.read(0, &mut block)?;
    let borrowed = milliseconds(begun);
    drop(drive);
    let begun = Instant::now();
    rack.give_back(&lease)?;
    Ok([borrowed, milliseconds(begun)])
}

/// How long a revocation may take before it has failed.
const REVOKED_WITHIN: Duration = Duration::from_secs(30);

/// From the command that withdraws the drive by force until its user, which reads all the while, can read no more.
fn revoke(rack: &BenchRack) -> Result<f64, BenchError> {
    let mut block = vec![0; BLOCK];
    let lease = rack.borrow(&["alpha/nvme0"])?;
    let mut drive = lent::open(&lease.socket, DATA)?;
    drive.read(0, &mut block)?;
    let begun = Instant::now();
    let mut command = rack.follow(&["withdraw", "alpha/nvme0", "--force"])?;
    while drive.read(0, &mut block).is_ok() {
        if begun.elapsed() > REVOKED_WITHIN {
            let _ = command.kill();
            return Err(BenchError::Peer("the drive was not withdrawn".to_owned()));
        }
    }
    let gone = milliseconds(begun);
    let status = command.wait().map_err(BenchError::io("withdrawing a drive"))?;
    if !status.success() {
        return Err(BenchError::Peer(format!("withdrawing a drive: {status}")));
    }
    drop(drive);
    rack.json(&["offer", "alpha/nvme0"])?;
    rack.wait_offered("alpha/nvme0")?;
    Ok(gone)
}

/// Borrowing, returning and revoking while another drive of the same two nodes is busy, against the same without.
fn under_load(
    rack: &BenchRack,
    settings: &Settings,
    report: &mut Report,
) -> Result<(), BenchError> {
    let names = ["borrow to first read, under load", "return, under load", "revoke, under load"];
    if !names.iter().any(|name| name.contains(&settings.only)) {
        return Ok(());
    }
    let busy = rack.borrow(&["alpha/nvme1"])?;
    let (on, stop) = (AtomicBool::new(false), AtomicBool::new(false));
    let is_busy = AtomicBool::new(false);
    let mut drive = lent::open(&busy.socket, DATA)?;
    let outcome = std::thread::scope(|scope| {
        let load = scope.spawn(|| {
            while !stop.load(Ordering::Acquire) {
                let loaded = on.load(Ordering::Acquire);
                is_busy.store(loaded, Ordering::Release);
                match loaded {
                    true => drop(lent::run_anywhere(
                        &mut drive,
                        &ClientLoad::new(BLOCK, 32, false, true),
                        Duration::from_millis(20),
                    )?),
                    false => std::thread::sleep(Duration::from_millis(1)),
                }
            }
            Ok::<(), BenchError>(())
        });
        // What is measured takes milliseconds: it begins when the load has begun or ended.
        let under = |loaded: bool| {
            on.store(loaded, Ordering::Release);
            while is_busy.load(Ordering::Acquire) != loaded && !load.is_finished() {
                std::thread::sleep(Duration::from_millis(1));
            }
        };
        let mut rows = Vec::new();
        for (at, name) in names.iter().enumerate().filter(|(_, name)| name.contains(&settings.only))
        {
            let measure = |loaded: bool| {
                under(loaded);
                match at {
                    0 | 1 => borrow_and_return(rack).map(|times| times[at]),
                    _ => revoke(rack),
                }
            };
            let case = case(settings, name, "the same, idle", "ms");
            rows.push(report.compare(case, || measure(true), || measure(false), |a, b| a / b));
        }
        stop.store(true, Ordering::Release);
        let ended = load.join().map_err(|_| BenchError::Peer("the load panicked".to_owned()));
        rows.into_iter().collect::<Result<(), BenchError>>().and(ended?)
    });
    drop(drive);
    outcome.and(rack.give_back(&busy))
}
