//! Both users with their functions, and the model beside them: each step is taken by both, and they agree.

use rackbus_fabric::{
    BarPlace, ComponentId, CountedBytes, Fabric, FabricHandle, Lending, ObjectKey, Place, Requester,
};
use rackbus_memory::space::{Behind, DmaMapping};
use rackbus_memory::{Access, MemoryHandle, PinnedPieces};
use rackbus_pci::FunctionState;

use super::files::{BAR, BORROWERS, BOUND, BOUNDED, FUNCTIONS, Files, PAGE, PEER};
use super::model::{MOST_LENT, Mapping, Model, length};
use super::schedule::{Range, Source, Step, UserStep};
use super::subject::{Policy, Subject};

pub struct World<'f> {
    files: &'f Files,
    fabric: FabricHandle,
    policy: Policy,
    subjects: Vec<Subject>,
    /// Accesses that were looked up, by function: whether each writes.
    pins: [Vec<(PinnedPieces, bool)>; 2],
    model: Model,
    /// All but some pages of what the bounded borrower may lend.
    _counted: CountedBytes,
}

/// That both do the same.
fn same<T: PartialEq + std::fmt::Debug>(what: &str, found: T, expected: T) -> Result<(), String> {
    if found == expected {
        return Ok(());
    }
    Err(format!("{what}: {found:x?}, where the model has {expected:x?}"))
}

