//! What a node lends.
//!
//! The lender decides who may use a function and when that ends; what it lends is behind a trait, so
//! that it does the same for all: a device model on an engine here ([`Modelled`]), a physical function,
//! another process' vfio-user server.

mod modelled;

use std::fmt::Debug;
use std::io;
use std::sync::Arc;
use std::time::Duration;

use rackbus_control::api::DeviceReport;
use rackbus_devices::class::{LentTo, no_levels};
use rackbus_devices::{Folders, RackDevice};
use rackbus_memory::{Carried, CarriedSession, Lending, Stream};
use rackbus_metal::SavedLoan;
use rackbus_pci::vfio_user::{RestingConversation, SavedSession, ServedDevice};
use rackbus_pci::{MediumOffer, SaveError};
use rackbus_qos::LevelRoom;

use crate::upstream::Upstream;
use crate::vfio::{self, Physical, WindowLending};

pub use modelled::{Factory, Modelled, Successor};

/// Why a function is not ready.
#[derive(Debug)]
pub enum NotReady {
    /// It does not answer in the time that it was given.
    Hangs,
    /// It cannot be run.
    Failed(io::Error),
}

/// A function that a node lends. Calls come from any thread; those that change who has it come one
/// at a time.
pub trait Lendable: Debug + Send + Sync {
    /// Whether a node begins without it and has it ready when it is asked for: the machine may be without it now.
    fn may_be_absent(&self) -> bool {
        false
    }

    /// It is not lent any more: whoever had it before gets it back, where there was somebody.
    fn release(&self) {}

    /// Has it ready for its next user, reset and scrubbed: starts what it runs on, at first and after
    /// that failed. Waits no longer than `limit`.
    ///
    /// # Errors
    /// [`NotReady`].
    fn arm(&self, limit: Duration) -> Result<(), NotReady>;

    /// Promises its next user this service level, or as much as anybody gets; nobody has what the one before had.
    ///
    /// # Errors
    /// Why not, and what could be promised instead.
    fn set_level(&self, level: Option<&str>, _to: LentTo) -> Result<(), String> {
        no_levels(level)
    }

    /// Promises the user that it has another service level from now on. One that cannot be kept changes nothing.
    ///
    /// # Errors
    /// As [`set_level`](Lendable::set_level).
    fn change_level(&self, level: Option<&str>) -> Result<(), String> {
        no_levels(level)
    }

    /// Promises a user that continues with what was [resumed](Lendable::resume) this service level, which it had before,
    /// whether it fits now or not.
    ///
    /// # Errors
    /// Why no such level can be kept.
    fn resume_level(&self, level: Option<&str>, _to: LentTo) -> Result<(), String> {
        no_levels(level)
    }

    /// What its device could still promise; nothing where there are no levels.
    fn room(&self) -> Option<LevelRoom> {
        None
    }

    /// Gives it to the user at the other end of `stream`, whose memory `lending` lends, for as long as
    /// the stream is open. Dropping what is returned takes everything of the user's away, resets and
    /// scrubs it. Does not wait for it.
    ///
    /// # Errors
    /// When it cannot be used.
    fn attach(&self, lending: Lending, stream: &Arc<dyn Stream>) -> io::Result<Box<dyn Attached>>;

    /// Lends it to the kernel of `borrower`, which lends its memory by `lending`, through this host's NTB to that host, for
    /// the lease of this epoch: in that host's own PCI tree. Dropping what is returned takes it away, resets and scrubs
    /// it; where it is lost before, the conversation with the borrower's node, `stream`, is ended.
    ///
    /// # Errors
    /// When it cannot be lent so, or there is no such NTB.
    fn lend_in_window(
        &self,
        _borrower: &str,
        _epoch: u64,
        _lending: Lending,
        _stream: &Arc<dyn Stream>,
    ) -> io::Result<LentInWindow> {
        let what = "a function of another program cannot be lent to a host's own kernel";
        Err(io::Error::new(io::ErrorKind::Unsupported, what))
    }

    /// How it is lent in windows, if it can be.
    fn windows(&self) -> Option<&WindowLending> {
        None
    }

    /// Goes on, as [`resume`](Lendable::resume), with what another process `lent` in its window to `borrower`, and with what it
    /// saved of a model.
    ///
    /// # Errors
    /// When that is not possible. Then it is as if it did not run, and the borrower reaches nothing of it.
    fn resume_in_window(
        &self,
        _saved: Option<SavedSession>,
        _user: User,
        (_borrower, _lent): (&str, SavedLoan),
    ) -> io::Result<LentInWindow> {
        Err(io::ErrorKind::Unsupported.into())
    }

    /// Takes all of its user's memory and interrupts away at once, although it hangs. It is not
    /// scrubbed by that.
    fn revoke(&self);

