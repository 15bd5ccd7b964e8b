//! What proves that a new connection belongs to a session that began on another one.

use std::fmt;

use rackbus_rma::LaneOffer;
use serde::{Deserialize, Serialize};

/// Shared by the two ends of a session, and by nobody else: the side that answers makes it and gives it to the other
/// over TLS, and a connection on which it is not said again is none of the session.
#[derive(Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Secret(String);

impl Secret {
    /// A new one, of 128 random bits.
    pub fn new() -> Secret {
        let bytes: [u8; 16] = rackbus_identity::random();
        Secret(bytes.iter().map(|byte| format!("{byte:02x}")).collect())
    }

    /// Whether this is `said`, in a time that does not depend on where they differ.
    pub fn is(&self, said: &Secret) -> bool {
        let pairs = self.0.bytes().zip(said.0.bytes());
        let differ = pairs.fold(0, |differ, (one, other)| differ | (one ^ other));
        self.0.len() == said.0.len() && std::hint::black_box(differ) == 0
    }
}

impl Default for Secret {
    fn default() -> Secret {
        Secret::new()
    }
}

impl fmt::Debug for Secret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Secret(..)")
    }
}

/// What a front needs to go on with its medium when their connection is lost.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct MediumSession {
    /// Said again on each other connection.
    pub secret: Secret,
    /// For how long, in milliseconds, the lender keeps the session when it hears nothing.
    pub kept_ms: u64,
    /// How the front reaches the memory that the lender exposes for the session, beside the link.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub lane: Option<LaneOffer>,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_secret_is_itself_alone_and_is_not_shown() {
        let secret = Secret::new();
        assert!(secret.is(&secret.clone()) && !secret.is(&Secret::new()));
        let cut = Secret(secret.0[..31].to_owned());
        assert!(!secret.is(&cut) && !cut.is(&secret) && !Secret(String::new()).is(&secret));
        assert_eq!(format!("{secret:?}"), "Secret(..)");
    }
}
