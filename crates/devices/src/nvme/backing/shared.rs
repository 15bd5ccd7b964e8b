//! A file or block device that several functions of one drive share, each with a part of its own.
//!
//! It is taken for this process while any function is there; each function opens it once more, so that the system
//! reports to each on its own what could not be written.

use std::fs::{self, File};
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError, Weak};

use super::super::config::NvmeError;
use super::super::parts::{DriveSpan, Parts};
use super::open::{self, OpenedFile};

/// The functions of a drive, and the file that they have while there are any.
#[derive(Debug)]
pub struct SharedFile {
    /// Name and size of each function's part.
    wanted: Vec<(String, u64)>,
    /// Bytes of the whole drive.
    size: u64,
    block_size: u32,
    held: Mutex<Weak<LockedFile>>,
}

/// The file, which nobody else can use as a drive while this is there.
#[derive(Debug)]
pub struct LockedFile {
    file: File,
    parts: Parts,
}

/// One function's part of a shared file.
#[derive(Debug, Clone)]
pub struct FilePart {
    /// The file that all functions of the drive have parts of.
    pub shared: Arc<SharedFile>,
    /// The drive's file or block device.
    pub path: PathBuf,
    /// The file that says which part each function has.
    pub notes: PathBuf,
    /// Which function it is: `vf1`.
    pub name: String,
}

impl PartialEq for FilePart {
    fn eq(&self, other: &FilePart) -> bool {
        Arc::ptr_eq(&self.shared, &other.shared) && self.name == other.name
    }
}

impl Eq for FilePart {}

impl SharedFile {
    /// A drive of `size` bytes whose functions have parts of these names and sizes.
    pub fn new(wanted: Vec<(String, u64)>, size: u64, block_size: u32) -> SharedFile {
        SharedFile { wanted, size, block_size, held: Mutex::default() }
    }

    fn hold(&self, path: &Path, notes: &Path) -> Result<Arc<LockedFile>, NvmeError> {
        let mut held = self.held.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(held) = held.upgrade() {
            return Ok(held);
        }
        let (file, capacity) = open::take(path, self.size, self.block_size)?;
        let parts = self.parts(notes, capacity)?;
        let taken = Arc::new(LockedFile { file, parts });
        *held = Arc::downgrade(&taken);
        Ok(taken)
    }

    /// The parts as they are noted, with those that are new.
    fn parts(&self, notes: &Path, capacity: u64) -> Result<Parts, NvmeError> {
        let fail = |what: &'static str| {
            let path = notes.to_owned();
            move |cause: io::Error| NvmeError::File { what, path, cause }
        };
        let mut parts = match fs::read(notes) {
            Ok(text) => serde_json::from_slice::<Parts>(&text)
                .map_err(|cause| fail("cannot understand")(cause.into()))?,
            Err(cause) if cause.kind() == io::ErrorKind::NotFound => Parts::default(),
            Err(cause) => return Err(fail("cannot read")(cause)),
        };
        let before = parts.clone();
        parts.give(&self.wanted, capacity).map_err(|cause| {
            let text = format!("{cause}; to give up a function's data, remove it there");
            fail("the parts of the drive noted in")(io::Error::other(text))
        })?;
        if parts != before {
            let text = serde_json::to_vec_pretty(&parts).unwrap_or_default();
            replace(notes, &text).map_err(fail("cannot write"))?;
        }
        Ok(parts)
    }
}

impl FilePart {
    /// Opens this part of the file for a drive.
    ///
    /// # Errors
    /// [`NvmeError`] when the file cannot be opened or is in use, or there is no room for the part.
    pub fn open(&self) -> Result<OpenedFile, NvmeError> {
        let held = self.shared.hold(&self.path, &self.notes)?;
        let Some(DriveSpan { start, size }) = held.parts.get(&self.name) else {
            return Err(NvmeError::Config(format!("{} has no part of its drive", self.name)));
        };
        let file = open::once_more(&held.file).map_err(|cause| NvmeError::File {
            what: "cannot open",
            path: self.path.clone(),
            cause,
        })?;
        let opened = open::describe(file, &self.path, size)?;
        Ok(OpenedFile { start, held: Some(held), ..opened })
    }
}

/// Puts `text` into the file at `path`, wholly or not at all, whenever power is lost.
fn replace(path: &Path, text: &[u8]) -> io::Result<()> {
    let fresh = path.with_extension("new");
    let mut file = File::create(&fresh)?;
    file.write_all(text)?;
    file.sync_all()?;
    fs::rename(&fresh, path)?;
    open::sync_folder(path)
}
