//! The atomics that the algorithms in shared memory are written over.
//!
//! Here they are the standard library's. `tests/loom.rs` compiles the same algorithms over loom's,
//! which runs them through every order that the memory model allows.

pub(crate) use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
