//! The connections of other hosts' processes, in bounded numbers, and to a bounded number of bytes.
//!
//! Between machines the owner keeps for each connection to memory what the other end is known to have of it: as many
//! bytes as the memory has, at most. So their sum is bounded, with each connection counted, by what several processes
//! that map all that the host exports come to ([`most_bytes`]).

use std::collections::BTreeMap;
use std::ops::Deref;

use rackbus_fabric::Loan;

use super::{ConnectionTarget, Directory, GuestConnection, MAX_HANDLES};
use crate::message::{
    DATA_SLOTS, InterruptKind, MAX_DATA, NodeId, PeerReply, Question, Refusal, TargetKind,
};

/// How many times what a host exports the connections of another machine may lead to.
const TIMES_EXPORT: u64 = 16;
/// And to how many bytes at least: the rings of data interrupts are no part of what a host exports.
const LEAST_BYTES: u64 = 1 << 30;

/// Senders of data interrupts that one host may have on another. Each has a ring, which the node and the interrupt's owner
/// map: without a bound one host could use up what the system lets a process map.
const MOST_SENDERS: u32 = 4096;
/// And all hosts together.
const MOST_SENDERS_OF_ALL: u32 = 4 * MOST_SENDERS;

/// To how many bytes the connections of one machine may lead together, on a host that exports `export` bytes.
fn most_bytes(export: u64) -> u64 {
    export.saturating_mul(TIMES_EXPORT).max(LEAST_BYTES)
}

/// What a connection leads to, and the loans by which it does.
type GuestEntry = (ConnectionTarget, Vec<Loan>);

/// What a host has.
#[derive(Debug, Default)]
struct HostUse {
    connections: u32,
    /// Those of them that send data interrupts.
    senders: u32,
    bytes: u64,
}

/// All of them, with what each host has.
#[derive(Debug, Default)]
pub(super) struct Guests {
    all: BTreeMap<GuestConnection, GuestEntry>,
    /// The bytes that each leads to, where they are counted.
    bytes: BTreeMap<GuestConnection, u64>,
    of_host: BTreeMap<NodeId, HostUse>,
    /// Senders of data interrupts, of all hosts.
    senders: u32,
}

/// Whether a connection has a ring.
fn sends_data((target, _): &GuestEntry) -> u32 {
    u32::from(matches!(target, ConnectionTarget::Interrupt(InterruptKind::Data, _)))
}

impl Guests {
    /// Whether a host has as many as its processes may have together on another machine.
    fn is_full(&self, node: NodeId) -> bool {
        self.of_host.get(&node).is_some_and(|it| it.connections >= MAX_HANDLES)
    }

    /// To how many of `most` bytes the connections of a host do not lead yet.
    fn room(&self, node: NodeId, most: u64) -> u64 {
        most.saturating_sub(self.of_host.get(&node).map_or(0, |it| it.bytes))
    }

    /// The bound on senders of data interrupts that `node` has reached, if any. Those of this host's `own` processes count
    /// for nobody else.
    fn senders_bound(&self, node: NodeId, own: NodeId) -> Option<u32> {
        let of = |node| self.of_host.get(&node).map_or(0, |it| it.senders);
        if of(node) >= MOST_SENDERS {
            return Some(MOST_SENDERS);
        }
        (self.senders - of(own) >= MOST_SENDERS_OF_ALL).then_some(MOST_SENDERS_OF_ALL)
    }

    pub(super) fn insert(&mut self, guest: GuestConnection, entry: GuestEntry) {
        let of_host = self.of_host.entry(guest.0).or_default();
        let new = sends_data(&entry);
        match self.all.insert(guest, entry) {
            None => {
                of_host.connections += 1;
                of_host.senders += new;
                self.senders += new;
            }
            Some(old) => {
                let old = sends_data(&old);
                of_host.senders = of_host.senders + new - old;
                self.senders = self.senders + new - old;
            }
        }
    }

    /// Counts the bytes that a connection leads to, once.
    fn count_bytes(&mut self, guest: GuestConnection, bytes: u64) {
        if self.all.contains_key(&guest) && self.bytes.insert(guest, bytes).is_none() {
            self.of_host.entry(guest.0).or_default().bytes += bytes;
        }
    }

