//! The sockets that a node listens on.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixListener;
use std::path::Path;

use rackbus_control::node;
use rackbus_link::{Link, Listener as LinkListener};
use rackbus_memory::PacketListener;

use super::NodeError;
use crate::handover::parcel::ParcelDescriptors;
use crate::handover::state::{Listeners, NodeState};
use crate::metrics;
use crate::segments::SOCKET;

/// The sockets that a node listens on.
pub(super) struct Sockets {
    pub(super) link: Box<dyn LinkListener>,
    pub(super) segments: PacketListener,
    pub(super) questions: UnixListener,
}

impl Sockets {
    /// Those of the process before, or new ones.
    pub(super) fn of(
        state: Option<&NodeState>,
        descriptors: &mut ParcelDescriptors,
        link: &dyn Link,
        host: &str,
        folder: &Path,
    ) -> Result<Sockets, NodeError> {
        if let Some(Listeners { link: at, segments, questions }) = state.map(|it| &it.listeners) {
            let listener = descriptors.take_handle(*at).map_err(NodeError::Inherited)?;
            let mut take = |number: &u32| descriptors.take(*number).map_err(NodeError::Inherited);
            return Ok(Sockets {
                link: link.listen_on(host, listener).map_err(NodeError::Link)?,
                segments: PacketListener::resume(take(segments)?),
                questions: UnixListener::from(take(questions)?),
            });
        }
        let named = |name: &str| {
            let path = folder.join(name);
            let error = path.clone();
            (path, move |cause| NodeError::Path { path: error, cause })
        };
        let (segments, segments_error) = named(SOCKET);
        let (questions, questions_error) = named(metrics::SOCKET);
        Ok(Sockets {
            link: link.listen(host).map_err(NodeError::Link)?,
            segments: PacketListener::bind(&segments).map_err(segments_error)?,
            questions: node::listen(&questions).map_err(questions_error)?,
        })
    }

    /// Copies for the next process; `None` where the link cannot be passed on.
    pub(super) fn copies(&self) -> std::io::Result<Option<Listeners<OwnedFd>>> {
        let Some(link) = self.link.handle() else { return Ok(None) };
        let copy = |fd: BorrowedFd<'_>| fd.try_clone_to_owned();
        let (segments, questions) = (self.segments.as_fd(), self.questions.as_fd());
        Ok(Some(Listeners {
            link: copy(link.as_descriptor())?,
            segments: copy(segments)?,
            questions: copy(questions)?,
        }))
    }
}
