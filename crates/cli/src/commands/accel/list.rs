//! `rackbus accel list`: the accelerators of the rack.

use rackbus_control::api::Device;
use rackbus_fabric::rack::DeviceCapability;

use crate::Common;
use crate::commands::{capability, client};
use crate::output::{Cell, Failure, Output, Tone, duration};

/// List the accelerators' functions, who has them, and of the lease that each has: its service level, what was
/// done, how much engine time that took, for how long its own limits made it wait, the part of its minimum that it
/// got while it had work waiting, and the seconds in which it got less.
#[derive(Debug, clap::Args)]
#[command(after_help = "Examples:
  rackbus accel list
  rackbus accel list --json | jq '.[] | {function, holder}'")]
pub struct Args {}

impl Args {
    pub async fn run(&self, common: &Common, output: &Output) -> Result<(), Failure> {
        let mut devices = client(common).await?.devices().await?;
        devices.retain(|device| capability::can(device, DeviceCapability::Engines));
        output.result(&devices, |o| {
            let head = [
                "function",
                "engines",
                "state",
                "holder",
                "lease",
                "level",
                "operations",
                "bytes in",
                "engine time",
                "waited",
                "kept",
                "violations",
            ];
            o.table(&head, devices.iter().map(row).collect());
        });
        Ok(())
    }
}

fn row(device: &Device) -> Vec<Cell> {
    let report = device.report.as_ref();
    let lease = report.and_then(|report| report.lease.clone()).unwrap_or_default();
    let time = |name: &str| duration(lease.shaped(name) as f64 / 1e3);
    let none = || "-".to_owned();
    let violations = lease.shaped("violations");
    let tone = if violations > 0 { Tone::Bad } else { Tone::Plain };
    vec![
        device.function.clone().into(),
        device.detail.clone().into(),
        format!("{:?}", device.state).to_lowercase().into(),
        device.holder.clone().unwrap_or_else(none).into(),
        device.lease.map_or_else(none, |lease| lease.to_string()).into(),
        report.and_then(|report| report.level.clone()).unwrap_or_else(none).into(),
        lease.all_operations().done.to_string().into(),
        lease.shaped("ingress_bytes").to_string().into(),
        time("engine_ns").into(),
        time("throttled_ns").into(),
        lease.kept().map_or_else(none, |kept| format!("{:.1} %", kept * 100.0)).into(),
        Cell(violations.to_string(), tone),
    ]
}
