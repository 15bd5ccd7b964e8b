//! A report: one HTML page, with nothing beside it, that shows what came of a workload. Its topology is
//! coloured by load at a moment that a slider chooses; sentences say what holds flows up; charts show their
//! latencies and their rates over time.
//!
//! The page is well-formed XML too, so that it can be checked without a browser. The moment may be chosen in its
//! address: `report.html#12` shows slice 12.

use std::fmt::Write as _;

use rackbus_fabric::rack::Rack;

use crate::picture::chart::{Chart, Series};
use crate::picture::{Axis, Scale, Unit, escape};
use crate::timing::Timing;
use crate::workload::{Failed, FlowResult, Results, Slice, Workload, pictures, watch};

mod sentences;

/// Slices of the measured time that the page shows.
pub const SLICES: usize = 60;

/// Simulates `workload` in `rack`, at most `most` events of it, and gives the page beside the results.
///
/// # Errors
/// [`Failed`] as [`crate::workload::run`] has it.
pub fn simulate(
    rack: &Rack,
    timing: &Timing,
    workload: &Workload,
    most: u64,
) -> Result<(Results, String), Failed> {
    let (results, slices) = watch(rack, timing, workload, most, SLICES)?;
    let page = page(rack, workload, &results, &slices)?;
    Ok((results, page))
}

/// The page; `slices` are of `results`' measured time.
///
/// # Errors
/// [`Failed`] when the rack's topology cannot be.
pub fn page(
    rack: &Rack,
    workload: &Workload,
    results: &Results,
    slices: &[Slice],
) -> Result<String, Failed> {
    let mut page = Page::default();
    let name = escape(&rack.name);
    page.add(format_args!(
        "<!DOCTYPE html>\n<html xmlns=\"http://www.w3.org/1999/xhtml\" lang=\"en\">\n<head>\n\
         <meta charset=\"utf-8\"/>\n\
         <meta name=\"viewport\" content=\"width=device-width, initial-scale=1\"/>\n\
         <title>{name}: what its flows get</title>\n<style>\n{}</style>\n</head>\n<body>\n\
         <h1>{name}: what its flows get</h1>",
        include_str!("report.css")
    ));
    let shown = workload.duration.since(workload.warmup);
    page.add(format_args!(
        "<p class=\"what\">{shown} of {}, simulated packet by packet. {}</p>",
        count(results.flows.len(), "flow"),
        escape(&sentences::hosts(results))
    ));
    page.add(format_args!("<h2>What holds them up</h2>\n<ul id=\"bottlenecks\">"));
    for sentence in sentences::all(results) {
        page.add(format_args!("<li>{}</li>", escape(&sentence)));
    }
    page.add(format_args!("</ul>"));
    moment(&mut page, slices);
    page.add(format_args!("<div class=\"picture\" id=\"topology\">"));
    page.text += &pictures::links(rack, results)?.svg();
    page.add(format_args!("</div>"));
    links(&mut page, results);
    page.add(format_args!("<h2>Flows</h2>"));
    flows(&mut page, results);
    for (id, chart) in
        [("latencies", pictures::latencies(results)), ("rates", rates(results, slices))]
    {
        page.add(format_args!("<div class=\"picture\" id=\"{id}\">"));
        page.text += &chart.svg();
        page.add(format_args!("</div>"));
    }
    data(&mut page, results, slices);
    page.add(format_args!("<script>\n{}</script>\n</body>\n</html>", include_str!("report.js")));
    Ok(page.text)
}

/// The page as it is written.
#[derive(Default)]
struct Page {
    text: String,
}

impl Page {
    fn add(&mut self, more: std::fmt::Arguments<'_>) {
        // Writing into a text cannot fail.
        let _ = self.text.write_fmt(more);
        self.text.push('\n');
    }
}

/// `1 flow`, `2 flows`.
fn count(number: usize, what: &str) -> String {
    format!("{number} {what}{}", if number == 1 { "" } else { "s" })
}

/// The slider: slice 0 stands for the whole time.
fn moment(page: &mut Page, slices: &[Slice]) {
    page.add(format_args!(
        "<h2>How busy the links are</h2>\n<p class=\"moment\"><label for=\"slider\">When</label> \
         <input type=\"range\" id=\"slider\" min=\"0\" max=\"{}\" value=\"0\"/> \
         <button type=\"button\" id=\"play\">Play</button> \
         <output id=\"when\" for=\"slider\">all the time</output></p>\n\
         <p class=\"key\">Links are drawn thicker and redder the busier they are at that moment; their labels \
         are means of all the time.</p>",
        slices.len()
    ));
}

