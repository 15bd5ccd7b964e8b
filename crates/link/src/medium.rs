//! What a lender says after it let a front in: which medium it is, and the exchange to reach it by.

use std::os::fd::{AsFd, OwnedFd};

use rackbus_memory::{ExchangeFiles, Stream, StreamError};
use serde::{Deserialize, Serialize};

use crate::{LinkError, receive_frame_with, send_frame_with};

/// A medium, as its lender offers it to a front.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Medium {
    /// The class of the function, as its front is named: `nvme`.
    pub class: String,
    /// What the front shows, as the class writes it (JSON).
    pub description: String,
}

impl Medium {
    /// Offers it.
    ///
    /// # Errors
    /// When the peer is gone.
    pub fn send(&self, stream: &dyn Stream, files: &ExchangeFiles) -> Result<(), StreamError> {
        let [answers, asks] = &files.events;
        send_frame_with(stream, self, &[files.memory.as_fd(), answers.as_fd(), asks.as_fd()])
    }

    /// Takes an offer from `peer`.
    ///
    /// # Errors
    /// [`LinkError::Broken`], [`LinkError::Protocol`].
    pub fn receive(stream: &dyn Stream, peer: &str) -> Result<(Medium, ExchangeFiles), LinkError> {
        let broken = |cause| LinkError::Broken { peer: peer.to_owned(), cause };
        let protocol = |what| LinkError::Protocol { peer: peer.to_owned(), what };
        let mut fds = Vec::new();
        let medium = receive_frame_with(stream, &mut fds).map_err(broken)?.map_err(protocol)?;
        let count = fds.len();
        let fds: Result<[OwnedFd; 3], _> = fds.try_into();
        let [memory, answers, asks] =
            fds.map_err(|_| protocol(format!("{count} descriptors beside a medium, not 3")))?;
        Ok((medium, ExchangeFiles { memory, events: [answers, asks] }))
    }
}
