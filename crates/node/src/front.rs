//! The front of a borrowed function that runs in the borrower's node: its engine is here, its medium
//! at the lender.
//!
//! The lender has none of this host's memory. When it is lost, what was under way fails, and the
//! function answers as an absent one does.

use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use rackbus_devices::{FrontError, Lost, class};
use rackbus_link::OfferedMedium;
use rackbus_memory::{
    Access, CarriedSession, HandleRef, InheritedEnd, Lending, MemoryHandle, Stream,
};
use rackbus_pci::endpoint::{FunctionRegion, IrqChange};
use rackbus_pci::engine::{EngineOptions, NoAnswer};
use rackbus_pci::vfio_user::{
    self, DeviceShape, EngineDevice, RequestRefused, SavedSession, ServedDevice,
};
use rackbus_pci::{Engine, EngineHandle, Function, MediumAccess, RestoreError};
use rustix::io::Errno;

use crate::borrower::FrontSlot;
use crate::lendable::NotSaved;
use crate::remote::OnLost;

/// A function whose front runs here.
#[derive(Debug)]
pub struct PlacedDevice {
    /// Before the engine: dropping it scrubs the function, which releases its user's memory.
    device: EngineDevice,
    conversation: MediumConversation,
    _engine: Engine,
}

/// The conversation with the node that has the medium, which others may end.
#[derive(Debug, Clone)]
pub struct MediumConversation(Arc<Conversation>);

struct Conversation {
    stream: Arc<dyn Stream>,
    medium: OfferedMedium,
    /// The function, whoever has it.
    device: EngineDevice,
    engine: EngineHandle,
    lost: Lost,
    gone: AtomicBool,
    /// It was ended on this side, before the other one did or was lost.
    ended_here: AtomicBool,
    /// Its place among the fronts of this host, until it has released all memory.
    slot: Mutex<Option<FrontSlot>>,
}

impl Conversation {
    fn slot(&self) -> MutexGuard<'_, Option<FrontSlot>> {
        self.slot.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl std::fmt::Debug for Conversation {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Conversation").field("gone", &self.gone).finish_non_exhaustive()
    }
}

impl MediumConversation {
    /// Lets the lender go. The function answers as an absent one from now on.
    pub fn end(&self) {
        // What was lost before is lost anyway: a user may release a function because it fails.
        if !self.0.stream.is_closed() {
            self.0.ended_here.store(true, Ordering::Release);
        }
        self.ended();
    }

    /// The front's engine; nothing when it has ended.
    pub fn engine(&self) -> Option<&EngineHandle> {
        (!self.is_gone()).then_some(&self.0.engine)
    }

    /// It has ended, on whatever side.
    fn ended(&self) {
        self.0.gone.store(true, Ordering::Release);
        self.0.stream.shut_down();
        // After it: what fails gives up its place for data, from which nothing may be sent any more.
        self.0.lost.set();
        // It may sleep, and wait for an answer that does not come: what is under way fails now. Then
        // it is at rest, since its user, for whom it is absent, can neither stop nor reset it: what
        // were its queues may be other memory soon. One that has stopped reaches nothing.
        let slot = self.0.slot().take();
        let _ = self.0.engine.post(move |endpoint| {
            endpoint.poll(endpoint.clock());
            endpoint.reset();
            endpoint.retire_registers();
            // Its user may keep it for ever, while another lease of the function has another front here,
            // which the fabric takes for the same.
            endpoint.drop_memory();
            endpoint.dma().revoker().revoke();
            // Not before: the lender has the function back already, and may lend it to this host again.
            drop(slot);
        });
    }

    /// Whether the conversation has ended.
    pub fn is_gone(&self) -> bool {
        self.0.gone.load(Ordering::Acquire)
    }

