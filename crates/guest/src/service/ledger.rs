//! Which of the last steps were carried out: memory and a file that the serving process and its standby
//! both have.
//!
//! A record says what is to be done; that it was done, the process may not live to record. So each request
//! of the guest has a word that says that it is not answered, and before an answer becomes visible it is
//! noted which entry of the queue it takes: whoever looks afterwards sees in the guest's own ring whether
//! that entry was taken. An answer to QEMU is sent from a file by the kernel (`sendfile`), which moves the
//! file's position in the same step: the position, which both processes share, says whether it was sent.

use std::os::fd::{AsFd, OwnedFd};
use std::sync::atomic::Ordering;

use rackbus_memory::{RegionError, SharedMemory};
use rackbus_segment::guest::GuestChannel;
use rustix::fs::{MemfdFlags, SeekFrom};
use rustix::io::Errno;

use super::backend::QUEUE_SIZE;
use crate::journal::QUEUES;
use crate::state::MOST_SESSIONS;

/// Indices of the ledger's words.
const PERFORMED: usize = 0;
const REPLY_FOR: usize = 1;
const REPLY_AT: usize = 2;
/// For each queue: the entry of its used ring that is being filled, and with which request's head.
const FILLING: usize = 8;
/// For each entry of each queue: the token of the request that is not answered.
const OPEN: usize = FILLING + QUEUES;
/// For each session and conversation: how many messages were taken off its socket (`Ledger::taken_off`).
const RECEIVING: usize = OPEN + QUEUES * QUEUE_SIZE;
const WORDS: usize = RECEIVING + 2 * MOST_SESSIONS;

/// Marks a word of [`FILLING`] as filled in.
const FILLED_IN: u64 = 1 << 32;
/// From this position on, the file of replies is written from its beginning again.
const MOST_REPLIES: u64 = 1 << 20;

/// As much of a count of messages as the ledger keeps.
const COUNT: u64 = (1 << 31) - 1;

/// Which message is the next one on a conversation's socket, where another process received from it before.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum LeftOnSocket {
    /// One that is not recorded.
    New,
    /// The one that was recorded last: the process had not taken it off yet.
    OneRecorded,
    /// Either of them: the process ended while it took one off.
    Unknown,
}

/// The ledger of one device.
#[derive(Debug)]
pub(super) struct Ledger {
    words: SharedMemory,
    replies: OwnedFd,
}

impl Ledger {
    pub(super) fn new() -> Result<Ledger, RegionError> {
        let words = SharedMemory::create("rackbus ledger", (WORDS * 8) as u64)?;
        let failed = |cause: Errno| RegionError::System { what: "memfd_create", cause };
        let replies =
            rustix::fs::memfd_create("rackbus replies", MemfdFlags::CLOEXEC).map_err(failed)?;
        Ok(Ledger { words, replies })
    }

    /// The same one, in another process.
    pub(super) fn adopt(words: OwnedFd, replies: OwnedFd) -> Result<Ledger, RegionError> {
        Ok(Ledger { words: SharedMemory::adopt(words, (WORDS * 8) as u64)?, replies })
    }

    pub(super) fn descriptors(&self) -> [std::os::fd::BorrowedFd<'_>; 2] {
        [self.words.as_fd(), self.replies.as_fd()]
    }

    fn load(&self, word: usize) -> u64 {
        self.words.whole().load_u64(word * 8, Ordering::SeqCst).unwrap_or(0)
    }

    fn store(&self, word: usize, value: u64) {
        // All words are inside.
        let _ = self.words.whole().store_u64(word * 8, value, Ordering::SeqCst);
    }

    /// All that records up to this one led to was carried out, but for answers.
    pub(super) fn performed(&self, records: u64) {
        self.store(PERFORMED, records);
    }

    pub(super) fn last_performed(&self) -> u64 {
        self.load(PERFORMED)
    }

