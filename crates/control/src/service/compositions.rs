//! What the control plane does with compositions: saves, borrows and returns them.
//!
//! A composition's leases are those of the group that has its name, at its borrower. So its functions reach
//! each other's memory, and what was borrowed into the group beside them is returned with them.

use futures_util::future::join_all;
use rackbus_lease::{
    CompositionRecord as Saved, CompositionRefused, FunctionId, LeaseRecord, LeaseState, Terms,
};

use super::writer::CompositionChange;
use super::{
    FunctionsRequest, Granted, Known, Service, WriterRequest, function_id, present, problem,
};
use crate::api::{ApiError, BorrowRequest, Lease, LeaseStage};
use crate::compositions::{Composition, CompositionRequest, CompositionSpec, CompositionState};

/// The leases of a composition's group that are not over.
fn live<'a>(known: &'a Known, composition: &Saved) -> Vec<&'a LeaseRecord> {
    let its = |lease: &&LeaseRecord| {
        lease.is_live()
            && lease.borrower == composition.borrower
            && lease.group.as_ref() == Some(&composition.name)
    };
    known.leases.values().filter(its).collect()
}

impl Service {
    /// The compositions of the rack file, and then those that were saved, by name.
    pub fn compositions(&self) -> Vec<Composition> {
        let (known, inventory) = (self.shared.known(), self.shared.inventory());
        let own = inventory.compositions.iter();
        own.chain(known.compositions.values()).map(|it| self.shown(&known, it)).collect()
    }

    fn shown(&self, known: &Known, composition: &Saved) -> Composition {
        let leases = live(known, composition);
        let active = |function: &FunctionId| {
            let usable = |lease: &&LeaseRecord| {
                lease.function == *function && matches!(lease.state, LeaseState::Active { .. })
            };
            leases.iter().any(usable)
        };
        let state = match () {
            () if composition.functions.iter().all(active) => CompositionState::Borrowed,
            () if leases.is_empty() => CompositionState::Free,
            () => CompositionState::Partly,
        };
        Composition {
            name: composition.name.clone(),
            borrower: composition.borrower.clone(),
            functions: composition.functions.iter().map(ToString::to_string).collect(),
            placement: composition.placement,
            in_rack_file: self.in_rack_file(&composition.name),
            state,
            leases: leases.into_iter().map(present).collect(),
        }
    }

    fn in_rack_file(&self, name: &str) -> bool {
        self.shared.inventory().compositions.iter().any(|it| it.name == name)
    }

    fn find_composition(&self, name: &str) -> Result<Saved, ApiError> {
        let own = self.shared.inventory().compositions.iter().find(|it| it.name == name).cloned();
        let found = own.or_else(|| self.shared.known().compositions.get(name).cloned());
        found.ok_or_else(|| explain(CompositionRefused::Unknown(name.to_owned())))
    }

    /// A composition as it is now.
    ///
    /// # Errors
    /// [`ApiError`] when there is none of that name.
    pub fn composition(&self, name: &str) -> Result<Composition, ApiError> {
        let composition = self.find_composition(name)?;
        Ok(self.shown(&self.shared.known(), &composition))
    }

    /// Saves a composition, to be borrowed by its name.
    ///
    /// # Errors
    /// [`ApiError`]; nothing changes then.
    pub async fn save_composition(&self, spec: &CompositionSpec) -> Result<Composition, ApiError> {
        // Its leases have its terms: what is wrong with these is said now.
        let named = BorrowRequest {
            isolation: spec.isolation,
            group: Some(spec.name.clone()),
            ..BorrowRequest::new("", &spec.borrower)
        };
        let placement = named.terms()?.placement;
        self.shared.check_host(&spec.borrower)?;
        let functions = spec.functions.iter().map(|name| function_id(name));
        let functions = functions.collect::<Result<Vec<_>, _>>()?;
        for function in &functions {
            let inventory = self.shared.inventory();
            let mut devices = inventory.devices.iter();
            if !devices.any(|device| device.function == *function) {
                let help = "`rackbus devices` lists the functions";
                return Err(problem("unknown_function", format!("there is no {function}"), help));
            }
        }
        self.shared.check_placement(&functions, placement, &spec.borrower)?;
        let (name, borrower) = (spec.name.clone(), spec.borrower.clone());
        let composition = Saved { name, borrower, functions, placement };
        if self.in_rack_file(&spec.name) && self.find_composition(&spec.name)? != composition {
            return Err(explain(CompositionRefused::Exists(spec.name.clone())));
        }
        if !self.in_rack_file(&spec.name) {
            self.change_composition(CompositionChange::Save(composition)).await?;
        }
        self.composition(&spec.name)
    }

