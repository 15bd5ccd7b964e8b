//! What a device model is: the trait that every function in `devices` implements, and the
//! services it is handed.
//!
//! A model never sees a socket, a lease or another thread. It is called from one thread, which
//! owns it; memory, interrupts and time come in by [`Bus`] with each call. Whatever a guest does
//! wrong is answered as the device's own protocol says, never as a Rust error: nobody above could
//! do better.

use std::os::fd::{BorrowedFd, OwnedFd};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use rackbus_memory::{Carried, CarriedSession, DmaSpace, Handles, ResourceHandle};

use crate::interrupts::Interrupts;
use crate::operations::Operations;
use crate::polled::{NotPolled, WatchedRegisters};
use crate::state::{ModelState, RestoreError, SaveError};
use crate::user::UserWatch;

/// The world as one function sees it during one call.
#[derive(Debug, Clone, Copy)]
pub struct Bus<'a> {
    /// Its IOMMU domain: the only way to memory.
    pub dma: &'a DmaSpace,
    /// The function's interrupts, to be signalled.
    pub irq: &'a Interrupts,
    /// Its user, who may be gone; see [`Function::poll`].
    pub user: &'a UserWatch,
    /// Monotonic time in nanoseconds. During [`Function::poll`] it may lag by a few microseconds.
    pub now_ns: u64,
}

/// Why a function is reset.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ResetKind {
    /// Function-level reset, asked for by the driver that uses it (PCIe base 6.0, section 6.6.2).
    FunctionLevel,
    /// The user opened, closed or lost the function. Besides the reset, nothing of the old user's
    /// state may remain: settings that survive resets, logs, identifiers. What the device stores
    /// on purpose (a drive's blocks) stays.
    Scrub,
}

/// What a [`Function::poll`] found.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Work {
    /// Something was done: poll again at once.
    Done,
    /// Nothing to do now, but a busy peer may put work into memory that only polling sees: worth
    /// spinning for a while.
    Idle,
    /// Nothing to do, and nothing that polling could see: whatever comes next rings (a register
    /// write, [`Function::wake_fd`], or the time given, in nanoseconds of [`Bus::now_ns`]).
    Asleep(Option<u64>),
    /// As [`Idle`](Work::Idle), where nobody rings: whoever puts work where polling sees it does no more than that.
    /// Worth spinning for a while; a sleep after that lasts so many nanoseconds at most.
    Watch(u64),
}

/// A function's base address register.
#[derive(Debug, Clone)]
pub struct Bar {
    /// Its number, 0 to 5. A 64-bit BAR takes the next number too.
    pub index: u8,
    /// Its size in bytes: a power of two, at least 4096.
    pub size: u64,
    /// Whether it is a 64-bit memory BAR.
    pub is_64bit: bool,
    /// Whether reads have no side effects (PCIe base 6.0, section 7.5.1.2.1).
    pub prefetchable: bool,
    /// Parts that a driver may map and touch without anybody trapping it.
    pub mappable: Option<Mappable>,
}

/// The memory behind a BAR. Its model may put other memory in its place when the function is scrubbed,
/// and at no other time: who uses the function maps the same all along.
#[derive(Debug, Clone)]
pub struct BarMemory(Arc<Mutex<Given>>);

#[derive(Debug)]
struct Given {
    file: Option<OwnedFd>,
    /// Somebody has been given a descriptor of it.
    given: bool,
}

impl BarMemory {
    /// The memory in `file`.
    pub fn new(file: impl Into<OwnedFd>) -> BarMemory {
        BarMemory(Arc::new(Mutex::new(Given { file: Some(file.into()), given: false })))
    }

    /// Whoever asks from now on gets `file`, or nothing.
    pub fn replace(&self, file: Option<OwnedFd>) {
        *self.lock() = Given { file, given: false };
    }

    /// Whether there is any.
    pub fn is_there(&self) -> bool {
        self.lock().file.is_some()
    }

    /// Whether anybody may have what there is mapped.
    pub fn is_given(&self) -> bool {
        self.lock().given
    }

    /// A descriptor to map it by.
    ///
    /// # Errors
    /// When there is none, or the process has no descriptors left.
    pub fn descriptor(&self) -> std::io::Result<OwnedFd> {
        let mut memory = self.lock();
        memory.given = true;
        match &memory.file {
            Some(file) => file.try_clone(),
            None => Err(std::io::Error::other("the function has no memory now")),
        }
    }

    /// The same, to be passed beside a message.
    ///
    /// # Errors
    /// As [`descriptor`](BarMemory::descriptor).
    pub fn handle(&self) -> std::io::Result<ResourceHandle> {
        self.descriptor().map(ResourceHandle::of_descriptor)
    }

