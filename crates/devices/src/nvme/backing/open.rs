//! Opening the file or block device of a drive: taking it for this process alone, its size, and
//! what its file system can do.

use std::fs::{File, OpenOptions};
use std::io::{self, Seek, SeekFrom};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};
use std::os::unix::fs::FileTypeExt;
use std::path::Path;
use std::sync::Arc;

use rackbus_memory::file_lock::lock_file;
use rustix::io::Errno;

use super::super::config::NvmeError;
use super::shared::LockedFile;
use crate::place::LOCK_PATIENCE;

/// File systems without a medium, where no read waits for one: tmpfs and hugetlbfs. They do not
/// know `RWF_NOWAIT`.
const MEMORY_FILE_SYSTEMS: [i64; 2] = [0x0102_1994, 0x9584_58f6];

/// An open file, and what is known of it.
#[derive(Debug)]
pub struct OpenedFile {
    /// The opened file, which no other process can use as a drive meanwhile.
    pub file: File,
    /// The same file, opened once more: the system reports to it on its own.
    pub witness: File,
    /// First byte of the file that the drive uses.
    pub start: u64,
    /// Bytes of the file that the drive uses.
    pub capacity: u64,
    /// `RWF_*` for reads that must not wait; `None` when there is no such thing here.
    pub read_now: Option<i32>,
    /// Bytes that ranges to be zeroed are multiples of.
    pub zero_alignment: u64,
    /// Where several functions share the file: what keeps it for this process.
    pub held: Option<Arc<LockedFile>>,
}

/// Opens `path`, or makes it with `size` bytes. A size of 0 takes what is there.
///
/// # Errors
/// [`NvmeError`] when it cannot be opened, is in use, or has another size.
pub fn open(path: &Path, size: u64, block_size: u32) -> Result<OpenedFile, NvmeError> {
    let (file, capacity) = take(path, size, block_size)?;
    describe(file, path, capacity)
}

/// As [`open`], without a look at what the file can do; with the bytes that it has for a drive.
///
/// # Errors
/// As [`open`].
pub fn take(path: &Path, size: u64, block_size: u32) -> Result<(File, u64), NvmeError> {
    let mut file = OpenOptions::new()
        .read(true)
        .write(true)
        .create(size > 0)
        .truncate(false)
        .open(path)
        .map_err(fail(path, "cannot open"))?;
    match lock_file(&file, LOCK_PATIENCE) {
        Ok(()) => {}
        Err(Errno::WOULDBLOCK) => {
            return Err(NvmeError::InUse { path: path.to_owned() });
        }
        Err(cause) => return Err(fail(path, "cannot lock")(cause.into())),
    }
    let capacity = size_up(&mut file, path, size, block_size).map_err(fail(path, "cannot use"))?;
    Ok((file, capacity))
}

/// What is to be known of `file`, of which a drive uses the first `capacity` bytes.
///
/// # Errors
/// When the system does not say.
pub fn describe(file: File, path: &Path, capacity: u64) -> Result<OpenedFile, NvmeError> {
    let read_now = probe(file.as_fd()).map_err(fail(path, "cannot read"))?;
    let witness = once_more(&file).map_err(fail(path, "cannot open"))?;
    let kind = file.metadata().map_err(fail(path, "cannot use"))?.file_type();
    let zero_alignment = if kind.is_block_device() {
        let blocks = rustix::fs::ioctl_blksszget(&file);
        u64::from(blocks.map_err(|cause| fail(path, "cannot use")(cause.into()))?)
    } else {
        1
    };
    Ok(OpenedFile { file, witness, start: 0, capacity, read_now, zero_alignment, held: None })
}

/// The file of `file`, opened on its own.
///
/// # Errors
/// The system's.
pub fn once_more(file: &File) -> io::Result<File> {
    let own = format!("/proc/self/fd/{}", file.as_raw_fd());
    OpenOptions::new().read(true).write(true).open(own)
}

fn fail(path: &Path, what: &'static str) -> impl FnOnce(io::Error) -> NvmeError + use<> {
    let path = path.to_owned();
    move |cause| NvmeError::File { what, path, cause }
}

/// `other`, if it is open on the same file as `file`, for writing.
///
/// # Errors
/// When it is not.
pub fn check_same(file: &File, other: File) -> io::Result<File> {
    let [one, two] = [rustix::fs::fstat(file)?, rustix::fs::fstat(&other)?];
    let same = (one.st_dev, one.st_ino) == (two.st_dev, two.st_ino);
    let writable = rustix::fs::fcntl_getfl(&other)?.contains(rustix::fs::OFlags::RDWR);
    if same && writable { Ok(other) } else { Err(io::Error::other("it is of another file")) }
}

/// Makes the names of a file's folder durable.
///
/// # Errors
/// The system's.
pub fn sync_folder(path: &Path) -> io::Result<()> {
    // The folder that has the file, and not the one of a link to it.
    let path = path.canonicalize()?;
    File::open(path.parent().unwrap_or(&path))?.sync_all()
}

/// The capacity to use: `size`, which a new or empty file is brought to.
fn size_up(file: &mut File, path: &Path, size: u64, block_size: u32) -> io::Result<u64> {
    let kind = file.metadata()?.file_type();
    if !kind.is_file() && !kind.is_block_device() {
        return Err(io::Error::other("it is neither a file nor a block device"));
    }
    let there = file.seek(SeekFrom::End(0))?;
    if kind.is_file() && there == 0 && size > 0 {
        // It may just have been made: what is flushed to it would be lost with its name.
        if let Err(cause) = sync_folder(path) {
            tracing::warn!(path = %path.display(), %cause, "the drive's folder cannot be synced: after a loss of power its file may be gone");
        }
        file.set_len(size)?;
        return Ok(size);
    }
    let fits = if kind.is_file() { size == there } else { size <= there };
    if size > 0 && !fits {
        let text =
            format!("it has {there} bytes, the drive is to have {size}; give size = {there}");
        return Err(io::Error::other(text));
    }
    let capacity = if size > 0 { size } else { there - there % u64::from(block_size) };
    if capacity == 0 {
        return Err(io::Error::other("it is empty; give the drive a size"));
    }
    Ok(capacity)
}

/// Finds the flags for a read that does not wait: a short read tells whether the file system
/// knows them.
fn probe(file: BorrowedFd<'_>) -> io::Result<Option<i32>> {
    let kind = rustix::fs::fstatfs(file)?;
    #[allow(clippy::unnecessary_cast, reason = "f_type differs between architectures")]
    if MEMORY_FILE_SYSTEMS.contains(&(kind.f_type as i64)) {
        return Ok(Some(0));
    }
    let mut byte = [0u8; 1];
    let mut buffers = [io::IoSliceMut::new(&mut byte)];
    match rustix::io::preadv2(file, &mut buffers, 0, rustix::io::ReadWriteFlags::NOWAIT) {
        Ok(_) | Err(Errno::AGAIN) => Ok(Some(libc::RWF_NOWAIT)),
        Err(Errno::OPNOTSUPP) => Ok(None),
        Err(cause) => Err(cause.into()),
    }
}
