//! The NVMe drive: lent, against the bound, against the same drive without lending, against fio
//! on the same file, against other systems that serve block devices.

mod restarts;

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use rackbus_devices::nvme::BackingConfig;

use crate::lent::{self, LenderProcess};
use crate::machine::{Again, Regime, processor_time, unpin, wait_quiet};
use crate::peers::{self, PeerServer};
use crate::rack::{self, Rack};
use crate::raw::{self, STORE};
use crate::report::{Case, Row, median};
use crate::{BenchError, Report};

/// What a client asks for.
#[derive(Debug, Clone, Copy)]
pub struct Load {
    /// Bytes of each operation.
    pub bytes: usize,
    /// Operations in flight.
    pub depth: u16,
    /// Writes instead of reads.
    pub write: bool,
    /// At random places, or one after the other.
    pub random: bool,
}

impl Load {
    pub(crate) const fn new(bytes: usize, depth: u16, write: bool, random: bool) -> Load {
        Load { bytes, depth, write, random }
    }

    /// The places of a store of `size` bytes, one after the other or by xorshift.
    pub fn offsets(&self, size: u64) -> impl FnMut() -> u64 + use<> {
        let (slots, bytes, random) = (size / self.bytes as u64, self.bytes as u64, self.random);
        let (mut state, mut sequence) = (88_172_645_463_325_252u64, 0u64);
        move || {
            let slot = if random {
                state ^= state << 13;
                state ^= state >> 7;
                state ^= state << 17;
                state
            } else {
                sequence += 1;
                sequence
            };
            slot % slots * bytes
        }
    }
}

const READ_1: Load = Load::new(4096, 1, false, true);
const READ_32: Load = Load::new(4096, 32, false, true);
const WRITE_1: Load = Load::new(4096, 1, true, true);
const WRITE_32: Load = Load::new(4096, 32, true, true);
const SEQUENTIAL: Load = Load::new(128 << 10, 1, false, false);
const SEQUENTIAL_8: Load = Load::new(128 << 10, 8, false, false);
/// Memory for data that serves every load.
pub(crate) const DATA: usize = 8 * (128 << 10);

/// How long and how often the cases of this area are measured.
#[derive(Debug, Clone)]
pub struct Settings {
    /// Pairs of runs for each case.
    pub runs: usize,
    /// How long each run takes.
    pub time: Duration,
    /// Where sockets and images go; the images' file system is part of what is measured.
    pub dir: PathBuf,
    /// Only cases whose name contains this.
    pub only: String,
    /// How long to wait for the machine to become quiet.
    pub patience: Duration,
    /// How to start the other processes.
    pub again: Again,
}

struct Bench<'a> {
    settings: &'a Settings,
    report: &'a mut Report,
}

/// How a figure is compared.
#[derive(Clone, Copy)]
enum As {
    /// Microseconds for each operation.
    Latency,
    /// Thousands of operations per second.
    Rate,
    /// Gigabytes per second.
    Bandwidth(usize),
}

impl As {
    fn figure(self, rate: f64) -> f64 {
        match self {
            As::Latency => 1e6 / rate,
            As::Rate => rate / 1e3,
            As::Bandwidth(bytes) => rate * bytes as f64 / 1e9,
        }
    }

    fn unit(self) -> &'static str {
        match self {
            As::Latency => "us",
            As::Rate => "kIOPS",
            As::Bandwidth(_) => "GB/s",
        }
    }
}

/// Runs all cases and adds their rows to `report`.
///
/// # Errors
/// When rackbus itself fails; a peer that is missing is only left out.
pub fn run(settings: &Settings, regime: &Regime, report: &mut Report) -> Result<(), BenchError> {
    std::fs::create_dir_all(&settings.dir).map_err(BenchError::io("making the work directory"))?;
    let load = wait_quiet(0.5, settings.patience);
    let (name, runs) = (regime.name(), settings.runs);
    report.note(&format!("regime: {name}; load before: {load:.2}; {runs} runs each"));
    let mut bench = Bench { settings, report };
    bench.against_the_bound()?;
    bench.against_local()?;
    bench.against_fio()?;
    bench.against_servers()?;
    bench.idle_and_busy()?;
    bench.borrowing()?;
    bench.whole_rack()?;
    bench.placements()
}

