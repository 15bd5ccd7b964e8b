//! The papers' figures, modelled: each row of `figures` that a timing model can answer to, from one set
//! of parameters per testbed (`examples/testbeds`), with what was published beside it.
//!
//! Each row says what it claims ([`Kind`]); what does not hold is a miss, and says why. Each is a workload of the
//! kinds that users have, in a rack file of the testbeds.

mod accelerator;
mod blind;
mod device_lending;
mod drives;
mod gpu_host;
mod gpus;
mod lab;
mod marlin;
mod mixes;
mod pcie_bench;
mod pictures;
pub mod shaped;
mod sisci;

use std::collections::BTreeSet;
use std::fmt;

use serde::Serialize;

pub use pictures::pictures;

use crate::workload::HostProfile;

/// What a row claims.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Kind {
    /// The very number: a count.
    Exact,
    /// A parameter was set by it: within 3 %. No evidence.
    Calibrated,
    /// Arithmetic on parameters that the same source gives. No evidence.
    Identity,
    /// No parameter was set by it, or by what is computed the same way: within 15 %.
    Predicted,
    /// An inequality or a trend, which could fail.
    Relation,
    /// Others' measurement of a whole system whose profile was made from other sources, known while the model was
    /// made, or blind until the model was changed by what it showed: within 15 %.
    Measured,
    /// One of a set whose inputs were fixed and committed before it was run for the first time, and that has
    /// stayed as it came out: within 15 %.
    Blind,
}

impl Kind {
    /// The greatest error that is allowed.
    pub fn allowed(self) -> f64 {
        match self {
            Kind::Exact | Kind::Relation => 0.0,
            Kind::Calibrated | Kind::Identity => 0.03,
            Kind::Predicted | Kind::Measured | Kind::Blind => 0.15,
        }
    }
}

impl fmt::Display for Kind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Kind::Exact => "exact",
            Kind::Calibrated => "calibrated",
            Kind::Identity => "identity",
            Kind::Predicted => "predicted",
            Kind::Relation => "relation",
            Kind::Measured => "measured",
            Kind::Blind => "blind",
        })
    }
}

/// Whether a row holds.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Verdict {
    /// It is as near as its kind allows, or its relation holds.
    Ok,
    /// It is further off; the row's note says why, where that is known.
    Miss,
}

/// A published value and the modelled one beside it.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Row {
    /// The figure's number: `DL3`.
    pub id: &'static str,
    /// Which of the figure's values, where it has several.
    pub case: String,
    /// What was published; of a range its middle, of a relation what it is nearest to.
    pub published: f64,
    /// The range that was published, or within which a relation holds.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub range: Option<(f64, f64)>,
    /// What the source says, where it is more than a number.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub says: Option<String>,
    /// What the model says.
    pub modelled: f64,
    /// The unit of `published` and `modelled`: `us`, `GB/s`, `ratio`.
    pub unit: &'static str,
    /// How far the model is off, as a share of what was published; of a relation, how far it is from where
    /// it would fail.
    pub error: f64,
    /// What it claims, which decides how far it may be off and whether it is evidence.
    pub kind: Kind,
    /// Whether it is within what its kind allows.
    pub verdict: Verdict,
    /// The parameter that was set by it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub fitted: Option<&'static str>,
    /// Why it misses, or what to know.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub note: Option<&'static str>,
}

