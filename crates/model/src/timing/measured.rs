//! A profile of one's own host: what the output of a few usual tools tells of it, and what stays unknown.
//!
//! | tool | what is taken | what of it |
//! | --- | --- | --- |
//! | Intel MLC | `memory.latency`, `memory.bandwidth` | the least idle latency of a node's own memory; "ALL Reads" |
//! | lmbench `lat_mem_rd` | `memory.latency` | of the largest size, which must be beyond all caches |
//! | STREAM | `memory.bandwidth` | the best of its four rates |
//! | pcie-bench (NFP) | `root.latency`, `root.completion_latency`, `iommu.entries` | a warm 64 B DMA read, halved; where windows grow slow |
//! | fio (JSON) | `cpu.interrupt` | how much longer a lone read takes without polling (`hipri`) |
//!
//! Where two tools tell the same, the smaller latency and the greater bandwidth count: what disturbs a measurement
//! makes it worse.

mod tools;

use std::collections::BTreeMap;
use std::ops::Range;

use rackbus_fabric::text::{FileError, Parsed, wrong};

use super::HostTiming;
use super::profiles::{self, Value};
use tools::read;

/// Sizes from which on `lat_mem_rd` reads memory and no cache, in MB.
const BEYOND_CACHES: f64 = 256.0;
/// Bytes of a page of an IOMMU.
const PAGE: f64 = 4096.0;

/// What a file tells: a value, and from which line.
#[derive(Debug, Clone, PartialEq)]
struct MeasuredValue {
    key: Key,
    value: f64,
    source: String,
}

/// What can be measured.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Key {
    /// A load from local memory, in nanoseconds.
    MemoryLatency,
    /// What local memory delivers, in bytes per second.
    MemoryBandwidth,
    /// Nanoseconds of a DMA read of 64 B.
    DmaRead,
    /// Translations that the IOMMU's cache holds.
    IommuEntries,
    /// From a device's interrupt to its handler, in nanoseconds.
    Interrupt,
}

impl Key {
    /// What a machine may have, least and most, and in words: what is beyond is no measurement.
    fn range(self) -> (f64, f64, &'static str) {
        match self {
            Key::MemoryLatency => (1.0, 1e5, "1 ns to 100 us"),
            Key::MemoryBandwidth => (1e8, 1e14, "100 MB/s to 100 TB/s"),
            Key::DmaRead => (10.0, 1e6, "10 ns to 1 ms"),
            Key::IommuEntries => (1.0, 16_777_216.0, "a page to 64 GiB"),
            Key::Interrupt => (1.0, 1e8, "1 ns to 100 ms"),
        }
    }
}

impl MeasuredValue {
    /// What the part of a file at `span` tells.
    fn new(key: Key, value: f64, source: String, span: Range<usize>) -> Parsed<MeasuredValue> {
        let (least, most, allowed) = key.range();
        match (least..=most).contains(&value) {
            true => Ok(MeasuredValue { key, value, source }),
            false => wrong(span, "this is no value that a machine has", format!("it is {allowed}")),
        }
    }
}

/// A profile made of measurements.
#[derive(Debug, Clone, PartialEq, serde::Serialize)]
pub struct Profile {
    /// Name of the profile, by which rack files refer to it.
    pub name: String,
    /// The profile that has what was not measured.
    pub like: String,
    /// What was measured, with the lines that tell it.
    pub measured: Vec<Value>,
    /// What was not: the values of `like`, and where those are from.
    pub unknown: Vec<Value>,
}

/// A profile of that name from the output of tools, each a file's name and its text; what they do not tell is as in
/// the profile `like`. `None` when there is no such profile.
///
/// # Errors
/// [`FileError`] for the first file that is no known tool's, or does not tell what it should.
pub fn profile(
    name: &str,
    like: &str,
    files: &[(String, String)],
) -> Option<Result<Profile, FileError>> {
    let of = profiles::all().get(like)?;
    let (_, values) = profiles::values(like)?;
    let mut best: BTreeMap<Key, MeasuredValue> = BTreeMap::new();
    for (file, text) in files {
        let found = match read(file, text) {
            Ok(found) => found,
            Err(problem) => return Some(Err(problem.locate(file, text))),
        };
        for one in found {
            let better = best.get(&one.key).is_none_or(|other| match one.key {
                Key::MemoryBandwidth => one.value > other.value,
                _ => one.value < other.value,
            });
            if better {
                best.insert(one.key, one);
            }
        }
    }
    let measured = measured(of, &best);
    let known = |value: &Value| measured.iter().any(|one| one.key == value.key);
    let unknown = values.into_iter().filter(|value| !known(value)).collect();
    Some(Ok(Profile { name: name.to_owned(), like: like.to_owned(), measured, unknown }))
}

