//! Compositions: functions that one host borrows together.
//!
//! A composition is borrowed whole or not at all, in one step of the authority. While it waits it has nothing,
//! so compositions that want each other's functions cannot wait for each other for ever.

use serde::{Deserialize, Serialize};

use crate::message::{FunctionId, Placement};

/// Functions that are borrowed together, as stored.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct CompositionRecord {
    /// Its name, which is also that of the group that its leases belong to.
    pub name: String,
    /// The host that borrows it.
    pub borrower: String,
    /// The functions; at least one, each once.
    pub functions: Vec<FunctionId>,
    /// Where the functions' fronts run.
    #[serde(default)]
    pub placement: Placement,
}

/// Why a composition cannot be saved or removed.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum CompositionRefused {
    /// There is one of that name, and it is another one.
    #[error("there is a composition {0} already")]
    Exists(String),
    /// There is none of that name.
    #[error("there is no composition {0}")]
    Unknown(String),
    /// It names no function.
    #[error("a composition has at least one function")]
    Empty,
    /// It names a function twice.
    #[error("{0} is in the composition twice")]
    Twice(FunctionId),
}

impl CompositionRecord {
    /// Whether it can be borrowed at all.
    ///
    /// # Errors
    /// [`CompositionRefused::Empty`], [`CompositionRefused::Twice`].
    pub fn check(&self) -> Result<(), CompositionRefused> {
        let functions = &self.functions;
        let twice = |(at, function): (usize, &FunctionId)| functions[..at].contains(function);
        match functions.iter().enumerate().find(|entry| twice(*entry)) {
            _ if functions.is_empty() => Err(CompositionRefused::Empty),
            Some((_, function)) => Err(CompositionRefused::Twice(function.clone())),
            None => Ok(()),
        }
    }
}
