//! `rackbus mem`: the rack's global memory.

use rackbus_fabric::pool::{Exported, Pool};
use rackbus_fabric::rack::format_size;
use serde_json::json;

use crate::Common;
use crate::commands::RackFile;
use crate::output::{Failure, Output};

/// Show the rack's global memory.
#[derive(Debug, clap::Args)]
pub struct Args {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, clap::Subcommand)]
enum Command {
    Map(MapArgs),
}

/// Show where each host's exported memory is in the rack's address space.
#[derive(Debug, clap::Args)]
#[command(after_help = "Examples:
  rackbus mem map                      of the rack that runs
  rackbus mem map --file rack.toml     of one that does not")]
struct MapArgs {
    #[command(flatten)]
    from: RackFile,
}

impl Args {
    pub fn run(&self, common: &Common, output: &Output) -> Result<(), Failure> {
        match &self.command {
            Command::Map(args) => map(&Pool::of(&args.from.read(common)?), output),
        }
        Ok(())
    }
}

fn map(pool: &Pool, output: &Output) {
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
