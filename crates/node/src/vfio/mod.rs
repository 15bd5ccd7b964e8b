//! A function of the machine, lent by the kernel's VFIO.
//!
//! Between two users nobody has it open. For each user it is opened into a container of its own, so that the IOMMU
//! bounds what it reaches by what that user lends; each mapping is a loan of the node's fabric as for any function.
//! Its registers are reached through the node, or mapped by the user itself; its interrupts are the kernel's to the
//! user's eventfds. When the user goes, its bus mastering is taken away, then all mappings, and then it is reset.
//!
//! A user that maps registers has a descriptor of the function, which the kernel has no way to take back. As long as
//! somebody has it, the function cannot be opened anew: so it is lent to nobody else before the last one released it, and
//! that is what the kernel is asked ([`Lendable::arm`]). Meanwhile its memory is off, and what was mapped is gone.
//!
//! When the node is restarted in place, a function in use does not stop: the next process has it by the same descriptors.

mod conversations;
mod link_ntbs;
mod ntbs;
mod opened;
mod saved;
mod session;
mod shown;
mod watch;
mod windows;
mod wiring;

use std::io;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use rackbus_control::api::{DeviceReport, ReportedIdentity};
use rackbus_devices::vfio::PhysicalFunction;
use rackbus_devices::{Folders, RackDevice};
use rackbus_memory::{Lending, RefusalBurst, Stream};
use rackbus_metal::{LentWindow, SavedLoan};
use rackbus_pci::vfio_user::{PassthroughSession, RestingConversation, SavedSession};
use rackbus_vfio::facts::{Facts, is_vfio};
use rackbus_vfio::{Binding, Bindings, Container, IommuFault, PciAddress, VfioDevice, VfioError};

use crate::lendable::{Attached, Lendable, LentInWindow, NotReady, NotSaved, Resumed, User};
pub use link_ntbs::link_ntbs;
pub use ntbs::Ntbs;
use opened::OpenedFunction;
pub(crate) use saved::abandon;
pub use saved::{CLASS, STATE_VERSION};
use saved::{PhysicalDescriptors, PhysicalState};
use session::PhysicalSession;
use watch::{WatchThread, WatchedEvents};
pub use windows::WindowLending;

/// Between two looks whether the last user has released it.
const AGAIN: Duration = Duration::from_millis(5);
/// How long a former user may take to release a function that goes back to its driver.
const RELEASING: Duration = Duration::from_secs(4);

/// A function of the machine.
#[derive(Debug)]
pub struct Physical {
    name: String,
    function: PhysicalFunction,
    taker: String,
    bindings: Bindings,
    /// Where it was when this process took it.
    taken: Mutex<Option<PciAddress>>,
    windows: WindowLending,
    shared: Arc<Shared>,
}

/// What a session and the function that it is of know of each other.
#[derive(Debug, Default)]
struct Shared {
    /// The function while it has a user.
    opened: Mutex<Option<Arc<OpenedFunction>>>,
    /// What looks whether that one ends.
    watch: Mutex<Option<WatchThread>>,
    /// Why it cannot be lent: its last session left it so.
    trouble: Mutex<Option<String>>,
    /// Register accesses, mappings and resets.
    jobs: AtomicU64,
    /// What sysfs says that it is, since it was taken.
    identity: Mutex<Option<ReportedIdentity>>,
    /// What the IOMMU refused: how often, and the newest that followed each other.
    refused: Mutex<(u64, Option<RefusalBurst<IommuFault>>)>,
}

fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Who takes functions for a host, as the notes have it: its node, whose state is there.
pub fn taker(host: &str, folders: &Folders) -> String {
    format!("node of {host}, {}", folders.state.display())
}

/// The functions of the machine that a host lends of a rack's devices.
pub fn functions_of(host: &str, devices: &[RackDevice]) -> Vec<PhysicalFunction> {
    let of_host = |device: &&RackDevice| {
        device.function.strip_prefix(host).is_some_and(|rest| rest.starts_with('/'))
    };
    let physical = |device: &RackDevice| device.config.as_ref()?.physical();
    devices.iter().filter(of_host).filter_map(physical).collect()
}

