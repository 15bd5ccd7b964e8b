//! Who asks, and what it may: decided here, for every request.
//!
//! Processes of this machine, of the same user or root's, administrate the rack. The node of a host on another
//! machine acts for that host and nobody else. People on other machines may what their role says, which their
//! certificate names. Who shows no certificate of the rack can join it or log in, with a token. [`table`] has what is
//! needed for each request; [`ApiPeer::decide`] says whether somebody has that. What is granted and refused is in the
//! events with who [asked](RequestOrigin).

pub mod table;

use std::collections::BTreeMap;
use std::fmt;
use std::sync::{Arc, Mutex, PoisonError};

use axum::extract::{ConnectInfo, Request, State};
use axum::http::Method;
use axum::middleware::Next;
use axum::response::{IntoResponse, Response};
use rackbus_identity::{Certified, KeyedCertificate, Person, Role, Subject, now};
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use crate::api::ApiError;
use crate::register::CertificateRegister;
use crate::service::{Service, anew, problem};
use crate::versions::{self, VERSIONS, check_request};
use table::Need;

/// Who is at the other end of a connection to the API.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ApiPeer {
    /// A process of this machine, as the kernel says; its number, when the kernel says that, too.
    Local(Option<i32>),
    /// The node of this host, as its certificate says; none where it is a process of this machine.
    Node(String, Option<Box<KeyedCertificate>>),
    /// A person, as their certificate says.
    Person(Person, Box<KeyedCertificate>),
    /// A control plane of the rack, as its certificate says: it passes on what its own machine's processes ask. The fingerprint of
    /// the authority that made the certificate.
    Control(String),
    /// Somebody whose certificate was revoked.
    Revoked(Box<Certified>),
    /// Somebody on another machine who has shown no certificate of the rack.
    Stranger,
}

impl ApiPeer {
    /// Refuses what is asked for `host` by who acts for another one, or for none.
    ///
    /// # Errors
    /// `forbidden`.
    pub fn acts_for(&self, host: &str) -> Result<(), ApiError> {
        let own = match self {
            ApiPeer::Local(_) | ApiPeer::Control(_) => return Ok(()),
            ApiPeer::Person(Person { role: Role::Administrator | Role::Operator, .. }, _) => {
                return Ok(());
            }
            ApiPeer::Person(Person { role: Role::Borrower(own), .. }, _)
            | ApiPeer::Node(own, _) => own,
            ApiPeer::Person(Person { role: Role::Reader, .. }, _) => {
                return Err(self.forbidden(format!("{} may not act for {host}", self.asker())));
            }
            ApiPeer::Revoked(_) | ApiPeer::Stranger => return Err(self.unknown()),
        };
        match own == host {
            true => Ok(()),
            false => Err(self.forbidden(format!("{} may not act for {host}", self.asker()))),
        }
    }

    /// Refuses a description of a device by who may change which devices there are, but not what they are: it may
    /// name files and programs of a host.
    ///
    /// # Errors
    /// `forbidden`.
    pub fn describes_devices(&self) -> Result<(), ApiError> {
        match self {
            ApiPeer::Person(..) if !self.administrates() => {
                let error = format!(
                    "{} may not describe a device, only offer one again that the rack file has",
                    self.asker()
                );
                Err(self.forbidden(error))
            }
            _ => Ok(()),
        }
    }

    /// Whether it administrates the rack.
    pub fn administrates(&self) -> bool {
        self.has(Need::Administrate)
    }

    /// Whether it has what is needed. For which host it acts, the request itself says.
    fn has(&self, need: Need) -> bool {
        match self {
            // Who a process of this machine speaks for is seen by who holds the host's file.
            ApiPeer::Local(_) => need != Need::Certificate,
            ApiPeer::Control(_) => !matches!(need, Need::Certificate | Need::Node),
            ApiPeer::Stranger => need == Need::Token,
            ApiPeer::Revoked(_) => false,
            ApiPeer::Node(..) => !matches!(need, Need::Operate | Need::Administrate),
            ApiPeer::Person(Person { role, .. }, _) => match need {
                Need::Token | Need::Read | Need::Certificate => true,
                Need::Node => false,
                Need::Host => *role != Role::Reader,
                Need::Devices | Need::Operate => {
                    matches!(role, Role::Administrator | Role::Operator)
                }
                Need::Administrate => *role == Role::Administrator,
            },
        }
    }

