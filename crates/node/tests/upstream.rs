//! Functions that other programs serve by vfio-user, lent by a node like its own: our own server, one that
//! hangs, and the example server of the crate `vfio_user`.

mod common;

use std::io::{Read, Write};
use std::os::fd::AsFd;
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};
use std::sync::mpsc::{Sender, channel};
use std::time::{Duration, Instant};

use common::user::{Memory, SIZE, is_refused, socket as socket_of};
use common::{Rack, blocking};
use rackbus_control::api::{BorrowRequest, DeviceState, Isolation, Lease};
use rackbus_control::reach::{ReachedPlace, ReachedRange};
use rackbus_control::{ControlClient as NodeClient, ControlClientError};
use rackbus_devices::nvme::{Nvme, NvmeConfig};
use rackbus_driver::{Drive, DriveError, DriveOptions};
use rackbus_memory::{Access, SharedMemory};
use rackbus_node::metrics::SOCKET;
use rackbus_pci::engine::EngineOptions;
use rackbus_pci::vfio_user::{Client, ClientError, LocalFunction, serve_function};
use rackbus_spec::nvme;
use rackbus_spec::vfio_user::{irq, region};
use rustix::process::{Pid, Signal, kill_process};

const SOON: Duration = Duration::from_secs(60);

/// The variable that makes this program a server: the socket that it listens at.
const SERVE: &str = "RACKBUS_TEST_SERVE";

/// A rack whose alpha has a function of another program.
fn rack_file(keys: &str) -> String {
    format!(
        "name = \"test\"\n[hosts.alpha.devices.d0]\nkind = \"upstream\"\n{keys}\n\
         [hosts.alpha.devices.ram0]\nkind = \"memory\"\nsize = \"4 MiB\"\n\
         [hosts.beta]\n\
         [hosts.gamma.devices.ram2]\nkind = \"memory\"\nsize = \"4 MiB\"\n"
    )
}

fn serve(socket: &Path) -> LocalFunction {
    let model = Nvme::new(&NvmeConfig::memory(1 << 20, "upstream")).unwrap();
    serve_function(Box::new(model), socket, EngineOptions::default()).unwrap()
}

fn open(lease: &Lease) -> Result<Drive, DriveError> {
    Drive::open(Path::new(lease.socket.as_ref().unwrap()), DriveOptions::default())
}

