//! Guests that share memory with the rack: what is started and refused, without a VM.

mod support;

use std::io::Write;
use std::os::unix::fs::PermissionsExt;
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
    // One that has a host's name is not that host unless that is said.
    let refused = rack.bad(2, &["vm", "run", "--host", "beta", "--name", "alpha", "--fabric"]);
    assert!(refused.contains("--fabric=alpha"), "{refused}");
    let refused = rack.bad(1, &["guest", "install", "db"]);
    assert!(refused.contains("no VM named 'db'"), "{refused}");
    let printed = rack.good(&["guest", "install", "--print"]);
    assert!(printed.contains("mount -t virtiofs rackbus /run/rackbus"), "{printed}");
}

#[test]
fn what_becomes_of_an_installation_by_ssh_is_said() {
    let rack = Rack::up(THREE_HOSTS);
    let programs = tempfile::tempdir().unwrap();
    let library = programs.path().join("libsisci.so");
    std::fs::write(&library, "not looked at").unwrap();
    let library = library.display().to_string();
    let install = |ssh: &str| {
        let program = programs.path().join("ssh");
        std::fs::write(&program, format!("#!/bin/sh\n{ssh}\n")).unwrap();
        std::fs::set_permissions(&program, std::fs::Permissions::from_mode(0o755)).unwrap();
        let args = ["guest", "install", "--ssh", "me@db", "--ssh-option", "Port=22"];
        let mut command = rack.command(&[&args[..], &["--library", &library]].concat());
        let path = std::env::var("PATH").unwrap_or_default();
        command.env("PATH", format!("{}:{path}", programs.path().display()));
        let output = command.output().unwrap();
        (output.status.code(), String::from_utf8_lossy(&output.stderr).into_owned())
    };
    let (code, said) = install("echo refused >&2; exit 255");
    assert!(code == Some(1) && said.contains("me@db is not reached: refused"), "{said}");
    let (code, said) = install("echo no space >&2; exit 2");
    assert!(code == Some(1) && said.contains("the guest refuses: no space"), "{said}");
    // What it is given: the options first, then where to, what to do, and the files.
    let (code, said) = install(
        "[ \"$1 $2 $3 $4 $5\" = '-o Port=22 -T -- me@db' ] && tar -t | grep -qx lib/libsisci.so",
    );
    assert!(code == Some(0), "{said}");
    for wrong in [&["--ssh=-oX"][..], &["db", "--ssh", "me@db"], &["--ssh-option", "Port=1"]] {
        let refused = rack.command(&[&["guest", "install"], wrong].concat()).output().unwrap();
        assert_eq!(refused.status.code(), Some(2), "{wrong:?}");
    }
}
