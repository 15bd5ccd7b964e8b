//! What an NVMe drive is made of: its size, its blocks, where the data lives, what it calls itself.

use std::path::PathBuf;

use super::backing::FilePart;
use super::buffer;
use super::limits::{LimitDelays, Limits};
use crate::memory::SpanError;

/// Logical block sizes that a namespace may have, in bytes.
pub const BLOCK_SIZES: [u32; 2] = [512, 4096];

/// Where the data of a drive lives.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum BackingConfig {
    /// In memory of the lender; gone when the lender ends.
    Memory,
    /// In a file or on a block device, through the page cache.
    File(PathBuf),
    /// In a part of a file or block device that functions of the same drive share.
    Part(FilePart),
    /// Nowhere: reads move no data, writes are forgotten. For measuring the protocol alone.
    Null,
}

/// Describes one drive, as a rack file's section does.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NvmeConfig {
    /// Capacity in bytes, a multiple of the block size. 0 takes the size that the file or block
    /// device has already.
    pub size: u64,
    /// Logical block size in bytes: 512 or 4096.
    pub block_size: u32,
    /// Where the data lives.
    pub backing: BackingConfig,
    /// Serial number, up to 20 printable ASCII characters. The namespace's identifiers derive
    /// from it, so two drives that one host may see need different ones.
    pub serial: String,
    /// Model number, up to 40 printable ASCII characters.
    pub model: String,
    /// Bytes of the controller memory buffer: a power of two, or 0 for none.
    pub buffer: u64,
    /// Bytes of the persistent memory region: a power of two, or 0 for none.
    pub persistent: u64,
    /// The file of the region; `None` where another node has it.
    pub persistent_file: Option<PathBuf>,
    /// What its user may do in a second.
    pub limits: Limits,
    /// Counts what had to wait for that.
    pub delays: LimitDelays,
}

impl NvmeConfig {
    /// A drive in memory with 512-byte blocks.
    pub fn memory(size: u64, serial: &str) -> Self {
        NvmeConfig {
            size,
            block_size: 512,
            backing: BackingConfig::Memory,
            serial: serial.to_owned(),
            model: "rackbus NVMe drive".to_owned(),
            buffer: 0,
            persistent: 0,
            persistent_file: None,
            limits: Limits::default(),
            delays: LimitDelays::default(),
        }
    }

    /// A drive in the file or block device at `path`, created when it is missing.
    pub fn file(path: impl Into<PathBuf>, size: u64, serial: &str) -> Self {
        NvmeConfig { backing: BackingConfig::File(path.into()), ..NvmeConfig::memory(size, serial) }
    }

    /// Checks what can be checked without opening anything.
    ///
    /// # Errors
    /// [`NvmeError::Config`], naming the field and what is allowed.
    pub(super) fn check(&self) -> Result<(), NvmeError> {
        let wrong = |what: String| Err(NvmeError::Config(what));
        if !BLOCK_SIZES.contains(&self.block_size) {
            return wrong(format!("block_size is {}; it must be 512 or 4096", self.block_size));
        }
        if !self.size.is_multiple_of(u64::from(self.block_size)) {
            return wrong(format!(
                "size is {}; it must be a multiple of the block size, {}",
                self.size, self.block_size
            ));
        }
        if self.size > MAX_SIZE {
            return wrong(format!("size is {}; at most {MAX_SIZE} is possible", self.size));
        }
        if self.limits.bytes == Some(0) || self.limits.operations == Some(0) {
            return wrong("a limit is 0; nothing could ever be done".to_owned());
        }
        if self.buffer > 0
            && !(self.buffer.is_power_of_two() && buffer::SIZES.contains(&self.buffer))
        {
            return wrong(format!(
                "buffer is {}; a controller memory buffer has a power of two from 64 KiB to 64 GiB",
                self.buffer
            ));
        }
        if self.persistent > 0
            && !(self.persistent.is_power_of_two() && buffer::SIZES.contains(&self.persistent))
        {
            return wrong(format!(
                "persistent is {}; a persistent memory region has a power of two from 64 KiB to 64 GiB",
                self.persistent
            ));
        }
        if self.size == 0 && !matches!(self.backing, BackingConfig::File(_)) {
            return wrong("size is 0; give the drive a size".to_owned());
        }
        for (field, text, most) in [("serial", &self.serial, 20), ("model", &self.model, 40)] {
            if text.is_empty() || text.len() > most || !text.bytes().all(|b| (32..127).contains(&b))
            {
                return wrong(format!(
                    "{field} is {text:?}; it must be 1 to {most} printable ASCII characters"
                ));
            }
        }
        Ok(())
    }
}

/// The most bytes a drive may have: what a file offset can address.
const MAX_SIZE: u64 = i64::MAX as u64 & !4095;

/// Why a drive could not be made.
#[derive(Debug, thiserror::Error)]
pub enum NvmeError {
    /// The description is wrong.
    #[error("NVMe drive: {0}")]
    Config(String),
    /// The file or device cannot be used.
    #[error("NVMe drive: {what} {}: {cause}", path.display())]
    File {
        /// The step that failed.
        what: &'static str,
        /// Path of the file that could not be used.
        path: PathBuf,
        /// The error of the system call.
        cause: std::io::Error,
    },
    /// Another process has the file.
    #[error("NVMe drive: {} is used by another process; stop it or choose another file", path.display())]
    InUse {
        /// Path of the file that somebody else uses.
        path: PathBuf,
    },
    /// Memory for the drive could not be obtained.
    #[error("NVMe drive: {0}")]
    Memory(#[from] rackbus_memory::RegionError),
    /// The persistent memory region's file cannot be used.
    #[error("NVMe drive: persistent memory region: {0}")]
    Region(#[from] SpanError),
    /// The system gave no io_uring.
    #[error("NVMe drive: io_uring: {0}; the kernel must allow it (kernel.io_uring_disabled = 0)")]
    Uring(std::io::Error),
    /// What the medium holds could not be brought in line with what is read.
    #[error("NVMe drive: its data cannot be flushed: {0}; look at the medium's health")]
    Load(std::io::Error),
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn wrong_descriptions_are_refused_with_the_allowed_values() {
        let good = NvmeConfig::memory(1 << 20, "S1");
        assert!(good.check().is_ok());
        let cases = [
            (NvmeConfig { block_size: 1024, ..good.clone() }, "512 or 4096"),
            (NvmeConfig { size: 1000, ..good.clone() }, "multiple"),
            (NvmeConfig { size: 0, ..good.clone() }, "give the drive a size"),
            (
                NvmeConfig { limits: Limits { operations: Some(0), bytes: None }, ..good.clone() },
                "a limit is 0",
            ),
            (NvmeConfig { size: 1 << 63, ..good.clone() }, "at most"),
            (NvmeConfig { buffer: 96 << 10, ..good.clone() }, "a power of two"),
            (NvmeConfig { persistent: 4096, ..good.clone() }, "from 64 KiB"),
            (NvmeConfig { serial: "x".repeat(21), ..good.clone() }, "1 to 20"),
            (NvmeConfig { model: "ü".to_owned(), ..good }, "printable ASCII"),
        ];
        for (config, words) in cases {
            let text = config.check().unwrap_err().to_string();
            assert!(text.contains(words), "{text}");
        }
    }
}
