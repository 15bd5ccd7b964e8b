//! What a user has wired to a function's interrupts, as loans: each is held as long as its wire.

use std::collections::BTreeMap;
use std::collections::btree_map::Entry;

use rackbus_fabric::{FunctionInterrupt, Lending, Loan, LoanEnd, LoanError};

use crate::endpoint::IrqChange;

/// The interrupts that a function may raise now.
#[derive(Debug, Default)]
pub struct InterruptLoans {
    held: BTreeMap<FunctionInterrupt, Loan>,
}

/// What becomes of the loans with a change of the wiring.
#[derive(Debug)]
#[must_use = "nothing changes before it is applied"]
pub struct LoanChange {
    wired: BTreeMap<FunctionInterrupt, Loan>,
    unwired: Unwired,
}

impl LoanChange {
    /// What ends the new loans from elsewhere, by the places of their entries.
    pub(crate) fn endings(&self) -> impl Iterator<Item = (u64, LoanEnd)> {
        self.wired.iter().map(|(interrupt, loan)| (interrupt.place(), loan.ending()))
    }
}

#[derive(Debug)]
enum Unwired {
    These(Vec<FunctionInterrupt>),
    AllVectors,
}

impl InterruptLoans {
    /// Lends by `lending` what `change` wires. It may be refused yet: then the result is dropped, and nothing has
    /// changed; else it is [applied](InterruptLoans::apply).
    ///
    /// # Errors
    /// [`LoanError`].
    pub fn prepare(&self, lending: &Lending, change: &IrqChange) -> Result<LoanChange, LoanError> {
        let (mut wired, mut unwired) = (Vec::new(), Unwired::These(Vec::new()));
        match change {
            IrqChange::WireVectors(start, wires) => {
                let mut gone = Vec::new();
                for (vector, wire) in (*start..).zip(wires) {
                    // A vector that no function has is refused by whoever wires it.
                    let Ok(vector) = u16::try_from(vector) else { break };
                    let list = if wire.is_some() { &mut wired } else { &mut gone };
                    list.push(FunctionInterrupt::Vector(vector));
                }
                unwired = Unwired::These(gone);
            }
            IrqChange::UnwireVectors => unwired = Unwired::AllVectors,
            IrqChange::WireIntx(Some(_)) => wired.push(FunctionInterrupt::Pin),
            IrqChange::WireIntx(None) => unwired = Unwired::These(vec![FunctionInterrupt::Pin]),
            IrqChange::FireVectors(_) | IrqChange::MaskIntx(_) | IrqChange::FireIntx => {}
        }
        Ok(LoanChange { wired: self.lend(lending, wired)?, unwired })
    }

    /// The wiring was changed.
    pub fn apply(&mut self, change: LoanChange) {
        match change.unwired {
            Unwired::These(interrupts) => {
                interrupts.iter().for_each(|it| drop(self.held.remove(it)));
            }
            Unwired::AllVectors => self.held.retain(|it, _| *it == FunctionInterrupt::Pin),
        }
        self.held.extend(change.wired);
    }

    /// The wiring was changed in part, if at all: whatever was to be wired may be, and whatever was to go may be there.
    pub fn keep(&mut self, change: LoanChange) {
        self.held.extend(change.wired);
    }

    /// As [`prepare`](InterruptLoans::prepare), for the vectors, and the pin, that are wired of a function that goes on.
    ///
    /// # Errors
    /// [`LoanError`].
    pub fn prepare_wired(
        &self,
        lending: &Lending,
        vectors: impl Iterator<Item = u32>,
        pin: bool,
    ) -> Result<LoanChange, LoanError> {
        let vectors = vectors.filter_map(|vector| u16::try_from(vector).ok());
        let mut wired: Vec<_> = vectors.map(FunctionInterrupt::Vector).collect();
        wired.extend(pin.then_some(FunctionInterrupt::Pin));
        let unwired = Unwired::These(Vec::new());
        Ok(LoanChange { wired: self.lend(lending, wired)?, unwired })
    }

    /// The interrupts that the function may raise.
    pub fn wired(&self) -> impl Iterator<Item = FunctionInterrupt> {
        self.held.keys().copied()
    }

    /// Nothing is wired any more.
    pub fn clear(&mut self) {
        self.held.clear();
    }

    /// Lends those of `interrupts` that are not: another wire in the place of one has its loan.
    fn lend(
        &self,
        lending: &Lending,
        interrupts: Vec<FunctionInterrupt>,
    ) -> Result<BTreeMap<FunctionInterrupt, Loan>, LoanError> {
        let mut loans = BTreeMap::new();
        for interrupt in interrupts.into_iter().filter(|it| !self.held.contains_key(it)) {
            if let Entry::Vacant(none) = loans.entry(interrupt) {
                none.insert(lending.lend_interrupt(interrupt)?);
            }
        }
        Ok(loans)
    }
}

#[cfg(test)]
mod tests {
    use std::os::fd::{AsFd, OwnedFd};

    use rackbus_memory::Event;

    use super::*;

    fn wire() -> Option<OwnedFd> {
        Some(Event::new().unwrap().as_fd().try_clone_to_owned().unwrap())
    }

    /// The interrupts by the record of who reaches what.
    fn may_raise(lending: &Lending) -> Vec<u64> {
        let reached = lending.fabric().with(|fabric| fabric.reached("host/function").unwrap());
        reached.iter().map(|it| it.address / FunctionInterrupt::MESSAGE).collect()
    }

    #[test]
    fn a_function_may_raise_what_is_wired_and_nothing_else() {
        let lending = Lending::alone();
        let mut loans = InterruptLoans::default();
        let mut change = |change: IrqChange| {
            let prepared = loans.prepare(&lending, &change).unwrap();
            loans.apply(prepared);
            may_raise(&lending)
        };
        assert_eq!(change(IrqChange::WireVectors(1, vec![wire(), wire(), None])), [1, 2]);
        assert_eq!(change(IrqChange::WireVectors(2, vec![wire(), wire()])), [1, 2, 3]);
        assert_eq!(change(IrqChange::WireIntx(wire())), [1, 2, 3, 1 << 16]);
        assert_eq!(change(IrqChange::WireVectors(2, vec![None])), [1, 3, 1 << 16]);
        assert_eq!(change(IrqChange::FireVectors(vec![9])), [1, 3, 1 << 16]);
        assert_eq!(change(IrqChange::UnwireVectors), [1 << 16]);
        assert!(change(IrqChange::WireIntx(None)).is_empty());
    }

    #[test]
    fn a_change_that_is_refused_lends_nothing() {
        let lending = Lending::alone();
        let loans = InterruptLoans::default();
        let change = IrqChange::WireVectors(0, vec![wire()]);
        let prepared = loans.prepare(&lending, &change).unwrap();
        assert_eq!(may_raise(&lending), [0]);
        drop(prepared);
        assert!(may_raise(&lending).is_empty());
    }
}
