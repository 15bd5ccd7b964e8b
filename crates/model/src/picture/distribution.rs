//! Distributions of latencies, as charts.
//!
//! A cumulative distribution lying on its side: shares of jobs to the right, by nines, and the time
//! that such a share takes at most upwards. So lines end beside each other, where their labels are,
//! and a tail has as much room as the middle.

use super::axis::{Axis, Scale, Unit};
use super::chart::{Chart, Series};
use crate::time::Time;

/// Where lines end: at two nines, or as many more as the rarest job needs, up to five.
const NINES: (f64, f64) = (2.0, 5.0);
/// Times that are further apart than this need a logarithmic axis.
const FAR: f64 = 20.0;

impl Chart {
    /// Distributions of latencies, each a name and, ascending, spans with the share of all jobs
    /// that takes no longer. The 50th and 99th percentiles are marked.
    pub fn distributions(title: &str, of: &[(String, Vec<(Time, f64)>)]) -> Chart {
        let rarest = of.iter().flat_map(|(_, points)| points).map(|point| point.1);
        let nines = rarest.filter_map(|share| Scale::Nines.at(share)).fold(NINES.0, f64::max);
        let end = 1.0 - 10f64.powf(-nines.min(NINES.1));
        let spans = || of.iter().flat_map(|(_, points)| points).map(|point| point.0.ns());
        let far = spans().fold(0.0, f64::max) > FAR * spans().fold(f64::INFINITY, f64::min);
        let scale = if far { Scale::Log10 } else { Scale::Linear };
        Chart {
            title: title.to_owned(),
            subtitle: "How long jobs take: of the given share, none takes longer".to_owned(),
            x: Axis::new("Share of jobs", Unit::Share, Scale::Nines),
            y: Axis::new("Latency", Unit::Nanoseconds, scale),
            series: of.iter().map(|(name, points)| series(name, points, end)).collect(),
        }
    }
}

fn series(name: &str, points: &[(Time, f64)], end: f64) -> Series {
    let mut line = Vec::new();
    let mut from = 0.0;
    for &(span, share) in points {
        if from < end {
            line.extend([(from, span.ns()), (share.min(end), span.ns())]);
            from = share;
        }
    }
    let marks = [0.5, 0.99].map(|share| Some((share, quantile(points, share)?.ns())));
    let dots: Vec<(f64, f64)> = marks.into_iter().flatten().collect();
    let texts = ["p50", "p99"].iter().zip(&dots);
    let texts: Vec<String> =
        texts.map(|(name, dot)| format!("{name} {}", Unit::Nanoseconds.text(dot.1))).collect();
    Series { name: name.to_owned(), note: texts.join(", "), line, dots, published: Vec::new() }
}

/// The least span that this share of jobs does not exceed.
fn quantile(points: &[(Time, f64)], share: f64) -> Option<Time> {
    points.iter().find(|point| point.1 >= share - 1e-12).map(|point| point.0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn percentiles_are_marked() {
        let points =
            vec![(Time::from_ns(100), 0.6), (Time::from_ns(200), 0.985), (Time::from_us(5), 1.0)];
        let chart = Chart::distributions("t", &[("reads".to_owned(), points)]);
        let series = &chart.series[0];
        assert_eq!(series.dots, [(0.5, 100.0), (0.99, 5000.0)]);
        assert_eq!(series.note, "p50 100 ns, p99 5 us");
        assert_eq!(series.line.first(), Some(&(0.0, 100.0)));
        assert_eq!(series.line.last(), Some(&(0.99, 5000.0)));
        assert_eq!(chart.y.scale, Scale::Log10);
    }
}
