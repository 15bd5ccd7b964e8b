//! What the borrower has continues in another process: its sockets, and the conversations of their users
//! with the lenders.

use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::{UnixListener, UnixStream};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use rackbus_control::lease_span;
use rackbus_lease::Borrower;
use rackbus_link::{Link, OfferedMedium};
use rackbus_memory::exchange::CarriedSessionState;
use rackbus_memory::{CarriedSession, Stream};
use rackbus_pci::PolledRegisters;
use rackbus_pci::vfio_user::{
    DeviceShape, RestingClient, ResumedClient, SavedSession, ServedDevice, Server, ShownWith,
};

use super::attach::because_of;
use super::host::{SavedInHost, WindowConversation};
use super::{Attachment, BorrowedFunctions, Open};
use crate::front::{MediumConversation, PlacedDevice};
use crate::handover::HandOverError;
use crate::handover::parcel::{Parcel, ParcelDescriptors};
use crate::handover::state::{
    ClientState, FrontState, SavedBorrow, SavedState, ShapeState, SharedRegisters,
};
use crate::lendable::NotSaved;
use crate::remote::{AbsentDevice, NotHeritable, OnLost, RemoteDevice};
use crate::sessions::HeldSession;

/// How long a front may take to answer: with the gate closed, everybody else waits with it.
const ANSWER: Duration = Duration::from_millis(500);

/// What is borrowed, saved. The fronts that run here go on when this is dropped.
#[derive(Default)]
pub struct SavedLeases {
    /// As another process continues with them.
    pub states: Vec<SavedBorrow>,
    /// Those in this host's own PCI tree.
    pub in_host: Vec<SavedInHost>,
    fronts: Vec<(MediumConversation, SavedSession)>,
    sessions: Vec<CarriedSession>,
}

impl Drop for SavedLeases {
    fn drop(&mut self) {
        for (front, saved) in std::mem::take(&mut self.fronts) {
            if let Err(error) = front.take_back(saved) {
                tracing::error!(%error, "a saved front cannot be taken back");
            }
        }
        self.sessions.iter().for_each(CarriedSession::take_back);
    }
}

impl BorrowedFunctions {
    /// All sockets and conversations, and the fronts that run here, with their descriptors in `parcel`.
    /// All conversations rest.
    ///
    /// # Errors
    /// [`HandOverError`]; all go on then.
    pub(crate) fn save(&self, parcel: &mut Parcel) -> Result<SavedLeases, HandOverError> {
        let mut all = SavedLeases::default();
        (all.in_host, all.sessions) = self.in_host.save(parcel)?;
        for open in self.every() {
            let server = open.server();
            let Some(server) = &*server else { continue };
            let listener = server.listener().map(|socket| parcel.put(socket)).transpose()?;
            let client = match server.resting_client() {
                Some(client) => Some(all.save_client(&open, &client, parcel)?),
                None => None,
            };
            if listener.is_some() || client.is_some() {
                let (grant, user) = (open.grant.clone(), open.user().clone());
                let was_used = open.was_used.load(Ordering::Acquire);
                all.states.push(SavedBorrow { grant, listener, client, user, was_used });
            }
        }
        Ok(all)
    }

    /// Goes on with what another process had, as was `decided` for it: its fronts ask again.
    ///
    /// # Errors
    /// When a socket cannot be gone on with.
    pub(crate) fn resume(
        &self,
        decided: Borrower,
        (states, in_host): (Vec<SavedBorrow>, Vec<SavedInHost>),
        descriptors: &mut ParcelDescriptors,
        link: &dyn Link,
    ) -> std::io::Result<()> {
        self.decide(|borrower| *borrower = decided);
        for saved in in_host {
            let _about = lease_span(saved.grant.lease).entered();
            let lost = saved.grant.clone();
            if let Err(reason) = self.resume_in_host(saved, descriptors, link) {
                tracing::error!(reason, "a function in this host's own PCI tree cannot go on");
                self.listener.lender_lost(&lost, &reason);
            }
        }
        // Until all are there, none of them knows what it is to reach.
        let resuming = self.peers.resuming();
        for SavedBorrow { grant, listener, client, user, was_used } in states {
            // Engines of fronts that go on are about their lease.
            let _about = lease_span(grant.lease).entered();
            let open = self.opened(grant);
            let listener = listener.map(|number| descriptors.take(number)).transpose()?;
            let ended = listener.is_none();
            let client = client.and_then(|client| {
                let resumed = self.resume_client(&open, client, descriptors, link);
                // Its user loses it; all others continue.
                resumed
                    .inspect_err(|error| {
                        tracing::error!(%error, "the user of a function cannot go on");
                    })
                    .ok()
            });
            if ended && client.is_none() {
                continue;
            }
            let opener = self.opener(&open);
            let listener = listener.map(UnixListener::from);
            let server = Server::resume(&open.path, listener, client, opener, self.gate.clone())?;
            *open.server() = Some(server);
            if ended {
                self.ended().push(open);
            } else {
                *open.user() = user;
                // Older states do not say so of one that has a user.
                open.was_used.fetch_or(was_used, Ordering::AcqRel);
                self.opener(&open).tell_use(&open);
                self.all().insert(open.grant.lease, open.clone());
                self.opener(&open).tell_starter(&open);
            }
        }
        drop(resuming);
        Ok(())
    }

