//! Commands made of the input: any opcode, any pointer to data.

use rackbus_spec::nvme::Sqe;

use super::{LISTS, NvmeDriver, PAGE, at};
use crate::input::Input;

pub(super) fn command(opcode: u8) -> Sqe {
    let mut sqe = Sqe { nsid: 1, ..Sqe::default() };
    sqe.cdw0.set_opcode(opcode);
    sqe
}

/// An address: mostly in the driver's memory, on and off borders.
pub(super) fn address(input: &mut Input<'_>) -> u64 {
    const OFFSETS: [u64; 8] = [0, 0, 4, 8, 512, 2048, 4088, 4092];
    let page = input.u8();
    match u64::from(page) {
        page @ 0..=63 => at(page),
        page @ 64..=127 => at(page - 64) + OFFSETS[usize::from(input.u8() & 7)],
        page @ 128..=191 => at(page - 128) + u64::from(input.u16() & 0xfff),
        _ => input.u64(),
    }
}

/// Puts a list of PRP entries into memory; its address.
pub(super) fn prp_list(driver: &NvmeDriver, input: &mut Input<'_>) -> u64 {
    let page = LISTS + u64::from(input.u8() % 8);
    let (first, count) = (u64::from(input.u16() & 511), u64::from(input.u16() % 600));
    let (start, step, last) = (address(input), u64::from(input.u8() % 3), address(input));
    // Entries that follow each other as a driver's do; the last may lead to another list.
    for nth in 0..count {
        let entry =
            if nth + 1 == count { last } else { start.wrapping_add(nth % 24 * step * PAGE) };
        let place = (first + nth) * 8;
        if place >= 8 * PAGE {
            break;
        }
        driver.poke(at(page) + place, &entry.to_le_bytes());
    }
    at(page) + first * 8
}

/// Puts SGL descriptors into memory: a segment. Its address.
pub(super) fn sgl_segment(driver: &NvmeDriver, input: &mut Input<'_>) -> u64 {
    let page = LISTS + u64::from(input.u8() % 8);
    let first = u64::from(input.u8()) * 16;
    for nth in 0..u64::from(input.u8() % 40) {
        let [low, high] = sgl_descriptor(input);
        driver.poke(at(page) + first + nth * 16, &[low.to_le_bytes(), high.to_le_bytes()].concat());
    }
    at(page) + first
}

pub(super) fn sgl_descriptor(input: &mut Input<'_>) -> [u64; 2] {
    let (kind, address) = (input.u8(), address(input));
    let length = match input.u8() {
        short @ 0..=127 => u64::from(short) * 16,
        blocks @ 128..=239 => u64::from(blocks - 127) * 512,
        _ => u64::from(input.u32()),
    };
    // Type above, subtype below, as the last byte of sixteen.
    let kind = match kind {
        0..=5 => u64::from(kind) << 4,
        other => other.into(),
    };
    [address, kind << 56 | length]
}

pub(super) fn data_pointer(driver: &NvmeDriver, input: &mut Input<'_>, sqe: &mut Sqe) {
    match input.u8() % 8 {
        0 | 1 => sqe.dptr = [address(input), address(input)],
        2 | 3 => sqe.dptr = [address(input), prp_list(driver, input)],
        4 => {
            sqe.cdw0.set_psdt(1);
            sqe.dptr = sgl_descriptor(input);
        }
        5 | 6 => {
            let segment = sgl_segment(driver, input);
            let length = u64::from(input.u8()) * 16;
            let kind = if input.u8() & 1 == 0 { 0x30 } else { 0x20 };
            sqe.cdw0.set_psdt(1 + input.u8() % 2);
            sqe.dptr = [segment, kind << 56 | length];
        }
        _ => {
            sqe.cdw0.set_psdt(input.u8() & 3);
            sqe.dptr = [input.u64(), input.u64()];
        }
    }
}

pub(super) fn any_command(driver: &NvmeDriver, input: &mut Input<'_>, qid: u16) -> Sqe {
    const ADMIN: [u8; 12] = [0, 1, 2, 4, 5, 6, 8, 9, 0xa, 0xc, 0x7c, 0x80];
    const IO: [u8; 8] = [0, 1, 2, 5, 8, 9, 0xc, 4];
    let (choice, flags) = (input.u8(), input.u8());
    let opcode = match (qid, choice) {
        (_, 200..) => choice,
        (0, _) => ADMIN[usize::from(choice) % ADMIN.len()],
        _ => IO[usize::from(choice) % IO.len()],
    };
    let mut sqe = command(opcode);
    sqe.nsid = [1, 1, 1, 0, u32::MAX, 2, 1, 1][usize::from(flags & 7)];
    sqe.cdw0.set_fuse(if flags & 0xc0 == 0xc0 { flags >> 3 & 3 } else { 0 });
    data_pointer(driver, input, &mut sqe);
    if flags & 8 != 0 {
        sqe.mptr = address(input);
    }
    let slba = input.number();
    (sqe.cdw10, sqe.cdw11) = (slba as u32, (slba >> 32) as u32);
    if qid == 0 {
        // Two numbers of 16 bits each, mostly small.
        sqe.cdw10 |= (input.number() as u32) << 16;
        sqe.cdw11 |= input.number() as u32 | (input.number() as u32) << 16;
    }
    sqe.cdw12 = input.number() as u32 | u32::from(flags & 0x30) << 26;
    sqe.cdw13 = input.number() as u32;
    sqe
}
