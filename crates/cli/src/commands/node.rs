//! `rackbus node`: one host's node, in the foreground. `up` starts it, `restart` has it go on as another
//! program ([`succession`]).

mod joined;
mod own_devices;
mod succession;

use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use rackbus_control::Client;
use rackbus_devices::Folders;
use rackbus_fabric::pool::{Exported, Pool};
use rackbus_fabric::rack;
use rackbus_fabric::sharing::Rules;
use rackbus_link::Link;
use rackbus_link::shm::ShmLink;
use rackbus_node::{NetworkService, NodeOptions, Program, vfio};
use rackbus_segment::directory::{HostRange, Settings};
use rackbus_vfio::PciAddress;

use crate::Common;
use crate::commands::{named_host, offers};
use crate::output::Failure;
use crate::{log, paths, process};
use succession::{NodeProgram, RackSource};

/// Run the node of one host, in the foreground.
#[derive(Debug, clap::Args)]
#[command(after_help = "Examples:
  rackbus node --host beta --join https://control:7420 --token-file beta.token
  rackbus node --host beta --join https://control:7420 --devices node.toml     with devices of its own
  rackbus node --host beta --join https://control:7420     again: it has its certificate

`rackbus up` starts the nodes of a rack whose hosts are all on this machine.")]
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
    /// Say whether this program can go on as the node that asks.
    #[arg(long, hide = true, conflicts_with = "resume")]
    can_resume: bool,
    /// Go on as the node whose process this is.
    #[arg(long, hide = true, conflicts_with = "join")]
    resume: bool,
    /// A file with devices of this host beside those of the rack file: `[devices.NAME]`, with the keys of the rack file.
    #[arg(long, value_name = "FILE")]
    devices: Option<PathBuf>,
    #[command(flatten)]
    joining: joined::JoinArgs,
}

impl Args {
    pub async fn run(&self, common: &Common) -> Result<(), Failure> {
        if self.can_resume {
            return succession::answer(&self.host);
        }
        process::detach();
        log::start(self.log.as_deref());
        process::make_room();
        let joined = self.joining.join(&self.host, common).await?;
        let run_dir = match &joined {
            Some(joined) => joined.run_dir.clone(),
            None => paths::find_run_dir(common)?,
        };
        let inherited = self.resume.then(succession::inherited).transpose()?;
        let from = match &inherited {
            Some(inherited) => RackSource::carried(inherited.carried())?,
            None => RackSource::running(&run_dir)?,
        };
        let (rack, devices) = from.parse()?;
        named_host(&rack, &self.host)?;
        let state_dir = from.state_dir.join(&self.host);
        let own_machine = joined.is_some();
        let mut held = Vec::new();
        // What the process before held, it holds: it is the same.
        if inherited.is_none() {
            paths::make_private(&run_dir.join(&self.host))?;
            held.push(process::hold(
                &process::pid_file(&run_dir, Some(&self.host)),
                process::runs_already(&format!("the node of {}", self.host)),
            )?);
            held.extend(self.low_latency.then(stay_awake).transpose()?);
            paths::make_private(&state_dir)?;
            held.push(process::own_state(&state_dir)?);
        }
        let rack_dir = from.file.parent().unwrap_or(Path::new("/")).to_owned();
        let topology = rackbus_fabric::derive::here(&rack)
            .map_err(|error| Failure::usage(error.to_string(), "correct the rack file"))?;
        let link: Arc<dyn Link> = match &joined {
            Some(joined) => Arc::new(joined.link.clone()),
            None => {
                let names = rack.hosts.iter().map(|host| host.name.as_str());
                Arc::new(ShmLink::new(&rack.name, &run_dir, names))
            }
        };
        let ports = rackbus_devices::class::ports(&devices);
        let network = NetworkService::new(&rack, &ports, &self.host, link.clone(), !own_machine);
        let term = state_dir.join("control.term");
        let folders = Folders::new(state_dir, rack_dir).with_network(Arc::new(network.clone()));
        let taker = vfio::taker(&self.host, &folders);
        let named = rack.hosts.iter().find(|host| host.name == self.host);
        let named = named.map(|host| host.ntbs.clone()).unwrap_or_default();
        let ntbs = vfio::Ntbs::new(&named).map_err(|error| {
            Failure::usage(error.to_string(), "correct the NTBs' addresses in the rack file")
        })?;
        let ntbs = Arc::new(ntbs);
        // What a former life took, and the rack file does not name any more.
        let own: Vec<PciAddress> = ntbs.addresses().values().copied().collect();
        vfio::give_back(&taker, &vfio::functions_of(&self.host, &devices), &own);
        let program = NodeProgram {
            host: self.host.clone(),
            args: self.again(&run_dir),
            from: from.clone(),
            held,
        };
        let source = from.clone();
        let (host, of, through) = (self.host.clone(), folders.clone(), ntbs.clone());
        let offered = move |device: &str, section: &str| {
            let devices = offers::device(&source.text, &host, device, section)?;
            Ok(rackbus_node::lendable::of_host(&host, &devices, &of, &through))
        };
        let own_file = self.devices.as_deref();
        let own_file = own_file.map(|file| own_devices::read(file, &from.text, &self.host));
        let own_devices = own_file.transpose()?;
        let options = NodeOptions {
            offered: Some(Arc::new(offered)),
            rack: rack.name.clone(),
            host: self.host.clone(),
            devices: rackbus_node::lendable::of_host(&self.host, &devices, &folders, &ntbs),
            ntbs: ntbs.addresses().clone(),
            run_dir,
            link,
            topology,
            segments: segments(&rack, &self.host, own_machine),
            network,
            hold: Duration::from_millis(rack.links.hold_ms),
            log_lines_left_out: log::lines_left_out,
            // What is restarted in place has a link that can be passed on.
            term,
            program: (!own_machine).then(|| Arc::new(program) as Arc<dyn Program>),
        };
        if let Some(own) = own_devices {
            let control = rackbus_node::control_socket(&options.run_dir);
            tokio::spawn(own_devices::offer(Client::new(&control), self.host.clone(), own));
        }
        // They are the node's.
        drop(devices);
        let node = async {
            match inherited {
                Some(inherited) => rackbus_node::resume(options, inherited).await,
                None => rackbus_node::run(options).await,
            }
        };
        let served = async {
            match joined {
                Some(joined) => joined.serve().await,
                None => std::future::pending().await,
            }
        };
        let outcome = tokio::select! {
            outcome = served => outcome,
            outcome = node => outcome.map_err(|error| {
                Failure::new(error.to_string(), "correct the rack file or the device, and start again")
            }),
            () = process::asked_to_end() => Ok(()),
        };
        // Their drivers get them back; what is in use is given up for that.
        if ntbs.close() {
            vfio::give_back(&taker, &[], &[]);
        }
        outcome
    }

    /// The arguments of the program that goes on.
    fn again(&self, run_dir: &Path) -> Vec<OsString> {
        let mut args: Vec<OsString> = vec!["node".into(), "--host".into(), (&self.host).into()];
        args.extend(["--run-dir".into(), run_dir.into()]);
        if self.low_latency {
            args.push("--low-latency".into());
        }
        args.extend(self.devices.iter().flat_map(|file| ["--devices".into(), file.into()]));
        args.extend(self.log.iter().flat_map(|log| ["--log".into(), log.into()]));
        args
    }
}

/// The settings of the host's segment service, from the rack file.
fn segments(rack: &rack::Rack, host: &str, machines: bool) -> Settings {
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
        machines,
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
