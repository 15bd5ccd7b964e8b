//! Two values of each case on one logarithmic scale, as bars from what would be ideal.

use super::axis::digits;
use super::svg::{Canvas, DIM, FRAME, Font, INK, PAD, Rect, colour};

/// A case with its two values.
#[derive(Debug, Clone, PartialEq)]
pub struct Compared {
    /// What the values are of.
    pub name: String,
    /// The first value, above 0.
    pub first: f64,
    /// The second value of the pair.
    pub second: f64,
}

/// Cases, one below the other, all on one scale.
#[derive(Debug, Clone, PartialEq)]
pub struct ComparisonPicture {
    /// What the picture shows, as its heading.
    pub title: String,
    /// What the values are.
    pub subtitle: String,
    /// What the first and the second value are called.
    pub names: [&'static str; 2],
    /// The value at which bars begin: what would be ideal.
    pub ideal: f64,
    /// The cases, from top to bottom.
    pub cases: Vec<Compared>,
}

const WIDTH: f64 = 760.0;
const ROW: f64 = 36.0;
const BAR: f64 = 11.0;
/// Of names, at most.
const NAME: f64 = 230.0;
/// Of a value beside its bar.
const VALUE: f64 = 64.0;
/// Powers of two to either side at least.
const LEAST: f64 = 1.0;

impl ComparisonPicture {
    /// The picture as an SVG document.
    pub fn svg(&self) -> String {
        let mut canvas = Canvas::new(&self.title, &self.subtitle, WIDTH);
        let name = Font::new(13.0, INK).end();
        let names: Vec<String> = self.cases.iter().map(|case| name.cut(&case.name, NAME)).collect();
        let widest = names.iter().map(|text| name.width(text)).fold(60.0, f64::max);
        let left = PAD + widest + 12.0 + VALUE;
        let power = |value: f64| (value.max(f64::MIN_POSITIVE) / self.ideal).log2();
        let values = self.cases.iter().flat_map(|case| [case.first, case.second]);
        let (low, high) = values.map(power).fold((-LEAST, LEAST), |(low, high), at| {
            (low.min(at.max(-12.0)), high.max(at.min(12.0)))
        });
        let place = |value: f64| {
            let part = (power(value).clamp(low, high) - low) / (high - low);
            left + part * (WIDTH - PAD - VALUE - left)
        };
        let (begin, middle) = (canvas.top + 16.0, place(self.ideal));
        let small = Font::new(12.0, DIM);
        canvas.text(middle, begin - 2.0, &format!("ideal: {}", digits(self.ideal)), small.middle());
        let mut top = begin + 8.0;
        let bottom = top + ROW * self.cases.len() as f64;
        canvas.line((middle, top - 4.0), (middle, bottom), FRAME, 1.5);
        for (nth, (case, text)) in self.cases.iter().zip(&names).enumerate() {
            let centre = top + ROW / 2.0;
            canvas.text(left - VALUE - 12.0, centre + 4.5, text, name);
            let bold = Font { fill: colour(0), ..small.bold() };
            let bars = [
                (case.first, "#fff", DIM, small, -BAR - 1.5),
                (case.second, colour(0), colour(0), bold, 1.5),
            ];
            for ((value, fill, stroke, font, down), which) in bars.into_iter().zip(self.names) {
                let end = place(value);
                let bar =
                    Rect::new(middle.min(end), centre + down, (end - middle).abs().max(1.5), BAR);
                canvas.rect(bar, fill, stroke, "");
                let which = if nth == 0 { format!(" {which}") } else { String::new() };
                let label = format!("{}{which}", digits(value));
                match end < middle && nth > 0 {
                    true => canvas.text(end - 6.0, centre + down + 10.0, &label, font.end()),
                    false => {
                        canvas.text(middle.max(end) + 6.0, centre + down + 10.0, &label, font);
                    }
                }
            }
            top += ROW;
        }
        canvas.finish(bottom)
    }
}
