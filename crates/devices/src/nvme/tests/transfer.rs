//! Data pointers against a naive walk: byte by byte, straight from the specification.

use proptest::prelude::*;
use rackbus_memory::{DmaSlice, DmaSpace, Lending};
use rackbus_spec::nvme::command::{Cdw0, PSDT_SGL_MPTR_BUFFER};
use rackbus_spec::nvme::data::{SglDescriptor, SglType};
use zerocopy::IntoBytes;

use super::super::transfer::{DataDirection, DataPointers};
use super::*;

const PAGE: u64 = 4096;
const PAGES: u64 = 512;

/// Host memory in two windows that adjoin in the middle.
struct Memory {
    dma: DmaSpace,
    ram: SharedMemory,
}

impl Memory {
    fn new() -> Memory {
        let ram = SharedMemory::create("transfer-test", PAGES * PAGE).unwrap();
        let mut dma = DmaSpace::new();
        dma.set_master(true);
        let both = Access::READ | Access::WRITE;
        let half = PAGES / 2 * PAGE;
        let lending = Lending::alone();
        for from in [0, half] {
            let loan = lending.lend(RAM + from, half, both, Some(ram.handle(from)));
            dma.map(loan.unwrap()).unwrap();
        }
        Memory { dma, ram }
    }

    fn poke(&self, address: u64, data: &[u8]) {
        self.ram.whole().part((address - RAM) as usize, data.len()).unwrap().copy_from(data);
    }

    /// Every byte differs from its neighbours and from its like in other pages.
    fn scramble(&self) {
        let bytes: Vec<u8> =
            (0..PAGES * PAGE).map(|i| (i.wrapping_mul(0x9e37_79b9) >> 13) as u8).collect();
        self.ram.whole().copy_from(&bytes);
    }

    fn bytes(&self) -> Vec<u8> {
        let mut out = vec![0; (PAGES * PAGE) as usize];
        self.ram.whole().copy_to(&mut out);
        out
    }
}

/// Gathers the bytes of a transfer.
fn gather(transfer: &DataPointers, dma: &DmaSpace) -> Vec<u8> {
    let mut out = Vec::new();
    let copied = transfer.with_slices(dma, |slices| {
        for slice in slices {
            let mut part = vec![0; slice.len()];
            slice.copy_to(&mut part);
            out.extend(part);
        }
    });
    copied.unwrap();
    out
}

