//! Sockets that others find by a path.
//!
//! Who sees the path may connect at once: the socket is made under another name, listens there, and only then gets its
//! own. A socket that is bound at its own path is refused to whoever comes between `bind` and `listen`.

use std::fs::File;
use std::io::{Error, ErrorKind, Result};
use std::os::fd::AsRawFd;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType, socket_with};

/// How long it may take to see whether somebody listens at a path.
const PROBE: Duration = Duration::from_millis(100);

/// Listens at `path` for streams; a socket left there by a process that is gone is replaced.
///
/// # Errors
/// When another process listens there, or the path cannot be made.
pub fn listen(path: &Path) -> Result<UnixListener> {
    let taken = match connect_within(path, PROBE) {
        Ok(_) => true,
        // More wait there than its queue has places for.
        Err(error) => error.kind() == ErrorKind::WouldBlock,
    };
    place(path, taken, |path| UnixListener::bind(path))
}

/// Connects to the stream socket at `path`. To be taken by who listens, and each reading and writing later, takes at
/// most `limit`: a process that has stopped lets callers wait for as long as it stands still.
///
/// # Errors
/// [`ErrorKind::WouldBlock`] when it was not taken in time; otherwise as `connect` says.
pub fn connect_within(path: &Path, limit: Duration) -> Result<UnixStream> {
    let (family, kind) = (AddressFamily::UNIX, SocketType::STREAM);
    let stream = UnixStream::from(socket_with(family, kind, SocketFlags::CLOEXEC, None)?);
    stream.set_read_timeout(Some(limit))?;
    // Linux waits as long for a place in the queue of those who connect.
    stream.set_write_timeout(Some(limit))?;
    let address = SocketAddrUnix::new(path)?;
    // With a time limit, the system does not try again after a signal.
    rustix::io::retry_on_intr(|| rustix::net::connect(&stream, &address))?;
    Ok(stream)
}

/// Has `make` make a socket that listens at the path that it is given, and moves that to `path`, where another process
/// listens (`taken`) or not.
pub(crate) fn place<T>(
    path: &Path,
    taken: bool,
    make: impl FnOnce(&Path) -> Result<T>,
) -> Result<T> {
    static MADE: AtomicU64 = AtomicU64::new(0);
    if taken {
        let text = format!("another process listens at {}", path.display());
        return Err(Error::new(ErrorKind::AddrInUse, text));
    }
    let folder = match path.parent() {
        Some(folder) if !folder.as_os_str().is_empty() => folder,
        _ => Path::new("."),
    };
    let held = File::open(folder)?;
    let name = format!(".{}.{}", std::process::id(), MADE.fetch_add(1, Ordering::Relaxed));
    // By the folder's descriptor: the other name must not be too long where the socket's own is not.
    let before = PathBuf::from(format!("/proc/self/fd/{}", held.as_raw_fd())).join(&name);
    // Of an earlier process with the same number.
    let _ = std::fs::remove_file(&before);
    let made = make(&before)?;
    std::fs::rename(&before, path).inspect_err(|_| drop(std::fs::remove_file(&before)))?;
    Ok(made)
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    /// A process that has stopped takes nobody, and its queue is full at some time.
    #[test]
    fn a_listener_that_accepts_nobody_is_found_and_blocks_nobody_for_ever() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("socket");
        let listener = listen(&path).unwrap();
        // With room for a few, not as many as the system allows.
        rustix::net::listen(&listener, 1).unwrap();
        let mut waiting = Vec::new();
        let refused = loop {
            match connect_within(&path, Duration::from_millis(10)) {
                Ok(stream) => waiting.push(stream),
                Err(error) => break error,
            }
        };
        assert_eq!(refused.kind(), ErrorKind::WouldBlock, "{refused}");
        assert_eq!(listen(&path).unwrap_err().kind(), ErrorKind::AddrInUse);
    }

    #[test]
    fn a_path_appears_when_its_socket_listens() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("socket");
        let made = place(&path, false, |before| {
            let made = UnixListener::bind(before)?;
            assert!(!path.exists());
            Ok(made)
        });
        UnixStream::connect(&path).unwrap();
        let refused = listen(&path).unwrap_err();
        assert_eq!(refused.kind(), ErrorKind::AddrInUse);
        drop(made);
        let _second = listen(&path).unwrap();
        UnixStream::connect(&path).unwrap();
        assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 1);
    }

    #[test]
    fn connecting_as_soon_as_the_path_exists_is_never_refused() {
        let folder = tempfile::tempdir().unwrap();
        for round in 0..200 {
            let path = folder.path().join(round.to_string());
            std::thread::scope(|scope| {
                let comes = scope.spawn(|| {
                    while !path.exists() {
                        std::hint::spin_loop();
                    }
                    UnixStream::connect(&path).map(drop)
                });
                let _listener = listen(&path).unwrap();
                comes.join().unwrap().unwrap();
            });
        }
    }
}
