//! The driver on real drives, through the socket and without, no VM anywhere.

use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use rackbus_devices::nvme::{BackingConfig, Nvme, NvmeConfig};
use rackbus_driver::{Drive, DriveError, DriveOptions, InThreadFunction};
use rackbus_memory::AdaptiveSpin;
use rackbus_pci::engine::EngineOptions;
use rackbus_pci::vfio_user::{ClientError, LocalFunction, serve_function};
use rackbus_spec::nvme::{IoOpcode, Status};
use tempfile::TempDir;

const SIZE: u64 = 16 << 20;

fn config(dir: &TempDir, kind: &str) -> NvmeConfig {
    let path = dir.path().join("image");
    match kind {
        "file" => NvmeConfig { block_size: 4096, ..NvmeConfig::file(path, SIZE, "F1") },
        _ => NvmeConfig::memory(SIZE, "M1"),
    }
}

fn lend(dir: &TempDir, config: &NvmeConfig) -> (LocalFunction, PathBuf) {
    lend_with(dir, config, EngineOptions::default())
}

fn lend_with(
    dir: &TempDir,
    config: &NvmeConfig,
    options: EngineOptions,
) -> (LocalFunction, PathBuf) {
    let path = dir.path().join("drive.sock");
    let nvme = Box::new(Nvme::new(config).unwrap());
    (serve_function(nvme, &path, options).unwrap(), path)
}

/// Opens the drive, which may take a moment to be taken from the borrower before.
fn open(path: &Path) -> Drive {
    let start = Instant::now();
    loop {
        match Drive::open(path, DriveOptions::default()) {
            Err(DriveError::Client(ClientError::Refused(_)))
                if start.elapsed() < Duration::from_secs(30) =>
            {
                std::thread::yield_now();
            }
            opened => return opened.unwrap(),
        }
    }
}

/// Bytes that differ from block to block and from seed to seed.
fn pattern(seed: u64, length: usize) -> Vec<u8> {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let mut next = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        state as u8
    };
    (0..length).map(|_| next()).collect()
}

fn exercise(drive: &mut Drive) {
    let block = drive.info().block_size as usize;
    assert_eq!(drive.info().blocks * block as u64, SIZE);
    // Longer than one command moves, and not a multiple of it.
    let data = pattern(1, (1 << 20) + 3 * 4096);
    drive.write(16, &data, false).unwrap();
    let mut back = vec![0; data.len()];
    drive.read(16, &mut back).unwrap();
    assert!(back == data, "what was written is not what is read");
    assert!(drive.compare(16, &data).unwrap());
    back[5] ^= 1;
    assert!(!drive.compare(16, &back).unwrap());
    drive.write(0, &data[..4096], true).unwrap();
    drive.flush().unwrap();
    drive.write_zeroes(16, 8).unwrap();
    drive.deallocate(32, 8).unwrap();
    let mut zeroes = vec![1; 8 * block];
    drive.read(16, &mut zeroes).unwrap();
    assert!(zeroes.iter().all(|byte| *byte == 0));
    drive.read(32, &mut zeroes).unwrap();
    assert!(zeroes.iter().all(|byte| *byte == 0));
    let beyond = drive.info().blocks;
    match drive.read(beyond, &mut zeroes) {
        Err(DriveError::Command { status, .. }) => {
            assert_eq!(status.code(), Status::LBA_OUT_OF_RANGE);
        }
        other => panic!("a read beyond the end gave {other:?}"),
    }
}

#[test]
fn a_lent_drive_does_what_a_drive_does() {
    for kind in ["memory", "file"] {
        let dir = TempDir::new().unwrap();
        let (_lent, path) = lend(&dir, &config(&dir, kind));
        exercise(&mut Drive::open(&path, DriveOptions::default()).unwrap());
    }
}

#[test]
fn a_local_drive_does_the_same() {
    for kind in ["memory", "file"] {
        let dir = TempDir::new().unwrap();
        let nvme = Nvme::new(&config(&dir, kind)).unwrap();
        let device = Box::new(InThreadFunction::new(Box::new(nvme)));
        exercise(&mut Drive::with_device(device, DriveOptions::default()).unwrap());
    }
}

#[test]
fn the_queue_stays_full_round_after_round() {
    let dir = TempDir::new().unwrap();
    // Awake for longer than other tests keep this one from its processor.
    let spin = AdaptiveSpin::new(20_000_000, 20_000_000);
    let options = EngineOptions { spin, ..EngineOptions::default() };
    let (lent, path) = lend_with(&dir, &config(&dir, "memory"), options);
    let depth = 7;
    let mut drive = Drive::open(&path, DriveOptions { depth, data: 64 << 10 }).unwrap();
    let buffers: Vec<_> =
        (0..depth).map(|i| drive.buffer(usize::from(i) * 4096, 4096).unwrap()).collect();
    let (queue, device, _) = drive.parts();
    let (mut sent, mut done) = (0u64, 0u64);
    let start = Instant::now();
    while done < 5_000 {
        while queue.in_flight() < queue.depth() {
            let buffer = buffers[(sent % u64::from(depth)) as usize];
            queue.submit(IoOpcode::Read, sent % 1000, 8, buffer, false).unwrap();
            sent += 1;
        }
        queue.ring(device).unwrap();
        while let Some(completed) = queue.poll(device).unwrap() {
            assert!(completed.status.is_success());
            done += 1;
        }
        assert!(start.elapsed() < Duration::from_secs(60), "stuck after {done} of {sent}");
        std::hint::spin_loop();
    }
    // A busy queue is polled: what went through the socket is little more than the bring-up, and what
    // woke an engine that slept while the machine had other things to do than to run this: after a sleep
    // the driver may ring for its submission queue and for its completion queue.
    let counters = lent.engine().handle().counters();
    let count = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
    let (jobs, sleeps) = (count(&counters.jobs), count(&counters.parks));
    assert!(
        jobs < done / 100 + 2 * sleeps,
        "{jobs} register accesses for {done} commands and {sleeps} sleeps"
    );
}

