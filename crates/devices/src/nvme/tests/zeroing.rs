//! Long ranges of a drive in memory that are made zeroes, beside other commands.

use rackbus_pci::{FunctionState, Work};
use rackbus_spec::nvme::data::DsmRange;
use zerocopy::IntoBytes;

use super::super::backing::parts::ZERO_PIECE;
use super::*;

const BLOCK: u64 = 512;
/// Bytes of the range, which begins and ends within a piece.
const LENGTH: u64 = 8 * ZERO_PIECE;
const FIRST: u64 = 7;
/// How far apart blocks are that hold something.
const STEP: u64 = 64 << 10;

/// The blocks that are looked at: some of the range, its first and its last.
fn blocks() -> impl Iterator<Item = u64> {
    let end = FIRST + LENGTH / BLOCK;
    (FIRST..end).step_by((STEP / BLOCK) as usize).chain([end - 1])
}

/// A drive with two queues, whose range, and the blocks before and behind it, hold something.
fn filled() -> TestHost {
    let mut host = TestHost::with_memory(LENGTH + ZERO_PIECE);
    host.create_pair(2, ENTRIES);
    let around = [FIRST - 1, FIRST + LENGTH / BLOCK];
    for block in blocks().chain(around) {
        assert_eq!(host.write_blocks(block, &[block as u8 | 1; BLOCK as usize]), Status::SUCCESS);
    }
    host
}

/// Whether a block holds what was written to it.
fn is_kept(host: &mut TestHost, block: u64) -> bool {
    host.read_blocks(block, BLOCK as usize) == [block as u8 | 1; BLOCK as usize]
}

/// Begins to make the range zeroes, by queue 1.
fn begin(host: &mut TestHost) -> u16 {
    host.submit(1, transfer(IoOpcode::WriteZeroes, FIRST, LENGTH as usize, 0))
}

#[test]
fn commands_of_other_queues_are_answered_before_a_long_range_is_zeroes() {
    let mut host = filled();
    let zeroes = begin(&mut host);
    assert_eq!(host.poll(), Work::Done);
    let mut between = 0;
    let buffer = host.scratch();
    while host.completion(1).is_none() {
        for opcode in [IoOpcode::Read, IoOpcode::Flush] {
            let other = host.submit(2, transfer(opcode, FIRST - 1, BLOCK as usize, buffer));
            host.poll();
            let answer = host.completion(2).expect("it waits for the zeroes");
            assert_eq!((answer.cid, answer.status()), (other, Status::SUCCESS));
            between += 1;
        }
        assert!(between <= 20, "command {zeroes} is never answered");
    }
    assert!(between >= 8, "{between} commands were answered between");
}

/// One that counted as idle would have its engine believe that somebody else has the processor.
#[test]
fn a_poll_that_does_a_piece_is_work() {
    let mut host = filled();
    begin(&mut host);
    let mut polls = 0;
    while host.completion(1).is_none() {
        assert_eq!(host.poll(), Work::Done);
        polls += 1;
    }
    assert!(polls >= 8, "{polls} polls");
}

#[test]
fn a_long_range_is_all_zeroes_when_it_is_answered_and_nothing_else_is() {
    let mut host = filled();
    let zeroes = begin(&mut host);
    assert_eq!(host.wait(1, zeroes).status(), Status::SUCCESS);
    for block in blocks() {
        assert_eq!(host.read_blocks(block, BLOCK as usize), [0; BLOCK as usize], "block {block}");
    }
    for around in [FIRST - 1, FIRST + LENGTH / BLOCK] {
        assert!(is_kept(&mut host, around), "block {around}");
    }
}

#[test]
fn several_long_ranges_are_zeroes_together_with_what_is_durable_and_the_engine_does_not_sleep() {
    let mut host = filled();
    let half = (LENGTH / 2 / BLOCK) * BLOCK;
    let mut sqe = transfer(IoOpcode::WriteZeroes, FIRST, half as usize, 0);
    sqe.cdw12 |= 1 << 30;
    let first = host.submit(1, sqe);
    let second =
        host.submit(2, transfer(IoOpcode::WriteZeroes, FIRST + half / BLOCK, half as usize, 0));
    host.poll();
    assert!(!host.endpoint.park(), "nobody would do the rest");
    assert_eq!(host.wait(1, first).status(), Status::SUCCESS);
    assert_eq!(host.wait(2, second).status(), Status::SUCCESS);
    assert!(blocks().all(|block| !is_kept(&mut host, block)));
    host.poll();
    assert!(host.endpoint.park(), "nothing is left to do");
}