/// Lays out a PRP list for `pages` from `list` on, with chains where a page ends, in pages that
/// `fresh` gives.
fn lay_out_list(memory: &Memory, mut list: u64, pages: &[u64], mut fresh: impl FnMut() -> u64) {
    let mut rest = pages;
    loop {
        let slots = ((PAGE - list % PAGE) / 8) as usize;
        let chained = rest.len() > slots;
        let here = if chained { slots - 1 } else { rest.len() };
        for (index, page) in rest[..here].iter().enumerate() {
            memory.poke(list + index as u64 * 8, &page.to_le_bytes());
        }
        if !chained {
            return;
        }
        let next = fresh();
        memory.poke(list + here as u64 * 8, &next.to_le_bytes());
        (list, rest) = (next, &rest[here..]);
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(96))]

    #[test]
    fn prps_lead_where_the_naive_walk_leads(
        order in Just((0..256u64).collect::<Vec<_>>()).prop_shuffle(),
        adjoining in any::<bool>(),
        offset in (0..1024u64).prop_map(|dword| dword * 4),
        length in 1usize..=(1 << 20),
        list_offset in prop_oneof![Just(0u64), Just(511), Just(510), 0..512u64],
    ) {
        let memory = Memory::new();
        memory.scramble();
        let order: Vec<u64> = if adjoining { (128..512).collect() } else { order };
        let page = |index: usize| RAM + order[index % order.len()] * PAGE;
        let count = (offset as usize + length).div_ceil(PAGE as usize).min(257);
        // Lists live in the last pages, which hold no data unless the pages adjoin.
        let mut next_list = RAM + 300 * PAGE;
        if adjoining { next_list = RAM; }
        let list = next_list + list_offset * 8;
        let mut sqe = Sqe { dptr: [page(0) + offset, 0], ..Sqe::default() };
        let pages: Vec<u64> = (1..count).map(page).collect();
        match pages.len() {
            0 => sqe.dptr[1] = 0xdead_beef,
            1 => sqe.dptr[1] = pages[0],
            _ => {
                sqe.dptr[1] = list;
                lay_out_list(&memory, list, &pages, || { next_list += PAGE; next_list });
            }
        }
        let length = length.min((257 * PAGE - offset) as usize);
        let content = memory.bytes();
        let expected: Vec<u8> = (0..length as u64).map(|at| {
            let from_first = offset + at;
            let page = page((from_first / PAGE) as usize);
            content[(page - RAM + from_first % PAGE) as usize]
        }).collect();
        let mut transfer = DataPointers::new(1 << 21).unwrap();
        transfer.parse(&memory.dma, &sqe, length, PAGE, true, DataDirection::FromHost).unwrap();
        prop_assert!(gather(&transfer, &memory.dma) == expected);
        let pinned: usize = transfer.pin(&memory.dma).unwrap().iter().map(|p| p.get().len()).sum();
        prop_assert_eq!(pinned, length);
    }

    #[test]
    fn sgls_lead_where_the_naive_walk_leads(
        pieces in prop::collection::vec((0..256 * PAGE, 0u32..9000, any::<bool>()), 1..60),
        cuts in prop::collection::vec(1usize..12, 1..20),
        to_host in any::<bool>(),
        surplus in 0usize..3000,
    ) {
        let memory = Memory::new();
        memory.scramble();
        let descriptors: Vec<SglDescriptor> = pieces.iter().map(|(at, length, bucket)| {
            let kind = if *bucket { SglType::BitBucket } else { SglType::DataBlock };
            SglDescriptor::new(kind, if *bucket { u64::MAX } else { RAM + at }, *length)
        }).collect();
        // What the descriptors describe, byte by byte: a place in memory, or nowhere.
        let mut places = Vec::new();
        for (at, length, bucket) in &pieces {
            for byte in 0..u64::from(*length) {
                match (*bucket, to_host) {
                    (false, _) => places.push(Some(at + byte)),
                    (true, true) => places.push(None),
                    (true, false) => {}
                }
            }
        }
        let length = places.len().saturating_sub(surplus).max(1);
        let sqe = Sqe {
            cdw0: Cdw0::new().with_psdt(PSDT_SGL_MPTR_BUFFER),
            dptr: lay_out_segments(&memory, &descriptors, &cuts),
            ..Sqe::default()
        };
        let mut transfer = DataPointers::new(1 << 20).unwrap();
        let direction = if to_host { DataDirection::ToHost } else { DataDirection::FromHost };
        let parsed = transfer.parse(&memory.dma, &sqe, length, PAGE, true, direction);
        if places.is_empty() {
            prop_assert_eq!(parsed, Err(Status::DATA_SGL_LENGTH_INVALID.do_not_retry()));
            return Ok(());
        }
        prop_assert_eq!(parsed, Ok(()));
        let mut content = memory.bytes();
        if !to_host {
            let expected: Vec<u8> = places[..length].iter()
                .map(|place| content[place.unwrap() as usize]).collect();
            prop_assert!(gather(&transfer, &memory.dma) == expected);
            return Ok(());
        }
        for (index, place) in places[..length].iter().enumerate() {
            if let Some(place) = place { content[*place as usize] = index as u8; }
        }
        let mut index = 0;
        let copied = transfer.with_slices(&memory.dma, |slices| for slice in slices {
            let part: Vec<u8> = (0..slice.len()).map(|at| (index + at) as u8).collect();
            slice.copy_from(&part);
            index += slice.len();
        });
        copied.unwrap();
        prop_assert_eq!(index, length);
        prop_assert!(memory.bytes() == content);
    }

    #[test]
    fn no_pointer_makes_the_parser_fail_other_than_by_a_status(
        dptr in any::<[u64; 2]>(),
        psdt in 0u8..4,
        length in 1usize..(1 << 20),
        seed in any::<u64>(),
    ) {
        let memory = Memory::new();
        // Lists and segments of arbitrary words, some of which point back into the memory.
        let words: Vec<u64> = (0..PAGES * PAGE / 8).scan(seed | 1, |state, _| {
            *state ^= *state << 13; *state ^= *state >> 7; *state ^= *state << 17;
            Some(if *state & 3 == 0 { *state } else { (RAM + *state % (PAGES * PAGE)) & !0xff })
        }).collect();
        memory.ram.whole().copy_from(words.as_bytes());
        let inside = [RAM + dptr[0] % (PAGES * PAGE), RAM + dptr[1] % (PAGES * PAGE)];
        let mut transfer = DataPointers::new(1 << 20).unwrap();
        for dptr in [dptr, inside, [inside[0] & !3, inside[1] & !7]] {
            let sqe = Sqe { cdw0: Cdw0::new().with_psdt(psdt), dptr, ..Sqe::default() };
            let parsed = transfer.parse(&memory.dma, &sqe, length, PAGE, true, DataDirection::ToHost);
            let total = |slices: &[DmaSlice<'_>]| slices.iter().map(DmaSlice::len).sum::<usize>();
            if parsed.is_ok() && let Ok(total) = transfer.with_slices(&memory.dma, total) {
                prop_assert_eq!(total, length);
            }
        }
    }
}

