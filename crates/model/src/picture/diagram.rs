//! A rack's links, and how busy they are: hosts as boxes, what is in them in layers below their memory,
//! switches between hosts under them. A link is as wide as its busier direction, and says both.

use std::collections::BTreeMap;

use super::{Anchor, COLOURS, GRID, HEAD, INK, SOFT, Svg, width_of};

/// A part.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Node {
    /// Its name.
    pub name: String,
    /// What it is.
    pub kind: String,
    /// The host it is in.
    pub host: Option<String>,
    /// How many links from its host's root; between hosts, from an NTB.
    pub depth: usize,
}

/// A link.
#[derive(Debug, Clone, PartialEq)]
pub struct Edge {
    /// Its ends: indices of the nodes.
    pub ends: [usize; 2],
    /// What it is.
    pub label: String,
    /// How busy it is from the first end to the second, 0 to 1.
    pub there: f64,
    /// And back.
    pub back: f64,
}

/// A rack.
#[derive(Debug, Clone, PartialEq)]
pub struct Diagram {
    /// What one sees.
    pub title: String,
    /// Its parts.
    pub nodes: Vec<Node>,
    /// Its links.
    pub edges: Vec<Edge>,
}

const NODE: (f64, f64) = (118.0, 38.0);
const GAP: (f64, f64) = (26.0, 62.0);
const MARGIN: f64 = 24.0;
/// Hosts in a row, and hosts that are drawn.
const IN_ROW: usize = 4;
const MOST_HOSTS: usize = 16;

impl Diagram {
    /// The picture. Of more than 16 hosts those with the busiest links are drawn.
    pub fn svg(&self) -> String {
        let kept = self.busiest_hosts();
        let places = Places::of(self, &kept);
        let all = self.nodes.iter().filter_map(|node| node.host.as_ref());
        let mut hosts: Vec<&String> = all.collect();
        hosts.sort();
        hosts.dedup();
        let mut subtitle = "the busier a link, the wider; both directions in %".to_owned();
        if hosts.len() > kept.len() {
            subtitle +=
                &format!("; {} of {} hosts, those with the busiest links", kept.len(), hosts.len());
        }
        let mut svg = Svg::new(places.width, places.height, &self.title, &subtitle);
        for (name, (at, size)) in &places.boxes {
            svg.area(*at, *size, "#f7f7f7", GRID);
            svg.styled(at.0 + 10.0, at.1 + 18.0, name, Anchor::Start, INK, 13.0, true);
        }
        let most = self.edges.iter().map(|edge| edge.there.max(edge.back)).fold(0.0, f64::max);
        for edge in &self.edges {
            let ends = edge.ends.map(|end| places.nodes.get(&end).copied());
            let [Some(a), Some(b)] = ends else { continue };
            let share = edge.there.max(edge.back);
            let colour = match share {
                _ if share > 0.005 && share >= most => COLOURS[1],
                0.005.. => COLOURS[0],
                _ => "#bbbbbb",
            };
            let middle = |at: (f64, f64)| (at.0 + NODE.0 / 2.0, at.1 + NODE.1 / 2.0);
            let (from, to) = (middle(a), middle(b));
            svg.line(from, to, colour, 1.2 + 9.0 * share);
        }
        for (nth, at) in &places.nodes {
            let node = &self.nodes[*nth];
            svg.area(*at, NODE, "white", SOFT);
            let name = node.name.rsplit('/').next().unwrap_or(&node.name);
            let x = at.0 + NODE.0 / 2.0;
            svg.styled(x, at.1 + 16.0, name, Anchor::Middle, INK, 12.0, true);
            svg.styled(x, at.1 + 30.0, &node.kind, Anchor::Middle, SOFT, 10.5, false);
        }
        self.label_links(&mut svg, &places, most);
        svg.finish()
    }

    /// Links' shares, above all lines and parts, on a ground of their own.
    fn label_links(&self, svg: &mut Svg, places: &Places, most: f64) {
        let mut taken: Vec<(f64, f64, f64)> = Vec::new();
        for edge in &self.edges {
            let [Some(a), Some(b)] = edge.ends.map(|end| places.nodes.get(&end).copied()) else {
                continue;
            };
            let share = edge.there.max(edge.back);
            if share < 0.005 {
                continue;
            }
            // From the upper to the lower end.
            let (down, up) =
                if a.1 <= b.1 { (edge.there, edge.back) } else { (edge.back, edge.there) };
            let text = format!("↓{:.0} ↑{:.0} %", down * 100.0, up * 100.0);
            let width = width_of(&text) * 0.9 + 6.0;
            let middle = ((a.0 + b.0 + NODE.0) / 2.0, (a.1 + b.1 + NODE.1) / 2.0);
            let mut at = middle;
            let meets = |at: (f64, f64), other: &(f64, f64, f64)| {
                (at.0 - other.0).abs() < (width + other.2) / 2.0 && (at.1 - other.1).abs() < 17.0
            };
            while taken.iter().any(|other| meets(at, other)) {
                at.1 += 17.0;
            }
            taken.push((at.0, at.1, width));
            svg.area((at.0 - width / 2.0, at.1 - 9.0), (width, 17.0), "white", "none");
            let colour = if share >= most { COLOURS[1] } else { INK };
            svg.styled(at.0, at.1 + 4.0, &text, Anchor::Middle, colour, 11.5, share >= most);
        }
    }