impl Bench<'_> {
    fn wanted(&self, case: &str) -> bool {
        case.contains(&self.settings.only)
    }

    /// Measures both in turns and adds the row.
    fn pairs(
        &mut self,
        case: &str,
        peer_name: &str,
        unit: &'static str,
        ours: impl FnMut() -> Result<f64, BenchError>,
        peer: impl FnMut() -> Result<f64, BenchError>,
        relate: fn(f64, f64) -> f64,
    ) -> Result<(), BenchError> {
        if !self.wanted(case) {
            return Ok(());
        }
        let case = Case { area: "nvme", case, peer_name, unit, runs: self.settings.runs };
        self.report.compare(case, ours, peer, relate)
    }

    fn against_the_bound(&mut self) -> Result<(), BenchError> {
        let Settings { time, dir, again, .. } = self.settings.clone();
        let memory = LenderProcess::start(&again, &BackingConfig::Memory, &dir, "memory")?;
        let null = LenderProcess::start(&again, &BackingConfig::Null, &dir, "null")?;
        let cases = [
            ("4k read qd1 memory", &memory, READ_1, As::Latency, false),
            ("4k read qd32 memory", &memory, READ_32, As::Rate, false),
            ("4k write qd1 memory", &memory, WRITE_1, As::Latency, false),
            ("4k write qd32 memory", &memory, WRITE_32, As::Rate, false),
            ("4k read qd1 null", &null, READ_1, As::Latency, true),
            ("4k read qd32 null", &null, READ_32, As::Rate, true),
            ("128k sequential qd1 memory", &memory, SEQUENTIAL, As::Bandwidth(128 << 10), false),
            ("128k sequential qd8 memory", &memory, SEQUENTIAL_8, As::Bandwidth(128 << 10), false),
        ];
        for (case, lender, load, kind, is_null) in cases {
            if !self.wanted(case) {
                continue;
            }
            let mut drive = lender.borrow_drive(DATA)?;
            fill(&mut drive, time)?;
            self.pairs(
                case,
                "raw bound",
                kind.unit(),
                || Ok(kind.figure(lent::run(&mut drive, &load, time)?)),
                || Ok(kind.figure(raw::run(&again, &load, is_null, time)?)),
                |ours, raw| ours / raw,
            )?;
        }
        Ok(())
    }

    /// What lending adds to the same drive in the client's own thread.
    fn against_local(&mut self) -> Result<(), BenchError> {
        let Settings { time, dir, again, .. } = self.settings.clone();
        let cases = [
            ("lending adds, 4k read qd1 memory", BackingConfig::Memory),
            ("lending adds, 4k read qd1 null", BackingConfig::Null),
        ];
        for (case, backing) in cases {
            if !self.wanted(case) {
                continue;
            }
            let lender = LenderProcess::start(&again, &backing, &dir, "local")?;
            let mut lent = lender.borrow_drive(DATA)?;
            let mut local = lent::local_drive(backing, DATA)?;
            fill(&mut lent, time)?;
            fill(&mut local, time)?;
            self.pairs(
                case,
                "same drive, not lent",
                "us added",
                || Ok(1e6 / lent::run(&mut lent, &READ_1, time)?),
                || Ok(1e6 / lent::run(&mut local, &READ_1, time)?),
                |lent, local| lent - local,
            )?;
        }
        Ok(())
    }

    /// A lent file against fio on the same file, whose pages are in the page cache.
    fn against_fio(&mut self) -> Result<(), BenchError> {
        if !peers::installed("fio") {
            self.report.left_out("fio", "not installed");
            return Ok(());
        }
        let Settings { time, dir, again, .. } = self.settings.clone();
        let image = dir.join("image");
        make_image(&image)?;
        let lender =
            LenderProcess::start(&again, &BackingConfig::File(image.clone()), &dir, "file")?;
        let mut drive = lender.borrow_drive(DATA)?;
        let target = format!("--filename={}", image.display());
        let fio = |load: &Load, engine| peers::fio(load, engine, &target, STORE as u64, time);
        for (case, load) in [("4k read qd1 file", READ_1), ("4k write qd1 file", WRITE_1)] {
            for engine in ["psync", "io_uring"] {
                self.pairs(
                    case,
                    &format!("fio {engine}, mean latency"),
                    "us added",
                    || Ok(1e6 / lent::run(&mut drive, &load, time)?),
                    || Ok(fio(&load, engine)?.mean_us),
                    |lent, fio| lent - fio,
                )?;
            }
        }
        for (case, load) in [("4k read qd32 file", READ_32), ("4k write qd32 file", WRITE_32)] {
            self.pairs(
                case,
                "fio io_uring",
                "kIOPS",
                || Ok(lent::run(&mut drive, &load, time)? / 1e3),
                || Ok(fio(&load, "io_uring")?.iops / 1e3),
                |lent, fio| lent / fio,
            )?;
        }
        Ok(())
    }

    /// Other systems that serve a block device to another process.
    fn against_servers(&mut self) -> Result<(), BenchError> {
        let Settings { dir, again, .. } = self.settings.clone();
        if peers::installed("nbdkit") && peers::installed("fio") && self.wanted("nbdkit") {
            let socket = dir.join("nbdkit.sock");
            let _ = std::fs::remove_file(&socket);
            let _server = PeerServer::nbdkit(&socket, STORE as u64)?;
            let target = format!("--uri=nbd+unix:///?socket={}", socket.display());
            let lender = LenderProcess::start(&again, &BackingConfig::Memory, &dir, "memory")?;
            let mut drive = lender.borrow_drive(DATA)?;
            let time = self.settings.time;
            fill(&mut drive, time)?;
            for (case, load) in
                [("4k read qd1 memory, nbdkit", READ_1), ("4k read qd32 memory, nbdkit", READ_32)]
            {
                self.pairs(
                    case,
                    "nbdkit memory plugin, fio nbd",
                    "kIOPS",
                    || Ok(lent::run(&mut drive, &load, time)? / 1e3),
                    || Ok(peers::fio(&load, "nbd", &target, STORE as u64, time)?.iops / 1e3),
                    |lent, nbd| lent / nbd,
                )?;
            }
        }
        self.against_qemu(&dir)
    }

    #[cfg(not(feature = "peers"))]
    fn against_qemu(&mut self, _dir: &Path) -> Result<(), BenchError> {
        self.report.left_out("qemu-storage-daemon", "built without the peers feature");
        Ok(())
    }

    #[cfg(feature = "peers")]
    fn against_qemu(&mut self, dir: &Path) -> Result<(), BenchError> {
        const NAME: &str = "qemu-storage-daemon";
        if !peers::installed(NAME) {
            self.report.left_out(NAME, "not installed");
            return Ok(());
        }
        let (theirs, ours) = (dir.join("image-qemu"), dir.join("image"));
        make_image(&theirs)?;
        make_image(&ours)?;
        let file = format!("driver=file,filename={},aio=io_uring", theirs.display());
        let null = format!("driver=null-co,size={STORE}");
        let kinds =
            [("null", null, BackingConfig::Null), ("file", file, BackingConfig::File(ours))];
        for (kind, node, backing) in kinds {
            let cases = [("qd1", READ_1, false), ("qd1", READ_1, true), ("qd32", READ_32, false)]
                .map(|(depth, load, sleep)| {
                    let client = if sleep { "sleeping client" } else { "polling client" };
                    let peer = format!("{NAME} vhost-user-blk, blkio, {client}");
                    (format!("4k read {depth} {kind}, {NAME}"), peer, load, sleep)
                });
            if !cases.iter().any(|(case, ..)| self.wanted(case)) {
                continue;
            }
            let socket = dir.join("qemu.sock");
            let _ = std::fs::remove_file(&socket);
            let _server = PeerServer::qemu_storage_daemon(&socket, &node)?;
            let lender = LenderProcess::start(&self.settings.again, &backing, dir, "qemu-other")?;
            let mut drive = lender.borrow_drive(DATA)?;
            let time = self.settings.time;
            for (case, peer, load, sleep) in cases {
                let size = STORE as u64;
                self.pairs(
                    &case,
                    &peer,
                    "kIOPS",
                    || Ok(lent::run(&mut drive, &load, time)? / 1e3),
                    || Ok(crate::blkio_peer::run(&socket, &load, size, time, sleep)? / 1e3),
                    |lent, qemu| lent / qemu,
                )?;
            }
        }
        Ok(())
    }

    /// The processor time of a lender whose drive is open: idle, and under load.
    fn idle_and_busy(&mut self) -> Result<(), BenchError> {
        let Settings { dir, again, .. } = self.settings.clone();
        let lender = LenderProcess::start(&again, &BackingConfig::Memory, &dir, "memory")?;
        let mut drive = lender.borrow_drive(DATA)?;
        let share = |work: &mut dyn FnMut() -> Result<(), BenchError>| {
            let (before, start) = (processor_time(lender.pid()), Instant::now());
            work()?;
            let used = processor_time(lender.pid()).saturating_sub(before);
            Ok::<f64, BenchError>(100.0 * used.as_secs_f64() / start.elapsed().as_secs_f64())
        };
        let second = Duration::from_secs(1);
        self.pairs(
            "lender's processor, idle",
            "the same, busy",
            "% of a cpu",
            || {
                share(&mut || {
                    std::thread::sleep(second);
                    Ok(())
                })
            },
            || share(&mut || lent::run(&mut drive, &READ_1, second).map(drop)),
            |idle, busy| idle / busy,
        )
    }

    /// From asking for the drive to its first block, and from giving it back to the next one who
    /// has it, both straight at the lender.
    fn borrowing(&mut self) -> Result<(), BenchError> {
        let Settings { dir, again, .. } = self.settings.clone();
        let lender = LenderProcess::start(&again, &BackingConfig::Memory, &dir, "memory")?;
        let mut block = vec![0; 4096];
        let mut first_read = || {
            let start = Instant::now();
            lender.borrow_drive(DATA)?.read(0, &mut block)?;
            Ok(start.elapsed().as_secs_f64() * 1e3)
        };
        let limit = || Ok(50.0);
        self.pairs("borrow to first read", "limit", "ms", &mut first_read, limit, |a, b| a / b)?;
        let again = || {
            let drive = lender.borrow_drive(DATA)?;
            let start = Instant::now();
            drop(drive);
            drop(lender.borrow_drive(DATA)?);
            Ok(start.elapsed().as_secs_f64() * 1e3)
        };
        self.pairs("return to next borrower", "limit", "ms", again, limit, |a, b| a / b)
    }
}

