#![forbid(unsafe_code)]
//! The lending protocol: who may use which function, decided without I/O, clock or threads.
//!
//! Three state machines exchange [`Message`]s:
//! * [`Authority`], in the control plane: grants leases, each with an epoch that only grows.
//! * [`Lender`], in the node of the host that has the function: *enforces* them. It lets in only
//!   the epoch it was last armed for, and answers a revocation when nothing of that epoch is
//!   reachable any more.
//! * [`Borrower`], in the node of the host that uses it: opens and closes its end, and renews. Where the function's
//!   front runs there, it *decides* which one may: one of a function at a time, whatever its lease.
//!
//! Messages may be lost, delayed, reordered and duplicated, nodes and control plane may die and
//! return; what must never happen is that two epochs of one function are live at once (I2), or
//! that an old one reaches anything after its revocation was answered (I4). The argument is
//! short: the authority arms an epoch only after the lender answered the older one's revocation,
//! or after the lender started anew (a new *incarnation*, whose process never had anything
//! mapped); and the lender never arms an epoch that is not newer than all it has seen.
//!
//! The authority repeats what was not answered; nodes answer repeated messages again. Only
//! registering, renewing and reporting a loss begin at a node, which repeats those.
//!
//! Requests for a function that somebody has may wait in a [`WaitingQueue`]. A [`CompositionRecord`] is several functions that
//! are borrowed whole or not at all. The service level of a lease can be [changed](LevelChange) while it is used;
//! its lender decides whether that can be kept.
//!
//! Borrowers may take turns on a function: a [`ShareRecord`] is a standing request for them.
//!
//! Devices may be offered and withdrawn while the rack runs: a [`DeviceChange`] is said to their host until its node has
//! answered, and to each new life of that.
//!
//! A node's process may be replaced by another one that goes on in its place, the same incarnation: the
//! lender's and the borrower's machines are values, which are complete when nothing is
//! [under way](UnderWay).
//!
//! Time is a number of milliseconds that the caller passes in; it need only grow.

pub mod authority;
pub mod borrower;
pub mod change;
pub mod composition;
pub mod device;
pub mod lender;
pub mod message;
pub mod queue;
pub mod share;
pub mod under_way;

pub use authority::{
    Authority, Availability, BorrowRefused, Config, Decision, EndReason, FunctionRecord, HostInUse,
    HostRecord, LeaseRecord, LeaseState, Record, ReturnRefused,
};
pub use borrower::{Borrower, BorrowerAction, FrontRefused};
pub use change::{ChangeRefused, LevelChange};
pub use composition::{CompositionRecord, CompositionRefused};
pub use device::{DeviceAnswer, DeviceChange, DeviceRefused};
pub use lender::{ArmFailure, ArmedFor, Lender, LenderAction, NotAdmitted, ToldDevice};
pub use message::{
    BadFunctionId, Epoch, FunctionId, Grant, Incarnation, LeaseId, Message, Millis, Placement,
    Terms,
};
pub use queue::{Priority, QueuePlace, WaitingQueue};
pub use share::{LeaveReason, ShareRecord, ShareRefused, ShareRequest, ShareTurn, TurnOf, TurnUse};
pub use under_way::UnderWay;
