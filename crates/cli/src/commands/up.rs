//! `rackbus up`: starts the rack on this machine, one process per host and the control plane.

mod changes;
mod fixed;
mod following;
mod hosts;
mod nodes;

use std::collections::BTreeSet;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::process::Child;
use std::time::{Duration, Instant};

use rackbus_control::ControlClient;
use rackbus_control::api::HostState;
use rackbus_devices::RackDevice;
use rackbus_fabric::rack::Rack;

use crate::Common;
use crate::commands::metrics::check_address;
use crate::commands::{read_devices, status};
use crate::output::{Failure, Output};
use crate::paths::{self, RunningRack};
use crate::process;

/// How long the rack may take to come up.
const PATIENCE: Duration = Duration::from_secs(30);

/// Start the rack on this machine: the control plane, and a node for each host.
#[derive(Debug, clap::Args)]
#[command(after_help = "Examples:
  rackbus up                              the rack of ./rack.toml
  rackbus up examples/demo/rack.toml
  rackbus up changed.toml                 of a rack that is up: hosts, devices and compositions follow the file
  rackbus up --foreground                 stay until Ctrl-C, then stop the rack
  rackbus up --metrics 127.0.0.1:9470     for Prometheus: http://127.0.0.1:9470/metrics
  rackbus up --low-latency                keep processors awake: interrupts in 2-4 us instead of 30-60")]
pub struct Args {
    /// The rack file, which says what hosts and devices there are.
    #[arg(default_value = "rack.toml")]
    file: PathBuf,
    /// Where drives' files and the control plane's database are kept.
    #[arg(long, value_name = "DIR", env = paths::STATE_DIR)]
    state_dir: Option<PathBuf>,
    /// Stay until interrupted, then stop the rack.
    #[arg(long)]
    foreground: bool,
    /// Hold the processors out of idle states: faster wake-ups, more power. Needs root.
    #[arg(long)]
    low_latency: bool,
    /// Serve the rack's metrics at this address of this machine alone, for Prometheus.
    #[arg(long, value_name = "ADDRESS:PORT")]
    metrics: Option<SocketAddr>,
}

impl Args {
    pub async fn run(&self, common: &Common, output: &Output) -> Result<(), Failure> {
        check_address(self.metrics)?;
        let (rack, devices) = read_devices(&self.file)?;
        let run_dir = paths::make_run_dir(common, &rack.name)?;
        paths::check_lengths(&rack, &run_dir)?;
        let state_dir = paths::state_dir(self.state_dir.as_deref(), &rack.name)?;
        let starting = process::hold(&run_dir.join("up.pid"), |_| {
            let error = format!("rack {} is being started by another `rackbus up`", rack.name);
            Failure::new(error, "wait for it, or end it with `rackbus down`")
        })?;
        if is_up(&run_dir) {
            let begins = self.foreground || self.low_latency || self.metrics.is_some();
            let elsewhere = paths::running(&run_dir).is_ok_and(|it| it.state_dir != state_dir);
            if begins || elsewhere {
                let error = format!("rack {} is up already", rack.name);
                let remedy =
                    "stop it with `rackbus down`, or leave options out to follow a changed file";
                return Err(Failure::new(error, remedy));
            }
            return following::apply(&run_dir, &self.file, (&rack, &devices), output).await;
        }
        paths::check_not_joined(&run_dir)?;
        check_nothing_runs(&rack.name, &run_dir)?;
        paths::make_private(&state_dir)?;
        let running = RunningRack::of(&rack, &self.file, &state_dir)?;
        RunningRack { low_latency: self.low_latency, ..running }.note(&run_dir)?;
        let begun = Instant::now();
        output.progress(&format!("starting rack {} in {}", rack.name, run_dir.display()));
        for RackDevice { function, kind, .. } in devices.iter().filter(|d| d.config.is_none()) {
            output.progress(&format!(
                "{function} is not offered: a {kind} is for `rackbus model` only"
            ));
        }
        // From before the first process on, so that no interrupt leaves some of them behind.
        let mut requests = process::EndRequests::listen();
        let mut children = Vec::new();
        let hosts = rack.hosts.iter().map(|host| host.name.clone()).collect();
        let client = ControlClient::new(&rackbus_node::control_socket(&run_dir));
        let outcome = match self.start(&rack, &run_dir, &mut children) {
            Ok(()) => tokio::select! {
                outcome = ready(&client, &hosts, &mut children, output) => outcome,
                () = requests.wait() => {
                    Err(Failure::new("interrupted", "nothing is left running; start again"))
                }
            },
            Err(failure) => Err(failure),
        };
        if let Err(failure) = outcome {
            // Nodes first, as `rackbus down` does: they give the machine's own functions back to its drivers.
            for (name, mut child, _) in children.into_iter().rev() {
                output.progress(&format!("stopping {name}"));
                process::end_child(&mut child);
            }
            let _ = std::fs::remove_file(run_dir.join("rack.json"));
            return Err(failure);
        }
        output.progress(&format!(
            "rack {} is up after {} ms",
            rack.name,
            begun.elapsed().as_millis()
        ));
        status::show(&client, output).await?;
        drop(starting);
        if self.foreground {
            requests.wait().await;
            crate::commands::down::stop(&run_dir, output)?;
        }
        Ok(())
    }

