//! Which version of the API a client and the control plane speak with each other.
//!
//! Each says in a header of every request and answer which versions it speaks. Who says nothing speaks the first one,
//! as everybody did before there were several. Fields that are not known are ignored in what nodes and control planes
//! say to each other; messages that are not known are answered as such, and the others heard.

use axum::http::{HeaderMap, HeaderValue};
use axum::response::Response;
use rackbus_identity::Versions;
use rackbus_lease::Message;
use serde::{Deserialize, Serialize};
use serde_json::Value;
use utoipa::ToSchema;

use crate::api::{ApiError, NodeMessages, NodeReport};
use crate::service::problem;

/// The versions that are spoken here.
pub const VERSIONS: Versions = Versions::new(1, 1);
/// The header that says so: `1`, or `1-2`.
pub const HEADER: &str = "rackbus-protocol";

/// What the other side says that it speaks, in the headers of a request or an answer.
///
/// # Errors
/// That it says something else.
fn spoken(headers: &HeaderMap) -> Result<Versions, String> {
    let Some(said) = headers.get(HEADER) else { return Ok(Versions::new(1, 1)) };
    let text = said.to_str().map_err(|error| error.to_string())?;
    text.parse().map_err(|error: rackbus_identity::BadVersions| error.to_string())
}

/// Refuses a request of who speaks no version that is spoken here.
///
/// # Errors
/// [`ApiError`], which says which side is to be upgraded.
pub(crate) fn check_request(own: Versions, headers: &HeaderMap) -> Result<u32, ApiError> {
    let remedy = "nodes, control planes and command lines of adjacent versions work together";
    let said = spoken(headers).map_err(|error| problem("bad_request", error, remedy))?;
    own.common(said).map_err(|apart| {
        problem("version", apart.explained("the control plane", "your side"), remedy)
    })
}

/// Whether an answer is of somebody who speaks a version that is spoken here.
///
/// # Errors
/// Which side is to be upgraded.
pub(crate) fn check_answer(own: Versions, headers: &HeaderMap) -> Result<u32, String> {
    let said = spoken(headers)?;
    own.common(said).map_err(|apart| apart.explained("your side", "the control plane"))
}

/// Says in an answer what is spoken here.
pub(crate) fn say(response: &mut Response) {
    if let Ok(value) = HeaderValue::from_str(&VERSIONS.to_string()) {
        response.headers_mut().insert(HEADER, value);
    }
}

/// What a node says, some of which may not be known here.
#[derive(Debug, Deserialize)]
pub(crate) struct AnyMessages {
    messages: Vec<Value>,
    #[serde(default)]
    report: Option<NodeReport>,
}

/// Messages that were not understood. The others were heard.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct NotUnderstood {
    /// What is wrong with each; of many the first few.
    pub not_understood: Vec<String>,
}

/// Of what is not understood this many are told of.
const TOLD: usize = 8;

impl AnyMessages {
    /// What is understood, and what is not.
    pub(crate) fn understood(self) -> (NodeMessages, Option<NotUnderstood>) {
        let AnyMessages { messages, report } = self;
        let (mut known, mut unknown) = (Vec::new(), Vec::new());
        for message in messages {
            match Message::deserialize(&message) {
                Ok(message) => known.push(message),
                Err(error) if unknown.len() < TOLD => {
                    let kind = message.get("type").and_then(Value::as_str).unwrap_or("none");
                    let kind: String = kind.chars().take(64).collect();
                    let error: String = error.to_string().chars().take(200).collect();
                    unknown.push(format!("{kind}: {error}"));
                }
                Err(_) => {}
            }
        }
        let unknown = (!unknown.is_empty()).then_some(NotUnderstood { not_understood: unknown });
        (NodeMessages { messages: known, report }, unknown)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn headers(said: Option<&str>) -> HeaderMap {
        let value = said.map(|said| HeaderValue::from_str(said).unwrap());
        value.into_iter().map(|value| (HEADER.parse().unwrap(), value)).collect()
    }

    #[test]
    fn a_peer_that_names_no_version_has_the_first() {
        assert_eq!(check_request(Versions::new(1, 2), &headers(None)), Ok(1));
        assert_eq!(check_request(Versions::new(1, 2), &headers(Some("2-3"))), Ok(2));
        let refused = check_request(Versions::new(2, 3), &headers(None)).unwrap_err();
        assert_eq!(refused.code, "version");
        assert!(refused.error.ends_with("upgrade rackbus of your side"), "{refused}");
        let refused = check_request(Versions::new(1, 1), &headers(Some("2-3"))).unwrap_err();
        assert!(refused.error.ends_with("upgrade rackbus of the control plane"), "{refused}");
        let refused = check_answer(Versions::new(1, 1), &headers(Some("2"))).unwrap_err();
        assert!(refused.ends_with("upgrade rackbus of your side"), "{refused}");
        assert!(check_request(VERSIONS, &headers(Some("new"))).is_err());
    }

    #[test]
    fn what_is_not_known_does_not_hide_the_rest() {
        let text = r#"{"messages": [
            {"type": "renew", "lease": 3, "incarnation": 7, "colour": "blue"},
            {"type": "sing", "song": 4},
            {"type": "closed", "lease": 5}, {"type": "closed"}, 7],
            "report": {"counted_ms": 4, "mood": "good"}, "weather": "fine"}"#;
        let (known, unknown) = serde_json::from_str::<AnyMessages>(text).unwrap().understood();
        let renew = Message::Renew { lease: 3, incarnation: 7, sent: None };
        assert_eq!(known.messages, [renew, Message::Closed { lease: 5 }]);
        assert_eq!(known.report.unwrap().counted_ms, 4);
        let unknown = unknown.unwrap().not_understood;
        assert_eq!(unknown.len(), 3);
        assert!(unknown[0].starts_with("sing: unknown variant `sing`"), "{unknown:?}");
        let many = format!(r#"{{"messages": [{}]}}"#, vec!["1"; 1000].join(","));
        let (_, unknown) = serde_json::from_str::<AnyMessages>(&many).unwrap().understood();
        assert_eq!(unknown.unwrap().not_understood.len(), TOLD);
    }
}
