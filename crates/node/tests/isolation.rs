//! A function of another host that its user tells to reach any memory, over a whole rack: it reaches that user's memory
//! and the BARs of that user's functions while they are mapped, and nothing else; what was refused is counted and told.
//!
//! Two threads of the user's have it: one maps pages and takes them away again, all the time, the other one has the
//! function read and write at boundaries of everything. The function is in alpha's node, its user at beta.

mod common;
#[path = "../../pci/tests/common/probe.rs"]
mod probe;

use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::Duration;

use common::user::{Memory, SIZE, is_refused, open_shared, socket};
use common::{Rack, blocking};
use probe::{ADDRESS, COMMAND, DONE, LENGTH, Probe, READ, REFUSED, STATUS, VALUE, WRITE};
use rackbus_control::ControlClient;
use rackbus_control::api::{BorrowRequest, DeviceReport, EventKind, Isolation, Lease};
use rackbus_devices::Folders;
use rackbus_devices::class::DeviceConfig;
use rackbus_memory::{Access, SharedMemory};
use rackbus_node::metrics::SOCKET;
use rackbus_pci::Function;
use rackbus_pci::vfio_user::Client as User;
use rackbus_seeds::Random;
use rackbus_spec::vfio_user::region;

/// `probe0` is the isolation test function. `ram0` is at its lender, `ram1` at another one: both of the same user.
/// `ram2` is another user's of the same host.
const RACK: &str = "name = \"test\"\n\
    [hosts.alpha.devices.probe0]\nkind = \"memory\"\nsize = \"4 MiB\"\n\
    [hosts.alpha.devices.ram0]\nkind = \"memory\"\nsize = \"4 MiB\"\n\
    [hosts.alpha.devices.nvme0]\nkind = \"nvme\"\nsize = \"64 MiB\"\nbacking = \"memory\"\n\
    [hosts.gamma.devices.ram1]\nkind = \"memory\"\nsize = \"4 MiB\"\n\
    [hosts.gamma.devices.ram2]\nkind = \"memory\"\nsize = \"4 MiB\"\n\
    [hosts.beta]\n";
const PROBE: &str = "alpha/probe0";
const PAGE: u64 = 4096;
/// Pages of the user's memory; the even ones are mapped now and then, the others never.
const PAGES: u64 = 32;
/// Where page 0 is mapped.
const AT: u64 = 0x10_0000;
/// Where the BARs of the user's functions are programmed to be; the second follows the first.
const BARS: u64 = 0x38_0000_0000;
/// Accesses of each test.
const ACCESSES: usize = 4000;
/// How many times at least a page is mapped and unmapped meanwhile.
const MAPPINGS: usize = 50;

#[derive(Debug)]
struct ProbeConfig;

impl DeviceConfig for ProbeConfig {
    fn detail(&self) -> String {
        "the isolation test function".to_owned()
    }

    fn model(&self, _: &Folders) -> std::io::Result<Box<dyn Function>> {
        Ok(Probe::new())
    }

    fn resume(&self, _: &Folders, _: Vec<OwnedFd>) -> std::io::Result<Box<dyn Function>> {
        Ok(Probe::new())
    }
}

async fn rack() -> Rack {
    let change = |devices: &mut [rackbus_devices::RackDevice]| {
        let mut probes = devices.iter_mut().filter(|device| device.function == PROBE);
        probes.next().unwrap().config = Some(Arc::new(ProbeConfig));
    };
    Rack::start_changed(RACK, |link| Arc::new(link), change).await
}

async fn borrow(rack: &Rack, function: &str, group: &str) -> Lease {
    let group = Some(group.to_owned());
    let request = BorrowRequest { group, ..BorrowRequest::new(function, "beta") };
    rack.client.borrow_as(&request).await.unwrap()
}

/// What is in a page, for its number.
fn filled(page: u64) -> Vec<u8> {
    (0..PAGE).map(|at| (at * 7 + page * 13) as u8).collect()
}

fn load(memory: &SharedMemory, page: u64) -> Vec<u8> {
    let mut bytes = vec![0; PAGE as usize];
    memory.region().slice((page * PAGE) as usize, PAGE as usize).unwrap().copy_to(&mut bytes);
    bytes
}

