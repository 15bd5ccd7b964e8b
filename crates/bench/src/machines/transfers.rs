//! Copies into memory of another machine, by the copy engine and by the copy service (CMMC), against UCX's puts over TCP.
//!
//! A copy counts from when it is submitted until all of it has taken effect on the other machine. Each is of other bytes than
//! the one before. UCX does not encrypt: what as many bytes take over TLS, between two threads that do nothing else, one message
//! at a time, is a row of its own.

use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use rackbus_attach::{CarriedCopy, Copier, Extent, RemoteSegment, Signal};
use rackbus_identity::CertificateAuthority;
use rackbus_memory::Region;
use rackbus_memory::copy::{
    CopyEngine, CopyEngineOptions, CopyLocation, Transaction, TransactionState,
};
use rackbus_rma::{ProviderChoice, providers};

use super::stores::{FarPrograms, again};
use super::{Settings, bare, failed};
use crate::memory::networks::ucx;
use crate::nvme::ClientLoad;
use crate::peers::installed;
use crate::report::{Case, median};
use crate::{BenchError, Report};

const SIZES: [usize; 3] = [64 << 10, 1 << 20, 16 << 20];
/// Copies of a run at least, however long they take.
const LEAST: usize = 4;

/// What is measured, as it is named, without its size.
const DMA: &str = "DMA to another machine";
const CMMC: &str = "CMMC to another machine";
/// What bounds both where the link carries the bytes.
const TLS: &str = "bytes over TLS to another machine";

/// What the bytes go by: the link alone, or an RDMA lane beside it, which is asked for by this in the rack file.
const WAYS: [(&str, &str); 2] = [("", ""), (" by RDMA", "[link]\nrdma = \"tcp\"\n")];
/// Copies until a lane is there, which the first one asks for.
const UNTIL_LANE: usize = 20;

fn named(what: &str, way: &str, bytes: usize) -> String {
    format!("{what}{way}, {}", rackbus_fabric::rack::format_size(bytes as u64))
}

/// Gigabytes a second of copies of so many bytes: by their median, as UCX says it of its own.
fn rate(
    (bytes, time): (usize, Duration),
    mut copy: impl FnMut(usize) -> Result<(), BenchError>,
) -> Result<f64, BenchError> {
    let (begun, mut times) = (Instant::now(), Vec::new());
    while times.len() < LEAST || begun.elapsed() < time {
        let from = Instant::now();
        copy(times.len() % 2)?;
        times.push(from.elapsed().as_secs_f64());
    }
    Ok(bytes as f64 / 1e9 / median(&times))
}

/// Two sources, of which every byte differs.
fn sources(programs: &FarPrograms, bytes: usize) -> Result<[Extent; 2], BenchError> {
    let source = |value: u8| -> Result<Extent, BenchError> {
        let source = programs.on_beta.allocate(bytes as u64)?;
        source.mapping().whole().fill(value);
        Ok(source)
    };
    Ok([source(1)?, source(2)?])
}

/// Copies all of one region into another, and waits for that.
fn engine_copy(
    engine: &CopyEngine,
    from: &Arc<Region>,
    (segment, to): (&Arc<RemoteSegment>, &Arc<Region>),
    bytes: usize,
) -> Result<(), BenchError> {
    let copy = Transaction::of(CopyLocation::shared(from, 0), CopyLocation::shared(to, 0), bytes);
    let copy = copy.map_err(failed)?.between(CarriedCopy::new(segment, to));
    let ticket = engine.channels()[0].submit(copy);
    match ticket.wait(None) {
        TransactionState::Done => Ok(()),
        other => Err(failed(format!("a copy ended as {other:?}"))),
    }
}

/// Measures those whose names are wanted.
///
/// # Errors
/// When rackbus itself fails.
pub(super) fn run(
    authority: &CertificateAuthority,
    settings: &Settings,
    report: &mut Report,
) -> Result<(), BenchError> {
    let dir = &settings.dir;
    run_tls(authority, settings, report)?;
    for (nth, way) in WAYS.into_iter().enumerate() {
        run_way(&dir.join(format!("way{nth}")), settings, report, way)?;
    }
    Ok(())
}

