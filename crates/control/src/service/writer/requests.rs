//! What the writer is asked, and what it answers.

use std::sync::Arc;

use rackbus_identity::{KeyedCertificate, Revoked};
use rackbus_lease::{
    BorrowRefused, ChangeRefused, CompositionRecord, CompositionRefused, DeviceChange,
    DeviceRefused, FunctionId, LeaseId, Message, Priority, QueuePlace, ReturnRefused, ShareRefused,
    ShareRequest, Terms,
};
use tokio::sync::oneshot;

use crate::access::RequestOrigin as By;
use crate::answers::{BorrowAnswer as Kept, KeyedChange};
use crate::api::ApiError;
use crate::events::Draft;
use crate::register::{
    AuthorityNumbers, AuthorityRecord, AuthoritySet, RegisterOutcome, RegisterRefused,
};
use crate::shares::ShareSpec;

use super::super::{Inventory, ReadRack};
use super::interests::Interest;

/// An answer, when what it says is stored.
pub(super) type Answer<T> = oneshot::Sender<Result<T, ApiError>>;
/// What the writer is asked to do.
#[derive(Debug)]
pub(in crate::service) enum WriterRequest {
    /// Grants leases on functions, on all or on none, or says why not. An idempotency key goes with one
    /// function only.
    Borrow {
        functions: Vec<FunctionId>,
        borrower: String,
        terms: Terms,
        key: Option<String>,
        /// That the request names no function, and this one was chosen for it.
        chosen: Option<ChosenFunction>,
        asker: QueueStanding,
        answer: Answer<Result<Granted, BorrowRefused>>,
    },
    /// What a request that names no function came to when it was made before with this key; nothing where it was not, or
    /// was refused.
    Recall { borrower: String, terms: Terms, key: String, answer: Answer<Option<Granted>> },
    /// Ends a lease in order.
    GiveBack {
        lease: LeaseId,
        /// How long its user has, in milliseconds, if not as long as the rack gives.
        within: Option<u64>,
        key: Option<String>,
        answer: Answer<Result<Returned, ReturnRefused>>,
    },
    /// Ends leases in order, as far as they have not ended; the answer is the greatest of them.
    GiveBackAll { leases: Vec<LeaseId>, keyed: Option<KeyedChange>, answer: Answer<LeaseId> },
    /// Somebody is to be told that it has these leases, all of them or none: the answer is whether it may be. Then none
    /// is given back any more because who asked for it first has gone.
    Told { leases: Vec<LeaseId>, answer: Answer<bool> },
    /// Asks a lease's lender for another service level; the answer is which change of it that is.
    ChangeLevel {
        lease: LeaseId,
        level: Option<String>,
        keyed: Option<KeyedChange>,
        answer: Answer<Result<u64, ChangeRefused>>,
    },
    /// Saves or forgets a composition. Its answer has no number.
    Compose {
        change: CompositionChange,
        keyed: Option<KeyedChange>,
        answer: Answer<Result<LeaseId, CompositionRefused>>,
    },
    /// Somebody takes turns on a function, or does so no more; the answer is the share's number.
    Share { change: ShareChange, answer: Answer<Result<LeaseId, ShareRefused>> },
    /// Offers a device; the answer is the number of the change.
    Offer {
        change: DeviceChange,
        keyed: Option<KeyedChange>,
        answer: Answer<Result<LeaseId, DeviceRefused>>,
    },
    /// Withdraws a device, and ends the leases of its functions where `force` says so; the answer is the number of the
    /// change.
    Withdraw {
        change: DeviceChange,
        force: bool,
        keyed: Option<KeyedChange>,
        answer: Answer<Result<LeaseId, DeviceRefused>>,
    },
    /// The rack is that of another file.
    FollowFile { file: NewRackFile, answer: Answer<Result<(), ApiError>> },
    /// Whether this change was made before under its key.
    WasMade { keyed: KeyedChange, answer: Answer<bool> },
    /// A node said something.
    Heard { host: String, messages: Vec<Message>, events: Vec<Draft>, answer: Answer<()> },
    /// A certificate is given out, or something is revoked.
    Register {
        asked: RegisterRequest,
        keyed: Option<KeyedChange>,
        answer: Answer<Result<RegisterOutcome, RegisterRefused>>,
    },
    /// Nodes know of a later term than this one's.
    RaiseTerm { above: u64, answer: Answer<u64> },
    /// Something happened that decides nothing.
    Note { events: Vec<Draft> },
    /// A host was refused what cannot be, before anything was decided.
    Refused { refusal: Draft },
    /// Somebody was refused something for lack of a right to it.
    Forbidden { by: By, text: String },
}

