//! Named network namespaces, as `ip netns` has them.
#![allow(unsafe_code)] // a system call that takes the thread it is made on into account

use std::fs::File;
use std::io;
use std::os::fd::AsFd;
use std::path::PathBuf;

use rustix::fs::FlockOperation;
use rustix::io::Errno;
use rustix::mount::{
    MountPropagationFlags, UnmountFlags, mount_bind, mount_bind_recursive, mount_change, unmount,
};
use rustix::thread::{LinkNameSpaceType, UnshareFlags, move_into_link_name_space, unshare_unsafe};

/// Where `ip netns` keeps them.
const FOLDER: &str = "/run/netns";

fn path(name: &str) -> PathBuf {
    PathBuf::from(FOLDER).join(name)
}

/// The namespace of that name.
///
/// # Errors
/// `NotFound` when there is none.
pub fn open(name: &str) -> io::Result<File> {
    let path = path(name);
    let file = File::open(&path)?;
    // A name that was left without a namespace is a plain file.
    match rustix::fs::fstatfs(&file)?.f_type == NSFS {
        true => Ok(file),
        false => Err(io::ErrorKind::NotFound.into()),
    }
}

/// What `fstatfs(2)` says of a namespace's file (`NSFS_MAGIC`).
const NSFS: rustix::fs::FsWord = 0x6e73_6673;

/// The namespace of that name, made if there is none.
///
/// # Errors
/// What the system says: `PermissionDenied` without the right to.
pub fn create(name: &str) -> io::Result<File> {
    match open(name) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => {}
        found => return found,
    }
    std::fs::create_dir_all(FOLDER)?;
    share_folder()?;
    let path = path(name);
    File::create(&path)?;
    let target = path.clone();
    let made = in_thread(move || {
        // SAFETY: the thread has its own network from here on, and nothing else changes.
        unsafe { unshare_unsafe(UnshareFlags::NEWNET) }?;
        Ok(mount_bind("/proc/thread-self/ns/net", &target)?)
    });
    if let Err(error) = made {
        let _ = std::fs::remove_file(&path);
        return Err(error);
    }
    open(name)
}

/// Namespaces are seen in all mount namespaces of the machine, as `ip netns` makes them. It locks the folder meanwhile,
/// as newer versions of that do: of two that found it no mount yet, the second one's would hide what the first one made.
fn share_folder() -> io::Result<()> {
    let folder = File::open(FOLDER)?;
    rustix::fs::flock(&folder, FlockOperation::LockExclusive)?;
    let share = || mount_change(FOLDER, MountPropagationFlags::SHARED | MountPropagationFlags::REC);
    match share() {
        // It is no mount yet.
        Err(Errno::INVAL) => {
            // With the namespaces that somebody has bound there before.
            mount_bind_recursive(FOLDER, FOLDER)?;
            Ok(share()?)
        }
        outcome => Ok(outcome?),
    }
}

/// Takes the name away; the namespace ends when nobody is in it any more. Nothing happens where there is none.
///
/// # Errors
/// What the system says.
pub fn remove(name: &str) -> io::Result<()> {
    let path = path(name);
    match unmount(&path, UnmountFlags::DETACH) {
        Ok(()) | Err(Errno::INVAL | Errno::NOENT) => {}
        Err(error) => return Err(error.into()),
    }
    match std::fs::remove_file(&path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
        _ => Ok(()),
    }
}

/// Takes the calling thread into a namespace.
///
/// # Errors
/// What the system says.
pub fn enter(namespace: &File) -> io::Result<()> {
    Ok(move_into_link_name_space(namespace.as_fd(), Some(LinkNameSpaceType::Network))?)
}

/// Does something on a thread in a namespace.
///
/// # Errors
/// Those of `job`, and what the system says.
pub fn within<T: Send + 'static>(
    namespace: &File,
    job: impl FnOnce() -> io::Result<T> + Send + 'static,
) -> io::Result<T> {
    let namespace = namespace.try_clone()?;
    in_thread(move || {
        enter(&namespace)?;
        job()
    })
}

fn in_thread<T: Send + 'static>(
    job: impl FnOnce() -> io::Result<T> + Send + 'static,
) -> io::Result<T> {
    let thread = std::thread::Builder::new().name("namespace".into()).spawn(job)?;
    thread.join().unwrap_or_else(|_| Err(io::Error::other("a thread failed")))
}