/// Maps the even pages and takes them away again, until it is told to stop: what one has when it is taken away, it has
/// until it is mapped again.
fn churn(
    user: &User,
    memory: &SharedMemory,
    (stop, times): (&AtomicBool, &AtomicUsize),
    seed: u64,
) {
    let mut random = Random(seed);
    let mut left: Vec<Option<Vec<u8>>> = vec![None; PAGES as usize];
    let all = (AT, PAGES * PAGE);
    while !stop.load(Ordering::Acquire) {
        let page = 2 * random.below(PAGES as usize / 2) as u64;
        let (at, offset) = (AT + page * PAGE, page * PAGE);
        let access = [Access::all(), Access::READ, Access::WRITE][random.below(3)];
        if let Some(left) = &left[page as usize] {
            assert!(*left == load(memory, page), "page {page} changed while it was not mapped");
        }
        user.dma_map(at, PAGE, access, Some((memory.as_fd(), offset))).unwrap();
        let before = load(memory, page);
        for _ in 0..random.below(200) {
            std::thread::yield_now();
        }
        if access == Access::READ {
            assert!(before == load(memory, page), "page {page} may be read only");
        }
        user.dma_unmap(at, PAGE).unwrap();
        left[page as usize] = Some(load(memory, page));
        times.fetch_add(1, Ordering::Release);
    }
    // Nothing of it is left, and nothing happens to it any more.
    assert!(user.dma_unmap(all.0, all.1).is_err(), "something was mapped still");
}

/// Has the function do an access; whether it reached what it was told to.
fn access(user: &User, command: u64, at: u64, length: u64, value: u8) -> bool {
    let registers =
        [(ADDRESS, at), (LENGTH, length), (VALUE, value.into()), (STATUS, 0), (COMMAND, command)];
    for (register, value) in registers {
        user.write(region::BAR0, register, &value.to_le_bytes()).unwrap();
    }
    loop {
        let mut status = [0; 8];
        user.read(region::BAR0, STATUS, &mut status).unwrap();
        match u64::from_le_bytes(status) {
            DONE => return true,
            REFUSED => return false,
            _ => {}
        }
    }
}

/// Where an access may begin or end: around all boundaries that there are, and of the address space.
fn boundary(random: &mut Random) -> u64 {
    let page = random.below(PAGES as usize + 2) as u64;
    let around = match random.below(8) {
        0..5 => AT + page * PAGE,
        5 => BARS + SIZE * random.below(3) as u64,
        6 => [0, u64::MAX, 1 << 63, 1 << 47, 1 << 32][random.below(5)],
        _ => random.next(),
    };
    around.wrapping_add_signed(random.below(17) as i64 - 8)
}

