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

/// Listens at `path` for streams; a socket left there by a process that is gone is replaced.
///
/// # Errors
/// When another process listens there, or the path cannot be made.
pub fn listen(path: &Path) -> Result<UnixListener> {
    place(path, UnixStream::connect(path).is_ok(), |path| UnixListener::bind(path))
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
    fn who_connects_as_soon_as_the_path_is_there_is_never_refused() {
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
