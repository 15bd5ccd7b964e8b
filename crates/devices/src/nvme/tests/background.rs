//! Commands in flight while their queue, their controller or their memory goes away. The backing
//! holds requests until it is told, or made, to finish them; it can also fail them.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex};

use rackbus_memory::{DmaSlice, PinnedSlice};
use rackbus_pci::Work;
use rackbus_spec::nvme::features as fid;

use super::super::backing::{
    Background, Backing, InlineResult, MediaError, MediumRequest, RequestResult,
};
use super::super::jobs::{WEIGHT_LIMIT, ZEROING_LIMIT};
use super::*;

type HeldRequest = (u32, MediumRequest<Vec<PinnedSlice>>);

/// What the test and the backing share.
#[derive(Default)]
pub struct BackgroundControl {
    pub held: VecDeque<HeldRequest>,
    finished: Vec<RequestResult>,
    /// How further requests end.
    pub fail_with: Option<MediaError>,
    pub flushes: u32,
    /// How what is held has ended, where it only waits for others to be reported with.
    pub outcome: Option<Result<(), MediaError>>,
    /// It was told that it failed in an earlier life.
    failed: bool,
    pub data: Vec<u8>,
}

impl BackgroundControl {
    /// Finishes the request that was held first.
    pub fn finish_one(&mut self) {
        let (tag, request) = self.held.pop_front().expect("no request is held");
        let result = self.fail_with.map_or(Ok(()), Err);
        if result.is_ok() {
            self.carry_out(&request);
        }
        self.finished.push((tag, result));
    }

    fn carry_out(&mut self, request: &MediumRequest<Vec<PinnedSlice>>) {
        match request {
            MediumRequest::Read { offset, into } => {
                let mut at = *offset as usize;
                for slice in into {
                    at += slice.get().copy_from(&self.data[at..]);
                }
            }
            MediumRequest::Write { offset, from, .. } => {
                let mut at = *offset as usize;
                for slice in from {
                    let end = at + slice.get().len();
                    slice.get().copy_to(&mut self.data[at..end]);
                    at = end;
                }
            }
            MediumRequest::Flush => self.flushes += 1,
            MediumRequest::Zero { offset, length, .. } => {
                self.data[*offset as usize..(*offset + *length) as usize].fill(0);
            }
        }
    }
}

struct Slow(Arc<Mutex<BackgroundControl>>);

