//! `rackbus testbed`: a rack of several machines on this one, to try it and to test it.
//!
//! Those of `rackbus testbed metal` are virtual machines ([`metal`]). Those of `rackbus testbed up` are namespaces:
//! a machine is a network namespace on one bridge, with a mount namespace in which it sees none of the others'
//! files ([`apart`]), and an IPC namespace: what machines have of each other goes over the network. Cables can be pulled.

mod apart;
mod cable;
mod metal;
mod processes;
mod rack;

use std::ffi::OsString;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use rackbus_control::ControlClient;
use rackbus_control::api::HostState;
use rackbus_node::network::namespace_of;
use serde::{Deserialize, Serialize};
use serde_json::json;

use crate::commands::status;
use crate::output::{Failure, Output};
use crate::{paths, process};
use metal::{MetalArgs, TestbedRequest};

/// How long the machines may take to come up.
const PATIENCE: Duration = Duration::from_secs(30);
/// The port of the control plane.
const CONTROL: u16 = 7420;
/// The port of each node.
const NODE: u16 = 7421;
/// The machine of the control plane, beside those of the hosts.
const CONTROL_MACHINE: &str = "control";
/// The namespace of the bridge that joins the machines' network interfaces.
const BRIDGE_MACHINE: &str = "bridge";
/// What hosts are named of which nothing but their number is said; the first one has a drive.
const NAMES: [&str; 8] = ["alpha", "beta", "gamma", "delta", "epsilon", "zeta", "eta", "theta"];
/// Where the files are unless somebody says otherwise.
const DEFAULT_DIR: &str = "/run/rackbus-testbed";
/// The folder's note of what there is.
const NOTE: &str = "testbed.json";

/// A rack of several machines on this one, to try it: network namespaces joined by a bridge. Needs root.
#[derive(Debug, clap::Args)]
#[command(after_help = "Examples:
  rackbus testbed up 3            alpha, which has a drive, beta and gamma
  rackbus testbed up examples/machines/rack.toml
  rackbus testbed up rack.toml --bare c1,c2,c3    these and the hosts, with nothing running on them
  rackbus testbed on beta -- rackbus borrow alpha/nvme0 --for beta
  rackbus testbed cut alpha       its cable is pulled
  rackbus testbed cut alpha --to beta             what alpha sends to beta is lost
  rackbus testbed slow alpha --rate '10 Mbit/s'   what comes faster is dropped
  rackbus testbed mend alpha
  rackbus testbed down
  rackbus testbed metal 3         virtual machines with NTBs between them, until Ctrl-C")]
pub struct Args {
    #[command(subcommand)]
    command: Action,
    /// Where the machines' files are; short, since sockets are there.
    #[arg(long, global = true, value_name = "DIR", default_value = DEFAULT_DIR)]
    dir: PathBuf,
}

#[derive(Debug, clap::Subcommand)]
enum Action {
    /// Start a machine for the control plane and one for each host of a rack.
    Up {
        /// The rack file that describes the hosts, each of which gets a machine; or how many hosts there are: alpha, which
        /// has a drive, beta and so on.
        #[arg(default_value = "rack.toml", value_name = "FILE|NUMBER")]
        file: PathBuf,
        /// Start nothing, and have these machines in the place of the control plane's: `--bare c1,c2,c3`.
        #[arg(long, value_name = "MACHINE,…", value_delimiter = ',')]
        bare: Vec<String>,
    },
    /// Boot virtual machines that stand for physical hosts, each with its end of an NTB in software, until this ends.
    Metal(MetalArgs),
    /// End all machines. Their files stay.
    Down,
    /// Run a program on a machine.
    On {
        /// The host, or `control`.
        machine: String,
        /// The program and its arguments.
        #[arg(last = true, required = true)]
        command: Vec<String>,
    },
    /// Pull a machine's cable.
    Cut {
        /// The host, or `control`.
        machine: String,
        /// Only what it sends to this machine is lost; what that one sends arrives.
        #[arg(long, value_name = "MACHINE")]
        to: Option<String>,
    },
    /// Have a machine's cable pass less, and drop what comes faster.
    Slow {
        /// The host, or `control`.
        machine: String,
        /// What it passes in each direction, as `10 Mbit/s`.
        #[arg(long, value_name = "RATE", value_parser = cable::parse_rate)]
        rate: u32,
    },
    /// Undo `cut` and `slow`.
    Mend {
        /// The host, or `control`.
        machine: String,
    },
    /// End a host's node, or the control plane, at once, as a crash would.
    Kill {
        /// The host, or `control`.
        machine: String,
    },
    /// Start what was killed again.
    Start {
        /// The host, or `control`.
        machine: String,
    },
}

