//! Who reaches what now: a plain model, without loans, domains or system calls.

use std::collections::{BTreeMap, BTreeSet};

use rackbus_memory::Access;

use super::files::{BAR, BOUNDED, FILES, PAGE, PAGES};
use super::schedule::{Range, Source};

/// Pages that the bounded borrower may lend together.
pub const MOST_LENT: usize = 10;

/// Where the bytes of a mapped page are.
#[derive(Debug, Clone, Copy)]
enum Bytes {
    File(Source),
    /// In memory that nobody else has: the page's first word.
    Private(u64),
}

/// Memory as it was mapped once: accesses may hold it longer than its mapping lasts.
#[derive(Debug)]
struct MappedMemory {
    pages: Vec<Bytes>,
    truncated: bool,
}

/// A mapping of a user, or a window.
#[derive(Debug)]
pub struct Mapping {
    pub range: Range,
    pub access: Access,
    pub source: Option<Source>,
    /// Whether the fabric has it.
    pub lent: bool,
    memory: Option<usize>,
}

/// An access that was looked up: the mapped memory and the page in it, for each page.
type LookedUp = Vec<(usize, usize)>;

#[derive(Debug, Default)]
pub struct User {
    pub borrower: usize,
    pub master: bool,
    revoked: bool,
    pub own: BTreeMap<u64, Mapping>,
    pub windows: BTreeMap<u64, Mapping>,
    pub refusals: u64,
    /// Bytes read from windows, and written.
    pub peer_bytes: (u64, u64),
    pub pins: Vec<LookedUp>,
}

#[derive(Debug)]
pub struct Model {
    /// The first word of each page that a file has.
    pub files: [Vec<u64>; FILES],
    memory: Vec<MappedMemory>,
    pub users: [User; 2],
}

/// Bytes of an access: of its last page, the first word.
pub fn length(range: Range) -> usize {
    ((range.pages - 1) * PAGE) as usize + size_of::<u64>()
}

impl Model {
    pub fn new() -> Model {
        let files = std::array::from_fn(|_| vec![0; PAGES as usize]);
        Model { files, memory: Vec::new(), users: Default::default() }
    }

    fn is_in_file(&self, range: Range, source: Source) -> bool {
        source.page + range.pages <= self.files[source.file].len() as u64
    }

    fn memory(&mut self, range: Range, source: Source) -> usize {
        let page = |nth| Bytes::File(Source { page: source.page + nth, ..source });
        let pages = (0..range.pages).map(page).collect();
        self.memory.push(MappedMemory { pages, truncated: false });
        self.memory.len() - 1
    }

    /// Nothing of it is reached any more, whoever holds it.
    fn revoke_memory(&mut self, memory: Option<usize>) {
        if let Some(memory) = memory {
            self.memory[memory].pages.fill(Bytes::Private(0));
        }
    }

    fn revoke_all(&mut self, mappings: &BTreeMap<u64, Mapping>) {
        mappings.values().for_each(|it| self.revoke_memory(it.memory));
    }

    /// Whether the borrower may lend these pages as well.
    fn may_lend(&self, borrower: usize, range: Range, source: Source) -> bool {
        let users = self.users.iter().filter(|user| user.borrower == borrower);
        let lent = users.flat_map(|user| user.own.values()).filter(|it| it.lent);
        let pages = |range: Range, source: Source| {
            (0..range.pages).map(move |nth| (source.file, source.page + nth))
        };
        let mut all: BTreeSet<_> =
            lent.filter_map(|it| Some(pages(it.range, it.source?))).flatten().collect();
        all.extend(pages(range, source));
        borrower != BOUNDED || all.len() <= MOST_LENT
    }

    pub fn map(&mut self, who: usize, range: Range, access: Access, from: Option<Source>) -> bool {
        let user = &self.users[who];
        let there =
            user.own.get(&range.first).filter(|it| (it.range, it.access) == (range, access));
        let source = there.map(|it| it.source);
        if source == Some(from) {
            return true;
        }
        // What lost its memory, or never had any, may be given some.
        let empty = source == Some(None);
        let meets = user.own.values().any(|it| it.range.meets(range));
        if range.pages == 0 || meets && !empty {
            return false;
        }
        let Some(source) = from else {
            let mapping = Mapping { range, access, source: None, lent: false, memory: None };
            self.users[who].own.insert(range.first, mapping);
            return true;
        };
        let refused = user.revoked || !self.may_lend(user.borrower, range, source);
        if refused || !self.is_in_file(range, source) {
            return false;
        }
        self.close_windows(who, |_, window| window.range.meets(range));
        let memory = Some(self.memory(range, source));
        let mapping = Mapping { range, access, source: from, lent: true, memory };
        self.users[who].own.insert(range.first, mapping);
        true
    }

