//! `rackbus model place`: where should it go?

use std::path::PathBuf;

use rackbus_model::workload::{FlowResult, Results};
use serde::Serialize;
use toml::{Table, Value};

use super::run::{VariantOutcome, all, processors};
use super::variants::{self, Sweep, Variant};
use super::{Case, Source, rate, span};
use crate::output::{Cell, Failure, Output, Tone};

/// More than this many arrangements are refused.
const MOST: usize = 4096;
/// From this share on a link counts as nearly full.
const BUSY: f64 = 0.8;

/// Try devices at several places, and borrowers at several hosts: which arrangement is best?
#[derive(Debug, clap::Args)]
#[command(after_help = "Examples:
  rackbus model place rack.toml workload.toml --at lender/gpu0=lender,board
  rackbus model place rack.toml workload.toml --sweep flows.database.host=alpha,beta --goal p99
  rackbus model place rack.toml workload.toml --at lender/gpu0=lender,board --at lender/nvme0=lender,board --goal links")]
pub struct Args {
    /// The rack file, with the fabric that flows go through.
    #[arg(value_name = "RACK")]
    rack_file: PathBuf,
    /// The workload file, with the flows that are compared.
    #[arg(value_name = "WORKLOAD")]
    workload_file: PathBuf,
    /// Link a device to each of these hosts or switches in turn, in place of what its link leads to.
    #[arg(long, value_name = "DEVICE=A,B,C")]
    at: Vec<Sweep>,
    /// Try each of these values of a key of either file: another host for a flow.
    #[arg(long, value_name = "KEY=A,B,C")]
    sweep: Vec<Sweep>,
    /// What is best: the least p99 of the flow whose p99 is greatest, most bytes per second of all flows
    /// together, or the fewest links over 80 % busy.
    #[arg(long, value_enum, default_value_t = Goal::Rate)]
    goal: Goal,
    /// The most events of a simulation.
    #[arg(long, value_name = "N", default_value_t = 4_000_000_000)]
    max_events: u64,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
enum Goal {
    P99,
    Rate,
    Links,
}

/// An arrangement, and what it comes to.
#[derive(Debug, Serialize)]
struct Placed {
    choice: Vec<(String, String)>,
    p99_ns: f64,
    bytes_per_second: f64,
    links_over_80_percent: usize,
    busiest_link: f64,
    /// The flow that says most about it, and what holds that up.
    because: String,
}

impl Args {
    pub fn run(&self, output: &Output) -> Result<(), Failure> {
        let (rack, workload) = (Source::read(&self.rack_file)?, Source::read(&self.workload_file)?);
        let choices = self.at.iter().chain(&self.sweep).map(|sweep| sweep.values().len());
        let count = choices.fold(1_usize, usize::saturating_mul);
        if !(2..=MOST).contains(&count) {
            let error = format!("there are {count} arrangements to try");
            return Err(Failure::usage(error, format!("name 2 to {MOST} by --at and --sweep")));
        }
        let mut variants = variants::all(&rack, &workload, &self.sweep)?;
        for at in &self.at {
            let mut next = Vec::new();
            for variant in &variants {
                for place in at.values() {
                    next.push(moved(variant, at.key(), place)?);
                }
            }
            variants = next;
        }
        let read = |variant: &Variant| Case::read(&variant.rack, &variant.workload);
        let cases: Vec<Case> = variants.iter().map(read).collect::<Result<_, _>>()?;
        output.progress(&format!("simulating {count} arrangements"));
        let each = processors() / cases.len().max(1);
        let simulate = |case: &Case| case.simulate(self.max_events, each.max(1));
        let outcomes = all(&variants, &cases, simulate)?;
        let mut placed: Vec<Placed> = outcomes.iter().map(|outcome| self.placed(outcome)).collect();
        placed.sort_by(|one, other| self.score(one).total_cmp(&self.score(other)));
        output.result(&placed, |o| {
            let keys = placed.first().into_iter().flat_map(|best| &best.choice);
            let own = ["worst p99", "rate", "links > 80 %", "busiest", "because"];
            let head: Vec<&str> = keys.map(|(key, _)| key.as_str()).chain(own).collect();
            o.table(&head, placed.iter().enumerate().map(cells).collect());
        });
        Ok(())
    }

