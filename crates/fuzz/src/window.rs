//! What goes through the window of a function that is lent through an NTB: what the borrower's kernel module stores in the
//! lender's memory, requests and the mappings that they are about, and where interrupts go; and what a lender says of where
//! the function is, and shows of its device.
//!
//! Whatever the module stores, the lender is done with it after a bounded number of steps and counts each request once; what
//! it carries out is of the lease and in its order, and concerns registers that are the borrower's. An isolated function
//! reaches whole pages of the borrower's window, each address once, and never those of interrupts. The next lease begins
//! as the first one did.

use std::collections::BTreeMap;
use std::io::Write;
use std::net::Shutdown;
use std::os::unix::net::UnixStream;
use std::sync::atomic::Ordering;

use rackbus_link::{InWindow, LinkError};
use rackbus_metal::image;
use rackbus_metal::isolated::{IsolatedMemory, MAPPED_MSI, MappingRequest};
use rackbus_metal::messages::{ApicWindow, MsiEffect, message};
use rackbus_metal::plan::WindowPlan;
use rackbus_metal::requests::{DEVICE_CONTROL_BITS, FunctionRequest, RequestRing, Writable};
use rackbus_metal::window::{ControlArea, MSI_SIZE, Offer, PAGE, RING_ENTRIES, WindowBar};

use crate::input::Input;

/// Words of what a lender says.
pub const WORDS: &[&str] = &[
    "{\"offset\":4096,\"epoch\":7",
    ",\"session\":{\"secret\":\"00000000000000000000000000000000\",\"kept_ms\":30000}",
    "18446744073709551615",
    "null",
];
/// Deeds of one input.
const MOST: usize = 256;
/// The lease's epoch, more than 32 bits.
const EPOCH: u64 = 1 << 32 | 7;
/// The lender's window onto the borrower's memory, and how many mappings there may be in it.
const WINDOW: u64 = 16 * PAGE as u64;
const MAPPINGS: u32 = 5;
/// Where the kernel module stores in the ring's page (`kernel/include/rackbus_window.h`).
const PRODUCER: usize = 0;
const ENTRIES: usize = 0x80;
const MAPPING: usize = 0x900;

/// What of a window the input is.
pub fn run(data: &[u8]) {
    let mut input = Input::new(data);
    let choice = input.u8();
    match choice % 4 {
        0 => {
            let is_there = |bit: u8, at: u16| if choice & bit == 0 { at } else { 0 };
            let [msix_control, device_control] = [is_there(4, 0x42), is_there(8, 0x68)];
            LentFunction::new(Writable { msix_control, device_control }).serve_all(&mut input);
        }
        1 => lender_says(input.rest(), choice & 4 != 0),
        2 => lender_shows(input.rest()),
        _ => interrupts(&mut input),
    }
}

/// A lent function without its device: its control area, and what the lender knows of it.
struct LentFunction {
    area: ControlArea,
    writable: Writable,
    requests: RequestRing,
    /// How many entries the borrower has written.
    written: u32,
    isolated: Option<(IsolatedMemory, BTreeMap<u64, u64>)>,
}

impl LentFunction {
    fn new(writable: Writable) -> LentFunction {
        let area = ControlArea::new().expect("there is memory");
        let requests = RequestRing::new(EPOCH, writable);
        let mut function = LentFunction { area, writable, requests, written: 0, isolated: None };
        function.lend(EPOCH);
        function
    }

    fn lend(&mut self, epoch: u64) {
        let offer = Offer {
            epoch,
            vectors: 4,
            flags: 0,
            dma: (1 << 32, WINDOW),
            msi_base: 1 << 33,
            doorbell: 0,
            mappings: MAPPINGS,
            bars: [WindowBar::default(); 6],
        };
        self.area.publish(&offer, &[0; PAGE]);
        self.requests = RequestRing::new(epoch, self.writable);
        (self.written, self.isolated) = (0, None);
    }

    /// The borrower stores words into the ring's page.
    fn store(&self, at: usize, words: &[u32]) {
        let [_, (_, ring, _)] = self.area.parts();
        for (at, word) in (at..).step_by(4).zip(words) {
            ring.whole().store_u32(at, word.to_le(), Ordering::Relaxed).expect("it is inside");
        }
    }

    /// Stores an entry behind those that there are.
    fn ask(&mut self, [seq, what, value, epoch]: [u32; 4]) {
        let at = ENTRIES + 16 * (self.written % RING_ENTRIES) as usize;
        self.store(at, &[seq, what, value, epoch]);
        self.written = self.written.wrapping_add(1);
        self.store(PRODUCER, &[self.written]);
    }

