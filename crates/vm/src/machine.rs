//! A VM's life: start, wait until its guest answers, plug and unplug functions, stop.

use std::fs::{self, File};
use std::os::unix::fs::DirBuilderExt;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use rustix::event::{PollFd, PollFlags, poll};
use rustix::io::Errno;
use rustix::process::{Signal, pidfd_send_signal};
use serde_json::json;

use crate::assets::Assets;
use crate::error::io;
use crate::qmp::turn_within;
use crate::registry::{NameClaim, Plugged, VmRecord, birth, free_port, plugged, remove};
use crate::spec::{Boot, Console, VmSpec, device};
use crate::{CommandOutput, GuestAgent, Result, VmError};

/// How long QEMU may take until its sockets are there.
const START: Duration = Duration::from_secs(10);

/// How often a guest that boots is asked whether it is there, or to release a function or memory.
pub(crate) const ASKED_AGAIN: Duration = Duration::from_secs(2);

/// How long a guest may take to release a function, or memory. A Linux guest takes some 0.1 s for a function.
pub const UNPLUG: Duration = Duration::from_secs(20);

/// QEMU's id of the disk that [`Vm::with_disk`] plugs in, and of its file.
const DISK: &str = "rackbus-disk";

/// How long a guest may take to switch itself off before it is ended.
const SHUTDOWN: Duration = Duration::from_secs(20);

/// A VM whose QEMU this process started, and its QMP connection.
#[derive(Debug)]
pub struct Vm {
    record: VmRecord,
    /// QEMU, when this process started it.
    child: Option<Child>,
    agent: Option<GuestAgent>,
}

impl Vm {
    /// Starts QEMU and waits until it can be controlled; the guest boots meanwhile. The VM is left
    /// running when the value is dropped.
    ///
    /// # Errors
    /// When a VM of that name runs already, set-up has not been run, or QEMU does not start: then
    /// with QEMU's own reason.
    pub fn launch(assets: &Assets, spec: &VmSpec) -> Result<Self> {
        let args = spec.args(assets)?;
        let accel = spec.accel.map_or_else(|| assets.accel(), Ok)?;
        // Until the record is written, which others find it by.
        let _claim = prepare_dir(&spec.dir, &spec.name)?;
        let host = spec.dir.ancestors().nth(2).and_then(Path::file_name);
        let record = VmRecord {
            name: spec.name.clone(),
            host: host.map(|h| h.to_string_lossy().into_owned()).unwrap_or_default(),
            pid: 0,
            birth: None,
            started: SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_secs(),
            memory_mib: spec.memory_mib,
            cpus: spec.cpus,
            accel: accel.name().to_owned(),
            boot: match &spec.boot {
                Boot::Guest(guest) => format!("guest {}", guest.name()),
                Boot::Kernel { kernel, .. } => format!("kernel {}", kernel.display()),
                Boot::Disk(image) => format!("disk {}", image.display()),
                Boot::Firmware => "firmware".to_owned(),
            },
            ports: spec.functions.len() + usize::from(spec.spare_ports),
            fabric: spec.fabric.is_some(),
            dir: spec.dir.clone(),
        };
        if spec.boot == Boot::Firmware {
            let path = spec.variables_file();
            let written = match &spec.variables {
                Some(variables) => std::fs::write(&path, variables),
                None => std::fs::copy(assets.firmware()?.variables, &path).map(drop),
            };
            written.map_err(|source| VmError::Io { action: "write", path, source })?;
        }
        record.keep_spec(spec)?;
        for function in &spec.functions {
            record.note_plugged(&function.name, &function.socket)?;
        }
        let child = start_qemu(&assets.qemu()?, &args, spec)?;
        let mut vm = Self { record, child: Some(child), agent: None };
        let limit = match spec.prealloc {
            // At the slowest that memory is cleared.
            true => START + Duration::from_millis(4) * spec.memory_mib,
            false => START,
        };
        match vm.wait_controllable(limit) {
            Ok(()) => Ok(vm),
            Err(error) => {
                vm.kill();
                Err(error)
            }
        }
    }