    /// Refuses a request that the peer's role may not make at all. For which host it may, the request's handler decides.
    ///
    /// # Errors
    /// `forbidden`, or that there is no such request.
    pub fn decide(&self, method: &Method, path: &str) -> Result<(), ApiError> {
        let Some((entry, host)) = table::find(method.as_str(), path) else {
            return match self {
                ApiPeer::Revoked(_) | ApiPeer::Stranger => Err(self.unknown()),
                _ => Err(problem(
                    "unknown_request",
                    format!("this control plane, version {VERSION}, does not know this request"),
                    "see that it is as new as who asks; `/openapi.json` lists all requests",
                )),
            };
        };
        if !self.has(entry.need) {
            let what = format!("{} {}", entry.method, entry.path);
            return Err(match self {
                ApiPeer::Revoked(_) | ApiPeer::Stranger => self.unknown(),
                _ => self.forbidden(format!("{} may not ask for {what}", self.asker())),
            });
        }
        host.map_or(Ok(()), |host| self.acts_for(host))
    }

    /// Refuses who is nobody of the rack, or no more.
    fn unknown(&self) -> ApiError {
        match self {
            ApiPeer::Revoked(certified) => {
                let Certified { serial, subject, .. } = &**certified;
                self.forbidden(format!("your certificate {serial}, of {subject}, was revoked"))
            }
            _ => self.forbidden("you have shown no certificate of this rack".to_owned()),
        }
    }

    fn forbidden(&self, error: String) -> ApiError {
        let remedy = match self {
            ApiPeer::Person(..) => {
                "ask an administrator for a token of a role that may: `rackbus token --user NAME --role ROLE`"
            }
            ApiPeer::Stranger => "join with `rackbus node --join`, or log in with `rackbus login`",
            ApiPeer::Revoked(_) => "ask an administrator for a new token",
            ApiPeer::Local(_) | ApiPeer::Node(..) | ApiPeer::Control(_) => {
                "ask where the control plane runs, or for one function of the host's own on its machine"
            }
        };
        problem("forbidden", error, remedy)
    }

    /// The certificate that it shows, of those that the register has.
    fn certificate(&self) -> Option<&KeyedCertificate> {
        match self {
            ApiPeer::Node(_, Some(shown)) | ApiPeer::Person(_, shown) => Some(shown),
            _ => None,
        }
    }

    /// Refuses who shows a certificate that was not given out, or, of a control plane, that was not made by the newest authority.
    ///
    /// # Errors
    /// `forbidden`.
    fn check_issued(&self, register: &CertificateRegister) -> Result<(), ApiError> {
        if let ApiPeer::Control(issuer) = self {
            let remedy =
                "see that this control plane is of the version of the others, and reads etcd";
            let checked = register.check_control_plane(issuer, now());
            return checked.map_err(|error| problem("forbidden", error.to_string(), remedy));
        }
        let Some(shown) = self.certificate() else { return Ok(()) };
        register
            .check_issued(shown)
            .map_err(|error| problem("forbidden", error.to_string(), anew(&error.subject)))
    }

    /// Who it is, for the events.
    pub fn asker(&self) -> RequestOrigin {
        let of = |role: &str, user: Option<&String>, host: Option<&str>| RequestOrigin {
            role: role.to_owned(),
            user: user.cloned(),
            host: host.map(str::to_owned),
        };
        match self {
            ApiPeer::Local(_) => of("local", None, None),
            ApiPeer::Node(host, _) => of("node", None, Some(host)),
            ApiPeer::Control(_) => of("control", None, None),
            ApiPeer::Stranger => of("stranger", None, None),
            ApiPeer::Revoked(certified) => match &certified.subject {
                Subject::Node(host) => of("revoked", None, Some(host)),
                Subject::Person(Person { user, .. }) => of("revoked", Some(user), None),
                Subject::Control => of("revoked", None, None),
            },
            ApiPeer::Person(Person { user, role }, _) => of(role.name(), Some(user), role.host()),
        }
    }
}

const VERSION: &str = env!("CARGO_PKG_VERSION");

/// Who asked for something.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize, ToSchema)]
pub struct RequestOrigin {
    /// What they may: `administrator`, `operator`, `borrower` or `reader` for a person; `node`; `local` for a process
    /// on the control plane's machine; `control` for another control plane, which passes on what is asked on its
    /// machine; `revoked` for who has one that was revoked; `stranger` for who has no certificate.
    pub role: String,
    /// The person's name, where a person asks.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub user: Option<String>,
    /// The host that a borrower or a node is for.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub host: Option<String>,
}

/// `ann (operator)`, `ann (borrower for beta)`, `node of beta`, `local`.
impl fmt::Display for RequestOrigin {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let RequestOrigin { role, user, host } = self;
        f.pad(&match (user, host) {
            (Some(user), Some(host)) => format!("{user} ({role} for {host})"),
            (Some(user), None) => format!("{user} ({role})"),
            (None, Some(host)) => format!("{role} of {host}"),
            (None, None) => role.clone(),
        })
    }
}

