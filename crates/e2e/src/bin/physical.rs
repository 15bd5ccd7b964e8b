#![forbid(unsafe_code)]
//! A program for guests: a driver in user space of a function that is lent by VFIO.
//!
//! Usage: `physical FUNCTION COMMAND`, where FUNCTION is the PCI address of a drive bound to `vfio-pci`, or the
//! vfio-user socket of one that was borrowed. COMMAND is
//!   open       opens a drive by its address, also as a process that was passed its descriptors, maps its registers into
//!              this process and into its own IOMMU domain, and resets it
//!   write      writes a pattern to the drive, and reads it back
//!   verify     reads the pattern that was written before
//!   busy       writes and reads until it is killed; says `busy` when it has begun
//!   lasting    writes, reads and compares until the file that follows is there; says `busy` when it has begun. Then gives the
//!              drive other memory, and waits for an interrupt by the wire that it has had from the beginning
//!   interrupt  waits for an interrupt of the drive
//!   stray      tells the drive to read into memory that nobody lent it; ends with 0 when the memory beside it is
//!              as it was
//!   keep       maps registers, releases the function and keeps the mapping; says `kept` when they are taken away
//!   reach      reads from the drive into BAR 2 of the function whose socket follows, and writes to the drive from there,
//!              by the address that the BAR is programmed to
//!   signal     has a device `edu` of QEMU's, which has MSI and no MSI-X, raise an interrupt, and move data by DMA and tell of
//!              that by another
//!   card       raises an interrupt of a network card's virtual function by software, and waits for it

use std::os::fd::{AsFd, OwnedFd};
use std::path::Path;
use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;

use rackbus_driver::device::{DmaAddresses, DrivenFunction, connect};
use rackbus_driver::{Drive, DriveError, DriveOptions, MachineFunction};
use rackbus_e2e::{CheckFailure, Result, ensure};
use rackbus_memory::{Access, Event, MappedRegisters, SharedMemory};
use rackbus_pci::vfio_user::Client;
use rackbus_spec::vfio_user::{irq, region};
use rackbus_vfio::{Container, Facts, VfioDevice, VfioError};

/// Bytes of the pattern, and the block that it begins with.
const LENGTH: usize = 256 << 10;
const BLOCK: u64 = 64;
/// How long each answer may take: guests in guests are slow.
const LIMIT: Duration = Duration::from_secs(20);
const LIMIT_NS: u64 = LIMIT.as_nanos() as u64;
/// Far from all that the driver has its drive reach.
const STRAY: u64 = 1 << 36;

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
    let outcome = match arguments[..] {
        [function, "open"] => open(function),
        [function, "write"] => drive(function).and_then(write),
        [function, "verify"] => drive(function).and_then(verify),
        [function, "busy"] => drive(function).and_then(busy),
        [function, "lasting", end] => lasting(function, Path::new(end)),
        [function, "interrupt"] => interrupt(function),
        [function, "stray"] => drive(function).and_then(stray),
        [function, "keep"] => keep(function),
        [function, "card"] => card(function),
        [function, "signal"] => signal(function),
        [function, "reach", target] => drive(function).and_then(|drive| reach(drive, target)),
        _ => {
            eprintln!(
                "usage: physical FUNCTION open|write|verify|busy|lasting END|interrupt|stray|keep|card|signal|reach \
                 TARGET"
            );
            return ExitCode::from(2);
        }
    };
    match outcome {
        Ok(text) => {
            println!("{text}");
            ExitCode::SUCCESS
        }
        Err(error) => {
            eprintln!("physical: {error}");
            ExitCode::FAILURE
        }
    }
}

