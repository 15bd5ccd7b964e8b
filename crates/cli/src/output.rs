//! How commands speak: tables for people, JSON for programs, one line for what went wrong.

use std::io::{IsTerminal, Write};
use std::process::ExitCode;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, Ordering};

use rackbus_control::ControlClientError;
use rackbus_control::api::AcceleratorOffer;
use serde::Serialize;
use serde_json::json;

/// What went wrong, and what to do.
#[derive(Debug)]
pub struct Failure {
    /// A word for programs.
    pub code: String,
    /// What went wrong, in one line.
    pub error: String,
    /// What the user can do about it, in one line.
    pub remedy: String,
    /// Wrong usage (exit code 2), not a failure (1).
    pub usage: bool,
    /// What accelerators would keep in place of a level that none keeps, the largest offer first.
    pub offers: Vec<AcceleratorOffer>,
}

impl Failure {
    /// A failure with its remedy.
    pub fn new(error: impl Into<String>, remedy: impl Into<String>) -> Self {
        let (error, remedy) = (error.into(), remedy.into());
        Failure { code: "failed".into(), error, remedy, usage: false, offers: Vec::new() }
    }

    /// The user asked for something that cannot be meant.
    pub fn usage(error: impl Into<String>, remedy: impl Into<String>) -> Self {
        Failure { code: "usage".into(), usage: true, ..Failure::new(error, remedy) }
    }
}

/// A command does not know whose the control plane is: that of `up`, or one of several machines.
const NO_CONTROL_PLANE: &str = "start the rack with `rackbus up`; where its hosts are machines, see that \
    `rackbus control` runs and is reached";

impl From<ControlClientError> for Failure {
    fn from(error: ControlClientError) -> Self {
        match error {
            ControlClientError::Refused(refused) => Failure {
                code: refused.code,
                error: refused.error,
                remedy: refused.remedy,
                usage: false,
                offers: refused.offers.map(|offers| *offers).unwrap_or_default(),
            },
            ControlClientError::Version(error) => Failure::new(
                error,
                "upgrade the older side: what both know works with adjacent versions",
            ),
            other => Failure::new(other.to_string(), NO_CONTROL_PLANE),
        }
    }
}

/// Where a command's words go.
#[derive(Debug)]
pub struct Output {
    json: bool,
    colour: bool,
}

/// Why something that was said could not be written, the first time.
static UNWRITTEN: OnceLock<String> = OnceLock::new();
/// Whoever reads what is said has gone away.
static UNHEARD: AtomicBool = AtomicBool::new(false);

/// The meaning of a word in a table, for its colour.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Tone {
    /// Neither good nor bad: the terminal's own colour.
    Plain,
    /// What works as it should: green.
    Good,
    /// Somebody is at work.
    Busy,
    /// What does not work, or was lost: red.
    Bad,
}

/// One cell of a table.
#[derive(Debug)]
pub struct Cell(pub String, pub Tone);

impl<T: Into<String>> From<T> for Cell {
    fn from(text: T) -> Self {
        Cell(text.into(), Tone::Plain)
    }
}

impl Output {
    /// Colours only on a terminal, and not when `NO_COLOR` says so.
    pub fn new(json: bool) -> Self {
        let wanted = std::env::var_os("NO_COLOR").is_none_or(|value| value.is_empty());
        Output { json, colour: wanted && !json && std::io::stdout().is_terminal() }
    }

    /// Whether programs are spoken to.
    pub fn is_json(&self) -> bool {
        self.json
    }

    /// A result: the value as JSON, or `people`'s words.
    pub fn result(&self, value: &impl Serialize, people: impl FnOnce(&Output)) {
        if self.json {
            let text = serde_json::to_string_pretty(value).unwrap_or_default();
            self.line(&text);
        } else {
            people(self);
        }
    }

    /// A line for people. One that cannot be written fails the command when it is [over](Output::finish).
    pub fn line(&self, text: &str) {
        self.bytes(format!("{text}\n").as_bytes());
    }

