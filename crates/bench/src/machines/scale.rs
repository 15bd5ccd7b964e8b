//! A control plane with a thousand hosts and twenty thousand functions, over SQLite and over etcd.
//!
//! The hosts are in this process: each has a connection on which it listens, says what the state machines of the lending
//! protocol say, and renews what it has borrowed. So the control plane, its store and all hosts share this machine's processors;
//! nothing is mapped, and nobody opens a function.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use rackbus_control::ControlClient;
use rackbus_control::api::NodeMessages;
use rackbus_identity::{CertificateAuthority, Person, Role, Subject};
use rackbus_lease::{Borrower, BorrowerAction, Lender, LenderAction, Message};
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

use super::failed;
use super::parts::{RunningPart, etcd, first_authority, shown};
use crate::BenchError;
use crate::rack::BenchRack;
use crate::report::Report;

/// Name of the measured rack.
const RACK: &str = "scale";
/// Hosts, and functions of each.
const HOSTS: usize = 1000;
const FUNCTIONS: usize = 20;
/// Who borrows and returns at a time.
const CLIENTS: usize = 64;
/// How often all devices are listed, for the percentiles.
const LISTS: usize = 200;
/// How often a host says that it is there, as a node does.
const HEARTBEAT: Duration = Duration::from_secs(3);
/// How long the hosts may take to register.
const PATIENCE: Duration = Duration::from_secs(60);

/// Where the control plane keeps its state.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum StoreKind {
    Sqlite,
    Etcd,
}

impl StoreKind {
    pub fn name(self) -> &'static str {
        match self {
            StoreKind::Sqlite => "SQLite",
            StoreKind::Etcd => "etcd",
        }
    }
}

/// The rack: its control plane and what it keeps its state in.
struct Lab {
    program: PathBuf,
    dir: PathBuf,
    address: String,
    authority: CertificateAuthority,
    control: RunningPart,
    store: Option<RunningPart>,
}

fn host_name(nth: usize) -> String {
    format!("h{nth}")
}

fn function_name(nth: usize) -> String {
    format!("h{}/d{}", nth / FUNCTIONS, nth % FUNCTIONS)
}

fn rack_file() -> String {
    let mut text = format!("name = \"{RACK}\"\n[control]\nlease_ttl = \"30 s\"\n");
    for host in 0..HOSTS {
        for device in 0..FUNCTIONS {
            text += &format!(
                "[hosts.h{host}.devices.d{device}]\nkind = \"nvme\"\nsize = \"1 MiB\"\nbacking = \"memory\"\n"
            );
        }
    }
    text
}

impl Lab {
    /// `None` where there is no such store, or no `rackbus`.
    fn start(dir: &Path, kind: StoreKind) -> Result<Option<Lab>, BenchError> {
        let Some(program) = BenchRack::find() else { return Ok(None) };
        let dir = dir.join("scale");
        let _ = std::fs::remove_dir_all(&dir);
        std::fs::create_dir_all(&dir).map_err(BenchError::io("making the rack's folder"))?;
        let file = dir.join("rack.toml");
        std::fs::write(&file, rack_file()).map_err(BenchError::io("writing the rack file"))?;
        // Whatever the control plane keeps its state in, its authority is the one that it finds at its first start.
        let authority = first_authority(&dir.join("state"), RACK)?;
        let address = super::network::free_address()?;
        let mut command = Command::new(&program);
        command.arg("--run-dir").arg(dir.join("run")).arg("control").arg(&file);
        command.arg("--state-dir").arg(dir.join("state")).args(["--listen", &address]);
        command.stderr(
            std::fs::File::create(dir.join("log")).map_err(BenchError::io("making a log"))?,
        );
        let mut store = None;
        if kind == StoreKind::Etcd {
            let Some((running, url)) = etcd(&dir)? else { return Ok(None) };
            command.args(["--store", "etcd", "--etcd", &url]);
            store = Some(running);
        }
        let control = RunningPart::start(&mut command)?;
        Ok(Some(Lab { program, dir, address, authority, control, store }))
    }

