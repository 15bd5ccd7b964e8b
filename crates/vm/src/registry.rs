//! Where the VMs of a host are found: a folder each under `<run directory>/<host>/vms`, with the
//! VM's sockets and a record of it.
//!
//! What is plugged into a VM is noted there as well, so a node that loses a lender finds the VM
//! that uses the function by the socket it serves.

use std::fs;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::process::{Pid, PidfdFlags, pidfd_open};
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use crate::error::io;
use crate::qmp::turn_within;
use crate::spec::{VmSpec, check_name, device_id, variables_file};
use crate::{Qmp, Result, VmError};

/// What is kept of a VM in `vm.json`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct VmRecord {
    /// The VM's name on its host.
    pub name: String,
    /// The host it runs on.
    pub host: String,
    /// Process id of its QEMU, which may have ended meanwhile.
    pub pid: u32,
    /// When that process began, as the kernel counts: another process of the same id began later.
    #[serde(default)]
    pub birth: Option<u64>,
    /// When it started, seconds since 1970.
    pub started: u64,
    /// Guest memory in MiB.
    pub memory_mib: u32,
    /// Number of virtual processors.
    pub cpus: u32,
    /// What executes it: `kvm` or `tcg`.
    pub accel: String,
    /// What it started from, for people.
    pub boot: String,
    /// PCIe ports that functions can be plugged into, used ones among them.
    pub ports: usize,
    /// Whether it has the device through which its guest shares memory with the rack.
    #[serde(default)]
    pub fabric: bool,
    /// Where its sockets and its description are.
    #[serde(skip)]
    pub dir: PathBuf,
}

/// A function that is plugged into a VM.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Plugged {
    /// QEMU's id of the device.
    pub id: String,
    /// What people call it: `alpha/nvme0`.
    pub function: String,
    /// The vfio-user socket it uses.
    pub socket: PathBuf,
}

impl VmRecord {
    /// Writes the record into its folder, whole or not at all.
    ///
    /// # Errors
    /// When the folder cannot be written.
    pub fn write(&self) -> Result<()> {
        let (path, new) = (self.dir.join("vm.json"), self.dir.join("vm.json.new"));
        let text = serde_json::to_vec_pretty(self)
            .map_err(|e| VmError::Invalid(format!("cannot write down the VM: {e}")))?;
        fs::write(&new, text).map_err(io("write", &new))?;
        fs::rename(&new, &path).map_err(io("write", &path))
    }

    /// Keeps what it was started from beside the record.
    pub(crate) fn keep_spec(&self, spec: &VmSpec) -> Result<()> {
        let path = self.dir.join("spec.json");
        let text = serde_json::to_vec_pretty(spec)
            .map_err(|e| VmError::Invalid(format!("cannot write down the VM: {e}")))?;
        fs::write(&path, text).map_err(io("write", &path))
    }

    /// What it was started from. A VM that an older rackbus started has it not.
    ///
    /// # Errors
    /// When it cannot be read.
    pub fn spec(&self) -> Result<VmSpec> {
        let path = self.dir.join("spec.json");
        let text = fs::read(&path).map_err(io("read", &path))?;
        serde_json::from_slice(&text)
            .map_err(|e| VmError::Invalid(format!("{}: {e}", path.display())))
    }

    /// Keeps the file of the firmware's variables by a second name beside the VM's folder, which goes as soon as anybody
    /// looks for VMs after this one has ended: what firmware and system write until then is in it. `None` of a VM without
    /// firmware.
    ///
    /// # Errors
    /// When the file cannot have that name.
    pub fn keep_variables(&self) -> Result<Option<PathBuf>> {
        let path = variables_file(&self.dir);
        let kept = self.dir.with_file_name(format!("{}.variables.fd", self.name));
        match fs::remove_file(&kept) {
            Err(cause) if cause.kind() != std::io::ErrorKind::NotFound => {
                return Err(io("remove", &kept)(cause));
            }
            _ => {}
        }
        match fs::hard_link(&path, &kept) {
            Ok(()) => Ok(Some(kept)),
            Err(cause) if cause.kind() == std::io::ErrorKind::NotFound => Ok(None),
            Err(cause) => Err(io("link", &kept)(cause)),
        }
    }

