//! A driver of the controller, which checks what it is told.

use std::sync::atomic::Ordering;

use rackbus_devices::nvme::{Nvme, NvmeConfig};
use rackbus_memory::{Access, SharedMemory};
use rackbus_pci::endpoint::FunctionRegion;
use rackbus_pci::{Endpoint, Function, FunctionState, Saved, Work};
use rackbus_spec::nvme::registers::{self as reg, Aqa, Cc};
use rackbus_spec::nvme::{AdminOpcode, Cqe, IoOpcode, Sqe, Status};

use super::commands::command;
use super::{DATA, DRIVE, OPEN, PAGE, PAGES, PAIRS, QUEUES, RAM, READ_ONLY, SHADOW, STRIDE};
use crate::clock::ManualClock;

pub(crate) struct NvmeDriver {
    pub(crate) endpoint: Endpoint,
    config: NvmeConfig,
    ram: SharedMemory,
    pub(super) time: ManualClock,
    /// Entries of each queue, and tails of submission queues.
    pub(super) entries: u16,
    tails: [u16; PAIRS as usize + 1],
    pub(super) shadow: bool,
    /// What unmapped memory held.
    pub(super) unmapped: Option<Vec<u8>>,
    next_cid: u16,
}

pub(super) fn at(page: u64) -> u64 {
    RAM + page * PAGE
}

impl NvmeDriver {
    pub(crate) fn new(block_size: u32) -> NvmeDriver {
        let config = NvmeConfig { block_size, ..NvmeConfig::memory(DRIVE, "FUZZ") };
        let nvme = Nvme::new(&config).expect("there is memory for it");
        NvmeDriver::of(Box::new(nvme), config)
    }

    /// Of a drive that `config` describes. Where that is no drive in memory, nobody can [go on](NvmeDriver::go_on) with it.
    pub(crate) fn of(nvme: Box<dyn Function>, config: NvmeConfig) -> NvmeDriver {
        let time = ManualClock::default();
        let ram = SharedMemory::create("driver", PAGES * PAGE).expect("there is memory for it");
        for page in [0, 60, 61, 62, 63, READ_ONLY.start, READ_ONLY.end - 1] {
            ram.whole().part((page * PAGE) as usize, 4096).expect("it is inside").fill(0xc5);
        }
        let mut driver = NvmeDriver {
            endpoint: Endpoint::with_clock(nvme, Box::new(time.clone())),
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

    pub(super) fn master(&mut self) {
        self.endpoint.write(FunctionRegion::Config, 4, &6u16.to_le_bytes()).expect("it is inside");
    }

    fn write4(&mut self, offset: u64, value: u32) {
        self.endpoint
            .write(FunctionRegion::Bar(0), offset, &value.to_le_bytes())
            .expect("it is inside");
    }

    pub(super) fn poke(&self, address: u64, data: &[u8]) {
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
    pub(crate) fn enable(&mut self, entries: u16, shared: bool) {
        self.write4(reg::CC, 0);
        self.poll();
        (self.entries, self.tails, self.shadow) = (entries, [0; PAIRS as usize + 1], false);
        let size = entries - 1;
        self.write4(reg::AQA, Aqa::new().with_asqs(size).with_acqs(size).into());
        for (register, page) in [(reg::ASQ, QUEUES), (reg::ACQ, QUEUES + 1)] {
            let address = at(page).to_le_bytes();
            self.endpoint.write(FunctionRegion::Bar(0), register, &address).expect("it is inside");
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

    pub(super) fn configure_shadow(&mut self) {
        let mut config = command(AdminOpcode::DoorbellBufferConfig as u8);
        config.dptr = [at(SHADOW), at(SHADOW + 1)];
        self.submit(0, config);
        self.poll();
        self.shadow = true;
    }

    /// Puts a command into a queue, without telling.
    pub(super) fn enqueue(&mut self, qid: u16, mut sqe: Sqe) {
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

    pub(super) fn doorbell(&mut self, register: u64, value: u32, shadow: bool) {
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
    pub(crate) fn take_all(&mut self, qid: u16) {
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
    pub(crate) fn check(&self) {
        for page in [0..1, 60..PAGES] {
            let bytes = self.peek(page.clone());
            assert!(bytes.iter().all(|byte| *byte == 0xc5), "{page:?} was written, not mapped");
        }
        for page in [READ_ONLY.start, READ_ONLY.end - 1] {
            let bytes = self.peek(page..page + 1);
            assert!(bytes.iter().all(|byte| *byte == 0xc5), "page {page} may only be read");
        }
    }

    pub(super) fn unmap(&mut self) {
        if self.unmapped.is_none() {
            let length = (OPEN[1].end - OPEN[1].start) * PAGE;
            self.endpoint.unmap(at(OPEN[1].start), length).expect("it is mapped");
            self.unmapped = Some(self.peek(OPEN[1].clone()));
        }
    }

    pub(super) fn remap(&mut self) {
        if let Some(before) = self.unmapped.take() {
            assert!(self.peek(OPEN[1].clone()) == before, "unmapped memory was written");
            self.map(&OPEN[1], true);
        }
    }

    /// The next driver: finds nothing of this one, and a drive that works.
    pub(super) fn succeed(&mut self) {
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
