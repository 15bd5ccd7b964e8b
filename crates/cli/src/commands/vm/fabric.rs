//! The helper through which a VM's guest shares memory with the rack.

use std::path::{Path, PathBuf};
use std::process::Child;
use std::time::{Duration, Instant};

use rackbus_fabric::rack::Rack;
use rackbus_node::segments::SOCKET;

use crate::commands::named_host;
use crate::output::Failure;
use crate::paths::{RunningRack, make_private, running};
use crate::process;

/// How long the helper may take until QEMU can connect.
const READY: Duration = Duration::from_secs(10);

/// A helper that waits for its VM. Dropped before [`keep`](GuestHelper::keep), it is ended.
#[derive(Debug)]
pub struct GuestHelper {
    /// The vhost-user socket that QEMU connects to.
    pub socket: PathBuf,
    child: Option<Child>,
}

impl GuestHelper {
    /// Starts one for a VM named `vm` on `host`, whose guest is the rack's host `guest`. `again`: for one
    /// VM after the other.
    pub fn start(
        run_dir: &Path,
        (host, vm): (&str, &str),
        guest: &str,
        again: bool,
    ) -> Result<GuestHelper, Failure> {
        let folder = run_dir.join(host).join("fabric");
        make_private(&folder)?;
        let log = folder.join(format!("{vm}.log"));
        // Others may try the same name at the same time.
        let socket = folder.join(format!("{vm}.{}.sock", std::process::id()));
        let (place, rack) = (socket.display().to_string(), run_dir.display().to_string());
        let mut args = vec!["guest", "serve", "--socket", &place, "--host", guest];
        args.extend(["--run-dir", &rack]);
        if again {
            args.push("--again");
        }
        let mut helper = GuestHelper { socket, child: Some(process::start(&args, &log)?) };
        let begun = Instant::now();
        while !helper.socket.exists() {
            let ended = helper.child.as_mut().is_none_or(|it| !matches!(it.try_wait(), Ok(None)));
            if ended || begun.elapsed() > READY {
                let error = format!("the helper of VM {vm} does not start");
                return Err(Failure::new(error, format!("see {}", log.display())));
            }
            std::thread::sleep(Duration::from_millis(5));
        }
        Ok(helper)
    }

    /// Its VM runs: the helper ends with it.
    pub fn keep(mut self) {
        self.child = None;
    }
}

impl Drop for GuestHelper {
    fn drop(&mut self) {
        if let Some(mut child) = self.child.take() {
            // It may have ended already.
            let _ = child.kill();
            let _ = child.wait();
            let _ = std::fs::remove_file(&self.socket);
        }
    }
}

/// Who the guest of the VM `vm` on `host` is in the rack: the host that was asked for, or the one of the VM's name.
pub fn identity(run_dir: &Path, asked: &str, (host, vm): (&str, &str)) -> Result<String, Failure> {
    let name = if asked.is_empty() { vm } else { asked };
    let running = running(run_dir)?;
    let rack = running.rack()?;
    let found = rack.host(name);
    if asked.is_empty() && found.is_some_and(|it| name == host || !it.devices.is_empty()) {
        let error = format!(
            "{name} is a host with more than this guest, which could do all that its programs can"
        );
        let remedy = format!("give --fabric={name} where that is meant, or the VM another --name");
        return Err(Failure::usage(error, remedy));
    }
    if asked.is_empty() && rack.host(name).is_none() {
        let error = format!("the rack has no host {name} for the guest of VM {name} to be");
        let remedy = format!(
            "write [hosts.{name}] into the rack file, with node id and export of its own; or give --fabric=HOST, \
             and the guest's programs are as those of that host"
        );
        return Err(Failure::usage(error, remedy));
    }
    named_host(&rack, name)?;
    if !run_dir.join(name).join(SOCKET).exists() {
        return Err(no_node(run_dir, &running, &rack, name));
    }
    Ok(name.to_owned())
}

/// The guest cannot be the host `name`, since no node of it runs here.
fn no_node(run_dir: &Path, running: &RunningRack, rack: &Rack, name: &str) -> Failure {
    if !running.is_joined() {
        let error = format!("the node of {name} does not run");
        return Failure::new(error, "restart the rack with the host in its file: rackbus up");
    }
    let here = rack.hosts.iter().find(|host| run_dir.join(&host.name).join(SOCKET).exists());
    let error = format!("the node of {name} does not run on this machine");
    let remedy = match here {
        Some(host) => format!("give --fabric={}: its node runs here", host.name),
        None => "start the node of this machine's host: rackbus node --join".to_owned(),
    };
    Failure::new(error, remedy)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn on_a_machine_that_has_joined_the_guest_is_the_host_whose_node_runs_there() {
        let folder = tempfile::tempdir().unwrap();
        let (run_dir, file) = (folder.path(), folder.path().join("rack.toml"));
        let text = "name = \"lab\"\n[hosts.alpha]\n[hosts.beta]\n";
        std::fs::write(&file, text).unwrap();
        let mut running = RunningRack {
            rack: "lab".to_owned(),
            file,
            state_dir: run_dir.to_owned(),
            text: None,
            joined: Vec::new(),
            behind: Vec::new(),
            low_latency: false,
        };
        running.note(run_dir).unwrap();
        let remedy = || identity(run_dir, "beta", ("alpha", "vm")).unwrap_err().remedy;
        assert!(remedy().contains("rackbus node --join"), "{}", remedy());
        let socket = run_dir.join("alpha").join(SOCKET);
        std::fs::create_dir_all(socket.parent().unwrap()).unwrap();
        std::fs::write(socket, "").unwrap();
        assert_eq!(remedy(), "give --fabric=alpha: its node runs here");
        assert_eq!(identity(run_dir, "alpha", ("alpha", "vm")).unwrap(), "alpha");
        // Where the whole rack runs on one machine, its own command starts what is missing.
        running.text = Some(text.to_owned());
        running.note(run_dir).unwrap();
        assert!(remedy().contains("rackbus up"), "{}", remedy());
    }
}
