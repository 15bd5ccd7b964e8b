//! What the control plane does with compositions: saves, borrows and returns them.
//!
//! A composition's leases are those of the group that has its name, at its borrower. So its functions reach
//! each other's memory, and what was borrowed into the group beside them is returned with them. A VM that was moved
//! has its functions in the same group at another host, and there they are the composition's still.

use futures_util::future::join_all;
use rackbus_lease::{
    CompositionRecord as Saved, CompositionRefused, FunctionId, LeaseId, LeaseRecord, LeaseState,
    Terms,
};

use super::writer::CompositionChange;
use super::{
    FunctionsRequest, Granted, RackState, Service, WriterRequest, function_id, present, problem,
};
use crate::access::ApiPeer;
use crate::answers::KeyedChange;
use crate::api::{ApiError, BorrowRequest, Lease, LeaseStage};
use crate::compositions::{Composition, CompositionRequest, CompositionSpec, CompositionState};

/// The leases of a composition's group.
fn of_group<'a>(
    known: &'a RackState,
    composition: &Saved,
) -> impl Iterator<Item = &'a LeaseRecord> {
    let its = |lease: &&LeaseRecord| {
        let at_home = lease.borrower == composition.borrower;
        lease.group.as_ref() == Some(&composition.name)
            && (at_home || composition.functions.contains(&lease.function))
    };
    known.leases.values().filter(its)
}

/// The leases of a composition that are not over.
pub(super) fn live<'a>(known: &'a RackState, composition: &Saved) -> Vec<&'a LeaseRecord> {
    of_group(known, composition).filter(|lease| lease.is_live()).collect()
}

impl Service {
    /// The compositions of the rack file, and then those that were saved, by name.
    pub fn compositions(&self) -> Vec<Composition> {
        let (known, inventory) = (self.shared.known(), self.shared.inventory());
        let own = inventory.compositions.iter();
        own.chain(known.compositions.values()).map(|it| self.shown(&known, it)).collect()
    }

