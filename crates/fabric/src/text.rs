//! TOML files that people write: taken apart key by key, with the place of everything that is wrong.
//!
//! The rack file, its timing and workloads are all read so: unknown keys are refused with what was
//! probably meant, values with what is allowed, and nothing is guessed.

use std::ops::Range;

use toml::Spanned;
use toml::de::{DeTable, DeValue};

use crate::names::{self, is_name};
use crate::values::{
    DURATIONS, LENGTHS, PRECISE, RATES, parse_duration_ms, parse_length, parse_picoseconds,
    parse_rate,
};
pub use crate::values::{SIZES, format_size, parse_size};

/// What is wrong with a file, and where.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{file}:{line}:{column}: {what}; {allowed}")]
pub struct FileError {
    /// The file, as it was named.
    pub file: String,
    /// The line, from 1.
    pub line: usize,
    /// The column in characters, from 1.
    pub column: usize,
    /// The error, as a sentence without a full stop.
    pub what: String,
    /// What is allowed there.
    pub allowed: String,
}

/// Something wrong at a place in the text.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Problem {
    /// Where: bytes of the text.
    pub span: Range<usize>,
    /// The error, as a sentence without a full stop.
    pub what: String,
    /// What is allowed there.
    pub allowed: String,
}

/// Something read, or what is wrong with it.
pub type Parsed<T> = Result<T, Problem>;

/// Refuses what is at `span`.
///
/// # Errors
/// Always.
pub fn wrong<T>(
    span: Range<usize>,
    what: impl Into<String>,
    allowed: impl Into<String>,
) -> Parsed<T> {
    Err(Problem { span, what: what.into(), allowed: allowed.into() })
}

impl Problem {
    /// With the name of the file, and line and column in its text.
    pub fn locate(self, file: &str, text: &str) -> FileError {
        let before = text.get(..self.span.start).unwrap_or(text);
        let line = before.matches('\n').count() + 1;
        let column = before.rsplit('\n').next().unwrap_or("").chars().count() + 1;
        let Problem { what, allowed, .. } = self;
        FileError { file: file.to_owned(), line, column, what, allowed }
    }
}

/// A file's text as a table.
///
/// # Errors
/// [`Problem`] when it is no TOML.
pub fn document(text: &str) -> Parsed<Spanned<DeTable<'_>>> {
    DeTable::parse(text).map_err(|error| Problem {
        span: error.span().unwrap_or(0..0),
        what: error.message().trim().replace('\n', ", "),
        allowed: "the file is TOML (https://toml.io)".to_owned(),
    })
}

/// A table whose keys are taken one by one; what is left over is unknown.
#[derive(Debug)]
pub struct Section<'a> {
    table: &'a DeTable<'a>,
    /// Its place in the text.
    pub span: Range<usize>,
    /// Where it is, for messages: "the rack file", "device alpha/nvme0".
    place: String,
    known: &'static [&'static str],
}

