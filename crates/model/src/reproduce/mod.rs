//! The papers' figures, modelled: each row of `figures` that a timing model can answer to, from one set
//! of parameters per testbed (`examples/testbeds`), with what was published beside it.
//!
//! A row is *exact* when it must be the very number, *calibrated* when a parameter was set by it
//! (within 3 %), *predicted* when none was (within 10 %), a *trend* when a relation must hold. What is
//! not within that is a miss, and says why.

mod accelerator;
mod device_lending;
mod lab;
mod marlin;
mod pictures;
mod sisci;

use std::fmt;

use serde::Serialize;

pub use pictures::pictures;

/// What a row claims.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Kind {
    /// The very number.
    Exact,
    /// A parameter was set by it: within 3 %.
    Calibrated,
    /// No parameter was set by it: within 10 %.
    Predicted,
    /// A relation.
    Trend,
}

impl Kind {
    /// The greatest error that is allowed.
    pub fn allowed(self) -> f64 {
        match self {
            Kind::Exact | Kind::Trend => 0.0,
            Kind::Calibrated => 0.03,
            Kind::Predicted => 0.10,
        }
    }
}

impl fmt::Display for Kind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Kind::Exact => "exact",
            Kind::Calibrated => "calibrated",
            Kind::Predicted => "predicted",
            Kind::Trend => "trend",
        })
    }
}

/// Whether a row holds.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Verdict {
    /// It does.
    Ok,
    /// It does not.
    Miss,
}

/// A row.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Row {
    /// The figure's number: `DL3`.
    pub id: &'static str,
    /// Which of the figure's values, where it has several.
    pub case: String,
    /// What was published; of a range, its end that is nearer to what is modelled, or that very value
    /// when it is within.
    pub published: f64,
    /// What the paper says, where it is more than a number.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub says: Option<String>,
    /// What the model says.
    pub modelled: f64,
    /// Of both.
    pub unit: &'static str,
    /// How far the model is off, as a share of what was published.
    pub error: f64,
    /// What is claimed.
    pub kind: Kind,
    /// Whether it holds.
    pub verdict: Verdict,
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
        let holds = error.abs() <= kind.allowed() + 1e-12;
        let verdict = if holds { Verdict::Ok } else { Verdict::Miss };
        let case = case.to_owned();
        Row {
            id,
            case,
            published,
            says: None,
            modelled,
            unit,
            error: rounded(error),
            kind,
            verdict,
            note: None,
        }
    }

    fn exact(name: (&'static str, &str), published: f64, modelled: f64, unit: &'static str) -> Row {
        Row::new(name, Kind::Exact, published, modelled, unit)
    }

    fn calibrated(name: (&'static str, &str), of: f64, modelled: f64, unit: &'static str) -> Row {
        Row::new(name, Kind::Calibrated, of, modelled, unit)
    }

    fn predicted(name: (&'static str, &str), of: f64, modelled: f64, unit: &'static str) -> Row {
        Row::new(name, Kind::Predicted, of, modelled, unit)
    }

    /// Of a published range.
    fn within(
        name: (&'static str, &str),
        kind: Kind,
        (least, most): (f64, f64),
        modelled: f64,
        unit: &'static str,
    ) -> Row {
        let nearest = rounded(modelled).clamp(least, most);
        Row {
            says: Some(format!("{least} to {most}")),
            ..Row::new(name, kind, nearest, modelled, unit)
        }
    }

    /// Of a relation: `modelled` is a ratio that must be within a range for it to hold.
    fn trend(
        name: (&'static str, &str),
        says: &str,
        (least, most): (f64, f64),
        modelled: f64,
    ) -> Row {
        let nearest = rounded(modelled).clamp(least, most);
        let row = Row::new(name, Kind::Trend, nearest, modelled, "ratio");
        Row { says: Some(says.to_owned()), ..row }
    }

    /// What must hold besides.
    fn and(self, holds: bool) -> Row {
        let verdict = if holds { self.verdict } else { Verdict::Miss };
        Row { verdict, ..self }
    }

    fn note(self, note: &'static str) -> Row {
        Row { note: Some(note), ..self }
    }
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
    rows
}

/// The testbeds' rack files, by name.
pub fn testbeds() -> &'static [(&'static str, &'static str)] {
    lab::TESTBEDS
}
