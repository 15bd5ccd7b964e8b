//! A drive of another machine, and the network between machines: what the link costs over the bare exchange of the same
//! bytes.
//!
//! The lender's engine is a thread, and the driver with its front another one, joined by the link over the
//! loopback. The bare exchanges are two such threads with nothing but a socket, or TLS of the same library on one. Beside
//! them other systems that serve drives over a network.

mod bare;
mod failover;
mod network;
mod parts;
mod reconnect;
mod scale;
mod servers;
mod stores;
mod transfers;

use std::path::PathBuf;
use std::sync::{Arc, RwLock, mpsc};
use std::time::Duration;

use rackbus_devices::nvme::{BackingConfig, Nvme};
use rackbus_devices::{Lost, class};
use rackbus_driver::{Drive, DriveOptions, InThreadFunction};
use rackbus_identity::{CertificateAuthority, Subject};
use rackbus_link::tcp::TcpLink;
use rackbus_link::{
    Connect, Conversation, Hello, Link, Listener, OfferedMedium, Purpose, VERSIONS,
};
use rackbus_memory::exchange::session::SessionSide;
use rackbus_memory::{Carried, CarriedSession, Carrier, Handles};
use rackbus_pci::engine::EngineOptions;
use rackbus_pci::{Engine, MediumAccess};

use crate::lent::{self, config};
use crate::machine::{Regime, wait_quiet};
use crate::nvme::{ClientLoad, DATA};
use crate::report::Case;
use crate::{BenchError, Report};

/// How long and how often the cases of this area are measured.
#[derive(Debug, Clone)]
pub struct Settings {
    /// Pairs of runs for each case.
    pub runs: usize,
    /// How long each run takes.
    pub time: Duration,
    /// The folder for the certificate authority that both ends have.
    pub dir: PathBuf,
    /// Only cases whose name contains this.
    pub only: String,
    /// How long to wait for the machine to become quiet.
    pub patience: Duration,
}

/// What is done, as it is named; and whether its figure is how long one takes, in microseconds, or how many
/// thousands there are in a second.
const CASES: [(&str, ClientLoad, bool); 3] = [
    ("4k read qd1", ClientLoad::new(4096, 1, false, true), true),
    ("4k read qd32", ClientLoad::new(4096, 32, false, true), false),
    ("128k read qd8", ClientLoad::new(128 << 10, 8, false, false), false),
];

fn failed(error: impl std::fmt::Display) -> BenchError {
    BenchError::Peer(error.to_string())
}

/// The link of a host that listens at `listen`.
fn link(authority: &CertificateAuthority, host: &str, listen: &str) -> Result<TcpLink, BenchError> {
    let credentials = authority.issue(&Subject::Node(host.to_owned())).map_err(failed)?;
    Ok(TcpLink::new("bench", listen, listen, Arc::new(RwLock::new(credentials))))
}

/// What is carried by one connection alone.
fn carried(carrier: Box<dyn Carrier>, side: SessionSide) -> Result<Carried, BenchError> {
    let session = CarriedSession::of_one_connection(side).map_err(failed)?;
    Ok(Carried { carrier, session, side, lane: None })
}

/// Lends a drive in memory to the first who connects, for as long as it is there.
fn lend(listener: &dyn Listener) -> Result<(), BenchError> {
    let caller = listener.accept().map_err(failed)?;
    let incoming = caller.hear().ok_or_else(|| failed("nobody was let in"))?;
    let model = Nvme::new(&config(BackingConfig::Memory)).map_err(failed)?;
    let engine = Engine::start("nvme0", Box::new(model), EngineOptions::default());
    let engine = engine.map_err(failed)?;
    let carried =
        incoming.stream.carrier().map(|it| carried(it, SessionSide::Answers)).transpose()?;
    let offer = engine.handle().call(|endpoint| endpoint.serve_medium(carried));
    let offer = offer.map_err(failed)?.map_err(failed)?;
    let stream = incoming.accept().map_err(failed)?;
    let (class, description) = (offer.class.to_owned(), offer.description);
    OfferedMedium { class, description, session: None }
        .send(&*stream, &Handles::new())
        .map_err(failed)?;
    stream.wait_closed();
    Ok(())
}

