//! `rackbus node-id`: what SISCI programs call the hosts.

use rackbus_fabric::rack::Host;
use serde_json::json;

use crate::Common;
use crate::commands::{DescriptionSource, named_host};
use crate::output::{Failure, Output};

/// Show the hosts' SISCI node ids.
#[derive(Debug, clap::Args)]
#[command(after_help = "Examples:
  rackbus node-id          all hosts
  rackbus node-id beta     the number alone, for scripts")]
pub struct Args {
    /// The host; all unless named.
    host: Option<String>,
    #[command(flatten)]
    from: DescriptionSource,
}

impl Args {
    pub fn run(&self, common: &Common, output: &Output) -> Result<(), Failure> {
        let rack = self.from.read(common)?;
        let told = |host: &Host| json!({ "host": host.name, "node_id": host.node_id });
        if let Some(name) = &self.host {
            let host = named_host(&rack, name)?;
            output.result(&told(host), |o| o.line(&host.node_id.to_string()));
            return Ok(());
        }
        let hosts: Vec<_> = rack.hosts.iter().map(told).collect();
        output.result(&hosts, |o| {
            let row = |host: &Host| vec![host.name.clone().into(), host.node_id.to_string().into()];
            o.table(&["host", "node id"], rack.hosts.iter().map(row).collect());
        });
        Ok(())
    }
}
