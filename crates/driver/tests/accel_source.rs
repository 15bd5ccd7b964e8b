//! Data of a drive through an accelerator: what comes out is what a program would get that read it and asked then.

use rackbus_devices::accel::{Accelerator, EnginePool, PoolOptions};
use rackbus_devices::nvme::{Nvme, NvmeConfig};
use rackbus_driver::accel::{
    Accel, AccelOptions, DriveRange, DriveSource, MessageWork, SourceError,
};
use rackbus_driver::{
    DmaAddresses, Drive, DriveError, DriveOptions, DrivenFunction, FunctionPlace, InThreadFunction,
};
use rackbus_memory::{Access, SharedMemory};
use rackbus_pci::endpoint::FunctionRegion;
use rackbus_pci::engine::EngineOptions;
use rackbus_pci::machine::ReachedRun;
use rackbus_pci::vfio_user::serve_function;
use rackbus_pci::{Endpoint, Function};
use rackbus_qos::TenantId;
use rackbus_spec::accel::{Operation, OperationStatus};

const MESSAGE: usize = 64 << 10;

fn accel() -> Accel {
    let pool = EnginePool::new(PoolOptions::default());
    let model = Accelerator::new(&pool, TenantId(1), None, 1).unwrap();
    Accel::start(Box::new(InThreadFunction::new(Box::new(model))), AccelOptions::default()).unwrap()
}

fn drive(depth: u16) -> Drive {
    let model = Nvme::new(&NvmeConfig::memory(4 << 20, "M1")).unwrap();
    let options = DriveOptions { depth, data: 3 * MESSAGE };
    Drive::with_device(Box::new(InThreadFunction::new(Box::new(model))), options).unwrap()
}

/// One that reads for as many messages as it has queues.
fn wide(queues: u16) -> Drive {
    let model = Nvme::new(&NvmeConfig::memory(4 << 20, "M1")).unwrap();
    let options = DriveOptions { depth: 1, data: (usize::from(queues) + 2) * MESSAGE };
    let function = Box::new(InThreadFunction::new(Box::new(model)));
    Drive::with_queues(function, options, queues).unwrap()
}

fn content() -> Vec<u8> {
    (0..4 << 20).map(|at: u32| (at.wrapping_mul(at) / 77 % 251) as u8).collect()
}

fn source(accel: &mut Accel) -> DriveSource {
    let mut drive = drive(1);
    drive.write(0, &content(), false).unwrap();
    DriveSource::with_drive(accel, drive, MESSAGE).unwrap()
}

fn run(
    source: &mut DriveSource,
    accel: &mut Accel,
    stages: &[(Operation, u16)],
    (offset, length): (u64, u64),
) -> Result<Vec<(u64, Vec<u8>)>, SourceError> {
    let (mut results, room) = (Vec::new(), accel.data_size());
    let work = MessageWork { stages, ..MessageWork::default() };
    let each = |at: u64, result: &[u8]| {
        results.push((at, result.to_vec()));
        Ok(())
    };
    source.run(accel, room, &work, DriveRange { offset, length }, each).map(|()| results)
}

#[test]
fn each_message_of_a_range_comes_out_once_in_its_order() {
    let mut accel = accel();
    let mut source = source(&mut accel);
    let key = accel.create_context(Operation::Aes256Ctr, &[5; 32]).unwrap();
    let chains: [&[(Operation, u16)]; 4] = [
        &[(Operation::Copy, 0)],
        &[(Operation::Sha256, 0)],
        &[(Operation::Aes256Ctr, key), (Operation::Sha256, 0)],
        &[(Operation::Deflate, 0), (Operation::Inflate, 0)],
    ];
    let content = content();
    for stages in chains {
        for (offset, length) in [(0, 4 << 20), (512, 512), (4096, 3 * MESSAGE as u64 + 512), (0, 0)]
        {
            let results = run(&mut source, &mut accel, stages, (offset, length)).unwrap();
            let whole = &content[offset as usize..(offset + length) as usize];
            assert_eq!(results.len(), whole.chunks(MESSAGE).len());
            for ((at, result), (nth, input)) in
                results.iter().zip(whole.chunks(MESSAGE).enumerate())
            {
                assert_eq!(*at, offset + (nth * MESSAGE) as u64);
                // Counted on, as in one message of the whole range: a message is 4096 blocks.
                let nonce = ((nth * MESSAGE / 16) as u128).to_be_bytes();
                let work = MessageWork { stages, nonce, ..MessageWork::default() };
                assert!(*result == accel.run(&work, input, 1 << 20).unwrap(), "{stages:?} at {at}");
            }
        }
    }
    source.close(&mut accel).unwrap();
    assert_eq!(
        accel.run(&MessageWork { stages: chains[0], ..MessageWork::default() }, b"on", 2).unwrap(),
        b"on"
    );
}

