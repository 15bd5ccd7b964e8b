//! `rackbus net`: the network between the hosts of the rack.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::time::Duration;

use rackbus_control::network::{CaptureRequest, NetworkStatus, PeerStatus, PortStatus};
use rackbus_control::{ControlClient, ControlClientError};
use rackbus_fabric::rack::format_size;

use crate::Common;
use crate::commands::named_host;
use crate::output::{Cell, Failure, Output, Tone};
use crate::paths::{find_run_dir, running};

/// Learned addresses of a port that a table has.
const SHOWN_ADDRESSES: usize = 4;

/// Join the hosts of the rack by a network through the fabric's memory.
#[derive(Debug, clap::Args)]
pub struct Args {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, clap::Subcommand)]
enum Command {
    Up(UpArgs),
    Down(DownArgs),
    Status(StatusArgs),
    Capture(CaptureArgs),
}

/// Give hosts an interface in the rack's network, each in a network namespace of its own.
#[derive(Debug, clap::Args)]
#[command(after_help = "Examples:
  rackbus net up                       every host of the rack
  rackbus net up alpha beta            these
  rackbus on beta -- iperf3 -s         a program in beta's namespace

Addresses, neighbours and the MTU come from the rack file's [network] section. An interface stays until
`rackbus net down` or `rackbus down`; a node that starts anew makes it again. Needs root.
Where hosts are machines, `rackbus net up` on each of them.")]
struct UpArgs {
    /// The hosts; without any, all of the rack whose nodes run on this machine.
    #[arg(value_name = "HOST")]
    hosts: Vec<String>,
}

/// Take hosts' interfaces and namespaces away.
#[derive(Debug, clap::Args)]
#[command(after_help = "Examples:
  rackbus net down
  rackbus net down beta")]
struct DownArgs {
    /// The hosts; without any, all of the rack whose nodes run on this machine.
    #[arg(value_name = "HOST")]
    hosts: Vec<String>,
}

/// Show ports, what they exchange, and which frames were dropped for which cause.
#[derive(Debug, clap::Args)]
#[command(after_help = "Examples:
  rackbus net status
  rackbus net status alpha --json")]
struct StatusArgs {
    /// The hosts; without any, all of the rack whose nodes run on this machine.
    #[arg(value_name = "HOST")]
    hosts: Vec<String>,
}

/// Write the frames of a port into a file for Wireshark, until interrupted.
#[derive(Debug, clap::Args)]
#[command(after_help = "Examples:
  rackbus net capture alpha -w alpha.pcapng
  rackbus net capture alpha/nic0.vf2 -w vf2.pcapng --frames 1000
  rackbus net capture beta -w beta.pcapng --time 10s

The port's node writes the file. Large segments are shown as they cross the fabric: in one piece.")]
struct CaptureArgs {
    /// The port: a host, or HOST/FUNCTION.
    port: String,
    /// Where the capture is written, as pcapng.
    #[arg(short, long, value_name = "FILE")]
    write: PathBuf,
    /// End after so many frames.
    #[arg(long, value_name = "N")]
    frames: Option<u64>,
    /// End after this time.
    #[arg(long, value_name = "TIME")]
    time: Option<humantime::Duration>,
}

impl Args {
    pub async fn run(&self, common: &Common, output: &Output) -> Result<(), Failure> {
        match &self.command {
            Command::Up(args) => set(common, output, &args.hosts, true).await,
            Command::Down(args) => set(common, output, &args.hosts, false).await,
            Command::Status(args) => status(common, output, &args.hosts).await,
            Command::Capture(args) => args.run(common, output).await,
        }
    }
}

