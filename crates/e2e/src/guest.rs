//! A guest in a VM that the rack runs.

use std::time::Duration;

use rackbus_vm::agent::RunningCommand;
use rackbus_vm::{CommandOutput, Vm, VmRecord, registry};

use crate::{CheckFailure, RackProcesses, Result, ensure};

/// How long a guest may take to boot under TCG on a busy machine.
const BOOT: Duration = Duration::from_secs(300);

/// How long a command may take unless told otherwise.
const COMMAND: Duration = Duration::from_secs(60);

/// Virtual processors of a guest.
pub const CPUS: &str = "2";

/// A stock guest that runs, with a shell on its serial console.
#[derive(Debug)]
pub struct Guest {
    name: String,
    vm: Vm,
}

impl Guest {
    /// Starts a VM with `rackbus vm run --detach` and these functions; it boots meanwhile. It has
    /// two processors, as the least that tells one queue from one for each.
    ///
    /// # Errors
    /// When it does not start.
    pub fn start(
        rack: &RackProcesses,
        name: &str,
        host: &str,
        release: &str,
        functions: &[&str],
    ) -> Result<Guest> {
        Guest::start_with(rack, name, host, release, functions, &[])
    }

    /// As [`start`](Guest::start), with more options of `rackbus vm run`.
    ///
    /// # Errors
    /// When it does not start.
    pub fn start_with(
        rack: &RackProcesses,
        name: &str,
        host: &str,
        release: &str,
        functions: &[&str],
        more: &[&str],
    ) -> Result<Guest> {
        Guest::start_by(rack, name, host, &["--guest", release], functions, more)
    }

    /// As [`start_with`](Guest::start_with), booted as these options of `rackbus vm run` say.
    ///
    /// # Errors
    /// When it does not start.
    pub fn start_by(
        rack: &RackProcesses,
        name: &str,
        host: &str,
        boot: &[&str],
        functions: &[&str],
        more: &[&str],
    ) -> Result<Guest> {
        let mut arguments = vec!["vm", "run", "--host", host, "--name", name, "--detach"];
        arguments.extend(boot);
        arguments.extend(["--cpus", CPUS]);
        for function in functions {
            arguments.extend(["--borrow", function]);
        }
        // Last: there may be arguments for QEMU.
        arguments.extend(more);
        rack.json(&arguments)?;
        let record = registry::find(rack.run_dir(), host, name)?;
        Ok(Guest { name: name.to_owned(), vm: Vm::attach(record) })
    }

    /// A VM that something else started.
    #[must_use]
    pub fn attach(record: VmRecord) -> Guest {
        Guest { name: record.name.clone(), vm: Vm::attach(record) }
    }

    /// Waits until the guest answers.
    ///
    /// # Errors
    /// When it does not in time.
    pub fn booted(&mut self) -> Result<()> {
        Ok(self.vm.wait_boot(BOOT)?)
    }

    /// Switches it off with `rackbus vm stop`; what it borrowed goes back.
    ///
    /// # Errors
    /// When that fails.
    pub fn stop(self, rack: &RackProcesses) -> Result<()> {
        // The agent serves few connections, and the command needs one.
        drop(self.vm);
        rack.json(&["vm", "stop", &self.name]).map(drop)
    }

    /// The VM's name, which is also that of its files.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Ends this connection to the guest's agent, of which there are few, so that commands can have it; the next request
    /// makes another one.
    pub fn release(&mut self) {
        self.vm = Vm::attach(self.vm.record().clone());
    }

    /// The VM that the guest runs in.
    #[must_use]
    pub fn vm(&mut self) -> &mut Vm {
        &mut self.vm
    }

    /// Runs a script that must succeed, and gives what it wrote.
    ///
    /// # Errors
    /// When it fails: with what it wrote.
    pub fn run(&mut self, script: &str) -> Result<String> {
        let output = self.vm.exec(script, COMMAND)?;
        succeeded(&self.name, script, &output)
    }

    /// Starts a script that may take up to `limit`.
    ///
    /// # Errors
    /// When the VM has gone.
    pub fn begin(&mut self, script: &str, limit: Duration) -> Result<RunningCommand> {
        Ok(self.vm.agent()?.start(script, limit)?)
    }

    /// Waits until `count` NVMe namespaces are there (a hot-plugged one takes a moment).
    ///
    /// # Errors
    /// When that is not so within 20 s.
    pub fn wait_drives(&mut self, count: usize) -> Result<()> {
        let script = format!(
            "for try in $(seq 400); do [ $(ls -d /dev/nvme*n1 2>/dev/null | wc -l) = {count} ] && \
             exit 0; sleep 0.05; done; dmesg | tail -n 20; exit 1"
        );
        self.run(&script).map(drop)
    }
}

/// What a guest's script wrote, or that it failed.
///
/// # Errors
/// When its status is not 0.
pub fn succeeded(name: &str, script: &str, output: &CommandOutput) -> Result<String> {
    if output.ok() {
        return Ok(output.text());
    }
    let errors = String::from_utf8_lossy(&output.stderr);
    let (status, text) = (output.status, output.text());
    Err(CheckFailure(format!("guest {name}: status {status} of\n{script}\n{text}\n{errors}")))
}

/// The value of a `key : value` line of nvme-cli's.
///
/// # Errors
/// When there is no such line.
pub fn field(text: &str, key: &str) -> Result<String> {
    let found = text.lines().find_map(|line| {
        let (left, right) = line.split_once(':')?;
        (left.trim() == key).then(|| right.trim().to_owned())
    });
    ensure!(found.is_some(), "no '{key}' in:\n{text}");
    Ok(found.unwrap_or_default())
}
