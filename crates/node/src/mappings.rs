//! What a function that is not modelled here was given of memory: by its user, and by windows to other functions'
//! BARs. The function itself is behind an IOMMU of the machine, or another program's.
//!
//! It decides as [`DmaSpace`](rackbus_memory::DmaSpace) does for functions that are modelled. What the user maps without
//! memory says nothing of what is there, so it is noted beside the windows. Where the user maps memory of its own, that
//! is what it means by the address, and windows there are closed.

use rackbus_fabric::{BarPlace, Domain, LentMemory, Loan};
use rackbus_memory::{Access, Lending, MapError, MemoryHandle, UnmapError};
use rackbus_pci::vfio_user::{RequestRefused, UserMapping};
use rustix::io::Errno;

/// What maps memory for the function.
pub(crate) trait MapsMemory {
    /// Lets the function reach `memory`, as long as the loan. `window`: it is part of another function's BAR.
    ///
    /// # Errors
    /// Nothing is mapped then.
    fn map(
        &self,
        range: (u64, u64),
        access: Access,
        memory: &MemoryHandle,
        window: bool,
    ) -> Result<(), RequestRefused>;

    /// Takes exactly this range away. On return nothing reaches it.
    ///
    /// # Errors
    /// It is reached as before then.
    fn unmap(&self, range: (u64, u64)) -> Result<(), RequestRefused>;
}

/// A mapping; without memory it leads nowhere.
type Mapped = Loan<Option<MemoryHandle>>;

/// What one function was given. Dropping it ends the loans, and takes nothing from the function.
#[derive(Debug, Default)]
pub(crate) struct Mappings {
    own: Domain<Mapped>,
    windows: Domain<(Mapped, BarPlace)>,
}

impl Mappings {
    /// Lends anew what the function was given in another process, and reaches already. It has nothing of this one's.
    ///
    /// # Errors
    /// Not all of it is lent here. What is, stays so: it is not to be ended before the function is made to release it.
    pub fn resume(
        &mut self,
        lending: &Lending,
        own: Vec<UserMapping>,
        windows: Vec<(UserMapping, BarPlace)>,
    ) -> Result<(), RequestRefused> {
        for UserMapping { iova, length, access, memory } in own {
            self.map((lending, &ReachedAlready), (iova, length), access, memory)?;
        }
        for (UserMapping { iova, length, access, memory }, place) in windows {
            let memory =
                memory.ok_or_else(|| RequestRefused::new(Errno::INVAL, "an empty window"))?;
            let by = (lending, &ReachedAlready);
            self.open_window(by, (iova, length), access, place, memory)?;
        }
        Ok(())
    }

    /// What the user mapped, and the windows.
    pub fn given(&self) -> (Vec<UserMapping>, Vec<(UserMapping, BarPlace)>) {
        let mapping = |loan: &Mapped| {
            let (iova, length) = loan.range();
            UserMapping { iova, length, access: loan.access(), memory: loan.memory().clone() }
        };
        let own = self.own.iter().map(|it| mapping(&it.target));
        let windows = self.windows.iter().map(|it| (mapping(&it.target.0), it.target.1.clone()));
        (own.collect(), windows.collect())
    }

    /// Maps what the user lends, or a range that no memory is behind. To map the same again changes nothing.
    ///
    /// # Errors
    /// It overlaps something else that the user mapped, it is not lent, or the function cannot be given it.
    pub fn map(
        &mut self,
        (lending, function): (&Lending, &impl MapsMemory),
        (iova, length): (u64, u64),
        access: Access,
        memory: Option<MemoryHandle>,
    ) -> Result<(), RequestRefused> {
        let same = self.own.get(iova, length).map(|it| &it.target);
        if same.is_some_and(|loan| is(loan, access, memory.as_ref())) {
            return Ok(());
        }
        self.own.check(iova, length).map_err(MapError::from)?;
        if memory.is_some() {
            for window in meeting(self.windows.iter().map(|it| it.target.0.range()), iova, length) {
                self.close(function, window)?;
            }
        }
        let loan = lending.lend(iova, length, access, memory).map_err(MapError::from)?;
        if let Some(memory) = loan.memory() {
            function.map((iova, length), access, memory, false)?;
        }
        Ok(self.own.map(iova, length, access, loan).map_err(MapError::from)?)
    }

