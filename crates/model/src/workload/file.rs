//! Reads a workload file: its flows and levels, with the place of each error in the file.

use rackbus_fabric::text::{
    FileError, Named, Parsed, Problem, Section, document, list, subsection, wrong,
};

use std::collections::BTreeMap;

use toml::de::DeValue;

use super::blocks;
use super::spread::spread;
use super::traces::{TraceFile, trace_file};
use super::{FlowKind, FlowSpans, FlowSpec, QueuesIn, StepSpec, Workload, engines, shaping, steps};
use crate::engine::Arrivals;
use crate::random::Distribution;
use crate::time::Time;

const KINDS: &[&str] = &[
    "write",
    "read",
    "copy",
    "request",
    "ring",
    "nvme-read",
    "nvme-write",
    "steps",
    "trace",
    "all-reduce",
];
/// The longest simulated time: 100 s.
pub(super) const LONGEST: u64 = 100_000_000_000_000;
pub(super) const MOST_BYTES: u64 = 1 << 40;

/// Reads a workload's `text`; `file` is its name, for messages. Files that it names are refused:
/// [`parse_with`] takes them.
///
/// # Errors
/// [`FileError`] for the first thing that is wrong.
pub fn parse(file: &str, text: &str) -> Result<Workload, FileError> {
    parse_with(file, text, &|_| Err("files beside a workload are not read here".to_owned()))
}

/// A file's name, for messages, and its text.
pub type NamedText = (String, String);

/// As [`parse`]; `read` gives the name, for messages, and the text of a file as the workload names it, or says
/// why it cannot.
///
/// # Errors
/// [`FileError`] for the first thing that is wrong in the workload, or in a file that it names.
pub fn parse_with(
    file: &str,
    text: &str,
    read: &dyn Fn(&str) -> Result<NamedText, String>,
) -> Result<Workload, FileError> {
    let here = |problem: Problem| problem.locate(file, text);
    let (mut workload, traces, lasting) = sections(text).map_err(here)?;
    for trace in &traces {
        let (name, words) = read(&trace.file).map_err(|cause| {
            let what = format!("`{}` cannot be read: {cause}", trace.file);
            let allowed = "name a file, from the workload's folder on".to_owned();
            here(Problem { span: trace.span.clone(), what, allowed })
        })?;
        let played = blocks::parse(&name, trace.format, &words)?;
        workload.play(trace, played).map_err(here)?;
    }
    if lasting.is_none() && !traces.is_empty() {
        workload.last_as_its_traces();
    }
    workload.flows.iter().try_for_each(|flow| is_there(flow, &workload)).map_err(here)?;
    Ok(workload)
}

type Sections = (Workload, Vec<TraceFile>, Option<u64>);

/// The workload, the traces that it names, and what it says that it lasts.
fn sections(text: &str) -> Parsed<Sections> {
    let root = document(text)?;
    let keys = &["seed", "duration", "warmup", "units", "flows", "shaping", "levels"];
    let top = Section::new(root.get_ref(), 0..0, "the workload", keys)?;
    let lasting = top.picoseconds("duration", LONGEST)?;
    if lasting == Some(0) {
        let what = format!("`duration` is {}", Time::ZERO);
        return wrong(top.place("duration"), what, "it is at least 1 ps, and longer than `warmup`");
    }
    let duration = lasting.unwrap_or(1_000_000_000);
    let warmup = top.picoseconds("warmup", LONGEST)?.unwrap_or(duration / 10);
    if warmup >= duration {
        let what = format!("`warmup` is {}", Time::from_ps(warmup));
        let allowed = format!("it is less than the duration, {}", Time::from_ps(duration));
        return wrong(top.place("warmup"), what, allowed);
    }
    let entries = top.tables("flows")?;
    let flows = entries.iter().map(flow).collect::<Parsed<Vec<_>>>()?;
    if flows.is_empty() {
        return wrong(0..0, "the workload has no flow", "write [flows.NAME] for each flow");
    }
    let traces = entries.iter().enumerate().map(|(nth, entry)| trace_file(nth, entry));
    let traces = traces.collect::<Parsed<Vec<_>>>()?.into_iter().flatten().collect();
    let workload = Workload {
        seed: top.count("seed", 0, u64::MAX)?.unwrap_or(1),
        duration: Time::from_ps(duration),
        warmup: Time::from_ps(warmup),
        units: units(&top)?,
        shaping: shaping::read(&top, &flows)?,
        levels: engines::read(&top)?,
        flows,
        notes: Vec::new(),
    };
    Ok((workload, traces, lasting))
}