    fn open(queue: u8, head: u16) -> Option<usize> {
        let (queue, head) = (usize::from(queue), usize::from(head));
        (queue < QUEUES && head < QUEUE_SIZE).then_some(OPEN + queue * QUEUE_SIZE + head)
    }

    /// A request was taken from a queue.
    pub(super) fn taken(&self, queue: u8, head: u16, token: u64) {
        Ledger::open(queue, head).into_iter().for_each(|word| self.store(word, token));
    }

    /// A request's answer goes to this entry of the used ring next.
    pub(super) fn answers(&self, queue: u8, head: u16, entry: u16) {
        if usize::from(queue) < QUEUES {
            let what = FILLED_IN | u64::from(entry) << 16 | u64::from(head);
            self.store(FILLING + usize::from(queue), what);
        }
    }

    /// The request's answer is in its ring.
    pub(super) fn answered(&self, queue: u8, head: u16) {
        Ledger::open(queue, head).into_iter().for_each(|word| self.store(word, 0));
        // The next request with this head has not been answered by this entry.
        if usize::from(queue) < QUEUES {
            self.store(FILLING + usize::from(queue), 0);
        }
    }

    /// Whether a request is not answered, where the guest's used ring goes on at `entry`.
    pub(super) fn is_open(&self, queue: u8, head: u16, token: u64, entry: u16) -> bool {
        let Some(word) = Ledger::open(queue, head) else { return false };
        let filling = self.load(FILLING + usize::from(queue));
        let this = filling & FILLED_IN != 0 && filling & 0xffff == u64::from(head);
        let filled = this && (filling >> 16) & 0xffff != u64::from(entry);
        self.load(word) == token && !filled
    }

    fn place(slot: usize, place: GuestChannel) -> usize {
        RECEIVING + 2 * slot.min(MOST_SESSIONS - 1) + usize::from(place == GuestChannel::Events)
    }

    /// So many messages of a session's conversation were taken off its socket; `taking` says that the next one,
    /// which is recorded, is about to be.
    pub(super) fn taken_off(
        &self,
        slot: usize,
        (session, place): (u64, GuestChannel),
        count: u64,
        taking: bool,
    ) {
        let what = session << 32 | (count & COUNT) << 1 | u64::from(taking);
        self.store(Ledger::place(slot, place), what);
    }

    /// What is to be done with the socket of a conversation of which `recorded` messages were recorded, so that
    /// the next one on it is one that was not.
    pub(super) fn left_on(
        &self,
        slot: usize,
        (session, place): (u64, GuestChannel),
        recorded: u64,
    ) -> LeftOnSocket {
        let word = self.load(Ledger::place(slot, place));
        // The word may be another session's, which had the slot before.
        let (count, taking) = match word >> 32 == session & u64::from(u32::MAX) {
            true => (word >> 1 & COUNT, word & 1 == 1),
            false => (0, false),
        };
        match (recorded.wrapping_sub(count) & COUNT, taking) {
            (0, false) => LeftOnSocket::New,
            (1, false) => LeftOnSocket::OneRecorded,
            _ => LeftOnSocket::Unknown,
        }
    }

    /// Sends the answer to the message of a record.
    pub(super) fn reply(&self, to: &impl AsFd, record: u64, bytes: &[u8]) -> std::io::Result<()> {
        let mut at = rustix::fs::tell(&self.replies)?;
        if at > MOST_REPLIES {
            at = rustix::fs::seek(&self.replies, SeekFrom::Start(0))?;
        }
        let mut written = 0;
        while let Some(rest) = bytes.get(written..).filter(|rest| !rest.is_empty()) {
            written += rustix::io::pwrite(&self.replies, rest, at + written as u64)?;
        }
        self.store(REPLY_AT, at);
        self.store(REPLY_FOR, record);
        let mut left = bytes.len();
        while left > 0 {
            match rustix::fs::sendfile(to, &self.replies, None, left) {
                Ok(0) => return Err(std::io::ErrorKind::WriteZero.into()),
                Ok(sent) => left -= sent,
                Err(Errno::INTR | Errno::AGAIN) => {}
                Err(error) => return Err(error.into()),
            }
        }
        Ok(())
    }

