//! Memory lent as a function, over real sockets: its borrower loads and stores without a trap, and
//! loses it with the lease, whatever it keeps.

mod common;

use std::path::Path;
use std::time::Duration;

use common::{Rack, blocking};
use rackbus_control::api::{BorrowRequest, Isolation, Lease};
use rackbus_devices::memory::BAR;
use rackbus_memory::Region as Mapping;
use rackbus_pci::vfio_user::Client as User;
use rackbus_spec::vfio_user::{RegionInfoFlags, region};

const RACK: &str = "name = \"test\"\n\
    [hosts.alpha.devices.ram0]\nkind = \"memory\"\nsize = \"16 MiB\"\n\
    [hosts.alpha.devices.ram1]\nkind = \"memory\"\nsize = \"1 TiB\"\nat_return = \"keep\"\n\
    [hosts.beta]\n[hosts.gamma]\n";

/// A program that has the function's socket open and its memory mapped.
struct Program {
    user: User,
    memory: Mapping,
}

impl Program {
    fn open(lease: &Lease, size: u64) -> Program {
        let socket = lease.socket.as_deref().unwrap();
        let user = User::connect(Path::new(socket), Duration::from_secs(60)).unwrap();
        user.write(region::CONFIG, 4, &2u16.to_le_bytes()).unwrap();
        let info = user.region_info(BAR.into()).unwrap();
        assert!(info.size == size && info.flags.contains(RegionInfoFlags::MMAP));
        assert_eq!(info.areas, [(0, size)]);
        let memory = user.map_region(BAR.into(), 0, size).unwrap();
        Program { user, memory }
    }

    fn store(&self, offset: usize, data: &[u8; 8]) {
        self.memory.slice(offset, 8).unwrap().copy_from(data);
    }

    fn load(&self, offset: usize) -> [u8; 8] {
        let mut data = [0; 8];
        self.memory.slice(offset, 8).unwrap().copy_to(&mut data);
        data
    }

    /// What the function itself answers.
    fn trapped(&self, offset: usize) -> [u8; 8] {
        let mut data = [0; 8];
        self.user.read(BAR.into(), offset as u64, &mut data).unwrap();
        data
    }
}

/// Invariant I4, wherever the function's front runs. With strict isolation the lender has nothing of
/// the borrower's.
#[tokio::test(flavor = "multi_thread")]
async fn memory_is_lent_and_taken_away_from_who_keeps_it_mapped() {
    const SIZE: u64 = 16 << 20;
    let rack = Rack::start(RACK).await;
    for isolation in [Isolation::Shared, Isolation::Strict] {
        let borrow = |host| BorrowRequest { isolation, ..BorrowRequest::new("alpha/ram0", host) };
        let lease = rack.client.borrow_as(&borrow("beta")).await.unwrap();
        let id = lease.lease;
        let old = blocking(move || {
            let program = Program::open(&lease, SIZE);
            assert_eq!(program.load(4096), [0; 8], "something is left of who had it before");
            program.store(4096, b"of beta!");
            program.store(SIZE as usize - 8, b"the end!");
            assert_eq!(&program.trapped(4096), b"of beta!");
            assert_eq!(&program.trapped(SIZE as usize - 8), b"the end!");
            program
        })
        .await;
        rack.client.give_back(id).await.unwrap();

        let lease = rack.client.borrow_as(&borrow("gamma")).await.unwrap();
        let id = lease.lease;
        blocking(move || {
            let new = Program::open(&lease, SIZE);
            assert_eq!((new.load(4096), old.load(4096)), ([0; 8], [0; 8]));
            old.store(4096, b"too late");
            new.store(8192, b"of gamma");
            assert_eq!((new.load(4096), new.trapped(4096)), ([0; 8], [0; 8]));
            assert_eq!(old.load(8192), [0; 8], "beta sees what is gamma's");
            assert_eq!(old.trapped(4096), [0xff; 8], "what was borrowed is absent");
        })
        .await;
        rack.client.give_back(id).await.unwrap();
    }
}

/// A span is as large as its address space; what is kept moves with it, where there is any.
#[tokio::test(flavor = "multi_thread")]
async fn a_terabyte_is_lent_and_kept_for_the_next_borrower() {
    const SIZE: u64 = 1 << 40;
    let rack = Rack::start(RACK).await;
    for (host, found) in [("beta", [0; 8]), ("gamma", *b"the last")] {
        let lease = rack.client.borrow("alpha/ram1", host).await.unwrap();
        let id = lease.lease;
        blocking(move || {
            let program = Program::open(&lease, SIZE);
            assert_eq!(program.load(SIZE as usize - 8), found);
            program.store(SIZE as usize - 8, b"the last");
        })
        .await;
        rack.client.give_back(id).await.unwrap();
    }
}
