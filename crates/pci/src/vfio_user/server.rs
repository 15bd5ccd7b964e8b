//! The server's side of vfio-user: answers one client's messages from a [`ServedDevice`].
//!
//! The framing is kept whatever the client sends: a request that is wrong is answered with an
//! error reply (header only, the errno in it), and only a length that cannot be ends the
//! conversation. A posted write is never answered, not even with an error.

mod peers;
mod registers;

use std::collections::BTreeSet;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use rackbus_memory::{Access, MemoryHandle, Stream, StreamError};
use rackbus_spec::vfio_user::{
    CAP_SPARSE_MMAP, CapHeader, DeviceInfo, DeviceInfoFlags, DmaMap, DmaMapFlags, DmaUnmap,
    DmaUnmapFlags, Flags, IrqInfo, IrqInfoFlags, IrqSet, IrqSetFlags, MessageHeader, RegionAccess,
    RegionInfo, RegionInfoFlags, SparseArea, SparseMmap, VERSION, Version, command, irq, region,
};
use rustix::io::Errno;
use zerocopy::IntoBytes;

use super::device::{RegionShape, RequestRefused, ServedDevice};
use super::session::{Promised, RestingConversation};
use super::wire::{MAX_TRANSFER, WireError, WireMessage, header, send_message};
use crate::endpoint::{FunctionRegion, IrqChange};

/// What goes back: a body (head and data) with descriptors.
#[derive(Default)]
struct Reply {
    head: Vec<u8>,
    data: Vec<u8>,
    fds: Vec<OwnedFd>,
}

impl Reply {
    fn head(value: &(impl IntoBytes + zerocopy::Immutable)) -> Self {
        Reply { head: value.as_bytes().to_vec(), ..Reply::default() }
    }
}

fn invalid(message: impl Into<String>) -> RequestRefused {
    RequestRefused::new(Errno::INVAL, message)
}

/// Holds one client's conversation until it closes the connection or breaks the framing.
///
/// # Errors
/// How the conversation ended, when not by the client's closing it.
pub fn serve(stream: &dyn Stream, device: &dyn ServedDevice) -> Result<(), WireError> {
    let mut session = ClientSession::new(device, RestingConversation::default());
    while session.answer_next(stream)? {}
    Ok(())
}

/// The next message; nothing when the client has closed the connection.
pub(super) fn receive(stream: &dyn Stream) -> Result<Option<WireMessage>, WireError> {
    match WireMessage::receive(stream) {
        Ok(message) => Ok(Some(message)),
        Err(WireError::Stream(StreamError::Closed)) => Ok(None),
        Err(error) => {
            if let WireError::BadLength { command, message_id, wants_reply: true, .. } = error {
                // The connection ends anyway; the reply is a courtesy.
                let _ = send_error(stream, message_id, command, Errno::MSGSIZE);
            }
            Err(error)
        }
    }
}

/// A server's session with one client of a device.
pub(super) struct ClientSession<'a> {
    device: &'a dyn ServedDevice,
    conversation: RestingConversation,
    /// Indices of messages by which vectors were wired and not disabled since. Another process that takes the
    /// conversation up knows none.
    wired: BTreeSet<u32>,
}

impl<'a> ClientSession<'a> {
    pub(super) fn new(device: &'a dyn ServedDevice, conversation: RestingConversation) -> Self {
        ClientSession { device, conversation, wired: BTreeSet::new() }
    }

    pub(super) fn into_conversation(self) -> RestingConversation {
        self.conversation
    }

    /// Receives one message and answers it; false when the client has closed the connection.
    pub(super) fn answer_next(&mut self, stream: &dyn Stream) -> Result<bool, WireError> {
        let Some(message) = receive(stream)? else { return Ok(false) };
        if !message.is_command() {
            // Nothing was asked of the client, so a reply from it answers nothing.
            tracing::debug!(command = message.header.command, "unexpected reply ignored");
            return Ok(true);
        }
        self.answer(message, stream)?;
        Ok(true)
    }

