//! What memory belongs to, and what becomes of it when that ends.
//!
//! A file stays for as long as the guest's kernel has it, so that a mapping reads what was there last. The node has
//! given its room to others by then: so the guest keeps no more of such memory than its window shows at a time. Of
//! more, that of the user who has most of it is taken away, what ended first, as if it had been revoked.

use std::collections::BTreeMap;

use rackbus_segment::Handle;
use rackbus_segment::guest::GuestChannel;
use rackbus_segment::message::{ConnectionChange, Reply, SessionEvent, SessionRequest, decode};
use serde::{Deserialize, Serialize};

use super::objects::GuestFile;
use super::{DescriptorKind, GuestAction, GuestState, PAGE};

/// What a request of a process is about, to be known with its reply.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(super) enum RequestSubject {
    /// The memory that comes with the reply belongs to this.
    Gives(Handle),
    /// This has ended when the reply is no refusal.
    Ends(Handle),
    #[default]
    Other,
}

impl RequestSubject {
    pub(super) fn of(request: &[u8]) -> RequestSubject {
        match decode(request) {
            Some(SessionRequest::GiveMemory { segment }) => RequestSubject::Gives(segment),
            Some(
                SessionRequest::Remove { segment: keeper }
                | SessionRequest::Disconnect { connection: keeper }
                | SessionRequest::RemoveInterrupt { interrupt: keeper }
                | SessionRequest::Free { extent: keeper },
            ) => RequestSubject::Ends(keeper),
            _ => RequestSubject::Other,
        }
    }
}

/// What a file belongs to, as the node calls it.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct FileKeeper {
    pub keeper: Option<Handle>,
    /// The interrupt of which the keeper is a ring.
    within: Option<Handle>,
    /// Which bytes of what it belongs to are in the file: all for as long as nothing of it was moved. One range for
    /// each file of the message, where they differ.
    ranges: Vec<(u64, u64)>,
}

impl FileKeeper {
    fn of(keeper: Handle) -> FileKeeper {
        FileKeeper { keeper: Some(keeper), ..FileKeeper::default() }
    }
}

/// What a message of the node's does to memory that was there before.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum KeeperChange {
    Ended(Handle),
    Revoked(Handle),
    /// A range, by its offset and length, is in the file that comes along.
    Moving(Handle, u64, u64),
    /// All have gone over to where it was moved.
    Moved(Handle),
}

/// What a message of the node's means for memory.
#[derive(Debug, Default)]
pub(super) struct MessageMeaning {
    /// What the files belong to that come along.
    files: FileKeeper,
    change: Option<KeeperChange>,
}

impl MessageMeaning {
    /// Of a message in one of the conversations; `subject` is what the request was about that it answers.
    pub(super) fn of(
        place: GuestChannel,
        message: &[u8],
        subject: RequestSubject,
    ) -> MessageMeaning {
        match place {
            GuestChannel::Calls => MessageMeaning::of_reply(message, subject),
            _ => MessageMeaning::of_event(message),
        }
    }

    fn of_reply(message: &[u8], subject: RequestSubject) -> MessageMeaning {
        let Some(reply) = decode(message) else { return MessageMeaning::default() };
        let files = match (reply, subject) {
            (Reply::Refused(_), _) => FileKeeper::default(),
            (_, RequestSubject::Ends(keeper)) => {
                let change = Some(KeeperChange::Ended(keeper));
                return MessageMeaning { files: FileKeeper::default(), change };
            }
            (Reply::Connected(connected), _) => FileKeeper::of(connected.connection),
            (Reply::Created { segment, .. }, _) => FileKeeper::of(segment),
            (Reply::Interrupt { interrupt, .. }, _) => FileKeeper::of(interrupt),
            (Reply::Extent { extent, .. }, _) => FileKeeper::of(extent),
            (Reply::Memory, RequestSubject::Gives(segment)) => FileKeeper::of(segment),
            (Reply::Pages { connection, lengths, .. }, _) => {
                let mut at = 0_u64;
                let each = lengths.into_iter().map(|length| {
                    let begin = at;
                    at = at.saturating_add(length);
                    (begin, at)
                });
                FileKeeper { ranges: each.collect(), ..FileKeeper::of(connection) }
            }
            _ => FileKeeper::default(),
        };
        MessageMeaning { files, change: None }
    }

    fn of_event(message: &[u8]) -> MessageMeaning {
        let changes = |change| MessageMeaning { change: Some(change), ..MessageMeaning::default() };
        match decode(message) {
            Some(SessionEvent::Adopt { keeper, offset, length, .. }) => {
                let ranges = vec![(offset, offset.saturating_add(length))];
                let files = FileKeeper { ranges, ..FileKeeper::of(keeper) };
                let change = Some(KeeperChange::Moving(keeper, offset, length));
                MessageMeaning { files, change }
            }
            Some(SessionEvent::Unfreeze { keeper, .. }) => changes(KeeperChange::Moved(keeper)),
            Some(SessionEvent::Sender { interrupt, ring }) => {
                let files = FileKeeper { within: Some(interrupt), ..FileKeeper::of(ring) };
                MessageMeaning { files, change: None }
            }
            Some(SessionEvent::SenderGone { ring, .. }) => changes(KeeperChange::Ended(ring)),
            Some(SessionEvent::Remote { connection, change }) => match change {
                ConnectionChange::Revoked => changes(KeeperChange::Revoked(connection)),
                _ if change.is_final() => changes(KeeperChange::Ended(connection)),
                _ => MessageMeaning::default(),
            },
            _ => MessageMeaning::default(),
        }
    }

