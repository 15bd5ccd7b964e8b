//! `rackbus model place`: where should it go?

use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;

use rackbus_model::workload::{FlowResult, HostProfile, Results, Run};
use serde::Serialize;

use super::run::{VariantOutcome, all, processors, show_each_once, show_unvalidated};
use super::slots;
use super::variants::{self, Sweep, Variant};
use super::{Case, Source, rate, span, taken_to_be};
use crate::output::{Cell, Failure, Output, Tone};

/// So many arrangements are all tried; of more, one choice after the other is improved.
const MOST: usize = 4096;
/// Values of one choice, at most.
const MOST_VALUES: usize = 4096;
/// So many arrangements for each processor are put together and simulated at a time: memory does not grow with all.
const AT_A_TIME: usize = 16;
/// Stands for all that there are: places of a device, hosts of a flow.
const ANY: &str = "any";
/// From this share on a link counts as nearly full.
const BUSY: f64 = 0.8;

/// Try devices at several places, and borrowers at several hosts: which arrangement is best?
#[derive(Debug, clap::Args)]
#[command(after_help = "Examples:
  rackbus model place rack.toml workload.toml --at lender/gpu0=lender,board
  rackbus model place rack.toml workload.toml --at lender/gpu0=any --sweep flows.database.host=any
  rackbus model place rack.toml workload.toml --sweep flows.database.host=alpha,beta --goal p99
  rackbus model place rack.toml workload.toml --at lender/gpu0=lender,board --at lender/nvme0=lender,board --goal links")]
pub struct Args {
    /// The rack file, with the fabric that flows go through.
    #[arg(value_name = "RACK")]
    rack_file: PathBuf,
    /// The workload file, with the flows that are compared.
    #[arg(value_name = "WORKLOAD")]
    workload_file: PathBuf,
    /// Link a device to each of these hosts or switches in turn, in place of what its link leads to; `any` for all
    /// hosts and the switches in them. In another host it has that host's name, and a number where one has its own.
    #[arg(long, value_name = "DEVICE=A,B,C")]
    at: Vec<Sweep>,
    /// Try each of these values of a key of either file: another host for a flow; `any` for all hosts.
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
#[derive(Debug, Clone, Serialize)]
struct Placed {
    choice: Vec<(String, String)>,
    /// None where a flow got no job done in the measured time: how long its jobs take is not known, and the most.
    p99_ns: Option<f64>,
    bytes_per_second: f64,
    links_over_80_percent: usize,
    busiest_link: f64,
    /// The flow that says most about it, and what holds that up.
    because: String,
    /// By flow: what the measured time is too short to tell.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    doubts: Vec<String>,
}

/// What there is to say of all arrangements.
#[derive(Debug, Serialize)]
struct Answer {
    /// Those that were tried and fit, ordered by the goal with the best first.
    arrangements: Vec<Placed>,
    /// How many there are, how many of them were tried, and how many of those do not fit.
    possible: usize,
    tried: usize,
    misfits: usize,
    /// Why the first of those does not.
    #[serde(skip_serializing_if = "Option::is_none")]
    misfit: Option<String>,
    /// What hosts are taken to be, in the first that was tried.
    hosts: Vec<HostProfile>,
    /// What was left out of the workload's files, in sentences.
    #[serde(skip_serializing_if = "BTreeSet::is_empty")]
    notes: BTreeSet<String>,
    /// What of the answers was held against no measurement, in sentences.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    unvalidated: Vec<String>,
}

/// What can be chosen: a device's place, or the value of a key.
struct Choice<'a> {
    key: &'a str,
    values: Vec<String>,
    is_device: bool,
    /// Whether the values are all that there are: then some may not fit.
    any: bool,
}

/// Arrangements that were simulated, or found not to fit, so that none is twice.
#[derive(Default)]
struct Tried {
    /// By the numbers of the values that were chosen; None for what does not fit.
    placed: BTreeMap<Vec<usize>, Option<Placed>>,
    /// Why the first of those does not.
    misfit: Option<Failure>,
    /// What hosts are taken to be.
    hosts: Vec<HostProfile>,
    notes: BTreeSet<String>,
    unvalidated: Vec<String>,
}

