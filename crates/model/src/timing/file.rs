//! Reads the rack file's `[timing]`: what parts take that differ from their profiles, with the place of each error.

use std::collections::BTreeMap;

use rackbus_fabric::text::{
    FileError, Parsed, Problem, Section, document, mismatch, subsection, wrong,
};
use rackbus_fabric::topology::ComponentKind;
use toml::Spanned;
use toml::de::{DeTable, DeValue};

use super::{DeviceTiming, PartTiming, Timing, host};
use crate::time::Time;

/// The longest that anything takes: 10 s.
const LONGEST: u64 = 10_000_000_000_000;

/// Reads the timing of a rack file's `text`; `file` is its name, for messages, and `parts` are the
/// rack's, with their kinds.
///
/// # Errors
/// [`FileError`] for the first thing that is wrong.
pub fn parse(file: &str, text: &str, parts: &[(&str, ComponentKind)]) -> Result<Timing, FileError> {
    read(text, parts).map_err(|problem| problem.locate(file, text))
}

fn read(text: &str, parts: &[(&str, ComponentKind)]) -> Parsed<Timing> {
    let root = document(text)?;
    let nothing = DeTable::new();
    let section = match root.get_ref().get("timing") {
        Some(value) => subsection(value, "timing", KEYS)?,
        None => Section::new(&nothing, 0..0, "timing", KEYS)?,
    };
    let mps = mps(&section)?;
    let usual = DeviceTiming::default().mps;
    let (host, hosts) = host::hosts(root.get_ref(), &section, mps.unwrap_or(usual))?;
    let mut timing = timing(&section, Timing::with(host), parts)?;
    timing.hosts = hosts;
    timing.mps_stated = mps.is_some();
    Ok(timing)
}

/// Sets `place` where the file has something for it.
pub(super) fn set<T>(place: &mut T, found: Option<T>) {
    if let Some(found) = found {
        *place = found;
    }
}

pub(super) fn time(section: &Section<'_>, key: &'static str) -> Parsed<Option<Time>> {
    Ok(section.picoseconds(key, LONGEST)?.map(Time::from_ps))
}

pub(super) fn count(
    section: &Section<'_>,
    key: &'static str,
    least: u64,
    most: u64,
) -> Parsed<Option<u32>> {
    Ok(section.count(key, least, most)?.map(|number| number as u32))
}

/// Bytes: a power of two within limits.
pub(super) fn power(
    section: &Section<'_>,
    key: &'static str,
    least: u64,
    most: u64,
) -> Parsed<Option<u32>> {
    match section.size(key, least, most)? {
        Some(bytes) if !bytes.is_power_of_two() => {
            let allowed = "it is a power of two";
            wrong(section.place(key), format!("`{key}` is {bytes} B"), allowed)
        }
        found => Ok(found.map(|bytes| bytes as u32)),
    }
}

/// Bytes, or 0 for none.
pub(super) fn power_or_none(
    section: &Section<'_>,
    key: &'static str,
    least: u64,
    most: u64,
) -> Parsed<Option<u32>> {
    match section.size(key, 0, u64::MAX)? {
        Some(0) => Ok(Some(0)),
        _ => power(section, key, least, most),
    }
}

/// The least that a device's own writes can be kept to: a cache line.
const LEAST_PAYLOAD: u64 = 64;

/// The most bytes of a packet of a device's own writes, of which none exceeds the MPS; 0 for that.
fn payload(section: &Section<'_>, mps: u32) -> Parsed<Option<u32>> {
    let payload = power_or_none(section, "payload", LEAST_PAYLOAD, 4096)?;
    within_mps(section, "payload", payload, mps, ", or 0 for as much")
}

/// Bytes of a packet that do not exceed the MPS; `else_` is what else may be said than bytes.
pub(super) fn within_mps(
    section: &Section<'_>,
    key: &'static str,
    found: Option<u32>,
    mps: u32,
    else_: &str,
) -> Parsed<Option<u32>> {
    match found.filter(|bytes| *bytes > mps) {
        Some(more) => {
            let what = format!("`{key}` is {more} B, and the MPS {mps} B");
            let allowed = format!("it is no more than `mps` in [timing.device]{else_}");
            wrong(section.place(key), what, allowed)
        }
        None => Ok(found),
    }
}

