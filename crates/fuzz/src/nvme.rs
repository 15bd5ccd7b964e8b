//! A driver that does anything it can to a drive: commands with PRP lists and SGL segments in
//! memory, several queues, shadow doorbells, registers, resets, memory that goes and comes.
//!
//! The drive may reach a part of the driver's memory: what lies before and after must not change,
//! nor what it may only read. What is unmapped does not change either, until it is mapped again.
//! And whatever was done, the next driver finds a drive that works. In between, another process may
//! go on with the drive.

mod commands;
mod driver;

use std::sync::atomic::Ordering;

use rackbus_pci::endpoint::FunctionRegion;
use rackbus_spec::nvme::registers::{self as reg};

use crate::input::Input;
use commands::any_command;
pub(crate) use driver::NvmeDriver;
use driver::at;

const PAGE: u64 = 4096;
/// Where the driver's memory is for the drive.
const RAM: u64 = 0x1_0000_0000;
const PAGES: u64 = 64;
/// Pages that the drive may read and write: in two maps side by side, so that accesses cross their
/// border. The pages before are not mapped; those behind may only be read.
const OPEN: [std::ops::Range<u64>; 2] = [4..32, 32..56];
const READ_ONLY: std::ops::Range<u64> = 56..60;
/// Pages by their use: queues, shadow doorbells and their event indices, lists, data.
const QUEUES: u64 = 4;
const SHADOW: u64 = 12;
const LISTS: u64 = 14;
const DATA: u64 = 22;
/// Bytes of the drive.
const DRIVE: u64 = 256 << 10;
/// I/O queue pairs that the driver makes.
const PAIRS: u16 = 3;
/// Deeds of one input.
const MOST: usize = 128;
const STRIDE: u8 = 4;

/// Puts a command into a queue, and may have it done.
pub(crate) fn ask(driver: &mut NvmeDriver, input: &mut Input<'_>, choice: u8) {
    let qid = u16::from(choice >> 4 & 3);
    let sqe = any_command(driver, input, qid);
    driver.enqueue(qid, sqe);
    if choice & 0x40 == 0 {
        driver.ring(qid);
    }
    if choice & 0x80 == 0 {
        driver.poll();
        driver.take_all(qid);
    }
}

fn deed(driver: &mut NvmeDriver, input: &mut Input<'_>) {
    let choice = input.u8();
    let qid = u16::from(choice >> 4 & 3);
    match choice & 15 {
        0..=6 => ask(driver, input, choice),
        7 => {
            let value = input.number() as u32;
            let register = match choice & 0x80 {
                0 => reg::sq_tail_doorbell(qid, STRIDE),
                _ => reg::cq_head_doorbell(qid, STRIDE),
            };
            driver.doorbell(register, value, choice & 0x40 != 0);
        }
        8 => {
            const REGISTERS: [u64; 8] = [
                reg::CC,
                reg::AQA,
                reg::ASQ,
                reg::ACQ,
                reg::INTMS,
                reg::INTMC,
                reg::NSSR,
                reg::CSTS,
            ];
            let offset = match input.u8() {
                known @ 0..=127 => {
                    REGISTERS[usize::from(known) % 8] + u64::from(known >> 6 & 1) * 4
                }
                _ => u64::from(input.u16()),
            };
            let value = input.u64().to_le_bytes();
            let length = 1 + usize::from(choice >> 4 & 7);
            // Beyond its end nothing is.
            let _ = driver.endpoint.write(FunctionRegion::Bar(0), offset, &value[..length]);
        }
        9 => {
            let mut data = [0; 64];
            let length = usize::from(input.u8() % 65);
            let offset = u64::from(input.u16() & 0x3fff);
            let _ = driver.endpoint.read(FunctionRegion::Bar(0), offset, &mut data[..length]);
        }
        10 => {
            let page = OPEN[0].start + u64::from(input.u8()) % (OPEN[1].end - OPEN[0].start);
            // While it is unmapped, only the drive could write there, and must not.
            if driver.unmapped.is_none() || page < OPEN[1].start {
                let offset = u64::from(input.u16() & 0xff8);
                driver.poke(at(page) + offset, &input.u64().to_le_bytes());
            }
        }
        11 if choice & 0x80 != 0 => driver.go_on_as_it_is(),
        11 => {
            driver.time.0.fetch_add(input.number() & 0xffff_ffff, Ordering::Relaxed);
            driver.poll();
        }
        12 if choice & 0x80 == 0 => {
            driver.endpoint.park();
        }
        12 | 13 if choice & 0x40 == 0 => driver.unmap(),
        12 | 13 => driver.remap(),
        14 => match qid {
            0 => driver.endpoint.reset(),
            1 => drop(driver.endpoint.write(
                FunctionRegion::Config,
                u64::from(input.u8()),
                input.short(),
            )),
            2 => driver.configure_shadow(),
            _ => driver.master(),
        },
        _ => driver.enable(2 + u16::from(choice >> 4) * 4, input.u8() & 1 != 0),
    }
}

