//! Where the parts of a rack's diagram stand.
//!
//! Hosts are boxes in one row, or in two when there are many; in each box a tree below the root
//! complex, its memory above. The lower row stands on its head, so that ways out of all hosts begin
//! next to what is between them: switches and whatever else is in no host, by how far it is from
//! either row.

use std::collections::{BTreeMap, VecDeque};

use super::diagram::{Edge, Node};
use super::label::spread;
use super::svg::{PAD, Rect};

/// Of a node's box.
pub(super) const NODE: (f64, f64) = (108.0, 36.0);
/// From one column of nodes to the next, and from one level to the next.
const COLUMN: f64 = NODE.0 + 18.0;
const LEVEL: f64 = NODE.1 + 52.0;
/// Of a host's box, around its nodes; its name is in addition.
const INSIDE: f64 = 12.0;
const NAME: f64 = 24.0;
const BETWEEN: f64 = 26.0;
/// Hosts that stand in one row.
const IN_ROW: usize = 4;
const LEAST_WIDTH: f64 = 640.0;

/// Where everything stands. Nodes that are not drawn are missing.
pub(super) struct Layout {
    /// Nodes' boxes, by their number.
    pub nodes: BTreeMap<usize, Rect>,
    /// Hosts' boxes, and whether the name stands at the bottom.
    pub hosts: Vec<(String, Rect, bool)>,
    /// Of the whole picture.
    pub width: f64,
    pub bottom: f64,
}

/// A host's nodes: column (in nodes' widths) and level of each.
struct Tree {
    host: String,
    at: BTreeMap<usize, (f64, usize)>,
    /// Those with links out of the host, which go to the row's last level.
    ports: Vec<usize>,
}

impl Layout {
    /// Of the nodes of `hosts`, and of `outside`; `top` is where the picture begins.
    pub fn of(
        nodes: &[Node],
        edges: &[Edge],
        hosts: &[String],
        outside: &[usize],
        top: f64,
    ) -> Layout {
        let trees: Vec<Tree> = hosts.iter().map(|host| Tree::of(nodes, edges, host)).collect();
        let upper = if trees.len() > IN_ROW { trees.len().div_ceil(2) } else { trees.len() };
        let (upper, lower) = trees.split_at(upper);
        let between = ranks(nodes, edges, [upper, lower], outside);
        let wide = |row: &[Tree]| {
            row.iter().map(|tree| tree.width() + BETWEEN).sum::<f64>() - BETWEEN + 2.0 * PAD
        };
        let most = between.iter().map(Vec::len).max().unwrap_or(0) as f64;
        let width = [wide(upper), wide(lower), most * COLUMN + 2.0 * PAD];
        let width = width.into_iter().fold(LEAST_WIDTH, f64::max);
        let mut layout = Layout { nodes: BTreeMap::new(), hosts: Vec::new(), width, bottom: top };
        layout.row(upper, (width - wide(upper)) / 2.0 + PAD, false);
        let first = layout.bottom + LEVEL - NODE.1;
        layout.bottom = first + between.len() as f64 * LEVEL;
        layout.row(lower, (width - wide(lower)) / 2.0 + PAD, true);
        for (rank, row) in between.iter().enumerate() {
            layout.between(row, edges, first + rank as f64 * LEVEL);
        }
        if lower.is_empty() {
            layout.bottom -= LEVEL - NODE.1;
        }
        layout
    }

    /// Hosts from `left` on, from the present bottom on, which they move.
    fn row(&mut self, trees: &[Tree], mut left: f64, reversed: bool) {
        if trees.is_empty() {
            return;
        }
        let last = trees.iter().map(Tree::last).max().unwrap_or(0);
        let top = self.bottom;
        let height = NAME + 2.0 * INSIDE + NODE.1 + last as f64 * LEVEL;
        for tree in trees {
            for (&node, &(column, level)) in &tree.at {
                let level = if tree.ports.contains(&node) { last } else { level };
                let down = NAME + INSIDE + level as f64 * LEVEL;
                let down = if reversed { height - down - NODE.1 } else { down };
                let x = left + INSIDE + column * COLUMN;
                self.nodes.insert(node, Rect::new(x, top + down, NODE.0, NODE.1));
            }
            let at = Rect::new(left, top, tree.width(), height);
            self.hosts.push((tree.host.clone(), at, reversed));
            left += tree.width() + BETWEEN;
        }
        self.bottom = top + height;
    }

