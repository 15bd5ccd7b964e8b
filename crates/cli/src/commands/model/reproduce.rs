//! `rackbus model reproduce`: the papers' figures, published and modelled.

use std::path::PathBuf;

use rackbus_model::reproduce::{
    Kind, Row, TestbedHosts, Verdict, headline, hosts, numbers, pictures, rows, sums,
};

use serde::Serialize;

use super::{taken_to_be, write};
use crate::output::{Cell, Failure, Output, Tone};

/// Model the published figures of the papers that rackbus follows, and compare.
#[derive(Debug, clap::Args)]
#[command(after_help = "Examples:
  rackbus model reproduce
  rackbus model reproduce --only M       those of Marlin
  rackbus model reproduce --pictures pictures/
  rackbus --json model reproduce         all rows, and what the testbeds' hosts are taken to be")]
pub struct Args {
    /// Only the figures of a paper, or one: DL, DL4. A figure that does not exist lists all that do.
    #[arg(long, value_name = "ID")]
    only: Option<String>,
    /// Draw them into this folder (SVG).
    #[arg(long, value_name = "DIR")]
    pictures: Option<PathBuf>,
}

/// The rows, and what the testbeds' hosts are taken to be.
#[derive(Debug, Serialize)]
struct Reproduced {
    rows: Vec<Row>,
    hosts: Vec<TestbedHosts>,
}

impl Args {
    pub fn run(&self, output: &Output) -> Result<(), Failure> {
        output.progress("simulating the papers' testbeds; this takes some seconds");
        let all = rows();
        let mut rows = all.clone();
        if let Some(only) = &self.only {
            rows.retain(|row| matches(row.id, only));
            if rows.is_empty() {
                let error = format!("no figure is called {only}");
                return Err(Failure::usage(error, format!("they are {}", numbers(&all))));
            }
        }
        if let Some(folder) = &self.pictures {
            for (name, text) in pictures(&all) {
                write(&folder.join(format!("{name}.svg")), &text)?;
            }
        }
        let reproduced = Reproduced { rows, hosts: hosts() };
        let rows = &reproduced.rows;
        output.result(&reproduced, |o| {
            let head = ["id", "case", "published", "modelled", "unit", "error", "kind", "verdict"];
            o.table(&head, rows.iter().map(cells).collect());
            let percent = |share: f64| format!("{:.1} %", share * 100.0);
            let counted = sums(rows).into_iter().map(|sum| {
                let errors = match sum.kind {
                    Kind::Relation | Kind::Exact => [String::new(), String::new(), String::new()],
                    _ => [sum.median, sum.most, sum.worst].map(percent),
                };
                let mut cells: Vec<Cell> = vec![sum.kind.to_string().into()];
                cells.extend([sum.rows, sum.missed].map(|count| Cell::from(count.to_string())));
                cells.extend(errors.map(Cell::from));
                cells
            });
            o.line("");
            o.table(
                &["kind", "rows", "missed", "median error", "90 % within", "worst"],
                counted.collect(),
            );
            o.line("");
            o.line(&headline(rows));
            for row in rows.iter().filter(|row| row.verdict == Verdict::Miss) {
                let why = row.note.unwrap_or("not explained");
                o.line(&format!("missed: {} {}: {why}", row.id, row.case));
            }
            for testbed in &reproduced.hosts {
                o.line(&format!("{}: {}", testbed.testbed, taken_to_be(&testbed.hosts)));
            }
        });
        Ok(())
    }
}

/// Whether a figure is meant: all of a paper's by its letters, or one by its number.
fn matches(id: &str, only: &str) -> bool {
    let letters = id.trim_end_matches(|c: char| c.is_ascii_digit());
    id.eq_ignore_ascii_case(only) || letters.eq_ignore_ascii_case(only)
}

fn cells(row: &Row) -> Vec<Cell> {
    let error = match row.kind {
        Kind::Relation => format!("margin {:.3}", row.error),
        _ => format!("{:+.1} %", row.error * 100.0),
    };
    let (word, tone) = match row.verdict {
        Verdict::Ok => ("ok", Tone::Good),
        Verdict::Miss => ("miss", Tone::Bad),
    };
    let published = match (&row.says, row.range) {
        (Some(says), _) => says.clone(),
        (None, Some((least, most))) => format!("{} to {}", number(least), number(most)),
        (None, None) => number(row.published),
    };
    vec![
        row.id.into(),
        row.case.clone().into(),
        published.into(),
        number(row.modelled).into(),
        row.unit.into(),
        error.into(),
        row.kind.to_string().into(),
        Cell(word.into(), tone),
    ]
}

/// With four significant digits.
fn number(value: f64) -> String {
    if value == 0.0 {
        return "0".into();
    }
    let digits = (3 - value.abs().log10().floor() as i32).clamp(0, 6) as usize;
    let text = format!("{value:.digits$}");
    match text.contains('.') {
        true => text.trim_end_matches('0').trim_end_matches('.').to_owned(),
        false => text,
    }
}
