//! A function that is lent through an NTB: its control area, what its borrower asks for, and its end.

use std::os::fd::AsFd;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

use rackbus_memory::{Access, Event, MappedRegisters};
use rackbus_spec::pcie::msix;
use rackbus_spec::vfio_user::region;
use rackbus_vfio::{Container, InterruptIndex, PciAddress, VfioDevice, VfioError};

use crate::error::MetalError;
use crate::image::{Image, MsixTable};
use crate::lender::{BEAT, LentStatus, locked};
use crate::ntb::{DOORBELL, Ntb};
use crate::requests::{DEVICE_CONTROL_BITS, FunctionRequest, RequestRing};
use crate::window::{
    BAR_64, BAR_PREFETCH, ControlArea, DIRECT, FunctionStatus, Offer, PAGE, WindowBar,
};

/// Behind this offset of an entry of the MSI-X table is its mask.
const VECTOR_CONTROL: u64 = 12;

/// A BAR of a device, mapped.
#[derive(Debug)]
pub(crate) struct BarMap {
    number: u8,
    size: u64,
    flags: u32,
    registers: Arc<MappedRegisters>,
}

impl BarMap {
    /// Size of the BAR in bytes.
    pub fn size(&self) -> u64 {
        self.size
    }
}

/// Maps the BARs of a device; those of I/O ports are not lent.
pub(crate) fn map_bars(device: &VfioDevice) -> Result<Vec<BarMap>, MetalError> {
    let address = device.address();
    let mut bars = Vec::new();
    for bar in device.facts().bars.iter().filter(|bar| !bar.io) {
        let index = u32::from(bar.bar);
        let facts = device.region(index);
        let whole = facts.size == bar.size && facts.areas == [(0, bar.size)];
        if !whole || !bar.size.is_power_of_two() || bar.size < PAGE as u64 {
            let reason = format!("BAR {} cannot be mapped as a whole", bar.bar);
            return Err(MetalError::NotLendable { address, reason });
        }
        let wide = if bar.wide { BAR_64 } else { 0 };
        let prefetch = if bar.prefetchable { BAR_PREFETCH } else { 0 };
        let registers = device.map(index, 0, bar.size)?;
        bars.push(BarMap { number: bar.bar, size: bar.size, flags: wide | prefetch, registers });
    }
    Ok(bars)
}

/// Mappings in the IOMMU domain, until this is dropped.
#[derive(Debug)]
struct Mappings {
    container: Arc<Container>,
    ranges: Vec<(u64, u64)>,
}

impl Mappings {
    fn add(
        &mut self,
        iova: u64,
        bytes: u64,
        backing: impl Into<rackbus_vfio::RangeTarget>,
        access: Access,
    ) -> Result<(), MetalError> {
        self.container.map(iova, backing, access)?;
        self.ranges.push((iova, bytes));
        Ok(())
    }
}

impl Drop for Mappings {
    fn drop(&mut self) {
        for (iova, bytes) in self.ranges.drain(..) {
            if let Err(error) = self.container.unmap(iova, bytes) {
                tracing::error!(iova, %error, "a lent function's window stays mapped");
            }
        }
    }
}

/// Told, once, why a function was taken away from its borrower.
pub type OnTakenAway = Box<dyn Fn(&str) + Send + Sync>;

/// A function, its control area, and what the borrower asked for.
pub(crate) struct ControlledFunction {
    device: VfioDevice,
    area: ControlArea,
    /// While it is lent. Who changes the device for the borrower holds this; nothing is changed after the end.
    mappings: Mutex<Option<Mappings>>,
    table: (Arc<MappedRegisters>, MsixTable),
    device_control: u16,
    requests: Mutex<RequestRing>,
    /// Offset of its control area in the borrower's window 1.
    control: u64,
    epoch: u64,
    lost: OnTakenAway,
    /// Nobody at the borrower uses it any more.
    released: AtomicBool,
    carried_out: AtomicU64,
    refused: AtomicU32,
    resets: AtomicU64,
    trouble: Mutex<Option<String>>,
    /// Rings when there may be something to do.
    wake: Event,
    /// Rings when the kernel wants the device back, or it reported an error that it cannot correct.
    given_up: Event,
    /// Enables MSI-X in the device; nothing rings it, as the table is the borrower's.
    _vector: Event,
}

impl std::fmt::Debug for ControlledFunction {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("ControlledFunction").field("status", &self.status()).finish_non_exhaustive()
    }
}