/// The keys that every flow has.
macro_rules! keys {
    ($($own:literal),*) => {
        &[
            "kind", "tenant", "size", "depth", "every", "poisson", "rate", "queues", "count", "begin",
            "end", "bursts", "random", "span", "think", $($own),*
        ]
    };
}

/// The keys of a flow of kind `trace`.
pub(super) const TRACE: &[&str] =
    keys!("host", "device", "file", "format", "skip", "service", "units", "interrupt", "queues_in");

/// The keys of a flow, by what its kind says; all that there are where it says nothing that is known.
fn keys_of(kind: Option<&str>) -> &'static [&'static str] {
    match kind {
        Some("write" | "read") => keys!("from", "to"),
        Some("copy") => keys!("by", "from", "to"),
        Some("request") => keys!("from", "to", "request", "service"),
        Some("ring") => keys!(
            "host",
            "device",
            "descriptor",
            "output",
            "service",
            "units",
            "interrupt",
            "queues_in"
        ),
        Some("nvme-read" | "nvme-write") => {
            keys!("host", "device", "service", "units", "interrupt", "queues_in")
        }
        Some("all-reduce") => keys!("members", "reduce", "step"),
        Some("trace") => TRACE,
        Some("steps") => keys!("steps"),
        _ => keys!(
            "from",
            "to",
            "by",
            "request",
            "service",
            "host",
            "device",
            "descriptor",
            "output",
            "units",
            "interrupt",
            "queues_in",
            "steps",
            "file",
            "format",
            "skip",
            "members",
            "reduce",
            "step"
        ),
    }
}

fn flow(entry: &Named<'_>) -> Parsed<FlowSpec> {
    let place = format!("flow {}", entry.name);
    let kind = entry.table.get("kind").and_then(|kind| kind.get_ref().as_str());
    let any = Section::new(entry.table, entry.span.clone(), place, keys_of(kind))?;
    let size = any.size("size", 1, MOST_BYTES)?;
    let traced = kind == Some("trace");
    let (kind, places) = kind_of(&any, size)?;
    let counted = size.unwrap_or(match &kind {
        FlowKind::Steps { steps } => StepSpec::moved_by(steps).min(MOST_BYTES),
        _ => 4096,
    });
    let (begin, end) = lifetime(&any)?;
    let own = ["depth", "every", "poisson", "rate"].into_iter().any(|key| any.get(key).is_some());
    let arrivals = match traced && !own {
        true => Arrivals::Traced,
        false => arrivals(&any, counted)?,
    };
    Ok(FlowSpec {
        tenant: any.text("tenant", "write a name")?.map(|(name, _)| name.to_owned()),
        queues: any.count("queues", 1, 1 << 16)?.unwrap_or(1) as u32,
        count: any.count("count", 1, u64::MAX)?.unwrap_or(u64::MAX),
        begin,
        end,
        bursts: bursts(&any)?,
        think: think(&any, arrivals)?,
        random: any.truth("random")?.unwrap_or(false),
        span: any.size("span", 1, u64::MAX / 2)?.unwrap_or(64 << 20),
        places: FlowSpans { ends: places, begin: any.place("begin"), end: any.place("end") },
        ..FlowSpec::new(entry.name, kind, arrivals, counted)
    })
}

/// When a flow's first job comes, and from when on none begins.
fn lifetime(section: &Section<'_>) -> Parsed<(Time, Time)> {
    let begin = time(section, "begin")?.unwrap_or(Time::ZERO);
    let end = time(section, "end")?.unwrap_or(Time::MAX);
    if end <= begin {
        let allowed = format!("it is later than the flow's beginning, {begin}");
        return wrong(section.place("end"), format!("`end` is {end}"), allowed);
    }
    Ok((begin, end))
}

/// Refuses a flow that begins after what is simulated, or ends before it is measured: nothing would be known of it.
fn is_there(flow: &FlowSpec, workload: &Workload) -> Parsed<()> {
    let Workload { duration, warmup, .. } = *workload;
    if flow.begin >= duration {
        let allowed = format!("it is before the end of what is simulated, {duration}");
        return wrong(flow.places.begin.clone(), format!("`begin` is {}", flow.begin), allowed);
    }
    if flow.end <= warmup {
        let allowed = format!("it is after the `warmup`, {warmup}, from when on it is measured");
        return wrong(flow.places.end.clone(), format!("`end` is {}", flow.end), allowed);
    }
    Ok(())
}