/// Borrows the function, which may be on its way back.
async fn borrow(rack: &Rack) -> Lease {
    let begun = Instant::now();
    loop {
        match rack.client.borrow("alpha/d0", "beta").await {
            Ok(lease) => return lease,
            Err(ControlClientError::Refused(_)) if begun.elapsed() < SOON => {}
            Err(error) => panic!("{error}"),
        }
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
}

/// What has no memory behind it takes no mapping's place: what is unmapped is reached no more.
#[tokio::test(flavor = "multi_thread")]
async fn what_is_unmapped_is_reached_no_more() {
    let folder = tempfile::tempdir().unwrap();
    let socket = folder.path().join("d0.sock");
    let _server = serve(&socket);
    let rack = Rack::start(&rack_file(&format!("socket = {socket:?}"))).await;
    let lease = borrow(&rack).await;
    blocking(move || {
        const AT: u64 = 1 << 40;
        let user = Client::connect(socket_of(&lease), Duration::from_secs(60)).unwrap();
        let memory = SharedMemory::create("own", 8192).unwrap();
        user.dma_map(AT, 8192, Access::all(), Some((memory.as_fd(), 0))).unwrap();
        for length in [8192, 4096] {
            let mapped = user.dma_map(AT, length, Access::all(), None);
            assert!(matches!(mapped, Err(ClientError::Refused(_))), "{mapped:?}");
        }
        user.dma_unmap(AT, 8192).unwrap();
        let unmapped = user.dma_unmap(AT, 8192);
        assert!(matches!(unmapped, Err(ClientError::Refused(_))), "{unmapped:?}");
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn what_another_program_serves_is_lent_and_taken_back() {
    let folder = tempfile::tempdir().unwrap();
    let socket = folder.path().join("server.sock");
    let rack = Rack::start(&rack_file(&format!("socket = {socket:?}"))).await;

    // A server that is not there is said to its user; one that comes later is used.
    let lease = borrow(&rack).await;
    let server = blocking(move || {
        let refused = open(&lease).unwrap_err().to_string();
        assert!(refused.contains("No such device"), "{refused}");
        serve(&socket)
    })
    .await;
    // Its node reports it once a second.
    let begun = Instant::now();
    let refused = loop {
        let report = rack.client.devices().await.unwrap().remove(0).report;
        match report.and_then(|report| report.last_attach_refused) {
            Some(refused) => break refused,
            None => assert!(begun.elapsed() < SOON, "the refusal is not reported"),
        }
        tokio::time::sleep(Duration::from_millis(10)).await;
    };
    assert!(refused.contains("no vfio-user server answers at"), "{refused}");
    let lease = rack.client.leases(false).await.unwrap().remove(0);
    let drive = blocking(move || {
        let mut drive = open(&lease).unwrap();
        drive.write(3, &[7; 512], true).unwrap();
        drive
    })
    .await;
    // Its lender says what it is, once it knows.
    let begun = Instant::now();
    let identity = loop {
        let report = rack.client.devices().await.unwrap().remove(0).report;
        match report.and_then(|report| report.identity) {
            Some(identity) => break identity,
            None => assert!(begun.elapsed() < SOON, "what it is is not reported"),
        }
        tokio::time::sleep(Duration::from_millis(10)).await;
    };
    assert_eq!(identity.class, nvme::CLASS_CODE);
    // The server has the driver's memory by loans.
    let node = NodeClient::new(&rack.folder.path().join("alpha").join(SOCKET));
    let reached = node.reach("alpha/d0").await.unwrap();
    assert!(!reached.is_empty(), "the loans of its user's memory are not recorded");

    let lease = rack.client.leases(false).await.unwrap().remove(0).lease;
    assert!(rack.client.give_back(lease).await.unwrap().returned);
    let mut drive = drive;
    blocking(move || assert!(drive.flush().is_err(), "it is used after its return")).await;
    assert!(node.reach("alpha/d0").await.unwrap().is_empty());

    let lease = borrow(&rack).await;
    blocking(move || {
        let mut block = [0; 512];
        open(&lease).unwrap().read(3, &mut block).unwrap();
        assert_eq!(block, [7; 512]);
    })
    .await;

    // It cannot be taken apart, and nothing is begun that would need it.
    let leases = rack.client.leases(true).await.unwrap().len();
    let strict =
        BorrowRequest { isolation: Isolation::Strict, ..BorrowRequest::new("alpha/d0", "beta") };
    let error = rack.client.borrow_as(&strict).await.unwrap_err().to_string();
    assert!(error.starts_with("alpha/d0 cannot be borrowed with strict isolation"), "{error}");
    assert_eq!(rack.client.leases(true).await.unwrap().len(), leases);
    drop(server);
}

/// A drive that another program serves reads into the BARs of memory functions, and no longer than it may.
#[tokio::test(flavor = "multi_thread")]
async fn what_another_program_serves_reaches_bars_of_its_users_other_functions() {
    const AT: u64 = 0x38_0000_0000;
    let folder = tempfile::tempdir().unwrap();
    let socket = folder.path().join("server.sock");
    let rack = Rack::start(&rack_file(&format!("socket = {socket:?}"))).await;
    let server = blocking(move || serve(&socket)).await;
    let grouped = |function: &str| BorrowRequest {
        group: Some("db".to_owned()),
        ..BorrowRequest::new(function, "beta")
    };
    let lease = rack.client.borrow_as(&grouped("alpha/d0")).await.unwrap();
    let mut drive = blocking(move || open(&lease).unwrap()).await;
    for (nth, target) in ["alpha/ram0", "gamma/ram2"].into_iter().enumerate() {
        let lease = rack.client.borrow_as(&grouped(target)).await.unwrap();
        let (id, at) = (lease.lease, AT + nth as u64 * SIZE);
        let (back, memory) = blocking(move || {
            let memory = Memory::open(&lease);
            assert!(is_refused(drive.read_to(8, 512, at)), "it is not programmed yet");
            memory.place(at);
            memory.decode(true);
            let data = [nth as u8 + 7; 4096];
            drive.write(8, &data, false).unwrap();
            drive.read_to(8, data.len(), at + 0x1000).unwrap();
            assert!(memory.load(0x1000, data.len()) == data, "other bytes came");
            memory.store(0x2000, b"stored by the program");
            drive.write_from(64, 512, at + 0x2000).unwrap();
            let mut found = [0; 512];
            drive.read(64, &mut found).unwrap();
            assert_eq!(&found[..21], b"stored by the program");
            (drive, memory)
        })
        .await;
        drive = back;
        let node = NodeClient::new(&rack.folder.path().join("alpha").join(SOCKET));
        let windows = |ranges: Vec<ReachedRange>| {
            ranges.into_iter().filter(|it| matches!(it.to, ReachedPlace::Bar { .. })).count()
        };
        assert_eq!(windows(node.reach("alpha/d0").await.unwrap()), 1);
        rack.client.give_back(id).await.unwrap();
        assert_eq!(windows(node.reach("alpha/d0").await.unwrap()), 0);
        drive = blocking(move || {
            assert!(is_refused(drive.read_to(8, 512, at)), "what was returned is reached");
            drop(memory);
            drive
        })
        .await;
    }
    drop(server);
}

/// Is the server of [`a_server_that_hangs_is_ended_and_run_anew`] when it is run by it.
#[test]
fn serves_when_it_is_told_to() {
    let Ok(socket) = std::env::var(SERVE) else { return };
    let socket = PathBuf::from(socket);
    std::fs::write(socket.with_extension("pid"), std::process::id().to_string()).unwrap();
    let _server = serve(&socket);
    loop {
        std::thread::park();
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_server_that_hangs_is_ended_and_run_anew() {
    let folder = tempfile::tempdir().unwrap();
    let socket = folder.path().join("server.sock");
    let program = std::env::current_exe().unwrap();
    let keys = format!(
        "socket = {socket:?}\ncommand = [\"env\", \"{SERVE}={}\", {program:?}, \"--exact\", \
         \"serves_when_it_is_told_to\"]",
        socket.display()
    );
    let rack = Rack::start(&rack_file(&keys)).await;
    let pid = || {
        let text = std::fs::read_to_string(socket.with_extension("pid")).unwrap();
        Pid::from_raw(text.parse().unwrap()).unwrap()
    };

    let lease = borrow(&rack).await;
    let id = lease.lease;
    let drive = blocking(move || {
        let mut drive = open(&lease).unwrap();
        drive.write(3, &[7; 512], true).unwrap();
        drive
    })
    .await;
    let hanging = pid();
    kill_process(hanging, Signal::STOP).unwrap();
    // With what it was passed it ends, although it answers nothing.
    assert!(rack.client.give_back(id).await.unwrap().returned);
    assert!(rustix::process::test_kill_process(hanging).is_err(), "the server is still there");
    drop(drive);

    let lease = borrow(&rack).await;
    let id = lease.lease;
    let drive = blocking(move || {
        let mut drive = open(&lease).unwrap();
        let mut block = [1; 512];
        drive.read(3, &mut block).unwrap();
        assert_eq!(block, [0; 512], "a server of an earlier user");
        drive
    })
    .await;
    assert_ne!(pid(), hanging);
    // Killed while it is used, it is lost to its user alone.
    kill_process(pid(), Signal::KILL).unwrap();
    let mut drive = drive;
    blocking(move || assert!(drive.flush().is_err())).await;
    // It ends by itself, and says why.
    let begun = Instant::now();
    while !rack.client.leases(false).await.unwrap().is_empty() {
        assert!(begun.elapsed() < SOON, "a lease is active whose server is gone");
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    let ended = rack.client.leases(true).await.unwrap();
    let ended = ended.iter().find(|it| it.lease == id).and_then(|it| it.reason.clone());
    assert!(ended.as_deref().is_some_and(|it| it.contains("its lender was lost")), "{ended:?}");
    let lease = borrow(&rack).await;
    blocking(move || open(&lease).unwrap().write(1, &[2; 512], true).unwrap()).await;
}

/// Answers each read in time, and never comes to an end: a reply of 4 KiB, a byte at a time. `asked` hears of each
/// request.
fn answer_for_ever(listener: &UnixListener, asked: &Sender<()>) {
    for stream in listener.incoming() {
        let (mut stream, asked) = (stream.unwrap(), asked.clone());
        std::thread::spawn(move || -> std::io::Result<()> {
            let mut request = [0; 16];
            stream.read_exact(&mut request)?;
            let mut reply = [0; 16];
            reply[..4].copy_from_slice(&request[..4]);
            reply[4..8].copy_from_slice(&4096u32.to_le_bytes());
            reply[8] = 1;
            stream.write_all(&reply)?;
            let _ = asked.send(());
            loop {
                stream.write_all(&[0])?;
                std::thread::sleep(Duration::from_millis(100));
            }
        });
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_server_that_never_ends_its_answer_keeps_nobody_from_taking_its_function_away() {
    let folder = tempfile::tempdir().unwrap();
    let socket = folder.path().join("server.sock");
    let listener = UnixListener::bind(&socket).unwrap();
    let (asked, hears) = channel();
    std::thread::spawn(move || answer_for_ever(&listener, &asked));
    let rack = Rack::start(&rack_file(&format!("socket = {socket:?}"))).await;
    let lease = borrow(&rack).await;
    let id = lease.lease;
    let opened = tokio::task::spawn_blocking(move || open(&lease).is_ok());
    blocking(move || hears.recv_timeout(SOON).expect("the lender never opens it")).await;
    let begun = Instant::now();
    let _ = rack.client.give_back(id).await;
    while rack.client.devices().await.unwrap()[0].state != DeviceState::Offered {
        assert!(begun.elapsed() < 2 * SOON, "the function is never back");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    assert!(!opened.await.unwrap());
}

/// The example of rust-vmm's crate: a card with an interrupt line, whose BAR 2 raises it at each third read.
/// `make test` builds it (`scripts/setup gpio`) and names it in `RACKBUS_GPIO`.
#[tokio::test(flavor = "multi_thread")]
async fn the_example_server_of_the_crate_vfio_user_is_lent() {
    let Ok(program) = std::env::var("RACKBUS_GPIO") else {
        return println!("not run: RACKBUS_GPIO names no server; scripts/setup gpio builds it");
    };
    let folder = tempfile::tempdir().unwrap();
    let socket = folder.path().join("gpio.sock");
    let keys =
        format!("socket = {socket:?}\ncommand = [{program:?}, \"--socket-path\", {socket:?}]");
    let rack = Rack::start(&rack_file(&keys)).await;
    for _ in 0..2 {
        let lease = borrow(&rack).await;
        let id = lease.lease;
        blocking(move || {
            let user = Client::connect(Path::new(&lease.socket.unwrap()), SOON).unwrap();
            let mut ids = [0; 4];
            user.read(region::CONFIG, 0, &mut ids).unwrap();
            assert_eq!(ids, [0x4f, 0x49, 0xc8, 0x0d]);
            assert_eq!(user.irq_info(irq::INTX).unwrap().count, 1);
            let raised = rustix::event::eventfd(0, rustix::event::EventfdFlags::NONBLOCK).unwrap();
            let line = raised.try_clone().unwrap();
            user.wire_irqs(irq::INTX, 0, &[Some(line)]).unwrap();
            let mut values = Vec::new();
            for _ in 0..3 {
                let mut value = [0];
                user.read(region::BAR0 + 2, 0, &mut value).unwrap();
                values.push(value[0]);
            }
            assert_eq!(values, [0, 0, 1], "a fresh one counts from the beginning");
            let mut count = [0; 8];
            rustix::io::read(&raised, &mut count).expect("its interrupt is passed on");
        })
        .await;
        assert!(rack.client.give_back(id).await.unwrap().returned);
    }
}
