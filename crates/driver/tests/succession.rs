//! A drive in use continues in another process: a real one, which is given a socket, descriptors and
//! bytes, and a driver that does not notice.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use rackbus_devices::nvme::{Nvme, NvmeConfig};
use rackbus_driver::{Drive, DriveOptions};
use rackbus_memory::{Event, HandleRef, Handles, Lending, Stream};
use rackbus_pci::Engine;
use rackbus_pci::engine::EngineOptions;
use rackbus_pci::vfio_user::{
    Client, Ended, EngineDevice, RestingConversation, SavedSession, SessionState, serve_until,
};

/// Names the file of the drive to the process that continues.
const IMAGE: &str = "RACKBUS_TEST_IMAGE";

fn config(image: &Path) -> NvmeConfig {
    NvmeConfig { block_size: 4096, ..NvmeConfig::file(image, 16 << 20, "S1") }
}

fn engine(nvme: Nvme) -> Engine {
    Engine::start("drive", Box::new(nvme), EngineOptions::default()).unwrap()
}

/// Hands a session over: its state, and the descriptors one by one.
fn hand_over(to: &UnixStream, session: &UnixStream, saved: &SavedSession) {
    let bytes = saved.state.to_bytes().unwrap();
    let fds: Vec<BorrowedFd<'_>> = [session.as_fd()]
        .into_iter()
        .chain(saved.medium.iter().chain(&saved.descriptors).map(AsFd::as_fd))
        .collect();
    let counts = [bytes.len(), saved.medium.len(), saved.descriptors.len()];
    let head: Vec<u8> = counts.iter().flat_map(|count| (*count as u64).to_le_bytes()).collect();
    to.send(&[&head, &bytes], &[]).unwrap();
    let handles = fds.iter().map(|fd| HandleRef::of_descriptor(*fd));
    handles.for_each(|handle| to.send(&[&[0]], &[handle]).unwrap());
}

fn take_over(from: &UnixStream) -> (UnixStream, SavedSession) {
    let mut head = [0; 24];
    let mut handles = Handles::new();
    from.receive(&mut head, &mut handles).unwrap();
    let count = |at: usize| u64::from_le_bytes(head[at..at + 8].try_into().unwrap()) as usize;
    let mut bytes = vec![0; count(0)];
    from.receive(&mut bytes, &mut handles).unwrap();
    for _ in 0..1 + count(8) + count(16) {
        from.receive(&mut [0], &mut handles).unwrap();
    }
    let mut fds = handles.into_descriptors();
    let descriptors = fds.split_off(1 + count(8));
    let medium: Vec<OwnedFd> = fds.split_off(1);
    let state = SessionState::from_bytes(&bytes).unwrap();
    (UnixStream::from(fds.remove(0)), SavedSession { state, descriptors, medium })
}

/// What the other process does: not a test of its own.
#[test]
fn process_that_goes_on() {
    let Some(image) = std::env::var_os(IMAGE) else { return };
    let from = UnixStream::from(std::io::stdin().as_fd().try_clone_to_owned().unwrap());
    let (stream, saved) = take_over(&from);
    let nvme = Nvme::resume(&config(&PathBuf::from(image)), saved.medium).unwrap();
    let engine = engine(nvme);
    let stream = Arc::new(stream);
    let handle = engine.handle().clone();
    let resumed = EngineDevice::resume(
        handle,
        saved.state,
        saved.descriptors,
        Lending::alone(),
        Some(stream.clone()),
    );
    let (device, conversation) = resumed.unwrap();
    let never = Event::new().unwrap();
    let ended = serve_until(&*stream, &device, conversation, &never).unwrap();
    assert!(matches!(ended, Ended::Closed));
}

/// Writes, reads and flushes without a break until it is told to stop; counts its rounds.
fn use_drive(mut drive: Drive, stop: &AtomicBool, rounds: &AtomicU64) {
    let mut round = 0u64;
    while !stop.load(Ordering::Relaxed) {
        let lba = round % 512;
        let data = (round + 1).to_le_bytes().repeat(2 * 4096 / 8);
        drive.write(lba, &data, round.is_multiple_of(5)).unwrap();
        let mut read = vec![0; data.len()];
        drive.read(lba, &mut read).unwrap();
        assert!(read == data, "round {round} reads something else");
        if round.is_multiple_of(7) {
            drive.flush().unwrap();
        }
        round += 1;
        rounds.store(round, Ordering::Relaxed);
    }
}

fn wait_for(rounds: &AtomicU64, more: u64, driver: &std::thread::JoinHandle<()>) {
    let goal = rounds.load(Ordering::Relaxed) + more;
    while rounds.load(Ordering::Relaxed) < goal {
        assert!(!driver.is_finished(), "the driver noticed");
        std::thread::sleep(Duration::from_millis(1));
    }
}

#[test]
fn another_process_goes_on_with_a_drive_in_use() {
    let folder = tempfile::tempdir().unwrap();
    let image = folder.path().join("image");
    let first = engine(Nvme::new(&config(&image)).unwrap());
    let (ours, theirs) = UnixStream::pair().unwrap();
    ours.set_read_timeout(Some(Duration::from_secs(300))).unwrap();
    let theirs = Arc::new(theirs);
    let device = EngineDevice::new(first.handle().clone()).unwrap();
    let device = device.session_of(Lending::alone(), Some(theirs.clone())).unwrap();
    let pause = Arc::new(Event::new().unwrap());
    let session = std::thread::spawn({
        let (device, theirs, pause) = (device.clone(), theirs.clone(), pause.clone());
        move || serve_until(&*theirs, &device, RestingConversation::default(), &*pause).unwrap()
    });
    let (stop, rounds) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicU64::new(0)));
    let driver = std::thread::spawn({
        let (stop, rounds) = (stop.clone(), rounds.clone());
        move || {
            let client = Client::with_stream(Arc::new(ours)).unwrap();
            let drive = Drive::with_device(Box::new(client), DriveOptions::default()).unwrap();
            use_drive(drive, &stop, &rounds);
        }
    });
    wait_for(&rounds, 50, &driver);

    let (to, stdin) = UnixStream::pair().unwrap();
    let mut next = Command::new(std::env::current_exe().unwrap())
        .args(["process_that_goes_on", "--exact"])
        .env(IMAGE, &image)
        .stdin(OwnedFd::from(stdin))
        .stdout(Stdio::null())
        .spawn()
        .unwrap();
    pause.ring();
    let Ended::Paused(conversation) = session.join().unwrap() else { panic!("it closed") };
    let saved = device.save(conversation).unwrap();
    drop((device, first));
    hand_over(&to, &theirs, &saved);
    drop((theirs, saved));

    wait_for(&rounds, 500, &driver);
    stop.store(true, Ordering::Relaxed);
    driver.join().unwrap();
    assert!(next.wait().unwrap().success());
}
