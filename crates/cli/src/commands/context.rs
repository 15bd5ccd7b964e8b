//! `rackbus context`: the racks that this user has logged in to.

use rackbus_identity::now;
use serde_json::{Value, json};

use crate::Common;
use crate::contexts::{self, ContextStore, LOCAL, RackContext};
use crate::output::{Cell, Failure, Output, Tone};

/// Show, choose or remove the racks that you have logged in to with `rackbus login`.
#[derive(Debug, clap::Args)]
#[command(after_help = "Examples:
  rackbus context list
  rackbus context use lab          commands are for rack lab from now on
  rackbus context use local        for the rack of this machine again
  rackbus --context lab status     for one command; RACKBUS_CONTEXT=lab for a shell
  rackbus context remove lab       with its certificate and key")]
pub struct Args {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, clap::Subcommand)]
enum Command {
    /// List the contexts, and mark the current one.
    List,
    /// Have commands mean the rack of this context; `local`: the rack of this machine.
    Use { name: String },
    /// Show a context: its control planes, and who you are there. The one that is used unless named.
    Show { name: Option<String> },
    /// Forget a context, with its certificate and key.
    Remove { name: String },
}

impl Args {
    pub fn run(&self, common: &Common, output: &Output) -> Result<(), Failure> {
        let contexts = ContextStore::own()?;
        match &self.command {
            Command::List => {
                // Where the current one cannot be told, this list is what another one is chosen from.
                let current = contexts.current().unwrap_or_default();
                let all = contexts.names().into_iter().map(|name| {
                    let is_current = current.as_ref() == Some(&name);
                    let found = contexts.get(&name);
                    found.and_then(|context| described(&context, is_current)).unwrap_or_else(
                        |failure| json!({ "name": name, "current": is_current, "error": failure.error }),
                    )
                });
                let all: Vec<Value> = all.collect();
                output.result(&all, |o| table(&all, o));
            }
            Command::Use { name } => {
                contexts.set_current(Some(name.as_str()).filter(|name| *name != LOCAL))?;
                output.result(&json!({ "current": name }), |o| {
                    o.line(&match name == LOCAL {
                        true => "commands are for the rack of this machine".to_owned(),
                        false => format!("commands are for the rack of context {name}"),
                    });
                });
            }
            Command::Show { name } => {
                let context = match name {
                    Some(name) => contexts.get(name)?,
                    None => contexts::chosen(common)?.ok_or_else(|| {
                        let remedy = "name one; `rackbus context list` lists them";
                        Failure::usage("no context is used", remedy)
                    })?,
                };
                let is_current =
                    contexts.current().is_ok_and(|it| it.as_ref() == Some(&context.name));
                let shown = described(&context, is_current)?;
                output.result(&shown, |o| {
                    for (key, value) in shown.as_object().into_iter().flatten() {
                        let text = value.as_str().map_or_else(|| value.to_string(), str::to_owned);
                        o.line(&format!("{key:<16}{text}"));
                    }
                });
            }
            Command::Remove { name } => {
                contexts.remove(name)?;
                output.result(&json!({ "removed": name }), |o| {
                    o.line(&format!("context {name} is removed, with its certificate"));
                });
            }
        }
        Ok(())
    }
}

/// A context as programs see it.
pub fn described(context: &RackContext, is_current: bool) -> Result<Value, Failure> {
    let credentials = context.credentials()?;
    let certified = credentials.certified();
    Ok(json!({
        "name": context.name,
        "current": is_current,
        "rack": context.noted.rack,
        "subject": certified.subject,
        "serial": certified.serial,
        "until": contexts::moment(certified.until),
        "over": certified.is_over(now()),
        "control_planes": context.noted.control_planes,
    }))
}

fn table(all: &[Value], output: &Output) {
    let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
    let rows = all.iter().map(|it| {
        let (bad, until) = match it["error"].as_str() {
            Some(error) => (true, error.to_owned()),
            None => (it["over"] == true, text(&it["until"])),
        };
        let tone = if bad { Tone::Bad } else { Tone::Plain };
        vec![
            if it["current"] == true { "*" } else { "" }.into(),
            text(&it["name"]).into(),
            text(&it["rack"]).into(),
            text(&it["subject"]).trim_end_matches(".user.rackbus").to_owned().into(),
            Cell(until, tone),
        ]
    });
    output.table(&["", "context", "rack", "user and role", "good until"], rows.collect());
}
