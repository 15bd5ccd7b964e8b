//! A rack's links, and how busy they are: a stroke for each direction, the wider the busier.

use std::collections::BTreeMap;

use super::label::TakenPlaces;
use super::layout::{Layout, NODE, neighbours};
use super::svg::{Canvas, DIM, FRAME, Font, INK, Rect, colour, escape, n};

/// A component of the rack, as a box.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Node {
    /// Its name; what is before the last `/` is not drawn.
    pub name: String,
    /// What it is: `root complex`, `memory`, `switch`, `ntb`.
    pub kind: String,
    /// The host it is in.
    pub host: Option<String>,
    /// How many links from its host's root; of no matter between hosts.
    pub depth: usize,
}

/// A link between two components, and how busy it is.
#[derive(Debug, Clone, PartialEq)]
pub struct Edge {
    /// Its ends: indices of the nodes.
    pub ends: [usize; 2],
    /// What it is called in the picture's `data-link`: the number of the link among all of the rack's.
    pub number: usize,
    /// What it is: `Gen3 x8`.
    pub label: String,
    /// How busy it is from the first end to the second, 0 to 1.
    pub there: f64,
    /// How busy it is from the second end to the first, from 0 to 1.
    pub back: f64,
}

impl Edge {
    /// How busy its busier direction is.
    fn share(&self) -> f64 {
        self.there.max(self.back)
    }
}

/// A rack: its components by host, and its links.
#[derive(Debug, Clone, PartialEq)]
pub struct Diagram {
    /// What the picture shows, as its heading.
    pub title: String,
    /// Its components, in any order; edges name them by index.
    pub nodes: Vec<Node>,
    /// Its links, each between two of `nodes`.
    pub edges: Vec<Edge>,
}

/// Hosts that are drawn.
const MOST_HOSTS: usize = 16;
/// Less than this is not said, and as much as this below the busiest is as busy.
const LITTLE: f64 = 0.005;
const IDLE: &str = "#94a3b8";
const BUSIEST: &str = "#c2410c";

/// A link as it is drawn: from its upper end downwards, or from the left one to the right.
struct DrawnEdge {
    /// Of the curve: its ends and what it is bent by.
    curve: [(f64, f64); 4],
    /// How busy it is forwards and backwards.
    shares: [f64; 2],
    /// Whether forwards is from its second end to its first.
    turned: bool,
    /// What points forwards and backwards.
    arrows: [&'static str; 2],
}

impl Diagram {
    /// The picture. Of more than 16 hosts those with the busiest links are drawn.
    pub fn svg(&self) -> String {
        let (hosts, all) = self.busiest_hosts();
        let outside = self.outside(&hosts, hosts.len() < all);
        let mut subtitle =
            "How busy links are in each direction: the wider, the busier; the busiest in red"
                .to_owned();
        if hosts.len() < all {
            subtitle += &format!(". The {} of {all} hosts with the busiest links", hosts.len());
        }
        // The layout's width says how many lines the headline has.
        let width = Layout::of(&self.nodes, &self.edges, &hosts, &outside, 0.0).width;
        let mut canvas = Canvas::new(&self.title, &subtitle, width);
        let top = canvas.top + 10.0;
        let layout = Layout::of(&self.nodes, &self.edges, &hosts, &outside, top);
        for (host, at, reversed) in &layout.hosts {
            canvas.rect(*at, "#f8fafc", FRAME, " rx=\"6\"");
            let y = if *reversed { at.y + at.height - 10.0 } else { at.y + 20.0 };
            let font = Font::new(13.0, INK).bold();
            canvas.text(at.x + 12.0, y, &font.cut(host, at.width - 24.0), font);
        }
        let edges = self.drawn_edges(&layout);
        let most = self.edges.iter().map(Edge::share).fold(0.0, f64::max);
        for (nth, edge) in &edges {
            let of = &self.edges[*nth];
            edge.draw(&mut canvas, most, of.number, &self.says(of));
        }
        for (&nth, at) in &layout.nodes {
            let node = &self.nodes[nth];
            canvas.rect(*at, "#fff", "#64748b", " rx=\"4\"");
            let name = node.name.rsplit('/').next().unwrap_or(&node.name);
            let (name_font, kind) =
                (Font::new(12.0, INK).bold().middle(), Font::new(11.0, DIM).middle());
            let x = at.x + NODE.0 / 2.0;
            canvas.text(x, at.y + 15.5, &name_font.cut(name, NODE.0 - 8.0), name_font);
            canvas.text(x, at.y + 29.5, &kind.cut(&node.kind, NODE.0 - 8.0), kind);
        }
        label(&mut canvas, &layout, &edges, most);
        let lowest = edges.iter().map(|(_, edge)| edge.at(0.5).1 + 12.0);
        canvas.finish(lowest.fold(layout.bottom, f64::max))
    }

