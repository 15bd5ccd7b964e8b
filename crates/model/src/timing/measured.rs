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

use std::collections::BTreeMap;
use std::ops::Range;

use rackbus_fabric::text::{FileError, Outcome, wrong};
use serde_json::Value as Json;

use super::HostTiming;
use super::profiles::{self, Value};

/// Sizes from which on `lat_mem_rd` reads memory and no cache, in MB.
const BEYOND_CACHES: f64 = 256.0;
/// Bytes of a page of an IOMMU.
const PAGE: f64 = 4096.0;

/// What a file tells: a value, and from which line.
#[derive(Debug, Clone, PartialEq)]
struct Found {
    key: Key,
    value: f64,
    source: String,
}

/// What can be measured.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Key {
    /// Nanoseconds.
    MemoryLatency,
    /// Bytes per second.
    MemoryBandwidth,
    /// Nanoseconds of a DMA read of 64 B.
    DmaRead,
    /// Translations.
    IommuEntries,
    /// Nanoseconds.
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

impl Found {
    /// What the part of a file at `span` tells.
    fn new(key: Key, value: f64, source: String, span: Range<usize>) -> Outcome<Found> {
        let (least, most, allowed) = key.range();
        match (least..=most).contains(&value) {
            true => Ok(Found { key, value, source }),
            false => wrong(span, "this is no value that a machine has", format!("it is {allowed}")),
        }
    }
}