fn open(function: &str) -> Result<String> {
    let device = VfioDevice::open_alone(function.parse()?)?;
    device.enable(true)?;
    let mut word = [0; 4];
    device.read(region::BAR0, VERSION, &mut word)?;
    let registers = device.map(region::BAR0, 0, 4096)?;
    ensure!(
        registers.read(VERSION) == Some(u32::from_le_bytes(word)),
        "other registers are mapped"
    );
    passed_on(&device)?;
    device.enable(true)?;
    let (container, access) = (device.container(), Access::READ | Access::WRITE);
    let memory = SharedMemory::create("memory", 8192)?;
    container.map(STRAY, registers.clone(), access)?;
    container.map(0, &memory, Access::READ)?;
    ensure!(container.mapped() == (2, 4096 + 8192), "mapped: {:?}", container.mapped());
    let refused = container.map(4096, &memory, access);
    ensure!(matches!(refused, Err(VfioError::Range { .. })), "mapped twice: {refused:?}");
    ensure!(container.unmap(0, 4096).is_err(), "a half of a mapping is unmapped");
    container.unmap(0, 8192)?;
    container.revoke()?;
    ensure!(container.mapped() == (0, 0), "mapped: {:?}", container.mapped());
    let after = container.map(0, &memory, access);
    ensure!(matches!(after, Err(VfioError::Revoked)), "mapped after all was revoked: {after:?}");
    let method = device.reset()?;
    device.enable(false)?;
    ensure!(
        registers.read(VERSION) == Some(0) && registers.gone(),
        "registers are mapped that are off"
    );
    Ok(format!(
        "opened; {method}; {}",
        refused.map_or_else(|error| error.to_string(), |()| String::new())
    ))
}

/// The function as another process has it, which was passed its descriptors; and not with others.
fn passed_on(device: &VfioDevice) -> Result<()> {
    let file = || device.as_fd().try_clone_to_owned();
    let (of_container, groups) = device.container().descriptors()?;
    let container = Arc::new(Container::inherited(of_container, groups, [])?);
    let with =
        |facts: &Facts, file: OwnedFd| VfioDevice::inherited(&container, facts.clone(), file);
    let again = with(device.facts(), file()?)?;
    ensure!(again.region(region::BAR0) == device.region(region::BAR0), "it is another function");
    // Where it is none of the group's, or the file none of a function.
    let elsewhere = Facts { address: "0000:00:00.0".parse()?, ..device.facts().clone() };
    ensure!(with(&elsewhere, file()?).is_err(), "it is gone on with at another address");
    let memory = SharedMemory::create("memory", 4096)?;
    let refused = with(device.facts(), memory.as_fd().try_clone_to_owned()?);
    ensure!(refused.is_err(), "a file of memory is gone on with");
    Ok(())
}

fn options() -> DriveOptions {
    DriveOptions { depth: 4, data: LENGTH }
}

fn drive(function: &str) -> Result<Drive> {
    let device: Box<dyn DrivenFunction> = match function.starts_with('/') {
        true => Box::new(connect(Path::new(function), LIMIT)?),
        false => Box::new(MachineFunction::open(function)?),
    };
    Ok(Drive::with_device(device, options())?)
}

fn pattern() -> Vec<u8> {
    (0..LENGTH).map(|n| (n * 7 + n / 509 + n / 4096) as u8).collect()
}

fn write(mut drive: Drive) -> Result<String> {
    drive.write(BLOCK, &pattern(), false)?;
    drive.flush()?;
    verify(drive)
}

fn verify(mut drive: Drive) -> Result<String> {
    let mut found = vec![0; LENGTH];
    drive.read(BLOCK, &mut found)?;
    ensure!(found == pattern(), "other bytes are on the drive");
    Ok(format!("{LENGTH} bytes are right on {}", drive.info().serial))
}

fn busy(mut drive: Drive) -> Result<String> {
    // Behind the pattern.
    let block = BLOCK + LENGTH as u64 / u64::from(drive.info().block_size);
    let mut data = pattern();
    println!("busy");
    loop {
        drive.write(block, &data, false)?;
        drive.read(block, &mut data)?;
    }
}

/// The function of one drive after the other, by the same session.
struct Lasting(Arc<Client>);

impl DrivenFunction for Lasting {
    fn read(&mut self, offset: u64, data: &mut [u8]) -> std::result::Result<(), DriveError> {
        Ok(self.0.read(region::BAR0, offset, data)?)
    }

    fn write(&mut self, offset: u64, data: &[u8]) -> std::result::Result<(), DriveError> {
        Ok(self.0.post(region::BAR0, offset, data)?)
    }

    fn start(
        &mut self,
        iova: u64,
        memory: &SharedMemory,
    ) -> std::result::Result<DmaAddresses, DriveError> {
        self.0.reset()?;
        // What the former one had, where there was one: otherwise the mapping is refused.
        let _ = self.0.dma_unmap(iova, memory.len() as u64);
        let access = Access::READ | Access::WRITE;
        self.0.dma_map(iova, memory.len() as u64, access, Some((memory.as_fd(), 0)))?;
        self.0.write(region::CONFIG, 4, &6u16.to_le_bytes())?;
        Ok(DmaAddresses::contiguous(iova, memory.len()))
    }
}

