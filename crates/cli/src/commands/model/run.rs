//! `rackbus model run`: a workload in a rack.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicUsize, Ordering};

use rackbus_model::flow::rack::{FlowLevel, shares};
use rackbus_model::report;
use rackbus_model::workload::{Failed, LinkResult, Results, Run, pictures, stranded};
use serde::Serialize;

use super::variants::{self, Sweep, Variant};
use super::{Case, Source, broken, live, rate, span, taken_to_be, write};
use crate::Common;
use crate::output::{Cell, Failure, Output, Tone};

/// Simulate a workload in a rack: what each flow gets, and what holds it up.
#[derive(Debug, clap::Args)]
#[command(after_help = "Examples:
  rackbus model run rack.toml workload.toml
  rackbus model run rack.toml workload.toml --sweep hosts.lender.iommu=true,false
  rackbus model run rack.toml workload.toml --sweep fabric.links.0.lanes=4,8,16 --sweep flows.a.depth=1,8
  rackbus model run rack.toml workload.toml --without lender/gpu0
  rackbus model run rack.toml workload.toml --degrade lender-ntb,top-of-rack
  rackbus model run rack.toml workload.toml --pictures pictures/
  rackbus model run rack.toml workload.toml --report report.html
  rackbus model run rack.toml workload.toml --flow-level
  rackbus model run --live                   the running rack, with its leases as the workload
  rackbus model run --live workload.toml     the running rack, with another workload
  rackbus --json model run rack.toml workload.toml")]
pub struct Args {
    /// The rack file and the workload file; with --live the workload file, or none.
    #[arg(value_name = "FILE", num_args = 0..=2)]
    files: Vec<PathBuf>,
    /// Take the rack that runs on this machine.
    #[arg(long)]
    live: bool,
    /// Run each of these values of a key of either file; several sweeps run all combinations.
    #[arg(long, value_name = "KEY=A,B,C")]
    sweep: Vec<Sweep>,
    /// Take this host, device, adapter or switch out, with its links; flows that need it are left out.
    #[arg(long, value_name = "PART")]
    without: Vec<String>,
    /// Halve the lanes of the link between these two.
    #[arg(long, value_name = "A,B")]
    degrade: Vec<String>,
    /// Draw bandwidth over size, latencies and links into this folder (SVG), one set for each variant.
    #[arg(long, value_name = "DIR")]
    pictures: Option<PathBuf>,
    /// Write a page to look at: topology by load over time, latencies, what holds flows up (one HTML file).
    #[arg(long, value_name = "FILE", conflicts_with_all = ["flow_level", "sweep"])]
    report: Option<PathBuf>,
    /// Share links fairly instead of simulating packets: bandwidth of thousands of hosts in seconds.
    #[arg(long, conflicts_with = "pictures")]
    flow_level: bool,
    /// The most events of a simulation.
    #[arg(long, value_name = "N", default_value_t = 4_000_000_000)]
    max_events: u64,
}

/// What came of a variant.
#[derive(Debug, Serialize)]
pub(super) struct VariantOutcome<T> {
    /// The values that were chosen.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub(super) variant: Vec<(String, String)>,
    #[serde(flatten)]
    pub(super) results: T,
}

impl Args {
    pub async fn run(&self, common: &Common, output: &Output) -> Result<(), Failure> {
        let (rack, workload, others) = self.sources(common).await?;
        let (rack, workload, gone) = self.broken(rack, workload)?;
        let as_written = |why| variants::as_written(&rack, &workload, why);
        let variants = variants::all(&rack, &workload, &self.sweep).map_err(as_written)?;
        let cases = variants.iter().map(|v| Case::read(&v.rack, &v.workload));
        let mut cases: Vec<Case> = cases.collect::<Result<_, _>>().map_err(as_written)?;
        if !gone.is_empty() {
            let note = format!("left out, as they need what is gone: {}", gone.join(", "));
            cases.iter_mut().for_each(|case| case.workload.notes.push(note.clone()));
        }
        if !others.is_empty() {
            let note =
                format!("lent, but left out as they are no NVMe drives: {}", others.join(", "));
            cases.iter_mut().for_each(|case| case.workload.notes.push(note.clone()));
        }
        let (flows, duration) = match cases.first() {
            Some(case) => (case.workload.flows.len(), case.workload.duration),
            None => return Ok(()),
        };
        let several =
            if cases.len() > 1 { format!(", {} variants", cases.len()) } else { String::new() };
        if self.flow_level {
            output.progress(&format!("sharing links among {flows} flows{several}"));
            let share = |case: &Case| shares(&case.rack, &case.timing, &case.workload);
            let outcomes = all(&variants, &cases, share)?;
            self.answer(output, &outcomes, show_shares);
            return Ok(());
        }
        output.progress(&format!("simulating {duration} of {flows} flows{several}"));
        let outcomes = match &self.report {
            None => {
                let each = processors() / cases.len().max(1);
                let simulate = |case: &Case| case.simulate(self.max_events, each.max(1));
                all(&variants, &cases, simulate)?
            }
            Some(file) => vec![self.reported(file, &cases[0])?],
        };
        if let Some(folder) = &self.pictures {
            self.draw(folder, &cases, &outcomes, output)?;
        }
        self.answer(output, &outcomes, |o, outcomes| {
            show_flows(o, outcomes);
            show_doubts(o, outcomes);
            show_tenants(o, outcomes);
            show_links(o, outcomes.iter().map(|one| (one, used(&one.results.links))), outcomes);
        });
        Ok(())
    }

