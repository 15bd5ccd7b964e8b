//! A tenant that does anything it can to an accelerator's function: registers, rings in memory that it scribbles over,
//! descriptors, doorbells, resets, memory that goes and comes. The function's front may be apart from its engines:
//! then each half may be told anything by the other one, and each may go on in another process. The registers may be
//! memory, to which the tenant stores.
//!
//! What the function may not reach stays as it was, and so does what it may not reach for a while. Whatever was done,
//! the next tenant finds a function that works.

use std::sync::Arc;
use std::time::{Duration, Instant};

use rackbus_devices::accel::{MEDIUM_LAYOUT, front, front_again};
use rackbus_devices::class::parse_rack;
use rackbus_devices::{DeviceConfig, Folders, Lost};
use rackbus_memory::exchange::session::SessionSide;
use rackbus_memory::{Access, Exchange, ExchangeHandles, Handles, InheritedEnd, SharedMemory};
use rackbus_pci::endpoint::FunctionRegion;
use rackbus_pci::{
    Endpoint, FunctionState, MediumAccess, PolledRegisters, RestoreError, Saved, Work,
};
use rackbus_spec::accel::{Completion, Descriptor, Operation, registers as reg};
use zerocopy::{FromBytes, IntoBytes};

use crate::input::Input;

const PAGE: u64 = 4096;
/// Where the tenant's memory is for the function.
const RAM: u64 = 0x1_0000_0000;
const PAGES: u64 = 64;
/// Pages that the function may read and write, in two maps side by side; the others are not mapped.
const OPEN: [std::ops::Range<u64>; 2] = [4..32, 32..60];
/// Pages by their use: two for each queue pair, the shadow doorbells, data.
const QUEUES: u64 = 4;
const SHADOW: u64 = 8;
const DATA: u64 = 9;
/// Queue pairs that are made, and entries of each.
const MADE: u64 = 2;
const ENTRIES: u32 = 16;
/// Deeds of one input.
const MOST: usize = 128;

thread_local! {
    /// The device, whose engines are measured once.
    static DEVICE: Arc<dyn DeviceConfig> = {
        let text = "name = \"lab\"\n[hosts.a.devices.d]\nkind = \"accelerator\"\nfunctions = 1\n";
        let (_, devices) = parse_rack("rack.toml", text).expect("it is right");
        devices[0].config.clone().expect("it is played")
    };
}

fn folders() -> Folders {
    Folders::new("/nonexistent", "/nonexistent")
}

fn lender() -> Endpoint {
    let model = DEVICE.with(|device| device.model(&folders()));
    Endpoint::new(model.expect("it needs no files"))
}

/// The lender's half, where the two are apart.
struct Apart {
    lender: Option<Endpoint>,
    description: String,
    files: ExchangeHandles,
}

impl Apart {
    fn lender(&mut self) -> &mut Endpoint {
        self.lender.as_mut().expect("it is there between two deeds")
    }
}

struct Tenant {
    front: Option<Endpoint>,
    apart: Option<Apart>,
    /// The function's registers, where they are memory.
    registers: Option<PolledRegisters>,
    ram: SharedMemory,
    unmapped: Option<Vec<u8>>,
    /// Something was said between the halves that neither of them said.
    spoilt: bool,
}

fn at(page: u64) -> u64 {
    RAM + page * PAGE
}

fn copies(handles: &ExchangeHandles) -> Handles {
    handles.try_clone().expect("there are descriptors").into()
}

impl Tenant {
    fn new(is_apart: bool) -> Tenant {
        let mut model = lender();
        let (front, apart) = match is_apart {
            false => (model, None),
            true => {
                let offer = model.serve_medium(None).expect("nobody has it");
                let files = ExchangeHandles::try_from(offer.handles).expect("there are three");
                let access = MediumAccess::Handles(copies(&files));
                let made = front(&offer.description, access, Lost::new(|| {}));
                let made = Endpoint::new(made.expect("it is what was offered"));
                (made, Some(Apart { lender: Some(model), description: offer.description, files }))
            }
        };
        let ram = SharedMemory::create("tenant", PAGES * PAGE).expect("there is memory");
        for page in [0, 1, 2, 3, 60, 61, 62, 63] {
            ram.whole().part((page * PAGE) as usize, 4096).expect("it is inside").fill(0xc5);
        }
        let (front, registers) = (Some(front), None);
        let mut tenant = Tenant { front, apart, registers, ram, unmapped: None, spoilt: false };
        tenant.map_all();
        tenant
    }

