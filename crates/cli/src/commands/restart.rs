//! `rackbus restart`: nodes go on as this program, and what they lend and borrow stays in use.

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use rackbus_control::api::ApiError;
use rackbus_control::node::{NodeProcess, RestartRequest};
use rackbus_control::{ControlClient, ControlClientError};
use serde::Serialize;

use crate::Common;
use crate::output::{Failure, Output, duration};
use crate::{paths, process};

/// How long a node may take to go on, and how often it is looked at.
const PATIENCE: Duration = Duration::from_secs(30);
const LOOK: Duration = Duration::from_millis(5);

/// Restart nodes in place, also to another version of rackbus: what they lend and borrow stays in use.
#[derive(Debug, clap::Args)]
#[command(after_help = "Examples:
  rackbus restart alpha               the node of alpha goes on as this program
  rackbus restart --all               all nodes, one after the other: an upgrade
  rackbus restart alpha --program /opt/rackbus-2/bin/rackbus

Guests, drivers and other nodes notice a pause. Leases, their sockets and what is mapped stay as they are.
Where that is not possible, the node says why and goes on as it was. The rack file is not read again.")]
pub struct Args {
    /// The hosts whose nodes are restarted.
    #[arg(value_name = "HOST", required_unless_present = "all")]
    hosts: Vec<String>,
    /// All nodes that run.
    #[arg(long, conflicts_with = "hosts")]
    all: bool,
    /// The program that the nodes go on as, instead of this one.
    #[arg(long, value_name = "FILE")]
    program: Option<PathBuf>,
}

/// A node that was restarted.
#[derive(Debug, Serialize)]
struct Row {
    host: String,
    #[serde(flatten)]
    process: NodeProcess,
}

impl Args {
    pub async fn run(&self, common: &Common, output: &Output) -> Result<(), Failure> {
        let run_dir = paths::find_run_dir(common)?;
        let program = self.program()?;
        let mut rows = Vec::new();
        for host in self.hosts(&run_dir)? {
            output.progress(&format!("restarting the node of {host}"));
            let process = restart(&run_dir, &host, RestartRequest::of(program.clone())).await?;
            let pause = duration(process.pause_us as f64);
            output.progress(&format!("the node of {host} goes on after {pause}"));
            rows.push(Row { host, process });
        }
        output.result(&rows, |o| {
            let cells = |row: &Row| {
                let NodeProcess { restarts, pause_us, in_use, version } = &row.process;
                let pause = duration(*pause_us as f64);
                let numbers = [pause, in_use.to_string(), restarts.to_string(), version.clone()];
                let cells = std::iter::once(row.host.clone()).chain(numbers);
                cells.map(Into::into).collect()
            };
            let head = ["host", "pause", "in use", "restarts", "version"];
            o.table(&head, rows.iter().map(cells).collect());
        });
        Ok(())
    }

    fn program(&self) -> Result<PathBuf, Failure> {
        let found = match &self.program {
            Some(program) => program.canonicalize(),
            None => std::env::current_exe(),
        };
        found.map_err(|cause| {
            let name = self.program.clone().unwrap_or_else(|| "this program".into());
            Failure::usage(format!("{}: {cause}", name.display()), "name a rackbus program")
        })
    }

    /// The hosts that are meant, of which a node runs.
    fn hosts(&self, run_dir: &Path) -> Result<Vec<String>, Failure> {
        let running: Vec<String> =
            process::living(run_dir).into_iter().filter_map(|process| process.host).collect();
        if let Some(host) = self.hosts.iter().find(|host| !running.contains(host)) {
            let remedy = match running.len() {
                0 => paths::START.to_owned(),
                _ => format!("nodes run of {}", running.join(", ")),
            };
            return Err(Failure::new(format!("no node of {host} runs"), remedy));
        }
        match self.all {
            true if running.is_empty() => Err(Failure::new("no node runs", paths::START)),
            true => Ok(running),
            false => Ok(self.hosts.clone()),
        }
    }
}

/// Where a node answers, whose process runs on this machine.
fn client_of(run_dir: &Path, host: &str) -> ControlClient {
    ControlClient::new(&run_dir.join(host).join(rackbus_node::metrics::SOCKET))
}

fn silent(run_dir: &Path, host: &str) -> Failure {
    let error = format!("the node of {host} does not answer");
    Failure::new(error, format!("see {}", run_dir.join(host).join("node.log").display()))
}

/// What keeps the node of `host` from being restarted now as that is asked for, if anything does. Nothing changes.
///
/// # Errors
/// When it does not answer.
pub async fn obstacle(
    run_dir: &Path,
    host: &str,
    request: RestartRequest,
) -> Result<Option<ApiError>, Failure> {
    let request = RestartRequest { check_only: true, ..request };
    match client_of(run_dir, host).restart_node(&request).await {
        Ok(()) => Ok(None),
        Err(ControlClientError::Refused(refused)) => Ok(Some(refused)),
        Err(_) => Err(silent(run_dir, host)),
    }
}

/// Why it is not known that a node goes on as another program.
#[derive(Debug)]
pub enum NotRestarted {
    /// It goes on as it was: it refused, or could not be asked.
    Unchanged(Failure),
    /// It does not answer: it may go on as it was, or as was asked for, or be gone.
    Silent(Failure),
}

impl From<NotRestarted> for Failure {
    fn from(not: NotRestarted) -> Failure {
        match not {
            NotRestarted::Unchanged(failure) | NotRestarted::Silent(failure) => failure,
        }
    }
}

/// Has the node of `host` go on as that is asked for; what became of it.
///
/// # Errors
/// [`NotRestarted`].
pub async fn restart(
    run_dir: &Path,
    host: &str,
    request: RestartRequest,
) -> Result<NodeProcess, NotRestarted> {
    let client = client_of(run_dir, host);
    let unasked = |_| NotRestarted::Unchanged(silent(run_dir, host));
    let before = client.node_process().await.map_err(unasked)?;
    let silent = || NotRestarted::Silent(silent(run_dir, host));
    match client.restart_node(&request).await {
        // It was done: whoever would answer is another program by now.
        Err(ControlClientError::Broken(_)) | Ok(()) => {}
        Err(ControlClientError::Refused(refused)) => {
            let error = format!("the node of {host} is not restarted: {}", refused.error);
            return Err(NotRestarted::Unchanged(Failure::new(error, refused.remedy)));
        }
        Err(_) => return Err(silent()),
    }
    let deadline = Instant::now() + PATIENCE;
    loop {
        match client.node_process().await {
            Ok(now) if now.restarts > before.restarts => return Ok(now),
            _ => {}
        }
        let lives = process::living(run_dir).iter().any(|it| it.host.as_deref() == Some(host));
        if !lives || Instant::now() > deadline {
            return Err(silent());
        }
        tokio::time::sleep(LOOK).await;
    }
}