    /// The handle of the conversation, for another process to [go on](PlacedDevice::resume) with. `None`
    /// where that is a session between machines.
    pub fn handle(&self) -> Option<HandleRef<'_>> {
        self.0.stream.handle()
    }

    /// The medium, as its lender described it.
    pub fn medium(&self) -> &OfferedMedium {
        &self.0.medium
    }

    /// The front as a value; nothing happens here any more until it is taken back.
    ///
    /// # Errors
    /// [`NotSaved`]; it goes on then. An engine that waits for its lender longer than `limit` hangs.
    pub fn save(&self, limit: Duration) -> Result<SavedSession, NotSaved> {
        // What is asked of an engine is done, however late: first, whether it answers.
        match self.0.engine.call_within(limit, |_| ()) {
            Err(NoAnswer::Late) => return Err(NotSaved::Hangs),
            Ok(()) | Err(NoAnswer::Stopped(_)) => {}
        }
        let saved = self.0.device.save(vfio_user::RestingConversation::default());
        saved.map_err(NotSaved::Refused)
    }

    /// Goes on here after all with what was saved.
    ///
    /// # Errors
    /// [`RestoreError`] when somebody else has gone on with it.
    pub fn take_back(&self, saved: SavedSession) -> Result<(), RestoreError> {
        self.0.device.take_back(saved)
    }
}

/// A front that takes at most `most` bytes of its host's memory: how many it takes says its lender.
fn bounded(front: Box<dyn Function>, most: u64) -> Result<Box<dyn Function>, FrontError> {
    match front.own_memory() {
        asked if asked > most => Err(FrontError::TooMuchMemory { asked, most }),
        _ => Ok(front),
    }
}

impl PlacedDevice {
    /// Runs the front of `medium`, which `stream`'s other end offers, and watches for its end. Its user
    /// lends its memory by `lending`.
    ///
    /// # Errors
    /// When the medium is none that this host has a front for, or no engine can be obtained.
    pub fn start(
        name: &str,
        medium: &OfferedMedium,
        access: MediumAccess,
        stream: Arc<dyn Stream>,
        lending: Lending,
        on_lost: OnLost,
    ) -> Result<PlacedDevice, RequestRefused> {
        let most = lending.memory();
        let model =
            |lost| bounded(class::front(&medium.class, &medium.description, access, lost)?, most);
        PlacedDevice::with(name, medium, model, stream, on_lost, |device| {
            device.session_of(lending, None)
        })
    }

    /// Goes on with a front that another process saved, whose handles to the medium are among it; where that is on
    /// another machine, by the `session` with it.
    ///
    /// # Errors
    /// When this process cannot.
    pub fn resume(
        name: &str,
        medium: &OfferedMedium,
        saved: SavedSession,
        (stream, session): (Arc<dyn Stream>, Option<CarriedSession>),
        lending: Lending,
        on_lost: OnLost,
    ) -> Result<PlacedDevice, RequestRefused> {
        let SavedSession { state, descriptors, medium: files } = saved;
        let end = InheritedEnd { files, session };
        let model = |lost| class::front_again(&medium.class, &medium.description, end, lost);
        PlacedDevice::with(name, medium, model, stream, on_lost, |device| {
            let engine = device.engine().clone();
            let resumed = EngineDevice::resume(engine, state, descriptors, lending, None);
            let refused =
                |error: RestoreError| RequestRefused::new(Errno::NODEV, error.to_string());
            resumed.map(|(session, _)| session).map_err(refused)
        })
    }

