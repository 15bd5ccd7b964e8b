//! What is passed beside a message: what leads the peer to memory, to an event, or to another conversation of
//! this machine.
//!
//! On one machine each is a descriptor. Whoever speaks over a conversation does not look at it: what is sent is
//! borrowed from the memory, the event or the conversation itself ([`AsHandle`]), and what came is taken from
//! [`Handles`] one after the other, as what the message says that it is. Memory that a peer is to keep as it is, events and
//! ends of conversations are checked when they are taken; other memory when it is mapped. What is wrong with any is a
//! [`HandleError`]; who wants nothing more to be there says so ([`Handles::finish`]).
//!
//! Descriptors are what a few need all the same: the links, whoever asks the kernel about them, and vfio-user, whose
//! specification speaks of them. They name them (`of_descriptor`, `as_descriptor`, `into_descriptor`), and
//! `scripts/seam` knows who they are.

use std::collections::VecDeque;
use std::fmt;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;

use crate::descriptors::keep_room;
use crate::event::Event;
use crate::handle::MemoryHandle;
use crate::packets::Packets;
use crate::peer_event::PeerEvent;
use crate::region::SharedMemory;

/// What a message says that a handle leads to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum HandleTarget {
    /// Memory that can be mapped.
    Memory,
    /// An event that can be rung.
    Event,
    /// An end of a conversation of packets.
    Packets,
    /// Something that is looked at where it is used.
    Resource,
}

impl fmt::Display for HandleTarget {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            HandleTarget::Memory => "memory",
            HandleTarget::Event => "an event",
            HandleTarget::Packets => "an end of a conversation",
            HandleTarget::Resource => "a handle",
        })
    }
}

/// Why what came beside a message cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum HandleError {
    /// The message came with fewer than it says.
    #[error("a message came without {0}")]
    Missing(HandleTarget),
    /// One leads to something else than the message says.
    #[error("what came beside a message is not {target}: {cause}")]
    Unfit {
        /// What it should have been.
        target: HandleTarget,
        /// What is wrong with what came instead.
        cause: std::io::Error,
    },
    /// The message came with more than it says.
    #[error("a message came with {0} more handles than belong to it")]
    TooMany(usize),
}

/// What leads to something of this machine, borrowed from it to be passed to a peer.
#[derive(Debug, Clone, Copy)]
pub struct HandleRef<'a>(BorrowedFd<'a>);

impl<'a> HandleRef<'a> {
    /// For who has nothing but a descriptor, as a vfio-user server has of its client's memory.
    pub fn of_descriptor(descriptor: BorrowedFd<'a>) -> HandleRef<'a> {
        HandleRef(descriptor)
    }

    /// For the link that passes it on, and for who waits until it is readable.
    pub fn as_descriptor(self) -> BorrowedFd<'a> {
        self.0
    }
}

/// What a peer can be led to.
pub trait AsHandle {
    /// What leads there, to be sent beside a message.
    fn as_handle(&self) -> HandleRef<'_>;
}

impl AsHandle for SharedMemory {
    fn as_handle(&self) -> HandleRef<'_> {
        HandleRef(self.as_fd())
    }
}

impl AsHandle for Event {
    fn as_handle(&self) -> HandleRef<'_> {
        HandleRef(self.as_fd())
    }
}

impl AsHandle for PeerEvent {
    fn as_handle(&self) -> HandleRef<'_> {
        HandleRef(self.as_fd())
    }
}

impl AsHandle for Packets {
    fn as_handle(&self) -> HandleRef<'_> {
        HandleRef(self.as_fd())
    }
}

/// What leads to something of this machine, kept to be passed to peers again and again; cheap to clone.
#[derive(Debug, Clone)]
pub struct ResourceHandle(Arc<OwnedFd>);

impl ResourceHandle {
    /// For who has it from the kernel.
    pub fn of_descriptor(descriptor: OwnedFd) -> ResourceHandle {
        ResourceHandle(Arc::new(descriptor))
    }

    /// For who asks the kernel about it.
    pub fn as_descriptor(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }

    /// For who has it alone from now on, or a copy where others have it as well.
    ///
    /// # Errors
    /// When the process has no descriptors left.
    pub fn into_descriptor(self) -> std::io::Result<OwnedFd> {
        Arc::try_unwrap(self.0).or_else(|shared| shared.try_clone())
    }

