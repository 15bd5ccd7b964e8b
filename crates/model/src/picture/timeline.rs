//! A transaction, hop by hop: parts from left to right, time downwards. A packet slants from one
//! part to the next while it is on the link, and a bar shows how long it stays in a part.
//!
//! Time has no scale: bursts are pulled apart so that they can be read, long waits are shortened.
//! So whatever takes time has its span written beside it.

use super::axis::Unit;
use super::label::TakenPlaces;
use super::svg::{Canvas, DIM, FRAME, Font, INK, PAD, Rect, colour};

/// A packet on a link.
#[derive(Debug, Clone, PartialEq)]
pub struct TimelinePacket {
    /// From which column, an index of the timeline's.
    pub from: usize,
    /// The index of the part that it comes to.
    pub to: usize,
    /// When its first bit went, in nanoseconds.
    pub begin: f64,
    /// When its last bit came.
    pub end: f64,
    /// What it is: `MRd 512 B`.
    pub label: String,
    /// Its kind: requests, writes and completions have colours of their own.
    pub kind: usize,
}

/// A job's packets from part to part, over time.
#[derive(Debug, Clone, PartialEq)]
pub struct Timeline {
    /// What the picture shows, as its heading.
    pub title: String,
    /// The rest that is to be known.
    pub subtitle: String,
    /// The parts, in the order of the way.
    pub columns: Vec<String>,
    /// What happened, by time.
    pub passages: Vec<TimelinePacket>,
}

/// Pixels from one part to the next.
const COLUMN: f64 = 152.0;
/// Room for moments, and for half a column's name on either side.
const LEFT: f64 = 128.0;
const RIGHT: f64 = 62.0;
const LEAST_WIDTH: f64 = 640.0;
/// Between two moments: the least and the most that they are apart, and pixels per nanosecond.
const STEPS: (f64, f64) = (14.0, 34.0);
const PER_NS: f64 = 0.1;
/// Packets of one kind on one link that follow each other this closely are one burst, in
/// nanoseconds.
const BURST: f64 = 150.0;
/// Bursts that are drawn at most; more cannot be read.
const MOST: usize = 120;

/// Packets that are drawn as one.
struct Burst<'a> {
    first: &'a TimelinePacket,
    last: &'a TimelinePacket,
    many: usize,
}

impl Burst<'_> {
    fn text(&self) -> String {
        let took = Unit::Nanoseconds.text(self.last.end - self.first.begin);
        match self.many {
            1 => format!("{} · {took}", self.first.label),
            many => format!("{many} × {} · {took}", self.first.label),
        }
    }

    /// Of these, the one whose packets this one carries on, or answers: the last of the same
    /// packets that came to where it begins; without any, the last packet of all, unless another
    /// burst has left from there since.
    fn before<'a, 'b>(&self, all: &'a [Burst<'b>]) -> Option<&'a Burst<'b>> {
        let (here, begin) = (self.first.from, self.first.begin);
        let comes = |burst: &&Burst<'_>| burst.first.to == here && burst.first.end <= begin;
        let same = |burst: &&Burst<'_>| {
            burst.first.label == self.first.label && burst.first.from != self.first.to
        };
        let last = |a: &&Burst<'_>, b: &&Burst<'_>| a.first.end.total_cmp(&b.first.end);
        all.iter().filter(comes).filter(same).max_by(last).or_else(|| {
            let came = all.iter().filter(comes).max_by(last)?;
            let since = came.first.end..begin;
            let left =
                |burst: &Burst<'_>| burst.first.from == here && since.contains(&burst.first.begin);
            (!all.iter().any(left)).then_some(came)
        })
    }
}

/// Packets as bursts, by time.
fn bursts(passages: &[TimelinePacket]) -> Vec<Burst<'_>> {
    let mut order: Vec<&TimelinePacket> = passages.iter().collect();
    order.sort_by(|a, b| a.begin.total_cmp(&b.begin));
    let mut bursts: Vec<Burst<'_>> = Vec::new();
    for passage in order {
        let same = |burst: &&mut Burst<'_>| {
            let last = burst.last;
            (last.from, last.to, &last.label) == (passage.from, passage.to, &passage.label)
        };
        match bursts.iter_mut().rev().find(same) {
            Some(burst) if passage.begin - burst.last.begin <= BURST => {
                (burst.last, burst.many) = (passage, burst.many + 1);
            }
            _ => bursts.push(Burst { first: passage, last: passage, many: 1 }),
        }
    }
    bursts
}

