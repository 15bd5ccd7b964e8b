//! A peer passes a file whose server never answers: nobody waits for that. Needs root, to mount such a file system in a
//! namespace of its own.
#![allow(unsafe_code)] // unshare(2) of one thread

use std::io::Write;
use std::os::fd::{AsRawFd, OwnedFd};
use std::path::Path;
use std::sync::mpsc::channel;
use std::time::Duration;

use rackbus_memory::{Access, MemoryHandle, PeerEvent, RegionError};
use rustix::fs::{CWD, Mode, OFlags};
use rustix::mount::{MountFlags, MountPropagationFlags};

/// So long anybody may take who does not wait.
const PATIENCE: Duration = Duration::from_secs(10);

/// The root of a file system in user space that nobody serves, and what makes it answer with errors when it is dropped.
fn silent_file(folder: &Path) -> std::io::Result<(OwnedFd, OwnedFd)> {
    let server = rustix::fs::open("/dev/fuse", OFlags::RDWR | OFlags::CLOEXEC, Mode::empty())?;
    // SAFETY: this thread alone has another view of the file systems from now on; no memory is concerned.
    if unsafe { libc::unshare(libc::CLONE_NEWNS | libc::CLONE_FS) } != 0 {
        return Err(std::io::Error::last_os_error());
    }
    let private = MountPropagationFlags::PRIVATE | MountPropagationFlags::REC;
    rustix::mount::mount_change("/", private)?;
    let options = format!("fd={},rootmode=40000,user_id=0,group_id=0", server.as_raw_fd());
    let options = std::ffi::CString::new(options)?;
    rustix::mount::mount("silent", folder, "fuse", MountFlags::empty(), &*options)?;
    let path = OFlags::PATH | OFlags::CLOEXEC;
    let file = rustix::fs::openat(CWD, folder, path, Mode::empty())?;
    Ok((file, server))
}

/// Says so where the output of tests that pass is not kept back.
fn not_tested(why: &str) {
    let _ = writeln!(std::io::stderr(), "\n*** NOT TESTED: {why} ***\n");
}

#[test]
fn nobody_waits_for_a_file_that_does_not_answer() {
    if !rustix::process::geteuid().is_root() {
        return not_tested("mounting takes root");
    }
    // Empty for everybody but the thread that mounts something there, with whom the mount goes.
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().to_owned();
    let (told, outcome) = channel();
    let (opened, server) = channel();
    std::thread::spawn(move || {
        let (file, server) = match silent_file(&path) {
            Ok(both) => both,
            Err(error) => return told.send(Err(error)).unwrap(),
        };
        opened.send(server).unwrap();
        let event = PeerEvent::new(file.try_clone().unwrap()).is_err();
        told.send(Ok(("an event", event))).unwrap();
        let memory = MemoryHandle::new(file, 0).unwrap();
        let mapped = memory.map(4096, Access::READ, false);
        let refused = matches!(mapped, Err(RegionError::NotMemory));
        told.send(Ok(("memory", refused))).unwrap();
    });
    for _ in 0..2 {
        match outcome.recv_timeout(PATIENCE) {
            Ok(Ok((what, refused))) => assert!(refused, "it counts as {what}"),
            Ok(Err(error)) => return not_tested(&format!("no such file system here: {error}")),
            Err(_) => {
                // Whoever waits is let go.
                drop(server.try_recv());
                panic!("somebody waits for the file");
            }
        }
    }
}