    fn front(&mut self) -> &mut Endpoint {
        self.front.as_mut().expect("it is there between two deeds")
    }

    fn map(&mut self, pages: &std::ops::Range<u64>) {
        let (length, offset) = ((pages.end - pages.start) * PAGE, pages.start * PAGE);
        let memory = Some(self.ram.handle(offset));
        let both = Access::READ | Access::WRITE;
        self.front().map(at(pages.start), length, both, memory).expect("nothing is there");
    }

    fn map_all(&mut self) {
        self.map(&OPEN[0]);
        self.map(&OPEN[1]);
        self.front().write(FunctionRegion::Config, 4, &6u16.to_le_bytes()).expect("it is inside");
    }

    /// Has the function's registers as memory from now on.
    fn map_registers(&mut self) {
        let (file, length) = self.front().poll_registers(0).expect("it runs here");
        self.registers = Some(PolledRegisters::adopt(file, length).expect("it was made for this"));
    }

    /// Writes registers, by message or by stores to memory.
    fn write(&mut self, offset: u64, data: &[u8]) {
        if let Some(registers) = &self.registers {
            for (at, word) in (offset..).step_by(4).zip(data.chunks_exact(4)) {
                registers.store(at, u32::from_le_bytes(word.try_into().expect("four bytes")));
            }
            return;
        }
        self.front().write(FunctionRegion::Bar(0), offset, data).expect("it is inside");
    }

    /// The tenant writes to memory that the function may write to as well: what it may not stays known.
    fn poke(&self, address: u64, value: &[u8]) {
        let end = if self.unmapped.is_some() { OPEN[0].end } else { OPEN[1].end };
        let last = address.saturating_add(value.len() as u64);
        if address >= at(OPEN[0].start)
            && last <= at(end)
            && let Some(part) = self.ram.whole().part((address - RAM) as usize, value.len())
        {
            part.copy_from(value);
        }
    }

    fn peek(&self, pages: std::ops::Range<u64>) -> Vec<u8> {
        let mut bytes = vec![0; ((pages.end - pages.start) * PAGE) as usize];
        let part = self.ram.whole().part((pages.start * PAGE) as usize, bytes.len());
        part.expect("it is inside").copy_to(&mut bytes);
        bytes
    }

    /// Lets both halves work until they have nothing to do, or long enough.
    fn poll(&mut self) {
        for _ in 0..16 {
            let now = self.front().clock();
            let mut done = self.front().poll(now) == Work::Done;
            if let Some(apart) = &mut self.apart {
                let now = apart.lender().clock();
                done |= apart.lender().poll(now) == Work::Done;
            }
            if !done {
                break;
            }
        }
    }

    /// Brings the function up with its queue pairs, and shadow doorbells where they are wanted.
    fn enable(&mut self, shadow: bool) {
        self.write(reg::CONTROL, &0u32.to_le_bytes());
        self.settle();
        let page = if shadow { at(SHADOW) } else { 0 };
        self.write(reg::SHADOW, &page.to_le_bytes());
        self.write(reg::CONTROL, &1u32.to_le_bytes());
        self.settle();
        for queue in 0..MADE {
            let base = reg::QUEUE + queue * reg::QUEUE_STRIDE;
            for (nth, register) in [reg::SUBMISSION, reg::COMPLETION].into_iter().enumerate() {
                let ring = at(QUEUES + 2 * queue + nth as u64);
                self.write(base + register, &ring.to_le_bytes());
            }
            self.write(base + reg::RING_ENTRIES, &ENTRIES.to_le_bytes());
            self.write(base + reg::ENABLE, &1u32.to_le_bytes());
        }
        self.settle();
    }

    /// The function sees what was stored to its registers, where it has to look.
    fn settle(&mut self) {
        if self.registers.is_some() {
            self.poll();
        }
    }