    /// A VM that another process started.
    #[must_use]
    pub fn attach(record: VmRecord) -> Self {
        Self { record, child: None, agent: None }
    }

    /// What is known of it.
    #[must_use]
    pub fn record(&self) -> &VmRecord {
        &self.record
    }

    /// Whether its QEMU runs.
    #[must_use]
    pub fn alive(&mut self) -> bool {
        match &mut self.child {
            Some(child) => matches!(child.try_wait(), Ok(None)),
            None => self.record.alive(),
        }
    }

    /// Waits until the guest's agent answers.
    ///
    /// # Errors
    /// When it does not within `limit`, or the VM ends.
    pub fn wait_boot(&mut self, limit: Duration) -> Result<()> {
        let deadline = Instant::now() + limit;
        // Firmware that opens the agent's port takes what was asked before the guest runs: it is asked again.
        let mut asked = Vec::new();
        let mut again = Instant::now();
        loop {
            if again <= Instant::now() {
                asked.push(self.agent()?.start("true", limit)?);
                again += ASKED_AGAIN;
            }
            let newest = asked.len() - 1;
            if asked[newest].answered(Duration::from_millis(200))
                || asked[..newest].iter().any(|asked| asked.answered(Duration::ZERO))
            {
                return Ok(());
            }
            self.check_running()?;
            self.check_executing()?;
            if Instant::now() >= deadline {
                let what = format!("the start of the guest in '{}'", self.record.name);
                return Err(VmError::TimedOut { what, limit });
            }
        }
    }

    /// The guest's agent, by a connection that is kept.
    ///
    /// # Errors
    /// When the VM does not run, or others have as many connections as there can be.
    pub fn agent(&mut self) -> Result<&GuestAgent> {
        if self.agent.is_none() {
            self.agent = Some(GuestAgent::of_vm(&self.record.dir)?);
        }
        self.agent.as_ref().ok_or_else(|| VmError::Invalid("no agent".into()))
    }

    /// The guest's agent, once others leave it a connection.
    fn free_agent(&mut self, deadline: Instant) -> Result<&GuestAgent> {
        while let Err(error) = self.agent() {
            if !matches!(error, VmError::AgentBusy(_)) || Instant::now() >= deadline {
                return Err(error);
            }
            std::thread::sleep(Duration::from_millis(20));
        }
        self.agent()
    }

    /// Runs a command in the guest; see [`GuestAgent::exec`].
    ///
    /// # Errors
    /// When the guest does not answer in time or goes away.
    pub fn exec(&mut self, command: &str, limit: Duration) -> Result<CommandOutput> {
        self.agent()?.exec(command, limit)
    }

    /// Plugs in the function that a node serves at `socket`, into a free port; gives QEMU's id of
    /// it. The guest finds it some milliseconds later.
    ///
    /// # Errors
    /// When no port is free, QEMU has a function of that name still, or refuses: then with its reason.
    pub fn hot_add(&mut self, name: &str, socket: &Path) -> Result<String> {
        let mut qmp = self.record.qmp()?;
        let port = free_port(&mut qmp, self.record.ports)?
            .ok_or_else(|| VmError::NoFreePort(self.record.name.clone()))?;
        // What is noted of a function that is plugged in stays, so that it is found when it is to be unplugged.
        if let Some(former) = plugged(&self.record, &mut qmp)?.iter().find(|it| it.function == name)
        {
            let id = &former.id;
            let message =
                format!("the guest has not released {name} of before yet, its device {id}");
            return Err(VmError::Refused { command: "device_add".to_owned(), message });
        }
        let id = self.record.note_plugged(name, socket)?;
        let added = qmp.command("device_add", &device(name, socket, &port));
        if let Err(error) = added {
            // It may be there although nobody heard so.
            let _ = qmp.command("device_del", &json!({"id": id}));
            return Err(error);
        }
        Ok(id)
    }

