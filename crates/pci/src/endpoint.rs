//! One whole function: a device model with its configuration space, interrupts and DMA space.
//!
//! The endpoint is where PCI's own rules live: no memory access while memory space is off, no DMA
//! while bus mastering is off, what a function-level reset resets, and the order *quiesce, then
//! unmap* that makes a revoked window stay untouched (invariant I4). It belongs to one thread.

mod config;
mod registers;
mod saved;
mod user;
mod windows;

use std::os::fd::{BorrowedFd, OwnedFd};
use std::time::Instant;

use config::with_msix_bar;
use rackbus_fabric::{Lending, LoanError};
use rackbus_memory::{
    Access, Carried, CarriedSession, DmaSpace, MapError, MemoryHandle, UnmapError, ticks,
};
use tracing::Span;

use crate::config::{ConfigSpace, MSIX_BAR, MsixPlace, msix_layout};
use crate::function::{
    Bar, Bus, Function, FunctionInfo, Health, MediumOffer, MediumRefused, ResetKind, Work,
};
use crate::interrupts::{InterruptLoans, Interrupts, LoanChange, WiringError};
use crate::operations::Operations;
use crate::polled::WatchedRegisters;
use crate::user::UserWatch;

/// Where an endpoint has its time from.
pub trait Clock: Send {
    /// Monotonic time in nanoseconds.
    fn now_ns(&self) -> u64;

    /// Time as [`ticks::now`] gives it.
    fn ticks(&self) -> u64;
}

/// The system's clock, from this moment on.
struct Monotonic(Instant);

impl Clock for Monotonic {
    #[inline]
    fn now_ns(&self) -> u64 {
        u64::try_from(self.0.elapsed().as_nanos()).unwrap_or(u64::MAX)
    }

    #[inline]
    fn ticks(&self) -> u64 {
        ticks::now()
    }
}

/// The region of a PCI function that an access addresses.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum FunctionRegion {
    /// A base address register's memory.
    Bar(u8),
    /// The function's configuration space.
    Config,
}

/// A change of the interrupt wiring, as vfio-user's `SET_IRQS` expresses it.
#[derive(Debug)]
pub enum IrqChange {
    /// Wires vectors of MSI-X or MSI from the given one on.
    WireVectors(u32, Vec<Option<OwnedFd>>),
    /// Takes all wires of vectors away.
    UnwireVectors,
    /// Fires vectors by software, for tests of the path.
    FireVectors(Vec<u16>),
    /// Wires INTx, or takes its wire away.
    WireIntx(Option<OwnedFd>),
    /// Masks or unmasks INTx.
    MaskIntx(bool),
    /// Fires INTx by software.
    FireIntx,
}

/// An access that is not inside what it addresses.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("{length} bytes at {offset:#x} are not inside {region:?}")]
pub struct OutOfRegion {
    /// The region that was addressed.
    pub region: FunctionRegion,
    /// Offset of the access in its region, in bytes.
    pub offset: u64,
    /// Its length in bytes.
    pub length: usize,
}

/// A function as a bus sees it.
pub struct Endpoint {
    function: Box<dyn Function>,
    config: ConfigSpace,
    dma: DmaSpace,
    irq: Interrupts,
    /// What its user has wired to them.
    interrupt_loans: InterruptLoans,
    /// The MSI-X table's memory. Its user emulates the table itself (VFIO does); the bytes are
    /// kept so that software which looks at them sees what it wrote.
    msix_table: Vec<u8>,
    /// BAR and offset of the MSI-X table.
    msix: MsixPlace,
    now_ns: u64,
    user: UserWatch,
    /// What the user lends its memory from.
    lending: Lending,
    /// What is logged for its user is about this.
    about: Span,
    /// It was saved: what it was goes on elsewhere, and here nothing happens any more.
    ended: bool,
    /// The registers that its user has as memory, while it is saved: the model looks at them no more.
    released: Option<WatchedRegisters>,
    /// The BAR with the registers that were given as memory last.
    polled_bar: u8,
    /// The memory of a device that a state is to be restored with.
    given: Option<MemoryHandle>,
}

