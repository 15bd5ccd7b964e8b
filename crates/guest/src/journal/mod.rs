//! What has happened to a device, as records: who has taken all of them knows all that there is to know.
//!
//! A device is served by one process, and a second one, its standby, takes the same records. [`GuestState`]
//! decides the same from the same, so the standby's [`Core`] is the first one's, and when that process dies
//! the standby continues: it answers what was taken from the guest's queues and not answered, has QEMU do
//! what was not done, and says to nobody what was said before. What a record cannot tell, whether the
//! last steps were still carried out, is in memory that both processes have (`service::ledger`).
//!
//! Pure, as [`GuestState`]: no descriptors, no clock.

pub mod frontend;
#[cfg(test)]
mod tests;

use std::collections::{BTreeMap, VecDeque};

use rackbus_segment::guest::GuestChannel;
use serde::{Deserialize, Serialize};

use crate::state::{DescriptorKind, GuestAction, GuestState, PendingRequest, Received};
use frontend::{Frontend, VhostSetting};

/// Queues of the device.
pub const QUEUES: usize = 2;

/// Steps that are kept because they may not have been carried out: more than one record leads to.
const MOST_STEPS: usize = 64;

/// An event in the order in which both processes take it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[allow(missing_docs, reason = "fields are named as the arguments of State's functions")]
pub enum JournalRecord {
    /// QEMU said something; its descriptors come along.
    Frontend {
        message: Vec<u8>,
    },
    /// The guest asks something: in which queue, at which entry, with this room for the answer.
    Request {
        now: u64,
        queue: u8,
        head: u16,
        room: Vec<(u64, u32)>,
        bytes: Vec<u8>,
    },
    /// The node was connected to; both sockets, the node's end of the events and the page come along.
    Connected {
        session: u64,
        page: DescriptorKind,
    },
    /// The node could not be reached for a session.
    Unreachable {
        session: u64,
    },
    /// A proof was looked for.
    Proven {
        asked: PendingRequest,
        same: bool,
    },
    /// The node said something; what it is comes along.
    Received {
        session: u64,
        events: bool,
        message: Vec<u8>,
        kinds: Vec<DescriptorKind>,
        lost: bool,
    },
    Over {
        session: u64,
    },
    /// An event of the node's rang, for a doorbell in the guest.
    Rang {
        object: u64,
    },
    /// The clock was read, in milliseconds.
    Tick {
        now: u64,
    },
    /// QEMU has done the job of mapping that was first, or not.
    Mapped {
        job: u64,
        done: bool,
    },
    /// QEMU has done the job of unmapping that was first.
    Unmapped,
    /// The queues are about to stop.
    Stop,
    /// The VM was reset.
    Clear,
}

/// Something for QEMU to do.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[allow(missing_docs, reason = "as in Action")]
pub enum QemuJob {
    Map { job: u64, object: u64, at: u64, offset: u64, length: u64 },
    Unmap { ranges: Vec<(u64, u64)>, asked: Option<PendingRequest> },
}

/// A request of the guest's that was taken from its queue.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct QueuedRequest {
    /// The queue that it came by.
    pub queue: u8,
    /// The request's entry in that queue's ring.
    pub head: u16,
    /// Where in the guest's memory its answer goes, in pieces.
    pub room: Vec<(u64, u32)>,
    /// Its answer, once there is one: whether the guest has it, the ledger knows.
    pub answer: Option<Vec<u8>>,
}

/// A step that cannot be taken twice, or must not be left out.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum JournalStep {
    /// A message for the node, of this session.
    Sent(u64),
    /// A ring of this event.
    Rung(u64),
}