/// A drive of alpha's, in the hands of a driver on beta.
struct Borrowed {
    drive: Drive,
    _stream: Arc<dyn Conversation>,
}

impl Borrowed {
    fn new(authority: &CertificateAuthority) -> Result<Borrowed, BenchError> {
        let free = std::net::TcpListener::bind("127.0.0.1:0").map_err(failed)?;
        let place = free.local_addr().map_err(failed)?.to_string();
        drop(free);
        let alpha = link(authority, "alpha", &place)?;
        let beta = link(authority, "beta", "127.0.0.1:0")?;
        let listener = alpha.listen("alpha").map_err(failed)?;
        let (failure, failures) = mpsc::channel();
        std::thread::spawn(move || {
            if let Err(error) = lend(&*listener) {
                let _ = failure.send(error);
            }
        });
        let service =
            Purpose::Medium { device: "nvme0".to_owned(), lease: 1, epoch: 1, lanes: Vec::new() };
        let (from, to) = ("beta".to_owned(), "alpha".to_owned());
        let hello = Hello { versions: VERSIONS, rack: "bench".to_owned(), from, to, service };
        let connected = beta.connect(&alpha.address("alpha"), &hello).and_then(|stream| {
            let (medium, _) = OfferedMedium::receive(&*stream, "alpha")?;
            Ok((stream, medium))
        });
        let (stream, medium) =
            connected.map_err(|error| failures.try_recv().unwrap_or_else(|_| failed(error)))?;
        let carrier = stream.carrier().ok_or_else(|| failed("the link carries nothing"))?;
        let access = MediumAccess::Carried(carried(carrier, SessionSide::Asks)?);
        let front = class::front(&medium.class, &medium.description, access, Lost::new(|| {}));
        let device = Box::new(InThreadFunction::new(front.map_err(failed)?));
        let drive = Drive::with_device(device, DriveOptions { depth: 32, data: DATA })?;
        Ok(Borrowed { drive, _stream: stream })
    }
}

/// Runs all cases and adds their rows to `report`.
///
/// # Errors
/// When rackbus itself fails.
pub fn run(settings: &Settings, regime: &Regime, report: &mut Report) -> Result<(), BenchError> {
    std::fs::create_dir_all(&settings.dir).map_err(BenchError::io("making the work directory"))?;
    let load = wait_quiet(0.5, settings.patience);
    let (name, runs) = (regime.name(), settings.runs);
    report.note(&format!("regime: {name}; load before: {load:.2}; {runs} runs each"));
    let authority = CertificateAuthority::open(&settings.dir, "bench").map_err(failed)?;
    let mut borrowed = Borrowed::new(&authority)?;
    for (case, load, is_latency) in CASES {
        if !case.contains(&settings.only) {
            continue;
        }
        let (unit, time) = (if is_latency { "us" } else { "kIOPS" }, settings.time);
        let figure = |rate: f64| if is_latency { 1e6 / rate } else { rate / 1e3 };
        for (peer_name, over_tls) in [("the bytes over TLS", true), ("the bytes over TCP", false)] {
            let case = Case { area: "machines", case, peer_name, unit, runs };
            report.compare(
                case,
                || Ok(figure(lent::run_anywhere(&mut borrowed.drive, &load, time)?)),
                || Ok(figure(bare::run(&authority, &load, over_tls, time)?)),
                |ours, peer| ours / peer,
            )?;
        }
    }
    servers::against(&mut borrowed, settings, report)?;
    drop(borrowed);
    between_hosts(&authority, settings, report)?;
    stores(&authority, settings, report)?;
    transfers::run(&authority, settings, report)?;
    after_failures(&authority, settings, report)?;
    for kind in [scale::StoreKind::Sqlite, scale::StoreKind::Etcd] {
        if format!("{SCALE} {}", kind.name()).contains(&settings.only) {
            scale::run(&settings.dir, kind, settings.time, report)?;
        }
    }
    Ok(())
}

/// Stores to memory of another machine, as they are named, and for how long nothing was stored before each: what is looked
/// for all the time is found sooner than what comes after a rest.
const STORES: [(&str, Duration); 2] = [
    ("a store is seen by another machine", Duration::ZERO),
    ("a store is seen by another machine, after 30 ms", Duration::from_millis(30)),
];

