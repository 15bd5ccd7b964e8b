//! The function of another program in its user's hands: what the program was passed of that, and what is asked of it.

use std::collections::BTreeMap;
use std::process::Child;
use std::sync::{Arc, Mutex};

use rackbus_fabric::{BarPlace, Lending, LentMemory, Loan};
use rackbus_memory::{Access, Carried, MapError, MemoryHandle, UnmapError};
use rackbus_pci::MediumOffer;
use rackbus_pci::endpoint::{FunctionRegion, IrqChange};
use rackbus_pci::vfio_user::{DeviceShape, RequestRefused, ServedDevice};
use rustix::io::Errno;

use super::{end, locked};
use crate::lendable::Attached;
use crate::remote::{LenderConversation, RemoteDevice};

/// What the server was passed.
pub(super) struct Passed {
    loan: Loan<Option<MemoryHandle>>,
    /// It leads to the BAR of another function of the user's.
    window: bool,
}

/// The function in its user's hands.
pub(super) struct Session {
    pub(super) device: RemoteDevice,
    pub(super) lending: Lending,
    /// What the server was passed, by address.
    pub(super) loans: Mutex<BTreeMap<u64, Passed>>,
    /// The program, where it was run for this user.
    pub(super) process: Option<Arc<Mutex<Option<Child>>>>,
    pub(super) conversation: Arc<Mutex<Option<LenderConversation>>>,
    pub(super) unsettled: Arc<Mutex<bool>>,
}

impl Drop for Session {
    fn drop(&mut self) {
        match &self.process {
            Some(process) => {
                // Not under the lock: one that cannot be killed must not keep who takes the function away.
                let child = locked(process).take();
                if let Some(mut child) = child {
                    self.device.conversation().end();
                    end(&mut child);
                }
            }
            None => {
                let settled = self.device.is_there()
                    && self.release(|_| true).is_ok()
                    && self.device.reset().is_ok()
                    // An answer in the server's place is none.
                    && self.device.is_there();
                *locked(&self.unsettled) = !settled;
            }
        }
        // Until here it can be ended by who takes the function away. The loans end with this.
        *locked(&self.conversation) = None;
    }
}

/// Whether the server was passed just this.
fn is_passed(
    loans: &BTreeMap<u64, Passed>,
    range: (u64, u64),
    access: Access,
    wanted: Option<&MemoryHandle>,
) -> bool {
    let memory = |handle: Option<&MemoryHandle>| handle.map(|it| (it.object(), it.offset()));
    loans.get(&range.0).map(|passed| &passed.loan).is_some_and(|loan| {
        loan.range() == range
            && loan.access() == access
            && memory(loan.memory().as_ref()) == memory(wanted)
    })
}

impl Session {
    /// Passes the server a loan.
    fn pass(
        &self,
        loans: &mut BTreeMap<u64, Passed>,
        passed: Passed,
    ) -> Result<(), RequestRefused> {
        let (iova, length) = passed.loan.range();
        // What has no memory behind it is kept here, so that it can be unmapped.
        if let Some(memory) = passed.loan.memory() {
            self.device.map(iova, length, passed.loan.access(), Some(memory.clone()))?;
        }
        loans.insert(iova, passed);
        Ok(())
    }

    /// Takes back what lies in a range: windows, or what is none.
    fn unmap_within(&self, iova: u64, length: u64, windows: bool) -> Result<(), RequestRefused> {
        let wrong = UnmapError { start: iova, length };
        let last = length.checked_sub(1).and_then(|more| iova.checked_add(more)).ok_or(wrong)?;
        let mut loans = locked(&self.loans);
        let own = loans.range(..=last).filter(|(_, passed)| passed.window == windows);
        let touched = own.map(|(_, passed)| passed.loan.range());
        let touched = touched.filter(|(start, length)| start + (length - 1) >= iova);
        let inside: Vec<(u64, u64)> = touched.collect();
        let parts = inside.iter().any(|(at, length)| *at < iova || at + (length - 1) > last);
        if inside.is_empty() || parts {
            return Err(wrong.into());
        }
        inside.into_iter().try_for_each(|(iova, _)| self.take_back(&mut loans, iova))
    }