    fn lock(&self) -> MutexGuard<'_, Given> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The part of a BAR that is plain shared memory.
#[derive(Debug, Clone)]
pub struct Mappable {
    /// The memory: as large as the BAR, used only within `areas`.
    pub memory: BarMemory,
    /// Offset and length of each mappable part, page aligned.
    pub areas: Vec<(u64, u64)>,
}

/// A vendor-specific capability (PCIe base 6.0, section 7.9.4).
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct VendorCapability {
    /// What is behind its length.
    pub body: Vec<u8>,
    /// Whether software reaches the function's BARs by it, as virtio defines that
    /// ([`PCI_ACCESS`](rackbus_spec::virtio::capability::PCI_ACCESS)).
    pub access: bool,
}

/// Who a function is: the fixed part of its configuration space and its resources.
#[derive(Debug, Clone)]
pub struct FunctionInfo {
    /// PCI vendor id: with the device id, what drivers recognise it by.
    pub vendor_id: u16,
    /// PCI device id, one of the vendor's.
    pub device_id: u16,
    /// PCI id of who made the card or board.
    pub subsystem_vendor_id: u16,
    /// The card's or board's id, by its maker.
    pub subsystem_id: u16,
    /// Revision of the device, 0 where there is but one.
    pub revision: u8,
    /// Class code: base class, sub-class, programming interface.
    pub class: [u8; 3],
    /// The BARs the model answers for. BAR 4 is taken by the MSI-X table, unless the model has a BAR 4 of its own:
    /// then the table is in the upper half of BAR 0, for which the model does not answer.
    pub bars: Vec<Bar>,
    /// MSI-X vectors, 1 to 2048.
    pub msix_vectors: u16,
    /// MSI vectors: a power of two up to 32, or 0 for a class whose drivers know MSI-X and the pin
    /// only.
    pub msi_vectors: u16,
    /// Its own capabilities: as many as there is room for in the first 256 bytes of configuration space.
    pub vendor: Vec<VendorCapability>,
    /// Device serial number (PCIe base 6.0, section 7.9.3).
    pub serial: u64,
}

/// Whether a device works as it should: said by its model when that changes, read by anybody.
#[derive(Debug, Clone, Default)]
pub struct Health(Arc<Mutex<Option<String>>>);

impl Health {
    /// What is wrong with it, for people.
    pub fn trouble(&self) -> Option<String> {
        self.lock().clone()
    }

    /// Something is wrong with it from now on.
    pub fn fail(&self, trouble: &str) {
        *self.lock() = Some(trouble.to_owned());
    }

    /// Nothing is wrong with it any more.
    pub fn recover(&self) {
        *self.lock() = None;
    }

    fn lock(&self) -> MutexGuard<'_, Option<String>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// What a front on another host needs to run in the place of this function.
#[derive(Debug)]
pub struct MediumOffer {
    /// The class, by which the front is chosen.
    pub class: &'static str,
    /// What the front shows, as its class writes it (JSON).
    pub description: String,
    /// What leads to the medium, as its class has it: an exchange, or the medium's own memory. None
    /// where the medium's operations are carried.
    pub handles: Handles,
}

/// How a front reaches the medium that another node offered.
#[derive(Debug)]
pub enum MediumAccess {
    /// By the handles of the [offer](MediumOffer::handles).
    Handles(Handles),
    /// By operations that this carries.
    Carried(Carried),
}

/// Why a function's medium cannot be separated from it.
#[derive(Debug, thiserror::Error)]
pub enum MediumRefused {
    /// Functions of its class run beside their medium only.
    #[error("functions of this class run at their lender only")]
    Inseparable,
    /// A front has it already.
    #[error("another front has the medium")]
    InUse,
    /// Memory or descriptors could not be obtained.
    #[error(transparent)]
    Exchange(#[from] rackbus_memory::ExchangeError),
    /// Its files could not be opened.
    #[error("the medium's files: {0}")]
    Files(std::io::Error),
}

/// A device model. See the module's text for who calls it and how.
pub trait Function: Send {
    /// Who it is. The answer never changes.
    fn info(&self) -> &FunctionInfo;

    /// Whether it works as it should: always the same handle.
    fn health(&self) -> Health {
        Health::default()
    }

    /// What it has done: always the same handle. Nothing is counted by a class that does not say so.
    fn operations(&self) -> Operations {
        Operations::default()
    }

    /// Bytes of memory of this process' that it gives its user, for example as a BAR.
    fn own_memory(&self) -> u64 {
        0
    }

