//! A host that drives the controller in this process: no socket, no thread, no VM. It has its own
//! idea of every structure, so that what is tested is the protocol and not a shared helper.

mod admin;
mod background;
mod buffer;
mod crowded;
mod elsewhere;
mod frozen;
mod hostile;
mod interrupts;
mod io;
mod limits;
mod lost;
mod persistent;
mod polled;
mod region_simulation;
mod simulation;
mod stored;
mod succession;
mod transfer;
mod verify;
mod wakeup;
mod zeroing;

use std::collections::HashMap;
use std::sync::atomic::Ordering;

use rackbus_memory::{Access, SharedMemory};
use rackbus_pci::endpoint::FunctionRegion;
use rackbus_pci::{Endpoint, PolledRegisters};
use rackbus_spec::nvme::registers::{self as reg, Aqa, Cc, Csts};
use rackbus_spec::nvme::{AdminOpcode, Cqe, IoOpcode, Sqe, Status};
use std::os::fd::AsFd;

use super::registers::DOORBELL_STRIDE;
use super::{Nvme, NvmeConfig};

/// Where the host's memory begins for the device, and its size.
pub const RAM: u64 = 0x1_0000_0000;
pub const RAM_SIZE: u64 = 16 << 20;
pub const ENTRIES: u16 = 16;

/// The host's side of a queue pair.
#[derive(Debug, Clone)]
struct Pair {
    sq: u64,
    cq: u64,
    entries: u16,
    tail: u16,
    head: u16,
    phase: bool,
    /// The values that the doorbells have.
    rung: [u16; 2],
}

impl Pair {
    fn new(entries: u16) -> Pair {
        Pair { sq: 0, cq: 0, entries, tail: 0, head: 0, phase: true, rung: [0; 2] }
    }
}

/// A host with memory, a drive, and a clock of its own.
pub struct TestHost {
    pub endpoint: Endpoint,
    pub ram: SharedMemory,
    ram_size: u64,
    /// Where in its memory mappings meet, in order.
    pub cuts: Vec<u64>,
    /// The pages of shadow doorbells: values and event indices.
    shadow: Option<[u64; 2]>,
    next_page: u64,
    pairs: HashMap<u16, Pair>,
    next_cid: u16,
    pub now: u64,
    /// Completions seen while waiting for others.
    early: Vec<Cqe>,
    /// The drive's registers, where they are memory.
    registers: Option<PolledRegisters>,
}

impl TestHost {
    /// A drive with memory behind it, enabled, with an I/O queue pair 1.
    pub fn with_memory(size: u64) -> TestHost {
        let mut host = TestHost::plain(&NvmeConfig::memory(size, "TEST"));
        host.enable();
        host.create_pair(1, ENTRIES);
        host
    }

    /// A drive as after power-on, with the host's memory mapped.
    pub fn plain(config: &NvmeConfig) -> TestHost {
        TestHost::around(Nvme::new(config).unwrap())
    }

    /// As [`plain`](TestHost::plain), around a drive made elsewhere.
    pub fn around(nvme: Nvme) -> TestHost {
        let ram = SharedMemory::create("host", RAM_SIZE).unwrap();
        TestHost::with_endpoint(Endpoint::new(Box::new(nvme)), ram)
    }

    /// A host with memory `ram`, mapped for the function of `endpoint`.
    pub fn with_endpoint(endpoint: Endpoint, ram: SharedMemory) -> TestHost {
        let mut host = TestHost::with_restored(endpoint, ram);
        host.map_ram();
        host.command_register(0b110);
        host
    }

    /// The same where the memory is mapped already.
    pub fn with_restored(endpoint: Endpoint, ram: SharedMemory) -> TestHost {
        let ram_size = ram.len() as u64;
        TestHost {
            endpoint,
            ram,
            ram_size,
            cuts: Vec::new(),
            shadow: None,
            next_page: RAM,
            pairs: HashMap::new(),
            next_cid: 0,
            now: 0,
            early: Vec::new(),
            registers: None,
        }
    }

    /// Maps the host's memory for the function, in pieces that meet at `cuts`.
    pub fn map_ram(&mut self) {
        let both = Access::READ | Access::WRITE;
        for (from, to) in self.mappings() {
            let memory = Some(self.ram.handle(from));
            self.endpoint.map(RAM + from, to - from, both, memory).unwrap();
        }
    }