/// A packet's delay in a part: from where to where, and how long.
type Stay = ((f64, f64), (f64, f64), String);

/// Moments, and where they stand.
struct Times {
    moments: Vec<f64>,
    places: Vec<f64>,
}

impl Times {
    fn of(bursts: &[Burst<'_>], top: f64) -> Times {
        let ends = |burst: &Burst<'_>| {
            [burst.first.begin, burst.first.end, burst.last.begin, burst.last.end]
        };
        let mut moments: Vec<f64> = bursts.iter().flat_map(ends).collect();
        moments.sort_by(f64::total_cmp);
        moments.dedup();
        let steps =
            moments.windows(2).map(|pair| ((pair[1] - pair[0]) * PER_NS).clamp(STEPS.0, STEPS.1));
        let places = std::iter::once(top).chain(steps.scan(top, |at, step| {
            *at += step;
            Some(*at)
        }));
        Times { places: places.collect(), moments }
    }

    fn at(&self, moment: f64) -> f64 {
        let rank = self.moments.partition_point(|other| *other < moment);
        self.places[rank.min(self.places.len() - 1)]
    }
}

impl Timeline {
    /// The picture. Of very many packets the first are drawn.
    pub fn svg(&self) -> String {
        let mut bursts = bursts(&self.passages);
        let left_out: usize = bursts.iter().skip(MOST).map(|burst| burst.many).sum();
        bursts.truncate(MOST);
        let subtitle = match left_out {
            0 => self.subtitle.clone(),
            rest => format!("{}; {rest} later packets are not drawn", self.subtitle),
        };
        let columns = self.columns.len().max(1) as f64;
        let width = (LEFT + (columns - 1.0) * COLUMN + RIGHT + PAD).max(LEAST_WIDTH);
        let mut canvas = Canvas::new(&self.title, &subtitle, width);
        let top = canvas.top + 46.0;
        let times = Times::of(&bursts, top);
        let bottom = times.places.last().copied().unwrap_or(top) + 22.0;
        let x = |column: usize| LEFT + column as f64 * COLUMN;
        let name = Font::new(12.0, INK).bold().middle();
        for (column, text) in self.columns.iter().enumerate() {
            canvas.line((x(column), top - 10.0), (x(column), bottom), FRAME, 1.5);
            canvas.text(x(column), top - 18.0, &name.cut(text, COLUMN - 8.0), name);
        }
        moments(&mut canvas, &times, &bursts);

        let mut places = TakenPlaces::default();
        for column in 0..self.columns.len() {
            places.take(Rect::around(x(column), top - 22.0, COLUMN, 14.0));
            places.take_line((x(column), top - 10.0), (x(column), bottom), 2.0);
        }
        let stays = bursts.iter().filter_map(|burst| {
            let before = burst.before(&bursts)?;
            let at = x(burst.first.from);
            let (from, to) = (times.at(before.first.end), times.at(burst.first.begin));
            let took = Unit::Nanoseconds.text(burst.first.begin - before.first.end);
            Some(((at, from), (at, to), took))
        });
        let mut stays: Vec<Stay> = stays.filter(|delay| delay.1.1 > delay.0.1).collect();
        stays.dedup();
        for (from, to, _) in &stays {
            canvas.line(*from, *to, "#94a3b8", 5.0);
            places.take_line(*from, *to, 6.0);
        }
        for burst in &bursts {
            let way = |passage: &TimelinePacket| {
                let (from, to) = (x(passage.from), x(passage.to));
                ((from, times.at(passage.begin)), (to, times.at(passage.end)))
            };
            let (first, last) = (way(burst.first), way(burst.last));
            let ink = colour(burst.first.kind);
            if burst.many > 1 {
                canvas.polygon(&[first.0, first.1, last.1, last.0], ink, 0.14);
            }
            for (from, to) in [first, last].into_iter().take(burst.many) {
                canvas.line(from, to, ink, 1.8);
                canvas.circle(to, 2.6, ink, ink);
                places.take_line(from, to, 3.0);
            }
        }
        // Labels are never over one another; where there is no room at all, over a line.
        let font = Font::new(11.0, DIM);
        for (from, to, text) in &stays {
            let wide = font.width(text) + 4.0;
            let sides = [from.0 + 6.0 + wide / 2.0, from.0 - 6.0 - wide / 2.0];
            let middle = (from.1 + to.1) / 2.0;
            write(&mut canvas, &mut places, font, text, &sides.map(|side| (side, middle)));
        }
        for burst in &bursts {
            let font = Font::new(11.0, colour(burst.first.kind));
            let at = |passage: &TimelinePacket, part: f64| {
                let (from, to) = (x(passage.from), x(passage.to));
                let (begin, end) = (times.at(passage.begin), times.at(passage.end));
                (from + (to - from) * part, begin + (end - begin) * part)
            };
            let points = parts(burst.first).into_iter().flat_map(|part| {
                let (above, below) = (at(burst.first, part), at(burst.last, part));
                let middle = (above.1 + below.1) / 2.0;
                [(above.0, middle), (above.0, above.1 - 9.0), (below.0, below.1 + 9.0)]
            });
            let points: Vec<(f64, f64)> = points.collect();
            write(&mut canvas, &mut places, font, &burst.text(), &points);
        }
        canvas.finish(bottom)
    }
}