#[test]
fn a_reset_gives_up_the_rest_of_a_long_range() {
    for by_register in [true, false] {
        let mut host = filled();
        begin(&mut host);
        host.poll();
        host.poll();
        match by_register {
            true => host.write4(reg::CC, 0),
            false => {
                host.endpoint.reset();
                host.command_register(0b110);
            }
        }
        host.restart(RAM);
        host.create_pair(1, ENTRIES);
        assert_ne!(host.poll(), Work::Done);
        assert_eq!(host.completion(1), None, "a command of before the reset is answered");
        let last = FIRST + LENGTH / BLOCK - 1;
        assert!(!is_kept(&mut host, FIRST) && is_kept(&mut host, last));
    }
}

/// A restart in place: what the old process had of the range is done again by the new one.
#[test]
fn another_process_finishes_a_long_range_and_answers_it_once() {
    let mut host = filled();
    let zeroes = begin(&mut host);
    host.poll();
    host.poll();
    let saved = host.endpoint.save().unwrap();
    let state = FunctionState::from_bytes(&saved.state.to_bytes().unwrap()).unwrap();
    let next = Nvme::resume(&NvmeConfig::memory(LENGTH + ZERO_PIECE, "TEST"), saved.medium);
    host.endpoint = Endpoint::new(Box::new(next.unwrap()));
    host.endpoint.restore(&state, saved.descriptors).unwrap();
    let last = FIRST + LENGTH / BLOCK - 1;
    assert!(is_kept(&mut host, last), "it was done at once");
    assert_eq!(host.wait(1, zeroes).status(), Status::SUCCESS);
    for block in blocks() {
        assert!(!is_kept(&mut host, block), "block {block}");
    }
    host.poll();
    assert_eq!(host.completion(1), None, "it is answered twice");
}

/// The lease is revoked, or returned: its next user's data is not made zeroes for the one before.
#[test]
fn the_end_of_a_lease_gives_up_the_rest_of_a_long_range() {
    let mut host = filled();
    begin(&mut host);
    host.poll();
    host.poll();
    host.endpoint.scrub();
    let ram = SharedMemory::create("next", RAM_SIZE).unwrap();
    let mut next = TestHost::with_endpoint(host.endpoint, ram);
    next.enable();
    next.create_pair(1, ENTRIES);
    let last = FIRST + LENGTH / BLOCK - 1;
    assert_eq!(next.write_blocks(last, &[last as u8 | 1; BLOCK as usize]), Status::SUCCESS);
    for _ in 0..20 {
        next.poll();
    }
    assert!(is_kept(&mut next, last));
    assert_eq!(next.completion(1), None, "a command of the user before is answered");
}

#[test]
fn a_shutdown_waits_until_a_long_range_is_zeroes() {
    let mut host = filled();
    begin(&mut host);
    host.poll();
    let cc = Cc::from(host.read4(reg::CC));
    host.write4(reg::CC, cc.with_shn(1).into());
    assert_eq!(host.csts().shst(), 1, "occurring");
    let mut polls = 0;
    while host.csts().shst() == 1 {
        assert_ne!(host.poll(), Work::Asleep(None), "nobody will look again");
        polls += 1;
        assert!(polls < 100, "the shutdown is never complete");
    }
    assert!(polls > 1);
    assert_eq!(host.completion(1).map(|answer| answer.status()), Some(Status::SUCCESS));
}

#[test]
fn what_was_never_written_is_given_back_without_a_look_at_each_piece() {
    let size = 4096 * ZERO_PIECE;
    let mut host = TestHost::with_memory(size);
    for block in [0, size / 2 / BLOCK] {
        assert_eq!(host.write_blocks(block, &[1; BLOCK as usize]), Status::SUCCESS);
    }
    let ranges = host.scratch();
    let range = DsmRange { attributes: 0, nlb: (size / BLOCK) as u32, slba: 0 };
    host.poke(ranges, range.as_bytes());
    let mut deallocate = transfer(IoOpcode::DatasetManagement, 0, BLOCK as usize, ranges);
    (deallocate.cdw10, deallocate.cdw11) = (0, 1 << 2);
    host.submit(1, deallocate);
    let polls = (0..10).take_while(|_| {
        host.poll();
        host.completion(1).is_none()
    });
    assert!(polls.count() < 10);
    assert_eq!(host.read_blocks(size / 2 / BLOCK, BLOCK as usize), [0; BLOCK as usize]);
}