    fn client(&self, subject: Subject) -> Result<ControlClient, BenchError> {
        let shown = shown(&self.authority, subject)?;
        Ok(ControlClient::with_tls(std::slice::from_ref(&self.address), shown))
    }

    fn person(&self) -> Result<ControlClient, BenchError> {
        let person = Person { user: "bench".to_owned(), role: Role::Operator };
        self.client(Subject::Person(person))
    }
}

/// A host's part of the protocol, until the rack ends.
struct Host {
    name: String,
    client: ControlClient,
    lender: Lender,
    borrower: Borrower,
    begun: Instant,
}

impl Host {
    fn new(name: String, client: ControlClient) -> Host {
        let devices = (0..FUNCTIONS).map(|device| format!("d{device}"));
        let (lender, borrower) = (Lender::new(1, devices), Borrower::new(1));
        Host { name, client, lender, borrower, begun: Instant::now() }
    }

    fn now(&self) -> u64 {
        u64::try_from(self.begun.elapsed().as_millis()).unwrap_or(u64::MAX)
    }

    fn register(&self) -> Message {
        Message::Register {
            incarnation: 1,
            devices: self.lender.newest_epochs(),
            newest_lease: self.lender.newest_lease().max(self.borrower.newest_lease()),
            address: format!("tcp:{}", self.name),
        }
    }

    /// Does what the state machines say at once, and gathers what is to be said.
    fn hear(&mut self, message: Message) -> Vec<Message> {
        let mut said = Vec::new();
        let mut lending = self.lender.receive(self.now(), message.clone());
        while let Some(action) = lending.pop() {
            match action {
                LenderAction::Arm { device, epoch, .. } => {
                    lending.extend(self.lender.arm_done(&device, epoch, Ok(())));
                }
                LenderAction::Revoke { device, epoch, .. } => {
                    lending.extend(self.lender.revoke_done(&device, epoch));
                }
                LenderAction::Send(message) => said.push(message),
                _ => {}
            }
        }
        let mut borrowing = self.borrower.receive(self.now(), message);
        while let Some(action) = borrowing.pop() {
            match action {
                BorrowerAction::Open(grant) => {
                    let outcome = Ok("/nowhere".to_owned());
                    borrowing.extend(self.borrower.open_done(grant.lease, outcome));
                }
                BorrowerAction::Close { lease, .. }
                | BorrowerAction::Cut { lease, .. }
                | BorrowerAction::Yield { lease, .. } => {
                    borrowing.extend(self.borrower.close_done(lease));
                }
                BorrowerAction::Hasten { .. } => {}
                BorrowerAction::Send(message) => said.push(message),
            }
        }
        said
    }

    async fn say(&self, messages: Vec<Message>) {
        if !messages.is_empty() {
            // What is lost, the protocol says again.
            let _ = self.client.say(&self.name, &NodeMessages { messages, report: None }).await;
        }
    }

    async fn run(mut self, registered: Arc<AtomicU64>) {
        loop {
            let Ok(mut lines) = self.client.listen(&self.name, 0).await else {
                tokio::time::sleep(Duration::from_millis(200)).await;
                continue;
            };
            self.say(vec![self.register()]).await;
            let mut known = false;
            let mut beat =
                tokio::time::interval_at(tokio::time::Instant::now() + HEARTBEAT, HEARTBEAT);
            loop {
                tokio::select! {
                    line = lines.next() => {
                        let Some(line): Option<rackbus_control::said::NodeLine> = line else { break };
                        let Some(message) = line.message else { continue };
                        if matches!(message, Message::Registered { .. }) && !known {
                            known = true;
                            registered.fetch_add(1, Ordering::Relaxed);
                        }
                        let said = self.hear(message);
                        self.say(said).await;
                    }
                    _ = beat.tick() => {
                        let now = self.now();
                        let mut said = vec![self.register()];
                        let renewed = self.borrower.tick(now).into_iter();
                        said.extend(renewed.filter_map(|action| match action {
                            BorrowerAction::Send(message) => Some(message),
                            _ => None,
                        }));
                        self.say(said).await;
                    }
                }
            }
        }
    }
}

