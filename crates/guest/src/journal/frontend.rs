//! What QEMU has said, as far as it still counts: whoever takes over is told the same.
//!
//! A vhost-user message is a head (number, flags, length, each 32 bits) and what it says. Most set
//! something: the last one counts. Those that QEMU waits for an answer to are asked again where nobody
//! answered.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

/// Bytes of a message's head.
pub const HEAD: usize = 12;
/// The longest message that is taken; QEMU's are far shorter.
pub const MAX_MESSAGE: usize = HEAD + 4096;

/// Flags of a message: the protocol's version; it is an answer; an answer is wanted.
const VERSION: u32 = 1;
const REPLY: u32 = 1 << 2;
const NEED_REPLY: u32 = 1 << 3;

/// Messages that ask and set nothing, so that QEMU waits whatever their flags are: features, a ring's
/// base, protocol features, queues, configuration, slots for memory, the window.
const QUESTIONS: [u32; 7] = [1, GET_VRING_BASE, 15, 17, 24, 36, 44];
const GET_VRING_BASE: u32 = 11;
const REMOVE_MEMORY: u32 = 38;
const RESET_OWNER: u32 = 4;
const RESET_DEVICE: u32 = 34;

/// What a message sets. In this order they are said again: memory before the rings that lie in it, and a
/// ring's kick, which starts it, last.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[allow(missing_docs, reason = "named as in the protocol's specification")]
pub enum VhostSetting {
    Owner,
    ProtocolFeatures,
    Features,
    BackendChannel,
    Table,
    Memory(u64),
    Size(u8),
    Address(u8),
    Base(u8),
    Errors(u8),
    Call(u8),
    Enable(u8),
    Kick(u8),
}

/// The head of a vhost-user message: request, flags and size.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct VhostHead {
    /// What it is about.
    pub request: u32,
    flags: u32,
    /// Bytes of what it says.
    pub length: usize,
}

impl VhostHead {
    /// From the bytes that a message begins with; `None` when it is none, or too long.
    pub fn of(bytes: &[u8]) -> Option<VhostHead> {
        let word = |at: usize| {
            let field = bytes.get(at..at + 4)?;
            Some(u32::from_le_bytes(field.try_into().ok()?))
        };
        let (request, flags, length) = (word(0)?, word(4)?, word(8)? as usize);
        (HEAD + length <= MAX_MESSAGE).then_some(VhostHead { request, flags, length })
    }

    /// Whether QEMU waits for an answer.
    pub fn wants_reply(self) -> bool {
        self.flags & NEED_REPLY != 0 || QUESTIONS.contains(&self.request)
    }

    /// Whether descriptors come with it; `says` is what follows the head.
    pub fn has_descriptors(self, says: &[u8]) -> bool {
        // A ring's event may be none.
        let none = says.get(1).is_some_and(|byte| byte & 1 != 0);
        match self.request {
            12..=14 => !none,
            5 | 21 | 37 => true,
            _ => false,
        }
    }

    /// Whether it asks for something that whoever takes over must do as well; all others are done when
    /// what they set is set.
    pub fn asks(self) -> bool {
        QUESTIONS.contains(&self.request) || self.request == RESET_DEVICE
    }

    /// The answer that says that it is done.
    pub fn done(self) -> Vec<u8> {
        message(self.request, VERSION | REPLY, &0_u64.to_le_bytes())
    }
}

/// A message from its parts.
fn message(request: u32, flags: u32, says: &[u8]) -> Vec<u8> {
    let length = u32::try_from(says.len()).unwrap_or(u32::MAX);
    let head = [request, flags, length].into_iter().flat_map(u32::to_le_bytes);
    head.chain(says.iter().copied()).collect()
}

/// What QEMU asks first of all: whoever was not asked it does not know that answers are wanted.
pub fn first_question() -> Vec<u8> {
    message(QUESTIONS[0], VERSION, &[])
}

/// A question for QEMU that changes nothing, and how its answer is told from others: to forget an object
/// that is not there.
pub fn probe() -> (Vec<u8>, u32) {
    const FORGET_OBJECT: u32 = 7;
    (message(FORGET_OBJECT, VERSION | NEED_REPLY, &[0; 16]), FORGET_OBJECT)
}

/// All that QEMU has said and that still counts.
#[derive(Debug, Default, Serialize, Deserialize)]
pub struct Frontend {
    set: BTreeMap<VhostSetting, Vec<u8>>,
    /// The last message, if QEMU waits for its answer, and which record it was.
    waits: Option<(u64, Vec<u8>)>,
}

impl Frontend {
    /// QEMU says something, in the record with this number. What it sets, if it sets something.
    pub fn take(&mut self, record: u64, bytes: &[u8]) -> Option<VhostSetting> {
        let head = VhostHead::of(bytes)?;
        let says = bytes.get(HEAD..)?;
        self.waits = head.wants_reply().then(|| (record, bytes.to_vec()));
        let queue = says.first().copied().unwrap_or(0);
        let region = || says.get(8..16)?.try_into().map(u64::from_le_bytes).ok();
        let key = match head.request {
            2 => VhostSetting::Features,
            3 => VhostSetting::Owner,
            5 => {
                self.set.retain(|key, _| !matches!(key, VhostSetting::Memory(_)));
                VhostSetting::Table
            }
            8 => VhostSetting::Size(queue),
            9 => VhostSetting::Address(queue),
            10 => VhostSetting::Base(queue),
            12 => VhostSetting::Kick(queue),
            13 => VhostSetting::Call(queue),
            14 => VhostSetting::Errors(queue),
            16 => VhostSetting::ProtocolFeatures,
            18 => VhostSetting::Enable(queue),
            21 => VhostSetting::BackendChannel,
            37 => VhostSetting::Memory(region()?),
            REMOVE_MEMORY => {
                self.set.remove(&VhostSetting::Memory(region()?));
                return None;
            }
            GET_VRING_BASE => {
                self.set.retain(|key, _| {
                    ![VhostSetting::Kick(queue), VhostSetting::Call(queue)].contains(key)
                });
                return None;
            }
            RESET_OWNER => {
                self.set.remove(&VhostSetting::Owner);
                return None;
            }
            RESET_DEVICE => {
                self.set.retain(|key, _| {
                    !matches!(key, VhostSetting::Enable(_) | VhostSetting::Features)
                });
                return None;
            }
            _ => return None,
        };
        self.set.insert(key, bytes.to_vec());
        Some(key)
    }

