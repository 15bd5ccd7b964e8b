//! Rows of results: printed for people, appended as JSON for programs.

use std::fs::{File, OpenOptions};
use std::io::Write;
use std::path::Path;

use serde::Serialize;

use crate::BenchError;
use crate::interval::{Interval, interval};

/// One comparison: a row of `target/bench/results.jsonl`.
#[derive(Debug, Clone, Serialize)]
pub struct ResultRow {
    /// What part of rackbus it is about.
    pub area: &'static str,
    /// What was done, the same text in every run.
    pub case: String,
    /// Median of our runs, in the row's unit.
    pub ours: f64,
    /// The other one's, median.
    pub peer: f64,
    /// Who the other one is.
    pub peer_name: String,
    /// The unit of both.
    pub unit: &'static str,
    /// Median of the ratios of neighbouring runs, ours to the other one's; for units "us added"
    /// and "ns added" the median of the differences.
    pub ratio: f64,
    /// How many pairs of runs.
    pub runs: usize,
}

/// What is compared: a [`ResultRow`] before it is measured.
#[derive(Debug, Clone, Copy)]
pub struct Case<'a> {
    /// What part of rackbus it is about.
    pub area: &'static str,
    /// Name of the case within its area: `4k read qd1`.
    pub case: &'a str,
    /// Who the other one is.
    pub peer_name: &'a str,
    /// The unit of both.
    pub unit: &'static str,
    /// How many pairs of runs.
    pub runs: usize,
}

/// The value in the middle.
pub fn median(values: &[f64]) -> f64 {
    let mut sorted = values.to_vec();
    sorted.sort_by(f64::total_cmp);
    match sorted.len() {
        0 => f64::NAN,
        n if n % 2 == 1 => sorted[n / 2],
        n => (sorted[n / 2 - 1] + sorted[n / 2]) / 2.0,
    }
}

/// Collects rows, prints each as a table's line, and appends it to the file of results.
#[derive(Debug)]
pub struct Report {
    file: Option<File>,
    json: bool,
    rows: Vec<ResultRow>,
}

impl Report {
    /// Appends rows to the file at `path`, or only prints them: as a table, or as JSON.
    ///
    /// # Errors
    /// When the file cannot be written.
    pub fn new(path: Option<&Path>, json: bool) -> Result<Report, BenchError> {
        let open = |path: &Path| {
            if let Some(dir) = path.parent() {
                std::fs::create_dir_all(dir)?;
            }
            OpenOptions::new().create(true).append(true).open(path)
        };
        let file = path
            .map(|path| open(path).map_err(BenchError::io(format!("writing {}", path.display()))))
            .transpose()?;
        let mut report = Report { file, json, rows: Vec::new() };
        report.note(&format!(
            "{:<38} {:>12} {:>12} {:<10} {:>8} {:>16}  against",
            "case", "ours", "peer", "unit", "ratio", "95 % interval"
        ));
        Ok(report)
    }

    /// Says something to people.
    pub fn note(&mut self, text: &str) {
        if !self.json {
            println!("{text}");
        }
    }

    /// Prints a row and appends it to the file of results.
    ///
    /// # Errors
    /// When the file cannot be written.
    pub fn add(&mut self, row: ResultRow) -> Result<(), BenchError> {
        self.add_with(row, None)
    }

    /// The same, of a row whose ratio has an interval.
    fn add_with(&mut self, row: ResultRow, within: Option<Interval>) -> Result<(), BenchError> {
        let within = within.map(|it| format!("{:.3} to {:.3}", it.low, it.high));
        let line =
            serde_json::to_string(&row).map_err(|error| BenchError::Peer(error.to_string()))?;
        if self.json {
            println!("{line}");
        }
        self.note(&format!(
            "{:<38} {:>12.3} {:>12.3} {:<10} {:>8.3} {:>16}  {}",
            row.case,
            row.ours,
            row.peer,
            row.unit,
            row.ratio,
            within.unwrap_or_default(),
            row.peer_name
        ));
        if let Some(file) = &mut self.file {
            writeln!(file, "{line}").map_err(BenchError::io("writing results"))?;
        }
        self.rows.push(row);
        Ok(())
    }

    /// Says that a comparison is left out, to people and beside JSON.
    pub fn left_out(&self, what: &str, why: &str) {
        eprintln!("{what}: left out, {why}");
    }

    /// Measures both in turns and takes the row: its ratio is the median of what `relate` makes of
    /// each pair, whose interval at 95 % people are shown from six pairs on.
    ///
    /// # Errors
    /// When one of both fails, or the file cannot be written.
    pub fn compare(
        &mut self,
        case: Case<'_>,
        mut ours: impl FnMut() -> Result<f64, BenchError>,
        mut peer: impl FnMut() -> Result<f64, BenchError>,
        relate: fn(f64, f64) -> f64,
    ) -> Result<(), BenchError> {
        self.compare_all([case], || Ok([ours()?]), || Ok([peer()?]), relate)
    }

    /// The same where each run has several figures: a row for each of `cases`, with as many runs as the first.
    ///
    /// # Errors
    /// As [`Report::compare`].
    pub fn compare_all<const N: usize>(
        &mut self,
        cases: [Case<'_>; N],
        mut ours: impl FnMut() -> Result<[f64; N], BenchError>,
        mut peer: impl FnMut() -> Result<[f64; N], BenchError>,
        relate: fn(f64, f64) -> f64,
    ) -> Result<(), BenchError> {
        let mut pairs = Vec::new();
        for _ in 0..cases.first().map_or(0, |case| case.runs) {
            pairs.push((ours()?, peer()?));
        }
        for (nth, case) in cases.into_iter().enumerate() {
            let each = |value: fn(f64, f64) -> f64| -> Vec<f64> {
                pairs.iter().map(|(ours, peer)| value(ours[nth], peer[nth])).collect()
            };
            let of = |value| median(&each(value));
            let row = ResultRow {
                area: case.area,
                case: case.case.to_owned(),
                ours: of(|ours, _| ours),
                peer: of(|_, peer| peer),
                peer_name: case.peer_name.to_owned(),
                unit: case.unit,
                ratio: of(relate),
                runs: pairs.len(),
            };
            self.add_with(row, interval(&each(relate)))?;
        }
        Ok(())
    }

    /// The rows so far.
    pub fn rows(&self) -> &[ResultRow] {
        &self.rows
    }
}

#[cfg(test)]
mod tests {
    use super::median;

    #[test]
    fn the_median_is_in_the_middle() {
        assert_eq!(median(&[3.0, 1.0, 2.0]), 2.0);
        assert_eq!(median(&[4.0, 1.0, 2.0, 3.0]), 2.5);
        assert!(median(&[]).is_nan());
    }
}