/// What was measured in one time.
struct Measured {
    /// Borrowed and returned in a second.
    rate: f64,
    /// Milliseconds of both together: median and 99th percentile.
    took: (f64, f64),
    refused: u64,
}

/// Borrows and returns by as many as there are, for so long.
async fn borrow_and_return(
    clients: &[ControlClient],
    time: Duration,
) -> Result<Measured, BenchError> {
    let (stop, refused) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicU64::new(0)));
    let begun = Instant::now();
    let tasks: Vec<_> = (0..CLIENTS)
        .map(|nth| {
            let client = clients[nth % clients.len()].clone();
            let (stop, refused) = (stop.clone(), refused.clone());
            tokio::spawn(async move {
                let mut took = Vec::new();
                // No two borrow the same one, and all hosts lend and borrow.
                let mut at = nth;
                while !stop.load(Ordering::Relaxed) {
                    let function = function_name(at % (HOSTS * FUNCTIONS));
                    let host = host_name((at * 7 + 3) % HOSTS);
                    at += CLIENTS;
                    let begun = Instant::now();
                    let done = async {
                        let lease = client.borrow(&function, &host).await?;
                        client.give_back(lease.lease).await
                    };
                    match done.await {
                        Ok(_) => took.push(begun.elapsed().as_secs_f64() * 1e3),
                        Err(_) => drop(refused.fetch_add(1, Ordering::Relaxed)),
                    }
                }
                took
            })
        })
        .collect();
    tokio::time::sleep(time).await;
    stop.store(true, Ordering::Relaxed);
    let mut took = Vec::new();
    for task in tasks {
        took.extend(task.await.map_err(failed)?);
    }
    let rate = took.len() as f64 / begun.elapsed().as_secs_f64();
    let refused = refused.load(Ordering::Relaxed);
    Ok(Measured { rate, took: percentiles(took), refused })
}

/// The median and the 99th percentile.
fn percentiles(mut values: Vec<f64>) -> (f64, f64) {
    values.sort_by(f64::total_cmp);
    let at = |part: f64| {
        let last = values.len().saturating_sub(1);
        values.get(((last as f64) * part).round() as usize).copied().unwrap_or(f64::NAN)
    };
    (at(0.5), at(0.99))
}

/// Milliseconds that `rackbus devices --json` takes as a process, and what its answer takes of that.
async fn list(lab: &Lab, client: &ControlClient) -> Result<[(f64, f64); 2], BenchError> {
    let (mut commands, mut answers) = (Vec::new(), Vec::new());
    for _ in 0..LISTS {
        let begun = Instant::now();
        let mut command = tokio::process::Command::new(&lab.program);
        command.arg("--run-dir").arg(lab.dir.join("run")).args(["devices", "--json"]);
        command.stdin(Stdio::null());
        let output = command.output().await.map_err(BenchError::io("running rackbus"))?;
        commands.push(begun.elapsed().as_secs_f64() * 1e3);
        if !output.status.success() {
            return Err(failed(String::from_utf8_lossy(&output.stderr)));
        }
        let begun = Instant::now();
        let devices = client.devices().await.map_err(failed)?;
        answers.push(begun.elapsed().as_secs_f64() * 1e3);
        if devices.len() != HOSTS * FUNCTIONS {
            return Err(failed(format!("{} devices are listed", devices.len())));
        }
    }
    Ok([percentiles(commands), percentiles(answers)])
}