    /// What a link says when it is pointed at.
    fn says(&self, edge: &Edge) -> String {
        let [a, b] = edge.ends.map(|end| &self.nodes[end].name);
        let (there, back) = (edge.there * 100.0, edge.back * 100.0);
        format!("{a} to {b}, {}: {there:.0} % there, {back:.0} % back", edge.label)
    }

    /// The hosts to draw, in the order of the nodes, and how many there are.
    fn busiest_hosts(&self) -> (Vec<String>, usize) {
        let mut busy: BTreeMap<&String, f64> = BTreeMap::new();
        for host in self.nodes.iter().filter_map(|node| node.host.as_ref()) {
            busy.insert(host, 0.0);
        }
        for edge in &self.edges {
            for host in edge.ends.iter().filter_map(|end| self.nodes[*end].host.as_ref()) {
                busy.entry(host).and_modify(|share| *share = share.max(edge.share()));
            }
        }
        let all = busy.len();
        let mut order: Vec<(&String, f64)> = busy.into_iter().collect();
        order.sort_by(|a, b| b.1.total_cmp(&a.1).then(a.0.cmp(b.0)));
        order.truncate(MOST_HOSTS);
        let mut kept: Vec<String> = Vec::new();
        for host in self.nodes.iter().filter_map(|node| node.host.as_ref()) {
            if order.iter().any(|(name, _)| *name == host) && !kept.contains(host) {
                kept.push(host.clone());
            }
        }
        (kept, all)
    }

    /// What is in no host; when hosts are left out, without what only they are linked to.
    fn outside(&self, hosts: &[String], some: bool) -> Vec<usize> {
        let mut drawn: Vec<usize> = (0..self.nodes.len())
            .filter(|&nth| self.nodes[nth].host.as_ref().is_none_or(|host| hosts.contains(host)))
            .collect();
        let mut more = some;
        while more {
            let links = |node: usize, among: &[usize]| {
                neighbours(&self.edges, node).filter(|other| among.contains(other)).count()
            };
            let in_host = |node: &usize| self.nodes[*node].host.is_some();
            let ends = |&node: &usize| {
                let all: Vec<usize> = neighbours(&self.edges, node).collect();
                let lost = all.iter().any(in_host)
                    && !all
                        .iter()
                        .filter(|other| in_host(other))
                        .any(|other| drawn.contains(other));
                !in_host(&node) && (lost || all.len() > 1 && links(node, &drawn) < 2)
            };
            let loose = drawn.iter().position(ends);
            loose.map(|at| drawn.remove(at));
            more = loose.is_some();
        }
        drawn.retain(|&node| self.nodes[node].host.is_none());
        drawn
    }

