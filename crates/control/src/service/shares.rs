//! What the control plane does for borrowers that take turns on a function: checks what they ask for, has it decided,
//! and shows how they stand. Whose turn it is decides the authority.

use rackbus_lease::share::{
    DEFAULT_GRACE, GREATEST_WEIGHT, LONGEST_GRACE, SLICES, ShareRecord as Record, next_turn,
};
use rackbus_lease::{FunctionId, LeaseId, LeaseState, Placement, ShareRefused, ShareRequest};

use super::writer::ShareChange;
use super::{RackState, Service, WriterRequest, WriterShared, function_id, problem};
use crate::access::ApiPeer;
use crate::answers::KeyedChange;
use crate::api::{ApiError, BorrowRequest};
use crate::shares::{Share, ShareSpec, ShareState, Turns};

impl Service {
    /// Those who take turns, by number.
    pub fn shares(&self) -> Vec<Share> {
        let known = self.shared.known();
        known.shares.values().map(|share| present(&known, share)).collect()
    }

    /// The share of this number, as the API shows it.
    ///
    /// # Errors
    /// [`ApiError`] when there is none of that number.
    pub fn find_share(&self, share: LeaseId) -> Result<Share, ApiError> {
        let known = self.shared.known();
        let found = known.shares.get(&share).map(|share| present(&known, share));
        found.ok_or_else(|| explain(ShareRefused::NoShare(share)))
    }

    /// Takes turns on a function from now on. Asked again with the same idempotency key, it is the same share, as it
    /// stands then.
    ///
    /// # Errors
    /// [`ApiError`]; nothing changes then.
    pub async fn join_share(
        &self,
        spec: &ShareSpec,
        key: Option<String>,
    ) -> Result<Share, ApiError> {
        let request = Box::new(self.checked(spec)?);
        let change = ShareChange::Join(request, Box::new(spec.clone()), key);
        let number = self.change_share(change).await?;
        self.find_share(number)
    }

    /// Takes no more turns, where `peer` may say so; as it was. Asked again with the same idempotency key, the answer
    /// has its number alone.
    ///
    /// # Errors
    /// [`ApiError`]; nothing changes then.
    pub async fn leave_share(
        &self,
        share: LeaseId,
        peer: &ApiPeer,
        key: Option<String>,
    ) -> Result<Share, ApiError> {
        let keyed = KeyedChange::new(key, "leave share", &share);
        let was = match self.find_share(share) {
            Ok(was) => was,
            Err(_) if self.was_made(&keyed).await? => return Ok(Share::left(share)),
            Err(unknown) => return Err(unknown),
        };
        peer.acts_for(&was.borrower)?;
        self.change_share(ShareChange::Leave(share, keyed)).await?;
        Ok(was)
    }

    /// Gives its turn back early. Asked again with the same idempotency key, a later turn stays.
    ///
    /// # Errors
    /// [`ApiError`] when it has none.
    pub async fn give_turn_back(
        &self,
        share: LeaseId,
        key: Option<String>,
    ) -> Result<Share, ApiError> {
        let keyed = KeyedChange::new(key, "give turn back", &share);
        self.change_share(ShareChange::GiveBack(share, keyed)).await?;
        self.find_share(share)
    }

    async fn change_share(&self, change: ShareChange) -> Result<LeaseId, ApiError> {
        let ask = |answer| WriterRequest::Share { change, answer };
        self.writing.ask(ask).await?.map_err(explain)
    }

    /// What is asked for, where that can be.
    fn checked(&self, spec: &ShareSpec) -> Result<ShareRequest, ApiError> {
        let ShareSpec { slice_ms: slice, grace_ms, weight, .. } = spec.clone();
        let function = function_id(&spec.function)?;
        self.shared.check_host(&spec.borrower)?;
        let (grace, weight) = (grace_ms.unwrap_or(DEFAULT_GRACE), weight.unwrap_or(1));
        let wrong = |error: String, help: &str| Err(problem("bad_request", error, help));
        if let Some(slice) = slice.filter(|slice| !SLICES.contains(slice)) {
            let help = "a slice is 100 ms at least and a day at most";
            return wrong(format!("a turn cannot be of {slice} ms"), help);
        }
        if grace > LONGEST_GRACE {
            let help = "a program has a minute at most";
            return wrong(format!("nobody waits for {grace} ms"), help);
        }
        if !(1..=GREATEST_WEIGHT).contains(&weight) {
            return wrong(format!("{weight} is no weight"), "it is from 1 to 100");
        }
        let asked = BorrowRequest {
            isolation: spec.isolation,
            group: spec.group.clone(),
            level: spec.level.clone(),
            vm: spec.vm.clone(),
            ..BorrowRequest::new(&spec.function, &spec.borrower)
        };
        let mut terms = asked.terms()?;
        if self.shared.inventory().apart {
            terms.placement = Placement::Borrower;
        }
        let functions = std::slice::from_ref(&function);
        self.shared.check_placement(functions, terms.placement, &spec.borrower)?;
        let borrower = spec.borrower.clone();
        Ok(ShareRequest { function, borrower, terms, slice, grace, weight })
    }
}