impl Args {
    pub fn run(&self, output: &Output) -> Result<(), Failure> {
        let (rack, workload) = (Source::read(&self.rack_file)?, Source::read(&self.workload_file)?);
        let first = Variant { choice: Vec::new(), rack, workload };
        let choices = self.choices(&first)?;
        let counts = choices.iter().map(|choice| choice.values.len());
        let count = counts.clone().fold(1_usize, usize::saturating_mul);
        if count < 2 || counts.clone().any(|values| values > MOST_VALUES) {
            let error = format!("there are {count} arrangements to try");
            let remedy =
                format!("name two or more by --at and --sweep, {MOST_VALUES} each at most");
            return Err(Failure::usage(error, remedy));
        }
        let mut tried = Tried::default();
        if count <= MOST {
            let mut arrangements = vec![Vec::new()];
            for values in counts {
                let with = |before: &Vec<usize>| {
                    let before = before.clone();
                    (0..values).map(move |nth| [&before[..], &[nth]].concat())
                };
                arrangements = arrangements.iter().flat_map(with).collect();
            }
            output.progress(&format!("simulating {count} arrangements"));
            self.simulate(&first, &choices, &arrangements, &mut tried)?;
        } else {
            self.search(&first, &choices, &mut tried, output)?;
        }
        self.answer(output, count, tried)
    }