impl<'a> Section<'a> {
    /// The section of a table; `known` are the keys it may have.
    ///
    /// # Errors
    /// [`Problem`] for a key that is not known.
    pub fn new(
        value: &'a DeTable<'a>,
        span: Range<usize>,
        place: impl Into<String>,
        known: &'static [&'static str],
    ) -> Parsed<Self> {
        let section = Section { table: value, span, place: place.into(), known };
        for key in section.table.keys() {
            let name: &str = key.get_ref();
            if !known.contains(&name) {
                let what = format!("unknown key `{name}` in {}", section.place);
                let near = closest(name, known.iter().copied());
                let allowed = match near {
                    Some(near) => format!("did you mean `{near}`? Allowed are {}", list(known)),
                    None => format!("allowed are {}", list(known)),
                };
                return wrong(key.span(), what, allowed);
            }
        }
        Ok(section)
    }

    /// The value of a key.
    pub fn get(&self, key: &'static str) -> Option<&'a Spanned<DeValue<'a>>> {
        debug_assert!(self.known.contains(&key));
        self.table.get(key)
    }

    /// What was found, which must be there.
    ///
    /// # Errors
    /// [`Problem`] when it is not.
    pub fn require<T>(&self, key: &str, found: Option<T>, allowed: &str) -> Parsed<T> {
        match found {
            Some(value) => Ok(value),
            None => wrong(self.span.clone(), format!("{} has no `{key}`", self.place), allowed),
        }
    }

    /// The string at `key`, if the section has it.
    ///
    /// # Errors
    /// [`Problem`] when it is something else.
    pub fn text(
        &self,
        key: &'static str,
        allowed: &str,
    ) -> Parsed<Option<(&'a str, Range<usize>)>> {
        match self.get(key) {
            None => Ok(None),
            Some(value) => match value.get_ref() {
                DeValue::String(text) => Ok(Some((text.as_ref(), value.span()))),
                other => wrong(value.span(), mismatch(key, other), allowed),
            },
        }
    }

    /// The list of strings at `key`, if the section has it.
    ///
    /// # Errors
    /// [`Problem`] when it is something else, or one of its entries is.
    pub fn texts(
        &self,
        key: &'static str,
        allowed: &str,
    ) -> Parsed<Option<(Vec<String>, Range<usize>)>> {
        let Some(value) = self.get(key) else { return Ok(None) };
        let DeValue::Array(entries) = value.get_ref() else {
            return wrong(value.span(), mismatch(key, value.get_ref()), allowed);
        };
        let text = |entry: &Spanned<DeValue<'_>>| match entry.get_ref() {
            DeValue::String(text) => Ok(text.to_string()),
            other => wrong(entry.span(), mismatch(key, other), allowed),
        };
        let texts = entries.iter().map(text).collect::<Parsed<Vec<String>>>()?;
        Ok(Some((texts, value.span())))
    }

    /// The boolean at `key`, if the section has it.
    ///
    /// # Errors
    /// [`Problem`] when it is something else.
    pub fn truth(&self, key: &'static str) -> Parsed<Option<bool>> {
        match self.get(key) {
            None => Ok(None),
            Some(value) => match value.get_ref() {
                DeValue::Boolean(truth) => Ok(Some(*truth)),
                other => wrong(value.span(), mismatch(key, other), "write true or false"),
            },
        }
    }

    /// The whole number at `key`, not negative, if the section has it.
    ///
    /// # Errors
    /// [`Problem`] when it is something else.
    pub fn number(&self, key: &'static str, allowed: &str) -> Parsed<Option<(u64, Range<usize>)>> {
        match self.get(key) {
            None => Ok(None),
            Some(value) => match integer(value.get_ref()) {
                Some(number) => Ok(Some((number, value.span()))),
                None => wrong(value.span(), mismatch(key, value.get_ref()), allowed),
            },
        }
    }

    /// One of a few numbers.
    ///
    /// # Errors
    /// [`Problem`] when it is something else.
    pub fn choice(&self, key: &'static str, choices: &[u8]) -> Parsed<Option<u8>> {
        let words: Vec<String> = choices.iter().map(u8::to_string).collect();
        let allowed = format!("`{key}` is one of {}", words.join(", "));
        let Some((number, span)) = self.number(key, &allowed)? else {
            return Ok(None);
        };
        match choices.iter().find(|choice| u64::from(**choice) == number) {
            Some(choice) => Ok(Some(*choice)),
            None => wrong(span, format!("`{key}` is {number}"), allowed),
        }
    }

    /// A size in bytes within limits.
    ///
    /// # Errors
    /// [`Problem`] when it is something else.
    pub fn size(&self, key: &'static str, least: u64, most: u64) -> Parsed<Option<u64>> {
        let Some(value) = self.get(key) else {
            return Ok(None);
        };
        let found = match value.get_ref() {
            DeValue::String(text) => parse_size(text),
            other => integer(other),
        };
        let Some(bytes) = found else {
            return wrong(value.span(), format!("`{key}` is no size"), SIZES);
        };
        if !(least..=most).contains(&bytes) {
            let allowed = format!("it is from {} to {}", format_size(least), format_size(most));
            return wrong(value.span(), format!("`{key}` is {}", format_size(bytes)), allowed);
        }
        Ok(Some(bytes))
    }

    /// A duration in milliseconds within limits, which are given in milliseconds.
    ///
    /// # Errors
    /// [`Problem`] when it is something else.
    pub fn duration(&self, key: &'static str, least: u64, most: u64) -> Parsed<Option<u64>> {
        let Some((text, span)) = self.text(key, DURATIONS)? else {
            return Ok(None);
        };
        match parse_duration_ms(text) {
            Some(ms) if (least..=most).contains(&ms) => Ok(Some(ms)),
            Some(_) => wrong(
                span,
                format!("`{key}` is {text}"),
                format!("it is from {least} ms to {} s", most / 1000),
            ),
            None => wrong(span, format!("`{key}` is no duration"), DURATIONS),
        }
    }

    /// A duration in picoseconds, at most `most`.
    ///
    /// # Errors
    /// [`Problem`] when it is something else.
    pub fn picoseconds(&self, key: &'static str, most: u64) -> Parsed<Option<u64>> {
        let Some((text, span)) = self.text(key, PRECISE)? else {
            return Ok(None);
        };
        match parse_picoseconds(text) {
            Some(ps) if ps <= most => Ok(Some(ps)),
            Some(_) => {
                let allowed = format!("it is at most {} us", most / 1_000_000);
                wrong(span, format!("`{key}` is {text}"), allowed)
            }
            None => wrong(span, format!("`{key}` is no duration"), PRECISE),
        }
    }

    /// A rate in bytes per second, at least 1.
    ///
    /// # Errors
    /// [`Problem`] when it is something else.
    pub fn rate(&self, key: &'static str) -> Parsed<Option<u64>> {
        let Some((text, span)) = self.text(key, RATES)? else {
            return Ok(None);
        };
        match parse_rate(text) {
            Some(rate) if rate > 0 => Ok(Some(rate)),
            _ => wrong(span, format!("`{key}` is {text}, which is no rate"), RATES),
        }
    }

    /// A length in millimetres, at most `most`.
    ///
    /// # Errors
    /// [`Problem`] when it is something else.
    pub fn length(&self, key: &'static str, most: u64) -> Parsed<Option<u64>> {
        let Some((text, span)) = self.text(key, LENGTHS)? else {
            return Ok(None);
        };
        match parse_length(text).filter(|length| *length <= most) {
            Some(length) => Ok(Some(length)),
            None => wrong(span, format!("`{key}` is {text}, which is no length"), LENGTHS),
        }
    }

    /// A whole number within limits.
    ///
    /// # Errors
    /// [`Problem`] when it is something else.
    pub fn count(&self, key: &'static str, least: u64, most: u64) -> Parsed<Option<u64>> {
        let allowed = format!("`{key}` is a whole number from {least} to {most}");
        match self.number(key, &allowed)? {
            Some((number, span)) if !(least..=most).contains(&number) => {
                wrong(span, format!("`{key}` is {number}"), allowed)
            }
            found => Ok(found.map(|(number, _)| number)),
        }
    }

    /// A list of whole numbers within limits.
    ///
    /// # Errors
    /// [`Problem`] when it is something else, or one of its entries is.
    pub fn counts(&self, key: &'static str, least: u64, most: u64) -> Parsed<Option<Vec<u64>>> {
        let allowed = format!("`{key}` is a list of whole numbers from {least} to {most}");
        let Some(value) = self.get(key) else { return Ok(None) };
        let DeValue::Array(entries) = value.get_ref() else {
            return wrong(value.span(), mismatch(key, value.get_ref()), allowed);
        };
        let count = |entry: &Spanned<DeValue<'_>>| match integer(entry.get_ref()) {
            Some(number) if (least..=most).contains(&number) => Ok(number),
            Some(number) => wrong(entry.span(), format!("`{key}` has {number}"), &*allowed),
            None => wrong(entry.span(), mismatch(key, entry.get_ref()), &*allowed),
        };
        entries.iter().map(count).collect::<Parsed<Vec<u64>>>().map(Some)
    }

    /// The place of a key's value, or of the section.
    pub fn place(&self, key: &'static str) -> Range<usize> {
        self.get(key).map_or(self.span.clone(), Spanned::span)
    }

    /// The tables under `key`, by name, in the file's order.
    ///
    /// # Errors
    /// [`Problem`] when something else is there, or one has no proper name.
    pub fn tables(&self, key: &'static str) -> Parsed<Vec<Named<'a>>> {
        let Some(value) = self.get(key) else {
            return Ok(Vec::new());
        };
        let DeValue::Table(table) = value.get_ref() else {
            let allowed = format!("write a table: [{key}.NAME]");
            return wrong(value.span(), mismatch(key, value.get_ref()), allowed);
        };
        let mut found = Vec::new();
        for (name, value) in table {
            let text: &str = name.get_ref();
            if !is_name(text) {
                return wrong(name.span(), format!("`{text}` is no name"), names::ALLOWED);
            }
            match value.get_ref() {
                DeValue::Table(table) => {
                    found.push(Named { name: text, span: name.span(), table });
                }
                other => {
                    let allowed = format!("write a table: [{key}.{text}]");
                    return wrong(value.span(), mismatch(text, other), allowed);
                }
            }
        }
        found.sort_by_key(|entry| entry.span.start);
        Ok(found)
    }
}