    /// The front of `medium`, as `session` begins or continues with it.
    fn with(
        name: &str,
        medium: &OfferedMedium,
        model: impl FnOnce(Lost) -> Result<Box<dyn Function>, FrontError>,
        stream: Arc<dyn Stream>,
        on_lost: OnLost,
        session: impl FnOnce(&EngineDevice) -> Result<EngineDevice, RequestRefused>,
    ) -> Result<PlacedDevice, RequestRefused> {
        let ended = stream.clone();
        // The watch below hears of it.
        let lost = Lost::new(move || ended.shut_down());
        let model = model(lost.clone());
        let model = model.map_err(|error| RequestRefused::new(Errno::NODEV, error.to_string()))?;
        let system = |cause: std::io::Error| RequestRefused::new(Errno::NODEV, cause.to_string());
        let engine = Engine::start(name, model, EngineOptions::default()).map_err(system)?;
        let function = EngineDevice::new(engine.handle().clone())?;
        let device = session(&function)?;
        let conversation = MediumConversation(Arc::new(Conversation {
            stream: stream.clone(),
            medium: medium.clone(),
            device: function,
            engine: engine.handle().clone(),
            lost,
            gone: AtomicBool::new(false),
            ended_here: AtomicBool::new(false),
            slot: Mutex::default(),
        }));
        let watched = conversation.clone();
        let watch = move || {
            stream.wait_closed();
            watched.ended();
            if !watched.0.ended_here.load(Ordering::Acquire) {
                on_lost("its node closed the link, or does not answer".to_owned());
            }
        };
        std::thread::Builder::new().name("lender watch".into()).spawn(watch).map_err(system)?;
        Ok(PlacedDevice { device, conversation, _engine: engine })
    }

    /// The same, which has this place until it has released all memory.
    pub(crate) fn keeping(self, slot: FrontSlot) -> PlacedDevice {
        *self.conversation.0.slot() = Some(slot);
        if self.conversation.is_gone() {
            // It has ended meanwhile, without the place.
            self.conversation.ended();
        }
        self
    }

    /// The conversation with the node that has the medium.
    pub fn conversation(&self) -> MediumConversation {
        self.conversation.clone()
    }

    fn unless_gone<T>(
        &self,
        absent: T,
        call: impl FnOnce(&EngineDevice) -> Result<T, RequestRefused>,
    ) -> Result<T, RequestRefused> {
        if self.conversation.is_gone() { Ok(absent) } else { call(&self.device) }
    }
}

impl Drop for PlacedDevice {
    fn drop(&mut self) {
        // First: what is under way is not waited for at the lender's pace.
        self.conversation.end();
    }
}

impl ServedDevice for PlacedDevice {
    fn shape(&self) -> &DeviceShape {
        self.device.shape()
    }

    fn read(
        &self,
        region: FunctionRegion,
        offset: u64,
        count: usize,
    ) -> Result<Vec<u8>, RequestRefused> {
        self.unless_gone(vec![0xff; count], |device| device.read(region, offset, count))
    }

    fn write(
        &self,
        region: FunctionRegion,
        offset: u64,
        data: Vec<u8>,
        posted: bool,
    ) -> Result<(), RequestRefused> {
        self.unless_gone((), |device| device.write(region, offset, data, posted))
    }

    // Mappings and interrupts are this host's own: they change whether or not the lender is there,
    // so that nothing is reached that the user took away. What is mapped without it is not lent.
    fn map(
        &self,
        iova: u64,
        length: u64,
        access: Access,
        memory: Option<MemoryHandle>,
    ) -> Result<(), RequestRefused> {
        let lent = memory.filter(|_| !self.conversation.is_gone());
        match self.device.map(iova, length, access, lent) {
            // It has ended meanwhile.
            Err(_) if self.conversation.is_gone() => self.device.map(iova, length, access, None),
            mapped => mapped,
        }
    }

    fn unmap(&self, iova: u64, length: u64) -> Result<(), RequestRefused> {
        self.device.unmap(iova, length)
    }

    fn unmap_all(&self) -> Result<(), RequestRefused> {
        self.device.unmap_all()
    }

    fn registers(&self, bar: u8) -> Result<(OwnedFd, u64), RequestRefused> {
        let given = self.device.registers(bar);
        if self.conversation.is_gone() {
            // It may have ended before they were there to be retired.
            self.conversation.0.engine.call(|endpoint| endpoint.retire_registers())?;
            return Err(RequestRefused::new(Errno::NODEV, "the lender is gone"));
        }
        given
    }

