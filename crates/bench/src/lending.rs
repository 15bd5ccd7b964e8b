//! Peer-to-peer: a borrowed drive reads into the memory of another borrowed function, against the same
//! bytes through the borrower's memory, and against both functions at their own host.
//!
//! The figures are those of transfers one after the other, by size, as in "Device Lending" (journal, 2019),
//! figures 12 and 16: a program asks for bytes, and has them where it wants them before it asks again.

use std::time::{Duration, Instant};

use rackbus_driver::{Drive, DriveError};
use rackbus_memory::Region as Mapping;
use rackbus_pci::vfio_user::{Client, ClientError};
use rackbus_spec::nvme::IoOpcode;
use rackbus_spec::vfio_user::region;

use crate::bounce::BareCopies;
use crate::lent;
use crate::machine::{CLIENT_CPU, Regime, pin, unpin, wait_quiet};
use crate::nvme::Settings;
use crate::rack::BenchRack;
use crate::raw::STORE;
use crate::report::Case;
use crate::{BenchError, Report};

/// Sizes of a transfer, as they are named and in bytes.
const SIZES: [(&str, usize); 6] = [
    ("4 KiB", 4 << 10),
    ("64 KiB", 64 << 10),
    ("256 KiB", 256 << 10),
    ("1 MiB", 1 << 20),
    ("4 MiB", 4 << 20),
    ("16 MiB", 16 << 20),
];
const LARGEST: usize = SIZES[SIZES.len() - 1].1;
/// Longer transfers are several commands, all in flight at once.
const PIECE: usize = 256 << 10;
/// Bytes of a memory function, and of its BAR.
const TARGET: usize = 64 << 20;
const TARGET_BAR: u8 = rackbus_devices::memory::BAR;
/// Where the BAR is programmed to be.
const AT: u64 = 1 << 40;

/// A rack in which `beta` borrows a drive of `alpha` and memory of `gamma`; `alpha` has the same for itself.
fn rack_file() -> String {
    let drive = format!("kind = \"nvme\"\nsize = \"{} MiB\"\nbacking = \"memory\"\n", STORE >> 20);
    let memory = format!("kind = \"memory\"\nsize = \"{} MiB\"\n", TARGET >> 20);
    format!(
        "name = \"bench\"\n[hosts.alpha.devices.nvme0]\n{drive}[hosts.alpha.devices.nvme1]\n{drive}\
         [hosts.alpha.devices.ram0]\n{memory}[hosts.gamma.devices.ram0]\n{memory}[hosts.beta]\n"
    )
}

/// A drive and a memory function of one program.
struct Pair {
    drive: Drive,
    target: Mapping,
    /// Keeps the function, and its BAR where it is programmed.
    _function: Client,
    /// The transfer that is next, to take another place each time.
    next: usize,
}

/// Which way the bytes go.
#[derive(Clone, Copy)]
enum DataPath {
    /// From the drive into the BAR.
    Peer,
    /// From the drive into the program's memory; when all are there, the program stores them into the BAR.
    Bounce,
    /// The same, but each piece is stored while the drive reads the next.
    BounceInPieces,
}

impl Pair {
    /// Borrows both for `host`.
    fn borrow(rack: &BenchRack, host: &str, drive: &str, target: &str) -> Result<Pair, BenchError> {
        let function = rack.borrow_for(host, &[target, "--group", host])?;
        let function = client(Client::connect(&function.socket, Duration::from_secs(5)))?;
        let target = client(function.map_region(TARGET_BAR.into(), 0, TARGET as u64))?;
        let register = 0x10 + 4 * u64::from(TARGET_BAR);
        client(function.write(region::CONFIG, register, &AT.to_le_bytes()))?;
        client(function.write(region::CONFIG, 4, &[2, 0]))?;
        let drive = rack.borrow_for(host, &[drive, "--group", host])?;
        let mut drive = lent::open(&drive.socket, LARGEST)?;
        // Pages are there before anything is measured.
        target.whole().fill(1);
        let block = vec![0x5a; 1 << 20];
        let blocks = (block.len() / drive.info().block_size as usize) as u64;
        for at in 0..(STORE / block.len()) as u64 {
            drive.write(at * blocks, &block, false)?;
        }
        Ok(Pair { drive, target, _function: function, next: 0 })
    }

    /// Gigabytes per second of transfers of `size` bytes for about `time`.
    fn run(&mut self, way: DataPath, size: usize, time: Duration) -> Result<f64, BenchError> {
        pin(CLIENT_CPU);
        let (begun, mut moved) = (Instant::now(), 0);
        while begun.elapsed() < time {
            self.transfer(way, size)?;
            moved += size;
        }
        let rate = moved as f64 / begun.elapsed().as_secs_f64() / 1e9;
        unpin();
        Ok(rate)
    }

