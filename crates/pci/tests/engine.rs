//! What an engine counts.

mod common;

use std::sync::atomic::Ordering;

use common::{Copier, GO, LENGTH, STATUS};
use rackbus_fabric::Lending;
use rackbus_pci::Engine;
use rackbus_pci::endpoint::FunctionRegion;
use rackbus_pci::engine::EngineOptions;
use rackbus_pci::vfio_user::{EngineDevice, ServedDevice};
use rackbus_spec::pcie::{Command, header};

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