impl<'f> World<'f> {
    pub fn new(files: &'f Files, policy: Policy) -> Result<World<'f>, String> {
        files.renew();
        let fabric = FabricHandle::new(Fabric::new(files.topology.clone()));
        let bounded = fabric.host(BORROWERS[BOUNDED]).ok_or("no such host")?;
        let most = BOUND - MOST_LENT as u64 * PAGE;
        let counted = fabric.count(bounded, ObjectKey(0, 0), 0, most).map_err(|e| e.to_string())?;
        let mut world = World {
            files,
            fabric,
            policy,
            subjects: Vec::new(),
            pins: Default::default(),
            model: Model::new(),
            _counted: counted,
        };
        for user in 0..FUNCTIONS.len() {
            world.subjects.push(Subject::new(policy, world.lending(user, 0)));
        }
        Ok(world)
    }

    fn lending(&self, user: usize, borrower: usize) -> Lending {
        self.fabric.lending(FUNCTIONS[user], BORROWERS[borrower]).expect("both are of the rack")
    }

    fn handle(&self, source: Source) -> MemoryHandle {
        self.files.handle(source.file, source.page)
    }

    pub fn take(&mut self, step: &UserStep) -> Result<(), String> {
        let UserStep { user: who, masters, step } = step;
        let who = *who;
        if *masters && !self.model.users[who].master {
            self.take_loss(who, &Step::Master(true))?;
        }
        match *step {
            Step::Map(range, access, source) => self.map(who, range, access, source),
            Step::MapAgain(which) => {
                let again = self.one(who, which, false).map(|it| (it.range, it.access, it.source));
                let Some((range, access, source)) = again else { return Ok(()) };
                let lost = Source { file: who, page: 0 };
                self.map(who, range, access, source.or(Some(lost)))
            }
            Step::Unmap(range) => self.unmap(who, range),
            Step::UnmapOne(which) => {
                let one = self.one(who, which, false).map(|it| it.range);
                one.map_or(Ok(()), |range| self.unmap(who, range))
            }
            Step::UnmapAll => {
                same("unmapped", self.subjects[who].unmap_all(), self.model.unmap_all(who))
            }
            Step::Open(range, page) => {
                let place = BarPlace { function: PEER.to_owned(), bar: 2, offset: page * PAGE };
                let opened = self.subjects[who].open(range, place, self.files.handle(BAR, page));
                same("opened", opened, self.model.open(who, range, page))
            }
            Step::Close(range) => self.close(who, range),
            Step::CloseOne(which) => {
                let one = self.one(who, which, true);
                one.map(|it| it.range).map_or(Ok(()), |range| self.close(who, range))
            }
            Step::TruncateOne(which, window, left) => {
                let source = self.one(who, which, window).and_then(|it| it.source);
                source.map_or(Ok(()), |it| self.resize(it.file, it.page + left))
            }
            Step::Resize(file, pages) => self.resize(file, pages),
            Step::AccessOne(which, window, store) => {
                let range = self.one(who, which, window).map(|it| it.range);
                range.map_or(Ok(()), |range| self.take_access(who, &Step::Access(range, store)))
            }
            Step::PinOne(which, window, write) => {
                let range = self.one(who, which, window).map(|it| it.range);
                range.map_or(Ok(()), |range| self.take_access(who, &Step::Pin(range, write)))
            }
            Step::Access(..) | Step::Pin(..) | Step::Touch(..) | Step::Unpin(_) => {
                self.take_access(who, step)
            }
            _ => self.take_loss(who, step),
        }
    }

    fn map(
        &mut self,
        who: usize,
        range: Range,
        access: Access,
        source: Option<Source>,
    ) -> Result<(), String> {
        let memory = source.map(|source| self.handle(source));
        let mapped = self.subjects[who].map(range, access, memory);
        same("mapped", mapped, self.model.map(who, range, access, source))
    }

    /// One of a user's mappings, or of its windows.
    fn one(&self, who: usize, which: usize, window: bool) -> Option<&Mapping> {
        let user = &self.model.users[who];
        let of = if window { &user.windows } else { &user.own };
        of.values().nth(which % of.len().max(1))
    }

    fn resize(&mut self, file: usize, pages: u64) -> Result<(), String> {
        self.files.resize(file, pages);
        self.model.resize(file, pages);
        Ok(())
    }

    fn unmap(&mut self, who: usize, range: Range) -> Result<(), String> {
        same("unmapped", self.subjects[who].unmap(range), self.model.unmap(who, range))
    }

    fn close(&mut self, who: usize, range: Range) -> Result<(), String> {
        same("closed", self.subjects[who].close(range), self.model.close(who, range))
    }

    fn take_access(&mut self, who: usize, step: &Step) -> Result<(), String> {
        match *step {
            Step::Access(range, store) if range.pages > 0 => {
                let dma = self.subjects[who].dma();
                let (iova, mut bytes) = (range.first * PAGE, vec![0; length(range)]);
                let outcome = match store {
                    None => dma.read(iova, &mut bytes),
                    Some(word) => {
                        bytes = word.to_ne_bytes().repeat(bytes.len() / size_of::<u64>());
                        dma.write(iova, &bytes)
                    }
                };
                let words = outcome.is_ok().then(|| words(&bytes));
                same("read or written", words, self.model.access(who, range, store))
            }
            Step::Pin(range, write) if range.pages > 0 => {
                let access = if write { Access::WRITE } else { Access::READ };
                let dma = self.subjects[who].dma();
                let pinned = dma.pin_pieces(range.first * PAGE, length(range), access).ok();
                let is_pinned = pinned.is_some();
                self.pins[who].extend(pinned.map(|pieces| (pieces, write)));
                same("looked up", is_pinned, self.model.pin(who, range, write))
            }
            Step::Touch(which, page, store) => {
                let which = which % self.pins[who].len().max(1);
                let Some((pieces, write)) = self.pins[who].get(which) else { return Ok(()) };
                let store = store.filter(|_| *write);
                let slice = pieces.at((page * PAGE) as usize, size_of::<u64>());
                if let (Some(slice), Some(word)) = (slice, store) {
                    slice.write_obj(0, &word);
                }
                let found = slice.and_then(|slice| slice.read_obj(0));
                same("touched", found, self.model.touch_pinned(who, which, page as usize, store))
            }
            Step::Unpin(which) if !self.pins[who].is_empty() => {
                let which = which % self.pins[who].len();
                self.pins[who].remove(which);
                self.model.users[who].pins.remove(which);
                Ok(())
            }
            _ => Ok(()),
        }
    }

    /// What a function loses, and how it continues.
    fn take_loss(&mut self, who: usize, step: &Step) -> Result<(), String> {
        match *step {
            Step::Notice => {
                self.subjects[who].notice();
                self.model.notice(who);
            }
            Step::DropMemory => {
                self.subjects[who].drop_memory();
                self.model.drop_memory(who);
            }
            Step::Revoke => {
                self.subjects[who].revoke();
                self.model.revoke(who);
            }
            Step::Master(on) => {
                self.subjects[who].set_master(on);
                self.model.users[who].master = on;
            }
            Step::End(keep, borrower) => {
                let lending = self.lending(who, borrower);
                match keep {
                    true => self.subjects[who].begin(lending),
                    // With its function, which has no accesses under way then.
                    false => {
                        self.pins[who].clear();
                        self.model.users[who].pins.clear();
                        self.subjects[who] = Subject::new(self.policy, lending);
                    }
                }
                self.model.end(who, borrower, !keep);
            }
            Step::Succeed(back) => return self.succeed(who, back),
            _ => {}
        }
        Ok(())
    }

    fn succeed(&mut self, who: usize, back: bool) -> Result<(), String> {
        let saved = self.subjects[who].endpoint().save();
        same("saved", saved.is_ok(), self.model.can_be_saved(who))?;
        let Ok(saved) = saved else { return Ok(()) };
        if back {
            return self.subjects[who].endpoint().take_back(saved).map_err(|e| e.to_string());
        }
        // As in another process, which has a fabric of its own or the former life's end.
        self.subjects[who].endpoint().scrub();
        let function = self.function(who)?;
        let left = self.fabric.with(|it| it.domain(function).map_or(0, |it| it.iter().count()));
        same("reached by what ended", left, 0)?;
        let bytes = saved.state.to_bytes().map_err(|e| e.to_string())?;
        let state = FunctionState::from_bytes(&bytes).map_err(|e| e.to_string())?;
        let lending = self.lending(who, self.model.users[who].borrower);
        self.subjects[who] = Subject::new(self.policy, lending);
        let restored = self.subjects[who].endpoint().restore(&state, saved.descriptors).is_ok();
        same("restored", restored, self.model.succeed(who))
    }

    fn function(&self, who: usize) -> Result<ComponentId, String> {
        let found = self.fabric.with(|fabric| fabric.topology().named(FUNCTIONS[who]));
        found.ok_or_else(|| "no such function".to_owned())
    }

    /// What holds after each step.
    pub fn check(&self) -> Result<(), String> {
        for (who, name) in FUNCTIONS.iter().enumerate() {
            let checked = self.check_endpoint(who).and_then(|()| self.check_fabric(who));
            checked.map_err(|error| format!("{name}: {error}"))?;
        }
        for (file, words) in self.model.files.iter().enumerate() {
            for (page, word) in words.iter().enumerate() {
                let found = self.files.word(file, page);
                if found != *word {
                    same(&format!("page {page} of file {file}"), found, *word)?;
                }
            }
        }
        Ok(())
    }

    fn check_endpoint(&self, who: usize) -> Result<(), String> {
        let (dma, user) = (self.subjects[who].dma(), &self.model.users[who]);
        let object = |source: Source| (self.files.object(source.file), source.page * PAGE);
        let expected = |it: &Mapping| (it.range, it.access, it.source.map(object));
        let found = |it: DmaMapping<'_>| {
            let behind = match it.behind {
                Behind::Nothing => None,
                Behind::Kept(_, object, offset) | Behind::NotKept(object, offset) => {
                    Some((*object, *offset))
                }
            };
            (Range { first: it.iova / PAGE, pages: it.length / PAGE }, it.access, behind)
        };
        if !dma.mappings().map(found).eq(user.own.values().map(expected)) {
            let all = (dma.mappings().map(found).collect(), user.own.values().map(expected));
            same::<Vec<_>>("mappings", all.0, all.1.collect())?;
        }
        if !dma.windows().map(|it| found(it.0)).eq(user.windows.values().map(expected)) {
            let found: Vec<_> = dma.windows().map(|it| found(it.0)).collect();
            same("windows", found, user.windows.values().map(expected).collect())?;
        }
        same("how many there are", dma.len(), user.own.len() + user.windows.len())?;
        same("bus mastering", dma.master(), user.master)?;
        same("refusals", dma.refusals().get().0, user.refusals)?;
        same("bytes of windows", dma.peer_bytes().get(), user.peer_bytes)
    }

