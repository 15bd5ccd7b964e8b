//! `rackbus events`: what happened in the rack, with its cause.

use std::time::{Duration, UNIX_EPOCH};

use rackbus_control::api::{EventKind, EventRecord};

use crate::Common;
use crate::commands::client;
use crate::output::{Cell, Failure, Output, Tone};

/// Show what happened in the rack: leases, losses, refusals, faults and restarts, each with its
/// cause. The control plane keeps the last 10,000 events, for up to 30 days.
#[derive(Debug, clap::Args)]
#[command(after_help = "Examples:
  rackbus events
  rackbus events --kind fault --last 10
  rackbus events --follow --json | jq -r .text     an object a line, as it happens")]
pub struct Args {
    /// Go on with what happens from now on, until interrupted.
    #[arg(long)]
    follow: bool,
    /// Only events of this kind.
    #[arg(long, value_name = "KIND")]
    kind: Option<Kind>,
    /// How many of the events so far.
    #[arg(long, value_name = "N", default_value_t = 100)]
    last: usize,
}

#[derive(Debug, Clone, Copy, clap::ValueEnum)]
enum Kind {
    /// A function was offered, lent, or returned in order.
    Lease,
    /// A lease ended otherwise than by its return.
    Loss,
    /// A request was refused, or a borrower was not let in.
    Refusal,
    /// Something does not work.
    Fault,
    /// The control plane or a node was started.
    Restart,
    /// Somebody was let in, or let out: tokens, machines that joined, people who logged in.
    Access,
}

impl From<Kind> for EventKind {
    fn from(kind: Kind) -> EventKind {
        match kind {
            Kind::Lease => EventKind::Lease,
            Kind::Loss => EventKind::Loss,
            Kind::Refusal => EventKind::Refusal,
            Kind::Fault => EventKind::Fault,
            Kind::Restart => EventKind::Restart,
            Kind::Access => EventKind::Access,
        }
    }
}

impl Args {
    pub async fn run(&self, common: &Common, output: &Output) -> Result<(), Failure> {
        let kind = self.kind.map(EventKind::from);
        let mut lines = client(common).await?.events(kind, Some(self.last), self.follow).await?;
        if !self.follow {
            let mut events = Vec::new();
            while let Some(event) = lines.next().await {
                events.push(event);
            }
            if lines.is_broken() {
                let error = "the control plane ended before it had told all events";
                return Err(Failure::new(error, "ask again"));
            }
            output.result(&events, |o| {
                o.table(&HEAD, events.iter().map(row).collect());
            });
            return Ok(());
        }
        while let Some(event) = lines.next().await {
            match output.is_json() {
                true => output.line(&serde_json::to_string(&event).unwrap_or_default()),
                false => output.row(&row(&event), &WIDTHS),
            }
            if output.is_unheard() {
                return Ok(());
            }
        }
        let remedy = "see with `rackbus status` whether it runs, and follow again";
        Err(Failure::new("the control plane has ended", remedy))
    }
}

/// Of the columns of events that come one by one; the last needs none.
const WIDTHS: [usize; 4] =
    ["2026-01-01T00:00:00.000Z".len(), "refusal".len(), 5, "ann (borrower for beta)".len()];

/// The columns of [`row`].
pub const HEAD: [&str; 5] = ["time", "kind", "lease", "asked by", "what happened"];

/// An event for people.
pub fn row(event: &EventRecord) -> Vec<Cell> {
    let (kind, tone) = match event.kind {
        EventKind::Lease => ("lease", Tone::Plain),
        EventKind::Loss => ("loss", Tone::Bad),
        EventKind::Refusal => ("refusal", Tone::Busy),
        EventKind::Fault => ("fault", Tone::Bad),
        EventKind::Restart => ("restart", Tone::Busy),
        EventKind::Access => ("access", Tone::Plain),
    };
    let time = UNIX_EPOCH + Duration::from_millis(event.at_ms);
    vec![
        humantime::format_rfc3339_millis(time).to_string().into(),
        Cell(kind.into(), tone),
        event.lease.map(|lease| lease.to_string()).unwrap_or_default().into(),
        event.by.as_ref().map(ToString::to_string).unwrap_or_default().into(),
        event.text.clone().into(),
    ]
}
