//! The SVG itself: escaped text, coordinates of one decimal, and the white card that every picture
//! stands on, so that it reads on light and on dark pages.
//!
//! Nothing here has an `id`, so several pictures may be put into one page.

use std::fmt::Write as _;

/// Text, and the axis that things stand on.
pub(super) const INK: &str = "#0f172a";
/// Text of lesser weight.
pub(super) const DIM: &str = "#475569";
pub(super) const FRAME: &str = "#cbd5e1";
pub(super) const GRID: &str = "#e2e8f0";

/// Space between the card's edge and what is on it.
pub(super) const PAD: f64 = 22.0;

const FONTS: &str =
    "system-ui, -apple-system, 'Segoe UI', Roboto, 'Helvetica Neue', Arial, sans-serif";
const TITLE: f64 = 17.0;
const SUBTITLE: f64 = 13.0;

/// Dark enough for text on white (a contrast of 4.5 or more), and apart for the colour-blind.
const COLOURS: [&str; 8] =
    ["#1d5fa8", "#c2410c", "#0f766e", "#7e22ce", "#be185d", "#7a5c00", "#334155", "#15803d"];

/// The colour of the series of that number.
pub(super) fn colour(number: usize) -> &'static str {
    COLOURS[number % COLOURS.len()]
}

/// Whether colours have been used up, and the series of that number needs dashes to tell it.
pub(super) fn dashed(number: usize) -> bool {
    (number / COLOURS.len()) % 2 == 1
}

/// Where a text stands from its point.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Anchor {
    Start,
    Middle,
    End,
}

/// How a text looks.
#[derive(Debug, Clone, Copy)]
pub(super) struct Font {
    pub size: f64,
    pub fill: &'static str,
    pub bold: bool,
    pub anchor: Anchor,
}

impl Font {
    pub fn new(size: f64, fill: &'static str) -> Font {
        Font { size, fill, bold: false, anchor: Anchor::Start }
    }

    pub fn bold(self) -> Font {
        Font { bold: true, ..self }
    }

    pub fn middle(self) -> Font {
        Font { anchor: Anchor::Middle, ..self }
    }

    pub fn end(self) -> Font {
        Font { anchor: Anchor::End, ..self }
    }

    /// How wide `text` will be at most, in the widest of the usual fonts.
    pub fn width(&self, text: &str) -> f64 {
        let em: f64 = text.chars().map(width).sum();
        em * self.size * if self.bold { 1.12 } else { 1.0 }
    }

    /// `text` in lines of at most `most`; a word that is longer has a line to itself.
    pub fn wrap(&self, text: &str, most: f64) -> Vec<String> {
        let mut lines: Vec<String> = Vec::new();
        for word in text.split_whitespace() {
            match lines.last_mut() {
                Some(line) if self.width(&format!("{line} {word}")) <= most => {
                    line.push(' ');
                    line.push_str(word);
                }
                _ => lines.push(word.to_owned()),
            }
        }
        lines
    }

    /// `text`, its end cut off where it is wider than `most`.
    pub fn cut(&self, text: &str, most: f64) -> String {
        if self.width(text) <= most {
            return text.to_owned();
        }
        let mut short = String::new();
        for c in text.chars() {
            if self.width(&format!("{short}{c}…")) > most {
                break;
            }
            short.push(c);
        }
        short + "…"
    }
}

/// In em, of DejaVu Sans, which is wider than the others that `FONTS` finds.
fn width(c: char) -> f64 {
    match c {
        'i' | 'j' | 'l' | 'I' | '|' | '\'' | '.' | ',' | ':' | ';' | ' ' => 0.33,
        '!' | '(' | ')' | '[' | ']' | 'f' | 't' | 'r' | '-' | '/' | '·' => 0.42,
        'm' | 'w' | 'M' | 'W' | '@' | '%' | '…' | '—' => 0.98,
        'A'..='Z' | '+' | '=' | '<' | '>' | '~' | '→' | '←' | '↑' | '↓' | '×' => 0.80,
        '\u{1100}'.. => 1.0,
        _ => 0.64,
    }
}

/// A coordinate: one decimal, none when it is zero.
pub(super) fn n(value: f64) -> String {
    let text = format!("{value:.1}");
    let text = text.strip_suffix(".0").unwrap_or(&text);
    if text == "-0" { "0".to_owned() } else { text.to_owned() }
}

/// `text` for XML, in elements and attributes; without characters that XML forbids.
pub(crate) fn escape(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    for c in text.chars() {
        match c {
            '&' => out.push_str("&amp;"),
            '<' => out.push_str("&lt;"),
            '>' => out.push_str("&gt;"),
            '"' => out.push_str("&quot;"),
            '\'' => out.push_str("&#39;"),
            '\t' | '\n' | '\r' => out.push(' '),
            '\u{fffe}' | '\u{ffff}' => {}
            c if c.is_control() => {}
            c => out.push(c),
        }
    }
    out
}

/// A picture under way.
pub(super) struct Canvas {
    body: String,
    label: String,
    title: String,
    width: f64,
    /// Where the headline ends and the picture proper may begin.
    pub top: f64,
}

