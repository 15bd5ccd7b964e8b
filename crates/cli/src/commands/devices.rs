//! `rackbus devices`: what there is to borrow, and how it is.

use rackbus_control::api::{
    Device, DeviceReport, DeviceState, MediumLinkReport, OperationReport, PeerReport,
    PeerWindowReport, RdmaLaneReport,
};
use rackbus_control::shares::Turns;
use rackbus_fabric::rack::format_size;

use crate::Common;
use crate::commands::client;
use crate::output::{Cell, Failure, Output, Tone, duration};

/// List the rack's devices: what they are, and who has them.
#[derive(Debug, clap::Args)]
#[command(after_help = "Examples:
  rackbus devices
  rackbus devices alpha/nvme0
  rackbus devices --json")]
pub struct Args {
    /// One device, with its counters.
    #[arg(value_name = "HOST/DEVICE")]
    device: Option<String>,
}

impl Args {
    pub async fn run(&self, common: &Common, output: &Output) -> Result<(), Failure> {
        let mut devices = client(common).await?.devices().await?;
        let Some(wanted) = &self.device else {
            output.result(&devices, |o| table(&devices, o));
            return Ok(());
        };
        devices.retain(|device| device.function == *wanted);
        let unknown = || {
            let text = format!("the rack has no device {wanted}");
            Failure::new(text, "`rackbus devices` lists them")
        };
        let device = devices.pop().ok_or_else(unknown)?;
        output.result(&device, |o| detail(&device, o));
        Ok(())
    }
}

/// The word for where a function stands.
pub fn state(state: DeviceState) -> (&'static str, Tone) {
    match state {
        DeviceState::Offered => ("offered", Tone::Good),
        DeviceState::Lent => ("lent", Tone::Busy),
        DeviceState::Returning => ("returning", Tone::Busy),
        DeviceState::Unreachable => ("unreachable", Tone::Bad),
        DeviceState::Absent => ("absent", Tone::Bad),
    }
}

/// A line for a device that does not work as it should.
pub fn trouble(device: &Device) -> Option<String> {
    let reports = device.report.iter().chain(&device.front);
    let trouble = reports.filter_map(|report| report.trouble.as_ref()).next()?;
    Some(format!("{}: {trouble}", device.function))
}

/// Who has it; of one that is shared, in how many turns it goes round.
pub fn holder(holder: Option<&str>, turns: Option<&Turns>) -> String {
    let holder = holder.unwrap_or_default();
    match turns {
        Some(turns) => format!("{holder} (1 of {})", turns.shares).trim_start().to_owned(),
        None => holder.to_owned(),
    }
}

fn table(devices: &[Device], output: &Output) {
    let rows = devices.iter().map(|device| {
        let (state, tone) = state(device.state);
        let lease = device.lease.map_or(String::new(), |lease| lease.to_string());
        vec![
            device.function.clone().into(),
            device.kind.clone().into(),
            Cell(state.into(), tone),
            holder(device.holder.as_deref(), device.turns.as_ref()).into(),
            lease.into(),
            device.detail.clone().into(),
        ]
    });
    output.table(&["device", "kind", "state", "holder", "lease", "what"], rows.collect());
    devices.iter().filter_map(trouble).for_each(|line| output.line(&line));
}

fn detail(device: &Device, output: &Output) {
    let (state, tone) = state(device.state);
    let mut rows = vec![
        vec!["device".into(), device.function.clone().into()],
        vec!["what".into(), format!("{}, {}", device.kind, device.detail).into()],
        vec!["state".into(), Cell(state.into(), tone)],
        vec!["epoch".into(), device.epoch.to_string().into()],
    ];
    if let (Some(holder), Some(lease)) = (&device.holder, device.lease) {
        rows.push(vec!["holder".into(), format!("{holder}, lease {lease}").into()]);
    }
    rows.extend(device.turns.as_ref().map(turns));
    if device.waiting > 0 {
        rows.push(vec!["waiting".into(), format!("{} requests", device.waiting).into()]);
    }
    if let Some(report) = &device.report {
        if let Some(trouble) = &report.trouble {
            rows.push(vec!["trouble".into(), Cell(trouble.clone(), Tone::Bad)]);
        }
        let last = report.last_refused.as_ref().map(|last| format!(", the last: {last}"));
        let refused = format!("{}{}", report.dma_refused, last.unwrap_or_default());
        rows.push(vec!["DMA refused".into(), refused.into()]);
        rows.extend(counters(report));
        rows.extend(shaped(report));
    }
    if let Some(front) = &device.front {
        let host = device.holder.as_deref().unwrap_or_default();
        rows.push(vec!["front".into(), format!("at its borrower, {host}:").into()]);
        if let Some(trouble) = &front.trouble {
            rows.push(vec!["trouble".into(), Cell(trouble.clone(), Tone::Bad)]);
        }
        rows.extend(counters(front));
        rows.extend(front.link.as_ref().map(link));
        rows.extend(front.link.as_ref().and_then(|it| it.lane.as_ref()).map(lane));
    }
    rows.extend(device.peers.iter().flat_map(peers));
    output.table(&["name", "value"], rows);
    let reports = device.report.iter().chain(&device.front);
    let kinds = reports.flat_map(|report| &report.operations);
    let operations: Vec<_> = kinds.map(|(kind, counts)| operation(kind, counts)).collect();
    if !operations.is_empty() {
        output.line("");
        output.table(&["operation", "done", "failed", "bytes", "p50", "p99", "p99.9"], operations);
    }
}

