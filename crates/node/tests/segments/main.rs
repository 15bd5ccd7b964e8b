//! Two hosts' segment services and processes' sessions with them: what is shared, with whom, and
//! what becomes of it.

#[path = "../common/mod.rs"]
mod common;
mod elsewhere;
mod groups;
mod interrupts;
mod machines;
mod moves;
mod nodes;
mod sharing;
mod support;
