//! A small device for tests: a copy engine with registers, as simple as a device with DMA and
//! interrupts can be.

use std::ops::Range;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::path::PathBuf;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use rackbus_memory::{Access, SharedMemory};
use rackbus_pci::engine::EngineOptions;
use rackbus_pci::vfio_user::{Client, LocalFunction, serve_function};
use rackbus_pci::{
    Bar, BarMemory, Bus, Function, FunctionInfo, Mappable, Mode, ModelState, ResetKind,
    RestoreError, SaveError, Work,
};

/// Register offsets in BAR 0: source, destination, length; writing `GO` starts, `STATUS` tells.
pub const SOURCE: u64 = 0x00;
pub const DESTINATION: u64 = 0x08;
pub const LENGTH: u64 = 0x10;
pub const GO: u64 = 0x18;
/// 0 nothing yet, 1 copied, 2 refused.
pub const STATUS: u64 = 0x20;
/// Offset of the mappable page in BAR 0.
pub const SHARED_PAGE: u64 = 0x1000;

pub struct Copier {
    info: FunctionInfo,
    registers: [u8; 0x28],
    pending: bool,
}

impl Copier {
    pub fn new() -> Box<Self> {
        let memory = SharedMemory::create("copier", 0x2000).unwrap();
        let memory = BarMemory::new(memory.descriptor().unwrap());
        let mappable = Some(Mappable { memory, areas: vec![(SHARED_PAGE, 0x1000)] });
        let bar = Bar { index: 0, size: 0x2000, is_64bit: true, prefetchable: false, mappable };
        let info = FunctionInfo {
            vendor_id: 0x1234,
            device_id: 0x5678,
            subsystem_vendor_id: 0,
            subsystem_id: 0,
            revision: 1,
            class: [0xff, 0, 0],
            bars: vec![bar],
            msix_vectors: 20,
            msi_vectors: 0,
            vendor: Vec::new(),
            serial: 1,
        };
        Box::new(Copier { info, registers: [0; 0x28], pending: false })
    }

    fn register(&self, at: u64) -> u64 {
        let at = at as usize;
        u64::from_le_bytes(self.registers[at..at + 8].try_into().unwrap())
    }
}

impl Function for Copier {
    fn info(&self) -> &FunctionInfo {
        &self.info
    }

    fn bar_read(&mut self, _: &Bus<'_>, _: u8, offset: u64, data: &mut [u8]) {
        for (at, byte) in (offset as usize..).zip(data) {
            *byte = self.registers.get(at).copied().unwrap_or(0);
        }
    }

    fn bar_write(&mut self, _: &Bus<'_>, _: u8, offset: u64, data: &[u8]) {
        for (at, byte) in (offset as usize..).zip(data) {
            if let Some(slot) = self.registers.get_mut(at) {
                *slot = *byte;
            }
        }
        self.pending |= offset == GO;
    }

    fn reset(&mut self, _: &Bus<'_>, _: ResetKind) {
        self.registers.fill(0);
        self.pending = false;
    }

    fn poll(&mut self, bus: &Bus<'_>) -> Work {
        if !std::mem::take(&mut self.pending) {
            return Work::Asleep(None);
        }
        let mut data = vec![0; (self.register(LENGTH) as usize).min(1 << 20)];
        let copied = bus.dma.read(self.register(SOURCE), &mut data);
        let copied = copied.and_then(|()| bus.dma.write(self.register(DESTINATION), &data));
        self.registers[STATUS as usize] = if copied.is_ok() { 1 } else { 2 };
        match bus.irq.mode() {
            Mode::Pin => bus.irq.intx(true),
            _ => bus.irq.trigger(0),
        }
        Work::Done
    }

    fn park(&mut self, bus: &Bus<'_>) -> bool {
        let _ = bus;
        !self.pending
    }

    fn wake_fd(&self) -> Option<BorrowedFd<'_>> {
        None
    }

    fn quiesce(&mut self, _: &Bus<'_>) {}

    fn save(&mut self, _: &Bus<'_>) -> Result<(ModelState, Vec<OwnedFd>), SaveError> {
        let state = (self.registers.to_vec(), self.pending);
        Ok((ModelState::new("copier", 1, &state)?, Vec::new()))
    }

    fn restore(&mut self, _: &Bus<'_>, state: &ModelState) -> Result<(), RestoreError> {
        let (registers, pending): (Vec<u8>, bool) = state.read("copier", 1)?;
        let registers = registers.try_into();
        self.registers = registers.map_err(|_| RestoreError::Invalid("registers".to_owned()))?;
        self.pending = pending;
        Ok(())
    }
}

/// A socket path of this test's own.
#[allow(dead_code, reason = "not every test file has a server")]
pub fn socket_path() -> PathBuf {
    static NEXT: AtomicU32 = AtomicU32::new(0);
    let number = NEXT.fetch_add(1, Ordering::Relaxed);
    std::env::temp_dir().join(format!("rackbus-pci-{}-{number}.sock", std::process::id()))
}

/// A copier behind a socket.
#[allow(dead_code, reason = "not every test file has a server")]
pub fn serve_copier() -> LocalFunction {
    serve_function(Copier::new(), &socket_path(), EngineOptions::default()).unwrap()
}

/// A client with bus mastering, memory space and MSI-X on.
#[allow(dead_code, reason = "not every test file drives the device")]
pub fn connect(function: &LocalFunction) -> Client {
    let client = Client::connect(function.server().path(), Duration::from_secs(5)).unwrap();
    client.write(7, 4, &6u16.to_le_bytes()).unwrap();
    client
}

/// Copies by the device and returns its status.
#[allow(dead_code, reason = "not every test file drives the device")]
pub fn copy(client: &Client, source: u64, destination: u64, length: u64) -> u8 {
    for (at, value) in [(STATUS, 0), (SOURCE, source), (DESTINATION, destination), (LENGTH, length)]
    {
        client.post(0, at, &value.to_le_bytes()).unwrap();
    }
    client.write(0, GO, &1u64.to_le_bytes()).unwrap();
    let mut status = [0];
    while status[0] == 0 {
        client.read(0, STATUS, &mut status).unwrap();
    }
    status[0]
}

/// Memory mapped for the device at `iova`.
#[allow(dead_code, reason = "not every test file drives the device")]
pub fn map(client: &Client, iova: u64, length: u64) -> SharedMemory {
    use std::os::fd::AsFd;
    let memory = SharedMemory::create("dma", length).unwrap();
    let access = Access::READ | Access::WRITE;
    client.dma_map(iova, length, access, Some((memory.as_fd(), 0))).unwrap();
    memory
}

/// Where the numbers of a JSON text are.
#[allow(dead_code, reason = "not every test file damages states")]
pub fn numbers(text: &[u8]) -> Vec<Range<usize>> {
    let mut found: Vec<Range<usize>> = Vec::new();
    for (at, _) in text.iter().enumerate().filter(|(_, byte)| byte.is_ascii_digit()) {
        match found.last_mut() {
            Some(last) if last.end == at => last.end += 1,
            _ => found.push(at..at + 1),
        }
    }
    found
}

/// The text with another number at this place.
#[allow(dead_code, reason = "not every test file damages states")]
pub fn with_number(text: &[u8], place: Range<usize>, number: u64) -> Vec<u8> {
    [&text[..place.start], number.to_string().as_bytes(), &text[place.end..]].concat()
}
