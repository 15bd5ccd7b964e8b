//! What there is of a guest: sessions, the files that came with their messages, and the window's mappings.
//!
//! Pure: the shell says what the guest's kernel asks, what the node sends and which time it is, and does
//! what it is told ([`GuestAction`]). An answer goes to the request that it is for by the request's *token*, a
//! number that the shell chooses.
//!
//! A file is there from the message that it came with until the guest's kernel forgets it; the kernel does
//! so when the last descriptor and the last mapping are gone. What a mapping leads to is a file of the same
//! guest, at a place in the window where nothing else is: that is looked at here, for QEMU ends the VM, or
//! refuses, where it is not so.

mod keepers;
mod maps;
mod objects;
mod sessions;
#[cfg(test)]
mod tests;

use std::collections::BTreeMap;

use rackbus_segment::guest::{EXCHANGE_BYTES, GuestChannel};
use serde::{Deserialize, Serialize};

use crate::fuse::{self, Attributes, Errno, FuseOperation};
use maps::Maps;
use objects::GuestFile;
use sessions::GuestSession;

/// Everything is in whole pages.
const PAGE: u64 = 4096;

/// Inode number of the only folder.
const ROOT: u64 = 1;
/// The file that sessions are opened by.
const CONTROL: u64 = 2;
/// The first number of a file that came with a message, and of a session.
const FIRST: u64 = 16;

/// Sessions that a guest may have at a time.
pub const MOST_SESSIONS: usize = 256;
/// Files that a guest may have at a time: each is a descriptor.
pub const MOST_OBJECTS: usize = 8192;
/// Reads and exchanges that wait at a time. Each has an entry of the device's queue, and others need some.
pub const MOST_PARKED: usize = 192;
/// Messages that wait for a process, and bytes of them; then its session ends.
const MOST_WAITING: (usize, usize) = (1024, 1 << 20);
/// Bytes of messages that wait for all processes of a guest: 64 KiB for each session that there may be. Half of them for
/// all users but the guest's root, and a quarter for each of those.
const MOST_UNREAD: usize = 16 << 20;

/// Posts of a session that the node has not answered: as many as surely fit the socket to it. Whoever has more waits for
/// an answer.
const MOST_POSTS: usize = 64;

/// How long a read waits for a message, and one for a ring, in milliseconds. A process of the guest cannot
/// be ended meanwhile.
const MESSAGE_WAIT: u64 = 1000;
const RING_WAIT: u64 = 500;

/// A request that is to be answered.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct PendingRequest {
    /// The shell's number for it.
    pub token: u64,
    /// The number that the guest's kernel gave the request.
    pub unique: u64,
}

/// What a descriptor is that came with a message.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum DescriptorKind {
    /// Memory that the guest may map.
    Memory {
        /// Its size in bytes.
        size: u64,
        /// Whether stores are allowed.
        write: bool,
    },
    /// The event of the doorbell in the memory before it.
    Bell,
    /// Nothing that a guest can use.
    Other,
}

/// A message of the node's.
#[derive(Debug, Clone)]
pub struct Received<'a> {
    /// The message as the node sent it.
    pub message: &'a [u8],
    /// What came beside it.
    pub objects: Vec<DescriptorKind>,
    /// Whether there was more, which had no room.
    pub lost: bool,
}

/// What the shell is to do, in this order.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum GuestAction {
    /// Give these bytes to the request with this token; none where it wants none.
    Answer {
        /// Which request is answered, by the shell's number.
        token: u64,
        /// The answer as the guest's kernel reads it.
        bytes: Vec<u8>,
    },
    /// Connect to the node, and say how that went ([`GuestState::connected`]).
    Connect {
        /// Number of the session.
        session: u64,
    },
    /// Send a message to the node.
    Send {
        /// Number of the session.
        session: u64,
        /// In which of its conversations.
        place: GuestChannel,
        /// The message as the node reads it.
        message: Vec<u8>,
    },
    /// End the conversations with the node.
    End {
        /// Number of the session.
        session: u64,
    },
    /// Look whether a page begins with `word`, store its proof behind that, and answer ([`GuestState::proven`]).
    Prove {
        /// Number of the page's file.
        object: u64,
        /// What the guest says that it has stored.
        word: u64,
        /// Who is to be answered.
        asked: PendingRequest,
    },
    /// Have a part of a file mapped, and say how that went ([`GuestState::mapped`]).
    Map {
        /// Number of the job.
        job: u64,
        /// Number of the file.
        object: u64,
        /// Where in the window.
        at: u64,
        /// From where in the file.
        offset: u64,
        /// How many bytes are mapped.
        length: u64,
    },
    /// Have mappings taken away, each from where and how long, and then answer.
    Unmap {
        /// The mappings, as they were made.
        ranges: Vec<(u64, u64)>,
        /// Who waits for it.
        asked: Option<PendingRequest>,
    },
    /// Wake who waits for a doorbell.
    Ring {
        /// Number of the event's file.
        object: u64,
    },
    /// Release the memory of a file that the guest has still.
    Release {
        /// Number of the file.
        object: u64,
    },
    /// Release a file's descriptor.
    Forget {
        /// Number of the file.
        object: u64,
    },
}

