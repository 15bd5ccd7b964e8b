//! `libsisci.so`: the SISCI API, so that its programs run on rackbus as they are.
//!
//! The C headers are in `include/`, programs on them in `tools/` and `tests/c/`. This is translation
//! only: handles to objects ([`handles`]), flags and checks to calls of `rackbus-attach`, errors to
//! the API's numbers ([`error`]). Every function is exported under three names, as programs that
//! were built against other headers look for it (`export`).
//!
//! * [`library`]: initialising, descriptors, what is asked about hosts.
//! * [`local`], [`remote`], [`maps`]: segments and mappings of them.
//! * [`copy`]: stores, sequences and block transfers.
//! * [`interrupts`]: with and without data.
//! * [`dma`]: transfers by the copy engine.
//! * [`devices`]: devices of the rack that a program borrows.
//! * [`query`]: facts, asked for by `SCIQuery`.
//! * [`unsupported`]: what needs hardware that is not here: the documented error, never a pretence.

// It panics when nothing can be written there: `error::explain` does not.
#![deny(clippy::print_stderr)]

#[macro_use]
mod export;

mod calling;
pub mod constants;
pub mod copy;
pub mod devices;
pub mod dma;
pub mod error;
mod forks;
pub mod handles;
pub mod interrupts;
pub mod library;
pub mod local;
pub mod maps;
pub mod query;
pub mod remote;
pub mod unsupported;
