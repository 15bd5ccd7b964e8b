//! `rackbus control`: the control plane, in the foreground. `up` starts it. [`cluster`]: one of several. [`ca`]: its certificate authority.
//! [`moving`]: its state as a whole. [`status`]: which of several leads.

mod ca;
mod cluster;
mod moving;
mod status;

use std::net::{Ipv6Addr, SocketAddr};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use rackbus_control::authorities::{
    self, ControlCredentials, ControlPlanesSource, KnownAuthorities,
};
use rackbus_control::machines::{self, Joining};
use rackbus_control::metrics::{MetricsSource, serve_on};
use rackbus_control::register::AuthoritySet;
use rackbus_control::service::{IsNode, ReadFile};
use rackbus_control::{Service, ServiceOptions, serve};
use rackbus_devices::class::parse_rack;
use rackbus_fabric::rack::Rack;
use rackbus_identity::{CertificateAuthority, Renewed, Subject, Tokens};
use rackbus_lease::Config;
use rackbus_link::presence::{holder, node_file};
use tokio::sync::watch;

use crate::Common;
use crate::commands::metrics::check_address;
use crate::commands::{misread, offers, read_devices};
use crate::output::{Failure, Output};
use crate::paths::RunningRack;
use crate::{log, paths, process};

/// Run the control plane, in the foreground.
#[derive(Debug, clap::Args)]
#[command(
    args_conflicts_with_subcommands = true,
    after_help = "Examples:
  rackbus control rack.toml --listen 0.0.0.0:7420     a rack whose hosts are machines
  rackbus token beta >beta.token                      lets the machine of host beta join
  rackbus control rack.toml --listen 10.0.0.1:7420 --store etcd --etcd https://e1:2379,https://e2:2379 \
    --etcd-ca ca.pem --etcd-cert control.pem --etcd-key control.key      one of several, of which one leads

`rackbus up` starts a rack whose hosts are all on this machine, with its control plane."
)]
pub struct Args {
    #[command(subcommand)]
    command: Option<Command>,
    /// The rack file; that of the rack which runs in the run directory unless named.
    file: Option<PathBuf>,
    /// Serve nodes on other machines at this address, over TLS.
    #[arg(long, value_name = "ADDRESS:PORT")]
    listen: Option<SocketAddr>,
    /// Where the state is kept: a file of this machine, or etcd, which several control planes share.
    #[arg(long, value_enum, default_value = "sqlite", requires_if("etcd", "listen"))]
    store: StoreKind,
    #[command(flatten)]
    etcd: cluster::EtcdArgs,
    /// Where nodes and the other control planes reach this one; the address that it listens at unless named.
    #[arg(long, value_name = "HOST:PORT", requires = "listen")]
    advertise: Option<String>,
    /// After how many seconds without an answer of etcd's the leader is another one.
    #[arg(long, value_name = "SECONDS", default_value_t = 3, value_parser = clap::value_parser!(u64).range(2..=60))]
    leader_ttl: u64,
    /// Where the database and the rack's certificate authority are kept.
    #[arg(long, value_name = "DIR", env = paths::STATE_DIR)]
    state_dir: Option<PathBuf>,
    /// The file that stderr goes to, which is exchanged when it has grown.
    #[arg(long, value_name = "FILE")]
    log: Option<PathBuf>,
    /// Serve `/metrics` without TLS too, at this address of this machine alone, for Prometheus.
    #[arg(long, value_name = "ADDRESS:PORT")]
    metrics: Option<SocketAddr>,
}

#[derive(Debug, clap::Subcommand)]
enum Command {
    /// Replace the rack's certificate authority, step by step.
    #[command(subcommand)]
    Ca(ca::AuthorityCommand),
    Status(status::Args),
    Migrate(moving::MigrateArgs),
    Backup(moving::BackupArgs),
    Restore(moving::RestoreArgs),
}

/// What the state is kept in.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
enum StoreKind {
    Sqlite,
    Etcd,
}

impl Args {
    pub async fn run(&self, common: &Common, output: &Output) -> Result<(), Failure> {
        match &self.command {
            Some(Command::Ca(command)) => command.run(common, output).await,
            Some(Command::Status(args)) => args.run(common, output).await,
            Some(Command::Migrate(args)) => args.run(common, output).await,
            Some(Command::Backup(args)) => args.run(common, output).await,
            Some(Command::Restore(args)) => args.run(output).await,
            None => self.serve(common).await,
        }
    }