/// The machines of a testbed, as its folder's note has them for later commands.
#[derive(Debug, Serialize, Deserialize)]
struct Testbed {
    rack: String,
    machines: Vec<Machine>,
    /// Whether it has no control plane and no nodes, but those that its user starts.
    #[serde(default)]
    is_bare: bool,
}

#[derive(Debug, Clone, Serialize, Deserialize)]
struct Machine {
    name: String,
    address: String,
    /// The process that holds its namespaces.
    process: i32,
}

/// The network namespace of a machine of `rack`: another one than that of its host's interface in the rack's network.
fn namespace(rack: &str, machine: &str) -> String {
    // No name has the dot, so that no two testbeds have one of these.
    format!("rackbus-testbed-{rack}.{machine}")
}

fn failed(error: impl Into<String>) -> Failure {
    Failure::new(error, "see to the cause; `rackbus testbed down` ends what was begun")
}

/// Runs a program that must succeed.
fn run(program: &str, args: &[&str]) -> Result<(), Failure> {
    let output = Command::new(program).args(args).stdin(Stdio::null()).output();
    let output = output.map_err(|cause| failed(format!("{program}: {cause}")))?;
    if output.status.success() {
        return Ok(());
    }
    let said = String::from_utf8_lossy(&output.stderr);
    Err(failed(format!("{program} {}: {}", args.join(" "), said.trim())))
}

impl Testbed {
    fn load(dir: &Path) -> Result<Testbed, Failure> {
        let text = std::fs::read(dir.join(NOTE)).map_err(|_| {
            let error = format!("there is no testbed in {}", dir.display());
            Failure::new(error, "start one with `rackbus testbed up`")
        })?;
        serde_json::from_slice(&text).map_err(|cause| failed(cause.to_string()))
    }

    fn note(&self, dir: &Path) -> Result<(), Failure> {
        let text = serde_json::to_vec_pretty(self).unwrap_or_default();
        std::fs::write(dir.join(NOTE), text).map_err(|cause| failed(cause.to_string()))
    }

    fn machine(&self, name: &str) -> Result<(usize, &Machine), Failure> {
        let found = self.machines.iter().enumerate().find(|(_, machine)| machine.name == name);
        found.ok_or_else(|| {
            let names: Vec<&str> = self.machines.iter().map(|it| it.name.as_str()).collect();
            Failure::usage(
                format!("there is no machine {name}"),
                format!("there are {}", names.join(", ")),
            )
        })
    }

    /// The name of a machine's network namespace; the bridge has one, too.
    fn namespace(&self, name: &str) -> String {
        namespace(&self.rack, name)
    }

    /// The namespace of the bridge.
    fn bridge(&self) -> String {
        self.namespace(BRIDGE_MACHINE)
    }

    /// Takes the namespaces away, as far as there are any.
    fn part(&self) {
        let machines = self.machines.iter().map(|machine| self.namespace(&machine.name));
        for namespace in machines.chain([self.bridge()]) {
            let _ = run("ip", &["netns", "delete", &namespace]);
        }
        // A machine's own mounts ended with it; the names of what it mounted are in a folder of all. One that is a
        // namespace here is of a rack that runs on this machine itself.
        for machine in &self.machines {
            let name = namespace_of(&self.rack, &machine.name);
            if rackbus_netdev::namespace::open(&name).is_err() {
                let _ = rackbus_netdev::namespace::remove(&name);
            }
        }
    }

    /// The file by which each machine knows all by their names.
    fn hosts_file(&self) -> String {
        let machines = self.machines.iter().map(|it| format!("{} {}\n", it.address, it.name));
        ["127.0.0.1 localhost\n".to_owned()].into_iter().chain(machines).collect()
    }