/// A profile made of measurements.
#[derive(Debug, Clone, PartialEq, serde::Serialize)]
pub struct Profile {
    /// Its name.
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
    let mut best: BTreeMap<Key, Found> = BTreeMap::new();
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

fn measured(like: &HostTiming, best: &BTreeMap<Key, Found>) -> Vec<Value> {
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

const TOOLS: &str =
    "they are Intel MLC, lmbench's lat_mem_rd, STREAM, pcie-bench's text and fio's JSON";

fn read(file: &str, text: &str) -> Outcome<Vec<Found>> {
    let has = |word: &str| text.contains(word);
    if has("Memory Latency Checker") || has("Measuring idle latencies") {
        mlc(file, text)
    } else if has("STREAM version") || has("Best Rate MB/s") {
        stream(file, text)
    } else if has("LAT_DMA_RD") || has("BW_DMA_RD") {
        pcie_bench(file, text)
    } else if has("\"stride=") || has("stride=") {
        lat_mem_rd(file, text)
    } else if has("\"fio version\"") {
        fio(file, text)
    } else {
        wrong(0..0, "this is the output of no tool that is known", TOOLS)
    }
}

/// A line, its number from 1, and where it begins in the text.
fn lines(text: &str) -> impl Iterator<Item = (usize, usize, &str)> {
    let mut at = 0;
    text.split_inclusive('\n').enumerate().map(move |(nth, line)| {
        let here = at;
        at += line.len();
        (nth + 1, here, line.trim_end())
    })
}

/// A number above 0 that stands in a line.
fn number(at: usize, line: &str, field: &str) -> Outcome<f64> {
    match field.parse::<f64>() {
        Ok(number) if number.is_finite() && number > 0.0 && number < 1e15 => Ok(number),
        _ => {
            let inside = (field.as_ptr() as usize).saturating_sub(line.as_ptr() as usize);
            let from = at + inside.min(line.len());
            let short: String = field.chars().take(20).collect();
            wrong(
                from..from + field.len(),
                format!("`{short}` is no number above 0"),
                "give the tool's output as it is",
            )
        }
    }
}

fn mlc(file: &str, text: &str) -> Outcome<Vec<Found>> {
    let mut found = Vec::new();
    let mut latencies = false;
    for (nth, at, line) in lines(text) {
        let fields: Vec<&str> = line.split_whitespace().collect();
        if line.contains("idle latencies") {
            latencies = true;
        } else if let Some(rest) = line.split("clocks (").nth(1) {
            let field = rest.split_whitespace().next().unwrap_or_default();
            let source = format!("{file}:{nth}: MLC, idle latency");
            found.push(Found::new(
                Key::MemoryLatency,
                number(at, line, field)?,
                source,
                at..at + line.len(),
            )?);
        } else if let (true, [node, values @ ..]) = (latencies, &fields[..]) {
            // A row of the matrix: a node, and the latency of each node's memory.
            match (node.parse::<usize>(), values) {
                (Ok(node), [_, ..]) if node < values.len() => {
                    let value = number(at, line, values[node])?;
                    let source =
                        format!("{file}:{nth}: MLC, idle latency of node {node}'s own memory");
                    found.push(Found::new(Key::MemoryLatency, value, source, at..at + line.len())?);
                }
                _ => latencies = line.contains("Numa node") || fields.is_empty(),
            }
        }
        if let Some(rest) = line.strip_prefix("ALL Reads") {
            let field = rest.trim_start_matches([' ', '\t', ':']).trim();
            let source = format!("{file}:{nth}: MLC, all reads");
            found.push(Found::new(
                Key::MemoryBandwidth,
                number(at, line, field)? * 1e6,
                source,
                at..at + line.len(),
            )?);
        }
    }
    told(
        found,
        "it tells no idle latency and no \"ALL Reads\"",
        "run mlc --latency_matrix, or --peak_injection_bandwidth",
    )
}

fn stream(file: &str, text: &str) -> Outcome<Vec<Found>> {
    let mut found = Vec::new();
    for (nth, at, line) in lines(text) {
        let fields: Vec<&str> = line.split_whitespace().collect();
        if let ["Copy:" | "Scale:" | "Add:" | "Triad:", rate, ..] = fields[..] {
            let source = format!("{file}:{nth}: STREAM, {}", fields[0].trim_end_matches(':'));
            found.push(Found::new(
                Key::MemoryBandwidth,
                number(at, line, rate)? * 1e6,
                source,
                at..at + line.len(),
            )?);
        }
    }
    told(found, "it tells no rate", "give STREAM's whole output")
}

fn lat_mem_rd(file: &str, text: &str) -> Outcome<Vec<Found>> {
    let mut largest: Option<(f64, usize, f64)> = None;
    for (nth, at, line) in lines(text) {
        let fields: Vec<&str> = line.split_whitespace().collect();
        if let [size, latency] = fields[..] {
            let (size, latency) = (number(at, line, size)?, number(at, line, latency)?);
            if largest.is_none_or(|(other, ..)| size > other) {
                largest = Some((size, nth, latency));
            }
        }
    }
    match largest {
        Some((size, nth, value)) if size >= BEYOND_CACHES => {
            let source = format!("{file}:{nth}: lat_mem_rd, {size:.0} MB");
            Ok(vec![Found::new(Key::MemoryLatency, value, source, 0..0)?])
        }
        _ => wrong(
            0..0,
            format!("it reads less than {BEYOND_CACHES} MB, which may be in a cache"),
            "run lat_mem_rd -t 1024 128",
        ),
    }
}

fn pcie_bench(file: &str, text: &str) -> Outcome<Vec<Found>> {
    let mut found = Vec::new();
    let mut windows: Vec<(f64, f64, usize)> = Vec::new();
    for (nth, at, line) in lines(text) {
        let fields: Vec<&str> = line.split_whitespace().collect();
        match fields[..] {
            ["LAT_DMA_RD", _, "HWarm", _, _, _, "64", ..] => {
                let Some(field) = fields.get(16) else {
                    return wrong(
                        at..at + line.len(),
                        "the line has no median",
                        "give the file lat_dma_sizes.txt",
                    );
                };
                let source = format!("{file}:{nth}: pcie-bench, median of a 64 B DMA read");
                found.push(Found::new(
                    Key::DmaRead,
                    number(at, line, field)?,
                    source,
                    at..at + line.len(),
                )?);
            }
            ["BW_DMA_RD", _, "Cold", _, _, window, "64", _, _, _, _, rate, ..] => {
                windows.push((bytes(at, line, window)?, number(at, line, rate)?, nth));
            }
            _ => {}
        }
    }
    let most = windows.iter().map(|(_, rate, _)| *rate).fold(0.0, f64::max);
    // Only where it falls to less than half is it an IOMMU, and not a cache.
    if windows.iter().any(|(_, rate, _)| *rate < most / 2.0) {
        let kept = windows.iter().filter(|(_, rate, _)| *rate > 0.9 * most);
        if let Some((window, _, nth)) = kept.max_by(|one, other| one.0.total_cmp(&other.0)) {
            let source = format!(
                "{file}:{nth}: pcie-bench, the largest window at full rate, in pages of 4 KiB"
            );
            found.push(Found::new(Key::IommuEntries, (window / PAGE).max(1.0), source, 0..0)?);
        }
    }
    told(
        found,
        "it tells no warm 64 B DMA read, and no windows that grow slow",
        "give lat_dma_sizes.txt, or bw_dma_win_sweep_rd_rnd_64.txt with the IOMMU on",
    )
}

/// A size as pcie-bench writes it: `8KB`, `1.5MB`.
fn bytes(at: usize, line: &str, field: &str) -> Outcome<f64> {
    let units = [("KB", 1024.0), ("MB", 1_048_576.0), ("GB", 1_073_741_824.0), ("B", 1.0)];
    let found = units.iter().find_map(|(unit, of)| Some((field.strip_suffix(unit)?, of)));
    let (digits, unit) = found.unwrap_or((field, &1.0));
    Ok(number(at, line, digits)? * unit)
}

fn fio(file: &str, text: &str) -> Outcome<Vec<Found>> {
    // fio writes its warnings before the JSON.
    let from = text.find('{').unwrap_or(0);
    let json: Json = match serde_json::from_str(&text[from..]) {
        Ok(json) => json,
        Err(error) => {
            let line = lines(&text[from..]).nth(error.line().saturating_sub(1));
            let at = from + line.map_or(0, |(_, at, _)| at);
            return wrong(
                at..at,
                format!("this is no JSON: {error}"),
                "run fio --output-format=json",
            );
        }
    };
    let mut means = [None, None];
    for job in json["jobs"].as_array().into_iter().flatten() {
        let option = |key: &str| {
            let own = &job["job options"][key];
            if own.is_null() { &json["global options"][key] } else { own }
        };
        let polled = option("hipri").as_str().is_some_and(|value| value != "0");
        let lone = option("iodepth").as_str().is_none_or(|depth| depth == "1");
        let mean = job["read"]["clat_ns"]["mean"].as_f64().filter(|mean| *mean > 0.0);
        if let (true, Some(mean)) = (lone, mean) {
            let place: &mut Option<f64> = &mut means[usize::from(polled)];
            *place = Some(place.map_or(mean, |other| other.min(mean)));
        }
    }
    let allowed =
        "run a job of reads with iodepth=1 and another with hipri=1, on a drive with polled queues";
    match means {
        [Some(waited), Some(polled)] if waited > polled => {
            let source = format!("{file}: fio, a lone read without polling less one with it");
            Ok(vec![Found::new(Key::Interrupt, waited - polled, source, 0..0)?])
        }
        [Some(_), Some(_)] => wrong(0..0, "reads with polling took longer than without", allowed),
        _ => wrong(0..0, "it has no lone reads with polling and without", allowed),
    }
}

/// What was found, or that nothing was.
fn told(found: Vec<Found>, what: &str, allowed: &str) -> Outcome<Vec<Found>> {
    if found.is_empty() { wrong(0..0, what, allowed) } else { Ok(found) }
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
        assert_eq!(profile.measured.len() + profile.unknown.len(), 6 + 5 + 4 + 8);
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
