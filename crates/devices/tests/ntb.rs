//! A bridge with two clients at its sockets.

use std::fs::File;
use std::io::{Read, Write};
use std::os::fd::AsFd;
use std::os::unix::fs::FileExt;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use rackbus_devices::ntb::{Bridge, BridgeConfig, BridgeError, BridgeSide, EndConfig, map};
use rackbus_memory::Access;
use rackbus_pci::vfio_user::Client;
use rackbus_spec::vfio_user::{DmaAccess, Flags, MessageHeader, command, irq, region};
use zerocopy::{FromBytes, IntoBytes};

const LONG: Duration = Duration::from_secs(60);
const MEMORY: u64 = 1 << 20;
const WINDOW: u64 = 64 << 10;

/// Where a machine's memory is on its bus.
const AT: u64 = 0x1_0000;

fn config(dir: &Path) -> BridgeConfig {
    let end = |name: &str| EndConfig {
        socket: dir.join(format!("{name}.sock")),
        memory: dir.join(format!("{name}.ram")),
    };
    let mut config = BridgeConfig::new([end("a"), end("b")]);
    (config.window, config.memory_size) = (WINDOW, MEMORY);
    (config.patience, config.training) = (Duration::from_millis(20), Duration::ZERO);
    config
}

/// A folder in shared memory, as a machine's memory should be.
fn folder() -> tempfile::TempDir {
    tempfile::TempDir::new_in("/dev/shm").unwrap()
}

fn memory(dir: &Path, name: &str) -> File {
    File::options().read(true).write(true).open(dir.join(format!("{name}.ram"))).unwrap()
}

/// A machine that has an end: enabled, its link wanted.
fn machine(dir: &Path, name: &str) -> Client {
    let client = Client::connect(&dir.join(format!("{name}.sock")), LONG).unwrap();
    enable(&client);
    client
}

fn enable(client: &Client) {
    client.write(region::CONFIG, 4, &[6, 0]).unwrap();
    client.write(region::BAR0, map::CONTROL, &[0; 4]).unwrap();
}

fn wait_link(client: &Client) {
    let mut status = [0; 2];
    while u16::from_le_bytes(status) & map::LINK_ACTIVE == 0 {
        client.read(region::CONFIG, map::LINK_STATUS.into(), &mut status).unwrap();
        std::thread::yield_now();
    }
}

#[test]
fn one_machine_reaches_the_others_memory_by_both_windows() {
    let dir = folder();
    let bridge = Bridge::start(&config(dir.path())).unwrap();
    let (a, b) = (machine(dir.path(), "a"), machine(dir.path(), "b"));
    wait_link(&a);
    assert_eq!(a.irq_info(irq::MSIX).unwrap().count, u32::from(map::MSIX_VECTORS));
    let memory = memory(dir.path(), "b");
    b.dma_map(AT, MEMORY, Access::READ | Access::WRITE, Some((memory.as_fd(), 0))).unwrap();
    b.write(region::BAR0, map::INBOUND, &AT.to_le_bytes()).unwrap();
    // Posted, and in order with the read that follows.
    a.post(2, 0x123, b"through window 1").unwrap();
    let mut read = [0; 16];
    a.read(2, 0x123, &mut read).unwrap();
    assert_eq!(&read, b"through window 1");
    memory.read_exact_at(&mut read, 0x123).unwrap();
    assert_eq!(&read, b"through window 1");
    // The second window is the memory as it lies in its file, and may be mapped.
    let window = a.region_info(4).unwrap();
    assert_eq!((window.size, window.memory.is_some()), (MEMORY, true));
    a.read(4, 0x123, &mut read).unwrap();
    assert_eq!(&read, b"through window 1");
    let counted = bridge.counted(BridgeSide::A);
    assert_eq!((counted.window1_writes, counted.window1_reads), (1, 1));
    assert_eq!((counted.direct, counted.posted, counted.dropped), (2, 0, 0));
    // What was unmapped is not reached any more: B's machine is asked, and does not answer.
    b.dma_unmap(AT, MEMORY).unwrap();
    a.read(2, 0x123, &mut read).unwrap();
    assert_eq!(read, [0xff; 16]);
    assert_eq!(bridge.counted(BridgeSide::A).timeouts, 1);
}

