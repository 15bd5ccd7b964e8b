//! Records that the kernel seals and opens (kTLS, Linux' `Documentation/networking/tls.rst`), with the keys that the
//! handshake came to.
//!
//! What is sent is sealed on its way into the kernel's own memory, so it is copied once less than where this process does
//! that. Keys are not renewed: kernels before 6.14 cannot. So a connection ends with an error when its keys have sealed as
//! much as they may, or when the peer renews its own, and who can resume a session does.

use std::io::{ErrorKind, IoSlice, IoSliceMut, Write};
use std::net::{Ipv4Addr, TcpListener, TcpStream};
use std::os::fd::{AsRawFd, RawFd};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use nix::sys::socket::sockopt::{TcpTlsRx, TcpTlsTx, TcpUlp, TlsCryptoInfo};
use nix::sys::socket::{ControlMessageOwned, MsgFlags, TlsGetRecordType, recvmsg, setsockopt};
use rackbus_identity::rustls::{
    CipherSuite, Connection, ConnectionTrafficSecrets, ExtractedSecrets,
};
use zeroize::Zeroize;

/// Blocks of 16 bytes that keys of AES-GCM may seal: as many as are in the 2^24.5 records of full size of RFC 8446, section
/// 5.5, rounded down. A record counts one more, for its tag.
const MOST_BLOCKS: u64 = 1 << 34;
/// Bytes of a block of AES.
const BLOCK: u64 = 16;
/// Bytes of the longest record (RFC 8446, section 5.1).
const RECORD: u64 = 1 << 14;
/// Records that are received at a time before others have a turn, where they carry nothing.
const RECEIVES: usize = 2;
/// The alert that says that nothing follows: its level and its description (RFC 8446, section 6).
const CLOSE_NOTIFY: [u8; 2] = [1, 0];

/// How long a connection of this process to itself may take.
const TRIAL: Duration = Duration::from_secs(1);

/// Connections of this process that the kernel has taken over.
static TAKEN_OVER: AtomicU64 = AtomicU64::new(0);

/// How many connections of this process the kernel has taken over.
pub(crate) fn taken_over() -> u64 {
    TAKEN_OVER.load(Ordering::Relaxed)
}

/// A connection whose records the kernel seals and opens, and what its socket has not taken yet.
#[derive(Debug)]
pub(super) struct KernelTls {
    kept: Vec<u8>,
    /// Bytes of them that the socket has.
    sent: usize,
    /// Blocks that were sealed with its keys.
    blocks: u64,
    /// Where the kernel says of what type a record is.
    control: Vec<u8>,
}

impl KernelTls {
    /// Whether the kernel takes over connections with the keys of this one, where it takes over any.
    pub(super) fn takes(connection: &Connection) -> bool {
        let suite = connection.negotiated_cipher_suite().map(|suite| suite.suite());
        suite == Some(CipherSuite::TLS13_AES_256_GCM_SHA384)
    }

    /// Has the kernel go on with a connection.
    ///
    /// # Errors
    /// Why it does not: the socket is of no use then.
    pub(super) fn begin(
        socket: &TcpStream,
        secrets: ExtractedSecrets,
    ) -> std::io::Result<KernelTls> {
        take_over(socket, &Keys::of(&secrets.tx)?, &Keys::of(&secrets.rx)?)?;
        TAKEN_OVER.fetch_add(1, Ordering::Relaxed);
        let blocks = secrets.tx.0.saturating_mul(RECORD / BLOCK + 1);
        let control = nix::cmsg_space!(u8);
        Ok(KernelTls { kept: Vec::new(), sent: 0, blocks, control })
    }

