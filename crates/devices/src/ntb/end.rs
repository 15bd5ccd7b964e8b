//! One end of a bridge as a vfio-user device: what a machine asks of its registers is answered by the model, what
//! goes through a window goes to the peer's machine.
//!
//! Where the peer's machine has mapped its memory for DMA, an access is done there at once. What it has not
//! mapped, registers of another device or the address of an interrupt, its machine is asked for. Accesses stay in
//! order: while requests are open, all that follows is a request too, and a doorbell waits for them.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::sync::mpsc::SyncSender;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use rackbus_fabric::Lending;
use rackbus_memory::{Access, DmaSpace, MapError, MemoryHandle};
use rackbus_pci::endpoint::{FunctionRegion, IrqChange, OutOfRegion};
use rackbus_pci::vfio_user::{DeviceShape, RequestError, RequestRefused, Requests, ServedDevice};
use rackbus_pci::{Bar, BarMemory, Interrupts, Mappable};

use super::counters::BridgeCounters;
use super::map;
use super::registers::{BridgeEffects, BridgeRegisters, BridgeSide, BridgeWindows};

/// What the ends of a bridge share.
#[derive(Debug)]
pub(super) struct BridgeShared {
    pub registers: Mutex<BridgeRegisters>,
    pub ends: [BridgeEnd; 2],
    pub windows: [BridgeWindows; 2],
    /// Who brings the link up is told that both ends want it.
    pub training: SyncSender<()>,
}

impl BridgeShared {
    /// The link has had its time to train.
    pub fn train(&self) {
        let effects = lock(&self.registers).train();
        self.interrupt(&effects);
    }

    /// Raises the interrupts that a change of the registers means.
    fn interrupt(&self, effects: &BridgeEffects) {
        for (side, vector) in &effects.interrupts {
            let end = &self.ends[side.index()];
            lock(&end.interrupts).trigger(*vector);
            end.counters.interrupts.count();
        }
    }
}

/// One end: the memory of its machine, the way to it, and what it counts.
#[derive(Debug)]
pub(super) struct BridgeEnd {
    interrupts: Mutex<Interrupts>,
    memory: Mutex<Memory>,
    requests: Requests,
    pub counters: BridgeCounters,
    /// The memory of its machine.
    pub file: File,
    pub length: u64,
}

/// What the end's machine has mapped for DMA.
#[derive(Debug)]
struct Memory {
    space: DmaSpace,
    lending: Lending,
}

impl BridgeEnd {
    /// The end in the machine whose memory `file` is, `length` bytes.
    pub fn new(file: File, length: u64, requests: Requests) -> BridgeEnd {
        BridgeEnd {
            interrupts: Mutex::new(Interrupts::new(map::MSIX_VECTORS)),
            memory: Mutex::new(Memory { space: DmaSpace::new(), lending: Lending::alone() }),
            requests,
            counters: BridgeCounters::default(),
            file,
            length,
        }
    }

    /// Writes that the machine was sent and has refused.
    pub fn refused_writes(&self) -> u64 {
        self.requests.refused_writes()
    }

    /// Writes to the machine's bus address `address`; false when that went nowhere.
    fn write(&self, from: &BridgeCounters, address: u64, data: &[u8]) -> bool {
        if self.requests.all_answered()
            && let Some(slice) =
                lock(&self.memory).mapped().slice_if_mapped(address, data.len(), Access::WRITE)
        {
            slice.copy_from(data);
            from.direct.count();
            return true;
        }
        from.posted.count();
        succeeded(from, self.requests.write(address, data))
    }

    /// Reads from there; false when nobody answered.
    fn read(&self, from: &BridgeCounters, address: u64, data: &mut [u8]) -> bool {
        if self.requests.all_answered()
            && let Some(slice) =
                lock(&self.memory).mapped().slice_if_mapped(address, data.len(), Access::READ)
        {
            slice.copy_to(data);
            from.direct.count();
            return true;
        }
        from.reads.count();
        succeeded(from, self.requests.read(address, data))
    }
}

impl Memory {
    fn map(
        &mut self,
        iova: u64,
        length: u64,
        access: Access,
        memory: Option<MemoryHandle>,
    ) -> Result<(), MapError> {
        let loan = self.lending.lend(iova, length, access, memory)?;
        self.space.map(loan)
    }

    /// What is mapped; nothing of it any more once its owner truncated some.
    fn mapped(&mut self) -> &DmaSpace {
        if self.space.truncated() {
            self.space.drop_memory();
        }
        &self.space
    }
}

fn lock<T>(value: &Mutex<T>) -> MutexGuard<'_, T> {
    value.lock().unwrap_or_else(PoisonError::into_inner)
}