/// The MPS of a rack file's `[timing]`; `None` where it says nothing of it.
fn mps(timing: &Section<'_>) -> Parsed<Option<u32>> {
    let Some(device) = timing.get("device") else { return Ok(None) };
    power(&subsection(device, "timing.device", DEVICE)?, "mps", 128, 4096)
}

/// Bytes per second, or 0 for none.
pub(super) fn rate_or_none(section: &Section<'_>, key: &'static str) -> Parsed<Option<u64>> {
    match section.get(key).map(Spanned::get_ref) {
        Some(DeValue::Integer(_)) => Ok(section.count(key, 0, 0)?),
        _ => section.rate(key),
    }
}

/// Packets and bytes of payload: `[64, "16 KiB"]` is written as two keys.
fn credits(
    section: &Section<'_>,
    packets: &'static str,
    bytes: &'static str,
    place: &mut (u32, u32),
) -> Parsed<()> {
    set(&mut place.0, count(section, packets, 1, 1 << 20)?);
    set(&mut place.1, section.size(bytes, 4096, 1 << 30)?.map(|bytes| bytes as u32));
    Ok(())
}

const KEYS: &[&str] = &[
    "link", "switch", "ntb", "root", "iommu", "memory", "cpu", "device", "cxl", "parts",
    "software", "power", "hosts", "profiles", "profile",
];

fn timing(
    section: &Section<'_>,
    mut timing: Timing,
    known: &[(&str, ComponentKind)],
) -> Parsed<Timing> {
    if let Some(value) = section.get("link") {
        link(value, &mut timing)?;
    }
    if let Some(value) = section.get("switch") {
        let part = subsection(value, "timing.switch", &["latency"])?;
        set(&mut timing.switch.latency, time(&part, "latency")?);
    }
    if let Some(value) = section.get("ntb") {
        let keys = &["latency", "translation", "completion_translation"];
        let part = subsection(value, "timing.ntb", keys)?;
        set(&mut timing.ntb.latency, time(&part, "latency")?);
        set(&mut timing.ntb.translation, time(&part, "translation")?);
        let place = &mut timing.ntb.completion_translation;
        set(place, time(&part, "completion_translation")?);
    }
    if let Some(value) = section.get("device") {
        device(value, &mut timing)?;
    }
    if let Some(value) = section.get("cxl") {
        let keys = &["port", "switch", "latency", "bandwidth", "loads"];
        let (part, cxl) = (subsection(value, "timing.cxl", keys)?, &mut timing.cxl);
        set(&mut cxl.port, time(&part, "port")?);
        set(&mut cxl.switch, time(&part, "switch")?);
        set(&mut cxl.latency, time(&part, "latency")?);
        set(&mut cxl.bandwidth, part.rate("bandwidth")?);
        set(&mut cxl.loads, count(&part, "loads", 1, 1 << 14)?);
    }
    if let Some(value) = section.get("parts") {
        timing.parts = parts(value, known, timing.device.mps)?;
    }
    if let Some(value) = section.get("software") {
        let entry = |section: &Section<'_>, key| time(section, key);
        timing.software = entries(value, "timing.software", entry)?;
    }
    if let Some(value) = section.get("power") {
        timing.power = entries(value, "timing.power", milliwatts)?;
    }
    Ok(timing)
}

fn link(value: &Spanned<DeValue<'_>>, timing: &mut Timing) -> Parsed<()> {
    let keys = &[
        "propagation",
        "credit_return",
        "acknowledge_every",
        "update_every",
        "posted_packets",
        "posted_bytes",
        "nonposted_packets",
        "completion_packets",
        "completion_bytes",
    ];
    let part = subsection(value, "timing.link", keys)?;
    let link = &mut timing.link;
    set(&mut link.propagation, time(&part, "propagation")?);
    set(&mut link.credit_return, time(&part, "credit_return")?);
    set(&mut link.acknowledge_every, count(&part, "acknowledge_every", 0, 64)?);
    set(&mut link.update_every, count(&part, "update_every", 0, 64)?);
    credits(&part, "posted_packets", "posted_bytes", &mut link.posted)?;
    set(&mut link.nonposted, count(&part, "nonposted_packets", 1, 1 << 20)?);
    credits(&part, "completion_packets", "completion_bytes", &mut link.completion)
}

