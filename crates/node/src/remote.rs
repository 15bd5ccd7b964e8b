//! A function of another host, as its borrower's socket serves it.
//!
//! What traps (configuration space, registers) is forwarded over the link; memory and interrupt
//! descriptors are passed on, so that DMA and interrupts need nobody here. When the lender is
//! lost, this keeps answering in its place as an absent device does: reads are all ones, writes
//! go nowhere. The driver sees a device that was pulled out, not a machine that hangs.

use std::collections::BTreeMap;
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use rackbus_fabric::BarPlace;
use rackbus_memory::{Access, HandleRef, MapError, MemoryHandle, Stream};
use rackbus_pci::endpoint::{FunctionRegion, IrqChange};
use rackbus_pci::vfio_user::{
    Client, ClientError, DeviceShape, RegionShape, RequestRefused, ServedDevice, SharedPart,
};
use rackbus_pci::{BarMemory, NotPolled, PolledRegisters};
use rackbus_spec::vfio_user::{IrqSetFlags, irq, region};
use rustix::io::Errno;

use crate::peers::{ACCESS, PeerWindows};

use crate::lent_out::LentOut;

/// Called once when the lender is lost, with how it was noticed.
pub type OnLost = Box<dyn FnOnce(String) + Send>;

/// A function at the other end of a link.
#[derive(Debug)]
pub struct RemoteDevice {
    shape: DeviceShape,
    conversation: LenderConversation,
    /// Interrupt indexes that vectors are wired at.
    vectors: Vec<u32>,
    /// Whether the other end takes writes that it does not answer.
    posts: bool,
    /// Counts what the other end is lent, where the memory is this host's.
    lent_out: Option<LentOut>,
}

/// The conversation with the lender, which others may end.
#[derive(Debug, Clone)]
pub struct LenderConversation {
    client: Arc<Client>,
    /// The lender is lost, or the borrower detached.
    gone: Arc<AtomicBool>,
    /// The borrower detached, while the lender was there.
    ended_here: Arc<AtomicBool>,
    /// Registers that the user has as memory, by the BAR: what a lender that is lost cannot retire itself.
    registers: Arc<Mutex<BTreeMap<u8, PolledRegisters>>>,
    refused: Arc<RefusedRequests>,
}

/// Requests of the user's that were refused on this side. What the lender refuses it counts itself.
#[derive(Debug, Default)]
struct RefusedRequests {
    count: AtomicU64,
    /// The request that is answered now was refused by the lender.
    by_lender: AtomicBool,
}

impl LenderConversation {
    /// How many requests of the user's were refused without the lender being asked.
    pub fn refused(&self) -> u64 {
        self.refused.count.load(Ordering::Relaxed)
    }

    /// It ends for this side's reasons from now on: that it does is no loss.
    pub fn expect_end(&self) {
        self.ended_here.store(true, Ordering::Release);
    }

    /// Lets the lender go. The device answers as an absent one from now on.
    pub fn end(&self) {
        // What was lost before is lost anyway: a user may release a function because it fails.
        if !self.client.is_closed() {
            self.expect_end();
        }
        self.gone.store(true, Ordering::Release);
        self.client.shut_down();
        self.retire_registers();
    }

    /// Registers in memory read all ones from now on, as those do that are asked for by messages.
    fn retire_registers(&self) {
        let mut registers = self.registers.lock().unwrap_or_else(PoisonError::into_inner);
        std::mem::take(&mut *registers).into_values().for_each(|registers| registers.retire());
    }

    /// Has registers retired when the lender is gone, which it may be by now.
    fn keep_registers(&self, bar: u8, registers: PolledRegisters) {
        let kept = &self.registers;
        kept.lock().unwrap_or_else(PoisonError::into_inner).insert(bar, registers);
        if self.gone.load(Ordering::Acquire) {
            self.retire_registers();
        }
    }

    /// The registers that the user has as memory, by the BAR, for a process that goes on with the conversation: descriptors, and
    /// their lengths in bytes.
    ///
    /// # Errors
    /// When the process has no descriptors left.
    pub fn shared_registers(&self) -> Result<Vec<(u8, OwnedFd, u64)>, NotPolled> {
        let registers = self.registers.lock().unwrap_or_else(PoisonError::into_inner);
        let each = registers.iter().map(|(bar, registers)| {
            let (file, length) = registers.descriptor()?;
            Ok((*bar, file, length))
        });
        each.collect()
    }