    /// Takes the host's memory away again.
    pub fn unmap_ram(&mut self) {
        for (from, to) in self.mappings() {
            self.endpoint.unmap(RAM + from, to - from).unwrap();
        }
    }

    fn mappings(&self) -> Vec<(u64, u64)> {
        let ends = self.cuts.iter().copied().chain([self.ram_size]);
        [0].into_iter().chain(self.cuts.iter().copied()).zip(ends).collect()
    }

    /// Where a completion queue is.
    pub fn completion_queue(&self, qid: u16) -> u64 {
        self.pairs[&qid].cq
    }

    /// Has doorbells stored in shadow pages from now on.
    pub fn configure_shadow(&mut self) {
        let pages = [self.pages(1), self.pages(1)];
        pages.iter().for_each(|page| self.poke(*page, &[0; 4096]));
        let mut config = admin(AdminOpcode::DoorbellBufferConfig);
        config.dptr = pages;
        assert_eq!(self.run(0, config).status(), Status::SUCCESS);
        self.shadow = Some(pages);
    }

    /// Tells the drive of a doorbell's new value, as a driver does; true when it was rung, false
    /// when the value is only in the shadow page.
    fn doorbell(&mut self, qid: u16, side: usize, new: u16) -> bool {
        let pair = self.pairs.get_mut(&qid).unwrap();
        let old = std::mem::replace(&mut pair.rung[side], new);
        let register = match side {
            0 => reg::sq_tail_doorbell(qid, DOORBELL_STRIDE),
            _ => reg::cq_head_doorbell(qid, DOORBELL_STRIDE),
        };
        if let Some([values, events]) = self.shadow
            && qid > 0
        {
            let slot = register - reg::DOORBELLS;
            let word = |page: u64| (page - RAM + slot) as usize;
            let ram = self.ram.whole();
            ram.store_u32(word(values), new.into(), Ordering::SeqCst).unwrap();
            let event = ram.load_u32(word(events), Ordering::SeqCst).unwrap();
            if !super::need_event(event as u16, new, old) {
                return false;
            }
        }
        self.write4(register, u32::from(new));
        true
    }

    /// Rings for what was [enqueued](TestHost::enqueue); see [`doorbell`](TestHost::doorbell).
    pub fn ring(&mut self, qid: u16) -> bool {
        let tail = self.pairs[&qid].tail;
        self.pairs[&qid].rung[0] != tail && self.doorbell(qid, 0, tail)
    }

    /// Gives the entries of completions taken back to the drive; see [`doorbell`](TestHost::doorbell).
    pub fn give_back(&mut self, qid: u16) -> bool {
        let head = self.pairs[&qid].head;
        self.pairs[&qid].rung[1] != head && self.doorbell(qid, 1, head)
    }

    /// Writes the PCI command register: bit 1 memory space, bit 2 bus master.
    pub fn command_register(&mut self, value: u16) {
        self.endpoint.write(FunctionRegion::Config, 4, &value.to_le_bytes()).unwrap();
    }

    pub fn read4(&mut self, offset: u64) -> u32 {
        if let Some(registers) = &self.registers {
            return registers.load(offset);
        }
        let mut data = [0; 4];
        self.endpoint.read(FunctionRegion::Bar(0), offset, &mut data).unwrap();
        u32::from_le_bytes(data)
    }

    pub fn write4(&mut self, offset: u64, value: u32) {
        if let Some(registers) = &self.registers {
            return registers.store(offset, value);
        }
        self.endpoint.write(FunctionRegion::Bar(0), offset, &value.to_le_bytes()).unwrap();
    }

    pub fn csts(&mut self) -> Csts {
        Csts::from(self.read4(reg::CSTS))
    }

    /// `pages` fresh pages of the host's memory; returns their address.
    pub fn pages(&mut self, pages: u64) -> u64 {
        let at = self.next_page;
        self.next_page += pages * 4096;
        assert!(self.next_page <= RAM + RAM_SIZE, "the test's host has no memory left");
        at
    }

    pub fn poke(&self, address: u64, data: &[u8]) {
        let part = self.ram.whole().part((address - RAM) as usize, data.len()).unwrap();
        part.copy_from(data);
    }

    pub fn peek(&self, address: u64, length: usize) -> Vec<u8> {
        let mut out = vec![0; length];
        self.ram.whole().part((address - RAM) as usize, length).unwrap().copy_to(&mut out);
        out
    }

