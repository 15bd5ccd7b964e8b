//! A transaction, hop by hop: parts from left to right, time downwards, a packet's way slanting from one
//! part to the next while it is on the link.

use super::chart::span;
use super::{Anchor, COLOURS, GRID, HEAD, INK, SOFT, Svg};

/// A packet on a link.
#[derive(Debug, Clone, PartialEq)]
pub struct Passage {
    /// From which lane, an index of the timeline's.
    pub from: usize,
    /// To which.
    pub to: usize,
    /// When its first bit went, in nanoseconds.
    pub begin: f64,
    /// When its last bit came.
    pub end: f64,
    /// What it is.
    pub label: String,
    /// Its kind: requests, writes and completions have colours of their own.
    pub kind: usize,
}

/// A transaction.
#[derive(Debug, Clone, PartialEq)]
pub struct Timeline {
    /// What one sees.
    pub title: String,
    /// The rest that is to be known.
    pub subtitle: String,
    /// The parts, in the order of the way.
    pub lanes: Vec<String>,
    /// What happened, by time.
    pub passages: Vec<Passage>,
}

const WIDTH: f64 = 920.0;
const LEFT: f64 = 92.0;
/// Between two moments: the least and the most that they are apart, and pixels per nanosecond.
const STEPS: (f64, f64) = (6.0, 34.0);
const PER_NS: f64 = 0.1;
/// Height of a passage's label.
const LINE: f64 = 15.0;
/// Passages that are drawn at most; more cannot be read.
const MOST: usize = 120;

/// A moment, to 10 ns: neighbours differ.
fn moment_text(ns: f64) -> String {
    if ns < 1e3 { span(ns) } else { format!("{:.2} us", ns / 1e3) }
}

/// Where moments stand: bursts are pulled apart so that they can be read, long waits are shortened; these
/// are given too, with their places.
fn spread(moments: &[f64], top: f64) -> (Vec<f64>, Vec<(f64, f64)>) {
    let mut places = Vec::with_capacity(moments.len());
    let mut breaks = Vec::new();
    let mut at = top;
    for (nth, moment) in moments.iter().enumerate() {
        if nth > 0 {
            let gap = moment - moments[nth - 1];
            let step = (gap * PER_NS).clamp(STEPS.0, STEPS.1);
            if gap * PER_NS > 2.0 * STEPS.1 {
                breaks.push((at + step / 2.0 + 4.0, gap));
            }
            at += step;
        }
        places.push(at);
    }
    (places, breaks)
}

impl Timeline {
    /// The picture.
    pub fn svg(&self) -> String {
        let shown = &self.passages[..self.passages.len().min(MOST)];
        let subtitle = match self.passages.len() - shown.len() {
            0 => self.subtitle.clone(),
            rest => format!("{}; {rest} later packets are not drawn", self.subtitle),
        };
        let mut moments: Vec<f64> = shown.iter().flat_map(|p| [p.begin, p.end]).collect();
        moments.sort_by(f64::total_cmp);
        moments.dedup();
        let top = HEAD + 34.0;
        let (places, breaks) = spread(&moments, top);
        let at = |moment: f64| {
            let rank = moments.partition_point(|other| *other < moment);
            places.get(rank).copied().unwrap_or(top)
        };
        let end = places.last().copied().unwrap_or(top);
        let height = end + 30.0;
        let mut svg = Svg::new(WIDTH, height, &self.title, &subtitle);
        let step = (WIDTH - LEFT - 70.0) / (self.lanes.len().max(2) - 1) as f64;
        let x = |lane: usize| LEFT + lane as f64 * step;
        for (nth, name) in self.lanes.iter().enumerate() {
            svg.line((x(nth), top - 6.0), (x(nth), end), GRID, 1.5);
            // Neighbours' names stand on two heights, so that they do not meet.
            let height = if nth % 2 == 0 { top - 24.0 } else { top - 10.0 };
            svg.styled(x(nth), height, name, Anchor::Middle, INK, 12.0, true);
        }
        let mut free = f64::MIN;
        for moment in &moments {
            let height = at(*moment);
            if height - free >= LINE {
                svg.styled(
                    LEFT - 14.0,
                    height + 4.0,
                    &moment_text(*moment),
                    Anchor::End,
                    SOFT,
                    11.0,
                    false,
                );
                free = height;
            }
        }
        for (height, gap) in breaks {
            let text = format!("⋮ {} without a packet on any link", span(gap));
            svg.styled(LEFT + 10.0, height, &text, Anchor::Start, SOFT, 11.0, false);
        }
        let mut below = vec![f64::MIN; self.lanes.len()];
        for passage in shown {
            let colour = COLOURS[passage.kind % COLOURS.len()];
            let (from, to) =
                ((x(passage.from), at(passage.begin)), (x(passage.to), at(passage.end)));
            svg.line(from, to, colour, 1.8);
            svg.dot(to, colour, false);
            let gap = passage.from.min(passage.to);
            let middle = ((from.0 + to.0) / 2.0, (from.1 + to.1) / 2.0 - 4.0);
            // Where labels would meet, the later one is left out: its line says that it is one more.
            if below.get(gap).is_some_and(|last| middle.1 - last >= 12.0) {
                svg.styled(middle.0, middle.1, &passage.label, Anchor::Middle, colour, 11.0, false);
                below[gap] = middle.1;
            }
        }
        svg.finish()
    }
}