/// What a 64 B read takes on the wire of a card in Gen3 x8, there and back, in nanoseconds.
fn on_the_wire() -> f64 {
    let wire = crate::wire::Wire::pcie(3, 8);
    let both = wire.packet(16, 0) + wire.packet(crate::wire::COMPLETION_HEADER, 64);
    wire.time(both).ns()
}

fn measured(like: &HostTiming, best: &BTreeMap<Key, MeasuredValue>) -> Vec<Value> {
    let mut values = Vec::new();
    let mut add = |key: &str, value: String, source: String| {
        values.push(Value { key: key.to_owned(), value, source });
    };
    let ns = |value: f64| format!("{:.1} ns", value.max(0.1));
    let memory = best.get(&Key::MemoryLatency);
    if let Some(found) = memory {
        add("memory.latency", ns(found.value), found.source.clone());
    }
    if let Some(found) = best.get(&Key::MemoryBandwidth) {
        add("memory.bandwidth", format!("{:.1} GB/s", found.value / 1e9), found.source.clone());
    }
    if let Some(found) = best.get(&Key::DmaRead) {
        let memory = memory.map_or(like.memory.latency.ns(), |found| found.value);
        let half = (found.value - memory - on_the_wire()) / 2.0;
        let source = format!(
            "{}, less memory and a Gen3 x8 link; half of the rest: an upper bound, as the card's own time is in it",
            found.source
        );
        add("root.latency", ns(half), source.clone());
        add("root.completion_latency", ns(half), source);
    }
    if let Some(found) = best.get(&Key::IommuEntries) {
        add("iommu.entries", format!("{:.0}", found.value), found.source.clone());
    }
    if let Some(found) = best.get(&Key::Interrupt) {
        let poll = like.cpu.poll.ns();
        add("cpu.interrupt", ns(found.value + poll), found.source.clone());
    }
    values
}