impl Row {
    fn new(
        (id, case): (&'static str, &str),
        kind: Kind,
        published: f64,
        modelled: f64,
        unit: &'static str,
    ) -> Row {
        // Kept to six digits: below that, platforms may differ.
        let (published, modelled) = (rounded(published), rounded(modelled));
        let error = if published == 0.0 { modelled } else { modelled / published - 1.0 };
        Row {
            id,
            case: case.to_owned(),
            published,
            range: None,
            says: None,
            modelled,
            unit,
            error: rounded(error),
            kind,
            verdict: verdict(error.abs() <= kind.allowed() + 1e-12),
            fitted: None,
            note: None,
        }
    }

    fn exact(name: (&'static str, &str), published: f64, modelled: f64, unit: &'static str) -> Row {
        Row::new(name, Kind::Exact, published, modelled, unit)
    }

    /// Of a value by which a parameter was set.
    fn calibrated(
        name: (&'static str, &str),
        (of, parameter): (f64, &'static str),
        modelled: f64,
        unit: &'static str,
    ) -> Row {
        Row::new(name, Kind::Calibrated, of, modelled, unit).fitted(parameter)
    }

    fn identity(name: (&'static str, &str), of: f64, modelled: f64, unit: &'static str) -> Row {
        Row::new(name, Kind::Identity, of, modelled, unit)
    }

    fn predicted(name: (&'static str, &str), of: f64, modelled: f64, unit: &'static str) -> Row {
        Row::new(name, Kind::Predicted, of, modelled, unit)
    }

    /// Of a range as it was published: its middle is what the error is of, and it holds within the range,
    /// or as near to it as its kind allows.
    fn within(
        name: (&'static str, &str),
        kind: Kind,
        (least, most): (f64, f64),
        modelled: f64,
        unit: &'static str,
    ) -> Row {
        let row = Row::new(name, kind, f64::midpoint(least, most), modelled, unit);
        let allowed = kind.allowed();
        let holds = (least * (1.0 - allowed)..=most * (1.0 + allowed)).contains(&row.modelled);
        Row { range: Some((least, most)), verdict: verdict(holds), ..row }
    }

    /// Of a relation: `modelled` is a ratio that must be within a range for it to hold. Its error is its
    /// margin: how far it is from the nearest end of the range, negative where it is beyond.
    fn relation(
        name: (&'static str, &str),
        says: &str,
        (least, most): (f64, f64),
        modelled: f64,
    ) -> Row {
        let ends = [least, most].map(rounded);
        let modelled = rounded(modelled);
        let margin = (modelled - ends[0]).min(ends[1] - modelled);
        let published = if modelled - ends[0] < ends[1] - modelled { ends[0] } else { ends[1] };
        let row = Row::new(name, Kind::Relation, published, modelled, "ratio");
        let error = rounded(margin);
        Row { error, range: Some((least, most)), verdict: verdict(margin >= 0.0), ..row }.says(says)
    }

    /// What must hold besides.
    fn and(self, holds: bool) -> Row {
        let verdict = if holds { self.verdict } else { Verdict::Miss };
        Row { verdict, ..self }
    }

    fn says(self, says: &str) -> Row {
        Row { says: Some(says.to_owned()), ..self }
    }

    fn fitted(self, parameter: &'static str) -> Row {
        Row { fitted: Some(parameter), ..self }
    }

    fn note(self, note: &'static str) -> Row {
        Row { note: Some(note), ..self }
    }
}

fn verdict(holds: bool) -> Verdict {
    if holds { Verdict::Ok } else { Verdict::Miss }
}

/// How many rows of a kind there are, and how far they are off.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct Sum {
    /// The kind that all of these rows have.
    pub kind: Kind,
    /// The number of rows of the kind, at least 1.
    pub rows: usize,
    /// How many of them miss.
    pub missed: usize,
    /// The median of their errors, as a share.
    pub median: f64,
    /// What nine of ten errors do not exceed.
    pub most: f64,
    /// The greatest of their errors, as a share.
    pub worst: f64,
}

/// The median of sorted values: of an even number, the mean of the two in the middle. 0 of none.
pub fn median(sorted: &[f64]) -> f64 {
    let (lower, upper) = (sorted.len().saturating_sub(1) / 2, sorted.len() / 2);
    let [lower, upper] = [lower, upper].map(|nth| sorted.get(nth).copied().unwrap_or_default());
    (lower + upper) / 2.0
}

/// What rows of each kind add up to, in the order of the kinds; those that there are none of are left out.
pub fn sums(rows: &[Row]) -> Vec<Sum> {
    let mut kinds: Vec<Kind> = rows.iter().map(|row| row.kind).collect();
    kinds.sort();
    kinds.dedup();
    let of = |kind| {
        let own: Vec<&Row> = rows.iter().filter(|row| row.kind == kind).collect();
        let mut errors: Vec<f64> = own.iter().map(|row| row.error.abs()).collect();
        errors.sort_by(f64::total_cmp);
        let at = |share: f64| errors[((errors.len() - 1) as f64 * share).round() as usize];
        let missed = own.iter().filter(|row| row.verdict == Verdict::Miss).count();
        let median = median(&errors);
        Sum { kind, rows: own.len(), missed, median, most: at(0.9), worst: at(1.0) }
    };
    kinds.into_iter().map(of).collect()
}

/// What the model's evidence comes to, in a sentence: only what no parameter was set by counts.
pub fn headline(rows: &[Row]) -> String {
    let sums = sums(rows);
    let of = |kind| sums.iter().find(|sum| sum.kind == kind);
    let told = |kind, what: &str| match of(kind) {
        None => format!("0 {what}"),
        Some(sum) => format!(
            "{} {what}, median error {:.1} %, worst {:.0} %",
            sum.rows,
            sum.median * 100.0,
            sum.worst * 100.0
        ),
    };
    let missed = rows.iter().filter(|row| row.verdict == Verdict::Miss).count();
    format!(
        "{}; {}; {}; {missed} of {} rows miss",
        told(Kind::Predicted, "independent predictions"),
        told(Kind::Measured, "measured"),
        told(Kind::Blind, "blind"),
        rows.len()
    )
}

fn rounded(value: f64) -> f64 {
    if value == 0.0 || !value.is_finite() {
        return value;
    }
    let digits = 5 - value.abs().log10().floor() as i32;
    let scale = 10f64.powi(digits);
    (value * scale).round() / scale
}

/// All rows, in the order of the figures.
pub fn rows() -> Vec<Row> {
    let mut rows = device_lending::rows();
    rows.extend(marlin::rows());
    rows.extend(sisci::rows());
    rows.extend(accelerator::rows());
    rows.extend(pcie_bench::rows());
    rows.extend(blind::rows());
    rows.extend(mixes::rows());
    rows.extend(gpus::rows());
    rows.extend(gpu_host::rows());
    rows.extend(drives::rows());
    rows
}

/// The numbers of the figures that `rows` are of, in their order: `DL1 to DL15, DL17, M1, M2`.
pub fn numbers(rows: &[Row]) -> String {
    let parts = |id: &'static str| {
        let letters = id.trim_end_matches(|c: char| c.is_ascii_digit());
        (letters, id[letters.len()..].parse::<u32>().unwrap_or(0))
    };
    let mut papers: Vec<(&str, BTreeSet<u32>)> = Vec::new();
    for (letters, number) in rows.iter().map(|row| parts(row.id)) {
        match papers.iter_mut().find(|(paper, _)| *paper == letters) {
            Some((_, numbers)) => _ = numbers.insert(number),
            None => papers.push((letters, BTreeSet::from([number]))),
        }
    }
    let mut found = Vec::new();
    for (paper, numbers) in papers {
        let numbers: Vec<u32> = numbers.into_iter().collect();
        for run in numbers.chunk_by(|one, next| *next == one + 1) {
            match run {
                [first, _, .., last] => found.push(format!("{paper}{first} to {paper}{last}")),
                few => found.extend(few.iter().map(|number| format!("{paper}{number}"))),
            }
        }
    }
    found.join(", ")
}

/// What the hosts of each testbed are taken to be.
///
/// # Panics
/// When a testbed's file is wrong: they are part of the crate, and tested.
pub fn hosts() -> Vec<TestbedHosts> {
    let of = |(testbed, text): &(&'static str, &'static str)| {
        let hosts = lab::hosts(testbed, text).unwrap_or_else(|error| panic!("{error}"));
        TestbedHosts { testbed, hosts }
    };
    testbeds().iter().map(of).collect()
}

/// A testbed, and what its hosts are taken to be.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct TestbedHosts {
    /// The name of its rack file, without `.toml`.
    pub testbed: &'static str,
    /// The profile of each host.
    pub hosts: Vec<HostProfile>,
}

/// The testbeds' rack files, by name.
pub fn testbeds() -> &'static [(&'static str, &'static str)] {
    lab::TESTBEDS
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_numbers_of_figures_are_listed_with_their_gaps() {
        let of = |ids: &[&'static str]| {
            let row = |id: &&'static str| Row::exact((*id, "it"), 1.0, 1.0, "ratio");
            numbers(&ids.iter().map(row).collect::<Vec<_>>())
        };
        let gaps = of(&["S1", "S2", "S5", "G3", "G1", "G2", "G2", "A9", "DL10", "DL9", "DL8"]);
        assert_eq!(gaps, "S1, S2, S5, G1 to G3, A9, DL8 to DL10");
        assert_eq!([of(&["P1", "P2"]), of(&[])], ["P1, P2", ""]);
    }

    #[test]
    fn of_an_even_number_of_values_the_median_is_between_the_two_in_the_middle() {
        assert_eq!(median(&[1.0, 2.0, 4.0]), 2.0);
        assert_eq!(median(&[1.0, 2.0, 4.0, 100.0]), 3.0);
        assert_eq!([median(&[7.0]), median(&[])], [7.0, 0.0]);
    }
}