/// The hosts that are meant, each with a client of its node.
fn nodes(common: &Common, hosts: &[String]) -> Result<Vec<(String, ControlClient)>, Failure> {
    let run_dir = find_run_dir(common)?;
    let rack = running(&run_dir)?.rack()?;
    let client = |host: &str| {
        let socket = run_dir.join(host).join(rackbus_node::metrics::SOCKET);
        (host.to_owned(), ControlClient::new(&socket))
    };
    if hosts.is_empty() {
        // Where hosts are machines, each has its own folder alone.
        let is_here = |host: &str| run_dir.join(host).is_dir();
        let here = rack.hosts.iter().filter(|host| is_here(&host.name));
        let here: Vec<_> = here.map(|host| client(&host.name)).collect();
        return match here.is_empty() {
            false => Ok(here),
            true => Err(Failure::new(
                "no node of the rack runs on this machine",
                "run this on the machine of the host that you mean",
            )),
        };
    }
    hosts.iter().map(|name| Ok(client(&named_host(&rack, name)?.name))).collect()
}

fn silent(host: &str, error: ControlClientError) -> Failure {
    match error {
        ControlClientError::Unreachable { .. } => Failure::new(
            format!("the node of {host} does not answer"),
            "look with `rackbus status`; where hosts are machines, run this on the host's own",
        ),
        other => other.into(),
    }
}

async fn set(common: &Common, output: &Output, hosts: &[String], up: bool) -> Result<(), Failure> {
    let mut all = Vec::new();
    for (host, client) in nodes(common, hosts)? {
        all.push(client.set_network(up).await.map_err(|error| silent(&host, error))?);
    }
    output.result(&all, |o| {
        let rows = all.iter().map(|it| {
            let port = it.ports.iter().find(|port| port.port == it.host);
            let of = |part: fn(&PortStatus) -> &String| port.map(part).cloned().unwrap_or_default();
            vec![
                it.host.clone().into(),
                state(it),
                of(|port| &port.ipv4).into(),
                of(|port| &port.ipv6).into(),
                it.mtu.to_string().into(),
                it.namespace.clone().into(),
            ]
        });
        let head = ["host", "interface", "ipv4", "ipv6", "mtu", "namespace"];
        o.table(&head, rows.collect());
    });
    Ok(())
}

fn state(status: &NetworkStatus) -> Cell {
    match status.up {
        true => Cell("up".to_owned(), Tone::Good),
        false => Cell("down".to_owned(), Tone::Plain),
    }
}

async fn status(common: &Common, output: &Output, hosts: &[String]) -> Result<(), Failure> {
    let mut all = Vec::new();
    for (host, client) in nodes(common, hosts)? {
        match client.network().await {
            Ok(status) => all.push(status),
            // The others' figures say what became of what was for it.
            Err(ControlClientError::Unreachable { .. }) if hosts.is_empty() => {
                output.progress(&format!("the node of {host} does not answer"));
            }
            Err(error) => return Err(silent(&host, error)),
        }
    }
    output.result(&all, |o| {
        let ports = || all.iter().flat_map(|it| it.ports.iter().map(move |port| (it, port)));
        if ports().next().is_none() {
            return o.line("no host has its interface up; see `rackbus net up`");
        }
        let head = ["port", "address", "mac", "mtu", "queues", "polling", "dropped"];
        o.table(&head, ports().map(|(it, port)| port_row(it, port)).collect());
        let vlans: Vec<_> = ports().filter_map(|(_, port)| vlan_row(port)).collect();
        if !vlans.is_empty() {
            o.line("");
            o.table(&["port", "vlan", "tagged vlans", "learned addresses"], vlans);
        }
        let of_host = |it: &NetworkStatus| -> Vec<Vec<Cell>> {
            let row = |(name, state): (&String, &String)| {
                let way = it.uplink_ways.get(name).cloned().unwrap_or_default();
                vec![name.clone().into(), state.clone().into(), way.into()]
            };
            it.uplinks.iter().map(row).collect()
        };
        let uplinks: Vec<_> = all.iter().flat_map(of_host).collect();
        if !uplinks.is_empty() {
            o.line("");
            o.table(&["uplink", "state", "by"], uplinks);
        }
        let pairs: Vec<_> =
            ports().flat_map(|(_, port)| port.peers.iter().map(|it| pair_row(port, it))).collect();
        if !pairs.is_empty() {
            o.line("");
            let head =
                ["from", "to", "by", "sent", "bytes", "received", "bytes", "ring", "dropped"];
            o.table(&head, pairs);
        }
    });
    Ok(())
}