impl Bench<'_> {
    /// The same through the control plane and two nodes, with the command that users have.
    fn whole_rack(&mut self) -> Result<(), BenchError> {
        let Settings { dir, .. } = self.settings.clone();
        // What is started is not to inherit where this thread was put.
        unpin();
        let Some(rack) = Rack::start(&dir, &rack::lending())? else {
            self.report.left_out("whole rack", "the rackbus binary is not beside this one");
            return Ok(());
        };
        let limit = || Ok(50.0);
        let mut block = vec![0; 4096];
        let first_read = || {
            let start = Instant::now();
            let lease = rack.borrow_drive()?;
            let mut drive = lent::open(&lease.socket, DATA)?;
            drive.read(0, &mut block)?;
            let taken = start.elapsed().as_secs_f64() * 1e3;
            drop(drive);
            rack.give_back(&lease)?;
            Ok(taken)
        };
        self.pairs("rack: borrow to first read", "limit", "ms", first_read, limit, |a, b| a / b)?;
        let offered_again = || {
            let lease = rack.borrow_drive()?;
            drop(lent::open(&lease.socket, DATA)?);
            let start = Instant::now();
            rack.give_back(&lease)?;
            Ok(start.elapsed().as_secs_f64() * 1e3)
        };
        let case = "rack: return to offered again";
        self.pairs(case, "limit", "ms", offered_again, limit, |a, b| a / b)?;
        self.restarts(&rack)?;
        self.reads_through(&rack)?;
        self.observed(&rack)?;
        self.unpinned_starts(&rack)
    }

    /// The same drive in a file, with its controller at the borrower and at the lender.
    fn placements(&mut self) -> Result<(), BenchError> {
        let cases = [
            ("front at borrower: 4k read qd1 file", READ_1, As::Latency),
            ("front at borrower: 4k write qd1 file", WRITE_1, As::Latency),
            ("front at borrower: 4k read qd32 file", READ_32, As::Rate),
            ("front at borrower: 128k seq qd8 file", SEQUENTIAL_8, As::Bandwidth(128 << 10)),
        ];
        if !cases.iter().any(|(case, ..)| self.wanted(case)) {
            return Ok(());
        }
        let Settings { dir, time, .. } = self.settings.clone();
        unpin();
        let Some(rack) = Rack::start(&dir, &rack::lending_files())? else {
            self.report.left_out("placements", "the rackbus binary is not beside this one");
            return Ok(());
        };
        let strict = rack.borrow(&["alpha/nvme0", "--isolation", "strict"])?;
        let direct = rack.borrow(&["alpha/nvme1"])?;
        let mut strict = lent::open(&strict.socket, DATA)?;
        let mut direct = lent::open(&direct.socket, DATA)?;
        fill(&mut strict, time)?;
        fill(&mut direct, time)?;
        for (case, load, kind) in cases {
            let (unit, relate): (_, fn(f64, f64) -> f64) = match kind {
                As::Latency => ("us added", |strict, direct| strict - direct),
                _ => (kind.unit(), |strict, direct| strict / direct),
            };
            self.pairs(
                case,
                "front at lender",
                unit,
                || Ok(kind.figure(lent::run(&mut strict, &load, time)?)),
                || Ok(kind.figure(lent::run(&mut direct, &load, time)?)),
                relate,
            )?;
        }
        Ok(())
    }

    /// Lone reads through the rack, the driver pinned and the engine where it likes.
    fn reads_through(&mut self, rack: &Rack) -> Result<(), BenchError> {
        let case = "rack: 4k read qd1 memory";
        if !self.wanted(case) {
            return Ok(());
        }
        let Settings { dir, again, time, .. } = self.settings.clone();
        let lease = rack.borrow_drive()?;
        let mut through = lent::open(&lease.socket, DATA)?;
        let lender = LenderProcess::start(&again, &BackingConfig::Memory, &dir, "memory")?;
        let mut straight = lender.borrow_drive(DATA)?;
        fill(&mut through, time)?;
        fill(&mut straight, time)?;
        self.pairs(
            case,
            "straight from a lender",
            "us",
            || Ok(1e6 / lent::run(&mut through, &READ_1, time)?),
            || Ok(1e6 / lent::run(&mut straight, &READ_1, time)?),
            |rack, lender| rack / lender,
        )?;
        drop(through);
        rack.give_back(&lease)
    }

    /// The same drive through the rack while its metrics are asked for ten times a second and its
    /// events are followed, and while nobody looks.
    fn observed(&mut self, rack: &Rack) -> Result<(), BenchError> {
        let cases =
            [("rack: 4k read qd1, observed", READ_1), ("rack: 4k read qd32, observed", READ_32)];
        for (case, load) in cases {
            if !self.wanted(case) {
                continue;
            }
            let time = self.settings.time;
            let lease = rack.borrow_drive()?;
            let drive = std::cell::RefCell::new(lent::open(&lease.socket, DATA)?);
            fill(&mut drive.borrow_mut(), time)?;
            let rate = || Ok(lent::run(&mut drive.borrow_mut(), &load, time)? / 1e3);
            let observed = || {
                unpin();
                let _observer = rack.observe(Duration::from_millis(100))?;
                rate()
            };
            self.pairs(case, "not observed", "kIOPS", observed, rate, |with, without| {
                with / without
            })?;
            drop(drive);
            rack.give_back(&lease)?;
        }
        Ok(())
    }

    /// Lone reads through the rack by programs that are started anew, with nothing pinned: the
    /// system puts driver and engine where it likes.
    fn unpinned_starts(&mut self, rack: &Rack) -> Result<(), BenchError> {
        const STARTS: usize = 20;
        let case = "rack: 4k read qd1, 19th of 20 starts";
        if !self.wanted(case) {
            return Ok(());
        }
        let Settings { dir, again, time, .. } = self.settings.clone();
        let lender = LenderProcess::start(&again, &BackingConfig::Memory, &dir, "starts")?;
        let mut straight = lender.borrow_drive(DATA)?;
        fill(&mut straight, time)?;
        let (mut starts, mut pinned) = (Vec::new(), Vec::new());
        for _ in 0..STARTS {
            pinned.push(1e6 / lent::run(&mut straight, &READ_1, time)?);
            unpin();
            let lease = rack.borrow_drive()?;
            let mut reader = again.command("reader")?;
            reader.arg("--socket").arg(&lease.socket);
            reader.arg("--time").arg(time.as_millis().to_string());
            let output = reader.output().map_err(BenchError::io("starting a reader"))?;
            let text = String::from_utf8_lossy(&output.stdout);
            let microseconds = text.trim().parse::<f64>();
            starts.push(microseconds.map_err(|_| BenchError::Peer("a reader failed".into()))?);
            rack.give_back(&lease)?;
        }
        starts.sort_by(f64::total_cmp);
        let all: Vec<String> = starts.iter().map(|start| format!("{start:.2}")).collect();
        self.report.note(&format!("20 starts, in us: {}", all.join(" ")));
        let (ours, peer) = (starts[STARTS - 2], median(&pinned));
        self.report.add(Row {
            area: "nvme",
            case: case.to_owned(),
            ours,
            peer,
            peer_name: "straight from a lender, pinned".to_owned(),
            unit: "us",
            ratio: ours / peer,
            runs: STARTS,
        })
    }
}

/// Prints how long a lone read of the drive at `socket` takes, in microseconds.
///
/// # Errors
/// When the drive cannot be opened or fails.
pub fn read_once(socket: &Path, time: Duration) -> Result<(), BenchError> {
    let mut drive = lent::open(socket, DATA)?;
    println!("{}", 1e6 / lent::run_anywhere(&mut drive, &READ_1, time)?);
    Ok(())
}

/// Writes the whole drive, so that reads find memory and not untouched pages.
fn fill(drive: &mut rackbus_driver::Drive, time: Duration) -> Result<(), BenchError> {
    let chunk = vec![0x5a; 1 << 20];
    let block = drive.info().block_size as usize;
    for at in (0..STORE).step_by(chunk.len()) {
        drive.write((at / block) as u64, &chunk, false)?;
    }
    lent::run(drive, &READ_1, time / 10).map(drop)
}

/// Makes an image and brings it into the page cache.
fn make_image(path: &Path) -> Result<(), BenchError> {
    std::fs::write(path, vec![0x5a; STORE]).map_err(BenchError::io("writing the image"))?;
    std::fs::read(path).map(drop).map_err(BenchError::io("reading the image"))
}