    /// Has registers [retired](LenderConversation::end) with the conversation that another process gave to the user.
    ///
    /// # Errors
    /// When they are none.
    pub fn inherit_registers(&self, bar: u8, file: OwnedFd, length: u64) -> Result<(), NotPolled> {
        self.keep_registers(bar, PolledRegisters::adopt(file, length)?);
        Ok(())
    }

    /// What leads another process to the conversation, to [go on](RemoteDevice::resume) with it between
    /// two requests. `None` when the conversation has ended.
    ///
    /// # Errors
    /// When it continues, and is none that another process can hold.
    pub fn handle(&self) -> Result<Option<HandleRef<'_>>, NotHeritable> {
        match self.gone.load(Ordering::Acquire) {
            true => Ok(None),
            false => self.client.handle().map(Some).ok_or(NotHeritable),
        }
    }
}

/// The link's conversations cannot be held by another process.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct NotHeritable;

impl PeerWindows for LenderConversation {
    fn open(
        &self,
        iova: u64,
        length: u64,
        place: &BarPlace,
        memory: &MemoryHandle,
    ) -> Result<(), String> {
        let opened = self.client.open_window(iova, length, ACCESS, place, memory.as_descriptor());
        opened.map_err(|error| error.to_string())
    }

    fn close(&self, iova: u64, length: u64) -> Result<(), String> {
        match self.client.close_window(iova, length) {
            // The user has mapped memory of its own there meanwhile.
            Err(ClientError::Refused(Errno::NOENT)) => Ok(()),
            closed => closed.map_err(|error| error.to_string()),
        }
    }
}

impl RemoteDevice {
    /// Takes over a conversation with the lender: learns what the function looks like, and
    /// watches for the lender's end.
    ///
    /// # Errors
    /// [`ClientError`] when the lender does not hold its side.
    pub fn attach(stream: Arc<dyn Stream>, on_lost: OnLost) -> Result<Self, ClientError> {
        let client = Client::with_stream(stream)?;
        let shape = learn(&client)?;
        Ok(RemoteDevice::with(client, shape, on_lost))
    }

    /// Goes on with a conversation that another process began, about a function that it knew to have this
    /// shape. Nothing is asked of the lender.
    pub fn resume(stream: Arc<dyn Stream>, shape: DeviceShape, on_lost: OnLost) -> Self {
        RemoteDevice::with(Client::resume(stream), shape, on_lost)
    }

    fn with(client: Client, shape: DeviceShape, on_lost: OnLost) -> Self {
        let (gone, ended_here, registers, refused) = Default::default();
        let client = Arc::new(client);
        let conversation = LenderConversation { client, gone, ended_here, registers, refused };
        let watcher = std::thread::Builder::new().name("lender watch".into()).spawn({
            let conversation = conversation.clone();
            move || {
                conversation.client.wait_closed();
                conversation.gone.store(true, Ordering::Release);
                conversation.client.shut_down();
                conversation.retire_registers();
                if !conversation.ended_here.load(Ordering::Acquire) {
                    on_lost("its node closed the link, or does not answer".to_owned());
                }
            }
        });
        if let Err(cause) = watcher {
            tracing::error!(%cause, "cannot start a thread to watch the lender; its loss shows at the next access");
        }
        // A node takes vectors by either index, and knows which kind the driver enabled: of a function of a machine, each
        // index has as many as the function has of that kind, which may be none.
        let count = |index: u32| shape.irqs.get(index as usize).copied().unwrap_or(0);
        let most = if count(irq::MSI) > count(irq::MSIX) { irq::MSI } else { irq::MSIX };
        let vectors = vec![most];
        RemoteDevice { shape, conversation, vectors, posts: true, lent_out: None }
    }

    /// The same, whose mappings count.
    #[must_use]
    pub fn counted_by(mut self, lent_out: LentOut) -> Self {
        self.lent_out = Some(lent_out);
        self
    }

    /// As one whose server is no rackbus node: it has its vectors under MSI and under MSI-X, each apart, and
    /// which of them the driver enabled only its configuration space knows. So both are wired. It may answer
    /// posted writes. Its BARs are not mapped: nothing would take them away from a former user.
    #[must_use]
    pub fn of_foreign_server(mut self) -> Self {
        let counts = &self.shape.irqs;
        let has = |index: &u32| counts.get(*index as usize).is_some_and(|count| *count > 0);
        self.vectors = [irq::MSIX, irq::MSI].into_iter().filter(has).collect();
        self.shape.regions.iter_mut().for_each(|region| region.mappable = None);
        self.posts = false;
        self
    }

