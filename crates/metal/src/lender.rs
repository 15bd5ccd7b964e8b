//! Functions that are lent through an NTB to the host at its other end.
//!
//! All of them, and the lender's end of the NTB, are in one IOMMU domain, which contains the borrower's windows, their
//! BARs and control areas, and nothing of this host's. So a function that is told to access anything else causes a
//! fault, and what the borrower reaches through the NTB's window 1 is what was lent to it.
//!
//! Three kinds of threads serve them: one writes the heartbeats of all; one hears doorbells and looks after the link; and
//! each function has one of its own, as a reset takes its time.

use std::collections::BTreeMap;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, TryLockError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use rackbus_memory::{Event, Lending, MemoryHandle, Revoker, SharedMemory};
use rackbus_pci::vfio_user::ServedDevice;
use rackbus_vfio::{Container, Facts, VfioDevice};

use crate::device::{ReadyDevice, WindowDevice};
use crate::error::MetalError;
use crate::function::{ControlledFunction, OnTakenAway};
use crate::loan::WindowLoan;
use crate::machine::PhysicalDevice;
use crate::model::ModelledDevice;
use crate::ntb::Ntb;
use crate::plan::WindowRoom;
use crate::room::{LentRoom, LoanPlace};
use crate::saved::{
    LoanState, NtbWindowState, SavedDevice, SavedLoan, SavedWindow, WindowDescriptors, impossible,
};
use crate::window::{HEARTBEAT_MS, adopt_shown, beat_in};

/// How often the heartbeat changes: twice as often as the borrower expects.
pub(crate) const BEAT: Duration = Duration::from_millis(HEARTBEAT_MS / 2);
/// Between two looks whether the threads are done with a function, or with a lock.
pub(crate) const AGAIN: Duration = Duration::from_millis(1);

/// Why functions are taken away whose borrower's host may have started anew.
const LINK_DOWN: &str = "the link to its borrower's host went down";

pub(crate) fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The lock, unless somebody holds it for longer than `limit`.
pub(crate) fn locked_within<T>(mutex: &Mutex<T>, limit: Duration) -> Option<MutexGuard<'_, T>> {
    let begun = Instant::now();
    loop {
        match mutex.try_lock() {
            Ok(guard) => return Some(guard),
            Err(TryLockError::Poisoned(poisoned)) => return Some(poisoned.into_inner()),
            Err(TryLockError::WouldBlock) if begun.elapsed() > limit => return None,
            Err(TryLockError::WouldBlock) => std::thread::sleep(AGAIN),
        }
    }
}

/// Bytes of the borrower's window 1.
fn size_of(ntb: &Ntb) -> u64 {
    let inbound = &ntb.plan().inbound;
    inbound.end - inbound.start
}

/// An NTB whose other end may be lent functions.
#[derive(Debug)]
pub struct LentWindow {
    shared: Arc<Shared>,
    threads: Vec<JoinHandle<()>>,
}

#[derive(Debug)]
pub(crate) struct Shared {
    pub ntb: Ntb,
    pub room: Mutex<LentRoom>,
    /// By the offset of their control areas.
    pub functions: Mutex<BTreeMap<u64, Arc<ControlledFunction>>>,
    /// Control areas of another process, whose functions are to go on here.
    left: Mutex<Vec<SharedMemory>>,
    stop: Event,
    stopped: AtomicBool,
}

impl LentWindow {
    /// Opens the NTB with these facts, which is bound to `vfio-pci`, and serves the host at its other end.
    ///
    /// # Errors
    /// When the NTB cannot be used, or VFIO refuses.
    pub fn open(ntb: Facts) -> Result<LentWindow, MetalError> {
        let container = Arc::new(Container::new()?);
        let ntb = Ntb::open(&container, ntb)?;
        ntb.map_windows()?;
        ntb.start()?;
        let room = LentRoom::new(WindowRoom::new(size_of(&ntb)));
        LentWindow::serving(ntb, room, None)
    }

    /// Goes on with the window of another process, whose NTB has these facts: with its room, and with what is lent there when
    /// that [goes on](LentWindow::lend_again). Where that fails, nothing of it is reached any more.
    ///
    /// # Errors
    /// When it is none, or the NTB is not as it was.
    pub fn again(ntb: Facts, saved: SavedWindow) -> Result<LentWindow, MetalError> {
        let SavedWindow { state, descriptors } = saved;
        let WindowDescriptors { container, ntb: file, doorbell, groups, beating } =
            WindowDescriptors::of(&state, descriptors)?;
        let container = Container::inherited(container, groups, state.mapped().iter().copied())?;
        let ntb = Ntb::again(&Arc::new(container), ntb, file, doorbell)?;
        let room = state.room(size_of(&ntb))?;
        let left = beating.into_iter().map(adopt_shown).collect::<Result<_, _>>()?;
        LentWindow::serving(ntb, room, Some(left))
    }