    /// The front goes on in another process, as `state` says.
    fn front_goes_on(&mut self, state: Option<&FunctionState>) -> bool {
        let Saved { state: own, descriptors, medium } =
            self.front().save().expect("it has not ended");
        let own = FunctionState::from_bytes(&own.to_bytes().expect("it can be written"));
        let own = own.expect("it was written here");
        self.front = None;
        let model = match &self.apart {
            Some(apart) => {
                let end = InheritedEnd { files: medium, session: None };
                front_again(&apart.description, end, Lost::new(|| {})).expect("it was there before")
            }
            None => DEVICE.with(|device| device.resume(&folders(), medium)).expect("as before"),
        };
        let mut next = Endpoint::new(model);
        let restored = next.restore(state.unwrap_or(&own), descriptors).is_ok();
        self.front = Some(next);
        restored
    }

    /// The same of the lender's half.
    fn lender_goes_on(&mut self, state: Option<&FunctionState>) -> Result<(), RestoreError> {
        let Some(apart) = &mut self.apart else { return Ok(()) };
        let saved = apart.lender().save().expect("it has not ended");
        let own = FunctionState::from_bytes(&saved.state.to_bytes().expect("it can be written"));
        let own = own.expect("it was written here");
        // As a process that ends: nothing of its function is left when the next one begins.
        drop(apart.lender.take());
        let model = DEVICE.with(|device| device.resume(&folders(), saved.medium));
        let mut next = Endpoint::new(model.expect("as before"));
        let restored = next.restore(state.unwrap_or(&own), saved.descriptors);
        apart.lender = Some(next);
        restored
    }

    fn unmap(&mut self) {
        if self.unmapped.is_none() {
            let length = (OPEN[1].end - OPEN[1].start) * PAGE;
            self.front().unmap(at(OPEN[1].start), length).expect("it is mapped");
            self.unmapped = Some(self.peek(OPEN[1].clone()));
        }
    }

    fn remap(&mut self) {
        if let Some(before) = self.unmapped.take() {
            assert!(self.peek(OPEN[1].clone()) == before, "unmapped memory was written");
            self.map(&OPEN[1].clone());
        }
    }

    /// What must hold whatever the tenant did.
    fn check(&self) {
        for page in [0..4, 60..PAGES] {
            let bytes = self.peek(page.clone());
            assert!(bytes.iter().all(|byte| *byte == 0xc5), "{page:?} was written");
        }
    }

    /// The next tenant: finds nothing of this one, and a function that works.
    fn serve_next(mut self) {
        let mut endpoint = match self.apart.take() {
            Some(apart) => {
                // What the tenant had mapped goes with its front.
                self.front = None;
                apart.lender.expect("it is there")
            }
            None => self.front.take().expect("it is there"),
        };
        endpoint.scrub();
        assert_eq!(endpoint.unmap_all(), 0, "a scrubbed function has mappings");
        let mut next = Tenant {
            front: Some(endpoint),
            unmapped: None,
            apart: None,
            registers: None,
            ram: self.ram,
            spoilt: false,
        };
        next.map_all();
        let rings = next.ram.whole().part((QUEUES * PAGE) as usize, (4 * PAGE) as usize);
        rings.expect("it is inside").fill(0);
        next.enable(false);
        next.poke(at(DATA), b"abc");
        let ask = Descriptor {
            id: 9,
            stages: [Operation::Sha256 as u8, 0, 0, 0],
            input: at(DATA),
            output: at(DATA + 1),
            input_length: 3,
            output_length: 32,
            ..Descriptor::default()
        };
        next.poke(at(QUEUES), ask.as_bytes());
        next.write(reg::DOORBELL, &1u32.to_le_bytes());
        let begun = Instant::now();
        let completion = loop {
            next.poll();
            let page = next.peek(QUEUES + 1..QUEUES + 2);
            let (completion, _) = Completion::read_from_prefix(&page).expect("a page is enough");
            if completion.status != 0 {
                break completion;
            }
            assert!(begun.elapsed() < Duration::from_secs(10), "the next tenant is not answered");
        };
        assert_eq!((completion.status, completion.id, completion.output), (1, 9, 32));
        // FIPS 180-2, section B.1.
        assert_eq!(next.peek(DATA + 1..DATA + 2)[..4], [0xba, 0x78, 0x16, 0xbf]);
    }
}

/// An address: mostly in the tenant's memory, on and off borders.
fn address(input: &mut Input<'_>) -> u64 {
    match u64::from(input.u8()) {
        page @ 0..=63 => at(page),
        page @ 64..=127 => at(page - 64) + u64::from(input.u16() & 0xfff),
        page @ 128..=239 => at(DATA + page % 48),
        _ => input.u64(),
    }
}

