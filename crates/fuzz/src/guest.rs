//! What a guest's kernel says to the device that it shares memory through, in between what the node, QEMU
//! and the clock say.
//!
//! Each request is answered once; what is mapped lies inside of the window, beside what is there, and is a
//! file that the node passed with all rights and that the guest still has; what is taken away was there.

use std::collections::{BTreeMap, BTreeSet};

use rackbus_guest::fuse::{self, REQUEST_HEAD};
use rackbus_guest::state::{
    DescriptorKind, GuestAction, GuestState, MOST_OBJECTS, MOST_SESSIONS, Received,
};
use rackbus_segment::Handle;
use rackbus_segment::guest::{EXCHANGE, EXCHANGE_BYTES, GuestChannel, object_name, to_exchange};
use rackbus_segment::message::{Connected, ConnectionChange, Reply, SessionEvent, encode};

use crate::input::Input;

const WINDOW: u64 = 32 << 20;
const STEPS: usize = 400;

/// The shell, as far as the state knows.
struct Shell {
    state: GuestState,
    now: u64,
    tokens: u64,
    /// Requests without an answer.
    asked: BTreeSet<u64>,
    /// Files that the guest has, with whether they are memory that may be mapped.
    held: BTreeMap<u64, bool>,
    sessions: BTreeSet<u64>,
    /// What QEMU has mapped.
    maps: BTreeMap<u64, u64>,
    /// How often it was told to map, and to take away.
    counts: (usize, usize),
}

/// Does what `data` says.
pub fn run(data: &[u8]) {
    drive(data);
}

/// The same; how often something was mapped, and taken away.
fn drive(data: &[u8]) -> (usize, usize) {
    let mut input = Input::new(data);
    let mut shell = Shell {
        state: GuestState::new(WINDOW),
        now: 0,
        tokens: 0,
        asked: BTreeSet::new(),
        held: BTreeMap::new(),
        sessions: BTreeSet::new(),
        maps: BTreeMap::new(),
        counts: (0, 0),
    };
    for _ in 0..STEPS {
        if input.is_empty() {
            break;
        }
        shell.step(&mut input);
        let [sessions, objects, maps] = shell.state.counts();
        assert!(sessions <= MOST_SESSIONS && objects <= MOST_OBJECTS);
        assert_eq!((objects, maps), (shell.held.len(), shell.maps.len()));
    }
    let mut actions = Vec::new();
    shell.state.clear(&mut actions);
    shell.perform(actions);
    assert!(shell.asked.is_empty(), "requests {:?} were never answered", shell.asked);
    assert_eq!((shell.held.len(), shell.maps.len()), (0, 0));
    shell.counts
}

impl Shell {
    fn step(&mut self, input: &mut Input<'_>) {
        let choice = input.u8();
        let actions = match choice % 16 {
            0..=10 => self.request(input),
            11 | 12 => self.said(input),
            13 => {
                self.now += u64::from(input.u16());
                self.state.tick(self.now)
            }
            14 => {
                let object = self.node(input);
                self.state.rang(object)
            }
            _ => match input.u8() & 1 {
                0 => self.state.stop(),
                _ => {
                    let session = self.session(input);
                    self.state.session_ended(session)
                }
            },
        };
        self.perform(actions);
    }

    /// A file's number: mostly one that is there.
    fn node(&self, input: &mut Input<'_>) -> u64 {
        match input.u8() {
            wild @ 0xf0.. => u64::from(wild) << 3 | input.number(),
            0xe0.. => 1,
            0xc0.. => 2,
            nth => self.held.keys().nth(usize::from(nth) % 8).copied().unwrap_or(2),
        }
    }

    fn session(&self, input: &mut Input<'_>) -> u64 {
        let nth = usize::from(input.u8()) % 4;
        self.sessions.iter().nth(nth).copied().unwrap_or_else(|| input.number())
    }