/// A table under a name.
#[derive(Debug)]
pub struct Named<'a> {
    /// Key of the table.
    pub name: &'a str,
    /// The name's place in the text.
    pub span: Range<usize>,
    /// Keys and values of the table.
    pub table: &'a DeTable<'a>,
}

/// A whole number that is not negative.
pub fn integer(value: &DeValue<'_>) -> Option<u64> {
    match value {
        DeValue::Integer(number) => u64::from_str_radix(number.as_str(), number.radix()).ok(),
        _ => None,
    }
}

/// A value of the wrong kind, in words.
pub fn mismatch(key: &str, found: &DeValue<'_>) -> String {
    match found {
        DeValue::Integer(number) => format!("`{key}` is the number {number}"),
        other => format!("`{key}` is a {}", other.type_str()),
    }
}

/// The words separated by commas, the last by "or": for messages.
pub fn list(words: &[&str]) -> String {
    words.iter().map(|word| format!("`{word}`")).collect::<Vec<_>>().join(", ")
}

/// The word that was probably meant: at most two edits away, or a third of its length.
fn closest<'w>(wrong: &str, words: impl Iterator<Item = &'w str>) -> Option<&'w str> {
    let scored = words.map(|word| (distance(wrong, word), word));
    scored.filter(|(edits, word)| *edits <= 2.min(word.len() / 2)).min().map(|(_, word)| word)
}

/// Levenshtein's edit distance between two words.
fn distance(a: &str, b: &str) -> usize {
    let b: Vec<char> = b.chars().collect();
    let mut row: Vec<usize> = (0..=b.len()).collect();
    for (i, x) in a.chars().enumerate() {
        let mut diagonal = std::mem::replace(&mut row[0], i + 1);
        for (j, y) in b.iter().enumerate() {
            let changed = diagonal + usize::from(x != *y);
            diagonal = row[j + 1];
            row[j + 1] = changed.min(row[j] + 1).min(diagonal + 1);
        }
    }
    row[b.len()]
}

/// The section of a value that must be a table.
///
/// # Errors
/// [`Problem`] when it is none, or has a key that is not known.
pub fn subsection<'a>(
    value: &'a Spanned<DeValue<'a>>,
    place: &str,
    known: &'static [&'static str],
) -> Parsed<Section<'a>> {
    match value.get_ref() {
        DeValue::Table(table) => Section::new(table, value.span(), place, known),
        other => wrong(value.span(), mismatch(place, other), format!("write a table: [{place}]")),
    }
}