/// What an engine counts.
fn counters(report: &DeviceReport) -> impl Iterator<Item = Vec<Cell>> + use<> {
    let counters = [
        ("busy polls", report.busy_polls),
        ("idle polls", report.idle_polls),
        ("sleeps", report.parks),
        ("wake-ups", report.wakeups),
        ("requests", report.jobs),
        ("moves", report.moves),
        ("peer bytes read", report.peer_bytes_read),
        ("peer bytes written", report.peer_bytes_written),
    ];
    counters.into_iter().map(|(name, count)| vec![name.into(), count.to_string().into()])
}

/// The turns that borrowers take on it.
fn turns(turns: &Turns) -> Vec<Cell> {
    let turn = turns.turn.map(|share| format!(", the turn of share {share}")).unwrap_or_default();
    let handover = turns.handover().map(|ms| format!(", handed over in {ms:.0} ms"));
    let text = format!(
        "{} take turns of {:.1} s{turn}; {} turns so far{}",
        turns.shares,
        turns.slice_ms as f64 / 1e3,
        turns.turns,
        handover.unwrap_or_default()
    );
    vec!["turns".into(), text.into()]
}

/// How the link to its medium was.
fn link(link: &MediumLinkReport) -> Vec<Cell> {
    let MediumLinkReport { lost_ms, resumed, repeated, .. } = link;
    let lost = lost_ms.map(|ms| format!("lost for {:.1} s; ", ms as f64 / 1e3));
    let lost = lost.unwrap_or_default();
    let text = format!("{lost}resumed {resumed} times, {repeated} operations repeated");
    vec!["link".into(), text.into()]
}

/// How it is with the lane beside the link.
fn lane(lane: &RdmaLaneReport) -> Vec<Cell> {
    let RdmaLaneReport { provider, up, lost, operations, bytes, fell_back } = lane;
    let tone = if lost.is_some() { Tone::Bad } else { Tone::Plain };
    let state = match (lost, up) {
        (Some(why), _) => format!("lost: {why}"),
        (None, true) => "up".to_owned(),
        (None, false) => "not used yet".to_owned(),
    };
    let text = format!(
        "{provider}, {state}; {} in {operations} operations moved, {fell_back} went by the link",
        format_size(*bytes)
    );
    vec!["RDMA lane".into(), Cell(text, tone)]
}

/// What a shaper did: for the function's users, and for the lease that has it.
fn shaped(report: &DeviceReport) -> impl Iterator<Item = Vec<Cell>> + use<'_> {
    let level = report.level.iter().map(|level| vec!["level".into(), level.clone().into()]);
    let counters = report.shaping.iter().map(|(name, count)| {
        let of_lease = report.lease.as_ref().map(|lease| lease.shaped(name));
        let of_lease = of_lease.map(|count| format!(" (this lease: {count})")).unwrap_or_default();
        vec![name.replace('_', " ").into(), format!("{count}{of_lease}").into()]
    });
    let last = report
        .last_lease
        .iter()
        .map(|last| vec![format!("lease {}", last.lease).into(), last.summary().into()]);
    level.chain(counters).chain(last)
}

/// What it reaches of other functions of its user.
fn peers(report: &PeerReport) -> impl Iterator<Item = Vec<Cell>> + use<'_> {
    let reaches = report.reaches.iter().map(|window| {
        let PeerWindowReport { address, length, function, bar, .. } = window;
        let text = format!("{function} BAR {bar}, {} at {address:#x}", format_size(*length));
        vec!["peer".into(), text.into()]
    });
    let refused = |text: &String| vec!["peer refused".into(), Cell(text.clone(), Tone::Bad)];
    reaches.chain(report.refused.iter().map(refused))
}

fn operation(kind: &str, counts: &OperationReport) -> Vec<Cell> {
    let time = |part| counts.percentile_ns(part).map(|ns| duration(ns / 1e3)).unwrap_or_default();
    let failed = if counts.failed > 0 { Tone::Bad } else { Tone::Plain };
    vec![
        kind.into(),
        counts.done.to_string().into(),
        Cell(counts.failed.to_string(), failed),
        counts.bytes.to_string().into(),
        time(0.5).into(),
        time(0.99).into(),
        time(0.999).into(),
    ]
}
