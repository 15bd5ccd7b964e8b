//! The conversation about segments: one of packets, which carry what leads to memory. The node that
//! connects makes it and passes the other end on.

use std::os::fd::AsFd;

use rackbus_memory::{Packets, Stream, StreamError};

/// Begins a conversation of packets with the other end of `stream`, which is of no more use then.
///
/// # Errors
/// [`StreamError`].
pub fn offer_packets(stream: &dyn Stream) -> Result<Packets, StreamError> {
    let (ours, theirs) = Packets::pair().map_err(|_| StreamError::TooManyDescriptors)?;
    stream.send(&[&[0]], &[theirs.as_fd()])?;
    Ok(ours)
}

/// Takes part in the conversation of packets that the other end of `stream` offers; `None` when it does
/// not.
pub fn take_packets(stream: &dyn Stream) -> Option<Packets> {
    let mut fds = Vec::new();
    stream.receive(&mut [0], &mut fds).ok()?;
    Packets::from_peer(fds.into_iter().next()?).ok()
}