    /// The only case's outcome, with a page of it written.
    fn reported(&self, file: &Path, case: &Case) -> Result<VariantOutcome<Results>, Failure> {
        let simulated = report::simulate(&case.rack, &case.timing, &case.workload, self.max_events);
        let (results, page) = simulated.map_err(|failed| case.failure(failed))?;
        write(file, &page)?;
        Ok(VariantOutcome { variant: Vec::new(), results })
    }

    fn answer<T: Serialize>(
        &self,
        output: &Output,
        outcomes: &[VariantOutcome<T>],
        show: impl FnOnce(&Output, &[VariantOutcome<T>]),
    ) {
        match outcomes {
            // Without sweeps there is one thing to tell, not a list.
            [only] if self.sweep.is_empty() => output.result(only, |o| show(o, outcomes)),
            _ => output.result(&outcomes, |o| show(o, outcomes)),
        }
    }

    /// The rack and workload with what is taken out or degraded, and the names of flows that are left out.
    fn broken(
        &self,
        rack: Source,
        workload: Source,
    ) -> Result<(Source, Source, Vec<String>), Failure> {
        if self.without.is_empty() && self.degrade.is_empty() {
            return Ok((rack, workload, Vec::new()));
        }
        // What is wrong before anything breaks is told with its place.
        let whole = Case::read(&rack, &workload)?;
        let fits = Run::new(&whole.rack, &whole.timing, &whole.workload);
        fits.map_err(|failed| whole.failure(failed))?;
        let rack =
            if self.degrade.is_empty() { rack } else { broken::degrade(&rack, &self.degrade)? };
        if self.without.is_empty() {
            return Ok((rack, workload, Vec::new()));
        }
        let (rack, cut) = broken::without(&rack, &self.without)?;
        let (workload, mut gone) = broken::idle(&workload, &[&self.without[..], &cut].concat())?;
        // Others lose the way to where they go.
        let case = Case::read(&rack, &workload)?;
        let lost = stranded(&case.rack, &case.timing, &case.workload);
        let lost = lost.map_err(|failed| case.failure(failed))?;
        let workload = broken::leave_out(&workload, &lost)?;
        gone.extend(lost);
        Ok((rack, workload, gone))
    }

    /// The rack, the workload, and what is lent in the running rack and has no flow.
    async fn sources(&self, common: &Common) -> Result<(Source, Source, Vec<String>), Failure> {
        let none = Vec::new();
        match (&self.files[..], self.live) {
            ([rack, workload], false) => Ok((Source::read(rack)?, Source::read(workload)?, none)),
            ([], true) => {
                let rack = live::rack(common)?;
                let (workload, others) = live::leases(common, &rack).await?;
                Ok((rack, workload, others))
            }
            ([workload], true) => Ok((live::rack(common)?, Source::read(workload)?, none)),
            _ => Err(Failure::usage(
                "which rack and workload is not clear",
                "write `rackbus model run RACK WORKLOAD`, or `rackbus model run --live [WORKLOAD]`",
            )),
        }
    }
}

/// Processors that this may run on.
pub(super) fn processors() -> usize {
    std::thread::available_parallelism().map_or(1, usize::from)
}

