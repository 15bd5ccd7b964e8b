//! The command line over real processes.

mod commands;
mod common;
mod deaths;
