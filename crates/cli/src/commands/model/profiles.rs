//! `rackbus model profiles`: what hosts can be taken to be, and where each value is from.

use rackbus_model::timing::profiles::{USUAL, Value, all, values};
use serde::Serialize;

use crate::output::{Cell, Failure, Output};

/// List what hosts can be taken to be, or the values of one profile with their sources.
#[derive(Debug, clap::Args)]
#[command(after_help = "Examples:
  rackbus model profiles
  rackbus model profiles genoa")]
pub struct Args {
    /// Which one; all when none is named.
    #[arg(value_name = "NAME")]
    name: Option<String>,
}

#[derive(Debug, Serialize)]
struct Profile {
    name: String,
    what: String,
    values: Vec<Value>,
}

impl Args {
    pub fn run(&self, output: &Output) -> Result<(), Failure> {
        let names = all().keys().filter(|name| self.name.as_ref().is_none_or(|own| own == *name));
        let found = names.filter_map(|name| {
            let (what, values) = values(name)?;
            Some(Profile { name: name.clone(), what, values })
        });
        let found: Vec<Profile> = found.collect();
        if found.is_empty() {
            let known: Vec<&str> = all().keys().map(String::as_str).collect();
            let name = self.name.as_deref().unwrap_or_default();
            let error = format!("there is no profile `{name}`");
            return Err(Failure::usage(error, format!("they are {}", known.join(", "))));
        }
        output.result(&found, |o| match (&self.name, &found[..]) {
            (Some(_), [one]) => {
                o.line(&format!("{}: {}", one.name, one.what));
                let row = |value: &Value| -> Vec<Cell> {
                    [&value.key, &value.value, &value.source]
                        .map(|text| text.as_str().into())
                        .into()
                };
                o.table(&["key", "value", "source"], one.values.iter().map(row).collect());
            }
            _ => {
                let row = |profile: &Profile| -> Vec<Cell> {
                    let usual = if profile.name == USUAL { " (the default)" } else { "" };
                    vec![format!("{}{usual}", profile.name).into(), profile.what.as_str().into()]
                };
                o.table(&["profile", "stands for"], found.iter().map(row).collect());
            }
        });
        Ok(())
    }
}