/// All of a device, but its descriptors.
#[derive(Debug, Serialize, Deserialize)]
pub struct Core {
    /// What the guest has.
    pub state: GuestState,
    /// What QEMU has said.
    pub frontend: Frontend,
    /// The next entry of each queue that is to be taken.
    next: [u16; QUEUES],
    /// Requests by token, of each entry of a queue the last one.
    requests: BTreeMap<u64, QueuedRequest>,
    places: BTreeMap<(u8, u16), u64>,
    last_token: u64,
    jobs: VecDeque<QemuJob>,
    proofs: BTreeMap<u64, (u64, u64, PendingRequest)>,
    /// Steps of the last records, each with its record's number.
    steps: VecDeque<(u64, JournalStep)>,
    /// How many records were taken so far.
    records: u64,
}

/// What a record led to.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct RecordOutcome {
    /// What is to be done.
    pub actions: Vec<GuestAction>,
    /// Numbers of the files that came along.
    pub objects: Vec<u64>,
    /// What QEMU has set.
    pub set: Option<VhostSetting>,
}

impl Core {
    /// That of a device that nobody has spoken to, with a window of so many bytes.
    pub fn new(window: u64) -> Core {
        Core {
            state: GuestState::new(window),
            frontend: Frontend::default(),
            next: [0; QUEUES],
            requests: BTreeMap::new(),
            places: BTreeMap::new(),
            last_token: 0,
            jobs: VecDeque::new(),
            proofs: BTreeMap::new(),
            steps: VecDeque::new(),
            records: 0,
        }
    }

    /// The token that the next request gets.
    pub fn next_token(&self) -> u64 {
        self.last_token + 1
    }

    /// How many records there were.
    pub fn records(&self) -> u64 {
        self.records
    }

    /// Requests that came by a queue and may not be answered, by token.
    pub fn requests(&self, queue: u8) -> impl Iterator<Item = (u64, &QueuedRequest)> {
        let all = self.requests.iter().map(|(token, request)| (*token, request));
        all.filter(move |(_, request)| request.queue == queue)
    }

    /// What QEMU is still to do.
    pub fn jobs(&self) -> impl Iterator<Item = &QemuJob> {
        self.jobs.iter()
    }

    /// Proofs that are still to be looked for.
    pub fn proofs(&self) -> impl Iterator<Item = GuestAction> {
        let each = self.proofs.values().copied();
        each.map(|(object, word, asked)| GuestAction::Prove { object, word, asked })
    }

    /// Steps that records after the one with this number led to.
    pub fn steps_after(&self, record: u64) -> impl Iterator<Item = JournalStep> {
        self.steps.iter().filter(move |(number, _)| *number > record).map(|(_, step)| *step)
    }

    /// Whether QEMU has all queues started.
    pub fn is_started(&self) -> bool {
        (0..QUEUES).all(|queue| self.frontend.has(VhostSetting::Kick(queue as u8)))
    }

    /// What to say to somebody who is to serve QEMU from here on.
    pub fn repeat(&self) -> Vec<(VhostSetting, Vec<u8>)> {
        self.frontend.repeat(&self.next)
    }

    /// Takes the next record; what is to be done follows from it.
    pub fn take(&mut self, record: &JournalRecord) -> RecordOutcome {
        self.records += 1;
        let outcome = self.decide(record);
        outcome.actions.iter().for_each(|action| self.note(action));
        outcome
    }