    async fn serve(&self, common: &Common) -> Result<(), Failure> {
        check_address(self.metrics)?;
        process::detach();
        log::start(self.log.as_deref());
        let (run_dir, running, is_new) = self.place(common)?;
        let text = running.text()?;
        let (rack, devices) =
            parse_rack(&running.file.display().to_string(), &text).map_err(misread)?;
        // Before this process holds anything there: who looks at a lock of his own releases it.
        paths::check_not_joined(&run_dir)?;
        let _held = process::hold(
            &process::pid_file(&run_dir, None),
            process::runs_already("the control plane"),
        )?;
        // Not before: where one runs, its note is what others go by.
        if is_new {
            running.note(&run_dir)?;
        }
        paths::make_private(&running.state_dir)?;
        let _state = process::own_state(&running.state_dir)?;
        let apart = self.listen.is_some();
        let inventory = offers::inventory(&rack, &devices, &text, apart)
            .map_err(|error| Failure::usage(error, "correct the rack file"))?;
        let (ttl, close_grace) = (rack.control.lease_ttl_ms, rack.control.return_grace_ms);
        let (silence, strict_ttl) = (ttl.max(15_000), rack.control.strict_ttl);
        let options = ServiceOptions {
            inventory,
            read_rack: Some(offers::reader(text.clone(), apart)),
            // Machines have the file that the control plane gave them when their nodes started.
            read_file: (!apart).then(|| -> ReadFile {
                Arc::new(|text: &str| offers::reader(text.to_owned(), false))
            }),
            config: Config { ttl, close_grace, silence, strict_ttl, ..Config::default() },
            database: running.state_dir.join("control.db"),
            log_lines_left_out: log::lines_left_out,
            is_node: is_node(&run_dir),
        };
        let socket = rackbus_node::control_socket(&run_dir);
        if let (StoreKind::Etcd, Some(listen)) = (self.store, self.listen) {
            let (cluster, keys) = (self.etcd.cluster()?, self.etcd.keys(&rack.name));
            let shared = cluster::ClusterOptions {
                rack: &rack,
                text,
                options,
                cluster,
                keys,
                ttl: self.leader_ttl,
                state_dir: &running.state_dir,
                socket,
                listen,
                advertise: self.advertise.clone(),
                metrics: self.metrics,
            };
            return shared.serve().await;
        }
        self.serve_alone(options, (&rack, text), &running.state_dir, &socket).await
    }

    /// Serves a rack whose only control plane this is, until asked to end.
    async fn serve_alone(
        &self,
        options: ServiceOptions,
        (rack, text): (&Rack, String),
        state_dir: &Path,
        socket: &Path,
    ) -> Result<(), Failure> {
        let failed = |error: String| Failure::new(error, "see to the cause, and start again");
        let service = Service::open(options).map_err(|error| failed(error.to_string()))?;
        let counted = service.clone();
        let scraped = scraped(Arc::new(move || counted.metrics()), self.metrics);
        tracing::info!(rack = rack.name, "control plane up");
        let served = async {
            match self.listen {
                None => serve(service, socket).await.map_err(|error| failed(error.to_string())),
                Some(listen) => {
                    let stored = service.authorities();
                    let machines = Machines::open(rack, text, state_dir, listen, stored).await?;
                    let Machines { listener, joining, credentials } = machines;
                    let revocations = service.revocations().clone();
                    let routes = machines::all_routes(service, joining);
                    let served =
                        machines::serve(routes, socket, listener, credentials, revocations);
                    served.await.map_err(|error| failed(error.to_string()))
                }
            }
        };
        tokio::select! {
            outcome = scraped => outcome,
            outcome = served => outcome,
            never = process::ready_at(socket) => match never {},
            () = process::asked_to_end() => Ok(()),
        }
    }

    /// The run directory, and what is in it: noted by who started the rack, or not yet where a file is named.
    fn place(&self, common: &Common) -> Result<(PathBuf, RunningRack, bool), Failure> {
        let Some(file) = &self.file else {
            let run_dir = paths::find_run_dir(common)?;
            let running = paths::running(&run_dir)?;
            return Ok((run_dir, running, false));
        };
        let (rack, _) = read_devices(file)?;
        let run_dir = paths::make_run_dir(common, &rack.name)?;
        paths::check_lengths(&rack, &run_dir)?;
        let state_dir = paths::state_dir(self.state_dir.as_deref(), &rack.name)?;
        let running = RunningRack::of(&rack, file, &state_dir)?;
        Ok((run_dir, running, true))
    }
}

