//! A whole rack of two hosts on this machine, through the `rackbus` command as its users have it.

use std::io::{BufRead, BufReader, ErrorKind, Read, Write};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdout, Command, Stdio};
use std::sync::mpsc;
use std::thread::JoinHandle;
use std::time::Duration;

use rackbus_link::presence::node_file;
use serde_json::Value;

use crate::BenchError;
use crate::raw::STORE;

/// A rack in which `alpha` lends a drive in memory, and `beta` borrows.
pub fn lending() -> String {
    format!(
        "name = \"bench\"\n[hosts.alpha.devices.nvme0]\nkind = \"nvme\"\n\
         size = \"{} MiB\"\nbacking = \"memory\"\n[hosts.beta]\n",
        STORE >> 20
    )
}

/// A rack in which `alpha` lends two drives in files, and `beta` borrows.
pub fn lending_files() -> String {
    let mib = STORE >> 20;
    format!(
        "name = \"bench\"\n[hosts.alpha.devices.nvme0]\nkind = \"nvme\"\nsize = \"{mib} MiB\"\n\
         [hosts.alpha.devices.nvme1]\nkind = \"nvme\"\nsize = \"{mib} MiB\"\n[hosts.beta]\n",
    )
}

/// A running rack. Ended when dropped.
#[derive(Debug)]
pub struct BenchRack {
    program: PathBuf,
    dir: PathBuf,
}

/// A lease on the drive.
#[derive(Debug)]
pub struct BorrowedDrive {
    number: u64,
    function: String,
    /// Where the borrower's node serves it.
    pub socket: PathBuf,
}

impl BenchRack {
    /// The `rackbus` binary: this program, or its neighbour.
    pub fn find() -> Option<PathBuf> {
        let me = std::env::current_exe().ok()?;
        let neighbour = me.with_file_name("rackbus");
        neighbour.is_file().then_some(neighbour)
    }

    /// Starts that of the rack file `text` in `dir`; `None` when there is no `rackbus` to start it
    /// with.
    ///
    /// # Errors
    /// When it does not come up.
    pub fn start(dir: &Path, text: &str) -> Result<Option<BenchRack>, BenchError> {
        let Some(program) = BenchRack::find() else { return Ok(None) };
        let dir = dir.join("rack");
        std::fs::create_dir_all(&dir).map_err(BenchError::io("making the rack's directory"))?;
        // What a rack of an earlier run knew is no other rack's.
        let state = dir.join("state");
        if state.exists() {
            std::fs::remove_dir_all(&state).map_err(BenchError::io("removing old state"))?;
        }
        let file = dir.join("rack.toml");
        std::fs::write(&file, text).map_err(BenchError::io("writing the rack file"))?;
        let rack = BenchRack { program, dir };
        rack.run(&["up", &file.display().to_string()])?;
        Ok(Some(rack))
    }

    /// The rack's run directory, with `control.sock`.
    pub fn run_dir(&self) -> PathBuf {
        self.dir.join("run")
    }

    fn run(&self, arguments: &[&str]) -> Result<String, BenchError> {
        let output = Command::new(&self.program)
            .args(arguments)
            .env("RACKBUS_RUN_DIR", self.run_dir())
            .env("RACKBUS_STATE_DIR", self.dir.join("state"))
            .stdin(Stdio::null())
            .output()
            .map_err(BenchError::io("running rackbus"))?;
        if !output.status.success() {
            let complaint = String::from_utf8_lossy(&output.stderr);
            return Err(BenchError::Peer(format!("rackbus {}: {complaint}", arguments.join(" "))));
        }
        Ok(String::from_utf8_lossy(&output.stdout).into_owned())
    }

    /// What a command says with `--json`.
    ///
    /// # Errors
    /// When it is refused.
    pub fn json(&self, arguments: &[&str]) -> Result<Value, BenchError> {
        let text = self.run(&[&["--json"], arguments].concat())?;
        serde_json::from_str(&text)
            .map_err(|error| BenchError::Peer(format!("rackbus {}: {error}", arguments.join(" "))))
    }

