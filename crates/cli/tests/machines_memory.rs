//! Memory functions of another machine: what is stored is at the lender, whatever becomes of the connection and of the nodes.

mod support;

use std::time::{Duration, Instant};

use rackbus_control::api::Lease;
use rackbus_pci::vfio_user::Client as User;
use rackbus_rma::{LIBRARY_ENV, Library};
use rackbus_spec::vfio_user::region;
use support::machines::{Machines, free_port};
use support::relay::Relay;
use support::{PATIENCE, socket};

const RACK: &str = r#"
name = "lab"

[control]
lease_ttl = "10 s"
return_grace = "500 ms"

[link]
hold = "4 s"

[hosts.alpha.devices.ram0]
kind = "memory"
size = "4 MiB"
backing = "file"
at_return = "keep"

[hosts.alpha.devices.ram1]
kind = "memory"
size = "1 MiB"

[hosts.beta]
"#;

/// The BAR that is the memory.
const BAR: u32 = 2;

fn open(lease: &Lease) -> User {
    let user = User::connect(socket(lease), PATIENCE).unwrap();
    user.write(region::CONFIG, 4, &2u16.to_le_bytes()).unwrap();
    user
}

fn pattern(length: usize, round: u32) -> Vec<u8> {
    (0..length as u32)
        .map(|it| (it.wrapping_mul(2_654_435_761).wrapping_add(round) >> 9) as u8)
        .collect()
}

/// Stores and loads, each of some bytes at once.
fn works(user: &User, round: u32) {
    let data = pattern(300_000, round);
    for (at, part) in (0..).step_by(4096).zip(data.chunks(4096)) {
        user.write(BAR, 1 + at, part).unwrap();
    }
    same(user, round);
}

fn same(user: &User, round: u32) {
    let data = pattern(300_000, round);
    let mut read = vec![0; data.len()];
    for (at, part) in (0..).step_by(4096).zip(read.chunks_mut(4096)) {
        user.read(BAR, 1 + at, part).unwrap();
    }
    assert!(read == data, "round {round}");
}

#[test]
fn memory_of_another_machine_keeps_what_was_stored() {
    keeps_what_was_stored(RACK);
}

/// Where there is a lane, large pieces move by that.
#[test]
fn memory_of_another_machine_keeps_what_moved_by_a_lane() {
    match Library::load() {
        Ok(_) => {}
        Err(error) if std::env::var_os(LIBRARY_ENV).is_some() => panic!("{error}"),
        Err(error) => return println!("left out: {error}"),
    }
    keeps_what_was_stored(&RACK.replace("[link]\n", "[link]\nrdma = \"tcp\"\n"));
}

fn keeps_what_was_stored(text: &str) {
    let rack = Machines::start(text);
    let listen = format!("127.0.0.1:{}", free_port());
    let relay = Relay::start(listen.clone());
    let mut alpha = rack.machine("alpha");
    let advertised = ["--advertise", &relay.address()];
    rack.node_at(&mut alpha, "alpha", &listen, &advertised, Some(&rack.token("alpha")));
    let beta = rack.joined("beta");
    let lease = beta.borrow("alpha/ram0", "beta");
    let user = open(&lease);
    assert!(user.map_region(BAR, 0, 4096).is_err(), "it is mapped");
    works(&user, 1);
    user.write(BAR, 4 << 20, &[1]).unwrap_err();
    for round in 2..5 {
        relay.kill();
        works(&user, round);
    }
    beta.restart_in_place("beta");
    works(&user, 5);
    alpha.restart_in_place("alpha");
    works(&user, 6);
    drop(user);
    beta.json(&["return", &lease.lease.to_string()]);
    rack.wait(|rack| rack.function("alpha/ram0")["state"] == "offered");
    // Whoever has it next finds it, also on the lender's own machine.
    let lease = alpha.borrow("alpha/ram0", "alpha");
    same(&open(&lease), 6);
    alpha.json(&["return", &lease.lease.to_string()]);
    rack.wait(|rack| rack.function("alpha/ram0")["state"] == "offered");

    // Where nothing is kept, nothing is found.
    let lease = beta.borrow("alpha/ram1", "beta");
    let user = open(&lease);
    works(&user, 7);
    drop(user);
    beta.json(&["return", &lease.lease.to_string()]);
    rack.wait(|rack| rack.function("alpha/ram1")["state"] == "offered");
    let lease = beta.borrow("alpha/ram1", "beta");
    let user = open(&lease);
    let mut read = [1; 64];
    user.read(BAR, 4096, &mut read).unwrap();
    assert_eq!(read, [0; 64]);

    // Its lender's machine dies: it reads as absent memory does, and nobody waits for ever.
    alpha.crash();
    let begun = Instant::now();
    while user.read(BAR, 0, &mut read).is_ok() && read != [0xff; 64] {
        assert!(begun.elapsed() < PATIENCE, "the memory of a dead machine is there");
        std::thread::sleep(Duration::from_millis(20));
    }
}
