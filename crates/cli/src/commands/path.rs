//! `rackbus path`: the way from one place of the rack to another.

use rackbus_control::api::Crossing;

use crate::Common;
use crate::commands::client;
use crate::output::{Failure, Output};

/// Show the way that memory accesses take from one host or device to another.
#[derive(Debug, clap::Args)]
#[command(after_help = "Examples:
  rackbus path alpha/nvme0 beta    the drive's DMA, when beta has borrowed it
  rackbus path beta alpha/nvme0    beta's register accesses
  rackbus path alpha gamma         a processor of alpha to gamma's memory")]
pub struct Args {
    /// Where it begins: HOST (its processors) or HOST/DEVICE.
    from: String,
    /// Where it ends: HOST (its memory) or HOST/DEVICE.
    to: String,
}

impl Args {
    pub async fn run(&self, common: &Common, output: &Output) -> Result<(), Failure> {
        let path = client(common).await?.path(&self.from, &self.to).await?;
        output.result(&path, |o| {
            let rows = path.components.iter().enumerate().map(|(step, hop)| {
                let link = hop.link.clone().unwrap_or_default();
                vec![
                    step.to_string().into(),
                    hop.kind.clone().into(),
                    hop.name.clone().into(),
                    link.into(),
                ]
            });
            o.table(&["step", "kind", "name", "by link"], rows.collect());
            let (hops, roots) = (path.hops, path.roots);
            o.line(&format!("{hops} hops between the ends, {roots} of them root complexes"));
            if let Some(Crossing { link, lane, copies }) = &path.between {
                let lane = lane.iter().map(|lane| format!(", and data by an RDMA lane ({lane})"));
                o.line(&format!("between the machines: {link}{}", lane.collect::<String>()));
                copies.iter().for_each(|copy| o.line(&format!("  copies at {copy}")));
            }
        });
        Ok(())
    }
}
