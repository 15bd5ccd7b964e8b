//! What a host's processor brings: root complex, IOMMU, memory, cores. The values of each kind of host, and where
//! they are from, are in `profiles/`.

use std::collections::BTreeMap;

use rackbus_fabric::text::{Parsed, Section, list, subsection, wrong};
use toml::Spanned;
use toml::de::{DeTable, DeValue};

use super::file::{count, power, power_or_none, rate_or_none, set, time, within_mps};
use super::profiles;
use crate::time::Time;

/// What a host's processor brings.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct HostTiming {
    /// The profile that it is of.
    pub profile: String,
    /// What packets meet between its links, its processors and its memory.
    pub root: RootTiming,
    /// Its IOMMU, where it is on.
    pub iommu: IommuTiming,
    /// All channels of its memory together.
    pub memory: MemoryTiming,
    /// What its cores take for stores, loads, polling and interrupts.
    pub cpu: CpuTiming,
}

impl Default for HostTiming {
    fn default() -> Self {
        profiles::usual().clone()
    }
}

/// How root complexes behave.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RootTiming {
    /// For requests on their way from the processor, to memory, or from port to port.
    pub latency: Time,
    /// For completions on such routes.
    pub completion_latency: Time,
    /// The most bytes of a read request that passes from port to port; longer ones are split. 0 passes
    /// them as they are. Seen on a Xeon E5: Device Lending (2019, section 7.1).
    pub split: u32,
    /// Such requests under way at a time.
    pub trackers: u32,
    /// Bytes per second of writes that pass from port to port. 0: what the links let through.
    pub peer_writes: u64,
    /// Completions of a split request are combined to so many bytes; 0 passes them as they come.
    /// Device Lending (2019) saw the pieces, and says nothing of completions.
    pub combine: u32,
}

impl Default for RootTiming {
    fn default() -> Self {
        profiles::usual().root.clone()
    }
}

/// What an IOMMU's cache holds and what translations take.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct IommuTiming {
    /// Translations in the cache. Neugebauer and others (SIGCOMM 2018) found the throughput to
    /// drop past 64 pages.
    pub entries: u32,
    /// Bytes of a page.
    pub page: u64,
    /// A translation that is in the cache. 0: within the root's latency.
    pub hit: Time,
    /// One that is not. The same authors measured about 330 ns.
    pub walk: Time,
    /// Walks at a time.
    pub walkers: u32,
}

impl Default for IommuTiming {
    fn default() -> Self {
        profiles::usual().iommu.clone()
    }
}

/// How long accesses to memory take, and how many bytes per second there are.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MemoryTiming {
    /// From a request's coming to its data's going, or a write's being seen.
    pub latency: Time,
    /// What all channels together transfer, in bytes per second.
    pub bandwidth: u64,
    /// The most bytes of a completion. 0: the MPS.
    pub completion: u32,
    /// Reads of more bytes than this are answered with completions of `long_completion`. 0: none is.
    pub long_read: u32,
    /// The most bytes of a completion of a long read. 0: the MPS. Refused in a file where `long_read` is 0.
    pub long_completion: u32,
    /// Added to a write of less than a cache line, whose line is read first.
    pub partial_write: Time,
}

impl Default for MemoryTiming {
    fn default() -> Self {
        profiles::usual().memory.clone()
    }
}

/// What a core takes for stores to, and loads from, windows and registers.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CpuTiming {
    /// Bytes of a write-combining buffer, no more than the MPS: stores to a window leave in packets of these.
    pub line: u32,
    /// The least time from one to the next.
    pub fill: Time,
    /// How many may wait for the root. Intel's cores have ten line fill buffers.
    pub window: u32,
    /// From an uncached load or store to its packet, and from a completion to the register.
    pub issue: Time,
    /// From a byte's landing in memory to its being seen by a loop that polls it.
    pub poll: Time,
    /// A call of the copying routine and the flush of its buffers.
    pub copy_call: Time,
    /// Reads of windows under way at a time. 1: uncached loads wait for each other.
    pub loads: u32,
    /// From an interrupt's coming to its handler.
    pub interrupt: Time,
}

