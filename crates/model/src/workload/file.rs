//! Reading a workload.

use rackbus_fabric::text::{FileError, Named, Outcome, Section, document, list, wrong};

use super::{FlowKind, FlowSpec, Places, Workload};
use crate::engine::Arrivals;
use crate::time::Time;

const KINDS: &[&str] = &["write", "read", "copy", "request", "ring", "nvme-read", "nvme-write"];
/// The longest simulated time: 100 s.
const LONGEST: u64 = 100_000_000_000_000;
const MOST_BYTES: u64 = 1 << 40;

/// Reads a workload's `text`; `file` is its name, for messages.
///
/// # Errors
/// [`FileError`] for the first thing that is wrong.
pub fn parse(file: &str, text: &str) -> Result<Workload, FileError> {
    read(text).map_err(|problem| problem.locate(file, text))
}

fn read(text: &str) -> Outcome<Workload> {
    let root = document(text)?;
    let keys = &["seed", "duration", "warmup", "flows"];
    let top = Section::new(root.get_ref(), 0..0, "the workload", keys)?;
    let duration = top.picoseconds("duration", LONGEST)?.unwrap_or(1_000_000_000);
    let warmup = top.picoseconds("warmup", LONGEST)?.unwrap_or(duration / 10);
    if warmup >= duration {
        let what = format!("`warmup` is {}", Time::from_ps(warmup));
        let allowed = format!("it is less than the duration, {}", Time::from_ps(duration));
        return wrong(top.place("warmup"), what, allowed);
    }
    let flows = top.tables("flows")?.iter().map(flow).collect::<Outcome<Vec<_>>>()?;
    if flows.is_empty() {
        return wrong(0..0, "the workload has no flow", "write [flows.NAME] for each flow");
    }
    Ok(Workload {
        seed: top.count("seed", 0, u64::MAX)?.unwrap_or(1),
        duration: Time::from_ps(duration),
        warmup: Time::from_ps(warmup),
        flows,
    })
}

/// The keys that every flow has.
macro_rules! keys {
    ($($own:literal),*) => {
        &[
            "kind", "tenant", "size", "depth", "every", "poisson", "rate", "queues", "count", "begin",
            "random", "span", $($own),*
        ]
    };
}

fn flow(entry: &Named<'_>) -> Outcome<FlowSpec> {
    let place = format!("flow {}", entry.name);
    let section = |keys| Section::new(entry.table, entry.span.clone(), place.clone(), keys);
    let all = keys!(
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
        "interrupt"
    );
    let any = section(all)?;
    let allowed = format!("`kind` is one of {}", list(KINDS));
    let (kind, span) = any.require("kind", any.text("kind", &allowed)?, &allowed)?;
    let size = any.size("size", 1, MOST_BYTES)?;
    let (kind, places) = match kind {
        "write" | "read" => {
            let own = section(keys!("from", "to"))?;
            let ((from, first), (to, second)) = (end(&own, "from")?, end(&own, "to")?);
            let kind = match kind {
                "write" => FlowKind::Write { from, to },
                _ => FlowKind::Read { from, to },
            };
            (kind, vec![first, second])
        }
        "copy" => {
            let own = section(keys!("by", "from", "to"))?;
            let (by, first) = end(&own, "by")?;
            let ((from, second), (to, third)) = (end(&own, "from")?, end(&own, "to")?);
            (FlowKind::Copy { by, from, to }, vec![first, second, third])
        }
        "request" => {
            let own = section(keys!("from", "to", "request", "service"))?;
            let ((from, first), (to, second)) = (end(&own, "from")?, end(&own, "to")?);
            let request = own.size("request", 1, MOST_BYTES)?.or(size).unwrap_or(64);
            let service = time(&own, "service")?.unwrap_or(Time::ZERO);
            (FlowKind::Request { from, to, request, service }, vec![first, second])
        }
        "ring" => ring(
            &section(keys!(
                "host",
                "device",
                "descriptor",
                "output",
                "service",
                "units",
                "interrupt"
            ))?,
            size,
        )?,
        "nvme-read" | "nvme-write" => {
            let own = section(keys!("host", "device", "service", "units", "interrupt"))?;
            nvme(&own, size, kind == "nvme-write")?
        }
        _ => return wrong(span, format!("there is no kind of flow `{kind}`"), allowed),
    };
    Ok(FlowSpec {
        name: entry.name.to_owned(),
        tenant: any.text("tenant", "write a name")?.map(|(name, _)| name.to_owned()),
        kind,
        size: size.unwrap_or(4096),
        arrivals: arrivals(&any, size.unwrap_or(4096))?,
        queues: any.count("queues", 1, 1 << 16)?.unwrap_or(1) as u32,
        count: any.count("count", 1, u64::MAX)?.unwrap_or(u64::MAX),
        begin: time(&any, "begin")?.unwrap_or(Time::ZERO),
        random: any.truth("random")?.unwrap_or(false),
        span: any.size("span", 1, u64::MAX / 2)?.unwrap_or(64 << 20),
        places: Places { ends: places },
    })
}

type Ends = (FlowKind, Vec<std::ops::Range<usize>>);

fn ring(own: &Section<'_>, size: Option<u64>) -> Outcome<Ends> {
    let ((host, first), (device, second)) = (end(own, "host")?, end(own, "device")?);
    let kind = FlowKind::Ring {
        host,
        device,
        descriptor: own.size("descriptor", 1, 4096)?.unwrap_or(64),
        input: size.unwrap_or(4096),
        output: own.size("output", 0, MOST_BYTES)?.or(size).unwrap_or(4096),
        service: time(own, "service")?.unwrap_or(Time::ZERO),
        units: own.count("units", 1, 1 << 16)?.unwrap_or(1) as u32,
        interrupt: own.truth("interrupt")?.unwrap_or(true),
    };
    Ok((kind, vec![first, second]))
}

fn nvme(own: &Section<'_>, size: Option<u64>, write: bool) -> Outcome<Ends> {
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
        service: time(own, "service")?.unwrap_or(Time::from_us(10)),
        units: own.count("units", 1, 1 << 16)?.unwrap_or(64) as u32,
        interrupt: own.truth("interrupt")?.unwrap_or(true),
    };
    Ok((kind, vec![first, second]))
}

fn time(section: &Section<'_>, key: &'static str) -> Outcome<Option<Time>> {
    Ok(section.picoseconds(key, LONGEST)?.map(Time::from_ps))
}

fn end(section: &Section<'_>, key: &'static str) -> Outcome<(String, std::ops::Range<usize>)> {
    let allowed = "name a host, HOST/DEVICE, or HOST@ADDRESS";
    let (name, span) = section.require(key, section.text(key, allowed)?, allowed)?;
    Ok((name.to_owned(), span))
}

fn arrivals(section: &Section<'_>, size: u64) -> Outcome<Arrivals> {
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