impl std::fmt::Debug for Endpoint {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Endpoint").field("info", self.info()).finish_non_exhaustive()
    }
}

impl Endpoint {
    /// A function around `model`, as after power-on.
    pub fn new(model: Box<dyn Function>) -> Self {
        Endpoint::with_clock(model, Box::new(Monotonic(Instant::now())))
    }

    /// As [`new`](Endpoint::new), with time from `clock`: a simulation's.
    pub fn with_clock(model: Box<dyn Function>, clock: Box<dyn Clock>) -> Self {
        let info = with_msix_bar(model.info());
        let msix = MsixPlace::of(model.info());
        let vectors = info.msix_vectors;
        let (_, pba) = msix_layout(vectors);
        let dma = DmaSpace::new();
        Endpoint {
            config: ConfigSpace::with(&info, msix, &[]),
            irq: Interrupts::under(vectors, dma.revoker().clone()),
            interrupt_loans: InterruptLoans::default(),
            user: UserWatch::new(clock, dma.revoker().clone()),
            dma,
            msix,
            msix_table: vec![0; usize::try_from(pba).expect("at most 32 KiB")],
            now_ns: 0,
            function: model,
            lending: Lending::alone(),
            about: Span::none(),
            ended: false,
            released: None,
            polled_bar: 0,
            given: None,
        }
    }

    /// Who the function is.
    pub fn info(&self) -> &FunctionInfo {
        self.function.info()
    }

    /// Whether its device works as it should.
    pub fn health(&self) -> Health {
        self.function.health()
    }

    /// What its function has done.
    pub fn operations(&self) -> Operations {
        self.function.operations()
    }

    /// All BARs: the model's, and the one that holds the MSI-X table.
    pub fn bars(&self) -> Vec<Bar> {
        with_msix_bar(self.info()).bars
    }

    /// Its DMA space, to look at.
    pub fn dma(&self) -> &DmaSpace {
        &self.dma
    }

    /// A driver reads. Where the function does not answer, reads are all ones.
    ///
    /// # Errors
    /// When the range is not inside the region; `data` is untouched then.
    pub fn read(
        &mut self,
        region: FunctionRegion,
        offset: u64,
        data: &mut [u8],
    ) -> Result<(), OutOfRegion> {
        self.check(region, offset, data.len())?;
        self.tick();
        match region {
            _ if self.ended => data.fill(0xff),
            FunctionRegion::Config => self.read_config(offset, data),
            FunctionRegion::Bar(_) if !self.config.answers_memory() => data.fill(0xff),
            FunctionRegion::Bar(bar) => {
                if let Some(at) = self.in_msix(bar, offset) {
                    self.read_msix(at, data);
                    return Ok(());
                }
                data.fill(0);
                let bus =
                    Bus { dma: &self.dma, irq: &self.irq, user: &self.user, now_ns: self.now_ns };
                self.function.bar_read(&bus, bar, offset, data);
            }
        }
        Ok(())
    }

    /// A driver writes. Where the function does not answer, writes are dropped.
    ///
    /// # Errors
    /// When the range is not inside the region; nothing is written then.
    pub fn write(
        &mut self,
        region: FunctionRegion,
        offset: u64,
        data: &[u8],
    ) -> Result<(), OutOfRegion> {
        self.check(region, offset, data.len())?;
        self.tick();
        match region {
            _ if self.ended => {}
            FunctionRegion::Config => match self.reached(offset, data.len()) {
                Some((bar, place)) => {
                    let bus = Bus {
                        dma: &self.dma,
                        irq: &self.irq,
                        user: &self.user,
                        now_ns: self.now_ns,
                    };
                    self.function.bar_write(&bus, bar, place, data);
                }
                None => self.write_config(offset, data),
            },
            FunctionRegion::Bar(_) if !self.config.answers_memory() => {}
            FunctionRegion::Bar(bar) => {
                if let Some(at) = self.in_msix(bar, offset) {
                    self.write_msix(at, data);
                    return Ok(());
                }
                let bus =
                    Bus { dma: &self.dma, irq: &self.irq, user: &self.user, now_ns: self.now_ns };
                self.function.bar_write(&bus, bar, offset, data);
            }
        }
        Ok(())
    }

