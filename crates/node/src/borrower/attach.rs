//! Attaches to the lender for each client that opens a function's socket, and makes the device that the client sees.

use std::sync::atomic::Ordering;
use std::sync::{Arc, PoisonError, Weak};
use std::time::Duration;

use rackbus_control::lease_span;
use rackbus_fabric::FabricHandle;
use rackbus_lease::{FrontRefused, Grant, Placement};
use rackbus_link::{Connect, Hello, OfferedMedium, Purpose};
use rackbus_memory::exchange::session::SessionSide;
use rackbus_memory::{Carried, CarriedSession, Gate, Stream};
use rackbus_pci::MediumAccess;
use rackbus_pci::vfio_user::{
    DeviceShape, Opener, RequestRefused, ServedDevice, ShownInterrupts, ShownWith,
};
use rackbus_vm::InterruptChoice;
use rustix::io::Errno;

use super::lease::{Attachment, Open};
use super::{LeaseEnded, UseListener};
use crate::front::PlacedDevice;
use crate::lanes::Lanes;
use crate::peers::{Followed, PeerGroups, PeerMembership, PeerWindows};
use crate::remote::{OnLost, RemoteDevice};
use crate::sessions::{HeldSession, hold_session};
use crate::turns::LeaseUse;
use crate::users::Users;

/// How long a former front of the same function may take to end.
const SUCCESSION: Duration = Duration::from_secs(5);

/// How often the lender is asked again where the connection is cut off before it has answered.
const CUT_OFF: usize = 5;

/// The half of the function that is attached to.
pub(super) fn wanted(grant: &Grant) -> Purpose {
    let Grant { lease, epoch, .. } = *grant;
    let device = grant.function.device.clone();
    match grant.placement {
        Placement::Lender => Purpose::Function { device, lease, epoch },
        Placement::Borrower => Purpose::Medium { device, lease, epoch, lanes: Vec::new() },
        Placement::Host => Purpose::Window { device, lease, epoch, held: true },
    }
}

/// Attaches to the lender for each client that opens the socket.
pub(super) struct AttachOpener {
    pub(super) hello: Hello,
    pub(super) link: Arc<dyn Connect>,
    pub(super) fabric: FabricHandle,
    pub(super) listener: Arc<dyn UseListener>,
    pub(super) peers: Arc<PeerGroups>,
    pub(super) gate: Gate,
    pub(super) hold: Duration,
    pub(super) lanes: Lanes,
    pub(super) open: Weak<Open>,
}

impl Opener for AttachOpener {
    fn open(&self) -> Result<Box<dyn ServedDevice>, RequestRefused> {
        let gone = || RequestRefused::new(Errno::NODEV, "the lease was returned");
        let open = self.open.upgrade().ok_or_else(gone)?;
        if !open.is_served() {
            return Err(gone());
        }
        let _about = lease_span(open.grant.lease).entered();
        let mut hello = self.hello.clone();
        if let Purpose::Medium { lanes, .. } = &mut hello.service {
            *lanes = self.lanes.providers().to_vec();
        }
        let mut stream = self.link.connect(&open.grant.address, &hello);
        for _ in 0..CUT_OFF {
            // Whoever goes on in the place of the lender's process hears it; or many others wanted a place there.
            match &stream {
                Err(error) if error.is_cut_off() => {}
                _ => break,
            }
            stream = self.link.connect(&open.grant.address, &hello);
        }
        let stream =
            stream.map_err(|error| RequestRefused::new(Errno::NODEV, error.to_string()))?;
        let device = self.attach(&open, stream)?;
        open.was_used.store(true, Ordering::Release);
        self.tell_use(&open);
        tracing::info!(process = open.process(), "in use");
        Ok(device)
    }
}

/// As a user is told that no front begins for it.
fn front_refused(refused: FrontRefused) -> RequestRefused {
    let errno = if refused.is_for_now() { Errno::BUSY } else { Errno::NODEV };
    RequestRefused::new(errno, refused.to_string())
}

