//! `rackbus mem`: the rack's global memory.

use std::ops::RangeInclusive;
use std::path::{Path, PathBuf};

use rackbus_attach::{AttachError, Location, SegmentAccess, SegmentEntry, Session};
use rackbus_fabric::pool::{Exported, MemoryPool};
use rackbus_fabric::rack::{Rack, format_size};
use rackbus_fabric::sharing::segment_range;
use serde_json::json;

use crate::Common;
use crate::commands::{DescriptionSource, named_host};
use crate::output::{Cell, Failure, Output, Tone};
use crate::paths;

/// Show the rack's global memory.
#[derive(Debug, clap::Args)]
pub struct Args {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, clap::Subcommand)]
enum Command {
    Map(MapArgs),
    Segments(SegmentsArgs),
    Share(ShareArgs),
}

/// Show where each host's exported memory is in the rack's address space.
#[derive(Debug, clap::Args)]
#[command(after_help = "Examples:
  rackbus mem map                      of the rack that runs
  rackbus mem map --file rack.toml     of one that does not")]
struct MapArgs {
    #[command(flatten)]
    from: DescriptionSource,
}

/// List the segments that processes share: of every host, or of one.
#[derive(Debug, clap::Args)]
#[command(after_help = "Examples:
  rackbus mem segments
  rackbus mem segments alpha --json")]
struct SegmentsArgs {
    /// Name of the host; all hosts without it.
    host: Option<String>,
}

/// Say who may use a host's segments, until its node ends: the rack file's rules come after that.
#[derive(Debug, clap::Args)]
#[command(after_help = "Examples:
  rackbus mem share alpha 4711 --with beta --access none     beta loses it, now
  rackbus mem share alpha '*' --with '*' --access read
  rackbus mem share alpha 0x100-0x1ff --with gamma --access write

Whoever loses a right it uses loses the segment; when the command returns, it reads and writes
nothing of it any more.")]
struct ShareArgs {
    /// The host that has the segments.
    host: String,
    /// Which: a number, a range of them, or `*`.
    #[arg(value_parser = parse_range)]
    segments: RangeInclusive<u32>,
    /// The host that may use them, or `*`.
    #[arg(long)]
    with: String,
    /// What it may do; `write` means read and write.
    #[arg(long)]
    access: Access,
}

#[derive(Debug, Clone, Copy, clap::ValueEnum)]
enum Access {
    None,
    Read,
    Write,
}

impl Args {
    pub fn run(&self, common: &Common, output: &Output) -> Result<(), Failure> {
        match &self.command {
            Command::Map(args) => map(&MemoryPool::of(&args.from.read(common)?), output),
            Command::Segments(args) => args.run(common, output)?,
            Command::Share(args) => args.run(common, output)?,
        }
        Ok(())
    }
}

/// The running rack, and a session with a host's node.
fn attach(run_dir: &Path, host: &str) -> Result<Session, Failure> {
    let location = Location { run_dir: run_dir.to_owned(), host: host.to_owned() };
    let failed = |error: AttachError| {
        Failure::new(error.to_string(), format!("look with `rackbus status`; {}", paths::START))
    };
    Session::open(&location).map_err(failed)
}

fn refused(error: AttachError) -> Failure {
    Failure::new(error.to_string(), "look with `rackbus mem segments`")
}

fn running(common: &Common) -> Result<(PathBuf, Rack), Failure> {
    let run_dir = paths::find_run_dir(common)?;
    let rack = paths::running(&run_dir)?.rack()?;
    Ok((run_dir, rack))
}

impl SegmentsArgs {
    fn run(&self, common: &Common, output: &Output) -> Result<(), Failure> {
        let (run_dir, rack) = running(common)?;
        let hosts: Vec<&str> = match &self.host {
            Some(host) => vec![&named_host(&rack, host)?.name],
            None => rack.hosts.iter().map(|host| host.name.as_str()).collect(),
        };
        let mut all: Vec<(&str, SegmentEntry)> = Vec::new();
        for host in hosts {
            let list = attach(&run_dir, host)?.segments().map_err(refused)?;
            all.extend(list.into_iter().map(|entry| (host, entry)));
        }
        let name = |node: &u32| {
            let known = rack.hosts.iter().find(|host| host.node_id == *node);
            known.map_or(node.to_string(), |host| host.name.clone())
        };
        let told = |(host, it): &(&str, SegmentEntry)| {
            json!({
                "host": host,
                "segment": it.id,
                "size": it.size,
                "available": it.available,
                "group": it.group,
                "address": it.address,
                "connected": it.connections.iter().map(name).collect::<Vec<_>>(),
            })
        };
        let list: Vec<_> = all.iter().map(told).collect();
        output.result(&list, |o| {
            let row = |(host, it): &(&str, SegmentEntry)| {
                let (state, tone) = match (it.group, it.available) {
                    (true, _) => ("multicast group", Tone::Good),
                    (_, true) => ("available", Tone::Good),
                    (_, false) => ("not available", Tone::Plain),
                };
                vec![
                    (*host).into(),
                    format!("{:#x}", it.id).into(),
                    format_size(it.size).into(),
                    Cell(state.into(), tone),
                    it.address.map_or(String::new(), |at| format!("{at:#x}")).into(),
                    it.connections.iter().map(name).collect::<Vec<_>>().join(", ").into(),
                ]
            };
            let head = ["host", "segment", "size", "state", "address", "connected"];
            o.table(&head, all.iter().map(row).collect());
        });
        Ok(())
    }
}

impl ShareArgs {
    fn run(&self, common: &Common, output: &Output) -> Result<(), Failure> {
        let (run_dir, rack) = running(common)?;
        let owner = &named_host(&rack, &self.host)?.name;
        let node = match self.with.as_str() {
            "*" => None,
            name => Some(named_host(&rack, name)?.node_id),
        };
        let share = match self.access {
            Access::None => SegmentAccess::None,
            Access::Read => SegmentAccess::Read,
            Access::Write => SegmentAccess::Write,
        };
        attach(&run_dir, owner)?.set_share(self.segments.clone(), node, share).map_err(refused)?;
        let (first, last) = (self.segments.start(), self.segments.end());
        let told = json!({ "host": owner, "first": first, "last": last, "with": self.with });
        output.result(&told, |o| o.line(&format!("{owner} shares as you said, from now on")));
        Ok(())
    }
}

fn parse_range(text: &str) -> Result<RangeInclusive<u32>, String> {
    let form = "write a segment's id, a range of them (0x100-0x1ff), or *";
    segment_range(text).filter(|range| !range.is_empty()).ok_or_else(|| form.to_owned())
}

fn map(pool: &MemoryPool, output: &Output) {
    let told = |it: &Exported| {
        json!({
            "host": it.host,
            "node_id": it.node_id,
            "base": it.base,
            "end": it.base + it.size,
            "size": it.size,
        })
    };
    let ranges: Vec<_> = pool.hosts().iter().map(told).collect();
    output.result(&ranges, |o| {
        let row = |it: &Exported| {
            vec![
                it.host.clone().into(),
                it.node_id.to_string().into(),
                format!("{:#018x}", it.base).into(),
                format!("{:#018x}", it.base + it.size).into(),
                format_size(it.size).into(),
            ]
        };
        let head = ["host", "node id", "base", "end", "size"];
        o.table(&head, pool.hosts().iter().map(row).collect());
    });
}
