//! A lender and two borrowers in this process, over a link of either kind and without a control plane: a test says
//! itself when a lease begins and is revoked, so it knows the moment at which a revocation has returned.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use rackbus_control::api::DeviceReport;
use rackbus_devices::class::{parse_rack, ports};
use rackbus_devices::{Folders, RackDevice};
use rackbus_fabric::rack::Rack;
use rackbus_fabric::{Fabric, FabricHandle, derive};
use rackbus_lease::{BorrowerAction, Grant, LenderAction, Message, Placement};
use rackbus_link::{Link, Listener};
use rackbus_memory::Gate;
use rackbus_node::borrower::{LeaseEnded, UseListener, functions_folder};
use rackbus_node::users::VmUser;
use rackbus_node::{BorrowedFunctions, Lanes, LentFunctions, NetworkService, lendable};
use tempfile::TempDir;

use crate::common::links::{LinkKind, links};

const LENDER: &str = "alpha";
const BORROWERS: [&str; 2] = ["beta", "gamma"];

/// The host alpha, which lends its devices, and beta and gamma, which borrow them.
pub struct Hosts {
    lender: Arc<LentFunctions>,
    borrowers: BTreeMap<&'static str, BorrowedFunctions>,
    /// Where the lender's link listens.
    address: String,
    /// Fronts and mediums move data by lanes.
    have_lanes: bool,
    /// Where fronts of all leases run.
    placement: Placement,
    /// Number and epoch of the last lease.
    last: AtomicU64,
    _listeners: [Box<dyn Listener>; 2],
    _network: NetworkService,
    _folder: TempDir,
}

/// A function that is lent.
pub struct OpenLease {
    pub device: &'static str,
    pub epoch: u64,
    /// Where the borrower serves it.
    pub socket: PathBuf,
}

/// Nobody hears of losses here.
struct Unheard;

impl UseListener for Unheard {
    fn lender_lost(&self, _: &Grant, _: &str) {}

    fn vm_of(&self, _: &Path) -> Option<String> {
        None
    }

    fn user_of(&self, _: &Path, _: u32) -> Option<VmUser> {
        None
    }

    fn running_vm(&self, _: &Path) -> Option<VmUser> {
        None
    }

    fn used(&self, _: &Grant, _: &VmUser, _: LeaseEnded) {}

    fn front_ended(&self, _: Vec<BorrowerAction>) {}
}

/// Lets in whoever connects to the lender, each on a thread of its own.
fn attend(link: &dyn Link, lender: Arc<LentFunctions>) {
    let listener = link.listen(LENDER).unwrap();
    std::thread::spawn(move || {
        while let Ok(caller) = listener.accept() {
            let lender = lender.clone();
            std::thread::spawn(move || {
                let passage = Gate::new().unwrap().enter();
                if let Some(incoming) = caller.hear() {
                    lender.attend(incoming, &passage);
                }
            });
        }
    });
}

fn borrower(host: &str, run_dir: &Path, link: Arc<dyn Link>, rack: &Rack) -> BorrowedFunctions {
    let folder = functions_folder(run_dir, host);
    std::fs::create_dir_all(&folder).unwrap();
    let fabric = FabricHandle::new(Fabric::new(derive::here(rack).unwrap()));
    let gate = Gate::new().unwrap();
    BorrowedFunctions::new("test", host, &folder, link, fabric, Arc::new(Unheard), gate)
}