const BURSTS: &str = "write { on = \"100 us\", off = \"1 ms\" }, each a duration or a distribution";

/// For how long jobs come, and for how long none does then.
fn bursts(section: &Section<'_>) -> Parsed<Option<[Distribution; 2]>> {
    let Some(value) = section.get("bursts") else { return Ok(None) };
    let own = subsection(value, "bursts", &["on", "off"])?;
    let on = own.require("on", spread(&own, "on")?, BURSTS)?;
    let off = own.require("off", spread(&own, "off")?, BURSTS)?;
    if on.mean() < Time::from_us(1) {
        return wrong(own.place("on"), format!("`on` is {}", on.mean()), "it is at least 1 us");
    }
    Ok(Some([on, off]))
}

/// What a flow's jobs do, and the places of its ends.
fn kind_of(own: &Section<'_>, size: Option<u64>) -> Parsed<Ends> {
    let allowed = format!("`kind` is one of {}", list(KINDS));
    let (kind, span) = own.require("kind", own.text("kind", &allowed)?, &allowed)?;
    Ok(match kind {
        "write" | "read" => {
            let ((from, first), (to, second)) = (end(own, "from")?, end(own, "to")?);
            let kind = match kind {
                "write" => FlowKind::Write { from, to },
                _ => FlowKind::Read { from, to },
            };
            (kind, vec![first, second])
        }
        "copy" => {
            let (by, first) = end(own, "by")?;
            let ((from, second), (to, third)) = (end(own, "from")?, end(own, "to")?);
            (FlowKind::Copy { by, from, to }, vec![first, second, third])
        }
        "request" => {
            let ((from, first), (to, second)) = (end(own, "from")?, end(own, "to")?);
            let request = own.size("request", 1, MOST_BYTES)?.or(size).unwrap_or(64);
            let service = spread(own, "service")?.unwrap_or(NOTHING);
            (FlowKind::Request { from, to, request, service }, vec![first, second])
        }
        "ring" => ring(own, size)?,
        "nvme-read" | "nvme-write" => nvme(own, size, kind == "nvme-write")?,
        "all-reduce" => all_reduce(own)?,
        "trace" => nvme(own, size, false)?,
        "steps" => {
            let steps = own.require("steps", own.get("steps"), steps::FORM)?;
            let (steps, places) = steps::read(steps)?;
            (FlowKind::Steps { steps }, places)
        }
        _ => return wrong(span, format!("there is no kind of flow `{kind}`"), allowed),
    })
}

/// How many there are of what steps use.
fn units(top: &Section<'_>) -> Parsed<BTreeMap<String, u32>> {
    let mut found = BTreeMap::new();
    let Some(value) = top.get("units") else { return Ok(found) };
    let allowed = "write [units] with a number from 1 to 65536 for each name";
    let DeValue::Table(table) = value.get_ref() else {
        return wrong(value.span(), "`units` is no table", allowed);
    };
    for (name, value) in table {
        let count = rackbus_fabric::text::integer(value.get_ref());
        match count.filter(|count| (1..=1 << 16).contains(count)) {
            Some(count) => found.insert(name.get_ref().to_string(), count as u32),
            None => {
                return wrong(
                    value.span(),
                    format!("there are no such `{}`", name.get_ref()),
                    allowed,
                );
            }
        };
    }
    Ok(found)
}

type Ends = (FlowKind, Vec<std::ops::Range<usize>>);

/// Devices of a ring, at most.
const MEMBERS: usize = 256;

fn all_reduce(own: &Section<'_>) -> Parsed<Ends> {
    let allowed = "write `members` as a list of 2 to 256 devices, each HOST/DEVICE and there once";
    let value = own.require("members", own.get("members"), allowed)?;
    let DeValue::Array(entries) = value.get_ref() else {
        return wrong(value.span(), "`members` is no list", allowed);
    };
    if !(2..=MEMBERS).contains(&entries.len()) {
        return wrong(value.span(), format!("there are {} members", entries.len()), allowed);
    }
    let (mut members, mut places) = (Vec::<String>::new(), Vec::new());
    for entry in entries.iter() {
        let DeValue::String(name) = entry.get_ref() else {
            return wrong(entry.span(), "a member is no name", allowed);
        };
        if members.iter().any(|member| *member == **name) {
            return wrong(entry.span(), format!("`{name}` is there twice"), allowed);
        }
        members.push(name.to_string());
        places.push(entry.span());
    }
    let step = time(own, "step")?.unwrap_or(Time::ZERO);
    Ok((FlowKind::AllReduce { members, reduce: own.rate("reduce")?, step }, places))
}