    /// A request as the module makes it.
    fn ask_orderly(&mut self, choice: u8, value: u32) {
        let register = |at: u16| 1 | 2 << 8 | u32::from(at) << 16;
        let what = match choice % 8 {
            0 => register(4),
            1 => register(self.writable.msix_control),
            2 => register(self.writable.device_control),
            3 => 2,
            4 => 3,
            5 => 4,
            _ => 5,
        };
        let value = if matches!(what, 2 | 3) { 0 } else { value };
        self.ask([self.written, what, value, EPOCH as u32]);
    }

    /// Stores where the borrower says which mapping it asks for: in the window, near its end and its MSI part, or anywhere.
    fn describe(&self, input: &mut Input<'_>) {
        let [iova, address, size] = [0; 3].map(|_: u8| match input.u8() {
            pages @ 0..0xc0 => u64::from(pages % 32) * PAGE as u64,
            near @ 0xc0..0xe0 => (MAPPED_MSI + u64::from(near & 7) * MSI_SIZE / 4) - PAGE as u64,
            _ => input.number(),
        });
        let access = u32::from(input.u8()) % 5;
        let words = |value: u64| [value as u32, (value >> 32) as u32];
        let [iova, address, size] = [iova, address, size].map(words);
        self.store(MAPPING, &[iova, address, size].concat());
        self.store(MAPPING + 24, &[access]);
    }

    /// Carries out what is there.
    fn serve(&mut self) {
        let producer = self.area.producer();
        let (before, refused) = self.requests.progress();
        let ahead = producer.wrapping_sub(before);
        let mut carried_out = 0;
        loop {
            let area = &self.area;
            let Some(request) = self.requests.next(producer, |nth| area.entry(nth)) else { break };
            self.check(request);
            self.carry_out(request);
            self.requests.done();
            carried_out += 1;
            assert!(carried_out <= RING_ENTRIES, "more than a ring has room for");
        }
        let (consumer, now) = self.requests.progress();
        assert_eq!(consumer, producer, "something is left");
        let passed_over = if ahead > RING_ENTRIES { 1 } else { ahead - carried_out };
        assert_eq!(now.wrapping_sub(refused), passed_over, "each is counted once");
        self.area.consumed(consumer, now);
    }

    /// A request is of the lease and in its order, and the borrower's.
    fn check(&self, request: FunctionRequest) {
        let (consumer, _) = self.requests.progress();
        let [seq, what, value, epoch] = self.area.entry(consumer);
        assert_eq!((seq, epoch), (consumer, self.requests.epoch() as u32));
        let (offset, kind) = ((what >> 16) as u16, what & 0xff);
        let Writable { msix_control, device_control } = self.writable;
        match request {
            FunctionRequest::Master(on) => assert_eq!((kind, offset, on), (1, 4, value & 4 != 0)),
            FunctionRequest::Msix => assert!(offset == msix_control && offset != 0),
            FunctionRequest::DeviceControl(bits) => {
                assert!(offset == device_control && offset != 0);
                assert_eq!(bits & !DEVICE_CONTROL_BITS, 0, "bits that are the lender's");
            }
            FunctionRequest::Reset => assert_eq!((what, value), (2, 0)),
            FunctionRequest::Release => assert_eq!(kind, 3),
            FunctionRequest::Isolate(on) => assert_eq!((what, value), (4, u32::from(on))),
            FunctionRequest::Map(on) => assert_eq!((what, value), (5, u32::from(on))),
        }
    }

    fn carry_out(&mut self, request: FunctionRequest) {
        match (request, &mut self.isolated) {
            (FunctionRequest::Isolate(true), isolated @ None) => {
                *isolated = Some((IsolatedMemory::new(WINDOW, MAPPINGS), BTreeMap::new()));
            }
            (FunctionRequest::Isolate(false) | FunctionRequest::Release, isolated) => {
                *isolated = None;
            }
            (FunctionRequest::Map(on), Some((memory, mapped))) => {
                let wanted = self.area.mapping();
                let refusal = if on {
                    map(memory, mapped, wanted)
                } else {
                    let found = memory.find(wanted);
                    assert_eq!(found.is_ok(), mapped.get(&wanted.iova) == Some(&wanted.size));
                    if let Ok(mapping) = &found {
                        memory.end(mapping);
                        mapped.remove(&wanted.iova);
                    }
                    found.err().map_or(0, |refusal| refusal.errno())
                };
                assert_eq!(memory.count(), mapped.len());
                self.area.answer(refusal);
            }
            _ => {}
        }
    }