/// Does what `data` says.
pub fn run(data: &[u8]) {
    let mut driver = driven(data);
    driver.poll();
    driver.succeed();
}

/// A driver that has done what `data` says.
pub(crate) fn driven(data: &[u8]) -> NvmeDriver {
    let mut input = Input::new(data);
    let shape = input.u8();
    let mut driver = NvmeDriver::new(if shape & 1 == 0 { 512 } else { 4096 });
    driver.enable(2 + u16::from(shape >> 4) * 4, shape & 2 != 0);
    if shape & 4 != 0 {
        driver.configure_shadow();
    }
    for _ in 0..MOST {
        if input.is_empty() {
            break;
        }
        deed(&mut driver, &mut input);
    }
    driver
}

/// Commands as drivers send them.
pub fn seeds() -> Vec<Vec<u8>> {
    const WRITE: u8 = 1;
    const READ: u8 = 2;
    let data = DATA as u8;
    // Queue 1: opcode, flags, two PRPs, block, what is for admin only left out, blocks, cdw13.
    let simple = |opcode| vec![0x10, opcode, 0, 0, data, data + 1, 3, 7, 0];
    let list = |opcode: u8| {
        [&[0x10, opcode, 0, 2, data][..], &[0, 0, 0, 40, 0, data + 1, 1, data + 3], &[0, 200, 0]]
            .concat()
    };
    let sgl = |opcode: u8| vec![0x20, opcode, 0, 4, 0, data, 136, 0, 8, 0];
    let segment = |opcode: u8| {
        let descriptors = [0, data, 132, 0, data + 2, 132, 1, 0, 129];
        let mut bytes = vec![0x10, opcode, 0, 5, 1, 0, 3];
        bytes.extend_from_slice(&descriptors);
        bytes.extend_from_slice(&[3, 0, 0, 0, 10, 0]);
        bytes
    };
    let admin = |opcode: u8, cdw10: u8| vec![0, opcode, 0, 0, data, data + 1, cdw10, 0, 0, 0, 0, 0];
    let all = |opcode| [simple(opcode), list(opcode), sgl(opcode), segment(opcode)].concat();
    let queries: Vec<u8> = (0..11).flat_map(|opcode| admin(opcode, 1)).collect();
    let memory =
        [vec![0x0d], simple(READ), vec![0x4d], vec![0x8b], simple(WRITE), vec![0x0e]].concat();
    [0x30, 0x31, 0x36, 0xf4]
        .into_iter()
        .flat_map(|shape| {
            let begin = |deeds: Vec<u8>| [vec![shape], deeds].concat();
            [
                begin([all(WRITE), all(READ), all(3), all(0)].concat()),
                begin([queries.clone(), memory.clone(), vec![0x3f, 0]].concat()),
                begin([all(4), all(5), all(6)].concat()),
            ]
        })
        .collect()
}