    /// Whether its folder is another VM's by now, of the same name.
    pub(crate) fn is_replaced(&self) -> bool {
        let found = fs::read(self.dir.join("vm.json")).ok();
        let found = found.and_then(|text| serde_json::from_slice::<VmRecord>(&text).ok());
        found.is_some_and(|found| (found.pid, found.birth) != (self.pid, self.birth))
    }

    /// Whether its QEMU runs.
    #[must_use]
    pub fn alive(&self) -> bool {
        self.birth.is_some() && birth(self.pid) == self.birth
    }

    /// Its QEMU, while it runs: what is done by this is done to no other process.
    pub(crate) fn process(&self) -> Option<OwnedFd> {
        let pid = i32::try_from(self.pid).ok().and_then(Pid::from_raw)?;
        let process = pidfd_open(pid, PidfdFlags::empty()).ok()?;
        // Looked at last: a process that lives now lived when it was opened.
        self.alive().then_some(process)
    }

    /// Whether its QEMU has ended, or does within `limit`. One that ends closes its sockets some time before
    /// it is gone.
    #[must_use]
    pub fn ends_within(&self, limit: Duration) -> bool {
        let Some(process) = self.process() else { return !self.alive() };
        let limit = Timespec::try_from(limit).ok();
        loop {
            match poll(&mut [PollFd::new(&process, PollFlags::IN)], limit.as_ref()) {
                Err(Errno::INTR) => {}
                ended => return ended.is_ok_and(|ended| ended > 0),
            }
        }
    }

    /// What was plugged in at some time; QEMU is not asked whether it is still.
    ///
    /// # Errors
    /// When the folder cannot be read.
    pub fn noted(&self) -> Result<Vec<Plugged>> {
        noted(&self.dir)
    }

    /// Where name and socket of the function with this id are noted.
    pub(crate) fn note(&self, id: &str) -> PathBuf {
        self.dir.join("functions").join(id)
    }

    /// Notes that `function` uses `socket`; gives QEMU's id for it.
    pub(crate) fn note_plugged(&self, function: &str, socket: &Path) -> Result<String> {
        let id = device_id(function);
        let note = self.note(&id);
        let folder = self.dir.join("functions");
        fs::create_dir_all(&folder).map_err(io("make", &folder))?;
        let text = format!("{function}\n{}", socket.display());
        fs::write(&note, text).map_err(io("write", &note))?;
        Ok(id)
    }

    /// Connects to its QEMU.
    ///
    /// # Errors
    /// When it does not run.
    pub fn qmp(&self) -> Result<Qmp> {
        Qmp::connect(&self.dir.join("qmp.sock"))
    }

    /// The same, where its QEMU is not waited for longer than `limit` at each step.
    pub(crate) fn qmp_within(&self, limit: Duration) -> Result<Qmp> {
        Qmp::connect_within(&self.dir.join("qmp.sock"), limit)
    }
}

/// When a process began, in the kernel's ticks since it started; `None` when there is none.
#[must_use]
pub fn birth(pid: u32) -> Option<u64> {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    // Behind the name, which may have anything in it: the state, and the 19th field after that.
    let mut fields = stat.rsplit_once(')')?.1.split_whitespace();
    match fields.next()? {
        // It has ended; its parent has not asked yet.
        "Z" | "X" => None,
        _ => fields.nth(18)?.parse().ok(),
    }
}

/// A name that nobody else can take or clear away for as long as this lives.
#[derive(Debug)]
pub struct NameClaim {
    _lock: fs::File,
}

