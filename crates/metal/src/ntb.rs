//! An end of an NTB with the registers of Intel's third generation (8086:201c), held by VFIO: a lender's, whose functions
//! go through it, or one of a link's two, whose messages do.
//!
//! Source: Linux, `drivers/ntb/hw/intel/ntb_hw_gen3.h` (facts), as in `devices::ntb::map`, which models them.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;

use rackbus_memory::{Access, Event, MappedRegisters, MemoryHandle};
use rackbus_spec::pcie::header;
use rackbus_spec::vfio_user::region;
use rackbus_vfio::{Container, Facts, InterruptIndex, PciAddress, RangeTarget, VfioDevice};

use crate::error::MetalError;
use crate::plan::WindowPlan;
use crate::window::MSI_SIZE;

/// Subsystem of a bridge in software (`rackbus ntb`).
const IN_SOFTWARE: [u8; 4] = [0xf4, 0x1a, 0x00, 0x11];
/// The doorbell that the other side rings.
pub const DOORBELL: u32 = 0;

/// Configuration space: log2 of the sizes of this end's windows and of the other end's.
const WINDOW_SIZES: u64 = 0xd0;
/// Configuration space: link status; its bit 13 is set while the link is up.
const LINK_STATUS: u64 = 0x1a2;
const LINK_ACTIVE: u16 = 1 << 13;
/// Registers of BAR 0.
const CONTROL: u64 = 0x0000;
const INBOUND_BASE: [u64; 2] = [0x0010, 0x0020];
const INBOUND_LIMIT: [u64; 2] = [0x0018, 0x0028];
const STATUS: u64 = 0x0040;
const DISABLED: u64 = 0x0048;
const VECTORS: u64 = 0x00d0;
const PEER_DOORBELLS: u64 = 0x0100;
const OUTBOUND_LIMIT: [u64; 2] = [0x4018, 0x4028];
const SECONDARY_COMMAND: u64 = 0x4504;
const SECONDARY_BARS: [u64; 2] = [0x4518, 0x4520];
const REGISTERS: u64 = 0x8000;
/// [`CONTROL`]: configuration locked; the link switched off.
const CONTROL_OFF: u32 = 0b11;
/// [`CONTROL`]: snooping, of both windows in both directions.
const CONTROL_SNOOP: u32 = 1 << 2 | 1 << 4 | 1 << 6 | 1 << 8;
const ALL_DOORBELLS: u64 = (1 << 33) - 1;
/// BARs of the windows.
const WINDOWS: [u32; 2] = [region::BAR0 + 2, region::BAR0 + 4];

/// What a function of the machine reaches of a borrower through an NTB, and the container in which it reaches all of that.
#[derive(Debug, Clone)]
pub(crate) struct BorrowerWindows {
    pub container: Arc<Container>,
    pub plan: WindowPlan,
    interrupts: Arc<MappedRegisters>,
    /// Window 2, which leads to the borrower's memory.
    pub memory: Arc<MappedRegisters>,
    /// The same, for the record of what is lent.
    pub handle: MemoryHandle,
}

impl BorrowerWindows {
    /// The borrower's local APICs; `None` where window 1 has not all of them.
    pub fn local_apics(&self) -> Option<RangeTarget> {
        RangeTarget::part(&self.interrupts, self.plan.local_apics()?, MSI_SIZE)
    }
}

/// An end of an NTB.
#[derive(Debug)]
pub struct Ntb {
    device: VfioDevice,
    registers: Arc<MappedRegisters>,
    /// Window 1: a borrower's local APICs, or the arena of a link's other end.
    outbound: Arc<MappedRegisters>,
    event: Event,
    plan: WindowPlan,
    direct: bool,
}

impl Ntb {
    /// Opens the NTB into a container. The link is down until it is [started](Ntb::start).
    ///
    /// # Errors
    /// When it is no NTB that is known, its windows cannot be used, or VFIO refuses.
    pub fn open(container: &Arc<Container>, facts: Facts) -> Result<Ntb, MetalError> {
        let Facts { address, vendor, device, .. } = facts;
        if !facts.is_ntb() {
            return Err(MetalError::NotAnNtb { address, vendor, device });
        }
        let device = VfioDevice::open(container, facts)?;
        let event = Event::new();
        let event = event.map_err(|cause| MetalError::System { what: "making an event", cause })?;
        Ntb::with(device, event, true)
    }

