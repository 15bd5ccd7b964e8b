//! A rack in one process: control plane and three nodes over their real sockets, a userspace NVMe
//! driver as the user. Lending from beginning to end, and what is refused.

mod common;

use std::os::fd::AsFd;
use std::path::Path;
use std::time::{Duration, Instant};

use common::{HOSTS, Rack, blocking};
use rackbus_control::api::{
    BorrowRequest, DeviceState, EventKind, Isolation, Lease, LeaseStage, Placement,
};
use rackbus_control::{ControlClient, ControlClientError};
use rackbus_driver::{Drive, DriveError, DriveOptions};
use rackbus_memory::{Access, SharedMemory};
use rackbus_node::metrics::SOCKET;
use rackbus_pci::vfio_user::{Client as User, ClientError as ClientFailure};
use rackbus_spec::nvme::registers;
use rackbus_spec::vfio_user::region;
use rustix::io::Errno;

const RACK: &str = "name = \"test\"\n[hosts.alpha.devices.nvme0]\nkind = \"nvme\"\nsize = \"64 MiB\"\n\
                    backing = \"memory\"\n[hosts.beta]\n[hosts.gamma]\n";

async fn rack() -> Rack {
    Rack::start(RACK).await
}

fn open(socket: &str) -> Result<Drive, DriveError> {
    Drive::open(Path::new(socket), DriveOptions::default())
}

#[tokio::test(flavor = "multi_thread")]
async fn data_written_by_one_borrower_is_found_by_the_next() {
    let rack = rack().await;
    let begun = Instant::now();
    let lease = rack.client.borrow("alpha/nvme0", "beta").await.unwrap();
    assert_eq!(lease.stage, LeaseStage::Active);
    let socket = lease.socket.clone().unwrap();
    let drive = blocking(move || {
        let mut drive = open(&socket).unwrap();
        let mut block = vec![0; 4096];
        drive.read(0, &mut block).unwrap();
        println!("borrowed to first read: {:?}", begun.elapsed());
        block.fill(0x5a);
        drive.write(8, &block, true).unwrap();
        drive
    })
    .await;

    let refused = rack.client.borrow("alpha/nvme0", "gamma").await.unwrap_err();
    let ControlClientError::Refused(refused) = refused else { panic!("{refused}") };
    assert_eq!((refused.code.as_str(), refused.holder.as_deref()), ("held", Some("beta")));
    assert_eq!(refused.lease, Some(lease.lease));

    let begun = Instant::now();
    let back = rack.client.give_back(lease.lease).await.unwrap();
    println!("returned and offered again: {:?}", begun.elapsed());
    assert!(back.returned && back.stage == LeaseStage::Ended);
    assert_eq!(rack.client.devices().await.unwrap()[0].state, DeviceState::Offered);
    // The old user's connection is of no more use.
    let mut drive = drive;
    blocking(move || assert!(drive.flush().is_err())).await;

    let lease = rack.client.borrow("alpha/nvme0", "gamma").await.unwrap();
    assert_eq!(lease.epoch, 2);
    blocking(move || {
        let mut drive = open(&lease.socket.unwrap()).unwrap();
        let mut block = vec![0; 4096];
        drive.read(8, &mut block).unwrap();
        assert!(block.iter().all(|byte| *byte == 0x5a));
    })
    .await;
    drop(rack.folder);
}

#[tokio::test(flavor = "multi_thread")]
async fn what_cannot_be_is_refused_with_a_remedy() {
    let rack = rack().await;
    for (function, borrower, code) in [
        ("alpha/nvme9", "beta", "unknown_function"),
        ("nvme0", "beta", "bad_name"),
        ("alpha/nvme0", "delta", "unknown_host"),
    ] {
        let error = rack.client.borrow(function, borrower).await.unwrap_err();
        let ControlClientError::Refused(error) = error else { panic!("{error}") };
        assert_eq!(error.code, code);
        assert!(!error.remedy.is_empty());
    }
    let error = rack.client.give_back(77).await.unwrap_err();
    assert!(error.to_string().contains("no lease 77"), "{error}");
}

/// The link itself lets in only the epoch that was armed.
#[tokio::test(flavor = "multi_thread")]
async fn a_forged_epoch_is_not_let_in() {
    use rackbus_link::shm::ShmLink;
    use rackbus_link::{Connect, Hello, Purpose as Wanted, VERSIONS};
    let rack = rack().await;
    let lease = rack.client.borrow("alpha/nvme0", "beta").await.unwrap();
    let link = ShmLink::new("test", rack.folder.path(), HOSTS);
    let address = link.address("alpha");
    let attempt = |from: &str, lease: u64, epoch: u64| {
        let service = Wanted::Function { device: "nvme0".into(), lease, epoch };
        let (rack, to) = ("test".to_owned(), "alpha".to_owned());
        let hello = Hello { versions: VERSIONS, rack, from: from.to_owned(), to, service };
        link.connect(&address, &hello).map(drop)
    };
    for (from, id, epoch) in [
        ("gamma", lease.lease, lease.epoch),
        ("beta", lease.lease + 1, lease.epoch),
        ("beta", lease.lease, lease.epoch + 1),
        ("beta", lease.lease, lease.epoch - 1),
    ] {
        let refused = attempt(from, id, epoch).unwrap_err().to_string();
        assert!(refused.contains("is not valid here"), "{refused}");
    }
    attempt("beta", lease.lease, lease.epoch).unwrap();
}