/// All of a guest.
#[derive(Debug, Serialize, Deserialize)]
pub struct GuestState {
    sessions: BTreeMap<u64, GuestSession>,
    objects: BTreeMap<u64, GuestFile>,
    maps: Maps,
    /// Numbers that were given to sessions and files so far. None is given twice.
    next: u64,
    /// How many files' keepers have ended so far.
    ends: u64,
}

impl GuestState {
    /// That of a guest that has not mounted anything yet, with a window of so many bytes.
    pub fn new(window: u64) -> GuestState {
        let maps = Maps::new(window);
        let (sessions, objects) = (BTreeMap::new(), BTreeMap::new());
        GuestState { sessions, objects, maps, next: FIRST, ends: 0 }
    }

    fn number(&mut self) -> u64 {
        self.next += 1;
        self.next
    }

    /// How many sessions, files and mappings there are.
    pub fn counts(&self) -> [usize; 3] {
        [self.sessions.len(), self.objects.len(), self.maps.len()]
    }

    /// The guest's kernel asks something.
    pub fn request(&mut self, now: u64, token: u64, bytes: &[u8]) -> Vec<GuestAction> {
        let mut actions = Vec::new();
        let Some(head) = fuse::head(bytes) else {
            return vec![GuestAction::Answer { token, bytes: Vec::new() }];
        };
        let asked = PendingRequest { token, unique: head.unique };
        let answered = match fuse::operation(bytes) {
            Ok(operation) => self.operation(now, asked, head, operation, &mut actions),
            Err(error) => Err(error),
        };
        match answered {
            Ok(Some(bytes)) => actions.push(GuestAction::Answer { token, bytes }),
            Ok(None) => self.make_room(&mut actions),
            Err(error) => {
                let bytes = fuse::failed(head.unique, error);
                actions.push(GuestAction::Answer { token, bytes });
            }
        }
        actions
    }

    /// The answer, unless it comes later or with an action.
    fn operation(
        &mut self,
        now: u64,
        asked: PendingRequest,
        head: fuse::RequestHead,
        operation: FuseOperation<'_>,
        actions: &mut Vec<GuestAction>,
    ) -> Result<Option<Vec<u8>>, Errno> {
        let fuse::RequestHead { unique, node, .. } = head;
        Ok(match operation {
            FuseOperation::Init { major, .. } if major != fuse::MAJOR => return Err(Errno::INVAL),
            FuseOperation::Init { minor, flags_2, .. } => {
                self.clear(actions);
                Some(fuse::ready(unique, minor, flags_2))
            }
            FuseOperation::Destroy => {
                self.clear(actions);
                Some(fuse::done(unique))
            }
            FuseOperation::Lookup { .. } if node != ROOT => return Err(Errno::NOENT),
            FuseOperation::Lookup { name } => Some(fuse::entry(unique, &self.look_up(name)?)),
            FuseOperation::Forget(list) => {
                list.iter().for_each(|(node, count)| self.forget(*node, *count, actions));
                Some(Vec::new())
            }
            FuseOperation::Interrupt => Some(Vec::new()),
            FuseOperation::Attributes => Some(fuse::attributes(unique, &self.attributes(node)?)),
            FuseOperation::Open if node == CONTROL => {
                self.open_session(asked, head, actions)?;
                None
            }
            FuseOperation::Open => Some(fuse::opened(unique, 0, self.open_object(node)?)),
            FuseOperation::Read { handle, offset, size } if node == CONTROL => {
                self.read_session(now, (asked, head.user), handle, (offset, size))?
            }
            FuseOperation::Read { offset, size, .. } => {
                self.read_object(now, (asked, head.user), node, (offset, size))?
            }
            FuseOperation::Write { handle, offset, data } if node == CONTROL => {
                self.write_session(asked, handle, (offset, data), actions)?
            }
            FuseOperation::Write { data, .. } => {
                self.write_object(node, actions)?;
                Some(fuse::written(unique, data.len() as u32))
            }
            FuseOperation::Control { handle, command, data, room } if node == CONTROL => {
                self.exchange(now, (asked, head.user), (handle, command), (data, room), actions)?
            }
            FuseOperation::Control { .. } => return Err(Errno::NOTTY),
            FuseOperation::Release { handle } => {
                if node == CONTROL {
                    self.release_session(handle, actions);
                }
                Some(fuse::done(unique))
            }
            FuseOperation::Nothing => Some(fuse::done(unique)),
            FuseOperation::OpenFolder if node == ROOT => Some(fuse::opened(unique, 0, true)),
            FuseOperation::ReadFolder { offset, size } if node == ROOT => {
                let session = (CONTROL, rackbus_segment::guest::SESSION, false);
                let list = [(ROOT, ".", true), (ROOT, "..", true), session];
                Some(fuse::entries(unique, &list, offset, size))
            }
            FuseOperation::OpenFolder | FuseOperation::ReadFolder { .. } => {
                return Err(Errno::INVAL);
            }
            FuseOperation::Statistics => Some(fuse::statistics(unique)),
            FuseOperation::SetUpMapping { offset, length, at, .. } => {
                self.set_up(asked, node, (offset, length, at), actions)?
            }
            FuseOperation::RemoveMappings(list) => {
                let ranges = list.iter().filter_map(|(at, _)| self.maps.take(*at)).collect();
                actions.push(GuestAction::Unmap { ranges, asked: Some(asked) });
                None
            }
            FuseOperation::Unknown(_) => return Err(Errno::NOSYS),
        })
    }