    /// Bytes as they are, such as a file's; otherwise as a line.
    pub fn bytes(&self, bytes: &[u8]) {
        let mut stdout = std::io::stdout().lock();
        match stdout.write_all(bytes).and_then(|()| stdout.flush()) {
            Ok(()) => {}
            // A reader that has gone away needs no words.
            Err(cause) if cause.kind() == std::io::ErrorKind::BrokenPipe => {
                UNHEARD.store(true, Ordering::Relaxed);
            }
            Err(cause) => drop(UNWRITTEN.set(cause.to_string())),
        }
    }

    /// Whether whoever read the results has gone away: a command that tells of what happens ends then.
    pub fn is_unheard(&self) -> bool {
        UNHEARD.load(Ordering::Relaxed)
    }

    /// The command is over: what it ends with. What it did and could not say is a failure.
    pub fn finish(&self, outcome: Result<(), Failure>) -> ExitCode {
        match (outcome, UNWRITTEN.get()) {
            (Err(failure), _) => self.failure(&failure),
            (Ok(()), None) => ExitCode::SUCCESS,
            (Ok(()), Some(cause)) => {
                let error = format!("the result could not be written: {cause}");
                let remedy = "it was done all the same; see to the cause, and ask for it again";
                Output { json: false, ..*self }.failure(&Failure::new(error, remedy))
            }
        }
    }

    /// A table with aligned columns.
    pub fn table(&self, head: &[&str], rows: Vec<Vec<Cell>>) {
        let mut widths: Vec<usize> = head.iter().map(|h| h.chars().count()).collect();
        for row in &rows {
            for (width, cell) in widths.iter_mut().zip(row) {
                *width = (*width).max(cell.0.chars().count());
            }
        }
        let head: Vec<Cell> = head.iter().map(|h| Cell(h.to_uppercase(), Tone::Plain)).collect();
        for row in std::iter::once(head).chain(rows) {
            self.row(&row, &widths);
        }
    }

    /// A row by itself, with columns of these widths; a last one without a width follows them.
    pub fn row(&self, row: &[Cell], widths: &[usize]) {
        let mut line = String::new();
        for (nth, cell) in row.iter().enumerate() {
            let width = widths.get(nth).copied().unwrap_or_default();
            let gap = width.saturating_sub(cell.0.chars().count()) + 2;
            line.push_str(&self.paint(cell));
            line.push_str(&" ".repeat(gap));
        }
        self.line(line.trim_end());
    }

    /// What is being done, on stderr.
    pub fn progress(&self, text: &str) {
        if !self.json {
            let _ = writeln!(std::io::stderr(), "{text}");
        }
    }

    /// What went wrong: one line with its remedy, or the same as JSON.
    pub fn failure(&self, failure: &Failure) -> ExitCode {
        let Failure { code, error, remedy, usage, offers } = failure;
        if self.json {
            let mut said = json!({ "code": code, "error": error, "remedy": remedy });
            if !offers.is_empty() {
                said["offers"] = json!(offers);
            }
            self.line(&said.to_string());
        } else {
            let _ = writeln!(std::io::stderr(), "rackbus: {error}; {remedy}");
        }
        ExitCode::from(if *usage { 2 } else { 1 })
    }

    fn paint(&self, cell: &Cell) -> String {
        let colour = match cell.1 {
            _ if !self.colour => return cell.0.clone(),
            Tone::Plain => return cell.0.clone(),
            Tone::Good => 32,
            Tone::Busy => 33,
            Tone::Bad => 31,
        };
        format!("\x1b[{colour}m{}\x1b[0m", cell.0)
    }
}

/// How long ago, for people.
pub fn ago(ms: u64) -> String {
    match ms / 1000 {
        0 => format!("{ms} ms"),
        s @ 1..120 => format!("{s} s"),
        s @ 120..7200 => format!("{} min", s / 60),
        s => format!("{} h", s / 3600),
    }
}

/// Microseconds with the unit that gives them two or three digits: `12.5 us`, `1.2 ms`.
pub fn duration(us: f64) -> String {
    match us {
        us if us.is_infinite() => ">10 s".into(),
        us if us < 1e3 => format!("{us:.1} us"),
        us if us < 1e6 => format!("{:.1} ms", us / 1e3),
        us => format!("{:.1} s", us / 1e6),
    }
}