    fn decide(&mut self, record: &JournalRecord) -> RecordOutcome {
        let mut outcome = RecordOutcome::default();
        let state = &mut self.state;
        outcome.actions = match record {
            JournalRecord::Frontend { message } => {
                let (set, actions) = self.heard(message);
                outcome.set = set;
                actions
            }
            JournalRecord::Request { now, queue, head, room, bytes } => {
                self.last_token += 1;
                let token = self.last_token;
                if let Some(next) = self.next.get_mut(usize::from(*queue)) {
                    *next = next.wrapping_add(1);
                }
                let request =
                    QueuedRequest { queue: *queue, head: *head, room: room.clone(), answer: None };
                if let Some(before) = self.places.insert((*queue, *head), token) {
                    self.requests.remove(&before);
                }
                self.requests.insert(token, request);
                state.request(*now, token, bytes)
            }
            JournalRecord::Connected { session, page } => {
                let (number, actions) = state.connected(*session, Some(*page));
                outcome.objects.extend(number);
                actions
            }
            JournalRecord::Unreachable { session } => state.connected(*session, None).1,
            JournalRecord::Proven { asked, same } => {
                self.proofs.remove(&asked.token);
                state.proven(*asked, *same)
            }
            JournalRecord::Received { session, events, message, kinds, lost } => {
                let place = if *events { GuestChannel::Events } else { GuestChannel::Calls };
                let received = Received { message, objects: kinds.clone(), lost: *lost };
                let (numbers, actions) = state.received(*session, place, received);
                outcome.objects = numbers;
                actions
            }
            JournalRecord::Over { session } => state.session_ended(*session),
            JournalRecord::Rang { object } => state.rang(*object),
            JournalRecord::Tick { now } => state.tick(*now),
            JournalRecord::Mapped { job, done } => {
                self.jobs.pop_front();
                state.mapped(*job, *done)
            }
            JournalRecord::Unmapped => match self.jobs.pop_front() {
                Some(QemuJob::Unmap { asked: Some(PendingRequest { token, unique }), .. }) => {
                    vec![GuestAction::Answer { token, bytes: crate::fuse::done(unique) }]
                }
                _ => Vec::new(),
            },
            JournalRecord::Stop => state.stop(),
            JournalRecord::Clear => {
                let mut actions = Vec::new();
                state.clear(&mut actions);
                actions
            }
        };
        outcome
    }

    /// QEMU said something; what it set, and what follows.
    fn heard(&mut self, message: &[u8]) -> (Option<VhostSetting>, Vec<GuestAction>) {
        let (set, mut actions) = (self.frontend.take(self.records, message), Vec::new());
        if let Some(VhostSetting::Base(queue)) = set
            && let Some(base) = self.frontend.base(queue)
            && let Some(next) = self.next.get_mut(usize::from(queue))
        {
            // A VM that was stopped continues where it was, and waits for the same answers: at 0, too, when its ring
            // has gone round. One that was reset begins anew in both queues, of which one may just be there.
            let reset = base == 0 && *next != 0;
            if *next != base {
                self.requests.retain(|_, request| !reset && request.queue != queue);
                self.places.retain(|(other, _), _| !reset && *other != queue);
            }
            if reset {
                // QEMU says of a reset only this. The guest may not mount the file system again.
                self.state.clear(&mut actions);
            }
            *next = base;
        }
        (set, actions)
    }

    /// Keeps what must be known of an action if nobody should have carried it out.
    fn note(&mut self, action: &GuestAction) {
        match action {
            GuestAction::Answer { token, bytes } => {
                if let Some(request) = self.requests.get_mut(token) {
                    request.answer = Some(bytes.clone());
                }
            }
            GuestAction::Map { job, object, at, offset, length } => {
                let (job, object, at) = (*job, *object, *at);
                let map = QemuJob::Map { job, object, at, offset: *offset, length: *length };
                self.jobs.push_back(map);
            }
            GuestAction::Unmap { ranges, asked } => {
                self.jobs.push_back(QemuJob::Unmap { ranges: ranges.clone(), asked: *asked });
            }
            GuestAction::Prove { object, word, asked } => {
                self.proofs.insert(asked.token, (*object, *word, *asked));
            }
            GuestAction::Send { session, .. } => self.step(JournalStep::Sent(*session)),
            GuestAction::Ring { object } => self.step(JournalStep::Rung(*object)),
            GuestAction::Connect { .. }
            | GuestAction::End { .. }
            | GuestAction::Release { .. }
            | GuestAction::Forget { .. } => {}
        }
    }

    fn step(&mut self, step: JournalStep) {
        self.steps.push_back((self.records, step));
        if self.steps.len() > MOST_STEPS {
            self.steps.pop_front();
        }
    }
}