    /// Forgets a composition of which nothing is borrowed; as it was.
    ///
    /// # Errors
    /// [`ApiError`]; nothing changes then.
    pub async fn remove_composition(&self, name: &str) -> Result<Composition, ApiError> {
        let composition = self.composition(name)?;
        if composition.in_rack_file {
            let said = format!("the rack file has the composition {name}");
            return Err(problem("in_rack_file", said, "remove it there"));
        }
        if let Some(lease) = composition.leases.first() {
            let said = format!("{} of the composition {name} is borrowed", lease.function);
            let help = format!("return it first: `rackbus composition return {name}`");
            return Err(problem("held", said, &help));
        }
        self.change_composition(CompositionChange::Remove(name.to_owned())).await?;
        Ok(composition)
    }

    async fn change_composition(&self, change: CompositionChange) -> Result<(), ApiError> {
        let changed = self.writing.ask(|answer| WriterRequest::Compose { change, answer }).await?;
        changed.map_err(explain)
    }

    /// Borrows a composition whole, and waits until all of it can be used. When a function of it cannot be obtained,
    /// or does not become usable, nothing of it is borrowed. The caller may go away meanwhile, as from
    /// [`borrow`](Service::borrow).
    ///
    /// # Errors
    /// [`ApiError`], which names the holder when there is one.
    pub async fn borrow_composition(
        &self,
        name: &str,
        request: &CompositionRequest,
    ) -> Result<Composition, ApiError> {
        let CompositionRequest { wait_ms, priority } = *request;
        let wait = BorrowRequest { wait_ms, ..BorrowRequest::new("", "") }.wait()?;
        let composition = self.find_composition(name)?;
        let now = self.composition(name)?;
        if now.state == CompositionState::Borrowed {
            // Who asked first may have gone, and this be the same request again: what is answered stays so.
            let its = |lease: &&Lease| {
                lease.stage == LeaseStage::Active && now.functions.contains(&lease.function)
            };
            let leases = now.leases.iter().filter(its).map(|lease| lease.lease).collect();
            if self.writing.ask(|answer| WriterRequest::Told { leases, answer }).await? {
                return self.composition(name);
            }
        }
        let Saved { borrower, functions, placement, .. } = composition;
        let terms = Terms { placement, group: Some(name.to_owned()), level: None };
        let asked = FunctionsRequest { functions, borrower: &borrower, terms, key: None };
        let what = format!("the composition {name}");
        if let Granted::Leases(wanted) = self.grant(asked, wait, priority).await? {
            self.settle(wanted, &what, &borrower).await?;
        }
        self.composition(name)
    }

    /// Returns all that is borrowed in a composition's group, and waits until it is offered again.
    ///
    /// # Errors
    /// [`ApiError`] for the first that is not; the others are returned anyway.
    pub async fn return_composition(&self, name: &str) -> Result<Composition, ApiError> {
        let leases = self.composition(name)?.leases;
        let back = leases.iter().map(|lease| self.give_back(lease.lease, None));
        for outcome in join_all(back).await {
            match outcome {
                // It ended meanwhile.
                Err(refused) if refused.code == "over" => {}
                outcome => drop(outcome?),
            }
        }
        self.composition(name)
    }
}

fn explain(refused: CompositionRefused) -> ApiError {
    let (code, help) = match &refused {
        CompositionRefused::Unknown(_) => {
            ("unknown_composition", "`rackbus composition list` shows which there are")
        }
        CompositionRefused::Exists(_) => {
            ("exists", "remove that one first, or choose another name")
        }
        CompositionRefused::Empty | CompositionRefused::Twice(_) => {
            ("bad_request", "name each of its functions once")
        }
    };
    problem(code, refused.to_string(), help)
}
