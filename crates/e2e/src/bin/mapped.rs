#![forbid(unsafe_code)]
//! A program for guests: a user of a drive by this machine's own VFIO, who has memory mapped for it and ends that.
//!
//! Usage: `mapped ADDRESS COMMAND`, where ADDRESS is the PCI address of a drive that is bound to `vfio-pci`. COMMAND is
//!   blocks    writes blocks near the drive's end, reads them back and compares them; interrupts come by an eventfd
//!   ended     has the drive read into memory that is mapped for it, and again when the mapping has ended: nothing arrives then
//!   until-told  writes and reads until the kernel wants the drive back; says `busy` when it has begun, and `told` at the end

use std::os::fd::AsFd;
use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;

use rackbus_driver::device::{DmaAddresses, DrivenFunction};
use rackbus_driver::{Drive, DriveError, DriveOptions};
use rackbus_e2e::{CheckFailure, Result, ensure};
use rackbus_memory::{Access, Event, SharedMemory};
use rackbus_pci::machine::MachineError;
use rackbus_spec::vfio_user::region;
use rackbus_vfio::{Container, InterruptIndex, VfioDevice, VfioError};

/// How long an answer may take: the machines are translated.
const LIMIT_NS: u64 = Duration::from_secs(60).as_nanos() as u64;
/// Bytes that are written, and how far from the drive's end they begin.
const LENGTH: usize = 256 << 10;
const FROM_END: u64 = 2 << 20;
/// Where the drive finds memory that is not its driver's.
const ASIDE: u64 = 1 << 34;

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
    let outcome = match arguments[..] {
        [address, "blocks"] => UsedDrive::open(address).and_then(blocks),
        [address, "ended"] => UsedDrive::open(address).and_then(ended),
        [address, "until-told"] => UsedDrive::open(address).and_then(until_told),
        _ => {
            eprintln!("usage: mapped ADDRESS blocks|ended|until-told");
            return ExitCode::from(2);
        }
    };
    match outcome {
        Ok(text) => {
            println!("{text}");
            ExitCode::SUCCESS
        }
        Err(error) => {
            eprintln!("mapped: {error}");
            ExitCode::FAILURE
        }
    }
}

/// The drive as its driver has it.
struct MappedDrive {
    device: VfioDevice,
    interrupt: Arc<Event>,
}

fn failed(error: VfioError) -> DriveError {
    MachineError::from(error).into()
}

impl DrivenFunction for MappedDrive {
    fn read(&mut self, offset: u64, data: &mut [u8]) -> std::result::Result<(), DriveError> {
        self.device.read(region::BAR0, offset, data).map_err(failed)
    }

    fn write(&mut self, offset: u64, data: &[u8]) -> std::result::Result<(), DriveError> {
        self.device.write(region::BAR0, offset, data).map_err(failed)
    }

    fn start(
        &mut self,
        iova: u64,
        memory: &SharedMemory,
    ) -> std::result::Result<DmaAddresses, DriveError> {
        self.device.reset().map_err(failed)?;
        let access = Access::READ | Access::WRITE;
        self.device.container().map(iova, memory, access).map_err(failed)?;
        self.device.enable(true).map_err(failed)?;
        let wires = [Some(self.interrupt.as_fd())];
        self.device.wire(InterruptIndex::Msix, 0, &wires).map_err(failed)?;
        Ok(DmaAddresses::contiguous(iova, memory.len()))
    }
}

/// The drive, its IOMMU domain, and what the kernel signals.
struct UsedDrive {
    drive: Drive,
    container: Arc<Container>,
    /// Of the drive's admin commands.
    interrupt: Arc<Event>,
    /// The kernel wants it back.
    wanted: Event,
}

impl UsedDrive {
    fn open(address: &str) -> Result<UsedDrive> {
        let device = VfioDevice::open_alone(address.parse()?)?;
        let (interrupt, wanted) = (Arc::new(Event::new()?), Event::new()?);
        device.wire(InterruptIndex::Request, 0, &[Some(wanted.as_fd())])?;
        let container = device.container().clone();
        let device = Box::new(MappedDrive { device, interrupt: interrupt.clone() });
        let drive = Drive::with_device(device, DriveOptions { depth: 4, data: LENGTH })?;
        Ok(UsedDrive { drive, container, interrupt, wanted })
    }

    /// The first block that is used.
    fn block(&self) -> u64 {
        let info = self.drive.info();
        info.blocks - FROM_END / u64::from(info.block_size)
    }

    /// Writes a pattern, and reads it back.
    fn round(&mut self, seed: u8) -> Result<()> {
        let block = self.block();
        let data: Vec<u8> =
            (0..LENGTH).map(|n| (n * 7 + n / 509 + n / 4096) as u8 ^ seed).collect();
        self.drive.write(block, &data, false)?;
        let mut found = vec![0; LENGTH];
        self.drive.read(block, &mut found)?;
        ensure!(found == data, "other bytes are on the drive");
        Ok(())
    }
}

fn blocks(mut used: UsedDrive) -> Result<String> {
    ensure!(used.interrupt.wait(Some(LIMIT_NS)), "no interrupt came");
    for seed in 0..8 {
        used.round(seed)?;
    }
    used.drive.flush()?;
    Ok(format!("{} bytes are right, and an interrupt came", 8 * LENGTH))
}

fn ended(mut used: UsedDrive) -> Result<String> {
    used.round(1)?;
    let memory = SharedMemory::create("aside", 4096)?;
    let part = memory.region().slice(0, 4096);
    let part = part.ok_or_else(|| CheckFailure("there is no memory".to_owned()))?;
    let content = || {
        let mut bytes = vec![0; 4096];
        part.copy_to(&mut bytes);
        bytes
    };
    let (block, none) = (used.block(), vec![0xa5; 4096]);
    part.copy_from(&none);
    used.container.map(ASIDE, &memory, Access::WRITE)?;
    used.drive.read_to(block, 4096, ASIDE)?;
    ensure!(content() != none, "nothing arrived where it is mapped");
    part.copy_from(&none);
    used.container.unmap(ASIDE, 4096)?;
    // The drive may say that it failed, or not notice: the lender's IOMMU does.
    let said = used.drive.read_to(block, 4096, ASIDE);
    ensure!(content() == none, "the drive reached memory whose mapping had ended");
    used.round(2)?;
    let said = said.map_or_else(|error| error.to_string(), |()| "nothing".to_owned());
    Ok(format!("a mapping ended; the drive said: {said}"))
}

fn until_told(mut used: UsedDrive) -> Result<String> {
    used.round(0)?;
    println!("busy");
    let mut seed = 0;
    while !used.wanted.drain() {
        seed += 1;
        if let Err(error) = used.round(seed % 100) {
            ensure!(used.wanted.wait(Some(LIMIT_NS)), "{error}, and nobody said why");
            break;
        }
    }
    Ok("told".to_owned())
}
