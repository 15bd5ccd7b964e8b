//! Flows that play a trace of block I/O: the keys that name it, and the jobs that it gives the flow.

use std::ops::Range;

use rackbus_fabric::text::{Named, Parsed, Section, list, wrong};

use super::blocks::{BlockTrace, FORMATS, Format};
use super::file::{LONGEST, TRACE, time};
use super::{FlowSpec, Workload};
use crate::engine::Arrivals;
use crate::time::Time;

/// A trace that a flow names.
pub(super) struct TraceFile {
    /// The number of the flow in the workload.
    flow: usize,
    /// The file as the flow names it, and where.
    pub(super) file: String,
    pub(super) span: Range<usize>,
    pub(super) format: Option<Format>,
    /// What of its beginning is not played.
    skip: Time,
}

impl Workload {
    /// Gives a flow the jobs of its trace.
    pub(super) fn play(&mut self, of: &TraceFile, mut trace: BlockTrace) -> Parsed<()> {
        let flow = &mut self.flows[of.flow];
        let whole = trace.length();
        trace.skip(of.skip);
        if trace.ios.is_empty() {
            let what = format!("nothing of `{}` is left to play", of.file);
            return wrong(of.span.clone(), what, format!("`skip` is at most {whole}"));
        }
        if flow.arrivals == Arrivals::Traced && !trace.timed && trace.ios.len() > 1 {
            let what = format!("`{}` does not tell when its I/Os came", of.file);
            return wrong(of.span.clone(), what, "give `depth`: so many at a time");
        }
        if trace.left_out > 0 {
            let of = match trace.left_out {
                1 => "a flush, sync or discard of the trace is".to_owned(),
                count => format!("{count} flushes, syncs and discards of the trace are"),
            };
            self.notes.push(format!("{}: {of} left out", flow.name));
        }
        flow.size = trace.mean_bytes();
        flow.trace = Some(trace);
        Ok(())
    }

    /// Lets it last, and be measured, from the first job of its traces to after the last.
    pub(super) fn last_as_its_traces(&mut self) {
        let last = |flow: &FlowSpec| Some(flow.begin + flow.trace.as_ref()?.length());
        let last = self.flows.iter().filter_map(last).max().unwrap_or(Time::ZERO);
        let last = (last + AFTER_TRACES).min(Time::from_ps(LONGEST));
        self.duration = self.duration.max(last);
        self.warmup = Time::ZERO;
    }
}

/// What is simulated after the last job of a trace has come, so that it can end: 1 ms.
const AFTER_TRACES: Time = Time::from_us(1_000);

/// The trace that a flow names, when it is of that kind.
pub(super) fn trace_file(flow: usize, entry: &Named<'_>) -> Parsed<Option<TraceFile>> {
    let kind = entry.table.get("kind").and_then(|kind| kind.get_ref().as_str());
    if kind != Some("trace") {
        return Ok(None);
    }
    let own = Section::new(entry.table, entry.span.clone(), format!("flow {}", entry.name), TRACE)?;
    let allowed = "name the trace's file, from the workload's folder on";
    let (file, span) = own.require("file", own.text("file", allowed)?, allowed)?;
    for key in ["size", "every", "poisson", "rate"] {
        if own.get(key).is_some() {
            let what = format!("`{key}` is given to a trace");
            let allowed =
                "a trace tells times and sizes; `depth` plays it so many at a time instead";
            return wrong(own.place(key), what, allowed);
        }
    }
    let names = FORMATS.map(|(name, _)| name);
    let allowed = format!("`format` is one of {}", list(&names));
    let format = match own.text("format", &allowed)? {
        None => None,
        Some((word, span)) => match FORMATS.into_iter().find(|(name, _)| *name == word) {
            Some((_, format)) => Some(format),
            None => return wrong(span, format!("there is no format `{word}`"), allowed),
        },
    };
    let skip = time(&own, "skip")?.unwrap_or(Time::ZERO);
    Ok(Some(TraceFile { flow, file: file.to_owned(), span, format, skip }))
}

#[cfg(test)]
mod tests {
    use rackbus_fabric::text::FileError;

    use super::*;
    use crate::workload::{parse, parse_with};

    const TRACED: &str = "[flows.a]\nkind = \"trace\"\nhost = \"beta\"\ndevice = \"alpha/nvme0\"\n\
                          file = \"app.log\"\n";

    fn traced(more: &str, log: &str) -> Result<Workload, FileError> {
        let read = |name: &str| match name {
            "app.log" => Ok(("dir/app.log".to_owned(), log.to_owned())),
            _ => Err("no such file".to_owned()),
        };
        parse_with("w.toml", &format!("{TRACED}{more}"), &read)
    }

    #[test]
    fn a_trace_lasts_as_long_as_its_jobs_come() {
        let log = "fio version 3 iolog\n1000 x write 0 4096\n1500 x sync 0 0\n9000 x read 0 8192\n";
        let workload = traced("begin = \"1 ms\"\n", log).unwrap();
        assert_eq!((workload.duration, workload.warmup), (Time::from_us(10_000), Time::ZERO));
        let flow = &workload.flows[0];
        assert_eq!((flow.size, flow.arrivals), (6144, Arrivals::Traced));
        assert_eq!(flow.traced(0).count(), 2);
        assert_eq!(workload.notes, ["a: a flush, sync or discard of the trace is left out"]);
        let later = traced("skip = \"5 ms\"\ndepth = 4\n", log).unwrap();
        assert_eq!(later.flows[0].arrivals, Arrivals::Depth(4));
        assert_eq!(later.flows[0].traced(0).map(|io| io.at).collect::<Vec<_>>(), [Time::ZERO]);
    }

    #[test]
    fn what_is_wrong_with_a_trace_is_named_with_its_place() {
        let log = "fio version 3 iolog\n1000 x write 0 4096\n";
        let cases = [
            ("size = \"4 KiB\"", log, "w.toml:6:8: `size` is given to a trace"),
            ("format = \"csv\"", log, "w.toml:6:10: there is no format `csv`; `format` is one of"),
            ("skip = \"1 us\"", log, "w.toml:5:8: nothing of `app.log` is left to play"),
            ("think = \"1 us\"", log, "w.toml:6:9: `think` is given to jobs that do not wait"),
            ("", "fio version 3 iolog\n1 x read 0\n", "dir/app.log:2:1: `1 x read 0` is no line"),
            (
                "",
                "fio version 2 iolog\nx read 0 1\nx read 0 1\n",
                "w.toml:5:8: `app.log` does not tell when its I/Os came; give `depth`",
            ),
        ];
        for (more, log, expected) in cases {
            let error = traced(more, log).unwrap_err().to_string();
            assert!(error.starts_with(expected), "{error}\n{expected}");
        }
        let error = parse("w.toml", TRACED).unwrap_err().to_string();
        assert!(error.starts_with("w.toml:5:8: `app.log` cannot be read"), "{error}");
    }
}
