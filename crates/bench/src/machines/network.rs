//! The rack's network between two machines, as far as one machine can play them: nodes that have nothing in common but the
//! loopback and TLS, and a network namespace for each host.

use std::net::TcpListener;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

use rackbus_attach::Location;
use rackbus_netdev::namespace;

use crate::BenchError;
use crate::network::TrafficEnds;
use crate::rack::BenchRack;

use super::failed;

/// How long a process may take to answer.
const PATIENCE: Duration = Duration::from_secs(20);

/// A machine: a folder, and the process that runs there.
pub(super) struct RackMachine {
    program: PathBuf,
    folder: PathBuf,
    process: Option<Child>,
}

impl RackMachine {
    fn new(program: &Path, folder: PathBuf) -> Result<RackMachine, BenchError> {
        // What was there before is of another rack.
        let _ = std::fs::remove_dir_all(&folder);
        std::fs::create_dir_all(&folder).map_err(BenchError::io("making a machine's folder"))?;
        Ok(RackMachine { program: program.to_owned(), folder, process: None })
    }

    fn command(&self, arguments: &[&str]) -> Command {
        let mut command = Command::new(&self.program);
        command
            .args(arguments)
            .env("RACKBUS_RUN_DIR", self.folder.join("run"))
            .env("RACKBUS_STATE_DIR", self.folder.join("state"))
            .env("XDG_CONFIG_HOME", self.folder.join("config"))
            .env_remove("RACKBUS_CONTEXT")
            .stdin(Stdio::null());
        command
    }

    /// Where programs of this machine find the node of `host`.
    pub(super) fn location(&self, host: &str) -> Location {
        Location { run_dir: self.folder.join("run"), host: host.to_owned() }
    }

    fn start(&mut self, arguments: &[&str]) -> Result<(), BenchError> {
        let started = self.command(arguments).stdout(Stdio::null()).stderr(Stdio::null()).spawn();
        self.process = Some(started.map_err(BenchError::io("running rackbus"))?);
        Ok(())
    }

    /// Runs a command until it succeeds; what it printed.
    ///
    /// # Errors
    /// What it said when it did not succeed for [`PATIENCE`].
    pub(super) fn run(&self, arguments: &[&str]) -> Result<String, BenchError> {
        let begun = Instant::now();
        loop {
            let output = self.command(arguments).output();
            let Output { status, stdout, stderr } =
                output.map_err(BenchError::io("running rackbus"))?;
            if status.success() {
                return Ok(String::from_utf8_lossy(&stdout).into_owned());
            }
            if begun.elapsed() > PATIENCE {
                let complaint = String::from_utf8_lossy(&stderr);
                return Err(failed(format!("rackbus {}: {complaint}", arguments.join(" "))));
            }
            std::thread::sleep(Duration::from_millis(50));
        }
    }
}

impl Drop for RackMachine {
    fn drop(&mut self) {
        if let Some(process) = &mut self.process {
            let _ = process.kill();
            let _ = process.wait();
        }
    }
}

/// An address of this machine that nobody listens at.
pub(super) fn free_address() -> Result<String, BenchError> {
    let free = TcpListener::bind("127.0.0.1:0").map_err(failed)?;
    Ok(free.local_addr().map_err(failed)?.to_string())
}

/// The control plane of a rack, on a machine of its own.
pub(super) struct Desk {
    dir: PathBuf,
    program: PathBuf,
    url: String,
    machine: RackMachine,
}

impl Desk {
    /// Starts the control plane of the rack that `text` describes, in `dir`.
    ///
    /// # Errors
    /// When it cannot be started.
    pub(super) fn start(program: &Path, dir: &Path, text: &str) -> Result<Desk, BenchError> {
        let file = dir.join("machines.toml");
        std::fs::write(&file, text).map_err(BenchError::io("writing the rack file"))?;
        let listen = free_address()?;
        let mut machine = RackMachine::new(program, dir.join("desk"))?;
        machine.start(&["control", &file.display().to_string(), "--listen", &listen])?;
        let (dir, program) = (dir.to_owned(), program.to_owned());
        Ok(Desk { dir, program, url: format!("https://{listen}"), machine })
    }

    /// Has the node of a host join, which listens at `listen` and has these arguments besides.
    ///
    /// # Errors
    /// When the control plane gives no token, or the node cannot be started.
    pub(super) fn join(
        &self,
        host: &str,
        listen: &str,
        more: &[&str],
    ) -> Result<RackMachine, BenchError> {
        let token = self.dir.join(format!("{host}.token"));
        let said = self.machine.run(&["token", host, "--json"])?;
        let said: serde_json::Value = serde_json::from_str(&said).map_err(failed)?;
        let secret = said["token"].as_str().unwrap_or_default();
        std::fs::write(&token, secret).map_err(BenchError::io("writing a token"))?;
        let mut machine = RackMachine::new(&self.program, self.dir.join(host))?;
        let token = token.display().to_string();
        let node = ["node", "--host", host, "--join", &self.url, "--listen", listen];
        machine.start(&[&node, &["--token-file", &token][..], more].concat())?;
        Ok(machine)
    }
}

/// Two machines whose hosts have interfaces in the rack's network, while it lives.
pub struct MachineNetwork {
    name: String,
    _desk: Desk,
    _machines: Vec<RackMachine>,
    /// The namespaces of the hosts alpha and beta.
    pub pair: TrafficEnds,
}

impl MachineNetwork {
    /// Starts them in `dir`; `None` when there is no `rackbus` to start them with, or no right to make interfaces.
    ///
    /// # Errors
    /// When they do not come up.
    pub fn start(dir: &Path, mtu: u16) -> Result<Option<MachineNetwork>, BenchError> {
        let Some(program) = BenchRack::find().filter(|_| rustix::process::geteuid().is_root())
        else {
            return Ok(None);
        };
        let name = format!("apart{}", std::process::id());
        let text =
            format!("name = \"{name}\"\n[network]\nmtu = {mtu}\n[hosts.alpha]\n[hosts.beta]\n");
        let desk = Desk::start(&program, dir, &text)?;
        let mut machines = Vec::new();
        for host in ["alpha", "beta"] {
            let machine = desk.join(host, &free_address()?, &[])?;
            machine.run(&["net", "up"])?;
            machines.push(machine);
        }
        let open = |host: &str| namespace::open(&format!("rackbus-{name}-{host}"));
        let none = || BenchError::io("opening a host's namespace");
        let spaces = (open("alpha").map_err(none())?, open("beta").map_err(none())?);
        let processes = machines.iter().filter_map(|machine| machine.process.as_ref());
        let carriers = processes.map(Child::id).collect();
        let pair = TrafficEnds { spaces: Some(spaces), address: [10, 77, 0, 2].into(), carriers };
        Ok(Some(MachineNetwork { name, _desk: desk, _machines: machines, pair }))
    }
}

impl Drop for MachineNetwork {
    fn drop(&mut self) {
        for host in ["alpha", "beta"] {
            let _ = namespace::remove(&format!("rackbus-{}-{host}", self.name));
        }
    }
}
