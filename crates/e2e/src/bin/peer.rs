#![forbid(unsafe_code)]
//! A program for guests: a drive reads into, and writes from, the BAR of another PCI function, by the address at
//! which the guest has programmed it.
//!
//! Usage: `peer DRIVE TARGET BAR COMMAND`, functions by their PCI addresses. COMMAND is
//!   move      the drive reads what it has into the BAR, and writes back what this program stored there
//!   refused   the drive cannot read into the BAR; ends with 0 when it says so
//!   store     with DRIVE as TARGET, whose persistent memory region BAR is: stores into it, and makes that durable
//!   check     the same bytes are there
//!
//! No kernel driver may be bound to the drive.

use std::fs::{File, read_to_string};
use std::os::fd::AsFd;
use std::os::unix::fs::FileExt;
use std::process::ExitCode;

use rackbus_driver::{Drive, DriveError, DriveOptions, MachineFunction};
use rackbus_e2e::programs::OTHER_BYTES;
use rackbus_e2e::{CheckFailure, Result, ensure};
use rackbus_memory::MappedRegisters;
use rackbus_spec::nvme::Status;

const PAGE: u64 = 4096;
/// Bytes that are moved each way, to and from the second page of the BAR.
const LENGTH: usize = 8192;

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
    let outcome = match arguments[..] {
        [drive, target, bar, "move"] => open(drive, target, bar).and_then(|it| it.move_both_ways()),
        [drive, target, bar, "store"] => open(drive, target, bar).and_then(Peers::store),
        [drive, target, bar, "check"] => open(drive, target, bar).and_then(Peers::check),
        [drive, target, bar, "refused"] => open(drive, target, bar).and_then(|it| it.cannot()),
        _ => {
            eprintln!("usage: peer DRIVE TARGET BAR move|refused|store|check");
            return ExitCode::from(2);
        }
    };
    match outcome {
        Ok(text) => {
            println!("{text}");
            ExitCode::SUCCESS
        }
        Err(error) => {
            eprintln!("peer: {error}");
            ExitCode::FAILURE
        }
    }
}

struct Peers {
    drive: Drive,
    /// Configuration space of the function that has the BAR.
    target: File,
    /// Where the guest has the BAR's second page, and the BAR's file.
    address: u64,
    bar: File,
}

fn open(drive: &str, target: &str, bar: &str) -> Result<Peers> {
    let folder = format!("/sys/bus/pci/devices/{target}");
    let number: usize = bar.parse().map_err(|_| CheckFailure(format!("{bar} is no BAR")))?;
    // A line for each BAR: its first and last address, and flags.
    let lines = read_to_string(format!("{folder}/resource"))?;
    let first = lines.lines().nth(number).and_then(|line| line.split_whitespace().next());
    let first = first.and_then(|hex| u64::from_str_radix(hex.trim_start_matches("0x"), 16).ok());
    let first = first.ok_or_else(|| CheckFailure(format!("{target} has no BAR {bar}")))?;
    let bar = File::options().read(true).write(true).open(format!("{folder}/resource{bar}"))?;
    let device = Box::new(MachineFunction::open(drive)?);
    let options = DriveOptions { depth: 4, data: 64 << 10 };
    let target = File::open(format!("{folder}/config"))?;
    let drive = Drive::with_device(device, options)?;
    Ok(Peers { drive, target, address: first + PAGE, bar })
}

/// What is at an offset of a persistent memory region.
fn word(at: u64) -> u32 {
    (at as u32).wrapping_mul(2_246_822_519) | 1
}

/// What is from the region's second page on.
fn words() -> impl Iterator<Item = u32> {
    (PAGE..PAGE + LENGTH as u64).step_by(4).map(word)
}

impl Peers {
    fn move_both_ways(mut self) -> Result<String> {
        let memory = MappedRegisters::map(self.bar.as_fd(), PAGE + LENGTH as u64)?;
        let there = |at: usize| memory.read(PAGE + at as u64);
        let words = || (0..LENGTH).step_by(4);
        let sent: Vec<u8> = (0..LENGTH).map(|n| (n * 7 + n / 512) as u8).collect();
        self.drive.write(0, &sent, false)?;
        self.drive.read_to(0, LENGTH, self.address)?;
        let came: Vec<u8> = words().filter_map(there).flat_map(u32::to_le_bytes).collect();
        self.check_there()?;
        ensure!(came == sent, "{OTHER_BYTES} into the BAR");
        let stored = |at: usize| (at as u32).wrapping_mul(2_654_435_761);
        for at in words() {
            memory.write(PAGE + at as u64, stored(at));
        }
        self.drive.write_from(0, LENGTH, self.address)?;
        let mut back = vec![0; LENGTH];
        self.drive.read(0, &mut back)?;
        let expected: Vec<u8> = words().map(stored).flat_map(u32::to_le_bytes).collect();
        self.check_there()?;
        ensure!(back == expected, "{OTHER_BYTES} from the BAR");
        Ok(format!("{LENGTH} bytes at {:#x} each way", self.address))
    }

    /// The function that has the BAR was there until now. One that was taken away answers all ones, and its memory holds
    /// nothing any more.
    fn check_there(&self) -> Result<()> {
        let mut vendor = [0xff; 2];
        let read = self.target.read_at(&mut vendor, 0);
        ensure!(read.is_ok() && vendor != [0xff; 2], "the function with the BAR is gone");
        Ok(())
    }

    /// One page by the program's own stores, the others by the drive.
    fn store(mut self) -> Result<String> {
        let memory = MappedRegisters::map(self.bar.as_fd(), PAGE + LENGTH as u64)?;
        self.drive.enable_region()?;
        self.drive.address_region(self.address - PAGE)?;
        for at in (0..PAGE).step_by(4) {
            memory.write(at, word(at));
        }
        let rest: Vec<u8> = words().flat_map(u32::to_le_bytes).collect();
        self.drive.write(0, &rest, false)?;
        self.drive.read_to(0, LENGTH, self.address)?;
        self.drive.make_region_durable()?;
        Ok(format!("{} bytes are durable", PAGE + LENGTH as u64))
    }

    fn check(mut self) -> Result<String> {
        let memory = MappedRegisters::map(self.bar.as_fd(), PAGE + LENGTH as u64)?;
        self.drive.enable_region()?;
        for at in (0..PAGE + LENGTH as u64).step_by(4) {
            let found = memory.read(at);
            ensure!(found == Some(word(at)), "{found:?} is at {at:#x}, not {:#x}", word(at));
        }
        Ok(format!("{} bytes are there", PAGE + LENGTH as u64))
    }

    fn cannot(mut self) -> Result<String> {
        match self.drive.read_to(0, LENGTH, self.address) {
            Err(DriveError::Command { status, .. })
                if status.code() == Status::DATA_TRANSFER_ERROR =>
            {
                Ok(status.to_string())
            }
            Err(error) => Err(error.into()),
            Ok(()) => Err(CheckFailure("the drive reads into the BAR".to_owned())),
        }
    }
}
