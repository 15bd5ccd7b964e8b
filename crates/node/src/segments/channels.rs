//! What the copy channels of the host's processes did: each process passes memory that it counts in, and the node reads
//! that when somebody asks.

use std::collections::{HashMap, HashSet};

use rackbus_fabric::{LentMemory, ObjectKey};
use rackbus_memory::MemoryHandle;
use rackbus_memory::copy::{Statistics, read_published};
use rackbus_segment::SessionId;

#[derive(Debug, Default)]
pub struct ProcessChannels {
    processes: HashMap<ObjectKey, Process>,
    of_session: HashMap<SessionId, ObjectKey>,
    /// What those did that have gone. It begins anew after its last number, as counters do: none of them can fill it.
    ended: Statistics,
}

/// A process that is attached, by one session or several.
#[derive(Debug)]
struct Process {
    memory: MemoryHandle,
    /// What it had done when it attached.
    before: Statistics,
    /// What it had done when that could be read last.
    last: Statistics,
    sessions: HashSet<SessionId>,
}

impl Process {
    fn look(&mut self) -> Statistics {
        if let Ok(now) = read_published(&self.memory) {
            // Whatever it says: a counter does not fall.
            self.last = self.last.at_least(now);
        }
        self.last.since(self.before)
    }
}

impl ProcessChannels {
    /// The process of a session counts in `memory`.
    ///
    /// # Errors
    /// When it is no memory to count in.
    pub fn begin(&mut self, session: SessionId, memory: MemoryHandle) -> std::io::Result<()> {
        let before = read_published(&memory)?;
        let number = memory.object();
        let sessions = HashSet::new();
        let new = || Process { memory, before, last: before, sessions };
        self.processes.entry(number).or_insert_with(new).sessions.insert(session);
        self.of_session.insert(session, number);
        Ok(())
    }

    /// A session has ended.
    pub fn end(&mut self, session: SessionId) {
        let Some(number) = self.of_session.remove(&session) else { return };
        let Some(process) = self.processes.get_mut(&number) else { return };
        process.sessions.remove(&session);
        if process.sessions.is_empty() {
            self.ended = self.ended.plus_wrapping(process.look());
            self.processes.remove(&number);
        }
    }

    /// What the channels of all processes did while these were attached.
    pub fn total(&mut self) -> Statistics {
        let each = self.processes.values_mut().map(Process::look);
        each.fold(self.ended, Statistics::plus_wrapping)
    }
}

#[cfg(test)]
mod tests {
    use rackbus_memory::SharedMemory;

    use super::*;

    fn page(transactions: u64) -> SharedMemory {
        let page = SharedMemory::create("test", 4096).unwrap();
        page.whole().write_obj(64, &transactions).unwrap();
        page
    }

    fn handle(page: &SharedMemory) -> MemoryHandle {
        page.handle(0)
    }

    #[test]
    fn what_a_process_did_before_and_elsewhere_is_left_out_and_what_it_did_stays() {
        let mut channels = ProcessChannels::default();
        let page = page(5);
        for session in [1, 2] {
            channels.begin(SessionId(session), handle(&page)).unwrap();
        }
        page.whole().write_obj(64, &12_u64).unwrap();
        page.whole().write_obj(128, &100_u64).unwrap();
        assert_eq!(channels.total().transactions, 107, "once, however many sessions it has");
        channels.end(SessionId(1));
        page.whole().write_obj(64, &13_u64).unwrap();
        channels.end(SessionId(2));
        channels.end(SessionId(2));
        page.whole().write_obj(64, &14_u64).unwrap();
        assert_eq!(channels.total().transactions, 108);
        assert!(channels.processes.is_empty() && channels.of_session.is_empty());
        // The same process attaches anew.
        channels.begin(SessionId(3), handle(&page)).unwrap();
        page.whole().write_obj(64, &15_u64).unwrap();
        assert_eq!(channels.total().transactions, 109);
    }

    #[test]
    fn whatever_a_process_says_no_count_falls_and_others_are_counted() {
        let mut channels = ProcessChannels::default();
        let liar = page(1);
        channels.begin(SessionId(1), handle(&liar)).unwrap();
        liar.whole().write_obj(64, &100_u64).unwrap();
        assert_eq!(channels.total().transactions, 99);
        liar.whole().write_obj(64, &7_u64).unwrap();
        assert_eq!(channels.total().transactions, 99);
        liar.whole().write_obj(64, &u64::MAX).unwrap();
        channels.end(SessionId(1));
        let before = channels.total().transactions;
        let other = page(0);
        channels.begin(SessionId(2), handle(&other)).unwrap();
        other.whole().write_obj(64, &5_u64).unwrap();
        assert_eq!(channels.total().transactions, before.wrapping_add(5));
    }

    #[test]
    fn what_is_no_memory_of_a_size_that_stays_is_refused() {
        let mut channels = ProcessChannels::default();
        let small = SharedMemory::reserve("test", 64).unwrap();
        let file = std::fs::File::open("/proc/self/exe").unwrap();
        let (pipe, _end) = rustix::pipe::pipe().unwrap();
        for fd in [small, file.into(), pipe] {
            assert!(channels.begin(SessionId(1), MemoryHandle::new(fd, 0).unwrap()).is_err());
        }
        channels.end(SessionId(1));
        assert_eq!(channels.total(), Statistics::default());
    }
}
