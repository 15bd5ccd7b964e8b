//! Leases that end by the clocks of their nodes (`strict_ttl`): lender and borrower reach each other, and one of them or
//! both are cut off from the control plane for longer than the time to live.

mod support;

use std::time::{Duration, Instant};

use rackbus_control::api::Lease;
use rackbus_driver::Drive;
use support::machines::{Machine, Machines, free_port};
use support::relay::{Passage, Relay};
use support::{PATIENCE, open};

const RACK: &str = r#"
name = "lab"

[control]
lease_ttl = "6 s"
strict_ttl = true
return_grace = "500 ms"

[hosts.alpha.devices.nvme0]
kind = "nvme"
size = "16 MiB"
backing = "file"

[hosts.beta]
"#;

const TTL: Duration = Duration::from_secs(6);

/// What the borrower and the lender log when they end a lease by their clocks.
const NOT_SERVED: &str = "the function is not served any more";
const TAKEN_BACK: &str = "not renewed for its time to live";

/// Beta with alpha's drive, where each reaches the control plane by a relay of its own.
struct Borrowed {
    rack: Machines,
    alpha: Machine,
    beta: Machine,
    ways: [Relay; 2],
    /// Where the control plane itself is reached.
    control: String,
    drive: Drive,
}

impl Borrowed {
    fn start(text: &str) -> Borrowed {
        let mut rack = Machines::start(text);
        let control = rack.url.clone();
        let ways = [(); 2].map(|()| Relay::start(control.replace("https://", "")));
        let [alpha, beta] = [("alpha", &ways[0]), ("beta", &ways[1])].map(|(host, way)| {
            rack.url = format!("https://{}", way.address());
            let mut machine = rack.machine(host);
            let listen = format!("127.0.0.1:{}", free_port());
            rack.node_at(&mut machine, host, &listen, &[], Some(&rack.token(host)));
            machine
        });
        let lease = beta.borrow("alpha/nvme0", "beta");
        let mut drive = open(&lease);
        drive.write(8, &[7; 4096], true).unwrap();
        Borrowed { rack, alpha, beta, ways, control, drive }
    }

    fn read(&mut self) -> bool {
        let mut read = [0; 4096];
        let outcome = self.drive.read(8, &mut read);
        assert!(outcome.is_err() || read == [7; 4096], "it reads something else");
        outcome.is_ok()
    }

    /// Waits until the drive is absent, and its lender has taken it back; the borrower did so first.
    fn ends(&mut self) {
        let cut = Instant::now();
        assert!(self.read(), "it ends with the connection to the control plane");
        while self.read() {
            assert!(cut.elapsed() < PATIENCE, "it is used on: {}", self.beta.log());
            std::thread::sleep(Duration::from_millis(20));
        }
        // It was renewed when it was cut off, or at most a sixth of the time to live before.
        let served = cut.elapsed();
        assert!(served > TTL / 4, "it was used for {served:?} more");
        self.rack.wait(|_| self.alpha.log().contains(TAKEN_BACK));
        let [stopped, taken] = [(&self.beta, NOT_SERVED), (&self.alpha, TAKEN_BACK)]
            .map(|(machine, text)| logged_at(&machine.log(), text));
        assert!(stopped < taken, "{stopped}, and its lender {taken}");
    }

    /// The control plane has ended the lease for this reason.
    fn ended_because(&self, reason: &str) {
        self.rack.wait(|rack| {
            let events = rack.control.json(&["events"]).to_string();
            events.contains(reason)
        });
    }

    /// The function is offered again, and its next borrower finds what was written.
    fn is_borrowed_again(&mut self) {
        self.rack.wait(|rack| rack.function("alpha/nvme0")["state"] == "offered");
        let lease: Lease = self.beta.borrow("alpha/nvme0", "beta");
        self.drive = open(&lease);
        assert!(self.read(), "the next lease is of no use");
    }
}

/// When a line with `text` was logged: times of one day, which are compared as text.
fn logged_at(log: &str, text: &str) -> String {
    let line = log.lines().find(|line| line.contains(text));
    let line = line.unwrap_or_else(|| panic!("{text:?} is not logged: {log}"));
    line.split_whitespace().next().unwrap().to_owned()
}

#[test]
fn both_nodes_cut_off_from_the_control_plane_end_the_lease_the_borrower_first() {
    let mut it = Borrowed::start(RACK);
    it.ways.iter().for_each(|way| way.set(Passage::Silent));
    it.ends();
    it.ended_because("expired: its borrower was silent too long");
    let state = it.rack.function("alpha/nvme0")["state"].clone();
    assert_ne!(state, "offered", "before its lender has said that it is back");
    it.ways.iter().for_each(|way| way.set(Passage::Open));
    it.is_borrowed_again();
}

/// The control plane hears the borrower renew, and cannot tell the lender.
#[test]
fn a_lender_cut_off_from_the_control_plane_ends_the_lease_after_its_borrower() {
    let mut it = Borrowed::start(RACK);
    it.ways[0].set(Passage::Silent);
    it.ends();
    it.ended_because("it could not be renewed within its time to live");
    it.ways[0].set(Passage::Open);
    it.is_borrowed_again();
}

/// One whose control plane dies and comes back within that goes on.
#[test]
fn a_strict_lease_is_renewed_and_outlives_a_restart_of_the_control_plane() {
    // Longer than a control plane takes to be there again on a busy machine.
    let mut it = Borrowed::start(&RACK.replace("\"6 s\"", "\"20 s\""));
    it.rack.control.crash();
    it.rack.url = it.control.clone();
    it.rack.begin_control();
    let begun = Instant::now();
    while begun.elapsed() < Duration::from_secs(25) {
        assert!(it.read(), "{}", it.beta.log());
        std::thread::sleep(Duration::from_millis(50));
    }
}

/// What is borrowed goes on without the control plane, unless the rack file says otherwise.
#[test]
fn leases_that_are_not_strict_go_on_for_longer_than_their_time_to_live() {
    let text = RACK.replace("strict_ttl = true\n", "").replace("\"6 s\"", "\"1 s\"");
    let mut it = Borrowed::start(&text);
    it.ways.iter().for_each(|way| way.set(Passage::Silent));
    it.ended_because("expired: its borrower was silent too long");
    let begun = Instant::now();
    while begun.elapsed() < Duration::from_secs(3) {
        assert!(it.read(), "{}", it.beta.log());
        std::thread::sleep(Duration::from_millis(50));
    }
}
