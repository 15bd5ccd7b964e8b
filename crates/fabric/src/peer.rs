//! Peer-to-peer: which functions of one user reach each other's BARs, and where.
//!
//! A user (a VM, or a driver process) has the functions that it borrowed in one address space: it programs
//! their BARs, and it gives them addresses for DMA. So an address in a BAR must mean that BAR to each of the
//! others too. [`PeerFunctions`] follows the functions of one user and says which *windows* are to be opened and
//! closed for that: one for each function, each other function, and each part of a BAR of that one that is
//! memory, as long as the other one decodes it. It does nothing itself; the borrower's node carries its
//! [`PeerStep`]s out and says what became of them.
//!
//! Source: "Device Lending" (journal, 2019), section 6: the borrower resolves addresses of other borrowed
//! devices, for a VM the guest-physical ones.

use std::collections::{BTreeMap, BTreeSet};

/// A function in the hands of a user, from its [`join`](PeerFunctions::join) to its [`leave`](PeerFunctions::leave). No
/// number is used twice.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct PeerMember(u64);

/// A part of a BAR that is memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct BarPart {
    /// The BAR, 0 to 5.
    pub bar: u8,
    /// Bytes from its beginning.
    pub offset: u64,
    /// Bytes of the BAR that are reached.
    pub length: u64,
}

/// A function as it joins.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PeerFunction {
    /// Its name in the rack, `HOST/DEVICE`.
    pub name: String,
    /// Its front runs at the borrower, as strict isolation needs it: it reaches no other function, and no
    /// other function reaches it.
    pub isolated: bool,
    /// The parts of its BARs that are memory.
    pub parts: Vec<BarPart>,
}

/// What a function's configuration space says now.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Programmed {
    /// Whether it may issue requests.
    pub masters_bus: bool,
    /// Where it decodes its BARs, by their numbers: those for which it answers memory accesses, and that
    /// are not at address 0, where none is programmed to be.
    pub bars: BTreeMap<u8, u64>,
}

/// A way from one function to a part of a BAR of another.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct PeerWindow {
    /// Whose DMA goes through it.
    pub initiator: PeerMember,
    /// Whose BAR it leads to.
    pub target: PeerMember,
    /// The part of the BAR.
    pub part: BarPart,
    /// What the initiator calls its first byte: where the target decodes it.
    pub address: u64,
}

impl PeerWindow {
    /// The last address. [`PeerFunctions`] has no window that goes past the address space.
    fn last(&self) -> u64 {
        self.address + (self.part.length - 1)
    }

    fn overlaps(&self, other: &PeerWindow) -> bool {
        self.initiator == other.initiator
            && self.address <= other.last()
            && other.address <= self.last()
    }
}

/// What is to be done next.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PeerStep {
    /// Take the window away from its initiator.
    Close(PeerWindow),
    /// Give it to its initiator.
    Open(PeerWindow),
}

/// Why one function does not reach a BAR of another, although that one decodes it.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum PeerRefusal {
    /// The front of one of the two runs at the borrower.
    #[error(
        "{initiator} does not reach {target}: the controller of {isolated} runs at its borrower (strict \
         isolation), so its memory and its DMA are not passed on; borrow both without --isolation strict"
    )]
    Isolated {
        /// Whose DMA is refused.
        initiator: String,
        /// Whose BAR it does not reach.
        target: String,
        /// Which of them is isolated.
        isolated: String,
    },
    /// Another function decodes the same addresses.
    #[error(
        "{initiator} does not reach {target} at {address:#x}: {other} decodes the same addresses; program \
         their BARs apart"
    )]
    Overlaps {
        /// Whose DMA is refused.
        initiator: String,
        /// Whose BAR it does not reach.
        target: String,
        /// Where that decodes it.
        address: u64,
        /// Who was there first.
        other: String,
    },
    /// The initiator's lender did not open the window.
    #[error("{initiator} does not reach {target} at {address:#x}: {reason}")]
    Failed {
        /// Whose DMA is refused.
        initiator: String,
        /// Whose BAR it does not reach.
        target: String,
        /// Where that decodes it.
        address: u64,
        /// What the lender said.
        reason: String,
    },
}

impl PeerRefusal {
    /// The function whose DMA is refused.
    pub fn initiator(&self) -> &str {
        match self {
            PeerRefusal::Isolated { initiator, .. }
            | PeerRefusal::Overlaps { initiator, .. }
            | PeerRefusal::Failed { initiator, .. } => initiator,
        }
    }
}

#[derive(Debug, Clone)]
struct Joined {
    function: PeerFunction,
    programmed: Programmed,
}

/// What follows from the functions as they are.
#[derive(Debug, Default)]
struct Plan {
    windows: BTreeSet<PeerWindow>,
    refused: Vec<PeerRefusal>,
}

/// The functions of one user.
#[derive(Debug, Clone, Default)]
pub struct PeerFunctions {
    members: BTreeMap<PeerMember, Joined>,
    newest: u64,
    /// The windows that there are.
    open: BTreeSet<PeerWindow>,
    /// Those that could not be opened, since the last change.
    failed: BTreeMap<PeerWindow, String>,
}

