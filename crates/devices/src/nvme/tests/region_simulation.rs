//! The persistent memory region under seeded schedules: a driver stores into it, has commands store into it, and reads
//! PMRSTS, while the system writes pages back or fails to, leases come and go, processes die or take over from each
//! other, and power is lost. Checked is what PMRCAP promises: what was stored before a read of PMRSTS that gave no error
//! survives everything (I5); after a failure no such read succeeds until the drive is given back (I7); and nothing but a
//! loss of power loses anything.

use std::os::fd::OwnedFd;
use std::sync::{Arc, Mutex, MutexGuard};

use rackbus_memory::Region as Mapping;
use rackbus_pci::FunctionState;
use rackbus_seeds::{Random, Simulation};
use rackbus_spec::nvme::registers::{PMRCAP, PMRCTL, PMRMSC, PMRSTS, Pmrmsc, Pmrsts};
use rackbus_spec::nvme::{log, log::SmartHealth};

use super::super::backing;
use super::super::persistent::{BAR, PersistentRegion, PmrStore};
use super::*;
use crate::memory::SpanError;

const PAGE: usize = 4096;
const PAGES: usize = 16;
const SIZE: u64 = (PAGE * PAGES) as u64;
const AT: u64 = 0x40_0000_0000;
const STEPS: usize = 60;

/// The system's file: what is in the page cache, and what is on the disk.
#[derive(Debug)]
struct Disk {
    cache: SharedMemory,
    durable: Vec<u8>,
    /// The next attempt to write it back fails.
    fails: bool,
}

#[derive(Debug, Clone)]
struct SimulatedFile(Arc<Mutex<Disk>>);

impl SimulatedFile {
    fn new() -> SimulatedFile {
        let cache = SharedMemory::create("region", SIZE).unwrap();
        let durable = vec![0; SIZE as usize];
        SimulatedFile(Arc::new(Mutex::new(Disk { cache, durable, fails: false })))
    }

    fn disk(&self) -> MutexGuard<'_, Disk> {
        self.0.lock().unwrap()
    }

    /// The system writes a page back on its own.
    fn write_back(&self, page: usize) {
        let disk = &mut *self.disk();
        let range = page * PAGE..(page + 1) * PAGE;
        disk.cache.whole().part(range.start, PAGE).unwrap().copy_to(&mut disk.durable[range]);
    }

    /// The power is lost: the next look finds what is on the disk.
    fn lose_power(&self) {
        let mut disk = self.disk();
        disk.cache = SharedMemory::create("region", SIZE).unwrap();
        disk.cache.whole().copy_from(&disk.durable);
        disk.fails = false;
    }
}

impl PmrStore for SimulatedFile {
    fn length(&self) -> u64 {
        SIZE
    }

    fn descriptor(&self) -> std::io::Result<OwnedFd> {
        self.disk().cache.descriptor()
    }

    fn files(&self) -> std::io::Result<Vec<OwnedFd>> {
        Ok(Vec::new())
    }

    fn make_durable(&self) -> std::io::Result<()> {
        let disk = &mut *self.disk();
        // The system tells of it once, and takes its pages for written then.
        if std::mem::take(&mut disk.fails) {
            return Err(std::io::Error::other("simulated"));
        }
        disk.cache.whole().copy_to(&mut disk.durable);
        Ok(())
    }

    fn take_away(&mut self) -> Result<(), SpanError> {
        let disk = &mut *self.disk();
        let new = SharedMemory::create("region", SIZE).unwrap();
        new.whole().copy_from_slice(disk.cache.whole());
        disk.cache.whole().fill(0);
        disk.cache = new;
        disk.cache.whole().copy_to(&mut disk.durable);
        disk.fails = false;
        Ok(())
    }
}

/// What a driver takes for the barrier.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Barrier {
    /// PMRSTS, as PMRCAP says.
    Status,
    /// Another register: it proves that the simulation notices.
    Capabilities,
}

struct World {
    random: Random,
    barrier: Barrier,
    file: SimulatedFile,
    host: TestHost,
    /// The driver's mapping of the BAR.
    mapping: Option<Mapping>,
    /// Of each page what was stored since it was last known to be durable, oldest first, and that.
    stored: Vec<Vec<u64>>,
    next: u64,
    failed: bool,
    trace: Vec<String>,
}

fn config() -> NvmeConfig {
    NvmeConfig { persistent: SIZE, ..NvmeConfig::memory(1 << 20, "SIM") }
}

