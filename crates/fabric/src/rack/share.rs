//! The file's `[[share]]` rules: who may use whose segments.

use std::ops::RangeInclusive;

use toml::Spanned;
use toml::de::DeValue;

use super::{Host, ShareAccess, ShareRule, With};
use crate::sharing::segment_range;
use crate::text::{Parsed, Section, integer, list, mismatch, subsection, wrong};

const FORM: &str = "write [[share]] with host, segments, with and access";

const SEGMENTS: &str = "write \"*\" for all, a segment id, or a range of them: \"0x100-0x1ff\"; or several in an array";

const ACCESS: &str = "`access` is one of `read`, `write` (read and write) and `none`";

pub(super) fn rules(value: &Spanned<DeValue<'_>>, hosts: &[Host]) -> Parsed<Vec<ShareRule>> {
    let DeValue::Array(entries) = value.get_ref() else {
        return wrong(value.span(), mismatch("share", value.get_ref()), FORM);
    };
    entries.iter().map(|entry| rule(entry, hosts)).collect()
}

fn rule(entry: &Spanned<DeValue<'_>>, hosts: &[Host]) -> Parsed<ShareRule> {
    let section = subsection(entry, "share", &["host", "segments", "with", "access"])?;
    let allowed = format!("`host` is one of {}", known(hosts));
    let owner = section.require("host", section.get("host"), &allowed)?;
    let owner = host(owner, "host", hosts, &allowed)?;
    let segments = each(section.require("segments", section.get("segments"), SEGMENTS)?);
    let segments = segments.into_iter().map(range).collect::<Parsed<Vec<_>>>()?;
    if segments.is_empty() {
        return wrong(section.place("segments"), "`segments` names none", SEGMENTS);
    }
    let with = with(&section, hosts)?;
    let access = match section.require("access", section.text("access", ACCESS)?, ACCESS)? {
        ("none", _) => ShareAccess::None,
        ("read", _) => ShareAccess::Read,
        ("write", _) => ShareAccess::Write,
        (other, span) => return wrong(span, format!("there is no access `{other}`"), ACCESS),
    };
    Ok(ShareRule { owner, segments, with, access })
}

fn with(section: &Section<'_>, hosts: &[Host]) -> Parsed<With> {
    let allowed = format!("write \"*\" for every host, or an array of {}", known(hosts));
    let value = section.require("with", section.get("with"), &allowed)?;
    match value.get_ref() {
        DeValue::String(text) if text == "*" => Ok(With::All),
        DeValue::Array(names) if !names.is_empty() => {
            let names = names.iter().map(|name| host(name, "with", hosts, &allowed));
            Ok(With::Hosts(names.collect::<Parsed<_>>()?))
        }
        DeValue::Array(_) => wrong(value.span(), "`with` names no host", allowed),
        other => wrong(value.span(), mismatch("with", other), allowed),
    }
}

fn known(hosts: &[Host]) -> String {
    list(&hosts.iter().map(|host| host.name.as_str()).collect::<Vec<_>>())
}

fn host(value: &Spanned<DeValue<'_>>, key: &str, hosts: &[Host], allowed: &str) -> Parsed<String> {
    match value.get_ref() {
        DeValue::String(name) if hosts.iter().any(|host| host.name == *name) => {
            Ok(name.to_string())
        }
        DeValue::String(name) => wrong(value.span(), format!("there is no host `{name}`"), allowed),
        other => wrong(value.span(), mismatch(key, other), allowed),
    }
}

/// What an array has, or the one value that stands for it.
fn each<'a>(value: &'a Spanned<DeValue<'a>>) -> Vec<&'a Spanned<DeValue<'a>>> {
    match value.get_ref() {
        DeValue::Array(values) => values.iter().collect(),
        _ => vec![value],
    }
}

fn range(value: &Spanned<DeValue<'_>>) -> Parsed<RangeInclusive<u32>> {
    let found = match value.get_ref() {
        DeValue::String(text) => segment_range(text),
        other => integer(other).and_then(|id| u32::try_from(id).ok()).map(|id| id..=id),
    };
    match found {
        Some(range) if !range.is_empty() => Ok(range),
        Some(range) => {
            let what = format!("no segment is from {} to {}", range.start(), range.end());
            wrong(value.span(), what, SEGMENTS)
        }
        None => match value.get_ref() {
            DeValue::String(text) => {
                wrong(value.span(), format!("`{text}` is no segment id"), SEGMENTS)
            }
            other => wrong(value.span(), mismatch("segments", other), SEGMENTS),
        },
    }
}
