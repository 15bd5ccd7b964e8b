//! I/O commands against a model of the disk, on memory and on files.

use proptest::prelude::*;
use rackbus_spec::nvme::data::DsmRange;
use zerocopy::IntoBytes;

use super::super::config::BackingConfig;
use super::*;

const BLOCKS: u64 = 256;
const BLOCK: usize = 512;

#[test]
fn what_is_written_is_read() {
    let mut host = TestHost::with_memory(1 << 20);
    let data: Vec<u8> = (0..4096u32).map(|i| (i * 7) as u8).collect();
    assert_eq!(host.write_blocks(8, &data), Status::SUCCESS);
    assert_eq!(host.read_blocks(8, 4096), data);
    assert_eq!(host.read_blocks(0, 4096), vec![0; 4096]);
}

#[test]
fn wrong_commands_have_their_status_and_change_nothing() {
    let mut host = TestHost::with_memory(BLOCKS * BLOCK as u64);
    let buffer = host.scratch();
    host.write_blocks(BLOCKS - 1, &[5; BLOCK]);
    let last = transfer(IoOpcode::Write, BLOCKS - 1, 2 * BLOCK, buffer);
    let wraps = transfer(IoOpcode::Write, u64::MAX, BLOCK, buffer);
    let mut fused = transfer(IoOpcode::Write, 0, BLOCK, buffer);
    fused.cdw0.set_fuse(1);
    let too_long = Sqe { cdw12: 0xffff, ..transfer(IoOpcode::Verify, 0, BLOCK, buffer) };
    let mut no_namespace = transfer(IoOpcode::Write, 0, BLOCK, buffer);
    no_namespace.nsid = 2;
    let all = Sqe { nsid: 0xffff_ffff, ..no_namespace };
    let nowhere = transfer(IoOpcode::Write, 0, BLOCK, 0x5000);
    for (sqe, status) in [
        (last, Status::LBA_OUT_OF_RANGE),
        (wraps, Status::LBA_OUT_OF_RANGE),
        (too_long, Status::LBA_OUT_OF_RANGE),
        (fused, Status::INVALID_FIELD),
        (no_namespace, Status::INVALID_NAMESPACE),
        (all, Status::INVALID_NAMESPACE),
        (nowhere, Status::DATA_TRANSFER_ERROR),
    ] {
        assert_eq!(host.status(1, sqe), status, "{sqe:?}");
    }
    assert_eq!(host.read_blocks(BLOCKS - 1, BLOCK), vec![5; BLOCK]);
    let mut flush = transfer(IoOpcode::Flush, 0, BLOCK, 0);
    assert_eq!(host.status(1, flush), Status::SUCCESS);
    flush.nsid = 0xffff_ffff;
    assert_eq!(host.status(1, flush), Status::SUCCESS);
}

#[test]
fn a_transfer_longer_than_announced_is_refused() {
    let mut host = TestHost::with_memory(4 << 20);
    let buffer = host.scratch();
    for opcode in [IoOpcode::Read, IoOpcode::Write, IoOpcode::Compare] {
        let sqe = Sqe { cdw12: 2048, ..transfer(opcode, 0, BLOCK, buffer) };
        assert_eq!(host.status(1, sqe), Status::INVALID_FIELD);
    }
}

/// It moves nothing to the host, and no limit of its own is reported.
#[test]
fn a_verify_may_be_longer_than_a_transfer() {
    let folder = tempfile::tempdir().unwrap();
    let size = 4 << 20;
    for config in [
        NvmeConfig::memory(size, "M"),
        NvmeConfig { backing: BackingConfig::Null, ..NvmeConfig::memory(size, "N") },
        NvmeConfig::file(folder.path().join("image"), size, "F"),
    ] {
        let mut host = TestHost::plain(&config);
        host.enable();
        host.create_pair(1, ENTRIES);
        let verify = |cdw12| Sqe { cdw12, ..transfer(IoOpcode::Verify, 0, BLOCK, 0) };
        for (last, status) in [
            (4095, Status::SUCCESS),
            (5000, Status::SUCCESS),
            (8191, Status::SUCCESS),
            (8192, Status::LBA_OUT_OF_RANGE),
        ] {
            assert_eq!(host.status(1, verify(last)), status, "{last} of {config:?}");
        }
    }
}