    pub(super) fn remove(&mut self, guest: &GuestConnection) -> Option<GuestEntry> {
        let entry = self.all.remove(guest)?;
        let bytes = self.bytes.remove(guest).unwrap_or_default();
        if let Some(of_host) = self.of_host.get_mut(&guest.0) {
            of_host.connections -= 1;
            of_host.senders -= sends_data(&entry);
            of_host.bytes -= bytes;
            if of_host.connections == 0 {
                self.of_host.remove(&guest.0);
            }
        }
        self.senders -= sends_data(&entry);
        Some(entry)
    }
}

impl Deref for Guests {
    type Target = BTreeMap<GuestConnection, GuestEntry>;

    fn deref(&self) -> &Self::Target {
        &self.all
    }
}

/// What another machine has too much of, and is refused more: how often.
#[derive(Debug, Default)]
pub(super) struct RefusalCounts {
    pub(super) connections: u64,
    pub(super) bytes: u64,
    pub(super) locks: u64,
    /// The host that was refused something last, and why.
    pub(super) last: Option<(NodeId, Refusal)>,
}

impl Directory {
    /// The bytes that the connection which a question asks for would lead to.
    fn bytes_asked(&self, what: &Question) -> u64 {
        let group = |id| self.groups.get(id).map(|group| group.size());
        match what {
            // Which is refused.
            Question::Segment { what: TargetKind::Group, .. } => 0,
            Question::Segment { id, .. } => {
                let segment = self.by_id.get(id).and_then(|handle| self.segments.get(handle));
                segment.map_or(0, |segment| segment.size)
            }
            Question::Group { id, size } => group(id).or(*size).unwrap_or_default(),
            Question::Interrupt { kind: InterruptKind::Data, .. } => {
                u64::from(DATA_SLOTS) * u64::from(MAX_DATA)
            }
            Question::Interrupt { kind: InterruptKind::Plain, .. }
            | Question::Pages { .. }
            | Question::Probe
            | Question::Alive(_)
            | Question::Lock { .. } => 0,
        }
    }

    /// Connects another host's process to what it asks for, by `connect`, if its host may have one more connection, and
    /// that leads to so much where it is another machine: others map the memory itself, of which the owner keeps nothing.
    pub(super) fn connect_bounded<Attached>(
        &mut self,
        guest: GuestConnection,
        what: &Question,
        connect: impl FnOnce(&mut Directory) -> Result<(PeerReply, Attached), Refusal>,
    ) -> Result<(PeerReply, Attached), Refusal> {
        if self.guests.is_full(guest.0) {
            self.refused.connections += 1;
            return Err(self.note_refused(guest.0, Refusal::TooMany(MAX_HANDLES)));
        }
        if let Question::Interrupt { kind: InterruptKind::Data, .. } = what
            && let Some(most) = self.guests.senders_bound(guest.0, self.settings.node)
        {
            self.refused.connections += 1;
            return Err(self.note_refused(guest.0, Refusal::TooMany(most)));
        }
        if !self.settings.machines {
            return connect(self);
        }
        let (bytes, most) = (self.bytes_asked(what), most_bytes(self.settings.range.size));
        let free = self.guests.room(guest.0, most);
        if bytes > free {
            self.refused.bytes += 1;
            return Err(self.note_refused(guest.0, Refusal::NoSpace { free }));
        }
        let answer = connect(self)?;
        self.guests.count_bytes(guest, bytes);
        Ok(answer)
    }

    /// Notes that a host is refused something that it has too much of.
    pub(super) fn note_refused(&mut self, node: NodeId, why: Refusal) -> Refusal {
        self.refused.last = Some((node, why.clone()));
        why
    }

    /// How often other machines were refused what they had too much of, each by its name.
    pub fn refusals(&self) -> [(&'static str, u64); 3] {
        let RefusalCounts { connections, bytes, locks, .. } = &self.refused;
        [("connections", *connections), ("bytes of connections", *bytes), ("locks", *locks)]
    }

    /// The host that was refused something last that it had too much of, and what it was told.
    pub fn last_refusal(&self) -> Option<String> {
        let (node, why) = self.refused.last.as_ref()?;
        let host = self.settings.hosts.get(node).map_or("an unknown host", String::as_str);
        Some(format!("{host}: {why}"))
    }
}

#[cfg(test)]
mod tests {
    use rackbus_fabric::FabricHandle;