impl NameClaim {
    /// Claims a name for a VM of whichever host of this machine; who has it looks for a VM of that name after that, and
    /// keeps it until the VM is found by its record.
    ///
    /// # Errors
    /// The name is none, somebody else has claimed it, or the run directory cannot be written to.
    pub fn of_rack(run_dir: &Path, name: &str) -> Result<NameClaim> {
        check_name(name)?;
        let claim = NameClaim::take(&run_dir.join(format!("vm-{name}")))?;
        claim.ok_or_else(|| VmError::Exists(name.to_owned()))
    }

    /// Claims the name that `dir` is the folder of; `None` when somebody else has it.
    pub(crate) fn take(dir: &Path) -> Result<Option<NameClaim>> {
        // No VM's name begins with a dot.
        let name = dir.file_name().unwrap_or_default().to_string_lossy();
        let path = dir.with_file_name(format!(".{name}.lock"));
        let lock = fs::File::options().create(true).append(true).open(&path);
        let lock = lock.map_err(io("make", &path))?;
        match rustix::fs::flock(&lock, rustix::fs::FlockOperation::NonBlockingLockExclusive) {
            Ok(()) => Ok(Some(NameClaim { _lock: lock })),
            Err(rustix::io::Errno::WOULDBLOCK) => Ok(None),
            Err(cause) => Err(io("lock", &path)(cause.into())),
        }
    }
}

/// The folder of the VMs of a host.
#[must_use]
pub fn vms_dir(run_dir: &Path, host: &str) -> PathBuf {
    run_dir.join(host).join("vms")
}

/// The VMs of a host that run, by name. The folders of those that ended are removed.
///
/// # Errors
/// When the folder cannot be read.
pub fn list(run_dir: &Path, host: &str) -> Result<Vec<VmRecord>> {
    let dir = vms_dir(run_dir, host);
    let entries = match fs::read_dir(&dir) {
        Ok(entries) => entries,
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => return Ok(Vec::new()),
        Err(e) => return Err(io("read", &dir)(e)),
    };
    let mut found: Vec<VmRecord> =
        entries.flatten().filter_map(|e| read(&e.path(), host)).collect();
    found.sort_by(|a, b| a.name.cmp(&b.name));
    Ok(found)
}

/// The VM of this name on a host.
///
/// # Errors
/// [`VmError::NoSuchVm`] when none runs.
pub fn find(run_dir: &Path, host: &str, name: &str) -> Result<VmRecord> {
    list(run_dir, host)?
        .into_iter()
        .find(|r| r.name == name)
        .ok_or_else(|| VmError::NoSuchVm { name: name.into(), host: host.into() })
}

/// The VM of a host into which the function behind `socket` is plugged, and QEMU's id for it; whoever asks has so much time
/// `left`.
///
/// # Errors
/// When the folder cannot be read, or a VM into which it was plugged does not say whether it still is: its QEMU speaks with
/// somebody else all the time, say. One into which it was not plugged is not asked, so that nobody waits for another
/// guest's QEMU.
pub fn find_by_socket(
    run_dir: &Path,
    host: &str,
    socket: &Path,
    left: Duration,
) -> Result<Option<(VmRecord, String)>> {
    let meant = |record: &VmRecord| {
        record.noted().is_ok_and(|all| all.iter().any(|plugged| plugged.socket == socket))
    };
    let mut silent = None;
    for record in list(run_dir, host)?.into_iter().filter(meant) {
        let qmp = record.qmp_within(turn_within(left));
        match qmp.and_then(|mut qmp| plugged(&record, &mut qmp)) {
            Ok(plugged) => {
                if let Some(device) = plugged.into_iter().find(|it| it.socket == socket) {
                    return Ok(Some((record, device.id)));
                }
            }
            Err(error) if record.alive() => silent = Some(error),
            // It has ended meanwhile.
            Err(_) => {}
        }
    }
    silent.map_or(Ok(None), Err)
}

