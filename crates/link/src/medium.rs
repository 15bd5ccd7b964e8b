//! What a lender says after it let a front in: which medium it is, and what leads to it.

use rackbus_memory::{Handles, Stream, StreamError};
use serde::{Deserialize, Serialize};

use crate::session::MediumSession;
use crate::{LinkError, receive_frame_with, send_frame_with};

/// A medium, as its lender offers it to a front.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct OfferedMedium {
    /// The class of the function, as its front is named: `nvme`.
    pub class: String,
    /// What the front shows, as the class writes it (JSON).
    pub description: String,
    /// How a front on another machine goes on with it by other connections. `None` where memory is shared.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub session: Option<MediumSession>,
}

impl OfferedMedium {
    /// Offers it, with what leads to it.
    ///
    /// # Errors
    /// When the peer is gone.
    pub fn send(&self, stream: &dyn Stream, handles: &Handles) -> Result<(), StreamError> {
        send_frame_with(stream, self, &handles.refs())
    }

    /// Takes an offer from `peer`. What each of the handles leads to, and how many there should be, its class knows.
    ///
    /// # Errors
    /// [`LinkError::Broken`], [`LinkError::Protocol`].
    pub fn receive(stream: &dyn Stream, peer: &str) -> Result<(OfferedMedium, Handles), LinkError> {
        let broken = |cause| LinkError::Broken { peer: peer.to_owned(), cause };
        let protocol = |what| LinkError::Protocol { peer: peer.to_owned(), what };
        let mut handles = Handles::new();
        let medium = receive_frame_with(stream, &mut handles).map_err(broken)?.map_err(protocol)?;
        Ok((medium, handles))
    }
}

/// Where a lent function is in the window that its borrower has onto the lender, through their NTB.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct InWindow {
    /// Offset of its control area, in bytes.
    pub offset: u64,
    /// The epoch in that area.
    pub epoch: u64,
    /// How the borrower goes on by other connections; nothing is said by them. `None` where the conversation has the one
    /// that it began with.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub session: Option<MediumSession>,
}

impl InWindow {
    /// Tells the borrower where the function is.
    ///
    /// # Errors
    /// When the peer is gone.
    pub fn send(&self, stream: &dyn Stream) -> Result<(), StreamError> {
        send_frame_with(stream, self, &[])
    }

    /// Hears it from `peer`.
    ///
    /// # Errors
    /// As [`OfferedMedium::receive`].
    pub fn receive(stream: &dyn Stream, peer: &str) -> Result<InWindow, LinkError> {
        let broken = |cause| LinkError::Broken { peer: peer.to_owned(), cause };
        let protocol = |what| LinkError::Protocol { peer: peer.to_owned(), what };
        receive_frame_with(stream, &mut Handles::new()).map_err(broken)?.map_err(protocol)
    }
}
