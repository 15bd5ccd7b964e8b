//! What-if: a rack and workload with some of their files' values changed.
//!
//! A key names a value by its path in the file: `timing.ntb.latency`, `hosts.lender.iommu`,
//! `fabric.links.0.lanes`, `flows.backup.size`, `timing.parts."alpha/gpu0".tags`.

use rackbus_fabric::text::Problem;
use toml::{Table, Value};

use super::{Case, Source};
use crate::commands::misread;
use crate::output::Failure;

const FORM: &str = "write KEY=VALUE[,VALUE…], for example timing.ntb.latency=\"100 ns,350 ns\"";
/// What is in the workload's file; all else is in the rack's.
const WORKLOAD: &[&str] = &["flows", "duration", "warmup", "seed", "units", "shaping"];

/// Values of a key, one of which a variant has.
#[derive(Debug, Clone)]
pub struct Sweep {
    key: String,
    values: Vec<String>,
}

/// A choice of values.
#[derive(Debug, Clone)]
pub struct Variant {
    /// Keys and the values chosen.
    pub choice: Vec<(String, String)>,
    /// Path and text of the rack file.
    pub rack: Source,
    /// Path and text of the workload file.
    pub workload: Source,
}

impl Sweep {
    /// What is chosen for.
    pub fn key(&self) -> &str {
        &self.key
    }

    /// The values that the parameter takes, one variant each.
    pub fn values(&self) -> &[String] {
        &self.values
    }
}

impl std::str::FromStr for Sweep {
    type Err = String;

    fn from_str(text: &str) -> Result<Sweep, String> {
        let (key, values) = text.split_once('=').ok_or(FORM)?;
        let values: Vec<String> = values.split(',').map(|value| value.trim().to_owned()).collect();
        if key.is_empty() || values.iter().any(String::is_empty) {
            return Err(FORM.to_owned());
        }
        Ok(Sweep { key: key.to_owned(), values })
    }
}

/// All variants: each value of each key with each of the others, in their order.
pub fn all(rack: &Source, workload: &Source, sweeps: &[Sweep]) -> Result<Vec<Variant>, Failure> {
    let first = Variant { choice: Vec::new(), rack: rack.clone(), workload: workload.clone() };
    let mut variants = vec![first];
    for sweep in sweeps {
        let mut next = Vec::new();
        for variant in &variants {
            for value in &sweep.values {
                next.push(with(variant, &sweep.key, value)?);
            }
        }
        variants = next;
    }
    Ok(variants)
}

/// A variant with another value of a key.
///
/// # Errors
/// When the key's file is no TOML, or the key leads nowhere.
pub fn with(variant: &Variant, key: &str, value: &str) -> Result<Variant, Failure> {
    let mut variant = variant.clone();
    variant.choice.push((key.to_owned(), value.to_owned()));
    let path = path(key);
    let file = if in_workload(&path) { &mut variant.workload } else { &mut variant.rack };
    let mut table = table(file)?;
    let wrong = |what: String| Failure::usage(format!("{key}: {what}"), FORM);
    set(&mut table, &path, parse(value)).map_err(wrong)?;
    *file = file.changed(table.to_string(), &format!("with {key} = {value}"));
    Ok(variant)
}

/// The table that a file is.
///
/// # Errors
/// With the place of what is no TOML.
pub fn table(file: &Source) -> Result<Table, Failure> {
    let failed = |cause: toml::de::Error| {
        let (span, what) = (cause.span().unwrap_or(0..0), cause.message().to_owned());
        let problem = Problem { span, what, allowed: "the file is TOML (https://toml.io)".into() };
        misread(problem.locate(&file.name, &file.text))
    };
    file.text.parse().map_err(failed)
}

/// Which of a sweep's values a key has as the files have it.
///
/// # Errors
/// As [`table`].
pub fn present(variant: &Variant, key: &str, values: &[String]) -> Result<Option<usize>, Failure> {
    let path = path(key);
    let table = table(if in_workload(&path) { &variant.workload } else { &variant.rack })?;
    let whole = Value::Table(table);
    let found = path.iter().try_fold(&whole, |value, part| match value {
        Value::Table(inner) => inner.get(part),
        Value::Array(items) => items.get(part.parse::<usize>().ok()?),
        _ => None,
    });
    Ok(found.and_then(|found| values.iter().position(|value| parse(value) == *found)))
}

