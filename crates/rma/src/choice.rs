//! Which provider is used.

use std::fmt;
use std::str::FromStr;

use crate::endpoint::FoundProvider;
use crate::{Library, RmaError};

/// Providers of adapters that move data themselves, in the order in which they are preferred. `psm3` is none of them: it
/// also runs over the sockets of any network, and has to be named.
const ADAPTERS: [&str; 5] = ["cxi", "opx", "psm2", "efa", "verbs"];

/// What the rack file says about the lane.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub enum ProviderChoice {
    /// An adapter's, where there is one.
    #[default]
    Auto,
    /// No RDMA: the link carries all data.
    Off,
    /// This one, by the name that libfabric has for it: `verbs`, `tcp`.
    Named(String),
}

impl FromStr for ProviderChoice {
    type Err = std::convert::Infallible;

    fn from_str(text: &str) -> Result<ProviderChoice, Self::Err> {
        Ok(match text {
            "auto" => ProviderChoice::Auto,
            "off" => ProviderChoice::Off,
            name => ProviderChoice::Named(name.to_owned()),
        })
    }
}

impl fmt::Display for ProviderChoice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            ProviderChoice::Auto => "auto",
            ProviderChoice::Off => "off",
            ProviderChoice::Named(name) => name,
        })
    }
}

/// The names of the providers that can be used here, the preferred ones first. For [`ProviderChoice::Auto`] there may be
/// none, also where libfabric is not installed.
///
/// # Errors
/// [`RmaError`] when one is named and not there.
pub fn providers(choice: &ProviderChoice) -> Result<Vec<String>, RmaError> {
    match choice {
        ProviderChoice::Off => Ok(Vec::new()),
        ProviderChoice::Auto => {
            let Ok(library) = Library::load() else { return Ok(Vec::new()) };
            let found = ADAPTERS.map(|name| FoundProvider::find(library, name, None));
            Ok(found.into_iter().flatten().map(|found| found.provider().to_owned()).collect())
        }
        ProviderChoice::Named(name) => {
            let found = FoundProvider::find(Library::load()?, name, None)?;
            Ok(vec![found.provider().to_owned()])
        }
    }
}