async fn measure(
    lab: &Lab,
    time: Duration,
    say: &mut (dyn FnMut(String) + Send),
) -> Result<(), BenchError> {
    let begun = Instant::now();
    let registered = Arc::new(AtomicU64::new(0));
    let mut hosts = tokio::task::JoinSet::new();
    for nth in 0..HOSTS {
        let name = host_name(nth);
        let client = lab.client(Subject::Node(name.clone()))?;
        hosts.spawn(Host::new(name, client).run(registered.clone()));
    }
    while registered.load(Ordering::Relaxed) < HOSTS as u64 {
        if begun.elapsed() > PATIENCE {
            return Err(failed(format!("{registered:?} of {HOSTS} hosts registered")));
        }
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    say(format!("{HOSTS} hosts registered in {:.1} s", begun.elapsed().as_secs_f64()));
    let mut clients = Vec::new();
    for _ in 0..CLIENTS / 4 {
        clients.push(lab.person()?);
    }
    let mut rows: BTreeMap<&str, Vec<f64>> = BTreeMap::new();
    for _ in 0..5 {
        let (processor, _) = lab.control.used()?;
        let stored = lab.store.as_ref().map(RunningPart::used).transpose()?;
        let begun = Instant::now();
        let measured = borrow_and_return(&clients, time).await?;
        let wall = begun.elapsed().as_secs_f64();
        let (after, memory) = lab.control.used()?;
        rows.entry("a second").or_default().push(measured.rate);
        rows.entry("ms, median").or_default().push(measured.took.0);
        rows.entry("ms, 99th percentile").or_default().push(measured.took.1);
        rows.entry("processors of the control plane").or_default().push((after - processor) / wall);
        rows.entry("MiB of the control plane").or_default().push((memory >> 20) as f64);
        rows.entry("refused").or_default().push(measured.refused as f64);
        if let (Some(store), Some((before, _))) = (&lab.store, stored) {
            let (now, memory) = store.used()?;
            rows.entry("processors of etcd").or_default().push((now - before) / wall);
            rows.entry("MiB of etcd").or_default().push((memory >> 20) as f64);
        }
    }
    for (what, values) in rows {
        let (least, most) = values.iter().fold((f64::MAX, f64::MIN), |(least, most), value| {
            (least.min(*value), most.max(*value))
        });
        let median = crate::report::median(&values);
        say(format!("borrow and return, {what}: {median:.2} ({least:.2} to {most:.2})"));
    }
    let client = lab.person()?;
    let [command, answer] = list(lab, &client).await?;
    say(format!("devices --json: {:.1} ms, 99th percentile {:.1}", command.0, command.1));
    say(format!("the answer alone, over TLS: {:.1} ms, 99th percentile {:.1}", answer.0, answer.1));
    hosts.shutdown().await;
    Ok(())
}

/// Measures a control plane with this store, and says what came of it.
///
/// # Errors
/// When the control plane fails, or not all hosts are let in.
pub fn run(
    dir: &Path,
    kind: StoreKind,
    time: Duration,
    report: &mut Report,
) -> Result<(), BenchError> {
    let limit = getrlimit(Resource::Nofile);
    setrlimit(Resource::Nofile, Rlimit { current: limit.maximum, ..limit })
        .map_err(|error| failed(format!("descriptors: {error}")))?;
    let name = kind.name();
    let Some(lab) = Lab::start(dir, kind)? else {
        report
            .note(&format!("control plane over {name}: left out, there is no rackbus or no etcd"));
        return Ok(());
    };
    let mut runtime = tokio::runtime::Builder::new_multi_thread();
    let runtime = runtime.worker_threads(2).enable_all().build();
    let runtime = runtime.map_err(BenchError::io("starting a runtime"))?;
    let mut lines = Vec::new();
    let mut say = |line: String| lines.push(line);
    let measured = runtime.block_on(measure(&lab, time, &mut say));
    for line in lines {
        report.note(&format!(
            "control plane over {name}, {HOSTS} hosts, {FUNCTIONS} functions each: {line}"
        ));
    }
    measured
}