/// What is enciphered under one nonce, or counter block, twice is given away.
#[test]
fn no_nonce_is_used_for_two_messages() {
    let mut accel = accel();
    let mut source = source(&mut accel);
    let seal = accel.create_context(Operation::Aes256GcmSeal, &[5; 32]).unwrap();
    let count = accel.create_context(Operation::Aes256Ctr, &[5; 32]).unwrap();
    let chains: [&[(Operation, u16)]; 4] = [
        &[(Operation::Aes256GcmSeal, seal)],
        &[(Operation::Aes256GcmOpen, seal)],
        &[(Operation::ZstdCompress, 0), (Operation::Aes256Ctr, count)],
        &[(Operation::Sha256, 0), (Operation::Aes256Ctr, count)],
    ];
    for stages in chains {
        let refused = run(&mut source, &mut accel, stages, (0, MESSAGE as u64 + 512)).unwrap_err();
        assert!(matches!(refused, SourceError::Request(_)), "{stages:?}: {refused}");
        let one = run(&mut source, &mut accel, stages, (0, MESSAGE as u64));
        let fails = stages[0].0 == Operation::Aes256GcmOpen;
        assert_eq!(one.is_err(), fails, "{stages:?}: {one:?}");
    }
    // In messages, as at once.
    let (stages, nonce) = ([(Operation::Aes256Ctr, count)], [0xff; 16]);
    let work = MessageWork { stages: &stages, nonce, ..MessageWork::default() };
    let whole = &content()[4096..4096 + 3 * MESSAGE + 512];
    let expected = accel.run(&work, whole, 1 << 20).unwrap();
    let (mut all, room) = (Vec::new(), accel.data_size());
    let range = DriveRange { offset: 4096, length: whole.len() as u64 };
    let each = |_: u64, result: &[u8]| {
        all.extend_from_slice(result);
        Ok(())
    };
    source.run(&mut accel, room, &work, range, each).unwrap();
    assert!(all == expected);
}

#[test]
fn messages_come_in_the_drives_order_however_many_are_read_at_the_same_time() {
    let content = content();
    for queues in [1, 2, 5, 8] {
        let (mut accel, mut drive) = (accel(), wide(queues));
        assert_eq!(drive.queues(), usize::from(queues));
        drive.write(0, &content, false).unwrap();
        let mut source = DriveSource::with_drive(&mut accel, drive, MESSAGE).unwrap();
        for (offset, length) in [(0, 4 << 20), (512, 512), (4096, 7 * MESSAGE as u64 + 512)] {
            let results = run(&mut source, &mut accel, &[(Operation::Copy, 0)], (offset, length));
            let mut at = offset;
            for (of, result) in results.unwrap() {
                assert_eq!(of, at);
                at += result.len() as u64;
                assert!(result == content[of as usize..at as usize], "{queues} queues, at {of}");
            }
            assert_eq!(at, offset + length);
        }
        source.close(&mut accel).unwrap();
    }
}

/// Messages behind one that fails have been read by then, and the next range begins anew all the same.
#[test]
fn what_is_behind_a_message_that_fails_is_not_handed_over() {
    let (mut accel, mut drive) = (accel(), wide(8));
    let mut state = 1u64;
    let noise: Vec<u8> = std::iter::repeat_with(|| {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
        (state >> 56) as u8
    })
    .take(MESSAGE)
    .collect();
    drive.write(5 * MESSAGE as u64 / 512, &noise, false).unwrap();
    let mut source = DriveSource::with_drive(&mut accel, drive, MESSAGE).unwrap();
    let stages = [(Operation::Lz4Compress, 0)];
    let work = MessageWork { stages: &stages, ..MessageWork::default() };
    // No engine makes noise smaller, and there is no more room than that.
    for _ in 0..3 {
        let (range, mut taken) = (DriveRange { offset: 0, length: 4 << 20 }, Vec::new());
        let outcome = source.run(&mut accel, 3 * MESSAGE, &work, range, |at, _| {
            taken.push(at);
            Ok(())
        });
        let failed = SourceError::Message {
            offset: 5 * MESSAGE as u64,
            status: OperationStatus::OutputTooSmall,
        };
        assert_eq!(outcome.unwrap_err().to_string(), failed.to_string());
        assert_eq!(taken, (0..5).map(|nth| nth * MESSAGE as u64).collect::<Vec<_>>());
    }
    assert_eq!(
        run(&mut source, &mut accel, &[(Operation::Copy, 0)], (0, 4 << 20)).unwrap().len(),
        64
    );
}