/// What is done with the register.
#[derive(Debug)]
pub(in crate::service) enum RegisterRequest {
    /// A certificate is given out, which these authorities made; one that is renewed goes with the one that it is renewed by.
    Issue(Box<KeyedCertificate>, AuthorityNumbers, Option<Box<KeyedCertificate>>),
    /// Certificates are no longer good: one, or all of a host or person.
    Revoke(Revoked),
    /// Somebody has shown this certificate.
    Shown(Box<KeyedCertificate>),
    /// The authority is to be replaced by a new one, or the new one is to sign.
    Rotate {
        /// What the rack has where it has never replaced its authority.
        first: Box<AuthoritySet>,
        next: Box<AuthorityRecord>,
        force: bool,
    },
    /// The authority before is trusted no more.
    Retire { force: bool },
}

/// A rack file that the running rack is to be that of.
pub(in crate::service) struct NewRackFile {
    /// The hosts, devices and compositions that it lists.
    pub inventory: Inventory,
    /// Reads it again, with devices beside its own.
    pub read: ReadRack,
}

impl std::fmt::Debug for NewRackFile {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("NewRackFile").field("inventory", &self.inventory).finish_non_exhaustive()
    }
}

/// What is done with a composition.
#[derive(Debug)]
pub(in crate::service) enum CompositionChange {
    /// It is stored, in the place of one of the same name.
    Save(CompositionRecord),
    /// The one of this name is forgotten.
    Remove(String),
}

/// What is done with a share.
#[derive(Debug)]
pub(in crate::service) enum ShareChange {
    /// There is a new one, as it was asked for, under an idempotency key.
    Join(Box<ShareRequest>, Box<ShareSpec>, Option<String>),
    /// It takes no more turns.
    Leave(LeaseId, Option<KeyedChange>),
    /// It gives its turn back early.
    GiveBack(LeaseId, Option<KeyedChange>),
}

/// How a request for a function stands to those who wait for the same.
#[derive(Debug, Clone, Copy)]
pub(in crate::service) enum QueueStanding {
    /// It does not wait.
    Now(Priority),
    /// It waits, and asks again.
    Waits(QueuePlace),
}

/// That a request names no function, and the control plane chose one.
#[derive(Debug, Clone, Copy)]
pub(in crate::service) struct ChosenFunction {
    /// The lease that the same request had before, and that was refused: this one takes its place under the request's key.
    pub instead_of: Option<LeaseId>,
}

/// The outcome of a request for a function.
#[derive(Debug)]
pub(in crate::service) enum Granted {
    /// A lease for each function, on its way to its borrower.
    Leases(Vec<AwaitedLease>),
    /// The request was answered before, about these leases.
    Answered(Box<Kept>, Vec<LeaseId>),
}

/// The outcome of a request to end a lease.
#[derive(Debug)]
pub(in crate::service) enum Returned {
    /// It ends; its function is on the way back.
    Awaited,
    /// The request was answered before.
    Answered(Box<Kept>),
}

/// A lease that somebody asked for and waits for. Dropped before it is [kept](AwaitedLease::keep), it is
/// given back: its caller went away.
#[derive(Debug)]
pub(in crate::service) struct AwaitedLease {
    pub lease: LeaseId,
    pub(super) interest: Arc<Interest>,
}

impl AwaitedLease {
    /// The caller has it.
    pub fn keep(self) {
        self.interest.keep();
    }

    /// The caller is answered that it does not get it.
    pub fn refuse(self) {
        self.interest.refuse();
    }
}