    /// A function in this host's own PCI tree.
    fn resume_in_host(
        &self,
        mut saved: SavedInHost,
        descriptors: &mut ParcelDescriptors,
        link: &dyn Link,
    ) -> Result<(), String> {
        fn said(error: impl std::fmt::Display) -> String {
            error.to_string()
        }
        let grant = &saved.grant;
        // Nobody else's runs in a process that has just begun.
        let slot = self.fence.begin_front(grant.lease, Duration::ZERO).map_err(said)?;
        let conversation = match (saved.session.take(), saved.conversation) {
            (Some((offered, state)), _) => self
                .window_session(grant, offered, HeldSession::Resumed(&state), None)
                .map_err(said)?,
            (None, Some(number)) => {
                let handle = descriptors.take_handle(number).map_err(said)?;
                let stream = link.conversation(handle).map_err(said)?;
                WindowConversation { stream, session: None }
            }
            (None, None) => return Err("it has no conversation with its lender".to_owned()),
        };
        let (stream, lost) = (conversation.stream.clone(), self.on_host_lost(grant));
        let resumed = self.in_host.resume(saved, conversation, slot, lost);
        // Its lender takes it away, which is also what has the module lose it.
        resumed.inspect_err(|_| stream.shut_down())
    }

    fn resume_client(
        &self,
        open: &Arc<Open>,
        client: ClientState,
        descriptors: &mut ParcelDescriptors,
        link: &dyn Link,
    ) -> std::io::Result<ResumedClient> {
        let ClientState {
            stream,
            conversation,
            shape,
            fixed,
            lender,
            lent,
            front,
            windows,
            registers,
        } = client;
        let front = front.map(|front| ResumedFront::take(front, descriptors)).transpose()?;
        // Whatever fails from here on.
        let mut left = LeftRegisters::default();
        left.extend(front.as_ref().map(ResumedFront::registers).transpose()?.flatten());
        let registers = take_registers(registers, descriptors, &mut left)?;
        open.was_used.store(true, Ordering::Release);
        if let Err(error) = open.lent_out.resume(lent) {
            tracing::error!(%error, "memory that was lent before the restart is beyond the host's limit");
        }
        let shape = shape.take(descriptors)?;
        *open.fixed() = fixed;
        conversation.check().map_err(std::io::Error::other)?;
        let lender = match lender {
            Some(number) => Some(link.conversation(descriptors.take_handle(number)?)?),
            None => None,
        };
        let stream = UnixStream::from(descriptors.take(stream)?);
        let device = match (lender, front) {
            (None, Some(front)) if front.session.is_some() => {
                self.resume_carried(open, front, shape.clone())
            }
            (None, _) => Err("it was lost before this node was restarted".to_owned()),
            (Some(lender), None) => {
                let device =
                    RemoteDevice::resume(lender, shape.clone(), self.opener(open).on_lost());
                // Before anything is said to the lender: where it is lost, they are to show that.
                for (bar, file, length) in registers {
                    let inherited = device.conversation().inherit_registers(bar, file, length);
                    inherited.map_err(std::io::Error::other)?;
                }
                Ok(self.resume_remote(open, device, shape.clone(), windows))
            }
            (Some(lender), Some(front)) => self.resume_front(open, lender, front, shape.clone()),
        };
        if device.is_ok() {
            left.gone_on_with();
        }
        let device = device.unwrap_or_else(|reason| {
            // The lender is lost.
            if open.is_served() {
                self.opener(open).on_lost()(reason);
            }
            Box::new(AbsentDevice(shape))
        });
        Ok(ResumedClient { stream, device, conversation })
    }