/// How long a store to memory of another machine takes until a program sees it there, against as many bytes that are sent.
fn stores(
    authority: &CertificateAuthority,
    settings: &Settings,
    report: &mut Report,
) -> Result<(), BenchError> {
    let wanted: Vec<_> =
        STORES.into_iter().filter(|(case, _)| case.contains(&settings.only)).collect();
    if wanted.is_empty() {
        return Ok(());
    }
    let Some(mut memory) = stores::FarMemory::start(&settings.dir)? else {
        report.left_out(STORES[0].0, "there is no rackbus");
        return Ok(());
    };
    let (time, runs, load) = (settings.time, settings.runs, ClientLoad::new(8, 1, false, false));
    for (case, pause) in wanted {
        let peer_name = "the bytes over TLS, one way";
        report.compare(
            Case { area: "machines", case, peer_name, unit: "us", runs },
            || memory.one_way(pause, time),
            || Ok(1e6 / bare::run(authority, &load, true, time)? / 2.0),
            |ours, peer| ours / peer,
        )?;
    }
    Ok(())
}

/// What is measured after failures, as it is named.
const RECONNECT: &str = "reconnect of the link";
const FAILOVER: &str = "failover of the control plane";

/// How long it takes until a network that is back, and a rack whose leader was killed, are of use again.
fn after_failures(
    authority: &CertificateAuthority,
    settings: &Settings,
    report: &mut Report,
) -> Result<(), BenchError> {
    let (unit, runs, relate) = ("ms", settings.runs, |ours: f64, peer: f64| ours / peer);
    if RECONNECT.contains(&settings.only) {
        if let Some(mut drive) = reconnect::FarDrive::borrow(&settings.dir)? {
            let server = reconnect::FarServer::start(authority)?;
            let peer_name = "a connection and its TLS handshake";
            let case = Case { area: "machines", case: RECONNECT, peer_name, unit, runs };
            report.compare(case, || drive.run(), || server.run(), relate)?;
        } else {
            report.left_out(RECONNECT, "there is no rackbus");
        }
    }
    if FAILOVER.contains(&settings.only) {
        if let Some(planes) = failover::Failover::start(&settings.dir)? {
            let planes = std::cell::RefCell::new(planes);
            let peer_name = "an election by etcd alone";
            let case = Case { area: "machines", case: FAILOVER, peer_name, unit, runs };
            let (ours, peer) = (|| planes.borrow_mut().run(), || planes.borrow_mut().elect());
            report.compare(case, ours, peer, relate)?;
        } else {
            report.left_out(FAILOVER, "there is no rackbus or no etcd");
        }
    }
    Ok(())
}

/// What a thousand hosts with one control plane are called.
const SCALE: &str = "control plane over";

/// What a stream between two hosts in the rack's network is called, and the bytes of its large segments.
const STREAM: &str = "tcp 1 stream";
const SEGMENT: usize = 64 << 10;

/// A stream of TCP between hosts of two machines, against as many bytes in pieces of a large segment's.
fn between_hosts(
    authority: &CertificateAuthority,
    settings: &Settings,
    report: &mut Report,
) -> Result<(), BenchError> {
    if !STREAM.contains(&settings.only) {
        return Ok(());
    }
    let Some(apart) = network::MachineNetwork::start(&settings.dir, 1500)? else {
        report.note("tcp 1 stream: left out, it takes root and the rackbus command");
        return Ok(());
    };
    let load = ClientLoad::new(SEGMENT, 8, false, false);
    let gigabits = |rate: f64| rate * SEGMENT as f64 * 8e-9;
    for (peer_name, over_tls) in [("the bytes over TLS", true), ("the bytes over TCP", false)] {
        let (unit, runs) = ("Gbit/s", settings.runs);
        report.compare(
            Case { area: "machines", case: STREAM, peer_name, unit, runs },
            || Ok(apart.pair.streams(1, settings.time)?.rate),
            || Ok(gigabits(bare::run(authority, &load, over_tls, settings.time)?)),
            |ours, peer| ours / peer,
        )?;
    }
    Ok(())
}
