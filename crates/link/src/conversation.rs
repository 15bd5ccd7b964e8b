//! What a link gives for a conversation: a stream, which can become a conversation of packets.

use std::net::IpAddr;
use std::os::unix::net::UnixStream;
use std::sync::Arc;

use rackbus_identity::{IsRevoked, WatchedConnection};
use rackbus_memory::{AsHandle, Carrier, Handles, PacketStream, Packets, Stream, StreamError};

use crate::VERSIONS;

/// What is done when a peer is revoked.
pub type OnRevoked = Box<dyn Fn() + Send + Sync>;

/// A connection between two nodes, as their link made it. What a function's conversation needs is a
/// [`Stream`]; that about segments is one of packets.
pub trait Conversation: Stream {
    /// Begins a conversation of packets with the peer, which takes part by
    /// [`take_packets`](Conversation::take_packets). The stream is of no more use then.
    ///
    /// # Errors
    /// [`StreamError`].
    fn offer_packets(&self) -> Result<Arc<dyn PacketStream>, StreamError>;

    /// Takes part in the conversation of packets that the peer offers.
    ///
    /// # Errors
    /// [`StreamError`]; what the peer offers instead is [`StreamError::Closed`].
    fn take_packets(&self) -> Result<Arc<dyn PacketStream>, StreamError>;

    /// What carries the operations of a medium to the peer, where no memory can be shared with it: from
    /// then on nothing else is received here. `None` where memory is shared.
    fn carrier(&self) -> Option<Box<dyn Carrier>> {
        None
    }

    /// Has `end` called when the peer is revoked, for as long as what is returned is there: also when the conversation has ended.
    /// It must not wait. Nothing where no peer is ever revoked, as on one machine.
    ///
    /// # Errors
    /// When it is by now.
    fn when_revoked(&self, _end: OnRevoked) -> Result<Option<WatchedConnection>, IsRevoked> {
        Ok(None)
    }

    /// The version of the link that both sides speak.
    fn version(&self) -> u32 {
        VERSIONS.newest()
    }

    /// The address of this machine by which the peer is reached, where it is another machine.
    fn local_address(&self) -> Option<IpAddr> {
        None
    }
}

impl Conversation for UnixStream {
    fn offer_packets(&self) -> Result<Arc<dyn PacketStream>, StreamError> {
        let (ours, theirs) = Packets::pair().map_err(|_| StreamError::TooManyDescriptors)?;
        self.send(&[&[0]], &[theirs.as_handle()])?;
        Ok(Arc::new(ours))
    }

    fn take_packets(&self) -> Result<Arc<dyn PacketStream>, StreamError> {
        let mut handles = Handles::new();
        self.receive(&mut [0], &mut handles)?;
        Ok(Arc::new(handles.packets().map_err(|_| StreamError::Closed)?))
    }
}