    /// The conversation with the lender.
    pub fn conversation(&self) -> LenderConversation {
        self.conversation.clone()
    }

    /// Whether the other end still answers for itself.
    pub fn is_there(&self) -> bool {
        !self.conversation.gone.load(Ordering::Acquire)
    }

    fn client(&self) -> &Client {
        &self.conversation.client
    }

    /// Sorts an outcome: refusals go back to the user, a lost lender answers like no device.
    fn or_absent<T>(
        &self,
        outcome: Result<T, ClientError>,
        absent: T,
    ) -> Result<T, RequestRefused> {
        match outcome {
            Ok(value) => Ok(value),
            Err(ClientError::Refused(errno)) => {
                self.conversation.refused.by_lender.store(true, Ordering::Relaxed);
                Err(RequestRefused::new(errno, "the lender refused"))
            }
            Err(_) if self.conversation.gone.load(Ordering::Acquire) => Ok(absent),
            Err(error) => {
                tracing::warn!(%error, "the lender does not answer; it counts as lost");
                // Wakes the watcher, which tells the node.
                self.client().shut_down();
                Ok(absent)
            }
        }
    }
}

impl Drop for RemoteDevice {
    fn drop(&mut self) {
        self.conversation.end();
        if let Some(lent_out) = &self.lent_out {
            lent_out.end_all();
        }
    }
}

impl ServedDevice for RemoteDevice {
    fn shape(&self) -> &DeviceShape {
        &self.shape
    }

    fn read(
        &self,
        target: FunctionRegion,
        offset: u64,
        count: usize,
    ) -> Result<Vec<u8>, RequestRefused> {
        let mut data = vec![0; count];
        let read = self.client().read(number(target), offset, &mut data).map(|()| data);
        self.or_absent(read, vec![0xff; count])
    }

    fn write(
        &self,
        target: FunctionRegion,
        offset: u64,
        data: Vec<u8>,
        posted: bool,
    ) -> Result<(), RequestRefused> {
        let written = match posted && self.posts {
            true => self.client().post(number(target), offset, &data),
            false => self.client().write(number(target), offset, &data),
        };
        self.or_absent(written, ())
    }

    fn map(
        &self,
        iova: u64,
        length: u64,
        access: Access,
        memory: Option<MemoryHandle>,
    ) -> Result<(), RequestRefused> {
        let counts = self.lent_out.as_ref().zip(memory.as_ref());
        let counted = counts.map(|(lent_out, memory)| lent_out.lend(iova, length, memory));
        let before = counted.transpose().inspect_err(|error| {
            tracing::warn!(%error, "memory is not lent");
        });
        let before = before.map_err(MapError::from)?;
        let parts = memory.as_ref().map(MemoryHandle::as_descriptor);
        let mapped = self.or_absent(self.client().dma_map(iova, length, access, parts), ());
        if let (Err(_), Some((lent_out, _)), Some(before)) = (&mapped, counts, before) {
            lent_out.take_back(iova, before);
        }
        mapped
    }

    fn unmap(&self, iova: u64, length: u64) -> Result<(), RequestRefused> {
        self.or_absent(self.client().dma_unmap(iova, length), ())?;
        if let Some(lent_out) = &self.lent_out {
            lent_out.end(iova, length);
        }
        Ok(())
    }

    fn unmap_all(&self) -> Result<(), RequestRefused> {
        self.or_absent(self.client().dma_unmap_all(), ())?;
        if let Some(lent_out) = &self.lent_out {
            lent_out.end_all();
        }
        Ok(())
    }

    fn registers(&self, bar: u8) -> Result<(OwnedFd, u64), RequestRefused> {
        // The same memory as long as the conversation goes on: who asks often takes no descriptors.
        let kept = self.conversation.registers.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(registers) = kept.get(&bar) {
            return Ok(registers.descriptor()?);
        }
        drop(kept);
        let absent = || RequestRefused::new(Errno::NODEV, "the lender is gone");
        let given = self.or_absent(self.client().registers(bar).map(Some), None)?;
        let (file, length) = given.ok_or_else(absent)?;
        let registers = PolledRegisters::adopt(file, length)?;
        let given = registers.descriptor()?;
        self.conversation.keep_registers(bar, registers);
        Ok(given)
    }