/// Tells that the lender is lost as `on_lost` does, by the end of its session: why that is over is known better there.
pub(super) fn because_of(session: &CarriedSession, on_lost: OnLost) -> OnLost {
    let ended = session.clone();
    Box::new(move |reason| on_lost(ended.end_reason().map_or(reason, |end| end.to_string())))
}

/// Shows `device` with the kind of interrupts that its user wants. Without MSI-X a function can be
/// taken out of every running QEMU, which the loss of its lender needs.
pub(super) fn show(
    open: &Open,
    device: impl ServedDevice + 'static,
) -> Result<Box<dyn ServedDevice>, RequestRefused> {
    let msix = InterruptChoice::noted(&open.path) != InterruptChoice::Msi;
    let shown = ShownInterrupts::choose(device.shape(), msix);
    let shown = ShownWith::new(device, shown)?;
    *open.fixed() = shown.fixed_bytes().to_vec();
    Ok(Box::new(shown))
}

/// Whether a lease has ended, or has another user than this process.
fn has_other_user(lease: Weak<Open>, process: u32) -> LeaseEnded {
    // Nobody is there any more, or still that one.
    let same = move |open: Arc<Open>| open.process().is_none_or(|now| now == process);
    Box::new(move || !lease.upgrade().filter(|open| !open.has_ended()).is_some_and(same))
}

impl AttachOpener {
    /// Tells who watches users of the one that is there, or was there last, if that is a VM. One may have ended while the
    /// control plane did not answer: then this returns the lease.
    pub(super) fn tell_use(&self, open: &Arc<Open>) {
        if let Some(process) = open.process()
            && !open.user().as_ref().is_some_and(|user| user.is(process))
        {
            let user = self.listener.user_of(&open.path, process);
            *open.user() = user;
        }
        let Some(user) = open.user().clone() else { return };
        let ended = has_other_user(self.open.clone(), user.process);
        self.listener.used(&open.grant, &user, ended);
    }

    /// Tells who watches users of the process that starts what will use the function: when it ends before, the lease is
    /// returned, unless a VM that it has started is about to open the function.
    pub(super) fn tell_starter(&self, open: &Arc<Open>) {
        let Some(starter) = open.grant.starter.as_deref().and_then(Users::starter) else { return };
        let (lease, listener) = (self.open.clone(), self.listener.clone());
        let needless = move || {
            let Some(open) = lease.upgrade() else { return true };
            if open.has_ended() || open.use_of() != LeaseUse::Unused {
                return true;
            }
            let Some(vm) = listener.running_vm(&open.path) else { return false };
            let (lease, process) = (lease.clone(), vm.process);
            listener.used(&open.grant, &vm, has_other_user(lease, process));
            true
        };
        if !needless() {
            self.listener.used(&open.grant, &starter, Box::new(needless));
        }
    }

    /// Tells once that the lender is lost.
    pub(super) fn on_lost(&self) -> OnLost {
        let (listener, lost) = (self.listener.clone(), self.open.clone());
        let gate = self.gate.clone();
        Box::new(move |reason: String| {
            if let Some(open) = lost.upgrade() {
                // Windows of others are closed at their lenders: no other process takes those conversations
                // up meanwhile. One that goes on in this one's place finds the lender lost by itself.
                let _passage = gate.enter();
                open.leave_peers();
                listener.lender_lost(&open.grant, &reason);
            }
        })
    }

