//! Data of a drive through an accelerator on its way to the program: with as many reads in flight as there are queues for,
//! and with one at a time.
//!
//! The drive is in memory and has a thread of its own, the function's front runs in the program's thread.

use std::path::PathBuf;
use std::time::{Duration, Instant};

use rackbus_devices::accel::{EnginePool, PoolOptions};
use rackbus_devices::nvme::{Nvme, NvmeConfig};
use rackbus_driver::accel::{Accel, AccelOptions, DriveRange, DriveSource, MessageWork};
use rackbus_driver::{Drive, DriveOptions};
use rackbus_pci::engine::EngineOptions;
use rackbus_pci::vfio_user::{LocalFunction, serve_function};
use rackbus_spec::accel::Operation;

use super::queue::function;
use crate::BenchError;

/// Bytes of a message.
const MESSAGE: usize = 64 << 10;
/// Bytes of the drive, all of which are read again and again.
const DRIVE: u64 = 64 << 20;

/// A drive, and an accelerator that its data go through.
pub struct InlineSource {
    accel: Accel,
    source: DriveSource,
    _served: LocalFunction,
    /// Where the drive's socket is.
    folder: PathBuf,
}

impl Drop for InlineSource {
    fn drop(&mut self) {
        // What is left of it is in the way of nothing.
        let _ = std::fs::remove_dir_all(&self.folder);
    }
}

fn failed(error: impl std::fmt::Display) -> BenchError {
    BenchError::Peer(error.to_string())
}

impl InlineSource {
    /// One whose drive reads ahead, or not.
    ///
    /// # Errors
    /// When one of the functions cannot be used.
    pub fn new(ahead: bool) -> Result<InlineSource, BenchError> {
        let name = format!("rackbus-bench-{}-{ahead}", std::process::id());
        let folder = std::env::temp_dir().join(name);
        std::fs::create_dir_all(&folder).map_err(BenchError::io("making the drive's folder"))?;
        let socket = folder.join("drive.sock");
        let model = Nvme::new(&NvmeConfig::memory(DRIVE, "bench")).map_err(failed)?;
        let served =
            serve_function(Box::new(model), &socket, EngineOptions::default()).map_err(failed)?;
        let pool = EnginePool::new(PoolOptions::default());
        let mut accel = function(&pool, 1, None, AccelOptions::default())?;
        let source = if ahead {
            DriveSource::open(&mut accel, &socket, MESSAGE)
        } else {
            // Room for those that have been read, and one that is.
            let options = DriveOptions { depth: 1, data: 3 * MESSAGE };
            DriveSource::with_drive(&mut accel, Drive::open(&socket, options)?, MESSAGE)
        };
        Ok(InlineSource { accel, source: source.map_err(failed)?, _served: served, folder })
    }

    /// Gigabytes each second of checksums.
    ///
    /// # Errors
    /// When a read or an operation fails.
    pub fn rate(&mut self, time: Duration) -> Result<f64, BenchError> {
        let stages = [(Operation::Crc32c, 0)];
        let work = MessageWork { stages: &stages, ..MessageWork::default() };
        let (range, room) = (DriveRange { offset: 0, length: DRIVE }, self.accel.data_size());
        let (begun, mut bytes) = (Instant::now(), 0);
        while begun.elapsed() < time {
            let ran = self.source.run(&mut self.accel, room, &work, range, |_, _| Ok(()));
            ran.map_err(failed)?;
            bytes += DRIVE;
        }
        Ok(bytes as f64 / begun.elapsed().as_secs_f64() / 1e9)
    }
}