impl Physical {
    /// The device `name`, which `function` is, taken for `taker`.
    pub fn new(name: &str, function: PhysicalFunction, taker: &str) -> Physical {
        Physical {
            name: name.to_owned(),
            function,
            taker: taker.to_owned(),
            bindings: Bindings::here(),
            taken: Mutex::default(),
            windows: WindowLending::default(),
            shared: Arc::default(),
        }
    }

    /// The same, which can be lent through NTBs.
    #[must_use]
    pub fn with_windows(self, windows: WindowLending) -> Physical {
        Physical { windows, ..self }
    }

    /// Takes the function from its driver, unless that was done. What somebody gave back since is not taken again.
    fn take(&self) -> Result<Facts, VfioError> {
        let before = *locked(&self.taken);
        if before.is_some_and(|address| !self.is_bound(address)) {
            return Err(VfioError::GivenBack(self.function.address));
        }
        self.bindings.load_driver();
        let address = match (self.function.number, self.function.functions) {
            (Some(number), Some(count)) => self.virtual_function(number, count)?,
            _ => self.function.address,
        };
        self.bindings.take(address, &self.taker, false)?;
        *locked(&self.taken) = Some(address);
        let facts = self.bindings.sysfs().facts(address)?;
        let Facts { vendor: vendor_id, device: device_id, class, .. } = facts;
        *locked(&self.shared.identity) = Some(ReportedIdentity { vendor_id, device_id, class });
        Ok(facts)
    }

    fn is_bound(&self, address: PciAddress) -> bool {
        let facts = self.bindings.sysfs().facts(address);
        facts.is_ok_and(|facts| facts.driver.as_deref().is_some_and(is_vfio))
    }

    /// The virtual function of this number, from 1 on. All of them are made when the first is asked for.
    fn virtual_function(&self, number: u16, count: u16) -> Result<PciAddress, VfioError> {
        let address = self.function.address;
        let made = self.bindings.sysfs().facts(address)?.virtual_functions;
        let there = |made: &[PciAddress]| made.get(usize::from(number) - 1).copied();
        if made.len() == usize::from(count)
            && let Some(function) = there(&made)
        {
            return Ok(function);
        }
        let made = self.bindings.make_virtual(address, count, &self.taker)?;
        let total = self.bindings.sysfs().facts(address)?.virtual_total;
        there(&made).ok_or(VfioError::VirtualFunctions { address, total, wanted: number })
    }

    /// Waits until nobody has the function open.
    fn wait_free(&self, facts: &Facts, limit: Duration) -> Result<(), VfioError> {
        let group = facts.group.unwrap_or_default();
        until_free(Instant::now() + limit, || rackbus_vfio::container::check_free(group))
    }

    /// The function at `address`, lent in a window, with what counts meanwhile what the IOMMU refuses it.
    fn watched_in_window(
        &self,
        address: PciAddress,
        LentInWindow { offset, held }: LentInWindow,
        stream: &Arc<dyn Stream>,
    ) -> LentInWindow {
        let (watched, refused) =
            (WatchedEvents::faults_alone(), self.shared.counting_faults(&self.name));
        // Its end is the window's to notice.
        let watch = WatchThread::begin(Arc::new(watched), address, stream.clone(), |_| (), refused);
        let unwatched = |error: &io::Error| tracing::warn!(device = self.name, %error, "the device cannot be watched");
        let watch = watch.inspect_err(unwatched).ok();
        LentInWindow { offset, held: Box::new((held, watch)) }
    }

    /// Opens the function, alone in its container, and resets it.
    fn open(&self) -> Result<VfioDevice, VfioError> {
        let facts = self.take()?;
        let device = VfioDevice::open(&Arc::new(Container::new()?), facts)?;
        let method = device.reset()?;
        tracing::info!(device = self.name, address = %device.address(), %method, "reset for its user");
        self.shared.count();
        Ok(device)
    }
}

impl Shared {
    fn count(&self) {
        self.jobs.fetch_add(1, Ordering::Relaxed);
    }

