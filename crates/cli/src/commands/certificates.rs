//! `rackbus certificates`: what the rack has given out.

use crate::Common;
use crate::commands::client;
use crate::contexts::moment;
use crate::output::{Cell, Failure, Output, Tone};

/// List the certificates that the rack has given to machines and people, and that have not expired.
#[derive(Debug, clap::Args)]
#[command(after_help = "Examples:
  rackbus certificates
  rackbus certificates --json | jq '.[] | select(.revoked | not)'

Those that the control plane makes for itself are not in the list, nor those of versions before it had one.")]
pub struct Args {}

impl Args {
    pub async fn run(&self, common: &Common, output: &Output) -> Result<(), Failure> {
        let mut all = client(common).await?.certificates().await?;
        all.sort_by(|a, b| (&a.subject, a.since).cmp(&(&b.subject, b.since)));
        output.result(&all, |o| {
            let rows = all.iter().map(|it| {
                let state = match it.revoked {
                    Some(number) => Cell(format!("revoked ({number})"), Tone::Bad),
                    None => Cell("good".to_owned(), Tone::Good),
                };
                let (since, until) = (moment(it.since), moment(it.until));
                let name = short_name(&it.subject).to_owned();
                vec![it.serial.clone().into(), name.into(), since.into(), until.into(), state]
            });
            o.table(&["serial", "whose", "since", "until", ""], rows.collect());
        });
        Ok(())
    }
}

/// A subject without what all of them end with: `beta.node`.
pub(super) fn short_name(subject: &str) -> &str {
    subject.trim_end_matches(".rackbus")
}
