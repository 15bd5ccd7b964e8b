//! Who asks, and what it may: decided here, for every request.
//!
//! Processes of this machine, of the same user or root's, administrate the rack. The node of a host on another
//! machine acts for that host and nobody else. Who shows no certificate of the rack can join it, with a token.

use axum::extract::{ConnectInfo, Request};
use axum::http::Method;
use axum::middleware::Next;
use axum::response::Response;

use crate::api::ApiError;
use crate::service::problem;

/// Who is at the other end of a connection to the API.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Peer {
    /// A process of this machine, as the kernel says; its number, when the kernel says that, too.
    Local(Option<i32>),
    /// The node of this host, as its certificate says.
    Node(String),
    /// A control plane of the rack, as its certificate says: it passes on what its own machine's processes ask.
    Control,
    /// Somebody on another machine who has shown no certificate of the rack.
    Stranger,
}

impl Peer {
    /// Refuses what is asked for `host` by the node of another one.
    ///
    /// # Errors
    /// `forbidden`.
    pub fn acts_for(&self, host: &str) -> Result<(), ApiError> {
        match self {
            Peer::Local(_) | Peer::Control => Ok(()),
            Peer::Node(own) if own == host => Ok(()),
            Peer::Node(own) => Err(forbidden(&format!("{own} may not act for {host}"))),
            Peer::Stranger => Err(forbidden("you have shown no certificate of this rack")),
        }
    }

    /// Whether it may ask for `path` at all; for whom, the request itself says.
    fn may(&self, method: &Method, path: &str) -> bool {
        match self {
            Peer::Local(_) | Peer::Control => true,
            Peer::Stranger => method == Method::POST && path == "/v1/join",
            Peer::Node(host) => match path.strip_prefix("/v1/hosts/") {
                Some(rest) => rest.strip_suffix("/messages") == Some(host),
                None if method == Method::GET => true,
                None if method == Method::POST => {
                    ["/v1/leases", "/v1/renew", "/v1/sections", "/v1/shares"].contains(&path)
                        || path.starts_with("/v1/shares/")
                }
                None if method == Method::PUT => path.starts_with("/v1/leases/"),
                None if method == Method::DELETE => {
                    path.starts_with("/v1/leases/")
                        || path.starts_with("/v1/shares/")
                        || path.starts_with(&format!("/v1/sections/{host}/"))
                }
                None => false,
            },
        }
    }
}

fn forbidden(error: &str) -> ApiError {
    let remedy =
        "ask where the control plane runs, or for one function of the host's own on its machine";
    problem("forbidden", error.to_owned(), remedy)
}

/// Answers no request that its sender may not make.
///
/// # Errors
/// `forbidden`.
pub async fn check(
    ConnectInfo(peer): ConnectInfo<Peer>,
    request: Request,
    next: Next,
) -> Result<Response, ApiError> {
    let (method, path) = (request.method(), request.uri().path());
    if !peer.may(method, path) {
        tracing::warn!(?peer, %method, path, "a request was refused");
        return Err(forbidden(&format!("you may not ask for {method} {path} from here")));
    }
    Ok(next.run(request).await)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_node_acts_for_its_own_host_alone() {
        let beta = Peer::Node("beta".to_owned());
        let (get, post, delete) = (Method::GET, Method::POST, Method::DELETE);
        for (method, path) in [
            (&get, "/v1/status"),
            (&get, "/v1/hosts/beta/messages"),
            (&post, "/v1/hosts/beta/messages"),
            (&post, "/v1/leases"),
            (&delete, "/v1/leases/7"),
            (&Method::PUT, "/v1/leases/7/level"),
            (&get, "/v1/rack"),
        ] {
            assert!(beta.may(method, path), "{method} {path}");
        }
        for (method, path) in [
            (&get, "/v1/hosts/alpha/messages"),
            (&post, "/v1/hosts/alpha/messages"),
            (&post, "/v1/hosts/beta/messages/"),
            (&post, "/v1/hosts//messages"),
            (&post, "/v1/tokens"),
            (&delete, "/v1/compositions/x"),
            (&Method::PUT, "/v1/leases"),
        ] {
            assert!(!beta.may(method, path), "{method} {path}");
        }
        assert!(beta.acts_for("beta").is_ok() && beta.acts_for("alpha").is_err());
    }

    /// It passes on what processes of its machine ask, who administrate the rack.
    #[test]
    fn another_control_plane_asks_for_everything() {
        for path in ["/v1/tokens", "/v1/leases", "/v1/compositions"] {
            assert!(Peer::Control.may(&Method::POST, path), "{path}");
        }
        assert!(Peer::Control.acts_for("alpha").is_ok());
    }

    #[test]
    fn a_stranger_can_do_nothing_but_join() {
        assert!(Peer::Stranger.may(&Method::POST, "/v1/join"));
        for path in ["/v1/status", "/v1/join", "/metrics", "/v1/rack", "/"] {
            assert!(!Peer::Stranger.may(&Method::GET, path), "{path}");
        }
        assert!(Peer::Stranger.acts_for("alpha").is_err());
    }
}
