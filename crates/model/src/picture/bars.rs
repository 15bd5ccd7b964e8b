//! Published and modelled values beside each other.

use super::{Anchor, COLOURS, HEAD, INK, SOFT, Svg, short, width_of};

/// A value twice.
#[derive(Debug, Clone, PartialEq)]
pub struct Pair {
    /// What it is.
    pub name: String,
    /// As published.
    pub published: f64,
    /// As modelled.
    pub modelled: f64,
    /// Of both.
    pub unit: String,
}

/// Pairs, one below the other. Each pair has its own scale: what is compared is its two bars.
#[derive(Debug, Clone, PartialEq)]
pub struct Bars {
    /// What one sees.
    pub title: String,
    /// The rest that is to be known.
    pub subtitle: String,
    /// The pairs.
    pub pairs: Vec<Pair>,
}

const WIDTH: f64 = 760.0;
const ROW: f64 = 38.0;
const BAR: f64 = 13.0;

impl Bars {
    /// The picture.
    pub fn svg(&self) -> String {
        let height = HEAD + ROW * self.pairs.len() as f64 + 20.0;
        let mut svg = Svg::new(WIDTH, height, &self.title, &self.subtitle);
        let names = self.pairs.iter().map(|pair| width_of(&pair.name)).fold(80.0, f64::max);
        let left = 20.0 + names.min(WIDTH / 2.0) + 12.0;
        let room = WIDTH - left - 170.0;
        for (nth, pair) in self.pairs.iter().enumerate() {
            let top = HEAD + ROW * nth as f64;
            svg.text(left - 12.0, top + 18.0, &pair.name, Anchor::End, INK);
            let most = pair.published.abs().max(pair.modelled.abs()).max(f64::MIN_POSITIVE);
            let values =
                [(pair.published, SOFT, "published"), (pair.modelled, COLOURS[0], "modelled")];
            for (line, (value, colour, what)) in values.into_iter().enumerate() {
                let at = top + line as f64 * (BAR + 1.0);
                let length = value.abs() / most * room;
                svg.area((left, at), (length, BAR), colour, "none");
                // The words stand at the first pair only; below it the colours are known.
                let word = if nth == 0 { format!(" {what}") } else { String::new() };
                let text = format!("{} {}{word}", short(value), pair.unit);
                svg.text(left + length + 6.0, at + 11.0, &text, Anchor::Start, colour);
            }
        }
        svg.finish()
    }
}
