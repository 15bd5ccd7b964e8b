//! Pairs runs of this program with runs of an earlier build of it, and says what became slower.
//!
//! A figure moves by more between two runs on one machine than most changes move it. So both
//! programs run in turns, each pair gives one ratio for each case, and the
//! [confidence interval](crate::interval) of the median says whether they differ.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use serde::Deserialize;

use crate::BenchError;
use crate::interval::{Interval, interval, places};

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

/// A row, as far as it is compared.
#[derive(Debug, Clone, Deserialize)]
struct Row {
    #[serde(flatten)]
    of: RowKey,
    ours: f64,
    unit: String,
}

/// What tells the rows of a run apart: the same case may be there against several peers.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Deserialize)]
struct RowKey {
    area: String,
    case: String,
    peer_name: String,
}

impl std::fmt::Display for RowKey {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}: {} ({})", self.area, self.case, self.peer_name)
    }
}

/// One run's rows: what was measured, and its unit. Of those whose ratio is a difference to a peer ("us added"), too, what was
/// measured is a time.
type Rows = BTreeMap<RowKey, (f64, String)>;

/// What pairs of runs have in common, and what not.
#[derive(Debug, Default)]
struct Pairs {
    /// After / before, of each pair, and the unit.
    ratios: BTreeMap<RowKey, (String, Vec<f64>)>,
    /// Rows that were missing in a run of either program, or had nothing to divide by, and in which.
    unpaired: BTreeMap<RowKey, &'static str>,
}

impl Pairs {
    /// Adds the rows of a pair of runs.
    fn add(&mut self, before: &Rows, after: Rows) {
        for of in before.keys().filter(|of| !after.contains_key(of)) {
            self.unpaired.insert(of.clone(), "not in each run of this build");
        }
        for (of, (new, unit)) in after {
            match before.get(&of) {
                None => drop(self.unpaired.insert(of, "not in each run of the earlier build")),
                Some((old, _)) if *old > 0.0 && new >= 0.0 => {
                    let [old, new] = [*old, new].map(|value| distance(value, &unit));
                    let ratios = self.ratios.entry(of).or_insert_with(|| (unit, Vec::new()));
                    ratios.1.push(new / old);
                }
                Some(_) => drop(self.unpaired.insert(of, "nothing that could be divided")),
            }
        }
    }
}

/// What is compared: of a ratio that is to be one how far it is from that, either way; all else as it is.
fn distance(value: f64, unit: &str) -> f64 {
    if unit == "ratio" { value.max(value.recip()) } else { value }
}

/// How the two compare, with 95 % confidence.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Verdict {
    Slower,
    Faster,
    Same,
}

fn verdict(interval: Interval, unit: &str) -> Verdict {
    let more_is_better =
        ["/s", "per second", "IOPS", "index"].iter().any(|rate| unit.contains(rate));
    let (more, less) = (interval.low > 1.0, interval.high < 1.0);
    match (more, less) {
        (false, false) => Verdict::Same,
        _ if more == more_is_better => Verdict::Faster,
        _ => Verdict::Slower,
    }
}

/// Runs one of both.
fn rows_of(program: &Path, settings: &Settings, with_notes: bool) -> Result<Rows, BenchError> {
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
    read(&text).map_err(|error| BenchError::Peer(format!("{}: {error}", rows.display())))
}

/// The rows of a run. One that is there twice would count for one of the two only.
fn read(text: &str) -> Result<Rows, String> {
    let mut rows = Rows::new();
    for line in text.lines() {
        let Row { of, ours, unit } =
            serde_json::from_str(line).map_err(|error| error.to_string())?;
        if let Some(again) = rows.insert(of.clone(), (ours, unit)) {
            return Err(format!("the row `{of}` is there twice, with {} and {ours}", again.0));
        }
    }
    Ok(rows)
}

/// What became slower, and what could not be compared.
#[derive(Debug, Default)]
pub struct BaselineComparison {
    /// Cases that became slower.
    pub slower: Vec<String>,
    /// Rows that only one of both programs has.
    pub unpaired: Vec<String>,
}

impl BaselineComparison {
    /// Nothing became slower, and all was compared.
    ///
    /// # Errors
    /// What is not so.
    pub fn check(&self) -> Result<(), BenchError> {
        match (self.slower.as_slice(), self.unpaired.as_slice()) {
            ([], []) => Ok(()),
            ([], unpaired) => Err(BenchError::Unpaired(unpaired.join(", "))),
            (slower, _) => Err(BenchError::Slower(slower.join(", "))),
        }
    }
}

/// Runs the pairs and prints a line for each case.
///
/// # Errors
/// When there are too few pairs for an interval, or one of both programs fails.
pub fn run(settings: &Settings) -> Result<BaselineComparison, BenchError> {
    if places(settings.pairs).is_none() {
        let needs = "a confidence interval of 95 % takes 6 pairs or more; give --pairs";
        return Err(BenchError::Peer(needs.to_owned()));
    }
    let after = std::env::current_exe().map_err(BenchError::io("finding this program"))?;
    let before = settings.before.canonicalize();
    let before = before.map_err(BenchError::io(format!("{}", settings.before.display())))?;
    let settings = &Settings { before, ..settings.clone() };
    let mut pairs = Pairs::default();
    for pair in 0..settings.pairs {
        eprintln!("pair {} of {}", pair + 1, settings.pairs);
        // What is left out is left out each time: once is enough.
        let rows_of = |program: &Path| rows_of(program, settings, pair == 0);
        // Who is first changes, so that what only grows (heat, page cache) takes no side.
        let (old, new) = if pair % 2 == 0 {
            let old = rows_of(&settings.before)?;
            (old, rows_of(&after)?)
        } else {
            let new = rows_of(&after)?;
            (rows_of(&settings.before)?, new)
        };
        pairs.add(&old, new);
    }
    if pairs.ratios.is_empty() && pairs.unpaired.is_empty() {
        let nothing = "neither program has measured anything: see what it says was left out, and what --only names";
        return Err(BenchError::Peer(nothing.to_owned()));
    }
    Ok(show(&pairs))
}