    /// What can be chosen, with what `any` stands for.
    fn choices(&self, first: &Variant) -> Result<Vec<Choice<'_>>, Failure> {
        let rack = variants::table(&first.rack)?;
        let (hosts, places) = (slots::hosts(&rack), slots::places(&rack));
        let of = |sweep: &'_ Sweep, is_device: bool, all: &[String]| {
            let any = sweep.values() == [ANY] && !places.iter().any(|place| place == ANY);
            let values = if any { all.to_vec() } else { sweep.values().to_vec() };
            (values, is_device, any)
        };
        let devices = self.at.iter().map(|at| (at, of(at, true, &places)));
        let values = self.sweep.iter().map(|sweep| (sweep, of(sweep, false, &hosts)));
        let choice = |(sweep, (values, is_device, any))| {
            let sweep: &Sweep = sweep;
            Choice { key: sweep.key(), values, is_device, any }
        };
        Ok(devices.chain(values).map(choice).collect())
    }

    /// The files of an arrangement.
    fn arrange(
        &self,
        first: &Variant,
        choices: &[Choice<'_>],
        numbers: &[usize],
    ) -> Result<(Variant, Case), Failure> {
        let mut variant = first.clone();
        // Flows that move with their device are changed before.
        for (choice, nth) in choices.iter().zip(numbers).rev() {
            let value = &choice.values[*nth];
            variant = match choice.is_device {
                true => slots::moved(&variant, choice.key, value)?,
                false => variants::with(&variant, choice.key, value)?,
            };
        }
        variant.choice.reverse();
        let case = Case::read(&variant.rack, &variant.workload)?;
        if choices.iter().any(|choice| choice.any) {
            let fits = Run::new(&case.rack, &case.timing, &case.workload);
            fits.map_err(|failed| case.failure(failed))?;
        }
        Ok((variant, case))
    }

    /// Simulates arrangements that were not yet.
    fn simulate(
        &self,
        first: &Variant,
        choices: &[Choice<'_>],
        arrangements: &[Vec<usize>],
        tried: &mut Tried,
    ) -> Result<(), Failure> {
        let mut some = arrangements.chunks(AT_A_TIME * processors());
        some.try_for_each(|some| self.simulate_some(first, choices, some, tried))
    }

    fn simulate_some(
        &self,
        first: &Variant,
        choices: &[Choice<'_>],
        arrangements: &[Vec<usize>],
        tried: &mut Tried,
    ) -> Result<(), Failure> {
        let (mut numbers, mut variants, mut cases) = (Vec::new(), Vec::new(), Vec::new());
        for arrangement in arrangements {
            if tried.placed.contains_key(arrangement) {
                continue;
            }
            match self.arrange(first, choices, arrangement) {
                Ok((variant, case)) => {
                    numbers.push(arrangement);
                    variants.push(variant);
                    cases.push(case);
                }
                Err(why) if choices.iter().any(|choice| choice.any) => {
                    // What is wrong with the files as they are is not because of the arrangement.
                    Case::read(&first.rack, &first.workload)?;
                    tried.misfit.get_or_insert(why);
                    tried.placed.insert(arrangement.clone(), None);
                }
                Err(why) => {
                    return Err(variants::as_written(&first.rack, &first.workload, why));
                }
            }
        }
        let each = processors() / cases.len().max(1);
        let simulate = |case: &Case| case.simulate(self.max_events, each.max(1));
        let outcomes = all(&variants, &cases, simulate)?;
        for (arrangement, outcome) in numbers.into_iter().zip(outcomes) {
            let new = outcome.results.unvalidated.iter();
            let new = new.filter(|what| !tried.unvalidated.contains(what)).cloned();
            let new: Vec<String> = new.collect();
            tried.unvalidated.extend(new);
            tried.notes.extend(outcome.results.notes.iter().cloned());
            if tried.hosts.is_empty() {
                tried.hosts.clone_from(&outcome.results.hosts);
            }
            tried.placed.insert(arrangement.clone(), Some(self.placed(&outcome)));
        }
        Ok(())
    }

    /// Improves one choice after the other, until none can be.
    fn search(
        &self,
        first: &Variant,
        choices: &[Choice<'_>],
        tried: &mut Tried,
        output: &Output,
    ) -> Result<(), Failure> {
        let score = |tried: &Tried, of: &Vec<usize>| {
            tried
                .placed
                .get(of)
                .and_then(Option::as_ref)
                .map_or([f64::INFINITY; 3], |placed| self.score(placed))
        };
        let mut best = self.present(first, choices)?;
        let mut seen = BTreeSet::new();
        while seen.insert(best.clone()) {
            for (nth, choice) in choices.iter().enumerate() {
                let with = |value| {
                    let mut other = best.clone();
                    other[nth] = value;
                    other
                };
                let others: Vec<Vec<usize>> = (0..choice.values.len()).map(with).collect();
                output.progress(&format!("simulating {} values of {}", others.len(), choice.key));
                self.simulate(first, choices, &others, tried)?;
                // Of equals what was best before, so that this ends.
                let before = score(tried, &best);
                let least = others.iter().map(|other| (score(tried, other), other));
                let least = least.min_by(|one, other| {
                    one.0.partial_cmp(&other.0).unwrap_or(std::cmp::Ordering::Equal)
                });
                if let Some((_, other)) = least.filter(|(score, _)| *score < before) {
                    best.clone_from(other);
                }
            }
        }
        Ok(())
    }

    /// The arrangement that the files have, as far as it is among the choices.
    fn present(&self, first: &Variant, choices: &[Choice<'_>]) -> Result<Vec<usize>, Failure> {
        let rack = variants::table(&first.rack)?;
        let of = |choice: &Choice<'_>| {
            let nth = if choice.is_device {
                let place = slots::place_of(&rack, choice.key);
                place.and_then(|place| choice.values.iter().position(|value| *value == place))
            } else {
                variants::present(first, choice.key, &choice.values)?
            };
            Ok(nth.unwrap_or_default())
        };
        choices.iter().map(of).collect()
    }

    fn answer(&self, output: &Output, count: usize, tried: Tried) -> Result<(), Failure> {
        let Tried { placed, misfit, hosts, notes, unvalidated } = tried;
        let all = placed.len();
        let mut placed: Vec<Placed> = placed.into_values().flatten().collect();
        let misfit = match misfit {
            Some(why) if placed.is_empty() => return Err(why),
            misfit => misfit,
        };
        placed.sort_by(|one, other| {
            let (one, other) = (self.score(one), self.score(other));
            let order = one.iter().zip(&other).map(|(one, other)| one.total_cmp(other));
            order.fold(std::cmp::Ordering::Equal, std::cmp::Ordering::then)
        });
        let answer = Answer {
            possible: count,
            tried: all,
            misfits: all - placed.len(),
            misfit: misfit.map(|why| why.error),
            arrangements: placed,
            hosts,
            notes,
            unvalidated,
        };
        output.result(&answer, |o| answer.show(o));
        Ok(())
    }

    fn placed(&self, outcome: &VariantOutcome<Results>) -> Placed {
        let results = &outcome.results;
        let p99 = |flow: &FlowResult| (flow.jobs > 0).then_some(flow.latency_ns.p99);
        let order = |flow: &&FlowResult| p99(flow).unwrap_or(f64::INFINITY);
        let worst = results.flows.iter().max_by(|one, other| order(one).total_cmp(&order(other)));
        let busiest = results.links.iter().map(|link| link.there.max(link.back));
        let least = results.flows.iter().find(|flow| flow.bottleneck != "demand");
        let told = if self.goal == Goal::P99 { worst } else { least.or(worst) };
        let because = |flow: &FlowResult| format!("{}: {}", flow.name, flow.bottleneck);
        let doubt = |flow: &FlowResult| Some(format!("{}: {}", flow.name, flow.doubt.as_ref()?));
        Placed {
            choice: outcome.variant.clone(),
            p99_ns: worst.and_then(p99),
            bytes_per_second: results.flows.iter().map(|flow| flow.bytes_per_second).sum(),
            links_over_80_percent: busiest.clone().filter(|share| *share > BUSY).count(),
            busiest_link: busiest.fold(0.0, f64::max),
            because: told.map(because).unwrap_or_default(),
            doubts: results.flows.iter().filter_map(doubt).collect(),
        }
    }

    /// The less the better, and of equals what comes next.
    fn score(&self, placed: &Placed) -> [f64; 3] {
        let p99 = placed.p99_ns.unwrap_or(f64::INFINITY);
        match self.goal {
            Goal::P99 => [p99, -placed.bytes_per_second, 0.0],
            Goal::Rate => [-placed.bytes_per_second, p99, 0.0],
            // Percents, as told: less is no difference.
            Goal::Links => [
                placed.links_over_80_percent as f64,
                (placed.busiest_link * 100.0).round(),
                -placed.bytes_per_second,
            ],
        }
    }
}

impl Answer {
    fn show(&self, o: &Output) {
        let keys = self.arrangements.first().into_iter().flat_map(|best| &best.choice);
        let own = ["worst p99", "rate", "links > 80 %", "busiest", "because"];
        let head: Vec<&str> = keys.map(|(key, _)| key.as_str()).chain(own).collect();
        o.table(&head, self.arrangements.iter().enumerate().map(cells).collect());
        let (tried, possible) = (self.tried, self.possible);
        if tried < possible {
            o.line(&format!(
                "{tried} of {possible} arrangements were tried, one choice after the other: another may be better"
            ));
        }
        let why = self.misfit.as_deref().unwrap_or_default();
        match self.misfits {
            0 => {}
            1 => o.line(&format!("1 arrangement does not fit and is left out: {why}")),
            more => o.line(&format!(
                "{more} arrangements do not fit and are left out, the first as {why}"
            )),
        }
        show_each_once(o, "", self.notes.iter());
        let best = self.arrangements.iter().take(1).flat_map(|best| &best.doubts);
        show_each_once(o, "of the best: ", best);
        o.line(&taken_to_be(&self.hosts));
        show_unvalidated(o, self.unvalidated.iter());
    }
}

fn cells((nth, placed): (usize, &Placed)) -> Vec<Cell> {
    let tone = if nth == 0 { Tone::Good } else { Tone::Plain };
    let mut cells: Vec<Cell> =
        placed.choice.iter().map(|(_, value)| Cell(value.clone(), tone)).collect();
    cells.extend([
        placed.p99_ns.map_or("not known".to_owned(), span).into(),
        rate(placed.bytes_per_second).into(),
        placed.links_over_80_percent.to_string().into(),
        format!("{:.0} %", placed.busiest_link * 100.0).into(),
        placed.because.as_str().into(),
    ]);
    cells
}