    fn shown(&self, known: &RackState, composition: &Saved) -> Composition {
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

    /// Saves a composition, to be borrowed by its name. Asked again with the same idempotency key, one that was
    /// removed since stays so.
    ///
    /// # Errors
    /// [`ApiError`]; nothing changes then.
    pub async fn save_composition(
        &self,
        spec: &CompositionSpec,
        key: Option<String>,
    ) -> Result<Composition, ApiError> {
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
            if inventory.devices.get(function).is_none() {
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
            let keyed = KeyedChange::new(key, "save composition", spec);
            self.change_composition(CompositionChange::Save(composition), keyed).await?;
        }
        self.composition(&spec.name)
    }

    /// Forgets a composition of which nothing is borrowed; as it was. Asked again with the same idempotency key,
    /// one of that name that was saved since stays; where there is none, the answer has its name alone.
    ///
    /// # Errors
    /// [`ApiError`]; nothing changes then.
    pub async fn remove_composition(
        &self,
        name: &str,
        key: Option<String>,
    ) -> Result<Composition, ApiError> {
        let keyed = KeyedChange::new(key, "remove composition", &name);
        let composition = match self.composition(name) {
            Ok(composition) => composition,
            Err(_) if self.was_made(&keyed).await? => return Ok(Composition::removed(name)),
            Err(unknown) => return Err(unknown),
        };
        if composition.in_rack_file {
            let said = format!("the rack file has the composition {name}");
            return Err(problem("in_rack_file", said, "remove it there"));
        }
        if let Some(lease) = composition.leases.first() {
            let said = format!("{} of the composition {name} is borrowed", lease.function);
            let help = format!("return it first: `rackbus composition return {name}`");
            return Err(problem("held", said, &help));
        }
        self.change_composition(CompositionChange::Remove(name.to_owned()), keyed).await?;
        Ok(composition)
    }

    async fn change_composition(
        &self,
        change: CompositionChange,
        keyed: Option<KeyedChange>,
    ) -> Result<(), ApiError> {
        let ask = |answer| WriterRequest::Compose { change, keyed, answer };
        self.writing.ask(ask).await?.map_err(explain).map(drop)
    }

    /// Borrows a composition whole, and waits until all of it can be used. When a function of it cannot be
    /// obtained, or does not become usable, nothing of it is borrowed. The caller may go away meanwhile, as from
    /// [`borrow`](Service::borrow). Asked again with the same idempotency key, its leases are those of the first
    /// request.
    ///
    /// # Errors
    /// [`ApiError`], which names the holder when there is one.
    pub async fn borrow_composition(
        &self,
        name: &str,
        request: &CompositionRequest,
        key: Option<String>,
    ) -> Result<Composition, ApiError> {
        let CompositionRequest { wait_ms, priority, vm, starter } = request.clone();
        let checked = BorrowRequest { wait_ms, vm, starter, ..BorrowRequest::new("", "") };
        let (wait, Terms { vm, starter, .. }) = (checked.wait()?, checked.terms()?);
        let composition = self.find_composition(name)?;
        let now = self.composition(name)?;
        if now.state == CompositionState::Borrowed {
            // Who asked first may have gone, and this be the same request again: what is answered stays so.
            let its = |lease: &&Lease| {
                lease.stage == LeaseStage::Active
                    && now.functions.contains(&lease.function)
                    && lease.vm == vm
                    && lease.borrower == now.borrower
            };
            let leases: Vec<LeaseId> = now.leases.iter().filter(its).map(|it| it.lease).collect();
            // One that is for another VM is not the same request: it is refused as whatever somebody has.
            if leases.len() == now.functions.len()
                && self.writing.ask(|answer| WriterRequest::Told { leases, answer }).await?
            {
                return self.composition(name);
            }
        }
        let Saved { borrower, functions, placement, .. } = composition;
        let group = Some(name.to_owned());
        let terms = Terms { placement, group, vm, level: None, starter };
        let asked = FunctionsRequest { functions, borrower: &borrower, terms, key, chosen: None };
        let what = format!("the composition {name}");
        match self.grant(asked, wait, priority).await? {
            Granted::Leases(wanted) => drop(self.settle(wanted, &what, &borrower).await?),
            Granted::Answered(answer, leases) => drop(self.still_lent(*answer, &leases)?),
        }
        self.composition(name)
    }

    /// Returns all that is borrowed in a composition's group, and waits until it is offered again; of a VM that was moved,
    /// what `peer` may return for the host that it was moved to. Asked again with the same idempotency key, what was
    /// borrowed since stays.
    ///
    /// # Errors
    /// [`ApiError`] for the first that is not; the others are returned anyway. `forbidden` where all that is borrowed is
    /// another host's.
    pub async fn return_composition(
        &self,
        name: &str,
        key: Option<String>,
        peer: &ApiPeer,
    ) -> Result<Composition, ApiError> {
        let composition = self.find_composition(name)?;
        let leases = {
            let known = self.shared.known();
            let live = live(&known, &composition);
            let may = |lease: &&&LeaseRecord| peer.acts_for(&lease.borrower).is_ok();
            let leases: Vec<LeaseId> = live.iter().filter(may).map(|it| it.lease).collect();
            if let Some(other) = live.first().filter(|_| leases.is_empty()) {
                peer.acts_for(&other.borrower)?;
            }
            leases
        };
        let keyed = KeyedChange::new(key, "return composition", &name);
        let ask = |answer| WriterRequest::GiveBackAll { leases, keyed, answer };
        let newest = self.writing.ask(ask).await?;
        let leaving: Vec<LeaseId> = {
            let known = self.shared.known();
            let its = of_group(&known, &composition)
                .filter(|it| it.lease <= newest && peer.acts_for(&it.borrower).is_ok());
            let leaving = its.filter(|it| it.is_live() || known.is_held(it.lease));
            leaving.map(|it| it.lease).collect()
        };
        for outcome in join_all(leaving.into_iter().map(|lease| self.wait_back(lease))).await {
            outcome?;
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
