//! What nodes and control planes of the version before say is understood, and what is said to them is what they know:
//! the messages in `previous/messages.jsonl` were written by that version.

use std::collections::BTreeSet;

use rackbus_control::api::{ApiError, BorrowRequest, EventRecord, Lease, NodeMessages, RackStatus};
use rackbus_control::machines::{
    Certificates, JoinRequest, NewToken, RackFile, RenewRequest, TokenRequest,
};
use rackbus_control::said::NodeLine;
use rackbus_control::versions::NotUnderstood;
use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::Value;

const RECORDED: &str = include_str!("previous/messages.jsonl");

fn read<T: DeserializeOwned>(value: &Value) -> T {
    serde_json::from_value(value.clone()).unwrap_or_else(|error| panic!("{value}: {error}"))
}

/// Reads a message and says it again.
fn again<T: Serialize + DeserializeOwned>(value: &Value) -> Value {
    serde_json::to_value(read::<T>(value)).unwrap()
}

/// The same; a field that nobody knows is ignored.
fn between_machines<T: Serialize + DeserializeOwned>(value: &Value) -> Value {
    let said = again::<T>(value);
    let mut more = value.clone();
    if let Some(fields) = more.as_object_mut() {
        fields.insert("of_a_later_version".to_owned(), Value::from(7));
        assert_eq!(again::<T>(&more), said, "{more}");
    }
    said
}

/// What the version before reads without a field that it does not know of: what is new may be left out, or be ignored
/// by it.
fn without_what_is_new(said: &Value, recorded: &Value) -> Value {
    match (said, recorded) {
        (Value::Object(said), Value::Object(known)) => {
            let kept = said.iter().filter_map(|(key, value)| {
                let known = known.get(key)?;
                Some((key.clone(), without_what_is_new(value, known)))
            });
            Value::Object(kept.collect())
        }
        (Value::Array(said), Value::Array(known)) if said.len() == known.len() => {
            said.iter().zip(known).map(|(said, known)| without_what_is_new(said, known)).collect()
        }
        _ => said.clone(),
    }
}

#[test]
fn messages_of_the_previous_version_are_read_and_written_the_same() {
    let mut kinds = BTreeSet::new();
    for line in RECORDED.lines() {
        let line: Value = serde_json::from_str(line).unwrap();
        let (kind, value) = (line["kind"].as_str().unwrap(), &line["value"]);
        // What the version before refuses when there is more in it is said as it was.
        let (said, exact) = match kind {
            "token_request" => (between_machines::<TokenRequest>(value), true),
            "join_request" => (between_machines::<JoinRequest>(value), true),
            "renew_request" => (between_machines::<RenewRequest>(value), true),
            "borrow_request" => (again::<BorrowRequest>(value), true),
            "heard" => (again::<Option<NotUnderstood>>(value), true),
            "node_messages" => (between_machines::<NodeMessages>(value), false),
            "said" => (between_machines::<NodeLine>(value), false),
            "new_token" => (between_machines::<NewToken>(value), false),
            "certificates" => (between_machines::<Certificates>(value), false),
            "rack_file" => (between_machines::<RackFile>(value), false),
            "api_error" => (between_machines::<ApiError>(value), false),
            "status" => (between_machines::<RackStatus>(value), false),
            "lease" => (between_machines::<Lease>(value), false),
            "event" => (between_machines::<EventRecord>(value), false),
            other => panic!("what is {other}?"),
        };
        let known = if exact { said } else { without_what_is_new(&said, value) };
        assert_eq!(known, *value, "{kind}");
        kinds.insert(kind.to_owned());
    }
    assert_eq!(kinds.len(), 14, "{kinds:?}");
}