    /// As another process goes on with it; nothing of a window in which nothing is lent, which is opened anew.
    ///
    /// # Errors
    /// When the process has no descriptors left.
    pub fn save(&self) -> std::io::Result<Option<SavedWindow>> {
        let functions = self.shared.all();
        if functions.is_empty() {
            return Ok(None);
        }
        let ntb = &self.shared.ntb;
        let (container, groups) = ntb.container().descriptors()?;
        let [function, doorbell] = ntb.descriptors()?;
        let groups = groups.into_iter().collect();
        let beating = functions.iter().map(|it| it.shown()).collect::<std::io::Result<Vec<_>>>()?;
        let count = u32::try_from(beating.len()).unwrap_or(u32::MAX);
        let all = WindowDescriptors { container, ntb: function, doorbell, groups, beating };
        let (groups, descriptors) = all.into_parts();
        let room = (locked(&self.shared.room).clone(), count);
        let state = NtbWindowState::new(ntb.address(), groups, ntb.container().ranges(), room);
        Ok(Some(SavedWindow { state, descriptors }))
    }

    /// Serves the host at the other end of an NTB that is started. Of one that another process had, what it `left` has
    /// heartbeats, and its link was up until now.
    fn serving(
        ntb: Ntb,
        room: LentRoom,
        left: Option<Vec<SharedMemory>>,
    ) -> Result<LentWindow, MetalError> {
        let was_up = left.is_some();
        let left = left.unwrap_or_default();
        let failed = |what| move |cause| MetalError::System { what, cause };
        let shared = Arc::new(Shared {
            ntb,
            room: Mutex::new(room),
            functions: Mutex::default(),
            left: Mutex::new(left),
            stop: Event::new().map_err(failed("making an event"))?,
            stopped: AtomicBool::new(false),
        });
        let mut window = LentWindow { shared: shared.clone(), threads: Vec::new() };
        let thread = |name: &str| std::thread::Builder::new().name(name.to_owned());
        let (beats, serves) = (shared.clone(), shared);
        window.threads = vec![
            thread("heartbeat").spawn(move || beats.beat()).map_err(failed("starting a thread"))?,
        ];
        let serving = thread("doorbells").spawn(move || serves.attend(was_up));
        window.threads.push(serving.map_err(failed("starting a thread"))?);
        Ok(window)
    }

    /// Whether the link to the other host is up.
    ///
    /// # Errors
    /// When the NTB does not answer.
    pub fn link_is_up(&self) -> Result<bool, MetalError> {
        self.shared.ntb.link_is_up()
    }

    /// Whether the NTB still is as it was set up; one that was reset or pulled out is not.
    pub fn works(&self) -> bool {
        self.shared.ntb.works()
    }

    /// Lends a function that is bound to `vfio-pci`, for the lease of this epoch, which is higher than that of any other
    /// that was lent here. It is ready on return, and taken away when what is returned is dropped. `lending` lends it the
    /// borrower's memory meanwhile. `lost` is called when it was taken away before, with the reason.
    ///
    /// # Errors
    /// When it cannot be lent through a window, there is no room, the borrower's memory cannot be lent to it, or VFIO
    /// refuses.
    pub fn lend(
        &self,
        facts: Facts,
        lending: &Lending,
        epoch: u64,
        lost: OnTakenAway,
    ) -> Result<WindowLoan, MetalError> {
        let device = VfioDevice::open(self.shared.ntb.container(), facts);
        let ready = device
            .map_err(MetalError::from)
            .and_then(|device| PhysicalDevice::prepare(device, &self.shared.ntb, lending));
        let outcome = ready.and_then(|ready| self.lend_ready(ready, epoch, lost));
        if outcome.is_err() {
            self.shared.ntb.container().leave_idle_groups();
        }
        outcome
    }

