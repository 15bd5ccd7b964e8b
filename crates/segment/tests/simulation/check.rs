//! What holds when all is at rest, and that nobody is cut off who answers.

use std::collections::{BTreeMap, BTreeSet};

use rackbus_segment::message::{ConnectionChange, OwnerMessage};
use rackbus_segment::{DirectoryAction, Handle, NodeId, ObjectId, Recipient, SessionId};

use super::rack::Rack;

/// An error unless something holds.
fn hold(holds: bool, otherwise: impl FnOnce() -> String) -> Result<(), String> {
    if holds { Ok(()) } else { Err(otherwise()) }
}

impl Rack {
    /// What holds at rest.
    pub fn check(&self) -> Result<(), String> {
        self.wrong.clone().map_or(Ok(()), Err)?;
        self.check_connections()?;
        let emptied: BTreeSet<ObjectId> =
            self.stores.values().flat_map(|store| store.emptied.iter().copied()).collect();
        for (who, client) in &self.clients {
            hold(client.waiting == 0, || format!("{who:?} waits for a reply"))?;
            hold(client.started.is_empty(), || format!("{who:?} waits for the end of a move"))?;
            // I4: of what was taken away, nothing is left where it was.
            for object in &client.former {
                hold(emptied.contains(object), || format!("{who:?} still has {object:?}"))?;
            }
            for object in client.former.union(&client.left) {
                for (other, mine) in &self.clients {
                    let used = mine.memory.values().any(|memory| memory == object);
                    hold(!used, || format!("{object:?}, not {who:?}'s, is in use by {other:?}"))?;
                }
            }
            // Nobody was left behind in memory that was emptied.
            for (handle, object) in &client.memory {
                hold(!emptied.contains(object), || {
                    format!("{who:?} has lost {object:?} of {handle:?}")
                })?;
            }
        }
        Ok(())
    }

    /// Each owner knows of the connections that sessions have to its memory: else it would not ask them when it moves
    /// that, nor tell them that it is withdrawn.
    fn check_connections(&self) -> Result<(), String> {
        let mut connected: BTreeMap<NodeId, usize> = BTreeMap::new();
        for ((node, session), client) in &self.clients {
            let owner = |handle| self.directories[node].owner_of(*session, handle);
            for (owner, _) in client.memory.keys().filter_map(|handle| owner(*handle)) {
                *connected.entry(owner).or_default() += 1;
            }
        }
        for (owner, connected) in connected {
            let kept = self.directories[&owner].statistics();
            let known = kept.iter().find(|(name, _)| *name == "connections of others");
            let known = known.map_or(0, |(_, count)| *count);
            hold(known >= connected, || {
                format!("node {owner} knows {known} of {connected} connections to its memory")
            })?;
        }
        Ok(())
    }

    /// Whether the memory that somebody has under a handle is given up, and so is nobody's any more.
    fn ends(&self, outputs: &[DirectoryAction], who: (NodeId, SessionId), handle: Handle) -> bool {
        let memory = self.clients.get(&who).and_then(|client| client.memory.get(&handle));
        let forgets = |object| outputs.contains(&DirectoryAction::Forget(object));
        memory.is_some_and(|object| forgets(*object))
    }

    /// Time limits cut those off who do not answer, and nobody else.
    pub fn look_who_is_cut_off(&mut self, node: NodeId, outputs: &[DirectoryAction]) {
        for output in outputs {
            let who = match output {
                DirectoryAction::Cut(session) => (node, *session),
                DirectoryAction::Send(Recipient::Tell(to, tell), _) => {
                    let OwnerMessage::Remote { connection, change } = tell else { continue };
                    let keeper = self.directories[to].keeper_of(*connection);
                    match keeper.filter(|_| *change == ConnectionChange::Revoked) {
                        // A group ends with its last member, who may be one who does not answer.
                        Some((session, handle)) if self.ends(outputs, (*to, session), handle) => {
                            continue;
                        }
                        Some((session, _)) => (*to, session),
                        None => continue,
                    }
                }
                _ => continue,
            };
            if self.clients.get(&who).is_some_and(|client| client.answers) {
                self.wrong.get_or_insert(format!("{who:?} answers, and is cut off"));
            }
        }
    }
}