    /// Starts the processes, each noted in `children` at once: a later one may fail.
    fn start(
        &self,
        rack: &Rack,
        run_dir: &Path,
        children: &mut Vec<StartedProcess>,
    ) -> Result<(), Failure> {
        let folder = run_dir.display().to_string();
        let log = run_dir.join("control.log");
        let metrics = self.metrics.map(|address| address.to_string());
        let mut args = vec!["control", "--run-dir", &folder];
        args.extend(metrics.iter().flat_map(|address| ["--metrics", address]));
        let control = process::start(&args, &log)?;
        children.push(("the control plane".to_owned(), control, log));
        for host in &rack.hosts {
            children.push(start_node(&host.name, run_dir, self.low_latency)?);
        }
        Ok(())
    }
}

/// A process that was started: what it is, to people, and its log.
type StartedProcess = (String, Child, PathBuf);

/// Starts the node of a host.
fn start_node(host: &str, run_dir: &Path, low_latency: bool) -> Result<StartedProcess, Failure> {
    let folder = run_dir.display().to_string();
    paths::make_private(&run_dir.join(host))?;
    let log = run_dir.join(host).join("node.log");
    let mut args = vec!["node", "--host", host, "--run-dir", &folder];
    if low_latency {
        args.push("--low-latency");
    }
    let node = process::start(&args, &log)?;
    Ok((format!("the node of {host}"), node, log))
}

/// Whether the rack's control plane runs.
fn is_up(run_dir: &Path) -> bool {
    process::living(run_dir).iter().any(|process| process.host.is_none())
}

/// Refuses when processes of the rack live: what was started beside them would fail, and cleaning
/// up after that would leave them without a note.
fn check_nothing_runs(rack: &str, run_dir: &Path) -> Result<(), Failure> {
    let living = process::living(run_dir);
    let nodes: Vec<&str> = living.iter().filter_map(|process| process.host.as_deref()).collect();
    if nodes.is_empty() {
        return Ok(());
    }
    let error = format!("nodes of rack {rack} run without a control plane: {}", nodes.join(", "));
    let remedy = format!(
        "start that alone with `rackbus control --run-dir {}`, or stop them with `rackbus down`",
        run_dir.display()
    );
    Err(Failure::new(error, remedy))
}

/// Waits until these hosts are up, or a process ends.
async fn ready(
    client: &ControlClient,
    hosts: &BTreeSet<String>,
    children: &mut [StartedProcess],
    output: &Output,
) -> Result<(), Failure> {
    let deadline = Instant::now() + PATIENCE;
    let mut told = Instant::now();
    loop {
        if let Ok(status) = client.status().await
            && status.hosts.iter().all(|it| it.state == HostState::Up || !hosts.contains(&it.host))
        {
            return Ok(());
        }
        for (name, child, log) in children.iter_mut() {
            if let Ok(Some(code)) = child.try_wait() {
                let text = std::fs::read_to_string(&*log).unwrap_or_default();
                let last =
                    text.lines().rev().find(|l| !l.trim().is_empty()).unwrap_or("it said nothing");
                let error = format!("{name} ended ({code}): {last}");
                return Err(Failure::new(error, format!("see {}", log.display())));
            }
        }
        if Instant::now() > deadline {
            let error = format!("the rack is not up after {PATIENCE:?}");
            return Err(Failure::new(error, "see the logs in its run directory"));
        }
        if told.elapsed() > Duration::from_secs(1) {
            output.progress("waiting for the nodes");
            told = Instant::now();
        }
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
}
