//! Pictures of results, as SVG: data in, text out.
//!
//! Labels stand at what they name, so that no legend must be searched; numbers have few digits; colours
//! are those of Okabe and Ito, which people who confuse red and green can tell apart. Pictures have a
//! white ground of their own, and the same data gives the same bytes.
//!
//! * [`chart`]: lines and points over an axis of sizes or times.
//! * [`bars`]: published and modelled values beside each other.
//! * [`diagram`]: a rack's links and how busy they are.
//! * [`timeline`]: a transaction, hop by hop.

pub mod bars;
pub mod chart;
pub mod diagram;
pub mod timeline;

use std::fmt::Write;

/// Colours of series, in their order.
pub(crate) const COLOURS: [&str; 6] =
    ["#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9"];
pub(crate) const INK: &str = "#222222";
pub(crate) const SOFT: &str = "#666666";
pub(crate) const GRID: &str = "#dddddd";
/// The height of ordinary text, in pixels.
pub(crate) const TEXT: f64 = 13.0;
/// The height of the head with title and subtitle.
pub(crate) const HEAD: f64 = 64.0;

/// Where a text stands against its point.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Anchor {
    Start,
    Middle,
    End,
}

/// A drawing under way.
pub(crate) struct Svg {
    body: String,
    width: f64,
    height: f64,
    title: String,
}

impl Svg {
    /// With its title and, below, a line of what it shows.
    pub(crate) fn new(width: f64, height: f64, title: &str, subtitle: &str) -> Svg {
        let mut svg = Svg { body: String::new(), width, height, title: title.to_owned() };
        svg.styled(20.0, 28.0, title, Anchor::Start, INK, 17.0, true);
        svg.text(20.0, 48.0, subtitle, Anchor::Start, SOFT);
        svg
    }

    pub(crate) fn text(&mut self, x: f64, y: f64, text: &str, anchor: Anchor, colour: &str) {
        self.styled(x, y, text, anchor, colour, TEXT, false);
    }

    #[expect(clippy::too_many_arguments, reason = "a text has these properties")]
    pub(crate) fn styled(
        &mut self,
        x: f64,
        y: f64,
        text: &str,
        anchor: Anchor,
        colour: &str,
        size: f64,
        bold: bool,
    ) {
        let anchor = match anchor {
            Anchor::Start => "start",
            Anchor::Middle => "middle",
            Anchor::End => "end",
        };
        let weight = if bold { " font-weight=\"600\"" } else { "" };
        let text = escape(text);
        let _ = writeln!(
            self.body,
            "<text x=\"{x:.1}\" y=\"{y:.1}\" text-anchor=\"{anchor}\" fill=\"{colour}\" font-size=\"{size}\"{weight}>{text}</text>"
        );
    }

    pub(crate) fn line(&mut self, from: (f64, f64), to: (f64, f64), colour: &str, width: f64) {
        let _ = writeln!(
            self.body,
            "<line x1=\"{:.1}\" y1=\"{:.1}\" x2=\"{:.1}\" y2=\"{:.1}\" stroke=\"{colour}\" stroke-width=\"{width:.1}\" stroke-linecap=\"round\"/>",
            from.0, from.1, to.0, to.1
        );
    }

    pub(crate) fn path(&mut self, points: &[(f64, f64)], colour: &str, width: f64) {
        let mut d = String::new();
        for (nth, (x, y)) in points.iter().enumerate() {
            let _ = write!(d, "{}{x:.1} {y:.1}", if nth == 0 { "M" } else { " L" });
        }
        let _ = writeln!(
            self.body,
            "<path d=\"{d}\" fill=\"none\" stroke=\"{colour}\" stroke-width=\"{width:.1}\" stroke-linejoin=\"round\"/>"
        );
    }

    pub(crate) fn dot(&mut self, at: (f64, f64), colour: &str, hollow: bool) {
        let fill = if hollow { "white" } else { colour };
        let _ = writeln!(
            self.body,
            "<circle cx=\"{:.1}\" cy=\"{:.1}\" r=\"3.5\" fill=\"{fill}\" stroke=\"{colour}\" stroke-width=\"1.8\"/>",
            at.0, at.1
        );
    }