    fn request(&mut self, input: &mut Input<'_>) -> Vec<GuestAction> {
        const OPERATIONS: [u32; 17] =
            [1, 2, 3, 14, 15, 16, 17, 18, 26, 28, 36, 38, 42, 48, 49, 60, 39];
        let code = OPERATIONS[usize::from(input.u8()) % OPERATIONS.len()];
        let node = self.node(input);
        let mut arguments = Vec::new();
        match code {
            1 => {
                arguments.extend(object_name(self.node(input)).bytes());
                arguments.push(0);
            }
            15 | 16 | 18 => {
                let place = [
                    GuestChannel::Calls,
                    GuestChannel::Events,
                    GuestChannel::Proof,
                    GuestChannel::End,
                ];
                let offset = match input.u8() {
                    nth @ 0..200 => place[usize::from(nth & 3)].offset(),
                    _ => input.number(),
                };
                let handle = self.session(input);
                arguments.extend(handle.to_le_bytes());
                arguments.extend(offset.to_le_bytes());
                let data = input.short();
                let size = if code == 16 { data.len() as u32 } else { 64 << 10 };
                arguments.extend(size.to_le_bytes());
                arguments.extend([0; 20]);
                arguments.extend(data);
            }
            39 => {
                let handle = self.session(input);
                for field in [handle, u64::from(EXCHANGE) << 32, 0] {
                    arguments.extend(field.to_le_bytes());
                }
                let data = to_exchange(input.short()).unwrap_or([255; EXCHANGE_BYTES]);
                for field in [data.len() as u32, 4096] {
                    arguments.extend(field.to_le_bytes());
                }
                arguments.extend(data);
            }
            48 => {
                let [offset, length, at] = [(); 3].map(|()| input.number() << 19);
                for field in [0, offset, length, 1, at] {
                    arguments.extend(field.to_le_bytes());
                }
            }
            49 => {
                arguments.extend(1_u32.to_le_bytes());
                let [at, length] = [(); 2].map(|()| input.number() << 19);
                arguments.extend(at.to_le_bytes());
                arguments.extend(length.to_le_bytes());
            }
            26 => {
                [7_u32, 38, 0, 1 << 30, 2].iter().for_each(|it| arguments.extend(it.to_le_bytes()))
            }
            _ => arguments.extend(input.short()),
        }
        let length = (REQUEST_HEAD + arguments.len()) as u32;
        let length = if input.u8() == 0xff { input.u32() } else { length };
        let mut bytes = length.to_le_bytes().to_vec();
        bytes.extend(code.to_le_bytes());
        self.tokens += 1;
        bytes.extend(self.tokens.to_le_bytes());
        bytes.extend(node.to_le_bytes());
        bytes.extend([0; 16]);
        bytes.extend(arguments);
        self.asked.insert(self.tokens);
        self.state.request(self.now, self.tokens, &bytes)
    }

    /// The node says something, with something beside it.
    fn said(&mut self, input: &mut Input<'_>) -> Vec<GuestAction> {
        let (session, connection) = (self.session(input), Handle(u64::from(input.u8() & 3)));
        let connected = Connected { connection, size: 1, write: true, address: None };
        let (place, message) = match input.u8() & 3 {
            0 => (GuestChannel::Calls, encode(&Reply::Connected(connected))),
            1 => (GuestChannel::Calls, input.short().to_vec()),
            2 => {
                let ended = [ConnectionChange::Revoked, ConnectionChange::Removed];
                let change = ended[usize::from(connection == Handle(2))];
                (GuestChannel::Events, encode(&SessionEvent::Remote { connection, change }))
            }
            _ => (GuestChannel::Events, input.short().to_vec()),
        };
        let kind = |choice: u8| match choice & 3 {
            0 => DescriptorKind::Memory { size: u64::from(choice) << 16 | 1, write: true },
            1 => DescriptorKind::Memory { size: 4096, write: false },
            2 => DescriptorKind::Bell,
            _ => DescriptorKind::Other,
        };
        let objects: Vec<DescriptorKind> =
            input.short().iter().take(8).map(|it| kind(*it)).collect();
        let received = Received { message: &message, objects: objects.clone(), lost: false };
        let (numbers, actions) = self.state.received(session, place, received);
        for (number, kind) in numbers.into_iter().zip(objects) {
            let mappable = matches!(kind, DescriptorKind::Memory { write: true, .. });
            assert!(self.held.insert(number, mappable).is_none(), "a number was given twice");
        }
        actions
    }

