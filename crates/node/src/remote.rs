//! A function of another host, as its borrower's socket serves it.
//!
//! What traps (configuration space, registers) is forwarded over the link; memory and interrupt
//! descriptors are passed on, so that DMA and interrupts need nobody here. When the lender is
//! lost, this keeps answering in its place as an absent device does: reads are all ones, writes
//! go nowhere. The driver sees a device that was pulled out, not a machine that hangs.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use rackbus_memory::{Access, MemoryHandle, Stream};
use rackbus_pci::BarMemory;
use rackbus_pci::endpoint::{IrqChange, Region};
use rackbus_pci::vfio_user::{
    Client, ClientError, Device, DeviceError, DeviceShape, RegionShape, SharedPart,
};
use rackbus_spec::vfio_user::{IrqSetFlags, irq, region};
use rustix::io::Errno;

/// Called once when the lender is lost, with how it was noticed.
pub type OnLost = Box<dyn FnOnce(String) + Send>;

/// A function at the other end of a link.
#[derive(Debug)]
pub struct RemoteDevice {
    shape: DeviceShape,
    conversation: Conversation,
}

/// The conversation with the lender, which others may end.
#[derive(Debug, Clone)]
pub struct Conversation {
    client: Arc<Client>,
    /// The lender is lost, or the borrower let go.
    gone: Arc<AtomicBool>,
}

impl Conversation {
    /// Lets the lender go. The device answers as an absent one from now on.
    pub fn end(&self) {
        self.gone.store(true, Ordering::Release);
        self.client.shut_down();
    }
}

impl RemoteDevice {
    /// Takes over a conversation with the lender: learns what the function looks like, and
    /// watches for the lender's end.
    ///
    /// # Errors
    /// [`ClientError`] when the lender does not hold its side.
    pub fn attach(stream: Arc<dyn Stream>, on_lost: OnLost) -> Result<Self, ClientError> {
        let client = Arc::new(Client::with_stream(stream)?);
        let shape = learn(&client)?;
        let gone = Arc::new(AtomicBool::new(false));
        let watcher = std::thread::Builder::new().name("lender watch".into()).spawn({
            let (client, gone) = (client.clone(), gone.clone());
            move || {
                client.wait_closed();
                if !gone.swap(true, Ordering::AcqRel) {
                    client.shut_down();
                    on_lost("its node closed the link, or does not answer".to_owned());
                }
            }
        });
        if let Err(cause) = watcher {
            tracing::error!(%cause, "no thread to watch the lender; its loss shows at the next access");
        }
        Ok(RemoteDevice { shape, conversation: Conversation { client, gone } })
    }

    /// The conversation with the lender.
    pub fn conversation(&self) -> Conversation {
        self.conversation.clone()
    }

    fn client(&self) -> &Client {
        &self.conversation.client
    }

    /// Sorts an outcome: refusals go back to the user, a lost lender answers like no device.
    fn or_absent<T>(&self, outcome: Result<T, ClientError>, absent: T) -> Result<T, DeviceError> {
        match outcome {
            Ok(value) => Ok(value),
            Err(ClientError::Refused(errno)) => Err(DeviceError::new(errno, "the lender refused")),
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
    }
}

impl Device for RemoteDevice {
    fn shape(&self) -> &DeviceShape {
        &self.shape
    }

    fn read(&self, target: Region, offset: u64, count: usize) -> Result<Vec<u8>, DeviceError> {
        let mut data = vec![0; count];
        let read = self.client().read(number(target), offset, &mut data).map(|()| data);
        self.or_absent(read, vec![0xff; count])
    }

    fn write(
        &self,
        target: Region,
        offset: u64,
        data: Vec<u8>,
        posted: bool,
    ) -> Result<(), DeviceError> {
        let written = match posted {
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
    ) -> Result<(), DeviceError> {
        let memory = memory.as_ref().map(MemoryHandle::parts);
        self.or_absent(self.client().dma_map(iova, length, access, memory), ())
    }

    fn unmap(&self, iova: u64, length: u64) -> Result<(), DeviceError> {
        self.or_absent(self.client().dma_unmap(iova, length), ())
    }

    fn unmap_all(&self) -> Result<(), DeviceError> {
        self.or_absent(self.client().dma_unmap_all(), ())
    }

    fn set_irqs(&self, change: IrqChange) -> Result<(), DeviceError> {
        use IrqSetFlags as F;
        let client = self.client();
        let none = |index, count, action| {
            client.set_irqs(index, 0, count, F::DATA_NONE | action, &[], &[])
        };
        let outcome = match change {
            IrqChange::WireVectors(start, fds) => client.wire_irqs(irq::MSIX, start, &fds),
            IrqChange::UnwireVectors => none(irq::MSIX, 0, F::ACTION_TRIGGER),
            IrqChange::FireVectors(vectors) => vectors.iter().try_for_each(|vector| {
                let flags = F::DATA_NONE | F::ACTION_TRIGGER;
                client.set_irqs(irq::MSIX, (*vector).into(), 1, flags, &[], &[])
            }),
            IrqChange::WireIntx(Some(fd)) => client.wire_irqs(irq::INTX, 0, &[Some(fd)]),
            IrqChange::WireIntx(None) => none(irq::INTX, 0, F::ACTION_TRIGGER),
            IrqChange::MaskIntx(true) => none(irq::INTX, 1, F::ACTION_MASK),
            IrqChange::MaskIntx(false) => none(irq::INTX, 1, F::ACTION_UNMASK),
            IrqChange::FireIntx => none(irq::INTX, 1, F::ACTION_TRIGGER),
        };
        self.or_absent(outcome, ())
    }

    fn reset(&self) -> Result<(), DeviceError> {
        self.or_absent(self.client().reset(), ())
    }
}

fn number(target: Region) -> u32 {
    match target {
        Region::Bar(bar) => region::BAR0 + u32::from(bar),
        Region::Config => region::CONFIG,
    }
}

/// Asks for all regions and interrupts. What the lender says is taken as far as a PCI function
/// can have it.
fn learn(client: &Client) -> Result<DeviceShape, ClientError> {
    let mut regions = Vec::new();
    for index in 0..region::COUNT {
        let info = match client.region_info(index) {
            Ok(info) => info,
            Err(ClientError::Refused(Errno::INVAL)) => {
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
        irqs.push(
            client.irq_info(index)?.count.min(u32::from(rackbus_spec::pcie::msix::MAX_VECTORS)),
        );
    }
    Ok(DeviceShape { regions, irqs })
}