/// The name of the VM of a host that the function behind `socket` was meant for, running or not.
#[must_use]
pub fn noted_with(run_dir: &Path, host: &str, socket: &Path) -> Option<String> {
    let mut vms = folders(&vms_dir(run_dir, host));
    let uses = |dir: &PathBuf| noted(dir).is_ok_and(|all| all.iter().any(|p| p.socket == socket));
    vms.find(uses)?.file_name().map(|name| name.to_string_lossy().into_owned())
}

fn folders(dir: &Path) -> impl Iterator<Item = PathBuf> + use<> {
    let entries = fs::read_dir(dir).into_iter().flatten().flatten();
    entries.map(|entry| entry.path()).filter(|path| path.is_dir())
}

/// What was plugged in at some time into the VM with this folder.
fn noted(dir: &Path) -> Result<Vec<Plugged>> {
    let folder = dir.join("functions");
    let entries = match fs::read_dir(&folder) {
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => return Ok(Vec::new()),
        entries => entries.map_err(io("read", &folder))?,
    };
    let ids = entries.flatten().map(|e| e.file_name().to_string_lossy().into_owned());
    Ok(ids.filter_map(|id| read_note(dir, id)).collect())
}

fn read_note(dir: &Path, id: String) -> Option<Plugged> {
    let note = fs::read_to_string(dir.join("functions").join(&id)).ok()?;
    let (function, socket) = note.split_once('\n')?;
    Some(Plugged { function: function.to_owned(), socket: socket.into(), id })
}

/// The functions of a VM: those that rackbus plugged in and its QEMU still has.
///
/// # Errors
/// When QEMU does not answer.
pub fn plugged(record: &VmRecord, qmp: &mut Qmp) -> Result<Vec<Plugged>> {
    let devices = qmp.command("qom-list", &json!({"path": "/machine/peripheral"}))?;
    let mut found = Vec::new();
    for device in devices.as_array().into_iter().flatten() {
        if device["type"] != "child<vfio-user-pci>" {
            continue;
        }
        // QEMU does not tell the socket of a function, so it is noted when it is plugged in.
        let Some(id) = device["name"].as_str() else { continue };
        found.extend(read_note(&record.dir, id.to_owned()));
    }
    Ok(found)
}

/// The first of `ports` hot-plug ports with nothing behind it.
pub(crate) fn free_port(qmp: &mut Qmp, ports: usize) -> Result<Option<String>> {
    let buses = qmp.command("query-pci", &json!({}))?;
    let all = buses.as_array().into_iter().flatten();
    let bridges: Vec<&Value> =
        all.flat_map(|bus| bus["devices"].as_array().into_iter().flatten()).collect();
    for port in (0..ports).map(crate::spec::port_id) {
        let Some(bridge) = bridges.iter().find(|b| b["qdev_id"] == port.as_str()) else {
            continue;
        };
        let behind = bridge["pci_bridge"]["devices"].as_array().map_or(0, Vec::len);
        if behind == 0 {
            return Ok(Some(port));
        }
    }
    Ok(None)
}

fn read(dir: &Path, host: &str) -> Option<VmRecord> {
    let record = read_record(dir, host)?;
    if record.alive() {
        return Some(record);
    }
    // Removed when that is certain: its process is gone, and nobody begins another one there.
    let _claim = NameClaim::take(dir).ok().flatten()?;
    let record = read_record(dir, host)?;
    if record.birth.is_some() && !record.alive() {
        remove(dir);
    }
    None
}

/// Removes what an ended VM left.
pub(crate) fn remove(dir: &Path) {
    if let Err(error) = fs::remove_dir_all(dir)
        && error.kind() != std::io::ErrorKind::NotFound
    {
        tracing::warn!("{}: cannot remove what an ended VM left: {error}", dir.display());
    }
}

