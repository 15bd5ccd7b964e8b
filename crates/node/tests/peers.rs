//! Peer-to-peer over real sockets: a drive reads into the BARs of memory functions and writes from them,
//! wherever these are, as long as its user has programmed them there, and no longer.

mod common;

use std::os::fd::AsFd;
use std::time::Duration;

use common::user::{Memory, SIZE, is_refused, open_shared, socket};
use common::{Rack, blocking};
use rackbus_control::ControlClient;
use rackbus_control::api::{BorrowRequest, DeviceReport, EventKind, Isolation, Lease};
use rackbus_control::reach::{ReachedPlace, ReachedRange};
use rackbus_devices::memory::BAR;
use rackbus_driver::{Drive, DriveOptions};
use rackbus_fabric::BarPlace;
use rackbus_memory::{Access, SharedMemory};
use rackbus_node::metrics::SOCKET;
use rackbus_pci::vfio_user::ClientError;
use rustix::io::Errno;

/// The drive is alpha's and beta the borrower: `ram0` is at the same lender, `ram1` at the borrower, and
/// `ram2` at another lender.
const RACK: &str = "name = \"test\"\n\
    [hosts.alpha.devices.nvme0]\nkind = \"nvme\"\nsize = \"64 MiB\"\nbacking = \"memory\"\n\
    [hosts.alpha.devices.ram0]\nkind = \"memory\"\nsize = \"4 MiB\"\n\
    [hosts.beta.devices.ram1]\nkind = \"memory\"\nsize = \"4 MiB\"\n\
    [hosts.gamma.devices.ram2]\nkind = \"memory\"\nsize = \"4 MiB\"\n";
const DRIVE: &str = "alpha/nvme0";
const TARGETS: [&str; 3] = ["alpha/ram0", "beta/ram1", "gamma/ram2"];
/// Where the BARs are programmed to be: the drive's memory is elsewhere.
const AT: u64 = 0x38_0000_0000;

fn open(lease: &Lease) -> Drive {
    Drive::open(socket(lease), DriveOptions::default()).unwrap()
}

fn for_group(function: &str, group: &str) -> BorrowRequest {
    BorrowRequest { group: Some(group.to_owned()), ..BorrowRequest::new(function, "beta") }
}

async fn borrow(rack: &Rack, function: &str, group: &str) -> Lease {
    rack.client.borrow_as(&for_group(function, group)).await.unwrap()
}

/// What the drive reaches of BARs, as its lender's fabric says.
async fn reached(rack: &Rack) -> Vec<ReachedRange> {
    let node = ControlClient::new(&rack.folder.path().join("alpha").join(SOCKET));
    let mut ranges = node.reach(DRIVE).await.unwrap();
    ranges.retain(|range| matches!(range.to, ReachedPlace::Bar { .. }));
    ranges
}

