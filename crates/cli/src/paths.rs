//! Where a rack's things are: its run directory (sockets, process ids, logs) and its state
//! directory (the control plane's database, drives' files).

use std::fs;
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};

use rackbus_attach::private::{self, run_base, run_base_with};
use serde::{Deserialize, Serialize};

use rackbus_devices::class::parse_rack;
use rackbus_fabric::rack::Rack;
use rackbus_node::borrower::{functions_folder, socket_path};

use crate::commands::{misread, read_text};
use crate::output::Failure;
use crate::process::living;
use crate::{Common, contexts};

/// Overrides the run directory.
pub const RUN_DIR: &str = "RACKBUS_RUN_DIR";
/// Overrides the state directory.
pub const STATE_DIR: &str = "RACKBUS_STATE_DIR";

/// Room that socket paths leave for the numbers of leases.
const LAST_LEASE: u64 = 9_999_999;

/// What `up` leaves in the run directory for the other commands: `rack.json`.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct RunningRack {
    /// Name of the rack, as its file says.
    pub rack: String,
    /// Absolute path of the rack file that it was started with.
    pub file: PathBuf,
    /// Where its database and the drives in files are.
    pub state_dir: PathBuf,
    /// What was in the file then: processes that are started later go on with that. Nothing where nobody else changes
    /// the file.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub text: Option<String>,
    /// Devices that joined since, because `up` found them in the file, `HOST/DEVICE`: they leave when the file does not
    /// list them any more.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub joined: Vec<String>,
    /// Hosts whose nodes have still to go on with this file, or to be started, as `up` has them do where hosts come and go.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub behind: Vec<String>,
    /// Whether it was started with `--low-latency`: so are the nodes of hosts that join it.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub low_latency: bool,
}

impl RunningRack {
    /// Leaves it in the run directory. Others may read it meanwhile: they find the whole of the old one or of the new.
    pub fn note(&self, run_dir: &Path) -> Result<(), Failure> {
        let path = run_dir.join("rack.json");
        let new = run_dir.join(format!(".rack.json.{}", std::process::id()));
        let text = serde_json::to_vec_pretty(self).unwrap_or_default();
        let written = fs::write(&new, text).and_then(|()| fs::rename(&new, &path));
        written.map_err(|cause| {
            Failure::new(format!("{}: {cause}", path.display()), "see to the run directory")
        })
    }

    /// Whether a node has noted it that joined from here: the rack's other hosts are other machines.
    pub fn is_joined(&self) -> bool {
        // The control plane and `up` note the text, since the file there is a person's to change.
        self.text.is_none()
    }

    /// The rack file as it was when the rack was started.
    pub fn text(&self) -> Result<String, Failure> {
        self.text.clone().map_or_else(|| read_text(&self.file), Ok)
    }

    /// The rack as it was started.
    pub fn rack(&self) -> Result<Rack, Failure> {
        let parsed = parse_rack(&self.file.display().to_string(), &self.text()?);
        parsed.map(|(rack, _)| rack).map_err(misread)
    }

    /// Of the rack that `file` describes.
    pub fn of(rack: &Rack, file: &Path, state_dir: &Path) -> Result<RunningRack, Failure> {
        let text = Some(read_text(file)?);
        let file = file.canonicalize().map_err(|cause| {
            Failure::usage(format!("{}: {cause}", file.display()), "name a rack file")
        })?;
        Ok(RunningRack {
            rack: rack.name.clone(),
            file,
            state_dir: state_dir.to_owned(),
            text,
            joined: Vec::new(),
            behind: Vec::new(),
            low_latency: false,
        })
    }
}

/// Makes the run directory of rack `name`, or takes the one there is, and says where it is.
pub fn make_run_dir(common: &Common, name: &str) -> Result<PathBuf, Failure> {
    let dir = match &common.run_dir {
        Some(dir) => absolute(dir)?,
        None => {
            let base = run_base();
            make_private(&base)?;
            base.join(name)
        }
    };
    make_private(&dir)?;
    Ok(dir)
}

/// Paths are passed on to other processes, and shown: they mean the same everywhere.
fn absolute(dir: &Path) -> Result<PathBuf, Failure> {
    std::path::absolute(dir)
        .map_err(|cause| Failure::usage(format!("{}: {cause}", dir.display()), "name a folder"))
}

/// The state directory of rack `name`.
pub fn state_dir(given: Option<&Path>, name: &str) -> Result<PathBuf, Failure> {
    let var = |name| std::env::var_os(name).filter(|v| !v.is_empty()).map(PathBuf::from);
    if let Some(dir) = given {
        return absolute(dir);
    }
    let base = var("XDG_STATE_HOME")
        .or_else(|| var("HOME").map(|home| home.join(".local/state")))
        .unwrap_or_else(|| PathBuf::from("/var/lib"));
    absolute(&base.join("rackbus").join(name))
}