const DEVICE: &[&str] = &[
    "mps",
    "payload",
    "mrrs",
    "tags",
    "window",
    "latency",
    "bandwidth",
    "message",
    "packet_gap",
    "write_gap",
    "write_setup",
    "alignment",
    "turn",
    "engine",
];

fn device(value: &Spanned<DeValue<'_>>, timing: &mut Timing) -> Parsed<()> {
    let part = subsection(value, "timing.device", DEVICE)?;
    let device = &mut timing.device;
    set(&mut device.mps, power(&part, "mps", 128, 4096)?);
    set(&mut device.payload, payload(&part, device.mps)?);
    set(&mut device.mrrs, power(&part, "mrrs", 128, 4096)?);
    set(&mut device.tags, count(&part, "tags", 1, 1 << 14)?);
    set(&mut device.window, count(&part, "window", 1, 1 << 20)?);
    set(&mut device.latency, time(&part, "latency")?);
    set(&mut device.bandwidth, part.rate("bandwidth")?);
    set(&mut device.message, time(&part, "message")?);
    set(&mut device.packet_gap, time(&part, "packet_gap")?);
    set(&mut device.write_gap, time(&part, "write_gap")?);
    set(&mut device.write_setup, time(&part, "write_setup")?);
    set(&mut device.alignment, power_or_none(&part, "alignment", 1, 4096)?);
    set(&mut device.turn, power_or_none(&part, "turn", 1, 1 << 20)?);
    set(&mut device.engine, rate_or_none(&part, "engine")?);
    Ok(())
}

/// The keys of a part of that kind. Each may say the MPS, which is the rack's.
fn keys_of(kind: ComponentKind) -> &'static [&'static str] {
    match kind {
        ComponentKind::Device => &[
            "latency",
            "bandwidth",
            "mps",
            "payload",
            "mrrs",
            "tags",
            "window",
            "message",
            "packet_gap",
            "write_gap",
            "write_setup",
            "alignment",
            "turn",
            "engine",
        ],
        ComponentKind::Ntb => &["latency", "translation", "completion_translation", "mps"],
        ComponentKind::Memory | ComponentKind::CxlMemory => &["latency", "bandwidth", "mps"],
        ComponentKind::RootComplex
        | ComponentKind::Switch
        | ComponentKind::CxlSwitch
        | ComponentKind::SharedMemory
        | ComponentKind::Network => &["latency", "mps"],
    }
}

fn parts(
    value: &Spanned<DeValue<'_>>,
    known: &[(&str, ComponentKind)],
    mps: u32,
) -> Parsed<BTreeMap<String, PartTiming>> {
    let form = "write [timing.parts.\"NAME\"] for each part";
    let DeValue::Table(table) = value.get_ref() else {
        return wrong(value.span(), mismatch("parts", value.get_ref()), form);
    };
    let mut found = BTreeMap::new();
    for (name, value) in table {
        let text: &str = name.get_ref();
        let Some((_, kind)) = known.iter().find(|(known, _)| *known == text) else {
            let what = format!("the rack has no part `{text}`");
            let names: Vec<&str> = known.iter().map(|(name, _)| *name).collect();
            let allowed = format!("its parts are {}", rackbus_fabric::text::list(&names));
            return wrong(name.span(), what, allowed);
        };
        let keys = keys_of(*kind);
        let part = subsection(value, &format!("timing.parts.{text}"), keys)?;
        // A part that takes less than another sends would drop what that sends (specification 2.2.2).
        if let Some(own) = power(&part, "mps", 128, 4096)?.filter(|own| *own != mps) {
            let what = format!("the MPS of {text} is {own} B, the rack's is {mps} B");
            let allowed = "all parts of a fabric have one MPS: set `mps` in [timing.device]";
            return wrong(part.place("mps"), what, allowed);
        }
        let mut timing = PartTiming { latency: time(&part, "latency")?, ..PartTiming::default() };
        if keys.contains(&"bandwidth") {
            timing.bandwidth = part.rate("bandwidth")?;
        }
        match kind {
            ComponentKind::Ntb => {
                timing.translation = time(&part, "translation")?;
                timing.completion_translation = time(&part, "completion_translation")?;
            }
            ComponentKind::Device => own_engine(&part, mps, &mut timing)?,
            _ => {}
        }
        found.insert(text.to_owned(), timing);
    }
    Ok(found)
}