    /// The function at the lender.
    fn resume_remote(
        &self,
        open: &Arc<Open>,
        device: RemoteDevice,
        shape: DeviceShape,
        had: Vec<(u64, u64)>,
    ) -> Box<dyn ServedDevice> {
        let device = device.counted_by(open.lent_out.clone());
        let conversation = device.conversation();
        let windows = Box::new(conversation.clone());
        open.attached(Attachment::Function(conversation));
        let device = self.opener(open).follow_again(open, device, Some(windows), had);
        Box::new(ShownWith::resume(device, shape, open.fixed().clone()))
    }

    /// The front here of the medium at the lender.
    fn resume_front(
        &self,
        open: &Arc<Open>,
        lender: Arc<dyn Stream>,
        front: ResumedFront,
        shape: DeviceShape,
    ) -> Result<Box<dyn ServedDevice>, String> {
        let on_lost = self.opener(open).on_lost();
        self.resume_placed(open, front, (lender, None), shape, on_lost)
    }

    /// The same where the lender is another machine.
    fn resume_carried(
        &self,
        open: &Arc<Open>,
        front: ResumedFront,
        shape: DeviceShape,
    ) -> Result<Box<dyn ServedDevice>, String> {
        let state = front.session.as_ref().ok_or("it has no session")?;
        let opener = self.opener(open);
        let session = opener.session(open, &front.medium, HeldSession::Resumed(state));
        let session = session.map_err(|error| error.to_string())?;
        let on_lost = because_of(&session, opener.on_lost());
        let lender = (Arc::new(session.clone()) as Arc<dyn Stream>, Some(session.clone()));
        let resumed = self.resume_placed(open, front, lender, shape, on_lost);
        resumed.inspect_err(|_| session.shut_down())
    }

    fn resume_placed(
        &self,
        open: &Arc<Open>,
        front: ResumedFront,
        lender: (Arc<dyn Stream>, Option<CarriedSession>),
        shape: DeviceShape,
        on_lost: OnLost,
    ) -> Result<Box<dyn ServedDevice>, String> {
        let ResumedFront { medium, saved, .. } = front;
        // Nobody else's runs in a process that has just begun.
        let slot = open.begin_front(Duration::ZERO).map_err(|refused| refused.to_string())?;
        let lent = &open.grant.function;
        let lending = self.fabric.front_lending(&lent.to_string(), &self.host);
        let lending = lending.map_err(|error| error.to_string())?;
        let session = lender.1.clone();
        let device = PlacedDevice::resume(&lent.device, &medium, saved, lender, lending, on_lost);
        let device = device.map_err(|error| error.to_string())?.keeping(slot);
        open.attached(Attachment::Medium(device.conversation(), session));
        let device = self.opener(open).follow_again(open, device, None, Vec::new());
        Ok(Box::new(ShownWith::resume(device, shape, open.fixed().clone())))
    }

    /// All that somebody may use.
    fn every(&self) -> Vec<Arc<Open>> {
        let ended = self.ended().clone();
        self.all().values().cloned().chain(ended).collect()
    }
}

/// The front of a function whose medium is elsewhere, as another process saved it.
struct ResumedFront {
    medium: OfferedMedium,
    saved: SavedSession,
    session: Option<CarriedSessionState>,
}

impl ResumedFront {
    fn take(
        FrontState { medium, function, session }: FrontState,
        descriptors: &mut ParcelDescriptors,
    ) -> std::io::Result<ResumedFront> {
        Ok(ResumedFront { medium, saved: function.take(descriptors)?, session })
    }

    fn registers(&self) -> std::io::Result<Option<PolledRegisters>> {
        self.saved.registers().map_err(std::io::Error::other)
    }
}

/// Registers that a user has as memory: where nobody goes on with them they read all ones, as those of a device that was pulled
/// out. Whoever only loads and stores would find them as they were for ever.
#[derive(Debug, Default)]
struct LeftRegisters(Vec<PolledRegisters>);

impl LeftRegisters {
    fn extend(&mut self, registers: impl IntoIterator<Item = PolledRegisters>) {
        self.0.extend(registers);
    }

    /// Who goes on with the function looks after them.
    fn gone_on_with(mut self) {
        self.0.clear();
    }
}

impl Drop for LeftRegisters {
    fn drop(&mut self) {
        self.0.iter().for_each(PolledRegisters::retire);
    }
}

