//! Who may go on with a session of a medium: the host that has the lease, under its epoch, with the session's secret,
//! for as long as the lender's process lives and has taken nothing back.

use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, RwLock};
use std::time::Duration;

use rackbus_devices::nvme::{Nvme, NvmeConfig};
use rackbus_fabric::rack::Rack;
use rackbus_fabric::{Fabric, FabricHandle, derive};
use rackbus_identity::{CertificateAuthority, Subject};
use rackbus_lease::{Message, Placement};
use rackbus_link::tcp::TcpLink;
use rackbus_link::{Connect, Conversation, Hello, Link, OfferedMedium, Purpose, Secret, VERSIONS};
use rackbus_memory::Gate;
use rackbus_node::{LentFunctions, Modelled};
use rackbus_pci::Function;
use rackbus_pci::engine::EngineOptions;

const RACK: &str = "name = \"test\"\n[hosts.alpha.devices.nvme0]\nkind = \"nvme\"\n\
                    size = \"1 MiB\"\n[hosts.beta]\n[hosts.gamma]\n";
const DEVICE: &str = "nvme0";

/// Alpha's node, and where it listens. Its lender has nothing of an earlier one.
struct Alpha {
    lender: Arc<LentFunctions>,
    link: TcpLink,
}

fn link(authority: &CertificateAuthority, host: &str, listen: &str) -> TcpLink {
    let credentials = authority.issue(&Subject::Node(host.to_owned())).unwrap();
    TcpLink::new("test", listen, listen, Arc::new(RwLock::new(credentials)))
}

impl Alpha {
    /// The drive is lent to beta by lease 5, under epoch 5.
    fn start(authority: &CertificateAuthority, hold: Duration) -> Alpha {
        // An address of its own: a port that was free is nobody else's before it is listened at.
        static COUNT: AtomicU32 = AtomicU32::new(1);
        let (process, count) = (std::process::id(), COUNT.fetch_add(1, Ordering::Relaxed));
        let loopback = format!("127.{}.{}.{count}", 1 + process / 256 % 250, process % 256);
        let free = std::net::TcpListener::bind(format!("{loopback}:0")).unwrap();
        let place = free.local_addr().unwrap().to_string();
        drop(free);
        let rack = Rack::parse("rack.toml", RACK).unwrap();
        let fabric = FabricHandle::new(Fabric::new(derive::here(&rack).unwrap()));
        let lender = LentFunctions::new("alpha", fabric).with_hold(hold);
        let factory = || {
            let model = Nvme::new(&NvmeConfig::memory(1 << 20, "T1"));
            Ok(Box::new(model.map_err(std::io::Error::other)?) as Box<dyn Function>)
        };
        let modelled = Modelled::new(DEVICE, Box::new(factory), EngineOptions::default());
        lender.add(DEVICE, Arc::new(modelled)).unwrap();
        lender.receive(
            0,
            Message::Arm {
                incarnation: 0,
                device: DEVICE.to_owned(),
                lease: 5,
                epoch: 5,
                borrower: "beta".to_owned(),
                placement: Placement::Borrower,
                level: None,
                serve_for: None,
            },
        );
        lender.arm(DEVICE, 5, None);
        let (lender, link) = (Arc::new(lender), link(authority, "alpha", &place));
        let (listener, attending) = (link.listen("alpha").unwrap(), lender.clone());
        std::thread::spawn(move || {
            while let Ok(caller) = listener.accept() {
                let lender = attending.clone();
                std::thread::spawn(move || {
                    let passage = Gate::new().unwrap().enter();
                    if let Some(incoming) = caller.hear() {
                        lender.attend(incoming, &passage);
                    }
                });
            }
        });
        Alpha { lender, link }
    }

    /// Connects as `host`; why it may not.
    fn connect(
        &self,
        authority: &CertificateAuthority,
        host: &str,
        service: Purpose,
    ) -> Result<Arc<dyn Conversation>, String> {
        let (rack, from, to) = ("test".to_owned(), host.to_owned(), "alpha".to_owned());
        let hello = Hello { versions: VERSIONS, rack, from, to, service };
        let connected =
            link(authority, host, "127.0.0.1:0").connect(&self.link.address("alpha"), &hello);
        connected.map_err(|error| error.to_string())
    }