    pub(crate) fn area(&mut self, at: (f64, f64), size: (f64, f64), fill: &str, stroke: &str) {
        let _ = writeln!(
            self.body,
            "<rect x=\"{:.1}\" y=\"{:.1}\" width=\"{:.1}\" height=\"{:.1}\" rx=\"3\" fill=\"{fill}\" stroke=\"{stroke}\"/>",
            at.0,
            at.1,
            size.0.max(0.0),
            size.1.max(0.0)
        );
    }

    pub(crate) fn finish(self) -> String {
        let (width, height, title) = (self.width, self.height, escape(&self.title));
        format!(
            "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {width:.0} {height:.0}\" width=\"{width:.0}\" height=\"{height:.0}\" role=\"img\" aria-label=\"{title}\" font-family=\"system-ui, -apple-system, 'Segoe UI', Helvetica, Arial, sans-serif\">\n<title>{title}</title>\n<rect width=\"100%\" height=\"100%\" fill=\"white\"/>\n{}</svg>\n",
            self.body
        )
    }
}

/// What XML keeps for itself, written otherwise; what it does not allow at all is left out.
fn escape(text: &str) -> String {
    let mut escaped = String::with_capacity(text.len());
    for letter in text.chars().filter(|letter| !letter.is_control()) {
        match letter {
            '&' => escaped.push_str("&amp;"),
            '<' => escaped.push_str("&lt;"),
            '>' => escaped.push_str("&gt;"),
            '"' => escaped.push_str("&quot;"),
            letter => escaped.push(letter),
        }
    }
    escaped
}

/// About how wide a text is.
pub(crate) fn width_of(text: &str) -> f64 {
    text.chars().count() as f64 * TEXT * 0.56
}

/// Moves heights apart so that no two are closer than `gap`, as little as possible, within limits where
/// they all fit. They keep their order.
pub(crate) fn apart(wanted: &[f64], gap: f64, (least, most): (f64, f64)) -> Vec<f64> {
    let mut order: Vec<usize> = (0..wanted.len()).collect();
    order.sort_by(|a, b| wanted[*a].total_cmp(&wanted[*b]));
    // Groups of labels that touch: each stands around the mean of where its members want to be.
    let mut groups: Vec<(f64, Vec<usize>)> = Vec::new();
    for nth in order {
        groups.push((wanted[nth], vec![nth]));
        while let [.., (above, upper), (below, lower)] = &groups[..] {
            let reach = gap * (upper.len() + lower.len()) as f64 / 2.0;
            if below - above >= reach - 1e-9 {
                break;
            }
            let members: Vec<usize> = upper.iter().chain(lower).copied().collect();
            let count = members.len() as f64;
            let middle = members.iter().map(|nth| wanted[*nth]).sum::<f64>() / count;
            let half = gap * (count - 1.0) / 2.0;
            let middle = middle.min(most - half).max(least + half);
            groups.truncate(groups.len() - 2);
            groups.push((middle, members));
        }
    }
    let mut placed = vec![0.0; wanted.len()];
    for (middle, members) in groups {
        let half = gap * (members.len() as f64 - 1.0) / 2.0;
        for (nth, member) in members.iter().enumerate() {
            placed[*member] = middle - half + gap * nth as f64;
        }
    }
    placed
}

/// A number with three digits that say something.
pub(crate) fn short(value: f64) -> String {
    let size = value.abs();
    match size {
        0.0 => "0".to_owned(),
        1e9.. => format!("{:.0}G", value / 1e9),
        1e6..1e9 => format!("{:.0}M", value / 1e6),
        1e4..1e6 => format!("{:.0}k", value / 1e3),
        100.0..1e4 => format!("{value:.0}"),
        10.0..100.0 => trim(format!("{value:.1}")),
        1.0..10.0 => trim(format!("{value:.2}")),
        _ => trim(format!("{value:.3}")),
    }
}

fn trim(text: String) -> String {
    text.trim_end_matches('0').trim_end_matches('.').to_owned()
}

#[cfg(test)]
mod tests;
