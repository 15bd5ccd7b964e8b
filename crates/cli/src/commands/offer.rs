//! `rackbus offer`: a device joins the running rack.

use rackbus_control::offers::{OfferRequest, RackSection};
use toml::{Table, Value};

use crate::Common;
use crate::commands::client;
use crate::output::{Failure, Output};

/// Offer a device of a host, which joins the rack without a restart.
#[derive(Debug, clap::Args)]
#[command(after_help = "Examples:
  rackbus offer alpha/nvme2 kind=nvme size='256 MiB' backing=file
  rackbus offer alpha/ssd kind=vfio address=0000:03:00.0
  rackbus offer alpha/nvme0                  again, what the rack file lists and was withdrawn
  rackbus withdraw alpha/nvme2               takes it out

The keys are those of a device in the rack file. What is offered stays offered when the control plane or the node is
restarted, until it is withdrawn.")]
pub struct Args {
    /// The device, HOST/NAME.
    device: String,
    /// What the rack file would say of it: KEY=VALUE, a value as in TOML; text needs no quotation marks.
    #[arg(value_name = "KEY=VALUE")]
    keys: Vec<String>,
}

impl Args {
    pub async fn run(&self, common: &Common, output: &Output) -> Result<(), Failure> {
        let request = OfferRequest {
            device: self.device.clone(),
            section: section(&self.keys)?,
            by_node: false,
        };
        let offered = client(common).await?.offer(&request).await?;
        show(&offered, "can be borrowed", output)
    }
}

/// Says what became of a device.
pub fn show(device: &RackSection, what: &str, output: &Output) -> Result<(), Failure> {
    let people = |output: &Output| output.line(&format!("{}: {what}", device.functions.join(", ")));
    output.result(device, people);
    Ok(())
}

/// The section of a device that the keys describe; nothing for none.
fn section(keys: &[String]) -> Result<Option<String>, Failure> {
    let mut table = Table::new();
    for key in keys {
        let Some((name, text)) = key.split_once('=').filter(|(name, _)| !name.is_empty()) else {
            let error = format!("`{key}` is not KEY=VALUE");
            return Err(Failure::usage(error, "write, for example, kind=nvme size='1 GiB'"));
        };
        let value = format!("value = {text}").parse::<Table>().ok();
        let value = value.filter(|table| table.len() == 1).and_then(|mut it| it.remove("value"));
        let value = value.unwrap_or_else(|| Value::String(text.to_owned()));
        // `functions.vf1` is a key of a table, as in TOML.
        let mut path: Vec<&str> = name.split('.').collect();
        let last = path.pop().unwrap_or(name);
        let mut place = &mut table;
        for part in path {
            let next = place.entry(part).or_insert_with(|| Value::Table(Table::new()));
            let Some(next) = next.as_table_mut() else {
                return Err(Failure::usage(
                    format!("`{part}` of {key} is a value"),
                    "name it once",
                ));
            };
            place = next;
        }
        if place.insert(last.to_owned(), value).is_some() {
            return Err(Failure::usage(format!("`{name}` is given twice"), "give it once"));
        }
    }
    let text = toml::to_string(&table);
    let text = text.map_err(|error| Failure::usage(error.to_string(), "write plain values"))?;
    Ok((!keys.is_empty()).then_some(text))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_are_values_of_toml_or_text() {
        let keys = ["kind=nvme", "size=1 GiB", "queues=4", "functions.vf1.size=\"1 MiB\""];
        let keys: Vec<String> = keys.iter().map(|key| (*key).to_owned()).collect();
        let text = section(&keys).unwrap().unwrap();
        let expected =
            "kind = \"nvme\"\nsize = \"1 GiB\"\nqueues = 4\n\n[functions.vf1]\nsize = \"1 MiB\"\n";
        assert_eq!(text, expected);
        assert_eq!(section(&[]).unwrap(), None);
        assert!(section(&["kind".to_owned()]).is_err());
        assert!(section(&["a=1".to_owned(), "a=2".to_owned()]).is_err());
        let text = section(&["a=1\nb=2".to_owned()]).unwrap().unwrap();
        assert_eq!(text.parse::<Table>().unwrap().len(), 1);
    }
}