    use super::*;
    use crate::directory::{
        DirectoryAction, DirectorySettings, HostRange, LinePart, ObjectId, Objects, Recipient,
    };
    use crate::message::{ConnectorMessage, Handle, OwnerMessage};

    /// Nothing is made in these tests.
    struct Nothing;

    impl Objects for Nothing {
        fn memory(&mut self, _size: u64) -> Result<ObjectId, String> {
            Err("no memory".into())
        }
        fn event(&mut self) -> Result<ObjectId, String> {
            Err("no event".into())
        }
        fn line(&mut self, _part: LinePart) -> Result<ObjectId, String> {
            Err("no line".into())
        }
        fn rung(&self, _line: ObjectId) -> Result<u32, String> {
            Err("no line".into())
        }
    }

    /// On one machine as well: the root of a virtual machine has its host's node ask for what it likes.
    #[test]
    fn a_host_at_its_bound_is_refused_more_and_no_other_host() {
        let range = HostRange { base: 1 << 32, size: 1 << 20 };
        let names = [(4, "alpha"), (8, "beta"), (12, "gamma")];
        let hosts = names.map(|(node, name)| (node, name.to_owned())).into();
        let (ranges, rules) = (vec![(4, range)], Default::default());
        let machines = false;
        let settings = DirectorySettings { node: 4, hosts, range, ranges, rules, machines };
        let fabric = FabricHandle::of_hosts(names.map(|(_, name)| name)).unwrap();
        let mut directory = Directory::new(settings, fabric);
        for connection in 0..u64::from(MAX_HANDLES) {
            let entry = (ConnectionTarget::Group(1), Vec::new());
            directory.guests.insert((8, Handle(connection)), entry);
        }
        let mut ask = |node| {
            let what = Question::Segment { id: 7, what: TargetKind::Segment };
            let connection = Handle(u64::MAX);
            let question = ConnectorMessage::Question { request: 1, connection, what };
            let told = directory.asked(0, node, question, &mut Nothing);
            let answer = |action| match action {
                DirectoryAction::Send(Recipient::Tell(_, it), _) => Some(it),
                _ => None,
            };
            told.into_iter().find_map(answer)
        };
        let refused = |why| Some(OwnerMessage::Answer { request: 1, answer: Err(why) });
        assert_eq!(ask(8), refused(Refusal::TooMany(MAX_HANDLES)));
        assert_eq!(ask(12), refused(Refusal::NoSuchSegment));
    }

    #[test]
    fn a_host_has_so_many_and_takes_none_of_others() {
        let mut guests = Guests::default();
        let entry = || (ConnectionTarget::Group(1), Vec::new());
        for connection in 0..u64::from(MAX_HANDLES) {
            assert!(!guests.is_full(8));
            guests.insert((8, Handle(connection)), entry());
        }
        guests.insert((8, Handle(0)), entry());
        assert!(guests.is_full(8) && !guests.is_full(12));
        assert!(guests.remove(&(8, Handle(5))).is_some() && !guests.is_full(8));
        assert!(
            guests.remove(&(8, Handle(5))).is_none() && guests.remove(&(12, Handle(1))).is_none()
        );
        guests.insert((8, Handle(5)), entry());
        assert!(guests.is_full(8));
    }

    #[test]
    fn bytes_are_counted_once_and_for_as_long_as_their_connection() {
        let mut guests = Guests::default();
        let entry = || (ConnectionTarget::Group(1), Vec::new());
        guests.count_bytes((8, Handle(1)), 50);
        assert_eq!(guests.room(8, 100), 100, "there is no such connection");
        guests.insert((8, Handle(1)), entry());
        guests.count_bytes((8, Handle(1)), 70);
        guests.count_bytes((8, Handle(1)), 70);
        assert_eq!((guests.room(8, 100), guests.room(8, 60), guests.room(12, 100)), (30, 0, 100));
        guests.remove(&(8, Handle(1)));
        assert!(guests.room(8, 100) == 100 && guests.of_host.is_empty() && guests.bytes.is_empty());
    }
}