fn succeeded(from: &BridgeCounters, outcome: Result<(), RequestError>) -> bool {
    match outcome {
        Ok(()) => return true,
        Err(RequestError::TimedOut) => from.timeouts.count(),
        Err(error) => tracing::debug!(%error, "an access to the peer's machine failed"),
    }
    false
}

/// An end, for as long as a machine has it.
#[derive(Debug)]
pub(super) struct EndDevice {
    shared: Arc<BridgeShared>,
    side: BridgeSide,
    shape: DeviceShape,
}

impl EndDevice {
    /// The end of `side`, whose machine is there from now on.
    ///
    /// # Errors
    /// When the process has no descriptors left.
    pub fn new(shared: Arc<BridgeShared>, side: BridgeSide) -> std::io::Result<EndDevice> {
        let windows = shared.windows[side.index()];
        let peer = &shared.ends[side.peer().index()];
        let bar = |index, size, prefetchable, mappable| Bar {
            index,
            size,
            is_64bit: true,
            prefetchable,
            mappable,
        };
        let memory = if windows.second_is_memory {
            let areas = vec![(0, peer.length.min(windows.sizes[1]))];
            Some(Mappable { memory: BarMemory::new(peer.file.try_clone()?), areas })
        } else {
            None
        };
        let bars = vec![
            bar(map::BAR_REGISTERS, map::BAR0_SIZE, false, None),
            bar(map::BAR_WINDOWS[0], windows.sizes[0], true, None),
            bar(map::BAR_WINDOWS[1], windows.sizes[1], true, memory),
        ];
        let shape = DeviceShape::new(bars, map::MSIX_VECTORS, 0);
        let device = EndDevice { shared, side, shape };
        let effects = lock(&device.shared.registers).connect(side, true);
        device.carry_out(&effects);
        Ok(device)
    }

    fn end(&self) -> &BridgeEnd {
        &self.shared.ends[self.side.index()]
    }

    fn peer(&self) -> &BridgeEnd {
        &self.shared.ends[self.side.peer().index()]
    }

    /// Does what a change of the registers means beyond them.
    fn carry_out(&self, effects: &BridgeEffects) {
        if effects.reset {
            lock(&self.end().interrupts).reset_levels();
        }
        if let Some(mode) = effects.mode {
            lock(&self.end().interrupts).set_mode(mode);
        }
        self.shared.interrupt(effects);
        if effects.training {
            // Where it is full, it is being trained already.
            let _ = self.shared.training.try_send(());
        }
        self.end().counters.doorbells.add(effects.doorbells.into());
    }

    /// The window that a BAR is.
    fn window(&self, bar: u8) -> Option<usize> {
        map::BAR_WINDOWS.iter().position(|window| *window == bar)
    }

    fn check(&self, region: FunctionRegion, offset: u64, length: usize) -> Result<(), OutOfRegion> {
        let size = match region {
            FunctionRegion::Config => rackbus_spec::pcie::CONFIG_SPACE_SIZE as u64,
            FunctionRegion::Bar(bar) => {
                self.shape.regions.get(usize::from(bar)).map_or(0, |region| region.size)
            }
        };
        match offset.checked_add(length as u64) {
            Some(end) if end <= size => Ok(()),
            _ => Err(OutOfRegion { region, offset, length }),
        }
    }

    fn write_config(&self, offset: u64, data: &[u8]) {
        let mut registers = lock(&self.shared.registers);
        let effects = registers.config_write(self.side, offset, data);
        let master = registers.masters_bus(self.side);
        drop(registers);
        lock(&self.end().memory).space.set_master(master);
        self.carry_out(&effects);
    }

    fn write_registers(&self, offset: u64, data: &[u8]) {
        self.end().counters.register_writes.count();
        // What the peer is told by a register comes after what was written to its memory before.
        if !self.peer().requests.all_answered() {
            let _ = succeeded(&self.end().counters, self.peer().requests.flush());
        }
        let effects = lock(&self.shared.registers).write(self.side, offset, data);
        self.carry_out(&effects);
    }

    fn read_registers(&self, offset: u64, data: &mut [u8]) {
        self.end().counters.register_reads.count();
        lock(&self.shared.registers).read(self.side, offset, data);
        let pending = lock(&self.end().interrupts);
        for (at, byte) in (offset..).zip(data) {
            if let Some(first) = at.checked_sub(map::MSIX_PENDING).filter(|first| *first < 8) {
                let first = usize::try_from(first).unwrap_or(0) * 8;
                *byte = (0..8)
                    .fold(0, |bits, bit| bits | u8::from(pending.is_pending(first + bit)) << bit);
            }
        }
    }