fn lasting(function: &str, end: &Path) -> Result<String> {
    let client = Arc::new(connect(Path::new(function), LIMIT)?);
    let event = Event::new()?;
    client.wire_irqs(irq::MSIX, 0, &[Some(event.as_fd().try_clone_to_owned()?)])?;
    let mut drive = Drive::with_device(Box::new(Lasting(client.clone())), options())?;
    // Behind the pattern.
    let block = BLOCK + LENGTH as u64 / u64::from(drive.info().block_size);
    println!("busy");
    let (mut rounds, mut left) = (0u8, 2);
    // The last ones have begun when the file was there.
    while left > 0 {
        left -= i32::from(end.exists());
        rounds = rounds.wrapping_add(1);
        let data: Vec<u8> = pattern().iter().map(|byte| byte ^ rounds).collect();
        drive.write(block, &data, false)?;
        let mut found = vec![0; LENGTH];
        drive.read(block, &mut found)?;
        ensure!(found == data, "other bytes are on the drive");
    }
    drop(drive);
    ensure!(event.drain(), "no interrupt came before");
    let drive = Drive::with_device(Box::new(Lasting(client)), options())?;
    ensure!(event.wait(Some(LIMIT_NS)), "no interrupt came");
    verify(drive)
}

/// A drive that tells of its admin commands by vector 0.
struct Wired(Client, Event);

impl DrivenFunction for Wired {
    fn read(&mut self, offset: u64, data: &mut [u8]) -> std::result::Result<(), DriveError> {
        DrivenFunction::read(&mut self.0, offset, data)
    }

    fn write(&mut self, offset: u64, data: &[u8]) -> std::result::Result<(), DriveError> {
        DrivenFunction::write(&mut self.0, offset, data)
    }

    fn start(
        &mut self,
        iova: u64,
        memory: &SharedMemory,
    ) -> std::result::Result<DmaAddresses, DriveError> {
        let addresses = DrivenFunction::start(&mut self.0, iova, memory)?;
        let wire = self.1.as_fd().try_clone_to_owned().map_err(DriveError::Descriptors)?;
        let kind = if self.0.irq_info(irq::MSIX)?.count > 0 { irq::MSIX } else { irq::INTX };
        self.0.wire_irqs(kind, 0, &[Some(wire)])?;
        Ok(addresses)
    }
}

fn interrupt(function: &str) -> Result<String> {
    let event = Event::new()?;
    let copy = event.as_fd().try_clone_to_owned()?;
    let rung = connect(Path::new(function), LIMIT)?;
    // The other end of the same event.
    let drive = Drive::with_device(Box::new(Wired(rung, event)), options())?;
    ensure!(Event::wait_any(&[copy.as_fd()], Some(LIMIT_NS)), "no interrupt came");
    Ok(format!("an interrupt came from {}", drive.info().serial))
}

fn stray(mut drive: Drive) -> Result<String> {
    let before = pattern();
    drive
        .memory()
        .whole()
        .part(drive.memory().len() - LENGTH, LENGTH)
        .map(|it| it.copy_from(&before));
    // The drive may say that it failed, or not notice: the IOMMU does.
    let said = match drive.read_to(BLOCK, 4096, STRAY) {
        Ok(()) => "nothing".to_owned(),
        Err(error) => error.to_string(),
    };
    let mut after = vec![0; LENGTH];
    drive
        .memory()
        .whole()
        .part(drive.memory().len() - LENGTH, LENGTH)
        .map(|it| it.copy_to(&mut after));
    ensure!(after == before, "memory of the driver changed");
    Ok(format!("the drive said: {said}"))
}

/// Where the memory of another function is programmed to be, and what of it is reached.
const WINDOW: u64 = 1 << 35;
const WINDOW_PART: (u64, usize) = (4096, 32 << 10);
/// The BAR that has it, and the offset of that one's register (PCI Local Bus 3.0, section 6.1).
const TARGET: u32 = 2;
const TARGET_REGISTER: u64 = 0x10 + 4 * TARGET as u64;

