//! A node that says whatever it likes, as the host that it is, in a rack of real processes: it harms no lease that it has no
//! part in, and the control plane and the other nodes stay well. `lease/tests/rogue.rs` tries the same on the decisions
//! alone, at greater length.
//!
//! The rogue has what a machine has that was taken over: the certificate of its host, the address of everybody, and all that
//! the API shows it, numbers of leases and epochs included.

mod support;

use std::sync::Arc;
use std::sync::RwLock;

use rackbus_control::ControlClient;
use rackbus_control::api::{
    BorrowRequest, DeviceReport, Lease, LeaseStage, NodeMessages, NodeReport,
};
use rackbus_identity::{CertificateAuthority, Subject};
use rackbus_lease::{Message, TurnUse};
use rackbus_link::tcp::TcpLink;
use rackbus_link::{Connect, Hello, LinkError, Purpose, VERSIONS};
use rackbus_seeds::Random;
use serde_json::Value;
use support::load::Load;
use support::machines::{Machines, free_port};

const RACK: &str = r#"
name = "lab"

[control]
lease_ttl = "15 s"

[hosts.alpha.devices.nvme0]
kind = "nvme"
size = "16 MiB"
backing = "file"

[hosts.alpha.devices.nvme1]
kind = "nvme"
size = "16 MiB"

[hosts.beta]

[hosts.gamma.devices.ram0]
kind = "memory"
size = "1 MiB"
"#;
const ROGUE: &str = "gamma";
/// Rounds of each sort that the rogue plays.
const ROUNDS: usize = 400;
/// Bytes of memory that the control plane may need more at the end: what it keeps of one host is bounded.
const MEMORY: u64 = 64 << 20;

/// What a node of the rogue's makes up, of what it knows.
struct Inventor {
    random: Random,
    lease: u64,
    epoch: u64,
}

impl Inventor {
    fn number(&mut self, near: u64) -> u64 {
        match self.random.below(6) {
            0 => u64::MAX,
            1 => self.random.next(),
            2 => near.wrapping_add(self.random.below(3) as u64),
            _ => near,
        }
    }

    fn device(&mut self) -> String {
        let long = "n".repeat(300);
        let names = ["nvme0", "nvme1", "ram0", "../alpha/nvme0", "", &long];
        names[self.random.below(names.len())].to_owned()
    }

    fn message(&mut self) -> Message {
        let (incarnation, epoch) = (self.number(1), self.number(self.epoch));
        let (device, lease) = (self.device(), self.number(self.lease));
        let text = || "made up".to_owned();
        match self.random.below(13) {
            0 => {
                let devices = (0..self.random.below(50)).map(|_| (self.device(), epoch)).collect();
                Message::Register { incarnation, devices, newest_lease: lease, address: text() }
            }
            1 => Message::Armed { incarnation, device, epoch, change: None },
            2 => Message::ArmFailed {
                incarnation,
                device,
                epoch,
                reason: text(),
                refused: self.random.chance(50),
            },
            3 => Message::Revoked { incarnation, device, epoch },
            4 => Message::Opened { lease, outcome: Ok(text()) },
            5 => Message::Opened { lease, outcome: Err(text()) },
            6 => Message::Renew { lease, incarnation, sent: None },
            7 => Message::Lost { lease, reason: text() },
            8 => Message::Closed { lease },
            9 => Message::TurnUsed { lease, how: TurnUse::Gone(text()) },
            10 => Message::Withdrawn { incarnation, device, number: lease },
            11 => {
                let outcome = Ok([(self.device(), epoch)].into());
                Message::Offered { incarnation, device, number: lease, outcome }
            }
            _ => Message::LevelSet {
                incarnation,
                device,
                epoch,
                number: lease,
                level: Some(text()),
                outcome: Ok(()),
            },
        }
    }

    fn said(&mut self) -> NodeMessages {
        let messages = (0..1 + self.random.below(8)).map(|_| self.message()).collect();
        let report = self.random.chance(30).then(|| {
            let device = DeviceReport { trouble: Some("made up".into()), ..Default::default() };
            let devices = (0..20).map(|_| (self.device(), device.clone())).collect();
            let fronts = [("alpha/nvme0".to_owned(), DeviceReport::default())].into();
            let restarts_in_place = self.random.next();
            NodeReport { devices, fronts, restarts_in_place, ..Default::default() }
        });
        NodeMessages { messages, report }
    }
}

/// It says what it makes up to the control plane, and asks it for what it has no right to.
async fn against_the_control_plane(client: &ControlClient, mut inventor: Inventor) {
    let lease = inventor.lease;
    for round in 0..ROUNDS {
        // Now and then it listens anew, and leaves the last conversation open for a while.
        let listening = if round % 20 == 0 { client.listen(ROGUE, 0).await.ok() } else { None };
        // Most of it is refused.
        let _ = client.say(ROGUE, &inventor.said()).await;
        if round % 40 == 0 {
            let _ = client.say("beta", &inventor.said()).await.unwrap_err();
            let _ = client.give_back(lease).await.unwrap_err();
            let _ = client.withdraw("alpha", "nvme0", true).await.unwrap_err();
            let stolen = BorrowRequest::new("alpha/nvme0", "beta");
            let _ = client.borrow_as(&stolen).await.unwrap_err();
        }
        drop(listening);
    }
}