    fn refused(&self, fault: IommuFault) {
        let mut refused = locked(&self.refused);
        let burst = RefusalBurst::with(refused.1, fault, Instant::now());
        *refused = (refused.0 + 1, Some(burst));
    }
}

/// Waits until a check no more says that somebody has the function, or for as long as that may take.
fn until_free(
    deadline: Instant,
    mut check: impl FnMut() -> Result<(), VfioError>,
) -> Result<(), VfioError> {
    loop {
        match check() {
            Err(VfioError::Busy { .. }) if Instant::now() < deadline => std::thread::sleep(AGAIN),
            outcome => return outcome,
        }
    }
}

/// Gives a function back when nobody has it open or maps its registers any more. To unbind it before would wait for
/// that without an end, and this process could not even be killed. One that is in use still stays bound, and noted.
fn give_back_free(
    bindings: &Bindings,
    address: PciAddress,
    deadline: Instant,
) -> Result<Option<Binding>, VfioError> {
    if bindings.note(address)?.is_none() {
        return Ok(None);
    }
    match until_free(deadline, || bindings.check_free(address)) {
        Err(busy @ VfioError::Busy { .. }) => Err(busy),
        // Whatever else is wrong, nobody is waited for.
        _ => bindings.give_back(address),
    }
}

fn failed(error: VfioError) -> NotReady {
    NotReady::Failed(io::Error::other(error))
}

impl Lendable for Physical {
    fn may_be_absent(&self) -> bool {
        true
    }

    fn release(&self) {
        let Some(address) = locked(&self.taken).take() else { return };
        match give_back_free(&self.bindings, address, Instant::now() + RELEASING) {
            Ok(_) => {}
            Err(error) => {
                tracing::error!(%error, "it is not given back; rackbus lend --return does it");
            }
        }
    }

    fn arm(&self, limit: Duration) -> Result<(), NotReady> {
        if locked(&self.shared.opened).is_some() {
            // Its user is there.
            return Ok(());
        }
        let facts = self.take().map_err(failed)?;
        // What takes its time is done before anybody waits for it.
        self.windows.open_all();
        // Whether the kernel can do it at all.
        Container::new().map_err(failed)?;
        self.wait_free(&facts, limit).map_err(failed)?;
        let trouble = locked(&self.shared.trouble).take();
        if let Some(trouble) = trouble {
            // It was not reset after its last user: it is now, or stays with nobody.
            if let Err(error) = self.open() {
                tracing::warn!(device = self.name, %error, "it cannot be opened");
                let said = io::Error::other(trouble.clone());
                *locked(&self.shared.trouble) = Some(trouble);
                return Err(NotReady::Failed(said));
            }
        }
        Ok(())
    }

    fn attach(&self, lending: Lending, stream: &Arc<dyn Stream>) -> io::Result<Box<dyn Attached>> {
        self.windows.begin_without(stream)?;
        let device = self.open().map_err(io::Error::other)?;
        let session = PhysicalSession::begin(
            &self.name,
            device,
            self.function.mapped,
            lending,
            stream,
            self.shared.clone(),
        );
        let session = session.map_err(io::Error::other)?;
        Ok(Box::new(session.sharing_bars().map_err(io::Error::other)?))
    }

    fn lend_in_window(
        &self,
        borrower: &str,
        epoch: u64,
        lending: Lending,
        stream: &Arc<dyn Stream>,
    ) -> io::Result<LentInWindow> {
        let facts = self.take().map_err(io::Error::other)?;
        let address = facts.address;
        let lend = |window: &LentWindow, lost| window.lend(facts, &lending, epoch, lost);
        let lent = self.windows.lend_by(&self.name, borrower, stream, lend)?;
        self.shared.count();
        Ok(self.watched_in_window(address, lent, stream))
    }

    fn revoke(&self) {
        if let Some(opened) = &*locked(&self.shared.opened) {
            opened.revoke();
        }
    }