    /// Takes what the user mapped inside of a range away.
    ///
    /// # Errors
    /// There is none, one is inside in part, or the function cannot be made to release one.
    pub fn unmap(
        &mut self,
        function: &impl MapsMemory,
        (iova, length): (u64, u64),
    ) -> Result<(), RequestRefused> {
        let wrong = UnmapError { start: iova, length };
        let last = length.checked_sub(1).and_then(|more| iova.checked_add(more)).ok_or(wrong)?;
        let inside = meeting(self.own.iter().map(|it| it.target.range()), iova, length);
        let cut = inside.iter().any(|(at, length)| *at < iova || at + (length - 1) > last);
        if inside.is_empty() || cut {
            return Err(wrong.into());
        }
        inside.into_iter().try_for_each(|range| self.release(function, range))
    }

    /// Takes all that the user mapped away. One by one: not everybody knows how to unmap several at once.
    ///
    /// # Errors
    /// The function cannot be made to release one; the ones behind it stay, too.
    pub fn unmap_all(&mut self, function: &impl MapsMemory) -> Result<(), RequestRefused> {
        let own: Vec<_> = self.own.iter().map(|it| it.target.range()).collect();
        own.into_iter().try_for_each(|range| self.release(function, range))
    }

    /// Takes away what the user mapped, and closes all windows.
    ///
    /// # Errors
    /// As [`unmap_all`](Mappings::unmap_all).
    pub fn clear(&mut self, function: &impl MapsMemory) -> Result<(), RequestRefused> {
        self.unmap_all(function)?;
        let windows: Vec<_> = self.windows.iter().map(|it| it.target.0.range()).collect();
        windows.into_iter().try_for_each(|range| self.close(function, range))
    }

    /// Opens a window to part of a BAR. One to the same memory stays.
    ///
    /// # Errors
    /// Memory of the user's or another window is there, it is not lent, or the function cannot be given it.
    pub fn open_window(
        &mut self,
        (lending, function): (&Lending, &impl MapsMemory),
        (iova, length): (u64, u64),
        access: Access,
        place: BarPlace,
        memory: MemoryHandle,
    ) -> Result<(), RequestRefused> {
        let same = self.windows.get(iova, length).map(|it| &it.target.0);
        if same.is_some_and(|loan| is(loan, access, Some(&memory))) {
            return Ok(());
        }
        self.windows.check(iova, length).map_err(MapError::from)?;
        let loan = lending.lend_bar(iova, length, access, &place, memory);
        let loan = loan.map_err(MapError::from)?;
        if let Some(memory) = loan.memory() {
            function.map((iova, length), access, memory, true)?;
        }
        Ok(self.windows.map(iova, length, access, (loan, place)).map_err(MapError::from)?)
    }

    /// Closes the window of exactly this range.
    ///
    /// # Errors
    /// There is none, or the function cannot be made to release it.
    pub fn close_window(
        &mut self,
        function: &impl MapsMemory,
        (iova, length): (u64, u64),
    ) -> Result<(), RequestRefused> {
        if self.windows.get(iova, length).is_none() {
            return Err(UnmapError { start: iova, length }.into());
        }
        self.close(function, (iova, length))
    }

    fn close(
        &mut self,
        function: &impl MapsMemory,
        range: (u64, u64),
    ) -> Result<(), RequestRefused> {
        function.unmap(range)?;
        // Only now: nothing reaches it any more.
        drop(self.windows.unmap(range.0, range.1));
        Ok(())
    }

    fn release(
        &mut self,
        function: &impl MapsMemory,
        range: (u64, u64),
    ) -> Result<(), RequestRefused> {
        let reached = self.own.get(range.0, range.1).is_some_and(|it| it.target.memory().is_some());
        if reached {
            function.unmap(range)?;
        }
        drop(self.own.unmap(range.0, range.1));
        Ok(())
    }
}