/// What a device's own DMA engine is like.
fn own_engine(part: &Section<'_>, mps: u32, timing: &mut PartTiming) -> Parsed<()> {
    timing.payload = payload(part, mps)?;
    timing.mrrs = power(part, "mrrs", 128, 4096)?;
    timing.tags = count(part, "tags", 1, 1 << 14)?;
    timing.window = count(part, "window", 1, 1 << 20)?;
    timing.message = time(part, "message")?;
    timing.packet_gap = time(part, "packet_gap")?;
    timing.write_gap = time(part, "write_gap")?;
    timing.write_setup = time(part, "write_setup")?;
    timing.alignment = power_or_none(part, "alignment", 1, 4096)?;
    timing.turn = power_or_none(part, "turn", 1, 1 << 20)?;
    timing.engine = rate_or_none(part, "engine")?;
    Ok(())
}

/// A table of values under names of the file's own.
fn entries<T>(
    value: &Spanned<DeValue<'_>>,
    place: &str,
    read: impl Fn(&Section<'_>, &'static str) -> Parsed<Option<T>>,
) -> Parsed<BTreeMap<String, T>> {
    let DeValue::Table(table) = value.get_ref() else {
        return wrong(value.span(), mismatch(place, value.get_ref()), format!("write [{place}]"));
    };
    let mut found = BTreeMap::new();
    for (name, value) in table {
        // A section of the one entry, so that its value is read and refused as any other.
        let mut single = DeTable::new();
        let key = std::borrow::Cow::Borrowed("value");
        single.insert(Spanned::new(name.span(), key), value.clone());
        let section = Section::new(&single, name.span(), place, &["value"])?;
        if let Some(entry) = read(&section, "value").map_err(|problem| Problem {
            what: problem.what.replace("`value`", &format!("`{}`", name.get_ref())),
            ..problem
        })? {
            found.insert(name.get_ref().to_string(), entry);
        }
    }
    Ok(found)
}

const WATTS: &str = "write a number and W: \"5.5 W\"";

