//! The files that users lend, made once for each thread, and what is in them.

use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use rackbus_fabric::rack::Rack;
use rackbus_fabric::{LentMemory, ObjectKey, Topology, derive};
use rackbus_memory::{Access, MemoryHandle, Region};
use rustix::fs::{MemfdFlags, ftruncate, memfd_create};

pub const PAGE: u64 = 4096;
/// Pages of each file when it is whole.
pub const PAGES: u64 = 8;
/// Files of users, and behind them the BAR of another function.
pub const USERS_FILES: usize = 3;
pub const BAR: usize = USERS_FILES;
pub const FILES: usize = USERS_FILES + 1;

pub const FUNCTIONS: [&str; 2] = ["alpha/nvme0", "alpha/nvme1"];
/// The function whose BAR is the last file.
pub const PEER: &str = "beta/nvme0";
/// Hosts that borrow: the first is bounded.
pub const BORROWERS: [&str; 2] = ["beta", "gamma"];
pub const BOUNDED: usize = 0;
/// Bytes of memory that the bounded one has by the rack file.
pub const BOUND: u64 = 64 << 20;

const RACK: &str = "name = \"test\"\n[hosts.alpha.devices.nvme0]\nkind = \"nvme\"\nsize = \"1 MiB\"\n\
                    [hosts.alpha.devices.nvme1]\nkind = \"nvme\"\nsize = \"1 MiB\"\n\
                    [hosts.beta.devices.nvme0]\nkind = \"nvme\"\nsize = \"1 MiB\"\n\
                    [hosts.beta]\nmemory = \"64 MiB\"\n[hosts.gamma]\nmemory = \"1 GiB\"\n";

pub struct Files {
    pub topology: Topology,
    files: Vec<Arc<OwnedFd>>,
    objects: Vec<ObjectKey>,
    /// Mappings of the test's own, to look at what is in the files.
    seen: Vec<Region>,
    /// What the files are called in the list of the process's mappings.
    name: String,
}

impl Files {
    pub fn new() -> Files {
        static NEXT: AtomicU32 = AtomicU32::new(0);
        let name = format!("mappings-{}-", NEXT.fetch_add(1, Ordering::Relaxed));
        let file = |nth| {
            let file = memfd_create(format!("{name}{nth}"), MemfdFlags::CLOEXEC).unwrap();
            ftruncate(&file, PAGES * PAGE).unwrap();
            Arc::new(file)
        };
        let files: Vec<_> = (0..FILES).map(file).collect();
        let see =
            |file: &Arc<OwnedFd>| Region::map(file.as_fd(), 0, PAGES * PAGE, Access::READ).unwrap();
        let topology = derive::here(&Rack::parse("rack.toml", RACK).unwrap()).unwrap();
        let seen = files.iter().map(see).collect();
        let object = |file: &Arc<OwnedFd>| MemoryHandle::shared(file.clone(), 0).unwrap().object();
        let objects = files.iter().map(object).collect();
        Files { topology, files, objects, seen, name }
    }

    /// All of them whole, and zero.
    pub fn renew(&self) {
        for file in 0..FILES {
            self.resize(file, 0);
            self.resize(file, PAGES);
        }
    }

    pub fn resize(&self, file: usize, pages: u64) {
        ftruncate(&self.files[file], pages * PAGE).unwrap();
    }

    pub fn handle(&self, file: usize, page: u64) -> MemoryHandle {
        MemoryHandle::shared(self.files[file].clone(), page * PAGE).unwrap()
    }

    pub fn object(&self, file: usize) -> ObjectKey {
        self.objects[file]
    }

    /// The first word of a page that the file has.
    pub fn word(&self, file: usize, page: usize) -> u64 {
        self.seen[file].whole().read_obj(page * PAGE as usize).unwrap()
    }

    /// How many others have one of the files open, as this process sees it.
    pub fn holders(&self) -> usize {
        self.files.iter().map(|file| Arc::strong_count(file) - 1).sum()
    }

    /// How many mappings of the files the process has beside the test's own.
    pub fn mapped(&self) -> usize {
        let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
        let lines = maps.lines().filter(|line| line.contains(&self.name));
        lines.count() - self.seen.len()
    }
}