    /// The links that are drawn, by their number.
    fn drawn_edges(&self, layout: &Layout) -> Vec<(usize, DrawnEdge)> {
        let drawn = self.edges.iter().enumerate().filter_map(|(nth, edge)| {
            let [a, b] = edge.ends.map(|end| layout.nodes.get(&end));
            let (a, b) = (*a?, *b?);
            let level = (a.y - b.y).abs() < 1.0;
            let forward = if level { a.x <= b.x } else { a.y < b.y };
            let (ends, shares) = match forward {
                true => (edge.ends, [edge.there, edge.back]),
                false => ([edge.ends[1], edge.ends[0]], [edge.back, edge.there]),
            };
            Some((nth, ends, shares, level))
        });
        let drawn: Vec<(usize, [usize; 2], [f64; 2], bool)> = drawn.collect();
        // Links leave a side of a node in the order of where they go.
        let port = |node: usize, other: usize, top: bool| {
            let side = |end: usize| {
                let (here, there) = (layout.nodes[&node], layout.nodes[&end]);
                if (here.y - there.y).abs() < 1.0 {
                    reversed(layout, node)
                } else {
                    there.y < here.y
                }
            };
            let all = drawn.iter().filter_map(|(_, ends, ..)| match ends {
                [a, b] if *a == node => Some(*b),
                [a, b] if *b == node => Some(*a),
                _ => None,
            });
            let mut all: Vec<usize> = all.filter(|&end| side(end) == top).collect();
            all.sort_by(|a, b| layout.nodes[a].x.total_cmp(&layout.nodes[b].x).then(a.cmp(b)));
            let rank = all.iter().position(|&end| end == other).unwrap_or(0) as f64;
            let at = layout.nodes[&node];
            let x = at.x + NODE.0 * (rank + 1.0) / (all.len() as f64 + 1.0);
            (x, if top { at.y } else { at.y + NODE.1 })
        };
        let edge = |&(nth, [from, to], shares, level): &(usize, [usize; 2], [f64; 2], bool)| {
            let (curve, arrows) = if level {
                let top = reversed(layout, from);
                let (a, b) = (port(from, to, top), port(to, from, top));
                let bend = if top { -58.0 } else { 58.0 };
                ([a, (a.0, a.1 + bend), (b.0, b.1 + bend), b], ["→", "←"])
            } else {
                let (a, b) = (port(from, to, false), port(to, from, true));
                let half = (b.1 - a.1) / 2.0;
                ([a, (a.0, a.1 + half), (b.0, b.1 - half), b], ["↓", "↑"])
            };
            let turned = self.edges[nth].ends[0] != from;
            (nth, DrawnEdge { curve, shares, turned, arrows })
        };
        drawn.iter().map(edge).collect()
    }
}

/// Whether a node's way out is upwards: it is in a host that stands on its head.
fn reversed(layout: &Layout, node: usize) -> bool {
    let at = layout.nodes[&node];
    layout.hosts.iter().any(|(_, host, reversed)| *reversed && host.overlaps(&at))
}

impl DrawnEdge {
    /// The point at a part of the curve, 0 to 1.
    fn at(&self, part: f64) -> (f64, f64) {
        let rest = 1.0 - part;
        let weights = [
            rest * rest * rest,
            3.0 * rest * rest * part,
            3.0 * rest * part * part,
            part * part * part,
        ];
        let sum = |of: fn(&(f64, f64)) -> f64| {
            self.curve.iter().zip(weights).map(|(point, weight)| of(point) * weight).sum()
        };
        (sum(|point| point.0), sum(|point| point.1))
    }

    /// The part where nothing else is near: a bent curve's end to which fewer links go.
    fn alone(&self, edges: &[(usize, DrawnEdge)]) -> f64 {
        let [from, _, _, to] = self.curve;
        if (from.0 - to.0).abs() < NODE.0 / 2.0 || (from.1 - to.1).abs() < 1.0 {
            return 0.5;
        }
        let near = |end: (f64, f64)| {
            let ends = edges.iter().flat_map(|(_, edge)| [edge.curve[0], edge.curve[3]]);
            ends.filter(|other| {
                (other.1 - end.1).abs() < 1.0 && (other.0 - end.0).abs() < NODE.0 * 0.9
            })
            .count()
        };
        if near(from) < near(to) { 0.2 } else { 0.8 }
    }