#[test]
fn a_machine_that_answers_nothing_blocks_nobody() {
    let dir = folder();
    let bridge = Bridge::start(&config(dir.path())).unwrap();
    let (a, b) = (machine(dir.path(), "a"), machine(dir.path(), "b"));
    wait_link(&a);
    for nth in 0..500 {
        a.post(2, nth % WINDOW, &[1]).unwrap();
    }
    let mut read = [0; 4];
    for _ in 0..100 {
        a.read(2, 0, &mut read).unwrap();
        assert_eq!(read, [0xff; 4]);
    }
    // Registers of A's own are there all along.
    a.write(region::BAR0, map::SCRATCHPADS, &7_u32.to_le_bytes()).unwrap();
    a.read(region::BAR0, map::SCRATCHPADS, &mut read).unwrap();
    assert_eq!(read, 7_u32.to_le_bytes());
    let counted = bridge.counted(BridgeSide::A);
    assert!(counted.dropped >= 500, "{counted:?}");
    // B's machine goes away without a word, and another one takes its place.
    drop(b);
    let mut status = [0xff; 2];
    while u16::from_le_bytes(status) & map::LINK_ACTIVE != 0 {
        a.read(region::CONFIG, map::LINK_STATUS.into(), &mut status).unwrap();
    }
    a.read(2, 0, &mut read).unwrap();
    assert_eq!(read, [0xff; 4]);
    let _b = machine(dir.path(), "b");
    wait_link(&a);
}

#[test]
fn writes_that_the_peers_machine_refuses_are_counted() {
    let dir = folder();
    let bridge = Bridge::start(&config(dir.path())).unwrap();
    let a = machine(dir.path(), "a");
    let mut stream = UnixStream::connect(dir.path().join("b.sock")).unwrap();
    let b = Client::with_stream(Arc::new(stream.try_clone().unwrap())).unwrap();
    enable(&b);
    wait_link(&a);
    a.write(2, 0, &[1; 4]).unwrap();
    let mut asked = [0; size_of::<MessageHeader>() + size_of::<DmaAccess>() + 4];
    stream.read_exact(&mut asked).unwrap();
    let (asked, _) = MessageHeader::read_from_prefix(&asked).unwrap();
    assert_eq!(asked.command, command::DMA_WRITE);
    let (flags, message_size) = (Flags::REPLY | Flags::ERROR, size_of::<MessageHeader>() as u32);
    let refusal = MessageHeader { flags: flags.bits(), message_size, error: 14, ..asked };
    stream.write_all(refusal.as_bytes()).unwrap();
    // A register of the peer's comes after what was written.
    a.write(region::BAR0, map::PEER_SCRATCHPADS, &[7; 4]).unwrap();
    let counted = bridge.counted(BridgeSide::A);
    assert_eq!((counted.posted, counted.dropped, counted.timeouts), (1, 1, 0));
    assert_eq!(bridge.counted(BridgeSide::B).dropped, 0);
}

#[test]
fn what_cannot_be_a_bridge_is_refused_with_its_reason() {
    let dir = folder();
    let mut odd = config(dir.path());
    odd.window = 3 << 20;
    assert!(matches!(Bridge::start(&odd), Err(BridgeError::Window(_))));
    std::fs::write(dir.path().join("a.ram"), [0; 100]).unwrap();
    assert!(matches!(Bridge::start(&config(dir.path())), Err(BridgeError::Memory { .. })));
    std::fs::remove_file(dir.path().join("a.ram")).unwrap();
    let first = Bridge::start(&config(dir.path())).unwrap();
    assert!(matches!(Bridge::start(&config(dir.path())), Err(BridgeError::Io { .. })));
    drop(first);
}
