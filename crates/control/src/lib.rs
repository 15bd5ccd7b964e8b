#![forbid(unsafe_code)]
//! The control plane: who may use what, said over HTTP.
//!
//! * [`api`]: the bodies of requests and answers.
//! * [`service`]: the lending protocol's authority with its store: decides, stores, then tells.
//! * [`http`]: the routes, and the OpenAPI document that describes them.
//! * [`store`]: what is remembered, behind a trait: an SQLite file, or etcd.
//! * [`etcd`]: what is used of that. [`leadership`]: one leader among several control planes. [`leaders`]: finds it.
//! * [`compositions`]: functions that are borrowed together, as the API has them.
//! * [`together`]: functions that are borrowed in one step, as the API has it.
//! * [`shares`]: borrowers take turns on a function, as the API has it.
//! * [`levels`]: the service level of a lease is changed, as the API has it.
//! * [`answers`]: requests with an idempotency key, and their answers.
//! * [`events`]: what happened, with its cause.
//! * [`usage`]: what a lease used, and how far it got what it was promised.
//! * [`access`]: who asks, and what it may. [`machines`]: the API for other machines, over TLS. [`people`]: how people
//!   get in. [`register`]: which certificates there are, and which are revoked; [`certificates`]: as the API has them.
//!   [`authorities`]: the rack's certificate authority is replaced, as the API has it.
//! * [`metrics`]: what is counted, for Prometheus.
//! * [`node`]: what a node answers at its own socket. [`reach`]: who reaches what.
//! * [`said`]: what is said to nodes, with the leader's term.
//! * [`versions`]: which version of the API two sides speak.
//! * [`client`]: the other side, for the command line and the nodes.

pub mod access;
pub mod answers;
pub mod api;
pub mod authorities;
mod blocking;
pub mod certificates;
pub mod client;
pub mod compositions;
pub mod etcd;
pub mod events;
pub mod http;
pub mod leaders;
pub mod leadership;
pub mod levels;
pub mod machines;
pub mod metrics;
pub mod network;
pub mod node;
pub mod offers;
pub mod people;
pub mod reach;
pub mod register;
pub mod said;
pub mod service;
pub mod shares;
pub mod store;
pub mod together;
pub mod usage;
pub mod versions;

pub use client::{ControlClient, ControlClientError};
pub use events::lease_span;
pub use http::{openapi, serve};
pub use service::{Inventory, Service, ServiceOptions};