    /// What the file at an index of the message belongs to, and which bytes of that are in it.
    pub(super) fn keeper(&self, index: usize, kind: DescriptorKind) -> FileKeeper {
        let all = match kind {
            DescriptorKind::Memory { size, .. } => (0, size),
            _ => (0, 0),
        };
        let range = self.files.ranges.get(index).copied().unwrap_or(all);
        FileKeeper { ranges: vec![range], ..self.files.clone() }
    }
}

/// What is left of ranges without `(begin, end)`.
fn without(ranges: &[(u64, u64)], (begin, end): (u64, u64)) -> Vec<(u64, u64)> {
    let cut = |(from, to): &(u64, u64)| [(*from, begin.min(*to)), (end.max(*from), *to)];
    ranges.iter().flat_map(cut).filter(|(from, to)| from < to).collect()
}

impl GuestState {
    /// Does to the memory that was there before what a message means for it.
    pub(super) fn follow(
        &mut self,
        session: u64,
        meaning: &MessageMeaning,
        actions: &mut Vec<GuestAction>,
    ) {
        let Some(change) = meaning.change else { return };
        match change {
            KeeperChange::Ended(keeper) => self.end_memory(actions, |it| {
                it.session == session
                    && [it.keeper.keeper, it.keeper.within].contains(&Some(keeper))
            }),
            KeeperChange::Revoked(keeper) => {
                self.revoke(session, keeper, actions);
                self.end_memory(actions, |it| it.belongs_to(session, keeper));
            }
            KeeperChange::Moving(keeper, offset, length) => {
                let moved = (offset, offset.saturating_add(length));
                for object in self.objects.values_mut().filter(|it| it.belongs_to(session, keeper))
                {
                    object.keeper.ranges = without(&object.keeper.ranges, moved);
                }
            }
            KeeperChange::Moved(keeper) => self.end_memory(actions, |it| {
                it.belongs_to(session, keeper) && it.keeper.ranges.is_empty()
            }),
        }
    }

    /// All that came for a session has ended.
    pub(super) fn end_memory_of(&mut self, session: u64, actions: &mut Vec<GuestAction>) {
        self.end_memory(actions, |it| it.session == session);
    }

    /// Takes everything that came for `keeper` of a session away from the guest.
    fn revoke(&mut self, session: u64, keeper: Handle, actions: &mut Vec<GuestAction>) {
        for (number, object) in &mut self.objects {
            if object.belongs_to(session, keeper) {
                object.revoked = true;
                let ranges = self.maps.take_of(*number);
                if !ranges.is_empty() {
                    actions.push(GuestAction::Unmap { ranges, asked: None });
                }
            }
        }
    }

    /// Nobody answers for some of the memory any more.
    fn end_memory(&mut self, actions: &mut Vec<GuestAction>, which: impl Fn(&GuestFile) -> bool) {
        for object in self.objects.values_mut().filter(|it| it.ended.is_none() && which(it)) {
            self.ends += 1;
            object.ended = Some(self.ends);
        }
        while let Some(number) = self.too_much() {
            self.let_go(number, actions);
        }
    }

    /// What is to be released next where there is more ended memory than there may be: of the user who has most of it,
    /// what ended first.
    fn too_much(&self) -> Option<u64> {
        let mut users: BTreeMap<u32, (u64, (u64, u64))> = BTreeMap::new();
        for (number, object) in &self.objects {
            let Some((ended, bytes)) = object.ended.zip(object.held()) else { continue };
            let it = users.entry(object.user()).or_insert((0, (ended, *number)));
            *it = (it.0.saturating_add(bytes), it.1.min((ended, *number)));
        }
        let all = users.values().fold(0_u64, |sum, (bytes, _)| sum.saturating_add(*bytes));
        let most = users.into_values().max().filter(|_| all > self.maps.window())?;
        Some(most.1.1)
    }

    /// Releases the memory of a file, which the guest's kernel may have for long.
    fn let_go(&mut self, number: u64, actions: &mut Vec<GuestAction>) {
        let Some(object) = self.objects.get_mut(&number) else { return };
        (object.revoked, object.released) = (true, true);
        let ranges = self.maps.take_of(number);
        if !ranges.is_empty() {
            actions.push(GuestAction::Unmap { ranges, asked: None });
        }
        actions.push(GuestAction::Release { object: number });
    }
}

impl GuestFile {
    fn belongs_to(&self, session: u64, keeper: Handle) -> bool {
        self.session == session && self.keeper.keeper == Some(keeper)
    }

    /// Bytes of memory that are kept for the file; none where it is none, or was released.
    fn held(&self) -> Option<u64> {
        match self.kind {
            DescriptorKind::Memory { size, .. } => {
                let pages = size.checked_next_multiple_of(PAGE).unwrap_or(u64::MAX);
                Some(pages).filter(|_| !self.released)
            }
            DescriptorKind::Bell | DescriptorKind::Other => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_left_of_ranges_is_what_was_not_moved() {
        let all = [(0, 10)];
        assert_eq!(without(&all, (3, 5)), [(0, 3), (5, 10)]);
        assert_eq!(without(&all, (0, 5)), [(5, 10)]);
        assert_eq!(without(&all, (5, 20)), [(0, 5)]);
        assert_eq!(without(&all, (0, 10)), []);
        assert_eq!(without(&all, (10, 20)), all);
        assert_eq!(without(&[(0, 3), (5, 10)], (1, 6)), [(0, 1), (6, 10)]);
        assert_eq!(without(&[(5, 10)], (0, 2)), [(5, 10)]);
    }
}
