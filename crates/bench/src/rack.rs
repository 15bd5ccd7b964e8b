//! A whole rack of two hosts on this machine, through the `rackbus` command as its users have it.

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

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
pub struct Rack {
    program: PathBuf,
    dir: PathBuf,
}

/// A lease on the drive.
#[derive(Debug)]
pub struct Lease {
    number: u64,
    /// Where the borrower's node serves it.
    pub socket: PathBuf,
}

impl Rack {
    /// The `rackbus` binary: this program, or its neighbour.
    fn find() -> Option<PathBuf> {
        let me = std::env::current_exe().ok()?;
        let neighbour = me.with_file_name("rackbus");
        neighbour.is_file().then_some(neighbour)
    }

    /// Starts that of the rack file `text` in `dir`; `None` when there is no `rackbus` to start it
    /// with.
    ///
    /// # Errors
    /// When it does not come up.
    pub fn start(dir: &Path, text: &str) -> Result<Option<Rack>, BenchError> {
        let Some(program) = Rack::find() else { return Ok(None) };
        let dir = dir.join("rack");
        std::fs::create_dir_all(&dir).map_err(BenchError::io("making the rack's directory"))?;
        let file = dir.join("rack.toml");
        std::fs::write(&file, text).map_err(BenchError::io("writing the rack file"))?;
        let rack = Rack { program, dir };
        rack.run(&["up", &file.display().to_string()])?;
        Ok(Some(rack))
    }

    /// Its run directory.
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

    fn json(&self, arguments: &[&str]) -> Result<Value, BenchError> {
        let text = self.run(&[&["--json"], arguments].concat())?;
        serde_json::from_str(&text)
            .map_err(|error| BenchError::Peer(format!("rackbus {}: {error}", arguments.join(" "))))
    }

    /// Borrows alpha's drive for beta.
    ///
    /// # Errors
    /// When it is refused.
    pub fn borrow_drive(&self) -> Result<Lease, BenchError> {
        self.borrow(&["alpha/nvme0"])
    }

    /// Borrows what `arguments` say for beta.
    ///
    /// # Errors
    /// When it is refused.
    pub fn borrow(&self, arguments: &[&str]) -> Result<Lease, BenchError> {
        let lease = self.json(&[&["borrow", "--for", "beta"], arguments].concat())?;
        match (lease["lease"].as_u64(), lease["socket"].as_str()) {
            (Some(number), Some(socket)) => Ok(Lease { number, socket: socket.into() }),
            _ => Err(BenchError::Peer(format!("rackbus borrow gave no socket: {lease}"))),
        }
    }

    /// Gives the drive back and waits until it is offered again.
    ///
    /// # Errors
    /// When the rack fails.
    pub fn give_back(&self, lease: &Lease) -> Result<(), BenchError> {
        self.run(&["return", &lease.number.to_string()])?;
        while self.json(&["devices"])?[0]["state"] != "offered" {}
        Ok(())
    }
}

impl Drop for Rack {
    fn drop(&mut self) {
        let _ = self.run(&["down"]);
    }
}