async fn report(
    rack: &Rack,
    function: &str,
    of: impl Fn(&rackbus_control::api::Device) -> Option<Box<DeviceReport>>,
    expected: impl Fn(&DeviceReport) -> bool,
) -> DeviceReport {
    let deadline = tokio::time::Instant::now() + Duration::from_secs(60);
    loop {
        let devices = rack.client.devices().await.unwrap();
        let device = devices.iter().find(|device| device.function == function).unwrap();
        let report = of(device).unwrap_or_default();
        if expected(&report) {
            return *report;
        }
        assert!(tokio::time::Instant::now() < deadline, "{report:?}");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}

/// How many refused accesses of the probe the events tell of: as many as expected before long, since what a report says
/// is shown before the event of it is stored.
async fn told_faults(rack: &Rack, expected: u64) -> u64 {
    let deadline = tokio::time::Instant::now() + Duration::from_secs(60);
    loop {
        let mut told = rack.client.events(Some(EventKind::Fault), None, false).await.unwrap();
        let mut faults = 0;
        while let Some(event) = told.next().await {
            assert_eq!(event.function.as_deref(), Some(PROBE), "{event:?}");
            assert!(event.text.contains(&format!("accesses of {PROBE} were refused")), "{event:?}");
            faults += event.text.split(' ').next().unwrap().parse::<u64>().unwrap();
        }
        if faults >= expected || tokio::time::Instant::now() >= deadline {
            return faults;
        }
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn it_reaches_its_users_windows_and_nothing_else_while_they_come_and_go() {
    let rack = rack().await;
    let probe = borrow(&rack, PROBE, "db").await;
    let peers = [borrow(&rack, "alpha/ram0", "db").await, borrow(&rack, "gamma/ram1", "db").await];
    let other = borrow(&rack, "gamma/ram2", "web").await;
    let ids: Vec<u64> =
        [&probe, &peers[0], &peers[1], &other].into_iter().map(|lease| lease.lease).collect();
    let refused = blocking(move || {
        let user = User::connect(socket(&probe), Duration::from_secs(60)).unwrap();
        user.write(region::CONFIG, 4, &[6, 0]).unwrap();
        let memory = SharedMemory::create("user", PAGES * PAGE).unwrap();
        for page in 0..PAGES {
            let place = memory.region().slice((page * PAGE) as usize, PAGE as usize).unwrap();
            place.copy_from(&filled(page));
        }
        let peers = peers.map(|lease| Memory::open(&lease));
        let other = Memory::open(&other);
        other.place(BARS + 2 * SIZE);
        other.decode(true);
        let untouched = filled(99);
        other.store(0, &untouched);
        let (stop, times) = (AtomicBool::new(false), AtomicUsize::new(0));
        let mut random = Random(7);
        let (mut reached, mut refused) = (0u64, 0u64);
        std::thread::scope(|scope| {
            let churning = scope.spawn(|| churn(&user, &memory, (&stop, &times), 3));
            // On a busy machine it goes on until the other thread had its part.
            let enough = || times.load(Ordering::Acquire) >= MAPPINGS || churning.is_finished();
            for nth in (0..).take_while(|nth| *nth < ACCESSES || !enough()) {
                if nth % 100 == 0 {
                    // A BAR comes, goes and moves.
                    let peer = &peers[random.below(2)];
                    peer.place(BARS + SIZE * random.below(2) as u64);
                    peer.decode(random.chance(70));
                }
                let at = boundary(&mut random);
                let length = match random.below(4) {
                    0 => 1 + random.below(9000) as u64,
                    1 => [1, 8, PAGE, PAGE + 1, u64::MAX, 1 << 63][random.below(6)],
                    _ => boundary(&mut random).wrapping_sub(at),
                };
                // No device moves as much as lies between two ends of the address space.
                let length = if length == 0 { 1 } else { length };
                let command = if random.chance(50) { READ } else { WRITE };
                let done = access(&user, command, at, length, nth as u8);
                if done {
                    reached += 1;
                    let end = at + (length - 1);
                    let own = AT <= at && end < AT + PAGES * PAGE;
                    let bar = BARS <= at && end < BARS + 2 * SIZE;
                    assert!(own || bar, "{length:#x} bytes at {at:#x} were reached");
                    let pages = own.then(|| ((at - AT) / PAGE, (end - AT) / PAGE));
                    let even = pages.is_none_or(|(first, last)| first == last && first % 2 == 0);
                    assert!(even, "{length:#x} bytes at {at:#x} were reached");
                } else {
                    refused += 1;
                }
            }
            stop.store(true, Ordering::Release);
            churning.join().unwrap();
        });
        assert!(reached > 20 && refused > 1000, "{reached} reached, {refused} refused");
        for page in (1..PAGES).step_by(2) {
            assert!(load(&memory, page) == filled(page), "page {page} was never mapped");
        }
        assert!(other.load(0, PAGE as usize) == untouched, "the other user's memory");
        refused
    })
    .await;
    let counted = report(
        &rack,
        PROBE,
        |device| device.report.clone(),
        |report| report.dma_refused >= refused,
    )
    .await;
    assert_eq!(counted.dma_refused, refused, "each is counted once: {counted:?}");
    let last = counted.last_refused.expect("the last that was refused");
    assert!(last.contains("0x"), "without an address: {last}");
    assert_eq!(told_faults(&rack, refused).await, refused, "events tell of all of them");
    for id in ids {
        rack.client.give_back(id).await.unwrap();
    }
}

/// With strict isolation the function's lender has no memory at all; what is hostile is refused at the borrower.
#[tokio::test(flavor = "multi_thread")]
async fn with_strict_isolation_nothing_is_reached_from_the_lender() {
    let rack = rack().await;
    let strict = |function: &str| BorrowRequest {
        isolation: Isolation::Strict,
        ..BorrowRequest::new(function, "beta")
    };
    let refused = rack.client.borrow_as(&strict(PROBE)).await.unwrap_err();
    assert!(refused.to_string().contains("runs whole at its lender"), "{refused}");
    let lease = rack.client.borrow_as(&strict("alpha/nvme0")).await.unwrap();
    let id = lease.lease;
    let (drive, refused) = blocking(move || {
        let (mut drive, user) = open_shared(&lease);
        drive.write(0, &[0x5a; 4096], false).unwrap();
        let memory = SharedMemory::create("user", 4 * PAGE).unwrap();
        user.dma_map(BARS, PAGE, Access::all(), Some((memory.as_fd(), PAGE))).unwrap();
        user.dma_map(BARS + 2 * PAGE, PAGE, Access::READ, Some((memory.as_fd(), 3 * PAGE)))
            .unwrap();
        drive.read_to(0, PAGE as usize, BARS).unwrap();
        assert!(load(&memory, 1) == vec![0x5a; PAGE as usize]);
        let mut refused = 0;
        let top = u64::MAX - PAGE + 1;
        for at in
            [0, PAGE, BARS - PAGE, BARS + PAGE, BARS + 2 * PAGE, BARS + 3 * PAGE, 1 << 63, top]
        {
            assert!(is_refused(drive.read_to(0, PAGE as usize, at)), "{at:#x} is reached");
            refused += 1;
        }
        for page in [0, 2, 3] {
            assert!(load(&memory, page) == vec![0; PAGE as usize], "page {page}");
        }
        (drive, refused)
    })
    .await;
    let node = ControlClient::new(&rack.folder.path().join("alpha").join(SOCKET));
    assert_eq!(node.reach("alpha/nvme0").await.unwrap(), [], "the lender reaches something");
    let front = |device: &rackbus_control::api::Device| device.front.clone();
    let counted = report(&rack, "alpha/nvme0", front, |report| report.dma_refused >= refused).await;
    assert!(counted.last_refused.is_some_and(|last| last.contains("0xfffffffffffff000")));
    drop(drive);
    rack.client.give_back(id).await.unwrap();
}
