//! `rackbus control ca`: the rack's certificate authority is replaced.

use rackbus_control::authorities::{AuthorityPart, AuthorityStatus, RotationAnswer};

use crate::Common;
use crate::commands::certificates::short_name;
use crate::commands::client;
use crate::contexts::moment;
use crate::output::{Cell, Failure, Output, Tone};

/// Steps and state of the replacement.
#[derive(Debug, clap::Subcommand)]
pub enum AuthorityCommand {
    Rotate(RotateArgs),
    Status(StatusArgs),
    Retire(RetireArgs),
}

/// Make a new certificate authority. Everybody is told to trust it; when all do, it makes the certificates, and everybody gets
/// one of it. What is borrowed is not disturbed.
#[derive(Debug, clap::Args)]
#[command(after_help = "Examples:
  rackbus control ca rotate
  rackbus control ca rotate --force    the new one signs, though some do not trust it yet: these are named, and cut off")]
pub struct RotateArgs {
    /// Have a new one that is there sign from now on, whoever does not trust it yet.
    #[arg(long)]
    force: bool,
}

/// Show the certificate authorities, and who holds up the next step.
#[derive(Debug, clap::Args)]
#[command(after_help = "Examples:
  rackbus control ca status
  rackbus control ca status --json | jq -r '.behind[].subject'")]
pub struct StatusArgs {}

/// End the certificate authority that was replaced: its certificates are refused from then on.
#[derive(Debug, clap::Args)]
#[command(after_help = "Examples:
  rackbus control ca retire
  rackbus control ca retire --force    certificates of it that are in use are revoked, and those who have them are named")]
pub struct RetireArgs {
    /// Also where certificates of it are in use: they are revoked.
    #[arg(long)]
    force: bool,
}

impl AuthorityCommand {
    pub async fn run(&self, common: &Common, output: &Output) -> Result<(), Failure> {
        let client = client(common).await?;
        match self {
            AuthorityCommand::Rotate(RotateArgs { force }) => {
                let done = client.rotate_authority(*force).await?;
                let what = match done.newest {
                    AuthorityPart::Introduced => {
                        "there is a new certificate authority; it signs when everybody trusts it"
                    }
                    AuthorityPart::Signs | AuthorityPart::Retiring => {
                        "the new certificate authority signs"
                    }
                };
                say(&done, what, output);
            }
            AuthorityCommand::Retire(RetireArgs { force }) => {
                let done = client.retire_authority(*force).await?;
                say(&done, "the old certificate authority is retired", output);
            }
            AuthorityCommand::Status(StatusArgs {}) => {
                let status = client.authority_status().await?;
                output.result(&status, |o| show(&status, o));
            }
        }
        Ok(())
    }
}

fn say(done: &RotationAnswer, what: &str, output: &Output) {
    output.result(done, |o| {
        o.line(what);
        if !done.cut_off.is_empty() {
            let names = done.cut_off.iter().map(|it| short_name(it)).collect::<Vec<_>>();
            o.line(&format!("cut off until they join or log in anew: {}", names.join(", ")));
        }
    });
}

fn show(status: &AuthorityStatus, output: &Output) {
    let rows = status.authorities.iter().map(|it| {
        let (part, tone) = match it.part {
            AuthorityPart::Signs => ("signs", Tone::Good),
            AuthorityPart::Introduced => ("signs when everybody trusts it", Tone::Plain),
            AuthorityPart::Retiring => ("is trusted until it is retired", Tone::Plain),
        };
        let number = it.number.to_string();
        vec![number.into(), it.fingerprint.clone().into(), Cell(part.to_owned(), tone)]
    });
    output.table(&["authority", "fingerprint (SHA-256)", ""], rows.collect());
    let planes = status.control_planes.iter().map(|it| {
        let of = |fingerprint: &String| {
            let found = status.authorities.iter().find(|it| it.fingerprint == *fingerprint);
            found.map_or("of another authority".to_owned(), |it| format!("of {}", it.number))
        };
        let shown = match (&it.authority, &it.error) {
            (Some(fingerprint), _) => Cell(of(fingerprint), Tone::Plain),
            (None, error) => Cell(error.clone().unwrap_or_default(), Tone::Bad),
        };
        vec![it.address.clone().into(), shown]
    });
    output.table(&["control plane", "certificate"], planes.collect());
    if status.authorities.len() == 1 {
        return;
    }
    if status.behind.is_empty() {
        let retiring = status.authorities.iter().any(|it| it.part == AuthorityPart::Retiring);
        output.line(match retiring {
            true => "nobody needs the old one: `rackbus control ca retire` ends it",
            false => "everybody trusts the new one: it signs in a moment",
        });
        return;
    }
    let behind = status.behind.iter().map(|it| {
        let (since, until) = (moment(it.since), moment(it.until));
        vec![it.serial.clone().into(), short_name(&it.subject).into(), since.into(), until.into()]
    });
    output.table(&["waits for", "whose", "since", "until"], behind.collect());
}
