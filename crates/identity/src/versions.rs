//! Versions of a protocol that a part of the rack speaks, and which one two of them speak with each other.
//!
//! Nodes and control planes are upgraded one machine at a time, so each speaks the version before as well where that
//! differs. Both sides say the oldest and the newest version that they speak; the newest that both speak is spoken.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

/// The versions that somebody speaks: all from the oldest to the newest.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(into = "Said", try_from = "Said")]
pub struct Versions {
    oldest: u32,
    newest: u32,
}

/// As it is said. Who speaks one version names that alone, as everybody did before there were several.
#[derive(Serialize, Deserialize)]
struct Said {
    version: u32,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    oldest: Option<u32>,
}

/// What are no versions.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("`{0}` is no range of versions: write `3` or `2-3`")]
pub struct BadVersions(String);

impl Versions {
    /// From the oldest to the newest, which is at least that.
    pub const fn new(oldest: u32, newest: u32) -> Versions {
        assert!(oldest <= newest && oldest > 0);
        Versions { oldest, newest }
    }

    /// The newest version, which is used when the other side speaks it.
    pub fn newest(self) -> u32 {
        self.newest
    }

    /// Whether this one is spoken.
    pub fn has(self, version: u32) -> bool {
        (self.oldest..=self.newest).contains(&version)
    }

    /// The newest one that `other` speaks as well.
    ///
    /// # Errors
    /// [`NoCommonVersion`], when there is none.
    pub fn common(self, other: Versions) -> Result<u32, NoCommonVersion> {
        let common = self.newest.min(other.newest);
        match common >= self.oldest.max(other.oldest) {
            true => Ok(common),
            false => Err(NoCommonVersion { own: self, other }),
        }
    }
}

/// For messages: `3` when there is one version, else `2-3`.
impl fmt::Display for Versions {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.oldest == self.newest {
            true => write!(f, "{}", self.newest),
            false => write!(f, "{}-{}", self.oldest, self.newest),
        }
    }
}

impl FromStr for Versions {
    type Err = BadVersions;

    fn from_str(text: &str) -> Result<Versions, BadVersions> {
        let bad = || BadVersions(text.chars().take(32).collect());
        let (oldest, newest) = text.split_once('-').unwrap_or((text, text));
        let number = |text: &str| text.trim().parse::<u32>().map_err(|_| bad());
        let (oldest, newest) = (number(oldest)?, number(newest)?);
        match oldest > 0 && oldest <= newest {
            true => Ok(Versions { oldest, newest }),
            false => Err(bad()),
        }
    }
}

impl From<Versions> for Said {
    fn from(versions: Versions) -> Said {
        let Versions { oldest, newest } = versions;
        Said { version: newest, oldest: (oldest != newest).then_some(oldest) }
    }
}

impl TryFrom<Said> for Versions {
    type Error = BadVersions;

    fn try_from(said: Said) -> Result<Versions, BadVersions> {
        let Said { version, oldest } = said;
        format!("{}-{version}", oldest.unwrap_or(version)).parse()
    }
}

/// Two sides speak no version in common.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct NoCommonVersion {
    /// What this side speaks.
    pub own: Versions,
    /// What the other side speaks.
    pub other: Versions,
}

impl NoCommonVersion {
    /// What is wrong, and which side is to be upgraded, with the names of this side and the other one.
    pub fn explained(&self, own: &str, other: &str) -> String {
        let NoCommonVersion { own: ours, other: theirs } = self;
        let old = if ours.newest < theirs.oldest { own } else { other };
        format!(
            "{own} speaks version {ours} of the protocol and {other} {theirs}: upgrade rackbus of {old}"
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_newest_version_of_both_sides_is_used() {
        for (own, other, common) in [
            ((1, 1), (1, 1), Some(1)),
            ((1, 2), (1, 1), Some(1)),
            ((1, 1), (1, 2), Some(1)),
            ((1, 3), (2, 4), Some(3)),
            ((2, 3), (3, 3), Some(3)),
            ((1, 1), (2, 2), None),
            ((3, 4), (1, 2), None),
        ] {
            let (one, two) = (Versions::new(own.0, own.1), Versions::new(other.0, other.1));
            assert_eq!(one.common(two).ok(), common, "{own:?} {other:?}");
            assert_eq!(two.common(one).ok(), common, "{own:?} {other:?}");
        }
    }

    #[test]
    fn a_peer_that_is_too_old_is_to_be_upgraded() {
        let (old, new) = (Versions::new(1, 1), Versions::new(2, 3));
        for apart in [old.common(new).unwrap_err(), new.common(old).unwrap_err()] {
            let (own, other) = if apart.own == old { ("beta", "alpha") } else { ("alpha", "beta") };
            let said = apart.explained(own, other);
            assert!(said.ends_with("upgrade rackbus of beta"), "{said}");
            assert!(
                said.contains("alpha speaks version 2-3") || said.contains("alpha 2-3"),
                "{said}"
            );
        }
    }

    #[test]
    fn one_version_is_written_as_a_single_number() {
        let text = |versions| serde_json::to_string(&versions).unwrap();
        assert_eq!(text(Versions::new(1, 1)), r#"{"version":1}"#);
        assert_eq!(text(Versions::new(1, 2)), r#"{"version":2,"oldest":1}"#);
        for versions in [Versions::new(1, 1), Versions::new(2, 5)] {
            let said = text(versions);
            assert_eq!(serde_json::from_str::<Versions>(&said).unwrap(), versions);
            assert_eq!(versions.to_string().parse(), Ok(versions));
        }
        for bad in [r#"{"version":0}"#, r#"{"version":1,"oldest":2}"#, r#"{"oldest":1}"#] {
            assert!(serde_json::from_str::<Versions>(bad).is_err(), "{bad}");
        }
        for bad in ["", "0", "2-1", "1-", "a", "-1", "99999999999"] {
            assert!(bad.parse::<Versions>().is_err(), "{bad}");
        }
    }
}
