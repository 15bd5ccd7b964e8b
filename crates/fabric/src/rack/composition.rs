//! The file's `[[composition]]` tables: functions that a host borrows together.

use std::collections::BTreeSet;

use toml::Spanned;
use toml::de::DeValue;

use super::{CompositionConfig, DeclaredFunction, Host};
use crate::names::{self, is_name};
use crate::text::{Parsed, list, mismatch, subsection, wrong};

const FORM: &str = "write [[composition]] with name, host and functions";

const FUNCTIONS: &str = "write an array of functions of the rack: [\"alpha/nvme0\", \"beta/ram0\"]";

const ISOLATION: &str = "`isolation` is \"shared\" or \"strict\"";

/// All compositions; `knows_functions`: whether it is known which virtual functions the devices of `hosts` have.
pub(super) fn all(
    value: &Spanned<DeValue<'_>>,
    hosts: &[Host],
    knows_functions: bool,
) -> Parsed<Vec<CompositionConfig>> {
    let DeValue::Array(entries) = value.get_ref() else {
        return wrong(value.span(), mismatch("composition", value.get_ref()), FORM);
    };
    let mut names = BTreeSet::new();
    let mut read = |entry: &Spanned<DeValue<'_>>| {
        let (composition, place) = one(entry, hosts, knows_functions)?;
        if !names.insert(composition.name.clone()) {
            let what = format!("there is a composition `{}` already", composition.name);
            return wrong(place, what, "each composition has a name of its own");
        }
        Ok(composition)
    };
    entries.iter().map(&mut read).collect()
}

type Place = std::ops::Range<usize>;

/// The name of the device that `function` is a virtual function of, as far as names tell.
fn device_of(function: &str) -> Option<&str> {
    let (device, number) = function.rsplit_once(".vf")?;
    number.parse::<u16>().is_ok_and(|number| number > 0).then_some(device)
}

fn one(
    entry: &Spanned<DeValue<'_>>,
    hosts: &[Host],
    knows_functions: bool,
) -> Parsed<(CompositionConfig, Place)> {
    let keys = &["name", "host", "functions", "isolation"];
    let section = subsection(entry, "composition", keys)?;
    let (name, place) = section.require("name", section.text("name", FORM)?, FORM)?;
    if !is_name(name) {
        return wrong(place, format!("`{name}` is no name"), names::ALLOWED);
    }
    let known = list(&hosts.iter().map(|host| host.name.as_str()).collect::<Vec<_>>());
    let allowed = format!("`host` is one of {known}");
    let (host, at) = section.require("host", section.text("host", &allowed)?, &allowed)?;
    if !hosts.iter().any(|known| known.name == host) {
        return wrong(at, format!("there is no host `{host}`"), allowed);
    }
    let (functions, at) =
        section.require("functions", section.texts("functions", FUNCTIONS)?, FUNCTIONS)?;
    if functions.is_empty() {
        return wrong(at, "`functions` names none", FUNCTIONS);
    }
    for (nth, function) in functions.iter().enumerate() {
        let there = function.split_once('/').is_some_and(|(host, device)| {
            let has = |known: &DeclaredFunction| {
                known.function() == device
                    || !knows_functions && device_of(device) == Some(&*known.name)
            };
            hosts.iter().any(|known| known.name == host && known.devices.iter().any(has))
        });
        if !there {
            return wrong(at, format!("there is no function `{function}`"), FUNCTIONS);
        }
        if functions[..nth].contains(function) {
            return wrong(at, format!("`{function}` is named twice"), FUNCTIONS);
        }
    }
    let strict = match section.text("isolation", ISOLATION)? {
        None | Some(("shared", _)) => false,
        Some(("strict", _)) => true,
        Some((other, span)) => return wrong(span, format!("`isolation` is {other}"), ISOLATION),
    };
    let (name, host) = (name.to_owned(), host.to_owned());
    Ok((CompositionConfig { name, host, functions, strict }, place))
}
