//! Lines and points over an axis.

use super::{Anchor, COLOURS, GRID, HEAD, INK, SOFT, Svg, apart, short, width_of};
use crate::time::Time;

/// What an axis counts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Scale {
    /// Evenly, from zero.
    Linear,
    /// By powers of ten.
    Log,
    /// Bytes, by powers of two.
    Bytes,
    /// Nanoseconds, by powers of ten.
    Spans,
}

/// A line, or points.
#[derive(Debug, Clone, PartialEq)]
pub struct Series {
    /// What it is called, beside its end.
    pub name: String,
    /// Its points, from left to right.
    pub points: Vec<(f64, f64)>,
    /// Only points, hollow: measured values beside a modelled line. They have the colour of the line
    /// before.
    pub measured: bool,
}

/// A chart.
#[derive(Debug, Clone, PartialEq)]
pub struct Chart {
    /// What one sees.
    pub title: String,
    /// What the axes count.
    pub subtitle: String,
    /// The axis to the right.
    pub x: Scale,
    /// The axis upwards.
    pub y: Scale,
    /// The lines.
    pub series: Vec<Series>,
}

const WIDTH: f64 = 760.0;
const HEIGHT: f64 = 420.0;
const LEFT: f64 = 64.0;
const BOTTOM: f64 = 40.0;
const LABEL_GAP: f64 = 17.0;
/// From the right edge on, a line's end is too far for a label there.
const FAR: f64 = 60.0;

/// Values and where they stand.
struct Axis {
    scale: Scale,
    least: f64,
    most: f64,
    from: f64,
    to: f64,
}

impl Axis {
    fn new(scale: Scale, values: impl Iterator<Item = f64>, (from, to): (f64, f64)) -> Axis {
        let mut least = f64::MAX;
        let mut most = f64::MIN;
        for value in values.filter(|value| value.is_finite()) {
            (least, most) = (least.min(value), most.max(value));
        }
        if least > most {
            (least, most) = (0.0, 1.0);
        }
        if scale == Scale::Linear {
            (least, most) = (least.min(0.0), if most > 0.0 { most * 1.06 } else { 1.0 });
        } else {
            least = least.max(1e-3);
            most = most.max(least * 1.01);
        }
        Axis { scale, least, most, from, to }
    }

    fn at(&self, value: f64) -> f64 {
        let share = match self.scale {
            Scale::Linear => (value - self.least) / (self.most - self.least),
            _ => (value.max(self.least) / self.least).ln() / (self.most / self.least).ln(),
        };
        self.from + share * (self.to - self.from)
    }

    fn ticks(&self) -> Vec<(f64, String)> {
        match self.scale {
            Scale::Linear => {
                let step = round_step((self.most - self.least) / 5.0);
                let count = (self.most / step).floor() as i64;
                let first = (self.least / step).ceil() as i64;
                (first..=count).map(|n| (n as f64 * step, short(n as f64 * step))).collect()
            }
            Scale::Bytes => {
                let (first, last) =
                    (self.least.log2().ceil() as i32, self.most.log2().floor() as i32);
                let step = ((last - first) / 7 + 1).max(1) as usize;
                (first..=last).step_by(step).map(|n| (2f64.powi(n), bytes(2f64.powi(n)))).collect()
            }
            Scale::Log | Scale::Spans => {
                let name = |value: f64| match self.scale {
                    Scale::Spans => span(value),
                    _ => short(value),
                };
                let (first, last) =
                    (self.least.log10().floor() as i32, self.most.log10().ceil() as i32);
                let fine: &[f64] = if last - first <= 3 { &[1.0, 2.0, 5.0] } else { &[1.0] };
                let all = (first..=last).flat_map(|n| fine.iter().map(move |f| f * 10f64.powi(n)));
                let inside = |value: &f64| (self.least * 0.999..=self.most * 1.001).contains(value);
                all.filter(inside).map(|value| (value, name(value))).collect()
            }
        }
    }
}

/// 1, 2 or 5 times a power of ten.
fn round_step(rough: f64) -> f64 {
    let power = 10f64.powf(rough.log10().floor());
    let times = [1.0, 2.0, 5.0, 10.0].into_iter().find(|times| times * power >= rough);
    times.unwrap_or(10.0) * power
}