/// By sockets, drive and accelerator work on threads of their own, and the drive has as many queues as there is memory for.
#[test]
fn a_drive_at_a_socket_reads_ahead_of_the_accelerator() {
    let folder = tempfile::tempdir().unwrap();
    let socket = folder.path().join("drive.sock");
    let model = Nvme::new(&NvmeConfig::memory(4 << 20, "M1")).unwrap();
    let _served = serve_function(Box::new(model), &socket, EngineOptions::default()).unwrap();
    let content = content();
    let mut drive = Drive::open(&socket, DriveOptions { depth: 1, data: 1 << 20 }).unwrap();
    drive.write(0, &content, false).unwrap();
    drop(drive);
    let (mut accel, place) = (accel(), FunctionPlace::Socket(socket));
    // Before any memory is taken for them.
    for message in [0, accel.info().largest as usize + 512, 1 << 44, usize::MAX - 511] {
        let refused = DriveSource::open(&mut accel, &place, message).unwrap_err();
        assert!(matches!(refused, SourceError::Request(_)), "{message}: {refused}");
    }
    for (message, queues) in [(MESSAGE, 8), (1 << 20, 6)] {
        let mut source = DriveSource::open(&mut accel, &place, message).unwrap();
        assert_eq!(source.drive().queues(), queues);
        let results = run(&mut source, &mut accel, &[(Operation::Copy, 0)], (0, 4 << 20)).unwrap();
        assert!(results.iter().flat_map(|(_, result)| result).eq(&content));
        source.close(&mut accel).unwrap();
    }
}

/// What no engine makes smaller.
#[test]
fn a_message_of_the_usual_length_has_room_for_what_comes_out() {
    let mut accel = accel();
    let mut state = 1u64;
    let noise: Vec<u8> = std::iter::repeat_with(|| {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
        (state >> 56) as u8
    })
    .take(2 << 20)
    .collect();
    for operation in [Operation::ZstdCompress, Operation::Lz4Compress, Operation::Copy] {
        let stages = [(operation, 0)];
        let message = DriveSource::usual_message(&accel, &stages);
        let model = Nvme::new(&NvmeConfig::memory(4 << 20, "M1")).unwrap();
        let options = DriveOptions { depth: 1, data: 3 * message };
        let mut drive =
            Drive::with_device(Box::new(InThreadFunction::new(Box::new(model))), options).unwrap();
        drive.write(0, &noise, false).unwrap();
        let mut source = DriveSource::with_drive(&mut accel, drive, message).unwrap();
        run(&mut source, &mut accel, &stages, (0, 2 << 20)).unwrap();
        source.close(&mut accel).unwrap();
    }
}

#[test]
fn what_cannot_be_is_refused_and_what_fails_leaves_both_usable() {
    let mut accel = accel();
    let mut source = source(&mut accel);
    let copy = [(Operation::Copy, 0)];
    for range in [(0, 100), (100, 512), (4 << 20, 512), (u64::MAX - 511, 512)] {
        let refused = run(&mut source, &mut accel, &copy, range).unwrap_err();
        assert!(matches!(refused, SourceError::Request(_)), "{range:?}: {refused}");
    }
    // Data that no engine compressed.
    let failed = run(&mut source, &mut accel, &[(Operation::Inflate, 0)], (512, 1 << 20));
    let Err(SourceError::Message { offset: 512, status: OperationStatus::CorruptInput }) = failed
    else {
        panic!("{failed:?}");
    };
    // Who takes results ends it.
    let mut taken = 0;
    let (work, room) = (MessageWork { stages: &copy, ..MessageWork::default() }, accel.data_size());
    let ended =
        source.run(&mut accel, room, &work, DriveRange { offset: 0, length: 1 << 20 }, |_, _| {
            taken += 1;
            if taken == 2 { Err(SourceError::Ended) } else { Ok(()) }
        });
    assert!(matches!(ended, Err(SourceError::Ended)) && taken == 2, "{ended:?}, {taken}");
    let results = run(&mut source, &mut accel, &copy, (0, 1 << 20)).unwrap();
    assert!(results.iter().flat_map(|(_, result)| result).eq(&content()[..1 << 20]));
    source.close(&mut accel).unwrap();
    for (drive, message) in
        [(drive(2), MESSAGE), (drive(1), 0), (drive(1), 100), (drive(1), 2 << 20)]
    {
        let refused = DriveSource::with_drive(&mut accel, drive, message).unwrap_err();
        assert!(matches!(refused, SourceError::Request(_)), "{refused}");
    }
}