    /// A rank of nodes that are in no host, each near the middle of what it is linked to.
    fn between(&mut self, row: &[usize], edges: &[Edge], top: f64) {
        let wanted = row.iter().map(|&node| {
            let near = neighbours(edges, node).filter_map(|other| self.nodes.get(&other));
            let near: Vec<f64> = near.map(|rect| rect.x + NODE.0 / 2.0).collect();
            let middle = near.iter().sum::<f64>() / near.len() as f64;
            (if near.is_empty() { self.width / 2.0 } else { middle }, COLUMN)
        });
        let wanted: Vec<(f64, f64)> = wanted.collect();
        for (&node, centre) in row.iter().zip(spread(&wanted, PAD, self.width - PAD)) {
            self.nodes.insert(node, Rect::new(centre - NODE.0 / 2.0, top, NODE.0, NODE.1));
        }
    }
}

impl Tree {
    fn of(nodes: &[Node], edges: &[Edge], host: &str) -> Tree {
        let own: Vec<usize> =
            (0..nodes.len()).filter(|&nth| nodes[nth].host.as_deref() == Some(host)).collect();
        let (memory, parts): (Vec<usize>, Vec<usize>) =
            own.iter().partition(|&&nth| nodes[nth].kind == "memory");
        let parent = |node: usize| {
            let above =
                |other: &usize| parts.contains(other) && nodes[*other].depth < nodes[node].depth;
            neighbours(edges, node).find(above)
        };
        let mut children: BTreeMap<Option<usize>, Vec<usize>> = BTreeMap::new();
        for &node in &parts {
            children.entry(parent(node)).or_default().push(node);
        }
        let mut tree = Tree { host: host.to_owned(), at: BTreeMap::new(), ports: Vec::new() };
        let mut free = 0.0;
        for &root in children.get(&None).into_iter().flatten() {
            tree.place(root, usize::from(!memory.is_empty()), &children, &mut free);
        }
        for node in memory {
            let near = neighbours(edges, node).find_map(|other| tree.at.get(&other).copied());
            let taken = tree.at.values().filter(|at| at.1 == 0).map(|at| at.0 + 1.0);
            let column = taken.fold(near.map_or(0.0, |at| at.0), f64::max);
            tree.at.insert(node, (column, 0));
        }
        let out = |node: &usize| {
            let elsewhere = |other: usize| nodes[other].host.as_deref() != Some(host);
            !children.contains_key(&Some(*node)) && neighbours(edges, *node).any(elsewhere)
        };
        tree.ports = parts.into_iter().filter(out).collect();
        tree
    }

    /// A node over the middle of what is below it; gives its column.
    fn place(
        &mut self,
        node: usize,
        level: usize,
        children: &BTreeMap<Option<usize>, Vec<usize>>,
        free: &mut f64,
    ) -> f64 {
        let below: Vec<f64> = children
            .get(&Some(node))
            .into_iter()
            .flatten()
            .map(|&child| self.place(child, level + 1, children, free))
            .collect();
        let column = match (below.first(), below.last()) {
            (Some(first), Some(last)) => (first + last) / 2.0,
            _ => {
                *free += 1.0;
                *free - 1.0
            }
        };
        self.at.insert(node, (column, level));
        column
    }

    fn last(&self) -> usize {
        self.at.values().map(|at| at.1).max().unwrap_or(0)
    }

    fn width(&self) -> f64 {
        let last = self.at.values().map(|at| at.0).fold(0.0, f64::max);
        last * COLUMN + NODE.0 + 2.0 * INSIDE
    }
}

/// `outside` in ranks from the upper row of hosts to the lower.
fn ranks(nodes: &[Node], edges: &[Edge], rows: [&[Tree]; 2], outside: &[usize]) -> Vec<Vec<usize>> {
    let [down, up] = rows.map(|row| {
        let mut far: BTreeMap<usize, usize> =
            row.iter().flat_map(|tree| tree.at.keys()).map(|&node| (node, 0)).collect();
        let mut queue: VecDeque<usize> = far.keys().copied().collect();
        while let Some(node) = queue.pop_front() {
            for next in neighbours(edges, node).filter(|&next| nodes[next].host.is_none()) {
                if !far.contains_key(&next) {
                    far.insert(next, far[&node] + 1);
                    queue.push_back(next);
                }
            }
        }
        far
    });
    let mut ranks: BTreeMap<(usize, usize), Vec<usize>> = BTreeMap::new();
    for &node in outside {
        let far = [&down, &up].map(|far| far.get(&node).copied());
        let rank = match far {
            [Some(down), Some(up)] => (1000 * down / (down + up), down + up),
            [Some(down), None] => (down, 0),
            [None, Some(up)] => (1000, usize::MAX - up),
            [None, None] => (usize::MAX, 0),
        };
        ranks.entry(rank).or_default().push(node);
    }
    ranks.into_values().collect()
}

/// What a node is linked to.
pub(super) fn neighbours(edges: &[Edge], node: usize) -> impl Iterator<Item = usize> {
    edges.iter().filter_map(move |edge| match edge.ends {
        [a, b] if a == node => Some(b),
        [a, b] if b == node => Some(a),
        _ => None,
    })
}
