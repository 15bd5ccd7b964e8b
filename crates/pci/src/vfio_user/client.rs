//! The client's side of vfio-user: what a borrower's node, a userspace driver or a test uses.
//!
//! One request at a time, each answered before the next (posted writes excepted); any thread may
//! ask. A server that does not answer within the time limit is given up, and so is the connection.

use std::fs::File;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicU16, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use rackbus_fabric::BarPlace;
use rackbus_memory::{Access, HandleRef, Region as Mapping, RegionError, Stream, StreamError};
use rackbus_spec::vfio_user::{
    CAP_SPARSE_MMAP, CapHeader, DeviceInfo, DmaMap, DmaMapFlags, DmaUnmap, DmaUnmapFlags, Flags,
    IrqInfo, IrqSet, IrqSetFlags, MessageHeader, PeerMap, RegionAccess, RegionInfo,
    RegionInfoFlags, Registers, SparseArea, SparseMmap, VERSION, Version, command,
};
use rustix::io::Errno;
use zerocopy::{FromBytes, FromZeros, Immutable, IntoBytes};

use super::wire::{MAX_FDS, WireError, WireMessage, header, send_message};

/// Why a request failed.
#[derive(Debug, thiserror::Error)]
pub enum ClientError {
    /// The device refused it.
    #[error("the device refused: {0}")]
    Refused(Errno),
    /// The connection is of no more use.
    #[error("connection to the device: {0}")]
    Wire(#[from] WireError),
    /// The device's reply does not fit the request.
    #[error("the device's reply to command {command} is malformed: {what}")]
    BadReply {
        /// The command that was sent.
        command: u16,
        /// What does not fit.
        what: &'static str,
    },
    /// The device gave memory that cannot be mapped.
    #[error("mapping the device's memory: {0}")]
    Mapping(#[from] RegionError),
}

/// A region, as the device describes it.
#[derive(Debug)]
pub struct RegionDescription {
    /// Size of the region in bytes.
    pub size: u64,
    /// What can be done with it.
    pub flags: RegionInfoFlags,
    /// Parts of the region that can be mapped, offset and length.
    pub areas: Vec<(u64, u64)>,
    /// What to map them from, and where the region begins in it.
    pub memory: Option<(File, u64)>,
}

/// A connection to a device.
pub struct Client {
    stream: Arc<dyn Stream>,
    /// Held from a request to its reply.
    turn: Mutex<()>,
    next_id: AtomicU16,
    broken: AtomicBool,
}

impl std::fmt::Debug for Client {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Client").field("broken", &self.broken).finish_non_exhaustive()
    }
}

impl Client {
    /// Connects to a device's socket and negotiates. To be taken by the server, to send a request, and to receive
    /// the header and the body of its reply then take at most `limit` each.
    ///
    /// # Errors
    /// [`ClientError`] when nobody listens, or the device turns the client away.
    pub fn connect(path: &Path, limit: Duration) -> Result<Client, ClientError> {
        let stream = rackbus_memory::socket::connect_within(path, limit).map_err(|error| {
            WireError::Stream(match Errno::from_io_error(&error).unwrap_or(Errno::IO) {
                Errno::AGAIN => StreamError::TimedOut,
                other => StreamError::Socket(other),
            })
        })?;
        Client::with_stream(Arc::new(stream))
    }

    /// Goes on over a connection whose version another process negotiated, between two requests.
    pub fn resume(stream: Arc<dyn Stream>) -> Client {
        let (turn, next_id, broken) = Default::default();
        Client { stream, turn, next_id, broken }
    }

    /// Negotiates over a connection that is there already.
    ///
    /// # Errors
    /// [`ClientError`] when the device turns the client away.
    pub fn with_stream(stream: Arc<dyn Stream>) -> Result<Client, ClientError> {
        let client = Client::resume(stream);
        let version = Version { major: VERSION.0, minor: VERSION.1 };
        let mut capabilities =
            serde_json::json!({ "capabilities": { "max_msg_fds": MAX_FDS } }).to_string();
        capabilities.push('\0');
        let reply =
            client.request(command::VERSION, version.as_bytes(), capabilities.as_bytes(), &[])?;
        let theirs: Version = head(&reply)?;
        if theirs.major != VERSION.0 {
            return Err(bad(command::VERSION, "another major version"));
        }
        Ok(client)
    }

