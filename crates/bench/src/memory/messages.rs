//! Messages there and back through segments: a put that a polling peer sees, and messages of many
//! sizes, against the same loops on one memory file.

use std::sync::atomic::Ordering;

use rackbus_attach::Mapping;
use rackbus_memory::DmaSlice;

use super::pingpong::{PingPongEnd, PrivateBuffer, one_way};
use super::plain::{Buffers, PingPongLines};
use super::{Bench, size};
use crate::BenchError;

/// Bytes of a message.
///
/// Which part of the last cache serves a line depends on where the line is; so every run takes
/// other pages on both sides.
const SIZES: [usize; 7] = [4, 8, 64, 256, 1 << 10, 4 << 10, 8 << 10];

impl Bench<'_> {
    pub(super) fn messages(&mut self) -> Result<(), BenchError> {
        self.put()?;
        let time = self.settings.time;
        for bytes in SIZES {
            let case = format!("ping-pong {}, one way", size(bytes));
            if !self.wanted(&case) {
                continue;
            }
            let room = stride(bytes) * (self.settings.runs + 1);
            let (on_alpha, on_beta) = (self.hosts.on_alpha(room)?, self.hosts.on_beta(room)?);
            let (mut at, mut bare_at) = (0, 0);
            self.pairs(
                (&case, "the same on one memfd", "ns"),
                || {
                    at += stride(bytes);
                    let mut near = CopiedMessage::new(&on_alpha.remote, &on_beta.local, at, bytes)?;
                    let mut far = CopiedMessage::new(&on_beta.remote, &on_alpha.local, at, bytes)?;
                    one_way(&mut near, &mut far, time)
                },
                || {
                    bare_at += stride(bytes);
                    let (mut near, mut far) = Buffers::pair(bare_at, bytes)?;
                    one_way(&mut near, &mut far, time)
                },
            )?;
        }
        Ok(())
    }

    /// 8 bytes, in another page each time.
    fn put(&mut self) -> Result<(), BenchError> {
        let (time, case) = (self.settings.time, "put 8 B, one way");
        if !self.wanted(case) {
            return Ok(());
        }
        let bytes = (self.settings.runs + 1) << 12;
        let (on_alpha, on_beta) = (self.hosts.on_alpha(bytes)?, self.hosts.on_beta(bytes)?);
        let (mut page, mut bare_page) = (0, 0);
        self.pairs(
            (case, "two bare cache lines", "ns"),
            || {
                page += 1;
                let mut near = Put::new(&on_alpha.remote, &on_beta.local, page << 12)?;
                let mut far = Put::new(&on_beta.remote, &on_alpha.local, page << 12)?;
                one_way(&mut near, &mut far, time)
            },
            || {
                bare_page += 1;
                let (mut near, mut far) = PingPongLines::pair(bare_page)?;
                one_way(&mut near, &mut far, time)
            },
        )
    }
}

/// From one run's pages to the next.
fn stride(bytes: usize) -> usize {
    bytes.next_multiple_of(4096)
}

fn outside() -> BenchError {
    BenchError::Peer("a message is larger than its segment".to_owned())
}

/// A number that is stored to the other host's segment, and awaited in this one's.
#[repr(align(128))]
pub struct Put<'m> {
    to: DmaSlice<'m>,
    from: DmaSlice<'m>,
    sent: u64,
    received: u64,
}

impl<'m> Put<'m> {
    /// One side, with its lines at `at` of both mappings.
    ///
    /// # Errors
    /// When that is not inside.
    pub fn new(to: &'m Mapping, from: &'m Mapping, at: usize) -> Result<Put<'m>, BenchError> {
        let line = |mapping: &'m Mapping| mapping.whole().part(at, 8).ok_or_else(outside);
        let (to, from) = (line(to)?, line(from)?);
        to.store_u64(0, 0, Ordering::Release).ok_or_else(outside)?;
        Ok(Put { to, from, sent: 0, received: 0 })
    }
}

impl PingPongEnd for Put<'_> {
    fn send(&mut self) -> Result<(), BenchError> {
        self.sent += 1;
        self.to.store_u64(0, self.sent, Ordering::Release).ok_or_else(outside)
    }

    fn wait(&mut self) -> Result<(), BenchError> {
        self.received += 1;
        while self.from.load_u64(0, Ordering::Acquire) != Some(self.received) {}
        Ok(())
    }
}

/// A message that is copied to the other host's segment, with its number as its last four bytes,
/// and copied out of this one's, unless its data is left where it came.
#[repr(align(128))]
pub struct CopiedMessage<'m> {
    to: DmaSlice<'m>,
    from: DmaSlice<'m>,
    data: PrivateBuffer,
    left: bool,
    sent: u32,
    received: u32,
}

impl<'m> CopiedMessage<'m> {
    /// The same, whose receiver does not touch the data.
    pub fn leaving_data(self) -> CopiedMessage<'m> {
        CopiedMessage { left: true, ..self }
    }

    /// One side, for messages of `bytes`, a multiple of four, at `at` of both mappings.
    ///
    /// # Errors
    /// When they are not inside.
    pub fn new(
        to: &'m Mapping,
        from: &'m Mapping,
        at: usize,
        bytes: usize,
    ) -> Result<CopiedMessage<'m>, BenchError> {
        let part = |mapping: &'m Mapping| mapping.whole().part(at, bytes).ok_or_else(outside);
        let (to, from) = (part(to)?, part(from)?);
        to.fill(0);
        let data = PrivateBuffer::new(bytes - 4);
        Ok(CopiedMessage { to, from, data, left: false, sent: 0, received: 0 })
    }
}

impl PingPongEnd for CopiedMessage<'_> {
    fn send(&mut self) -> Result<(), BenchError> {
        self.sent += 1;
        self.to.copy_from(&self.data);
        self.to.store_u32(self.data.len(), self.sent, Ordering::Release).ok_or_else(outside)
    }

    fn wait(&mut self) -> Result<(), BenchError> {
        self.received += 1;
        let number = self.data.len();
        while self.from.load_u32(number, Ordering::Acquire) != Some(self.received) {}
        if !self.left {
            self.from.copy_to(&mut self.data);
        }
        Ok(())
    }
}