/// Where along a passage its label may stand: between columns first.
fn parts(passage: &TimelinePacket) -> Vec<f64> {
    let columns = passage.from.abs_diff(passage.to).max(1);
    let middles = (0..columns).map(|column| (column as f64 + 0.5) / columns as f64);
    middles.chain([0.4, 0.6, 0.3, 0.7]).collect()
}

/// When bursts begin, at the left, as far as there is room.
fn moments(canvas: &mut Canvas, times: &Times, bursts: &[Burst<'_>]) {
    let font = Font::new(11.0, DIM).end();
    let mut free = f64::MIN;
    for moment in bursts.iter().map(|burst| burst.first.begin) {
        let at = times.at(moment);
        if at >= free {
            // To 10 ns, so that neighbours differ.
            let text = match moment {
                ns if ns < 1e3 => Unit::Nanoseconds.text(ns),
                ns => format!("{:.2} us", ns / 1e3),
            };
            canvas.text(LEFT - 58.0, at + 4.0, &text, font);
            free = at + 14.0;
        }
    }
}

/// A text at the first of the points where it is free, or further and further from them.
fn write(
    canvas: &mut Canvas,
    places: &mut TakenPlaces,
    font: Font,
    text: &str,
    points: &[(f64, f64)],
) {
    let wide = font.width(text) + 4.0;
    let away = [0.0, -4.0, 4.0, -8.0, 8.0, -12.0, 12.0, -18.0, 18.0, -24.0, 24.0];
    let candidates = away
        .into_iter()
        .flat_map(|down| points.iter().map(move |&(x, y)| Rect::around(x, y + down, wide, 13.0)));
    let all: Vec<Rect> = candidates.collect();
    let clear = places.place(all.iter().copied());
    let Some(at) = clear.or_else(|| places.place_over_lines(all)) else { return };
    if clear.is_none() {
        canvas.rect(at, "#fff", "none", " fill-opacity=\"0.8\"");
    }
    canvas.text(at.x + at.width / 2.0, at.y + 10.5, text, font.middle());
}

#[cfg(test)]
mod tests {
    use super::*;

    fn passage(from: usize, to: usize, begin: f64, label: &str) -> TimelinePacket {
        TimelinePacket { from, to, begin, end: begin + 5.0, label: label.into(), kind: 0 }
    }

    #[test]
    fn packets_in_a_row_are_one_burst_that_stays_where_it_came_to() {
        let writes = (0..4).flat_map(|nth| {
            let begin = 40.0 * f64::from(nth);
            [passage(0, 1, begin, "MWr 256 B"), passage(1, 2, begin + 105.0, "MWr 256 B")]
        });
        let passages: Vec<TimelinePacket> =
            writes.chain([passage(0, 1, 900.0, "MWr 256 B")]).collect();
        let bursts = bursts(&passages);
        let shape: Vec<_> = bursts.iter().map(|burst| (burst.first.from, burst.many)).collect();
        assert_eq!(shape, [(0, 4), (1, 4), (0, 1)]);
        assert_eq!(bursts[0].text(), "4 × MWr 256 B · 125 ns");
        let before = bursts[1].before(&bursts).expect("it came from somewhere");
        assert_eq!((before.first.from, bursts[1].first.begin - before.first.end), (0, 100.0));
        assert!(bursts[0].before(&bursts).is_none());
        // An answer stays too; what leaves after it does not.
        let passages = [
            passage(0, 1, 0.0, "MRd 64 B"),
            passage(1, 0, 50.0, "CplD 64 B"),
            passage(1, 0, 400.0, "MWr 4 B"),
        ];
        let bursts = super::bursts(&passages);
        assert!(bursts[1].before(&bursts).is_some() && bursts[2].before(&bursts).is_none());
    }
}