fn ring(own: &Section<'_>, size: Option<u64>) -> Parsed<Ends> {
    let ((host, first), (device, second)) = (end(own, "host")?, end(own, "device")?);
    let kind = FlowKind::Ring {
        host,
        device,
        descriptor: own.size("descriptor", 1, 4096)?.unwrap_or(64),
        input: size.unwrap_or(4096),
        output: own.size("output", 0, MOST_BYTES)?.or(size).unwrap_or(4096),
        service: spread(own, "service")?.unwrap_or(NOTHING),
        units: own.count("units", 1, 1 << 16)?.map(|units| units as u32),
        drive: false,
        queues_in: queues_in(own)?,
        interrupt: own.truth("interrupt")?.unwrap_or(true),
    };
    Ok((kind, vec![first, second]))
}

fn nvme(own: &Section<'_>, size: Option<u64>, write: bool) -> Parsed<Ends> {
    let ((host, first), (device, second)) = (end(own, "host")?, end(own, "device")?);
    let size = size.unwrap_or(4096);
    let (input, output) = if write { (size, 0) } else { (0, size) };
    let kind = FlowKind::Ring {
        host,
        device,
        // A submission queue entry (NVMe base specification 4.1).
        descriptor: 64,
        input,
        output,
        service: spread(own, "service")?.unwrap_or(if write { PROGRAM } else { READ }),
        units: own.count("units", 1, 1 << 16)?.map(|units| units as u32),
        drive: true,
        queues_in: queues_in(own)?,
        interrupt: own.truth("interrupt")?.unwrap_or(true),
    };
    Ok((kind, vec![first, second]))
}

pub(super) fn time(section: &Section<'_>, key: &'static str) -> Parsed<Option<Time>> {
    Ok(section.picoseconds(key, LONGEST)?.map(Time::from_ps))
}

const NOTHING: Distribution = Distribution::Fixed(Time::ZERO);
/// A flash drive's read of 4 KiB, and a write into its buffer: data sheets of drives with triple-level cells tell 75 to 80 and
/// 15 us with the host's part (Micron 7450, Solidigm D7-P5520; cited from memory); the spread that their quality of
/// service suggests.
const READ: Distribution = Distribution::LogNormal(Time::from_us(70), 150);
const PROGRAM: Distribution = Distribution::LogNormal(Time::from_us(10), 150);

const QUEUES_IN: &str = "write \"host\" (the memory of the host that drives it) or \"lender\" (of the host that it is in)";

fn queues_in(section: &Section<'_>) -> Parsed<QueuesIn> {
    match section.text("queues_in", QUEUES_IN)? {
        None | Some(("host", _)) => Ok(QueuesIn::Host),
        Some(("lender", _)) => Ok(QueuesIn::Lender),
        Some((other, span)) => wrong(span, format!("`queues_in` is `{other}`"), QUEUES_IN),
    }
}

fn think(section: &Section<'_>, arrivals: Arrivals) -> Parsed<Distribution> {
    let Some(found) = spread(section, "think")? else { return Ok(NOTHING) };
    if !matches!(arrivals, Arrivals::Depth(_)) {
        let what = "`think` is given to jobs that do not wait for each other";
        return wrong(section.place("think"), what, "give it with `depth`");
    }
    Ok(found)
}

fn end(section: &Section<'_>, key: &'static str) -> Parsed<(String, std::ops::Range<usize>)> {
    let allowed = "name a host, HOST/DEVICE, or HOST@ADDRESS";
    let (name, span) = section.require(key, section.text(key, allowed)?, allowed)?;
    Ok((name.to_owned(), span))
}