impl ControlledFunction {
    /// Lends a device that was reset and whose memory is on, at a place in the borrower's window.
    pub fn new(
        ntb: &Ntb,
        device: VfioDevice,
        image: Image,
        bars: &[BarMap],
        (control, offsets): (u64, Vec<u64>),
        (epoch, lost): (u64, OnTakenAway),
    ) -> Result<ControlledFunction, MetalError> {
        let (msix, table) = table_of(device.address(), &image, bars)?;
        let plan = ntb.plan();
        let area = ControlArea::new()?;
        let mut mappings = Mappings { container: ntb.container().clone(), ranges: Vec::new() };
        let inbound = plan.inbound.start;
        let both = Access::READ | Access::WRITE;
        for (offset, memory, access) in area.parts() {
            mappings.add(inbound + control + offset, memory.len() as u64, memory, access)?;
        }
        let mut shown = [WindowBar::default(); 6];
        for (bar, offset) in bars.iter().zip(offsets) {
            mappings.add(inbound + offset, bar.size, bar.registers.clone(), both)?;
            shown[usize::from(bar.number)] = WindowBar::new(offset, bar.size, bar.flags);
        }
        let event =
            || Event::new().map_err(|cause| MetalError::System { what: "making an event", cause });
        let (wake, given_up, vector) = (event()?, event()?, event()?);
        device.wire(InterruptIndex::Msix, 0, &[Some(vector.as_fd())])?;
        for kind in [InterruptIndex::Request, InterruptIndex::Error] {
            // Not every kernel and device has both.
            let _ = device.wire(kind, 0, &[Some(given_up.as_fd())]);
        }
        let offer = Offer {
            epoch,
            vectors: msix.entries.into(),
            flags: if ntb.is_direct() { DIRECT } else { 0 },
            dma: (plan.memory.start, plan.memory.end - plan.memory.start),
            msi_base: plan.msi_base(),
            doorbell: DOORBELL,
            bars: shown,
        };
        let function = ControlledFunction {
            area,
            mappings: Mutex::new(Some(mappings)),
            table: (table, msix),
            device_control: image.writable.device_control,
            requests: Mutex::new(RequestRing::new(epoch, image.writable)),
            control,
            epoch,
            lost,
            released: AtomicBool::new(false),
            carried_out: AtomicU64::new(0),
            refused: AtomicU32::new(0),
            resets: AtomicU64::new(0),
            trouble: Mutex::new(None),
            wake,
            given_up,
            device,
            _vector: vector,
        };
        function.mask_all();
        function.area.publish(&offer, &image.bytes);
        Ok(function)
    }

    /// Gives its heartbeat another value.
    pub fn beat(&self, value: u32) {
        self.area.beat(value);
    }

    /// There may be something to do.
    pub fn wake(&self) {
        self.wake.ring();
    }

    /// Whether the borrower has said that nobody there uses it: also by a request that was not carried out any more.
    pub fn is_released(&self) -> bool {
        let mut requests = locked(&self.requests);
        let producer = self.area.producer();
        while let Some(request) = requests.next(producer, |number| self.area.entry(number)) {
            let released = matches!(request, FunctionRequest::Release);
            self.released.store(released, Ordering::Relaxed);
            requests.done();
        }
        self.released.load(Ordering::Relaxed)
    }

    /// Masks every entry of the MSI-X table, which is the borrower's from then on.
    fn mask_all(&self) {
        let (registers, MsixTable { offset, entries, .. }) = &self.table;
        for entry in 0..u64::from(*entries) {
            let at = u64::from(*offset) + msix::ENTRY_SIZE * entry + VECTOR_CONTROL;
            registers.write(at, 1);
        }
    }

    /// Does what the borrower asks for, until it is taken away.
    pub fn serve(&self) {
        loop {
            let events = [self.wake.as_fd(), self.given_up.as_fd()];
            Event::wait_any(&events, Some(BEAT.as_nanos() as u64));
            self.wake.drain();
            if self.given_up.drain() {
                self.fail("the kernel wants it back, or it reported an error".to_owned());
            }
            loop {
                match self.serve_one() {
                    Served::Ended => return,
                    Served::All => break,
                    Served::One => {}
                }
            }
        }
    }

