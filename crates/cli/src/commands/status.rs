//! `rackbus status`: how the rack is, and what went wrong lately.

use rackbus_control::ControlClient;
use rackbus_control::api::{Device, HostState, RackStatus};

use crate::Common;
use crate::commands::client;
use crate::commands::devices::trouble;
use crate::output::{Cell, Failure, Output, Tone, ago};

/// Show the state of the rack: its hosts, and leases that ended without being returned.
#[derive(Debug, clap::Args)]
#[command(after_help = "Examples:
  rackbus status
  rackbus status --json")]
pub struct Args {}

impl Args {
    pub async fn run(&self, common: &Common, output: &Output) -> Result<(), Failure> {
        show(&client(common).await?, output).await
    }
}

/// Asks the control plane and shows what it says.
pub async fn show(client: &ControlClient, output: &Output) -> Result<(), Failure> {
    let status = client.status().await?;
    let devices = if output.is_json() { Vec::new() } else { client.devices().await? };
    output.result(&status, |o| people(&status, &devices, o));
    Ok(())
}

/// The word for how a host's node is.
pub fn node_state(state: HostState) -> (&'static str, Tone) {
    match state {
        HostState::Up => ("up", Tone::Good),
        HostState::Down => ("down", Tone::Bad),
        HostState::NeverSeen => ("never seen", Tone::Bad),
    }
}

/// So many of what `one` is: `1 lease`, `2 leases`.
fn counted(count: u64, one: &str) -> String {
    match count {
        1 => format!("1 {one}"),
        _ => format!("{count} {one}s"),
    }
}

fn people(status: &RackStatus, devices: &[Device], output: &Output) {
    output.line(&format!(
        "rack {}: {}, {}, {} refused, control plane up {}",
        status.rack,
        counted(status.hosts.len() as u64, "host"),
        counted(status.live_leases as u64, "lease"),
        counted(status.refused, "request"),
        ago(status.uptime_ms)
    ));
    if status.store_failures > 0 {
        output.line(&format!(
            "{} decisions could not be stored and were taken back: see to the control plane's disk",
            status.store_failures
        ));
    }
    for host in status.hosts.iter().filter(|host| host.overruns > 0) {
        let (name, times) = (&host.host, host.overruns);
        output.line(&format!("the node of {name} took nothing and was cut off {times} times"));
    }
    let logs = status.hosts.iter().map(|host| (host.host.as_str(), host.log_lines_left_out));
    for (who, count) in logs.chain([("the control plane", status.log_lines_left_out)]) {
        if count > 0 {
            output.line(&format!("{count} lines were left out of the log of {who}"));
        }
    }
    devices.iter().filter_map(trouble).for_each(|line| output.line(&line));
    let rows = status.hosts.iter().map(|host| {
        let (state, tone) = node_state(host.state);
        let heard = host.heard_ms_ago.map_or("never".to_owned(), |ms| format!("{} ago", ago(ms)));
        vec![
            host.host.clone().into(),
            Cell(state.into(), tone),
            heard.into(),
            host.offers.to_string().into(),
            host.borrows.to_string().into(),
        ]
    });
    output.table(&["host", "node", "heard", "offers", "borrows"], rows.collect());
    if !status.incidents.is_empty() {
        output.line("\nlately:");
    }
    for lease in &status.incidents {
        let reason = lease.reason.as_deref().unwrap_or("unknown");
        output.line(&format!(
            "  lease {}: {} lent to {}: {reason}",
            lease.lease, lease.function, lease.borrower
        ));
    }
}
