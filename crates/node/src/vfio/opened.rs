//! A physical function that is open, with what its user gave it.

use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::{fmt, io};

use rackbus_memory::{Access, Lending, MapError, MemoryHandle, Stream};
use rackbus_pci::vfio_user::{RequestRefused, UserResources};
use rackbus_spec::vfio_user::region;
use rackbus_vfio::{InterruptIndex, IommuFault, VfioDevice, VfioError};
use tracing::Span;

use super::saved::PhysicalState;
use super::session::refusal;
use super::shown::{NoTableByte, ShownConfiguration};
use super::watch::{WatchThread, WatchedEvents};
use super::wiring::{NoVector, WiredEvents, Wiring};
use super::{Shared, locked};
use crate::mappings::{Mappings, MapsMemory};
use crate::wired::WiredInterrupts;

/// A function that is open, for its session, for who takes it away, and for who passes it on to another process.
pub(super) struct OpenedFunction {
    pub(super) device: VfioDevice,
    pub(super) wiring: Mutex<Wiring<OwnedFd>>,
    pub(super) shown: Mutex<ShownConfiguration>,
    pub(super) mappings: Mutex<Mappings>,
    /// What its user has wired.
    pub(super) interrupts: WiredInterrupts,
    /// By what its end is known; `None` where the kernel does not tell.
    pub(super) watched: Option<Arc<WatchedEvents>>,
    user: Arc<dyn Stream>,
    /// It was removed, or failed: it answers as an absent one.
    gone: AtomicBool,
    /// Its user's lease, which what is logged is about.
    about: Span,
}

impl fmt::Debug for OpenedFunction {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("OpenedFunction").field("device", &self.device).finish_non_exhaustive()
    }
}

impl OpenedFunction {
    /// A function that was reset, for a new user.
    pub(super) fn reset(
        name: &str,
        device: VfioDevice,
        user: &Arc<dyn Stream>,
    ) -> Result<OpenedFunction, VfioError> {
        let shown = ShownConfiguration::of(&configuration(&device)?);
        let watched = WatchedEvents::of(&device);
        // It is lent anyway: its loss shows at the next access.
        let unwatched = |error: &io::Error| tracing::warn!(device = name, %error, "the device cannot be watched");
        let watched = watched.inspect_err(unwatched).ok();
        Ok(OpenedFunction {
            wiring: Mutex::new(wiring(&device)),
            device,
            shown: Mutex::new(shown),
            mappings: Mutex::default(),
            interrupts: WiredInterrupts::default(),
            watched: watched.map(Arc::new),
            user: user.clone(),
            gone: AtomicBool::new(false),
            about: Span::current(),
        })
    }

    /// A function that another process passed on with its user, who lends its memory by `lending`.
    ///
    /// # Errors
    /// When it is not as `state` says, or what its user gave it is not lent here: it reaches nothing any more then.
    pub(super) fn passed_on(
        (device, watched): (VfioDevice, WatchedEvents),
        state: &PhysicalState,
        (resources, msix_table): (UserResources, &[(u32, u8)]),
        lending: &Lending,
        user: &Arc<dyn Stream>,
    ) -> io::Result<OpenedFunction> {
        let config = configuration(&device).map_err(io::Error::other)?;
        let shown = ShownConfiguration::of(&config).with_written(state.control, msix_table);
        let other = || io::Error::other("its MSI-X table is smaller than it was");
        let shown = shown.map_err(|NoTableByte(_)| other())?;
        let UserResources { mappings, windows, vectors, pin } = resources;
        let numbers = vectors.iter().map(|(vector, _)| *vector);
        let interrupts = WiredInterrupts::resumed(lending, numbers, pin.is_some());
        let interrupts = interrupts.map_err(io::Error::other)?;
        let events = WiredEvents { vectors, pin, live: state.live };
        let wiring = wiring(&device).with_events(events, shown.enabled());
        let wiring =
            wiring.map_err(|NoVector| io::Error::other("it has fewer vectors than it had"))?;
        let opened = OpenedFunction {
            device,
            wiring: Mutex::new(wiring),
            shown: Mutex::new(shown),
            mappings: Mutex::default(),
            interrupts,
            watched: Some(Arc::new(watched)),
            user: user.clone(),
            gone: AtomicBool::new(false),
            about: Span::current(),
        };
        // Where one is not lent, the function is closed with `opened`, before the others end.
        let lent = locked(&opened.mappings).resume(lending, mappings, windows);
        lent.map_err(io::Error::other)?;
        Ok(opened)
    }