/// Answers all cases, on all processors; the first failure in their order is told.
pub(super) fn all<T: Send>(
    variants: &[Variant],
    cases: &[Case],
    answer: impl Fn(&Case) -> Result<T, Failed> + Sync,
) -> Result<Vec<VariantOutcome<T>>, Failure> {
    let next = AtomicUsize::new(0);
    let threads = processors().min(cases.len());
    let work = || {
        let mut done = Vec::new();
        while let Some(nth) =
            Some(next.fetch_add(1, Ordering::Relaxed)).filter(|n| *n < cases.len())
        {
            let case = &cases[nth];
            done.push((nth, answer(case).map_err(|failed| case.failure(failed))));
        }
        done
    };
    let mut done = std::thread::scope(|scope| {
        let workers: Vec<_> = (0..threads).map(|_| scope.spawn(work)).collect();
        workers.into_iter().flat_map(|worker| worker.join().unwrap_or_default()).collect::<Vec<_>>()
    });
    done.sort_by_key(|(nth, _)| *nth);
    if done.len() < cases.len() {
        return Err(Failure::new("a simulation broke off", "report this as an error of rackbus"));
    }
    let outcome = |(nth, results): (usize, Result<T, Failure>)| {
        Ok(VariantOutcome { variant: variants[nth].choice.clone(), results: results? })
    };
    done.into_iter().map(outcome).collect()
}

impl Args {
    fn draw(
        &self,
        folder: &Path,
        cases: &[Case],
        outcomes: &[VariantOutcome<Results>],
        output: &Output,
    ) -> Result<(), Failure> {
        output.progress(&format!("drawing into {}", folder.display()));
        for (nth, (case, outcome)) in cases.iter().zip(outcomes).enumerate() {
            let own =
                if cases.len() > 1 { folder.join((nth + 1).to_string()) } else { folder.into() };
            let failed = |failed| case.failure(failed);
            let bandwidth = pictures::bandwidth(&case.rack, &case.timing, &case.workload);
            let links = pictures::links(&case.rack, &outcome.results);
            let files = [
                ("bandwidth.svg", bandwidth.map_err(failed)?.svg()),
                ("latency.svg", pictures::latencies(&outcome.results).svg()),
                ("links.svg", links.map_err(failed)?.svg()),
            ];
            for (name, text) in files {
                write(&own.join(name), &text)?;
            }
        }
        Ok(())
    }
}

/// The columns of a variant: its values.
fn choice<T>(outcome: &VariantOutcome<T>) -> Vec<Cell> {
    outcome.variant.iter().map(|(_, value)| value.as_str().into()).collect()
}

fn head<'a, T>(outcomes: &'a [VariantOutcome<T>], own: &[&'a str]) -> Vec<&'a str> {
    let keys =
        outcomes.first().into_iter().flat_map(|o| o.variant.iter().map(|(key, _)| key.as_str()));
    keys.chain(own.iter().copied()).collect()
}

fn show_flows(o: &Output, outcomes: &[VariantOutcome<Results>]) {
    let own =
        ["flow", "rate", "+-", "jobs/s", "mean", "p50", "p99", "greatest", "hops", "held up by"];
    let rows = outcomes.iter().flat_map(|outcome| {
        outcome.results.flows.iter().map(move |flow| {
            let latency = &flow.latency_ns;
            // Where no job ended, none is known.
            let span = |ns| if flow.jobs == 0 { String::new() } else { span(ns) };
            let mut cells = choice(outcome);
            cells.extend([
                flow.name.as_str().into(),
                rate(flow.bytes_per_second).into(),
                flow.confidence.map_or(String::new(), sure).into(),
                format!("{:.0}", flow.jobs_per_second).into(),
                span(latency.mean).into(),
                span(latency.p50).into(),
                span(latency.p99).into(),
                span(latency.greatest).into(),
                flow.hops.to_string().into(),
                flow.bottleneck.as_str().into(),
            ]);
            cells
        })
    });
    o.table(&head(outcomes, &own), rows.collect());
}

/// The half width of a rate's interval of confidence.
fn sure(share: f64) -> String {
    match share * 100.0 {
        ..0.1 => "0.1 %".to_owned(),
        percent => format!("{percent:.1} %"),
    }
}

/// What the measured time is too short to tell, and what the hosts are taken to be.
fn show_doubts(o: &Output, outcomes: &[VariantOutcome<Results>]) {
    show_each_once(o, "", outcomes.iter().flat_map(|outcome| &outcome.results.notes));
    for outcome in outcomes {
        let values: Vec<&str> = outcome.variant.iter().map(|(_, value)| value.as_str()).collect();
        let place =
            if values.is_empty() { String::new() } else { format!("{}: ", values.join(", ")) };
        let doubts =
            outcome.results.flows.iter().filter_map(|flow| Some((flow, flow.doubt.as_ref()?)));
        for (flow, doubt) in doubts {
            o.line(&format!("{place}{}: {doubt}", flow.name));
        }
    }
    o.line(&taken_to_be(outcomes.first().map_or(&[], |outcome| &outcome.results.hosts)));
    show_unvalidated(o, outcomes.iter().flat_map(|outcome| &outcome.results.unvalidated));
}

/// What of all answers was held against no measurement.
pub(super) fn show_unvalidated<'a>(o: &Output, all: impl Iterator<Item = &'a String>) {
    show_each_once(o, "not validated: ", all);
}

