//! The tools whose output is read, and what each says of a host.

use rackbus_fabric::text::{Parsed, wrong};
use serde_json::Value as Json;

use super::{BEYOND_CACHES, Key, MeasuredValue, PAGE};

const TOOLS: &str =
    "they are Intel MLC, lmbench's lat_mem_rd, STREAM, pcie-bench's text and fio's JSON";

pub(super) fn read(file: &str, text: &str) -> Parsed<Vec<MeasuredValue>> {
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
pub(super) fn lines(text: &str) -> impl Iterator<Item = (usize, usize, &str)> {
    let mut at = 0;
    text.split_inclusive('\n').enumerate().map(move |(nth, line)| {
        let here = at;
        at += line.len();
        (nth + 1, here, line.trim_end())
    })
}

/// A number above 0 that stands in a line.
pub(super) fn number(at: usize, line: &str, field: &str) -> Parsed<f64> {
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

fn mlc(file: &str, text: &str) -> Parsed<Vec<MeasuredValue>> {
    let mut found = Vec::new();
    let mut latencies = false;
    for (nth, at, line) in lines(text) {
        let fields: Vec<&str> = line.split_whitespace().collect();
        if line.contains("idle latencies") {
            latencies = true;
        } else if let Some(rest) = line.split("clocks (").nth(1) {
            let field = rest.split_whitespace().next().unwrap_or_default();
            let source = format!("{file}:{nth}: MLC, idle latency");
            found.push(MeasuredValue::new(
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
                    found.push(MeasuredValue::new(
                        Key::MemoryLatency,
                        value,
                        source,
                        at..at + line.len(),
                    )?);
                }
                _ => latencies = line.contains("Numa node") || fields.is_empty(),
            }
        }
        if let Some(rest) = line.strip_prefix("ALL Reads") {
            let field = rest.trim_start_matches([' ', '\t', ':']).trim();
            let source = format!("{file}:{nth}: MLC, all reads");
            found.push(MeasuredValue::new(
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

fn stream(file: &str, text: &str) -> Parsed<Vec<MeasuredValue>> {
    let mut found = Vec::new();
    for (nth, at, line) in lines(text) {
        let fields: Vec<&str> = line.split_whitespace().collect();
        if let ["Copy:" | "Scale:" | "Add:" | "Triad:", rate, ..] = fields[..] {
            let source = format!("{file}:{nth}: STREAM, {}", fields[0].trim_end_matches(':'));
            found.push(MeasuredValue::new(
                Key::MemoryBandwidth,
                number(at, line, rate)? * 1e6,
                source,
                at..at + line.len(),
            )?);
        }
    }
    told(found, "it tells no rate", "give STREAM's whole output")
}

pub(super) fn lat_mem_rd(file: &str, text: &str) -> Parsed<Vec<MeasuredValue>> {
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
            Ok(vec![MeasuredValue::new(Key::MemoryLatency, value, source, 0..0)?])
        }
        _ => wrong(
            0..0,
            format!("it reads less than {BEYOND_CACHES} MB, which may be in a cache"),
            "run lat_mem_rd -t 1024 128",
        ),
    }
}

fn pcie_bench(file: &str, text: &str) -> Parsed<Vec<MeasuredValue>> {
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
                found.push(MeasuredValue::new(
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
            found.push(MeasuredValue::new(
                Key::IommuEntries,
                (window / PAGE).max(1.0),
                source,
                0..0,
            )?);
        }
    }
    told(
        found,
        "it tells no warm 64 B DMA read, and no windows that grow slow",
        "give lat_dma_sizes.txt, or bw_dma_win_sweep_rd_rnd_64.txt with the IOMMU on",
    )
}

/// A size as pcie-bench writes it: `8KB`, `1.5MB`.
pub(super) fn bytes(at: usize, line: &str, field: &str) -> Parsed<f64> {
    let units = [("KB", 1024.0), ("MB", 1_048_576.0), ("GB", 1_073_741_824.0), ("B", 1.0)];
    let found = units.iter().find_map(|(unit, of)| Some((field.strip_suffix(unit)?, of)));
    let (digits, unit) = found.unwrap_or((field, &1.0));
    Ok(number(at, line, digits)? * unit)
}

pub(super) fn fio(file: &str, text: &str) -> Parsed<Vec<MeasuredValue>> {
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
            Ok(vec![MeasuredValue::new(Key::Interrupt, waited - polled, source, 0..0)?])
        }
        [Some(_), Some(_)] => wrong(0..0, "reads with polling took longer than without", allowed),
        _ => wrong(0..0, "it has no lone reads with polling and without", allowed),
    }
}

/// What was found, or that nothing was.
pub(super) fn told(
    found: Vec<MeasuredValue>,
    what: &str,
    allowed: &str,
) -> Parsed<Vec<MeasuredValue>> {
    if found.is_empty() { wrong(0..0, what, allowed) } else { Ok(found) }
}
