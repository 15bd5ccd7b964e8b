//! What an engine counts, and what it logs while it works for a user.

mod common;

use std::io;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex};

use common::{Copier, GO, LENGTH, STATUS};
use rackbus_fabric::Lending;
use rackbus_pci::Engine;
use rackbus_pci::endpoint::FunctionRegion;
use rackbus_pci::engine::EngineOptions;
use rackbus_pci::vfio_user::{EngineDevice, ServedDevice};
use rackbus_spec::pcie::{Command, header};

/// Lines of the log, from all threads.
#[derive(Debug, Clone, Default)]
struct Lines(Arc<Mutex<Vec<u8>>>);

impl io::Write for Lines {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.0.lock().unwrap().extend_from_slice(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl Lines {
    /// Those of this engine about refused accesses to memory that came since the last call.
    fn refusals(&self, engine: &str) -> Vec<String> {
        let bytes = std::mem::take(&mut *self.0.lock().unwrap());
        let text = String::from_utf8(bytes).unwrap();
        let its = |line: &&str| line.contains("DMA refused") && line.contains(engine);
        text.lines().filter(its).map(str::to_owned).collect()
    }
}

/// Has the function read memory that nobody lent it.
fn read_too_far(device: &EngineDevice) {
    let write = |region, offset, data: &[u8]| {
        device.write(region, offset, data.to_vec(), false).unwrap();
    };
    let command = Command::MEMORY_SPACE | Command::BUS_MASTER;
    write(FunctionRegion::Config, header::COMMAND.into(), &command.bits().to_le_bytes());
    write(FunctionRegion::Bar(0), LENGTH, &8u64.to_le_bytes());
    write(FunctionRegion::Bar(0), GO, &1u64.to_le_bytes());
    let status = || device.read(FunctionRegion::Bar(0), STATUS, 1).unwrap();
    while status() == [0] {
        std::thread::yield_now();
    }
    assert_eq!(status(), [2], "it was refused");
}

fn start(name: &str) -> (Engine, EngineDevice) {
    let engine = Engine::start(name, Copier::new(), EngineOptions::default()).unwrap();
    let device = EngineDevice::new(engine.handle().clone()).unwrap();
    (engine, device)
}

#[test]
fn what_an_engine_logs_is_about_the_lease_of_its_user() {
    let lines = Lines::default();
    let writer = lines.clone();
    tracing_subscriber::fmt()
        .with_ansi(false)
        .with_thread_names(true)
        .with_max_level(tracing::Level::DEBUG)
        .with_writer(move || writer.clone())
        .init();
    let (_engine, device) = start("logging");
    for lease in [7, 8] {
        let session = {
            let _about = tracing::info_span!("lease", id = lease).entered();
            device.session_of(Lending::alone(), None).unwrap()
        };
        read_too_far(&session);
        let refusals = lines.refusals("logging");
        let about = format!(" lease{{id={lease}}}: ");
        assert!(!refusals.is_empty() && refusals.iter().all(|line| line.contains(&about)));
    }
    // Of a user without a lease nothing is said.
    read_too_far(&device.session_of(Lending::alone(), None).unwrap());
    let refusals = lines.refusals("logging");
    assert!(!refusals.is_empty() && refusals.iter().all(|line| !line.contains("lease")));
}

#[test]
fn polls_that_find_nothing_are_counted_beside_those_that_find_work() {
    let (engine, device) = start("counting");
    let session = device.session_of(Lending::alone(), None).unwrap();
    let polls = || {
        let counters = engine.handle().counters();
        let [busy, idle] = [&counters.busy_polls, &counters.idle_polls];
        (busy.load(Ordering::Relaxed), idle.load(Ordering::Relaxed))
    };
    read_too_far(&session);
    // It sleeps only after a poll that found nothing.
    while engine.handle().counters().parks.load(Ordering::Relaxed) == 0 {
        std::thread::yield_now();
    }
    let (busy, idle) = polls();
    assert_eq!(busy, 1);
    assert!(idle > 0, "no poll found nothing, and it sleeps");
    // Register accesses wake it: it polls after each, and finds nothing.
    session.read(FunctionRegion::Bar(0), STATUS, 1).unwrap();
    while polls().1 == idle {
        std::thread::yield_now();
    }
    assert_eq!(polls().0, 1);
}
