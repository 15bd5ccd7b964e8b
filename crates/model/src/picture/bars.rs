//! Published and modelled values beside each other.

use super::axis::digits;
use super::svg::{Canvas, DIM, Font, INK, PAD, Rect, colour};

/// A published value beside the modelled one.
#[derive(Debug, Clone, PartialEq)]
pub struct Pair {
    /// What both values are of, in a few words.
    pub name: String,
    /// The value that was published, in `unit`.
    pub published: f64,
    /// The value that the model gives, in `unit`.
    pub modelled: f64,
    /// The unit of both values, as it is printed.
    pub unit: String,
}

/// Pairs, one below the other. Each pair has its own scale: what is compared is its two bars.
#[derive(Debug, Clone, PartialEq)]
pub struct Bars {
    /// What the picture shows, as its heading.
    pub title: String,
    /// The rest that is to be known.
    pub subtitle: String,
    /// The pairs, from top to bottom.
    pub pairs: Vec<Pair>,
}

const WIDTH: f64 = 760.0;
/// Of a pair, besides its name's further lines.
const ROW: f64 = 40.0;
const BAR: f64 = 11.0;
const LINE: f64 = 16.0;
/// Of names, at most.
const NAME: f64 = 240.0;
/// Of the last column.
const OFF: f64 = 56.0;

impl Bars {
    /// The picture as an SVG document.
    pub fn svg(&self) -> String {
        let mut canvas = Canvas::new(&self.title, &self.subtitle, WIDTH);
        let (name, value) = (Font::new(13.0, INK).end(), Font::new(12.0, DIM));
        let names: Vec<Vec<String>> =
            self.pairs.iter().map(|pair| name.wrap(&pair.name, NAME)).collect();
        let widest = names.iter().flatten().map(|line| name.width(line)).fold(60.0, f64::max);
        let left = PAD + widest + 12.0;
        let texts: Vec<[String; 2]> = self.pairs.iter().enumerate().map(texts).collect();
        let beside =
            texts.iter().flatten().map(|text| value.bold().width(text)).fold(0.0, f64::max);
        let room = WIDTH - PAD - OFF - beside - 8.0 - left;
        let mut top = canvas.top + 14.0;
        canvas.text(WIDTH - PAD, top + 4.0, "off by", value.end());
        for (nth, (pair, (lines, texts))) in
            self.pairs.iter().zip(names.iter().zip(&texts)).enumerate()
        {
            top += if nth == 0 { 12.0 } else { 0.0 };
            let most = pair.published.abs().max(pair.modelled.abs()).max(f64::MIN_POSITIVE);
            let height = ROW.max(lines.len() as f64 * LINE + 8.0);
            let middle = top + height / 2.0;
            let first = middle + 4.5 - (lines.len() as f64 - 1.0) * LINE / 2.0;
            for (nth, line) in lines.iter().enumerate() {
                canvas.text(left - 12.0, first + nth as f64 * LINE, line, name);
            }
            let modelled = value.bold();
            let modelled = Font { fill: colour(0), ..modelled };
            let bars = [
                (pair.published, "#fff", DIM, value, -BAR - 1.5),
                (pair.modelled, colour(0), colour(0), modelled, 1.5),
            ];
            for ((of, fill, stroke, font, down), text) in bars.into_iter().zip(texts) {
                let length = (of.abs() / most * room).max(1.0);
                let bar = Rect::new(left + 0.5, middle + down, length, BAR);
                canvas.rect(bar, fill, stroke, "");
                canvas.text(left + length + 8.0, middle + down + 10.0, text, font);
            }
            canvas.text(WIDTH - PAD, middle + 4.5, &off(pair), value.end());
            top += height;
        }
        canvas.finish(top)
    }
}

/// Both values; the first pair's say which is which.
fn texts((nth, pair): (usize, &Pair)) -> [String; 2] {
    let text = |value: f64, which: &str| {
        let which = if nth == 0 { which } else { "" };
        format!("{} {}{which}", digits(value), pair.unit)
    };
    [text(pair.published, " published"), text(pair.modelled, " modelled")]
}

/// How far the model is from what was published.
fn off(pair: &Pair) -> String {
    let share = (pair.modelled / pair.published - 1.0) * 100.0;
    match share {
        share if !share.is_finite() => String::new(),
        share if share.abs() < 0.05 => "0 %".to_owned(),
        share => format!("{}{:.1} %", if share > 0.0 { "+" } else { "−" }, share.abs()),
    }
}
