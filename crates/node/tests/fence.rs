//! Who may attach is decided by the lending protocol alone: the node that runs the functions has no
//! opinion of its own.

use std::os::unix::net::UnixStream;
use std::sync::Arc;

use rackbus_devices::nvme::{Nvme, NvmeConfig};
use rackbus_fabric::rack::Rack;
use rackbus_fabric::{Fabric, FabricHandle, derive};
use rackbus_lease::{ArmedFor, Lender, LenderAction, Message, Placement};
use rackbus_link::{Hello, IncomingConnection, Purpose, VERSIONS};
use rackbus_memory::{Gate, Handles, Stream};
use rackbus_node::{LentFunctions, Modelled};
use rackbus_pci::Function;
use rackbus_pci::engine::EngineOptions;
use rackbus_seeds::Random;

const RACK: &str = "name = \"test\"\n[hosts.alpha.devices.nvme0]\nkind = \"nvme\"\n\
                    size = \"1 MiB\"\n[hosts.beta]\n[hosts.gamma]\n";
const DEVICE: &str = "nvme0";

fn functions() -> Arc<LentFunctions> {
    let rack = Rack::parse("rack.toml", RACK).unwrap();
    let fabric = FabricHandle::new(Fabric::new(derive::here(&rack).unwrap()));
    let lender = LentFunctions::new("alpha", fabric);
    let factory = || {
        let model = Nvme::new(&NvmeConfig::memory(1 << 20, "T1")).map_err(std::io::Error::other)?;
        Ok(Box::new(model) as Box<dyn Function>)
    };
    let modelled = Modelled::new(DEVICE, Box::new(factory), EngineOptions::default());
    lender.add(DEVICE, Arc::new(modelled)).unwrap();
    Arc::new(lender)
}

fn arm(epoch: u64, borrower: &str) -> Message {
    let (device, borrower) = (DEVICE.to_owned(), borrower.to_owned());
    Message::Arm {
        incarnation: 0,
        device,
        lease: epoch,
        epoch,
        borrower,
        placement: Placement::Lender,
        level: None,
        serve_for: None,
    }
}

fn revoke(epoch: u64) -> Message {
    Message::Revoke { incarnation: 0, device: DEVICE.to_owned(), epoch }
}

/// A conversation with the lender: open until it is dropped.
struct Attempt {
    ours: UnixStream,
    attending: std::thread::JoinHandle<()>,
}

impl Attempt {
    /// Who is not let in gets the reason.
    fn start(lender: &Arc<LentFunctions>, wanted: &ArmedFor) -> Result<Attempt, String> {
        let (ours, theirs) = UnixStream::pair().unwrap();
        let ArmedFor { lease, epoch, borrower, placement } = wanted.clone();
        let device = DEVICE.to_owned();
        let service = match placement {
            Placement::Lender => Purpose::Function { device, lease, epoch },
            Placement::Borrower => Purpose::Medium { device, lease, epoch, lanes: Vec::new() },
            Placement::Host => Purpose::Window { device, lease, epoch, held: false },
        };
        let (rack, to) = ("test".to_owned(), "alpha".to_owned());
        let hello = Hello { versions: VERSIONS, rack, from: borrower, to, service };
        let incoming =
            IncomingConnection { hello, version: VERSIONS.newest(), stream: Arc::new(theirs) };
        let lender = lender.clone();
        let passage = Gate::new().unwrap().enter();
        let attending = std::thread::spawn(move || lender.attend(incoming, &passage));
        let mut length = [0; 4];
        ours.receive(&mut length, &mut Handles::new()).unwrap();
        let mut reply = vec![0; u32::from_le_bytes(length) as usize];
        ours.receive(&mut reply, &mut Handles::new()).unwrap();
        let reply = String::from_utf8(reply).unwrap();
        let attempt = Attempt { ours, attending };
        match reply.contains("accepted") {
            true => Ok(attempt),
            false => {
                attempt.end();
                Err(reply)
            }
        }
    }

    fn end(self) {
        drop(self.ours);
        self.attending.join().unwrap();
    }
}

/// Refused from the moment of the decision: nothing has been done about it yet.
#[test]
fn a_decided_revocation_refuses_before_it_is_carried_out() {
    let lender = functions();
    lender.receive(0, arm(5, "beta"));
    lender.arm(DEVICE, 5, None);
    let (borrower, placement) = ("beta".to_owned(), Placement::Lender);
    let beta = ArmedFor { lease: 5, epoch: 5, borrower, placement };
    Attempt::start(&lender, &beta).expect("it is armed for beta").end();
    lender.receive(0, revoke(5));
    let refused = Attempt::start(&lender, &beta).err().expect("its lease is being revoked");
    assert!(refused.contains("being taken back"), "{refused}");
    let said = lender.revoke(DEVICE, 5).unwrap();
    assert!(
        matches!(said[..], [LenderAction::Send(Message::Revoked { epoch: 5, .. })]),
        "{said:?}"
    );
    let refused = Attempt::start(&lender, &beta).err().expect("its lease is revoked");
    assert!(refused.contains("not lent to anybody"), "{refused}");
    assert!(lender.receive(0, arm(5, "beta")).iter().all(|a| matches!(a, LenderAction::Send(_))));
}

/// The same messages to the pure lender: it lets in whom the node lets in, and nobody else.
#[test]
fn the_node_admits_whom_the_protocol_admits() {
    for seed in 0..40 {
        let mut random = Random(seed);
        let lender = functions();
        let mut pure = Lender::new(0, [DEVICE.to_owned()]);
        for step in 0..60 {
            let epoch = 1 + random.below(4) as u64;
            let borrower = ["beta", "gamma"][random.below(2)];
            match random.below(5) {
                0 => {
                    let message = arm(epoch, borrower);
                    let decided = pure.receive(0, message.clone());
                    assert_eq!(lender.receive(0, message), decided, "seed {seed}, step {step}");
                }
                1 => {
                    let decided = pure.receive(0, revoke(epoch));
                    assert_eq!(
                        lender.receive(0, revoke(epoch)),
                        decided,
                        "seed {seed}, step {step}"
                    );
                }
                2 => {
                    let decided = pure.arm_done(DEVICE, epoch, Ok(()));
                    assert_eq!(
                        lender.arm(DEVICE, epoch, None),
                        decided,
                        "seed {seed}, step {step}"
                    );
                }
                3 => {
                    let decided = pure.revoke_done(DEVICE, epoch);
                    let done = lender.revoke(DEVICE, epoch).unwrap();
                    assert_eq!(done, decided, "seed {seed}, step {step}");
                }
                _ => {
                    let placement = [Placement::Lender, Placement::Borrower][random.below(2)];
                    let borrower = borrower.to_owned();
                    let wanted = ArmedFor { lease: epoch, epoch, borrower, placement };
                    let live = Attempt::start(&lender, &wanted);
                    match (pure.admits(DEVICE, &wanted), live) {
                        (Ok(()), Ok(attempt)) => attempt.end(),
                        (Err(why), Err(reply)) => {
                            assert!(reply.contains(&why.to_string()), "{why}, but {reply}");
                        }
                        (decided, live) => {
                            panic!("seed {seed}, step {step}: {decided:?}, but {:?}", live.err())
                        }
                    }
                }
            }
        }
    }
}