    fn count_refused(&self) {
        self.device.count_refused();
    }

    fn set_irqs(&self, change: IrqChange) -> Result<(), RequestRefused> {
        self.device.set_irqs(change)
    }

    fn reset(&self) -> Result<(), RequestRefused> {
        self.unless_gone((), ServedDevice::reset)
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::net::UnixStream;

    use rackbus_devices::nvme::{Nvme, NvmeConfig};
    use rackbus_lease::Message;
    use rackbus_memory::{Handles, SharedMemory};
    use rackbus_pci::endpoint::Endpoint;
    use rackbus_spec::pcie::Command;

    use super::*;
    use crate::borrower::fence_tests::{ended, grant, granted};

    /// A drive at its lender, what that offers of it, and what leads to its medium.
    fn offered() -> (Endpoint, OfferedMedium, Handles) {
        let mut lender =
            Endpoint::new(Box::new(Nvme::new(&NvmeConfig::memory(1 << 20, "M1")).unwrap()));
        let offer = lender.serve_medium(None).unwrap();
        let class = offer.class.to_owned();
        let medium = OfferedMedium { class, description: offer.description, session: None };
        (lender, medium, offer.handles)
    }

    /// The lender says how much memory its front takes here.
    #[test]
    fn a_front_takes_no_more_memory_than_its_host_has() {
        let drive = || {
            let config = NvmeConfig { buffer: 1 << 20, ..NvmeConfig::memory(1 << 20, "M1") };
            Box::new(Nvme::new(&config).unwrap())
        };
        assert!(bounded(drive(), 1 << 20).is_ok());
        let refused = bounded(drive(), 64 << 10).map(drop).unwrap_err().to_string();
        assert!(refused.starts_with("the device has 1 MiB of memory of its own"), "{refused}");
        assert!(refused.contains("gives this host 64 KiB"), "{refused}");
    }

    /// Its user cannot stop it any more: what it writes goes nowhere. So it must be at rest.
    #[test]
    fn a_front_that_lost_its_medium_reaches_no_memory_any_more() {
        let (_lender, medium, handles) = offered();
        let (stream, _lenders) = UnixStream::pair().unwrap();
        let stream: Arc<dyn Stream> = Arc::new(stream);
        let lending = Lending::alone();
        let reached = lending.fabric().clone();
        let reached = || reached.with(|fabric| fabric.reached("host/function").unwrap().len());
        let lost = Box::new(drop);
        let front = PlacedDevice::start(
            "nvme0",
            &medium,
            MediumAccess::Handles(handles),
            stream,
            lending,
            lost,
        );
        let front = front.unwrap();
        let memory = SharedMemory::create("guest", 4096).unwrap();
        let both = Access::READ | Access::WRITE;
        front.map(0, 4096, both, Some(memory.handle(0))).unwrap();
        assert_eq!(reached(), 1);
        let command = (Command::MEMORY_SPACE | Command::BUS_MASTER).bits();
        front.write(FunctionRegion::Config, 4, command.to_le_bytes().to_vec(), false).unwrap();
        let engine = front.conversation().0.engine.clone();
        let masters = || engine.call(|endpoint| endpoint.dma().master()).unwrap();
        assert!(masters());
        front.conversation().end();
        assert!(!masters(), "a front that is absent for its user has the bus");
        drop(front);
        assert_eq!(reached(), 0, "a front that is gone reaches memory");
    }

    /// Its user releases it because it fails: the loss is told anyway.
    #[test]
    fn a_medium_that_is_lost_before_its_user_lets_go_is_told_as_lost() {
        for lender_ends in [true, false] {
            let (_lender, medium, handles) = offered();
            let (stream, lenders) = UnixStream::pair().unwrap();
            let stream: Arc<dyn Stream> = Arc::new(stream);
            let (told, heard) = std::sync::mpsc::channel();
            let access = MediumAccess::Handles(handles);
            let lost = Box::new(move |_| told.send(()).unwrap());
            let lending = Lending::alone();
            let front = PlacedDevice::start("d", &medium, access, stream, lending, lost).unwrap();
            if lender_ends {
                drop(lenders);
                drop(front);
                heard.recv().unwrap();
            } else {
                drop(front);
                assert!(heard.recv().is_err(), "nobody was lost");
            }
        }
    }

    /// Its user may keep it for as long as it likes, as a VM does whose lease has ended.
    #[test]
    fn a_front_that_lost_its_medium_does_not_block_a_later_one() {
        let lending = Lending::alone();
        let both = Access::READ | Access::WRITE;
        let start = || {
            let (lender, medium, handles) = offered();
            let (stream, lenders) = UnixStream::pair().unwrap();
            let (stream, lost) = (Arc::new(stream), Box::new(drop));
            let front = PlacedDevice::start(
                "nvme0",
                &medium,
                MediumAccess::Handles(handles),
                stream,
                lending.clone(),
                lost,
            );
            (front.unwrap(), lender, lenders)
        };
        let reached = || lending.fabric().with(|it| it.reached("host/function").unwrap().len());
        let memory = SharedMemory::create("guests", 3 * 4096).unwrap();
        let (old, _medium, _lenders) = start();
        old.map(0, 4096, both, Some(memory.handle(0))).unwrap();
        old.conversation().end();
        // What it maps now, it does not reach, and takes away as usual.
        old.map(4096, 4096, both, Some(memory.handle(4096))).unwrap();
        assert_eq!(reached(), 0, "a front that lost its medium has loans");
        let (new, _medium, _lenders) = start();
        new.map(0, 8192, both, Some(memory.handle(4096))).unwrap();
        old.unmap(0, 4096).unwrap();
        old.unmap(4096, 4096).unwrap();
        drop(old);
        assert_eq!(reached(), 1);
    }

    /// The lender has the function back by then, and may have lent it to this host again: memory of the next front once was
    /// refused, as the former one had it in the same place.
    #[test]
    fn the_next_front_may_begin_when_the_memory_of_the_former_one_is_released() {
        let (_lender, medium, handles) = offered();
        let (stream, lenders) = UnixStream::pair().unwrap();
        let (access, lending) = (MediumAccess::Handles(handles), Lending::alone());
        let fabric = lending.fabric().clone();
        let lost = Box::new(drop);
        let front = PlacedDevice::start("d", &medium, access, Arc::new(stream), lending, lost);
        let (fence, follows) = granted(&[(1, "alpha/d")]);
        let front = front.unwrap().keeping(fence.begin_front(1, Duration::ZERO).unwrap());
        let memory = SharedMemory::create("guest", 4096).unwrap();
        front.map(0, 4096, Access::READ | Access::WRITE, Some(memory.handle(0))).unwrap();
        // Its engine is busy.
        let (go_on, busy) = std::sync::mpsc::channel::<()>();
        front.device.engine().post(move |_| _ = busy.recv()).unwrap();
        front.conversation().end();
        lenders.wait_closed();
        fence.decide(|it| it.receive(0, Message::Granted(grant(2, "alpha/d"))));
        assert!(fence.begin_front(2, Duration::ZERO).is_err(), "its memory is lent");
        // Nor is its lease answered as closed.
        fence.decide(|it| it.receive(0, ended(1)));
        assert_eq!(fence.decide(|it| it.close_done(1)), []);
        assert!(follows.try_recv().is_err());
        go_on.send(()).unwrap();
        let next = fence.begin_front(2, Duration::from_secs(60));
        assert!(next.is_ok());
        assert_eq!(follows.recv().unwrap().len(), 1, "it is closed");
        assert_eq!(fabric.with(|it| it.reached("host/function").unwrap().len()), 0);
    }
}