    /// Goes on with the NTB that another process [started](Ntb::start), by its file in a container that was passed on, and the
    /// event of its doorbell. Nothing about it changes.
    ///
    /// # Errors
    /// When the file is not this NTB's, or the NTB is not as it was set up.
    pub fn again(
        container: &Arc<Container>,
        facts: Facts,
        file: OwnedFd,
        doorbell: OwnedFd,
    ) -> Result<Ntb, MetalError> {
        let device = VfioDevice::inherited(container, facts, file)?;
        let failed = |cause| MetalError::System { what: "a doorbell that was passed on", cause };
        let ntb = Ntb::with(device, Event::adopt(doorbell).map_err(failed)?, false)?;
        let address = ntb.address();
        let reason = "it was reset meanwhile";
        ntb.works().then_some(ntb).ok_or(MetalError::Windows { address, reason })
    }

    /// An NTB that is open, let loose as a new one is, or as it was.
    fn with(device: VfioDevice, event: Event, is_new: bool) -> Result<Ntb, MetalError> {
        let address = device.address();
        let unusable = |reason| MetalError::Windows { address, reason };
        let mut sizes = [0; 4];
        device.read(region::CONFIG, WINDOW_SIZES, &mut sizes)?;
        let own = WINDOWS.map(|window| device.region(window).size);
        let others = 1u64.checked_shl(sizes[2].into()).unwrap_or(0);
        let plan = WindowPlan::new(others, own[0], own[1])
            .ok_or_else(|| unusable("its windows have sizes that no windows have"))?;
        let registers = device.map(region::BAR0, 0, REGISTERS)?;
        if is_new {
            // Memory is mapped before the function is let loose.
            device.enable(true)?;
            device.wire(InterruptIndex::Msix, 0, &[Some(event.as_fd())])?;
        }
        let outbound = device.map(WINDOWS[0], 0, own[0])?;
        let mut subsystem = [0; 4];
        device.read(region::CONFIG, header::SUBSYSTEM_VENDOR_ID.into(), &mut subsystem)?;
        let direct = subsystem == IN_SOFTWARE;
        Ok(Ntb { device, registers, outbound, event, plan, direct })
    }

    /// Maps its windows for the devices of its container that come.
    ///
    /// # Errors
    /// When VFIO refuses.
    pub fn map_windows(&self) -> Result<(), MetalError> {
        let access = Access::READ | Access::WRITE;
        let memory = self.map_memory()?;
        self.container().map(self.plan.interrupts.start, self.outbound.clone(), access)?;
        Ok(self.container().map(self.plan.memory.start, memory, access)?)
    }

    fn map_memory(&self) -> Result<Arc<MappedRegisters>, MetalError> {
        Ok(self.device.map(WINDOWS[1], 0, self.device.region(WINDOWS[1]).size)?)
    }

    /// What a function of the machine reaches through it.
    ///
    /// # Errors
    /// When the process has no descriptors or addresses left.
    pub(crate) fn windows(&self) -> Result<BorrowerWindows, MetalError> {
        Ok(BorrowerWindows {
            container: self.container().clone(),
            plan: self.plan.clone(),
            interrupts: self.outbound.clone(),
            memory: self.map_memory()?,
            handle: self.memory()?,
        })
    }

    /// Opens this end of the link: accesses of the other side arrive in the plan's inbound range, as far as something is
    /// mapped there.
    ///
    /// # Errors
    /// When the NTB does not take it, or does not answer.
    pub fn start(&self) -> Result<(), MetalError> {
        self.write(DISABLED, ALL_DOORBELLS);
        self.translate(0, self.plan.inbound.start)?;
        // Nothing of this host is behind the other side's window 2.
        self.set(SECONDARY_COMMAND, 0b110);
        // The first vector is the doorbell's. The link's own one is looked at by nobody: what is gone is seen by time.
        let vectors = self.registers.read(VECTORS).unwrap_or(0);
        self.set(VECTORS, vectors & !0xff);
        self.write(STATUS, ALL_DOORBELLS);
        self.write(DISABLED, ALL_DOORBELLS & !(1 << DOORBELL));
        let control = self.registers.read(CONTROL).unwrap_or(0);
        self.set(CONTROL, control & !CONTROL_OFF | CONTROL_SNOOP);
        Ok(())
    }