    /// Takes back all of one sort. One by one: not every server knows how to unmap several at once.
    fn release(&self, which: impl Fn(&Passed) -> bool) -> Result<(), RequestRefused> {
        let mut loans = locked(&self.loans);
        let found = loans.iter().filter(|(_, passed)| which(passed)).map(|(iova, _)| *iova);
        let found: Vec<u64> = found.collect();
        found.into_iter().try_for_each(|iova| self.take_back(&mut loans, iova))
    }

    fn take_back(
        &self,
        loans: &mut BTreeMap<u64, Passed>,
        iova: u64,
    ) -> Result<(), RequestRefused> {
        let Some(passed) = loans.get(&iova) else { return Ok(()) };
        if passed.loan.memory().is_some() {
            let (iova, length) = passed.loan.range();
            self.device.unmap(iova, length)?;
        }
        loans.remove(&iova);
        Ok(())
    }
}

impl Attached for Session {
    fn serve_medium(&self, _carried: Option<Carried>) -> Result<MediumOffer, String> {
        Err("another program serves the function whole, so its front cannot run at the borrower; \
             borrow it without `isolation = \"strict\"`"
            .to_owned())
    }
}

impl ServedDevice for Session {
    fn shape(&self) -> &DeviceShape {
        self.device.shape()
    }

    fn read(
        &self,
        region: FunctionRegion,
        offset: u64,
        count: usize,
    ) -> Result<Vec<u8>, RequestRefused> {
        self.device.read(region, offset, count)
    }

    fn write(
        &self,
        region: FunctionRegion,
        offset: u64,
        data: Vec<u8>,
        posted: bool,
    ) -> Result<(), RequestRefused> {
        self.device.write(region, offset, data, posted)
    }

    fn map(
        &self,
        iova: u64,
        length: u64,
        access: Access,
        wanted: Option<MemoryHandle>,
    ) -> Result<(), RequestRefused> {
        let mut loans = locked(&self.loans);
        // What has no memory behind it may be another function's BAR, to which there is a window.
        let window = loans.get(&iova).is_some_and(|passed| passed.window);
        if is_passed(&loans, (iova, length), access, wanted.as_ref()) || window && wanted.is_none()
        {
            // To map the same again changes nothing.
            return Ok(());
        }
        let loan = self.lending.lend(iova, length, access, wanted).map_err(MapError::from)?;
        self.pass(&mut loans, Passed { loan, window: false })
    }

    fn unmap(&self, iova: u64, length: u64) -> Result<(), RequestRefused> {
        self.unmap_within(iova, length, false)
    }

    fn unmap_all(&self) -> Result<(), RequestRefused> {
        self.release(|passed| !passed.window)
    }

    fn open_window(
        &self,
        iova: u64,
        length: u64,
        access: Access,
        place: BarPlace,
        memory: MemoryHandle,
    ) -> Result<(), RequestRefused> {
        if memory.is_of_device() {
            let said =
                "another program serves the function, and is not given the registers of a device";
            return Err(RequestRefused::new(Errno::NOTSUP, said));
        }
        let mut loans = locked(&self.loans);
        if is_passed(&loans, (iova, length), access, Some(&memory)) {
            return Ok(());
        }
        // QEMU maps the BARs of its other functions itself, without memory behind them.
        let bare = |passed: &Passed| {
            passed.loan.range() == (iova, length) && passed.loan.memory().is_none()
        };
        if loans.get(&iova).is_some_and(bare) {
            loans.remove(&iova);
        }
        let loan = self.lending.lend_bar(iova, length, access, &place, memory);
        self.pass(&mut loans, Passed { loan: loan.map_err(MapError::from)?, window: true })
    }

    fn close_window(&self, iova: u64, length: u64) -> Result<(), RequestRefused> {
        self.unmap_within(iova, length, true)
    }

    fn set_irqs(&self, change: IrqChange) -> Result<(), RequestRefused> {
        self.device.set_irqs(change)
    }

    fn reset(&self) -> Result<(), RequestRefused> {
        self.device.reset()
    }
}
