//! `rackbus whoami`: who the control plane takes this user for.

use serde_json::json;

use crate::Common;
use crate::commands::client;
use crate::contexts;
use crate::output::{Failure, Output};

/// Show as whom the control plane knows you, and what you may do.
#[derive(Debug, clap::Args)]
#[command(after_help = "Examples:
  rackbus whoami
  rackbus --context lab whoami --json | jq -r .role")]
pub struct Args {}

impl Args {
    pub async fn run(&self, common: &Common, output: &Output) -> Result<(), Failure> {
        let context = contexts::chosen(common)?;
        let known = client(common).await?.whoami().await?;
        // What is kept now: asking may have renewed it.
        let certified = context.as_ref().map(|it| it.credentials()).transpose()?;
        let certified = certified.as_ref().map(|it| it.certified());
        let mut shown = serde_json::to_value(&known).unwrap_or_default();
        if let (Some(context), Some(certified)) = (&context, certified) {
            shown["context"] = json!(context.name);
            shown["serial"] = json!(certified.serial);
            shown["until"] = json!(contexts::moment(certified.until));
        }
        output.result(&shown, |o| {
            o.line(&format!("{} in rack {}: {}", known.asker, known.rack, may(&known.asker.role)));
            if let (Some(context), Some(certified)) = (&context, certified) {
                o.line(&format!(
                    "context {}, certificate {}, good until {}",
                    context.name,
                    certified.serial,
                    contexts::moment(certified.until)
                ));
            }
        });
        Ok(())
    }
}

/// What a role may do, in a few words.
fn may(role: &str) -> &'static str {
    match role {
        "local" | "control" | "administrator" => "administrates the rack",
        "operator" => "borrows, returns and withdraws for all hosts",
        "borrower" | "node" => "borrows and returns for that host, reads the rest",
        "reader" => "reads",
        _ => "may do nothing",
    }
}