/// Prints what the pairs say.
fn show(pairs: &Pairs) -> BaselineComparison {
    println!("{:<60} {:>8} {:>18} {:<10}", "case", "ratio", "95 % interval", "unit");
    let mut comparison = BaselineComparison::default();
    for (of, why) in &pairs.unpaired {
        println!("{:<60} {why}", of.to_string());
        comparison.unpaired.push(of.to_string());
    }
    for (of, (unit, ratios)) in &pairs.ratios {
        let case = of.to_string();
        let Some(found) = interval(ratios) else {
            println!("{case:<60} only in {} pairs", ratios.len());
            continue;
        };
        let verdict = verdict(found, unit);
        let word = match verdict {
            Verdict::Slower => "slower",
            Verdict::Faster => "faster",
            Verdict::Same => "",
        };
        let Interval { median: ratio, low, high } = found;
        println!("{case:<60} {ratio:>8.3} {low:>8.3} to {high:<6.3} {unit:<10} {word}");
        if verdict == Verdict::Slower {
            comparison.slower.push(case);
        }
    }
    comparison
}

#[cfg(test)]
mod tests {
    use super::*;

    fn line(case: &str, peer: &str, ours: f64, unit: &str) -> String {
        format!(
            "{{\"area\":\"nvme\",\"case\":\"{case}\",\"ours\":{ours},\"peer\":1,\"peer_name\":\"{peer}\",\"unit\":\"{unit}\",\"ratio\":1,\"runs\":1}}\n"
        )
    }

    #[test]
    fn each_case_is_compared_against_each_peer_and_times_also_where_the_row_is_a_difference() {
        let run = |psync: f64, uring: f64, added: f64| {
            let rows = [
                line("4k write", "fio psync", psync, "us"),
                line("4k write", "fio io_uring", uring, "us"),
                line("4k read qd1", "fio", added, "us added"),
            ];
            read(&rows.concat()).unwrap()
        };
        let mut pairs = Pairs::default();
        for _ in 0..6 {
            pairs.add(&run(10.0, 8.0, 3.0), run(10.0, 16.0, 6.0));
        }
        let slower = show(&pairs).slower;
        assert_eq!(slower, ["nvme: 4k read qd1 (fio)", "nvme: 4k write (fio io_uring)"]);
        assert!(pairs.unpaired.is_empty());
    }

    #[test]
    fn a_row_that_only_one_of_both_has_is_said() {
        let run = |case: &str| read(&line(case, "fio", 1.0, "us")).unwrap();
        let mut pairs = Pairs::default();
        pairs.add(&run("before"), run("after"));
        assert_eq!(show(&pairs).unpaired, ["nvme: after (fio)", "nvme: before (fio)"]);
        let nothing = read(&line("a", "fio", 0.0, "us")).unwrap();
        pairs.add(&nothing, run("a"));
        assert_eq!(show(&pairs).unpaired.len(), 3);
    }

    #[test]
    fn a_row_that_counts_twice_is_refused() {
        let twice = line("4k write", "fio", 1.0, "us").repeat(2);
        assert!(read(&twice).unwrap_err().contains("twice"));
        assert!(read("{}").is_err());
    }

    #[test]
    fn a_single_disturbed_pair_does_not_change_the_verdict() {
        let mut ratios = vec![1.05; 14];
        ratios.push(0.1);
        let interval = interval(&ratios).unwrap();
        assert_eq!(verdict(interval, "us"), Verdict::Slower);
        assert_eq!(verdict(interval, "GB/s"), Verdict::Faster);
    }

    #[test]
    fn less_even_shares_are_worse() {
        let verdict_of = |unit: &str, before: f64, after: f64| {
            let run = |value: f64| read(&line("shares", "even", value, unit)).unwrap();
            let mut pairs = Pairs::default();
            (0..15).for_each(|_| pairs.add(&run(before), run(after)));
            let (unit, ratios) = pairs.ratios.values().next().unwrap();
            verdict(interval(ratios).unwrap(), unit)
        };
        assert_eq!(verdict_of("index", 0.99, 0.7), Verdict::Slower);
        assert_eq!(verdict_of("index", 0.7, 0.99), Verdict::Faster);
        for uneven in [0.4, 2.5] {
            assert_eq!(verdict_of("ratio", 1.0, uneven), Verdict::Slower);
            assert_eq!(verdict_of("ratio", uneven, 1.1), Verdict::Faster);
        }
        assert_eq!(verdict_of("ratio", 2.5, 0.4), Verdict::Same);
    }

    #[test]
    fn ratios_on_both_sides_of_one_say_nothing() {
        let ratios: Vec<f64> = (0..15).map(|i| 0.93 + 0.01 * f64::from(i)).collect();
        assert_eq!(verdict(interval(&ratios).unwrap(), "kIOPS"), Verdict::Same);
    }
}
