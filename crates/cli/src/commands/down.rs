//! `rackbus down`: stops the rack.

use std::os::unix::fs::FileTypeExt;
use std::path::Path;

use crate::Common;
use crate::commands::read_rack;
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
        let name = paths::running(&run_dir)?.rack;
        let count = stop(&run_dir, output);
        let value = serde_json::json!({ "rack": name, "stopped": count });
        output.result(&value, |o| o.line(&format!("rack {name}: {count} processes stopped")));
        Ok(())
    }
}

/// Stops every process of the rack in `run_dir`; returns how many there were.
pub fn stop(run_dir: &Path, output: &Output) -> usize {
    let mut files = vec![process::pid_file(run_dir, None)];
    let hosts: Vec<String> = paths::running(run_dir)
        .ok()
        .and_then(|running| read_rack(&running.file).ok())
        .map(|rack| rack.hosts.into_iter().map(|h| h.name).collect())
        .unwrap_or_else(|| folders(run_dir));
    // Nodes first: what they lend and borrow is let go while the control plane can hear it.
    files.splice(0..0, hosts.iter().map(|host| process::pid_file(run_dir, Some(host))));
    let mut count = 0;
    for file in files {
        if let Some(pid) = process::holder(&file) {
            output.progress(&format!("stopping process {pid}"));
            process::end(pid);
            count += 1;
        }
        if let Some(folder) = file.parent() {
            remove_sockets(folder);
        }
        let _ = std::fs::remove_file(&file);
    }
    let _ = std::fs::remove_file(run_dir.join("rack.json"));
    count
}

/// Removes the sockets that a process which has ended listened on: whoever looks for a rack by
/// them finds none.
fn remove_sockets(folder: &Path) {
    let entries = std::fs::read_dir(folder).into_iter().flatten().flatten();
    for entry in entries.filter(|it| it.file_type().is_ok_and(|kind| kind.is_socket())) {
        // One that stays is no harm: nobody answers there.
        let _ = std::fs::remove_file(entry.path());
    }
}

/// The folders in the run directory: the hosts, when the rack file is gone.
fn folders(run_dir: &Path) -> Vec<String> {
    let entries = std::fs::read_dir(run_dir).into_iter().flatten().flatten();
    entries
        .filter(|e| e.path().is_dir())
        .map(|e| e.file_name().to_string_lossy().into_owned())
        .collect()
}
