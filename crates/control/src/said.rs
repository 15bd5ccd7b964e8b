//! What a control plane says to a host's node: a stream of lines, each with the leader's term.
//!
//! A node remembers the newest term that it was spoken to in, also when it is started anew, and takes nothing from an
//! earlier one: who led then may wake up and not know yet that it leads no more. Between messages there are lines
//! that say nothing else, so that a node notices that its leader stalls.

use std::future::ready;
use std::time::Duration;

use futures_util::stream::{once, select};
use futures_util::{Stream, StreamExt};
use rackbus_lease::Message;
use serde::{Deserialize, Serialize};
use serde_json::Value;
use tokio::sync::mpsc;
use tokio_stream::wrappers::{IntervalStream, ReceiverStream};

/// How often a node is told that the leader is there.
const BEAT: Duration = Duration::from_secs(1);
/// How long a node that hears beats waits for the next one.
pub const SILENCE: Duration = Duration::from_millis(2500);

/// One line of the stream that a node hears: a message, or that the leader is still there.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "Value", into = "Value")]
pub struct NodeLine {
    /// The leader's term; 0 from a control plane that knows of none.
    pub term: u64,
    /// What it says; nothing but that it is there.
    pub message: Option<Message>,
}

impl TryFrom<Value> for NodeLine {
    type Error = serde_json::Error;

    fn try_from(mut line: Value) -> Result<NodeLine, serde_json::Error> {
        let term = line.get("term").and_then(Value::as_u64).unwrap_or(0);
        if line.get("type").is_none() {
            return Ok(NodeLine { term, message: None });
        }
        if let Some(line) = line.as_object_mut() {
            line.remove("term");
        }
        Ok(NodeLine { term, message: Some(serde_json::from_value(line)?) })
    }
}

impl From<NodeLine> for Value {
    fn from(said: NodeLine) -> Value {
        let message = said.message.and_then(|message| serde_json::to_value(message).ok());
        let mut line = message.unwrap_or_else(|| Value::Object(serde_json::Map::new()));
        line["term"] = said.term.into();
        line
    }
}

/// Everything that is said to a node in `term`: that it is there at once and every second, and the messages. Ends
/// with these.
pub(crate) fn stream(term: u64, messages: mpsc::Receiver<Message>) -> impl Stream<Item = NodeLine> {
    let beats = IntervalStream::new(tokio::time::interval(BEAT));
    let beats = beats.map(move |_| Some(NodeLine { term, message: None }));
    let said = move |message| Some(NodeLine { term, message: Some(message) });
    let messages = ReceiverStream::new(messages).map(said).chain(once(ready(None)));
    select(messages, beats).take_while(|said| ready(said.is_some())).filter_map(ready)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_message_has_its_term_and_an_older_control_planes_has_none() {
        let message = Message::Registered { incarnation: 7 };
        let said = NodeLine { term: 3, message: Some(message.clone()) };
        let line = serde_json::to_string(&said).unwrap();
        assert_eq!(serde_json::from_str::<NodeLine>(&line).unwrap(), said);
        // A node that knows no terms reads the message.
        assert_eq!(serde_json::from_str::<Message>(&line).unwrap(), message);
        let older = serde_json::to_string(&message).unwrap();
        assert_eq!(serde_json::from_str::<NodeLine>(&older).unwrap(), NodeLine { term: 0, ..said });
        assert!(serde_json::from_str::<NodeLine>(r#"{"type":"arm"}"#).is_err());
        let beat = serde_json::from_str::<NodeLine>(r#"{"term":4}"#).unwrap();
        assert_eq!(beat, NodeLine { term: 4, message: None });
    }

    #[tokio::test(start_paused = true)]
    async fn the_leader_says_its_term_and_the_stream_ends_with_the_messages() {
        let (sender, messages) = mpsc::channel(4);
        let mut said = std::pin::pin!(stream(9, messages));
        for _ in 0..3 {
            assert_eq!(said.next().await, Some(NodeLine { term: 9, message: None }));
        }
        let message = Message::Registered { incarnation: 7 };
        sender.send(message.clone()).await.unwrap();
        assert_eq!(said.next().await.unwrap().message, Some(message));
        drop(sender);
        assert_eq!(said.next().await, None);
    }
}