    /// Whether the answer to the message of a record was sent.
    pub(super) fn replied(&self, record: u64) -> bool {
        let moved = rustix::fs::tell(&self.replies).is_ok_and(|at| at > self.load(REPLY_AT));
        self.load(REPLY_FOR) == record && moved
    }
}

#[cfg(test)]
mod tests {
    use std::io::Read;
    use std::os::unix::net::UnixStream;

    use super::*;

    /// The ledgers of both processes, over the same memory.
    fn pair() -> (Ledger, Ledger) {
        let one = Ledger::new().unwrap();
        let [words, replies] = one.descriptors().map(|fd| fd.try_clone_to_owned().unwrap());
        let other = Ledger::adopt(words, replies).unwrap();
        (one, other)
    }

    #[test]
    fn a_request_is_open_until_its_answer_is_in_the_ring() {
        let (one, other) = pair();
        assert!(!other.is_open(1, 7, 3, 10));
        one.taken(1, 7, 3);
        assert!(other.is_open(1, 7, 3, 10));
        one.answers(1, 7, 10);
        // The process dies before, or after, the entry is there.
        assert!(other.is_open(1, 7, 3, 10));
        assert!(!other.is_open(1, 7, 3, 11));
        one.answered(1, 7);
        assert!(!other.is_open(1, 7, 3, 11));
        // The same entry of the queue, with another request.
        one.taken(1, 7, 4);
        assert!(other.is_open(1, 7, 4, 11));
        one.answers(1, 8, 11);
        assert!(other.is_open(1, 7, 4, 12) && !other.is_open(1, 7, 3, 12));
        one.taken(9, 7, 4);
        assert!(!other.is_open(9, 7, 4, 12) && !other.is_open(1, 60_000, 4, 12));
    }

    #[test]
    fn the_files_position_says_whether_a_reply_was_sent() {
        let (one, other) = pair();
        let (to, mut from) = UnixStream::pair().unwrap();
        assert!(!other.replied(1));
        for record in 1..2000 {
            // As it is when the process dies right before it sends.
            one.store(REPLY_AT, rustix::fs::tell(&one.replies).unwrap());
            one.store(REPLY_FOR, record);
            assert!(!other.replied(record));
            let bytes = [record as u8; 1000];
            one.reply(&to, record, &bytes).unwrap();
            assert!(other.replied(record) && !other.replied(record + 1));
            let mut read = [0; 1000];
            from.read_exact(&mut read).unwrap();
            assert_eq!(read, bytes);
        }
    }

    #[test]
    fn what_is_left_on_a_socket_is_known_but_while_it_is_taken_off() {
        let (one, other) = pair();
        let (calls, events) = ((9, GuestChannel::Calls), (9, GuestChannel::Events));
        let left = |recorded| other.left_on(3, events, recorded);
        assert_eq!((left(0), left(1)), (LeftOnSocket::New, LeftOnSocket::OneRecorded));
        one.taken_off(3, events, 0, true);
        assert_eq!(left(1), LeftOnSocket::Unknown);
        one.taken_off(3, events, 1, false);
        assert_eq!((left(1), left(2)), (LeftOnSocket::New, LeftOnSocket::OneRecorded));
        assert_eq!(left(3), LeftOnSocket::Unknown);
        // Another conversation, another slot, and a later session in the same one.
        assert_eq!(other.left_on(3, calls, 0), LeftOnSocket::New);
        assert_eq!(other.left_on(2, events, 0), LeftOnSocket::New);
        assert_eq!(other.left_on(3, (10, events.1), 0), LeftOnSocket::New);
        // The count begins again.
        one.taken_off(3, events, COUNT, false);
        assert_eq!(left(COUNT + 1), LeftOnSocket::OneRecorded);
        one.performed(9);
        assert_eq!(other.last_performed(), 9);
    }
}