/// It connects to nodes as itself, for what others have, and says nothing further to those that let it in. How many times it
/// was let in for a lease, and how many times it was answered at all.
fn against_a_node(
    link: &TcpLink,
    address: &str,
    to: &str,
    mut inventor: Inventor,
) -> (usize, usize) {
    let (mut admitted, mut heard) = (Vec::new(), 0);
    for _ in 0..ROUNDS / 4 {
        let (device, lease) = (inventor.device(), inventor.number(inventor.lease));
        let epoch = inventor.number(inventor.epoch);
        let lanes = Vec::new();
        let service = match inventor.random.below(4) {
            0 => Purpose::Function { device, lease, epoch },
            1 => Purpose::Medium { device, lease, epoch, lanes },
            2 => Purpose::Window { device, lease, epoch, held: inventor.random.below(2) == 0 },
            _ => Purpose::Segments,
        };
        let is_of_a_lease = service != Purpose::Segments;
        // The link refuses to ask for one that only shared memory has.
        let is_asked = !matches!(service, Purpose::Function { .. });
        // As whom it says it comes changes nothing: its certificate says it.
        let from = ["beta", ROGUE][inventor.random.below(2)].to_owned();
        let (rack, to) = ("lab".to_owned(), to.to_owned());
        let hello = Hello { versions: VERSIONS, rack, from, to, service };
        match link.connect(address, &hello) {
            Ok(conversation) if is_of_a_lease => admitted.push(conversation),
            Ok(_) | Err(LinkError::Refused { .. }) if is_asked => heard += 1,
            _ => {}
        }
    }
    (admitted.len(), heard)
}

fn resident(pid: u32) -> u64 {
    let status = std::fs::read_to_string(format!("/proc/{pid}/status")).unwrap();
    let line = status.lines().find(|line| line.starts_with("VmRSS:")).unwrap();
    line.split_whitespace().nth(1).unwrap().parse::<u64>().unwrap() << 10
}

fn address_of(rack: &Machines, host: &str) -> String {
    let status = rack.control.json(&["status"]);
    let hosts = status["hosts"].as_array().unwrap();
    let found = hosts.iter().find(|it| it["host"] == host).unwrap();
    found["address"].as_str().unwrap().to_owned()
}

#[test]
fn a_rogue_node_harms_no_lease_of_others_in_a_whole_rack() {
    let mut rack = Machines::start(RACK);
    let [mut alpha, mut beta] = ["alpha", "beta"].map(|host| rack.joined(host));
    let lease = beta.borrow("alpha/nvme0", "beta");
    let load = Load::start(&lease);
    load.progress(20, || alpha.log());
    let identity = rack.control.state_dir().join("identity");
    let authority = CertificateAuthority::load(&identity).unwrap().unwrap();
    let stolen = authority.issue(&Subject::Node(ROGUE.to_owned())).unwrap();
    let before = resident(rack.control.process().id());
    let (lease_id, epoch) = (lease.lease, lease.epoch);
    let inventor = |seed: u64| Inventor { random: Random(seed), lease: lease_id, epoch };
    let addresses = [rack.url.strip_prefix("https://").unwrap().to_owned()];
    let client = ControlClient::with_tls(&addresses, stolen.client().clone());
    let listen = format!("127.0.0.1:{}", free_port());
    let link = TcpLink::new("lab", &listen, &listen, Arc::new(RwLock::new(stolen)));
    let targets = ["alpha", "beta"].map(|host| (host, address_of(&rack, host)));
    std::thread::scope(|scope| {
        let nodes = targets.each_ref().map(|(host, address)| {
            let (link, inventor) = (&link, inventor(2));
            scope.spawn(move || against_a_node(link, address, host, inventor))
        });
        let control = scope.spawn(|| {
            let runtime = tokio::runtime::Runtime::new().unwrap();
            runtime.block_on(against_the_control_plane(&client, inventor(1)));
        });
        // Meanwhile the others lend and return.
        while !control.is_finished() {
            let other = beta.borrow("alpha/nvme1", "beta");
            load.progress(1, || alpha.log());
            beta.json(&["return", &other.lease.to_string()]);
        }
        control.join().unwrap();
        for node in nodes {
            let (admitted, heard) = node.join().unwrap();
            assert_eq!(admitted, 0, "somebody who has no lease was let in");
            assert!(heard > 0, "the node was not reached");
        }
    });
    load.progress(20, || alpha.log());
    let leases: Vec<Lease> = serde_json::from_value(beta.json(&["leases"])).unwrap();
    let same = leases.iter().find(|it| it.lease == lease_id).unwrap();
    assert_eq!((same.stage, same.epoch), (LeaseStage::Active, epoch), "{same:?}");
    drop(load.finish());
    beta.json(&["return", &lease_id.to_string()]);
    rack.wait(|rack| rack.function("alpha/nvme0")["state"] == "offered");
    let more = resident(rack.control.process().id()).saturating_sub(before);
    assert!(more < MEMORY, "the control plane has {more} bytes more");
    // What it was refused is told, and does not fill the record.
    let events: Value = beta.json(&["events", "--kind", "refusal"]);
    let count = events.as_array().unwrap().len();
    assert!((1..200).contains(&count), "{count} refusals are told");
    for node in [&mut alpha, &mut beta] {
        assert!(node.process().try_wait().unwrap().is_none(), "{}", node.log());
    }
    assert!(started_anew(&rack), "{}", rack.control.log());
}

/// The host's own node, when its machine is its owner's again, is what it was.
fn started_anew(rack: &Machines) -> bool {
    let gamma = rack.joined(ROGUE);
    rack.wait(|rack| rack.function("gamma/ram0")["state"] == "offered");
    let lease = gamma.borrow("gamma/ram0", ROGUE);
    lease.stage == LeaseStage::Active
}