fn arrivals(section: &Section<'_>, size: u64) -> Parsed<Arrivals> {
    let given: Vec<&'static str> = ["depth", "every", "poisson", "rate"]
        .into_iter()
        .filter(|key| section.get(key).is_some())
        .collect();
    if let [_, second, ..] = given[..] {
        let what = format!("{} are given at once", list(&given));
        return wrong(
            section.place(second),
            what,
            "give one of `depth`, `every`, `poisson` and `rate`",
        );
    }
    let span = |key| match time(section, key)? {
        Some(Time::ZERO) => {
            wrong(section.place(key), format!("`{key}` is no time"), "it is at least 1 ps")
        }
        span => Ok(span),
    };
    if let Some(every) = span("every")? {
        return Ok(Arrivals::Every(every));
    }
    if let Some(mean) = span("poisson")? {
        return Ok(Arrivals::Poisson(mean));
    }
    if let Some(rate) = section.rate("rate")? {
        if size == 0 {
            let allowed = "give `depth`, `every` or `poisson`, or a `size`";
            return wrong(section.place("rate"), "`rate` is given, and no bytes move", allowed);
        }
        let ps = u128::from(size) * 1_000_000_000_000 / u128::from(rate);
        return Ok(Arrivals::Every(Time::from_ps(ps.clamp(1, u128::from(LONGEST)) as u64)));
    }
    Ok(Arrivals::Depth(section.count("depth", 1, 1 << 16)?.unwrap_or(1) as u32))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn flows_are_read() {
        let text = "duration = \"2 ms\"\n[flows.a]\nkind = \"write\"\nfrom = \"alpha/gpu0\"\nto = \"beta\"\n\
                    size = \"128 KiB\"\ndepth = 8\nqueues = 2\n[flows.b]\nkind = \"nvme-read\"\nhost = \"beta\"\n\
                    device = \"alpha/nvme0\"\nrate = \"1 GB/s\"\n";
        let workload = parse("w.toml", text).unwrap();
        assert_eq!(workload.warmup, Time::from_us(200));
        let [a, b] = &workload.flows[..] else { panic!("two flows") };
        assert_eq!((a.size, a.queues, a.arrivals), (131_072, 2, Arrivals::Depth(8)));
        assert_eq!(b.arrivals, Arrivals::Every(Time::from_ns(4_096)));
        assert!(matches!(b.kind, FlowKind::Ring { input: 0, output: 4096, .. }));
    }

    #[test]
    fn what_is_wrong_is_named_with_its_place() {
        let flow = "[flows.a]\nkind = \"write\"\nfrom = \"a\"\nto = \"b\"\n";
        let cases = [
            ("", "w.toml:1:1: the workload has no flow"),
            ("[flows.a]\n", "w.toml:1:8: flow a has no `kind`"),
            ("[flows.a]\nkind = \"wrote\"", "w.toml:2:8: there is no kind of flow `wrote`"),
            (&format!("{flow}size = -1"), "w.toml:5:8: `size` is no size"),
            (&format!("{flow}size = 0"), "w.toml:5:8: `size` is 0 B"),
            (&format!("{flow}host = \"b\""), "w.toml:5:1: unknown key `host` in flow a"),
            (
                &format!("{flow}depth = 2\nrate = \"1 GB/s\""),
                "w.toml:6:8: `depth`, `rate` are given at once",
            ),
            (&format!("{flow}every = \"0 ns\""), "w.toml:5:9: `every` is no time"),
            (
                &format!("{flow}begin = \"2 us\"\nend = \"1 us\""),
                "w.toml:6:7: `end` is 1.000 us; it is later than the flow's beginning, 2.000 us",
            ),
            (&format!("{flow}bursts = {{ on = \"1 ms\" }}"), "w.toml:5:10: bursts has no `off`"),
            (
                &format!("{flow}bursts = {{ on = \"1 ns\", off = \"1 ms\" }}"),
                "w.toml:5:17: `on` is 1.0 ns; it is at least 1 us",
            ),
            (
                "[flows.a]\nkind = \"all-reduce\"\nmembers = [\"a/x\"]",
                "w.toml:3:11: there are 1 members; write `members` as a list of 2 to 256",
            ),
            (
                "[flows.a]\nkind = \"all-reduce\"\nmembers = [\"a/x\", \"b/x\", \"a/x\"]",
                "w.toml:3:26: `a/x` is there twice",
            ),
            (
                "[flows.a]\nkind = \"steps\"\nsteps = [{ together = [{ wait = \"1 us\" }] }]",
                "w.toml:3:24: `steps` is no list",
            ),
            (&format!("{flow}file = \"x\""), "w.toml:5:1: unknown key `file` in flow a"),
            (
                "duration = \"1 us\"\nwarmup = \"1 us\"\n[flows.a]",
                "w.toml:2:10: `warmup` is 1.000 us",
            ),
        ];
        for (text, expected) in cases {
            let error = parse("w.toml", text).unwrap_err().to_string();
            assert!(error.starts_with(expected), "{error}\n{expected}");
        }
    }
}
