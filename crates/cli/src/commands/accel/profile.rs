//! `rackbus accel profile`: what operations cost on this machine, by size and content.

use std::path::{Path, PathBuf};
use std::time::Duration;

use rackbus_devices::accel::profile::{CONTENTS, Content, PARTS, measure, rentable};
use rackbus_model::picture::chart::{Chart, Series};
use rackbus_model::picture::{Axis, Scale, Unit};
use rackbus_qos::Point;
use rackbus_spec::accel::Operation;
use serde::Serialize;

use crate::output::{Failure, Output};

/// Measure what each operation costs on one processor of this machine, by message size, content and
/// the ratio of output to input: what admission reckons with.
#[derive(Debug, clap::Args)]
#[command(after_help = "Examples:
  rackbus accel profile
  rackbus accel profile aes256gcm deflate
  rackbus accel profile --picture profile.svg
  rackbus accel profile zstd unzstd --ratio-picture ratio.svg    by how far messages shrink or grow
  rackbus accel profile --json | jq '.[] | select(.operation == \"zstd\")'")]
pub struct Args {
    /// The operations; without any, all.
    #[arg(value_name = "OPERATION")]
    operations: Vec<String>,
    /// Draw throughput against message size into this file (SVG).
    #[arg(long, value_name = "FILE")]
    picture: Option<PathBuf>,
    /// Measure messages that compress better and worse, too, and draw throughput against the ratio of output to input
    /// into this file (SVG); for operations that compress, or undo that.
    #[arg(long, value_name = "FILE")]
    ratio_picture: Option<PathBuf>,
}

const SIZES: [usize; 8] = [64, 256, 1024, 4096, 16_384, 65_536, 262_144, 1_048_576];
/// Bytes of a message of mixed content, before it is compressed.
const MIXED: usize = 65_536;
/// For how long each point is measured.
const LENGTH: Duration = Duration::from_millis(3);

/// What an engine did with messages of one size and content.
#[derive(Debug, Serialize)]
struct Measured {
    operation: &'static str,
    content: &'static str,
    #[serde(flatten)]
    point: Point,
    /// Input bytes each second.
    bytes_per_second: f64,
}

impl Args {
    pub fn run(&self, output: &Output) -> Result<(), Failure> {
        let operations = self.operations()?;
        let varies = |operation: &Operation| contents(*operation).len() > 1;
        if self.ratio_picture.is_some() && !operations.iter().any(varies) {
            let error = "none of these operations has a ratio of output to input that varies";
            return Err(Failure::usage(error, "name some that compress: deflate, zstd, lz4"));
        }
        output.progress("measuring on one processor");
        let mut measured = Vec::new();
        for operation in &operations {
            for content in contents(*operation) {
                for size in SIZES {
                    measured.push(measure_one(*operation, size, *content)?);
                }
            }
        }
        if let Some(file) = &self.picture {
            draw(file, &picture(&measured))?;
        }
        if let Some(file) = &self.ratio_picture {
            let mut mixed = Vec::new();
            for operation in operations.iter().filter(|it| varies(it)) {
                for random in (0..=PARTS).step_by(2) {
                    mixed.push(measure_one(*operation, MIXED, Content::Mixed(random))?);
                }
            }
            draw(file, &ratio_picture(&mixed))?;
            measured.append(&mut mixed);
        }
        output.result(&measured, |o| {
            let head = ["operation", "content", "bytes", "output/input", "ns", "MB/s"];
            let row = |m: &Measured| {
                vec![
                    m.operation.into(),
                    m.content.into(),
                    m.point.message.to_string().into(),
                    format!("{:.3}", f64::from(m.point.ratio) / 1000.0).into(),
                    format!("{:.0}", m.point.cost_ns).into(),
                    format!("{:.1}", m.bytes_per_second / 1e6).into(),
                ]
            };
            o.table(&head, measured.iter().map(row).collect());
        });
        Ok(())
    }

    fn operations(&self) -> Result<Vec<Operation>, Failure> {
        if self.operations.is_empty() {
            return Ok(rentable().collect());
        }
        let named = self.operations.iter().map(|name| {
            rentable().find(|operation| operation.name() == name).ok_or_else(|| {
                let names: Vec<_> = rentable().map(Operation::name).collect();
                let error = format!("there is no operation `{name}`");
                Failure::usage(error, format!("use some of {}", names.join(", ")))
            })
        });
        named.collect()
    }
}

/// What one operation costs with messages of one size and content.
fn measure_one(operation: Operation, size: usize, content: Content) -> Result<Measured, Failure> {
    let point = measure(operation, size, content, LENGTH).map_err(|status| {
        Failure::new(format!("{} failed: {status}", operation.name()), "report this")
    })?;
    let bytes_per_second = point.message as f64 * 1e9 / point.cost_ns;
    Ok(Measured { operation: operation.name(), content: name(content), point, bytes_per_second })
}

fn draw(file: &Path, chart: &Chart) -> Result<(), Failure> {
    std::fs::write(file, chart.svg()).map_err(|cause| {
        Failure::usage(format!("{}: {cause}", file.display()), "name another file")
    })
}

/// Contents that make a difference to an operation.
fn contents(operation: Operation) -> &'static [Content] {
    match operation {
        Operation::Deflate
        | Operation::Inflate
        | Operation::ZstdCompress
        | Operation::ZstdDecompress
        | Operation::Lz4Compress
        | Operation::Lz4Decompress => &CONTENTS,
        _ => &[Content::Text],
    }
}

fn name(content: Content) -> &'static str {
    match content {
        Content::Zeroes => "zeroes",
        Content::Text => "text",
        Content::Noise => "noise",
        Content::Mixed(_) => "mixed",
    }
}

/// A line for each operation and content.
fn picture(measured: &[Measured]) -> Chart {
    let mut series: Vec<Series> = Vec::new();
    for m in measured {
        let label = format!("{}, {}", m.operation, m.content);
        if series.last().is_none_or(|last| last.name != label) {
            series.push(Series::line(label, Vec::new()));
        }
        if let Some(last) = series.last_mut() {
            last.line.push((m.point.message as f64, m.bytes_per_second));
        }
    }
    Chart {
        title: "What an engine does each second depends on the message".into(),
        subtitle: "input bytes each second on one processor, measured".into(),
        x: Axis::new("message", Unit::Bytes, Scale::Log2),
        y: Axis::new("throughput", Unit::BytesPerSecond, Scale::Log2),
        series,
    }
}

/// A line for each operation: throughput by how much comes out of a byte.
fn ratio_picture(mixed: &[Measured]) -> Chart {
    let mut series: Vec<Series> = Vec::new();
    for m in mixed {
        if series.last().is_none_or(|last| last.name != m.operation) {
            series.push(Series::line(m.operation.to_owned(), Vec::new()));
        }
        if let Some(last) = series.last_mut() {
            last.line.push((f64::from(m.point.ratio.max(1)) / 1000.0, m.bytes_per_second));
        }
    }
    for one in &mut series {
        one.line.sort_by(|a, b| a.0.total_cmp(&b.0));
    }
    Chart {
        title: "What an engine does each second depends on what comes out".into(),
        subtitle: "input bytes each second on one processor, messages of 64 KiB before compression, measured".into(),
        x: Axis::new("output for a byte of input", Unit::Plain("B".into()), Scale::Log2),
        y: Axis::new("throughput", Unit::BytesPerSecond, Scale::Log2),
        series,
    }
}