fn reach(mut drive: Drive, target: &str) -> Result<String> {
    let client = connect(Path::new(target), LIMIT)?;
    client.write(region::CONFIG, TARGET_REGISTER, &WINDOW.to_le_bytes())?;
    client.write(region::CONFIG, 4, &2u16.to_le_bytes())?;
    let (part, length) = WINDOW_PART;
    let bar = region::BAR0 + TARGET;
    let sent: Vec<u8> = (0..length).map(|n| (n * 13 + n / 251) as u8).collect();
    drive.write(BLOCK, &sent, false)?;
    drive.read_to(BLOCK, length, WINDOW + part)?;
    let mut came = vec![0; length];
    in_words(&mut came, |at, word| client.read(bar, part + at, word))?;
    ensure!(came == sent, "other bytes came into the BAR");
    let mut stored: Vec<u8> = sent.iter().map(|byte| byte.wrapping_mul(5) ^ 0x5a).collect();
    in_words(&mut stored, |at, word| client.write(bar, part + at, word))?;
    drive.write_from(BLOCK, length, WINDOW + part)?;
    let mut back = vec![0; length];
    drive.read(BLOCK, &mut back)?;
    ensure!(back == stored, "other bytes came from the BAR");
    // What decodes nothing is not reached. The drive may say that it failed, or not notice.
    client.write(region::CONFIG, 4, &0u16.to_le_bytes())?;
    drive.write(BLOCK, &sent, false)?;
    let _ = drive.read_to(BLOCK, length, WINDOW + part);
    client.write(region::CONFIG, 4, &2u16.to_le_bytes())?;
    in_words(&mut came, |at, word| client.read(bar, part + at, word))?;
    ensure!(came == stored, "the drive reached what decodes nothing");
    Ok(format!("{length} bytes each way between {} and {target}", drive.info().serial))
}

/// Moves what `data` has by accesses as drivers make them.
fn in_words<E>(
    data: &mut [u8],
    mut access: impl FnMut(u64, &mut [u8]) -> std::result::Result<(), E>,
) -> std::result::Result<(), E> {
    data.chunks_mut(8).zip(0u64..).try_for_each(|(word, nth)| access(nth * 8, word))
}

/// Offset of the version register of an NVMe controller (NVMe base 2.0, section 3.1.3.2).
const VERSION: u64 = 8;

fn keep(function: &str) -> Result<String> {
    let client = connect(Path::new(function), LIMIT)?;
    client.write(region::CONFIG, 4, &6u16.to_le_bytes())?;
    let mut trapped = [0; 4];
    client.read(region::BAR0, VERSION, &mut trapped)?;
    let info = client.region_info(region::BAR0)?;
    let (file, offset) =
        info.memory.ok_or_else(|| CheckFailure("its registers cannot be mapped".to_owned()))?;
    let registers = MappedRegisters::map_device(file.as_fd(), offset, 4096)?;
    ensure!(
        registers.read(VERSION) == Some(u32::from_le_bytes(trapped)),
        "other registers are mapped"
    );
    println!("mapped");
    drop(client);
    // The lender takes them away when the conversation has ended.
    while !registers.gone() {
        registers.read(VERSION);
        std::thread::sleep(Duration::from_millis(2));
    }
    println!("kept");
    loop {
        std::thread::park();
        // The descriptor is what is kept.
        let _ = file.metadata();
    }
}

/// Registers of an 82576's virtual function (Intel 82576 datasheet, section 8.26): set an interrupt's cause, enable
/// it, and which vector it takes.
const VTEICS: u64 = 0x1520;
const VTEIMS: u64 = 0x1524;
const VTIVAR_MISC: u64 = 0x1740;

fn card(function: &str) -> Result<String> {
    let client = connect(Path::new(function), LIMIT)?;
    client.reset()?;
    client.write(region::CONFIG, 4, &6u16.to_le_bytes())?;
    let event = Event::new()?;
    let wire = event.as_fd().try_clone_to_owned()?;
    client.wire_irqs(irq::MSIX, 0, &[Some(wire)])?;
    client.write(region::BAR0, VTIVAR_MISC, &0x80u32.to_le_bytes())?;
    client.write(region::BAR0, VTEIMS, &1u32.to_le_bytes())?;
    client.write(region::BAR0, VTEICS, &1u32.to_le_bytes())?;
    let mut status = [0; 4];
    client.read(region::BAR0, 8, &mut status)?;
    ensure!(event.wait(Some(LIMIT_NS)), "no interrupt came");
    Ok(format!("an interrupt came; status {:#x}", u32::from_le_bytes(status)))
}