/// What is said of several answers, each sentence once.
pub(super) fn show_each_once<'a>(o: &Output, before: &str, all: impl Iterator<Item = &'a String>) {
    let mut told: BTreeSet<&String> = BTreeSet::new();
    all.filter(|what| told.insert(what)).for_each(|what| o.line(&format!("{before}{what}")));
}

fn show_tenants(o: &Output, outcomes: &[VariantOutcome<Results>]) {
    let rows: Vec<Vec<Cell>> = outcomes
        .iter()
        .flat_map(|outcome| {
            outcome.results.tenants.iter().map(move |tenant| {
                let mut cells = choice(outcome);
                cells.extend([
                    tenant.name.as_str().into(),
                    rate(tenant.bytes_per_second).into(),
                    format!("{:.0}", tenant.jobs_per_second).into(),
                    format!("{:.1} %", tenant.share * 100.0).into(),
                ]);
                cells
            })
        })
        .collect();
    if !rows.is_empty() {
        o.line("");
        o.table(&head(outcomes, &["tenant", "rate", "jobs/s", "share"]), rows);
    }
}

/// A link's ends, what it is, and how busy it is there and back.
type Busy<'a> = (&'a [String; 2], &'a str, f64, f64);

fn used(links: &[LinkResult]) -> Vec<Busy<'_>> {
    links.iter().map(|link| (&link.ends, link.link.as_str(), link.there, link.back)).collect()
}

fn show_links<'a, T: 'a>(
    o: &Output,
    links: impl Iterator<Item = (&'a VariantOutcome<T>, Vec<Busy<'a>>)>,
    outcomes: &[VariantOutcome<T>],
) {
    let tone = |share: f64| if share >= 0.95 { Tone::Busy } else { Tone::Plain };
    let percent = |share: f64| Cell(format!("{:.1} %", share * 100.0), tone(share));
    let mut rows: Vec<Vec<Cell>> = Vec::new();
    for (outcome, links) in links {
        for (ends, what, there, back) in links.into_iter().filter(|link| link.2 + link.3 > 0.0) {
            let mut cells = choice(outcome);
            cells.extend([ends.join(" - ").into(), what.into(), percent(there), percent(back)]);
            rows.push(cells);
        }
    }
    if !rows.is_empty() {
        o.line("");
        o.table(&head(outcomes, &["link", "what", "there", "back"]), rows);
    }
}

fn show_shares(o: &Output, outcomes: &[VariantOutcome<FlowLevel>]) {
    let own = ["flow", "rate", "jobs/s", "fair share", "alone", "hops", "held up by"];
    let rows = outcomes.iter().flat_map(|outcome| {
        outcome.results.flows.iter().map(move |flow| {
            let mut cells = choice(outcome);
            cells.extend([
                flow.name.as_str().into(),
                flow.bytes_per_second.map_or("not known".to_owned(), rate).into(),
                flow.jobs_per_second.map_or(String::new(), |jobs| format!("{jobs:.0}")).into(),
                if flow.fair_bytes_per_second > 0.0 {
                    rate(flow.fair_bytes_per_second).into()
                } else {
                    format!("{:.0} jobs/s", flow.fair_jobs_per_second).into()
                },
                span(flow.unloaded_ns).into(),
                flow.hops.to_string().into(),
                flow.bottleneck.as_str().into(),
            ]);
            cells
        })
    });
    o.table(&head(outcomes, &own), rows.collect());
    for outcome in outcomes {
        for (flow, why) in
            outcome.results.flows.iter().filter_map(|flow| Some((flow, flow.refused?)))
        {
            o.line(&format!("{}: {why}", flow.name));
        }
    }
    show_each_once(o, "", outcomes.iter().flat_map(|outcome| &outcome.results.notes));
    o.line(&taken_to_be(outcomes.first().map_or(&[], |outcome| &outcome.results.hosts)));
    show_unvalidated(o, outcomes.iter().flat_map(|outcome| &outcome.results.unvalidated));
    let links = outcomes.iter().map(|outcome| {
        let busy = outcome.results.links.iter();
        (
            outcome,
            busy.map(|link| (&link.ends, link.link.as_str(), link.there, link.back)).collect(),
        )
    });
    show_links(o, links, outcomes);
}