    fn set_irqs(&self, change: IrqChange) -> Result<(), RequestRefused> {
        use IrqSetFlags as F;
        let client = self.client();
        let none = |index, count, action| {
            client.set_irqs(index, 0, count, F::DATA_NONE | action, &[], &[])
        };
        let outcome = match change {
            IrqChange::WireVectors(start, fds) => self.vectors.iter().try_for_each(|index| {
                // One index may have fewer vectors than the other.
                let left = self.shape.irqs[*index as usize].saturating_sub(start) as usize;
                client.wire_irqs(*index, start, &fds[..fds.len().min(left)])
            }),
            IrqChange::UnwireVectors => {
                self.vectors.iter().try_for_each(|index| none(*index, 0, F::ACTION_TRIGGER))
            }
            IrqChange::FireVectors(vectors) => vectors.iter().try_for_each(|vector| {
                let flags = F::DATA_NONE | F::ACTION_TRIGGER;
                let index = self.vectors.first().copied().unwrap_or(irq::MSIX);
                client.set_irqs(index, (*vector).into(), 1, flags, &[], &[])
            }),
            IrqChange::WireIntx(Some(fd)) => client.wire_irqs(irq::INTX, 0, &[Some(fd)]),
            IrqChange::WireIntx(None) => none(irq::INTX, 0, F::ACTION_TRIGGER),
            IrqChange::MaskIntx(true) => none(irq::INTX, 1, F::ACTION_MASK),
            IrqChange::MaskIntx(false) => none(irq::INTX, 1, F::ACTION_UNMASK),
            IrqChange::FireIntx => none(irq::INTX, 1, F::ACTION_TRIGGER),
        };
        self.or_absent(outcome, ())
    }

    fn count_refused(&self) {
        let refused = &self.conversation.refused;
        if !refused.by_lender.swap(false, Ordering::Relaxed) {
            refused.count.fetch_add(1, Ordering::Relaxed);
        }
    }

    fn reset(&self) -> Result<(), RequestRefused> {
        self.or_absent(self.client().reset(), ())
    }
}

/// A function whose lender is gone: what its user still has of it. Reads are all ones, and all else is
/// taken and has no effect.
#[derive(Debug)]
pub struct AbsentDevice(pub DeviceShape);

impl ServedDevice for AbsentDevice {
    fn shape(&self) -> &DeviceShape {
        &self.0
    }

    fn read(
        &self,
        _target: FunctionRegion,
        _offset: u64,
        count: usize,
    ) -> Result<Vec<u8>, RequestRefused> {
        Ok(vec![0xff; count])
    }

    fn write(
        &self,
        _target: FunctionRegion,
        _offset: u64,
        _data: Vec<u8>,
        _posted: bool,
    ) -> Result<(), RequestRefused> {
        Ok(())
    }

    fn map(
        &self,
        _iova: u64,
        _length: u64,
        _access: Access,
        _memory: Option<MemoryHandle>,
    ) -> Result<(), RequestRefused> {
        Ok(())
    }

    fn unmap(&self, _iova: u64, _length: u64) -> Result<(), RequestRefused> {
        Ok(())
    }

    fn unmap_all(&self) -> Result<(), RequestRefused> {
        Ok(())
    }

    fn set_irqs(&self, _change: IrqChange) -> Result<(), RequestRefused> {
        Ok(())
    }

    fn reset(&self) -> Result<(), RequestRefused> {
        Ok(())
    }
}

fn number(target: FunctionRegion) -> u32 {
    match target {
        FunctionRegion::Bar(bar) => region::BAR0 + u32::from(bar),
        FunctionRegion::Config => region::CONFIG,
    }
}

/// Asks for all regions and interrupts. What the lender says is taken as far as a PCI function
/// can have it.
fn learn(client: &Client) -> Result<DeviceShape, ClientError> {
    let mut regions = Vec::new();
    for index in 0..region::COUNT {
        let info = match client.region_info(index) {
            Ok(info) => info,
            // With EINVAL, or as some servers do, with no number.
            Err(ClientError::Refused(_)) => {
                regions.push(RegionShape::default());
                continue;
            }
            Err(error) => return Err(error),
        };
        let areas = info.areas;
        let mappable = info.memory.map(|(file, offset)| SharedPart {
            memory: BarMemory::new(file),
            offset,
            areas,
        });
        regions.push(RegionShape { size: info.size, mappable });
    }
    let mut irqs = Vec::new();
    for index in 0..irq::COUNT {
        let count = match client.irq_info(index) {
            Ok(info) => info.count,
            Err(ClientError::Refused(_)) => 0,
            Err(error) => return Err(error),
        };
        irqs.push(count.min(u32::from(rackbus_spec::pcie::msix::MAX_VECTORS)));
    }
    Ok(DeviceShape { regions, irqs })
}

#[cfg(test)]
mod tests;