    /// Has `machine` run for as long as its first process does, which does nothing.
    fn begin(&self, dir: &Path, machine: &Machine) -> Result<i32, Failure> {
        let folder = dir.join(&machine.name);
        std::fs::create_dir_all(&folder).map_err(|cause| failed(cause.to_string()))?;
        std::fs::write(folder.join(apart::HOSTS), self.hosts_file())
            .map_err(|cause| failed(cause.to_string()))?;
        let mut command = Command::new("ip");
        command.args(["netns", "exec", &self.namespace(&machine.name)]);
        command.args(apart::command(dir, &machine.name)?);
        command.args(["sh", "-c", "echo ready && exec sleep infinity"]);
        command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
        // By this `end` finds it where it was not noted any more.
        command.env(paths::RUN_DIR, folder.join("run"));
        // It outlives this command, and a terminal's interrupt is not for it.
        let mut child =
            command.process_group(0).spawn().map_err(|cause| failed(format!("ip: {cause}")))?;
        let mut said = [0; 6];
        let ready =
            child.stdout.take().map(|mut out| std::io::Read::read_exact(&mut out, &mut said));
        if matches!(ready, Some(Ok(()))) {
            return i32::try_from(child.id()).map_err(|error| failed(error.to_string()));
        }
        let output = child.wait_with_output().map_err(|cause| failed(cause.to_string()))?;
        let said = String::from_utf8_lossy(&output.stderr).trim().to_owned();
        Err(failed(format!("machine {} does not start: {said}", machine.name)))
    }

    /// A program on a machine, not started yet.
    fn on(&self, dir: &Path, machine: &Machine, program: impl Into<OsString>) -> Command {
        let mut command = Command::new("nsenter");
        command.args(["--target", &machine.process.to_string(), "--net", "--mount", "--ipc"]);
        command.arg("--").arg(program.into());
        let folder = dir.join(&machine.name);
        command.env(paths::RUN_DIR, folder.join("run"));
        command.env(paths::STATE_DIR, folder.join("state"));
        command
    }

    /// Starts the machine's part of the rack.
    fn start(&self, dir: &Path, machine: &Machine, args: &[&str]) -> Result<(), Failure> {
        let program = std::env::current_exe().map_err(|cause| failed(cause.to_string()))?;
        let log = dir.join(&machine.name).join("log");
        let log = std::fs::File::options().create(true).append(true).open(log);
        let log = log.map_err(|cause| failed(cause.to_string()))?;
        let mut command = self.on(dir, machine, program);
        command.args(args).stdin(Stdio::null()).stdout(Stdio::null()).stderr(log);
        command.process_group(0).spawn().map(drop).map_err(|cause| failed(cause.to_string()))
    }

    fn start_node(&self, dir: &Path, machine: &Machine) -> Result<(), Failure> {
        let url = format!("https://{}:{CONTROL}", self.machines[0].address);
        let listen = format!("{}:{NODE}", machine.address);
        let token = dir.join(&machine.name).join("token").display().to_string();
        let args = ["node", "--host", &machine.name, "--join", &url, "--listen", &listen];
        self.start(dir, machine, &[&args[..], &["--token-file", &token]].concat())
    }