    /// The device at the other end of `stream`, or the front here of the medium there.
    pub(super) fn attach(
        &self,
        open: &Arc<Open>,
        stream: Arc<dyn rackbus_link::Conversation>,
    ) -> Result<Box<dyn ServedDevice>, RequestRefused> {
        let on_lost = self.on_lost();
        let none = |error: String| RequestRefused::new(Errno::NODEV, error);
        match open.grant.placement {
            Placement::Host => Err(none("it is in this host's own PCI tree".to_owned())),
            Placement::Lender => {
                let device = RemoteDevice::attach(stream, on_lost);
                let device = device.map_err(|error| none(error.to_string()))?;
                let device = device.counted_by(open.lent_out.clone());
                let conversation = device.conversation();
                let windows = Box::new(conversation.clone());
                open.attached(Attachment::Function(conversation));
                show(open, self.follow(open, device, Some(windows)))
            }
            Placement::Borrower => {
                let offered = OfferedMedium::receive(&*stream, &self.hello.to);
                let (medium, handles) = offered.map_err(|error| none(error.to_string()))?;
                let function = &open.grant.function;
                let lending = self.fabric.front_lending(&function.to_string(), &self.hello.from);
                let lending = lending.map_err(|error| none(error.to_string()))?;
                let name = &function.device;
                let slot = open.begin_front(SUCCESSION).map_err(front_refused)?;
                let Some(carrier) = stream.carrier() else {
                    let access = MediumAccess::Handles(handles);
                    let device =
                        PlacedDevice::start(name, &medium, access, stream, lending, on_lost)?;
                    open.attached(Attachment::Medium(device.conversation(), None));
                    return show(open, self.follow(open, device.keeping(slot), None));
                };
                let session = self.session(open, &medium, HeldSession::Begins(self.hold))?;
                let side = SessionSide::Asks;
                let lane = self.lanes.initiator(&*stream, &medium, &self.hello.to);
                let carried = Carried { carrier, session: session.clone(), side, lane };
                let on_lost = because_of(&session, on_lost);
                let (access, stream) = (MediumAccess::Carried(carried), Arc::new(session.clone()));
                let device = PlacedDevice::start(name, &medium, access, stream, lending, on_lost);
                let device = device.inspect_err(|_| session.shut_down())?;
                open.attached(Attachment::Medium(device.conversation(), Some(session)));
                show(open, self.follow(open, device.keeping(slot), None))
            }
        }
    }

    /// The session with the lender of `medium` on another machine.
    pub(super) fn session(
        &self,
        open: &Open,
        medium: &OfferedMedium,
        held: HeldSession<'_>,
    ) -> Result<CarriedSession, RequestRefused> {
        let none = |error: String| RequestRefused::new(Errno::NODEV, error);
        let older =
            || none(format!("the node of {} is older than this one; upgrade it", self.hello.to));
        let offered = medium.session.as_ref().ok_or_else(older)?;
        let (link, address) = (self.link.clone(), open.grant.address.clone());
        let (listener, grant) = (self.listener.clone(), open.grant.clone());
        let on_change = Box::new(move |_| listener.link_changed(&grant));
        let hello = self.hello.clone();
        let session = hold_session(offered, held, link, address, hello, on_change);
        session.map_err(|error| none(error.to_string()))
    }

    /// `device`, among the functions of its user: those of a VM, or of a group.
    pub(super) fn follow(
        &self,
        open: &Open,
        device: impl ServedDevice + 'static,
        windows: Option<Box<dyn PeerWindows>>,
    ) -> Box<dyn ServedDevice> {
        match self.join(open, device.shape(), windows) {
            Some(membership) => Box::new(Followed::new(device, membership)),
            None => Box::new(device),
        }
    }

    /// The same for a device that another process of this node followed, which its user has programmed. It
    /// `had` these windows, each an address and a length.
    pub(super) fn follow_again(
        &self,
        open: &Open,
        device: impl ServedDevice + 'static,
        windows: Option<Box<dyn PeerWindows>>,
        had: Vec<(u64, u64)>,
    ) -> Box<dyn ServedDevice> {
        match self.join(open, device.shape(), windows) {
            Some(membership) => {
                membership.inherit(had);
                Box::new(Followed::again(device, membership, &self.peers, self.gate.clone()))
            }
            None => Box::new(device),
        }
    }

    pub(super) fn join(
        &self,
        open: &Open,
        shape: &DeviceShape,
        windows: Option<Box<dyn PeerWindows>>,
    ) -> Option<Arc<PeerMembership>> {
        let vm = self.listener.vm_of(&open.path).map(|vm| format!("VM {vm}"));
        let group = || Some(format!("group {}", open.grant.group.as_ref()?));
        let user = vm.or_else(group)?;
        let name = open.grant.function.to_string();
        let membership = Arc::new(self.peers.join(&user, &name, shape, windows));
        *open.membership.lock().unwrap_or_else(PoisonError::into_inner) = Some(membership.clone());
        Some(membership)
    }
}

#[cfg(test)]
mod tests;