    /// A driver reads `data.len()` bytes at `offset` of BAR `bar`; the range is inside the BAR.
    /// `data` comes zeroed; what the model leaves alone reads as zero.
    fn bar_read(&mut self, bus: &Bus<'_>, bar: u8, offset: u64, data: &mut [u8]);

    /// A driver writes `data` at `offset` of BAR `bar`; the range is inside the BAR.
    fn bar_write(&mut self, bus: &Bus<'_>, bar: u8, offset: u64, data: &[u8]);

    /// Back to the state after power-on, as far as `kind` asks. What is under way is given up, and
    /// waited for only as far as it cannot be: on return no DMA is in flight, as after
    /// [`quiesce`](Function::quiesce).
    fn reset(&mut self, bus: &Bus<'_>, kind: ResetKind);

    /// Does a bounded amount of the work that is there now. What is found in memory of the host's
    /// may be looked at; before it is acted on, and before anything is written there, the model
    /// calls [`UserWatch::before_access`].
    fn poll(&mut self, bus: &Bus<'_>) -> Work;

    /// The engine is about to sleep. Arrange that work which comes from now on rings, then look
    /// once more: false when there is work already.
    fn park(&mut self, bus: &Bus<'_>) -> bool;

    /// Readable when asynchronous work of the model's own has finished.
    fn wake_fd(&self) -> Option<BorrowedFd<'_>>;

    /// Hands the medium to a front elsewhere, until the next reset: from now on
    /// [`poll`](Function::poll) serves that front, and the function itself does nothing. Where the front's
    /// process shares no memory with this one, `carried` carries the medium's operations.
    ///
    /// # Errors
    /// [`MediumRefused`]; the function continues as it was.
    fn serve_medium(&mut self, carried: Option<Carried>) -> Result<MediumOffer, MediumRefused> {
        let _ = carried;
        Err(MediumRefused::Inseparable)
    }

    /// The BARs whose memory goes along with a medium that is not carried: a front elsewhere has that mapped, and its user.
    fn front_memory(&self) -> &'static [u8] {
        &[]
    }

    /// Before the function is [restored](Function::restore): this carries the medium's operations, if a front on
    /// another machine has it.
    fn carried_by(&mut self, session: CarriedSession) {
        drop(session);
    }

    /// Gives the registers of BAR `bar` as memory as well, until the user is gone ([`ResetKind::Scrub`]) or
    /// [`retire_registers`](Function::retire_registers): a descriptor, and their length in bytes. Asked for again,
    /// it is the same memory. See [`polled`](crate::polled).
    ///
    /// # Errors
    /// [`NotPolled`]; the function continues as it was.
    fn poll_registers(&mut self, _bus: &Bus<'_>, _bar: u8) -> Result<(OwnedFd, u64), NotPolled> {
        Err(NotPolled::Class)
    }

    /// The registers in memory are looked at no more, and read all ones: for their user the device is gone.
    fn retire_registers(&mut self) {}

    /// Looks no more at the registers that were given as memory, which stay as they are: what is known of them. Nothing
    /// where none were given. Comes after a [save](Function::save).
    fn release_registers(&mut self) -> Option<WatchedRegisters> {
        None
    }

    /// Looks at registers that were [released](Function::release_registers), by this function or the one in another process
    /// whose state was [restored](Function::restore).
    ///
    /// # Errors
    /// [`NotPolled`] when they are none of this function's.
    fn watch_registers(&mut self, registers: WatchedRegisters) -> Result<(), NotPolled> {
        drop(registers);
        Err(NotPolled::Class)
    }

    /// On return no DMA of the function is in flight: what uses memory of the host has finished,
    /// and slices kept from [`Bus::dma`] are dropped or will be resolved again. Work that uses none
    /// continues. Called before mappings go away.
    fn quiesce(&mut self, bus: &Bus<'_>);

    /// All that the model knows of its user, as a value, with descriptors for whoever opens its
    /// medium next. What is under way is not waited for: it is part of the value, to be done again.
    /// The model itself stays as it is; where all went well, nothing but
    /// [`reset`](Function::reset) is called afterwards, which gives up what is under way, unless the value
    /// is taken back: then the model continues as if it had not been saved.
    ///
    /// # Errors
    /// [`SaveError`]; the function continues as it was.
    fn save(&mut self, _bus: &Bus<'_>) -> Result<(ModelState, Vec<OwnedFd>), SaveError> {
        Err(SaveError::Unsupported)
    }

    /// Of a function that was [saved](Function::save): whether the system has ended all that the model asked it for.
    /// Until then the process cannot become another program: `execve(2)` waits for reads and writes that are with
    /// a device, and no signal ends that.
    fn is_settled(&mut self) -> bool {
        true
    }

    /// What was [saved](Function::save) is of no use to anybody else any more: all that the model says and is asked is
    /// of its own life again.
    fn take_back(&mut self) {}

    /// Goes on from a saved state. The model is as after power-on, memory and interrupts are as
    /// they were when it was saved. What was under way is done again as if it was never begun, and
    /// completed once.
    ///
    /// # Errors
    /// [`RestoreError`]; the model is to be reset or dropped then.
    fn restore(&mut self, _bus: &Bus<'_>, _state: &ModelState) -> Result<(), RestoreError> {
        Err(RestoreError::Unsupported)
    }
}