    /// Maps memory that the user lends, or a range that no memory is behind. To map the same again
    /// changes nothing, but where that lost its memory: then it has what is there now.
    ///
    /// # Errors
    /// [`MapError`]; nothing changes then.
    pub fn map(
        &mut self,
        iova: u64,
        length: u64,
        access: Access,
        memory: Option<MemoryHandle>,
    ) -> Result<(), MapError> {
        if self.dma.has(iova, length, access, memory.as_ref()) {
            return Ok(());
        }
        let counted = memory.as_ref().map(|memory| self.lending.count(memory, length));
        let counted = counted.transpose().inspect_err(not_lent)?;
        // What is refused closes no windows.
        let prepared = self.dma.prepare(iova, length, access, memory.as_ref())?;
        if memory.is_some() {
            self.give_way(iova, length);
        }
        let loan = self.lending.lend(iova, length, access, memory).inspect_err(not_lent);
        drop(counted);
        self.dma.map_prepared(loan?, prepared)
    }

    /// Takes the mappings inside of a range away. On return nothing reads or writes their memory any more.
    ///
    /// # Errors
    /// When there is none, or one is inside in part.
    pub fn unmap(&mut self, iova: u64, length: u64) -> Result<(), UnmapError> {
        self.quiesce();
        self.dma.unmap(iova, length)
    }

    /// Takes all mappings of the user's away; returns how many there were.
    pub fn unmap_all(&mut self) -> usize {
        self.quiesce();
        self.dma.unmap_all()
    }

    /// Releases all memory of the user's; see [`DmaSpace::drop_memory`].
    pub fn drop_memory(&mut self) {
        self.quiesce();
        self.dma.drop_memory();
    }

    /// Changes the interrupt wiring.
    ///
    /// # Errors
    /// When a vector does not exist, a descriptor is not fit, or the function may not interrupt the user's host; nothing
    /// changes then.
    pub fn set_irqs(&mut self, change: IrqChange) -> Result<(), WiringError> {
        if self.dma.revoker().is_revoked() {
            // Nothing is raised any more, and the next user's front may have the same entries already.
            return self.irq.change(change);
        }
        let loans = self.interrupt_loans.prepare(&self.lending, &change)?;
        self.irq.change(change)?;
        self.hold_interrupts(loans);
        Ok(())
    }

    fn hold_interrupts(&mut self, loans: LoanChange) {
        let revoker = self.dma.revoker();
        loans.endings().for_each(|(place, loan)| revoker.keep_interrupt(place, loan));
        self.interrupt_loans.apply(loans);
    }

    /// Function-level reset, as the driver or its hypervisor asks for.
    pub fn reset(&mut self) {
        if self.ended {
            return;
        }
        self.tick();
        self.config.reset();
        self.irq.reset_levels();
        self.reset_function(ResetKind::FunctionLevel);
        self.apply_config();
    }

    /// Somebody truncated memory that was mapped, or took it away. If it is of this function, what
    /// its user lent is gone: all memory of it goes, and its driver finds a function that was reset.
    pub fn check_memory(&mut self) {
        if self.close_truncated_windows() {
            tracing::warn!("a BAR that was mapped for peer-to-peer was truncated");
        }
        if self.dma.truncated() {
            tracing::warn!("the user truncated memory it had mapped");
        } else if !self.dma.revoker().is_revoked() || self.dma.is_empty() {
            return;
        }
        self.drop_memory();
        self.reset();
    }

