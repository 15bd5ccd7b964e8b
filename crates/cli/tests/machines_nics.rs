//! Functions of a network card that other machines borrow: frames go over the link, in order and once, while connections
//! are lost and nodes restarted.

mod support;

use std::time::{Duration, Instant};

use rackbus_control::api::Lease;
use rackbus_driver::net::{Net, NetOptions};
use rackbus_rma::{LIBRARY_ENV, Library};
use rackbus_spec::virtio::net::NetHeader;
use support::PATIENCE;
use support::machines::{Machine, Machines, free_port};
use support::relay::{Passage, Relay};

const RACK: &str = r#"
name = "lab"

[control]
lease_ttl = "10 s"
return_grace = "500 ms"

[link]
hold = "4 s"

[hosts.alpha.devices.nic0]
kind = "nic"
functions = 2
queues = 1
anti_spoofing = true

[hosts.beta]
"#;

fn open(lease: &Lease) -> Net {
    let options = NetOptions { interrupts: true, ..NetOptions::default() };
    let socket = lease.socket.as_ref().unwrap();
    Net::open(std::path::Path::new(socket), PATIENCE, options).unwrap()
}

/// Frames with numbers between two drivers.
struct Stream {
    sent: u32,
    /// The number of the last that came.
    last: Option<u32>,
    came: u32,
}

impl Stream {
    fn new() -> Stream {
        Stream { sent: 0, last: None, came: 0 }
    }

    fn send(&mut self, from: &mut Net, to: &Net) {
        let mut frame = [&to.info().mac[..], &from.info().mac, &[0x88, 0xb5]].concat();
        frame.extend(self.sent.to_le_bytes());
        frame.resize(64 + (self.sent as usize * 37) % 1400, self.sent as u8);
        from.send(0, &NetHeader::default(), &frame).unwrap();
        self.sent += 1;
    }

    /// Takes what has come, which must be in order, once, and as it was sent.
    fn take(&mut self, to: &mut Net) {
        let mut frame = Vec::new();
        while to.receive(0, &mut frame).unwrap().is_some() {
            let number = u32::from_le_bytes(frame[14..18].try_into().unwrap());
            assert!(self.last.is_none_or(|last| number > last), "{number} after {:?}", self.last);
            assert_eq!(frame.len(), 64 + (number as usize * 37) % 1400);
            assert!(frame[18..].iter().all(|byte| *byte == number as u8), "frame {number}");
            self.last = Some(number);
            self.came += 1;
        }
    }

    /// Sends until `count` more frames have come.
    fn flow(&mut self, from: &mut Net, to: &mut Net, count: u32) {
        let (begun, until) = (Instant::now(), self.came + count);
        while self.came < until {
            assert!(begun.elapsed() < PATIENCE, "{} of {} came", self.came, self.sent);
            for _ in 0..8 {
                self.send(from, to);
            }
            from.flush(0).unwrap();
            to.wait(0, Duration::from_millis(10));
            self.take(to);
        }
    }
}

/// Alpha, and beta with alpha's function, through a relay.
fn borrowed(text: &str) -> (Machines, Machine, Machine, Relay, Lease) {
    let rack = Machines::start(text);
    let listen = format!("127.0.0.1:{}", free_port());
    let relay = Relay::start(listen.clone());
    let mut alpha = rack.machine("alpha");
    let advertised = ["--advertise", &relay.address()];
    rack.node_at(&mut alpha, "alpha", &listen, &advertised, Some(&rack.token("alpha")));
    let beta = rack.joined("beta");
    let lease = beta.borrow("alpha/nic0.vf1", "beta");
    (rack, alpha, beta, relay, lease)
}

#[test]
fn frames_of_another_machine_come_once_and_in_order_whatever_becomes_of_the_connection() {
    let (rack, mut alpha, beta, relay, lease) = borrowed(RACK);
    assert_eq!(serde_json::to_value(lease.placement).unwrap(), "borrower");
    // The other function is used on the lender's own machine.
    let own = alpha.borrow("alpha/nic0.vf2", "alpha");
    let (mut far, mut near) = (open(&lease), open(&own));
    let (mut there, mut back) = (Stream::new(), Stream::new());
    let mut both = |far: &mut Net, near: &mut Net| {
        there.flow(far, near, 500);
        back.flow(near, far, 500);
    };
    both(&mut far, &mut near);
    for _ in 0..3 {
        relay.kill();
        both(&mut far, &mut near);
    }
    // For a while nobody can connect.
    relay.set(Passage::Closed);
    relay.kill();
    std::thread::sleep(Duration::from_millis(200));
    relay.set(Passage::Open);
    both(&mut far, &mut near);
    beta.restart_in_place("beta");
    both(&mut far, &mut near);
    alpha.restart_in_place("alpha");
    both(&mut far, &mut near);

    // The lender lets nobody send from somebody else's address.
    let mut forged = [&near.info().mac[..], &[2, 9, 9, 9, 9, 9], &[0x88, 0xb5]].concat();
    forged.resize(100, 0xee);
    far.send(0, &NetHeader::default(), &forged).unwrap();
    far.flush(0).unwrap();
    both(&mut far, &mut near);

    // Whoever has it next finds nothing of this one.
    drop(far);
    beta.json(&["return", &lease.lease.to_string()]);
    rack.wait(|rack| rack.function("alpha/nic0.vf1")["state"] == "offered");
    let lease = beta.borrow("alpha/nic0.vf1", "beta");
    let mut far = open(&lease);
    let mut again = Stream::new();
    again.flow(&mut near, &mut far, 100);

    // Its lender's machine dies.
    alpha.crash();
    let begun = Instant::now();
    while matches!(far.is_broken(), Ok(false)) {
        assert!(begun.elapsed() < PATIENCE, "the function of a dead machine still works");
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// Batches of frames move beside the link, whose completions come in whatever order; frames stay in theirs.
#[test]
fn frames_that_move_by_a_lane_come_once_and_in_order() {
    match Library::load() {
        Ok(_) => {}
        Err(error) if std::env::var_os(LIBRARY_ENV).is_some() => panic!("{error}"),
        Err(error) => return println!("left out: {error}"),
    }
    let text = RACK.replace("[link]\n", "[link]\nrdma = \"tcp\"\n");
    let (rack, alpha, beta, relay, lease) = borrowed(&text);
    let own = alpha.borrow("alpha/nic0.vf2", "alpha");
    let (mut far, mut near) = (open(&lease), open(&own));
    let (mut there, mut back) = (Stream::new(), Stream::new());
    let lane = || rack.function("alpha/nic0.vf1")["front"]["link"]["lane"].clone();
    rack.wait(|_| lane()["up"] == true);
    for _ in 0..3 {
        there.flow(&mut far, &mut near, 2000);
        back.flow(&mut near, &mut far, 2000);
        relay.kill();
    }
    rack.wait(|_| lane()["operations"].as_u64() > Some(0));
    drop(far);
    beta.json(&["return", &lease.lease.to_string()]);
}