/// The VLANs of a port and what is behind it, where there is anything to say.
fn vlan_row(port: &PortStatus) -> Option<Vec<Cell>> {
    if port.vlan.is_none() && port.vlans.is_none() && port.learned.is_empty() {
        return None;
    }
    let vlans = port.vlans.iter().flatten().map(u16::to_string).collect::<Vec<_>>();
    let learned = port.learned.iter().map(|it| match it.vlan {
        Some(vlan) if Some(vlan) != port.vlan => format!("{} in VLAN {vlan}", it.mac),
        _ => it.mac.clone(),
    });
    // More than fit a line are in the JSON.
    let mut shown: Vec<String> = learned.take(SHOWN_ADDRESSES).collect();
    if port.learned.len() > SHOWN_ADDRESSES {
        shown.push(format!("and {} more", port.learned.len() - SHOWN_ADDRESSES));
    }
    Some(vec![
        port.port.clone().into(),
        port.vlan.map(|vlan| vlan.to_string()).unwrap_or_default().into(),
        vlans.join(" ").into(),
        shown.join(", ").into(),
    ])
}

fn port_row(status: &NetworkStatus, port: &PortStatus) -> Vec<Cell> {
    vec![
        port.port.clone().into(),
        port.ipv4.clone().into(),
        port.mac.clone().into(),
        status.mtu.to_string().into(),
        port.queues.to_string().into(),
        port.polling.map_or("-".to_owned(), |part| format!("{:.1} %", 100.0 * part)).into(),
        dropped(&port.drops),
    ]
}

fn pair_row(port: &PortStatus, peer: &PeerStatus) -> Vec<Cell> {
    let ring = match peer.rings {
        0 => "-".to_owned(),
        _ => format!("{} of {}", format_size(peer.waiting_bytes), format_size(peer.ring_bytes)),
    };
    vec![
        port.port.clone().into(),
        peer.peer.clone().into(),
        peer.way.clone().into(),
        peer.sent.to_string().into(),
        format_size(peer.sent_bytes).into(),
        peer.received.to_string().into(),
        format_size(peer.received_bytes).into(),
        ring.into(),
        dropped(&peer.drops),
    ]
}

/// Drops with their causes.
fn dropped(drops: &BTreeMap<String, u64>) -> Cell {
    match drops.is_empty() {
        true => "0".into(),
        false => {
            let each: Vec<String> =
                drops.iter().map(|(cause, count)| format!("{count} {cause}")).collect();
            Cell(each.join(", "), Tone::Bad)
        }
    }
}

impl CaptureArgs {
    async fn run(&self, common: &Common, output: &Output) -> Result<(), Failure> {
        let host = self.port.split('/').next().unwrap_or_default().to_owned();
        let (_, client) = nodes(common, std::slice::from_ref(&host))?.remove(0);
        let file = std::path::absolute(&self.write).map_err(|cause| {
            Failure::usage(format!("{}: {cause}", self.write.display()), "name a file")
        })?;
        let ms = self.time.map(|time| Duration::from(time).as_millis());
        let request = CaptureRequest {
            port: self.port.clone(),
            file: file.clone(),
            frames: self.frames,
            ms: ms.map(|ms| u64::try_from(ms).unwrap_or(u64::MAX)),
        };
        output.progress(&format!("capturing {} into {}", self.port, file.display()));
        let done = tokio::select! {
            done = client.capture(&request) => done.map_err(|error| silent(&host, error))?,
            // The node ends it when nobody waits for it any more.
            () = crate::process::asked_to_end() => return Ok(()),
        };
        output.result(&done, |o| {
            o.line(&format!(
                "{} frames in {}, {} missed",
                done.frames,
                file.display(),
                done.missed
            ));
        });
        Ok(())
    }
}