    fn perform(&mut self, actions: Vec<GuestAction>) {
        for action in actions {
            match action {
                GuestAction::Answer { token, bytes } => {
                    assert!(self.asked.remove(&token), "request {token} was answered twice");
                    let length = bytes.first_chunk().map_or(0, |it| u32::from_le_bytes(*it));
                    assert_eq!(length as usize, bytes.len());
                }
                GuestAction::Connect { session } => self.connect(session),
                GuestAction::End { session } => drop(self.sessions.remove(&session)),
                GuestAction::Send { message, .. } => assert!(!message.is_empty()),
                GuestAction::Prove { object, asked, .. } => {
                    assert!(self.held.contains_key(&object) || !self.sessions.is_empty());
                    let answer = self.state.proven(asked, true);
                    self.perform(answer);
                }
                GuestAction::Map { job, object, at, length, .. } => {
                    assert_eq!(self.held.get(&object), Some(&true), "no file to be mapped");
                    assert!(length > 0 && at.checked_add(length).is_some_and(|end| end <= WINDOW));
                    let before = self.maps.range(..at + length).next_back();
                    assert!(before.is_none_or(|(begin, long)| begin + long <= at));
                    self.maps.insert(at, length);
                    self.counts.0 += 1;
                    let answer = self.state.mapped(job, true);
                    self.perform(answer);
                }
                GuestAction::Unmap { ranges, asked } => {
                    for (at, length) in ranges {
                        assert_eq!(self.maps.remove(&at), Some(length), "nothing is mapped there");
                        self.counts.1 += 1;
                    }
                    if let Some(asked) = asked {
                        let bytes = fuse::done(asked.unique);
                        self.perform(vec![GuestAction::Answer { token: asked.token, bytes }]);
                    }
                }
                GuestAction::Ring { object } => assert!(self.held.contains_key(&object)),
                GuestAction::Release { object } => {
                    assert!(self.held.insert(object, false).is_some());
                }
                GuestAction::Forget { object } => assert!(self.held.remove(&object).is_some()),
            }
        }
    }

    fn connect(&mut self, session: u64) {
        let page = (!session.is_multiple_of(5))
            .then_some(DescriptorKind::Memory { size: 4096, write: true });
        let (number, actions) = self.state.connected(session, page);
        if let Some(number) = number {
            self.held.insert(number, true);
            self.sessions.insert(session);
        }
        self.perform(actions);
    }
}

/// A guest that mounts, opens a session, connects, maps, and releases it again; and one that keeps too much.
pub fn seeds() -> Vec<Vec<u8>> {
    let (init, open) = ([0, 8, 0, 0], [0, 3, 0xc0, 0, 0]);
    let greeting = [0, 4, 0xc0, 0, 0, 0, 0];
    let connected = [11, 0, 1, 0, 2, 0x20, 2];
    let look_up = [0, 0, 0xe0, 1, 0];
    let map = [0, 13, 1, 0, 4, 8, 0];
    let remove = [0, 14, 1, 8, 4, 0];
    let session: Vec<u8> = [&init[..], &open, &greeting, &connected, &look_up, &map].concat();
    let revoked = [&session[..], &[12, 0, 1, 2, 0, 0], &map].concat();
    let ended = [&session[..], &remove, &[0, 5, 0xc0, 3, 0, 1, 0, 0], &[13, 0xff, 0xff]].concat();
    // More memory than the window shows, of which some is released when all of it has ended.
    let crowded =
        [&session[..], &[11, 0, 1, 0, 3, 0xfc, 0xfc, 0xfc], &[12, 0, 1, 2, 0, 0]].concat();
    vec![session, revoked, ended, crowded]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_seeds_map_and_take_away() {
        let counts: Vec<_> = seeds().iter().map(|seed| drive(seed)).collect();
        assert_eq!(counts, [(1, 1); 4]);
    }
}
