//! Messages out of a stream of bytes, in which each is behind its length (32 bits, little endian).

use rackbus_memory::StreamError;
use rackbus_memory::packets::MAX_PACKET;
use rustix::io::Errno;

/// Bytes of a message's length.
pub(crate) const LENGTH: usize = 4;

/// Bytes that were received and not asked for, from which messages are taken whole.
#[derive(Debug)]
pub struct FramedPackets {
    buffer: Vec<u8>,
    from: usize,
    to: usize,
}

impl Default for FramedPackets {
    fn default() -> Self {
        FramedPackets { buffer: vec![0; 2 * (LENGTH + MAX_PACKET)], from: 0, to: 0 }
    }
}

impl FramedPackets {
    /// Takes the next message, of 1 to [`MAX_PACKET`] bytes; `None` while not all of it is there.
    ///
    /// # Errors
    /// [`Errno::MSGSIZE`] when what follows is of no such length: nothing behind it can be understood.
    pub fn next_packet(&mut self) -> Result<Option<&[u8]>, StreamError> {
        let here = &self.buffer[self.from..self.to];
        let Some(length) = here.first_chunk::<LENGTH>() else { return Ok(None) };
        let length = usize::try_from(u32::from_le_bytes(*length)).unwrap_or(usize::MAX);
        if length == 0 || length > MAX_PACKET {
            return Err(StreamError::Socket(Errno::MSGSIZE));
        }
        if here.len() < LENGTH + length {
            return Ok(None);
        }
        let start = self.from + LENGTH;
        self.from = start + length;
        Ok(Some(&self.buffer[start..self.from]))
    }

    /// Room for what is received next: where no whole message is there, at least as much as lacks of the longest.
    pub fn room(&mut self) -> &mut [u8] {
        self.buffer.copy_within(self.from..self.to, 0);
        (self.to, self.from) = (self.to - self.from, 0);
        &mut self.buffer[self.to..]
    }

    /// So many bytes were received into the beginning of the [room](FramedPackets::room).
    pub fn received(&mut self, count: usize) {
        self.to = (self.to + count).min(self.buffer.len());
    }
}
