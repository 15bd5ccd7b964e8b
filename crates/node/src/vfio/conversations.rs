//! The conversations in which functions of the machine are used, so that the node's end ends them: what is in use
//! cannot be given back to its driver.

use std::io;
use std::sync::{Arc, Mutex, Weak};

use rackbus_memory::Stream;

use super::locked;

/// Those that have begun, of all functions of a node.
#[derive(Debug, Default)]
pub(super) struct Conversations(Mutex<OpenConversations>);

#[derive(Default)]
struct OpenConversations {
    conversations: Vec<Weak<dyn Stream>>,
    /// The node ends: none begins any more.
    closed: bool,
}

impl std::fmt::Debug for OpenConversations {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("OpenConversations").field("closed", &self.closed).finish_non_exhaustive()
    }
}

impl Conversations {
    /// Takes note of one, before its function is opened.
    ///
    /// # Errors
    /// When the node ends.
    pub(super) fn begin(&self, conversation: &Arc<dyn Stream>) -> io::Result<()> {
        let mut begun = locked(&self.0);
        if begun.closed {
            return Err(io::Error::other("the node ends"));
        }
        begun.conversations.retain(|conversation| conversation.strong_count() > 0);
        begun.conversations.push(Arc::downgrade(conversation));
        Ok(())
    }

    /// Ends all of them, for each user as the loss of its lender. Their sessions take the functions away.
    pub(super) fn end_all(&self) {
        let mut begun = locked(&self.0);
        begun.closed = true;
        let conversations = std::mem::take(&mut begun.conversations);
        drop(begun);
        for conversation in conversations.iter().filter_map(Weak::upgrade) {
            conversation.shut_down();
        }
    }
}

#[cfg(test)]
mod tests {
    use std::io::Read;
    use std::os::unix::net::UnixStream;

    use super::*;

    #[test]
    fn the_end_of_the_node_ends_all_conversations_and_none_begins_after_it() {
        let pair = || {
            let (lender, borrower) = UnixStream::pair().unwrap();
            (Arc::new(lender) as Arc<dyn Stream>, borrower)
        };
        let conversations = Conversations::default();
        let (over, _) = pair();
        conversations.begin(&over).unwrap();
        drop(over);
        let (lender, mut borrower) = pair();
        conversations.begin(&lender).unwrap();
        assert_eq!(locked(&conversations.0).conversations.len(), 1, "what is over is forgotten");
        conversations.end_all();
        assert_eq!(borrower.read(&mut [0]).unwrap(), 0);
        assert!(conversations.begin(&pair().0).is_err());
    }
}
