//! A bridge between two hosts whose windows lead into memory of this process: an NTB for tests.

use std::os::fd::{AsFd, BorrowedFd};
use std::sync::atomic::{AtomicBool, Ordering, fence};
use std::sync::{Arc, Mutex, OnceLock};

use rackbus_link::ntb::{ArenaLayout, Arenas, NtbDriver, OpenNtb};
use rackbus_memory::{Event, SharedMemory};

/// What a host has of the bridge, as its peer's stores find it.
#[derive(Debug, Clone)]
pub struct Place {
    pub arena: SharedMemory,
    bell: Arc<Event>,
}

impl Place {
    fn new(layout: ArenaLayout) -> Place {
        let arena = SharedMemory::create("arena", layout.bytes()).unwrap();
        Place { arena, bell: Arc::new(Event::new().unwrap()) }
    }
}

/// Called before a store: with the end that stores, and the offset in its peer's arena.
pub type BeforeStore = Box<dyn Fn(usize, u32) + Send + Sync>;

/// The bridge between two hosts: what each has of it, or had last.
#[derive(Clone)]
pub struct Cable {
    pub layout: ArenaLayout,
    places: Arc<[Mutex<Place>; 2]>,
    pub works: Arc<AtomicBool>,
    /// At each end, whether the link went down.
    pub cut: Arc<[AtomicBool; 2]>,
    /// At each end, whether somebody has it open: its device is given to one at a time.
    open: Arc<[AtomicBool; 2]>,
    /// At each end, whether its stores are lost, as those of a process that was killed.
    pub silent: Arc<[AtomicBool; 2]>,
    /// What a test does while an end stores, if it does anything.
    pub before_store: Arc<OnceLock<BeforeStore>>,
}

impl Cable {
    pub fn new() -> Cable {
        let layout = ArenaLayout::within([512 << 10, 64 << 20]).unwrap();
        let places = [Place::new(layout), Place::new(layout)].map(Mutex::new);
        let works = Arc::new(AtomicBool::new(true));
        let (cut, open, silent, before_store) = Default::default();
        Cable { layout, places: Arc::new(places), works, cut, open, silent, before_store }
    }

    pub fn place(&self, end: usize) -> Place {
        self.places[end].lock().unwrap().clone()
    }

    /// Opens an end, as a driver does that has just started: with an arena of its own. It is busy while another has it open.
    pub fn opening(&self, end: usize) -> OpenNtb {
        let cable = self.clone();
        Box::new(move || {
            if cable.open[end].swap(true, Ordering::Relaxed) {
                return Err(std::io::ErrorKind::ResourceBusy.into());
            }
            let own = Place::new(cable.layout);
            *cable.places[end].lock().unwrap() = own.clone();
            cable.works.store(true, Ordering::Relaxed);
            // The link comes up, or went down and comes up again, which both ends see.
            cable.cut.iter().for_each(|cut| cut.store(true, Ordering::Relaxed));
            Ok(Box::new(CableEnd { cable: cable.clone(), own, end }))
        })
    }
}

struct CableEnd {
    cable: Cable,
    own: Place,
    end: usize,
}

impl Drop for CableEnd {
    fn drop(&mut self) {
        self.cable.open[self.end].store(false, Ordering::Relaxed);
    }
}

impl Arenas for CableEnd {
    fn load(&self, at: u32) -> u32 {
        self.own.arena.whole().load_u32(at as usize, Ordering::Acquire).unwrap()
    }

    fn copy(&self, at: u32, out: &mut [u8]) {
        let whole = self.own.arena.whole();
        assert_eq!(whole.part(at as usize, out.len()).unwrap().copy_to(out), out.len());
    }

    fn clear(&self, at: u32, bytes: u32) {
        self.own.arena.whole().part(at as usize, bytes as usize).unwrap().fill(0);
    }

    fn store(&self, at: u32, words: &[u32]) {
        if let Some(before_store) = self.cable.before_store.get() {
            before_store(self.end, at);
        }
        if self.cable.silent[self.end].load(Ordering::Relaxed) {
            return;
        }
        let peer = self.cable.place(1 - self.end);
        fence(Ordering::Release);
        for (at, word) in (at as usize..).step_by(4).zip(words) {
            peer.arena.whole().store_u32(at, *word, Ordering::Release).unwrap();
        }
    }

    fn was_cut(&self) -> bool {
        self.cable.cut[self.end].swap(false, Ordering::Relaxed)
    }
}

impl NtbDriver for CableEnd {
    fn layout(&self) -> ArenaLayout {
        self.cable.layout
    }

    fn ring(&self) {
        self.cable.place(1 - self.end).bell.ring();
    }

    fn bell(&self) -> BorrowedFd<'_> {
        self.own.bell.as_fd()
    }

    fn answer(&self) -> bool {
        self.own.bell.drain()
    }

    fn works(&self) -> bool {
        self.cable.works.load(Ordering::Relaxed)
    }
}