    /// Carries out one command of the client's and sends its reply.
    pub(super) fn answer(
        &mut self,
        message: WireMessage,
        stream: &dyn Stream,
    ) -> Result<(), WireError> {
        let MessageHeader { message_id, command, .. } = message.header;
        let wants_reply = message.wants_reply();
        let outcome = self.handle(message);
        if let Err(error) = &outcome {
            tracing::debug!(command, errno = %error.errno, %error, "request refused");
            self.device.count_refused();
        }
        if !wants_reply {
            return Ok(());
        }
        match outcome {
            Ok(reply) => {
                let length = reply.head.len() + reply.data.len();
                let header = header(message_id, command, Flags::REPLY.bits(), 0, length);
                let fds: Vec<BorrowedFd<'_>> = reply.fds.iter().map(AsFd::as_fd).collect();
                send_message(stream, header, [&reply.head, &reply.data], &fds)?;
            }
            Err(error) => send_error(stream, message_id, command, error.errno)?,
        }
        Ok(())
    }

    fn handle(&mut self, message: WireMessage) -> Result<Reply, RequestRefused> {
        if self.conversation.0.is_none() && message.header.command != command::VERSION {
            return Err(invalid("the first message must be VERSION"));
        }
        match message.header.command {
            command::VERSION => self.version(&message),
            command::DMA_MAP => self.dma_map(message),
            command::DMA_UNMAP => self.dma_unmap(&message),
            command::DEVICE_GET_INFO => self.device_info(&message),
            command::DEVICE_GET_REGION_INFO => self.region_info(&message),
            command::DEVICE_GET_IRQ_INFO => self.irq_info(&message),
            command::DEVICE_SET_IRQS => self.set_irqs(message),
            command::REGION_READ => self.region_read(&message),
            command::REGION_WRITE => self.region_write(message),
            command::DEVICE_RESET => self.device.reset().map(|()| Reply::default()),
            command::PEER_MAP => peers::map(self.device, message),
            command::PEER_UNMAP => peers::unmap(self.device, &message),
            command::REGISTERS => registers::answer(self.device, &message),
            other => {
                Err(RequestRefused::new(Errno::NOTSUP, format!("command {other} is not known")))
            }
        }
    }

    /// QEMU's buffer for the reply is as large as its own request, so this stays short.
    fn version(&mut self, message: &WireMessage) -> Result<Reply, RequestRefused> {
        let version: Version = message.head().ok_or_else(|| invalid("VERSION is too short"))?;
        if self.conversation.0.is_some() {
            return Err(invalid("VERSION was negotiated already"));
        }
        if version.major != VERSION.0 {
            return Err(RequestRefused::new(
                Errno::NOTSUP,
                format!("version {}.{} is not spoken here", version.major, version.minor),
            ));
        }
        check_capabilities(message.tail::<Version>())?;
        let promised = self.conversation.0.insert(Promised::here());
        let ours = serde_json::json!({ "capabilities": {
            "max_msg_fds": promised.max_msg_fds,
            "max_data_xfer_size": promised.max_data_xfer_size,
            "max_dma_maps": promised.max_dma_maps,
            "pgsizes": 4096,
        }});
        let mut reply = Reply::head(&Version { major: promised.major, minor: promised.minor });
        reply.data = ours.to_string().into_bytes();
        reply.data.push(0);
        Ok(reply)
    }

    fn dma_map(&self, mut message: WireMessage) -> Result<Reply, RequestRefused> {
        let map: DmaMap = exact(&message)?;
        if message.fds.len() > 1 {
            return Err(invalid("DMA_MAP takes one descriptor at most"));
        }
        let access = access(&map)?;
        if message.fds.is_empty() {
            let DmaMap { address, size, .. } = map;
            tracing::debug!(address, size, "a mapping without memory");
        }
        let memory = message.fds.pop().map(|fd| MemoryHandle::new(fd, map.offset)).transpose();
        let memory = memory.map_err(|cause| invalid(cause.to_string()))?;
        self.device.map(map.address, map.size, access, memory)?;
        Ok(Reply::default())
    }

    fn dma_unmap(&self, message: &WireMessage) -> Result<Reply, RequestRefused> {
        let unmap: DmaUnmap = exact(message)?;
        let flags = DmaUnmapFlags::from_bits(unmap.flags)
            .ok_or_else(|| invalid(format!("DMA_UNMAP flags {:#x}", unmap.flags)))?;
        if flags.contains(DmaUnmapFlags::ALL) {
            if unmap.address != 0 || unmap.size != 0 {
                return Err(invalid("DMA_UNMAP of everything takes neither address nor size"));
            }
            self.device.unmap_all()?;
        } else {
            self.device.unmap(unmap.address, unmap.size)?;
        }
        Ok(Reply::head(&DmaUnmap { argsz: size_u32::<DmaUnmap>(), ..unmap }))
    }

