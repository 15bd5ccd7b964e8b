//! Records that this process seals and opens, by rustls; the socket carries them.

use std::io::{ErrorKind, IoSlice, Read, Write};
use std::net::TcpStream;
use std::ops::Range;

use rackbus_identity::rustls::{Connection, Error, ExtractedSecrets};

/// Bytes that TLS holds at most before the socket takes them.
const BUFFER: usize = 256 << 10;
/// Bytes that are taken from the socket at once.
const RECEIVED: usize = 64 << 10;
/// Times that so many are taken before others have a turn, where they carry nothing.
const RECEIVES: usize = 2;

/// TLS, and what came from the socket and has not gone through it. TLS itself takes few bytes at a time: a call of the
/// system for each of these takes as long as to open them.
#[derive(Debug)]
pub(super) struct ProcessTls {
    connection: Connection,
    buffer: Box<[u8]>,
    unread: Range<usize>,
}

impl ProcessTls {
    pub(super) fn new(mut connection: Connection) -> ProcessTls {
        connection.set_buffer_limit(Some(BUFFER));
        ProcessTls { connection, buffer: vec![0; RECEIVED].into_boxed_slice(), unread: 0..0 }
    }

    pub(super) fn connection(&self) -> &Connection {
        &self.connection
    }

    /// Sends and receives what can be now; whether there was anything.
    pub(super) fn step(&mut self, socket: &TcpStream) -> std::io::Result<bool> {
        let sent = self.send_out(socket)?;
        Ok(self.take_in(socket)? || sent)
    }

    /// Whether nothing is on its way through it, in either direction, as far as it can be known here.
    pub(super) fn can_be_given_up(&self) -> bool {
        let is_taken = self.unread.is_empty() && self.connection.wants_read();
        is_taken && !self.connection.is_handshaking() && !self.has_kept()
    }

    /// What is needed to go on in its place.
    ///
    /// # Errors
    /// Why rustls does not say.
    pub(super) fn into_secrets(self) -> std::io::Result<ExtractedSecrets> {
        self.connection.dangerous_extract_secrets().map_err(std::io::Error::other)
    }

    pub(super) fn write(&mut self, parts: &[IoSlice<'_>]) -> std::io::Result<usize> {
        self.connection.writer().write_vectored(parts)
    }

    pub(super) fn put(&mut self, parts: &[&[u8]]) -> std::io::Result<()> {
        // In one record, as far as that goes: each is sealed, sent and opened by itself.
        let mut slices: Vec<IoSlice<'_>> = parts.iter().map(|part| IoSlice::new(part)).collect();
        let mut rest = &mut slices[..];
        while !rest.is_empty() {
            let taken = self.write(rest)?;
            if taken == 0 {
                return Err(ErrorKind::WriteZero.into());
            }
            IoSlice::advance_slices(&mut rest, taken);
        }
        Ok(())
    }

    pub(super) fn send_out(&mut self, socket: &TcpStream) -> std::io::Result<bool> {
        let mut some = false;
        while self.connection.wants_write() {
            match self.connection.write_tls(&mut &*socket) {
                Ok(_) => some = true,
                Err(error) if error.kind() == ErrorKind::WouldBlock => break,
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
        Ok(some)
    }

    pub(super) fn has_kept(&self) -> bool {
        self.connection.wants_write()
    }

    /// Has TLS take what is there, once, as far as it does that before what it has is read; false when there is nothing.
    fn take_in(&mut self, socket: &TcpStream) -> std::io::Result<bool> {
        if !self.connection.wants_read() {
            return Ok(false);
        }
        if self.unread.is_empty() {
            match (&*socket).read(&mut self.buffer) {
                Ok(0) => return Err(ErrorKind::UnexpectedEof.into()),
                Ok(count) => self.unread = 0..count,
                Err(error) if error.kind() == ErrorKind::WouldBlock => return Ok(false),
                Err(error) if error.kind() == ErrorKind::Interrupted => return Ok(true),
                Err(error) => return Err(error),
            }
        }
        while self.connection.wants_read() && !self.unread.is_empty() {
            let unread = &mut &self.buffer[self.unread.clone()];
            self.unread.start += self.connection.read_tls(unread)?;
            if let Err(error) = self.connection.process_new_packets() {
                // The peer is told why.
                let _ = self.send_out(socket);
                tracing::warn!(%error, "TLS with another node failed");
                return Err(refused(error));
            }
        }
        Ok(true)
    }

    pub(super) fn receive(
        &mut self,
        socket: &TcpStream,
        buffer: &mut [u8],
    ) -> std::io::Result<Option<usize>> {
        let (mut done, mut turns) = (0, 0);
        loop {
            match self.connection.reader().read(&mut buffer[done..]) {
                // What came before the end is taken first.
                Ok(0) if done == 0 && !buffer.is_empty() => return Ok(None),
                Ok(count) => done += count,
                Err(error) if error.kind() == ErrorKind::WouldBlock => {}
                Err(error) => return Err(error),
            }
            if self.unread.is_empty() {
                // Records may be empty, as many as the peer likes.
                if done > 0 || turns == RECEIVES {
                    return Ok(Some(done));
                }
                turns += 1;
            }
            if done == buffer.len() || !self.take_in(socket)? {
                return Ok(Some(done));
            }
        }
    }

    pub(super) fn close(&mut self, socket: &TcpStream) {
        self.connection.send_close_notify();
        let _ = self.send_out(socket);
    }
}

/// What TLS found wrong.
fn refused(error: Error) -> std::io::Error {
    std::io::Error::new(ErrorKind::InvalidData, error)
}
