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
        let own = self.own.iter().map(|it| mapping(&it.target));
        let windows = self.windows.iter().map(|it| (mapping(&it.target.0), it.target.1.clone()));
        (own.collect(), windows.collect())
    }

    /// Maps what the user lends, or a range that no memory is behind. To map the same again changes nothing; memory for a
    /// range that had none takes its place.
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
        let empty = same.is_some_and(|loan| memory.is_some() && is(loan, access, None));
        if !empty {
            self.own.check(iova, length).map_err(MapError::from)?;
        }
        // What is refused closes no windows. What can be known is asked before; the function itself refuses later.
        let counted = memory.as_ref().map(|memory| lending.count(memory, length));
        let counted = counted.transpose().map_err(MapError::from)?;
        let closed = match memory {
            Some(_) => self.give_way((lending, function), (iova, length))?,
            None => Vec::new(),
        };
        let lent = lending.lend(iova, length, access, memory).map_err(MapError::from);
        drop(counted);
        let mapped = lent.map_err(RequestRefused::from).and_then(|loan| {
            if let Some(memory) = loan.memory() {
                function.map((iova, length), access, memory, false)?;
            }
            Ok(loan)
        });
        let loan = mapped.inspect_err(|_| self.open_again((lending, function), closed))?;
        if empty {
            // It has no memory that would have to be released.
            let _ = self.own.unmap(iova, length);
        }
        Ok(self.own.map(iova, length, access, loan).map_err(MapError::from)?)
    }

    /// Closes the windows that have an address of this range; what they were.
    ///
    /// # Errors
    /// The function cannot be made to release one; all are open then.
    fn give_way(
        &mut self,
        by: (&Lending, &impl MapsMemory),
        (iova, length): (u64, u64),
    ) -> Result<Vec<(UserMapping, BarPlace)>, RequestRefused> {
        let mut closed = Vec::new();
        for range in meeting(self.windows.iter().map(|it| it.target.0.range()), iova, length) {
            let Some(window) = self.windows.get(range.0, range.1) else { continue };
            let was = (mapping(&window.target.0), window.target.1.clone());
            if let Err(error) = self.close(by.1, range) {
                self.open_again(by, closed);
                return Err(error);
            }
            closed.push(was);
        }
        Ok(closed)
    }

    /// Opens windows that were closed for what was refused then.
    fn open_again(
        &mut self,
        by: (&Lending, &impl MapsMemory),
        windows: Vec<(UserMapping, BarPlace)>,
    ) {
        for (UserMapping { iova, length, access, memory }, place) in windows {
            let Some(memory) = memory else { continue };
            if let Err(error) = self.open_window(by, (iova, length), access, place, memory) {
                tracing::warn!(iova, %error, "a window to another function stays closed");
            }
        }
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
        let same = self.windows.get(iova, length).map(|it| &it.target);
        if same.is_some_and(|(loan, to)| *to == place && is(loan, access, Some(&memory))) {
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

/// What was mapped, as it is asked for.
fn mapping(loan: &Mapped) -> UserMapping {
    let (iova, length) = loan.range();
    UserMapping { iova, length, access: loan.access(), memory: loan.memory().clone() }
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
mod tests;
