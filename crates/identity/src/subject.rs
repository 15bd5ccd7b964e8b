//! Whom a certificate of the rack names, and what a person may do by it.
//!
//! A certificate has one name, a DNS name: `control.rackbus`, `alpha.node.rackbus`, `ann.operator.user.rackbus`, or
//! `ann.beta.borrower.user.rackbus`. So what a person may do is signed with the name, and cannot be separated from it.

use std::fmt;
use std::str::FromStr;

use rustls::pki_types::{CertificateDer, ServerName};
use serde::{Deserialize, Serialize};

/// Ends the names of nodes.
const NODE: &str = ".node.rackbus";
/// Ends the names of people.
const USER: &str = ".user.rackbus";
/// The name of the control plane.
const CONTROL: &str = "control.rackbus";

/// What a certificate of the rack names.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(into = "String", try_from = "String")]
pub enum Subject {
    /// A control plane, which all of the rack's nodes and users talk to.
    Control,
    /// The node of this host.
    Node(String),
    /// Somebody who uses or administrates the rack.
    Person(Person),
}

/// Somebody who uses or administrates the rack.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct Person {
    /// By which name the rack knows them.
    pub user: String,
    /// What they may do.
    pub role: Role,
}

/// What a person may do.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub enum Role {
    /// Everything, among that to let in others and to revoke what they were given.
    Administrator,
    /// To borrow and return for every host, and what else changes who has what.
    Operator,
    /// To borrow and return for this host.
    Borrower(String),
    /// To read what there is, and change nothing.
    Reader,
}

impl Role {
    /// The words for all roles.
    pub const NAMES: [&str; 4] = ["administrator", "operator", "borrower", "reader"];

    /// The word for it, without the host.
    pub fn name(&self) -> &'static str {
        match self {
            Role::Administrator => "administrator",
            Role::Operator => "operator",
            Role::Borrower(_) => "borrower",
            Role::Reader => "reader",
        }
    }

    /// The host that it is for, if it is for one.
    pub fn host(&self) -> Option<&str> {
        match self {
            Role::Borrower(host) => Some(host),
            Role::Administrator | Role::Operator | Role::Reader => None,
        }
    }

    /// The role of this name, for this host.
    ///
    /// # Errors
    /// [`BadRole`].
    pub fn named(name: &str, host: Option<&str>) -> Result<Role, BadRole> {
        let role = match (name, host) {
            ("borrower", Some(host)) => return Ok(Role::Borrower(host.to_owned())),
            ("borrower", None) => return Err(BadRole::NoHost),
            ("administrator", _) => Role::Administrator,
            ("operator", _) => Role::Operator,
            ("reader", _) => Role::Reader,
            _ => return Err(BadRole::Unknown(name.to_owned())),
        };
        match host {
            None => Ok(role),
            Some(_) => Err(BadRole::Host(role.name())),
        }
    }
}

/// `operator`, or `borrower for beta`.
impl fmt::Display for Role {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Role::Borrower(host) => write!(f, "borrower for {host}"),
            other => f.write_str(other.name()),
        }
    }
}

/// There is no such role.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum BadRole {
    /// No role has this name.
    #[error("there is no role {0}: they are administrator, operator, borrower and reader")]
    Unknown(String),
    /// A borrower is one for a host.
    #[error("a borrower borrows for one host: name it")]
    NoHost,
    /// Other roles are for the whole rack.
    #[error("the role {0} is for the whole rack, and not for a host")]
    Host(&'static str),
}

impl Subject {
    /// The subject that `certificate` names: one, and none but by its name for DNS. Whether the certificate is
    /// of this rack has been looked at.
    pub fn of(certificate: &CertificateDer<'_>) -> Option<Subject> {
        let certificate = webpki::EndEntityCert::try_from(certificate).ok()?;
        let mut names = certificate.valid_dns_names();
        let subject = names.next()?.parse().ok()?;
        names.next().is_none().then_some(subject)
    }

    /// The name by which others connect to it; `None` where it is not [valid](Subject::is_valid), and for people,
    /// as nobody connects to them.
    pub fn server_name(&self) -> Option<ServerName<'static>> {
        let serves = self.is_valid() && !matches!(self, Subject::Person(_));
        ServerName::try_from(self.to_string()).ok().filter(|_| serves)
    }

    /// Whether a certificate can name it: names of hosts and people are labels of DNS names.
    pub fn is_valid(&self) -> bool {
        match self {
            Subject::Control => true,
            Subject::Node(host) => is_label(host),
            Subject::Person(Person { user, role }) => {
                is_label(user) && role.host().is_none_or(is_label)
            }
        }
    }
}