    fn transfer(&mut self, way: DataPath, size: usize) -> Result<(), BenchError> {
        let block = self.drive.info().block_size as usize;
        let from = self.next * size % STORE;
        let to = self.next * size % TARGET;
        self.next += 1;
        let piece = PIECE.min(size);
        let buffers: Vec<_> =
            (0..size / piece).map(|nth| self.drive.buffer(nth * piece, piece)).collect();
        let missing = DriveError::Request("the drive was opened with less data");
        let buffers = buffers.into_iter().collect::<Option<Vec<_>>>().ok_or(missing)?;
        let (queue, device, _) = self.drive.parts();
        let mut pieces = vec![0; queue.depth()];
        let (mut sent, mut done) = (0, 0);
        while done < buffers.len() {
            while sent < buffers.len() && queue.in_flight() < queue.depth() {
                let (lba, blocks) = ((from + sent * piece) / block, piece / block);
                let (lba, blocks) = (lba as u64, blocks as u32);
                let id = match way {
                    DataPath::Peer => {
                        let data = (AT + (to + sent * piece) as u64, piece);
                        queue.submit_at(IoOpcode::Read, lba, blocks, data, false)?
                    }
                    _ => queue.submit(IoOpcode::Read, lba, blocks, buffers[sent], false)?,
                };
                pieces[usize::from(id)] = sent;
                sent += 1;
            }
            queue.ring(device)?;
            while let Some(completed) = queue.poll(device)? {
                if !completed.status.is_success() {
                    let (command, status) = ("transfer", completed.status);
                    return Err(DriveError::Command { command, status }.into());
                }
                done += 1;
                if let DataPath::BounceInPieces = way {
                    let nth = pieces[usize::from(completed.id)];
                    if let (Some(data), Some(target)) =
                        (queue.data(buffers[nth]), self.target.slice(to + nth * piece, piece))
                    {
                        target.copy_from_slice(data);
                    }
                }
            }
            device.progress();
        }
        if let (DataPath::Bounce, Some(all)) = (way, self.drive.buffer(0, size)) {
            let (queue, ..) = self.drive.parts();
            if let (Some(data), Some(target)) = (queue.data(all), self.target.slice(to, size)) {
                target.copy_from_slice(data);
            }
        }
        Ok(())
    }
}

/// The copies by themselves: what peer-to-peer could gain here, if a drive were nothing but a copy.
fn bare_copies(settings: &Settings, report: &mut Report) -> Result<(), BenchError> {
    let cases = SIZES.map(|(size, bytes)| (format!("bare copies {size}"), bytes));
    // Of shorter ones the two processors' way to each other is a part.
    let large =
        |(case, bytes): &&(String, usize)| *bytes >= 1 << 20 && case.contains(&settings.only);
    if !cases.iter().any(|case| large(&case)) {
        return Ok(());
    }
    let copies = BareCopies::new([STORE, LARGEST, TARGET], PIECE)?;
    for (case, bytes) in cases.iter().filter(large) {
        let (peer_name, unit) = ("by way of a buffer", "GB/s");
        let case = Case { area: "lending", case, peer_name, unit, runs: settings.runs };
        let rate = |bounce| Ok(copies.run(bounce, *bytes, settings.time));
        report.compare(case, || rate(false), || rate(true), |one, two| one / two)?;
    }
    Ok(())
}

fn client<T>(outcome: Result<T, ClientError>) -> Result<T, BenchError> {
    outcome.map_err(|error| BenchError::Drive(error.into()))
}

/// Runs all cases and adds their rows to `report`.
///
/// # Errors
/// When rackbus itself fails.
pub fn run(settings: &Settings, regime: &Regime, report: &mut Report) -> Result<(), BenchError> {
    std::fs::create_dir_all(&settings.dir).map_err(BenchError::io("making the work directory"))?;
    let load = wait_quiet(0.5, settings.patience);
    let (name, runs) = (regime.name(), settings.runs);
    report.note(&format!("regime: {name}; load before: {load:.2}; {runs} runs each"));
    let Some(rack) = BenchRack::start(&settings.dir, &rack_file())? else {
        report.left_out("lending", "the rackbus binary is not beside this one");
        return Ok(());
    };
    let borrowed = Pair::borrow(&rack, "beta", "alpha/nvme0", "gamma/ram0")?;
    let own = Pair::borrow(&rack, "alpha", "alpha/nvme1", "alpha/ram0")?;
    let (borrowed, own) = (std::cell::RefCell::new(borrowed), std::cell::RefCell::new(own));
    let time = settings.time;
    for (size, bytes) in SIZES {
        let rate = |pair: &std::cell::RefCell<Pair>, way| pair.borrow_mut().run(way, bytes, time);
        let peers: [(&str, &std::cell::RefCell<Pair>, DataPath); 3] = [
            ("through the borrower's memory", &borrowed, DataPath::Bounce),
            ("the same, in pieces", &borrowed, DataPath::BounceInPieces),
            ("both at their own host", &own, DataPath::Peer),
        ];
        for (peer_name, pair, way) in peers {
            let case = format!("peer-to-peer {size}");
            if !case.contains(&settings.only) {
                continue;
            }
            let case = Case { area: "lending", case: &case, peer_name, unit: "GB/s", runs };
            let ours = || rate(&borrowed, DataPath::Peer);
            report.compare(case, ours, || rate(pair, way), |ours, peer| ours / peer)?;
        }
    }
    bare_copies(settings, report)
}
