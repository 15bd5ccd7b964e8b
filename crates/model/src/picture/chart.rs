//! Lines over two axes, each labelled at its end.
//!
//! What was published stands as hollow circles in the colour of the line that models it, so that
//! the two are compared where they are.

use super::axis::{Axis, Laid};
use super::label::spread;
use super::svg::{Canvas, DIM, Font, GRID, INK, PAD, colour, dashed};

const WIDTH: f64 = 760.0;
const HEIGHT: f64 = 300.0;
/// Between the plot's edges and its outermost points.
const INSET: f64 = 8.0;
/// Of a label, at most.
const LABEL: f64 = 190.0;
const LINE: f64 = 16.0;

/// Series of points over two axes.
#[derive(Debug, Clone, PartialEq)]
pub struct Chart {
    /// The headline: what one sees.
    pub title: String,
    /// What is shown, under which conditions.
    pub subtitle: String,
    /// The axis of the points' first values, to the right.
    pub x: Axis,
    /// The axis of their second values, upwards.
    pub y: Axis,
    /// What is drawn. Points that an axis has no place for (zero on a logarithmic one) are left
    /// out.
    pub series: Vec<Series>,
}

/// A line, points, or both, in one colour with one label.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Series {
    /// What the legend calls it.
    pub name: String,
    /// A smaller line below the label. May be empty.
    pub note: String,
    /// What was modelled: joined by a line.
    pub line: Vec<(f64, f64)>,
    /// Points of the line to stress: solid circles.
    pub dots: Vec<(f64, f64)>,
    /// What was published: hollow circles.
    pub published: Vec<(f64, f64)>,
}

impl Series {
    /// A line of that name.
    pub fn line(name: impl Into<String>, line: Vec<(f64, f64)>) -> Series {
        Series { name: name.into(), line, ..Series::default() }
    }

    /// With a dot at each of its points.
    pub fn dotted(self) -> Series {
        Series { dots: self.line.clone(), ..self }
    }

    /// With what was published.
    pub fn published(self, published: Vec<(f64, f64)>) -> Series {
        Series { published, ..self }
    }

    fn points(&self) -> impl Iterator<Item = (f64, f64)> {
        self.line.iter().chain(&self.dots).chain(&self.published).copied()
    }
}

/// Where the plot is on the card.
struct Plot {
    x: Laid,
    y: Laid,
    left: f64,
    right: f64,
    top: f64,
    bottom: f64,
}

impl Plot {
    fn x(&self, value: f64) -> Option<f64> {
        Some(self.left + INSET + self.x.part(value)? * (self.right - self.left - 2.0 * INSET))
    }

    fn y(&self, value: f64) -> Option<f64> {
        Some(self.bottom - self.y.part(value)? * (self.bottom - self.top))
    }

    fn places(&self, points: &[(f64, f64)]) -> Vec<(f64, f64)> {
        points.iter().filter_map(|&(x, y)| self.x(x).zip(self.y(y))).collect()
    }
}

/// A series' label: its lines, and the point that it belongs to.
struct Label {
    number: usize,
    name: Vec<String>,
    note: Vec<String>,
    end: (f64, f64),
}

impl Label {
    fn height(&self) -> f64 {
        (self.name.len() + self.note.len()) as f64 * LINE + 4.0
    }
}

const NAME: Font = Font { size: 13.0, fill: INK, bold: true, anchor: super::svg::Anchor::Start };

impl Chart {
    /// The picture as an SVG document.
    pub fn svg(&self) -> String {
        let mut canvas = Canvas::new(&self.title, &self.subtitle, WIDTH);
        if self.series.iter().any(|series| !series.published.is_empty()) {
            key(&mut canvas);
        }
        let small = Font::new(12.0, DIM);
        let points = || self.series.iter().flat_map(Series::points);
        let x = self.x.lay(points().map(|point| point.0), false);
        let y = self.y.lay(points().map(|point| point.1), true);

        let note = Font::new(12.0, DIM);
        let lines = self
            .series
            .iter()
            .map(|series| (NAME.wrap(&series.name, LABEL), note.wrap(&series.note, LABEL)));
        let lines: Vec<(Vec<String>, Vec<String>)> = lines.collect();
        let widths = lines.iter().flat_map(|(name, more)| {
            let names = name.iter().map(|line| NAME.width(line));
            names.chain(more.iter().map(|line| note.width(line)))
        });
        let beside = widths.fold(0.0, f64::max);
        let tall = lines.iter().map(|(name, more)| (name.len() + more.len()) as f64 * LINE + 4.0);
        let ticks = y.ticks.iter().map(|tick| small.width(&tick.1)).fold(0.0, f64::max);
        let top = canvas.top + 34.0;
        let plot = Plot {
            left: PAD + ticks + 8.0,
            right: WIDTH - PAD - beside - 14.0,
            top,
            bottom: top + tall.sum::<f64>().max(HEIGHT),
            x,
            y,
        };
        plot.frame(&mut canvas);

        let mut labels = Vec::new();
        for (number, (series, (name, note))) in self.series.iter().zip(lines).enumerate() {
            let line = plot.places(&series.line);
            let dash = if dashed(number) { " stroke-dasharray=\"7 4\"" } else { "" };
            canvas.polyline(&line, colour(number), 2.2, dash);
            let published = plot.places(&series.published);
            let ends = [line.last(), published.last()].into_iter().flatten();
            if let Some(&end) = ends.reduce(|a, b| if b.0 > a.0 { b } else { a }) {
                labels.push(Label { number, name, note, end });
            }
        }
        // Over all lines.
        for (number, series) in self.series.iter().enumerate() {
            for at in plot.places(&series.dots) {
                canvas.circle(at, 3.2, colour(number), "#fff");
            }
            for at in plot.places(&series.published) {
                canvas.circle(at, 4.2, "#fff", colour(number));
            }
        }
        if labels.is_empty() {
            let middle = ((plot.left + plot.right) / 2.0, (plot.top + plot.bottom) / 2.0);
            canvas.text(middle.0, middle.1, "no data", small.middle());
        }
        plot.labels(&mut canvas, &labels);
        canvas.finish(plot.bottom + 44.0)
    }
}