fn length(input: &mut Input<'_>) -> u32 {
    match input.u8() {
        count @ 0..=127 => 16 * u32::from(count),
        128..=223 => u32::from(input.u16()),
        224..=239 => 32,
        _ => input.u32(),
    }
}

fn descriptor(input: &mut Input<'_>) -> Descriptor {
    let kind = input.u8();
    let mut stages = [input.u8() % 19, 0, 0, 0];
    if kind & 1 != 0 {
        stages[1] = input.u8() % 19;
        stages[2] = if kind & 2 != 0 { input.u8() % 19 } else { 0 };
    }
    let handles = input.u8();
    let handle = |shift: u8| u16::from(handles >> shift & 3);
    let segments = if kind & 4 != 0 { u16::from(input.u8()) } else { 0 };
    Descriptor {
        id: u16::from(kind),
        stages,
        contexts: [handle(0), handle(2), handle(4), 0],
        input_segments: segments,
        output_segments: if kind & 8 != 0 { segments } else { 0 },
        associated: if kind & 16 != 0 { input.u8().into() } else { 0 },
        input: address(input),
        output: address(input),
        input_length: length(input),
        output_length: length(input),
        nonce: [input.u8(); 16],
        ..Descriptor::default()
    }
}

/// What one half says to the other in the place of the one that should.
fn say(tenant: &mut Tenant, input: &mut Input<'_>) {
    let Some(apart) = &tenant.apart else { return };
    let (to_front, tag) = (input.u8() & 1 != 0, u32::from(input.u8()));
    let files = copies(&apart.files).into_descriptors();
    let end = InheritedEnd { files, session: None };
    let side = if to_front { SessionSide::Answers } else { SessionSide::Asks };
    let other = Exchange::again(side, end, MEDIUM_LAYOUT);
    tenant.spoilt = true;
    let Ok(mut other) = other else { return };
    // Dropping it ends nothing.
    let passed_on = other.pass_on();
    if let Some(place) = other.data(tag, 4096) {
        place.get().fill(input.u8());
    }
    let _ = other.send(input.short(), None);
    other.ring();
    drop((other, passed_on));
}

fn deed(tenant: &mut Tenant, input: &mut Input<'_>) {
    match input.u8() % 14 {
        0..=2 => {
            let (queue, slot) = (u64::from(input.u8()) % MADE, u64::from(input.u8() & 15));
            let descriptor = descriptor(input);
            tenant.poke(at(QUEUES + 2 * queue) + 64 * slot, descriptor.as_bytes());
        }
        3 | 4 => {
            let (queue, tail) = (u64::from(input.u8()) % MADE, u32::from(input.u8() % 17));
            let head = u32::from(input.u8() % 17);
            let doorbell = reg::DOORBELL + queue * reg::DOORBELL_STRIDE;
            tenant.write(doorbell + 4, &head.to_le_bytes());
            tenant.write(doorbell, &tail.to_le_bytes());
        }
        5 => tenant.poll(),
        6 => {
            let (offset, value) = (u64::from(input.u16()) & 0xffc, input.u64().to_le_bytes());
            let width = [4, 8][usize::from(input.u8() & 1)];
            tenant.write(offset, &value[..width]);
        }
        7 => {
            let mut data = [0; 8];
            let offset = u64::from(input.u16()) & 0xff8;
            tenant.front().read(FunctionRegion::Bar(0), offset, &mut data).expect("it is inside");
        }
        8 => {
            tenant.front().park();
            if let Some(apart) = &mut tenant.apart {
                apart.lender().park();
            }
        }
        9 => match tenant.unmapped {
            None => tenant.unmap(),
            Some(_) => tenant.remap(),
        },
        10 => tenant.enable(input.u8() & 1 != 0),
        11 => {
            let (address, data) = (address(input), input.short());
            tenant.poke(address, data);
        }
        12 => say(tenant, input),
        _ => {
            tenant.remap();
            match input.u8() % 2 {
                0 => assert!(tenant.front_goes_on(None), "what was saved cannot be restored"),
                _ => {
                    let restored = tenant.lender_goes_on(None);
                    assert!(restored.is_ok() || tenant.spoilt, "{restored:?}");
                }
            }
        }
    }
}