#[test]
fn a_poll_is_bounded_and_every_queue_has_its_turn() {
    let mut host = TestHost::with_memory(4 << 20);
    host.create_pair(2, ENTRIES);
    let list = host.pages(1);
    for page in 0..256u64 {
        host.poke(list + page * 8, &(RAM + page * 4096).to_le_bytes());
    }
    // Compares of a megabyte each, which fail but read nonetheless: fifteen in both queues.
    let mut sqe = transfer(IoOpcode::Compare, 0, 1 << 20, 0);
    sqe.dptr = [RAM + 0x10_0000, list];
    for _ in 0..15 {
        host.submit(1, sqe);
        host.submit(2, sqe);
    }
    let mut done = [0; 2];
    let mut polls = 0;
    while done != [15, 15] {
        polls += 1;
        assert!(polls < 100, "{done:?} after {polls} polls");
        host.poll();
        let before = done;
        for qid in [1, 2] {
            while host.completion(qid).is_some() {
                done[usize::from(qid) - 1] += 1;
            }
        }
        assert!(done[0] + done[1] - before[0] - before[1] <= 6, "one poll did too much");
        if polls == 4 {
            assert!(done[0] > 0 && done[1] > 0, "{done:?}: a queue is starved");
        }
    }
}

#[test]
fn commands_of_many_queues_go_to_one_completion_queue() {
    let mut host = TestHost::with_memory(1 << 20);
    let buffer = host.scratch();
    host.share_completion_queue(2, 1);
    host.share_completion_queue(3, 1);
    for lba in 0..30 {
        for qid in 1..=3 {
            let cid = host.submit(qid, transfer(IoOpcode::Read, lba, BLOCK, buffer));
            host.poll();
            let cqe = host.completion(1).expect("no completion in the shared queue");
            assert_eq!((cqe.sq_id, cqe.cid, cqe.status()), (qid, cid, Status::SUCCESS));
        }
    }
}

#[derive(Debug, Clone)]
enum Operation {
    Write { lba: u64, blocks: usize, seed: u8, fua: bool },
    Read { lba: u64, blocks: usize },
    Compare { lba: u64, blocks: usize, spoil: bool },
    Zeroes { lba: u64, blocks: usize, deallocate: bool },
    Deallocate(Vec<(u64, u32)>),
    Verify { lba: u64, blocks: usize },
    Flush,
}

fn operation() -> impl Strategy<Value = Operation> {
    // Some ranges reach beyond the end.
    let range = (0..BLOCKS + 2, 1usize..=16);
    prop_oneof![
        4 => (range.clone(), any::<u8>(), any::<bool>()).prop_map(|((lba, blocks), seed, fua)| {
            Operation::Write { lba, blocks, seed, fua }
        }),
        4 => range.clone().prop_map(|(lba, blocks)| Operation::Read { lba, blocks }),
        2 => (range.clone(), any::<bool>())
            .prop_map(|((lba, blocks), spoil)| Operation::Compare { lba, blocks, spoil }),
        2 => (range.clone(), any::<bool>())
            .prop_map(|((lba, blocks), deallocate)| Operation::Zeroes { lba, blocks, deallocate }),
        1 => prop::collection::vec((0..BLOCKS + 1, 0u32..40), 1..5)
            .prop_map(Operation::Deallocate),
        1 => range.prop_map(|(lba, blocks)| Operation::Verify { lba, blocks }),
        1 => Just(Operation::Flush),
    ]
}

/// A drive and what it should hold.
struct Checked {
    host: TestHost,
    disk: Vec<u8>,
}

impl Checked {
    /// The bytes of a range, or nothing when it is beyond the end.
    fn range(&self, lba: u64, blocks: usize) -> Option<std::ops::Range<usize>> {
        let start = lba as usize * BLOCK;
        let end = start + blocks * BLOCK;
        (end <= self.disk.len()).then_some(start..end)
    }

    fn expect(&mut self, sqe: Sqe, range: Option<&std::ops::Range<usize>>) {
        let status = if range.is_some() { Status::SUCCESS } else { Status::LBA_OUT_OF_RANGE };
        assert_eq!(self.host.status(1, sqe), status, "{sqe:?}");
    }