    /// What leads another process to the connection, to [go on](Client::resume) with it between two requests.
    pub fn handle(&self) -> Option<HandleRef<'_>> {
        self.stream.handle()
    }

    /// Waits until the device's end of the connection is gone.
    pub fn wait_closed(&self) {
        self.stream.wait_closed();
    }

    /// Whether the connection has ended, or the server is gone already. Nothing is read.
    pub fn is_closed(&self) -> bool {
        self.stream.is_closed()
    }

    /// Ends the connection from any thread; requests under way fail.
    pub fn shut_down(&self) {
        self.broken.store(true, Ordering::Release);
        self.stream.shut_down();
    }

    /// Number of regions and of interrupt indexes.
    ///
    /// # Errors
    /// [`ClientError`].
    pub fn device_info(&self) -> Result<DeviceInfo, ClientError> {
        let mut ask = DeviceInfo::new_zeroed();
        ask.argsz = size_u32::<DeviceInfo>();
        head(&self.request(command::DEVICE_GET_INFO, ask.as_bytes(), &[], &[])?)
    }

    /// What region `index` is.
    ///
    /// # Errors
    /// [`ClientError`].
    pub fn region_info(&self, index: u32) -> Result<RegionDescription, ClientError> {
        // Room for the capability of a device with many areas; asked again, once, if that is not enough.
        let ask = |room: u32| -> Result<_, ClientError> {
            let mut ask = RegionInfo::new_zeroed();
            (ask.argsz, ask.index) = (room, index);
            let reply = self.request(command::DEVICE_GET_REGION_INFO, ask.as_bytes(), &[], &[])?;
            let info: RegionInfo = head(&reply)?;
            Ok((reply, info))
        };
        let room = 1024;
        let (mut reply, mut info) = ask(room)?;
        if info.argsz > room {
            (reply, info) = ask(info.argsz.min(1 << 20))?;
        }
        let flags = RegionInfoFlags::from_bits_truncate(info.flags);
        let areas = areas(&reply.body, &info);
        let memory = reply.fds.into_iter().next().map(|fd| (File::from(fd), info.offset));
        Ok(RegionDescription { size: info.size, flags, areas, memory })
    }

    /// How many vectors interrupt index `index` has.
    ///
    /// # Errors
    /// [`ClientError`].
    pub fn irq_info(&self, index: u32) -> Result<IrqInfo, ClientError> {
        let ask = IrqInfo { argsz: size_u32::<IrqInfo>(), flags: 0, index, count: 0 };
        head(&self.request(command::DEVICE_GET_IRQ_INFO, ask.as_bytes(), &[], &[])?)
    }

    /// Reads `data.len()` bytes at `offset` of region `region`.
    ///
    /// # Errors
    /// [`ClientError`].
    pub fn read(&self, region: u32, offset: u64, data: &mut [u8]) -> Result<(), ClientError> {
        let access = RegionAccess { offset, region, count: count(data.len()) };
        let reply = self.request(command::REGION_READ, access.as_bytes(), &[], &[])?;
        let got = reply.tail::<RegionAccess>();
        if got.len() != data.len() {
            return Err(bad(command::REGION_READ, "its data has another length"));
        }
        data.copy_from_slice(got);
        Ok(())
    }

    /// Writes `data` at `offset` of region `region` and waits until the device has it.
    ///
    /// # Errors
    /// [`ClientError`].
    pub fn write(&self, region: u32, offset: u64, data: &[u8]) -> Result<(), ClientError> {
        let access = RegionAccess { offset, region, count: count(data.len()) };
        self.request(command::REGION_WRITE, access.as_bytes(), data, &[]).map(drop)
    }

