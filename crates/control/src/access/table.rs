//! Every request that the API knows, and what is needed for it. What is not here, nobody may ask for.

/// What is needed to ask for something.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Need {
    /// Nothing: the request itself has a token.
    Token,
    /// To be somebody of the rack.
    Read,
    /// A certificate, which is renewed.
    Certificate,
    /// To be the node of the host in the path.
    Node,
    /// To act for the host that the request is about: its node, a borrower for it, or who operates the rack.
    Host,
    /// To change the devices of a host: its node, or who operates the rack.
    Devices,
    /// To operate the rack: change who has what, for all hosts.
    Operate,
    /// To administrate it: let in others, and revoke what they were given.
    Administrate,
}

/// One kind of request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct AccessEntry {
    /// `GET`, `POST`, `PUT` or `DELETE`.
    pub method: &'static str,
    /// The path, where `{…}` stands for any one part.
    pub path: &'static str,
    /// What is needed for it.
    pub need: Need,
}

const fn entry(method: &'static str, path: &'static str, need: Need) -> AccessEntry {
    AccessEntry { method, path, need }
}

/// All requests, each with what is needed for it.
pub const TABLE: [AccessEntry; 45] = [
    entry("GET", "/v1/status", Need::Read),
    entry("GET", "/v1/control", Need::Read),
    entry("GET", "/v1/devices", Need::Read),
    entry("GET", "/v1/path", Need::Read),
    entry("GET", "/v1/events", Need::Read),
    entry("GET", "/v1/changes", Need::Read),
    entry("GET", "/v1/rack", Need::Read),
    entry("PUT", "/v1/rack", Need::Administrate),
    entry("GET", "/v1/whoami", Need::Read),
    entry("GET", "/openapi.json", Need::Read),
    entry("GET", "/metrics", Need::Read),
    entry("GET", "/v1/leases", Need::Read),
    entry("POST", "/v1/leases", Need::Host),
    entry("POST", "/v1/leases/together", Need::Host),
    entry("GET", "/v1/leases/{lease}", Need::Read),
    entry("DELETE", "/v1/leases/{lease}", Need::Host),
    entry("PUT", "/v1/leases/{lease}/level", Need::Host),
    entry("GET", "/v1/shares", Need::Read),
    entry("POST", "/v1/shares", Need::Host),
    entry("GET", "/v1/shares/{share}", Need::Read),
    entry("DELETE", "/v1/shares/{share}", Need::Host),
    entry("POST", "/v1/shares/{share}/yield", Need::Host),
    entry("GET", "/v1/shares/{share}/turns", Need::Read),
    entry("GET", "/v1/compositions", Need::Read),
    entry("POST", "/v1/compositions", Need::Operate),
    entry("DELETE", "/v1/compositions/{name}", Need::Operate),
    entry("POST", "/v1/compositions/{name}/borrow", Need::Host),
    entry("POST", "/v1/compositions/{name}/return", Need::Host),
    entry("GET", "/v1/sections", Need::Read),
    entry("POST", "/v1/sections", Need::Devices),
    entry("DELETE", "/v1/sections/{host}/{device}", Need::Devices),
    entry("GET", "/v1/hosts/{host}/messages", Need::Node),
    entry("POST", "/v1/hosts/{host}/messages", Need::Node),
    entry("POST", "/v1/tokens", Need::Administrate),
    entry("POST", "/v1/users/tokens", Need::Administrate),
    entry("POST", "/v1/join", Need::Token),
    entry("POST", "/v1/login", Need::Token),
    entry("POST", "/v1/renew", Need::Certificate),
    entry("GET", "/v1/authorities", Need::Read),
    entry("GET", "/v1/authorities/status", Need::Administrate),
    entry("POST", "/v1/authorities", Need::Administrate),
    entry("POST", "/v1/authorities/retire", Need::Administrate),
    entry("GET", "/v1/certificates", Need::Administrate),
    entry("GET", "/v1/revocations", Need::Read),
    entry("POST", "/v1/revocations", Need::Administrate),
];

/// The entry for a request, and the host that its path names, if it does.
pub fn find<'p>(method: &str, path: &'p str) -> Option<(&'static AccessEntry, Option<&'p str>)> {
    TABLE.iter().filter(|entry| entry.method == method).find_map(|entry| {
        let host = matched(entry.path, path)?;
        Some((entry, host))
    })
}

/// Whether `path` is one of those that `template` stands for, and if so, the host that it names.
fn matched<'p>(template: &str, path: &'p str) -> Option<Option<&'p str>> {
    let (mut wanted, mut found) = (template.split('/'), path.split('/'));
    let mut host = None;
    loop {
        match (wanted.next(), found.next()) {
            (None, None) => return Some(host),
            (Some(want), Some(part)) if want.starts_with('{') => {
                if part.is_empty() {
                    return None;
                }
                if want == "{host}" {
                    host = Some(part);
                }
            }
            (Some(want), Some(part)) if want == part => {}
            _ => return None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_path_belongs_to_one_entry_at_most() {
        for (at, entry) in TABLE.iter().enumerate() {
            let path = entry.path.replace(['{', '}'], "x");
            let found: Vec<usize> = (0..TABLE.len())
                .filter(|other| TABLE[*other].method == entry.method)
                .filter(|other| matched(TABLE[*other].path, &path).is_some())
                .collect();
            assert_eq!(found, [at], "{} {}", entry.method, entry.path);
        }
    }

    #[test]
    fn what_is_a_little_different_is_nothing() {
        for (method, path) in [
            ("POST", "/v1/status"),
            ("get", "/v1/status"),
            ("GET", "/v1/status/"),
            ("GET", "//v1/status"),
            ("GET", "/v1"),
            ("GET", "/"),
            ("GET", ""),
            ("GET", "/v1/leases/"),
            ("DELETE", "/v1/leases/1/2"),
            ("GET", "/v1/hosts//messages"),
            ("GET", "/v1/hosts/beta/messages/"),
        ] {
            assert_eq!(find(method, path), None, "{method} {path}");
        }
        let (entry, host) = find("GET", "/v1/hosts/beta/messages").unwrap();
        assert_eq!((entry.need, host), (Need::Node, Some("beta")));
    }
}