    /// Does one thing that the borrower asks for.
    fn serve_one(&self) -> Served {
        let mut requests = locked(&self.requests);
        let mappings = locked(&self.mappings);
        if mappings.is_none() {
            return Served::Ended;
        }
        let producer = self.area.producer();
        let next = requests.next(producer, |number| self.area.entry(number));
        let outcome = match next {
            Some(request) => {
                let outcome = self.carry_out(request);
                requests.done();
                self.carried_out.fetch_add(1, Ordering::Relaxed);
                outcome
            }
            None => Ok(()),
        };
        let (consumer, refused) = requests.progress();
        self.refused.store(refused, Ordering::Relaxed);
        self.area.consumed(consumer, refused);
        drop((requests, mappings));
        if let Err(trouble) = outcome {
            self.fail(trouble.to_string());
            return Served::Ended;
        }
        if next.is_some() { Served::One } else { Served::All }
    }

    fn carry_out(&self, request: FunctionRequest) -> Result<(), VfioError> {
        tracing::debug!(device = %self.device.address(), ?request, "the borrower asks");
        self.released.store(matches!(request, FunctionRequest::Release), Ordering::Relaxed);
        match request {
            FunctionRequest::Master(true) => self.device.enable(true),
            FunctionRequest::Master(false) => self.device.stop_mastering(),
            FunctionRequest::Msix => Ok(()),
            FunctionRequest::DeviceControl(bits) => self.set_device_control(bits),
            FunctionRequest::Reset | FunctionRequest::Release => self.reset(),
        }
    }

    fn set_device_control(&self, bits: u16) -> Result<(), VfioError> {
        let at = self.device_control.into();
        let mut control = [0; 2];
        self.device.read(region::CONFIG, at, &mut control)?;
        let value = u16::from_le_bytes(control) & !DEVICE_CONTROL_BITS | bits;
        self.device.write(region::CONFIG, at, &value.to_le_bytes())
    }

    /// Resets the device, and has it as it was when it was lent.
    fn reset(&self) -> Result<(), VfioError> {
        self.resets.fetch_add(1, Ordering::Relaxed);
        self.device.stop_mastering()?;
        self.device.reset()?;
        self.device.enable_memory()?;
        self.mask_all();
        Ok(())
    }

    /// It is of no more use: the borrower loses it, and who lent it is told.
    pub fn fail(&self, trouble: String) {
        if !self.end() {
            return;
        }
        tracing::error!(device = %self.device.address(), trouble, "a lent function is taken away");
        (self.lost)(&trouble);
        locked(&self.trouble).get_or_insert(trouble);
    }

    /// Takes it away, whatever its borrower does; false when that was done. Waits for what is being done for the
    /// borrower, a reset at most.
    pub fn end(&self) -> bool {
        self.area.set_state(FunctionStatus::Revoked);
        let mut mappings = locked(&self.mappings);
        let Some(mapped) = mappings.take() else { return false };
        if let Err(error) = self.device.stop_mastering() {
            tracing::warn!(device = %self.device.address(), %error, "bus mastering could not be turned off");
        }
        drop(mapped);
        if let Err(error) = self.device.reset() {
            // Closing it resets it, too.
            tracing::warn!(device = %self.device.address(), %error, "the function could not be reset yet");
        }
        drop(mappings);
        self.wake();
        true
    }

    /// What is known of it. Waits for nothing.
    pub fn status(&self) -> LentStatus {
        LentStatus {
            device: self.device.address(),
            offset: self.control,
            epoch: self.epoch,
            requests: self.carried_out.load(Ordering::Relaxed),
            refused: self.refused.load(Ordering::Relaxed),
            resets: self.resets.load(Ordering::Relaxed),
            trouble: locked(&self.trouble).clone(),
        }
    }
}

/// What was done for a borrower.
enum Served {
    /// All that it asked for.
    All,
    /// One request; more may be there.
    One,
    /// The function is not lent any more.
    Ended,
}

/// Where a device's MSI-X table is, and the registers of that BAR.
fn table_of(
    address: PciAddress,
    image: &Image,
    bars: &[BarMap],
) -> Result<(MsixTable, Arc<MappedRegisters>), MetalError> {
    let not_lendable = |reason: &str| MetalError::NotLendable { address, reason: reason.into() };
    let msix = image
        .msix
        .ok_or_else(|| not_lendable("it has no MSI-X, and other interrupts do not pass an NTB"))?;
    let holds_table = |bar: &&BarMap| {
        let end = u64::from(msix.offset) + msix::ENTRY_SIZE * u64::from(msix.entries);
        bar.number == msix.bar && end <= bar.size
    };
    let table = bars.iter().find(holds_table);
    let table = table.ok_or_else(|| not_lendable("its MSI-X table is in no BAR"))?;
    Ok((msix, table.registers.clone()))
}