/// The test runs itself as another process, whose descriptors are nobody else's.
#[tokio::test(flavor = "multi_thread")]
async fn a_hundred_cycles_lose_no_data_and_leave_nothing() {
    const ALONE: &str = "RACKBUS_LENDING_ALONE";
    if std::env::var_os(ALONE).is_none() {
        let mut alone = tokio::process::Command::new(std::env::current_exe().unwrap());
        alone.args(["--exact", "a_hundred_cycles_lose_no_data_and_leave_nothing", "--nocapture"]);
        assert!(alone.env(ALONE, "1").status().await.unwrap().success());
        return;
    }
    let rack = rack().await;
    let descriptors = || std::fs::read_dir("/proc/self/fd").unwrap().count();
    let mut before = 0;
    for cycle in 0..100u64 {
        let host = HOSTS[(cycle % 3) as usize];
        let lease = rack.client.borrow("alpha/nvme0", host).await.unwrap();
        assert_eq!(lease.epoch, cycle + 1);
        let other = HOSTS[((cycle + 1) % 3) as usize];
        assert!(rack.client.borrow("alpha/nvme0", other).await.is_err());
        let socket = lease.socket.unwrap();
        blocking(move || {
            let mut drive = open(&socket).unwrap();
            let mut block = vec![0; 512];
            if cycle > 0 {
                drive.read(cycle - 1, &mut block).unwrap();
                assert_eq!(block, vec![cycle as u8 - 1; 512]);
            }
            block.fill(cycle as u8);
            drive.write(cycle, &block, false).unwrap();
        })
        .await;
        rack.client.give_back(lease.lease).await.unwrap();
        if cycle == 10 {
            before = descriptors();
        }
    }
    // Threads of ended conversations may still be closing theirs.
    let begun = std::time::Instant::now();
    while descriptors() > before + 20 {
        let open = descriptors();
        assert!(begun.elapsed() < Duration::from_secs(60), "{open} descriptors after {before}");
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
}

/// A user that stays keeps the socket's conversation, not its name.
#[tokio::test(flavor = "multi_thread")]
async fn a_function_is_borrowed_again_while_its_last_user_is_still_there() {
    let rack = rack().await;
    let first = rack.client.borrow("alpha/nvme0", "beta").await.unwrap();
    let socket = first.socket.clone().unwrap();
    let kept = blocking(move || open(&socket).unwrap()).await;
    rack.client.give_back(first.lease).await.unwrap();
    let second = rack.client.borrow("alpha/nvme0", "beta").await.unwrap();
    assert_ne!(first.socket, second.socket, "what ends with the first would take the second along");
    let socket = second.socket.clone().unwrap();
    let mut drive = blocking(move || open(&socket).unwrap()).await;
    drop(kept);
    blocking(move || drive.read(0, &mut vec![0; 512]).unwrap()).await;
    assert!(Path::new(&second.socket.unwrap()).exists());
    assert!(!Path::new(&first.socket.unwrap()).exists());
}

/// A request for the function with its front at the borrower.
fn strict(borrower: &str) -> BorrowRequest {
    BorrowRequest { isolation: Isolation::Strict, ..BorrowRequest::new("alpha/nvme0", borrower) }
}

/// The front runs at the borrower: what a driver does is the same, and so is what the next borrower
/// finds, wherever its front runs.
#[tokio::test(flavor = "multi_thread")]
async fn with_strict_isolation_the_drive_is_the_same() {
    let rack = rack().await;
    let lease = rack.client.borrow_as(&strict("beta")).await.unwrap();
    assert_eq!(lease.placement, Placement::Borrower);
    let drive = blocking(move || {
        let mut drive = open(&lease.socket.unwrap()).unwrap();
        let long: Vec<u8> = (0..256 << 10).map(|n| (n / 512) as u8).collect();
        drive.write(8, &long, true).unwrap();
        assert!(drive.compare(8, &long[..4096]).unwrap());
        assert!(!drive.compare(9, &long[..4096]).unwrap());
        drive.write_zeroes(8, 2).unwrap();
        drive.deallocate(10, 2).unwrap();
        drive.flush().unwrap();
        let mut found = vec![1; long.len()];
        drive.read(8, &mut found).unwrap();
        assert!(found[..2048].iter().all(|byte| *byte == 0) && found[2048..] == long[2048..]);
        drive
    })
    .await;
    let back = rack.client.give_back(lease.lease).await.unwrap();
    assert!(back.returned);
    let mut drive = drive;
    blocking(move || assert!(drive.flush().is_err())).await;

    let lease = rack.client.borrow("alpha/nvme0", "gamma").await.unwrap();
    assert_eq!(lease.placement, Placement::Lender);
    blocking(move || {
        let mut drive = open(&lease.socket.unwrap()).unwrap();
        let mut block = vec![0; 512];
        drive.read(8 + 200, &mut block).unwrap();
        assert_eq!(block, vec![200; 512]);
    })
    .await;
}

/// The lender lets in the half of the function that was asked for, and no other.
#[tokio::test(flavor = "multi_thread")]
async fn a_front_and_its_medium_cannot_be_exchanged() {
    use rackbus_link::shm::ShmLink;
    use rackbus_link::{Connect, Hello, Purpose as Wanted, VERSIONS};
    let rack = rack().await;
    let link = ShmLink::new("test", rack.folder.path(), HOSTS);
    let address = link.address("alpha");
    let attempt = |service: Wanted| {
        let (rack, from, to) = ("test".to_owned(), "beta".to_owned(), "alpha".to_owned());
        let hello = Hello { versions: VERSIONS, rack, from, to, service };
        link.connect(&address, &hello).map(drop)
    };
    let lease = rack.client.borrow_as(&strict("beta")).await.unwrap();
    let (device, lease, epoch) = ("nvme0".to_owned(), lease.lease, lease.epoch);
    let refused = attempt(Wanted::Function { device: device.clone(), lease, epoch }).unwrap_err();
    assert!(refused.to_string().contains("runs at its borrower"), "{refused}");
    attempt(Wanted::Medium { device: device.clone(), lease, epoch, lanes: Vec::new() }).unwrap();
    rack.client.give_back(lease).await.unwrap();
    let lease = rack.client.borrow("alpha/nvme0", "beta").await.unwrap();
    let refused = attempt(Wanted::Medium {
        device,
        lease: lease.lease,
        epoch: lease.epoch,
        lanes: Vec::new(),
    });
    let refused = refused.unwrap_err().to_string();
    assert!(refused.contains("runs at its lender"), "{refused}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_request_that_contradicts_itself_is_refused() {
    let rack = rack().await;
    let request = BorrowRequest { placement: Some(Placement::Lender), ..strict("beta") };
    let error = rack.client.borrow_as(&request).await.unwrap_err();
    let ControlClientError::Refused(error) = error else { panic!("{error}") };
    assert_eq!(error.code, "contradiction");
    assert_eq!(rack.client.devices().await.unwrap()[0].state, DeviceState::Offered);
}

/// Operations that go on when the function is taken back: on return nothing is done any more.
#[tokio::test(flavor = "multi_thread")]
async fn a_revocation_ends_what_a_front_has_under_way() {
    let rack = rack().await;
    for round in 0..20u8 {
        let lease = rack.client.borrow_as(&strict("beta")).await.unwrap();
        let socket = lease.socket.unwrap();
        let (begun, working) = tokio::sync::oneshot::channel();
        let writer = tokio::task::spawn_blocking(move || {
            let mut drive = open(&socket).unwrap();
            let data = vec![round; 128 << 10];
            drive.write(0, &data, false).unwrap();
            begun.send(()).unwrap();
            while drive.write(0, &data, false).is_ok() {}
        });
        working.await.unwrap();
        rack.client.give_back(lease.lease).await.unwrap();
        let next = rack.client.borrow_as(&strict("gamma")).await.unwrap();
        let socket = next.socket.unwrap();
        blocking(move || {
            let mut drive = open(&socket).unwrap();
            let mut data = vec![0xff; 128 << 10];
            drive.write(0, &data, false).unwrap();
            // What the former user had under way would be seen here.
            for _ in 0..20 {
                drive.read(0, &mut data).unwrap();
                assert!(data.iter().all(|byte| *byte == 0xff), "round {round}");
            }
        })
        .await;
        writer.await.unwrap();
        rack.client.give_back(next.lease).await.unwrap();
    }
}

/// A driver enables a controller and names memory that it never gave it: refused where the front runs,
/// and told there and at the control plane.
#[tokio::test(flavor = "multi_thread")]
async fn faults_are_events_wherever_the_front_runs() {
    let rack = rack().await;
    let lender = ControlClient::new(&rack.folder.path().join("alpha").join(SOCKET));
    let before = "rackbus_function_dma_refused_total{function=\"alpha/nvme0\",host=\"alpha\",\
                  role=\"lender\",cause=\"not mapped\"} 0";
    let page = lender.metrics().await.unwrap();
    assert!(page.lines().any(|line| line == before), "it is not there before the first: {page}");
    for (placement, host) in [("lender", "alpha"), ("borrower", "beta")] {
        let request = match host {
            "alpha" => BorrowRequest::new("alpha/nvme0", "beta"),
            _ => strict("beta"),
        };
        let lease = rack.client.borrow_as(&request).await.unwrap();
        let mut faults = rack.client.events(Some(EventKind::Fault), Some(0), true).await.unwrap();
        let socket = lease.socket.unwrap();
        let user = blocking(move || {
            let user = User::connect(Path::new(&socket), Duration::from_secs(60)).unwrap();
            let register = |offset: u64, bytes: &[u8]| user.write(0, offset, bytes).unwrap();
            // Memory space and bus mastering.
            user.write(region::CONFIG, 4, &6u16.to_le_bytes()).unwrap();
            register(registers::AQA, &0x001f_001f_u32.to_le_bytes());
            register(registers::ASQ, &0x10_0000_u64.to_le_bytes());
            register(registers::ACQ, &0x20_0000_u64.to_le_bytes());
            // 64 and 16 byte entries; enabled.
            register(registers::CC, &0x0046_0001_u32.to_le_bytes());
            register(registers::sq_tail_doorbell(0, 0), &1u32.to_le_bytes());
            user
        })
        .await;
        let heard = async {
            loop {
                // The node of the round before may still tell of more.
                let fault = faults.next().await.expect("the control plane ended");
                if fault.host.as_deref() == Some(host) {
                    return fault;
                }
            }
        };
        let told = tokio::time::timeout(Duration::from_secs(60), heard).await;
        let told = told
            .unwrap_or_else(|_| panic!("nobody tells of it, with the front at the {placement}"));
        assert!(told.text.contains("accesses of alpha/nvme0 were refused"), "{told:?}");
        let node = ControlClient::new(&rack.folder.path().join(host).join(SOCKET));
        let text = node.metrics().await.unwrap();
        let counted = format!(
            "rackbus_function_dma_refused_total{{function=\"alpha/nvme0\",host=\"{host}\",\
             role=\"{placement}\",cause=\"not mapped\"}} "
        );
        let count = text.lines().find_map(|line| line.strip_prefix(&counted));
        assert!(count.is_some_and(|count| count != "0"), "{placement}: {text}");
        drop(user);
        rack.client.give_back(lease.lease).await.unwrap();
    }
}

/// What a host lends to several lenders is together at most what it has; what is lent to several counts once.
#[tokio::test(flavor = "multi_thread")]
async fn what_several_lenders_are_lent_is_bounded_together() {
    const MIB: u64 = 1 << 20;
    let rack = Rack::start(
        "name = \"test\"\n[hosts.alpha.devices.nvme0]\nkind = \"nvme\"\nsize = \"1 MiB\"\n\
         backing = \"memory\"\n[hosts.beta]\nmemory = \"64 MiB\"\n\
         [hosts.gamma.devices.nvme0]\nkind = \"nvme\"\nsize = \"1 MiB\"\nbacking = \"memory\"\n",
    )
    .await;
    let here = rack.client.borrow("alpha/nvme0", "beta").await.unwrap();
    let there = rack.client.borrow("gamma/nvme0", "beta").await.unwrap();
    blocking(move || {
        let connect = |lease: &Lease| {
            let socket = lease.socket.clone().unwrap();
            User::connect(Path::new(&socket), Duration::from_secs(60)).unwrap()
        };
        let (here, there) = (connect(&here), connect(&there));
        let one = SharedMemory::create("one", 48 * MIB).unwrap();
        let other = SharedMemory::create("other", 32 * MIB).unwrap();
        let map = |user: &User, at: u64, memory: &SharedMemory| {
            let length = memory.len() as u64;
            user.dma_map(at, length, Access::all(), Some((memory.as_fd(), 0)))
        };
        map(&here, 0, &one).unwrap();
        map(&there, 0, &one).unwrap();
        let full = |outcome| matches!(outcome, Err(ClientFailure::Refused(Errno::NOSPC)));
        assert!(full(map(&there, 1 << 30, &other)), "more than the host has is lent");
        // One of two that have it, gives it back.
        here.dma_unmap(0, one.len() as u64).unwrap();
        assert!(full(map(&here, 1 << 30, &other)));
        there.dma_unmap(0, one.len() as u64).unwrap();
        map(&here, 1 << 30, &other).unwrap();
        assert!(full(map(&there, 0, &one)));
        // Whoever leaves lends nothing any more.
        drop(here);
        let begun = Instant::now();
        while full(map(&there, 0, &one)) {
            assert!(begun.elapsed() < Duration::from_secs(60), "it stays lent");
        }
    })
    .await;
}
