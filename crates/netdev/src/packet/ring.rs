//! The ring that the kernel puts the frames of a packet socket into (`PACKET_RX_RING`, version 2), so that taking them
//! makes no system calls.
//!
//! A slot of the ring holds a frame of the interface's MTU, up to some 4,000 bytes. Of a larger one the slot says
//! that all of it is in the socket's own queue (`PACKET_COPY_THRESH`), so that frames stay in order. Version 3 has slots of
//! any length, but hands them over in blocks, and one that is not full no sooner than a millisecond later.
//!
//! Source: Linux, `Documentation/networking/packet_mmap.rst`, and `tpacket_rcv` in `net/packet/af_packet.c`.

use std::io;
use std::mem::{offset_of, size_of};
use std::os::fd::{AsRawFd, OwnedFd};
use std::sync::atomic::{AtomicU32, Ordering};

use super::{HEADER, Received, TAG, set, tag_of};
use crate::mapped::MappedArea;

/// Bytes of the ring.
const BYTES: usize = 4 << 20;
/// Bytes of its memory that the kernel has in one piece.
const BLOCK: usize = 64 << 10;
/// Bytes of a slot, at least and at most: the larger they are, the fewer small frames can wait.
const SLOT: [usize; 2] = [2048, 4096];
/// What is in a slot before a packet, at most: the slot's header, an address, what is left to do, Ethernet's header and tags.
const BEFORE: usize = 160;

/// The side of the ring that takes frames out.
#[derive(Debug)]
pub(super) struct ReceiveRing {
    area: MappedArea,
    slot_bytes: usize,
    slots: usize,
    /// Index of the slot that the next frame will be in.
    at: usize,
}

/// What is in the next slot.
pub(super) enum Slot {
    /// The kernel has put no frame into it yet.
    Empty,
    /// The frame was taken out of it.
    Taken(Received),
    /// The frame is in the socket's queue. The slot is to be [released](ReceiveRing::release) after it was read there.
    Queued,
}

impl ReceiveRing {
    /// Gives a socket a ring, which is bound to nothing yet and whose frames come with what is left to do to them, for an
    /// interface whose packets have so many bytes at most.
    ///
    /// # Errors
    /// The system's.
    pub fn new(socket: &OwnedFd, mtu: u16) -> io::Result<ReceiveRing> {
        let slot_bytes = (usize::from(mtu) + BEFORE).next_power_of_two().clamp(SLOT[0], SLOT[1]);
        let slots = BYTES / slot_bytes;
        let option = |option, value: libc::c_int| set(socket, libc::SOL_PACKET, option, &value);
        option(libc::PACKET_VERSION, libc::tpacket_versions::TPACKET_V2 as libc::c_int)?;
        option(libc::PACKET_COPY_THRESH, 1)?;
        let request = libc::tpacket_req {
            tp_block_size: BLOCK as libc::c_uint,
            tp_block_nr: (BYTES / BLOCK) as libc::c_uint,
            tp_frame_size: slot_bytes as libc::c_uint,
            tp_frame_nr: slots as libc::c_uint,
        };
        set(socket, libc::SOL_PACKET, libc::PACKET_RX_RING, &request)?;
        let area = MappedArea::map(BYTES, libc::MAP_SHARED, socket.as_raw_fd(), 0);
        let area = area.inspect_err(|_| {
            // Frames would go where nobody looks.
            // SAFETY: a request is plain numbers.
            let none: libc::tpacket_req = unsafe { std::mem::zeroed() };
            let _ = set(socket, libc::SOL_PACKET, libc::PACKET_RX_RING, &none);
        })?;
        Ok(ReceiveRing { area, slot_bytes, slots, at: 0 })
    }

    /// Takes the next frame out, which goes into `buffer`, if it is in the ring.
    pub fn take(&mut self, buffer: &mut [u8]) -> Slot {
        let status = self.status().load(Ordering::Acquire);
        if status & libc::TP_STATUS_USER == 0 {
            return Slot::Empty;
        }
        if status & libc::TP_STATUS_COPY != 0 {
            return Slot::Queued;
        }
        let received = self.received(status, buffer);
        self.release();
        Slot::Taken(received)
    }

    /// Gives the next slot back to the kernel.
    pub fn release(&mut self) {
        self.status().store(libc::TP_STATUS_KERNEL, Ordering::Release);
        self.at = (self.at + 1) % self.slots;
    }

    fn status(&self) -> &AtomicU32 {
        // SAFETY: it is the first word of a slot in the area, and aligned, as slots have whole pages or parts of them; both
        // sides use it as an atomic.
        unsafe {
            let slot = self.area.address().as_ptr().add(self.at * self.slot_bytes);
            AtomicU32::from_ptr(slot.cast())
        }
    }

    fn received(&self, status: u32, buffer: &mut [u8]) -> Received {
        let word = |at: usize| {
            let mut bytes = [0; 4];
            self.read(at, &mut bytes);
            u32::from_ne_bytes(bytes)
        };
        let half = |at: usize| {
            let mut bytes = [0; 2];
            self.read(at, &mut bytes);
            u16::from_ne_bytes(bytes)
        };
        let frame = usize::from(half(offset_of!(libc::tpacket2_hdr, tp_mac)));
        let [length, held] =
            [offset_of!(libc::tpacket2_hdr, tp_len), offset_of!(libc::tpacket2_hdr, tp_snaplen)]
                .map(|at| word(at) as usize);
        let mut header = [0; HEADER];
        self.read(frame.saturating_sub(HEADER).max(size_of::<libc::tpacket2_hdr>()), &mut header);
        // Room for a tag behind what is read.
        let room = buffer.len().saturating_sub(TAG);
        let whole = held == length && length <= room && self.read(frame, &mut buffer[..length]);
        let tag = || {
            let tci = half(offset_of!(libc::tpacket2_hdr, tp_vlan_tci));
            tag_of(status, half(offset_of!(libc::tpacket2_hdr, tp_vlan_tpid)), tci)
        };
        Received { header, length: whole.then_some(length), tag: tag() }
    }

    /// Reads bytes of the next slot; false where they are not all in it.
    fn read(&self, at: usize, to: &mut [u8]) -> bool {
        at + to.len() <= self.slot_bytes && self.area.read(self.at * self.slot_bytes + at, to)
    }
}