    fn write_window(&self, window: usize, offset: u64, data: &[u8]) {
        let counters = &self.end().counters;
        [&counters.window1_writes, &counters.window2_writes][window].count();
        let written = if self.is_memory(window) {
            let inside = self.peer().length.saturating_sub(offset) >= data.len() as u64;
            inside && self.peer().file.write_all_at(data, offset).is_ok()
        } else {
            let target = lock(&self.shared.registers).translate(
                self.side,
                window,
                offset,
                data.len() as u64,
            );
            target.is_ok_and(|address| self.peer().write(counters, address, data))
        };
        if !written {
            counters.dropped.count();
        }
    }

    fn read_window(&self, window: usize, offset: u64, data: &mut [u8]) {
        let counters = &self.end().counters;
        [&counters.window1_reads, &counters.window2_reads][window].count();
        let read = if self.is_memory(window) {
            let inside = self.peer().length.saturating_sub(offset) >= data.len() as u64;
            inside && self.peer().file.read_exact_at(data, offset).is_ok()
        } else {
            let target = lock(&self.shared.registers).translate(
                self.side,
                window,
                offset,
                data.len() as u64,
            );
            target.is_ok_and(|address| self.peer().read(counters, address, data))
        };
        if !read {
            counters.dropped.count();
            data.fill(0xff);
        }
    }

    fn is_memory(&self, window: usize) -> bool {
        window == 1 && self.shared.windows[self.side.index()].second_is_memory
    }

    fn answers(&self) -> bool {
        lock(&self.shared.registers).answers_memory(self.side)
    }
}

impl Drop for EndDevice {
    fn drop(&mut self) {
        let effects = lock(&self.shared.registers).connect(self.side, false);
        let mut memory = lock(&self.end().memory);
        memory.space.set_master(false);
        memory.space.unmap_all();
        drop(memory);
        lock(&self.end().interrupts).clear();
        self.carry_out(&effects);
    }
}

impl ServedDevice for EndDevice {
    fn shape(&self) -> &DeviceShape {
        &self.shape
    }

    fn read(
        &self,
        region: FunctionRegion,
        offset: u64,
        count: usize,
    ) -> Result<Vec<u8>, RequestRefused> {
        self.check(region, offset, count)?;
        let mut data = vec![0; count];
        match region {
            FunctionRegion::Config => {
                lock(&self.shared.registers).config_read(self.side, offset, &mut data);
            }
            FunctionRegion::Bar(_) if !self.answers() => data.fill(0xff),
            FunctionRegion::Bar(bar) => match self.window(bar) {
                Some(window) => self.read_window(window, offset, &mut data),
                None => self.read_registers(offset, &mut data),
            },
        }
        Ok(data)
    }

    fn write(
        &self,
        region: FunctionRegion,
        offset: u64,
        data: Vec<u8>,
        _posted: bool,
    ) -> Result<(), RequestRefused> {
        self.check(region, offset, data.len())?;
        match region {
            FunctionRegion::Config => self.write_config(offset, &data),
            FunctionRegion::Bar(_) if !self.answers() => {}
            FunctionRegion::Bar(bar) => match self.window(bar) {
                Some(window) => self.write_window(window, offset, &data),
                None => self.write_registers(offset, &data),
            },
        }
        Ok(())
    }

    fn map(
        &self,
        iova: u64,
        length: u64,
        access: Access,
        memory: Option<MemoryHandle>,
    ) -> Result<(), RequestRefused> {
        let mut own = lock(&self.end().memory);
        if own.space.has(iova, length, access, memory.as_ref()) {
            return Ok(());
        }
        match own.map(iova, length, access, memory) {
            // Memory that is not fit to be mapped here is reached by messages.
            Err(MapError::Region(error)) => {
                tracing::debug!(%error, "memory is not mapped");
                Ok(own.map(iova, length, access, None)?)
            }
            outcome => Ok(outcome?),
        }
    }

    fn unmap(&self, iova: u64, length: u64) -> Result<(), RequestRefused> {
        Ok(lock(&self.end().memory).space.unmap(iova, length)?)
    }

    fn unmap_all(&self) -> Result<(), RequestRefused> {
        lock(&self.end().memory).space.unmap_all();
        Ok(())
    }

    fn set_irqs(&self, change: IrqChange) -> Result<(), RequestRefused> {
        Ok(lock(&self.end().interrupts).change(change)?)
    }

    fn reset(&self) -> Result<(), RequestRefused> {
        let effects = lock(&self.shared.registers).reset(self.side);
        lock(&self.end().memory).space.set_master(false);
        self.carry_out(&effects);
        Ok(())
    }

    fn requests(&self) -> Option<&Requests> {
        Some(&self.end().requests)
    }
}