/// Whether a rack file tells of parts between hosts, or of links. Hosts of one that does not share memory.
pub fn is_joined_by_cables(rack: &Table) -> bool {
    let parts = ["adapters", "switches", "memories", "links"];
    let of = |name| rack.get("fabric").and_then(|fabric: &Value| fabric.get(name));
    parts.into_iter().filter_map(of).any(|parts| match parts {
        Value::Table(table) => !table.is_empty(),
        Value::Array(entries) => !entries.is_empty(),
        _ => true,
    })
}

/// What is wrong with a variant: what is wrong with the files as they are written comes first, as it has a place there.
pub fn as_written(rack: &Source, workload: &Source, variant: Failure) -> Failure {
    Case::read(rack, workload).err().unwrap_or(variant)
}

fn in_workload(path: &[String]) -> bool {
    path.first().is_some_and(|first| WORKLOAD.contains(&first.as_str()))
}

/// The parts of a key; quotes keep dots.
fn path(key: &str) -> Vec<String> {
    let mut parts = vec![String::new()];
    let mut quoted = false;
    for letter in key.chars() {
        match letter {
            '"' => quoted = !quoted,
            '.' if !quoted => parts.push(String::new()),
            letter => parts.last_mut().into_iter().for_each(|part| part.push(letter)),
        }
    }
    parts
}

/// A number, truth or array as TOML has it; all else is a text.
fn parse(text: &str) -> Value {
    let table: Result<Table, _> = format!("v = {text}").parse();
    let value = table.ok().and_then(|mut table| table.remove("v"));
    value.unwrap_or_else(|| Value::String(text.to_owned()))
}

fn set(table: &mut Table, path: &[String], value: Value) -> Result<(), String> {
    let (Some(first), rest) = (path.first(), path.get(1..).unwrap_or_default()) else {
        return Err("it names nothing".to_owned());
    };
    if rest.is_empty() {
        table.insert(first.clone(), value);
        return Ok(());
    }
    match table.entry(first.clone()).or_insert_with(|| Value::Table(Table::new())) {
        Value::Table(inner) => set(inner, rest, value),
        Value::Array(items) => {
            let count = items.len();
            let item = rest[0].parse::<usize>().ok().and_then(|nth| items.get_mut(nth));
            match item {
                Some(Value::Table(inner)) if rest.len() > 1 => set(inner, &rest[1..], value),
                _ => Err(format!("`{first}` has entries 0 to {}", count.saturating_sub(1))),
            }
        }
        _ => Err(format!("`{first}` is a single value")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn source(text: &str) -> Source {
        Source { name: "x.toml".into(), text: text.into(), ..Source::default() }
    }

    #[test]
    fn variants_are_all_choices_of_values() {
        let rack = source("name = \"lab\"\n[[fabric.links]]\nlanes = 4\n");
        let workload = source("[flows.a]\nsize = \"4 KiB\"\n");
        let sweeps =
            ["fabric.links.0.lanes=8,16", "flows.a.size=1 KiB", "timing.parts.\"a/b\".tags=3"]
                .map(|text| text.parse().unwrap());
        let variants = all(&rack, &workload, &sweeps).unwrap();
        assert_eq!(variants.len(), 2);
        let table: Table = variants[1].rack.text.parse().unwrap();
        assert_eq!(table["fabric"]["links"][0]["lanes"].as_integer(), Some(16));
        assert_eq!(table["timing"]["parts"]["a/b"]["tags"].as_integer(), Some(3));
        assert!(variants[0].workload.text.contains("1 KiB"));
    }

    #[test]
    fn what_cannot_be_set_is_refused() {
        let rack = source("name = \"lab\"\n[[fabric.links]]\nlanes = 4\n");
        for key in ["fabric.links.1.lanes=8", "name.x=1"] {
            let sweep = key.parse().unwrap();
            assert!(all(&rack, &source(""), &[sweep]).is_err(), "{key}");
        }
        assert!("timing".parse::<Sweep>().is_err());
        assert!("a=1,,2".parse::<Sweep>().is_err());
    }
}