impl Canvas {
    /// A card of that width with its headline.
    pub fn new(title: &str, subtitle: &str, width: f64) -> Canvas {
        let label = [title, subtitle].map(|part| part.trim().trim_end_matches('.')).join(". ");
        let label = label.trim_end_matches(". ").to_owned();
        let mut canvas =
            Canvas { body: String::new(), label, title: title.to_owned(), width, top: PAD };
        let (big, small) = (Font::new(TITLE, INK).bold(), Font::new(SUBTITLE, DIM));
        for (font, text, step) in [(big, title, 24.0), (small, subtitle, 18.0)] {
            for line in font.wrap(text, width - 2.0 * PAD) {
                canvas.top += step;
                canvas.text(PAD, canvas.top - 8.0, &line, font);
            }
        }
        canvas
    }

    pub fn text(&mut self, x: f64, y: f64, text: &str, font: Font) {
        let anchor = match font.anchor {
            Anchor::Start => "",
            Anchor::Middle => " text-anchor=\"middle\"",
            Anchor::End => " text-anchor=\"end\"",
        };
        let weight = if font.bold { " font-weight=\"600\"" } else { "" };
        let (x, y, size, fill) = (n(x), n(y), n(font.size), font.fill);
        let text = escape(text);
        self.raw(format_args!(
            "<text x=\"{x}\" y=\"{y}\" font-size=\"{size}\" fill=\"{fill}\"{weight}{anchor}>{text}</text>"
        ));
    }

    pub fn line(&mut self, from: (f64, f64), to: (f64, f64), stroke: &str, width: f64) {
        let (x1, y1, x2, y2) = (n(from.0), n(from.1), n(to.0), n(to.1));
        let width = n(width);
        self.raw(format_args!(
            "<line x1=\"{x1}\" y1=\"{y1}\" x2=\"{x2}\" y2=\"{y2}\" stroke=\"{stroke}\" stroke-width=\"{width}\"/>"
        ));
    }

    /// A line along points; `more` are further attributes.
    pub fn polyline(&mut self, points: &[(f64, f64)], stroke: &str, width: f64, more: &str) {
        let points: Vec<String> =
            points.iter().map(|&(x, y)| format!("{},{}", n(x), n(y))).collect();
        let (points, width) = (points.join(" "), n(width));
        self.raw(format_args!(
            "<polyline points=\"{points}\" fill=\"none\" stroke=\"{stroke}\" stroke-width=\"{width}\" stroke-linejoin=\"round\"{more}/>"
        ));
    }

    /// A shape with corners, through which one sees.
    pub fn polygon(&mut self, points: &[(f64, f64)], fill: &str, opacity: f64) {
        let points: Vec<String> =
            points.iter().map(|&(x, y)| format!("{},{}", n(x), n(y))).collect();
        let points = points.join(" ");
        self.raw(format_args!(
            "<polygon points=\"{points}\" fill=\"{fill}\" fill-opacity=\"{opacity:.2}\"/>"
        ));
    }

    /// A rectangle; `more` are further attributes.
    pub fn rect(&mut self, at: Rect, fill: &str, stroke: &str, more: &str) {
        let (x, y, width, height) = (n(at.x), n(at.y), n(at.width), n(at.height));
        self.raw(format_args!(
            "<rect x=\"{x}\" y=\"{y}\" width=\"{width}\" height=\"{height}\" fill=\"{fill}\" stroke=\"{stroke}\"{more}/>"
        ));
    }

    pub fn circle(&mut self, at: (f64, f64), radius: f64, fill: &str, stroke: &str) {
        let (x, y, radius) = (n(at.0), n(at.1), n(radius));
        self.raw(format_args!(
            "<circle cx=\"{x}\" cy=\"{y}\" r=\"{radius}\" fill=\"{fill}\" stroke=\"{stroke}\" stroke-width=\"1.8\"/>"
        ));
    }

    /// What is well-formed already.
    pub fn raw(&mut self, element: std::fmt::Arguments<'_>) {
        let _ = self.body.write_fmt(element);
        self.body.push('\n');
    }

    /// The whole, down to `bottom` and the card's edge.
    pub fn finish(self, bottom: f64) -> String {
        let (width, height) = (n(self.width), n(bottom + PAD));
        let (inner, low) = (n(self.width - 1.0), n(bottom + PAD - 1.0));
        let (title, label, body) = (escape(&self.title), escape(&self.label), self.body);
        format!(
            "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {width} {height}\" \
             width=\"{width}\" height=\"{height}\" role=\"img\" aria-label=\"{label}\" \
             font-family=\"{FONTS}\" style=\"max-width:100%;height:auto\">\n\
             <title>{title}</title>\n\
             <rect x=\"0.5\" y=\"0.5\" width=\"{inner}\" height=\"{low}\" rx=\"8\" \
             fill=\"#fff\" stroke=\"{FRAME}\"/>\n{body}</svg>\n"
        )
    }
}

/// A part of the picture.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct Rect {
    pub x: f64,
    pub y: f64,
    pub width: f64,
    pub height: f64,
}

impl Rect {
    pub fn new(x: f64, y: f64, width: f64, height: f64) -> Rect {
        Rect { x, y, width, height }
    }

    /// Of that size around a point.
    pub fn around(x: f64, y: f64, width: f64, height: f64) -> Rect {
        Rect::new(x - width / 2.0, y - height / 2.0, width, height)
    }

    /// Whether they share more than an edge.
    pub fn overlaps(&self, other: &Rect) -> bool {
        self.x < other.x + other.width
            && other.x < self.x + self.width
            && self.y < other.y + other.height
            && other.y < self.y + self.height
    }
}
