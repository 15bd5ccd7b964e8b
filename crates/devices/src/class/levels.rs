//! Service levels of functions, as far as all classes have them in common: who a level is for, and the answer of a class
//! that has none.

/// Who a function is for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LentTo {
    /// Nobody: it is given back.
    Nobody,
    /// The host that it is in.
    Owner,
    /// A host other than the device's own.
    Borrower,
}

/// The answer of a class that has no service levels.
///
/// # Errors
/// That there are none, where one is asked for.
pub fn no_levels(level: Option<&str>) -> Result<(), String> {
    match level {
        None => Ok(()),
        Some(_) => Err("there are no service levels for functions of this class".to_owned()),
    }
}