    pub fn unmap(&mut self, who: usize, range: Range) -> bool {
        let own = &mut self.users[who].own;
        let inside = |it: &Mapping| it.range.first >= range.first && it.range.end() <= range.end();
        let mut met = own.values().filter(|it| it.range.meets(range)).peekable();
        if range.pages == 0 || met.peek().is_none() || !met.all(inside) {
            return false;
        }
        let met = |(_, it): &(u64, Mapping)| it.range.meets(range);
        let (gone, left) = std::mem::take(own).into_iter().partition(met);
        *own = left;
        self.revoke_all(&gone);
        true
    }

    pub fn unmap_all(&mut self, who: usize) -> usize {
        let own = std::mem::take(&mut self.users[who].own);
        self.revoke_all(&own);
        own.len()
    }

    pub fn open(&mut self, who: usize, range: Range, page: u64) -> bool {
        let user = &self.users[who];
        let source = Source { file: BAR, page };
        let there = user.windows.get(&range.first);
        if there.is_some_and(|it| (it.range, it.source) == (range, Some(source))) {
            return true;
        }
        let met = |it: &Mapping| it.range.meets(range);
        let own = user.own.values().filter(|it| it.source.is_some()).any(met);
        if range.pages == 0 || user.revoked || own || user.windows.values().any(met) {
            return false;
        }
        if !self.is_in_file(range, source) {
            return false;
        }
        let memory = Some(self.memory(range, source));
        let (access, source) = (Access::all(), Some(source));
        let window = Mapping { range, access, source, lent: true, memory };
        self.users[who].windows.insert(range.first, window);
        true
    }

    pub fn close(&mut self, who: usize, range: Range) -> bool {
        self.close_windows(who, |_, window| window.range == range)
    }

    /// Whether there were any.
    fn close_windows(&mut self, who: usize, which: impl Fn(&Model, &Mapping) -> bool) -> bool {
        let windows = std::mem::take(&mut self.users[who].windows);
        let (closed, left) = windows.into_iter().partition(|(_, it)| which(self, it));
        self.users[who].windows = left;
        self.revoke_all(&closed);
        !closed.is_empty()
    }

    fn is_truncated(&self, mapping: &Mapping) -> bool {
        mapping.memory.is_some_and(|memory| self.memory[memory].truncated)
    }

    pub fn notice(&mut self, who: usize) {
        self.close_windows(who, |model, window| model.is_truncated(window));
        let user = &self.users[who];
        let truncated = user.own.values().any(|it| self.is_truncated(it));
        let any = !user.own.is_empty() || !user.windows.is_empty();
        if truncated || user.revoked && any {
            self.drop_memory(who);
            self.users[who].master = false;
        }
    }

    pub fn drop_memory(&mut self, who: usize) {
        self.close_windows(who, |_, _| true);
        let mut own = std::mem::take(&mut self.users[who].own);
        for mapping in own.values_mut() {
            self.revoke_memory(mapping.memory.take());
            (mapping.source, mapping.lent) = (None, false);
        }
        self.users[who].own = own;
    }

    pub fn revoke(&mut self, who: usize) {
        let user = &mut self.users[who];
        user.revoked = true;
        let mut held = Vec::new();
        for mapping in user.own.values_mut().chain(user.windows.values_mut()) {
            mapping.lent = false;
            held.push(mapping.memory);
        }
        held.into_iter().for_each(|memory| self.revoke_memory(memory));
    }

    /// The user's conversation ends, and one with this borrower begins; `anew` in an endpoint as new.
    pub fn end(&mut self, who: usize, borrower: usize, anew: bool) {
        self.unmap_all(who);
        self.close_windows(who, |_, _| true);
        let user = &mut self.users[who];
        (user.borrower, user.master, user.revoked) = (borrower, false, false);
        if anew {
            (user.refusals, user.peer_bytes) = (0, (0, 0));
        }
    }

