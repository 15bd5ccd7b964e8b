//! Files that came with messages: memory, and events to wait for and to ring.

use rackbus_segment::guest::{SESSION, object_number};
use serde::{Deserialize, Serialize};

use super::keepers::FileKeeper;
use super::{
    CONTROL, DescriptorKind, GuestAction, GuestState, Parked, PendingRequest, RING_WAIT, ROOT,
};
use crate::fuse::{self, Attributes, Errno};

/// A file that came with a message.
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct GuestFile {
    pub session: u64,
    pub keeper: FileKeeper,
    pub kind: DescriptorKind,
    pub revoked: bool,
    /// What it belongs to has ended: as which of all that have.
    pub ended: Option<u64>,
    /// Its memory is kept no more.
    pub released: bool,
    user: u32,
    group: u32,
    /// How often the guest's kernel has it from looking it up.
    lookups: u64,
    opened: bool,
    /// Rings that were heard.
    rings: u64,
    parked: Vec<Parked>,
}

impl GuestFile {
    pub(super) fn new(
        session: u64,
        (user, group): (u32, u32),
        keeper: FileKeeper,
        kind: DescriptorKind,
    ) -> GuestFile {
        GuestFile {
            session,
            keeper,
            kind,
            revoked: false,
            ended: None,
            released: false,
            user,
            group,
            lookups: 0,
            opened: false,
            rings: 0,
            parked: Vec::new(),
        }
    }

    pub(super) fn attributes(&self, node: u64) -> Attributes {
        let (size, dax) = match self.kind {
            DescriptorKind::Memory { size, .. } => (size, true),
            DescriptorKind::Bell | DescriptorKind::Other => (0, false),
        };
        // Without a name: it is gone from the guest when nobody has it open or mapped.
        let (mode, links) = (0o100_600, 0);
        Attributes { node, size, mode, links, user: self.user, group: self.group, dax }
    }

    pub(super) fn user(&self) -> u32 {
        self.user
    }

    pub(super) fn parked(&self) -> impl Iterator<Item = &Parked> {
        self.parked.iter()
    }

    pub(super) fn answer_parked(
        &mut self,
        which: impl Fn(&Parked) -> bool,
        actions: &mut Vec<GuestAction>,
    ) {
        let rings = self.rings.to_le_bytes();
        let (over, waiting) = self.parked.drain(..).partition(which);
        self.parked = waiting;
        actions.extend(Vec::into_iter(over).map(|parked: Parked| parked.answer(&rings)));
    }

    pub(super) fn end(mut self, actions: &mut Vec<GuestAction>) {
        actions.extend(self.parked.drain(..).map(|parked| parked.fail(Errno::NOTCONN)));
    }

    /// Whether nobody in the guest has it, or can have it again.
    fn is_over(&self, session_lives: bool) -> bool {
        self.lookups == 0 && (self.opened || !session_lives)
    }
}

impl GuestState {
    pub(super) fn look_up(&mut self, name: &[u8]) -> Result<Attributes, Errno> {
        if name == SESSION.as_bytes() {
            return self.attributes(CONTROL);
        }
        let node = object_number(name).ok_or(Errno::NOENT)?;
        let object = self.objects.get_mut(&node).ok_or(Errno::NOENT)?;
        object.lookups = object.lookups.saturating_add(1);
        Ok(object.attributes(node))
    }

    pub(super) fn forget(&mut self, node: u64, count: u64, actions: &mut Vec<GuestAction>) {
        if node == ROOT || node == CONTROL {
            return;
        }
        let Some(object) = self.objects.get_mut(&node) else { return };
        object.lookups = object.lookups.saturating_sub(count);
        if object.is_over(self.sessions.contains_key(&object.session)) {
            self.drop_object(node, actions);
        }
    }

    /// Releases what a session's process has never opened, and never will.
    pub(super) fn drop_unopened(&mut self, session: u64, actions: &mut Vec<GuestAction>) {
        let of = self.objects.iter().filter(|(_, it)| it.session == session && it.is_over(false));
        let over: Vec<u64> = of.map(|(node, _)| *node).collect();
        over.into_iter().for_each(|node| self.drop_object(node, actions));
    }

    fn drop_object(&mut self, node: u64, actions: &mut Vec<GuestAction>) {
        let Some(object) = self.objects.remove(&node) else { return };
        let ranges = self.maps.take_of(node);
        if !ranges.is_empty() {
            actions.push(GuestAction::Unmap { ranges, asked: None });
        }
        object.end(actions);
        actions.push(GuestAction::Forget { object: node });
    }

    /// Whether the file that is opened is mapped directly.
    pub(super) fn open_object(&mut self, node: u64) -> Result<bool, Errno> {
        let object = self.objects.get_mut(&node).ok_or(Errno::NOENT)?;
        object.opened = true;
        match object.kind {
            DescriptorKind::Memory { .. } => Ok(true),
            DescriptorKind::Bell => Ok(false),
            DescriptorKind::Other => Err(Errno::ACCES),
        }
    }

    /// Reading an event's file waits for a ring after the one whose number is the offset.
    pub(super) fn read_object(
        &mut self,
        now: u64,
        (asked, user): (PendingRequest, u32),
        node: u64,
        (offset, size): (u64, u32),
    ) -> Result<Option<Vec<u8>>, Errno> {
        let object = self.objects.get_mut(&node).ok_or(Errno::BADF)?;
        match object.kind {
            DescriptorKind::Bell if size < 8 => Err(Errno::INVAL),
            DescriptorKind::Bell if object.rings != offset => {
                Ok(Some(fuse::data(asked.unique, &object.rings.to_le_bytes())))
            }
            DescriptorKind::Bell => {
                object.parked.push(Parked { asked, user, until: now + RING_WAIT, exchange: false });
                Ok(None)
            }
            // A kernel that asks for memory's bytes would keep them in its page cache.
            DescriptorKind::Memory { .. } | DescriptorKind::Other => Err(Errno::IO),
        }
    }

    /// Writing to an event's file rings.
    pub(super) fn write_object(
        &mut self,
        node: u64,
        actions: &mut Vec<GuestAction>,
    ) -> Result<(), Errno> {
        match self.objects.get(&node).ok_or(Errno::BADF)?.kind {
            DescriptorKind::Bell => {
                actions.push(GuestAction::Ring { object: node });
                Ok(())
            }
            DescriptorKind::Memory { .. } | DescriptorKind::Other => Err(Errno::IO),
        }
    }

    /// An event was signalled: readers that wait for it are answered.
    pub fn rang(&mut self, object: u64) -> Vec<GuestAction> {
        let mut actions = Vec::new();
        if let Some(object) = self.objects.get_mut(&object) {
            object.rings = object.rings.wrapping_add(1);
            object.answer_parked(|_| true, &mut actions);
        }
        actions
    }
}
