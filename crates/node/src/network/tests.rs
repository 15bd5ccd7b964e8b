//! A host's network by itself: what it copies, counts, lends and believes.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use rackbus_control::network::{CaptureRequest, NodeNetwork};
use rackbus_link::shm::ShmLink;

use rackbus_net::{NetworkPort as _, Offload, SendOutcome};

use super::*;

const FUNCTION: &str = "alpha/nic0.vf1";

/// The network of alpha, whose hosts have two queues each.
pub(super) fn network() -> NetworkService {
    network_with("")
}

/// The same, with another line of its section.
fn network_with(line: &str) -> NetworkService {
    let text = format!(
        "name = \"t\"\n[network]\nqueues = 2\n{line}\n[hosts.alpha.devices.nic0]\nkind = \"nic\"\n\
         functions = 1\n[hosts.beta]\n"
    );
    let (rack, _) = rackbus_devices::class::parse_rack("rack.toml", &text).unwrap();
    let rack: Rack = rack;
    let ports = BTreeMap::from([(FUNCTION.to_owned(), PortOptions::default())]);
    let link = ShmLink::new("t", std::path::Path::new("/nowhere"), ["alpha", "beta"]);
    NetworkService::new(&rack, &ports, "alpha", Arc::new(link), false)
}

/// Queues of alpha's interface, whose threads are a test's.
pub(super) fn host_queues(network: &NetworkService) -> Vec<PortQueue> {
    let (station, _) = network.0.stations.named("alpha").unwrap();
    let queues: Vec<_> =
        (0..2).map(|number| network.0.port_queue(station, number).unwrap()).collect();
    let handles = queues.iter().map(|queue| queue.handle().clone()).collect();
    network.0.lock().ports.insert(station, LocalPort::new(handles, None));
    queues
}

/// Sends from both queues to the function until it is told to stop.
fn keep_busy(network: &NetworkService, mut queues: Vec<PortQueue>, stop: &AtomicBool) {
    let asked = network.0.asked.lock().unwrap().take().unwrap();
    let mut function = network.port(FUNCTION).unwrap();
    function.attend(true);
    let (_, own) = network.0.stations.named("alpha").unwrap();
    let frame = |number: usize| {
        let head = [&function.mac().0[..], &own.mac.0, &[0x88, 0xb5]].concat();
        [&head[..], &[0xa0 + number as u8; 1400]].concat()
    };
    let frames = [frame(0), frame(1)];
    while !stop.load(Ordering::Relaxed) {
        for (queue, frame) in queues.iter_mut().zip(&frames) {
            for _ in 0..16 {
                if queue.send_checked(Offload::default(), frame, &[]) == SendOutcome::Full {
                    break;
                }
            }
            queue.flush();
        }
        while let Some((from, to)) = asked.try_next() {
            network.0.open(from, to);
        }
        while function.next().is_some() {
            function.consume();
        }
    }
}

#[test]
fn a_capture_of_a_busy_port_ends_in_time_and_has_frames_of_all_queues() {
    let network = network();
    let queues = host_queues(&network);
    let stop = AtomicBool::new(false);
    let file = std::env::temp_dir().join(format!("rackbus-capture-{}", std::process::id()));
    let request = CaptureRequest {
        port: "alpha".to_owned(),
        file: file.clone(),
        ms: Some(100),
        frames: None,
    };
    std::thread::scope(|scope| {
        scope.spawn(|| keep_busy(&network, queues, &stop));
        let begun = Instant::now();
        // The test ends, with an error, also where the capture does not look at its limit.
        let watched = scope.spawn(|| network.capture_into(&request, &|| false));
        while !watched.is_finished() && begun.elapsed() < Duration::from_secs(10) {
            std::thread::sleep(Duration::from_millis(5));
        }
        let took = begun.elapsed();
        stop.store(true, Ordering::Relaxed);
        let done = watched.join().unwrap().unwrap();
        assert!(took < Duration::from_secs(10), "{took:?}");
        assert!(done.frames > 0);
    });
    let bytes = std::fs::read(&file).unwrap();
    std::fs::remove_file(&file).unwrap();
    for number in 0..2 {
        assert!(bytes.windows(1400).any(|it| it == [0xa0 + number; 1400]), "queue {number}");
    }
}

#[test]
fn a_capture_ends_with_an_error_when_its_port_is_made_anew() {
    let network = network();
    let _queues = host_queues(&network);
    let file = std::env::temp_dir().join(format!("rackbus-capture-gone-{}", std::process::id()));
    // It ends by itself after a while, where nobody notices.
    let request = CaptureRequest {
        port: "alpha".to_owned(),
        file: file.clone(),
        ms: Some(5000),
        frames: None,
    };
    let (station, _) = network.0.stations.named("alpha").unwrap();
    let is_captured = || network.0.lock().ports[&station].captured.strong_count() > 0;
    let ended = std::thread::scope(|scope| {
        let capture = scope.spawn(|| network.capture_into(&request, &|| false));
        while !is_captured() && !capture.is_finished() {
            std::thread::yield_now();
        }
        let _anew = host_queues(&network);
        capture.join().unwrap()
    });
    std::fs::remove_file(&file).unwrap();
    let error = ended.unwrap_err();
    assert!(matches!(error, NetworkError::PortGone(_)), "{error}");
}

#[test]
fn the_end_of_a_capture_is_not_that_of_the_next_one() {
    let network = network();
    let _queues = host_queues(&network);
    let former = network.copies("alpha").unwrap();
    let _anew = host_queues(&network);
    let next = network.copies("alpha").unwrap();
    drop(former);
    assert!(matches!(network.copies("alpha"), Err(NetworkError::Captured(_))));
    drop(next);
    assert!(network.copies("alpha").is_ok());
}

#[test]
fn an_interface_that_sleeps_does_not_poll() {
    let network = network();
    let queues = host_queues(&network);
    let now = (network.0.clock)();
    for queue in &queues {
        let pace = &queue.handle().counters().pace;
        pace.since_ns.set(now - 1_000_000_000);
        pace.asleep_since.set(now - 990_000_000);
    }
    let status = network.status();
    let port = status.ports.iter().find(|port| port.port == "alpha").unwrap();
    let polling = port.polling.unwrap();
    assert!(polling < 0.02, "{polling}");
}

#[test]
fn an_uplink_that_fails_leaves_a_network_that_is_up_alone() {
    let network = network_with("uplinks = [\"alpha/nowhere0\"]");
    let _queues = host_queues(&network);
    let station = network.0.stations.named("alpha").unwrap().0;
    let failed = network.up().unwrap_err();
    assert!(matches!(failed, NetworkError::Uplink(..)), "{failed}");
    assert!(network.0.lock().ports.contains_key(&station));
}

#[test]
fn a_host_has_rings_for_the_queues_that_its_stations_have() {
    let network = network();
    let _queues = host_queues(&network);
    let named = |name: &str| network.0.stations.named(name).unwrap().0;
    let (own, beta) = (named("alpha"), named("beta"));
    let mut state = network.0.lock();
    let mut ring = |number| {
        let from = PortQueueId { station: beta, number };
        state.make_ring(&network.0, None, from, own).map(drop)
    };
    assert_eq!((ring(0), ring(1)), (Ok(()), Ok(())));
    assert!(ring(2).unwrap_err().contains("has no queue 2"));
}
