//! What nodes of the version before say over the link is understood, and what is said to them is what they know: the
//! messages in `previous/messages.jsonl` were written by that version. Fields that are not known are ignored.

use rackbus_link::{Hello, HelloReply, InWindow, OfferedMedium, Purpose, VERSIONS};
use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::Value;

const RECORDED: &str = include_str!("previous/messages.jsonl");

fn read<T: DeserializeOwned>(value: &Value) -> T {
    serde_json::from_value(value.clone()).unwrap_or_else(|error| panic!("{value}: {error}"))
}

/// Reads a message and says it again; and reads it with a field that nobody knows.
fn again<T: Serialize + DeserializeOwned>(value: &Value) -> (T, Value) {
    let message: T = read(value);
    if let Value::Object(fields) = value {
        let mut more = fields.clone();
        more.insert("of_a_later_version".to_owned(), Value::from(7));
        let more = Value::Object(more);
        read::<T>(&more);
    }
    let said = serde_json::to_value(&message).unwrap();
    (message, said)
}

#[test]
fn messages_of_the_previous_version_are_read_and_written_the_same() {
    let mut kinds = std::collections::BTreeSet::new();
    for line in RECORDED.lines() {
        let line: Value = serde_json::from_str(line).unwrap();
        let (kind, value) = (line["kind"].as_str().unwrap(), &line["value"]);
        let said = match kind {
            "hello" => {
                let (hello, said) = again::<Hello>(value);
                assert!(VERSIONS.common(hello.versions).is_ok(), "no version in common");
                // Also what the conversation is for may have fields that are not known.
                let mut more = said["service"].clone();
                for service in more.as_object_mut().into_iter().flat_map(|it| it.values_mut()) {
                    service["of_a_later_version"] = Value::Null;
                }
                assert_eq!(read::<Purpose>(&more), hello.service);
                said
            }
            "reply" => serde_json::to_value(read::<HelloReply>(value)).unwrap(),
            "medium" => again::<OfferedMedium>(value).1,
            "in_window" => again::<InWindow>(value).1,
            other => panic!("what is {other}?"),
        };
        assert_eq!(said, *value, "{kind}");
        kinds.insert(kind.to_owned());
    }
    assert_eq!(kinds.len(), 4, "{kinds:?}");
}
