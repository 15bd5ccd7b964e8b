//! Pictures are well-formed, the same each time, and their labels do not meet.

use proptest::prelude::*;

use super::bars::{Bars, Pair};
use super::chart::{Chart, Scale, Series};
use super::diagram::{Diagram, Edge, Node};
use super::timeline::{Passage, Timeline};
use super::*;

/// Whether tags open and close in pairs, and nothing that XML keeps for itself stands bare.
fn well_formed(svg: &str) -> bool {
    let mut open: Vec<&str> = Vec::new();
    let mut rest = svg;
    while let Some(begin) = rest.find('<') {
        let text = &rest[..begin];
        if text.contains('>')
            || text
                .replace("&amp;", "")
                .replace("&lt;", "")
                .replace("&gt;", "")
                .replace("&quot;", "")
                .contains('&')
        {
            return false;
        }
        let Some(end) = rest[begin..].find('>') else { return false };
        let tag = &rest[begin + 1..begin + end];
        let name = tag.trim_start_matches('/').split([' ', '/']).next().unwrap_or_default();
        if tag.matches('"').count() % 2 == 1 {
            return false;
        } else if tag.starts_with('/') {
            if open.pop() != Some(name) {
                return false;
            }
        } else if !tag.ends_with('/') {
            open.push(name);
        }
        rest = &rest[begin + end + 1..];
    }
    open.is_empty() && rest.trim().is_empty()
}

fn chart(x: Scale, y: Scale, names: &[String], points: &[(f64, f64)]) -> Chart {
    let series = names.iter().enumerate().map(|(nth, name)| Series {
        name: name.clone(),
        points: points.iter().map(|(a, b)| (*a, b * (nth + 1) as f64)).collect(),
        measured: nth % 2 == 1,
    });
    Chart {
        title: "A <b> & \"c\"".into(),
        subtitle: "x > y".into(),
        x,
        y,
        series: series.collect(),
    }
}

#[test]
fn all_pictures_are_well_formed() {
    let names = ["one & two".to_owned(), "<three>".to_owned()];
    for scale in [Scale::Linear, Scale::Log, Scale::Bytes, Scale::Spans] {
        let svg = chart(scale, Scale::Linear, &names, &[(64.0, 1.0), (4096.0, 9.0)]).svg();
        assert!(well_formed(&svg), "{svg}");
        assert!(svg.contains("A &lt;b&gt; &amp; &quot;c&quot;") && svg.contains("one &amp; two"));
        assert!(well_formed(&chart(scale, scale, &names, &[]).svg()));
    }
    let pair = Pair { name: "a<b".into(), published: 1.54, modelled: 1.55, unit: "Gbps".into() };
    assert!(well_formed(
        &Bars { title: "t".into(), subtitle: "s".into(), pairs: vec![pair] }.svg()
    ));
    let passage = Passage { from: 0, to: 1, begin: 1.0, end: 5.0, label: "MRd".into(), kind: 0 };
    let lanes = vec!["a".to_owned(), "b".to_owned()];
    let timeline =
        Timeline { title: "t".into(), subtitle: "s".into(), lanes, passages: vec![passage; 200] };
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
        ends: [2 * h, 2 * h + 1],
        label: "Gen3 x8".into(),
        there: h as f64 / 40.0,
        back: 0.0,
    });
    let svg = Diagram { title: "t".into(), nodes, edges: edges.collect() }.svg();
    assert!(well_formed(&svg));
    assert!(svg.contains("16 of 40 hosts") && svg.contains(">h39<") && !svg.contains(">h3<"));
}

proptest! {
    #[test]
    fn labels_keep_their_distance_and_order(wanted in prop::collection::vec(0.0f64..300.0, 1..15)) {
        let placed = apart(&wanted, 17.0, (0.0, 300.0));
        for (a, one) in placed.iter().enumerate() {
            prop_assert!((-1e-6..=300.0 + 1e-6).contains(one), "{placed:?}");
            for (b, other) in placed.iter().enumerate().skip(a + 1) {
                prop_assert!((one - other).abs() >= 17.0 - 1e-6, "{placed:?}");
                prop_assert!((wanted[a] - wanted[b]) * (one - other) >= -1e-6);
            }
        }
    }

    #[test]
    fn any_data_draws_the_same_picture_twice(
        points in prop::collection::vec((1e-3f64..1e9, 0.0f64..1e12), 0..30),
        names in prop::collection::vec("\\PC{0,12}", 0..5),
    ) {
        let chart = chart(Scale::Log, Scale::Linear, &names, &points);
        prop_assert!(well_formed(&chart.svg()));
        prop_assert_eq!(chart.svg(), chart.svg());
    }
}