/// The run directory of the rack that a command means: the one named, or the only one there is.
/// What others can change is not believed: commands signal the processes that it names.
pub fn find_run_dir(common: &Common) -> Result<PathBuf, Failure> {
    contexts::refuse_named(common)?;
    if let Some(dir) = &common.run_dir {
        let dir = absolute(dir)?;
        check_private(&dir)?;
        return Ok(dir);
    }
    let base = run_base_with(|base| match &common.rack {
        Some(name) => base.join(name).exists(),
        None => !racks_in(base).is_empty(),
    });
    check_private(&base)?;
    let dir = match &common.rack {
        Some(name) => base.join(name),
        None => only_rack(&base)?,
    };
    check_private(&dir)?;
    Ok(dir)
}

fn racks_in(base: &Path) -> Vec<PathBuf> {
    let entries = fs::read_dir(base).into_iter().flatten().flatten();
    let runs = |dir: &PathBuf| dir.join("rack.json").exists() || !living(dir).is_empty();
    entries.map(|e| e.path()).filter(runs).collect()
}

fn only_rack(base: &Path) -> Result<PathBuf, Failure> {
    match racks_in(base).as_slice() {
        [rack] => Ok(rack.clone()),
        [] => Err(Failure::new("no rack runs on this machine", START)),
        several => {
            let names: Vec<String> = several
                .iter()
                .filter_map(|p| p.file_name())
                .map(|n| n.to_string_lossy().into_owned())
                .collect();
            let remedy = format!("say which with --rack: {}", names.join(", "));
            Err(Failure::usage("several racks run on this machine", remedy))
        }
    }
}

/// What `up` noted in a run directory.
pub fn running(run_dir: &Path) -> Result<RunningRack, Failure> {
    let path = run_dir.join("rack.json");
    let remedy = START;
    let text = fs::read(&path).map_err(|cause| match cause.kind() {
        std::io::ErrorKind::NotFound => {
            Failure::new(format!("no rack runs in {}", run_dir.display()), remedy)
        }
        _ => Failure::new(format!("{}: {cause}", path.display()), remedy),
    })?;
    serde_json::from_slice(&text)
        .map_err(|cause| Failure::new(format!("{}: {cause}", path.display()), remedy))
}

/// What is done where a run directory is another process'.
pub const OWN_RUN_DIR: &str = "name a run directory of its own with --run-dir";

/// How a rack starts, of which no part runs here.
pub const START: &str =
    "start the rack with `rackbus up`, or have this machine join one with `rackbus node --join`";

/// Refuses a run directory in which a node runs that joined the rack of other machines: what is noted there is that
/// node's.
pub fn check_not_joined(run_dir: &Path) -> Result<(), Failure> {
    let Some(host) = living(run_dir).into_iter().find_map(|process| process.host) else {
        return Ok(());
    };
    match running(run_dir) {
        Ok(noted) if noted.is_joined() => {
            let error = format!("the node of {host} runs in {} already", run_dir.display());
            Err(Failure::new(error, OWN_RUN_DIR))
        }
        _ => Ok(()),
    }
}

/// Makes a folder that only this user can enter. One that somebody else can change is refused.
pub fn make_private(dir: &Path) -> Result<(), Failure> {
    let made = fs::DirBuilder::new().recursive(true).mode(0o700).create(dir);
    made.map_err(|cause| refused(dir, &cause.to_string()))?;
    check_private(dir)
}

fn check_private(dir: &Path) -> Result<(), Failure> {
    private::check_private(dir).map_err(|found| refused(dir, &found.reason))
}

/// Refuses a rack whose sockets would have paths that are too long, before anything is started.
pub fn check_lengths(rack: &Rack, run_dir: &Path) -> Result<(), Failure> {
    /// What fits into `struct sockaddr_un`, with its terminating zero.
    const LONGEST: usize = 107;
    // A borrowed function's socket has the longest path: any host may borrow any device.
    let longest = |names: &mut dyn Iterator<Item = &String>| {
        names.max_by_key(|name| name.len()).cloned().unwrap_or_default()
    };
    let host = longest(&mut rack.hosts.iter().map(|host| &host.name));
    let device = longest(&mut rack.hosts.iter().flat_map(|h| &h.devices).map(|d| &d.name));
    let socket = socket_path(&functions_folder(run_dir, &host), &device, LAST_LEASE);
    let length = socket.as_os_str().len();
    if length <= LONGEST {
        return Ok(());
    }
    let error = format!(
        "sockets such as {} would have paths of {length} characters, and the system takes {LONGEST}",
        socket.display()
    );
    let remedy = format!("choose a shorter run directory with {RUN_DIR}, or shorter names");
    Err(Failure::usage(error, remedy))
}

fn refused(dir: &Path, cause: &str) -> Failure {
    let remedy = format!(
        "see that it is yours alone (chmod go-w), or choose another folder with {RUN_DIR} or {STATE_DIR}"
    );
    Failure::new(format!("{}: {cause}", dir.display()), remedy)
}
