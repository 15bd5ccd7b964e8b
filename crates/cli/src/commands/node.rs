//! `rackbus node`: one host's node, in the foreground. `up` starts it.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use rackbus_devices::Folders;
use rackbus_fabric::pool::{Exported, Pool};
use rackbus_fabric::rack;
use rackbus_fabric::sharing::Rules;
use rackbus_link::shm::ShmLink;
use rackbus_node::NodeOptions;
use rackbus_segment::directory::{HostRange, Settings};

use crate::Common;
use crate::commands::{named_host, read_devices};
use crate::output::Failure;
use crate::{log, paths, process};

/// Run the node of one host, in the foreground.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// The host.
    #[arg(long)]
    host: String,
    /// Hold the processors out of idle states.
    #[arg(long)]
    low_latency: bool,
    /// The file that stderr goes to, which is exchanged when it has grown.
    #[arg(long, value_name = "FILE")]
    log: Option<PathBuf>,
}

impl Args {
    pub async fn run(&self, common: &Common) -> Result<(), Failure> {
        process::detach();
        log::start(self.log.as_deref());
        process::make_room();
        let run_dir = paths::find_run_dir(common)?;
        let running = paths::running(&run_dir)?;
        let (rack, devices) = read_devices(&running.file)?;
        named_host(&rack, &self.host)?;
        paths::make_private(&run_dir.join(&self.host))?;
        let _held = process::hold(
            &process::pid_file(&run_dir, Some(&self.host)),
            process::runs_already(&format!("the node of {}", self.host)),
        )?;
        let _awake = self.low_latency.then(stay_awake).transpose()?;
        let state_dir = running.state_dir.join(&self.host);
        let rack_dir = running.file.parent().unwrap_or(Path::new("/")).to_owned();
        let folders = Folders { state: state_dir.clone(), rack: rack_dir };
        let topology = rackbus_fabric::derive::here(&rack)
            .map_err(|error| Failure::usage(error.to_string(), "correct the rack file"))?;
        let names = rack.hosts.iter().map(|host| host.name.as_str());
        let link = ShmLink::new(&rack.name, &run_dir, names);
        let options = NodeOptions {
            rack: rack.name.clone(),
            host: self.host.clone(),
            devices: rackbus_node::lendable::of_host(&self.host, &devices, &folders),
            run_dir,
            link: Arc::new(link),
            topology,
            segments: segments(&rack, &self.host),
            log_lines_left_out: log::lines_left_out,
        };
        paths::make_private(&state_dir)?;
        let _state = process::own_state(&state_dir)?;
        tokio::select! {
            outcome = rackbus_node::run(options) => outcome.map_err(|error| {
                Failure::new(error.to_string(), "correct the rack file or the device, and start again")
            }),
            () = process::asked_to_end() => Ok(()),
        }
    }
}

/// The settings of the host's segment service, from the rack file.
fn segments(rack: &rack::Rack, host: &str) -> Settings {
    let pool = Pool::of(rack);
    let all = || pool.hosts().iter();
    let range = |exported: &Exported| HostRange { base: exported.base, size: exported.size };
    let here = pool.host(host);
    Settings {
        node: here.map_or(0, |exported| exported.node_id),
        hosts: all().map(|exported| (exported.node_id, exported.host.clone())).collect(),
        range: here.map_or(HostRange { base: 0, size: 0 }, range),
        ranges: all().map(|exported| (exported.node_id, range(exported))).collect(),
        rules: Rules::of(rack),
    }
}

/// While the file is open, processors poll instead of halting (Linux PM QoS).
fn stay_awake() -> Result<std::fs::File, Failure> {
    use std::io::Write;
    const PATH: &str = "/dev/cpu_dma_latency";
    let failed = |cause: std::io::Error| {
        Failure::new(format!("{PATH}: {cause}"), "run as root, or without --low-latency")
    };
    let mut file = std::fs::File::options().write(true).open(PATH).map_err(failed)?;
    file.write_all(&0i32.to_ne_bytes()).map_err(failed)?;
    Ok(file)
}
