//! Pairs runs of this program with runs of an earlier build of it, and says what became slower.
//!
//! A figure moves by more between two runs on one machine than most changes move it. So both
//! programs run in turns, each pair gives one ratio for each case, and the confidence interval is that
//! of the median by order statistics (the sign test turned round): it assumes nothing about how
//! the ratios are distributed, and one disturbed run moves it by one place at most.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use serde::Deserialize;

use crate::BenchError;
use crate::report::median;

/// Which programs are paired, on what, and how often.
#[derive(Debug, Clone)]
pub struct Settings {
    /// The earlier build of `rackbus-bench`.
    pub before: PathBuf,
    /// The area and what is passed on to both.
    pub arguments: Vec<String>,
    /// Pairs of runs: at least 6, for an interval at 95 %.
    pub pairs: usize,
    /// Where each run's rows and files go.
    pub dir: PathBuf,
}

/// The part of a row that is compared.
#[derive(Debug, Clone, Deserialize)]
struct Figure {
    case: String,
    ours: f64,
    unit: String,
}

/// What the pairs say of one case.
#[derive(Debug, Clone, Copy, PartialEq)]
struct Interval {
    /// Median of after / before.
    ratio: f64,
    /// Bounds of the confidence interval.
    low: f64,
    high: f64,
}

/// How the two compare, with 95 % confidence.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Verdict {
    Slower,
    Faster,
    Same,
}

/// Places from either end of the sorted ratios at which the interval of at least 95 % for the
/// median begins: the largest k with P(Binomial(n, 1/2) < k) <= 2.5 %. `None` for fewer than six.
fn places(n: usize) -> Option<usize> {
    let mut chance = 0.5f64.powi(i32::try_from(n).ok()?);
    let mut sum = 0.0;
    let mut k = 0;
    while sum + chance <= 0.025 {
        sum += chance;
        chance *= (n - k) as f64 / (k + 1) as f64;
        k += 1;
    }
    k.checked_sub(1)
}

fn interval(ratios: &[f64]) -> Option<Interval> {
    let place = places(ratios.len())?;
    let mut sorted = ratios.to_vec();
    sorted.sort_by(f64::total_cmp);
    let (low, high) = (sorted[place], sorted[sorted.len() - 1 - place]);
    Some(Interval { ratio: median(&sorted), low, high })
}

fn verdict(interval: Interval, unit: &str) -> Verdict {
    let more_is_better = ["/s", "per second", "IOPS"].iter().any(|rate| unit.contains(rate));
    let (more, less) = (interval.low > 1.0, interval.high < 1.0);
    match (more, less) {
        (false, false) => Verdict::Same,
        _ if more == more_is_better => Verdict::Faster,
        _ => Verdict::Slower,
    }
}

/// Runs one of both and returns its figures by case.
fn figures(
    program: &Path,
    settings: &Settings,
    with_notes: bool,
) -> Result<BTreeMap<String, Figure>, BenchError> {
    // A folder each: an earlier build may not read what a later one leaves behind.
    let name = if program == settings.before { "before" } else { "after" };
    let folder = settings.dir.join(name);
    std::fs::create_dir_all(&folder)
        .map_err(BenchError::io(format!("making {}", folder.display())))?;
    let rows = folder.join("rows.jsonl");
    match std::fs::remove_file(&rows) {
        Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
            return Err(BenchError::io(format!("removing {}", rows.display()))(error));
        }
        _ => {}
    }
    let status = Command::new(program)
        .args(&settings.arguments)
        .args(["--runs", "1", "--results", "rows.jsonl"])
        .current_dir(&folder)
        .stdout(Stdio::null())
        .stderr(if with_notes { Stdio::inherit() } else { Stdio::null() })
        .status()
        .map_err(BenchError::io(format!("starting {}", program.display())))?;
    if !status.success() {
        return Err(BenchError::Peer(format!("{} failed: {status}", program.display())));
    }
    let text = std::fs::read_to_string(&rows)
        .map_err(BenchError::io(format!("reading {}", rows.display())))?;
    text.lines()
        .map(|line| {
            serde_json::from_str::<Figure>(line)
                .map(|figure| (figure.case.clone(), figure))
                .map_err(|error| BenchError::Peer(format!("{}: {error}", rows.display())))
        })
        .collect()
}