    /// Lends the function `name` that `device` models, for the lease of this epoch, as [`lend`](LentWindow::lend) lends one
    /// of the machine. Its registers are memory that the model looks at; its DMA goes through the lender's end of the
    /// NTB, until `memory` revokes it. `lending` is what its session was made with. Dropping what is returned drops the
    /// device.
    ///
    /// # Errors
    /// When its registers cannot be shared as memory, there is no room, or the borrower's memory cannot be lent to it.
    pub fn lend_model(
        &self,
        name: &str,
        (device, memory): (Box<dyn ServedDevice>, Revoker),
        lending: &Lending,
        epoch: u64,
        lost: OnTakenAway,
    ) -> Result<WindowLoan, MetalError> {
        let ready = ModelledDevice::prepare(name, (device, memory), &self.shared.ntb, lending)?;
        self.lend_ready(ready, epoch, lost)
    }

    /// Goes on with the function `name` of another process, which the model `device` goes on as, as
    /// [`lend_model`](LentWindow::lend_model) lends one: at the same place of a window that was passed on, by the same lease.
    ///
    /// # Errors
    /// When it cannot be as `saved` says, or was taken from the borrower meanwhile.
    pub fn lend_model_again(
        &self,
        name: &str,
        device: (Box<dyn ServedDevice>, Revoker),
        lending: &Lending,
        saved: SavedLoan,
        lost: OnTakenAway,
    ) -> Result<WindowLoan, MetalError> {
        let (state, area, passed) = self.checked(saved)?;
        let SavedDevice::Model(vectors, descriptors) = passed else {
            return Err(impossible("a function of the machine in the place of a model"));
        };
        let (ntb, vectors) = (&self.shared.ntb, (&vectors, descriptors));
        let msix_control = state.requests.writable().msix_control;
        let device = ModelledDevice::again(name, device, ntb, lending, vectors, msix_control)?;
        self.go_on(Box::new(device), (&state, area), lost)
    }

    /// The same with a function of this machine, which did not stop meanwhile.
    ///
    /// # Errors
    /// As [`lend_model_again`](LentWindow::lend_model_again), or when VFIO refuses. It is closed then.
    pub fn lend_again(
        &self,
        facts: Facts,
        lending: &Lending,
        saved: SavedLoan,
        lost: OnTakenAway,
    ) -> Result<WindowLoan, MetalError> {
        let outcome = self.lend_machine_again(facts, lending, saved, lost);
        if outcome.is_err() {
            self.shared.ntb.container().leave_idle_groups();
        }
        outcome
    }

    fn lend_machine_again(
        &self,
        facts: Facts,
        lending: &Lending,
        saved: SavedLoan,
        lost: OnTakenAway,
    ) -> Result<WindowLoan, MetalError> {
        let (state, area, passed) = self.checked(saved)?;
        let SavedDevice::Machine(machine, descriptors) = passed else {
            return Err(impossible("a model in the place of a function of the machine"));
        };
        let passed = (&machine, descriptors);
        let device = PhysicalDevice::again(facts, &self.shared.ntb, lending, passed)?;
        self.go_on(Box::new(device), (&state, area), lost)
    }

    /// What another process had lent, if it can be.
    fn checked(
        &self,
        saved: SavedLoan,
    ) -> Result<(LoanState, [OwnedFd; 2], SavedDevice), MetalError> {
        let (state, area, device) = saved.into_parts()?;
        let ntb = &self.shared.ntb;
        let mapped = ntb.container().ranges();
        state.check(&ntb.plan().inbound, &mapped, &locked(&self.shared.room))?;
        Ok((state, area, device))
    }

    fn go_on(
        &self,
        device: Box<dyn WindowDevice>,
        (state, area): (&LoanState, [OwnedFd; 2]),
        lost: OnTakenAway,
    ) -> Result<WindowLoan, MetalError> {
        let place = &state.place;
        if !locked(&self.shared.room).go_on(place) {
            return Err(impossible("two functions at the same place"));
        }
        let function = ControlledFunction::again(&self.shared.ntb, device, (state, area), lost);
        let lent = function.and_then(|function| self.serve(function, place.clone()));
        lent.inspect_err(|_| locked(&self.shared.room).abandon(place))
    }

    /// The borrower's memory, as a model reaches it that [goes on](LentWindow::lend_again).
    ///
    /// # Errors
    /// When the process has no descriptors left.
    pub fn memory(&self) -> Result<MemoryHandle, MetalError> {
        self.shared.ntb.memory()
    }