    fn placed(&self, outcome: &VariantOutcome<Results>) -> Placed {
        let results = &outcome.results;
        let worst = results
            .flows
            .iter()
            .max_by(|one, other| one.latency_ns.p99.total_cmp(&other.latency_ns.p99));
        let busiest = results.links.iter().map(|link| link.there.max(link.back));
        let least = results.flows.iter().find(|flow| flow.bottleneck != "demand");
        let told = if self.goal == Goal::P99 { worst } else { least.or(worst) };
        let because = |flow: &FlowResult| format!("{}: {}", flow.name, flow.bottleneck);
        Placed {
            choice: outcome.variant.clone(),
            p99_ns: worst.map_or(0.0, |flow| flow.latency_ns.p99),
            bytes_per_second: results.flows.iter().map(|flow| flow.bytes_per_second).sum(),
            links_over_80_percent: busiest.clone().filter(|share| *share > BUSY).count(),
            busiest_link: busiest.fold(0.0, f64::max),
            because: told.map(because).unwrap_or_default(),
        }
    }

    /// The less the better.
    fn score(&self, placed: &Placed) -> f64 {
        match self.goal {
            Goal::P99 => placed.p99_ns,
            Goal::Rate => -placed.bytes_per_second,
            Goal::Links => placed.links_over_80_percent as f64 + placed.busiest_link / 2.0,
        }
    }
}

fn cells((nth, placed): (usize, &Placed)) -> Vec<Cell> {
    let tone = if nth == 0 { Tone::Good } else { Tone::Plain };
    let mut cells: Vec<Cell> =
        placed.choice.iter().map(|(_, value)| Cell(value.clone(), tone)).collect();
    cells.extend([
        span(placed.p99_ns).into(),
        rate(placed.bytes_per_second).into(),
        placed.links_over_80_percent.to_string().into(),
        format!("{:.0} %", placed.busiest_link * 100.0).into(),
        placed.because.as_str().into(),
    ]);
    cells
}

/// Lets the one link of a device lead to another place, or gives it the one that it has without being written; false
/// where there is no such device, or more links.
fn relinked(table: &mut Table, device: &str, place: &str) -> bool {
    let known = device.split_once('/').is_some_and(|(host, name)| {
        let devices = table.get("hosts").and_then(|hosts| hosts.get(host)?.get("devices"));
        devices.is_some_and(|devices| devices.get(name).is_some())
    });
    let Some(Value::Table(fabric)) = table.get_mut("fabric") else { return false };
    let links = fabric.entry("links").or_insert_with(|| Value::Array(Vec::new()));
    let Value::Array(links) = links else { return false };
    let own = |link: &&mut Value| {
        let ends = link.get("ends").and_then(Value::as_array).into_iter().flatten();
        ends.into_iter().any(|end| end.as_str() == Some(device))
    };
    let mut found = links.iter_mut().filter(own);
    match (found.next(), found.next()) {
        (None, _) if known => {
            let ends = [place, device].map(|end| Value::String(end.to_owned()));
            let (generation, lanes) = rackbus_model::wire::AMPLE;
            let link = [
                ("ends", Value::Array(ends.into())),
                ("generation", Value::Integer(generation.into())),
                ("lanes", Value::Integer(lanes.into())),
            ];
            links.push(Value::Table(
                link.map(|(key, value)| (key.to_owned(), value)).into_iter().collect(),
            ));
            true
        }
        (Some(link), None) => {
            let ends = link.get_mut("ends").and_then(Value::as_array_mut).into_iter().flatten();
            for end in ends.filter(|end| end.as_str() != Some(device)) {
                *end = Value::String(place.to_owned());
            }
            true
        }
        _ => false,
    }
}

/// The rack with a device's link leading to another place.
fn moved(variant: &Variant, device: &str, place: &str) -> Result<Variant, Failure> {
    let mut variant = variant.clone();
    let table: Result<Table, _> = variant.rack.text.parse();
    let mut table = table.map_err(|cause: toml::de::Error| {
        Failure::usage(format!("{}: {}", variant.rack.name, cause.message()), "correct the file")
    })?;
    if !relinked(&mut table, device, place) {
        let error = format!("{}: no one link leads to `{device}`", variant.rack.name);
        return Err(Failure::usage(error, "write a link for the device in [[fabric.links]]"));
    }
    variant.choice.push((device.to_owned(), place.to_owned()));
    variant.rack.text = table.to_string();
    variant.rack.name = format!("{} with {device} at {place}", variant.rack.name);
    Ok(variant)
}
