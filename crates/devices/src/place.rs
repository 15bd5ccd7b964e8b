//! Where a device's data is: what `backing` says in the rack file, and the file that it means.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use rackbus_net::PortSource;

/// How long another process may hold the file of a device before it counts as in use.
pub(crate) const LOCK_PATIENCE: Duration = Duration::from_secs(1);

/// A place for data.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum DataLocation {
    /// In a file that rackbus keeps in its state directory.
    State,
    /// In this file or block device; a relative path counts from the rack file's folder.
    Path(PathBuf),
    /// In the node's memory, and lost with it.
    Memory,
    /// A backing without data: reads leave the buffer as it is, writes are forgotten.
    Null,
}

/// The folders that a host's devices find their files in, and the network that their ports are of.
#[derive(Debug, Clone)]
pub struct Folders {
    /// Where rackbus keeps files of this host.
    pub state: PathBuf,
    /// Where the rack file is.
    pub rack: PathBuf,
    /// Where network functions have their ports; without it their links are down.
    pub network: Option<Arc<dyn PortSource>>,
}

impl Folders {
    /// These folders, and no network.
    pub fn new(state: impl Into<PathBuf>, rack: impl Into<PathBuf>) -> Folders {
        Folders { state: state.into(), rack: rack.into(), network: None }
    }

    /// The same with this network.
    #[must_use]
    pub fn with_network(self, network: Arc<dyn PortSource>) -> Folders {
        Folders { network: Some(network), ..self }
    }
}

impl DataLocation {
    /// What a word in the rack file means. A path has a slash, so that a misspelt word does not
    /// become a file.
    pub fn parse(text: &str) -> Option<DataLocation> {
        match text {
            "file" => Some(DataLocation::State),
            "memory" => Some(DataLocation::Memory),
            "null" => Some(DataLocation::Null),
            path if path.contains('/') => Some(DataLocation::Path(PathBuf::from(path))),
            _ => None,
        }
    }

    /// The file of `function` (`alpha/nvme0`), if it is in one.
    pub fn file(&self, function: &str, folders: &Folders) -> Option<PathBuf> {
        match self {
            DataLocation::State => {
                let device = function.rsplit('/').next().unwrap_or(function);
                Some(folders.state.join(format!("{device}.img")))
            }
            // An absolute path stays as it is.
            DataLocation::Path(path) => Some(folders.rack.join(Path::new(path))),
            DataLocation::Memory | DataLocation::Null => None,
        }
    }
}

impl std::fmt::Display for DataLocation {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            DataLocation::State => f.write_str("file"),
            DataLocation::Path(path) => write!(f, "{}", path.display()),
            DataLocation::Memory => f.write_str("memory"),
            DataLocation::Null => f.write_str("null"),
        }
    }
}

/// A number made of a function's name (FNV-1a), for identifiers that differ between the functions of
/// a rack and stay what they are.
pub(crate) fn digest(function: &str) -> u64 {
    function.bytes().fold(0xcbf2_9ce4_8422_2325, |hash, byte| {
        (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3)
    })
}