/// The registers of a function at its lender that its user has as memory, which are among those that are `left`: BARs,
/// descriptors, and lengths in bytes.
fn take_registers(
    registers: Vec<SharedRegisters>,
    descriptors: &mut ParcelDescriptors,
    left: &mut LeftRegisters,
) -> std::io::Result<Vec<(u8, OwnedFd, u64)>> {
    let mut taken = Vec::new();
    for SharedRegisters { bar, memory, length } in registers {
        let file = descriptors.take(memory)?;
        let registers = PolledRegisters::adopt(file.try_clone()?, length);
        left.extend([registers.map_err(std::io::Error::other)?]);
        taken.push((bar, file, length));
    }
    Ok(taken)
}

impl SavedLeases {
    fn save_client(
        &mut self,
        open: &Open,
        client: &RestingClient,
        parcel: &mut Parcel,
    ) -> Result<ClientState, HandOverError> {
        let attachment = open.attachment();
        let (lender, front) = match &*attachment {
            Some(Attachment::Function(conversation)) => {
                (conversation.handle().map_err(|NotHeritable| HandOverError::Link)?, None)
            }
            Some(Attachment::Medium(front, session)) if !front.is_gone() => {
                let handle = front.handle();
                if handle.is_none() && session.is_none() {
                    return Err(HandOverError::Link);
                }
                let function = open.grant.function.to_string();
                let saved = front.save(ANSWER).map_err(|not_saved| match not_saved {
                    NotSaved::Hangs => HandOverError::Hangs(function),
                    NotSaved::Refused(cause) => HandOverError::Save { function, cause },
                })?;
                let function = SavedState::new(&saved, parcel);
                self.fronts.push((front.clone(), saved));
                let (medium, function) = (front.medium().clone(), function?);
                let state = session.as_ref().map(CarriedSession::save);
                self.sessions.extend(session.clone());
                (handle, Some(FrontState { medium, function, session: state }))
            }
            Some(Attachment::Medium(..)) | None => (None, None),
        };
        let lender = lender.map(|handle| parcel.put_handle(handle)).transpose()?;
        let mut registers = Vec::new();
        if let Some(Attachment::Function(conversation)) = &*attachment {
            let shared = conversation.shared_registers().map_err(std::io::Error::other)?;
            for (bar, file, length) in shared {
                registers.push(SharedRegisters { bar, memory: parcel.put(file.as_fd())?, length });
            }
        }
        Ok(ClientState {
            stream: parcel.put(client.stream.as_fd())?,
            conversation: client.conversation.clone(),
            shape: ShapeState::new(&client.shape, parcel)?,
            fixed: open.fixed().clone(),
            lender,
            lent: open.lent_out.ranges(),
            front,
            windows: open.windows(),
            registers,
        })
    }
}

#[cfg(test)]
mod tests {
    use rackbus_devices::Folders;
    use rackbus_devices::class::parse_rack;
    use rackbus_pci::Engine;
    use rackbus_pci::engine::EngineOptions;
    use rackbus_pci::vfio_user::{EngineDevice, RestingConversation};
    use rackbus_spec::nvme::registers::CSTS;

    use super::*;

    const RACK: &str = "name = \"test\"\n[hosts.alpha.devices.d0]\nkind = \"nvme\"\n\
                        size = \"1 MiB\"\nbacking = \"memory\"\n";

    /// A driver that only loads and stores hears of nothing else.
    #[test]
    fn registers_of_a_function_that_does_not_go_on_read_all_ones() {
        for goes_on in [false, true] {
            let (_, devices) = parse_rack("rack.toml", RACK).unwrap();
            let folders = Folders::new("/nonexistent", "/nonexistent");
            let model = devices[0].config.as_ref().unwrap().model(&folders).unwrap();
            let engine = Engine::start("d0", model, EngineOptions::default()).unwrap();
            let device = EngineDevice::new(engine.handle().clone()).unwrap();
            let (file, length) = device.registers(0).unwrap();
            let driver = PolledRegisters::adopt(file, length).unwrap();
            let saved = device.save(RestingConversation::default()).unwrap();
            let mut left = LeftRegisters::default();
            left.extend(saved.registers().unwrap());
            match goes_on {
                true => left.gone_on_with(),
                false => drop(left),
            }
            assert_eq!(driver.load(CSTS), if goes_on { 0 } else { u32::MAX });
        }
    }
}