impl Backing for Slow {
    fn capacity(&self) -> u64 {
        self.0.lock().unwrap().data.len() as u64
    }
    fn volatile_cache(&self) -> bool {
        true
    }
    fn attempt(&mut self, _request: &MediumRequest<&[DmaSlice<'_>]>) -> InlineResult {
        InlineResult::WouldBlock
    }
    fn background(&mut self) -> Option<&mut dyn Background> {
        Some(self)
    }
    fn has_failed(&self) -> bool {
        self.0.lock().unwrap().failed
    }
    fn inherit_failure(&mut self) {
        self.0.lock().unwrap().failed = true;
    }
}

impl Background for Slow {
    fn start(&mut self, tag: u32, request: MediumRequest<Vec<PinnedSlice>>) {
        self.0.lock().unwrap().held.push_back((tag, request));
    }
    fn submit(&mut self) {}
    fn reap(&mut self, finished: &mut Vec<RequestResult>) {
        finished.append(&mut self.0.lock().unwrap().finished);
    }
    fn wait(&mut self, finished: &mut Vec<RequestResult>) {
        let mut control = self.0.lock().unwrap();
        if control.finished.is_empty() && !control.held.is_empty() {
            control.finish_one();
        }
        finished.append(&mut control.finished);
    }
    fn has_buffers(&self) -> bool {
        let buffers = |request: &MediumRequest<_>| {
            !matches!(request, MediumRequest::Flush | MediumRequest::Zero { .. })
        };
        self.0.lock().unwrap().held.iter().any(|(_, request)| buffers(request))
    }
    fn outcome(&self, tag: u32) -> Option<Result<(), MediaError>> {
        let control = self.0.lock().unwrap();
        control.outcome.filter(|_| control.held.iter().any(|(held, _)| *held == tag))
    }
    fn abort(&mut self) {
        let mut control = self.0.lock().unwrap();
        control.held.clear();
        control.finished.clear();
    }
    fn rearm(&mut self) -> bool {
        !self.0.lock().unwrap().finished.is_empty()
    }
}

/// A drive with such a backing.
pub fn slow_drive() -> (Nvme, Arc<Mutex<BackgroundControl>>) {
    slow_drive_of(1 << 20)
}

/// The same with so many bytes.
pub fn slow_drive_of(size: usize) -> (Nvme, Arc<Mutex<BackgroundControl>>) {
    let control = BackgroundControl { data: vec![0x11; size], ..BackgroundControl::default() };
    let control = Arc::new(Mutex::new(control));
    let config = NvmeConfig::memory(size as u64, "SLOW");
    (Nvme::with_backing(&config, Box::new(Slow(control.clone()))).unwrap(), control)
}

fn slow() -> (TestHost, Arc<Mutex<BackgroundControl>>) {
    let (nvme, control) = slow_drive();
    let mut host = TestHost::around(nvme);
    host.enable();
    host.create_pair(1, ENTRIES);
    (host, control)
}

#[test]
fn deleting_a_queue_completes_what_it_had_in_flight() {
    let (mut host, control) = slow();
    let buffer = host.scratch();
    let cids: Vec<u16> =
        (0..5).map(|lba| host.submit(1, transfer(IoOpcode::Write, lba, 512, buffer))).collect();
    assert_eq!(host.poll(), Work::Done);
    assert_eq!(host.completion(1), None, "nothing has finished");
    let delete = host.submit(0, Sqe { cdw10: 1, ..admin(AdminOpcode::DeleteSq) });
    host.poll();
    let late = host.submit(1, transfer(IoOpcode::Write, 9, 512, buffer));
    for _ in 0..5 {
        host.poll();
        assert_eq!(host.completion(0), None, "the queue has commands in flight");
        control.lock().unwrap().finish_one();
    }
    assert_eq!(host.wait(0, delete).status(), Status::SUCCESS);
    for cid in cids {
        let cqe = host.completion(1).expect("a command was lost with its queue");
        assert_eq!((cqe.cid, cqe.status()), (cid, Status::SUCCESS));
        assert_ne!(cqe.cid, late, "taken from a queue that is being deleted");
    }
    assert!(control.lock().unwrap().held.is_empty());
}

#[test]
fn completions_that_wait_for_their_queue_are_posted_before_it_is_deleted() {
    let (mut host, control) = slow();
    let cids = [(); 3].map(|()| host.submit(1, transfer(IoOpcode::Flush, 0, 512, 0)));
    host.poll();
    let delete = host.submit(0, Sqe { cdw10: 1, ..admin(AdminOpcode::DeleteSq) });
    host.poll();
    host.unmap_ram();
    cids.iter().for_each(|_| control.lock().unwrap().finish_one());
    host.poll();
    host.map_ram();
    host.poll();
    assert_eq!(host.wait(0, delete).status(), Status::SUCCESS);
    for cid in cids {
        let cqe = host.completion(1).expect("a completion was lost with its queue");
        assert_eq!((cqe.cid, cqe.status()), (cid, Status::SUCCESS));
    }
}

#[test]
fn a_queue_whose_completions_are_out_of_reach_is_deleted_when_they_are_posted() {
    let (mut host, control) = slow();
    let cid = host.submit(1, transfer(IoOpcode::Flush, 0, 512, 0));
    host.poll();
    let both = Access::READ | Access::WRITE;
    let cq = host.completion_queue(1) - RAM;
    host.endpoint.unmap(RAM, RAM_SIZE).unwrap();
    for (from, to) in [(0, cq), (cq + 4096, RAM_SIZE)] {
        let memory = Some(host.ram.handle(from));
        host.endpoint.map(RAM + from, to - from, both, memory).unwrap();
    }
    control.lock().unwrap().finish_one();
    host.poll();
    let delete = host.submit(0, Sqe { cdw10: 1, ..admin(AdminOpcode::DeleteSq) });
    host.poll();
    assert_eq!(host.completion(0), None, "the queue has a completion that waits");
    host.endpoint.map(RAM + cq, 4096, both, Some(host.ram.handle(cq))).unwrap();
    assert_eq!(host.wait(0, delete).status(), Status::SUCCESS);
    let cqe = host.completion(1).expect("a completion was lost with its queue");
    assert_eq!((cqe.cid, cqe.status()), (cid, Status::SUCCESS));
}

#[test]
fn a_reset_leaves_nothing_in_flight() {
    let (mut host, control) = slow();
    let buffer = host.scratch();
    host.submit(1, transfer(IoOpcode::Read, 0, 4096, buffer));
    host.poll();
    assert_eq!(control.lock().unwrap().held.len(), 1);
    host.write4(reg::CC, 0);
    assert!(control.lock().unwrap().held.is_empty() && !host.csts().rdy());
    host.poke(buffer, &[0; 4096]);
    host.enable();
    while host.poll() == Work::Done {}
    assert_eq!(host.peek(buffer, 4096), vec![0; 4096], "written after the reset");
}

#[test]
fn memory_is_not_touched_after_it_was_unmapped() {
    let (mut host, control) = slow();
    let buffer = host.scratch();
    host.submit(1, transfer(IoOpcode::Read, 0, 4096, buffer));
    host.poll();
    host.endpoint.unmap(RAM, RAM_SIZE).unwrap();
    assert!(control.lock().unwrap().held.is_empty(), "the read ended before the unmap");
    assert_eq!(host.peek(buffer, 4096), vec![0x11; 4096]);
    host.poke(buffer, &[0; 4096]);
    for _ in 0..10 {
        host.poll();
    }
    assert_eq!(host.peek(buffer, 4096), vec![0; 4096]);
}

#[test]
fn queues_out_of_reach_are_fatal_after_a_while_and_not_before() {
    let (mut host, control) = slow();
    let buffer = host.scratch();
    let both = Access::READ | Access::WRITE;
    host.endpoint.unmap(RAM, RAM_SIZE).unwrap();
    host.submit(1, transfer(IoOpcode::Read, 0, 512, buffer));
    let Work::Asleep(Some(deadline)) = host.poll() else { panic!("nobody will look again") };
    assert!(!host.csts().cfs());
    // Back in time: nothing happened.
    host.endpoint.map(RAM, RAM_SIZE, both, Some(host.ram.handle(0))).unwrap();
    assert_eq!(host.poll(), Work::Done);
    control.lock().unwrap().finish_one();
    assert_eq!(host.poll(), Work::Done);
    assert!(host.completion(1).is_some());
    // Gone for good.
    host.endpoint.unmap(RAM, RAM_SIZE).unwrap();
    host.submit(1, transfer(IoOpcode::Read, 0, 512, buffer));
    host.now = deadline;
    host.poll();
    host.now += 1_000_000_000;
    host.poll();
    assert!(host.csts().cfs());
}

#[test]
fn a_completion_queue_never_overflows() {
    let (mut host, control) = slow();
    let buffer = host.scratch();
    // Fifteen commands are in flight; the queue has fifteen entries for them and no more.
    for lba in 0..15 {
        host.submit(1, transfer(IoOpcode::Read, lba, 512, buffer));
    }
    host.poll();
    assert_eq!(control.lock().unwrap().held.len(), 15);
    host.submit(1, transfer(IoOpcode::Read, 15, 512, buffer));
    host.poll();
    assert_eq!(control.lock().unwrap().held.len(), 15, "no entry is free for its completion");
    for _ in 0..15 {
        control.lock().unwrap().finish_one();
    }
    host.poll();
    assert!(host.completion(1).is_some());
    host.poll();
    assert_eq!(control.lock().unwrap().held.len(), 1, "an entry is free now");
}

#[test]
fn media_errors_are_statuses() {
    let (mut host, control) = slow();
    for (error, opcode, status) in [
        (MediaError::Read, IoOpcode::Read, Status::UNRECOVERED_READ),
        (MediaError::Write, IoOpcode::Write, Status::WRITE_FAULT),
        (MediaError::NoSpace, IoOpcode::Write, Status::CAPACITY_EXCEEDED),
        (MediaError::ReadOnly, IoOpcode::Write, Status::WRITE_PROTECTED),
        (MediaError::Buffer, IoOpcode::Read, Status::DATA_TRANSFER_ERROR),
        (MediaError::Read, IoOpcode::Compare, Status::UNRECOVERED_READ),
        (MediaError::Read, IoOpcode::Verify, Status::UNRECOVERED_READ),
        (MediaError::NoSpace, IoOpcode::WriteZeroes, Status::CAPACITY_EXCEEDED),
        (MediaError::Write, IoOpcode::Flush, Status::WRITE_FAULT),
    ] {
        control.lock().unwrap().fail_with = Some(error);
        let buffer = host.scratch();
        let cid = host.submit(1, transfer(opcode, 0, 512, buffer));
        host.poll();
        control.lock().unwrap().finish_one();
        assert_eq!(host.wait(1, cid).status().code(), status, "{opcode:?}");
    }
}

#[test]
fn force_unit_access_flushes_where_the_backing_cannot() {
    let (mut host, control) = slow();
    let buffer = host.scratch();
    for opcode in [IoOpcode::Read, IoOpcode::WriteZeroes] {
        let flushes = control.lock().unwrap().flushes;
        let mut sqe = transfer(opcode, 0, 512, buffer);
        sqe.cdw12 |= 1 << 30;
        let cid = host.submit(1, sqe);
        host.poll();
        control.lock().unwrap().finish_one();
        host.poll();
        assert_eq!(host.completion(1), None, "{opcode:?} completed before the flush");
        control.lock().unwrap().finish_one();
        assert_eq!(host.wait(1, cid).status(), Status::SUCCESS);
        assert_eq!(control.lock().unwrap().flushes, flushes + 1);
    }
    // A write is made durable by itself, by FUA or with the cache turned off.
    let mut fua = transfer(IoOpcode::Write, 0, 512, buffer);
    fua.cdw12 |= 1 << 30;
    let mut set = admin(AdminOpcode::SetFeatures);
    set.cdw10 = 6;
    for (sqe, cache, expected) in [
        (transfer(IoOpcode::Write, 0, 512, buffer), 1, false),
        (fua, 1, true),
        (transfer(IoOpcode::Write, 0, 512, buffer), 0, true),
    ] {
        let change = host.submit(0, Sqe { cdw11: cache, ..set });
        host.poll();
        if cache == 0 {
            assert_eq!(host.completion(0), None, "what the cache holds is not flushed");
            control.lock().unwrap().finish_one();
        }
        assert_eq!(host.wait(0, change).status(), Status::SUCCESS);
        let cid = host.submit(1, sqe);
        host.poll();
        let durable = match control.lock().unwrap().held.front() {
            Some((_, MediumRequest::Write { durable, .. })) => *durable,
            other => panic!("{other:?}"),
        };
        assert_eq!(durable, expected);
        control.lock().unwrap().finish_one();
        host.wait(1, cid);
    }
}

/// What is written while the cache is turned off, before or after its flush begins, is durable when both are answered.
#[test]
fn nothing_is_left_in_a_cache_that_is_turned_off() {
    let (mut host, control) = slow();
    let buffer = host.scratch();
    let written = [IoOpcode::Write, IoOpcode::WriteZeroes].map(|opcode| {
        let cid = host.submit(1, transfer(opcode, 0, 512, buffer));
        host.poll();
        cid
    });
    let mut off = admin(AdminOpcode::SetFeatures);
    off.cdw10 = fid::VOLATILE_WRITE_CACHE.into();
    let off = host.submit(0, off);
    host.poll();
    let late = host.submit(1, transfer(IoOpcode::Write, 1, 512, buffer));
    host.poll();
    let last = control.lock().unwrap().held.pop_back();
    assert!(
        matches!(last, Some((_, MediumRequest::Write { durable: true, .. }))),
        "it comes into the cache behind the flush: {last:?}"
    );
    control.lock().unwrap().held.extend(last);
    // The flush first: those that were under way have it behind them.
    let flush = control.lock().unwrap().held.remove(2);
    control.lock().unwrap().held.push_front(flush.unwrap());
    control.lock().unwrap().finish_one();
    assert_eq!(host.wait(0, off).status(), Status::SUCCESS);
    for cid in written {
        let flushes = control.lock().unwrap().flushes;
        control.lock().unwrap().finish_one();
        host.poll();
        assert_eq!(host.completion(1), None, "acknowledged, and in the cache");
        let flush = control.lock().unwrap().held.pop_back();
        control.lock().unwrap().held.push_front(flush.unwrap());
        control.lock().unwrap().finish_one();
        assert_eq!(host.wait(1, cid).status(), Status::SUCCESS);
        assert_eq!(control.lock().unwrap().flushes, flushes + 1);
    }
    control.lock().unwrap().finish_one();
    assert_eq!(host.wait(1, late).status(), Status::SUCCESS);
}

/// Whichever queue a poll begins with, and for as long as ranges are made zeroes.
#[test]
fn many_long_ranges_keep_no_other_queue_waiting() {
    let (mut host, control) = slow();
    host.create_pair(2, ENTRIES);
    host.create_pair(3, 2 * WEIGHT_LIMIT as u16);
    let zeroes = transfer(IoOpcode::WriteZeroes, 0, 512, 0);
    let many: Vec<u16> = (1..2 * WEIGHT_LIMIT).map(|_| host.submit(3, zeroes)).collect();
    while host.poll() == Work::Done {}
    let held = |control: &Arc<Mutex<BackgroundControl>>| control.lock().unwrap().held.len();
    assert_eq!(held(&control), ZEROING_LIMIT, "half of the places are for others");
    let asked = Sqe { cdw10: fid::VOLATILE_WRITE_CACHE.into(), ..admin(AdminOpcode::GetFeatures) };
    for nth in 1..usize::from(ENTRIES) {
        host.submit(2, transfer(IoOpcode::Flush, 0, 512, 0));
        let asked = host.submit(0, asked);
        host.poll();
        assert_eq!(
            held(&control),
            ZEROING_LIMIT + nth,
            "a flush waits for zeroes of another queue"
        );
        assert_eq!(host.completion(0).map(|answer| answer.cid), Some(asked));
    }
    // One that ends makes room for the next.
    let mut answered = 0;
    while answered < many.len() {
        control.lock().unwrap().finish_one();
        host.poll();
        while host.completion(3).is_some() {
            answered += 1;
        }
    }
}

/// Whichever of them is polled first; one that cannot continue keeps the others from nothing.
#[test]
fn queues_with_many_long_ranges_take_turns() {
    let (mut host, control) = slow();
    let zeroes = transfer(IoOpcode::WriteZeroes, 0, 512, 0);
    let queues = [2, 3, 4];
    for qid in queues {
        host.create_pair(qid, WEIGHT_LIMIT as u16);
        for _ in 1..WEIGHT_LIMIT {
            host.submit(qid, zeroes);
        }
    }
    while host.poll() == Work::Done {}
    assert_eq!(control.lock().unwrap().held.len(), ZEROING_LIMIT);
    let finish = |host: &mut TestHost, answered: &mut [usize; 3]| {
        control.lock().unwrap().finish_one();
        host.poll();
        for (qid, answered) in queues.iter().zip(answered) {
            while host.completion(*qid).is_some() {
                *answered += 1;
            }
        }
    };
    let mut answered = [0; 3];
    (0..ZEROING_LIMIT).for_each(|_| finish(&mut host, &mut answered));
    let mut answered = [0; 3];
    (0..ZEROING_LIMIT).for_each(|_| finish(&mut host, &mut answered));
    let (least, most) = (answered.iter().min().unwrap(), answered.iter().max().unwrap());
    assert!(most - least <= 1, "{answered:?} in turn");
    // The one whose turn it would be is deleted.
    let delete = Sqe { cdw10: 3, ..admin(AdminOpcode::DeleteSq) };
    host.submit(0, delete);
    host.poll();
    let mut answered = [0; 3];
    (0..ZEROING_LIMIT).for_each(|_| finish(&mut host, &mut answered));
    let mut answered = [0; 3];
    (0..ZEROING_LIMIT / 2).for_each(|_| finish(&mut host, &mut answered));
    assert_eq!(answered, [ZEROING_LIMIT / 4, 0, ZEROING_LIMIT / 4]);
}

#[test]
fn a_shutdown_waits_for_its_flush() {
    let (mut host, control) = slow();
    let cc = Cc::from(host.read4(reg::CC));
    host.write4(reg::CC, cc.with_shn(1).into());
    assert_eq!(host.csts().shst(), 1, "occurring");
    control.lock().unwrap().finish_one();
    host.poll();
    assert_eq!(host.csts().shst(), 2, "complete");
}

#[test]
fn a_drive_enabled_before_it_may_master_the_bus_works_once_it_may() {
    let (mut host, _control) = slow();
    host.write4(reg::CC, 0);
    host.command_register(0b010);
    host.restart(RAM);
    for _ in 0..3 {
        host.now += 1_000_000_000;
        host.poll();
    }
    assert!(!host.csts().cfs(), "nobody asked for anything yet");
    host.command_register(0b110);
    host.create_pair(1, ENTRIES);
}

#[test]
fn a_controller_reset_clears_the_interrupt_mask() {
    let (mut host, _control) = slow();
    host.write4(reg::INTMS, 0b101);
    assert_eq!(host.read4(reg::INTMC), 0b101);
    host.write4(reg::CC, 0);
    assert_eq!(host.read4(reg::INTMS), 0);
}

#[test]
fn a_shutdown_that_cannot_flush_is_fatal_and_never_complete() {
    let (mut host, control) = slow();
    control.lock().unwrap().fail_with = Some(MediaError::NotDurable);
    let cc = Cc::from(host.read4(reg::CC));
    host.write4(reg::CC, cc.with_shn(1).into());
    control.lock().unwrap().finish_one();
    host.poll();
    assert!(host.csts().cfs());
    assert_eq!(host.csts().shst(), 1, "occurring for ever");
}

#[test]
fn a_reset_drops_the_rest_of_a_long_command() {
    let (mut host, control) = slow();
    let ranges = host.scratch();
    for at in 0..4u64 {
        let range = [0u32.to_le_bytes(), 8u32.to_le_bytes()].concat();
        host.poke(ranges + at * 16, &[&range[..], &(at * 8).to_le_bytes()].concat());
    }
    let mut deallocate = transfer(IoOpcode::DatasetManagement, 0, 512, ranges);
    (deallocate.cdw10, deallocate.cdw11) = (3, 1 << 2);
    host.submit(1, deallocate);
    host.poll();
    control.lock().unwrap().finish_one();
    host.poll();
    assert_eq!(control.lock().unwrap().held.len(), 1, "the second range of four");
    // Unmapping waits for nothing: zeroing uses no memory of the host.
    host.endpoint.unmap(RAM, RAM_SIZE).unwrap();
    assert_eq!(control.lock().unwrap().held.len(), 1);
    host.endpoint.reset();
    let control = control.lock().unwrap();
    assert!(control.held.is_empty() && control.data[16 * 512..].iter().all(|byte| *byte == 0x11));
}