    fn serve_all(&mut self, input: &mut Input<'_>) {
        for _ in 0..MOST {
            if input.is_empty() {
                break;
            }
            match input.u8() % 8 {
                0..=2 => {
                    let (choice, value) = (input.u8(), input.number() as u32);
                    self.ask_orderly(choice, value);
                }
                3 => {
                    let [ahead, what, value] = [input.number(), input.number(), input.number()];
                    let epoch = (EPOCH as u32).wrapping_add(u32::from(input.u8() >> 6));
                    let seq = self.written.wrapping_add(ahead as u32);
                    self.ask([seq, what as u32, value as u32, epoch]);
                }
                4 => {
                    let ahead = input.number() as u32;
                    self.written = self.written.wrapping_add(ahead);
                    self.store(PRODUCER, &[self.written]);
                }
                5 => self.describe(input),
                6 => self.serve(),
                _ => self.go_on(),
            }
        }
        self.serve();
        assert!(self.area.is_ready(EPOCH), "the borrower has written what it is shown");
        self.lend(EPOCH + 1);
        self.ask([0, 2, 0, (EPOCH + 1) as u32]);
        let area = &self.area;
        let next = self.requests.next(area.producer(), |nth| area.entry(nth));
        assert_eq!(next, Some(FunctionRequest::Reset), "of the next lease");
    }

    /// Another process goes on with what this one knew.
    fn go_on(&mut self) {
        let saved = serde_json::to_vec(&self.requests).expect("it is plain data");
        let again: RequestRing = serde_json::from_slice(&saved).expect("it was written here");
        assert_eq!(again, self.requests);
        self.requests = again;
    }
}

/// Maps what is wanted, as far as it can be, and checks it against what is `mapped`: sizes by address. The error number.
fn map(
    memory: &mut IsolatedMemory,
    mapped: &mut BTreeMap<u64, u64>,
    wanted: MappingRequest,
) -> u32 {
    let mapping = match memory.map(wanted) {
        Ok(mapping) => mapping,
        Err(refusal) => return refusal.errno(),
    };
    let MappingRequest { iova, address, size, .. } = wanted;
    assert_eq!((mapping.iova, mapping.offset, mapping.size), (iova, address, size));
    let pages = [iova, address, size].iter().all(|it| it.is_multiple_of(PAGE as u64));
    assert!(pages && size > 0, "no whole pages: {wanted:x?}");
    assert!(address + size <= WINDOW, "outside of the window: {wanted:x?}");
    let apart = |at: u64, bytes: u64| iova + size <= at || at + bytes <= iova;
    assert!(apart(MAPPED_MSI, MSI_SIZE), "where interrupts go: {wanted:x?}");
    assert!(mapped.iter().all(|(at, bytes)| apart(*at, *bytes)), "twice: {wanted:x?}");
    mapped.insert(iova, size);
    assert!(mapped.len() <= MAPPINGS as usize, "too many");
    0
}

/// What a lender answers to a node that borrows.
fn lender_says(text: &[u8], framed: bool) {
    let (near, mut far) = UnixStream::pair().expect("there are descriptors");
    let frame = (text.len() as u32).to_le_bytes();
    let said = if framed { [&frame, text].concat() } else { text.to_vec() };
    far.write_all(&said).expect("the socket takes it");
    far.shutdown(Shutdown::Write).expect("it is open");
    match InWindow::receive(&near, "alpha") {
        Ok(found) => {
            let length = said.first_chunk().map_or(0, |length| u32::from_le_bytes(*length));
            let text = &said[4..4 + length as usize];
            assert_eq!(serde_json::from_slice::<InWindow>(text).ok(), Some(found.clone()));
            let again = serde_json::to_vec(&found).expect("it is plain data");
            assert_eq!(serde_json::from_slice::<InWindow>(&again).ok(), Some(found));
        }
        Err(LinkError::Broken { .. } | LinkError::Protocol { .. }) => {}
        Err(error) => panic!("{error}"),
    }
}