    /// The event that it leads to.
    ///
    /// # Errors
    /// When it leads to none, or the process has no descriptors left.
    pub fn event(&self) -> std::io::Result<PeerEvent> {
        PeerEvent::new(self.0.try_clone()?)
    }

    /// Whether this is a clone of `other`.
    pub fn is_clone_of(&self, other: &ResourceHandle) -> bool {
        Arc::ptr_eq(&self.0, &other.0)
    }
}

impl AsHandle for ResourceHandle {
    fn as_handle(&self) -> HandleRef<'_> {
        HandleRef(self.0.as_fd())
    }
}

/// What came beside a message, in the order in which it was sent, or what is to be sent so. What is not taken is
/// closed.
#[derive(Debug, Default)]
pub struct Handles(VecDeque<OwnedFd>);

impl Handles {
    /// A message without handles; they are added by [`push`](Handles::push).
    pub fn new() -> Handles {
        Handles::default()
    }

    /// For a link that received them, and for what other protocols passed.
    pub fn of_descriptors(descriptors: Vec<OwnedFd>) -> Handles {
        Handles(descriptors.into())
    }

    /// For who speaks a protocol of descriptors, or passes them on to another process.
    pub fn into_descriptors(self) -> Vec<OwnedFd> {
        self.0.into()
    }

    /// How many are left.
    pub fn len(&self) -> usize {
        self.0.len()
    }

    /// Whether none is left.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Puts a copy of one behind the others.
    ///
    /// # Errors
    /// When the process has no descriptors left.
    pub fn push(&mut self, handle: HandleRef<'_>) -> std::io::Result<()> {
        self.0.push_back(handle.0.try_clone_to_owned()?);
        Ok(())
    }

    /// Puts others behind these.
    pub fn append(&mut self, mut others: Handles) {
        self.0.append(&mut others.0);
    }

    /// Puts what a link received behind the others.
    pub(crate) fn extend(&mut self, descriptors: impl IntoIterator<Item = OwnedFd>) {
        self.0.extend(descriptors);
    }

