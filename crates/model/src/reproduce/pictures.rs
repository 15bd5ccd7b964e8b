//! The figures drawn: published values beside modelled ones.

use super::{Kind, Row};
use crate::picture::bars::{Bars, Pair};
use crate::picture::chart::{Chart, Series};
use crate::picture::{Axis, Scale, Unit};

/// Name and SVG text of each picture of `rows`.
pub fn pictures(rows: &[Row]) -> Vec<(&'static str, String)> {
    let of = |ids: &[&str]| -> Vec<&Row> {
        let numbers = rows.iter().filter(|row| !matches!(row.kind, Kind::Relation | Kind::Exact));
        numbers.filter(|row| ids.contains(&row.id)).collect()
    };
    let title = "Published and modelled";
    let device_lending = of(&["DL1", "DL2", "DL3", "DL6", "DL8", "DL13"]);
    let bandwidth = [("IXH610, Gen2 x8", of(&["S1"])), ("PXH830, Gen3 x16", of(&["S2"]))];
    let latency = [("IXH610", of(&["S5"]))];
    vec![
        (
            "device-lending",
            bars(title, "Device Lending (2019): latency and bandwidth", &device_lending),
        ),
        (
            "marlin-hrdma",
            bars(
                title,
                "Marlin (2014): remote DMA, CMMC and Ethernet",
                &of(&["M1", "M2", "M11", "M12"]),
            ),
        ),
        (
            "marlin-latency",
            bars(
                title,
                "Marlin (2014): where the microseconds go",
                &of(&["M5", "M6", "M7", "M8", "M9", "M10"]),
            ),
        ),
        (
            "accelerator",
            bars(
                title,
                "Accelerator-as-a-Service (2024): two tenants",
                &of(&["A4", "A5", "A6", "A9"]),
            ),
        ),
        (
            "sisci-bandwidth",
            lines(
                "A processor's stores into remote memory",
                "Virtualized SISCI (2017), tables 5.4 and 5.5",
                ("Size of a copy", "Bandwidth", "MB/s"),
                &bandwidth,
            ),
        ),
        (
            "sisci-latency",
            lines(
                "From store to remote load",
                "Half a round trip; Virtualized SISCI (2017), table 5.6",
                ("Size of a store", "Latency", "us"),
                &latency,
            ),
        ),
    ]
}

fn bars(title: &str, subtitle: &str, rows: &[&Row]) -> String {
    let pair = |row: &&Row| Pair {
        name: format!("{} {}", row.id, row.case),
        published: row.published,
        modelled: row.modelled,
        unit: row.unit.to_owned(),
    };
    let (title, subtitle) = (title.to_owned(), subtitle.to_owned());
    Bars { title, subtitle, pairs: rows.iter().map(pair).collect() }.svg()
}

fn lines(
    title: &str,
    subtitle: &str,
    (x, y, unit): (&str, &str, &str),
    groups: &[(&str, Vec<&Row>)],
) -> String {
    let mut series = Vec::new();
    for (name, rows) in groups {
        let points = |value: fn(&Row) -> f64| {
            rows.iter().filter_map(|row| Some((bytes(&row.case)?, value(row)))).collect()
        };
        let line = Series::line(*name, points(|row| row.modelled));
        series.push(line.published(points(|row| row.published)));
    }
    let (title, subtitle) = (title.to_owned(), subtitle.to_owned());
    let x = Axis::new(x, Unit::Bytes, Scale::Log2);
    let y = Axis::new(y, Unit::Plain(unit.to_owned()), Scale::Linear);
    Chart { title, subtitle, x, y, series }.svg()
}

/// Bytes in a case's name: `64 KB`.
fn bytes(case: &str) -> Option<f64> {
    let (number, unit) = case.split_once(' ')?;
    let factor = match unit {
        "B" => 1.0,
        "KB" => 1024.0,
        "MB" => 1_048_576.0,
        _ => return None,
    };
    Some(number.parse::<f64>().ok()? * factor)
}
