//! A bridge with its two sockets: what `rackbus ntb` runs.

use std::fs::File;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::mpsc::{self, Receiver};
use std::sync::{Arc, Mutex, Weak};
use std::time::Duration;

use rackbus_pci::vfio_user::{RequestRefused, Requests, ServedDevice, Server, requests};
use rustix::io::Errno;

use super::counters::BridgeCounts;
use super::end::{BridgeEnd, BridgeShared, EndDevice};
use super::registers::{BridgeRegisters, BridgeSide, BridgeWindows};

/// Sizes that a window may have.
const SIZES: std::ops::RangeInclusive<u64> = 4096..=1 << 40;
const PAGE: u64 = 4096;
/// About what a link of PCI Express takes from detection to its speed.
const TRAINING: Duration = Duration::from_millis(100);

/// One end of a bridge.
#[derive(Debug, Clone)]
pub struct EndConfig {
    /// Where its machine connects.
    pub socket: PathBuf,
    /// The file that is its machine's memory.
    pub memory: PathBuf,
}

/// Sockets, memory and window sizes of a bridge.
#[derive(Debug, Clone)]
pub struct BridgeConfig {
    /// Its ends: A and B.
    pub ends: [EndConfig; 2],
    /// Size of the first window in bytes.
    pub window: u64,
    /// Size of the second window, where that is translated too; otherwise it is the peer's memory.
    pub second: Option<u64>,
    /// Size that a missing memory file gets.
    pub memory_size: u64,
    /// How long a machine may take to answer.
    pub patience: Duration,
    /// How long the link takes to train.
    pub training: Duration,
}

impl BridgeConfig {
    /// The usual: a window of 64 MiB, and the peer's memory.
    #[must_use]
    pub fn new(ends: [EndConfig; 2]) -> BridgeConfig {
        BridgeConfig {
            ends,
            window: 64 << 20,
            second: None,
            memory_size: 512 << 20,
            patience: requests::PATIENCE,
            training: TRAINING,
        }
    }
}

/// Why a bridge does not start.
#[derive(Debug, thiserror::Error)]
pub enum BridgeError {
    /// A window's size cannot be.
    #[error("a window of {0} bytes: give a power of two from 4K to 1T")]
    Window(u64),
    /// A memory file's size cannot be.
    #[error("{}: {length} bytes are no machine's memory; give a file of whole pages", path.display())]
    Memory {
        /// The file that backs the memory.
        path: PathBuf,
        /// How many bytes the file has.
        length: u64,
    },
    /// The system has no thread for it.
    #[error("no thread for the link: {0}")]
    Thread(io::Error),
    /// A file or socket cannot be used.
    #[error("cannot {action} {}: {source}", path.display())]
    Io {
        /// What was tried, as a verb.
        action: &'static str,
        /// The file or socket.
        path: PathBuf,
        /// What the system said of it.
        source: io::Error,
    },
}

/// A bridge that is served, until it is dropped.
#[derive(Debug)]
pub struct Bridge {
    shared: Arc<BridgeShared>,
    // Both ends' sockets; who has an end has it until this is dropped.
    _servers: [Server; 2],
}

impl Bridge {
    /// Serves both ends. Memory files that are missing are made.
    ///
    /// # Errors
    /// [`BridgeError`].
    pub fn start(config: &BridgeConfig) -> Result<Bridge, BridgeError> {
        for size in [Some(config.window), config.second].into_iter().flatten() {
            if !size.is_power_of_two() || !SIZES.contains(&size) {
                return Err(BridgeError::Window(size));
            }
        }
        let end = |end: &EndConfig| {
            let (file, length) = memory(&end.memory, config.memory_size)?;
            Ok(BridgeEnd::new(file, length, Requests::with_patience(config.patience)))
        };
        let ends = [end(&config.ends[0])?, end(&config.ends[1])?];
        let onto = |peer: &BridgeEnd| BridgeWindows {
            sizes: [config.window, config.second.unwrap_or(peer.length.next_power_of_two())],
            second_is_memory: config.second.is_none(),
        };
        let windows = [onto(&ends[1]), onto(&ends[0])];
        let registers = Mutex::new(BridgeRegisters::new(windows));
        let (training, wanted) = mpsc::sync_channel(1);
        let shared = Arc::new(BridgeShared { registers, ends, windows, training });
        train(Arc::downgrade(&shared), wanted, config.training)?;
        let serve = |side: BridgeSide| serve(&shared, side, &config.ends[side.index()].socket);
        let servers = [serve(BridgeSide::A)?, serve(BridgeSide::B)?];
        Ok(Bridge { shared, _servers: servers })
    }

    /// What went through an end.
    #[must_use]
    pub fn counted(&self, side: BridgeSide) -> BridgeCounts {
        let mut counts = self.shared.ends[side.index()].counters.get();
        // Told after they were sent, by the machine that they were for.
        counts.dropped += self.shared.ends[side.peer().index()].refused_writes();
        counts
    }

    /// Whether the link between the ends is up.
    #[must_use]
    pub fn link_is_up(&self) -> bool {
        self.shared.registers.lock().is_ok_and(|registers| registers.link_is_up())
    }

    /// Sizes of the windows of an end.
    #[must_use]
    pub fn windows(&self, side: BridgeSide) -> [u64; 2] {
        self.shared.windows[side.index()].sizes
    }
}

/// Brings the link up some time after both ends wanted it, until the bridge is gone.
fn train(
    shared: Weak<BridgeShared>,
    wanted: Receiver<()>,
    time: Duration,
) -> Result<(), BridgeError> {
    let train = move || {
        while wanted.recv().is_ok() {
            std::thread::sleep(time);
            let Some(shared) = shared.upgrade() else { return };
            shared.train();
        }
    };
    let thread = std::thread::Builder::new().name("link training".into()).spawn(train);
    thread.map(drop).map_err(BridgeError::Thread)
}

/// The memory of a machine, and its size.
fn memory(path: &Path, size: u64) -> Result<(File, u64), BridgeError> {
    let failed = |action| {
        let path = path.to_owned();
        move |source| BridgeError::Io { action, path, source }
    };
    let mut options = File::options();
    options.read(true).write(true).create(true).truncate(false);
    let file = options.open(path).map_err(failed("open"))?;
    let mut length = file.metadata().map_err(failed("look at"))?.len();
    if length == 0 {
        file.set_len(size).map_err(failed("make"))?;
        length = size;
    }
    if length == 0 || !length.is_multiple_of(PAGE) || length > *SIZES.end() {
        return Err(BridgeError::Memory { path: path.to_owned(), length });
    }
    Ok((file, length))
}

fn serve(
    shared: &Arc<BridgeShared>,
    side: BridgeSide,
    socket: &Path,
) -> Result<Server, BridgeError> {
    let shared = shared.clone();
    let open = move || match EndDevice::new(shared.clone(), side) {
        Ok(device) => Ok(Box::new(device) as Box<dyn ServedDevice>),
        Err(cause) => Err(RequestRefused::new(Errno::MFILE, cause.to_string())),
    };
    Server::bind(socket, open).map_err(|source| BridgeError::Io {
        action: "serve",
        path: socket.to_owned(),
        source,
    })
}