/// Whether this can stand between two full stops of a DNS name.
fn is_label(name: &str) -> bool {
    let plain = |byte: u8| byte.is_ascii_lowercase() || byte.is_ascii_digit() || byte == b'-';
    let ends = !name.starts_with('-') && !name.ends_with('-');
    (1..=63).contains(&name.len()) && ends && name.bytes().all(plain)
}

/// The name in the certificate: `alpha.node.rackbus`.
impl fmt::Display for Subject {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Subject::Control => f.write_str(CONTROL),
            Subject::Node(host) => write!(f, "{host}{NODE}"),
            Subject::Person(Person { user, role: Role::Borrower(host) }) => {
                write!(f, "{user}.{host}.borrower{USER}")
            }
            Subject::Person(Person { user, role }) => write!(f, "{user}.{}{USER}", role.name()),
        }
    }
}

/// A name that stands for nobody of a rack.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("`{0}` is no name in a rack's certificates")]
pub struct BadSubject(String);

impl FromStr for Subject {
    type Err = BadSubject;

    fn from_str(name: &str) -> Result<Subject, BadSubject> {
        let person = |of: &str| {
            let parts: Vec<&str> = of.split('.').collect();
            let (user, role) = match parts[..] {
                [user, host, "borrower"] => (user, Role::Borrower(host.to_owned())),
                [user, role] => (user, Role::named(role, None).ok()?),
                _ => return None,
            };
            Some(Subject::Person(Person { user: user.to_owned(), role }))
        };
        let subject = match (name.strip_suffix(NODE), name.strip_suffix(USER)) {
            (Some(host), _) => Some(Subject::Node(host.to_owned())),
            (_, Some(of)) => person(of),
            _ => (name == CONTROL).then_some(Subject::Control),
        };
        subject.filter(Subject::is_valid).ok_or_else(|| BadSubject(name.to_owned()))
    }
}

impl From<Subject> for String {
    fn from(subject: Subject) -> String {
        subject.to_string()
    }
}

impl TryFrom<String> for Subject {
    type Error = BadSubject;

    fn try_from(name: String) -> Result<Subject, BadSubject> {
        name.parse()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn person(user: &str, role: Role) -> Subject {
        Subject::Person(Person { user: user.to_owned(), role })
    }

    #[test]
    fn each_subject_has_a_name_of_its_own() {
        for (subject, name) in [
            (Subject::Control, "control.rackbus"),
            (Subject::Node("beta".into()), "beta.node.rackbus"),
            (person("ann", Role::Administrator), "ann.administrator.user.rackbus"),
            (person("ann", Role::Operator), "ann.operator.user.rackbus"),
            (person("ann", Role::Borrower("beta".into())), "ann.beta.borrower.user.rackbus"),
            (person("ann", Role::Reader), "ann.reader.user.rackbus"),
            // Whoever has the name of a host, a role or the control plane is still somebody else.
            (person("control", Role::Reader), "control.reader.user.rackbus"),
            (Subject::Node("borrower".into()), "borrower.node.rackbus"),
        ] {
            assert_eq!(subject.to_string(), name);
            assert_eq!(name.parse::<Subject>().as_ref(), Ok(&subject));
        }
    }

    #[test]
    fn other_names_are_of_no_subject() {
        for name in [
            "",
            "rackbus",
            "ann.user.rackbus",
            "ann.borrower.user.rackbus",
            "ann.root.user.rackbus",
            "a.b.operator.user.rackbus",
            "ann.a.b.borrower.user.rackbus",
            "Ann.reader.user.rackbus",
            ".reader.user.rackbus",
            "ann.-.borrower.user.rackbus",
            "a.b.node.rackbus",
            ".node.rackbus",
            "x.control.rackbus",
        ] {
            assert!(name.parse::<Subject>().is_err(), "{name}");
        }
        for user in ["Ann", "a.b", "", "-a", &"a".repeat(64)] {
            assert!(!person(user, Role::Reader).is_valid(), "{user}");
        }
    }

    #[test]
    fn a_borrower_is_for_a_host_and_nobody_else_is() {
        assert_eq!(Role::named("borrower", Some("beta")), Ok(Role::Borrower("beta".into())));
        assert_eq!(Role::named("borrower", None), Err(BadRole::NoHost));
        assert_eq!(Role::named("reader", Some("beta")), Err(BadRole::Host("reader")));
        assert!(matches!(Role::named("root", None), Err(BadRole::Unknown(_))));
        for name in Role::NAMES {
            let host = (name == "borrower").then_some("beta");
            assert_eq!(Role::named(name, host).unwrap().name(), name);
        }
    }
}
