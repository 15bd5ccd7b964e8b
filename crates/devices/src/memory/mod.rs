//! Memory as a function: a PCI function whose BAR is a span of memory, which its user loads from and
//! stores into without anybody trapping it.
//!
//! * `class`: what the rack file says of one.
//! * `span`: the bytes, the file that holds them, and how they are taken away from a user.
//! * `function`: the function around them.
//! * `medium`: the two ends where the front runs on another machine, and each access is a question.

mod accesses;
mod class;
mod function;
mod medium;
mod span;

#[cfg(test)]
mod tests;

pub use class::MemoryClass;
pub use function::{BAR, MemoryFunction};
pub use medium::LAYOUT as MEDIUM_LAYOUT;
pub use span::{AtReturn, MemorySpan, SpanError};

/// The name of the class.
pub const CLASS: &str = "memory";