    /// Sets up the admin queue from `memory` on, which is used from now on, and enables the
    /// controller.
    pub fn restart(&mut self, memory: u64) {
        self.next_page = memory;
        self.enable();
    }

    /// Whether queue pair `qid` was created.
    pub fn has_pair(&self, qid: u16) -> bool {
        self.pairs.contains_key(&qid)
    }

    /// Creates submission queue `qid` that completes into completion queue `cqid`.
    pub fn share_completion_queue(&mut self, qid: u16, cqid: u16) {
        let sq = self.pages(1);
        let mut create = admin(AdminOpcode::CreateSq);
        create.cdw10 = u32::from(ENTRIES - 1) << 16 | u32::from(qid);
        create.cdw11 = u32::from(cqid) << 16 | 1;
        create.dptr[0] = sq;
        assert_eq!(self.run(0, create).status(), Status::SUCCESS);
        let pair = Pair { sq, cq: 0, ..Pair::new(ENTRIES) };
        self.pairs.insert(qid, pair);
    }

    /// Sets up the admin queue and enables the controller.
    pub fn enable(&mut self) {
        let (sq, cq) = (self.pages(1), self.pages(1));
        self.poke(cq, &[0; 4096]);
        let size = ENTRIES - 1;
        self.write4(reg::AQA, Aqa::new().with_asqs(size).with_acqs(size).into());
        for (register, value) in [(reg::ASQ, sq), (reg::ACQ, cq)] {
            self.write4(register, value as u32);
            self.write4(register + 4, (value >> 32) as u32);
        }
        self.pairs.clear();
        self.early.clear();
        self.shadow = None;
        self.pairs.insert(0, Pair { sq, cq, ..Pair::new(ENTRIES) });
        let cc = Cc::new().with_en(true).with_iosqes(6).with_iocqes(4);
        self.write4(reg::CC, cc.into());
        if self.registers.is_some() {
            self.poll();
        }
        assert!(self.csts().rdy() && !self.csts().cfs());
    }

    /// Creates completion queue and submission queue `qid`, with interrupts by vector `qid`.
    pub fn create_pair(&mut self, qid: u16, entries: u16) {
        let (sq, cq) = (self.pages(u64::from(entries).div_ceil(64)), self.pages(1));
        self.poke(cq, &[0; 4096]);
        let size = u32::from(entries - 1) << 16;
        let mut create = admin(AdminOpcode::CreateCq);
        create.cdw10 = size | u32::from(qid);
        create.cdw11 = u32::from(qid) << 16 | 0b11;
        create.dptr[0] = cq;
        assert_eq!(self.run(0, create).status(), Status::SUCCESS);
        let mut create = admin(AdminOpcode::CreateSq);
        create.cdw10 = size | u32::from(qid);
        create.cdw11 = u32::from(qid) << 16 | 1;
        create.dptr[0] = sq;
        assert_eq!(self.run(0, create).status(), Status::SUCCESS);
        self.pairs.insert(qid, Pair { sq, cq, ..Pair::new(entries) });
    }

    /// Puts `sqe` into queue `qid` and rings; returns its command identifier.
    pub fn submit(&mut self, qid: u16, sqe: Sqe) -> u16 {
        let cid = self.enqueue(qid, sqe);
        let tail = self.pairs[&qid].tail;
        self.write4(reg::sq_tail_doorbell(qid, DOORBELL_STRIDE), u32::from(tail));
        cid
    }

    /// Puts `sqe` into queue `qid` without ringing.
    pub fn enqueue(&mut self, qid: u16, mut sqe: Sqe) -> u16 {
        self.next_cid = self.next_cid.wrapping_add(1);
        sqe.cdw0.set_cid(self.next_cid);
        let pair = self.pairs.get_mut(&qid).unwrap();
        let at = (pair.sq - RAM) as usize + usize::from(pair.tail) * 64;
        self.ram.whole().write_obj(at, &sqe).unwrap();
        pair.tail = (pair.tail + 1) % pair.entries;
        self.next_cid
    }

    /// Commands of queue `qid` that were enqueued and whose completions were not taken; its completion queue is
    /// its own.
    pub fn waiting(&self, qid: u16) -> u16 {
        let pair = &self.pairs[&qid];
        (pair.tail + pair.entries - pair.head) % pair.entries
    }

    /// Lets the drive work once.
    pub fn poll(&mut self) -> rackbus_pci::Work {
        self.now += 1000;
        self.endpoint.poll(self.now)
    }