    /// Both directions beside each other, the forward one to the left.
    fn draw(&self, canvas: &mut Canvas, most: f64, number: usize, says: &str) {
        canvas.raw(format_args!(
            "<g fill=\"none\" data-link=\"{number}\" data-turned=\"{}\"><title>{}</title>",
            u8::from(self.turned),
            escape(says)
        ));
        for (share, side) in self.shares.into_iter().zip([-1.0, 1.0]) {
            let width = 1.4 + 7.0 * share.clamp(0.0, 1.0);
            let aside = side * (width / 2.0 + 0.8);
            // Where the curve is flat, beside is below.
            let [from, _, _, to] = self.curve;
            let (right, down) = (to.0 - from.0, (to.1 - from.1).abs());
            let below =
                [0.0, 1.4, 1.4, 0.0].map(|by| -aside * by * right / (right.abs() + down + 1.0));
            let points = self.curve.iter().zip(below);
            let mut points = points.map(|((x, y), by)| format!("{} {}", n(x + aside), n(y + by)));
            let [a, b, c, d] = std::array::from_fn(|_| points.next().unwrap_or_default());
            let (stroke, width) = (stroke(share, most), n(width));
            canvas.raw(format_args!(
                "<path d=\"M{a} C{b} {c} {d}\" stroke=\"{stroke}\" stroke-width=\"{width}\"/>"
            ));
        }
        canvas.raw(format_args!("</g>"));
    }
}

fn stroke(share: f64, most: f64) -> &'static str {
    match share {
        share if share < LITTLE => IDLE,
        share if share > most - LITTLE => BUSIEST,
        _ => colour(0),
    }
}

/// Says how busy links are: on the link, away from nodes, other labels and, where there is room,
/// other links.
fn label(canvas: &mut Canvas, layout: &Layout, edges: &[(usize, DrawnEdge)], most: f64) {
    const PARTS: usize = 24;
    let mut places = TakenPlaces::default();
    layout.nodes.values().for_each(|node| places.take(*node));
    for (_, at, reversed) in &layout.hosts {
        let y = if *reversed { at.y + at.height - 26.0 } else { at.y };
        places.take(Rect::new(at.x, y, at.width, 26.0));
    }
    let mut order: Vec<&(usize, DrawnEdge)> = edges.iter().collect();
    let share = |edge: &DrawnEdge| edge.shares[0].max(edge.shares[1]);
    order.sort_by(|a, b| share(&b.1).total_cmp(&share(&a.1)));
    for (nth, edge) in order.into_iter().filter(|(_, edge)| share(edge) >= LITTLE) {
        let texts = [0, 1].map(|of| format!("{}{:.0} %", edge.arrows[of], edge.shares[of] * 100.0));
        let text = texts.join(" ");
        let busiest = share(edge) > most - LITTLE;
        let font = Font::new(11.0, if busiest { BUSIEST } else { INK }).middle();
        let font = if busiest { font.bold() } else { font };
        let width = font.width(&text) + 6.0;
        // From where the link is on its own outwards, then ever further aside.
        let best = edge.alone(edges);
        let parts = (0..2 * PARTS).map(move |step| {
            let out = (step as f64 / 2.0).ceil() / PARTS as f64;
            if step % 2 == 0 { best + out } else { best - out }
        });
        let parts = parts.filter(|part| (0.1..=0.9).contains(part));
        let beside = |asides: &[f64]| {
            let all = asides.iter().flat_map(|aside| parts.clone().map(move |part| (part, aside)));
            let rect = |(part, aside): (f64, &f64)| {
                let (x, y) = edge.at(part);
                Rect::around(x + aside * width, y, width, 16.0)
            };
            all.map(rect).collect::<Vec<Rect>>()
        };
        let crossed = |rect: &Rect| {
            let others = edges.iter().filter(|other| other.0 != *nth);
            let points = others
                .flat_map(|(_, edge)| (1..PARTS).map(|part| edge.at(part as f64 / PARTS as f64)));
            points.into_iter().any(|(x, y)| rect.overlaps(&Rect::around(x, y, 6.0, 6.0)))
        };
        let clear = beside(&[0.0, 0.6, -0.6]).into_iter().filter(|rect| !crossed(rect));
        let found = places.place(clear.collect::<Vec<Rect>>());
        let found = found.or_else(|| places.place(beside(&[0.0, 0.6, -0.6, 1.2, -1.2, 2.0, -2.0])));
        let Some(at) = found else { continue };
        canvas.rect(at, "#fff", "none", " rx=\"3\" fill-opacity=\"0.9\"");
        canvas.text(at.x + at.width / 2.0, at.y + 12.0, &text, font);
    }
}
