//! A driver that does anything it can to a drive: commands with PRP lists and SGL segments in
//! memory, several queues, shadow doorbells, registers, resets, memory that goes and comes.
//!
//! The drive may reach a part of the driver's memory: what lies before and after must not change,
//! nor what it may only read. What is unmapped does not change either, until it is mapped again.
//! And whatever was done, the next driver finds a drive that works. In between, another process may
//! go on with the drive.

use std::sync::atomic::Ordering;

use rackbus_devices::nvme::{Nvme, NvmeConfig};
use rackbus_memory::{Access, SharedMemory};
use rackbus_pci::endpoint::{Clock, Region};
use rackbus_pci::{Endpoint, FunctionState, Saved, Work};
use rackbus_spec::nvme::registers::{self as reg, Aqa, Cc};
use rackbus_spec::nvme::{AdminOpcode, Cqe, IoOpcode, Sqe, Status};

use crate::input::Input;

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

/// Where the time stands.
#[derive(Debug, Clone, Default)]
struct Time(std::sync::Arc<std::sync::atomic::AtomicU64>);

impl Clock for Time {
    fn now_ns(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }

    fn ticks(&self) -> u64 {
        self.now_ns()
    }
}

pub(crate) struct Driver {
    pub(crate) endpoint: Endpoint,
    config: NvmeConfig,
    ram: SharedMemory,
    time: Time,
    /// Entries of each queue, and tails of submission queues.
    entries: u16,
    tails: [u16; PAIRS as usize + 1],
    shadow: bool,
    /// What unmapped memory held.
    unmapped: Option<Vec<u8>>,
    next_cid: u16,
}

fn at(page: u64) -> u64 {
    RAM + page * PAGE
}

impl Driver {
    pub(crate) fn new(block_size: u32) -> Driver {
        let config = NvmeConfig { block_size, ..NvmeConfig::memory(DRIVE, "FUZZ") };
        let nvme = Nvme::new(&config).expect("there is memory for it");
        let time = Time::default();
        let ram = SharedMemory::create("driver", PAGES * PAGE).expect("there is memory for it");
        for page in [0, 60, 61, 62, 63, READ_ONLY.start, READ_ONLY.end - 1] {
            ram.whole().part((page * PAGE) as usize, 4096).expect("it is inside").fill(0xc5);
        }
        let mut driver = Driver {
            endpoint: Endpoint::with_clock(Box::new(nvme), Box::new(time.clone())),
            config,
            ram,
            time,
            entries: 16,
            tails: [0; PAIRS as usize + 1],
            shadow: false,
            unmapped: None,
            next_cid: 0,
        };
        driver.map(&OPEN[0], true);
        driver.map(&OPEN[1], true);
        driver.map(&READ_ONLY, false);
        driver.master();
        driver
    }

    fn map(&mut self, pages: &std::ops::Range<u64>, writable: bool) {
        let access = if writable { Access::READ | Access::WRITE } else { Access::READ };
        let (length, offset) = ((pages.end - pages.start) * PAGE, pages.start * PAGE);
        let memory = Some(self.ram.handle(offset));
        self.endpoint.map(at(pages.start), length, access, memory).expect("nothing is there");
    }

    fn master(&mut self) {
        self.endpoint.write(Region::Config, 4, &6u16.to_le_bytes()).expect("it is inside");
    }

    fn write4(&mut self, offset: u64, value: u32) {
        self.endpoint.write(Region::Bar(0), offset, &value.to_le_bytes()).expect("it is inside");
    }

    fn poke(&self, address: u64, data: &[u8]) {
        if let Some(offset) = address.checked_sub(RAM).and_then(|at| usize::try_from(at).ok())
            && let Some(part) = self.ram.whole().part(offset, data.len())
        {
            part.copy_from(data);
        }
    }

    fn peek(&self, pages: std::ops::Range<u64>) -> Vec<u8> {
        let mut bytes = vec![0; ((pages.end - pages.start) * PAGE) as usize];
        let part = self.ram.whole().part((pages.start * PAGE) as usize, bytes.len());
        part.expect("it is inside").copy_to(&mut bytes);
        bytes
    }

    /// Another process goes on with the drive, as `state` says, with what was `saved` beside it. True
    /// when that could be.
    pub(crate) fn go_on(&mut self, state: &FunctionState, saved: Saved) -> bool {
        let nvme = Nvme::resume(&self.config, saved.medium).expect("it is the drive's memory");
        self.endpoint = Endpoint::with_clock(Box::new(nvme), Box::new(self.time.clone()));
        self.endpoint.restore(state, saved.descriptors).is_ok()
    }