    /// All of them, to be sent beside a message.
    pub fn refs(&self) -> Vec<HandleRef<'_>> {
        self.0.iter().map(|descriptor| HandleRef(descriptor.as_fd())).collect()
    }

    /// Raises the limit of descriptors of a process that does not do so itself, where these came near it.
    pub fn keep_room(&self) {
        self.0.iter().for_each(keep_room);
    }

    /// Takes the next one, whatever it leads to: that is looked at where it is used.
    ///
    /// # Errors
    /// [`HandleError::Missing`].
    pub fn resource(&mut self) -> Result<ResourceHandle, HandleError> {
        self.next(HandleTarget::Resource).map(ResourceHandle::of_descriptor)
    }

    /// Takes all that are left, whatever they lead to.
    pub fn into_resources(self) -> impl Iterator<Item = ResourceHandle> {
        self.0.into_iter().map(ResourceHandle::of_descriptor)
    }

    /// Takes the next one as the file that it is, for who asks the kernel about that.
    ///
    /// # Errors
    /// [`HandleError::Missing`].
    pub fn next_descriptor(&mut self) -> Result<OwnedFd, HandleError> {
        self.next(HandleTarget::Memory)
    }

    /// Takes the next one as memory, which begins at `offset` of what the handle leads to. Whether it can be mapped is
    /// found out when it is, as [`MemoryHandle::new`] says.
    ///
    /// # Errors
    /// [`HandleError::Missing`], [`HandleError::Unfit`].
    pub fn memory(&mut self, offset: u64) -> Result<MemoryHandle, HandleError> {
        let target = HandleTarget::Memory;
        let memory = MemoryHandle::new(self.next(target)?, offset);
        memory.map_err(|cause| HandleError::Unfit { target, cause })
    }

    /// Takes the next one as memory of `length` bytes that nobody can truncate, and maps it.
    ///
    /// # Errors
    /// [`HandleError::Missing`], [`HandleError::Unfit`].
    pub fn shared_memory(&mut self, length: u64) -> Result<SharedMemory, HandleError> {
        let target = HandleTarget::Memory;
        let memory = SharedMemory::adopt(self.next(target)?, length);
        memory.map_err(|cause| HandleError::Unfit { target, cause: std::io::Error::other(cause) })
    }

    /// Takes the next one as an event.
    ///
    /// # Errors
    /// [`HandleError::Missing`], [`HandleError::Unfit`].
    pub fn event(&mut self) -> Result<PeerEvent, HandleError> {
        let target = HandleTarget::Event;
        PeerEvent::new(self.next(target)?).map_err(|cause| HandleError::Unfit { target, cause })
    }

    /// Takes the next one as an end of a conversation.
    ///
    /// # Errors
    /// [`HandleError::Missing`], [`HandleError::Unfit`].
    pub fn packets(&mut self) -> Result<Packets, HandleError> {
        let target = HandleTarget::Packets;
        Packets::from_peer(self.next(target)?).map_err(|cause| HandleError::Unfit { target, cause })
    }

    /// Nothing more belongs to the message.
    ///
    /// # Errors
    /// [`HandleError::TooMany`].
    pub fn finish(self) -> Result<(), HandleError> {
        match self.len() {
            0 => Ok(()),
            left => Err(HandleError::TooMany(left)),
        }
    }

    fn next(&mut self, target: HandleTarget) -> Result<OwnedFd, HandleError> {
        self.0.pop_front().ok_or(HandleError::Missing(target))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn passed(handles: &[HandleRef<'_>]) -> Handles {
        let mut passed = Handles::new();
        handles.iter().for_each(|handle| passed.push(*handle).unwrap());
        passed
    }

    #[test]
    fn handles_are_taken_in_their_order_as_what_they_lead_to() {
        let memory = SharedMemory::create("handles", 4096).unwrap();
        let event = Event::new().unwrap();
        let (ours, theirs) = Packets::pair().unwrap();
        let mut handles = passed(&[memory.as_handle(), event.as_handle(), theirs.as_handle()]);
        drop(theirs);
        memory.whole().write_obj(8, &7_u32).unwrap();
        let same = handles.shared_memory(4096).unwrap();
        assert_eq!(same.whole().read_obj::<u32>(8).unwrap(), 7);
        handles.event().unwrap().ring();
        assert!(event.drain());
        let end = handles.packets().unwrap();
        end.send(b"hello", &[]).unwrap();
        assert_eq!(ours.try_receive(&mut [0; 8]).unwrap().length, 5);
        handles.finish().unwrap();
    }

    #[test]
    fn what_is_something_else_than_the_message_says_is_refused() {
        let memory = SharedMemory::create("handles", 4096).unwrap();
        let event = Event::new().unwrap();
        let target = |error: HandleError| match error {
            HandleError::Unfit { target, .. } => Some(target),
            HandleError::Missing(_) | HandleError::TooMany(_) => None,
        };
        let memory = || passed(&[memory.as_handle()]);
        assert_eq!(target(memory().event().unwrap_err()), Some(HandleTarget::Event));
        assert_eq!(target(memory().packets().unwrap_err()), Some(HandleTarget::Packets));
        // A peer that passed less than it says, and one that could truncate it.
        assert_eq!(target(memory().shared_memory(8192).unwrap_err()), Some(HandleTarget::Memory));
        let file = rustix::fs::memfd_create("handles", rustix::fs::MemfdFlags::CLOEXEC).unwrap();
        rustix::fs::ftruncate(&file, 4096).unwrap();
        let mut unsealed = passed(&[HandleRef::of_descriptor(file.as_fd())]);
        assert_eq!(target(unsealed.shared_memory(4096).unwrap_err()), Some(HandleTarget::Memory));
        let event = || passed(&[event.as_handle()]);
        assert_eq!(target(event().shared_memory(4096).unwrap_err()), Some(HandleTarget::Memory));
    }

    #[test]
    fn what_is_missing_and_what_is_left_over_is_said() {
        let mut handles = Handles::new();
        let missing = handles.event().unwrap_err().to_string();
        assert_eq!(missing, "a message came without an event");
        let event = Event::new().unwrap();
        let mut handles = passed(&[event.as_handle(), event.as_handle(), event.as_handle()]);
        handles.event().unwrap();
        assert!(matches!(handles.finish(), Err(HandleError::TooMany(2))));
    }
}
