//! A borrowed drive's data goes through an accelerator on its way to the tenant: the drive reads into memory on
//! the way, a BAR of a third function, and the accelerator takes it from there when the drive says that it has
//! read. The tenant submits both at once, and does nothing in between.

mod common;

use std::os::fd::AsFd;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use common::{Rack, blocking};
use rackbus_control::api::{BorrowRequest, Lease};
use rackbus_devices::memory::BAR;
use rackbus_driver::accel::{Accel, AccelOptions, MessageSpan, MessageWork};
use rackbus_driver::{DmaAddresses, Drive, DriveError, DriveOptions, DrivenFunction};
use rackbus_memory::{Access, SharedMemory};
use rackbus_pci::vfio_user::Client as User;
use rackbus_spec::accel::{Completion, Condition, Descriptor, Operation, OperationStatus};
use rackbus_spec::nvme::IoOpcode;
use rackbus_spec::vfio_user::region;

/// Each function is at another lender; the memory on the way is the borrower's own.
const RACK: &str = "name = \"test\"\n\
    [hosts.alpha.devices.nvme0]\nkind = \"nvme\"\nsize = \"8 MiB\"\nbacking = \"memory\"\n\
    [hosts.beta.devices.ram0]\nkind = \"memory\"\nsize = \"1 MiB\"\n\
    [hosts.gamma.devices.accel0]\nkind = \"accelerator\"\nfunctions = 1\n";
/// Where the memory on the way is programmed to be, and where the accelerator reaches the drive's queues.
const WAY: u64 = 0x38_0000_0000;
const QUEUES: u64 = 0x20_0000_0000;
/// Bytes of a message: one command of the drive's, and one descriptor.
const MESSAGE: usize = 64 << 10;
const LIMIT: Duration = Duration::from_secs(60);

/// A connection that the driver shares with the test, which maps more by it.
struct Shared(Arc<User>);

impl DrivenFunction for Shared {
    fn read(&mut self, offset: u64, data: &mut [u8]) -> Result<(), DriveError> {
        Ok(self.0.read(region::BAR0, offset, data)?)
    }

    fn write(&mut self, offset: u64, data: &[u8]) -> Result<(), DriveError> {
        Ok(self.0.post(region::BAR0, offset, data)?)
    }

    fn start(&mut self, iova: u64, memory: &SharedMemory) -> Result<DmaAddresses, DriveError> {
        let length = memory.len() as u64;
        self.0.dma_map(iova, length, Access::all(), Some((memory.as_fd(), 0)))?;
        self.0.write(region::CONFIG, 4, &[6, 0])?;
        Ok(DmaAddresses::contiguous(iova, memory.len()))
    }
}

fn connect(lease: &Lease) -> Arc<User> {
    let socket = Path::new(lease.socket.as_deref().unwrap());
    Arc::new(User::connect(socket, Duration::from_secs(60)).unwrap())
}

/// A tenant with the three functions.
struct Tenant {
    drive: Drive,
    accel: Accel,
    _memory: Arc<User>,
}

impl Tenant {
    fn new(leases: &[Lease]) -> Tenant {
        let [drive, memory, accel] = [0, 1, 2].map(|nth: usize| connect(&leases[nth]));
        let register = 0x10 + 4 * u64::from(BAR);
        memory.write(region::CONFIG, register, &WAY.to_le_bytes()).unwrap();
        memory.write(region::CONFIG, 4, &[2, 0]).unwrap();
        let options = DriveOptions { depth: 1, ..DriveOptions::default() };
        let drive = Drive::with_device(Box::new(Shared(drive)), options).unwrap();
        let started =
            Accel::start(Box::new(Shared(accel.clone())), AccelOptions::default()).unwrap();
        let queues = drive.memory();
        let there = Some((queues.as_fd(), 0));
        accel.dma_map(QUEUES, queues.len() as u64, Access::READ, there).unwrap();
        Tenant { drive, accel: started, _memory: memory }
    }

    /// Puts in a read of the drive's into the memory on the way, and behind it, in the accelerator's queue, what is
    /// to come of it. The accelerator hears of it first.
    fn submit(&mut self, lba: u64, chain: &[(Operation, u16)], limit: Duration) {
        let (queue, _, _) = self.drive.parts();
        let blocks = (MESSAGE / 512) as u32;
        let id = queue.submit_at(IoOpcode::Read, lba, blocks, (WAY, MESSAGE), false).unwrap();
        let (at, condition) = queue.awaited(id);
        let wait = Accel::describe_wait(QUEUES + at as u64, condition, limit);
        let input = MessageSpan { address: WAY, segments: 0, length: MESSAGE as u32 };
        let output = self.accel.span(0, 1 << 20).unwrap();
        let work = MessageWork { stages: chain, ..MessageWork::default() };
        let descriptor = Accel::describe_spans(&work, input, output).unwrap();
        self.accel.push(0, &wait).unwrap();
        self.accel.push(0, &descriptor).unwrap();
        self.accel.ring(0).unwrap();
    }