/// Puts of so many bytes by UCX, in gigabytes a second.
fn ucx_rate(bytes: usize, time: Duration) -> Result<f64, BenchError> {
    let options = ["-d", "lo", "-x", "tcp", "-D", "zcopy"];
    Ok(bytes as f64 / 1e3 / ucx("put_bw", bytes, &options, time)?)
}

/// As many bytes over TLS, without memory that is kept the same.
fn run_tls(
    authority: &CertificateAuthority,
    settings: &Settings,
    report: &mut Report,
) -> Result<(), BenchError> {
    let wanted = SIZES.into_iter().filter(|bytes| named(TLS, "", *bytes).contains(&settings.only));
    for bytes in wanted.filter(|_| installed("ucx_perftest")) {
        let (load, case) = (ClientLoad::new(bytes, 1, false, false), named(TLS, "", bytes));
        let (unit, runs, time) = ("GB/s", settings.runs, settings.time);
        report.compare(
            Case { area: "machines", case: &case, peer_name: "UCX tcp", unit, runs },
            || Ok(bytes as f64 / 1e9 * bare::run(authority, &load, true, time)?),
            || ucx_rate(bytes, time),
            |ours, peer| ours / peer,
        )?;
    }
    Ok(())
}

/// Those of one way, in a rack of its own.
fn run_way(
    dir: &Path,
    settings: &Settings,
    report: &mut Report,
    (way, in_file): (&str, &str),
) -> Result<(), BenchError> {
    let all = SIZES.into_iter().flat_map(|bytes| [(DMA, bytes), (CMMC, bytes)]);
    let wanted: Vec<_> =
        all.filter(|(what, bytes)| named(what, way, *bytes).contains(&settings.only)).collect();
    if wanted.is_empty() {
        return Ok(());
    }
    if !installed("ucx_perftest") {
        report.left_out(DMA, "ucx_perftest is not installed");
        return Ok(());
    }
    if !in_file.is_empty() && providers(&ProviderChoice::Named("tcp".to_owned())).is_err() {
        report.left_out(&format!("{DMA}{way}"), "libfabric is not installed");
        return Ok(());
    }
    std::fs::create_dir_all(dir).map_err(BenchError::io("a directory of machines"))?;
    let Some(programs) = FarPrograms::start_with(dir, in_file)? else {
        report.left_out(DMA, "there is no rackbus");
        return Ok(());
    };
    let options = CopyEngineOptions::default();
    let engine = CopyEngine::start("bench", &options).map_err(BenchError::io("a copy engine"))?;
    let (copier, time, runs) = (Copier::start(&options)?, settings.time, settings.runs);
    for (what, bytes) in wanted {
        let area = programs.on_alpha.export_area(bytes as u64)?;
        let sources = sources(&programs, bytes)?;
        let key = area.key();
        // One connection each: further ones have memory of their own, which is kept the same too.
        let mut copy: Box<dyn FnMut(usize) -> Result<(), BenchError>> = if what == DMA {
            let segment = again(|| programs.on_beta.connect(key.node, key.segment, 1_000))?;
            let (segment, sources) = (Arc::new(segment), &sources);
            let mapping = segment.map(0, bytes as u64)?;
            let engine = &engine;
            Box::new(move |nth| {
                let from = sources[nth].mapping().region();
                engine_copy(engine, from, (&segment, mapping.region()), bytes)
            })
        } else {
            let remote = again(|| programs.on_beta.register_area(key))?;
            let (copier, sources) = (&copier, &sources);
            Box::new(move |nth| {
                let source = (sources[nth].mapping(), 0);
                let writing = copier.write(&remote, 0, source, bytes, Signal::None);
                writing.and_then(|it| it.finish()).map_err(failed)
            })
        };
        if !in_file.is_empty() {
            (0..UNTIL_LANE).try_for_each(|nth| copy(nth % 2))?;
        }
        let (case, load) = (named(what, way, bytes), (bytes, time));
        let case = Case { area: "machines", case: &case, peer_name: "UCX tcp", unit: "GB/s", runs };
        let before = programs.copied_by_lane()?;
        report.compare(
            case,
            || rate(load, &mut copy),
            || ucx_rate(bytes, time),
            |ours, peer| ours / peer,
        )?;
        // A row is of what its name says.
        if (programs.copied_by_lane()? > before) == in_file.is_empty() {
            return Err(failed(format!("{what}{way}: the bytes did not go by what it names")));
        }
    }
    Ok(())
}