    fn begin(&self, authority: &CertificateAuthority) -> (Arc<dyn Conversation>, Secret) {
        let service =
            Purpose::Medium { device: DEVICE.to_owned(), lease: 5, epoch: 5, lanes: Vec::new() };
        let stream = self.connect(authority, "beta", service).unwrap();
        let (medium, _) = OfferedMedium::receive(&*stream, "alpha").unwrap();
        (stream, medium.session.unwrap().secret)
    }
}

fn resume(lease: u64, epoch: u64, secret: &Secret, connection: u64) -> Purpose {
    let (device, secret) = (DEVICE.to_owned(), secret.clone());
    Purpose::Resume { device, lease, epoch, secret, connection }
}

fn authority() -> (tempfile::TempDir, CertificateAuthority) {
    let folder = tempfile::tempdir().unwrap();
    let authority = CertificateAuthority::open(folder.path(), "test").unwrap();
    (folder, authority)
}

#[test]
fn only_the_holder_of_the_lease_who_knows_the_secret_goes_on() {
    let (_folder, authority) = authority();
    let alpha = Alpha::start(&authority, Duration::from_secs(20));
    let said = alpha.connect(&authority, "beta", resume(5, 5, &Secret::new(), 1)).err().unwrap();
    assert!(said.contains("nobody uses nvme0"), "{said}");
    let (first, secret) = alpha.begin(&authority);
    let refused = |host: &str, service| alpha.connect(&authority, host, service).err().unwrap();
    let said = refused("beta", resume(5, 5, &Secret::new(), 1));
    assert!(said.contains("was never there"), "{said}");
    // Another host that has learned the secret, and beta under other numbers.
    for (host, lease, epoch) in [("gamma", 5, 5), ("beta", 5, 4), ("beta", 6, 5)] {
        let said = refused(host, resume(lease, epoch, &secret, 1));
        assert!(said.contains("is not valid here"), "{host}: {said}");
    }
    let second = alpha.connect(&authority, "beta", resume(5, 5, &secret, 2)).unwrap();
    // The one before is of no more use, and neither is one that was begun earlier and came later.
    first.wait_closed();
    let late = alpha.connect(&authority, "beta", resume(5, 5, &secret, 1)).unwrap();
    late.wait_closed();
    assert!(!second.is_closed());
    // The lease ends, and the session with it.
    let (device, epoch) = (DEVICE.to_owned(), 5);
    alpha.lender.receive(0, Message::Revoke { incarnation: 0, device, epoch });
    alpha.lender.revoke(DEVICE, 5).unwrap();
    second.wait_closed();
    let said = refused("beta", resume(5, 5, &secret, 3));
    assert!(said.contains("is not valid here"), "{said}");
}

#[test]
fn a_lender_that_was_restarted_goes_on_with_nothing() {
    let (_folder, authority) = authority();
    let before = Alpha::start(&authority, Duration::from_secs(20));
    let (_stream, secret) = before.begin(&authority);
    let after = Alpha::start(&authority, Duration::from_secs(20));
    let said = after.connect(&authority, "beta", resume(5, 5, &secret, 1)).err().unwrap();
    assert!(said.contains("nobody uses nvme0"), "{said}");
    let (_stream, _) = after.begin(&authority);
    let said = after.connect(&authority, "beta", resume(5, 5, &secret, 1)).err().unwrap();
    assert!(said.contains("was never there"), "{said}");
}

/// The borrower's process is another, and knows nothing of the session that waits.
#[test]
fn a_new_attach_does_not_wait_for_a_session_that_lost_its_connection() {
    let (_folder, authority) = authority();
    let alpha = Alpha::start(&authority, Duration::from_secs(600));
    let (first, _) = alpha.begin(&authority);
    first.shut_down();
    drop(first);
    let (_second, _) = alpha.begin(&authority);
}