    fn apply(&mut self, operation: Operation) {
        let buffer = self.host.scratch();
        match operation {
            Operation::Write { lba, blocks, seed, fua } => {
                let data: Vec<u8> =
                    (0..blocks * BLOCK).map(|i| (i as u8).wrapping_mul(seed | 1)).collect();
                self.host.poke(buffer, &data);
                let mut sqe = transfer(IoOpcode::Write, lba, blocks * BLOCK, buffer);
                sqe.cdw12 |= u32::from(fua) << 30;
                let range = self.range(lba, blocks);
                self.expect(sqe, range.as_ref());
                if let Some(range) = range {
                    self.disk[range].copy_from_slice(&data);
                }
            }
            Operation::Read { lba, blocks } => {
                self.host.poke(buffer, &[0xee; 8192]);
                let range = self.range(lba, blocks);
                self.expect(transfer(IoOpcode::Read, lba, blocks * BLOCK, buffer), range.as_ref());
                let found = self.host.peek(buffer, blocks * BLOCK);
                match range {
                    Some(range) => assert!(found == self.disk[range], "lba {lba}"),
                    None => assert!(found.iter().all(|byte| *byte == 0xee)),
                }
            }
            Operation::Compare { lba, blocks, spoil } => {
                let range = self.range(lba, blocks);
                let sqe = transfer(IoOpcode::Compare, lba, blocks * BLOCK, buffer);
                let Some(bytes) = range.clone() else { return self.expect(sqe, None) };
                let mut data = self.disk[bytes].to_vec();
                if spoil {
                    *data.last_mut().unwrap() ^= 0x80;
                }
                self.host.poke(buffer, &data);
                let status = if spoil { Status::COMPARE_FAILURE } else { Status::SUCCESS };
                assert_eq!(self.host.status(1, sqe), status);
            }
            Operation::Zeroes { lba, blocks, deallocate } => {
                let mut sqe = transfer(IoOpcode::WriteZeroes, lba, blocks * BLOCK, 0);
                sqe.cdw12 |= u32::from(deallocate) << 25;
                let range = self.range(lba, blocks);
                self.expect(sqe, range.as_ref());
                if let Some(range) = range {
                    self.disk[range].fill(0);
                }
            }
            Operation::Deallocate(ranges) => self.deallocate(&ranges),
            Operation::Verify { lba, blocks } => {
                let range = self.range(lba, blocks);
                self.expect(transfer(IoOpcode::Verify, lba, blocks * BLOCK, 0), range.as_ref());
            }
            Operation::Flush => {
                self.expect(transfer(IoOpcode::Flush, 0, BLOCK, 0), Some(&(0..0)));
            }
        }
    }

    fn deallocate(&mut self, ranges: &[(u64, u32)]) {
        let buffer = self.host.scratch();
        let list: Vec<DsmRange> = ranges
            .iter()
            .map(|(slba, nlb)| DsmRange { attributes: 0, nlb: *nlb, slba: *slba })
            .collect();
        self.host.poke(buffer, list.as_bytes());
        let mut sqe = transfer(IoOpcode::DatasetManagement, 0, BLOCK, buffer);
        (sqe.cdw10, sqe.cdw11, sqe.cdw12) = (list.len() as u32 - 1, 1 << 2, 0);
        let found: Option<Vec<_>> =
            ranges.iter().map(|(lba, count)| self.range(*lba, *count as usize)).collect();
        self.expect(sqe, found.as_ref().map(|_| &(0..0)));
        for range in found.into_iter().flatten() {
            self.disk[range].fill(0);
        }
    }
}

fn run(config: &NvmeConfig, operations: Vec<Operation>) {
    let mut host = TestHost::plain(config);
    host.enable();
    host.create_pair(1, ENTRIES);
    let mut checked = Checked { host, disk: vec![0; BLOCKS as usize * BLOCK] };
    for operation in operations {
        checked.apply(operation);
    }
    for lba in (0..BLOCKS).step_by(16) {
        checked.apply(Operation::Read { lba, blocks: 16 });
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(48))]

    #[test]
    fn a_drive_in_memory_is_the_model(operations in prop::collection::vec(operation(), 1..60)) {
        run(&NvmeConfig::memory(BLOCKS * BLOCK as u64, "M"), operations);
    }

    #[test]
    fn a_drive_in_a_file_is_the_model(operations in prop::collection::vec(operation(), 1..40)) {
        let dir = tempfile::TempDir::new().unwrap();
        let config = NvmeConfig::file(dir.path().join("image"), BLOCKS * BLOCK as u64, "F");
        run(&config, operations.clone());
        // And on a file system without a medium.
        let dir = tempfile::TempDir::new_in("/dev/shm").unwrap();
        let config = NvmeConfig::file(dir.path().join("image"), BLOCKS * BLOCK as u64, "F");
        run(&config, operations);
    }
}

/// A guest that translates DMA itself maps its memory page by page, wherever the pages are.
#[test]
fn queues_and_buffers_may_lie_in_several_mappings() {
    let mut host = TestHost::plain(&NvmeConfig::memory(1 << 20, "PAGES"));
    host.unmap_ram();
    host.cuts = (1..RAM_SIZE / 4096).map(|page| page * 4096).collect();
    host.cuts.truncate(64);
    host.map_ram();
    host.enable();
    // Four pages of submissions, a page of completions.
    host.create_pair(1, 256);
    let buffer = host.pages(2);
    for round in 0..300u64 {
        let data = [round as u8; 8192];
        host.poke(buffer, &data);
        let write = transfer(IoOpcode::Write, round % 100, 8192, buffer);
        assert_eq!(host.status(1, write), Status::SUCCESS, "round {round}");
        host.poke(buffer, &[0xff; 8192]);
        let read = transfer(IoOpcode::Read, round % 100, 8192, buffer);
        assert_eq!(host.status(1, read), Status::SUCCESS, "round {round}");
        assert_eq!(host.peek(buffer, 8192), data, "round {round}");
    }
}