    /// Takes away what another process lent here and nobody went on with.
    pub fn end_left(&self) {
        locked(&self.shared.left).clear();
        let (ntb, inbound) = (&self.shared.ntb, &self.shared.ntb.plan().inbound);
        // A loan that ends meanwhile waits for it with its place, when nothing of it is mapped any more.
        let mut room = locked(&self.shared.room);
        for (iova, bytes) in ntb.container().ranges() {
            if !inbound.contains(&iova) || room.is_lent(iova - inbound.start) {
                continue;
            }
            if let Err(error) = ntb.container().unmap(iova, bytes) {
                tracing::error!(iova, %error, "what was lent before stays mapped");
            }
        }
        room.retire_others();
        drop(room);
        ntb.container().leave_idle_groups();
    }

    fn lend_ready(
        &self,
        ready: ReadyDevice,
        epoch: u64,
        lost: OnTakenAway,
    ) -> Result<WindowLoan, MetalError> {
        let sizes: Vec<u64> = ready.bars.iter().map(|bar| bar.size).collect();
        let place = locked(&self.shared.room).take(&sizes);
        let place = place.ok_or_else(|| MetalError::NoRoom(ready.device.name()))?;
        let taken = (place.control, place.bars.clone());
        let function = ControlledFunction::new(&self.shared.ntb, ready, taken, (epoch, lost));
        let lent = function.and_then(|function| self.serve(function, place.clone()));
        lent.inspect_err(|_| locked(&self.shared.room).give_back(&place))
    }

    /// Serves a function at its place.
    fn serve(
        &self,
        function: ControlledFunction,
        place: LoanPlace,
    ) -> Result<WindowLoan, MetalError> {
        let function = Arc::new(function);
        let serving = function.clone();
        let thread = std::thread::Builder::new().name("lent function".to_owned());
        let thread = thread.spawn(move || serving.serve());
        let thread =
            thread.map_err(|cause| MetalError::System { what: "starting a thread", cause })?;
        let status = function.status();
        locked(&self.shared.functions).insert(place.control, function.clone());
        // Nobody else fails a function that is here only since then.
        if locked(&self.shared.room).went_down_since(&place) {
            function.fail(LINK_DOWN);
        }
        let shared = self.shared.clone();
        Ok(WindowLoan { shared, running: Some((function, thread)), place, status })
    }

    /// Takes all functions away from the borrower. They are when the window is [idle](LentWindow::is_idle).
    pub fn end_all(&self, why: &str) {
        self.shared.all().iter().for_each(|function| function.fail(why));
    }

    /// Whether nothing is lent any more, and every device is closed.
    pub fn is_idle(&self) -> bool {
        // Its own reference, and those of its threads.
        Arc::strong_count(&self.shared) <= 1 + self.threads.len()
    }
}

impl Drop for LentWindow {
    fn drop(&mut self) {
        self.shared.stopped.store(true, Ordering::Relaxed);
        self.shared.stop.ring();
        for thread in self.threads.drain(..) {
            // One that panicked has said so.
            let _ = thread.join();
        }
    }
}

impl Shared {
    fn all(&self) -> Vec<Arc<ControlledFunction>> {
        locked(&self.functions).values().cloned().collect()
    }

    /// Changes every function's heartbeat until it is stopped, so that borrowers see that the
    /// lender lives.
    fn beat(&self) {
        let mut beat = 0u32;
        while !self.stopped.load(Ordering::Relaxed) {
            beat = beat.wrapping_add(1);
            self.all().iter().for_each(|function| function.beat(beat));
            locked(&self.left).iter().for_each(|shown| beat_in(shown, beat));
            Event::wait_any(&[self.stop.as_fd()], Some(BEAT.as_nanos() as u64));
        }
    }

    /// Passes doorbells on, and takes everything away when the link goes down: the borrower's host may have started
    /// anew, and knows of nothing then.
    fn attend(&self, mut was_up: bool) {
        while !self.stopped.load(Ordering::Relaxed) {
            let events = [self.ntb.as_fd(), self.stop.as_fd()];
            Event::wait_any(&events, Some(BEAT.as_nanos() as u64));
            self.ntb.answer();
            let up = self.ntb.link_is_up().unwrap_or(false);
            let gone = std::mem::replace(&mut was_up, up) && !up;
            if gone {
                // Before the functions are looked for: one that comes in between finds that.
                locked(&self.room).link_went_down();
            }
            for function in self.all() {
                match gone {
                    true => function.fail(LINK_DOWN),
                    false => function.wake(),
                }
            }
        }
    }
}
