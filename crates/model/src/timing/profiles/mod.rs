//! Kinds of hosts: a file each, every value with its source.
//!
//! What nobody published is called an estimate there. A profile stands for a kind of machine, not for the one
//! that a rack will have: settings of its firmware alone move latencies by a tenth.

use std::collections::BTreeMap;
use std::sync::LazyLock;

use toml::de::{DeTable, DeValue};

use super::{CpuTiming, HostTiming, IommuTiming, MemoryTiming, RootTiming};
use crate::time::Time;

/// The profile of hosts that name none: a current server of two sockets.
pub const USUAL: &str = "sapphire-rapids";

const FILES: &[(&str, &str)] = &[
    ("desktop", include_str!("desktop.toml")),
    ("xeon-e5-v3", include_str!("xeon-e5-v3.toml")),
    ("xeon-e5-v4", include_str!("xeon-e5-v4.toml")),
    ("ice-lake", include_str!("ice-lake.toml")),
    (USUAL, include_str!("sapphire-rapids.toml")),
    ("genoa", include_str!("genoa.toml")),
];

static ALL: LazyLock<BTreeMap<String, HostTiming>> = LazyLock::new(|| {
    let read = |(name, text): &(&str, &str)| ((*name).to_owned(), read(name, text));
    FILES.iter().map(read).collect()
});

/// The profiles, by name.
pub fn all() -> &'static BTreeMap<String, HostTiming> {
    &ALL
}

/// The one of hosts that name none.
pub fn usual() -> &'static HostTiming {
    &ALL[USUAL]
}

/// A value of a profile, as its file has it.
#[derive(Debug, Clone, PartialEq, Eq, serde::Serialize)]
pub struct Value {
    /// Its key in `[timing]`: `root.latency`.
    pub key: String,
    /// The value as the profile's file writes it, with its unit.
    pub value: String,
    /// Where it is from.
    pub source: String,
}

/// What a profile stands for, and its values.
pub fn values(name: &str) -> Option<(String, Vec<Value>)> {
    let (_, text) = FILES.iter().find(|(other, _)| *other == name)?;
    let table = DeTable::parse(text).ok()?;
    let table = table.get_ref();
    let text = |value: &DeValue<'_>| match value {
        DeValue::String(text) => text.to_string(),
        DeValue::Integer(number) => number.to_string(),
        _ => String::new(),
    };
    let sources = table.get("sources")?.get_ref().as_table()?;
    let mut values = Vec::new();
    for section in super::host::SECTIONS {
        for (key, value) in table.get(*section)?.get_ref().as_table()? {
            let key = format!("{section}.{}", key.get_ref());
            let source = sources.get(key.as_str()).map(|source| text(source.get_ref()));
            let value = text(value.get_ref());
            values.push(Value { key, value, source: source.unwrap_or_default() });
        }
    }
    Some((text(table.get("what")?.get_ref()), values))
}

/// What of a profile was held against no measurement; `None` where there are measurements of such a host, or no such
/// profile.
pub fn untried(name: &str) -> Option<String> {
    let (_, text) = FILES.iter().find(|(other, _)| *other == name)?;
    let table = DeTable::parse(text).ok()?;
    table.get_ref().get("untried")?.get_ref().as_str().map(str::to_owned)
}

/// What every profile fits: the least MPS that there is.
const LEAST_MPS: u32 = 128;

/// Reads a file, which sets every value.
///
/// # Panics
/// When it is wrong: the files are part of the crate, and tested.
fn read(name: &str, text: &str) -> HostTiming {
    let none = Time::ZERO;
    let mut host = HostTiming {
        profile: name.to_owned(),
        root: RootTiming {
            latency: none,
            completion_latency: none,
            split: 0,
            trackers: 1,
            peer_writes: 0,
            combine: 0,
        },
        iommu: IommuTiming { entries: 1, page: 4096, hit: none, walk: none, walkers: 1 },
        memory: MemoryTiming {
            latency: none,
            bandwidth: 1,
            completion: 0,
            long_read: 0,
            long_completion: 0,
            partial_write: none,
        },
        cpu: CpuTiming {
            line: 64,
            fill: none,
            window: 1,
            issue: none,
            poll: none,
            copy_call: none,
            loads: 1,
            interrupt: none,
        },
    };
    let table = DeTable::parse(text).unwrap_or_else(|error| panic!("{name}: {error}"));
    let done = host.read(table.get_ref(), name, LEAST_MPS);
    done.unwrap_or_else(|problem| panic!("{name}: {}", problem.what));
    host
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_profile_sets_every_value_and_says_where_it_is_from() {
        let keys = |name: &str| -> Vec<String> {
            values(name).unwrap().1.into_iter().map(|value| value.key).collect()
        };
        assert_eq!(keys(USUAL).len(), 6 + 5 + 6 + 8);
        for (name, _) in FILES {
            assert_eq!(keys(name), keys(USUAL), "{name}");
            for value in values(name).unwrap().1 {
                assert!(value.source.len() > 10, "{name}: {} has no source", value.key);
            }
        }
    }

    /// What was measured on other machines is an estimate here, whoever published it.
    #[test]
    fn what_was_measured_on_another_kind_of_host_is_called_an_estimate() {
        for (name, _) in FILES {
            for value in values(name).unwrap().1 {
                let elsewhere = value.source.contains("pcie-bench") && !name.starts_with("xeon-e5")
                    || value.source.contains("SISCI") && *name != "desktop";
                assert!(
                    !elsewhere || value.source.starts_with("estimate"),
                    "{name}: {} is from {}",
                    value.key,
                    value.source
                );
            }
        }
    }

    #[test]
    fn a_servers_dma_read_takes_what_servers_take() {
        for (name, host) in all() {
            let (root, memory) = (&host.root, &host.memory);
            let inside = (root.latency + root.completion_latency + memory.latency).ns();
            assert!((300.0..700.0).contains(&inside), "{name}: {inside} ns");
        }
    }
}