    /// The same with what is saved now.
    pub(crate) fn go_on_as_it_is(&mut self) {
        let saved = self.endpoint.save().expect("it has not ended");
        let text = saved.state.to_bytes().expect("it can be written");
        let state = FunctionState::from_bytes(&text).expect("it was written here");
        assert!(self.go_on(&state, saved), "what was saved cannot be restored");
    }

    /// Lets the drive work until it has nothing to do, or long enough.
    pub(crate) fn poll(&mut self) {
        for _ in 0..32 {
            let now = self.time.0.fetch_add(1000, Ordering::Relaxed) + 1000;
            if self.endpoint.poll(now) != Work::Done {
                break;
            }
        }
    }

    /// Enables the controller and makes the queues.
    fn enable(&mut self, entries: u16, shared: bool) {
        self.write4(reg::CC, 0);
        self.poll();
        (self.entries, self.tails, self.shadow) = (entries, [0; PAIRS as usize + 1], false);
        let size = entries - 1;
        self.write4(reg::AQA, Aqa::new().with_asqs(size).with_acqs(size).into());
        for (register, page) in [(reg::ASQ, QUEUES), (reg::ACQ, QUEUES + 1)] {
            let address = at(page).to_le_bytes();
            self.endpoint.write(Region::Bar(0), register, &address).expect("it is inside");
        }
        self.write4(reg::CC, Cc::new().with_en(true).with_iosqes(6).with_iocqes(4).into());
        for qid in 1..=PAIRS {
            let page = QUEUES + 2 * u64::from(qid);
            let cqid = if shared { 1 } else { qid };
            let mut create = command(AdminOpcode::CreateCq as u8);
            create.cdw10 = u32::from(size) << 16 | u32::from(qid);
            create.cdw11 = u32::from(qid) << 16 | 0b11;
            create.dptr[0] = at(page + 1);
            self.submit(0, create);
            create.cdw0.set_opcode(AdminOpcode::CreateSq as u8);
            create.cdw11 = u32::from(cqid) << 16 | u32::from(qid & 3) << 1 | 1;
            create.dptr[0] = at(page);
            self.submit(0, create);
            self.poll();
            self.take_all(0);
        }
    }

    fn configure_shadow(&mut self) {
        let mut config = command(AdminOpcode::DoorbellBufferConfig as u8);
        config.dptr = [at(SHADOW), at(SHADOW + 1)];
        self.submit(0, config);
        self.poll();
        self.shadow = true;
    }

    /// Puts a command into a queue, without telling.
    fn enqueue(&mut self, qid: u16, mut sqe: Sqe) {
        self.next_cid = self.next_cid.wrapping_add(1);
        sqe.cdw0.set_cid(self.next_cid);
        let tail = &mut self.tails[usize::from(qid)];
        let page = QUEUES + 2 * u64::from(qid);
        let offset = page * PAGE + u64::from(*tail) * 64;
        self.ram.whole().write_obj(offset as usize, &sqe);
        *tail = (*tail + 1) % self.entries;
    }

    pub(crate) fn ring(&mut self, qid: u16) {
        let tail = u32::from(self.tails[usize::from(qid)]);
        self.doorbell(reg::sq_tail_doorbell(qid, STRIDE), tail, qid > 0 && self.shadow);
    }

    fn doorbell(&mut self, register: u64, value: u32, shadow: bool) {
        if shadow {
            let slot = SHADOW * PAGE + (register - reg::DOORBELLS);
            self.ram.whole().store_u32(slot as usize, value, Ordering::SeqCst);
        } else {
            self.write4(register, value);
        }
    }

    fn submit(&mut self, qid: u16, sqe: Sqe) {
        self.enqueue(qid, sqe);
        self.ring(qid);
    }

    /// Gives all entries of a completion queue back.
    fn take_all(&mut self, qid: u16) {
        // The drive's own tail is not known; the number of commands is.
        let head = u32::from(self.tails[usize::from(qid)]);
        let shadow = qid > 0 && self.shadow;
        self.doorbell(reg::cq_head_doorbell(qid, STRIDE), head, shadow);
    }

    /// The newest completion of the admin queue or queue 1.
    fn completion(&self, qid: u16) -> Option<Cqe> {
        let page = QUEUES + 2 * u64::from(qid) + 1;
        let last = (self.tails[usize::from(qid)] + self.entries - 1) % self.entries;
        self.ram.whole().read_obj((page * PAGE + u64::from(last) * 16) as usize)
    }