impl Profile {
    /// The section of a rack file that makes the profile; what is unknown is named in comments.
    pub fn text(&self) -> String {
        let mut text = format!("[timing.profiles.{}]\nlike = \"{}\"\n", self.name, self.like);
        for section in super::host::SECTIONS {
            let of = |value: &&Value| value.key.split('.').next() == Some(*section);
            let own: Vec<&Value> = self.measured.iter().filter(of).collect();
            if !own.is_empty() {
                text += &format!("[timing.profiles.{}.{section}]\n", self.name);
            }
            for value in own {
                let key = value.key.split('.').nth(1).unwrap_or_default();
                let number = value.value.bytes().all(|byte| byte.is_ascii_digit());
                let told =
                    if number { value.value.clone() } else { format!("\"{}\"", value.value) };
                text += &format!("{key} = {told} # {}\n", value.source);
            }
        }
        text += &format!("# not measured, as in {}:\n", self.like);
        for value in &self.unknown {
            text += &format!("#   {} = {} ({})\n", value.key, value.value, value.source);
        }
        text
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::time::Time;
    use rackbus_fabric::rack::Rack;

    const MLC: &str = "Intel(R) Memory Latency Checker - v3.11\nMeasuring idle latencies for random access (in ns)...\n\
                       \t\tNuma node\nNuma node\t     0\t     1\t\n       0\t  96.5\t 163.2\t\n       1\t 164.0\t  95.1\t\n\n\
                       Measuring Peak Injection Memory Bandwidths for the system\nALL Reads        :\t251833.4\t\n\
                       3:1 Reads-Writes :\t230000.0\t\n";
    const STREAM: &str = "STREAM version $Revision: 5.10 $\nFunction    Best Rate MB/s  Avg time\nCopy:          181234.5  0.1\n\
                          Triad:         190000.0  0.1\n";
    const LAT: &str = "\"stride=128\n0.00049 1.123\n512.00000 104.250\n";
    const PCIE: &str = "LAT_DMA_RD  Seq   HWarm  0  0   8KB   64    949.0  718.6   720   656 11088   736   752      790.8   598.9     600     546    9240     613       626           16    2097152\n";
    const WINDOWS: &str = "BW_DMA_RD Rand Cold 0 0 256KB 64 1 1ms 512MB 8 27.5 5\nBW_DMA_RD Rand Cold 0 0 1MB 64 1 1ms 512MB 8 14.3 5\n\
                           BW_DMA_RD Rand Cold 0 0 4MB 64 1 1ms 512MB 8 10.6 5\n";
    const FIO: &str = "fio: a warning\n{\"fio version\": \"fio-3.36\", \"global options\": {\"iodepth\": \"1\"}, \"jobs\": [\
                       {\"job options\": {}, \"read\": {\"clat_ns\": {\"mean\": 12400.5}}},\
                       {\"job options\": {\"hipri\": \"1\"}, \"read\": {\"clat_ns\": {\"mean\": 10100.5}}}]}\n";

    fn made(files: &[&str]) -> Result<Profile, FileError> {
        let named = |(nth, text): (usize, &&str)| (format!("f{nth}"), (*text).to_owned());
        let files: Vec<(String, String)> = files.iter().enumerate().map(named).collect();
        profile("mine", "ice-lake", &files).unwrap()
    }

    #[test]
    fn a_rack_file_reads_the_profile_that_is_made() {
        let profile = made(&[MLC, STREAM, LAT, PCIE, WINDOWS, FIO]).unwrap();
        assert_eq!(profile.measured.len() + profile.unknown.len(), 6 + 5 + 6 + 8);
        let rack = format!("name = \"r\"\n[hosts.a]\nprofile = \"mine\"\n{}", profile.text());
        let parsed = Rack::parse("rack.toml", &rack).unwrap();
        let timing = super::super::read_for("rack.toml", &rack, &parsed).unwrap();
        let host = timing.of_host("a");
        assert_eq!(host.profile, "mine");
        assert_eq!((host.memory.latency.ns(), host.memory.bandwidth), (95.1, 251_800_000_000));
        assert_eq!((host.iommu.entries, host.cpu.interrupt), (64, Time::from_ns(2_340)));
        let inside = host.root.latency + host.root.completion_latency + host.memory.latency;
        assert!((inside.ns() + on_the_wire() - 600.0).abs() < 0.3, "{inside}");
        // What nobody measured is the other profile's.
        assert_eq!(host.root.trackers, profiles::all()["ice-lake"].root.trackers);
        assert!(profile.unknown.iter().any(|value| value.key == "root.trackers"));
    }

    #[test]
    fn the_better_of_two_measurements_counts() {
        let value = |files: &[&str], key: &str| {
            let profile = made(files).unwrap();
            profile.measured.into_iter().find(|value| value.key == key).unwrap()
        };
        assert_eq!(value(&[STREAM], "memory.bandwidth").value, "190.0 GB/s");
        assert_eq!(value(&[STREAM, MLC], "memory.bandwidth").source, "f1:9: MLC, all reads");
        assert_eq!(value(&[LAT, MLC], "memory.latency").value, "95.1 ns");
    }

    #[test]
    fn what_is_wrong_is_named_with_its_place() {
        let cases = [
            ("hello", "f0:1:1: this is the output of no tool that is known; they are Intel MLC"),
            ("stride=128\n8.0 4.5\n", "f0:1:1: it reads less than 256 MB, which may be in a cache"),
            ("stride=128\n512 x\n", "f0:2:5: `x` is no number above 0"),
            ("Best Rate MB/s\nCopy: -3 1\n", "f0:2:7: `-3` is no number above 0"),
            ("Best Rate MB/s\n", "f0:1:1: it tells no rate"),
            (
                "Best Rate MB/s\nCopy: 3 1\n",
                "f0:2:1: this is no value that a machine has; it is 100 MB/s",
            ),
            ("Memory Latency Checker\n", "f0:1:1: it tells no idle latency"),
            ("LAT_DMA_RD Seq HWarm 0 0 8KB 64 1\n", "f0:1:1: the line has no median"),
            ("x\n{\"fio version\": 3,\n]\n", "f0:3:1: this is no JSON"),
            ("{\"fio version\": \"3\"}", "f0:1:1: it has no lone reads with polling and without"),
        ];
        for (text, expected) in cases {
            let error = made(&[text]).unwrap_err().to_string();
            assert!(error.starts_with(expected), "{error}\n{expected}");
        }
        assert!(profile("mine", "abacus", &[]).is_none());
    }
}
