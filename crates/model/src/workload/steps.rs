//! Flows of steps: what depends on each other, one step after the other, as software and devices do it.

use std::ops::Range;

use rackbus_fabric::text::{Parsed, Section, subsection, wrong};
use toml::Spanned;
use toml::de::DeValue;

use super::file::MOST_BYTES;
use super::spread::spread;
use crate::engine::{Admitted, Until};
use crate::random::Distribution;
use crate::time::Time;

/// What a step may be, for messages.
pub(super) const FORM: &str = "steps are { wait = TIME }, { use = UNIT, time = TIME }, { write, read, store or load = SIZE, \
    from = END, to = END }, { copy = SIZE, by = END, from = END, to = END }, { each = N, apart = SIZE, \
    steps = [...] }, { hold = UNIT, steps = [...] } and { together = [[...], [...]] }";
/// How deep steps may be within steps.
const DEEPEST: usize = 4;

/// One thing that a job of a flow of steps does before the next.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum StepSpec {
    /// Nothing happens for a time.
    Wait(Distribution),
    /// One of the units of that name is used for a time.
    Use(String, Distribution),
    /// One of the units of that name is held during steps.
    Hold(String, Vec<StepSpec>),
    /// Steps are done so many times, side by side.
    Each {
        /// The number of times, at least 1.
        count: u64,
        /// Bytes from one to the next.
        apart: u64,
        /// The steps that each time does, one after the other.
        steps: Vec<StepSpec>,
    },
    /// Steps are done when the gate of that name lets the job through; files have none.
    Admitted(String, Admitted, Vec<StepSpec>),
    /// Lists of steps are done side by side.
    Together(Vec<Vec<StepSpec>>),
    /// Bytes are written, read or copied.
    Move(Move),
}

/// Who moves bytes, and what of it counts as the step's end.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum MoveKind {
    /// A write, as a device's DMA engine makes it.
    Write,
    /// A read of one.
    Read,
    /// A processor's store, from its instruction to its being seen.
    Store,
    /// A processor's load, till the register has it.
    Load,
    /// A device's read whose bytes it writes elsewhere.
    Copy,
}

/// A step that moves bytes between ends.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Move {
    /// Whether it is a write, read, store, load or copy.
    pub how: MoveKind,
    /// By whom, from or to where; of a copy by whom, from where and to where.
    pub ends: Vec<String>,
    /// Bytes in all, at least 1.
    pub bytes: u64,
    /// Bytes from where the job is to where they are.
    pub at: u64,
    /// The channel of the device: those of different ones take turns.
    pub channel: String,
    /// What the next step waits for; of reads and loads always all bytes.
    pub until: Until,
}

impl StepSpec {
    /// Whether time can pass while it is done.
    fn takes_time(&self) -> bool {
        match self {
            StepSpec::Wait(span) | StepSpec::Use(_, span) => span.mean() > Time::ZERO,
            StepSpec::Hold(_, steps)
            | StepSpec::Each { steps, .. }
            | StepSpec::Admitted(_, _, steps) => steps.iter().any(StepSpec::takes_time),
            StepSpec::Together(lists) => lists.iter().flatten().any(StepSpec::takes_time),
            StepSpec::Move(_) => true,
        }
    }

    /// Bytes that it moves, those of a copy once; where a number has no room for more, that many.
    fn moved(&self) -> u64 {
        match self {
            StepSpec::Move(moved) => moved.bytes,
            StepSpec::Each { count, steps, .. } => count.saturating_mul(StepSpec::moved_by(steps)),
            StepSpec::Hold(_, steps) | StepSpec::Admitted(_, _, steps) => StepSpec::moved_by(steps),
            StepSpec::Together(lists) => {
                lists.iter().map(|list| StepSpec::moved_by(list)).fold(0, u64::saturating_add)
            }
            StepSpec::Wait(_) | StepSpec::Use(..) => 0,
        }
    }

    /// Bytes that steps move in all.
    pub(super) fn moved_by(steps: &[StepSpec]) -> u64 {
        steps.iter().map(StepSpec::moved).fold(0, u64::saturating_add)
    }

    pub(super) fn ends(&self) -> &[String] {
        match self {
            StepSpec::Move(moved) => &moved.ends,
            _ => &[],
        }
    }

    /// Its ends, and those of the steps in it.
    pub(super) fn all_ends(&self) -> Vec<&str> {
        match self {
            StepSpec::Hold(_, steps)
            | StepSpec::Admitted(_, _, steps)
            | StepSpec::Each { steps, .. } => steps.iter().flat_map(StepSpec::all_ends).collect(),
            StepSpec::Together(lists) => {
                lists.iter().flatten().flat_map(StepSpec::all_ends).collect()
            }
            _ => self.ends().iter().map(String::as_str).collect(),
        }
    }
}

type Steps = (Vec<StepSpec>, Vec<Range<usize>>);

/// Steps of a file, and the places of their ends.
pub(super) fn read(value: &Spanned<DeValue<'_>>) -> Parsed<Steps> {
    let mut places = Vec::new();
    let steps = list(value, &mut places, 0)?;
    // One job after the other would begin and end at the same moment, for ever.
    if !steps.iter().any(StepSpec::takes_time) {
        let allowed =
            "give one of its `wait` or `time` more than 0, or add a step that moves bytes";
        return wrong(value.span(), "a job of these steps takes no time", allowed);
    }
    Ok((steps, places))
}

