//! `rackbus accel list`: the accelerators of the rack.

use rackbus_control::api::Device;

use crate::Common;
use crate::commands::client;
use crate::output::{Failure, Output, duration};

/// List the accelerators' functions, who has them, what they did, how much engine time they took for it, and
/// for how long their users' own limits made them wait.
#[derive(Debug, clap::Args)]
#[command(after_help = "Examples:
  rackbus accel list
  rackbus accel list --json | jq '.[] | {function, holder}'")]
pub struct Args {}

impl Args {
    pub async fn run(&self, common: &Common, output: &Output) -> Result<(), Failure> {
        let mut devices = client(common)?.devices().await?;
        devices.retain(|device| device.kind == rackbus_devices::accel::CLASS);
        output.result(&devices, |o| {
            let head = [
                "function",
                "engines",
                "state",
                "holder",
                "lease",
                "operations",
                "bytes",
                "engine time",
                "waited",
            ];
            o.table(&head, devices.iter().map(row).collect());
        });
        Ok(())
    }
}

fn row(device: &Device) -> Vec<crate::output::Cell> {
    let report = device.report.as_ref();
    let operations = || report.into_iter().flat_map(|report| report.operations.values());
    let done: u64 = operations().map(|operation| operation.done).sum();
    let bytes: u64 = operations().map(|operation| operation.bytes).sum();
    let shaped = |name: &str| report.and_then(|report| report.shaping.get(name)).copied();
    let time = |name: &str| duration(shaped(name).unwrap_or(0) as f64 / 1e3);
    let none = || "-".to_owned();
    vec![
        device.function.clone().into(),
        device.detail.clone().into(),
        format!("{:?}", device.state).to_lowercase().into(),
        device.holder.clone().unwrap_or_else(none).into(),
        device.lease.map_or_else(none, |lease| lease.to_string()).into(),
        done.to_string().into(),
        bytes.to_string().into(),
        time("engine_ns").into(),
        time("throttled_ns").into(),
    ]
}
