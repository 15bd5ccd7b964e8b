//! `rackbus reach`: whose memory a function or host reaches now, and by which way.

use rackbus_control::reach::{ReachedPlace, ReachedRange};
use rackbus_control::{ControlClient, ControlClientError};
use rackbus_fabric::rack::format_size;
use serde::Serialize;

use crate::Common;
use crate::output::{Failure, Output};
use crate::paths::{find_run_dir, running};

/// Show whose memory a function reaches now, or which segments and interrupts a host's processes do.
#[derive(Debug, clap::Args)]
#[command(after_help = "Examples:
  rackbus reach alpha/nvme0          what its driver mapped and wired for the drive, and the way there
  rackbus reach beta                 segments, pages, interrupts and registers that beta's processes have
  rackbus reach alpha/nvme0 --json

The nodes answer, each for what it lets others reach.")]
pub struct Args {
    /// HOST/DEVICE, or HOST for its processes.
    of: String,
}

/// A range, and the node that lets it be reached.
#[derive(Debug, Serialize)]
struct Row<'n> {
    node: &'n str,
    #[serde(flatten)]
    range: ReachedRange,
}

impl Args {
    pub async fn run(&self, common: &Common, output: &Output) -> Result<(), Failure> {
        let run_dir = find_run_dir(common)?;
        let rack = running(&run_dir)?.rack()?;
        let mut rows = Vec::new();
        for host in &rack.hosts {
            let socket = run_dir.join(&host.name).join(rackbus_node::metrics::SOCKET);
            match ControlClient::new(&socket).reach(&self.of).await {
                Ok(ranges) => {
                    rows.extend(ranges.into_iter().map(|range| Row { node: &host.name, range }));
                }
                // What a node lets be reached ends with it.
                Err(ControlClientError::Unreachable { .. }) => {
                    output.progress(&format!("the node of {} does not answer", host.name));
                }
                Err(error) => return Err(error.into()),
            }
        }
        output.result(&rows, |o| {
            if rows.is_empty() {
                return o.line(&format!("{} reaches nothing of others now", self.of));
            }
            let head = ["address", "size", "access", "leads to", "at", "way"];
            o.table(&head, rows.iter().map(|row| cells(&row.range)).collect());
        });
        Ok(())
    }
}

fn cells(range: &ReachedRange) -> Vec<crate::output::Cell> {
    let (to, at) = match &range.to {
        ReachedPlace::Lent { host, offset } => (format!("memory lent by {host}"), *offset),
        ReachedPlace::Exported { host, offset } => (format!("memory exported by {host}"), *offset),
        ReachedPlace::Interrupt { host, number, data: false } => {
            (format!("interrupt of {host}"), u64::from(*number))
        }
        ReachedPlace::Interrupt { host, number, data: true } => {
            (format!("data interrupt of {host}"), u64::from(*number))
        }
        ReachedPlace::Wired { host, vector: Some(vector) } => {
            (format!("vector wired by {host}"), u64::from(*vector))
        }
        ReachedPlace::Wired { host, vector: None } => (format!("INTx pin wired by {host}"), 0),
        ReachedPlace::Bar { device, bar, offset } => (format!("BAR {bar} of {device}"), *offset),
        ReachedPlace::Unknown => {
            ("what this program does not know (an older version)".to_owned(), 0)
        }
    };
    let access = match (range.read, range.write) {
        (true, true) => "read, write",
        (true, false) => "read",
        _ => "write",
    };
    let names: Vec<&str> = range.components.iter().map(|hop| hop.name.as_str()).collect();
    vec![
        format!("{:#x}", range.at).into(),
        format_size(range.length).into(),
        access.to_owned().into(),
        to.into(),
        format!("{at:#x}").into(),
        names.join(" > ").into(),
    ]
}