    /// Plugs in a disk with the bytes of `file`, to be read only, for as long as `work` takes: more than
    /// goes through the agent. The guest finds it by its serial number, some milliseconds later. One at a time: others
    /// are refused, and what is left of one whose process was ended goes first.
    ///
    /// # Errors
    /// When another process does this, no port is free, QEMU refuses, or `work` fails.
    pub fn with_disk<T>(
        &mut self,
        file: &Path,
        serial: &str,
        work: impl FnOnce(&mut Vm) -> Result<T>,
    ) -> Result<T> {
        let _claim = NameClaim::take(&self.record.dir.join(DISK))?.ok_or_else(|| {
            VmError::Invalid("another program gives this VM a disk just now".into())
        })?;
        match self.hot_remove(DISK, UNPLUG) {
            Err(VmError::Refused { message, .. }) if message.contains("not found") => {}
            outcome => outcome?,
        }
        let mut qmp = self.record.qmp()?;
        // Mostly there is none.
        let _ = qmp.command("blockdev-del", &json!({"node-name": DISK}));
        let port = free_port(&mut qmp, self.record.ports)?
            .ok_or_else(|| VmError::NoFreePort(self.record.name.clone()))?;
        let name = file.display().to_string();
        let node = json!({"driver": "raw", "node-name": DISK, "read-only": true, "file": {
            "driver": "file", "filename": name, "locking": "off"}});
        qmp.command("blockdev-add", &node)?;
        let device = json!({"driver": "virtio-blk-pci", "id": DISK, "drive": DISK, "bus": port,
            "serial": serial});
        let outcome = match qmp.command("device_add", &device) {
            Ok(_) => {
                drop(qmp);
                let outcome = work(self);
                let gone = self.hot_remove(DISK, UNPLUG);
                qmp = self.record.qmp()?;
                outcome.and_then(|done| gone.map(|()| done))
            }
            Err(error) => Err(error),
        };
        // It fails only where the device is still there, which was said.
        let _ = qmp.command("blockdev-del", &json!({"node-name": DISK}));
        outcome
    }

    /// Unplugs a function: asks the guest and waits until it has released it, for so long at most.
    ///
    /// # Errors
    /// When there is none of that id, or the guest does not release it in time.
    pub fn hot_remove(&self, id: &str, limit: Duration) -> Result<()> {
        let until = Instant::now() + limit;
        self.hot_remove_while(id, || until.saturating_duration_since(Instant::now()))
    }

    /// Unplugs a function: asks the guest and waits until it has released it. `left` says how much time is left for
    /// that, and is asked every two seconds: it may become less at any time.
    ///
    /// # Errors
    /// As [`hot_remove`](Vm::hot_remove).
    pub fn hot_remove_while(&self, id: &str, left: impl Fn() -> Duration) -> Result<()> {
        let (begun, mut asked) = (Instant::now(), false);
        loop {
            let now = left();
            if asked && now.is_zero() {
                let what = format!("the removal of {id} by the guest");
                return Err(VmError::TimedOut { what, limit: begun.elapsed() });
            }
            // QEMU speaks with one at a time: others have their turn between two questions.
            let mut qmp = match self.record.qmp_within(turn_within(now)) {
                Err(VmError::TimedOut { .. }) if !left().is_zero() => continue,
                connected => connected?,
            };
            match qmp.unplug(id, ASKED_AGAIN, now.min(ASKED_AGAIN)) {
                Err(VmError::TimedOut { what, .. }) if left().is_zero() => {
                    return Err(VmError::TimedOut { what, limit: begun.elapsed() });
                }
                Err(VmError::TimedOut { .. }) => asked = true,
                // The guest released it since it was last asked.
                Err(VmError::Refused { message, .. }) if asked && message.contains("not found") => {
                    return Ok(());
                }
                outcome => return outcome,
            }
        }
    }

    /// The functions plugged in now.
    ///
    /// # Errors
    /// When QEMU does not answer.
    pub fn functions(&self) -> Result<Vec<Plugged>> {
        plugged(&self.record, &mut self.record.qmp()?)
    }

    /// Has the guest switch itself off, and ends it when it does not do so in time; whether it did. Waits until it is gone.
    ///
    /// # Errors
    /// When the guest could not be asked: it goes on, and may be in the middle of something.
    pub fn shutdown(mut self) -> Result<bool> {
        self.ask_to_power_off(SHUTDOWN)?;
        let off = self.wait_off(SHUTDOWN).is_ok();
        self.kill();
        Ok(off)
    }