fn drive(file: &SimulatedFile) -> Endpoint {
    let region = PersistentRegion::around(Box::new(file.clone())).unwrap();
    let backing = backing::open(&config()).unwrap();
    Endpoint::new(Box::new(Nvme::with_memory(&config(), backing, None, Some(region)).unwrap()))
}

impl World {
    fn new(seed: u64, barrier: Barrier, ram: &SharedMemory) -> World {
        let file = SimulatedFile::new();
        let host = TestHost::with_endpoint(drive(&file), ram.clone());
        let stored = vec![vec![0]; PAGES];
        let (random, trace) = (Random(seed), Vec::new());
        let (mapping, next, failed) = (None, 1, false);
        let mut world = World { random, barrier, file, host, mapping, stored, next, failed, trace };
        world.begin();
        world
    }

    /// A driver begins to use the drive.
    fn begin(&mut self) {
        let host = &mut self.host;
        host.endpoint.unmap_all();
        host.map_ram();
        host.command_register(0b110);
        host.restart(RAM);
        host.create_pair(1, ENTRIES);
        host.write4(PMRCTL, 1);
        let control = u64::from(Pmrmsc::new().with_cmse(true).with_cba(AT >> 12));
        host.write4(PMRMSC, control as u32);
        host.write4(PMRMSC + 4, (control >> 32) as u32);
        // Some drivers use messages and commands alone.
        self.mapping = self.random.chance(70).then(|| {
            let bars = self.host.endpoint.bars();
            let bar = bars.iter().find(|bar| bar.index == BAR).unwrap();
            let file = bar.mappable.as_ref().unwrap().memory.descriptor().unwrap();
            Mapping::map_stored(file.as_fd(), 0, SIZE, Access::READ | Access::WRITE).unwrap()
        });
    }

    fn store(&mut self) {
        let page = self.random.below(PAGES);
        let version = self.next;
        self.next += 1;
        let content = version.to_le_bytes().repeat(PAGE / 8);
        match (self.random.below(3), &self.mapping) {
            (0, Some(mapping)) => {
                let copied = mapping.slice(page * PAGE, PAGE).unwrap().copy_from(&content);
                assert_eq!(copied, PAGE);
            }
            (0 | 1, _) => {
                let at = (page * PAGE) as u64;
                self.host.endpoint.write(FunctionRegion::Bar(BAR), at, &content).unwrap();
            }
            _ => {
                assert_eq!(self.host.write_blocks(0, &content), Status::SUCCESS);
                let to = AT + (page * PAGE) as u64;
                let read = transfer(IoOpcode::Read, 0, PAGE, to);
                assert_eq!(self.host.status(1, read), Status::SUCCESS);
            }
        }
        self.trace.push(format!("page {page} has version {version}"));
        self.stored[page].push(version);
    }

    fn barrier(&mut self) -> Result<(), String> {
        let ok = match self.barrier {
            Barrier::Capabilities => self.host.read4(PMRCAP) != 0,
            Barrier::Status => Pmrsts::from(self.host.read4(PMRSTS)).err() == 0,
        };
        self.trace.push(format!("barrier: {ok}"));
        if ok && self.failed && self.barrier == Barrier::Status {
            return Err("a barrier succeeded after a failure".to_owned());
        }
        if ok {
            self.stored.iter_mut().for_each(|versions| {
                versions.drain(..versions.len() - 1);
            });
        } else if !self.failed {
            return Err("a barrier failed and nothing was wrong".to_owned());
        }
        Ok(())
    }

    /// Whether each page has what it may have: the newest, or after a loss of power what is not older than what is durable.
    fn check(&mut self, lost: bool) -> Result<(), String> {
        for (page, versions) in self.stored.iter_mut().enumerate() {
            let mut content = vec![0; PAGE];
            let at = (page * PAGE) as u64;
            self.host.endpoint.read(FunctionRegion::Bar(BAR), at, &mut content).unwrap();
            let found = u64::from_le_bytes(*content.first_chunk().unwrap());
            let newest = versions.last().copied().unwrap_or(0);
            let allowed = if lost { versions.contains(&found) } else { found == newest };
            if !allowed || content != found.to_le_bytes().repeat(PAGE / 8) {
                return Err(format!("page {page} has {found}, not one of {versions:?}"));
            }
            if lost {
                *versions = vec![found];
            }
        }
        Ok(())
    }

