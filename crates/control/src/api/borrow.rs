//! What is asked for when a function is borrowed, and what of that contradicts itself.

use std::time::Duration;

use rackbus_lease::{Placement, Terms};
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use super::{AcceleratorChoice, ApiError};
use crate::levels::check_level;

/// Asks for a function.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct BorrowRequest {
    /// Name of the function that is asked for, `HOST/DEVICE`; nothing where an `accelerator` is asked for.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub function: String,
    /// In place of a function: whichever accelerator keeps a service level. The control plane chooses among those with a
    /// free function the one where most is left for that engine.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub accelerator: Option<AcceleratorChoice>,
    /// The host that shall have it.
    pub borrower: String,
    /// What the lender must not be able to do.
    #[serde(default)]
    pub isolation: Isolation,
    /// Where the function's front shall run, `lender` or `borrower`; nothing lets the isolation
    /// decide.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<String>)]
    pub placement: Option<Placement>,
    /// The user that it is for, among those of the borrower: functions of one group reach each other's
    /// memory by DMA. At most 64 letters, digits, `.`, `_` and `-`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub group: Option<String>,
    /// The service level that the lender is to promise: `aes256gcm 4 Gbit/s`. Refused, with what would
    /// fit, where it cannot be kept, and for functions of a class that has none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub level: Option<String>,
    /// The running VM of the borrower that it is plugged into: answered when it is, and refused where it cannot be. At
    /// most 64 letters, digits, `.`, `_` and `-`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub vm: Option<String>,
    /// The process of the borrower's machine that starts what will use the function, as ID.BIRTH.NAMESPACE: its id, when it began
    /// in the kernel's ticks, and a number of the namespace that the id is of (the inode of `/proc/self/ns/pid`, combined by
    /// exclusive or with the first 16 hexadecimal digits of the machine's boot id). A process that the borrower's node does
    /// not know by that is not waited for. Where it ends before anybody has used
    /// the function, the lease is returned.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub starter: Option<String>,
    /// How long to wait for the function while others have it, in milliseconds, at most a day; nothing:
    /// not at all.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub wait_ms: Option<u64>,
    /// Of those who wait, the greatest comes first.
    #[serde(default)]
    pub priority: u8,
}

/// The longest time that a request may wait: a day, in milliseconds.
pub const LONGEST_WAIT_MS: u64 = 24 * 60 * 60 * 1000;

/// The longest service level, in bytes: it is kept with the lease, and said again until it is answered.
pub const LONGEST_LEVEL: usize = 256;

/// How far a borrower trusts its lender.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum Isolation {
    /// The lender reaches what the borrower's driver maps for the function.
    #[default]
    Shared,
    /// The lender has no memory of the borrower's.
    Strict,
}

impl BorrowRequest {
    /// A function for a host, with nothing particular asked for.
    pub fn new(function: &str, borrower: &str) -> BorrowRequest {
        let (function, borrower) = (function.to_owned(), borrower.to_owned());
        BorrowRequest {
            function,
            accelerator: None,
            borrower,
            isolation: Isolation::Shared,
            placement: None,
            group: None,
            level: None,
            vm: None,
            starter: None,
            wait_ms: None,
            priority: 0,
        }
    }

    /// Whichever accelerator keeps `level`, for a host, with nothing else asked for.
    pub fn of_accelerator(level: &str, borrower: &str) -> BorrowRequest {
        let accelerator = Some(AcceleratorChoice { level: level.to_owned() });
        BorrowRequest { accelerator, ..BorrowRequest::new("", borrower) }
    }

    /// Refuses a request that names neither a function nor an accelerator's level, or both.
    ///
    /// # Errors
    /// [`ApiError`] of code `bad_request`.
    pub fn check_target(&self) -> Result<(), ApiError> {
        let error = match (&self.accelerator, self.function.is_empty()) {
            (None, false) => return Ok(()),
            (Some(_), true) if self.level.is_none() => return Ok(()),
            (None, true) => "the request names nothing to borrow",
            (Some(_), false) => "the request names a function and an accelerator's level",
            (Some(_), true) => "the request has two levels",
        };
        let remedy =
            "name either `function`, with or without a `level`, or `accelerator` with its `level`";
        Err(ApiError::new("bad_request", error.to_owned(), remedy))
    }

    /// How long to wait for a function that others have.
    ///
    /// # Errors
    /// When that is too long.
    pub fn wait(&self) -> Result<Option<Duration>, ApiError> {
        match self.wait_ms {
            Some(ms) if ms > LONGEST_WAIT_MS => Err(ApiError::new(
                "bad_request",
                format!("a request cannot wait for {ms} ms"),
                "wait for a day at most, and ask again",
            )),
            wait => Ok(wait.map(Duration::from_millis)),
        }
    }

    /// On which terms it is asked for.
    ///
    /// # Errors
    /// When what is asked for contradicts itself, or the group or the VM has no name.
    pub fn terms(&self) -> Result<Terms, ApiError> {
        check_name("a group", self.group.as_deref())?;
        check_name("a VM", self.vm.as_deref())?;
        check_name("a process", self.starter.as_deref())?;
        check_level(self.level.as_deref())?;
        let placement = self.placed()?;
        if placement == Placement::Host && self.vm.is_some() {
            return Err(ApiError::new(
                "contradiction",
                "a function in its host's own PCI tree cannot be plugged into a VM".to_owned(),
                "ask for no placement, or for no VM",
            ));
        }
        let (group, level, vm) = (self.group.clone(), self.level.clone(), self.vm.clone());
        Ok(Terms { placement, group, level, vm, starter: self.starter.clone() })
    }

    /// Where the function's front runs.
    ///
    /// # Errors
    /// When what is asked for contradicts itself.
    pub fn placed(&self) -> Result<Placement, ApiError> {
        match (self.isolation, self.placement) {
            (Isolation::Strict, Some(Placement::Lender)) => Err(ApiError::new("contradiction", "strict isolation and a front at the lender exclude each other: the lender \
                        would have memory of the borrower's"
                    .to_owned(), "ask for placement `borrower`, or for no placement")),
            (Isolation::Strict, Some(Placement::Host)) => Err(ApiError::new("contradiction", "strict isolation and placement `host` exclude each other: through an NTB's window the \
                        lender's device reaches all of the borrower's memory that the window covers"
                    .to_owned(), "ask for placement `borrower`, or do without strict isolation")),
            (Isolation::Strict, _) => Ok(Placement::Borrower),
            (Isolation::Shared, asked) => Ok(asked.unwrap_or_default()),
        }
    }
}

/// Checks what is asked for as the name of `what`: of a group, or of a VM.
fn check_name(what: &str, name: Option<&str>) -> Result<(), ApiError> {
    let known = |c: char| c.is_ascii_alphanumeric() || "._-".contains(c);
    let named = |name: &str| (1..=64).contains(&name.len()) && name.chars().all(known);
    match name.filter(|name| !named(name)) {
        None => Ok(()),
        Some(name) => Err(ApiError::new(
            "bad_name",
            format!("`{name}` is no name of {what}"),
            "write up to 64 letters, digits, dots, underscores and hyphens",
        )),
    }
}