    fn busiest_hosts(&self) -> Vec<String> {
        let mut busy: BTreeMap<&String, f64> = BTreeMap::new();
        for node in &self.nodes {
            busy.extend(node.host.as_ref().map(|host| (host, 0.0)));
        }
        for edge in &self.edges {
            for end in edge.ends {
                if let Some(share) =
                    self.nodes[end].host.as_ref().and_then(|host| busy.get_mut(host))
                {
                    *share = share.max(edge.there).max(edge.back);
                }
            }
        }
        let mut order: Vec<(&String, f64)> = busy.into_iter().collect();
        order.sort_by(|a, b| b.1.total_cmp(&a.1).then(a.0.cmp(b.0)));
        order.truncate(MOST_HOSTS);
        // In the order of the nodes.
        let mut kept: Vec<String> = Vec::new();
        for host in self.nodes.iter().filter_map(|node| node.host.as_ref()) {
            if order.iter().any(|(name, _)| *name == host) && !kept.contains(host) {
                kept.push(host.clone());
            }
        }
        kept
    }
}

/// A place and a size.
type Area = ((f64, f64), (f64, f64));

/// Where everything stands.
struct Places {
    nodes: BTreeMap<usize, (f64, f64)>,
    boxes: Vec<(String, Area)>,
    width: f64,
    height: f64,
}

impl Places {
    fn of(diagram: &Diagram, kept: &[String]) -> Places {
        let mut places =
            Places { nodes: BTreeMap::new(), boxes: Vec::new(), width: 480.0, height: 0.0 };
        let mut top = HEAD + 8.0;
        for row in kept.chunks(IN_ROW) {
            let mut left = MARGIN;
            let mut lowest = top;
            for host in row {
                let size = places.host(diagram, host, (left, top));
                left += size.0 + GAP.0;
                lowest = f64::max(lowest, top + size.1);
            }
            places.width = places.width.max(left - GAP.0 + MARGIN);
            top = lowest + GAP.1;
        }
        let outside: Vec<usize> =
            (0..diagram.nodes.len()).filter(|nth| diagram.nodes[*nth].host.is_none()).collect();
        top = places.layers(diagram, &outside, (MARGIN, top), true);
        places.height = top + MARGIN;
        places
    }

    /// A host's parts, in a box.
    fn host(&mut self, diagram: &Diagram, host: &str, at: (f64, f64)) -> (f64, f64) {
        let own: Vec<usize> = (0..diagram.nodes.len())
            .filter(|nth| diagram.nodes[*nth].host.as_deref() == Some(host))
            .collect();
        let bottom = self.layers(diagram, &own, (at.0 + 12.0, at.1 + 28.0), false);
        let right =
            own.iter().filter_map(|nth| self.nodes.get(nth)).map(|at| at.0).fold(at.0, f64::max);
        let size = (right + NODE.0 + 12.0 - at.0, bottom + 12.0 - at.1);
        self.boxes.push((host.to_owned(), (at, size)));
        size
    }

    /// Nodes by their depth, from top to bottom; gives where they end.
    fn layers(&mut self, diagram: &Diagram, nodes: &[usize], at: (f64, f64), spread: bool) -> f64 {
        let mut layers: BTreeMap<usize, Vec<usize>> = BTreeMap::new();
        for nth in nodes {
            layers.entry(diagram.nodes[*nth].depth).or_default().push(*nth);
        }
        let mut top = at.1;
        for layer in layers.values() {
            let width = layer.len() as f64 * (NODE.0 + GAP.0) - GAP.0;
            let indent = if spread { ((self.width - width) / 2.0 - at.0).max(0.0) } else { 0.0 };
            for (column, nth) in layer.iter().enumerate() {
                let x = at.0 + indent + column as f64 * (NODE.0 + GAP.0);
                self.nodes.insert(*nth, (x, top));
            }
            self.width = self.width.max(at.0 + indent + width + MARGIN);
            top += NODE.1 + GAP.1;
        }
        if layers.is_empty() { at.1 } else { top - GAP.1 }
    }
}
