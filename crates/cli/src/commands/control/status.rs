//! `rackbus control status`: the processes of the control plane, which of them leads, and their store.

use rackbus_control::leadership::serving::ControlStatus;

use crate::Common;
use crate::commands::client;
use crate::output::{Cell, Failure, Output, Tone};

/// Show the processes of the control plane, which of them leads, and how their store is.
#[derive(Debug, clap::Args)]
#[command(after_help = "Examples:
  rackbus control status
  rackbus control status --json")]
pub struct Args {}

impl Args {
    pub async fn run(&self, common: &Common, output: &Output) -> Result<(), Failure> {
        let status = client(common).await?.control().await?;
        output.result(&status, |o| people(&status, o));
        Ok(())
    }
}

fn people(status: &ControlStatus, output: &Output) {
    let term = status.term.map(|term| format!(", term {term}")).unwrap_or_default();
    if status.store == "sqlite" {
        output.line(&format!("rack {}: one control plane{term}, store sqlite", status.rack));
        return;
    }
    let leader = match &status.leader {
        Some(leader) => format!("led by {}", leader.url),
        None => "without a leader at this moment".to_owned(),
    };
    output.line(&format!("rack {}: {leader}{term}", status.rack));
    let health = &status.health;
    match &health.error {
        None if health.healthy => output.line(&format!(
            "store etcd {}: healthy, {} KiB",
            health.version,
            health.bytes / 1024
        )),
        error => {
            let error = error.as_deref().unwrap_or("it has not answered yet");
            output.line(&format!("store etcd: {error}"));
        }
    }
    let rows = status.members.iter().map(|member| {
        let leads = status.leader.as_ref().is_some_and(|leader| leader.id == member.id);
        let asked = status.answers.as_ref().is_some_and(|own| own.id == member.id);
        let part = match leads {
            true => Cell("leader".into(), Tone::Good),
            false => Cell("follower".into(), Tone::Plain),
        };
        let version = member.version.clone();
        let asked = if asked { "this one" } else { "" };
        vec![member.url.clone().into(), part, version.into(), asked.to_owned().into()]
    });
    output.table(&["control plane", "part", "version", ""], rows.collect());
}
