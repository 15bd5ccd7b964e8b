//! The NVMe drive: lent, against the bound, against the same drive without lending, against fio
//! on the same file, against other systems that serve block devices.

mod copies;
mod load;
mod restarts;
mod whole_rack;

use std::hint::black_box;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use rackbus_devices::nvme::BackingConfig;
use rackbus_memory::ticks;
use rackbus_pci::Operations;
use rackbus_pci::operations::Tally;

use crate::lent::{self, LenderProcess};
use crate::machine::{Regime, RestartCommand, processor_time, wait_quiet};
use crate::peers::{self, PeerServer};
use crate::raw::{self, STORE};
use crate::report::Case;
use crate::{BenchError, Report};
pub use load::ClientLoad;
pub(crate) use load::DATA;
use load::{READ_1, READ_32, SEQUENTIAL, SEQUENTIAL_8, SEQUENTIAL_WRITE_8, WRITE_1, WRITE_32};

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
    pub again: RestartCommand,
}

/// Nanoseconds that it takes to count a command that is alone in its turn, as a drive does it, measured for `time`.
fn count_for(operations: &Operations, time: Duration) -> f64 {
    const BATCH: u32 = 1000;
    let (start, mut commands) = (Instant::now(), 0.0);
    while start.elapsed() < time {
        for _ in 0..BATCH {
            let begun = ticks::now();
            let mut tally = Tally::default();
            tally.count(black_box(4096), black_box(true));
            operations.add(black_box(0), tally, ticks::now().saturating_sub(begun));
        }
        commands += f64::from(BATCH);
    }
    start.elapsed().as_secs_f64() * 1e9 / commands
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
    /// Gigabytes that pass each second, by requests of this size.
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
    bench.counting()?;
    bench.against_fio()?;
    bench.against_servers()?;
    bench.idle_and_busy()?;
    bench.borrowing()?;
    bench.whole_rack()?;
    bench.placements()?;
    bench.copies()
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

    /// What metrics cost a command: to count it and its time, which is done whether anybody asks for metrics or not.
    fn counting(&mut self) -> Result<(), BenchError> {
        let case = "counting a 4k read qd1 memory";
        if !self.wanted(case) {
            return Ok(());
        }
        let time = self.settings.time;
        let mut local = lent::local_drive(BackingConfig::Memory, DATA)?;
        fill(&mut local, time)?;
        let operations = Operations::new(&["read"]);
        self.pairs(
            case,
            "the whole read, not lent",
            "ns",
            || Ok(count_for(&operations, time)),
            || Ok(1e9 / lent::run(&mut local, &READ_1, time)?),
            |counting, read| counting / read,
        )
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
        read_into_cache(&image)?;
        let target = format!("--filename={}", image.display());
        let fio = |load: &ClientLoad, engine| peers::fio(load, engine, &target, STORE as u64, time);
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
            if let BackingConfig::File(image) = &backing {
                read_into_cache(image)?;
            }
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

fn make_image(path: &Path) -> Result<(), BenchError> {
    std::fs::write(path, vec![0x5a; STORE]).map_err(BenchError::io("writing the image"))
}

/// Brings an image into the page cache. A drive that is opened empties it, so as to know what its medium holds.
fn read_into_cache(path: &Path) -> Result<(), BenchError> {
    std::fs::read(path).map(drop).map_err(BenchError::io("reading the image"))
}