    fn attributes(&self, node: u64) -> Result<Attributes, Errno> {
        let of = |node, mode, links| Attributes {
            node,
            size: 0,
            mode,
            links,
            user: 0,
            group: 0,
            dax: false,
        };
        match node {
            ROOT => Ok(of(ROOT, 0o040_755, 2)),
            // Whoever may do less is kept out where it is mounted.
            CONTROL => Ok(of(CONTROL, 0o100_666, 1)),
            _ => Ok(self.objects.get(&node).ok_or(Errno::NOENT)?.attributes(node)),
        }
    }

    /// The guest begins anew: what its former life had has ended.
    pub fn clear(&mut self, actions: &mut Vec<GuestAction>) {
        for (session, it) in std::mem::take(&mut self.sessions) {
            it.end(session, actions);
        }
        let ranges = self.maps.take_all();
        if !ranges.is_empty() {
            actions.push(GuestAction::Unmap { ranges, asked: None });
        }
        for (object, it) in std::mem::take(&mut self.objects) {
            it.end(actions);
            actions.push(GuestAction::Forget { object });
        }
    }

    fn parked(&self) -> impl Iterator<Item = &Parked> {
        let sessions = self.sessions.values().flat_map(GuestSession::parked);
        sessions.chain(self.objects.values().flat_map(GuestFile::parked))
    }

    /// When [`tick`](GuestState::tick) is to be called next.
    pub fn next_tick(&self) -> Option<u64> {
        self.parked().map(|parked| parked.until).min()
    }

    /// Where too many wait, answers the one that has waited for longest, of those of the user who has most of them: it
    /// asks again if nothing came for it, and others wait on.
    fn make_room(&mut self, actions: &mut Vec<GuestAction>) {
        if self.parked().count() <= MOST_PARKED {
            return;
        }
        let mut users: BTreeMap<u32, (usize, u64)> = BTreeMap::new();
        for Parked { user, asked, .. } in self.parked() {
            let it = users.entry(*user).or_insert((0, asked.token));
            *it = (it.0 + 1, it.1.min(asked.token));
        }
        if let Some((_, oldest)) = users.into_values().max() {
            actions.extend(self.answer_parked(|parked| parked.asked.token == oldest));
        }
    }

    /// Whether a user may have so many more files. All users but the guest's root may have half of them at most, so that
    /// others have some.
    fn has_room(&self, user: u32, more: usize) -> bool {
        let all = self.objects.len() + more <= MOST_OBJECTS;
        let own = || self.objects.values().filter(|it| it.user() == user).count();
        all && (user == 0 || own() + more <= MOST_OBJECTS / 2)
    }

    /// Answers those who have waited long enough.
    pub fn tick(&mut self, now: u64) -> Vec<GuestAction> {
        self.answer_parked(|parked| parked.until <= now)
    }

    /// Answers all who wait: the device's queues are about to stop.
    pub fn stop(&mut self) -> Vec<GuestAction> {
        self.answer_parked(|_| true)
    }

    fn answer_parked(&mut self, which: impl Fn(&Parked) -> bool + Copy) -> Vec<GuestAction> {
        let mut actions = Vec::new();
        for session in self.sessions.values_mut() {
            session.answer_parked(which, &mut actions);
        }
        for object in self.objects.values_mut() {
            object.answer_parked(which, &mut actions);
        }
        actions
    }
}

/// A read that waits, or an exchange.
#[derive(Debug, Clone, Copy, Serialize, Deserialize)]
struct Parked {
    asked: PendingRequest,
    user: u32,
    until: u64,
    /// It is not a read, but waits for the answer in an exchange.
    exchange: bool,
}

impl Parked {
    /// Whether so many bytes can be its answer.
    fn has_room(&self, bytes: usize) -> bool {
        !self.exchange || bytes <= EXCHANGE_BYTES
    }

    fn answer(self, bytes: &[u8]) -> GuestAction {
        let PendingRequest { token, unique } = self.asked;
        let bytes = match self.exchange {
            true => fuse::controlled(unique, bytes),
            false => fuse::data(unique, bytes),
        };
        GuestAction::Answer { token, bytes }
    }

    fn fail(self, error: Errno) -> GuestAction {
        let PendingRequest { token, unique } = self.asked;
        GuestAction::Answer { token, bytes: fuse::failed(unique, error) }
    }
}
