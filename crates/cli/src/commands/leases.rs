//! `rackbus leases`: who has what.

use std::time::{SystemTime, UNIX_EPOCH};

use rackbus_control::api::LeaseStage;

use crate::Common;
use crate::commands::client;
use crate::output::{Cell, Failure, Output, Tone, ago};

/// List who has borrowed what, and where it is used.
#[derive(Debug, clap::Args)]
#[command(after_help = "Examples:
  rackbus leases
  rackbus leases --all      also those that are over, and why they ended")]
pub struct Args {
    /// Also those that are over.
    #[arg(long)]
    all: bool,
}

impl Args {
    pub async fn run(&self, common: &Common, output: &Output) -> Result<(), Failure> {
        let leases = client(common).await?.leases(self.all).await?;
        let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        let now = u64::try_from(now.as_millis()).unwrap_or(u64::MAX);
        output.result(&leases, |o| {
            let rows = leases.iter().map(|lease| {
                let (stage, tone) = match lease.stage {
                    LeaseStage::Arming => ("arming", Tone::Busy),
                    LeaseStage::Opening => ("opening", Tone::Busy),
                    LeaseStage::Active => ("active", Tone::Good),
                    LeaseStage::Closing => ("closing", Tone::Busy),
                    LeaseStage::Ended if lease.returned => ("ended", Tone::Plain),
                    LeaseStage::Ended => ("ended", Tone::Bad),
                };
                let told = lease.socket.clone().or(lease.reason.clone()).unwrap_or_default();
                vec![
                    lease.lease.to_string().into(),
                    lease.function.clone().into(),
                    lease.borrower.clone().into(),
                    lease.epoch.to_string().into(),
                    lease.placement.to_string().into(),
                    Cell(stage.into(), tone),
                    format!("{} ago", ago(now.saturating_sub(lease.since_ms))).into(),
                    told.into(),
                ]
            });
            let head = [
                "lease",
                "device",
                "borrower",
                "epoch",
                "front",
                "stage",
                "since",
                "socket or reason",
            ];
            o.table(&head, rows.collect());
        });
        Ok(())
    }
}
