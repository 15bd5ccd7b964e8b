//! `rackbus node`: one host's node, in the foreground. `up` starts it, `restart` has it go on as another
//! program ([`succession`]).

mod joined;
mod own_devices;
mod renewal;
mod succession;

use std::ffi::OsString;
use std::fs::File;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use rackbus_control::ControlClient;
use rackbus_devices::{Folders, RackDevice};
use rackbus_fabric::pool::{Exported, MemoryPool};
use rackbus_fabric::sharing::Rules;
use rackbus_fabric::{derive, rack};
use rackbus_link::Link;
use rackbus_link::ntb::NtbLink;
use rackbus_link::shm::ShmLink;
use rackbus_link::tcp::TcpLink;
use rackbus_node::lender::devices::OfferedFunctions;
use rackbus_node::{Lanes, NetworkService, NodeOptions, vfio};
use rackbus_segment::directory::{DirectorySettings, HostRange};
use rackbus_vfio::{PciAddress, VfioError};

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
    /// The host of the rack file that this machine is, or plays.
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
    #[arg(long, hide = true)]
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
            return succession::answer(&self.host, self.devices.as_deref());
        }
        process::detach();
        log::start(self.log.as_deref());
        process::make_room();
        let mut inherited = self.resume.then(succession::inherited).transpose()?;
        let carried = inherited.as_ref().map(|it| RackSource::carried(it.carried())).transpose()?;
        let mut joined = match &carried {
            Some(from) => self.joining.again(&self.host, common, from)?,
            None => self.joining.join(&self.host, common).await?,
        };
        let run_dir = match &joined {
            Some(joined) => joined.run_dir.clone(),
            None => paths::find_run_dir(common)?,
        };
        let (from, held) = self.hold_source(&run_dir, carried, joined.is_some())?;
        let state_dir = from.state_dir.join(&self.host);
        if let Some(joined) = &mut joined {
            joined.listen(inherited.as_mut())?;
        }
        let built = self.build(&from, run_dir, state_dir, joined.as_ref(), held)?;
        if inherited.is_none() {
            built.give_back_unnamed();
        }
        let Built { options, ntbs, through_ntbs, taker, own_devices, .. } = built;
        if let Some(own) = own_devices {
            let control = rackbus_node::control_socket(&options.run_dir);
            tokio::spawn(own_devices::offer(ControlClient::new(&control), self.host.clone(), own));
        }
        let socket = options.run_dir.join(&self.host).join(rackbus_node::metrics::SOCKET);
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
            never = process::ready_at(&socket) => match never {},
            () = process::asked_to_end() => Ok(()),
        };
        if let Some(link) = through_ntbs {
            link.close();
        }
        // Their drivers get them back; what is in use is given up for that.
        if ntbs.close() {
            vfio::give_back(&taker, &[], &[]);
        }
        outcome
    }

    /// What the rack is, and what this process holds to be the host's node in it.
    fn hold_source(
        &self,
        run_dir: &Path,
        carried: Option<RackSource>,
        joined: bool,
    ) -> Result<(RackSource, Vec<File>), Failure> {
        if let Some(carried) = carried {
            // What the process before held, it holds: it is the same.
            return Ok((carried, Vec::new()));
        }
        let from = RackSource::running(run_dir, joined)?;
        let held = self.hold_parts(run_dir, &from.state_dir.join(&self.host))?;
        // Whoever has nodes follow another file notes it, and then looks which nodes there are. What was read before this
        // one was among them may be overtaken.
        Ok((RackSource::running(run_dir, joined)?, held))
    }

    /// Makes this process the host's node and the only user of its state, for as long as the files are open.
    fn hold_parts(&self, run_dir: &Path, state_dir: &Path) -> Result<Vec<File>, Failure> {
        paths::make_private(&run_dir.join(&self.host))?;
        let mut held = vec![process::hold(
            &process::pid_file(run_dir, Some(&self.host)),
            process::runs_already(&format!("the node of {}", self.host)),
        )?];
        held.extend(self.low_latency.then(keep_processors_awake).transpose()?);
        paths::make_private(state_dir)?;
        held.push(process::own_state(state_dir)?);
        Ok(held)
    }

    /// What the node is started with, from the rack file.
    fn build(
        &self,
        from: &RackSource,
        run_dir: PathBuf,
        state_dir: PathBuf,
        joined: Option<&joined::JoinedHost>,
        held: Vec<File>,
    ) -> Result<Built, Failure> {
        let (rack, devices) = from.parse()?;
        let named = named_host(&rack, &self.host)?;
        let own_machine = joined.is_some();
        let rack_dir = from.file.parent().unwrap_or(Path::new("/")).to_owned();
        let topology = match own_machine {
            true => derive::here_of_machines(&rack),
            false => derive::here(&rack),
        };
        let topology =
            topology.map_err(|error| Failure::usage(error.to_string(), "correct the rack file"))?;
        let term = state_dir.join("control.term");
        let folders = Folders::new(state_dir, rack_dir);
        let taker = vfio::taker(&self.host, &folders);
        let ntbs = vfio::Ntbs::new(&named.ntbs).map_err(wrong_ntb)?;
        let ntbs = Arc::new(ntbs);
        let own_file = self.devices.as_deref();
        let own_file = own_file.map(|file| own_devices::read(file, &from.text, &self.host));
        let own_devices = own_file.transpose()?;
        let requests = joined.map(joined::JoinedHost::requests).transpose()?.flatten();
        // Last of what can fail: from here on functions of the machine are taken, and given back when the node ends.
        let through_ntbs = match joined {
            Some(joined) => self.through_ntbs(&rack.name, named, &taker, &joined.link)?,
            None => None,
        };
        let link: Arc<dyn Link> = match (joined, &through_ntbs) {
            (_, Some(link)) => link.clone(),
            (Some(joined), None) => Arc::new(joined.link.clone()),
            (None, None) => {
                let names = rack.hosts.iter().map(|host| host.name.as_str());
                Arc::new(ShmLink::new(&rack.name, &run_dir, names))
            }
        };
        let ports = rackbus_devices::class::ports(&devices);
        let network = NetworkService::new(&rack, &ports, &self.host, link.clone(), own_machine);
        let folders = folders.with_network(Arc::new(network.clone()));
        let (host, args, source) = (self.host.clone(), self.again(&run_dir, joined), from.clone());
        let own = self.devices.clone();
        let program = NodeProgram { host, args, from: source, devices: own, held, requests };
        let options = NodeOptions {
            offered: Some(self.offered(from, &folders, &ntbs)),
            rack: rack.name.clone(),
            host: self.host.clone(),
            devices: rackbus_node::lendable::of_host(&self.host, &devices, &folders, &ntbs),
            ntbs: ntbs.clone(),
            run_dir,
            link,
            topology,
            segments: segments(&rack, &self.host, own_machine),
            network,
            hold: Duration::from_millis(rack.links.hold_ms),
            lanes: Lanes::new(&rack.links.rdma),
            log_lines_left_out: log::lines_left_out,
            term,
            program: Some(Arc::new(program)),
        };
        let link_ntbs: Vec<PciAddress> =
            named.link_ntbs.values().filter_map(|address| address.parse().ok()).collect();
        Ok(Built { options, ntbs, link_ntbs, through_ntbs, taker, devices, own_devices })
    }

    /// The link of a host that some other hosts are joined with by NTBs for it, before the one by TCP; nothing where there is
    /// no such NTB.
    fn through_ntbs(
        &self,
        rack: &str,
        host: &rack::Host,
        taker: &str,
        behind: &TcpLink,
    ) -> Result<Option<Arc<NtbLink>>, Failure> {
        if host.link_ntbs.is_empty() {
            return Ok(None);
        }
        let ntbs = vfio::link_ntbs(&host.link_ntbs, taker).map_err(wrong_ntb)?;
        let link = NtbLink::new(Arc::new(behind.clone()), rack, &self.host, ntbs);
        let link = link.map_err(|cause| {
            Failure::new(
                format!("the link through NTBs: {cause}"),
                "raise the limits of the process",
            )
        })?;
        Ok(Some(Arc::new(link.with_revocations(behind.revocations().clone()))))
    }

    /// Makes the functions of devices that are offered while the node runs.
    fn offered(
        &self,
        from: &RackSource,
        folders: &Folders,
        ntbs: &Arc<vfio::Ntbs>,
    ) -> OfferedFunctions {
        let (host, text) = (self.host.clone(), from.text.clone());
        let (folders, ntbs) = (folders.clone(), ntbs.clone());
        Arc::new(move |device, section| {
            let devices = offers::device(&text, &host, device, section)?;
            Ok(rackbus_node::lendable::of_host(&host, &devices, &folders, &ntbs))
        })
    }

    /// The arguments of the program that goes on.
    fn again(&self, run_dir: &Path, joined: Option<&joined::JoinedHost>) -> Vec<OsString> {
        let mut args: Vec<OsString> = vec!["node".into(), "--host".into(), (&self.host).into()];
        args.extend(["--run-dir".into(), run_dir.into()]);
        if self.low_latency {
            args.push("--low-latency".into());
        }
        args.extend(joined.iter().flat_map(|joined| joined.again.iter().cloned()));
        args.extend(self.devices.iter().flat_map(|file| ["--devices".into(), file.into()]));
        args.extend(self.log.iter().flat_map(|log| ["--log".into(), log.into()]));
        args
    }
}