    pub(super) fn is_gone(&self) -> bool {
        self.gone.load(Ordering::Acquire)
    }

    /// Takes all of the user's memory and interrupts away, whatever the session is doing.
    pub(super) fn revoke(&self) {
        // Before all that may wait. A function that is gone masters nothing.
        let _ = self.device.stop_mastering();
        if let Err(error) = self.device.container().revoke() {
            tracing::error!(address = %self.device.address(), %error, "memory is not taken away");
        }
        for kind in [InterruptIndex::Intx, InterruptIndex::Msi, InterruptIndex::Msix] {
            // All but one of them are off.
            let _ = self.device.unwire(kind);
        }
    }
}

fn configuration(device: &VfioDevice) -> Result<Vec<u8>, VfioError> {
    let size = usize::try_from(device.region(region::CONFIG).size).unwrap_or(0).min(4096);
    let mut config = vec![0; size];
    device.read(region::CONFIG, 0, &mut config)?;
    Ok(config)
}

/// The interrupts of a function of which none is wired.
fn wiring(device: &VfioDevice) -> Wiring<OwnedFd> {
    let vectors = |kind| device.vectors(kind);
    let grows = device.grows(InterruptIndex::Msix);
    Wiring::new(vectors(InterruptIndex::Msi), vectors(InterruptIndex::Msix), grows)
}

impl MapsMemory for OpenedFunction {
    fn map(
        &self,
        (iova, length): (u64, u64),
        access: Access,
        memory: &MemoryHandle,
        window: bool,
    ) -> Result<(), RequestRefused> {
        let region = memory.map(length, access, window).map_err(MapError::from)?;
        match self.device.container().map(iova, Arc::new(region), access) {
            Err(VfioError::Revoked) => Err(MapError::Revoked.into()),
            mapped => mapped.map_err(refusal),
        }
    }

    fn unmap(&self, (iova, length): (u64, u64)) -> Result<(), RequestRefused> {
        match self.device.container().unmap(iova, length) {
            // It was taken away.
            Err(VfioError::Revoked) => Ok(()),
            unmapped => unmapped.map_err(refusal),
        }
    }
}

impl Shared {
    /// Counts what the IOMMU refuses the function.
    pub(super) fn counting_faults(
        self: &Arc<Shared>,
        name: &str,
    ) -> impl Fn(IommuFault) + Send + use<> {
        let (device, shared) = (name.to_owned(), self.clone());
        move |fault: IommuFault| {
            tracing::warn!(device, %fault, "the IOMMU refused an access");
            shared.refused(fault);
        }
    }

    /// Watches the function of a session, until that ends or the function is passed on.
    pub(super) fn watch(self: &Arc<Shared>, name: &str, opened: &Arc<OpenedFunction>) {
        let Some(watched) = &opened.watched else { return };
        let _about = opened.about.enter();
        let (device, of, shared) = (name.to_owned(), Arc::downgrade(opened), self.clone());
        let ended = move |reason: &'static str| {
            tracing::error!(device, reason, "a lent function of this machine ends");
            *locked(&shared.trouble) = Some(format!("{device}: {reason}"));
            if let Some(opened) = of.upgrade() {
                opened.gone.store(true, Ordering::Release);
            }
        };
        let refused = self.counting_faults(name);
        let (address, user) = (opened.device.address(), opened.user.clone());
        match WatchThread::begin(watched.clone(), address, user, ended, refused) {
            Ok(watch) => *locked(&self.watch) = Some(watch),
            Err(error) => tracing::warn!(device = name, %error, "the device cannot be watched"),
        }
    }
}