    /// Starts a command that goes on telling of something on its standard output.
    ///
    /// # Errors
    /// When it cannot be started.
    pub fn follow(&self, arguments: &[&str]) -> Result<Child, BenchError> {
        let mut command = Command::new(&self.program);
        command.args(arguments).env("RACKBUS_RUN_DIR", self.run_dir());
        command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::null());
        command.spawn().map_err(BenchError::io("running rackbus"))
    }

    /// Gives its hosts interfaces in the rack's network.
    ///
    /// # Errors
    /// When it is refused.
    pub fn net_up(&self) -> Result<(), BenchError> {
        self.run(&["net", "up"]).map(drop)
    }

    /// The processes of the nodes of these hosts.
    ///
    /// # Errors
    /// When one is not there.
    pub fn nodes(&self, hosts: &[&str]) -> Result<Vec<u32>, BenchError> {
        let pid = |host: &&str| {
            let file = node_file(&self.run_dir(), host);
            let text = std::fs::read_to_string(file).map_err(BenchError::io("finding a node"))?;
            let none = |_| BenchError::Peer(format!("{host}'s node says no process: {text:?}"));
            text.trim().parse().map_err(none)
        };
        hosts.iter().map(pid).collect()
    }

    /// Borrows alpha's drive for beta.
    ///
    /// # Errors
    /// When it is refused.
    pub fn borrow_drive(&self) -> Result<BorrowedDrive, BenchError> {
        self.borrow(&["alpha/nvme0"])
    }

    /// Borrows what `arguments` say for beta.
    ///
    /// # Errors
    /// When it is refused.
    pub fn borrow(&self, arguments: &[&str]) -> Result<BorrowedDrive, BenchError> {
        self.borrow_for("beta", arguments)
    }

    /// The same for another host.
    ///
    /// # Errors
    /// When it is refused.
    pub fn borrow_for(&self, host: &str, arguments: &[&str]) -> Result<BorrowedDrive, BenchError> {
        let lease = self.json(&[&["borrow", "--for", host], arguments].concat())?;
        let function = lease["function"].as_str().unwrap_or_default().to_owned();
        match (lease["lease"].as_u64(), lease["socket"].as_str()) {
            (Some(number), Some(socket)) => {
                Ok(BorrowedDrive { number, function, socket: socket.into() })
            }
            _ => Err(BenchError::Peer(format!("rackbus borrow gave no socket: {lease}"))),
        }
    }

    /// Restarts the node of `host` in place.
    ///
    /// # Errors
    /// When it is not.
    pub fn restart(&self, host: &str) -> Result<(), BenchError> {
        self.run(&["restart", host]).map(drop)
    }

    /// Gives the drive back and waits until it is offered again.
    ///
    /// # Errors
    /// When the rack fails.
    pub fn give_back(&self, lease: &BorrowedDrive) -> Result<(), BenchError> {
        self.run(&["return", &lease.number.to_string()])?;
        self.wait_offered(&lease.function)
    }

    /// Waits until nobody has a function and it is available.
    ///
    /// # Errors
    /// When the rack fails.
    pub fn wait_offered(&self, function: &str) -> Result<(), BenchError> {
        let is_offered = |devices: &Value| {
            let mut all = devices.as_array().into_iter().flatten();
            all.any(|device| device["function"] == function && device["state"] == "offered")
        };
        while !is_offered(&self.json(&["devices"])?) {}
        Ok(())
    }
}

impl BenchRack {
    /// Asks the lender's node and the control plane for their metrics again and again, and follows
    /// the events, until what is returned is dropped. On return both are under way: what it takes to begin is nothing that
    /// a rack pays while it is observed.
    ///
    /// # Errors
    /// When the rack cannot be observed.
    pub fn observe(&self, every: Duration) -> Result<Observer, BenchError> {
        let sockets = ["alpha/metrics.sock", "control.sock"].map(|name| self.run_dir().join(name));
        for socket in &sockets {
            scrape(socket).map_err(BenchError::io("asking for metrics"))?;
        }
        let mut follower = Command::new(&self.program);
        follower.args(["events", "--follow"]).env("RACKBUS_RUN_DIR", self.run_dir());
        follower.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::null());
        let mut follower = follower.spawn().map_err(BenchError::io("following the events"))?;
        // The first is that the control plane was started.
        let events = follower.stdout.take().map(BufReader::new);
        let mut follower = Follower { process: follower, events };
        if let Some(events) = &mut follower.events {
            let first = events.read_line(&mut String::new());
            let first = first.and_then(|bytes| match bytes {
                0 => Err(ErrorKind::UnexpectedEof.into()),
                _ => Ok(()),
            });
            first.map_err(BenchError::io("following the events"))?;
        }
        let (stop, stopped) = mpsc::channel::<()>();
        let scraper = std::thread::spawn(move || {
            while stopped.recv_timeout(every) == Err(mpsc::RecvTimeoutError::Timeout) {
                for socket in &sockets {
                    // One that fails is asked again; the rack's own end is told elsewhere.
                    let _ = scrape(socket);
                }
            }
        });
        Ok(Observer { stop: Some(stop), scraper: Some(scraper), _follower: follower })
    }
}

/// A page of metrics from the server at `socket`.
pub(crate) fn scrape(socket: &Path) -> std::io::Result<String> {
    let mut stream = UnixStream::connect(socket)?;
    stream.write_all(b"GET /metrics HTTP/1.1\r\nHost: rackbus\r\nConnection: close\r\n\r\n")?;
    let mut page = String::new();
    stream.read_to_string(&mut page)?;
    if page.starts_with("HTTP/1.1 200") { Ok(page) } else { Err(ErrorKind::InvalidData.into()) }
}

/// Observes a rack until it is dropped.
#[derive(Debug)]
pub struct Observer {
    stop: Option<mpsc::Sender<()>>,
    scraper: Option<JoinHandle<()>>,
    /// Its process is killed, and waited for, when this is dropped.
    _follower: Follower,
}

/// Whoever follows the events.
#[derive(Debug)]
struct Follower {
    process: Child,
    /// What it says: open for as long as it runs.
    events: Option<BufReader<ChildStdout>>,
}

impl Drop for Follower {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

impl Drop for Observer {
    fn drop(&mut self) {
        drop(self.stop.take());
        let _ = self.scraper.take().map(JoinHandle::join);
    }
}

impl Drop for BenchRack {
    fn drop(&mut self) {
        let _ = self.run(&["down"]);
    }
}