impl Default for CpuTiming {
    fn default() -> Self {
        profiles::usual().cpu.clone()
    }
}

/// The sections that tell of a host.
pub(super) const SECTIONS: &[&str] = &["root", "iommu", "memory", "cpu"];

impl HostTiming {
    /// Sets what a table tells of a host in a rack of that MPS; `place` is the table's, for messages.
    pub(super) fn read(&mut self, table: &DeTable<'_>, place: &str, mps: u32) -> Parsed<()> {
        let at = |name: &str| format!("{place}.{name}");
        if let Some(value) = table.get("root") {
            let keys =
                &["latency", "completion_latency", "split", "trackers", "peer_writes", "combine"];
            let (part, root) = (subsection(value, &at("root"), keys)?, &mut self.root);
            set(&mut root.latency, time(&part, "latency")?);
            set(&mut root.completion_latency, time(&part, "completion_latency")?);
            set(&mut root.split, power_or_none(&part, "split", 1, 4096)?);
            set(&mut root.trackers, count(&part, "trackers", 1, 1 << 20)?);
            set(&mut root.peer_writes, rate_or_none(&part, "peer_writes")?);
            set(&mut root.combine, power_or_none(&part, "combine", 1, 4096)?);
        }
        if let Some(value) = table.get("iommu") {
            let keys = &["entries", "page", "hit", "walk", "walkers"];
            let (part, iommu) = (subsection(value, &at("iommu"), keys)?, &mut self.iommu);
            set(&mut iommu.entries, count(&part, "entries", 1, 1 << 24)?);
            set(&mut iommu.page, power(&part, "page", 4096, 1 << 30)?.map(u64::from));
            set(&mut iommu.hit, time(&part, "hit")?);
            set(&mut iommu.walk, time(&part, "walk")?);
            set(&mut iommu.walkers, count(&part, "walkers", 1, 1024)?);
        }
        if let Some(value) = table.get("memory") {
            let keys = &[
                "latency",
                "bandwidth",
                "completion",
                "long_read",
                "long_completion",
                "partial_write",
            ];
            let (part, memory) = (subsection(value, &at("memory"), keys)?, &mut self.memory);
            set(&mut memory.latency, time(&part, "latency")?);
            set(&mut memory.bandwidth, part.rate("bandwidth")?);
            set(&mut memory.completion, power_or_none(&part, "completion", 1, 4096)?);
            set(&mut memory.long_read, power_or_none(&part, "long_read", 1, 4096)?);
            set(&mut memory.long_completion, power_or_none(&part, "long_completion", 1, 4096)?);
            if memory.long_read == 0
                && part.get("long_completion").is_some()
                && memory.long_completion != 0
            {
                let what = "`long_completion` is given, and no `long_read`";
                let allowed = "give `long_read` too: reads of more bytes than that are answered so";
                return wrong(part.place("long_completion"), what, allowed);
            }
            set(&mut memory.partial_write, time(&part, "partial_write")?);
        }
        if let Some(value) = table.get("cpu") {
            let keys =
                &["line", "fill", "window", "issue", "poll", "copy_call", "loads", "interrupt"];
            let (part, cpu) = (subsection(value, &at("cpu"), keys)?, &mut self.cpu);
            let line = power(&part, "line", 4, 4096)?;
            set(&mut cpu.line, within_mps(&part, "line", line, mps, "")?);
            set(&mut cpu.fill, time(&part, "fill")?);
            set(&mut cpu.window, count(&part, "window", 1, 1 << 20)?);
            set(&mut cpu.issue, time(&part, "issue")?);
            set(&mut cpu.poll, time(&part, "poll")?);
            set(&mut cpu.copy_call, time(&part, "copy_call")?);
            set(&mut cpu.loads, count(&part, "loads", 1, 1 << 20)?);
            set(&mut cpu.interrupt, time(&part, "interrupt")?);
        }
        Ok(())
    }
}

