//! Hosts that are machines of their own, as `rackbus testbed` makes them: namespaces that a network alone joins.

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use crate::interrupt::when_interrupted;
use crate::rack::beside;
use crate::{RackProcesses, Result, ensure};

/// A testbed of machines that ends with this. It needs root.
#[derive(Debug)]
pub struct MachineTestbed {
    rackbus: PathBuf,
    dir: PathBuf,
}

impl MachineTestbed {
    /// The machines of the rack in `file`, with their nodes up.
    ///
    /// # Errors
    /// When they do not come up: with what the command said.
    pub fn start(file: &Path) -> Result<MachineTestbed> {
        MachineTestbed::start_with(file, &[])
    }

    /// The machines of the hosts of the rack in `file`, and these beside them, with nothing running on any.
    ///
    /// # Errors
    /// When they are not made: with what the command said.
    pub fn bare(file: &Path, machines: &[&str]) -> Result<MachineTestbed> {
        MachineTestbed::start_with(file, &["--bare", &machines.join(",")])
    }

    fn start_with(file: &Path, more: &[&str]) -> Result<MachineTestbed> {
        let dir = std::env::temp_dir().join(format!("rb-{}", std::process::id()));
        let testbed = MachineTestbed { rackbus: beside("rackbus")?, dir };
        testbed.end_when_interrupted();
        testbed.run(&[&["up", &file.display().to_string()], more].concat())?;
        Ok(testbed)
    }

    /// An interrupted test leaves no machines behind.
    fn end_when_interrupted(&self) {
        let (rackbus, dir) = (self.rackbus.clone(), self.dir.clone());
        when_interrupted(move || {
            drop(MachineTestbed { rackbus: rackbus.clone(), dir: dir.clone() });
        });
    }

    /// Runs a command of the testbed, which must succeed.
    ///
    /// # Errors
    /// When it does not: with what it said.
    pub fn run(&self, arguments: &[&str]) -> Result<()> {
        let mut command = Command::new(&self.rackbus);
        command.arg("testbed").args(arguments).arg("--dir").arg(&self.dir).stdin(Stdio::null());
        let output = command.output()?;
        let said = String::from_utf8_lossy(&output.stderr);
        let command = arguments.join(" ");
        ensure!(output.status.success(), "rackbus testbed {command}: {}", said.trim());
        Ok(())
    }

    /// A shell's script on a machine, not started yet. Its process becomes the script's shell.
    #[must_use]
    pub fn script(&self, machine: &str, script: &str) -> Command {
        let mut command = Command::new(&self.rackbus);
        command.args(["testbed", "on", machine, "--dir"]).arg(&self.dir);
        command.args(["--", "sh", "-ec", script]).stdin(Stdio::null());
        command
    }

    /// The folder with a folder for each machine's files.
    #[must_use]
    pub fn dir(&self) -> &Path {
        &self.dir
    }

    /// The rack as it is seen on a machine.
    ///
    /// # Errors
    /// When there is no `rackbus` beside this program.
    pub fn on(&self, machine: &str) -> Result<RackProcesses> {
        RackProcesses::on(&self.dir, machine)
    }
}

impl Drop for MachineTestbed {
    fn drop(&mut self) {
        let _ = self.run(&["down"]);
        let _ = std::fs::remove_dir_all(&self.dir);
    }
}
