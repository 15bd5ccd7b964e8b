//! Pictures are well-formed, the same each time, and their labels do not meet.

use proptest::prelude::*;

use super::bars::{Bars, Pair};
use super::chart::{Chart, Series};
use super::compare::{Compared, ComparisonPicture};
use super::diagram::{Diagram, Edge, Node};
use super::timeline::{Timeline, TimelinePacket};
use super::*;

fn well_formed(svg: &str) -> bool {
    let numbers = !svg.contains("NaN") && !svg.contains("inf");
    numbers && roxmltree::Document::parse(svg).is_ok()
}

fn chart(scales: (Scale, Scale), names: &[String], points: &[(f64, f64)]) -> Chart {
    let series = names.iter().enumerate().map(|(nth, name)| {
        let line = points.iter().map(|(a, b)| (*a, b * (nth + 1) as f64)).collect();
        Series::line(name, line).published(points.iter().step_by(2).copied().collect())
    });
    Chart {
        title: "A <b> & \"c\"".into(),
        subtitle: "x > y".into(),
        x: Axis::new("size", Unit::Bytes, scales.0),
        y: Axis::new("time", Unit::Nanoseconds, scales.1),
        series: series.collect(),
    }
}

#[test]
fn all_pictures_are_well_formed() {
    let names = ["one & two".to_owned(), "<three>".to_owned()];
    for scale in [Scale::Linear, Scale::Log2, Scale::Log10, Scale::Nines] {
        let svg = chart((scale, Scale::Linear), &names, &[(0.5, 1.0), (0.9, 9.0)]).svg();
        assert!(well_formed(&svg), "{svg}");
        assert!(svg.contains("A &lt;b&gt; &amp; &quot;c&quot;") && svg.contains("one &amp; two"));
        assert!(well_formed(&chart((scale, scale), &names, &[]).svg()));
    }
    let pair = Pair { name: "a<b".into(), published: 1.54, modelled: 1.55, unit: "Gbps".into() };
    assert!(well_formed(
        &Bars { title: "t".into(), subtitle: "s".into(), pairs: vec![pair] }.svg()
    ));
    let case = |first, second| Compared { name: "a<b".into(), first, second };
    let cases = vec![case(8.4, 1.0), case(0.03, 0.98), case(1e6, 1e-6)];
    let names = ["off", "shaped"];
    let comparison =
        ComparisonPicture { title: "t".into(), subtitle: "s".into(), names, ideal: 1.0, cases };
    assert!(well_formed(&comparison.svg()));
    let passages = (0..200).map(|nth| {
        let (begin, end) = (f64::from(nth), f64::from(nth + 4));
        TimelinePacket { from: 0, to: 1, begin, end, label: format!("MRd {nth} B"), kind: 0 }
    });
    let passages = passages.collect();
    let columns = vec!["a".to_owned(), "b".to_owned()];
    let timeline = Timeline { title: "t".into(), subtitle: "s".into(), columns, passages };
    let svg = timeline.svg();
    assert!(well_formed(&svg) && svg.contains("80 later packets"));
}

#[test]
fn a_large_rack_shows_its_busiest_hosts() {
    let node = |host: usize, name: &str, depth| Node {
        name: format!("h{host}/{name}"),
        kind: name.into(),
        host: Some(format!("h{host}")),
        depth,
    };
    let nodes: Vec<Node> = (0..40).flat_map(|h| [node(h, "root", 1), node(h, "ntb", 2)]).collect();
    let edges = (0..40).map(|h| Edge {
        number: 0,
        ends: [2 * h, 2 * h + 1],
        label: "Gen3 x8".into(),
        there: h as f64 / 40.0,
        back: 0.0,
    });
    let svg = Diagram { title: "t".into(), nodes, edges: edges.collect() }.svg();
    assert!(well_formed(&svg));
    assert!(svg.contains("16 of 40 hosts") && svg.contains(">h39<") && !svg.contains(">h3<"));
}

/// Hosts with a board, a drive and an NTB each, below a switch; shares by turns.
fn rack(hosts: usize, shares: &[f64]) -> Diagram {
    let mut nodes = vec![Node { name: "top".into(), kind: "switch".into(), host: None, depth: 0 }];
    let mut ends = Vec::new();
    for host in 0..hosts {
        let root = nodes.len();
        for (name, depth) in [("root", 0), ("board", 1), ("nvme0", 2), ("nvme1", 2), ("ntb", 1)] {
            let (name, host) = (format!("h{host}/{name}"), Some(format!("h{host}")));
            nodes.push(Node { name, kind: "part".into(), host, depth });
        }
        let links = [(0, 1), (1, 2), (1, 3), (0, 4)];
        ends.extend(links.map(|(a, b)| [root + a, root + b]));
        ends.push([root + 4, 0]);
    }
    let mut shares = shares.iter().copied().cycle();
    let mut share = || shares.next().unwrap_or(0.0);
    let edges = ends.into_iter().map(|ends| Edge {
        number: 0,
        ends,
        label: "Gen4 x8".into(),
        there: share(),
        back: share(),
    });
    Diagram { title: "t".into(), edges: edges.collect(), nodes }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(32))]

    /// Every busy link is labelled, no label is over another or over a part.
    #[test]
    fn a_diagrams_labels_never_meet(
        hosts in 1..12usize,
        shares in prop::collection::vec(0.01..1.0f64, 1..9),
    ) {
        let diagram = rack(hosts, &shares);
        let svg = diagram.svg();
        let document = roxmltree::Document::parse(&svg).unwrap();
        let rect = |node: roxmltree::Node<'_, '_>| {
            let number = |name| node.attribute(name).unwrap().parse::<f64>().unwrap();
            // Coordinates are rounded to a tenth.
            let (width, height) = (number("width") - 0.2, number("height") - 0.2);
            svg::Rect::new(number("x") + 0.1, number("y") + 0.1, width, height)
        };
        let rects = |attribute: &str, value: &str| -> Vec<svg::Rect> {
            let all = document.descendants();
            all.filter(|node| node.attribute(attribute) == Some(value)).map(rect).collect()
        };
        let (parts, labels) = (rects("rx", "4"), rects("fill-opacity", "0.9"));
        prop_assert_eq!(parts.len(), diagram.nodes.len());
        prop_assert_eq!(labels.len(), diagram.edges.len());
        for (nth, label) in labels.iter().enumerate() {
            prop_assert!(!parts.iter().any(|part| part.overlaps(label)), "{:?}", label);
            prop_assert!(!labels[..nth].iter().any(|other| other.overlaps(label)), "{:?}", label);
        }
        prop_assert_eq!(&svg, &diagram.svg());
    }

    #[test]
    fn any_data_draws_the_same_picture_twice(
        points in prop::collection::vec((1e-3f64..1e9, 0.0f64..1e12), 0..30),
        names in prop::collection::vec("\\PC{0,12}", 0..5),
    ) {
        let chart = chart((Scale::Log10, Scale::Linear), &names, &points);
        prop_assert!(well_formed(&chart.svg()));
        prop_assert_eq!(chart.svg(), chart.svg());
    }
}