    /// The fabric has what is lent and nothing else, and each leads where it should.
    fn check_fabric(&self, who: usize) -> Result<(), String> {
        let (function, user) = (self.function(who)?, &self.model.users[who]);
        let (owner, peer) = self.fabric.with(|fabric| {
            let topology = fabric.topology();
            (topology.host_named(BORROWERS[user.borrower]), topology.named(PEER))
        });
        let (Some(host), Some(device)) = (owner, peer) else {
            return Err("no such host".to_owned());
        };
        let mut lent = 0;
        for mapping in user.own.values().chain(user.windows.values()).filter(|it| it.lent) {
            lent += 1;
            let Some(Source { file, page }) = mapping.source else { continue };
            let (object, offset) = (self.files.object(file), page * PAGE);
            let place = match file {
                BAR => Place::Bar { device, bar: 2, offset },
                _ => Place::Lent { host, object, offset },
            };
            let (iova, length) = (mapping.range.first * PAGE, mapping.range.pages * PAGE);
            let requester = Requester::Device(function);
            let found = self.fabric.with(|it| it.resolve(requester, iova, length, mapping.access));
            let found = found.map(|it| (it.place, it.length)).map_err(|error| error.to_string())?;
            same("where a loan leads", found, (place, length))?;
        }
        let loans = self.fabric.with(|it| it.domain(function).map_or(0, |it| it.iter().count()));
        same("loans", loans, lent)
    }

    /// Both users go, each in another way: nothing is left. `mapped`: of the process's mappings as well.
    pub fn end(mut self, mapped: bool) -> Result<(), String> {
        self.subjects[0].endpoint().scrub();
        self.pins = Default::default();
        self.subjects.clear();
        for who in 0..FUNCTIONS.len() {
            let function = self.function(who)?;
            let left = self.fabric.with(|it| it.domain(function).map_or(0, |it| it.iter().count()));
            same("loans that are left", left, 0)?;
        }
        let hosts = self.fabric.with(|fabric| {
            let spaces = fabric.topology().hosts().filter_map(|(host, _)| fabric.space(host));
            spaces.map(|space| space.iter().count()).sum::<usize>()
        });
        same("what hosts' addresses lead to at the end", hosts, 0)?;
        let bounded = self.fabric.host(BORROWERS[BOUNDED]).ok_or("no such host")?;
        let all = self.fabric.count(bounded, ObjectKey(0, 1), 0, MOST_LENT as u64 * PAGE);
        all.map_err(|error| format!("bytes that nobody lends: {error}"))?;
        same("files that are held", self.files.holders(), 0)?;
        if mapped {
            same("mappings of the process", self.files.mapped(), 0)?;
        }
        Ok(())
    }
}

/// The first word of each page.
fn words(bytes: &[u8]) -> Vec<u64> {
    let first = |page: &[u8]| page.first_chunk().map(|word| u64::from_ne_bytes(*word));
    bytes.chunks(PAGE as usize).filter_map(first).collect()
}