    fn device_info(&self, message: &WireMessage) -> Result<Reply, RequestRefused> {
        sized(message, |info: &DeviceInfo| info.argsz)?;
        Ok(Reply::head(&DeviceInfo {
            argsz: size_u32::<DeviceInfo>(),
            flags: (DeviceInfoFlags::RESET | DeviceInfoFlags::PCI).bits(),
            num_regions: region::COUNT,
            num_irqs: irq::COUNT,
        }))
    }

    fn region_info(&self, message: &WireMessage) -> Result<Reply, RequestRefused> {
        let asked: RegionInfo = sized(message, |info: &RegionInfo| info.argsz)?;
        let shape =
            usize::try_from(asked.index).ok().and_then(|i| self.device.shape().regions.get(i));
        let shape = shape.ok_or_else(|| invalid(format!("there is no region {}", asked.index)))?;
        let (mut flags, capability) = describe(shape);
        let full = size_u32::<RegionInfo>() + u32::try_from(capability.len()).unwrap_or(0);
        let fits = asked.argsz >= full;
        if !fits {
            // Linux says here that there are some, and not where; QEMU (11.1) refuses that of a
            // vfio-user server. It asks again anyway, with the room that it is told.
            flags.remove(RegionInfoFlags::CAPS);
        }
        let mut info = RegionInfo {
            argsz: full,
            flags: flags.bits(),
            index: asked.index,
            cap_offset: 0,
            size: shape.size,
            offset: 0,
        };
        let mut reply = Reply::default();
        if fits && !capability.is_empty() {
            info.cap_offset = size_u32::<RegionInfo>();
            reply.data = capability;
        }
        if fits && let Some(mappable) = &shape.mappable {
            let fd = mappable.memory.descriptor();
            reply.fds.push(fd.map_err(|e| RequestRefused::new(Errno::MFILE, e.to_string()))?);
            info.offset = mappable.offset;
        }
        reply.head = info.as_bytes().to_vec();
        Ok(reply)
    }

    fn irq_info(&self, message: &WireMessage) -> Result<Reply, RequestRefused> {
        let asked: IrqInfo = sized(message, |info: &IrqInfo| info.argsz)?;
        let counts = &self.device.shape().irqs;
        let count = usize::try_from(asked.index).ok().and_then(|i| counts.get(i));
        let count =
            *count.ok_or_else(|| invalid(format!("there is no irq index {}", asked.index)))?;
        let mut flags = IrqInfoFlags::EVENTFD;
        if asked.index == irq::INTX {
            flags |= IrqInfoFlags::MASKABLE | IrqInfoFlags::AUTOMASKED;
        }
        let flags = flags.bits();
        Ok(Reply::head(&IrqInfo { argsz: size_u32::<IrqInfo>(), flags, index: asked.index, count }))
    }

    fn set_irqs(&mut self, message: WireMessage) -> Result<Reply, RequestRefused> {
        let set: IrqSet = sized(&message, |set: &IrqSet| set.argsz)?;
        let counts = &self.device.shape().irqs;
        let have = usize::try_from(set.index).ok().and_then(|i| counts.get(i)).copied();
        let have = have.ok_or_else(|| invalid(format!("there is no irq index {}", set.index)))?;
        if set.start.checked_add(set.count).is_none_or(|end| end > have) {
            return Err(invalid(format!(
                "vectors {}+{} of irq index {}, which has {have}",
                set.start, set.count, set.index
            )));
        }
        if let Some(change) = irq_change(&set, message)? {
            self.change_irqs(set.index, change)?;
        }
        Ok(Reply::default())
    }

    /// MSI and MSI-X have the same vectors, and a driver uses one of them. What takes wires away by the index that is not
    /// in use leaves those of the other alone. (The kernel refuses it; a borrower's node says all that it says by both.)
    fn change_irqs(&mut self, index: u32, change: IrqChange) -> Result<(), RequestRefused> {
        let disables = matches!(change, IrqChange::UnwireVectors);
        let wires = match &change {
            IrqChange::WireVectors(_, wires) => Some(wires.iter().any(Option::is_some)),
            _ => None,
        };
        let is_other = !self.wired.is_empty() && !self.wired.contains(&index);
        if is_other && (disables || wires == Some(false)) {
            return Ok(());
        }
        self.device.set_irqs(change)?;
        if disables {
            self.wired.remove(&index);
        } else if wires == Some(true) {
            self.wired.insert(index);
        }
        Ok(())
    }