    /// Hands the function's medium to a front elsewhere, until the next [`scrub`](Endpoint::scrub).
    ///
    /// # Errors
    /// [`MediumRefused`].
    pub fn serve_medium(&mut self, carried: Option<Carried>) -> Result<MediumOffer, MediumRefused> {
        self.function.serve_medium(carried)
    }

    /// The BARs whose memory goes along with the medium ([`Function::front_memory`]).
    pub fn front_memory(&self) -> &'static [u8] {
        self.function.front_memory()
    }

    /// As [`Function::carried_by`], before the function is restored.
    pub fn carried_by(&mut self, session: CarriedSession) {
        self.function.carried_by(session);
    }

    /// Takes everything of the user's away: mappings, wires, registers, settings, logs. On return
    /// nothing of it can be reached, and the next user finds the function as new.
    pub fn scrub(&mut self) {
        self.user.is_of(None);
        // First, so that what was started is given up and not waited for.
        self.tick();
        match self.ended {
            false => self.reset_function(ResetKind::Scrub),
            // The medium is another's now: nothing but what is under way is given up.
            true => self.reset_function(ResetKind::FunctionLevel),
        }
        self.unmap_all();
        self.dma.close_windows();
        self.irq.clear();
        self.interrupt_loans.clear();
        self.config.reset();
        self.msix_table.fill(0);
        self.apply_config();
        self.about = Span::none();
    }

    /// Lets the device model work; `now_ns` as [`clock`](Endpoint::clock) gives it.
    #[inline]
    pub fn poll(&mut self, now_ns: u64) -> Work {
        if self.ended {
            return Work::Asleep(None);
        }
        self.now_ns = now_ns;
        let bus = Bus { dma: &self.dma, irq: &self.irq, user: &self.user, now_ns };
        self.function.poll(&bus)
    }

    /// Asks the model to make what comes next ring; false when there is work already.
    pub fn park(&mut self) -> bool {
        if self.ended {
            return true;
        }
        self.tick();
        self.user.before_access();
        let bus = Bus { dma: &self.dma, irq: &self.irq, user: &self.user, now_ns: self.now_ns };
        self.function.park(&bus)
    }

    /// What to sleep on besides the engine's own doorbell.
    pub fn wake_fd(&self) -> Option<BorrowedFd<'_>> {
        self.function.wake_fd()
    }

    /// Nanoseconds on its clock.
    #[inline]
    pub fn clock(&self) -> u64 {
        self.user.now_ns()
    }

    fn tick(&mut self) {
        self.now_ns = self.clock();
    }

    fn quiesce(&mut self) {
        self.tick();
        if self.ended {
            // What is under way is done again elsewhere and must not be answered here.
            return self.reset_function(ResetKind::FunctionLevel);
        }
        let bus = Bus { dma: &self.dma, irq: &self.irq, user: &self.user, now_ns: self.now_ns };
        self.function.quiesce(&bus);
    }

    fn reset_function(&mut self, kind: ResetKind) {
        let bus = Bus { dma: &self.dma, irq: &self.irq, user: &self.user, now_ns: self.now_ns };
        self.function.reset(&bus, kind);
    }

    fn check(&self, region: FunctionRegion, offset: u64, length: usize) -> Result<(), OutOfRegion> {
        let size = match region {
            FunctionRegion::Config => rackbus_spec::pcie::CONFIG_SPACE_SIZE as u64,
            FunctionRegion::Bar(MSIX_BAR) if self.msix.bar == MSIX_BAR => {
                msix_layout(self.info().msix_vectors).0
            }
            FunctionRegion::Bar(index) => {
                self.info().bars.iter().find(|b| b.index == index).map_or(0, |b| b.size)
            }
        };
        match offset.checked_add(length as u64) {
            Some(end) if end <= size => Ok(()),
            _ => Err(OutOfRegion { region, offset, length }),
        }
    }
}

/// Says why memory is not lent: its user hears of a number only.
fn not_lent(error: &LoanError) {
    if !matches!(error, LoanError::Space(_)) {
        tracing::warn!(%error, "memory is not lent");
    }
}
