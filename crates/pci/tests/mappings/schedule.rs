//! What users do, and what happens to them.

use rackbus_memory::Access;
use rackbus_seeds::Random;

use super::files::{FILES, PAGES, USERS_FILES};

/// Pages of a function's addresses that are used.
pub const ADDRESSES: u64 = 10;

/// A range of a function's addresses, in pages.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Range {
    pub first: u64,
    pub pages: u64,
}

impl Range {
    pub fn end(self) -> u64 {
        self.first + self.pages
    }

    pub fn meets(self, other: Range) -> bool {
        self.first < other.end() && other.first < self.end()
    }
}

/// A page of a file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Source {
    pub file: usize,
    pub page: u64,
}

#[derive(Debug, Clone, Copy)]
pub enum Step {
    Map(Range, Access, Option<Source>),
    /// One of the mappings that there are, once more; one that lost its memory with that which it had.
    MapAgain(usize),
    Unmap(Range),
    /// Exactly one of the mappings that there are.
    UnmapOne(usize),
    UnmapAll,
    /// A window to the BAR from this page on.
    Open(Range, u64),
    Close(Range),
    CloseOne(usize),
    /// The file of one of the mappings, or of one of the windows (`true`), ends with that one's first page, or where
    /// it begins.
    TruncateOne(usize, bool, u64),
    /// A file has so many pages from now on.
    Resize(usize, u64),
    /// The function reads, or writes this word into each page.
    Access(Range, Option<u64>),
    /// The same of all that one of the mappings or windows has.
    AccessOne(usize, bool, Option<u64>),
    /// The function looks up the memory of an access.
    Pin(Range, bool),
    /// The same of all that one of the mappings or windows has.
    PinOne(usize, bool, bool),
    /// An access that was looked up touches a page of its memory.
    Touch(usize, u64, Option<u64>),
    /// An access that was looked up lets go of its memory.
    Unpin(usize),
    /// The function's thread looks whether memory was truncated or revoked.
    Notice,
    /// All memory is released.
    DropMemory,
    /// All memory is taken away from outside, whatever the function's thread does.
    Revoke,
    Master(bool),
    /// The conversation ends, with the endpoint or not; the next is with this borrower.
    End(bool, usize),
    /// It continues in another endpoint, or here after all.
    Succeed(bool),
}

/// A step, and whose it is.
#[derive(Debug, Clone, Copy)]
pub struct UserStep {
    pub user: usize,
    /// Whether the driver sees to it first that the function may master the bus.
    pub masters: bool,
    pub step: Step,
}

pub fn step(random: &mut Random) -> UserStep {
    let user = random.below(2);
    let range = |random: &mut Random| {
        let pages = if random.chance(3) { 0 } else { 1 + random.below(3) as u64 };
        Range { first: random.below(ADDRESSES as usize) as u64, pages }
    };
    let store = |random: &mut Random| random.chance(60).then(|| random.next() | 1);
    let (which, window) = (random.below(8), random.chance(30));
    let step = match random.below(116) {
        0..18 => {
            let access = [Access::READ, Access::WRITE, Access::all(), Access::all()];
            let access = access[random.below(4)];
            let (file, page) = (random.below(USERS_FILES), random.below(PAGES as usize) as u64);
            let memory = random.chance(90).then_some(Source { file, page });
            Step::Map(range(random), access, memory)
        }
        18..24 => Step::MapAgain(which),
        24..27 => Step::Unmap(range(random)),
        27..33 => Step::UnmapOne(which),
        33 => Step::UnmapAll,
        34..39 => Step::Open(range(random), random.below(PAGES as usize) as u64),
        39 => Step::Close(range(random)),
        40..42 => Step::CloseOne(which),
        42..44 => Step::Resize(random.below(FILES), random.below(PAGES as usize) as u64),
        44..47 => Step::Resize(random.below(FILES), PAGES),
        47..58 => Step::Access(range(random), store(random)),
        58..72 => Step::AccessOne(which, window, store(random)),
        72..74 => Step::Pin(range(random), random.chance(60)),
        74..80 => Step::PinOne(which, window, random.chance(60)),
        80..92 => Step::Touch(which, random.below(3) as u64, store(random)),
        92..95 => Step::Unpin(which),
        95..102 => Step::Notice,
        102 => Step::DropMemory,
        103..105 => Step::Revoke,
        105 => Step::Master(random.chance(70)),
        106..109 => Step::End(random.chance(70), random.below(2)),
        109 => Step::Succeed(false),
        110 => Step::Succeed(true),
        111 => Step::Master(true),
        _ => Step::TruncateOne(which, window, random.below(2) as u64),
    };
    UserStep { user, masters: random.chance(90), step }
}