fn list(
    value: &Spanned<DeValue<'_>>,
    places: &mut Vec<Range<usize>>,
    depth: usize,
) -> Parsed<Vec<StepSpec>> {
    let DeValue::Array(entries) = value.get_ref() else {
        return wrong(value.span(), "`steps` is no list", FORM);
    };
    if depth > DEEPEST || entries.is_empty() || entries.len() > 1000 {
        let allowed = "there are 1 to 1000 steps in a list, and lists at most 4 deep";
        return wrong(value.span(), "there are too many steps, or none", allowed);
    }
    entries.iter().map(|entry| step(entry, places, depth)).collect()
}

const KEYS: &[&str] = &[
    "wait", "use", "time", "hold", "each", "apart", "steps", "write", "read", "store", "load",
    "copy", "by", "from", "to", "at", "channel", "until", "together",
];
const WORDS: [(&str, MoveKind); 5] = [
    ("write", MoveKind::Write),
    ("read", MoveKind::Read),
    ("store", MoveKind::Store),
    ("load", MoveKind::Load),
    ("copy", MoveKind::Copy),
];

fn step(
    entry: &Spanned<DeValue<'_>>,
    places: &mut Vec<Range<usize>>,
    depth: usize,
) -> Parsed<StepSpec> {
    let section = subsection(entry, "a step", KEYS)?;
    let verbs =
        ["wait", "use", "hold", "each", "together"].into_iter().chain(WORDS.map(|(word, _)| word));
    let given: Vec<&str> = verbs.filter(|verb| section.get(verb).is_some()).collect();
    let [verb] = given[..] else {
        return wrong(entry.span(), "a step does one thing", FORM);
    };
    let only = |keys: &'static [&'static str]| subsection(entry, "the step", keys);
    let inner = |places: &mut Vec<Range<usize>>| {
        let steps = section.require("steps", section.get("steps"), FORM)?;
        list(steps, places, depth + 1)
    };
    let unit =
        |key| section.require(key, section.text(key, FORM)?, FORM).map(|(name, _)| name.to_owned());
    match verb {
        "wait" => {
            let own = only(&["wait"])?;
            Ok(StepSpec::Wait(spread(&own, "wait")?.unwrap_or(Distribution::Fixed(Time::ZERO))))
        }
        "use" => {
            let own = only(&["use", "time"])?;
            let span = own.require("time", spread(&own, "time")?, FORM)?;
            Ok(StepSpec::Use(unit("use")?, span))
        }
        "hold" => {
            only(&["hold", "steps"])?;
            Ok(StepSpec::Hold(unit("hold")?, inner(places)?))
        }
        "each" => {
            only(&["each", "apart", "steps"])?;
            let count = section.count("each", 1, 1 << 20)?.unwrap_or(1);
            let apart = section.size("apart", 0, MOST_BYTES)?.unwrap_or(0);
            Ok(StepSpec::Each { count, apart, steps: inner(places)? })
        }
        "together" => {
            let own = only(&["together"])?;
            let lists = own.require("together", own.get("together"), FORM)?;
            let DeValue::Array(lists) = lists.get_ref() else {
                return wrong(lists.span(), "`together` is no list of lists", FORM);
            };
            if lists.is_empty() || lists.len() > 1000 {
                return wrong(
                    own.place("together"),
                    "`together` has no list, or more than 1000",
                    FORM,
                );
            }
            let lists = lists.iter().map(|steps| list(steps, places, depth + 1));
            Ok(StepSpec::Together(lists.collect::<Parsed<_>>()?))
        }
        verb => moves(&section, verb, places).map(StepSpec::Move),
    }
}

fn moves(section: &Section<'_>, verb: &str, places: &mut Vec<Range<usize>>) -> Parsed<Move> {
    let found = WORDS.into_iter().find(|(word, _)| *word == verb);
    let Some((word, how)) = found else {
        return wrong(section.span.clone(), "a step does one thing", FORM);
    };
    for key in ["wait", "use", "time", "hold", "each", "apart", "steps", "together"] {
        if section.get(key).is_some() {
            return wrong(section.place(key), format!("`{key}` is not for `{word}`"), FORM);
        }
    }
    let keys: &[&'static str] =
        if how == MoveKind::Copy { &["by", "from", "to"] } else { &["from", "to"] };
    let mut ends = Vec::new();
    for key in keys {
        let (name, span) = section.require(key, section.text(key, FORM)?, FORM)?;
        ends.push(name.to_owned());
        places.push(span);
    }
    let untils = "`until` is \"landed\", \"issued\" or \"begun\"";
    let until = match section.text("until", untils)? {
        None | Some(("landed", _)) => Until::Landed,
        Some(("issued", _)) => Until::Issued,
        Some(("begun", _)) => Until::Begun,
        Some((other, span)) => return wrong(span, format!("`until` is `{other}`"), untils),
    };
    let channel = section.text("channel", "write a name")?.map_or("", |(name, _)| name);
    Ok(Move {
        how,
        ends,
        bytes: section.size(word, 1, MOST_BYTES)?.unwrap_or(1),
        at: section.size("at", 0, MOST_BYTES)?.unwrap_or(0),
        channel: channel.to_owned(),
        until,
    })
}