/// The hosts of a rack file: those that name nothing of their own, and the others. A host's values are those
/// of its profile, of `[timing.root]` and its like, which are for all hosts, and of `[timing.hosts.NAME]`;
/// what comes later wins.
pub(super) fn hosts(
    file: &DeTable<'_>,
    timing: &Section<'_>,
    mps: u32,
) -> Parsed<(HostTiming, BTreeMap<String, HostTiming>)> {
    let own = own_profiles(timing, mps)?;
    let all = file.get("timing").and_then(|value| value.get_ref().as_table());
    let with = |profile: &HostTiming| -> Parsed<HostTiming> {
        let mut host = profile.clone();
        all.map_or(Ok(()), |table| host.read(table, "timing", mps))?;
        Ok(host)
    };
    let usual = match timing.get("profile") {
        Some(value) => with(named(value, &own)?)?,
        None => with(profiles::usual())?,
    };
    let mut hosts = BTreeMap::new();
    let described = file.get("hosts").and_then(|value| value.get_ref().as_table());
    let nothing = DeTable::new();
    let described = described.unwrap_or(&nothing);
    for (name, value) in described {
        let profile = value.get_ref().as_table().and_then(|host| host.get("profile"));
        if let Some(profile) = profile {
            hosts.insert(name.get_ref().to_string(), with(named(profile, &own)?)?);
        }
    }
    for entry in timing.tables("hosts")? {
        if !described.contains_key(entry.name) {
            let known: Vec<&str> = described.keys().map(|name| name.get_ref().as_ref()).collect();
            let what = format!("the rack has no host `{}`", entry.name);
            return wrong(entry.span, what, format!("its hosts are {}", list(&known)));
        }
        let place = format!("timing.hosts.{}", entry.name);
        Section::new(entry.table, entry.span.clone(), place.clone(), SECTIONS)?;
        let host = hosts.entry(entry.name.to_owned()).or_insert_with(|| usual.clone());
        host.read(entry.table, &place, mps)?;
    }
    Ok((usual, hosts))
}

/// The profile that a value names.
fn named<'p>(
    value: &Spanned<DeValue<'_>>,
    own: &'p BTreeMap<String, HostTiming>,
) -> Parsed<&'p HostTiming> {
    let mut known: Vec<&str> = profiles::all().keys().map(String::as_str).collect();
    known.extend(own.keys().map(String::as_str));
    let allowed = format!("a profile is one of {}", list(&known));
    let DeValue::String(word) = value.get_ref() else {
        let what = rackbus_fabric::text::mismatch("profile", value.get_ref());
        return wrong(value.span(), what, allowed);
    };
    let word: &str = word;
    match own.get(word).or_else(|| profiles::all().get(word)) {
        Some(found) => Ok(found),
        None => wrong(value.span(), format!("there is no profile `{word}`"), allowed),
    }
}

/// The profiles that a rack file adds.
fn own_profiles(timing: &Section<'_>, mps: u32) -> Parsed<BTreeMap<String, HostTiming>> {
    let mut own = BTreeMap::new();
    for entry in timing.tables("profiles")? {
        let place = format!("timing.profiles.{}", entry.name);
        let keys = &["root", "iommu", "memory", "cpu", "like"];
        let section = Section::new(entry.table, entry.span.clone(), place.clone(), keys)?;
        let known: Vec<&str> = profiles::all().keys().map(String::as_str).collect();
        let allowed = format!("`like` is one of {}", list(&known));
        let like = section.text("like", &allowed)?;
        let mut host = match like {
            None => profiles::usual().clone(),
            Some((word, span)) => match profiles::all().get(word) {
                Some(host) => host.clone(),
                None => return wrong(span, format!("there is no profile `{word}`"), allowed),
            },
        };
        host.profile = entry.name.to_owned();
        host.read(entry.table, &place, mps)?;
        own.insert(entry.name.to_owned(), host);
    }
    Ok(own)
}