    fn region_read(&self, message: &WireMessage) -> Result<Reply, RequestRefused> {
        let access: RegionAccess = exact(message)?;
        let count = transfer_size(&access)?;
        let Some(target) = target(access.region)? else {
            return Err(invalid(format!("region {} is empty", access.region)));
        };
        let mut reply = Reply::head(&access);
        reply.data = self.device.read(target, access.offset, count)?;
        Ok(reply)
    }

    fn region_write(&self, message: WireMessage) -> Result<Reply, RequestRefused> {
        let access: RegionAccess =
            message.head().ok_or_else(|| invalid("the message is too short"))?;
        let count = transfer_size(&access)?;
        let posted = message.flags().contains(Flags::NO_REPLY);
        if message.tail::<RegionAccess>().len() != count {
            return Err(invalid("REGION_WRITE's count is not the length of its data"));
        }
        let Some(target) = target(access.region)? else {
            return Err(invalid(format!("region {} is empty", access.region)));
        };
        let mut data = message.body;
        data.drain(..size_of::<RegionAccess>());
        self.device.write(target, access.offset, data, posted)?;
        Ok(Reply::head(&access))
    }
}

/// What a mapping allows.
fn access(map: &DmaMap) -> Result<Access, RequestRefused> {
    let flags = DmaMapFlags::from_bits(map.flags)
        .ok_or_else(|| invalid(format!("DMA_MAP flags {:#x}", map.flags)))?;
    let mut access = Access::empty();
    access.set(Access::READ, flags.contains(DmaMapFlags::READ));
    access.set(Access::WRITE, flags.contains(DmaMapFlags::WRITE));
    if access.is_empty() {
        return Err(invalid("DMA_MAP allows neither reading nor writing"));
    }
    Ok(access)
}

/// Answers a message with an error: a header alone.
pub(super) fn send_error(
    stream: &dyn Stream,
    message_id: u16,
    command: u16,
    errno: Errno,
) -> Result<(), WireError> {
    let errno = u32::try_from(errno.raw_os_error()).unwrap_or(0);
    let flags = (Flags::REPLY | Flags::ERROR).bits();
    send_message(stream, header(message_id, command, flags, errno, 0), [&[], &[]], &[])
}

/// The region's flags and its capabilities, as they follow [`RegionInfo`].
fn describe(shape: &RegionShape) -> (RegionInfoFlags, Vec<u8>) {
    let mut flags = RegionInfoFlags::empty();
    let mut capability = Vec::new();
    if shape.size > 0 {
        flags |= RegionInfoFlags::READ | RegionInfoFlags::WRITE;
    }
    if let Some(mappable) = &shape.mappable {
        flags |= RegionInfoFlags::MMAP | RegionInfoFlags::CAPS;
        let sparse = SparseMmap {
            header: CapHeader { id: CAP_SPARSE_MMAP, version: 1, next: 0 },
            nr_areas: u32::try_from(mappable.areas.len()).unwrap_or(0),
            reserved: 0,
        };
        capability.extend_from_slice(sparse.as_bytes());
        for (offset, size) in &mappable.areas {
            let area = SparseArea { offset: *offset, size: *size };
            capability.extend_from_slice(area.as_bytes());
        }
    }
    (flags, capability)
}