    /// Writes without waiting: the device takes it in order, and says nothing.
    ///
    /// # Errors
    /// [`ClientError`] when it cannot be sent.
    pub fn post(&self, region: u32, offset: u64, data: &[u8]) -> Result<(), ClientError> {
        let access = RegionAccess { offset, region, count: count(data.len()) };
        let _turn = self.turn.lock().unwrap_or_else(PoisonError::into_inner);
        self.check_open()?;
        let body = size_of::<RegionAccess>() + data.len();
        let id = self.next_id.fetch_add(1, Ordering::Relaxed);
        let header = header(id, command::REGION_WRITE, Flags::NO_REPLY.bits(), 0, body);
        self.note(send_message(&*self.stream, header, [access.as_bytes(), data], &[]))
    }

    /// Lets the device reach `[iova, iova + length)`: `memory` from `offset`, or nothing.
    ///
    /// # Errors
    /// [`ClientError`].
    pub fn dma_map(
        &self,
        iova: u64,
        length: u64,
        access: Access,
        memory: Option<(BorrowedFd<'_>, u64)>,
    ) -> Result<(), ClientError> {
        let map = dma_map(iova, length, access, memory.map_or(0, |(_, offset)| offset));
        let fds: Vec<_> = memory.map(|(fd, _)| fd).into_iter().collect();
        self.request(command::DMA_MAP, map.as_bytes(), &[], &fds).map(drop)
    }

    /// Takes the mapping of `[iova, iova + length)` away; on return the device does not reach it.
    ///
    /// # Errors
    /// [`ClientError`].
    pub fn dma_unmap(&self, iova: u64, length: u64) -> Result<(), ClientError> {
        let argsz = size_u32::<DmaUnmap>();
        let unmap = DmaUnmap { argsz, flags: 0, address: iova, size: length };
        self.request(command::DMA_UNMAP, unmap.as_bytes(), &[], &[]).map(drop)
    }

    /// Takes every mapping away.
    ///
    /// # Errors
    /// [`ClientError`].
    pub fn dma_unmap_all(&self) -> Result<(), ClientError> {
        let (argsz, flags) = (size_u32::<DmaUnmap>(), DmaUnmapFlags::ALL.bits());
        let unmap = DmaUnmap { argsz, flags, address: 0, size: 0 };
        self.request(command::DMA_UNMAP, unmap.as_bytes(), &[], &[]).map(drop)
    }

    /// Lets the device reach a part of the BAR at `place`, of another function: `memory` from `offset` on is
    /// what it calls `[iova, iova + length)`. Only a lender's node takes this.
    ///
    /// # Errors
    /// [`ClientError`].
    pub fn open_window(
        &self,
        iova: u64,
        length: u64,
        access: Access,
        place: &BarPlace,
        (memory, offset): (BorrowedFd<'_>, u64),
    ) -> Result<(), ClientError> {
        let peer = PeerMap {
            map: dma_map(iova, length, access, offset),
            bar_offset: place.offset,
            bar: place.bar.into(),
            name_length: count(place.function.len()),
        };
        let name = place.function.as_bytes();
        self.request(command::PEER_MAP, peer.as_bytes(), name, &[memory]).map(drop)
    }

    /// Takes what [`open_window`](Client::open_window) let it reach away; on return the device does not.
    ///
    /// # Errors
    /// [`ClientError`].
    pub fn close_window(&self, iova: u64, length: u64) -> Result<(), ClientError> {
        let argsz = size_u32::<DmaUnmap>();
        let unmap = DmaUnmap { argsz, flags: 0, address: iova, size: length };
        self.request(command::PEER_UNMAP, unmap.as_bytes(), &[], &[]).map(drop)
    }

    /// Wires vectors of interrupt index `index` from `start` on, in messages as large as the
    /// protocol allows. `None` takes a vector's wire away.
    ///
    /// # Errors
    /// [`ClientError`].
    pub fn wire_irqs(
        &self,
        index: u32,
        start: u32,
        fds: &[Option<OwnedFd>],
    ) -> Result<(), ClientError> {
        let flags = IrqSetFlags::DATA_EVENTFD | IrqSetFlags::ACTION_TRIGGER;
        let mut at = 0;
        while at < fds.len() {
            // A message's vectors have descriptors all, or none.
            let wired = fds[at].is_some();
            let run = fds[at..].iter().take(MAX_FDS).take_while(|fd| fd.is_some() == wired).count();
            let borrowed: Vec<_> = fds[at..at + run].iter().flatten().map(AsFd::as_fd).collect();
            self.set_irqs(
                index,
                start.saturating_add(count(at)),
                count(run),
                flags,
                &[],
                &borrowed,
            )?;
            at += run;
        }
        Ok(())
    }

    /// Any other change of interrupts: `SET_IRQS` as the protocol has it.
    ///
    /// # Errors
    /// [`ClientError`].
    pub fn set_irqs(
        &self,
        index: u32,
        start: u32,
        count: u32,
        flags: IrqSetFlags,
        bools: &[u8],
        fds: &[BorrowedFd<'_>],
    ) -> Result<(), ClientError> {
        let argsz = size_u32::<IrqSet>() + u32::try_from(bools.len()).unwrap_or(0);
        let set = IrqSet { argsz, flags: flags.bits(), index, start, count };
        self.request(command::DEVICE_SET_IRQS, set.as_bytes(), bools, fds).map(drop)
    }

    /// Resets the function by `DEVICE_RESET`.
    ///
    /// # Errors
    /// [`ClientError`].
    pub fn reset(&self) -> Result<(), ClientError> {
        self.request(command::DEVICE_RESET, &[], &[], &[]).map(drop)
    }

    /// Maps `length` bytes at `offset` of region `region`.
    ///
    /// # Errors
    /// [`ClientError`]; also when the device does not let that part be mapped.
    pub fn map_region(
        &self,
        region: u32,
        offset: u64,
        length: u64,
    ) -> Result<Mapping, ClientError> {
        let info = self.region_info(region)?;
        // The end of an area is a number of 64 bits: it is inside of the region.
        let inside = |(start, size): &(u64, u64)| {
            offset >= *start && offset.checked_add(length).is_some_and(|end| end <= start + size)
        };
        let Some((file, at)) = info.memory.filter(|_| info.areas.iter().any(inside)) else {
            return Err(bad(command::DEVICE_GET_REGION_INFO, "that part cannot be mapped"));
        };
        let from = at.saturating_add(offset);
        // A BAR may be a file: that of a persistent memory region.
        Ok(Mapping::map_stored(file.as_fd(), from, length, Access::READ | Access::WRITE)?)
    }

    /// The registers of BAR `bar` as memory, and their length in bytes; for a function whose class has them so, see
    /// [`polled`](crate::polled). Only a node of rackbus knows this.
    ///
    /// # Errors
    /// [`ClientError`].
    pub fn registers(&self, bar: u8) -> Result<(OwnedFd, u64), ClientError> {
        let ask = Registers { argsz: size_u32::<Registers>(), bar: bar.into(), size: 0 };
        let reply = self.request(command::REGISTERS, ask.as_bytes(), &[], &[])?;
        let Registers { size, .. } = head(&reply)?;
        let file = reply.fds.into_iter().next();
        let file = file.ok_or_else(|| bad(command::REGISTERS, "no descriptor is beside it"))?;
        Ok((file, size))
    }

    fn request(
        &self,
        command: u16,
        head: &[u8],
        data: &[u8],
        fds: &[BorrowedFd<'_>],
    ) -> Result<WireMessage, ClientError> {
        let _turn = self.turn.lock().unwrap_or_else(PoisonError::into_inner);
        self.check_open()?;
        let id = self.next_id.fetch_add(1, Ordering::Relaxed);
        let header = header(id, command, 0, 0, head.len() + data.len());
        self.note(send_message(&*self.stream, header, [head, data], fds))?;
        let reply = self.note(WireMessage::receive(&*self.stream))?;
        let MessageHeader { message_id, command: answered, error, .. } = reply.header;
        if reply.is_command() || message_id != id || answered != command {
            // The conversation is out of step and cannot be trusted any more.
            self.shut_down();
            return Err(bad(command, "it answers another request"));
        }
        if reply.flags().contains(Flags::ERROR) {
            // Some servers give no number.
            let errno = i32::try_from(error).ok().filter(|errno| (1..4096).contains(errno));
            return Err(ClientError::Refused(errno.map_or(Errno::IO, Errno::from_raw_os_error)));
        }
        Ok(reply)
    }

    fn check_open(&self) -> Result<(), ClientError> {
        match self.broken.load(Ordering::Acquire) {
            true => Err(WireError::from(StreamError::Closed).into()),
            false => Ok(()),
        }
    }

    /// After a failure the stream cannot be followed any more.
    fn note<T>(&self, result: Result<T, WireError>) -> Result<T, ClientError> {
        result.map_err(|error| {
            self.shut_down();
            error.into()
        })
    }
}

fn dma_map(address: u64, size: u64, access: Access, offset: u64) -> DmaMap {
    let mut flags = DmaMapFlags::empty();
    flags.set(DmaMapFlags::READ, access.contains(Access::READ));
    flags.set(DmaMapFlags::WRITE, access.contains(Access::WRITE));
    DmaMap { argsz: size_u32::<DmaMap>(), flags: flags.bits(), offset, address, size }
}

fn bad(command: u16, what: &'static str) -> ClientError {
    ClientError::BadReply { command, what }
}

fn head<T: FromBytes>(reply: &WireMessage) -> Result<T, ClientError> {
    reply.head().ok_or_else(|| bad(reply.header.command, "it is too short"))
}

fn count(length: usize) -> u32 {
    u32::try_from(length).unwrap_or(u32::MAX)
}

fn size_u32<T: Immutable>() -> u32 {
    count(size_of::<T>())
}

/// How many mappable areas of a region are looked at: a table, its pending bits and doorbells part one into a handful,
/// and each costs whoever maps it. The rest is reached by messages.
const MOST_AREAS: usize = 64;

/// The mappable areas that a region's reply lists, up to [`MOST_AREAS`]; all of it when it lists none but can be
/// mapped. What is not inside of the region is none of it, whatever its server says.
fn areas(body: &[u8], info: &RegionInfo) -> Vec<(u64, u64)> {
    let flags = RegionInfoFlags::from_bits_truncate(info.flags);
    if !flags.contains(RegionInfoFlags::MMAP) {
        return Vec::new();
    }
    let inside = |(offset, size): &(u64, u64)| {
        *size > 0 && offset.checked_add(*size).is_some_and(|end| end <= info.size)
    };
    let mut at = if flags.contains(RegionInfoFlags::CAPS) { info.cap_offset as usize } else { 0 };
    // Each capability lies behind the one before, so a chain ends.
    while at >= size_of::<RegionInfo>() {
        let Some((cap, _)) = body.get(at..).and_then(|b| CapHeader::read_from_prefix(b).ok())
        else {
            break;
        };
        if cap.id == CAP_SPARSE_MMAP
            && let Ok((sparse, mut rest)) = SparseMmap::read_from_prefix(&body[at..])
        {
            let listed = std::iter::from_fn(|| {
                let (area, more) = SparseArea::read_from_prefix(rest).ok()?;
                rest = more;
                Some((area.offset, area.size))
            });
            let listed = listed.take(sparse.nr_areas as usize);
            return listed.filter(inside).take(MOST_AREAS).collect();
        }
        match cap.next as usize {
            next if next > at => at = next,
            _ => break,
        }
    }
    Some((0, info.size)).filter(inside).into_iter().collect()
}

#[cfg(test)]
mod tests;