impl WriterShared {
    /// What is to be said of the turns on a function; nothing where nobody takes any.
    pub(super) fn turns(&self, known: &RackState, function: &FunctionId) -> Option<Turns> {
        let ring: Vec<&Record> = known.ring(function).collect();
        let sum = |of: fn(&Record) -> u64| ring.iter().map(|share| of(share)).sum();
        Some(Turns {
            shares: ring.len(),
            turn: ring.iter().find(|share| share.turn.is_some()).map(|share| share.share),
            slice_ms: ring.first()?.slice,
            turns: sum(|share| share.turns),
            handovers: sum(|share| share.handovers),
            handover_ms: sum(|share| share.handover),
        })
    }
}

/// How many of its ring have a turn before `share`, where all that wait could have one.
fn ahead(known: &RackState, share: &Record) -> usize {
    let mut ring: Vec<Record> =
        known.ring(&share.function).filter(|it| it.turn.is_none()).cloned().collect();
    let before = ring.len();
    while let Some(next) = next_turn(&mut ring, |_| true).filter(|next| *next != share.share) {
        ring.retain(|it| it.share != next);
    }
    before - ring.len()
}

fn present(known: &RackState, share: &Record) -> Share {
    let turn = share.turn.as_ref();
    let lease = turn.and_then(|turn| known.leases.get(&turn.lease));
    let (state, socket) = match lease.map(|lease| &lease.state) {
        None | Some(LeaseState::Ended { .. }) => (ShareState::Waiting, None),
        Some(LeaseState::Arming | LeaseState::Opening) => (ShareState::Coming, None),
        Some(LeaseState::Active { socket }) => (ShareState::Turn, Some(socket.clone())),
        Some(LeaseState::Closing { .. }) => (ShareState::Asked, None),
    };
    let allowance = turn.map(|turn| i64::try_from(turn.allowance).unwrap_or(i64::MAX));
    Share {
        share: share.share,
        function: share.function.to_string(),
        borrower: share.borrower.clone(),
        vm: share.vm.clone(),
        placement: share.terms.placement,
        group: share.terms.group.clone(),
        level: share.terms.level.clone(),
        slice_ms: share.slice,
        grace_ms: share.grace,
        weight: share.weight,
        state,
        lease: turn.map(|turn| turn.lease),
        socket,
        allowance_ms: allowance.unwrap_or_else(|| share.next_allowance()),
        ahead: turn.is_none().then(|| ahead(known, share)),
        turns: share.turns,
        held_ms: share.held,
        handovers: share.handovers,
        handover_ms: share.handover,
        since_ms: share.since,
    }
}

fn explain(refused: ShareRefused) -> ApiError {
    let (code, help) = match &refused {
        ShareRefused::Unknown(_) => ("unknown_function", "`rackbus devices` lists the functions"),
        ShareRefused::Withdrawn(_) => ("withdrawn", "offer its device again: `rackbus offer`"),
        ShareRefused::NoHost(_) => ("unknown_host", "see whether its node runs: `rackbus status`"),
        ShareRefused::OtherSlice { .. } => ("exists", "join without a slice, or with that one"),
        ShareRefused::Full(_) => ("exists", "share another function"),
        ShareRefused::Waited { .. } => ("queued", "try again when they have had it"),
        ShareRefused::NoShare(_) => ("unknown_share", "`rackbus share list` lists them"),
        ShareRefused::NoTurn(_) => ("over", "`rackbus share follow` tells when it has one"),
    };
    problem(code, refused.to_string(), help)
}