/// The change that a `SET_IRQS` asks for; `None` when it names nothing.
fn irq_change(set: &IrqSet, message: WireMessage) -> Result<Option<IrqChange>, RequestRefused> {
    let flags = IrqSetFlags::from_bits(set.flags).unwrap_or(IrqSetFlags::empty());
    let data =
        flags & (IrqSetFlags::DATA_NONE | IrqSetFlags::DATA_BOOL | IrqSetFlags::DATA_EVENTFD);
    let action = flags - data;
    let bools = message.tail::<IrqSet>();
    if data == IrqSetFlags::DATA_BOOL && bools.len() != set.count as usize {
        return Err(invalid("SET_IRQS needs one byte a vector"));
    }
    let selected: Vec<u32> = match data {
        IrqSetFlags::DATA_NONE => (0..set.count).collect(),
        _ => (0..set.count).zip(bools).filter(|(_, b)| **b != 0).map(|(i, _)| i).collect(),
    };
    let fds = message.fds.len();
    if data != IrqSetFlags::DATA_EVENTFD && fds > 0 {
        return Err(invalid("SET_IRQS got descriptors it did not announce"));
    }
    let wired = matches!(set.index, irq::INTX | irq::MSI | irq::MSIX);
    Ok(match (data, action) {
        (IrqSetFlags::DATA_EVENTFD, IrqSetFlags::ACTION_TRIGGER) => {
            // All vectors of a message get a wire, or none does.
            if fds != 0 && fds != set.count as usize {
                return Err(invalid("SET_IRQS needs one descriptor a vector, or none at all"));
            }
            let mut given = message.fds.into_iter();
            let wires: Vec<_> = (0..set.count).map(|_| given.next()).collect();
            match set.index {
                // A device has one of the two kinds of message.
                irq::MSI | irq::MSIX => Some(IrqChange::WireVectors(set.start, wires)),
                irq::INTX if set.count == 1 => {
                    Some(IrqChange::WireIntx(wires.into_iter().next().flatten()))
                }
                _ => None,
            }
        }
        (IrqSetFlags::DATA_NONE, IrqSetFlags::ACTION_TRIGGER) if set.count == 0 => {
            match set.index {
                irq::MSI | irq::MSIX => Some(IrqChange::UnwireVectors),
                irq::INTX => Some(IrqChange::WireIntx(None)),
                _ => None,
            }
        }
        (IrqSetFlags::DATA_NONE | IrqSetFlags::DATA_BOOL, IrqSetFlags::ACTION_TRIGGER) if wired => {
            let vectors = selected.iter().filter_map(|i| u16::try_from(set.start + i).ok());
            match (set.index, selected.is_empty()) {
                (irq::MSI | irq::MSIX, _) => Some(IrqChange::FireVectors(vectors.collect())),
                (_, false) => Some(IrqChange::FireIntx),
                (_, true) => None,
            }
        }
        (IrqSetFlags::DATA_NONE | IrqSetFlags::DATA_BOOL, IrqSetFlags::ACTION_MASK)
            if set.index == irq::INTX =>
        {
            (!selected.is_empty()).then_some(IrqChange::MaskIntx(true))
        }
        (IrqSetFlags::DATA_NONE | IrqSetFlags::DATA_BOOL, IrqSetFlags::ACTION_UNMASK)
            if set.index == irq::INTX =>
        {
            (!selected.is_empty()).then_some(IrqChange::MaskIntx(false))
        }
        _ => {
            return Err(invalid(format!(
                "SET_IRQS flags {:#x} for index {}",
                set.flags, set.index
            )));
        }
    })
}

/// Looks at a client's capabilities: they must be JSON when there are any; none of them limits us.
fn check_capabilities(text: &[u8]) -> Result<(), RequestRefused> {
    if text.is_empty() {
        return Ok(());
    }
    let end = text.iter().position(|b| *b == 0).unwrap_or(text.len());
    serde_json::from_slice::<serde_json::Map<String, serde_json::Value>>(&text[..end])
        .map(|_| ())
        .map_err(|cause| invalid(format!("the client's capabilities are not JSON: {cause}")))
}

/// The structure that is the whole body.
fn exact<T: zerocopy::FromBytes>(message: &WireMessage) -> Result<T, RequestRefused> {
    if message.body.len() != size_of::<T>() {
        return Err(invalid(format!(
            "the body has {} bytes instead of {}",
            message.body.len(),
            size_of::<T>()
        )));
    }
    message.head().ok_or_else(|| invalid("the message is too short"))
}

/// The structure at the body's start, whose `argsz` says that the sender has room for it.
fn sized<T: zerocopy::FromBytes>(
    message: &WireMessage,
    argsz: impl Fn(&T) -> u32,
) -> Result<T, RequestRefused> {
    let value: T = message.head().ok_or_else(|| invalid("the message is too short"))?;
    if argsz(&value) < size_u32::<T>() {
        return Err(invalid(format!("argsz {} is too small", argsz(&value))));
    }
    Ok(value)
}

fn size_u32<T>() -> u32 {
    u32::try_from(size_of::<T>()).expect("protocol structures are small")
}

fn transfer_size(access: &RegionAccess) -> Result<usize, RequestRefused> {
    usize::try_from(access.count)
        .ok()
        .filter(|count| *count <= MAX_TRANSFER)
        .ok_or_else(|| invalid(format!("an access of {} bytes is too large", access.count)))
}

/// What a region number addresses; `None` for one that a PCI device may have and this one has not.
fn target(number: u32) -> Result<Option<FunctionRegion>, RequestRefused> {
    match number {
        0..region::ROM => Ok(u8::try_from(number).ok().map(FunctionRegion::Bar)),
        region::CONFIG => Ok(Some(FunctionRegion::Config)),
        region::ROM | 8 => Ok(None),
        _ => Err(invalid(format!("there is no region {number}"))),
    }
}