/// The drive's counters, when they are as expected.
async fn report(rack: &Rack, expected: impl Fn(&DeviceReport) -> bool) -> DeviceReport {
    let deadline = tokio::time::Instant::now() + Duration::from_secs(60);
    loop {
        let devices = rack.client.devices().await.unwrap();
        let drive = devices.into_iter().find(|device| device.function == DRIVE).unwrap();
        let report = drive.report.unwrap_or_default();
        if expected(&report) {
            return *report;
        }
        assert!(tokio::time::Instant::now() < deadline, "{report:?}");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}

/// Block 8 of the drive on: more than one command may have, so that there are several.
fn pattern(seed: usize) -> Vec<u8> {
    (0..3 << 20).map(|at: usize| ((at / 512) * 7 + at + seed) as u8).collect()
}

#[tokio::test(flavor = "multi_thread")]
async fn a_drive_reads_into_bars_and_writes_from_them_wherever_they_are() {
    let rack = Rack::start(RACK).await;
    let lease = borrow(&rack, DRIVE, "db").await;
    let mut drive = blocking(move || open(&lease)).await;
    for (nth, target) in TARGETS.into_iter().enumerate() {
        let lease = borrow(&rack, target, "db").await;
        let id = lease.lease;
        let at = AT + nth as u64 * SIZE;
        let (back, memory) = blocking(move || {
            let memory = Memory::open(&lease);
            assert!(is_refused(drive.read_to(8, 512, at)), "it is not programmed yet");
            memory.place(at);
            assert!(is_refused(drive.read_to(8, 512, at)), "memory space is off");
            memory.decode(true);
            let data = pattern(nth);
            drive.write(8, &data, false).unwrap();
            drive.read_to(8, data.len(), at + 0x1000).unwrap();
            assert!(memory.load(0x1000, data.len()) == data, "other bytes came");
            // And back: what the program stores into the BAR goes to the drive.
            memory.store(0x2000, b"stored by the program");
            drive.write_from(1 << 14, 8192, at + 0x2000).unwrap();
            let mut found = vec![0; 8192];
            drive.read(1 << 14, &mut found).unwrap();
            assert_eq!(&found[..21], b"stored by the program");
            assert!(found[512..] == memory.load(0x2000 + 512, 8192 - 512));
            (drive, memory)
        })
        .await;
        drive = back;
        let ranges = reached(&rack).await;
        let (device, bar) = (target.to_owned(), BAR);
        assert_eq!(ranges.len(), 1, "{ranges:?}");
        assert_eq!((ranges[0].at, ranges[0].length), (at, SIZE));
        assert_eq!(ranges[0].to, ReachedPlace::Bar { device, bar, offset: 0 });
        let ends: Vec<&str> = ranges[0].components.iter().map(|hop| hop.name.as_str()).collect();
        assert_eq!((ends.first(), ends.last()), (Some(&DRIVE), Some(&target)));
        let written = (nth as u64 + 1) * (3 << 20);
        let read = 8192 * (nth as u64 + 1);
        report(&rack, |report| {
            (report.peer_bytes_written, report.peer_bytes_read) == (written, read)
        })
        .await;
        rack.client.give_back(id).await.unwrap();
        assert_eq!(reached(&rack).await, [], "what was returned is reached");
        drive = blocking(move || {
            assert!(is_refused(drive.read_to(8, 512, at)));
            drop(memory);
            drive
        })
        .await;
    }
    // Three for each target, with the requester's address.
    let last = format!("access to {:#x}+0x200", AT + 2 * SIZE);
    report(&rack, |report| {
        report.dma_refused == 9
            && report.last_refused.as_ref().is_some_and(|text| text.contains(&last))
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_window_follows_its_bar_and_is_seen_through_mappings_without_memory() {
    let rack = Rack::start(RACK).await;
    let drive = borrow(&rack, DRIVE, "db").await;
    let target = borrow(&rack, "gamma/ram2", "db").await;
    blocking(move || {
        let (mut drive, user) = open_shared(&drive);
        drive.write(0, &[0x5a; 4096], false).unwrap();
        let memory = Memory::open(&target);
        memory.place(AT);
        memory.decode(true);
        let reads = |drive: &mut Drive, at: u64| {
            memory.store(0, &[0; 8]);
            drive.read_to(0, 4096, at).unwrap();
            assert_eq!(memory.load(0, 8), [0x5a; 8]);
        };
        reads(&mut drive, AT);
        // Moved while it is decoded, and back.
        for at in [AT + SIZE, AT + 16 * SIZE, AT] {
            memory.place(at);
            reads(&mut drive, at);
            let (before, behind) = (at - 4096, at + SIZE);
            assert!(is_refused(drive.read_to(0, 4096, before)));
            assert!(is_refused(drive.read_to(0, 4096, behind)));
        }
        memory.decode(false);
        assert!(is_refused(drive.read_to(0, 4096, AT)), "it is reached although it is not decoded");
        memory.decode(true);
        reads(&mut drive, AT);
        memory.user.reset().unwrap();
        assert!(is_refused(drive.read_to(0, 4096, AT)), "it is reached although it was reset");
        memory.place(AT);
        memory.decode(true);

        // QEMU maps the BARs that it maps for its guest for other functions too, without a descriptor.
        let both = Access::all();
        user.dma_map(AT, SIZE, both, None).unwrap();
        reads(&mut drive, AT);
        memory.place(AT + SIZE);
        assert!(is_refused(drive.read_to(0, 4096, AT)), "there is no memory behind it any more");
        user.dma_unmap(AT, SIZE).unwrap();
        user.dma_map(AT + SIZE, SIZE, both, None).unwrap();
        reads(&mut drive, AT + SIZE);
        memory.decode(false);
        user.dma_unmap(AT + SIZE, SIZE).unwrap();
        memory.decode(true);
        reads(&mut drive, AT + SIZE);

        // What is memory to its user is memory.
        let own = SharedMemory::create("user", 4096).unwrap();
        let page = Some((own.as_fd(), 0));
        user.dma_map(AT + SIZE + 8192, 4096, both, page).unwrap();
        drive.read_to(0, 4096, AT + SIZE + 8192).unwrap();
        assert_eq!(own.region().whole().read_obj::<u8>(0).unwrap(), 0x5a);
        user.dma_unmap(AT + SIZE + 8192, 4096).unwrap();
        memory.place(AT);
        reads(&mut drive, AT);
    })
    .await;
}

/// Invariant I1: only functions of the same user reach each other, and users open no windows themselves.
#[tokio::test(flavor = "multi_thread")]
async fn functions_of_others_are_not_reached() {
    let rack = Rack::start(RACK).await;
    let drive = borrow(&rack, DRIVE, "db").await;
    let other = borrow(&rack, TARGETS[0], "web").await;
    let alone = rack.client.borrow(TARGETS[1], "beta").await.unwrap();
    let elsewhere = for_group(TARGETS[2], "db");
    let elsewhere = BorrowRequest { borrower: "gamma".to_owned(), ..elsewhere };
    let elsewhere = rack.client.borrow_as(&elsewhere).await.unwrap();
    blocking(move || {
        let (mut drive, user) = open_shared(&drive);
        for (nth, lease) in [other, alone, elsewhere].iter().enumerate() {
            let (memory, at) = (Memory::open(lease), AT + nth as u64 * SIZE);
            memory.place(at);
            memory.decode(true);
            assert!(is_refused(drive.read_to(0, 512, at)), "{} is reached", lease.function);
        }
        let page = SharedMemory::create("own", 4096).unwrap();
        let place = BarPlace { function: TARGETS[2].to_owned(), bar: BAR, offset: 0 };
        let memory = (page.as_fd(), 0);
        let opened = user.open_window(AT, 4096, Access::all(), &place, memory);
        assert!(matches!(opened, Err(ClientError::Refused(Errno::NOTSUP))), "{opened:?}");
    })
    .await;
    let bad = rack.client.borrow_as(&for_group("alpha/ram0", "a b")).await.unwrap_err();
    assert!(bad.to_string().contains("`a b` is no name of a group"), "{bad}");
}

/// Whichever of the two is isolated; its user is told why.
#[tokio::test(flavor = "multi_thread")]
async fn with_strict_isolation_it_is_refused_with_the_reason() {
    let rack = Rack::start(RACK).await;
    for strict in [DRIVE, TARGETS[2]] {
        let mut told = rack.client.events(Some(EventKind::Refusal), Some(0), true).await.unwrap();
        let mut leases = Vec::new();
        for function in [DRIVE, TARGETS[2]] {
            let isolation = if function == strict { Isolation::Strict } else { Isolation::Shared };
            let request = BorrowRequest { isolation, ..for_group(function, "db") };
            leases.push(rack.client.borrow_as(&request).await.unwrap());
        }
        let ids: Vec<u64> = leases.iter().map(|lease| lease.lease).collect();
        let open = blocking(move || {
            let (mut drive, memory) = (open(&leases[0]), Memory::open(&leases[1]));
            memory.place(AT);
            memory.decode(true);
            assert!(is_refused(drive.read_to(0, 512, AT)));
            (drive, memory)
        })
        .await;
        let text = format!("the controller of {strict} runs at its borrower (strict isolation)");
        let heard = async {
            loop {
                let event = told.next().await.expect("the control plane ended");
                if event.text.contains(&text) {
                    return event;
                }
            }
        };
        let event = tokio::time::timeout(Duration::from_secs(60), heard).await.expect("an event");
        assert_eq!((event.host.as_deref(), event.function.as_deref()), (Some("beta"), Some(DRIVE)));
        let devices = rack.client.devices().await.unwrap();
        let drive = devices.iter().find(|device| device.function == DRIVE).unwrap();
        assert!(drive.peers.as_ref().unwrap().refused[0].contains(&text), "{drive:?}");
        drop(open);
        for id in ids {
            rack.client.give_back(id).await.unwrap();
        }
    }
}
