//! What two ends of a carried exchange decide when connections between them come and go.
//!
//! A *session* is what the two ends have in common for as long as both live; connections carry it, one after the
//! other. [`FrameOutbox`] numbers what one side sends and keeps it until the other side has said that it has it, so that
//! each frame is taken exactly once and in order, whatever connections it takes: an operation is executed once, and
//! its answer is heard once, for as long as both processes live. [`Contact`] decides which connection counts, when
//! it counts as lost, when the next is tried, and when the session has ended.
//!
//! Either side may go on in another process of its host: what it knows is a value ([`ContactState`], [`OutboxState`]), and
//! to the other side it is as if the connection was lost.
//!
//! Nothing here waits, looks at a clock or sends. Times are milliseconds since the session began, by this side's
//! own monotonic clock.

mod contact;
mod outbox;

pub use contact::{Contact, ContactState, SessionEndReason, SessionSide, SessionTiming};
pub use outbox::{FrameOutbox, OutboxFull, OutboxState, WrongCount};

/// Milliseconds since the session began, by the clock of one side.
pub type SessionMillis = u64;