fn links(page: &mut Page, results: &Results) {
    page.add(format_args!(
        "<table id=\"links\"><thead><tr><th>link</th><th>what</th><th>there</th><th>back</th>\
         <th>waits for credits</th></tr></thead><tbody>"
    ));
    let busy = |there: f64, back: f64| there + back > 0.0;
    for (nth, link) in results.links.iter().enumerate().filter(|(_, l)| busy(l.there, l.back)) {
        page.add(format_args!(
            "<tr data-link=\"{nth}\"><td>{} – {}</td><td>{}</td><td>{}</td><td>{}</td><td>{}</td></tr>",
            escape(&link.ends[0]),
            escape(&link.ends[1]),
            escape(&link.link),
            percent(link.there),
            percent(link.back),
            link.starved
        ));
    }
    page.add(format_args!("</tbody></table>"));
}

fn flows(page: &mut Page, results: &Results) {
    page.add(format_args!(
        "<table id=\"flows\"><thead><tr><th>flow</th><th>rate</th><th>±</th><th>jobs/s</th><th>median</th>\
         <th>99 %</th><th>greatest</th><th>hops</th><th>held up by</th></tr></thead><tbody>"
    ));
    for (nth, flow) in results.flows.iter().enumerate() {
        let latency = &flow.latency_ns;
        page.add(format_args!(
            "<tr data-flow=\"{nth}\"><td>{}</td><td>{}</td><td>{}</td><td>{:.0}</td><td>{}</td><td>{}</td>\
             <td>{}</td><td>{}</td><td>{}</td></tr>",
            escape(&flow.name),
            Unit::BytesPerSecond.text(flow.bytes_per_second),
            flow.confidence.map(percent).unwrap_or_default(),
            flow.jobs_per_second,
            span(flow, latency.p50),
            span(flow, latency.p99),
            span(flow, latency.greatest),
            flow.hops,
            escape(&flow.bottleneck)
        ));
    }
    page.add(format_args!("</tbody></table>"));
}

/// A latency, where any job ended.
fn span(flow: &FlowResult, ns: f64) -> String {
    if flow.jobs == 0 { String::new() } else { Unit::Nanoseconds.text(ns) }
}

fn percent(share: f64) -> String {
    format!("{:.1} %", share * 100.0)
}

/// Each flow's rate over time.
fn rates(results: &Results, slices: &[Slice]) -> Chart {
    let of = |nth: usize| {
        let points = slices.iter().map(|slice| (slice.until.ns(), slice.rates[nth]));
        points.collect::<Vec<_>>()
    };
    let flows = results.flows.iter().enumerate().take(pictures::LINES);
    Chart {
        title: "Rate of each flow over time".to_owned(),
        subtitle: format!("Means of the {} before", count(slices.len(), "slice")),
        x: Axis::new("Time", Unit::Nanoseconds, Scale::Linear),
        y: Axis::new("Rate", Unit::BytesPerSecond, Scale::Linear),
        series: flows.map(|(nth, flow)| Series::line(flow.name.clone(), of(nth))).collect(),
    }
}

/// What the script reads: for all the time and each slice, links' loads there and back and flows' rates.
fn data(page: &mut Page, results: &Results, slices: &[Slice]) {
    let all = results.links.iter().flat_map(|link| [link.there, link.back]);
    let mut loads = vec![line(all.map(permille))];
    let mut rates = vec![line(results.flows.iter().map(|flow| flow.bytes_per_second as u64))];
    let mut times = vec!["all the time".to_owned()];
    for slice in slices {
        loads.push(line(slice.loads.iter().flatten().map(|load| permille(*load))));
        rates.push(line(slice.rates.iter().map(|rate| *rate as u64)));
        times.push(format!("until {}", Unit::Nanoseconds.text(slice.until.ns())));
    }
    page.add(format_args!(
        "<div id=\"data\" hidden=\"hidden\" data-loads=\"{}\" data-rates=\"{}\" data-times=\"{}\"></div>",
        loads.join(";"),
        rates.join(";"),
        times.join(";")
    ));
}

fn permille(share: f64) -> u64 {
    (share.clamp(0.0, 1.0) * 1000.0).round() as u64
}

fn line(values: impl Iterator<Item = u64>) -> String {
    values.map(|value| value.to_string()).collect::<Vec<_>>().join(" ")
}