/// Registers of QEMU's `edu` (QEMU, `docs/specs/edu.rst`): the cause of an interrupt, to raise one by its cause, to
/// acknowledge it; source, destination, length and command of a transfer. Then the device's own buffer, and how long it is.
const EDU_CAUSE: u64 = 0x24;
const EDU_RAISE: u64 = 0x60;
const EDU_ACKNOWLEDGE: u64 = 0x64;
const EDU_TRANSFER: [u64; 4] = [0x80, 0x88, 0x90, 0x98];
const EDU_BUFFER: u64 = 0x40000;
const EDU_LENGTH: usize = 4096;
/// Of a command: begin, from the device into memory, raise an interrupt at the end. And the cause that this one has.
const EDU_BEGIN: u64 = 1;
const EDU_TO_MEMORY: u64 = 2;
const EDU_INTERRUPT: u64 = 4;
const EDU_DONE: u32 = 0x100;
/// Where its memory is for the device, which has addresses of 28 bits.
const EDU_MEMORY: u64 = 1 << 20;

/// A device with MSI that has no MSI-X.
struct Signalled {
    client: Client,
    event: Event,
}

impl Signalled {
    fn open(function: &str) -> Result<Signalled> {
        let client = connect(Path::new(function), LIMIT)?;
        client.reset()?;
        let [msi, msix] = [irq::MSI, irq::MSIX].map(|kind| client.irq_info(kind));
        let (msi, msix) = (msi?.count, msix?.count);
        ensure!((msi, msix) == (1, 0), "{msi} vectors of MSI and {msix} of MSI-X are shown");
        client.write(region::CONFIG, 4, &6u16.to_le_bytes())?;
        let event = Event::new()?;
        client.wire_irqs(irq::MSI, 0, &[Some(event.as_fd().try_clone_to_owned()?)])?;
        Ok(Signalled { client, event })
    }

    fn set(&self, register: u64, value: u32) -> Result<()> {
        Ok(self.client.write(region::BAR0, register, &value.to_le_bytes())?)
    }

    /// Waits for the interrupt of a cause, and acknowledges it.
    fn awaited(&self, cause: u32) -> Result<()> {
        ensure!(self.event.wait(Some(LIMIT_NS)), "no interrupt came for {cause:#x}");
        let mut found = [0; 4];
        self.client.read(region::BAR0, EDU_CAUSE, &mut found)?;
        let found = u32::from_le_bytes(found);
        ensure!(found == cause, "the cause is {found:#x}, not {cause:#x}");
        self.set(EDU_ACKNOWLEDGE, cause)
    }

    /// Has it move a page.
    fn transfer(&self, from: u64, to: u64, command: u64) -> Result<()> {
        let values = [from, to, EDU_LENGTH as u64, command | EDU_BEGIN | EDU_INTERRUPT];
        for (register, value) in EDU_TRANSFER.into_iter().zip(values) {
            self.client.write(region::BAR0, register, &value.to_le_bytes())?;
        }
        self.awaited(EDU_DONE)
    }
}

fn signal(function: &str) -> Result<String> {
    let device = Signalled::open(function)?;
    for cause in [1, 0x4000] {
        device.set(EDU_RAISE, cause)?;
        device.awaited(cause)?;
    }
    let memory = SharedMemory::create("edu", 2 * EDU_LENGTH as u64)?;
    let access = Access::READ | Access::WRITE;
    device.client.dma_map(EDU_MEMORY, memory.len() as u64, access, Some((memory.as_fd(), 0)))?;
    let sent: Vec<u8> = (0..EDU_LENGTH).map(|n| (n * 7 + n / 253) as u8).collect();
    let slice = |at| {
        let part = memory.region().slice(at, EDU_LENGTH);
        part.ok_or_else(|| CheckFailure("the memory is too small".to_owned()))
    };
    slice(0)?.copy_from(&sent);
    device.transfer(EDU_MEMORY, EDU_BUFFER, 0)?;
    device.transfer(EDU_BUFFER, EDU_MEMORY + EDU_LENGTH as u64, EDU_TO_MEMORY)?;
    let mut came = vec![0; EDU_LENGTH];
    slice(EDU_LENGTH)?.copy_to(&mut came);
    ensure!(came == sent, "other bytes came back from the device");
    Ok("four interrupts came by MSI, and a page went there and back".to_owned())
}