fn driven(data: &[u8]) -> Tenant {
    let mut input = Input::new(data);
    let choice = input.u8();
    let mut tenant = Tenant::new(choice & 1 != 0);
    if choice & 4 != 0 {
        tenant.map_registers();
    }
    tenant.enable(choice & 2 != 0);
    for _ in 0..MOST {
        if input.is_empty() {
            break;
        }
        deed(&mut tenant, &mut input);
        tenant.check();
    }
    tenant
}

/// Whether the two halves are apart, then deeds.
pub fn run(data: &[u8]) {
    let mut tenant = driven(data);
    tenant.remap();
    tenant.check();
    tenant.serve_next();
}

/// What states have in them.
pub const WORDS: &[&str] = &[
    "\"version\":",
    "\"queues\":[",
    "\"under_way\":[",
    "\"descriptor\":[",
    "\"work\":",
    "\"done\":",
    "\"contexts\":[",
    "\"handle\":",
    "\"asks\":[[",
    "\"given_up\":[[",
    "18446744073709551615",
    "4294967295",
    "null",
    "true",
];

/// Restores what `data` says of a function, of a front, and of a front's lender.
pub fn restore(data: &[u8]) {
    let Ok(state) = FunctionState::from_bytes(data) else { return };
    for half in 0..3 {
        let mut tenant = Tenant::new(half > 0);
        let restored = match half {
            2 => tenant.lender_goes_on(Some(&state)).is_ok(),
            _ => tenant.front_goes_on(Some(&state)),
        };
        if restored {
            tenant.poll();
            tenant.check();
            if half == 2 {
                // Its lender may have given it up meanwhile.
                let _ = tenant.lender_goes_on(None);
            } else {
                assert!(tenant.front_goes_on(None), "what was restored cannot be saved");
            }
        } else if half < 2 {
            assert!(tenant.front().dma().is_empty(), "what was refused holds memory");
        }
        tenant.serve_next();
    }
}

/// Tenants that hash, compress, keep keys and search, beside their engines and apart from them.
pub fn seeds() -> Vec<Vec<u8>> {
    let ask = |queue: u8, slot: u8, operation: u8, handles: u8| {
        vec![0, queue, slot, 0, operation, handles, 128, 129, 16, 224, 3]
    };
    let make = |slot: u8, of: u8| vec![0, 0, slot, 1, 1, of, 0, 128, 129, 2, 0, 3];
    let text = |page: u8| {
        vec![11, page, 11, b'(', b'a', b'|', b'b', b')', b'+', b'c', b'\n', b'a', b'b', b'c']
    };
    let ring = |queue: u8, tail: u8| vec![3, queue, tail, 0];
    let mut all = Vec::new();
    for choice in 0..8 {
        let used = [
            vec![choice],
            text(128),
            ask(0, 0, 7, 0),
            ask(0, 1, 8, 0),
            ring(0, 2),
            vec![5, 8, 13, 0, 13, 1, 5],
            make(2, 4),
            ask(0, 3, 4, 1),
            make(4, 16),
            ask(0, 5, 16, 2),
            ring(0, 6),
            vec![5, 9, 5, 9, 5],
            ask(1, 0, 10, 0),
            ring(1, 1),
            vec![13, 0, 5, 13, 1, 5, 8, 10, 0],
            ask(1, 0, 3, 0),
            ring(1, 1),
            vec![5],
        ];
        all.push(used.concat());
    }
    // A front that says what none should, and a lender.
    for to_front in 0..2 {
        let message = [vec![12, to_front, 0, 7, 12], vec![0; 12]].concat();
        all.push([vec![1], ask(0, 0, 7, 0), ring(0, 1), vec![5], message, vec![5, 5]].concat());
    }
    all
}

/// States of functions that tenants have used.
pub fn states() -> Vec<Vec<u8>> {
    let mut all = Vec::new();
    // One whose registers are memory is not saved.
    for seed in seeds().iter().filter(|seed| seed[0] & 4 == 0) {
        let mut tenant = driven(seed);
        let saved = tenant.front().save().expect("it has not ended");
        all.push(saved.state.to_bytes().expect("it can be written"));
        if let Some(apart) = &mut tenant.apart {
            let saved = apart.lender().save().expect("it has not ended");
            all.push(saved.state.to_bytes().expect("it can be written"));
        }
    }
    all
}