/// A function that was given everything by another process.
struct ReachedAlready;

impl MapsMemory for ReachedAlready {
    fn map(
        &self,
        _range: (u64, u64),
        _access: Access,
        _memory: &MemoryHandle,
        _window: bool,
    ) -> Result<(), RequestRefused> {
        Ok(())
    }

    fn unmap(&self, (iova, _length): (u64, u64)) -> Result<(), RequestRefused> {
        // A window where memory is.
        Err(RequestRefused::new(Errno::EXIST, format!("{iova:#x} was given twice")))
    }
}

/// Whether a loan is just that.
fn is(loan: &Mapped, access: Access, memory: Option<&MemoryHandle>) -> bool {
    let key = |memory: &MemoryHandle| (memory.object(), memory.offset());
    loan.access() == access && loan.memory().as_ref().map(key) == memory.map(key)
}

/// Those of the ranges that have an address of `[iova, iova + length)`.
fn meeting(ranges: impl Iterator<Item = (u64, u64)>, iova: u64, length: u64) -> Vec<(u64, u64)> {
    let last = |start: u64, length: u64| start.saturating_add(length.saturating_sub(1));
    let end = last(iova, length);
    ranges.filter(|(at, own)| *at <= end && iova <= last(*at, *own)).collect()
}

#[cfg(test)]
mod tests {
    use std::cell::RefCell;
    use std::collections::BTreeMap;

    use rackbus_memory::SharedMemory;

    use super::*;

    /// What a function reaches: by first address the length, and whether it is a window.
    #[derive(Default)]
    struct Reached(RefCell<BTreeMap<u64, (u64, bool)>>);

    impl MapsMemory for Reached {
        fn map(
            &self,
            (iova, length): (u64, u64),
            _access: Access,
            _memory: &MemoryHandle,
            window: bool,
        ) -> Result<(), RequestRefused> {
            let mut reached = self.0.borrow_mut();
            let ranges = reached.iter().map(|(at, (length, _))| (*at, *length));
            match meeting(ranges, iova, length).is_empty() {
                true => drop(reached.insert(iova, (length, window))),
                false => return Err(RequestRefused::new(Errno::EXIST, "it is mapped")),
            }
            Ok(())
        }

        fn unmap(&self, (iova, length): (u64, u64)) -> Result<(), RequestRefused> {
            let taken = self.0.borrow_mut().remove(&iova);
            assert_eq!(taken.map(|(length, _)| length), Some(length), "{iova:#x} is not mapped so");
            Ok(())
        }
    }

    struct Given {
        lending: Lending,
        function: Reached,
        mappings: Mappings,
    }

    const PAGE: u64 = 4096;

    impl Given {
        fn new() -> Given {
            let mappings = Mappings::default();
            Given { lending: Lending::alone(), function: Reached::default(), mappings }
        }

        fn map(&mut self, page: u64, pages: u64, memory: bool) -> bool {
            let memory = memory.then(|| handle(pages));
            let by = (&self.lending, &self.function);
            self.mappings.map(by, (page * PAGE, pages * PAGE), Access::all(), memory).is_ok()
        }

        fn window(&mut self, page: u64) -> bool {
            let place = BarPlace { function: "host/function".to_owned(), bar: 2, offset: 0 };
            let by = (&self.lending, &self.function);
            let range = (page * PAGE, PAGE);
            self.mappings.open_window(by, range, Access::all(), place, handle(1)).is_ok()
        }

        fn unmap(&mut self, page: u64, pages: u64) -> bool {
            self.mappings.unmap(&self.function, (page * PAGE, pages * PAGE)).is_ok()
        }

        /// Pages that are reached, those of windows with a minus.
        fn reached(&self) -> Vec<i64> {
            let reached = self.function.0.borrow();
            let page = |at: &u64| i64::try_from(at / PAGE).unwrap();
            reached
                .iter()
                .map(|(at, (_, window))| page(at) * if *window { -1 } else { 1 })
                .collect()
        }
    }