tokio::task_local! {
    /// Who made the request that this task answers.
    static ASKER: RequestOrigin;
}

/// Who made the request that is answered; nobody where none is.
pub(crate) fn asker() -> Option<RequestOrigin> {
    ASKER.try_with(RequestOrigin::clone).ok()
}

/// How many requests were refused, by the role of who made them.
#[derive(Debug, Default)]
pub struct Forbidden(Mutex<BTreeMap<String, u64>>);

impl Forbidden {
    fn count(&self, asker: &RequestOrigin) {
        let mut counts = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        *counts.entry(asker.role.clone()).or_default() += 1;
    }

    /// The counts by role.
    pub fn counts(&self) -> BTreeMap<String, u64> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }
}

/// Answers no request that its sender may not make, and notes those in the events.
pub async fn check(
    State(service): State<Arc<Service>>,
    ConnectInfo(peer): ConnectInfo<ApiPeer>,
    request: Request,
    next: Next,
) -> Response {
    let asker = peer.asker();
    let what = format!("{} {}", request.method(), request.uri().path());
    let decided = peer.decide(request.method(), request.uri().path());
    let decided = decided.and_then(|()| check_request(VERSIONS, request.headers()));
    let decided = decided.and_then(|_| peer.check_issued(&service.register()));
    if let (Ok(()), Some(shown)) = (&decided, peer.certificate()) {
        service.note_shown(shown).await;
    }
    let mut response = match decided {
        Err(refused) => refused.into_response(),
        Ok(()) => ASKER.scope(asker.clone(), next.run(request)).await,
    };
    versions::say(&mut response);
    // By the table, or by who decided about the request itself.
    if let Some(AccessRefused(refused)) = response.extensions().get().cloned() {
        tracing::warn!(%asker, what, error = refused.error, "a request was refused");
        service.forbidden().count(&asker);
        service.note_forbidden(asker, &refused).await;
    }
    response
}

/// The same, for a control plane that does not lead, and has no events of its own.
///
/// # Errors
/// `forbidden`.
pub async fn check_alone(
    ConnectInfo(peer): ConnectInfo<ApiPeer>,
    request: Request,
    next: Next,
) -> Result<Response, ApiError> {
    peer.decide(request.method(), request.uri().path())?;
    check_request(VERSIONS, request.headers())?;
    let mut response = next.run(request).await;
    versions::say(&mut response);
    Ok(response)
}

/// Goes with an answer that refuses something for lack of a right to it.
#[derive(Debug, Clone)]
pub(crate) struct AccessRefused(pub(crate) ApiError);

#[cfg(test)]
mod tests {
    use super::table::TABLE;
    use super::*;

    fn person(role: Role) -> ApiPeer {
        let person = Person { user: "ann".to_owned(), role };
        ApiPeer::Person(person, shown())
    }

    fn certified() -> Box<Certified> {
        let subject = Subject::Node("beta".to_owned());
        Box::new(Certified::new(subject, std::time::Duration::from_secs(60)))
    }

    fn shown() -> Box<KeyedCertificate> {
        Box::new(KeyedCertificate { certified: *certified(), key: [0; 32].into() })
    }

    fn everybody() -> Vec<(&'static str, ApiPeer)> {
        vec![
            ("local", ApiPeer::Local(None)),
            ("control", ApiPeer::Control(String::new())),
            ("administrator", person(Role::Administrator)),
            ("operator", person(Role::Operator)),
            ("borrower", person(Role::Borrower("beta".to_owned()))),
            ("reader", person(Role::Reader)),
            ("node", ApiPeer::Node("beta".to_owned(), None)),
            ("revoked", ApiPeer::Revoked(certified())),
            ("stranger", ApiPeer::Stranger),
        ]
    }