    /// What must hold whatever the driver did.
    fn check(&self) {
        for page in [0..1, 60..PAGES] {
            let bytes = self.peek(page.clone());
            assert!(bytes.iter().all(|byte| *byte == 0xc5), "{page:?} was written, not mapped");
        }
        for page in [READ_ONLY.start, READ_ONLY.end - 1] {
            let bytes = self.peek(page..page + 1);
            assert!(bytes.iter().all(|byte| *byte == 0xc5), "page {page} may only be read");
        }
    }

    fn unmap(&mut self) {
        if self.unmapped.is_none() {
            let length = (OPEN[1].end - OPEN[1].start) * PAGE;
            self.endpoint.unmap(at(OPEN[1].start), length).expect("it is mapped");
            self.unmapped = Some(self.peek(OPEN[1].clone()));
        }
    }

    fn remap(&mut self) {
        if let Some(before) = self.unmapped.take() {
            assert!(self.peek(OPEN[1].clone()) == before, "unmapped memory was written");
            self.map(&OPEN[1], true);
        }
    }

    /// The next driver: finds nothing of this one, and a drive that works.
    fn succeed(&mut self) {
        self.remap();
        self.check();
        self.serve_next();
    }

    /// The next driver, whatever this one could reach.
    pub(crate) fn serve_next(&mut self) {
        self.endpoint.scrub();
        assert_eq!(self.endpoint.unmap_all(), 0, "a scrubbed function has mappings");
        self.map(&OPEN[0], true);
        self.map(&OPEN[1], true);
        self.master();
        self.ram
            .whole()
            .part((QUEUES * PAGE) as usize, (8 * PAGE) as usize)
            .expect("inside")
            .fill(0);
        self.enable(16, false);
        let data: Vec<u8> = (0..PAGE).map(|byte| byte as u8 ^ 0x5a).collect();
        self.poke(at(DATA), &data);
        for (opcode, page) in [(IoOpcode::Write, DATA), (IoOpcode::Read, DATA + 12)] {
            let mut sqe = command(opcode as u8);
            sqe.dptr[0] = at(page);
            // One block, whatever its size.
            self.submit(1, sqe);
            self.poll();
            let done = self.completion(1).map(|cqe| (cqe.status(), cqe.cid));
            assert_eq!(
                done,
                Some((Status::SUCCESS, self.next_cid)),
                "the next driver's {opcode:?}"
            );
        }
        assert!(self.peek(DATA + 12..DATA + 13)[..512] == data[..512], "not what was written");
    }
}

fn command(opcode: u8) -> Sqe {
    let mut sqe = Sqe { nsid: 1, ..Sqe::default() };
    sqe.cdw0.set_opcode(opcode);
    sqe
}

/// An address: mostly in the driver's memory, on and off borders.
fn address(input: &mut Input<'_>) -> u64 {
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
fn prp_list(driver: &Driver, input: &mut Input<'_>) -> u64 {
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
fn sgl_segment(driver: &Driver, input: &mut Input<'_>) -> u64 {
    let page = LISTS + u64::from(input.u8() % 8);
    let first = u64::from(input.u8()) * 16;
    for nth in 0..u64::from(input.u8() % 40) {
        let [low, high] = sgl_descriptor(input);
        driver.poke(at(page) + first + nth * 16, &[low.to_le_bytes(), high.to_le_bytes()].concat());
    }
    at(page) + first
}

fn sgl_descriptor(input: &mut Input<'_>) -> [u64; 2] {
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

fn data_pointer(driver: &Driver, input: &mut Input<'_>, sqe: &mut Sqe) {
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

fn any_command(driver: &Driver, input: &mut Input<'_>, qid: u16) -> Sqe {
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

fn deed(driver: &mut Driver, input: &mut Input<'_>) {
    let choice = input.u8();
    let qid = u16::from(choice >> 4 & 3);
    match choice & 15 {
        0..=6 => {
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
            let _ = driver.endpoint.write(Region::Bar(0), offset, &value[..length]);
        }
        9 => {
            let mut data = [0; 64];
            let length = usize::from(input.u8() % 65);
            let offset = u64::from(input.u16() & 0x3fff);
            let _ = driver.endpoint.read(Region::Bar(0), offset, &mut data[..length]);
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
            1 => drop(driver.endpoint.write(Region::Config, u64::from(input.u8()), input.short())),
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
pub(crate) fn driven(data: &[u8]) -> Driver {
    let mut input = Input::new(data);
    let shape = input.u8();
    let mut driver = Driver::new(if shape & 1 == 0 { 512 } else { 4096 });
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