    /// Lets the drive begin.
    fn read(&mut self) {
        let (queue, device, _) = self.drive.parts();
        queue.ring(device).unwrap();
    }

    /// How the wait ended, and what was behind it.
    fn ends(&mut self) -> [Completion; 2] {
        [(), ()].map(|()| self.accel.wait_for(0, LIMIT).unwrap().expect("nothing ends"))
    }

    /// The drive's own completion.
    fn drive_ends(&mut self) -> bool {
        let (queue, device, _) = self.drive.parts();
        loop {
            if let Some(completed) = queue.poll(device).unwrap() {
                return completed.status.is_success();
            }
        }
    }
}

async fn tenant(rack: &Rack) -> Tenant {
    let mut leases = Vec::new();
    for function in ["alpha/nvme0", "beta/ram0", "gamma/accel0.vf1"] {
        let request = BorrowRequest::new(function, "beta");
        let request = BorrowRequest { group: Some("inline".to_owned()), ..request };
        leases.push(rack.client.borrow_as(&request).await.unwrap());
    }
    blocking(move || Tenant::new(&leases)).await
}

#[tokio::test(flavor = "multi_thread")]
async fn what_a_drive_reads_goes_through_a_chain_without_the_tenants_doing() {
    let rack = Rack::start(RACK).await;
    let mut tenant = tenant(&rack).await;
    blocking(move || {
        for nth in 0..3u8 {
            let data: Vec<u8> = (0..MESSAGE).map(|at| (at / 300) as u8 ^ nth).collect();
            tenant.drive.write(8, &data, false).unwrap();
            let digest = [(Operation::Sha256, 0)];
            let work = MessageWork { stages: &digest, ..MessageWork::default() };
            let expected = tenant.accel.run(&work, &data, 32).unwrap();
            tenant.submit(8, &[(Operation::Copy, 0), (Operation::Sha256, 0)], LIMIT);
            let early = tenant.accel.wait_for(0, Duration::from_millis(20)).unwrap();
            assert_eq!(early, None, "it does not wait for the drive");
            tenant.read();
            let [waited, done] = tenant.ends();
            assert_eq!((waited.status, done.status, done.output), (0, 0, 32));
            let mut found = vec![0; 32];
            tenant.accel.data(0, 32).unwrap().copy_to(&mut found);
            assert!(found == expected, "round {nth}: another digest");
            assert!(tenant.drive_ends());
        }
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn what_a_drive_did_not_read_is_not_begun() {
    let rack = Rack::start(RACK).await;
    let mut tenant = tenant(&rack).await;
    blocking(move || {
        let both = |status: OperationStatus| [status as u16; 2];
        let copy = [(Operation::Copy, 0)];
        // Blocks that the drive has not.
        tenant.submit(1 << 40, &copy, LIMIT);
        tenant.read();
        assert_eq!(tenant.ends().map(|end| end.status), both(OperationStatus::ConditionFailed));
        assert!(!tenant.drive_ends());
        // A drive that was never told.
        tenant.submit(0, &copy, Duration::from_millis(30));
        assert_eq!(tenant.ends().map(|end| end.status), both(OperationStatus::TimedOut));
        tenant.read();
        assert!(tenant.drive_ends());
        // A word that is not the tenant's, and conditions that cannot be.
        let wait = Accel::describe_wait(4, Condition::default(), LIMIT);
        tenant.accel.push(0, &wait).unwrap();
        tenant.accel.ring(0).unwrap();
        assert_eq!(tenant.accel.wait(0).unwrap().status, OperationStatus::Transfer as u16);
        let good = Accel::describe_wait(QUEUES, Condition::default(), LIMIT);
        let next = tenant.accel.describe(
            &MessageWork { stages: &copy, ..MessageWork::default() },
            (0, 64),
            (64, 64),
        );
        // The one behind the wait that timed out.
        tenant.accel.push(0, &next.unwrap()).unwrap();
        tenant.accel.ring(0).unwrap();
        assert_eq!(tenant.accel.wait(0).unwrap().status, OperationStatus::Transfer as u16);
        for (descriptor, expected) in [
            (Descriptor { input_length: 8, ..good }, OperationStatus::InvalidField),
            (Descriptor { input: QUEUES + 2, ..good }, OperationStatus::InvalidField),
            (Descriptor { associated: 0, ..good }, OperationStatus::InvalidField),
            (Descriptor { associated: 60_001, ..good }, OperationStatus::InvalidField),
            (Descriptor { output_length: 1, ..good }, OperationStatus::InvalidField),
            (Descriptor { stages: [18, 3, 0, 0], ..good }, OperationStatus::InvalidOperation),
            (Descriptor { stages: [3, 18, 0, 0], ..good }, OperationStatus::InvalidOperation),
            (good, OperationStatus::Success),
        ] {
            tenant.accel.push(0, &descriptor).unwrap();
            tenant.accel.ring(0).unwrap();
            assert_eq!(tenant.accel.wait(0).unwrap().status, expected as u16, "{descriptor:?}");
        }
    })
    .await;
}