    /// What it counts and how it is, beside what is `known`. Nothing is waited for.
    fn describe(&self, known: DeviceReport) -> DeviceReport;

    /// The function as a value, and the `conversation` with its user, which rests. From now on nothing
    /// happens here, until it is [taken back](Lendable::take_back); a function of the machine goes on meanwhile. `None` when there is nothing to continue
    /// with: it does not run, or its user's memory was taken away. Waits no longer than `limit`.
    ///
    /// # Errors
    /// [`NotSaved`]; it continues as it was.
    fn save(
        &self,
        _conversation: RestingConversation,
        _limit: Duration,
    ) -> Result<Option<SavedSession>, NotSaved> {
        Err(NotSaved::Refused(SaveError::Unsupported))
    }

    /// Whether the system has ended all that the saved function asked it for: see
    /// [`is_settled`](rackbus_pci::Function::is_settled).
    fn is_settled(&self) -> bool {
        true
    }

    /// Whether it is of the kind of which a function of class `class` was saved: the rack file may name another one since.
    fn continues(&self, class: &str) -> bool {
        ![crate::vfio::CLASS, rackbus_devices::upstream::CLASS].contains(&class)
    }

    /// Goes on here after all with what was saved.
    fn take_back(&self, _saved: SavedSession) {}

    /// Goes on, in the place of [`arm`](Lendable::arm), with what another process saved; for the `user`
    /// that it had, which lends its memory by the lending and has the function as long as the stream is
    /// open.
    ///
    /// # Errors
    /// When that is not possible. Then it is as if it did not run.
    fn resume(&self, _saved: SavedSession, _user: Option<User>) -> io::Result<Option<Resumed>> {
        Err(io::ErrorKind::Unsupported.into())
    }
}

/// Who uses a function.
pub struct User {
    /// Its memory, as the fabric lends it to the function.
    pub lending: Lending,
    /// Its conversation, which is open as long as it has the function.
    pub stream: Arc<dyn Stream>,
    /// What carries the operations of its front on another machine.
    pub session: Option<CarriedSession>,
}

/// A function in the hands of its user, and where the conversation with it rested.
pub type Resumed = (Box<dyn Attached>, RestingConversation);

/// Why a function was not saved.
#[derive(Debug)]
pub enum NotSaved {
    /// It does not answer in the time that it was given.
    Hangs,
    /// The model or its session cannot be saved now.
    Refused(SaveError),
}

/// A function in a borrower's window.
#[derive(Debug)]
pub struct LentInWindow {
    /// Offset of its control area there.
    pub offset: u64,
    /// What takes it away when it is dropped.
    pub held: Box<dyn Debug + Send>,
}

/// A function in the hands of one user.
pub trait Attached: ServedDevice {
    /// Hands its medium to a front at the user's, instead of itself, until it is dropped; where that shares
    /// no memory with this process, by operations that `carried` carries.
    ///
    /// # Errors
    /// Why the medium cannot be obtained.
    fn serve_medium(&self, carried: Option<Carried>) -> Result<MediumOffer, String>;

    /// Its user has the medium and nothing of the registers, from the beginning or again after a restart in place; of the
    /// BARs those whose memory goes along with a medium that is not `carried` to another machine.
    fn share_medium(&self, _carried: bool) {}
}

/// What `host` lends of a rack's devices, which find their files in `folders`; functions of the machine also through
/// its NTBs. Those that only the timing model knows are left out.
pub fn of_host(
    host: &str,
    devices: &[RackDevice],
    folders: &Folders,
    ntbs: &Arc<vfio::Ntbs>,
) -> Vec<(String, Arc<dyn Lendable>)> {
    let lendable = |device: &RackDevice| {
        let name = device.function.strip_prefix(host)?.strip_prefix('/')?.to_owned();
        let (config, folders) = (device.config.clone()?, folders.clone());
        if let Some(server) = config.upstream(&folders) {
            let upstream = Upstream::new(&name, server);
            return Some((name, Arc::new(upstream) as Arc<dyn Lendable>));
        }
        if let Some(function) = config.physical() {
            let taker = vfio::taker(host, &folders);
            let windows = WindowLending::new(ntbs.clone(), taker.clone());
            let physical = Physical::new(&name, function, &taker).with_windows(windows);
            return Some((name, Arc::new(physical) as Arc<dyn Lendable>));
        }
        let windows = WindowLending::new(ntbs.clone(), vfio::taker(host, &folders));
        let modelled = Modelled::described(&name, config, folders).with_windows(windows);
        Some((name, Arc::new(modelled) as Arc<dyn Lendable>))
    };
    devices.iter().filter_map(lendable).collect()
}