/// Runs the pairs and prints a line for each case. Returns the cases that became slower.
///
/// # Errors
/// When there are too few pairs for an interval, or one of both programs fails.
pub fn run(settings: &Settings) -> Result<Vec<String>, BenchError> {
    if places(settings.pairs).is_none() {
        let needs = "a confidence interval of 95 % takes 6 pairs or more; give --pairs";
        return Err(BenchError::Peer(needs.to_owned()));
    }
    let after = std::env::current_exe().map_err(BenchError::io("finding this program"))?;
    let before = settings.before.canonicalize();
    let before = before.map_err(BenchError::io(format!("{}", settings.before.display())))?;
    let settings = &Settings { before, ..settings.clone() };
    let mut ratios: BTreeMap<String, (String, Vec<f64>)> = BTreeMap::new();
    for pair in 0..settings.pairs {
        eprintln!("pair {} of {}", pair + 1, settings.pairs);
        // What is left out is left out each time: once is enough.
        let figures = |program: &Path| figures(program, settings, pair == 0);
        // Who is first changes, so that what only grows (heat, page cache) takes no side.
        let (old, new) = if pair % 2 == 0 {
            let old = figures(&settings.before)?;
            (old, figures(&after)?)
        } else {
            let new = figures(&after)?;
            (figures(&settings.before)?, new)
        };
        // A difference has no ratio: it may be nothing, or negative.
        for (case, new) in new.into_iter().filter(|(_, new)| !new.unit.ends_with("added")) {
            if let Some(old) = old.get(&case) {
                let entry = ratios.entry(case).or_insert_with(|| (new.unit.clone(), Vec::new()));
                entry.1.push(new.ours / old.ours);
            }
        }
    }
    println!("{:<40} {:>8} {:>18} {:<10}", "case", "ratio", "95 % interval", "unit");
    let mut slower = Vec::new();
    for (case, (unit, ratios)) in ratios {
        let Some(found) = interval(&ratios) else {
            println!("{case:<40} only in {} pairs", ratios.len());
            continue;
        };
        let verdict = verdict(found, &unit);
        let word = match verdict {
            Verdict::Slower => "slower",
            Verdict::Faster => "faster",
            Verdict::Same => "",
        };
        let Interval { ratio, low, high } = found;
        println!("{case:<40} {ratio:>8.3} {low:>8.3} to {high:<6.3} {unit:<10} {word}");
        if verdict == Verdict::Slower {
            slower.push(case);
        }
    }
    Ok(slower)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_interval_begins_where_tables_of_the_sign_test_say() {
        // For n = 15: P(B < 4) = 1.76 %, P(B < 5) = 5.9 %, so the fourth value from either end.
        assert_eq!(places(5), None);
        assert_eq!(places(6), Some(0));
        assert_eq!(places(15), Some(3));
        assert_eq!(places(20), Some(5));
    }

    #[test]
    fn one_disturbed_pair_does_not_change_the_verdict() {
        let mut ratios = vec![1.05; 14];
        ratios.push(0.1);
        let interval = interval(&ratios).unwrap();
        assert_eq!(verdict(interval, "us"), Verdict::Slower);
        assert_eq!(verdict(interval, "GB/s"), Verdict::Faster);
    }

    #[test]
    fn ratios_on_both_sides_of_one_say_nothing() {
        let ratios: Vec<f64> = (0..15).map(|i| 0.93 + 0.01 * f64::from(i)).collect();
        assert_eq!(verdict(interval(&ratios).unwrap(), "kIOPS"), Verdict::Same);
    }
}
