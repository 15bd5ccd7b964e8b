//! `rackbus down`: stops the rack.

use std::os::unix::fs::FileTypeExt;
use std::path::Path;

use rackbus_netdev::namespace;
use rackbus_node::network::namespace_of;

use crate::Common;
use crate::output::{Failure, Output};
use crate::{paths, process};

/// Stop the rack: its nodes and its control plane. Leases are kept and end when the nodes return.
#[derive(Debug, clap::Args)]
#[command(after_help = "Example:
  rackbus down")]
pub struct Args {}

impl Args {
    pub async fn run(&self, common: &Common, output: &Output) -> Result<(), Failure> {
        let run_dir = paths::find_run_dir(common)?;
        let name = match paths::running(&run_dir) {
            Ok(running) => running.rack,
            // Somebody removed the note: what lives is stopped anyway.
            Err(failure) if process::living(&run_dir).is_empty() => return Err(failure),
            Err(_) => run_dir.file_name().unwrap_or_default().to_string_lossy().into_owned(),
        };
        let count = stop(&run_dir, output)?;
        let value = serde_json::json!({ "rack": name, "stopped": count });
        output.result(&value, |o| o.line(&format!("rack {name}: {count} processes stopped")));
        Ok(())
    }
}

/// Stops every process of the rack in `run_dir`; returns how many there were.
///
/// # Errors
/// When some of them do not end.
pub fn stop(run_dir: &Path, output: &Output) -> Result<usize, Failure> {
    // Nodes first: what they lend and borrow is released while the control plane can hear it.
    let living = process::living(run_dir);
    let mut left = Vec::new();
    for process in &living {
        output.progress(&format!("stopping process {}", process.pid()));
        if !process.end() {
            let whose = process.host.as_ref().map(|host| format!("the node of {host}"));
            let whose = whose.unwrap_or_else(|| "the control plane".to_owned());
            left.push(format!("{whose} (process {})", process.pid()));
        }
    }
    if !left.is_empty() {
        let error = format!("was killed and has not ended: {}", left.join(", "));
        let remedy = "it waits in the kernel, most likely for storage; see to that, then run `rackbus down` again";
        return Err(Failure::new(error, remedy));
    }
    // Unless somebody starts it anew by now.
    if process::living(run_dir).is_empty() {
        remove_networks(run_dir);
        let _ = std::fs::remove_file(run_dir.join("rack.json"));
        remove_sockets(run_dir);
    }
    Ok(living.len())
}

/// Removes the hosts' network namespaces, as far as there are any.
fn remove_networks(run_dir: &Path) {
    let rack = paths::running(run_dir).and_then(|running| running.rack());
    for host in rack.iter().flat_map(|rack| &rack.hosts) {
        remove_network(rack.as_ref().map_or("", |rack| &rack.name), &host.name);
    }
}

/// Removes a host's network namespace, if there is one. Programs that are in it stay there, without an interface.
fn remove_network(rack: &str, host: &str) {
    let name = namespace_of(rack, host);
    if namespace::open(&name).is_ok()
        && let Err(error) = namespace::remove(&name)
    {
        tracing::warn!(%error, name, "a network namespace could not be removed");
    }
}

/// Removes what the node of a host, which has ended, leaves while its rack runs. Its log stays, and the files of its
/// drives.
pub fn clean_host(run_dir: &Path, rack: &str, host: &str) {
    remove_network(rack, host);
    remove_sockets(&run_dir.join(host));
}

/// Removes the sockets that processes which have ended listened on, in `folder` and below it:
/// whoever looks for a rack by them finds none. Virtual machines go on, and so do theirs.
fn remove_sockets(folder: &Path) {
    let entries = std::fs::read_dir(folder).into_iter().flatten().flatten();
    for entry in entries {
        match entry.file_type() {
            Ok(kind) if kind.is_dir() && entry.file_name() != "vms" => {
                remove_sockets(&entry.path())
            }
            // One that stays is no harm: nobody answers there.
            Ok(kind) if kind.is_socket() => drop(std::fs::remove_file(entry.path())),
            _ => {}
        }
    }
}