    pub(super) fn write(
        &mut self,
        socket: &TcpStream,
        parts: &[IoSlice<'_>],
    ) -> std::io::Result<usize> {
        self.send_out(socket)?;
        match self.has_kept() {
            true => Ok(0),
            false => self.seal(socket, parts),
        }
    }

    pub(super) fn put(&mut self, socket: &TcpStream, parts: &[&[u8]]) -> std::io::Result<()> {
        let slices: Vec<IoSlice<'_>> = parts.iter().map(|part| IoSlice::new(part)).collect();
        let mut taken = self.write(socket, &slices)?;
        for part in parts {
            let of_part = taken.min(part.len());
            self.kept.extend_from_slice(&part[of_part..]);
            taken -= of_part;
        }
        Ok(())
    }

    pub(super) fn send_out(&mut self, socket: &TcpStream) -> std::io::Result<bool> {
        let before = self.sent;
        while self.has_kept() {
            let kept = std::mem::take(&mut self.kept);
            let taken = self.seal(socket, &[IoSlice::new(&kept[self.sent..])]);
            self.kept = kept;
            match taken? {
                0 => break,
                count => self.sent += count,
            }
        }
        let some = self.sent > before;
        if !self.has_kept() {
            self.kept.clear();
            self.sent = 0;
        }
        Ok(some)
    }

    pub(super) fn has_kept(&self) -> bool {
        self.sent < self.kept.len()
    }

    /// Seals what the socket takes of it: how many bytes.
    fn seal(&mut self, socket: &TcpStream, parts: &[IoSlice<'_>]) -> std::io::Result<usize> {
        if self.blocks >= MOST_BLOCKS {
            tracing::info!("a connection ends: its keys have sealed as much as they may");
            return Err(ErrorKind::ConnectionReset.into());
        }
        loop {
            match (&*socket).write_vectored(parts) {
                Ok(count) => {
                    let bytes = count as u64;
                    self.blocks += bytes.div_ceil(BLOCK) + bytes.div_ceil(RECORD);
                    return Ok(count);
                }
                Err(error) if error.kind() == ErrorKind::WouldBlock => return Ok(0),
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
    }

    pub(super) fn receive(
        &mut self,
        socket: &TcpStream,
        buffer: &mut [u8],
    ) -> std::io::Result<Option<usize>> {
        if buffer.is_empty() {
            return Ok(Some(0));
        }
        for _ in 0..RECEIVES {
            match self.receive_once(socket.as_raw_fd(), buffer) {
                Ok((0, None)) => return Err(ErrorKind::UnexpectedEof.into()),
                // Records may be empty, as many as the peer likes.
                Ok((0, Some(TlsGetRecordType::ApplicationData))) => {}
                Ok((count, None | Some(TlsGetRecordType::ApplicationData))) => {
                    return Ok(Some(count));
                }
                Ok((count, Some(TlsGetRecordType::Alert))) => {
                    let alert = &buffer[..count.min(CLOSE_NOTIFY.len())];
                    // Where there is room for its level only, that says as much as it can.
                    if count > 0 && CLOSE_NOTIFY.starts_with(alert) {
                        return Ok(None);
                    }
                    tracing::warn!(?alert, "TLS with another node failed: its alert");
                    return Err(ErrorKind::ConnectionAborted.into());
                }
                Ok((_, Some(other))) => {
                    tracing::info!("a connection ends: TLS says {other:?}, which is not followed");
                    return Err(ErrorKind::ConnectionReset.into());
                }
                Err(error) if error.kind() == ErrorKind::WouldBlock => return Ok(Some(0)),
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
        Ok(Some(0))
    }

    /// Receives what is there of one type, and that.
    fn receive_once(
        &mut self,
        socket: RawFd,
        buffer: &mut [u8],
    ) -> std::io::Result<(usize, Option<TlsGetRecordType>)> {
        let mut parts = [IoSliceMut::new(buffer)];
        let control = Some(&mut self.control[..]);
        let received = recvmsg::<()>(socket, &mut parts, control, MsgFlags::MSG_DONTWAIT)?;
        let kind = received.cmsgs()?.find_map(|message| match message {
            ControlMessageOwned::TlsGetRecordType(kind) => Some(kind),
            _ => None,
        });
        Ok((received.bytes, kind))
    }

    pub(super) fn close(&mut self, socket: &TcpStream) {
        let _ = self.send_out(socket);
        if !self.has_kept() {
            super::alert::send(socket, &CLOSE_NOTIFY);
        }
    }
}

/// Keys of one direction as the kernel takes them.
struct Keys(TlsCryptoInfo);

impl Drop for Keys {
    fn drop(&mut self) {
        if let TlsCryptoInfo::Aes256Gcm(keys) = &mut self.0 {
            keys.key.zeroize();
        }
    }
}

impl Keys {
    /// Those behind so many records.
    fn of((records, secrets): &(u64, ConnectionTrafficSecrets)) -> std::io::Result<Keys> {
        let ConnectionTrafficSecrets::Aes256Gcm { key, iv } = secrets else {
            return Err(ErrorKind::Unsupported.into());
        };
        let unlike = |_| std::io::Error::from(ErrorKind::Unsupported);
        let key = key.as_ref().try_into().map_err(unlike)?;
        // The kernel has the first four bytes apart: they are the salt of TLS 1.2.
        let (salt, iv) = iv.as_ref().split_at_checked(4).ok_or(ErrorKind::Unsupported)?;
        let keys = libc::tls12_crypto_info_aes_gcm_256 {
            info: libc::tls_crypto_info {
                version: libc::TLS_1_3_VERSION,
                cipher_type: libc::TLS_CIPHER_AES_GCM_256,
            },
            iv: iv.try_into().map_err(unlike)?,
            key,
            salt: salt.try_into().map_err(unlike)?,
            rec_seq: records.to_be_bytes(),
        };
        Ok(Keys(TlsCryptoInfo::Aes256Gcm(keys)))
    }

    /// Keys that protect nothing, to see whether the kernel takes such.
    fn of_nobody() -> std::io::Result<Keys> {
        let secrets =
            ConnectionTrafficSecrets::Aes256Gcm { key: [0; 32].into(), iv: [0; 12].into() };
        Keys::of(&(0, secrets))
    }
}

fn take_over(socket: &TcpStream, sends: &Keys, receives: &Keys) -> std::io::Result<()> {
    setsockopt(socket, TcpTlsTx, &sends.0)?;
    setsockopt(socket, TcpTlsRx, &receives.0)?;
    Ok(())
}

/// Has a socket take keys. It goes on as before until it has some, also where this process goes on sealing.
pub(super) fn prepare(socket: &TcpStream) -> bool {
    let outcome = setsockopt(socket, TcpUlp::default(), b"tls");
    outcome.inspect_err(|error| tracing::debug!(%error, "a socket takes no keys")).is_ok()
}

/// Whether this machine's kernel takes over connections, tried once with one of this process to itself: keys are given up
/// before a kernel refuses them. Where it cannot be tried, it is tried again the next time.
pub(super) fn is_there() -> bool {
    static IS_THERE: OnceLock<bool> = OnceLock::new();
    if let Some(is_there) = IS_THERE.get() {
        return *is_there;
    }
    let connection = || {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0))?;
        let socket = TcpStream::connect_timeout(&listener.local_addr()?, TRIAL)?;
        Ok::<_, std::io::Error>((listener, socket))
    };
    // It is connected for as long as the listener is there.
    let Ok((_listener, socket)) = connection() else { return false };
    let try_it = || {
        setsockopt(&socket, TcpUlp::default(), b"tls")?;
        let keys = Keys::of_nobody()?;
        take_over(&socket, &keys, &keys)
    };
    *IS_THERE.get_or_init(|| match try_it() {
        Ok(()) => true,
        Err(error) => {
            tracing::info!(%error, "the kernel does not encrypt connections (kTLS), so this process does");
            false
        }
    })
}

#[cfg(test)]
mod tests {
    use std::io::Read;

    use super::*;

    /// A socket that the kernel does not seal, and its other end: what is kept and counted is the same.
    fn plain() -> (KernelTls, TcpStream, TcpStream) {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
        let here = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let there = listener.accept().unwrap().0;
        here.set_nonblocking(true).unwrap();
        let control = nix::cmsg_space!(u8);
        (KernelTls { kept: Vec::new(), sent: 0, blocks: 0, control }, here, there)
    }

    #[test]
    fn what_the_socket_does_not_take_is_kept_and_sent_in_order() {
        let (mut tls, here, mut there) = plain();
        let mut expected: Vec<u8> = Vec::new();
        for number in 0_u64.. {
            let parts = [vec![number as u8; 60_000], number.to_le_bytes().to_vec()];
            expected.extend(parts.iter().flatten());
            tls.put(&here, &[&parts[0], &parts[1]]).unwrap();
            if tls.has_kept() && number > 100 {
                break;
            }
        }
        assert_eq!(tls.write(&here, &[IoSlice::new(b"later")]).unwrap(), 0);
        let length = expected.len();
        let reader = std::thread::spawn(move || {
            let mut found = vec![0; length];
            there.read_exact(&mut found).unwrap();
            (found, there)
        });
        while tls.has_kept() {
            if !tls.send_out(&here).unwrap() {
                super::super::wait(&here, true, None).unwrap();
            }
        }
        let (found, mut there) = reader.join().unwrap();
        assert!(found == expected, "other bytes arrived");
        assert_eq!(tls.write(&here, &[IoSlice::new(b"later")]).unwrap(), 5);
        let mut found = [0; 5];
        there.read_exact(&mut found).unwrap();
        assert_eq!(&found, b"later");
    }

    #[test]
    fn a_connection_ends_before_its_keys_have_sealed_too_much() {
        let (mut tls, here, _there) = plain();
        tls.write(&here, &[IoSlice::new(&[0; 17])]).unwrap();
        assert_eq!(tls.blocks, 3, "two blocks, of which one is not full, and a tag");
        tls.blocks = MOST_BLOCKS;
        let refused = tls.write(&here, &[IoSlice::new(&[0; 17])]).unwrap_err();
        assert_eq!(refused.kind(), ErrorKind::ConnectionReset);
    }

    #[test]
    fn an_end_that_nobody_told_of_is_a_failure() {
        let (mut tls, here, there) = plain();
        let mut buffer = [0; 8];
        assert_eq!(tls.receive(&here, &mut buffer).unwrap(), Some(0));
        (&there).write_all(b"four").unwrap();
        super::super::wait(&here, false, None).unwrap();
        assert_eq!(tls.receive(&here, &mut buffer).unwrap(), Some(4));
        drop(there);
        super::super::wait(&here, false, None).unwrap();
        let end = tls.receive(&here, &mut buffer).unwrap_err();
        assert_eq!(end.kind(), ErrorKind::UnexpectedEof);
    }

    #[test]
    fn keys_are_laid_out_as_the_kernel_takes_them() {
        let iv: [u8; 12] = std::array::from_fn(|nth| nth as u8);
        let secrets = ConnectionTrafficSecrets::Aes256Gcm { key: [7; 32].into(), iv: iv.into() };
        let keys = Keys::of(&(0x0102, secrets)).unwrap();
        let TlsCryptoInfo::Aes256Gcm(keys) = keys.0 else { panic!("other keys") };
        assert_eq!((keys.salt, keys.key), ([0, 1, 2, 3], [7; 32]));
        assert_eq!(keys.iv, [4, 5, 6, 7, 8, 9, 10, 11]);
        assert_eq!(keys.rec_seq, [0, 0, 0, 0, 0, 0, 1, 2]);
        assert_eq!((keys.info.version, keys.info.cipher_type), (0x0304, 52));
    }
}
