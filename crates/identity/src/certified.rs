//! What a certificate of the rack says, apart from its key: of whom it is, its number, and for how long it is good.

use std::fmt;
use std::str::FromStr;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use rustls::pki_types::CertificateDer;
use serde::{Deserialize, Serialize};

use crate::{Subject, hex, random};

/// How far clocks may be apart: a certificate is good so much before it is made.
pub(crate) const SKEW: Duration = Duration::from_secs(600);
/// How long a certificate of a node or of the control plane is good.
pub const NODE_LIFE: Duration = Duration::from_secs(30 * 24 * 3600);
/// How long a certificate of a person is good unless its token says otherwise.
pub const PERSON_LIFE: Duration = Duration::from_secs(7 * 24 * 3600);
/// The longest that a certificate of a person is good.
pub const LONGEST_LIFE: Duration = NODE_LIFE;
/// Bytes of the longest serial number (RFC 5280).
const LONGEST_SERIAL: usize = 20;

/// The number of a certificate, which no other certificate of the rack has: hexadecimal digits.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(into = "String", try_from = "String")]
pub struct Serial(Vec<u8>);

impl Serial {
    /// A new one, of 64 bits.
    pub fn new() -> Serial {
        let mut bytes: [u8; 8] = random();
        // Positive, and as long as it is written.
        bytes[0] = bytes[0] & 0x3f | 0x40;
        Serial(bytes.to_vec())
    }

    pub(crate) fn bytes(&self) -> &[u8] {
        &self.0
    }
}

impl Default for Serial {
    fn default() -> Serial {
        Serial::new()
    }
}

impl fmt::Display for Serial {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(&hex(&self.0))
    }
}

/// What is no serial number.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("`{0}` is no serial number of a certificate: these are hexadecimal digits")]
pub struct BadSerial(String);

impl FromStr for Serial {
    type Err = BadSerial;

    fn from_str(text: &str) -> Result<Serial, BadSerial> {
        let bad = || BadSerial(text.chars().take(2 * LONGEST_SERIAL).collect());
        let digits = text.as_bytes();
        let pairs = digits.chunks_exact(2);
        let fits =
            (2..=2 * LONGEST_SERIAL).contains(&digits.len()) && digits.len().is_multiple_of(2);
        if !fits || !digits.iter().all(u8::is_ascii_hexdigit) {
            return Err(bad());
        }
        let byte = |pair: &[u8]| u8::from_str_radix(std::str::from_utf8(pair).ok()?, 16).ok();
        pairs.map(byte).collect::<Option<_>>().map(Serial).ok_or_else(bad)
    }
}

impl From<Serial> for String {
    fn from(serial: Serial) -> String {
        serial.to_string()
    }
}

impl TryFrom<String> for Serial {
    type Error = BadSerial;

    fn try_from(text: String) -> Result<Serial, BadSerial> {
        text.parse()
    }
}

/// What a certificate says.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Certified {
    /// Of whom it is.
    pub subject: Subject,
    /// Its serial number, which no other certificate of the rack has.
    pub serial: Serial,
    /// When it was made, in seconds since 1970.
    pub since: u64,
    /// Until when it is good, in seconds since 1970.
    pub until: u64,
}

impl Certified {
    /// A certificate to be made now, which is good for `life`.
    pub fn new(subject: Subject, life: Duration) -> Certified {
        let since = now();
        let until = since.saturating_add(life.as_secs());
        Certified { subject, serial: Serial::new(), since, until }
    }

    /// What stands for somebody who is known without a certificate. A revocation of all that `subject` was given is about it for as
    /// long as that revocation is kept, whatever was given out since; one of a single certificate never is.
    pub fn unshown(subject: Subject) -> Certified {
        Certified { subject, serial: Serial::new(), since: 0, until: u64::MAX }
    }

    /// What `certificate` says; nothing where it names nobody of a rack. Whether it is of this rack has been looked
    /// at.
    pub fn of(certificate: &CertificateDer<'_>) -> Option<Certified> {
        let subject = Subject::of(certificate)?;
        let (_, parsed) = x509_parser::parse_x509_certificate(certificate).ok()?;
        let bytes = parsed.raw_serial();
        let serial = (1..=LONGEST_SERIAL).contains(&bytes.len()).then(|| Serial(bytes.to_vec()))?;
        let seconds = |time: i64| u64::try_from(time).ok();
        let validity = parsed.validity();
        let since = seconds(validity.not_before.timestamp())?.saturating_add(SKEW.as_secs());
        Some(Certified { subject, serial, since, until: seconds(validity.not_after.timestamp())? })
    }

    /// For how long it is good as a whole.
    pub fn life(&self) -> Duration {
        Duration::from_secs(self.until.saturating_sub(self.since))
    }

    /// Whether it is of no more use at `now` (seconds since 1970).
    pub fn is_over(&self, now: u64) -> bool {
        self.until <= now
    }

    /// Whether it is to be renewed at `now`: one of a person when half of its life is over, another one when less than
    /// a third is left.
    pub fn is_due(&self, now: u64) -> bool {
        let (left, life) = (self.until.saturating_sub(now), self.life().as_secs());
        match self.subject {
            Subject::Person(_) => left <= life / 2,
            Subject::Node(_) | Subject::Control => left < life / 3,
        }
    }
}

/// The machine's clock in seconds since 1970, which can be set back.
pub fn now() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |passed| passed.as_secs())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Person, Role};

    #[test]
    fn serial_numbers_are_hexadecimal_and_differ() {
        let (one, other) = (Serial::new(), Serial::new());
        assert_ne!(one, other);
        assert_eq!(one.to_string().len(), 16);
        assert_eq!(one.to_string().parse::<Serial>().as_ref(), Ok(&one));
        for bad in ["", "1", "xy", "123", &"00".repeat(21), "0x12", "é1"] {
            assert!(bad.parse::<Serial>().is_err(), "{bad}");
        }
    }

    #[test]
    fn people_renew_at_half_of_their_time_and_nodes_at_a_third() {
        let person = Person { user: "ann".into(), role: Role::Reader };
        for (subject, due) in [(Subject::Person(person), 50), (Subject::Node("beta".into()), 68)] {
            let serial = Serial::new();
            let certified = Certified { subject, serial, since: 1000, until: 1100 };
            assert!(!certified.is_due(1000 + due - 1), "{certified:?}");
            assert!(certified.is_due(1000 + due), "{certified:?}");
            assert!(!certified.is_over(1099) && certified.is_over(1100));
        }
    }
}
