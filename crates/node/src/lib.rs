#![forbid(unsafe_code)]
//! One host's node: it lends the host's functions and borrows others'.
//!
//! * [`lender`]: runs the functions this host lends, one engine each, and lets in the one
//!   borrower whose epoch was armed.
//! * [`borrower`]: serves each borrowed function as a vfio-user socket on this host.
//! * [`remote`]: a function of another host, as the borrower's socket serves it.

pub mod borrower;
pub mod lender;
pub mod remote;

pub use borrower::{BorrowError, Borrower};
pub use lender::{Armed, LendError, Lender};
pub use remote::RemoteDevice;
