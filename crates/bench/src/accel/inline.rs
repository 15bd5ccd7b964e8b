//! Data of a drive through an accelerator on its way to the program: with as many reads in flight as there are queues for,
//! and with one at a time.
//!
//! The drive is in memory and has a thread of its own, the function's front runs in the program's thread.

use std::collections::HashMap;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use rackbus_devices::accel::{EnginePool, PoolOptions};
use rackbus_devices::nvme::{Nvme, NvmeConfig};
use rackbus_driver::accel::{Accel, AccelOptions, DriveRange, DriveSource, MessageWork};
use rackbus_driver::{Drive, DriveBuffer, DriveOptions, FunctionPlace};
use rackbus_pci::engine::EngineOptions;
use rackbus_pci::vfio_user::{LocalFunction, serve_function};
use rackbus_spec::accel::Operation;
use rackbus_spec::nvme::IoOpcode;

use super::queue::function;
use crate::BenchError;

/// Bytes of a message.
const MESSAGE: usize = 64 << 10;
/// Bytes of the drive, all of which are read again and again.
const DRIVE: u64 = 64 << 20;
/// Reads in flight, as an accelerator that reads ahead has at most.
const AHEAD: u16 = 8;

/// A drive in memory, served at a socket in a folder of its own.
struct ServedDrive {
    _served: LocalFunction,
    /// Where the drive's socket is.
    folder: PathBuf,
}

impl Drop for ServedDrive {
    fn drop(&mut self) {
        // What is left of it is in the way of nothing.
        let _ = std::fs::remove_dir_all(&self.folder);
    }
}

fn failed(error: impl std::fmt::Display) -> BenchError {
    BenchError::Peer(error.to_string())
}

impl ServedDrive {
    /// One in a folder whose name ends so.
    fn start(name: &str) -> Result<ServedDrive, BenchError> {
        let folder =
            std::env::temp_dir().join(format!("rackbus-bench-{}-{name}", std::process::id()));
        std::fs::create_dir_all(&folder).map_err(BenchError::io("making the drive's folder"))?;
        let model = Nvme::new(&NvmeConfig::memory(DRIVE, "bench")).map_err(failed)?;
        let socket = folder.join("drive.sock");
        let served =
            serve_function(Box::new(model), &socket, EngineOptions::default()).map_err(failed)?;
        Ok(ServedDrive { _served: served, folder })
    }

    fn socket(&self) -> PathBuf {
        self.folder.join("drive.sock")
    }
}

/// A drive, and an accelerator that its data go through.
pub struct InlineSource {
    accel: Accel,
    source: DriveSource,
    /// It is used until the others are gone.
    _drive: ServedDrive,
}

impl InlineSource {
    /// One whose drive reads ahead, or not.
    ///
    /// # Errors
    /// When one of the functions cannot be used.
    pub fn new(ahead: bool) -> Result<InlineSource, BenchError> {
        let drive = ServedDrive::start(if ahead { "ahead" } else { "single" })?;
        let socket = drive.socket();
        let place = FunctionPlace::Socket(socket.clone());
        let pool = EnginePool::new(PoolOptions::default());
        let mut accel = function(&pool, 1, None, AccelOptions::default())?;
        let source = if ahead {
            DriveSource::open(&mut accel, &place, MESSAGE)
        } else {
            // Room for those that have been read, and one that is.
            let options = DriveOptions { depth: 1, data: 3 * MESSAGE };
            DriveSource::with_drive(&mut accel, Drive::open(&socket, options)?, MESSAGE)
        };
        Ok(InlineSource { accel, source: source.map_err(failed)?, _drive: drive })
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

/// A drive whose data a program reads into its own memory, several reads ahead, and gives to the library.
pub struct LibraryReader {
    drive: Drive,
    /// It is used until the driver is gone.
    _served: ServedDrive,
}

impl LibraryReader {
    /// One with as many reads in flight as an accelerator's source has at most.
    ///
    /// # Errors
    /// When the drive cannot be used.
    pub fn new() -> Result<LibraryReader, BenchError> {
        let served = ServedDrive::start("library")?;
        let options = DriveOptions { depth: AHEAD, data: usize::from(AHEAD) * MESSAGE };
        let drive = Drive::open(&served.socket(), options)?;
        Ok(LibraryReader { drive, _served: served })
    }

    /// Gigabytes each second of checksums.
    ///
    /// # Errors
    /// When a read fails.
    pub fn rate(&mut self, time: Duration) -> Result<f64, BenchError> {
        let block = self.drive.info().block_size as usize;
        let buffers: Vec<DriveBuffer> = (0..usize::from(AHEAD))
            .filter_map(|nth| self.drive.buffer(nth * MESSAGE, MESSAGE))
            .collect();
        let blocks = (MESSAGE / block) as u32;
        let (queue, device, _) = self.drive.parts();
        let (mut free, mut under_way) = (buffers, HashMap::new());
        let (mut at, mut message) = (0u64, vec![0; MESSAGE]);
        let (begun, mut bytes) = (Instant::now(), 0u64);
        while begun.elapsed() < time || !under_way.is_empty() {
            while begun.elapsed() < time
                && let Some(buffer) = free.pop()
            {
                let id = queue.submit(IoOpcode::Read, at / block as u64, blocks, buffer, false)?;
                under_way.insert(id, buffer);
                at = (at + MESSAGE as u64) % DRIVE;
            }
            queue.ring(device)?;
            while let Some(done) = queue.poll(device)? {
                let Some(buffer) = under_way.remove(&done.id) else { continue };
                if !done.status.is_success() {
                    return Err(failed(format!("a read ended with {:?}", done.status)));
                }
                if let Some(data) = queue.data(buffer) {
                    data.copy_to(&mut message);
                }
                std::hint::black_box(crc32c::crc32c(&message));
                bytes += MESSAGE as u64;
                free.push(buffer);
            }
        }
        Ok(bytes as f64 / begun.elapsed().as_secs_f64() / 1e9)
    }
}
