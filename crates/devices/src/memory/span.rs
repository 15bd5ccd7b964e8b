//! A span of memory: bytes in a file that users map, and their way from one file to another.
//!
//! Who has mapped a file keeps it for as long as it likes, and nobody can take a mapping out of
//! another process. So what is taken away is the content: when a user returns the span, its bytes
//! move to a new file, or zeroes take their place there, and the old file is emptied. Whoever still
//! maps that one reads zeroes, and stores into what nobody looks at (invariant I4). A user that
//! stores while its bytes are copied has returned the span already: what the next one finds of that
//! is either.
//!
//! A memory file moves to another. A regular file moves to one beside it, which takes its name;
//! where the file system shares blocks between files, nothing is copied, unless all of it is to have
//! room of its own. The first move is when the
//! span is opened: somebody may still map the file from a former life of the node. A DAX device has
//! one inode and no other to move to, so it is refused; a file on a DAX file system is as any other.

use std::fs::File;
use std::io;
use std::ops::Range;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::os::unix::fs::{FileExt, FileTypeExt};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};

use rackbus_memory::file_lock::lock_file;
use rackbus_memory::{HandleError, Handles, SharedMemory, sparse};
use rustix::fs::{FallocateFlags, SeekFrom};
use rustix::io::Errno;

use crate::place::LOCK_PATIENCE;

/// What becomes of a span's content when it is returned.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum AtReturn {
    /// Zeroes take its place.
    Zero,
    /// The next user finds it.
    Keep,
}

