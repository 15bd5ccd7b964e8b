//! Programs with several functions: two drives, and memory that they read into by peer-to-peer.
//!
//! What a drive has read into the memory is checked as what a read gives. It counts only where the memory function
//! still answers afterwards: memory that was taken away holds zeroes, as it should.

use std::path::Path;
use std::sync::atomic::Ordering;
use std::time::Duration;

use rackbus_driver::{Drive, DriveOptions};
use rackbus_e2e::Result;
use rackbus_e2e::soak::{BLOCK, BLOCKS, LentDrive};
use rackbus_memory::Region;
use rackbus_pci::vfio_user::Client;
use rackbus_seeds::Random;
use rackbus_spec::vfio_user::region;

use crate::{FUNCTIONS, HOSTS, MEMORY, Soak};

/// Bytes of a memory function.
const LENGTH: usize = 1 << 20;
/// The BAR that is its memory, and where the program says that it is.
const BAR: u8 = 2;
const AT: u64 = 1 << 40;
/// Offset of the vendor in configuration space, and what an absent function answers there.
const VENDOR: u64 = 0;
const ABSENT: [u8; 2] = [0xff; 2];

/// Memory in the hands of a program.
struct Target {
    memory: Region,
    function: Client,
}

impl Target {
    /// Opens the function and gives its BAR an address. Nothing where it is lost meanwhile.
    fn open(socket: &Path) -> Option<Target> {
        let function = Client::connect(socket, Duration::from_secs(5)).ok()?;
        let memory = function.map_region(BAR.into(), 0, LENGTH as u64).ok()?;
        function.write(region::CONFIG, 0x10 + 4 * u64::from(BAR), &AT.to_le_bytes()).ok()?;
        function.write(region::CONFIG, 4, &[2, 0]).ok()?;
        Some(Target { memory, function })
    }

    /// Whether it was this program's until now.
    fn is_there(&self) -> bool {
        let mut vendor = ABSENT;
        self.function.read(region::CONFIG, VENDOR, &mut vendor).is_ok() && vendor != ABSENT
    }
}

/// Borrows two drives and memory for one group, reads from the drives into the memory, and returns all, until it is
/// told to stop.
pub fn work(soak: &Soak, number: usize, mut random: Random) -> Result<()> {
    let group = format!("peers{number}");
    while !soak.load.stop.load(Ordering::Relaxed) {
        soak.load.return_owed(&soak.rack);
        let host = HOSTS[random.below(HOSTS.len())];
        let memory = MEMORY[random.below(MEMORY.len())];
        let first = random.below(FUNCTIONS.len());
        let drives = [first, (first + 1 + random.below(FUNCTIONS.len() - 1)) % FUNCTIONS.len()];
        let borrow = |function: &str| {
            let asked = ["borrow", function, "--for", host, "--group", &group, "--wait=1s"];
            let lease = soak.rack.json(&asked).ok()?;
            soak.load.leases.fetch_add(1, Ordering::Relaxed);
            Some(lease)
        };
        let Some(target) = borrow(memory) else { continue };
        let leases: Vec<_> =
            drives.iter().filter_map(|it| Some((*it, borrow(FUNCTIONS[*it])?))).collect();
        let lent: Vec<_> = leases.iter().map(|(it, lease)| (*it, LentDrive::of(lease))).collect();
        let count = 1 + random.below(300);
        let used = use_all(soak, &LentDrive::of(&target), &lent, count, &mut random);
        let all = leases.iter().map(|(_, lease)| lease).chain([&target]);
        all.filter_map(|lease| lease["lease"].as_u64()).for_each(|lease| soak.load.owe(lease));
        used?;
    }
    Ok(())
}

/// Reads blocks of the drives into the memory, in one thread, until something is lost or enough was done.
fn use_all(
    soak: &Soak,
    memory: &LentDrive,
    drives: &[(usize, LentDrive)],
    count: usize,
    random: &mut Random,
) -> Result<()> {
    let load = &soak.load;
    let absent = "it does not answer";
    let Some(target) = Target::open(&memory.socket) else {
        return load.await_end(&soak.rack, "the memory", &[memory.lease], &absent, || {
            Target::open(&memory.socket).is_some()
        });
    };
    let options = DriveOptions { depth: 4, data: 64 << 10 };
    let mut opened = Vec::new();
    for (drive, lent) in drives {
        match Drive::open(&lent.socket, options) {
            Ok(it) => opened.push((*drive, lent, it)),
            Err(error) => {
                let function = FUNCTIONS[*drive];
                return load.await_end(&soak.rack, function, &[lent.lease], &error, || {
                    Drive::open(&lent.socket, options).is_ok()
                });
            }
        }
    }
    for _ in 0..count {
        let nth = random.below(opened.len());
        let Some((drive, lent, opened)) = opened.get_mut(nth) else { return Ok(()) };
        let (block, place) = (random.below(BLOCKS), random.below(LENGTH / BLOCK) * BLOCK);
        soak.load.operations.fetch_add(1, Ordering::Relaxed);
        if !soak.load.is_current(*drive, lent.epoch) {
            return Ok(());
        }
        let lba = (block * BLOCK / 512) as u64;
        if let Err(error) = opened.read_to(lba, BLOCK, AT + place as u64) {
            let leases = [lent.lease, memory.lease];
            return load.await_end(&soak.rack, FUNCTIONS[*drive], &leases, &error, || false);
        }
        let mut data = vec![0; BLOCK];
        let copied = target.memory.slice(place, BLOCK).map(|part| part.copy_to(&mut data));
        if copied.is_none() || !target.is_there() {
            return load.await_end(&soak.rack, "the memory", &[memory.lease], &absent, || false);
        }
        soak.load.check(*drive, lent.epoch, block, &data, ", by peer-to-peer")?;
        soak.moved.fetch_add(1, Ordering::Relaxed);
    }
    Ok(())
}