    /// Whether what this sets is set.
    pub fn has(&self, key: VhostSetting) -> bool {
        self.set.contains_key(&key)
    }

    /// The next entry of a ring that is to be taken, as QEMU said when it started it.
    pub fn base(&self, queue: u8) -> Option<u16> {
        let says = self.set.get(&VhostSetting::Base(queue))?.get(HEAD + 4..HEAD + 6)?;
        says.try_into().map(u16::from_le_bytes).ok()
    }

    /// What to say to somebody who knows nothing, in this order, none of it to be answered; the rings go
    /// on from `next`.
    pub fn repeat(&self, next: &[u16]) -> Vec<(VhostSetting, Vec<u8>)> {
        let each = self.set.iter().map(|(key, bytes)| {
            let (mut bytes, flags) = (bytes.clone(), VERSION);
            if let Some(field) = bytes.get_mut(4..8) {
                field.copy_from_slice(&flags.to_le_bytes());
            }
            if let VhostSetting::Base(queue) = key
                && let Some(at) = next.get(usize::from(*queue))
                && let Some(field) = bytes.get_mut(HEAD + 4..HEAD + 8)
            {
                field.copy_from_slice(&u32::from(*at).to_le_bytes());
            }
            (*key, bytes)
        });
        each.collect()
    }

    /// The last message and its record's number, if QEMU waits for an answer to it.
    pub fn waits(&self) -> Option<(u64, &[u8])> {
        self.waits.as_ref().map(|(record, bytes)| (*record, bytes.as_slice()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ring(request: u32, queue: u32, value: u32) -> Vec<u8> {
        let says: Vec<u8> = [queue, value].into_iter().flat_map(u32::to_le_bytes).collect();
        message(request, VERSION, &says)
    }

    fn memory(request: u32, at: u64) -> Vec<u8> {
        let says: Vec<u8> = [0, at, 4096, 0, 0].into_iter().flat_map(u64::to_le_bytes).collect();
        message(request, VERSION | NEED_REPLY, &says)
    }

    #[test]
    fn the_last_of_a_kind_counts_and_rings_start_last() {
        let mut frontend = Frontend::default();
        for (record, bytes) in [
            ring(12, 1, 0),
            ring(10, 1, 5),
            memory(37, 1 << 20),
            memory(37, 2 << 20),
            memory(38, 1 << 20),
            ring(8, 1, 128),
            ring(8, 1, 256),
        ]
        .iter()
        .enumerate()
        {
            frontend.take(record as u64, bytes);
        }
        assert_eq!(frontend.base(1), Some(5));
        let repeated = frontend.repeat(&[0, 77]);
        let keys: Vec<VhostSetting> = repeated.iter().map(|(key, _)| *key).collect();
        assert_eq!(
            keys,
            [
                VhostSetting::Memory(2 << 20),
                VhostSetting::Size(1),
                VhostSetting::Base(1),
                VhostSetting::Kick(1)
            ]
        );
        assert_eq!(repeated[1].1, ring(8, 1, 256));
        assert_eq!(repeated[2].1, ring(10, 1, 77));
        assert!(!VhostHead::of(&repeated[0].1).unwrap().wants_reply());
    }

    #[test]
    fn a_ring_that_was_stopped_stays_so_and_its_question_is_repeated() {
        let mut frontend = Frontend::default();
        frontend.take(1, &ring(12, 0, 0));
        frontend.take(2, &ring(13, 0, 0));
        assert!(frontend.waits().is_none());
        let question = ring(GET_VRING_BASE, 0, 0);
        assert_eq!(frontend.take(3, &question), None);
        assert!(frontend.repeat(&[]).is_empty());
        assert_eq!(frontend.waits(), Some((3, &question[..])));
        assert!(VhostHead::of(&question).unwrap().asks());
    }

    #[test]
    fn what_is_no_message_changes_nothing() {
        let mut frontend = Frontend::default();
        for bytes in [&[][..], &[0; 11], &message(37, VERSION, &[0; 9]), &[255; 64]] {
            assert_eq!(frontend.take(1, bytes), None);
        }
        assert!(frontend.repeat(&[]).is_empty());
        let done = VhostHead::of(&memory(37, 0)).unwrap().done();
        assert_eq!(done.len(), HEAD + 8);
        assert!(!VhostHead::of(&done).unwrap().wants_reply());
        let has = |bytes: &[u8]| VhostHead::of(bytes).unwrap().has_descriptors(&bytes[HEAD..]);
        assert!(has(&memory(37, 0)) && has(&ring(12, 1, 0)));
        assert!(!has(&ring(12, 1 | 1 << 8, 0)) && !has(&ring(10, 1, 0)) && !has(&memory(38, 0)));
    }
}
