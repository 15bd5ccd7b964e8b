#![forbid(unsafe_code)]
//! What the demo and the end-to-end tests share: a rack of real processes, used through the
//! command line as a person uses it, and guests in it.

pub mod guest;
mod interrupt;
pub mod machines;
pub mod metal;
pub mod programs;
pub mod rack;
pub mod sisci;
pub mod soak;
pub mod system;

pub use guest::Guest;
pub use rack::RackProcesses;
pub use system::SystemGuest;

/// A step's condition that did not hold, described for people.
#[derive(Debug)]
pub struct CheckFailure(pub String);

impl std::fmt::Display for CheckFailure {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.0)
    }
}

impl<E: std::error::Error> From<E> for CheckFailure {
    fn from(error: E) -> Self {
        CheckFailure(error.to_string())
    }
}

/// An outcome with this crate's [`CheckFailure`].
pub type Result<T> = std::result::Result<T, CheckFailure>;

/// Ends a step with a [`CheckFailure`] unless the condition holds.
#[macro_export]
macro_rules! ensure {
    ($condition:expr, $($text:tt)+) => {
        if !$condition {
            return Err($crate::CheckFailure(format!($($text)+)));
        }
    };
}
