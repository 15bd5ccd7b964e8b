//! Functions whose registers are plain memory, lent through the window of an NTB: no trap and no message of the lender's
//! is left. The NTB is the one in software, whose clients stand for two machines.
//!
//! The borrower's stores to its window are stores to the registers' memory, at the lender. The lender's engine reaches
//! the borrower's memory by its own window, which is that memory. The lender's client says nothing after it has
//! mapped the registers.

use std::os::fd::{AsFd, AsRawFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use rackbus_devices::accel::{Accelerator, EnginePool, PoolOptions};
use rackbus_devices::ntb::{Bridge, BridgeConfig, BridgeSide, EndConfig, map};
use rackbus_devices::nvme::{Nvme, NvmeConfig};
use rackbus_driver::accel::{Accel, AccelOptions, MessageWork};
use rackbus_driver::device::{DmaAddresses, DrivenFunction};
use rackbus_driver::{Drive, DriveError, DriveOptions};
use rackbus_memory::{Access, MemoryHandle, SharedMemory};
use rackbus_pci::engine::EngineOptions;
use rackbus_pci::vfio_user::Client;
use rackbus_pci::{Engine, Function, PolledRegisters};
use rackbus_qos::TenantId;
use rackbus_spec::accel::{Operation, registers as accel};
use rackbus_spec::vfio_user::region;

const LONG: Duration = Duration::from_secs(60);
/// The borrower's memory, in bytes.
const MEMORY: u64 = 16 << 20;
/// Where the lender's machine has the registers on its bus.
const REGISTERS: u64 = 0x10_0000;
/// Where the lender's window onto the borrower's memory is for the function.
const BASE: u64 = 1 << 40;
const COMMAND: u16 = 0b110;
const BOTH: Access = Access::READ.union(Access::WRITE);

/// A machine that has an end of the bridge: enabled, its link wanted.
fn machine(end: &EndConfig) -> Client {
    let client = Client::connect(&end.socket, LONG).unwrap();
    client.write(region::CONFIG, 4, &COMMAND.to_le_bytes()).unwrap();
    client.write(region::BAR0, map::CONTROL, &[0; 4]).unwrap();
    client
}

/// The borrower's side: its end of the NTB, and its memory. What it knows of the function are registers in window 1,
/// and that the function finds its memory at [`BASE`].
struct ThroughWindow {
    end: Client,
    memory: SharedMemory,
    accesses: Arc<AtomicU64>,
}

impl DrivenFunction for ThroughWindow {
    fn read(&mut self, offset: u64, data: &mut [u8]) -> Result<(), DriveError> {
        self.accesses.fetch_add(1, Ordering::Relaxed);
        Ok(self.end.read(region::BAR0 + 2, offset, data)?)
    }

    fn write(&mut self, offset: u64, data: &[u8]) -> Result<(), DriveError> {
        self.accesses.fetch_add(1, Ordering::Relaxed);
        Ok(self.end.post(region::BAR0 + 2, offset, data)?)
    }

    fn memory(&mut self, _name: &str, length: usize) -> Result<SharedMemory, DriveError> {
        assert!(length <= self.memory.len());
        Ok(self.memory.clone())
    }

    fn start(&mut self, _iova: u64, memory: &SharedMemory) -> Result<DmaAddresses, DriveError> {
        Ok(DmaAddresses::contiguous(BASE, memory.len()))
    }
}

/// Two machines, one of which has lent a function to the other.
struct Lent {
    bridge: Bridge,
    engine: Engine,
    /// The function's registers, as the lender has them.
    registers: PolledRegisters,
    /// What the borrower's driver takes.
    device: Option<ThroughWindow>,
    accesses: Arc<AtomicU64>,
    /// The lender's end, and where the sockets are.
    _lender: (Client, tempfile::TempDir),
}

impl Lent {
    fn new(model: Box<dyn Function>) -> Lent {
        let folder = tempfile::tempdir().unwrap();
        let lenders = SharedMemory::create("lenders memory", 1 << 20).unwrap();
        let borrowers = SharedMemory::create("borrowers memory", MEMORY).unwrap();
        let end = |name: &str, memory: &SharedMemory| EndConfig {
            socket: folder.path().join(name),
            memory: format!("/proc/self/fd/{}", memory.as_fd().as_raw_fd()).into(),
        };
        let ends = [end("a", &lenders), end("b", &borrowers)];
        let config = BridgeConfig {
            window: 64 << 10,
            training: Duration::ZERO,
            ..BridgeConfig::new(ends.clone())
        };
        let bridge = Bridge::start(&config).unwrap();
        let (lender, borrower) = (machine(&ends[0]), machine(&ends[1]));
        while !bridge.link_is_up() {
            std::thread::yield_now();
        }

        // The lender: a function whose registers are memory on its bus, onto which the borrower's window 1 leads; and
        // the borrower's memory, which its own second window is.
        let engine = Engine::start("lent", model, EngineOptions::default()).unwrap();
        let (file, length) = engine.handle().call(|it| it.poll_registers(0)).unwrap().unwrap();
        let registers = PolledRegisters::adopt(file, length).unwrap();
        let memory = Some((registers.memory().as_fd(), 0));
        lender.dma_map(REGISTERS, length, BOTH, memory).unwrap();
        lender.write(region::BAR0, map::INBOUND, &REGISTERS.to_le_bytes()).unwrap();
        let window = lender.region_info(region::BAR0 + 4).unwrap();
        let (file, offset) = window.memory.expect("the peer's memory can be mapped");
        let window = MemoryHandle::new(file, offset).unwrap();
        let reach = move |endpoint: &mut rackbus_pci::Endpoint| {
            endpoint.map(BASE, MEMORY, BOTH, Some(window)).unwrap();
            let config = rackbus_pci::endpoint::FunctionRegion::Config;
            endpoint.write(config, 4, &COMMAND.to_le_bytes()).unwrap();
        };
        engine.handle().call(reach).unwrap();

        let accesses = Arc::new(AtomicU64::new(0));
        let device = ThroughWindow { end: borrower, memory: borrowers, accesses: accesses.clone() };
        let device = Some(device);
        Lent { bridge, engine, registers, device, accesses, _lender: (lender, folder) }
    }

    fn device(&mut self) -> Box<ThroughWindow> {
        Box::new(self.device.take().expect("one driver has it"))
    }

    /// The lender said nothing since the function was lent, and what crossed the bridge were the borrower's accesses to
    /// the window, and the device's own to its memory, which nothing counts.
    fn was_used_without_messages(&self) {
        // A job is counted when it has answered: of the lender's three the last one may not be yet.
        self.engine.handle().call(|_| ()).unwrap();
        let jobs = self.engine.handle().counters().jobs.load(Ordering::Relaxed);
        assert!((2..=3).contains(&jobs), "{jobs} jobs: something was asked by message");
        // The last stores are posted, and the function may see them before the bridge has counted them.
        let (made, begun) = (self.accesses.load(Ordering::Relaxed), Instant::now());
        let crossed = || {
            let counted = self.bridge.counted(BridgeSide::B);
            counted.window1_reads + counted.window1_writes
        };
        while crossed() < made && begun.elapsed() < Duration::from_secs(10) {
            std::thread::yield_now();
        }
        assert_eq!(crossed(), made);
        assert_eq!(self.bridge.counted(BridgeSide::A).window1_writes, 0);
    }

    /// The lender takes it back: for the borrower the device is gone.
    fn take_back(&self) {
        self.engine.handle().call(|it| it.scrub()).unwrap();
    }
}

#[test]
fn a_drive_is_used_through_an_ntb_by_loads_and_stores_alone() {
    let model = Nvme::new(&NvmeConfig::memory(8 << 20, "W1")).unwrap();
    let mut lent = Lent::new(Box::new(model));
    let options = DriveOptions { depth: 8, data: 1 << 20 };
    let mut used = Drive::with_device(lent.device(), options).unwrap();
    let pattern: Vec<u8> = (0..256 << 10).map(|at: u32| (at * 7 + at / 4096) as u8).collect();
    for round in 0..20 {
        let data: Vec<u8> = pattern.iter().map(|byte| byte.wrapping_add(round)).collect();
        used.write(u64::from(round) * 8, &data, false).unwrap();
        used.flush().unwrap();
        let mut read = vec![0; data.len()];
        used.read(u64::from(round) * 8, &mut read).unwrap();
        assert!(read == data, "round {round}");
    }
    lent.was_used_without_messages();
    lent.take_back();
    assert_eq!(lent.registers.load(0x1c), u32::MAX);
    assert!(used.flush().is_err());
}

#[test]
fn an_accelerator_is_used_through_an_ntb_by_loads_and_stores_alone() {
    let pool = EnginePool::new(PoolOptions::default());
    let model = Accelerator::new(&pool, TenantId(1), None, 1).unwrap();
    let mut lent = Lent::new(Box::new(model));
    let options = AccelOptions { queues: 2, depth: 8, data: 1 << 20, interrupts: false };
    let mut used = Accel::start(lent.device(), options).unwrap();
    let key = used.create_context(Operation::Aes256GcmSeal, &[7; 32]).unwrap();
    for round in 0..20u8 {
        let data: Vec<u8> = (0..100_000u32).map(|at| (at % 251) as u8 ^ round).collect();
        let work = |stages| MessageWork { stages, nonce: [round; 16], associated: 0 };
        let seal = [(Operation::ZstdCompress, 0), (Operation::Aes256GcmSeal, key)];
        let sealed = used.run(&work(&seal), &data, 200_000).unwrap();
        let open = [(Operation::Aes256GcmOpen, key), (Operation::ZstdDecompress, 0)];
        let opened = used.run(&work(&open), &sealed, data.len()).unwrap();
        assert!(opened == data, "round {round}");
    }
    lent.was_used_without_messages();
    lent.take_back();
    assert_eq!(lent.registers.load(accel::STATUS), u32::MAX);
    let copy = MessageWork { stages: &[(Operation::Copy, 0)], ..MessageWork::default() };
    assert!(used.run(&copy, b"abc", 3).is_err());
}