    /// Switches the guest off, and waits until it is. Its folder stays until it is [killed](Vm::kill).
    ///
    /// # Errors
    /// When the guest cannot be asked, or does not switch itself off within `limit`: it goes on then.
    pub fn power_off(&mut self, limit: Duration) -> Result<()> {
        self.ask_to_power_off(limit)?;
        self.wait_off(limit)
    }

    /// Asks the guest to switch itself off, unless the VM has ended.
    fn ask_to_power_off(&mut self, limit: Duration) -> Result<()> {
        let asked = if self.record.boot.starts_with("guest ") {
            // The prepared guests have nobody who listens for the power button.
            let agent = self.free_agent(Instant::now() + limit);
            agent.and_then(|agent| agent.start("sync; poweroff -f", limit).map(drop))
        } else {
            let asked = self.record.qmp();
            asked.and_then(|mut qmp| qmp.command("system_powerdown", &json!({})).map(drop))
        };
        match asked {
            Err(error @ VmError::AgentBusy(_)) => Err(error),
            Err(cause) if self.alive() => {
                let name = self.record.name.clone();
                Err(VmError::NotAsked { name, cause: Box::new(cause) })
            }
            _ => Ok(()),
        }
    }

    /// Waits until the guest has switched itself off, from when it was asked.
    fn wait_off(&mut self, limit: Duration) -> Result<()> {
        let deadline = Instant::now() + limit;
        while self.alive() {
            if Instant::now() >= deadline {
                let what = format!("the shutdown of the guest in '{}'", self.record.name);
                return Err(VmError::TimedOut { what, limit });
            }
            std::thread::sleep(Duration::from_millis(20));
        }
        Ok(())
    }

    /// Ends it at once, as a power cut would, and removes its folder, unless another VM of its name has that meanwhile.
    pub fn kill(&mut self) {
        self.agent = None;
        match &mut self.child {
            Some(child) => {
                // An error means that it has ended, which is what is wanted.
                let _ = child.kill();
                let _ = child.wait();
            }
            None => {
                if let Some(process) = self.record.process() {
                    // An error means that it has ended, as above.
                    let _ = pidfd_send_signal(&process, Signal::KILL);
                    while poll(&mut [PollFd::new(&process, PollFlags::IN)], None)
                        == Err(Errno::INTR)
                    {}
                }
            }
        }
        if !self.record.is_replaced() {
            remove(&self.record.dir);
        }
    }

    /// Waits until it ends, for a VM in the foreground.
    ///
    /// # Errors
    /// When QEMU ended with a failure: with its reason.
    pub fn wait(mut self) -> Result<()> {
        if let Some(child) = &mut self.child {
            let path = self.record.dir.as_path();
            let status = child.wait().map_err(io("wait for the VM in", path))?;
            if !status.success() {
                return Err(self.ended(status.to_string()));
            }
        }
        self.kill();
        Ok(())
    }

    fn wait_controllable(&mut self, limit: Duration) -> Result<()> {
        let deadline = Instant::now() + limit;
        self.record.pid = self.child.as_ref().map_or(0, Child::id);
        self.record.birth = birth(self.record.pid);
        // From now on it is found, and not cleared away, also when this process ends.
        self.record.write()?;
        while !self.record.dir.join("agent.sock").exists() || self.record.qmp().is_err() {
            self.check_running()?;
            if Instant::now() >= deadline {
                return Err(VmError::TimedOut { what: "the start of QEMU".into(), limit });
            }
            std::thread::sleep(Duration::from_millis(5));
        }
        Ok(())
    }

    fn check_running(&mut self) -> Result<()> {
        let Some(child) = &mut self.child else {
            return Ok(());
        };
        match child.try_wait() {
            Ok(None) => Ok(()),
            Ok(Some(status)) => Err(self.ended(status.to_string())),
            Err(e) => Err(io("wait for the VM in", &self.record.dir)(e)),
        }
    }

