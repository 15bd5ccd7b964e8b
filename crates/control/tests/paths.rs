//! Ways between hosts that are machines of their own. The nodes are played by the test.

use std::sync::Arc;
use std::time::Duration;

use rackbus_control::api::{AccessPath, BorrowRequest, NodeMessages, NodeReport, Placement};
use rackbus_control::register::{RegisterChange, RegisterEntry};
use rackbus_control::service::{Inventory, InventoryDevice};
use rackbus_control::store::{Commit, MemoryStore, Store};
use rackbus_control::{Service, ServiceOptions};
use rackbus_fabric::derive;
use rackbus_fabric::rack::{DeviceCapability, Rack};
use rackbus_identity::{Revocation, Revoked};
use rackbus_lease::{Config, Message};

/// Two machines that the network joins, and an NTB.
async fn open() -> Arc<Service> {
    open_ntb_linked([]).await
}

/// The same, where NTBs of these pairs are for the link.
async fn open_ntb_linked<const N: usize>(ntb_linked: [(&str, &str); N]) -> Arc<Service> {
    open_on(MemoryStore::default(), ntb_linked).await
}

/// The same, with what is in `store`.
async fn open_on<const N: usize>(
    store: MemoryStore,
    ntb_linked: [(&str, &str); N],
) -> Arc<Service> {
    let file = "name = \"lab\"\n[hosts.alpha.devices.nvme0]\nkind = \"nvme\"\nsize = \"1 MiB\"\n\
                [hosts.alpha.ntb.beta]\naddress = \"0000:05:00.0\"\n\
                [hosts.beta.ntb.alpha]\naddress = \"0000:06:00.0\"\n";
    let rack = Rack::parse("rack.toml", file).unwrap();
    let device = InventoryDevice {
        function: "alpha/nvme0".parse().unwrap(),
        kind: "nvme".to_owned(),
        capabilities: &[DeviceCapability::Blocks],
        detail: String::new(),
        separable: true,
        windows: ["beta".to_owned()].into(),
    };
    let inventory = Inventory {
        rack: "lab".to_owned(),
        hosts: vec!["alpha".to_owned(), "beta".to_owned()],
        devices: vec![device].into(),
        topology: derive::topology_of_machines(&rack).unwrap(),
        apart: true,
        ntb_linked: ntb_linked.map(|(a, b)| (a.to_owned(), b.to_owned())).into(),
        ..Inventory::default()
    };
    let options = ServiceOptions {
        inventory,
        read_rack: None,
        read_file: None,
        config: Config::default(),
        database: "".into(),
        log_lines_left_out: || 0,
        is_node: Arc::new(|_, _| false),
    };
    let service = Service::open_with(options, Box::new(store)).unwrap();
    for host in ["alpha", "beta"] {
        let devices = if host == "alpha" { [("nvme0".to_owned(), 0)].into() } else { [].into() };
        let (address, newest_lease) = (host.to_owned(), 0);
        let register = Message::Register { incarnation: 1, devices, newest_lease, address };
        let said = NodeMessages { messages: vec![register], report: None };
        service.receive(host, said).await.unwrap();
    }
    service
}

fn names(path: &AccessPath) -> Vec<&str> {
    path.components.iter().map(|part| part.name.as_str()).collect()
}

/// Its medium is asked over the network, and where it is in the borrower's own PCI tree the NTBs map it.
#[tokio::test]
async fn a_function_in_its_borrowers_own_pci_tree_is_reached_by_bridges() {
    let service = open().await;
    let path = service.path("alpha/nvme0", "beta").unwrap();
    let way = ["alpha/nvme0", "alpha/root", "network", "beta/root", "beta/memory"];
    assert_eq!((names(&path), path.hops), (way.to_vec(), 3));
    assert!(path.between.is_some());

    let placement = Some(Placement::Host);
    let request = BorrowRequest { placement, ..BorrowRequest::new("alpha/nvme0", "beta") };
    let borrowing = service.clone();
    tokio::spawn(async move { borrowing.borrow(&request, None).await });
    while service.leases(false).is_empty() {
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
    let path = service.path("alpha/nvme0", "beta").unwrap();
    let way = ["alpha/nvme0", "alpha/root", "alpha/ntb", "beta/ntb", "beta/root", "beta/memory"];
    assert_eq!((names(&path), path.hops, &path.between), (way.to_vec(), 4, &None));
}

#[tokio::test]
async fn memory_of_hosts_whose_link_is_an_ntb_goes_through_that() {
    let service = open_ntb_linked([("alpha", "beta"), ("beta", "alpha")]).await;
    let path = service.path("alpha", "beta").unwrap();
    let way = ["alpha/root", "alpha/ntb", "beta/ntb", "beta/root", "beta/memory"];
    assert_eq!(names(&path), way);
    let crossing = path.between.unwrap();
    assert!(crossing.link.contains("NTB") && crossing.copies.len() == 3, "{crossing:?}");
    // Either end may find that the cable leads elsewhere, and says so for as long as it is there.
    let node = service.listen("beta").unwrap();
    let unused_ntbs = [("alpha".to_owned(), "it leads to another host".to_owned())].into();
    let report = NodeReport { unused_ntbs, ..NodeReport::default() };
    let said = NodeMessages { messages: Vec::new(), report: Some(report) };
    service.receive("beta", said).await.unwrap();
    let between = || service.path("alpha", "beta").unwrap().between.unwrap().link;
    assert_eq!(between(), "an NTB, which is not used just now: it leads to another host");
    drop(node);
    assert_eq!(between(), "an NTB, by posted stores");
    // A drive's medium goes by TCP all the same.
    let path = service.path("alpha/nvme0", "beta").unwrap();
    assert!(names(&path).contains(&"network"), "{path:?}");
    assert_eq!(path.between.unwrap().link, "TLS over TCP");
}

/// Nobody prolonged the revocation while the rack was off.
#[tokio::test]
async fn a_host_that_did_not_join_anew_is_revoked_still_when_the_control_plane_begins() {
    let mut store = MemoryStore::default();
    let beta = Revocation { number: 1, what: Revoked::Host("beta".into()), at: 10, until: 20 };
    let certificates = vec![RegisterChange::Put(RegisterEntry::Revoked(beta.clone()))];
    store.commit(&Commit { certificates, ..Commit::default() }).unwrap();
    let service = open_on(store.clone(), [("alpha", "beta"), ("beta", "alpha")]).await;
    let told = service.revocations().list().revoked;
    assert!(matches!(&told[..], [it] if it.what == beta.what && it.until > beta.until), "{told:?}");
    assert_eq!(store.load().unwrap().certificates, [RegisterEntry::Revoked(told[0].clone())]);
    // So segments do not go as the cables say.
    let path = service.path("alpha", "beta").unwrap();
    assert!(names(&path).contains(&"network"), "{path:?}");
    let link = path.between.unwrap().link;
    assert_eq!(link, "TLS over TCP, and not the NTB, as beta was revoked");
}