    /// Has accesses of the other side through its window `n` arrive at `base`, as far as the window is wide.
    fn translate(&self, n: usize, base: u64) -> Result<(), MetalError> {
        let mut low_high = [0; 8];
        let bar = 0x10 + 4 * u64::from(WINDOWS[n]);
        self.device.read(region::CONFIG, bar, &mut low_high)?;
        let size = self.device.region(WINDOWS[n]).size;
        let own = u64::from_le_bytes(low_high) & !0xf;
        let outer = self.read(SECONDARY_BARS[n]) & !0xf;
        self.write(INBOUND_BASE[n], base);
        // Limits are addresses, counted from where the BARs are. What a guest's kernel shows as BAR may be VFIO's own idea
        // of it; without a limit the whole window is open, and the IOMMU says what is behind it.
        let end = |bar: u64| if bar == 0 { Some(0) } else { bar.checked_add(size) };
        let (Some(limit), Some(outer_limit)) = (end(own), outer.checked_add(size)) else {
            return Err(MetalError::Windows {
                address: self.device.address(),
                reason: "its registers read all ones: it does not answer",
            });
        };
        self.write(INBOUND_LIMIT[n], limit);
        self.write(OUTBOUND_LIMIT[n], outer_limit);
        match self.read(INBOUND_BASE[n]) == base {
            true => Ok(()),
            false => Err(MetalError::Windows {
                address: self.device.address(),
                reason: "it does not take a translation",
            }),
        }
    }

    /// Copies of the descriptors of its function and of its doorbell's event, for a process that goes on with it.
    ///
    /// # Errors
    /// When the process has no descriptors left.
    pub fn descriptors(&self) -> std::io::Result<[OwnedFd; 2]> {
        let copy = |fd: BorrowedFd<'_>| fd.try_clone_to_owned();
        Ok([copy(self.device.as_fd())?, copy(self.event.as_fd())?])
    }

    /// Where what is behind its windows is.
    pub fn plan(&self) -> &WindowPlan {
        &self.plan
    }

    /// Whether it still is as it was set up.
    pub fn works(&self) -> bool {
        self.read(INBOUND_BASE[0]) == self.plan.inbound.start
    }

    /// Whether window 2 reaches the other host's memory without its IOMMU, as that of a bridge in software does. Its
    /// translation cannot be set.
    pub fn is_direct(&self) -> bool {
        self.direct
    }

    /// Window 1, as this process stores to it: what models raise interrupts by, or a link's way to the other side.
    pub fn outbound(&self) -> &Arc<MappedRegisters> {
        &self.outbound
    }

    /// Rings the other side's doorbell.
    pub fn ring(&self) {
        self.set(PEER_DOORBELLS + 4 * u64::from(DOORBELL), 1);
    }

    /// Window 2, as models reach the borrower's memory by it.
    ///
    /// # Errors
    /// When the process has no descriptors left.
    pub fn memory(&self) -> Result<MemoryHandle, MetalError> {
        Ok(self.device.memory(WINDOWS[1])?)
    }

    /// PCI address of the NTB.
    pub fn address(&self) -> PciAddress {
        self.device.address()
    }

    /// The container that it is in.
    pub fn container(&self) -> &Arc<Container> {
        self.device.container()
    }

    /// Whether the link is up.
    ///
    /// # Errors
    /// When it does not answer.
    pub fn link_is_up(&self) -> Result<bool, MetalError> {
        let mut status = [0; 2];
        self.device.read(region::CONFIG, LINK_STATUS, &mut status)?;
        let status = u16::from_le_bytes(status);
        Ok(status != u16::MAX && status & LINK_ACTIVE != 0)
    }

    /// Whether the link went up or down since this was asked last, which the adapter keeps, or does not answer.
    pub fn link_changed(&self) -> bool {
        let changed = self.registers.read(STATUS + 4).is_none_or(|status| status & 1 != 0);
        if changed {
            self.set(STATUS + 4, 1);
        }
        changed
    }

    /// Takes note of the doorbell, after its event rang: it can ring again. False when it has not rung.
    pub fn answer(&self) -> bool {
        let rang = self.event.drain();
        if rang {
            self.write(STATUS, 1 << DOORBELL);
        }
        rang
    }

    fn read(&self, at: u64) -> u64 {
        let word = |at| u64::from(self.registers.read(at).unwrap_or(u32::MAX));
        word(at) | word(at + 4) << 32
    }

    fn write(&self, at: u64, value: u64) {
        self.set(at, value as u32);
        self.set(at + 4, (value >> 32) as u32);
    }

    /// Writes a register of 32 bits. All of them are inside of what is mapped.
    fn set(&self, at: u64, value: u32) {
        self.registers.write(at, value);
    }
}

/// Readable when the other side rang.
impl AsFd for Ntb {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.event.as_fd()
    }
}

impl Drop for Ntb {
    fn drop(&mut self) {
        // The other side is told by the link, before what it reaches is taken away.
        self.write(DISABLED, ALL_DOORBELLS);
        let control = self.registers.read(CONTROL).unwrap_or(0);
        self.set(CONTROL, control | CONTROL_OFF);
    }
}