    fn describe(&self, known: DeviceReport) -> DeviceReport {
        let trouble = known.trouble.or_else(|| locked(&self.shared.trouble).clone());
        let (dma_refused, burst) = *locked(&self.shared.refused);
        DeviceReport {
            trouble,
            dma_refused,
            dma_refused_by_cause: [("not mapped".to_owned(), dma_refused)].into(),
            first_refused: burst.map(|burst| burst.first.to_string()),
            last_refused: burst.map(|burst| burst.last.to_string()),
            jobs: self.shared.jobs.load(Ordering::Relaxed),
            identity: *locked(&self.shared.identity),
            ..known
        }
    }

    /// What it does goes on. Without a user there is nothing to pass on.
    fn save(
        &self,
        conversation: RestingConversation,
        _limit: Duration,
    ) -> Result<Option<SavedSession>, NotSaved> {
        let opened = locked(&self.shared.opened).clone();
        // In a window there is nothing of it that the window has not.
        let Some(opened) = opened else { return Ok(None) };
        // What this has not seen of the function's end, the next process does.
        let watch = locked(&self.shared.watch).take();
        drop(watch);
        let saved = opened.save(conversation);
        if saved.is_err() {
            self.shared.watch(&self.name, &opened);
        }
        saved.map(Some).map_err(NotSaved::Refused)
    }

    fn windows(&self) -> Option<&WindowLending> {
        Some(&self.windows)
    }

    fn resume_in_window(
        &self,
        _saved: Option<SavedSession>,
        user: User,
        (borrower, lent): (&str, SavedLoan),
    ) -> io::Result<LentInWindow> {
        // It is taken: what somebody gives back meanwhile waits for this process to close it.
        let address = lent.state.address();
        *locked(&self.taken) = address;
        let facts = self.take().map_err(io::Error::other)?;
        let User { lending, stream, .. } = user;
        let (address, loan) = (facts.address, (borrower, lent));
        let lent = self.windows.lend_machine_again(&self.name, facts, &lending, loan, &stream)?;
        Ok(self.watched_in_window(address, lent, &stream))
    }

    fn continues(&self, class: &str) -> bool {
        class == CLASS
    }

    fn take_back(&self, saved: SavedSession) {
        if let Err(error) = saved.reclaim() {
            tracing::error!(device = self.name, %error, "a saved function cannot be taken back");
        }
        let opened = locked(&self.shared.opened).clone();
        if let Some(opened) = opened {
            self.shared.watch(&self.name, &opened);
        }
    }

    fn resume(&self, saved: SavedSession, user: Option<User>) -> io::Result<Option<Resumed>> {
        // Where something fails from here on, the function reaches nothing any more.
        let passed_on = saved::passed_on(&saved)?;
        // Only one with a user is saved.
        let Some(User { lending, stream, .. }) = user else {
            return Err(io::ErrorKind::Unsupported.into());
        };
        let passed = PassthroughSession::restore(saved).map_err(io::Error::other)?;
        let PassthroughSession { conversation, resources, msix_table, model, medium } = passed;
        let state: PhysicalState = model.read(CLASS, STATE_VERSION).map_err(io::Error::other)?;
        let descriptors = PhysicalDescriptors::of(&state, medium).map_err(io::Error::other)?;
        let (container, file, watched) = descriptors.open(&resources)?;
        conversation.check().map_err(io::Error::other)?;
        self.windows.begin_without(&stream)?;
        // It is taken. Somebody may have begun to give it back since, and waits for this process to close it: to bind it anew
        // would wait for that one.
        *locked(&self.taken) = Some(state.address);
        let facts = self.take().map_err(io::Error::other)?;
        if facts.address != state.address {
            let (here, passed) = (facts.address, state.address);
            return Err(io::Error::other(format!("it is {here} here, and was {passed}")));
        }
        let device = VfioDevice::inherited(&Arc::new(container), facts, file);
        let device = device.map_err(io::Error::other)?;
        let watched = WatchedEvents::inherited(watched)?;
        let given = (resources, &*msix_table);
        let opened =
            OpenedFunction::passed_on((device, watched), &state, given, &lending, &stream)?;
        let mapped = self.function.mapped;
        let session = PhysicalSession::of(&self.name, opened, mapped, lending, self.shared.clone());
        let session = session.map_err(io::Error::other)?;
        let session = session.sharing_bars().map_err(io::Error::other)?;
        passed_on.keep();
        Ok(Some((Box::new(session), conversation)))
    }
}