    /// Who may ask for each request, said a second time and in another way than the code does: who changes one has
    /// to change the other.
    const ALL: &str = "local control administrator operator borrower reader node stranger";
    const READ: &str = "local control administrator operator borrower reader node";
    const HOST: &str = "local control administrator operator borrower node";
    const DEVICES: &str = "local control administrator operator node";
    const OPERATE: &str = "local control administrator operator";
    const ADMINISTRATE: &str = "local control administrator";
    const MAY: [(&str, &str); 45] = [
        ("GET /v1/status", READ),
        ("GET /v1/authorities", READ),
        ("GET /v1/authorities/status", ADMINISTRATE),
        ("POST /v1/authorities", ADMINISTRATE),
        ("POST /v1/authorities/retire", ADMINISTRATE),
        ("GET /v1/control", READ),
        ("GET /v1/devices", READ),
        ("GET /v1/path", READ),
        ("GET /v1/events", READ),
        ("GET /v1/changes", READ),
        ("GET /v1/rack", READ),
        ("PUT /v1/rack", ADMINISTRATE),
        ("GET /v1/whoami", READ),
        ("GET /openapi.json", READ),
        ("GET /metrics", READ),
        ("GET /v1/leases", READ),
        ("POST /v1/leases", HOST),
        ("POST /v1/leases/together", HOST),
        ("GET /v1/leases/{lease}", READ),
        ("DELETE /v1/leases/{lease}", HOST),
        ("PUT /v1/leases/{lease}/level", HOST),
        ("GET /v1/shares", READ),
        ("POST /v1/shares", HOST),
        ("GET /v1/shares/{share}", READ),
        ("DELETE /v1/shares/{share}", HOST),
        ("POST /v1/shares/{share}/yield", HOST),
        ("GET /v1/shares/{share}/turns", READ),
        ("GET /v1/compositions", READ),
        ("POST /v1/compositions", OPERATE),
        ("DELETE /v1/compositions/{name}", OPERATE),
        ("POST /v1/compositions/{name}/borrow", HOST),
        ("POST /v1/compositions/{name}/return", HOST),
        ("GET /v1/sections", READ),
        ("POST /v1/sections", DEVICES),
        ("DELETE /v1/sections/{host}/{device}", DEVICES),
        ("GET /v1/hosts/{host}/messages", "local node"),
        ("POST /v1/hosts/{host}/messages", "local node"),
        ("POST /v1/tokens", ADMINISTRATE),
        ("POST /v1/users/tokens", ADMINISTRATE),
        ("POST /v1/join", ALL),
        ("POST /v1/login", ALL),
        ("POST /v1/renew", "administrator operator borrower reader node"),
        ("GET /v1/certificates", ADMINISTRATE),
        ("GET /v1/revocations", READ),
        ("POST /v1/revocations", ADMINISTRATE),
    ];

    #[test]
    fn every_request_is_decided_for_everybody() {
        let named: Vec<String> =
            TABLE.iter().map(|it| format!("{} {}", it.method, it.path)).collect();
        for entry in &named {
            assert!(MAY.iter().any(|(name, _)| name == entry), "{entry} is not in this test");
        }
        assert_eq!(named.len(), MAY.len());
        for (name, may) in MAY {
            let (method, path) = name.split_once(' ').unwrap();
            let method: Method = method.parse().unwrap();
            let own = path.replace("{host}", "beta").replace(['{', '}'], "");
            for (who, peer) in everybody() {
                let wanted = may.split(' ').any(|it| it == who);
                assert_eq!(peer.decide(&method, &own).is_ok(), wanted, "{who}: {name}");
            }
            if path.contains("{host}") {
                // Who acts for beta asks for alpha.
                let other = path.replace("{host}", "alpha").replace(['{', '}'], "");
                for (who, peer) in everybody() {
                    let wanted = may.split(' ').any(|it| it == who) && who != "node";
                    assert_eq!(peer.decide(&method, &other).is_ok(), wanted, "{who}: {other}");
                }
            }
        }
    }

    /// The routes that there are, as the API's document lists them, are those of the table.
    #[test]
    fn every_route_is_in_the_table() {
        let document: serde_json::Value = serde_json::from_str(&crate::openapi()).unwrap();
        let mut count = 0;
        for (path, methods) in document["paths"].as_object().unwrap() {
            for method in methods.as_object().unwrap().keys() {
                let method = method.to_uppercase();
                let known = TABLE.iter().any(|it| it.method == method && it.path == path);
                assert!(known, "{method} {path} has no entry in access::table");
                count += 1;
            }
        }
        // All but /openapi.json and /metrics, which are no part of the document.
        assert_eq!(count, TABLE.len() - 2, "a request of the table is not in the document");
    }

    #[test]
    fn what_has_no_entry_is_nobodys() {
        for (who, peer) in everybody() {
            for (method, path) in [(Method::POST, "/v1/status"), (Method::GET, "/v1/secrets")] {
                assert!(peer.decide(&method, path).is_err(), "{who}: {path}");
            }
        }
    }

    #[test]
    fn a_node_acts_for_its_own_host_only() {
        for (who, peer) in everybody() {
            let all = OPERATE.split(' ').any(|it| it == who);
            let own = all || who == "borrower" || who == "node";
            assert_eq!(peer.acts_for("beta").is_ok(), own, "{who}");
            assert_eq!(peer.acts_for("alpha").is_ok(), all, "{who}");
            assert_eq!(peer.administrates(), ADMINISTRATE.contains(who), "{who}");
        }
        let refused = person(Role::Borrower("beta".into())).acts_for("alpha").unwrap_err();
        assert_eq!(refused.error, "ann (borrower for beta) may not act for alpha");
    }
}