/// What a control plane has for nodes on other machines.
struct Machines {
    listener: tokio::net::TcpListener,
    joining: Arc<Joining>,
    credentials: Renewed,
}

impl Machines {
    async fn open(
        rack: &Rack,
        text: String,
        state_dir: &Path,
        listen: SocketAddr,
        stored: watch::Receiver<Option<AuthoritySet>>,
    ) -> Result<Machines, Failure> {
        let hosts = certified_hosts(rack)?;
        let folder = state_dir.join("identity");
        paths::make_private(&folder)?;
        let failed = |error: String| Failure::new(error, "see to the state directory");
        let authority =
            CertificateAuthority::open(&folder, &rack.name).map_err(|e| failed(e.to_string()))?;
        let known = KnownAuthorities::new(&authority).map_err(|e| failed(e.to_string()))?;
        let known = Arc::new(known);
        let credentials = own_credentials(&known, stored.borrow().as_ref())?;
        let tokens = Tokens::open(&folder, authority.fingerprint());
        let tokens = tokens.map_err(|e| failed(e.to_string()))?;
        tokio::spawn(authorities::renew(known.clone(), stored, credentials.clone()));
        let listener = listen_at(listen).await?;
        let own = own_address(&listener);
        let source = ControlPlanesSource {
            addresses: Arc::new(move || own.iter().cloned().collect()),
            tls: machines::tls_of(&credentials.asking),
        };
        let joining = Joining::new(known, tokens, hosts, text).with_control_planes(source);
        let credentials = credentials.serving;
        Ok(Machines { listener, joining: Arc::new(joining), credentials })
    }
}

/// The hosts of a rack whose hosts are machines.
fn certified_hosts(rack: &Rack) -> Result<Vec<String>, Failure> {
    let hosts: Vec<String> = rack.hosts.iter().map(|host| host.name.clone()).collect();
    match hosts.iter().find(|host| !Subject::Node((*host).clone()).is_valid()) {
        None => Ok(hosts),
        Some(host) => Err(Failure::usage(
            format!("host {host} cannot have a certificate of its name"),
            "name hosts on machines of their own with lower-case letters, digits and `-`",
        )),
    }
}

async fn listen_at(listen: SocketAddr) -> Result<tokio::net::TcpListener, Failure> {
    tokio::net::TcpListener::bind(listen).await.map_err(|error| {
        let error = format!("nodes cannot be listened to at {listen}: {error}");
        Failure::new(error, "name an address of this machine and a port that is free")
    })
}

/// Where this machine reaches what listens there.
fn own_address(listener: &tokio::net::TcpListener) -> Option<String> {
    let mut own = listener.local_addr().ok()?;
    if own.ip().is_unspecified() {
        own.set_ip(if own.is_ipv4() { [127, 0, 0, 1].into() } else { Ipv6Addr::LOCALHOST.into() });
    }
    Some(own.to_string())
}

/// The control plane's own credentials in a rack with these authorities.
fn own_credentials(
    known: &KnownAuthorities,
    stored: Option<&AuthoritySet>,
) -> Result<ControlCredentials, Failure> {
    ControlCredentials::new(known, stored).map_err(|error| {
        Failure::new(error.to_string(), "see to the store: the rack's authority is in it")
    })
}

/// Serves the metrics at a network address, if one is named.
async fn scraped(counted: MetricsSource, address: Option<SocketAddr>) -> Result<(), Failure> {
    let Some(address) = address else { return std::future::pending().await };
    let failed = |error: std::io::Error| {
        let error = format!("metrics cannot be served at {address}: {error}");
        Failure::new(error, "name an address of this machine and a port that is free")
    };
    let listener = tokio::net::TcpListener::bind(address).await.map_err(failed)?;
    serve_on(counted, listener).await.map_err(failed)
}

/// Which process is which host's node: the kernel knows who holds the host's file.
fn is_node(run_dir: &Path) -> IsNode {
    let run_dir = run_dir.to_owned();
    Arc::new(move |host, process| {
        let holder = holder(&node_file(&run_dir, host));
        holder.is_some_and(|holder| holder.as_raw_nonzero().get() == process)
    })
}