/// A device's configuration space, of which a borrower is shown a part.
fn lender_shows(found: &[u8]) {
    let mut space = vec![0; 256.max(found.len()).min(PAGE)];
    let told = found.len().min(PAGE);
    space[..told].copy_from_slice(&found[..told]);
    let Some(shown) = image::of(&space) else { return };
    let (bytes, mut at, mut steps) = (&shown.bytes, usize::from(shown.bytes[0x34]), 0);
    while at != 0 {
        assert!((0x40..0x100).contains(&at), "a capability at {at:#x}");
        steps += 1;
        assert!(steps <= 48, "the list does not end");
        at = usize::from(bytes[at + 1]);
    }
    let Writable { msix_control, device_control } = shown.writable;
    let inside = |at: u16| at == 0 || (0x40..0xff).contains(&at);
    assert!(inside(msix_control) && inside(device_control), "{:?}", shown.writable);
    assert_eq!(shown.msix.is_some(), msix_control != 0);
    assert_eq!(bytes[0x10..0x28], [0; 24], "addresses of the lender's");
}

/// Entries of a table of interrupts.
fn interrupts(input: &mut Input<'_>) {
    let size = || 1u64 << 20;
    let sizes = [0; 3].map(|_: u8| size() << (input.u8() % 8));
    let plan = WindowPlan::new(sizes[0], sizes[1], sizes[2]).expect("windows have these sizes");
    let windows = [Some(ApicWindow::whole(&plan)), ApicWindow::isolated(&plan)];
    for _ in 0..MOST {
        if input.is_empty() {
            break;
        }
        for window in windows.iter().flatten() {
            let base = window.addresses.start.wrapping_add(u64::from(input.u32())).wrapping_sub(8);
            let address = if input.u8() & 3 == 0 { input.u64() } else { base };
            let control = input.u8().into();
            let entry = [address as u32, (address >> 32) as u32, input.u8().into(), control];
            let MsiEffect::Store { offset, data } = message(entry, window) else { continue };
            assert_eq!((data, control & 1), (entry[2], 0));
            assert!(offset.is_multiple_of(4) && offset + 4 <= sizes[1], "outside: {entry:x?}");
        }
    }
}

/// A borrower that uses its function, one that maps memory for it, a lender's answers, a device and its interrupts.
pub fn seeds() -> Vec<Vec<u8>> {
    let ask = |kind: u8, value: u8| vec![0, kind, value];
    let used = [ask(0, 6), ask(1, 0x80), ask(2, 0x10), vec![6], ask(3, 0), ask(0, 2), ask(4, 0)];
    let mapping = |iova: u8, address: u8, size: u8| vec![5, iova, address, size, 3];
    let isolated = [
        vec![vec![0], ask(5, 1), vec![6], mapping(4, 0, 2), ask(6, 1), vec![6], mapping(8, 2, 1)],
        vec![ask(6, 1), vec![6], mapping(4, 0, 2), ask(6, 0), vec![6], mapping(0xc4, 0, 1)],
        // A page beyond the window, and up to its end.
        vec![ask(6, 1), vec![6], mapping(12, 15, 2), ask(6, 1), vec![6], mapping(12, 14, 2)],
        vec![ask(6, 1), vec![6, 7], ask(5, 0), vec![6]],
    ];
    let raw = [vec![0], vec![3, 0, 2, 0, 0, 3, 0, 0xf4, 1, 2, 4, 0, 6, 0, 4, 200, 6, 4, 1, 6]];
    let session = "{\"offset\":4096,\"epoch\":7,\"session\":{\"secret\":\"ab\",\"kept_ms\":30000}}";
    let said = |text: &str| [b"\x05", text.as_bytes()].concat();
    let mut space = vec![2, 0x86, 0x80, 1, 0];
    space.resize(257, 0);
    // A list of PCI Express and MSI-X, whose first one is at 0x40.
    space[1 + 6] = 0x10;
    space[1 + 0x34] = 0x40;
    space[1 + 0x40..][..4].copy_from_slice(&[0x10, 0x80, 2, 0]);
    space[1 + 0x80..][..12].copy_from_slice(&[0x11, 0, 3, 0, 0, 0x20, 0, 0, 0, 0x30, 0, 0]);
    let entries = vec![3, 6, 6, 6, 8, 0, 0, 0, 1, 0, 33, 12, 0, 0, 0, 1, 0, 34, 8, 0, 16, 0, 1, 1];
    vec![
        [vec![0], used.concat()].concat(),
        isolated.concat().concat(),
        raw.concat(),
        said("{\"offset\":4096,\"epoch\":7}"),
        said(session),
        space,
        entries,
    ]
}