    /// The drive tells in its health log whether the region is reliable.
    fn check_health(&mut self) {
        let told = Pmrsts::from(self.host.read4(PMRSTS)).err() != 0;
        let at = self.host.scratch();
        let id = u32::from(log::SMART_HEALTH);
        let dwords = (size_of::<SmartHealth>() / 4 - 1) as u32;
        let read = admin_data(AdminOpcode::GetLogPage, !0, dwords << 16 | id, at);
        assert_eq!(self.host.status(0, read), Status::SUCCESS);
        let warned = self.host.peek(at, 1)[0] & log::WARNING_REGION != 0;
        assert_eq!(warned, told);
        if !told {
            self.stored.iter_mut().for_each(|versions| {
                versions.drain(..versions.len() - 1);
            });
        }
    }

    fn step(&mut self) -> Result<(), String> {
        match self.random.below(100) {
            0..50 => self.store(),
            50..65 => self.barrier()?,
            65..80 => {
                let page = self.random.below(PAGES);
                self.file.write_back(page);
            }
            80..83 if !self.failed => {
                self.trace.push("the disk fails".to_owned());
                self.file.disk().fails = true;
                self.failed = true;
            }
            83..86 if self.barrier == Barrier::Status => self.check_health(),
            86..90 => {
                self.trace.push("the lease ends, another begins".to_owned());
                self.mapping = None;
                self.host.endpoint.scrub();
                // What nobody was given, and of which no failure is known, stays where it is.
                self.failed = self.file.disk().fails;
                self.begin();
                self.check(false)?;
            }
            90..94 => self.succeed()?,
            94..97 => {
                self.trace.push("the process dies".to_owned());
                // Whoever opens a drive anew hears of failures as it does.
                let ram = self.host.ram.clone();
                self.host = TestHost::with_endpoint(drive(&self.file), ram);
                self.failed = self.file.disk().fails;
                self.begin();
                self.check(false)?;
            }
            97..100 => {
                self.trace.push("the power is lost".to_owned());
                self.file.lose_power();
                let ram = self.host.ram.clone();
                self.host = TestHost::with_endpoint(drive(&self.file), ram);
                self.failed = false;
                self.begin();
                self.check(true)?;
            }
            _ => {}
        }
        Ok(())
    }

    /// Another process continues with the drive, unnoticed by its driver.
    fn succeed(&mut self) -> Result<(), String> {
        self.trace.push("another process goes on".to_owned());
        let mut saved = self.host.endpoint.save().map_err(|error| error.to_string())?;
        let state = saved.state.to_bytes().map_err(|error| error.to_string())?;
        let state = FunctionState::from_bytes(&state).map_err(|error| error.to_string())?;
        saved.medium.truncate(backing::descriptor_count(&config()));
        let backing = backing::open_again(&config(), saved.medium).unwrap();
        let region = PersistentRegion::around(Box::new(self.file.clone())).unwrap();
        let next = Nvme::with_memory(&config(), backing, None, Some(region)).unwrap();
        self.host.endpoint = Endpoint::new(Box::new(next));
        let restored = self.host.endpoint.restore(&state, saved.descriptors);
        restored.map_err(|error| error.to_string())?;
        self.check(false)
    }
}

fn run(seed: u64, barrier: Barrier, ram: &SharedMemory) -> Result<(), (String, Vec<String>)> {
    let mut world = World::new(seed, barrier, ram);
    for _ in 0..STEPS {
        world.step().map_err(|error| (error, std::mem::take(&mut world.trace)))?;
    }
    Ok(())
}

fn memory() -> SharedMemory {
    SharedMemory::create("host", RAM_SIZE).unwrap()
}

#[test]
fn what_a_barrier_acknowledged_survives() {
    let test = "-p rackbus-devices --lib nvme::tests::region_simulation";
    Simulation { test, usual: 1000 }.run_with(memory, |ram, seed, traced| {
        run(seed, Barrier::Status, ram).map_err(|(error, trace)| match traced {
            true => format!("{error}\n{}", trace.join("\n")),
            false => error,
        })
    });
}

#[test]
fn a_driver_without_the_barrier_is_found_out() {
    let memory = memory();
    let error = (0..1000).find_map(|seed| run(seed, Barrier::Capabilities, &memory).err());
    let (error, _) = error.expect("what is no barrier went unnoticed");
    assert!(error.contains("not one of"), "{error}");
}