#[test]
fn a_hundred_borrowers_one_after_the_other_find_what_the_last_one_left() {
    let dir = TempDir::new().unwrap();
    let (_lent, path) = lend(&dir, &config(&dir, "file"));
    let mut expected = vec![0; 64 << 10];
    for round in 0..100 {
        let mut drive = open(&path);
        let mut found = vec![1; expected.len()];
        drive.read(round, &mut found).unwrap();
        assert!(found == expected, "round {round}: the data is not what was left");
        expected = pattern(round + 1, expected.len());
        drive.write(round + 1, &expected, false).unwrap();
        drive.flush().unwrap();
    }
}

#[test]
fn a_second_borrower_is_turned_away_while_the_first_one_stays() {
    let dir = TempDir::new().unwrap();
    let (_lent, path) = lend(&dir, &config(&dir, "memory"));
    let first = Drive::open(&path, DriveOptions::default()).unwrap();
    let second = Drive::open(&path, DriveOptions::default());
    assert!(matches!(second, Err(DriveError::Client(ClientError::Refused(_)))), "{second:?}");
    drop(first);
    open(&path);
}

/// Processor time of the engine's thread, and how often it gave the processor back, by the kernel's account.
fn engine_use() -> (Duration, u64) {
    for task in std::fs::read_dir("/proc/self/task").unwrap() {
        let task = task.unwrap().path();
        let name = std::fs::read_to_string(task.join("comm")).unwrap_or_default();
        if name.trim() == "engine-idle" {
            let schedstat = std::fs::read_to_string(task.join("schedstat")).unwrap();
            let ns = schedstat.split_whitespace().next().unwrap().parse().unwrap();
            let status = std::fs::read_to_string(task.join("status")).unwrap();
            let slept =
                status.lines().find_map(|line| line.strip_prefix("voluntary_ctxt_switches:"));
            return (Duration::from_nanos(ns), slept.unwrap().trim().parse().unwrap());
        }
    }
    panic!("the engine's thread was not found");
}

#[test]
fn an_idle_drive_does_not_wake_in_ten_seconds_and_a_doorbell_wakes_it() {
    let dir = TempDir::new().unwrap();
    let path = dir.path().join("drive.sock");
    let engine = rackbus_pci::Engine::start(
        "engine-idle",
        Box::new(Nvme::new(&config(&dir, "memory")).unwrap()),
        EngineOptions::default(),
    )
    .unwrap();
    let handle = engine.handle().clone();
    let device = rackbus_pci::vfio_user::EngineDevice::new(handle).unwrap();
    let _server = rackbus_pci::vfio_user::Server::bind(&path, move || {
        Ok(Box::new(device.session()) as Box<dyn rackbus_pci::vfio_user::ServedDevice>)
    })
    .unwrap();
    let mut drive = Drive::open(&path, DriveOptions::default()).unwrap();
    let mut block = [0; 512];
    drive.read(0, &mut block).unwrap();
    // An adaptive spin is over after a hundred microseconds of its thread, which a busy machine may let run only later.
    let begun = Instant::now();
    let mut before = engine_use();
    loop {
        std::thread::sleep(Duration::from_millis(100));
        let now = engine_use();
        if now == before {
            break;
        }
        assert!(begun.elapsed() < Duration::from_secs(60), "it does not come to rest: {now:?}");
        before = now;
    }
    assert!(before.0 > Duration::ZERO && before.1 > 0, "{before:?}");
    std::thread::sleep(Duration::from_secs(10));
    assert_eq!(engine_use(), before, "an idle drive woke in 10 s");
    for lba in 0..50 {
        std::thread::sleep(Duration::from_millis(2));
        drive.read(lba, &mut block).unwrap();
    }
}

#[test]
fn what_is_in_use_or_of_another_size_is_refused() {
    let dir = TempDir::new().unwrap();
    let config = config(&dir, "file");
    let first = Nvme::new(&config).unwrap();
    let text = Nvme::new(&config).unwrap_err().to_string();
    assert!(text.contains("used by another process"), "{text}");
    drop(first);
    let text = Nvme::new(&NvmeConfig { size: 2 * SIZE, ..config.clone() }).unwrap_err().to_string();
    assert!(text.contains("give size ="), "{text}");
    let there = NvmeConfig { size: 0, ..config };
    Nvme::new(&there).unwrap();
    let missing = BackingConfig::File(dir.path().join("no/such"));
    assert!(Nvme::new(&NvmeConfig { backing: missing, ..there }).is_err());
}
