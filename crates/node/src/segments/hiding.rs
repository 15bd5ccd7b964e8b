//! Keeping the processes of this host from memory while what came from another machine takes effect there: so that
//! who polls one word of it finds all the others changed as well.

use std::collections::HashMap;
use std::ops::Range;
use std::sync::{Condvar, Mutex, PoisonError};
use std::time::Duration;

use rackbus_segment::directory::widen;
use rackbus_segment::message::{SessionEvent, encode};
use rackbus_segment::{Handle, NodeId, SessionId};

use super::far::{ConnectionKey, FarConversation};
use super::outbox::Letter;
use super::{Segments, SegmentsState};

/// How long a process may take to answer: on a busy machine, a thread waits long for a processor while another one of
/// its process looks at the memory. One that is stopped accesses nothing, and costs this once.
const PATIENCE: Duration = Duration::from_millis(250);

/// Who is waited for.
#[derive(Debug, Default)]
pub struct Hiding {
    state: Mutex<HidingState>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct HidingState {
    last: u64,
    /// Of each turn, the sessions that have not answered.
    waiting: HashMap<u64, Vec<SessionId>>,
    /// Of each session that did not answer in time, how many answers it owes. It is asked nothing until it has
    /// given them.
    owed: HashMap<SessionId, usize>,
}

impl Hiding {
    /// A session has answered.
    pub fn hidden(&self, turn: u64, session: SessionId) {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        let waiting = state.waiting.get_mut(&turn);
        let found = waiting.and_then(|waiting| {
            let at = waiting.iter().position(|it| *it == session)?;
            Some(waiting.swap_remove(at))
        });
        if found.is_none()
            && let Some(owed) = state.owed.get_mut(&session)
        {
            *owed = owed.saturating_sub(1);
            if *owed == 0 {
                state.owed.remove(&session);
            }
        }
        self.changed.notify_all();
    }

    /// A session has ended.
    pub fn forget(&self, session: SessionId) {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        state.owed.remove(&session);
        state.waiting.values_mut().for_each(|waiting| waiting.retain(|it| *it != session));
        self.changed.notify_all();
    }

    /// Begins a turn with those of `kept` that owe no answer.
    fn begin(&self, kept: &mut Vec<KeptRange>) -> u64 {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        kept.retain(|(session, ..)| !state.owed.contains_key(session));
        state.last += 1;
        let turn = state.last;
        state.waiting.insert(turn, kept.iter().map(|(session, ..)| *session).collect());
        turn
    }

    fn wait(&self, turn: u64) {
        let state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        let waiting =
            |it: &mut HidingState| it.waiting.get(&turn).is_some_and(|left| !left.is_empty());
        let waited = self.changed.wait_timeout_while(state, PATIENCE, waiting);
        let mut state = waited.unwrap_or_else(PoisonError::into_inner).0;
        for session in state.waiting.remove(&turn).unwrap_or_default() {
            *state.owed.entry(session).or_default() += 1;
        }
    }
}

/// Who keeps memory: the session, what it calls the memory, and the range, its first byte and how many.
type KeptRange = (SessionId, Handle, u64, u64);

/// A range of a connection's memory: where it begins, and its bytes.
pub type ConnectionRange = (ConnectionKey, u64, u64);

impl Segments {
    /// Hides ranges of memory that this host has in common with `node`, calls `with`, and shows them again.
    pub(super) fn while_hidden<T>(
        &self,
        node: NodeId,
        spans: &[ConnectionRange],
        with: impl FnOnce() -> T,
    ) -> T {
        if spans.is_empty() {
            return with();
        }
        let mut kept = self.lock().keepers(node, spans);
        let turn = self.hiding.begin(&mut kept);
        let say = |session: &SessionId, event: &SessionEvent| {
            let events = self.lock().sessions.get(session).and_then(|it| it.events.clone());
            match events {
                Some(events) => events.send(Letter { bytes: encode(event), handles: Vec::new() }),
                None => self.hiding.hidden(turn, *session),
            }
        };
        for (session, keeper, offset, length) in &kept {
            let (keeper, offset, length) = (*keeper, *offset, *length);
            say(session, &SessionEvent::Hide { turn, keeper, offset, length });
        }
        self.hiding.wait(turn);
        let done = with();
        for (session, keeper, ..) in &kept {
            say(session, &SessionEvent::Show { keeper: *keeper });
        }
        done
    }
}

impl SegmentsState {
    /// Who may have ranges of connections' memory mapped.
    fn keepers(&self, node: NodeId, spans: &[ConnectionRange]) -> Vec<KeptRange> {
        // One range for each that keeps a memory, whatever connections lead there.
        let of = |side: FarConversation| {
            let spans = spans.iter().filter(move |((way, _), ..)| *way == side);
            spans.map(|((_, connection), offset, length)| {
                (*connection, *offset..offset.saturating_add(*length))
            })
        };
        let mut kept = self.directory.keepers(node, of(FarConversation::ToConnector));
        for (connection, range) in of(FarConversation::ToOwner) {
            if let Some(keeper) = self.directory.keeper_of(connection) {
                widen(kept.entry(keeper), range);
            }
        }
        let one = |((session, keeper), range): (_, Range<u64>)| {
            (session, keeper, range.start, range.end - range.start)
        };
        kept.into_iter().map(one).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_process_that_does_not_answer_is_asked_again_when_it_has() {
        let hiding = Hiding::default();
        let (slow, quick) = (SessionId(1), SessionId(2));
        let kept: Vec<KeptRange> =
            vec![(slow, Handle(1), 0, 8), (slow, Handle(2), 0, 8), (quick, Handle(3), 0, 8)];
        let asked = |hiding: &Hiding| {
            let mut kept = kept.clone();
            let turn = hiding.begin(&mut kept);
            (turn, kept.into_iter().map(|(session, ..)| session).collect::<Vec<_>>())
        };
        let (first, sessions) = asked(&hiding);
        assert_eq!(sessions, [slow, slow, quick]);
        hiding.hidden(first, quick);
        hiding.wait(first);
        let (second, sessions) = asked(&hiding);
        assert_eq!(sessions, [quick]);
        hiding.hidden(second, quick);
        hiding.wait(second);
        hiding.hidden(first, slow);
        assert_eq!(asked(&hiding).1, [quick], "owes one more");
        hiding.hidden(first, slow);
        let (third, sessions) = asked(&hiding);
        assert_eq!(sessions, [slow, slow, quick]);
        hiding.wait(third);
        hiding.forget(slow);
        assert_eq!(asked(&hiding).1, [slow, slow], "is another one of that number");
    }
}
