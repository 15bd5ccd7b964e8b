//! `rackbus control`: the control plane, in the foreground. `up` starts it.

use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use rackbus_control::metrics::serve_on;
use rackbus_control::service::{Inventory, InventoryDevice, IsNode};
use rackbus_control::{Options, Service, serve};
use rackbus_fabric::rack::Composition;
use rackbus_lease::{Config, Placement};
use rackbus_link::presence::{holder, node_file};

use crate::Common;
use crate::commands::read_devices;
use crate::output::Failure;
use crate::{log, paths, process};

/// Run the control plane, in the foreground.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// The file that stderr goes to, which is exchanged when it has grown.
    #[arg(long, value_name = "FILE")]
    log: Option<PathBuf>,
    /// Serve `/metrics` at this address too, for Prometheus.
    #[arg(long, value_name = "ADDRESS:PORT")]
    metrics: Option<SocketAddr>,
}

impl Args {
    pub async fn run(&self, common: &Common) -> Result<(), Failure> {
        process::detach();
        log::start(self.log.as_deref());
        let run_dir = paths::find_run_dir(common)?;
        let running = paths::running(&run_dir)?;
        let (rack, devices) = read_devices(&running.file)?;
        let _held = process::hold(
            &process::pid_file(&run_dir, None),
            process::runs_already("the control plane"),
        )?;
        paths::make_private(&running.state_dir)?;
        let _state = process::own_state(&running.state_dir)?;
        let offered = devices.iter().filter_map(|device| {
            let function = device.function.parse().ok()?;
            // Devices that only the timing model knows are not there to borrow.
            let config = device.config.as_ref()?;
            let (kind, detail) = (device.kind.to_owned(), config.detail());
            Some(InventoryDevice { function, kind, detail, separable: config.is_separable() })
        });
        let topology = rackbus_fabric::derive::topology(&rack)
            .map_err(|error| Failure::usage(error.to_string(), "correct the rack file"))?;
        let (ttl, close_grace) = (rack.control.lease_ttl_ms, rack.control.return_grace_ms);
        let options = Options {
            inventory: Inventory {
                rack: rack.name.clone(),
                hosts: rack.hosts.iter().map(|h| h.name.clone()).collect(),
                devices: offered.collect(),
                compositions: rack.compositions.iter().filter_map(saved).collect(),
                topology,
            },
            config: Config { ttl, close_grace, silence: ttl.max(15_000), ..Config::default() },
            database: running.state_dir.join("control.db"),
            log_lines_left_out: log::lines_left_out,
            is_node: is_node(&run_dir),
        };
        let failed = |error: String| Failure::new(error, "see to the cause, and start again");
        let service = Service::open(options).map_err(|error| failed(error.to_string()))?;
        let socket = rackbus_node::control_socket(&run_dir);
        tracing::info!(rack = rack.name, "control plane up");
        tokio::select! {
            outcome = scraped(service.clone(), self.metrics) => outcome,
            outcome = serve(service, &socket) => outcome.map_err(|error| failed(error.to_string())),
            () = process::asked_to_end() => Ok(()),
        }
    }
}

/// A composition of the rack file as the control plane knows it.
fn saved(composition: &Composition) -> Option<rackbus_lease::Composition> {
    let functions = composition.functions.iter().map(|function| function.parse().ok());
    Some(rackbus_lease::Composition {
        name: composition.name.clone(),
        borrower: composition.host.clone(),
        functions: functions.collect::<Option<_>>()?,
        placement: if composition.strict { Placement::Borrower } else { Placement::Lender },
    })
}

/// Serves the metrics at a network address, if one is named.
async fn scraped(service: Arc<Service>, address: Option<SocketAddr>) -> Result<(), Failure> {
    let Some(address) = address else { return std::future::pending().await };
    let failed = |error: std::io::Error| {
        let error = format!("metrics cannot be served at {address}: {error}");
        Failure::new(error, "name an address of this machine and a port that is free")
    };
    let listener = tokio::net::TcpListener::bind(address).await.map_err(failed)?;
    serve_on(Arc::new(move || service.metrics()), listener).await.map_err(failed)
}

/// Which process is which host's node: the kernel knows who holds the host's file.
fn is_node(run_dir: &Path) -> IsNode {
    let run_dir = run_dir.to_owned();
    Arc::new(move |host, process| {
        let holder = holder(&node_file(&run_dir, host));
        holder.is_some_and(|holder| holder.as_raw_nonzero().get() == process)
    })
}