fn read_record(dir: &Path, host: &str) -> Option<VmRecord> {
    let text = fs::read(dir.join("vm.json")).ok()?;
    let mut record: VmRecord = match serde_json::from_slice(&text) {
        Ok(record) => record,
        Err(error) => {
            tracing::warn!("{}: not a VM's record: {error}", dir.display());
            return None;
        }
    };
    dir.clone_into(&mut record.dir);
    record.host = host.to_owned();
    Some(record)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::qmp::ANSWER;

    fn record(dir: &Path) -> VmRecord {
        let name = dir.file_name().unwrap_or_default().to_string_lossy();
        let record = serde_json::json!({
            "name": name, "host": "beta", "pid": 1, "started": 0, "memory_mib": 64, "cpus": 1,
            "accel": "tcg", "boot": "uefi", "ports": 1,
        });
        let mut record: VmRecord = serde_json::from_value(record).unwrap();
        dir.clone_into(&mut record.dir);
        record
    }

    /// A QEMU that stands still would be waited for as long as the guest has that the function is taken from.
    #[test]
    fn a_vm_that_a_function_was_not_plugged_into_is_not_asked() {
        let run_dir = std::env::temp_dir().join(format!("rackbus-asked-{}", std::process::id()));
        let dir = vms_dir(&run_dir, "beta").join("other");
        fs::create_dir_all(&dir).unwrap();
        let pid = std::process::id();
        VmRecord { pid, birth: birth(pid), ..record(&dir) }.write().unwrap();
        let silent = std::os::unix::net::UnixListener::bind(dir.join("qmp.sock")).unwrap();
        silent.set_nonblocking(true).unwrap();
        assert_eq!(list(&run_dir, "beta").unwrap().len(), 1);
        let found =
            find_by_socket(&run_dir, "beta", Path::new("/run/nvme0.1.sock"), ANSWER).unwrap();
        assert_eq!(found, None);
        assert!(silent.accept().is_err(), "it was asked");
        fs::remove_dir_all(&run_dir).unwrap();
    }

    /// A function that is taken for unplugged is never unplugged.
    #[test]
    fn a_vm_whose_qemu_does_not_answer_is_an_error_while_it_runs() {
        let run_dir = std::env::temp_dir().join(format!("rackbus-silent-{}", std::process::id()));
        let dir = vms_dir(&run_dir, "beta").join("vm1");
        fs::create_dir_all(&dir).unwrap();
        let pid = std::process::id();
        let vm = VmRecord { pid, birth: birth(pid), ..record(&dir) };
        vm.write().unwrap();
        let socket = Path::new("/run/nvme0.1.sock");
        vm.note_plugged("alpha/nvme0", socket).unwrap();
        // Nobody listens at its socket, as while a QEMU hangs before it does.
        let asked = find_by_socket(&run_dir, "beta", socket, ANSWER);
        assert!(matches!(asked, Err(VmError::Io { .. })), "{asked:?}");
        fs::remove_dir_all(&run_dir).unwrap();
    }

    /// Whoever looks for VMs removes the folder of one that has ended, also while it is being moved.
    #[test]
    fn a_firmwares_variables_outlive_the_folder_of_their_vm() {
        let host = std::env::temp_dir().join(format!("rackbus-registry-{}", std::process::id()));
        let dir = host.join("vm1");
        fs::create_dir_all(&dir).unwrap();
        let record = record(&dir);
        assert_eq!(record.keep_variables().unwrap(), None, "a VM without firmware has none");
        fs::write(variables_file(&dir), "first").unwrap();
        record.keep_variables().unwrap();
        let kept = record.keep_variables().unwrap().expect("they are there");
        // As its firmware writes them: the file stays the same.
        fs::write(variables_file(&dir), "again").unwrap();
        remove(&dir);
        assert!(!dir.exists());
        assert_eq!(fs::read_to_string(&kept).unwrap(), "again");
        fs::remove_dir_all(&host).unwrap();
    }
}
