//! Distributions as files write them: of services, thoughts and bursts.

use rackbus_fabric::text::{Parsed, Section, wrong};
use toml::Spanned;
use toml::de::{DeTable, DeValue};

use super::file::time;
use crate::random::Distribution;
use crate::time::Time;

const SPREADS: &str = "write a duration, { exponential = \"10 us\" }, { lognormal = \"10 us\", sigma = 0.3 } or \
                       { measured = [[\"8 us\", 50], [\"20 us\", 3]] }";

/// How long something takes: always the same, or as a distribution says.
pub(super) fn spread(section: &Section<'_>, key: &'static str) -> Parsed<Option<Distribution>> {
    let Some(value) = section.get(key) else { return Ok(None) };
    let DeValue::Table(table) = value.get_ref() else {
        return Ok(time(section, key)?.map(Distribution::Fixed));
    };
    let keys = &["exponential", "lognormal", "sigma", "measured"];
    let own = Section::new(table, value.span(), key, keys)?;
    let (exponential, lognormal) = (time(&own, "exponential")?, time(&own, "lognormal")?);
    let found = match (exponential, lognormal, own.get("sigma"), own.get("measured")) {
        (Some(mean), None, None, None) => Distribution::Exponential(mean),
        (None, Some(mean), Some(sigma), None) => {
            let number = match sigma.get_ref() {
                DeValue::Float(float) => float.as_str().parse().ok(),
                _ => None,
            };
            match number.filter(|sigma: &f64| (0.001..=3.0).contains(sigma)) {
                Some(number) => Distribution::LogNormal(mean, (number * 1e3).round() as u32),
                None => {
                    let allowed = "it is a number with a point, from 0.001 to 3.0";
                    return wrong(sigma.span(), "`sigma` is no deviation of a logarithm", allowed);
                }
            }
        }
        (None, None, None, Some(counts)) => measured(counts)?,
        _ => return wrong(value.span(), format!("`{key}` is no distribution"), SPREADS),
    };
    Ok(Some(found))
}

/// Spans that rise, with counts.
fn measured(counts: &Spanned<DeValue<'_>>) -> Parsed<Distribution> {
    let refuse = |span, what: &str| wrong(span, what, SPREADS);
    let DeValue::Array(entries) = counts.get_ref() else {
        return refuse(counts.span(), "`measured` is no list");
    };
    let mut found: Vec<(Time, u64)> = Vec::new();
    for entry in entries.iter() {
        let (span, count) = match entry.get_ref().as_array().map(|pair| &pair[..]) {
            Some([span, count]) => (span, count),
            _ => return refuse(entry.span(), "an entry of `measured` is no pair"),
        };
        let (span, count) = (span_of(span)?, rackbus_fabric::text::integer(count.get_ref()));
        let rises = found.last().is_none_or(|(before, _)| *before < span);
        match count.filter(|count| (1..=1 << 40).contains(count) && rises) {
            Some(count) => found.push((span, count)),
            None => return refuse(entry.span(), "spans rise, and counts are from 1 to 2^40"),
        }
    }
    if found.is_empty() || found.len() > 100_000 {
        return refuse(counts.span(), "`measured` has no entry, or more than 100,000");
    }
    Ok(Distribution::Measured(found))
}

fn span_of(value: &Spanned<DeValue<'_>>) -> Parsed<Time> {
    let mut single = DeTable::new();
    single.insert(Spanned::new(value.span(), std::borrow::Cow::Borrowed("span")), value.clone());
    let section = Section::new(&single, value.span(), "measured", &["span"])?;
    Ok(time(&section, "span")?.unwrap_or(Time::ZERO))
}
