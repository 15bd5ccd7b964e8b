//! `rackbus devices`: what there is to borrow.

use rackbus_control::api::DeviceState;

use crate::Common;
use crate::commands::client;
use crate::output::{Cell, Failure, Output, Tone};

/// List the rack's devices: what they are, and who has them.
#[derive(Debug, clap::Args)]
#[command(after_help = "Examples:
  rackbus devices
  rackbus devices --json")]
pub struct Args {}

impl Args {
    pub async fn run(&self, common: &Common, output: &Output) -> Result<(), Failure> {
        let devices = client(common)?.devices().await?;
        output.result(&devices, |o| {
            let rows = devices.iter().map(|device| {
                let (state, tone) = match device.state {
                    DeviceState::Offered => ("offered", Tone::Good),
                    DeviceState::Lent => ("lent", Tone::Busy),
                    DeviceState::Returning => ("returning", Tone::Busy),
                    DeviceState::Unreachable => ("unreachable", Tone::Bad),
                    DeviceState::Absent => ("absent", Tone::Bad),
                };
                let lease = device.lease.map_or(String::new(), |lease| lease.to_string());
                vec![
                    device.function.clone().into(),
                    device.kind.clone().into(),
                    Cell(state.into(), tone),
                    device.holder.clone().unwrap_or_default().into(),
                    lease.into(),
                    device.detail.clone().into(),
                ]
            });
            o.table(&["device", "kind", "state", "holder", "lease", "what"], rows.collect());
        });
        Ok(())
    }
}
