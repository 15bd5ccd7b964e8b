//! Guests that share memory with the rack: what is started and refused, without a VM.

mod support;

use std::io::Write;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use support::{PATIENCE, Rack, THREE_HOSTS};

/// The socket of a helper, from the arguments for QEMU.
fn socket(rack: &Rack) -> PathBuf {
    let args = rack.json(&["vm", "args", "--host", "alpha", "--fabric", "beta"]);
    let all = args["arguments"].as_array().unwrap().iter().filter_map(|it| it.as_str());
    let all: Vec<&str> = all.collect();
    let device = all.iter().find(|it| it.starts_with("vhost-user-test-device-pci,"));
    assert!(device.is_some_and(|it| it.contains("virtio-id=26")), "{all:?}");
    let mut places = all.iter().filter_map(|it| it.split_once(",path=").map(|(_, path)| path));
    places.next().unwrap().into()
}

/// Waits until the socket is there, or gone.
fn wait(socket: &Path, there: bool) {
    let begun = Instant::now();
    while socket.exists() != there {
        assert!(begun.elapsed() < PATIENCE, "{}: not {there}", socket.display());
        std::thread::sleep(Duration::from_millis(5));
    }
}

#[test]
fn a_helper_outlives_malformed_messages_and_ends_with_its_rack() {
    let rack = Rack::up(THREE_HOSTS);
    let socket = socket(&rack);
    for said in [&b"GET / HTTP/1.1\r\n\r\n"[..], &[0xff; 4096], &[1, 0, 0, 0], &[]] {
        wait(&socket, true);
        let mut stream = UnixStream::connect(&socket).unwrap();
        // Somebody has connected: the next one waits for a socket of its own.
        wait(&socket, false);
        // It may have been shut down before all was said.
        let _ = stream.write_all(said);
    }
    wait(&socket, true);
    rack.good(&["down"]);
    wait(&socket, false);
}

#[test]
fn a_guest_that_is_no_host_of_the_rack_is_refused() {
    let rack = Rack::up(THREE_HOSTS);
    let refused = rack.bad(2, &["vm", "run", "--host", "beta", "--name", "db", "--fabric"]);
    assert!(refused.contains("[hosts.db]") && refused.contains("--fabric=HOST"), "{refused}");
    let refused = rack.bad(2, &["vm", "args", "--host", "beta", "--fabric", "db"]);
    assert!(refused.contains("has no host db"), "{refused}");
    let refused = rack.bad(1, &["guest", "install", "db"]);
    assert!(refused.contains("no VM named 'db'"), "{refused}");
    let printed = rack.good(&["guest", "install", "--print"]);
    assert!(printed.contains("mount -t virtiofs rackbus /run/rackbus"), "{printed}");
}