    fn handle(pages: u64) -> MemoryHandle {
        let memory = SharedMemory::create("mapped", pages * PAGE).unwrap();
        memory.handle(0)
    }

    #[test]
    fn what_has_no_memory_takes_no_place_of_what_has() {
        let mut given = Given::new();
        assert!(given.map(4, 2, true));
        for (page, pages) in [(4, 2), (4, 1), (5, 1), (3, 2), (1, 9)] {
            assert!(!given.map(page, pages, false), "{page}+{pages}");
            assert!(!given.map(page, pages, true), "{page}+{pages}");
        }
        assert_eq!(given.reached(), [4]);
        // What is acknowledged is so.
        assert!(given.unmap(4, 2));
        assert!(given.reached().is_empty());
        assert!(!given.unmap(4, 2));
    }

    #[test]
    fn memory_of_the_users_closes_a_window_and_a_range_without_is_beside_it() {
        let mut given = Given::new();
        assert!(given.window(7));
        assert!(given.map(7, 1, false), "noted beside the window");
        assert_eq!(given.reached(), [-7]);
        assert!(given.unmap(7, 1), "and unmapped so");
        assert_eq!(given.reached(), [-7]);
        assert!(!given.unmap(7, 1), "a window is no mapping of the user's");
        assert!(given.map(6, 3, true));
        assert_eq!(given.reached(), [6]);
        assert!(!given.window(7), "the user's own memory is there");
        assert!(given.unmap(6, 3) && given.window(7));
        assert!(given.map(2, 1, true));
        given.mappings.unmap_all(&given.function).unwrap();
        assert_eq!(given.reached(), [-7]);
        given.mappings.clear(&given.function).unwrap();
        assert!(given.reached().is_empty());
    }

    #[test]
    fn what_was_given_is_lent_again_and_not_mapped_again() {
        let mut before = Given::new();
        assert!(before.map(4, 2, true) && before.map(6, 1, false) && before.window(9));
        let (own, windows) = before.mappings.given();
        let key = |it: &UserMapping| {
            let place = |memory: &MemoryHandle| (memory.object(), memory.offset());
            (it.iova, it.length, it.access, it.memory.as_ref().map(place))
        };
        let was: Vec<_> = own.iter().chain(windows.iter().map(|(it, _)| it)).map(key).collect();
        let (lending, function) = (Lending::alone(), before.function);
        let mut mappings = Mappings::default();
        mappings.resume(&lending, own, windows).unwrap();
        let (own, windows) = mappings.given();
        let is: Vec<_> = own.iter().chain(windows.iter().map(|(it, _)| it)).map(key).collect();
        assert_eq!(is, was);
        let lent = |lending: &Lending| {
            let reached = lending.fabric().with(|fabric| fabric.reached("host/function").unwrap());
            reached.iter().map(|it| it.address / PAGE).collect::<Vec<_>>()
        };
        assert_eq!(lent(&lending), [4, 9]);
        // Whatever the user does next, the function follows.
        let mut after = Given { lending, function, mappings };
        assert!(after.unmap(4, 2) && !after.unmap(4, 2));
        assert_eq!(after.reached(), [-9]);
        assert!(after.map(8, 2, true), "memory of the user's closes a window");
        assert_eq!(after.reached(), [8]);
        drop(after.mappings);
        assert!(lent(&after.lending).is_empty());
    }

    #[test]
    fn what_overlaps_is_not_gone_on_with() {
        let mapping = |page: u64| {
            let memory = Some(handle(1));
            UserMapping { iova: page * PAGE, length: PAGE, access: Access::all(), memory }
        };
        let place = BarPlace { function: "host/function".to_owned(), bar: 2, offset: 0 };
        let resume =
            |own, windows| Mappings::default().resume(&Lending::alone(), own, windows).is_ok();
        assert!(resume(vec![mapping(1), mapping(2)], Vec::new()));
        assert!(!resume(vec![mapping(1), mapping(1)], Vec::new()));
        let empty = UserMapping { memory: None, ..mapping(3) };
        assert!(!resume(vec![mapping(1)], vec![(empty, place)]));
    }
}