/// Bytes, as people write them.
pub fn bytes(value: f64) -> String {
    match value {
        1073741824.0.. => format!("{} GiB", short(value / 1073741824.0)),
        1048576.0.. => format!("{} MiB", short(value / 1048576.0)),
        1024.0.. => format!("{} KiB", short(value / 1024.0)),
        _ => format!("{} B", short(value)),
    }
}

/// Nanoseconds, as people write them.
pub fn span(ns: f64) -> String {
    match ns {
        1e6.. => format!("{} ms", short(ns / 1e6)),
        1e3.. => format!("{} us", short(ns / 1e3)),
        _ => format!("{} ns", short(ns)),
    }
}

impl Chart {
    /// Distributions of latencies: what share of all does not exceed a span.
    pub fn distributions(title: &str, of: &[(String, Vec<(Time, f64)>)]) -> Chart {
        let series = of.iter().map(|(name, points)| {
            let first = points.first().map(|(span, _)| (span.ns(), 0.0));
            let points = points.iter().map(|(span, share)| (span.ns(), share * 100.0));
            let points = first.into_iter().chain(points).collect();
            Series { name: name.clone(), points, measured: false }
        });
        Chart {
            title: title.to_owned(),
            subtitle: "share of jobs, in %, that take no longer than a time".to_owned(),
            x: Scale::Spans,
            y: Scale::Linear,
            series: series.collect(),
        }
    }

    /// The picture.
    pub fn svg(&self) -> String {
        let mut svg = Svg::new(WIDTH, HEIGHT, &self.title, &self.subtitle);
        let longest = self.series.iter().filter(|series| !series.measured);
        let labels = longest.map(|series| width_of(&series.name)).fold(0.0, f64::max);
        let right = (WIDTH - labels - 30.0).max(WIDTH / 2.0);
        let (top, bottom) = (HEAD + 12.0, HEIGHT - BOTTOM);
        let points = || self.series.iter().flat_map(|series| series.points.iter().copied());
        let x = Axis::new(self.x, points().map(|point| point.0), (LEFT, right));
        let y = Axis::new(self.y, points().map(|point| point.1), (bottom, top));
        for (value, name) in y.ticks() {
            let at = y.at(value);
            svg.line((LEFT, at), (right, at), GRID, 1.0);
            svg.text(LEFT - 8.0, at + 4.5, &name, Anchor::End, SOFT);
        }
        for (value, name) in x.ticks() {
            let at = x.at(value);
            svg.line((at, bottom), (at, bottom + 5.0), SOFT, 1.0);
            svg.text(at, bottom + 20.0, &name, Anchor::Middle, SOFT);
        }
        svg.line((LEFT, bottom), (right, bottom), INK, 1.2);
        let (mut ends, mut inner) = (Vec::new(), Vec::new());
        let mut colour = 0;
        for (nth, series) in self.series.iter().enumerate() {
            if !series.measured && nth > 0 {
                colour += 1;
            }
            let ink = COLOURS[colour % COLOURS.len()];
            let places: Vec<(f64, f64)> =
                series.points.iter().map(|(a, b)| (x.at(*a), y.at(*b))).collect();
            if series.measured {
                places.iter().for_each(|at| svg.dot(*at, ink, true));
            } else {
                svg.path(&places, ink, 2.2);
                match places.last() {
                    Some(end) if end.0 > right - FAR => ends.push((*end, &series.name, ink)),
                    // A line that ends before the others is named at its middle.
                    Some(end) => {
                        let half = (places[0].1 + end.1) / 2.0;
                        let near = |at: &&(f64, f64)| ((at.1 - half).abs() * 10.0) as u64;
                        let at = places.iter().min_by_key(near).unwrap_or(end);
                        inner.push((*at, &series.name, ink));
                    }
                    None => {}
                }
            }
        }
        let heights: Vec<f64> = inner.iter().map(|label| label.0.1).collect();
        let heights = apart(&heights, LABEL_GAP, (top, bottom));
        for ((at, name, ink), height) in inner.iter().zip(heights) {
            svg.text(at.0 + 9.0, height + 4.5, name, Anchor::Start, ink);
        }
        let heights: Vec<f64> = ends.iter().map(|end| end.0.1).collect();
        let heights = apart(&heights, LABEL_GAP, (top, bottom));
        for ((end, name, ink), height) in ends.iter().zip(heights) {
            svg.line(*end, (right + 6.0, height), ink, 0.8);
            svg.text(right + 10.0, height + 4.5, name, Anchor::Start, ink);
        }
        svg.finish()
    }
}