fn milliwatts(section: &Section<'_>, key: &'static str) -> Parsed<Option<u64>> {
    let Some((text, span)) = section.text(key, WATTS)? else { return Ok(None) };
    let watts = text.strip_suffix(" W").and_then(|number| number.parse::<f64>().ok());
    match watts.filter(|watts| (0.0..1e9).contains(watts)) {
        Some(watts) => Ok(Some((watts * 1e3).round() as u64)),
        None => wrong(span, format!("`{text}` is no power"), WATTS),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_the_file_sets_is_set_and_the_rest_is_as_ever() {
        let text = "[timing.ntb]\nlatency = \"3.52 us\"\n[timing.device]\nmps = \"128 B\"\n\
                    [timing.parts.\"a/gpu0\"]\ntags = 64\n[timing.software]\nprepare = \"5.7 us\"\n\
                    [timing.power]\nswitch = \"90 W\"\nadapter = \"4.9 W\"\n";
        let timing = parse("rack.toml", text, &[("a/gpu0", ComponentKind::Device)]).unwrap();
        assert_eq!(timing.ntb.latency, Time::from_ns(3520));
        assert_eq!((timing.device.mps, timing.device.mrrs), (128, 512));
        assert_eq!(timing.parts["a/gpu0"].tags, Some(64));
        assert_eq!(timing.software("prepare"), Time::from_ns(5700));
        assert_eq!(timing.power["adapter"], 4900);
    }

    #[test]
    fn an_engine_of_0_moves_what_the_link_lets_through() {
        let text = "[timing.device]\nengine = 0\n[timing.parts.\"a/gpu0\"]\nengine = 0\n";
        let timing = parse("rack.toml", text, &[("a/gpu0", ComponentKind::Device)]).unwrap();
        assert_eq!((timing.device.engine, timing.parts["a/gpu0"].engine), (0, Some(0)));
        let limited =
            "[timing.device]\nengine = \"3 GB/s\"\n[timing.parts.\"a/gpu0\"]\nengine = 0\n";
        let timing = parse("rack.toml", limited, &[("a/gpu0", ComponentKind::Device)]).unwrap();
        let engines = (timing.device.engine, timing.parts["a/gpu0"].engine);
        assert_eq!(engines, (3_000_000_000, Some(0)));
    }

    #[test]
    fn a_profile_with_long_reads_may_have_the_length_of_its_completions_changed() {
        let text =
            "[timing]\nprofile = \"xeon-e5-v3\"\n[timing.memory]\nlong_completion = \"256 B\"\n";
        let memory = parse("rack.toml", text, &[]).unwrap().host.memory;
        assert_eq!((memory.long_read, memory.long_completion), (256, 256));
    }

    #[test]
    fn what_is_wrong_is_named_with_its_place() {
        let cases = [
            ("[timing.ntb]\nlatency = \"-1 ns\"", "rack.toml:2:11: `latency` is no duration"),
            (
                "[timing.ntb]\nlatancy = \"1 ns\"",
                "rack.toml:2:1: unknown key `latancy` in timing.ntb",
            ),
            ("[timing.device]\nmps = 300", "rack.toml:2:7: `mps` is 300 B; it is a power of two"),
            ("[timing.device]\ntags = 0", "rack.toml:2:8: `tags` is 0"),
            (
                "[timing.device]\npayload = \"32 B\"",
                "rack.toml:2:11: `payload` is 32 B; it is from 64 B to 4 KiB",
            ),
            (
                "[timing.device]\npayload = \"512 B\"",
                "rack.toml:2:11: `payload` is 512 B, and the MPS 256 B; it is no more than `mps`",
            ),
            (
                "[timing.parts.\"a/gpu0\"]\npayload = \"256 B\"\n[timing.device]\nmps = \"128 B\"",
                "rack.toml:2:11: `payload` is 256 B, and the MPS 128 B; it is no more than `mps`",
            ),
            (
                "[timing.cpu]\nline = \"1 KiB\"",
                "rack.toml:2:8: `line` is 1024 B, and the MPS 256 B; it is no more than `mps`",
            ),
            (
                "[timing.profiles.x.cpu]\nline = 256\n[timing.device]\nmps = \"128 B\"",
                "rack.toml:2:8: `line` is 256 B, and the MPS 128 B; it is no more than `mps`",
            ),
            (
                "[timing.memory]\nlong_completion = \"128 B\"",
                "rack.toml:2:19: `long_completion` is given, and no `long_read`; give `long_read` too",
            ),
            ("[timing.parts.\"b/x\"]\ntags = 1", "rack.toml:1:15: the rack has no part `b/x`"),
            ("[timing.software]\nx = 3", "rack.toml:2:5: `x` is the number 3"),
            ("[timing.power]\nx = \"3\"", "rack.toml:2:5: `3` is no power"),
            (
                "[timing.parts.\"a/gpu0\"]\nmps = \"512 B\"",
                "rack.toml:2:7: the MPS of a/gpu0 is 512 B, the rack's is 256 B",
            ),
            ("timing = 1", "rack.toml:1:10: `timing` is the number 1"),
        ];
        for (text, expected) in cases {
            let error = parse("rack.toml", text, &[("a/gpu0", ComponentKind::Device)])
                .unwrap_err()
                .to_string();
            assert!(error.starts_with(expected), "{error}\n{expected}");
        }
    }
}