    /// A VM whose processor QEMU had to stop does not start any more.
    fn check_executing(&self) -> Result<()> {
        let status = self.record.qmp()?.command("query-status", &json!({}))?;
        match status["status"].as_str() {
            Some(stopped @ ("internal-error" | "guest-panicked" | "io-error")) => {
                let detail = format!("the VM '{}' stopped: {stopped}", self.record.name);
                Err(VmError::Protocol { peer: "QEMU", detail })
            }
            _ => Ok(()),
        }
    }

    fn ended(&self, status: String) -> VmError {
        let log = fs::read_to_string(self.record.dir.join("qemu.log")).unwrap_or_default();
        let last: Vec<&str> = log.lines().filter(|l| !l.is_empty()).collect();
        let tail = last[last.len().saturating_sub(3)..].join("; ");
        VmError::Ended { name: self.record.name.clone(), status, tail }
    }
}

/// An empty folder that only this user can enter, claimed; what an ended VM of that name left is
/// removed.
fn prepare_dir(dir: &Path, name: &str) -> Result<NameClaim> {
    let private = |dir: &Path| {
        fs::DirBuilder::new().recursive(true).mode(0o700).create(dir).map_err(io("make", dir))
    };
    private(dir.parent().unwrap_or(dir))?;
    let taken = || VmError::Exists(name.to_owned());
    let claim = NameClaim::take(dir)?.ok_or_else(taken)?;
    let record = fs::read(dir.join("vm.json")).ok();
    let record = record.and_then(|text| serde_json::from_slice::<VmRecord>(&text).ok());
    if record.is_some_and(|record| record.alive()) {
        return Err(taken());
    }
    match fs::remove_dir_all(dir) {
        Err(e) if e.kind() != std::io::ErrorKind::NotFound => return Err(io("clear", dir)(e)),
        _ => {}
    }
    private(dir)?;
    Ok(claim)
}

fn start_qemu(qemu: &PathBuf, args: &[String], spec: &VmSpec) -> Result<Child> {
    let log = spec.dir.join("qemu.log");
    let file = File::create(&log).map_err(io("write", &log))?;
    let mut command = Command::new(qemu);
    command.args(args).stderr(file.try_clone().map_err(io("write", &log))?);
    if let Some(folder) = &spec.folder {
        command.current_dir(folder);
    }
    match spec.console {
        Console::Terminal => {}
        Console::Socket => {
            // Its own process group: an interrupt at the terminal is not meant for it.
            command.stdin(Stdio::null()).stdout(file).process_group(0);
        }
    }
    command.spawn().map_err(io("start", qemu))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A VM of one's own disk, whose QEMU is a process that answers nothing.
    fn silent(dir: &Path) -> (VmRecord, Child) {
        let child = Command::new("sleep").arg("1000").spawn().unwrap();
        let mut record: VmRecord = serde_json::from_value(json!({
            "name": "db", "host": "beta", "pid": child.id(), "birth": birth(child.id()),
            "started": 0, "memory_mib": 512, "cpus": 1, "accel": "tcg", "boot": "disk /dev/null",
            "ports": 0,
        }))
        .unwrap();
        record.dir = dir.to_owned();
        record.write().unwrap();
        (record, child)
    }

    #[test]
    fn a_guest_that_cannot_be_asked_to_switch_itself_off_goes_on() {
        let folder = tempfile::tempdir().unwrap();
        let (record, mut child) = silent(folder.path());
        let refused = Vm::attach(record.clone()).shutdown();
        assert!(matches!(refused, Err(VmError::NotAsked { .. })), "{refused:?}");
        assert!(record.alive());
        Vm::attach(record).kill();
        child.wait().unwrap();
        assert!(!folder.path().exists());
    }

    #[test]
    fn ending_a_vm_leaves_the_folder_to_another_one_that_has_it() {
        let folder = tempfile::tempdir().unwrap();
        let (record, mut child) = silent(folder.path());
        let former = VmRecord { pid: 1, birth: Some(0), ..record.clone() };
        Vm::attach(former).kill();
        assert!(record.alive() && folder.path().join("vm.json").exists());
        child.kill().unwrap();
        child.wait().unwrap();
    }
}
