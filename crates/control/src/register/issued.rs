//! A certificate that was given out, as the register keeps it: for which key it is, which authorities made it, and whether it is
//! in use yet, or another one in its place.

use rackbus_identity::{Certified, KeyDigest, KeyedCertificate, Serial};
use serde::{Deserialize, Serialize};

/// Which authorities somebody has to do with, by their numbers: a rack's first one has 0, and each later one the next number.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct AuthorityNumbers {
    /// The one that makes certificates, or made this one.
    pub issuer: u64,
    /// The newest one that is trusted.
    pub newest: u64,
}

impl AuthorityNumbers {
    fn is_first(&self) -> bool {
        *self == AuthorityNumbers::default()
    }
}

/// A certificate that was given out.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct IssuedCertificate {
    /// Its number, its holder and how long it is good, as it says.
    #[serde(flatten)]
    pub certified: Certified,
    /// For which key it is. A version that did not keep this gave it out where there is none, and nobody has shown it since.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub key: Option<KeyDigest>,
    /// Who made it, and which authority whoever has it trusts.
    #[serde(default, skip_serializing_if = "AuthorityNumbers::is_first")]
    pub under: AuthorityNumbers,
    /// The one that it was made in the place of.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub renews: Option<Serial>,
    /// Whether nobody has shown it yet: the answer that it was in may have been lost.
    #[serde(default, skip_serializing_if = "is_false")]
    pub unshown: bool,
    /// Whether another one was shown in its place.
    #[serde(default, skip_serializing_if = "is_false")]
    pub replaced: bool,
}

#[expect(clippy::trivially_copy_pass_by_ref, reason = "serde passes a reference")]
fn is_false(value: &bool) -> bool {
    !value
}

impl IssuedCertificate {
    /// One that is given out now, by which `old` is renewed.
    pub fn new(
        given: KeyedCertificate,
        under: AuthorityNumbers,
        old: Option<&Certified>,
    ) -> IssuedCertificate {
        let KeyedCertificate { certified, key } = given;
        let (key, renews) = (Some(key), old.map(|old| old.serial.clone()));
        IssuedCertificate { certified, key, under, renews, unshown: true, replaced: false }
    }
}