impl Hosts {
    /// The hosts that the rack file describes, joined by this kind of link, and by lanes of libfabric's
    /// `provider` beside it. Fronts run at `placement`.
    pub fn start(
        file: &str,
        kind: LinkKind,
        provider: Option<&str>,
        placement: Placement,
    ) -> Hosts {
        let lanes = Lanes::new(provider.unwrap_or("off"));
        let folder = tempfile::tempdir().unwrap();
        let run_dir = folder.path();
        let (rack, devices) = parse_rack("rack.toml", file).unwrap();
        let links = links(kind, run_dir);
        let fabric = FabricHandle::new(Fabric::new(derive::here(&rack).unwrap()));
        let link = links[LENDER].clone();
        let apart = kind == LinkKind::Tcp;
        let network = NetworkService::new(&rack, &ports(&devices), LENDER, link.clone(), apart);
        network.start(fabric.clone()).unwrap();
        let lender = LentFunctions::new(LENDER, fabric).with_lanes(lanes.clone());
        lend(&lender, &devices, run_dir, &network);
        let lender = Arc::new(lender);
        attend(&*link, lender.clone());
        // By what its node has there, others know on one machine which host a process speaks for.
        let listeners = BORROWERS.map(|host| links[host].listen(host).unwrap());
        let borrowers = BORROWERS.map(|host| {
            let link = links[host].clone();
            (host, borrower(host, run_dir, link, &rack).with_lanes(lanes.clone()))
        });
        Hosts {
            lender,
            borrowers: borrowers.into(),
            address: link.address(LENDER),
            have_lanes: provider.is_some(),
            placement,
            last: AtomicU64::new(0),
            _listeners: listeners,
            _network: network,
            _folder: folder,
        }
    }

    /// Lends a device to a host, which serves it.
    pub fn lend(&self, device: &'static str, host: &str) -> OpenLease {
        let epoch = 1 + self.last.fetch_add(1, Ordering::Relaxed);
        let (name, borrower) = (device.to_owned(), host.to_owned());
        let placement = self.placement;
        self.lender.receive(
            0,
            Message::Arm {
                incarnation: 0,
                device: name.clone(),
                lease: epoch,
                epoch,
                borrower,
                placement,
                level: None,
                serve_for: None,
            },
        );
        let said = self.lender.arm(device, epoch, None);
        assert!(matches!(said[..], [LenderAction::Send(Message::Armed { .. })]), "{said:?}");
        let grant = Grant {
            lease: epoch,
            function: format!("{LENDER}/{device}").parse().unwrap(),
            epoch,
            address: self.address.clone(),
            ttl: 1_000_000,
            placement,
            group: None,
            turn: None,
            vm: None,
            starter: None,
            strict_ttl: false,
        };
        let borrower = &self.borrowers[host];
        borrower.decide(|it| it.receive(0, Message::Granted(grant.clone())));
        OpenLease { device, epoch, socket: borrower.open(grant).unwrap() }
    }

    /// Takes a lease's function back; its borrower is not asked, and not told.
    pub fn revoke(&self, lease: &OpenLease) {
        let OpenLease { device, epoch, .. } = *lease;
        self.lender
            .receive(0, Message::Revoke { incarnation: 0, device: device.to_owned(), epoch });
        let said = self.lender.revoke(device, epoch).unwrap();
        let revoked = matches!(said[..], [LenderAction::Send(Message::Revoked { .. })]);
        assert!(revoked, "{said:?}");
    }

    /// Has the borrower end a lease, and then takes its function back.
    pub fn give_back(&self, lease: &OpenLease, host: &str) {
        self.borrowers[host].close(lease.epoch);
        self.revoke(lease);
    }

    /// Whether data of the function that `host` uses move as they are to: by a lane where there are lanes.
    pub fn are_joined(&self, device: &str, host: &str) -> bool {
        let fronts = self.borrowers[host].fronts();
        let link = fronts.get(&format!("{LENDER}/{device}")).and_then(|it| it.link.as_ref());
        let lane = link.and_then(|link| link.lane.as_ref());
        !self.have_lanes || lane.is_some_and(|lane| lane.up)
    }

    /// What the lender has counted of a device.
    pub fn report(&self, device: &str) -> DeviceReport {
        self.lender.report()[device].clone()
    }
}

/// Adds the lender's devices to what it lends.
fn lend(lender: &LentFunctions, devices: &[RackDevice], files: &Path, network: &NetworkService) {
    let folders = Folders::new(files, files).with_network(Arc::new(network.clone()));
    for (device, lendable) in lendable::of_host(LENDER, devices, &folders, &Arc::default()) {
        lender.add(&device, lendable).unwrap();
    }
}