impl PeerFunctions {
    /// A user without functions.
    pub fn new() -> PeerFunctions {
        PeerFunctions::default()
    }

    /// Whether the user has none.
    pub fn is_empty(&self) -> bool {
        self.members.is_empty()
    }

    /// The user has opened a function, which is as after reset.
    pub fn join(&mut self, function: PeerFunction) -> PeerMember {
        self.newest += 1;
        let member = PeerMember(self.newest);
        self.members.insert(member, Joined { function, programmed: Programmed::default() });
        member
    }

    /// The function is gone, and all that it reached with it. What others reached of it is closed by the
    /// next steps.
    pub fn leave(&mut self, member: PeerMember) {
        self.members.remove(&member);
        self.open.retain(|window| window.initiator != member);
        self.failed.clear();
    }

    /// What the function's configuration space says now. To say the same again changes nothing.
    pub fn programmed(&mut self, member: PeerMember, programmed: Programmed) {
        if let Some(joined) = self.members.get_mut(&member)
            && joined.programmed != programmed
        {
            joined.programmed = programmed;
            self.failed.clear();
        }
    }

    /// What kept a window from being opened may be gone: all that failed is tried again.
    pub fn try_again(&mut self) {
        self.failed.clear();
    }

    /// What is to be done next, if anything: windows are closed before others are opened.
    pub fn next(&self) -> Option<PeerStep> {
        let wanted = self.plan().windows;
        if let Some(window) = self.open.difference(&wanted).next() {
            return Some(PeerStep::Close(*window));
        }
        let missing = |window: &&PeerWindow| {
            !self.open.contains(*window) && !self.failed.contains_key(*window)
        };
        wanted.iter().find(missing).map(|window| PeerStep::Open(*window))
    }

    /// A step was carried out. One that closes a window has done so whatever else there is to say; one that
    /// opens it may have failed, and is not tried again before something changes.
    pub fn done(&mut self, step: PeerStep, outcome: Result<(), String>) {
        match (step, outcome) {
            (PeerStep::Close(window), _) => {
                self.open.remove(&window);
            }
            (PeerStep::Open(window), Ok(())) => {
                self.open.insert(window);
            }
            (PeerStep::Open(window), Err(reason)) => {
                self.failed.insert(window, reason);
            }
        }
    }

    /// The windows that there are.
    pub fn windows(&self) -> impl Iterator<Item = &PeerWindow> {
        self.open.iter()
    }

    /// The name of a function that has not left.
    pub fn name(&self, member: PeerMember) -> Option<&str> {
        self.members.get(&member).map(|joined| joined.function.name.as_str())
    }

    /// What is not reached although it is decoded, and why.
    pub fn refused(&self) -> Vec<PeerRefusal> {
        let mut refused = self.plan().refused;
        for (window, reason) in &self.failed {
            let (Some(initiator), Some(target)) =
                (self.name(window.initiator), self.name(window.target))
            else {
                continue;
            };
            refused.push(PeerRefusal::Failed {
                initiator: initiator.to_owned(),
                target: target.to_owned(),
                address: window.address,
                reason: reason.clone(),
            });
        }
        refused
    }

    fn plan(&self) -> Plan {
        let mut plan = Plan::default();
        let masters = self.members.iter().filter(|(_, from)| from.programmed.masters_bus);
        for (initiator, from) in masters {
            for (target, to) in self.members.iter().filter(|(target, _)| *target != initiator) {
                self.plan_pair((*initiator, from), (*target, to), &mut plan);
            }
        }
        plan
    }

    fn plan_pair(
        &self,
        (initiator, from): (PeerMember, &Joined),
        (target, to): (PeerMember, &Joined),
        plan: &mut Plan,
    ) {
        let decoded = to.function.parts.iter().filter_map(|part| {
            let address = to.programmed.bars.get(&part.bar)?.checked_add(part.offset)?;
            // One that goes past the address space is decoded nowhere.
            address.checked_add(part.length.checked_sub(1)?)?;
            Some(PeerWindow { initiator, target, part: *part, address })
        });
        let names = || (from.function.name.clone(), to.function.name.clone());
        let isolated = [from, to].into_iter().find(|joined| joined.function.isolated);
        for window in decoded {
            if let Some(joined) = isolated {
                let (initiator, target) = names();
                let isolated = joined.function.name.clone();
                plan.refused.push(PeerRefusal::Isolated { initiator, target, isolated });
                return;
            }
            // Who joined first was looked at first.
            let other = plan.windows.iter().find(|other| other.overlaps(&window));
            match other.and_then(|other| self.name(other.target)) {
                None => {
                    plan.windows.insert(window);
                }
                Some(other) => {
                    let ((initiator, target), other) = (names(), other.to_owned());
                    let address = window.address;
                    plan.refused.push(PeerRefusal::Overlaps { initiator, target, address, other });
                }
            }
        }
    }
}