    /// Starts the control plane, and waits until it answers.
    async fn start_control(&self, dir: &Path) -> Result<(), Failure> {
        let control = &self.machines[0];
        let own = dir.join(CONTROL_MACHINE).join("rack.toml").display().to_string();
        let listen = format!("{}:{CONTROL}", control.address);
        self.start(dir, control, &["control", &own, "--listen", &listen])?;
        let (client, begun) = (self.client(dir), Instant::now());
        while client.status().await.is_err() {
            if begun.elapsed() > PATIENCE {
                let log = dir.join(CONTROL_MACHINE).join("log");
                return Err(failed(format!(
                    "the control plane does not start; see {}",
                    log.display()
                )));
            }
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
        Ok(())
    }

    /// A client of the control plane.
    fn client(&self, dir: &Path) -> ControlClient {
        let run_dir = dir.join(CONTROL_MACHINE).join("run");
        ControlClient::new(&rackbus_node::control_socket(&run_dir))
    }
}

impl Args {
    /// Runs the subcommand; `on` returns only when its program cannot be run.
    pub async fn run(&self, output: &Output) -> Result<(), Failure> {
        if !rustix::process::geteuid().is_root() {
            let remedy = "run it as root, or start the rack on this machine with `rackbus up`";
            return Err(Failure::new("network namespaces are root's to make", remedy));
        }
        let dir = std::path::absolute(&self.dir).map_err(|cause| failed(cause.to_string()))?;
        if metal::is_there(&dir) {
            return self.on_metal(&dir, output);
        }
        match &self.command {
            Action::Up { file, bare } => up(&dir, file, bare, output).await,
            Action::Metal(_) if dir.join(NOTE).exists() => Err(taken(&dir)),
            Action::Metal(args) => args.run(&dir, output).await,
            Action::Down => {
                let testbed = Testbed::load(&dir)?;
                processes::end_all(&testbed, &dir);
                testbed.part();
                std::fs::remove_file(dir.join(NOTE)).map_err(|cause| failed(cause.to_string()))?;
                output.result(&json!({ "ended": true }), |o| o.line("the machines have ended"));
                Ok(())
            }
            Action::On { machine, command } => on(&dir, machine, command),
            Action::Cut { machine, to: None } => cable::plug(&dir, machine, "down", output),
            Action::Cut { machine, to: Some(to) } => cable::cut_towards(&dir, machine, to, output),
            Action::Slow { machine, rate } => cable::slow(&dir, machine, *rate, output),
            Action::Mend { machine } => cable::plug(&dir, machine, "up", output),
            Action::Kill { machine } => processes::kill(&dir, machine, output),
            Action::Start { machine } => processes::start(&dir, machine, output).await,
        }
    }
}

impl Args {
    /// The same, of machines that [`MetalArgs`] has booted.
    fn on_metal(&self, dir: &Path, output: &Output) -> Result<(), Failure> {
        let (request, what) = match &self.command {
            Action::Up { .. } | Action::Metal(_) => return Err(taken(dir)),
            Action::On { machine, command } => return metal::on(dir, machine, command, output),
            Action::Down => (TestbedRequest::End, "ended"),
            Action::Slow { .. } | Action::Cut { to: Some(_), .. } => {
                let remedy = "cut it off as a whole, or use `rackbus testbed up`";
                return Err(Failure::new(
                    "virtual machines of a testbed have no such cable",
                    remedy,
                ));
            }
            Action::Cut { machine, to: None } => {
                (TestbedRequest::Cable { machine: machine.clone(), plugged_in: false }, "cut off")
            }
            Action::Mend { machine } => (
                TestbedRequest::Cable { machine: machine.clone(), plugged_in: true },
                "reached again",
            ),
            Action::Kill { machine } => {
                (TestbedRequest::Kill { machine: machine.clone() }, "killed")
            }
            Action::Start { machine } => {
                (TestbedRequest::Start { machine: machine.clone() }, "started")
            }
        };
        metal::request(dir, &request, what, output)
    }
}

fn taken(dir: &Path) -> Failure {
    let error = format!("there is a testbed in {} already", dir.display());
    Failure::new(error, "end it with `rackbus testbed down`, or name another --dir")
}

fn done(output: &Output, machine: &str, what: &str) {
    output.result(&json!({ "machine": machine, "is": what }), |o| {
        o.line(&format!("{machine}: {what}"));
    });
}

async fn up(dir: &Path, asked: &Path, bare: &[String], output: &Output) -> Result<(), Failure> {
    let (rack, text) = rack::asked_for(asked)?;
    if dir.join(NOTE).exists() {
        return Err(taken(dir));
    }
    let names = rack::machine_names(&rack, bare)?;
    let bridge = Path::new("/run/netns").join(namespace(&rack.name, BRIDGE_MACHINE));
    if bridge.exists() {
        let error =
            format!("there is a testbed of rack {} already ({})", rack.name, bridge.display());
        return Err(Failure::new(
            error,
            "end it with `rackbus testbed down`, or give the rack another name",
        ));
    }
    // The machines' nodes have the same names, and would take these for their own.
    let of_rack = |host: &str| rackbus_netdev::namespace::open(&namespace_of(&rack.name, host));
    if let Some(host) = rack.hosts.iter().find(|host| of_rack(&host.name).is_ok()) {
        let error =
            format!("rack {} has a network on this machine already (of {})", rack.name, host.name);
        let remedy = "end it with `rackbus net down`, or give the rack another name";
        return Err(Failure::new(error, remedy));
    }
    paths::make_private(dir)?;
    let machines = (1..).zip(names).map(|(number, name): (u32, String)| Machine {
        name,
        // The rack's network has others.
        address: format!("10.66.{}.{}", number / 250, number % 250),
        process: 0,
    });
    let mut testbed = Testbed {
        rack: rack.name.clone(),
        machines: machines.collect(),
        is_bare: !bare.is_empty(),
    };
    testbed.note(dir)?;
    let mut requests = process::EndRequests::listen();
    let outcome = tokio::select! {
        outcome = begin(&mut testbed, dir, &text, output) => outcome,
        () = requests.wait() => Err(failed("interrupted")),
    };
    if outcome.is_err() {
        processes::end_all(&testbed, dir);
        testbed.part();
        let _ = std::fs::remove_file(dir.join(NOTE));
    }
    outcome
}

async fn begin(
    testbed: &mut Testbed,
    dir: &Path,
    text: &str,
    output: &Output,
) -> Result<(), Failure> {
    cable::lay(testbed)?;
    for number in 0..testbed.machines.len() {
        let process = testbed.begin(dir, &testbed.machines[number])?;
        testbed.machines[number].process = process;
        testbed.note(dir)?;
    }
    let [_, hosts @ ..] = &testbed.machines[..] else {
        return Err(failed("there are no machines"));
    };
    output.progress(&format!("{} machines, joined by a bridge", testbed.machines.len()));
    if testbed.is_bare {
        let addresses: serde_json::Map<_, _> =
            testbed.machines.iter().map(|it| (it.name.clone(), json!(it.address))).collect();
        output.result(&json!({ "machines": addresses }), |o| {
            testbed.machines.iter().for_each(|it| o.line(&format!("{}: {}", it.name, it.address)));
        });
        return Ok(());
    }
    // The rack file is the control plane's own.
    let own = dir.join(CONTROL_MACHINE).join("rack.toml");
    std::fs::write(own, text).map_err(|cause| failed(cause.to_string()))?;
    let begun = Instant::now();
    testbed.start_control(dir).await?;
    let client = testbed.client(dir);
    for host in hosts {
        let token = client.token(&host.name, PATIENCE).await?;
        let path = dir.join(&host.name).join("token");
        std::fs::write(&path, token).map_err(|cause| failed(cause.to_string()))?;
        testbed.start_node(dir, host)?;
    }
    let names: Vec<&str> = hosts.iter().map(|host| host.name.as_str()).collect();
    up_again(&client, &names).await?;
    output.progress(&format!("the rack is up after {} ms", begun.elapsed().as_millis()));
    status::show(&client, output).await
}

/// Waits until these hosts' nodes are connected.
async fn up_again(client: &ControlClient, names: &[&str]) -> Result<(), Failure> {
    let begun = Instant::now();
    loop {
        let hosts = client.status().await?.hosts;
        let is_up = |name: &&str| {
            hosts.iter().any(|host| host.host == **name && host.state == HostState::Up)
        };
        let Some(missing) = names.iter().find(|name| !is_up(name)) else { return Ok(()) };
        if begun.elapsed() > PATIENCE {
            return Err(failed(format!(
                "{missing} has not joined after {PATIENCE:?}; see its log"
            )));
        }
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}

/// Becomes a program on a machine; returns only when that cannot be.
fn on(dir: &Path, machine: &str, command: &[String]) -> Result<(), Failure> {
    let testbed = Testbed::load(dir)?;
    let (_, machine) = testbed.machine(machine)?;
    let [program, arguments @ ..] = command else {
        return Err(Failure::usage("no program is named", "name one after `--`"));
    };
    let cause = testbed.on(dir, machine, program).args(arguments).exec();
    Err(failed(format!("nsenter: {cause}")))
}