/// A function as one without an IOMMU, whose driver's memory is in huge pages, each of which lies somewhere else.
struct Scattered {
    endpoint: Endpoint,
    first: u64,
    now_ns: u64,
}

const HUGE_PAGE: u64 = 2 << 20;

impl Scattered {
    /// Its own memory is from `first` on, and that of others far behind.
    fn new(model: Box<dyn Function>, first: u64) -> Scattered {
        Scattered { endpoint: Endpoint::new(model), first, now_ns: 0 }
    }

    /// Maps memory in pieces that are in reverse order and have gaps between them.
    fn map(&mut self, first: u64, memory: &SharedMemory) -> DmaAddresses {
        let pages = memory.len() as u64 / HUGE_PAGE;
        let page = |nth: u64| {
            let address = first + 2 * HUGE_PAGE * (pages - nth);
            let (offset, access) = (nth * HUGE_PAGE, Access::READ | Access::WRITE);
            let memory = Some(memory.handle(offset));
            self.endpoint.map(address, HUGE_PAGE, access, memory).unwrap();
            ReachedRun { offset, address }
        };
        DmaAddresses::of((0..pages).map(page).collect(), memory.len())
    }
}

impl DrivenFunction for Scattered {
    fn read(&mut self, offset: u64, data: &mut [u8]) -> Result<(), DriveError> {
        self.endpoint.read(FunctionRegion::Bar(0), offset, data).unwrap();
        Ok(())
    }

    fn write(&mut self, offset: u64, data: &[u8]) -> Result<(), DriveError> {
        self.endpoint.write(FunctionRegion::Bar(0), offset, data).unwrap();
        Ok(())
    }

    fn memory(&mut self, name: &str, length: usize) -> Result<SharedMemory, DriveError> {
        Ok(SharedMemory::create(name, (length as u64).next_multiple_of(HUGE_PAGE))?)
    }

    fn start(&mut self, _: u64, memory: &SharedMemory) -> Result<DmaAddresses, DriveError> {
        let addresses = self.map(self.first, memory);
        self.endpoint.write(FunctionRegion::Config, 4, &[6, 0]).unwrap();
        Ok(addresses)
    }

    fn share(&mut self, _: u64, memory: &SharedMemory) -> Result<DmaAddresses, DriveError> {
        Ok(self.map(self.first + (1 << 36), memory))
    }

    fn unshare(&mut self, _: u64, length: usize) -> Result<(), DriveError> {
        for nth in 1..=length as u64 / HUGE_PAGE {
            let address = self.first + (1 << 36) + 2 * HUGE_PAGE * nth;
            self.endpoint.unmap(address, HUGE_PAGE).unwrap();
        }
        Ok(())
    }

    fn progress(&mut self) -> bool {
        self.now_ns = self.endpoint.clock();
        self.endpoint.poll(self.now_ns);
        true
    }
}

/// Messages of all sizes, of which none is across a boundary of huge pages, with several reads in flight.
#[test]
fn memory_in_huge_pages_that_are_apart_is_enough() {
    let pool = EnginePool::new(PoolOptions::default());
    let model = Accelerator::new(&pool, TenantId(1), None, 1).unwrap();
    let function = Scattered::new(Box::new(model), 1 << 33);
    let mut accel = Accel::start(Box::new(function), AccelOptions::default()).unwrap();
    let content = content();
    for message in [MESSAGE, 3 * MESSAGE, 1 << 20] {
        let model = Nvme::new(&NvmeConfig::memory(4 << 20, "M1")).unwrap();
        let options = DriveOptions { depth: 1, data: 8 * message };
        let function = Box::new(Scattered::new(Box::new(model), 1 << 34));
        let mut drive = Drive::with_queues(function, options, 6).unwrap();
        drive.write(0, &content, false).unwrap();
        let mut source = DriveSource::with_drive(&mut accel, drive, message).unwrap();
        for stages in [
            &[(Operation::Copy, 0)][..],
            &[(Operation::Lz4Compress, 0), (Operation::Lz4Decompress, 0)],
        ] {
            let results = run(&mut source, &mut accel, stages, (0, 4 << 20)).unwrap();
            let results = results.iter().flat_map(|(_, result)| result);
            assert!(results.eq(&content), "{message} bytes: {stages:?}");
        }
        source.close(&mut accel).unwrap();
    }
}