    /// Whether a function can be saved.
    pub fn can_be_saved(&self, who: usize) -> bool {
        let user = &self.users[who];
        !user.revoked || user.own.is_empty() && user.windows.is_empty()
    }

    /// It continues in an endpoint as new, if all that it had can be mapped there; whether it does.
    pub fn succeed(&mut self, who: usize) -> bool {
        let user = &mut self.users[who];
        let (borrower, master) = (user.borrower, user.master);
        let own = std::mem::take(&mut user.own);
        let windows = std::mem::take(&mut user.windows);
        self.end(who, borrower, true);
        self.revoke_all(&own);
        self.revoke_all(&windows);
        let mapped = own.values().all(|it| self.map(who, it.range, it.access, it.source));
        let opened = |model: &mut Model, it: &Mapping| {
            it.source.is_some_and(|source| model.open(who, it.range, source.page))
        };
        if mapped && windows.values().all(|it| opened(self, it)) {
            self.users[who].master = master;
            return true;
        }
        self.end(who, borrower, false);
        false
    }

    pub fn resize(&mut self, file: usize, pages: u64) {
        self.files[file].resize(pages as usize, 0);
    }

    /// The memory of an access, if all of it is reached; what is refused is counted.
    fn look_up(&mut self, who: usize, range: Range, access: Access) -> Option<LookedUp> {
        let user = &self.users[who];
        let memory_at = |page: u64| {
            let at = |it: &&Mapping| (it.range.first..it.range.end()).contains(&page);
            let own = user.own.values().filter(|it| it.memory.is_some()).find(at);
            let found = own.or_else(|| user.windows.values().find(at))?;
            let memory = found.memory.filter(|_| found.access.contains(access) && user.master)?;
            let there = !self.memory[memory].truncated;
            there.then_some((memory, (page - found.range.first) as usize, found.source?.file))
        };
        let found: Option<Vec<_>> = (range.first..range.end()).map(memory_at).collect();
        let user = &mut self.users[who];
        let Some(found) = found else {
            user.refusals += 1;
            return None;
        };
        for (nth, (_, _, file)) in found.iter().enumerate() {
            let bytes = if nth + 1 == found.len() { size_of::<u64>() as u64 } else { PAGE };
            let bytes = if *file == BAR { bytes } else { 0 };
            match access.contains(Access::WRITE) {
                true => user.peer_bytes.1 += bytes,
                false => user.peer_bytes.0 += bytes,
            }
        }
        Some(found.into_iter().map(|(memory, page, _)| (memory, page)).collect())
    }

    /// Touches a page; its first word afterwards.
    fn touch(&mut self, (memory, page): (usize, usize), store: Option<u64>) -> u64 {
        let memory = &mut self.memory[memory];
        let bytes = &mut memory.pages[page];
        if let Bytes::File(source) = *bytes
            && source.page >= self.files[source.file].len() as u64
        {
            // The system has no page there any more, and the guard gives one.
            *bytes = Bytes::Private(0);
            memory.truncated = true;
        }
        let word = match bytes {
            Bytes::File(source) => &mut self.files[source.file][source.page as usize],
            Bytes::Private(word) => word,
        };
        *word = store.unwrap_or(*word);
        *word
    }

    /// An access at once; the words that it reads, or that are there when it has written.
    pub fn access(&mut self, who: usize, range: Range, store: Option<u64>) -> Option<Vec<u64>> {
        let access = if store.is_some() { Access::WRITE } else { Access::READ };
        let found = self.look_up(who, range, access)?;
        Some(found.into_iter().map(|page| self.touch(page, store)).collect())
    }

    pub fn pin(&mut self, who: usize, range: Range, write: bool) -> bool {
        let access = if write { Access::WRITE } else { Access::READ };
        let found = self.look_up(who, range, access);
        let pinned = found.is_some();
        self.users[who].pins.extend(found);
        pinned
    }

    /// An access that was looked up touches its `page`th page.
    pub fn touch_pinned(
        &mut self,
        who: usize,
        which: usize,
        page: usize,
        store: Option<u64>,
    ) -> Option<u64> {
        let page = *self.users[who].pins.get(which)?.get(page)?;
        Some(self.touch(page, store))
    }
}