    /// The next completion of queue `qid`, if one is there.
    pub fn completion(&mut self, qid: u16) -> Option<Cqe> {
        let cqe = self.take_completion(qid)?;
        let head = self.pairs[&qid].head;
        self.write4(reg::cq_head_doorbell(qid, DOORBELL_STRIDE), u32::from(head));
        Some(cqe)
    }

    /// As [`completion`](TestHost::completion); the drive does not hear of it until
    /// [`give_back`](TestHost::give_back).
    pub fn take_completion(&mut self, qid: u16) -> Option<Cqe> {
        let pair = self.pairs.get_mut(&qid).unwrap();
        let at = (pair.cq - RAM) as usize + usize::from(pair.head) * 16;
        let last = self.ram.whole().load_u16(at + 14, Ordering::Acquire).unwrap();
        if (last & 1 != 0) != pair.phase {
            return None;
        }
        let cqe: Cqe = self.ram.whole().read_obj(at).unwrap();
        pair.head = (pair.head + 1) % pair.entries;
        if pair.head == 0 {
            pair.phase = !pair.phase;
        }
        Some(cqe)
    }

    /// Waits for the completion of command `cid` of queue `qid`: a disk that others use takes its time.
    pub fn wait(&mut self, qid: u16, cid: u16) -> Cqe {
        let begun = std::time::Instant::now();
        while begun.elapsed() < std::time::Duration::from_secs(60) {
            if let Some(at) = self.early.iter().position(|cqe| (cqe.sq_id, cqe.cid) == (qid, cid)) {
                return self.early.remove(at);
            }
            self.poll();
            while let Some(cqe) = self.completion(qid) {
                self.early.push(cqe);
            }
        }
        panic!("command {cid} of queue {qid} never completed");
    }

    /// Runs one command to its end.
    pub fn run(&mut self, qid: u16, sqe: Sqe) -> Cqe {
        let cid = self.submit(qid, sqe);
        self.wait(qid, cid)
    }

    /// Runs one command and returns its status without flags.
    pub fn status(&mut self, qid: u16, sqe: Sqe) -> Status {
        self.run(qid, sqe).status().code()
    }

    /// Writes `data` at `slba` through a buffer at page boundary (at most 8 KiB, so PRPs suffice).
    pub fn write_blocks(&mut self, slba: u64, data: &[u8]) -> Status {
        let buffer = self.scratch();
        self.poke(buffer, data);
        self.status(1, transfer(IoOpcode::Write, slba, data.len(), buffer))
    }

    /// Reads `length` bytes from `slba` on.
    pub fn read_blocks(&mut self, slba: u64, length: usize) -> Vec<u8> {
        let buffer = self.scratch();
        self.poke(buffer, &vec![0xee; length]);
        let sqe = transfer(IoOpcode::Read, slba, length, buffer);
        assert_eq!(self.status(1, sqe), Status::SUCCESS);
        self.peek(buffer, length)
    }

    /// Two pages at the end of the host's memory.
    pub fn scratch(&self) -> u64 {
        RAM + RAM_SIZE - 8192
    }
}

/// An admin command without arguments.
pub fn admin(opcode: AdminOpcode) -> Sqe {
    let mut sqe = Sqe::default();
    sqe.cdw0.set_opcode(opcode as u8);
    sqe
}

/// An I/O command on `length` bytes (512-byte blocks) at `slba`, data at two PRPs from `buffer`.
pub fn transfer(opcode: IoOpcode, slba: u64, length: usize, buffer: u64) -> Sqe {
    let mut sqe = Sqe { nsid: 1, ..Sqe::default() };
    sqe.cdw0.set_opcode(opcode as u8);
    sqe.cdw10 = slba as u32;
    sqe.cdw11 = (slba >> 32) as u32;
    sqe.cdw12 = (length / 512 - 1) as u32;
    sqe.dptr = [buffer, (buffer & !4095) + 4096];
    sqe
}

/// An admin command that moves data to or from `buffer`.
pub fn admin_data(opcode: AdminOpcode, nsid: u32, cdw10: u32, buffer: u64) -> Sqe {
    let mut sqe = admin(opcode);
    sqe.nsid = nsid;
    sqe.cdw10 = cdw10;
    sqe.dptr = [buffer, (buffer & !4095) + 4096];
    sqe
}