/// Lays descriptors out in segments of the given lengths; returns the command's descriptor.
fn lay_out_segments(memory: &Memory, descriptors: &[SglDescriptor], cuts: &[usize]) -> [u64; 2] {
    let mut segments: Vec<Vec<SglDescriptor>> = Vec::new();
    let (mut rest, mut cut) = (descriptors, cuts.iter().cycle());
    while !rest.is_empty() {
        let (segment, more) = rest.split_at((*cut.next().unwrap()).min(rest.len()));
        segments.push(segment.to_vec());
        rest = more;
    }
    // From the last segment back, each in a page of its own and not at its start.
    let mut pointer = None;
    for (index, segment) in segments.iter_mut().enumerate().rev() {
        let last = pointer.is_none();
        segment.extend(pointer);
        let at = RAM + (300 + index as u64) * PAGE + 64;
        memory.poke(at, segment.as_bytes());
        let kind = if last { SglType::LastSegment } else { SglType::Segment };
        pointer = Some(SglDescriptor::new(kind, at, segment.as_bytes().len() as u32));
    }
    zerocopy::transmute!(pointer.unwrap())
}

fn refused(memory: &Memory, psdt: u8, dptr: [u64; 2], length: usize) -> Status {
    let sqe = Sqe { cdw0: Cdw0::new().with_psdt(psdt), dptr, ..Sqe::default() };
    let mut transfer = DataPointers::new(1 << 20).unwrap();
    match transfer.parse(&memory.dma, &sqe, length, PAGE, true, DataDirection::ToHost) {
        Ok(()) => transfer.with_slices(&memory.dma, |_| {}).unwrap_err().code(),
        Err(status) => status.code(),
    }
}

#[test]
fn wrong_prps_have_their_status() {
    let memory = Memory::new();
    let list = RAM + 8 * PAGE;
    memory.poke(list, &(RAM + 5).to_le_bytes());
    let end = RAM + PAGES * PAGE;
    for (dptr, length, status) in [
        ([RAM + 2, 0], 512, Status::PRP_OFFSET_INVALID),
        ([RAM, RAM + 8], 8192, Status::PRP_OFFSET_INVALID),
        ([RAM, list + 4], 16384, Status::PRP_OFFSET_INVALID),
        ([RAM, list], 16384, Status::PRP_OFFSET_INVALID),
        ([RAM, 0x10], 16384, Status::DATA_TRANSFER_ERROR),
        ([RAM, u64::MAX - 7], 16384, Status::DATA_TRANSFER_ERROR),
        ([end, 0], 512, Status::DATA_TRANSFER_ERROR),
        ([!0xfff, 0], 4096, Status::DATA_TRANSFER_ERROR),
    ] {
        assert_eq!(refused(&memory, 0, dptr, length), status, "{dptr:x?}");
    }
    assert_eq!(refused(&memory, 3, [RAM, 0], 512), Status::INVALID_FIELD);
}

#[test]
fn wrong_sgls_have_their_status() {
    let memory = Memory::new();
    let at = RAM + PAGE;
    let point = |kind, address, length: usize| {
        zerocopy::transmute!(SglDescriptor::new(kind, address, length as u32))
    };
    let lay = |descriptors: &[SglDescriptor], last: bool| {
        memory.poke(at, descriptors.as_bytes());
        let kind = if last { SglType::LastSegment } else { SglType::Segment };
        point(kind, at, descriptors.as_bytes().len())
    };
    let data = |length| SglDescriptor::new(SglType::DataBlock, RAM, length);
    let check = |dptr, status| assert_eq!(refused(&memory, 1, dptr, 4096), status);
    check(point(SglType::DataBlock, RAM, 4095), Status::DATA_SGL_LENGTH_INVALID);
    check(point(SglType::DataBlock, 0, 4096), Status::DATA_TRANSFER_ERROR);
    check(point(SglType::DataBlock, u64::MAX - 5, 4096), Status::DATA_TRANSFER_ERROR);
    check([RAM, 0x4000_0000_0000_0000 | 4096], Status::SGL_TYPE_INVALID);
    check([RAM, 0x0100_0000_0000_0000 | 4096], Status::SGL_TYPE_INVALID);
    check(point(SglType::LastSegment, at, 0), Status::INVALID_SGL_SEGMENT);
    check(point(SglType::LastSegment, at, 24), Status::INVALID_SGL_SEGMENT);
    check(point(SglType::LastSegment, 0, 16), Status::DATA_TRANSFER_ERROR);
    check(lay(&[data(100)], true), Status::DATA_SGL_LENGTH_INVALID);
    check(lay(&[data(4096)], false), Status::INVALID_SGL_SEGMENT);
    let segment = SglDescriptor::new(SglType::Segment, at, 32);
    check(lay(&[segment, data(4096)], true), Status::INVALID_SGL_SEGMENT);
    // A segment that is its own successor.
    check(lay(&[data(0), segment], false), Status::INVALID_SGL_COUNT);
}
