//! One leader among several control planes, by a key in etcd.
//!
//! * [`core`]: when to renew, when to campaign, when to stop: decided without clock or I/O.
//! * [`election`]: the transactions by which a leader is made.
//! * [`candidate`]: a process that does what the core says.
//! * [`tenure`]: a leadership as its store and its API see it.
//! * [`serving`]: the API of a process that leads or does not. [`members`]: who else is there.
//! * [`authorities`]: those that took the place of the first one. [`shared`]: the certificate authority and the tokens, which all of them have.

pub mod authorities;
pub mod candidate;
pub mod core;
pub mod election;
pub mod members;
pub mod serving;
pub mod shared;
pub mod tenure;

pub use tenure::{Tenure, TenureClock, machine_clock};