fn wrong_ntb(error: VfioError) -> Failure {
    Failure::usage(error.to_string(), "correct the NTBs' addresses in the rack file")
}

/// A node that has not been started yet.
struct Built {
    options: NodeOptions,
    ntbs: Arc<vfio::Ntbs>,
    /// The NTBs for the link, and that link.
    link_ntbs: Vec<PciAddress>,
    through_ntbs: Option<Arc<NtbLink>>,
    /// By which name functions of the machine are taken.
    taker: String,
    /// The devices of the rack file.
    devices: Vec<RackDevice>,
    own_devices: Option<own_devices::OwnDevices>,
}

impl Built {
    /// Gives back what a life that has ended took, and nothing names any more. One that goes on has what it took, also where
    /// nobody uses it just now.
    fn give_back_unnamed(&self) {
        let own = self.own_devices.iter().flat_map(|devices| devices.values());
        let named = own.map(|device| &device.functions[..]).chain([&self.devices[..]]);
        let host = &self.options.host;
        let still: Vec<_> = named.flat_map(|devices| vfio::functions_of(host, devices)).collect();
        let own = self.ntbs.addresses().values().chain(&self.link_ntbs);
        let own: Vec<PciAddress> = own.copied().collect();
        vfio::give_back(&self.taker, &still, &own);
    }
}

/// The settings of the host's segment service, from the rack file.
fn segments(rack: &rack::Rack, host: &str, machines: bool) -> DirectorySettings {
    let pool = MemoryPool::of(rack);
    let all = || pool.hosts().iter();
    let range = |exported: &Exported| HostRange { base: exported.base, size: exported.size };
    let here = pool.host(host);
    DirectorySettings {
        node: here.map_or(0, |exported| exported.node_id),
        hosts: all().map(|exported| (exported.node_id, exported.host.clone())).collect(),
        range: here.map_or(HostRange { base: 0, size: 0 }, range),
        ranges: all().map(|exported| (exported.node_id, range(exported))).collect(),
        rules: Rules::of(rack),
        machines,
    }
}

/// While the file is open, processors poll instead of halting (Linux PM QoS).
fn keep_processors_awake() -> Result<File, Failure> {
    use std::io::Write;
    const PATH: &str = "/dev/cpu_dma_latency";
    let failed = |cause: std::io::Error| {
        Failure::new(format!("{PATH}: {cause}"), "run as root, or without --low-latency")
    };
    let mut file = File::options().write(true).open(PATH).map_err(failed)?;
    file.write_all(&0i32.to_ne_bytes()).map_err(failed)?;
    Ok(file)
}