/// What lines and circles are, once for all series.
fn key(canvas: &mut Canvas) {
    let font = Font::new(12.0, DIM);
    canvas.top += 20.0;
    let y = canvas.top - 8.0;
    canvas.line((PAD, y - 4.0), (PAD + 22.0, y - 4.0), DIM, 2.2);
    canvas.text(PAD + 28.0, y, "modelled", font);
    canvas.circle((PAD + 112.0, y - 4.0), 4.2, "#fff", DIM);
    canvas.text(PAD + 122.0, y, "published", font);
}

impl Plot {
    fn frame(&self, canvas: &mut Canvas) {
        let font = Font::new(12.0, DIM);
        canvas.text(PAD, self.top - 14.0, &self.y.caption, font);
        for (value, text) in &self.y.ticks {
            let Some(y) = self.y(*value) else { continue };
            canvas.line((self.left, y), (self.right, y), GRID, 1.0);
            canvas.text(self.left - 8.0, y + 4.0, text, font.end());
        }
        canvas.line((self.left, self.bottom), (self.right, self.bottom), INK, 1.0);
        let mut free = f64::NEG_INFINITY;
        for (value, text) in &self.x.ticks {
            let Some(x) = self.x(*value) else { continue };
            canvas.line((x, self.bottom), (x, self.bottom + 5.0), INK, 1.0);
            let half = font.width(text) / 2.0;
            if x - half >= free {
                canvas.text(x, self.bottom + 19.0, text, font.middle());
                free = x + half + 6.0;
            }
        }
        let middle = (self.left + self.right) / 2.0;
        canvas.text(middle, self.bottom + 40.0, &self.x.caption, font.middle());
    }

    fn labels(&self, canvas: &mut Canvas, labels: &[Label]) {
        let wanted: Vec<(f64, f64)> =
            labels.iter().map(|label| (label.end.1, label.height())).collect();
        let centres = spread(&wanted, self.top - 10.0, self.bottom + 10.0);
        let x = self.right + 10.0;
        for (label, centre) in labels.iter().zip(centres) {
            let (from, fill) = (label.end, colour(label.number));
            if x - from.0 > 24.0 || (centre - from.1).abs() > 8.0 {
                let bend = (self.right - 4.0).max(from.0 + 6.0);
                let leader = [(from.0 + 6.0, from.1), (bend, from.1), (x - 4.0, centre)];
                canvas.polyline(&leader, fill, 0.8, " opacity=\"0.6\"");
            }
            let mut y = centre - label.height() / 2.0 + 14.0;
            for line in &label.name {
                canvas.text(x, y, line, Font { fill, ..NAME });
                y += LINE;
            }
            for line in &label.note {
                canvas.text(x, y, line, Font::new(12.0, DIM));
                y += LINE;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::{Scale, Unit};
    use super::*;

    #[test]
    fn every_series_is_labelled_and_text_is_escaped() {
        let series =
            Series::line("a < b & \"c\"", vec![(1.0, 2.0), (1024.0, f64::NAN), (0.0, 3.0)]);
        let chart = Chart {
            title: "<headline>".into(),
            subtitle: "it's\u{7}".into(),
            x: Axis::new("size", Unit::Bytes, Scale::Log2),
            y: Axis::new("time", Unit::Nanoseconds, Scale::Linear),
            series: vec![series.published(vec![(64.0, 2.5)]), Series::line("empty", Vec::new())],
        };
        let svg = chart.svg();
        let document = roxmltree::Document::parse(&svg).expect("well-formed");
        let root = document.root_element();
        assert_eq!(root.attribute("aria-label"), Some("<headline>. it's"));
        assert_eq!(root.attribute("role"), Some("img"));
        let texts: Vec<&str> = root.descendants().filter_map(|node| node.text()).collect();
        assert!(texts.contains(&"a < b & \"c\"") && texts.contains(&"published"), "{texts:?}");
        assert!(!svg.contains("NaN") && !svg.contains("inf"), "{svg}");
        assert_eq!(svg, chart.svg());
    }
}