/// Gives what `taker` took back to its drivers, apart from what is in `still` and the `ntbs`. What cannot be given back,
/// or is not released within a few seconds, stays noted.
pub fn give_back(taker: &str, still: &[PhysicalFunction], ntbs: &[PciAddress]) {
    let bindings = Bindings::here();
    let taken = match bindings.taken() {
        Ok(taken) => taken,
        Err(error) => {
            return tracing::error!(%error, "the record of functions taken from drivers cannot be read");
        }
    };
    // Virtual functions go with those that they are made of.
    let (whole, parts): (Vec<_>, Vec<_>) =
        taken.into_iter().filter(|it| it.taker == taker).partition(|it| it.virtual_functions > 0);
    let wanted = |address: PciAddress| {
        let sysfs = bindings.sysfs();
        let physical = sysfs.facts(address).ok().and_then(|facts| facts.physical);
        ntbs.contains(&address)
            || still.iter().any(|it| it.address == address || Some(it.address) == physical)
    };
    let deadline = Instant::now() + RELEASING;
    for binding in whole.into_iter().chain(parts).filter(|it| !wanted(it.address)) {
        match give_back_free(&bindings, binding.address, deadline) {
            Ok(Some(given)) => {
                let driver = given.former.as_deref().unwrap_or("no driver");
                tracing::info!(address = %given.address, driver, "given back");
            }
            Ok(None) => {}
            Err(error) => {
                tracing::error!(%error, "it is not given back; rackbus lend --return does it")
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::os::fd::OwnedFd;
    use std::os::unix::net::UnixStream;

    use rackbus_memory::Event;
    use rackbus_pci::ModelState;
    use rackbus_pci::vfio_user::UserResources;

    use super::*;

    /// A session of the function at this address, with descriptors that are none of VFIO's.
    fn passed_on(model: &ModelState) -> SavedSession {
        let medium = (0..6).map(|_| OwnedFd::from(Event::new().unwrap())).collect();
        let (conversation, resources) = (RestingConversation::default(), UserResources::default());
        let (msix_table, model) = (Vec::new(), model.clone());
        let session = PassthroughSession { conversation, resources, msix_table, model, medium };
        session.save().unwrap()
    }

    #[test]
    fn what_is_passed_on_is_a_function_of_the_kernels_or_refused() {
        let address = "0000:03:00.1".parse().unwrap();
        let function = PhysicalFunction { address, functions: None, number: None, mapped: true };
        let physical = Physical::new("d0", function, "a test");
        let resume = |model: &ModelState, has_user: bool| {
            let (stream, _borrower) = UnixStream::pair().unwrap();
            let (lending, stream) = (Lending::alone(), Arc::new(stream) as Arc<dyn Stream>);
            let user = has_user.then_some(User { lending, stream, session: None });
            let refused = physical.resume(passed_on(model), user).map(drop).unwrap_err();
            assert!(locked(&physical.shared.opened).is_none());
            refused.to_string()
        };
        let stored = include_str!("stored/function-1.json");
        let model: ModelState = serde_json::from_str(stored).unwrap();
        assert!(resume(&model, true).contains("a container that was passed on"));
        assert_eq!(resume(&model, false), "unsupported");
        let newer = ModelState { version: STATE_VERSION + 1, ..model.clone() };
        assert!(resume(&newer, true).contains("use a newer program"));
        let other = ModelState { class: "nvme".to_owned(), ..model };
        assert!(resume(&other, true).contains("is of another function"));
    }

    #[test]
    fn a_function_is_waited_for_until_it_is_free_and_not_for_ever() {
        let busy = || Err(VfioError::Busy { group: 7 });
        let mut looks = vec![Ok(()), busy(), busy()];
        let deadline = Instant::now() + Duration::from_secs(60);
        until_free(deadline, || looks.pop().unwrap()).unwrap();
        assert!(looks.is_empty());
        let late = until_free(Instant::now(), busy);
        assert!(matches!(late, Err(VfioError::Busy { group: 7 })));
    }
}