/// Why a span cannot be had.
#[derive(Debug, thiserror::Error)]
pub enum SpanError {
    /// The file cannot be used.
    #[error("{what} {}: {cause}", path.display())]
    File {
        /// The step that failed.
        what: &'static str,
        /// Path of the file that could not be used.
        path: PathBuf,
        /// The error of the system call.
        cause: io::Error,
    },
    /// Another process has the file.
    #[error("{} is used by another process; stop it or choose another file", path.display())]
    InUse {
        /// Path of the file that somebody else uses.
        path: PathBuf,
    },
    /// A descriptor that was passed on is no file of this size.
    #[error("what was passed on is no file of {0} bytes")]
    Unfit(u64),
    /// Memory could not be had.
    #[error(transparent)]
    Memory(#[from] rackbus_memory::RegionError),
    /// What leads to it did not come.
    #[error(transparent)]
    Handles(#[from] HandleError),
}

/// Where the bytes are at home.
#[derive(Debug)]
enum Home {
    /// In memory files of this process'.
    Memory,
    /// In the file of this name, which `lock` keeps for this process: a file beside it that no user is
    /// given, as who has a file can lock it, and keeps a lock that was taken by its descriptor. It has the
    /// span's length in it while somebody has the file, who can change its size, too.
    File { path: PathBuf, lock: File },
    /// At another node, which takes them away itself.
    Elsewhere,
}

/// A span of memory. It is not mapped here: what its users do to its file harms nobody.
#[derive(Debug)]
pub struct MemorySpan {
    home: Home,
    length: u64,
    at_return: AtReturn,
    /// All of the file's bytes have room on its disk, so that no store fails for want of it.
    reserved: bool,
    file: File,
    /// Somebody may have been given the file, and the lock says how long it is.
    noted: AtomicBool,
}

impl MemorySpan {
    /// `length` bytes of zeroes in memory; pages are taken when they are first written.
    ///
    /// # Errors
    /// [`SpanError::Memory`].
    pub fn memory(length: u64, at_return: AtReturn) -> Result<MemorySpan, SpanError> {
        let file = File::from(SharedMemory::reserve("memory", length)?);
        Ok(MemorySpan::new(Home::Memory, length, at_return, file))
    }

    fn new(home: Home, length: u64, at_return: AtReturn, file: File) -> MemorySpan {
        let noted = AtomicBool::new(false);
        MemorySpan { home, length, at_return, reserved: false, file, noted }
    }

    /// As [`file`](MemorySpan::file), with room on the disk for all of it, and its content kept at return: a store by
    /// a mapping that the disk has no room for ends whoever stores.
    ///
    /// # Errors
    /// As [`file`](MemorySpan::file), and when the disk has no room, or the file is on none.
    pub fn reserved(path: &Path, length: u64) -> Result<MemorySpan, SpanError> {
        if is_in_memory(folder_of(path)).map_err(failed(path, "cannot use"))? {
            let text = "it is on tmpfs, which a loss of power empties; name a file on a disk";
            return Err(failed(path, "cannot use")(io::Error::other(text)));
        }
        MemorySpan::open(path, length, AtReturn::Keep, true)
    }

    /// The `length` bytes of the file at `path`, which is made if it is missing or empty.
    ///
    /// # Errors
    /// [`SpanError`] when it cannot be used, or has another length that no user gave it.
    pub fn file(path: &Path, length: u64, at_return: AtReturn) -> Result<MemorySpan, SpanError> {
        MemorySpan::open(path, length, at_return, false)
    }

    fn open(
        path: &Path,
        length: u64,
        at_return: AtReturn,
        reserved: bool,
    ) -> Result<MemorySpan, SpanError> {
        let failed = |what| failed(path, what);
        let mut options = File::options();
        options.read(true).write(true).create(true).truncate(false);
        let file = options.open(path).map_err(failed("cannot open"))?;
        // Of what a link leads to, the name is exchanged, not that of the link.
        let path = &path.canonicalize().map_err(failed("cannot use"))?;
        let metadata = file.metadata().map_err(failed("cannot use"))?;
        let refused = |text: String| failed("cannot use")(io::Error::other(text));
        if metadata.file_type().is_char_device() {
            let text = "who maps a DAX device keeps it; name a file on a DAX file system";
            return Err(refused(text.to_owned()));
        }
        if !metadata.is_file() {
            return Err(refused("it is no regular file".to_owned()));
        }
        let lock = lock(path)?;
        let noted = noted_length(&lock);
        match metadata.len() {
            0 => file.set_len(length).map_err(failed("cannot use"))?,
            // A user of a life that was killed may have truncated or extended the file: it is made whole below.
            there if there == length || noted == Some(length) => {}
            there => {
                let there = noted.unwrap_or(there);
                let text = format!("it has {there} bytes, not {length}; give size = {there}");
                return Err(refused(text));
            }
        }
        let home = Home::File { path: path.to_owned(), lock };
        let noted = AtomicBool::new(noted.is_some());
        let mut span =
            MemorySpan { reserved, noted, ..MemorySpan::new(home, length, at_return, file) };
        span.take_away()?;
        Ok(span)
    }

    /// What another process had open as `file`: an earlier life of this span, or the node that has
    /// it, when it is not this one's to move (`elsewhere`).
    ///
    /// # Errors
    /// [`SpanError::Unfit`].
    fn passed_on(file: OwnedFd, length: u64) -> Result<File, SpanError> {
        let file = File::from(file);
        let fits = |metadata: std::fs::Metadata| metadata.is_file() && metadata.len() >= length;
        match file.metadata().is_ok_and(fits) {
            true => Ok(file),
            false => Err(SpanError::Unfit(length)),
        }
    }

    /// The span of another node, which gave what leads to it as the next of `handles`.
    ///
    /// # Errors
    /// [`SpanError::Handles`], [`SpanError::Unfit`].
    pub fn elsewhere(handles: &mut Handles, length: u64) -> Result<MemorySpan, SpanError> {
        let file = MemorySpan::passed_on(handles.next_descriptor()?, length)?;
        Ok(MemorySpan::new(Home::Elsewhere, length, AtReturn::Keep, file))
    }

    /// The span that an earlier life of its function passed on as [`files`](MemorySpan::files): at `path`,
    /// or in memory.
    ///
    /// # Errors
    /// [`SpanError::Unfit`].
    pub fn again(
        path: Option<&Path>,
        length: u64,
        at_return: AtReturn,
        files: Vec<OwnedFd>,
    ) -> Result<MemorySpan, SpanError> {
        let mut files = files.into_iter();
        let (file, lock) = (files.next(), files.next());
        let file = MemorySpan::passed_on(file.ok_or(SpanError::Unfit(length))?, length)?;
        let home = match (path, lock) {
            (None, _) => Home::Memory,
            (Some(path), Some(lock)) => Home::File {
                path: path.canonicalize().unwrap_or(path.to_owned()),
                lock: lock.into(),
            },
            (Some(_), None) => return Err(SpanError::Unfit(length)),
        };
        let span = MemorySpan::new(home, length, at_return, file);
        // Versions before did not: without it a crash may leave a file that is refused.
        let _ = span.note();
        Ok(span)
    }

    /// As [`again`](MemorySpan::again), of a span that was [reserved](MemorySpan::reserved).
    ///
    /// # Errors
    /// As [`again`](MemorySpan::again).
    pub fn reserved_again(
        path: &Path,
        length: u64,
        files: Vec<OwnedFd>,
    ) -> Result<MemorySpan, SpanError> {
        let span = MemorySpan::again(Some(path), length, AtReturn::Keep, files)?;
        Ok(MemorySpan { reserved: true, ..span })
    }

    /// What was stored so far, through whichever mapping, survives a loss of power when this returns.
    ///
    /// # Errors
    /// When the system could not write it: it may be lost, although another attempt succeeds.
    pub fn make_durable(&self) -> io::Result<()> {
        self.file.sync_data()
    }

    /// How many [`files`](MemorySpan::files) there are, of a span that is at home in a file or in memory.
    pub fn file_count(in_file: bool) -> usize {
        if in_file { 2 } else { 1 }
    }

    /// What another process needs to continue with the span.
    ///
    /// # Errors
    /// When the process has no descriptors left.
    pub fn files(&self) -> io::Result<Vec<OwnedFd>> {
        let lock = match &self.home {
            Home::File { lock, .. } => Some(lock),
            Home::Memory | Home::Elsewhere => None,
        };
        self.note()?;
        let files = [Some(&self.file), lock].into_iter().flatten();
        files.map(|file| file.as_fd().try_clone_to_owned()).collect()
    }

    /// Length of the memory in bytes.
    pub fn length(&self) -> u64 {
        self.length
    }

    /// The file that holds it now, from its beginning on, for a user: opened once more, so that what
    /// the user does to its flags (`O_APPEND`) is not done to this process'.
    ///
    /// # Errors
    /// When the process has no descriptors left, or the length cannot be noted.
    pub fn descriptor(&self) -> io::Result<OwnedFd> {
        self.note()?;
        let own = format!("/proc/self/fd/{}", self.file.as_raw_fd());
        Ok(File::options().read(true).write(true).open(own)?.into())
    }

    /// Notes the length where nobody who is given the file can change it.
    fn note(&self) -> io::Result<()> {
        let Home::File { lock, .. } = &self.home else { return Ok(()) };
        if self.noted.load(Ordering::Acquire) {
            return Ok(());
        }
        note_length(lock, self.length)?;
        self.noted.store(true, Ordering::Release);
        Ok(())
    }

    /// Reads from `offset` on.
    ///
    /// # Errors
    /// When the system cannot, or a user has truncated the file.
    pub fn read(&self, offset: u64, data: &mut [u8]) -> io::Result<()> {
        self.file.read_exact_at(data, offset)
    }

    /// Writes from `offset` on.
    ///
    /// # Errors
    /// When the system cannot.
    pub fn write(&self, offset: u64, data: &[u8]) -> io::Result<()> {
        self.file.write_all_at(data, offset)
    }

    /// Takes the content away from whoever maps its file. On return it is in another, or gone, as
    /// it is to be; what is done to the old file from now on is seen by nobody else.
    ///
    /// # Errors
    /// [`SpanError`]; everything is as it was then, or the content is in another file whose name may not survive a
    /// loss of power.
    pub fn take_away(&mut self) -> Result<(), SpanError> {
        let old = match &self.home {
            Home::Elsewhere => return Ok(()),
            Home::Memory => {
                let new = SharedMemory::reserve("memory", self.length)?;
                if self.at_return == AtReturn::Keep {
                    sparse::copy_sparse((&self.file, 0), (&new, 0), self.length)?;
                }
                std::mem::replace(&mut self.file, File::from(new))
            }
            Home::File { path, lock } => {
                let (new, folder) = (self.move_file(path)?, folder_of(path).to_owned());
                let old = std::mem::replace(&mut self.file, new);
                // The old one is emptied only when its name leads to the new one for good.
                let synced = File::open(&folder).and_then(|folder| folder.sync_all());
                synced.map_err(failed(&folder, "cannot write"))?;
                // Nobody has the new one yet: another length is its owner's doing.
                if self.noted.swap(false, Ordering::AcqRel) {
                    let _ = lock.set_len(0);
                }
                old
            }
        };
        // It uses no space from now on, although somebody may map it. Where a file system knows no
        // holes it does until then, and holds what was its user's anyway.
        let flags = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
        let _ = rustix::fs::fallocate(&old, flags, 0, self.length);
        Ok(())
    }

    /// A new file with the content to be, in the place of that at `path`.
    fn move_file(&self, path: &Path) -> Result<File, SpanError> {
        let next = beside(path, ".next");
        let failed = |what| failed(&next, what);
        let mut options = File::options();
        options.read(true).write(true).create(true).truncate(true);
        let new = options.open(&next).map_err(failed("cannot make"))?;
        new.set_len(self.length).map_err(failed("cannot make"))?;
        if self.reserved {
            let room = rustix::fs::fallocate(&new, FallocateFlags::empty(), 0, self.length);
            room.map_err(|cause| failed("no room for")(cause.into()))?;
        }
        let permissions = self.file.metadata().map(|metadata| metadata.permissions());
        permissions
            .and_then(|permissions| new.set_permissions(permissions))
            .map_err(failed("cannot make"))?;
        match (self.at_return, self.reserved) {
            (AtReturn::Zero, _) => {}
            (AtReturn::Keep, false) => self.copy_to(&new).map_err(failed("cannot copy to"))?,
            (AtReturn::Keep, true) => self.write_to(&new).map_err(failed("cannot copy to"))?,
        }
        // A name that leads to half of the content would lose the rest.
        new.sync_all().map_err(failed("cannot write"))?;
        std::fs::rename(&next, path).map_err(failed("cannot rename"))?;
        Ok(new)
    }

    /// Copies to a file that has room for all of it. Blocks that both files have would need room when they are stored to.
    fn write_to(&self, new: &File) -> io::Result<()> {
        let mut buffer = vec![0; 1 << 20];
        self.each_data(|range| {
            let mut at = range.start;
            while at < range.end {
                let length = (range.end - at).min(buffer.len() as u64) as usize;
                let count = self.file.read_at(&mut buffer[..length], at)?;
                if count == 0 {
                    // A user has truncated the file meanwhile.
                    break;
                }
                new.write_all_at(&buffer[..count], at)?;
                at += count as u64;
            }
            Ok(())
        })
    }

    fn copy_to(&self, new: &File) -> io::Result<()> {
        if rustix::fs::ioctl_ficlone(new, &self.file).is_ok() {
            // What a user appended, or cut off, is none of the span.
            return new.set_len(self.length);
        }
        self.each_data(|range| {
            let (mut from, mut to) = (range.start, range.start);
            while from < range.end {
                let length = usize::try_from(range.end - from).unwrap_or(usize::MAX);
                let (source, target) = (Some(&mut from), Some(&mut to));
                // A user has truncated the file meanwhile.
                if rustix::fs::copy_file_range(&self.file, source, new, target, length)? == 0 {
                    break;
                }
            }
            Ok(())
        })
    }

    /// Calls `with` for each part of the file that is no hole.
    fn each_data(&self, mut with: impl FnMut(Range<u64>) -> io::Result<()>) -> io::Result<()> {
        let mut at = 0;
        while at < self.length {
            let data = match rustix::fs::seek(&self.file, SeekFrom::Data(at)) {
                Ok(data) => data,
                Err(Errno::NXIO) => break,
                Err(cause) => return Err(cause.into()),
            };
            // A user may truncate the file meanwhile: there is nothing from there on.
            let hole = match rustix::fs::seek(&self.file, SeekFrom::Hole(data)) {
                Ok(hole) => hole.min(self.length),
                Err(Errno::NXIO) => break,
                Err(cause) => return Err(cause.into()),
            };
            with(data..hole)?;
            at = hole.max(data + 1);
        }
        Ok(())
    }
}

/// How the name of the file ends that says whose a span's file is, and how long.
const LOCK: &str = ".lock";

/// The length that a span's lock says it has; `None` where none was written yet.
fn noted_length(lock: &File) -> Option<u64> {
    let mut text = [0; 24];
    let count = lock.read_at(&mut text, 0).ok()?;
    std::str::from_utf8(&text[..count]).ok()?.trim_end().parse().ok()
}

/// Writes the length of a span where none of its users can change it.
fn note_length(lock: &File, length: u64) -> io::Result<()> {
    lock.set_len(0)?;
    lock.write_all_at(format!("{length}\n").as_bytes(), 0)?;
    // A user's change of the file's size may survive a loss of power; so does this.
    lock.sync_all()
}

fn failed(path: &Path, what: &'static str) -> impl Fn(io::Error) -> SpanError {
    let path = path.to_owned();
    move |cause| SpanError::File { what, path: path.clone(), cause }
}

/// Takes the file at `path` for this process alone.
fn lock(path: &Path) -> Result<File, SpanError> {
    let lock = beside(path, LOCK);
    let failed = failed(&lock, "cannot lock");
    let mut options = File::options();
    options.read(true).write(true).create(true).truncate(false);
    let file = options.open(&lock).map_err(&failed)?;
    match lock_file(&file, LOCK_PATIENCE) {
        Ok(()) => Ok(file),
        Err(Errno::WOULDBLOCK) => Err(SpanError::InUse { path: path.to_owned() }),
        Err(cause) => Err(failed(cause.into())),
    }
}

/// The folder that a file's name is in.
fn folder_of(path: &Path) -> &Path {
    path.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."))
}

/// Whether what is in this folder is in memory alone.
fn is_in_memory(folder: &Path) -> io::Result<bool> {
    /// What the system says of a ramfs.
    const RAMFS: u32 = 0x8584_58f6;
    /// What the system says of a tmpfs.
    const TMPFS: u32 = 0x0102_1994;
    let kind = rustix::fs::statfs(folder)?.f_type;
    Ok([RAMFS, TMPFS].contains(&(kind as u32)))
}

/// The name of a file beside that at `path`.
fn beside(path: &Path, ending: &str) -> PathBuf {
    let mut name = path.as_os_str().to_owned();
    name.push(ending);
    PathBuf::from(name)
}
