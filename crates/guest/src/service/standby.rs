//! The standby: a process that knows what the serving one knows, and goes on when that one dies.
//!
//! QEMU notices nothing, because its sockets stay open: it would wait for ever for a process that
//! reconnects, or end. The guest waits for as long as this takes.

use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::process::Child;
use std::sync::atomic::Ordering;
use std::sync::{Arc, PoisonError};
use std::time::Duration;

use rackbus_memory::Packets;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::process::{Pid, PidfdFlags, pidfd_open};

use super::kept::KeptFile;
use super::link::{InheritedDevice, StandbyLink, listen};
use super::relay::Relay;
use super::{Device, ServeError, ServingEnd, run, system};
use crate::journal::frontend::{VhostSetting, first_question};
use crate::journal::{JournalStep, QemuJob};
use crate::state::GuestAction;

/// How long after a standby's end the next one is started.
const PAUSE: Duration = Duration::from_secs(1);
/// How long a process that has closed its sockets may take to be gone.
const GONE: Duration = Duration::from_secs(10);

/// Starts a standby, whose standard input is to be this socket.
pub type StartStandby = dyn Fn(OwnedFd) -> std::io::Result<Child> + Send + Sync;

/// What a process needs that serves a device.
#[derive(Clone)]
pub struct StandbyStart {
    /// The vhost-user socket that QEMU connects to.
    pub socket: PathBuf,
    /// The socket that processes attach to on the host that the guest is for.
    pub node: PathBuf,
    /// How its standby is started.
    pub start: Arc<StartStandby>,
}

/// Follows the process that serves, which speaks by `from`, and continues where it dies. `None` when it did
/// not die, or never said enough: another one is started then.
///
/// # Errors
/// As [`serve`](super::serve).
pub fn stand_by(
    helper: StandbyStart,
    from: OwnedFd,
    takes_over: impl FnOnce(),
) -> Result<Option<ServingEnd>, ServeError> {
    let packets = Packets::from_peer(from).map_err(system("the socket of a standby"))?;
    let peer = rustix::net::sockopt::socket_peercred(&packets)
        .map_err(|error| system("the serving process")(error.into()))?;
    let serving = pidfd_open(peer.pid, PidfdFlags::empty());
    let Some(InheritedDevice { kept, ledger, qemu }) = listen(&packets) else { return Ok(None) };
    // A process that gave this one up would go on serving.
    if serving.is_ok_and(|process| !ends(&process, Some(GONE))) {
        return Ok(None);
    }
    // One that was given up for being slow has not heard of all that was done.
    if ledger.last_performed() > kept.core.records() {
        tracing::error!("this standby has missed records and cannot take over");
        return Ok(None);
    }
    takes_over();
    tracing::warn!("the process that served the guest is gone; this one goes on");
    run(helper, kept, ledger, UnixStream::from(qemu), true).map(Some)
}

/// Whether a process ends within a time.
fn ends(process: &OwnedFd, limit: Option<Duration>) -> bool {
    let limit = limit.map(|limit| Timespec {
        tv_sec: i64::try_from(limit.as_secs()).unwrap_or(i64::MAX),
        tv_nsec: limit.subsec_nanos().into(),
    });
    loop {
        let mut polled = [PollFd::from_borrowed_fd(process.as_fd(), PollFlags::IN)];
        match poll(&mut polled, limit.as_ref()) {
            Ok(ended) => return ended > 0,
            Err(_) => continue,
        }
    }
}

impl Device {
    /// Has a standby, one after the other, until the device has ended.
    pub(super) fn keep_standby(self: &Arc<Self>, qemu: &UnixStream) {
        while !self.over.load(Ordering::Acquire) {
            if let Err(error) = self.have_standby(qemu) {
                tracing::error!(%error, "no standby could be started: the guest's requests hang if this process dies");
            }
            if !self.over.load(Ordering::Acquire) {
                std::thread::sleep(PAUSE);
            }
        }
    }

    /// Starts a standby and waits until it ends.
    fn have_standby(self: &Arc<Self>, qemu: &UnixStream) -> std::io::Result<()> {
        let (ours, theirs) = Packets::pair()?;
        let mut child = (self.helper.start)(theirs.into())?;
        let process = Pid::from_child(&child);
        let handle = pidfd_open(process, PidfdFlags::empty())?;
        let begun = {
            let mut inner = self.lock();
            let begun = StandbyLink::begin(ours, &inner.kept, &self.ledger, qemu.as_fd());
            begun.map(|link| inner.link = Some(link))
        };
        match begun {
            Ok(()) => {
                // It has been sent everything, and reads that even if this process dies now.
                tracing::info!(standby = process.as_raw_nonzero(), "a standby follows");
                *self.standby.lock().unwrap_or_else(PoisonError::into_inner) = Some(process);
                // Where the device ended meanwhile, or it was given up, nobody else ends it.
                if self.over.load(Ordering::Acquire) || self.lock().link.is_none() {
                    let _ = child.kill();
                }
                ends(&handle, None);
                *self.standby.lock().unwrap_or_else(PoisonError::into_inner) = None;
                self.lock().link = None;
            }
            Err(_) => drop(child.kill()),
        }
        let status = child.wait()?;
        if !self.over.load(Ordering::Acquire) {
            tracing::warn!(%status, "the standby ended; another one is started");
        }
        begun
    }

    /// The device has ended, and so has its standby.
    pub(super) fn end_standby(&self) {
        // Nothing more is told; but it is not to see that before it ends.
        let _link = self.lock().link.take();
        self.kill_standby();
    }

    /// Ends the standby that there is now.
    pub(super) fn kill_standby(&self) {
        let standby = self.standby.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(process) = *standby {
            // It cannot be gone and its number another's: whoever waits for it takes it out first.
            let _ = rustix::process::kill_process(process, rustix::process::Signal::KILL);
        }
    }

    /// Goes on where another process died, with what it had.
    pub(super) fn resume(self: &Arc<Self>, relay: &Relay) -> Result<(), ServeError> {
        let failed = |cause: std::io::Error| system("what QEMU has said")(cause);
        let (sessions, connecting, steps) = {
            let inner = self.lock();
            let kept = &inner.kept;
            relay.ask(&first_question(), &[]).map_err(failed)?;
            for (key, message) in kept.core.repeat() {
                let beside = kept.said.get(&key).map_or(&[][..], Vec::as_slice);
                relay.ask(&message, beside).map_err(failed)?;
            }
            for (number, held) in &kept.held {
                if let KeptFile::Bell(bell, _) = held
                    && let Err(error) = self.bells.listen(*number, bell)
                {
                    tracing::error!(%error, "an interrupt of the guest cannot be waited for and may be delayed");
                }
            }
            let (connecting, open) = kept.core.state.phases();
            let last = self.ledger.last_performed();
            (open, connecting, kept.core.steps_after(last).collect::<Vec<_>>())
        };
        for session in sessions {
            if !self.take_up_sockets(session) || steps.contains(&JournalStep::Sent(session)) {
                tracing::warn!(
                    session,
                    "a message to or from a process may be lost: its session ends"
                );
                self.end_session(session);
            } else {
                self.go_on(session);
            }
        }
        connecting.into_iter().for_each(|session| self.connect(session));
        for step in steps {
            if let (JournalStep::Rung(object), inner) = (step, self.lock())
                && let Some(KeptFile::Bell(bell, _)) = inner.kept.held.get(&object)
            {
                bell.relay();
            }
        }
        self.resume_work();
        Ok(())
    }

    /// What QEMU and the guest were still to have.
    fn resume_work(self: &Arc<Self>) {
        let inner = self.lock();
        let proofs: Vec<GuestAction> = inner.kept.core.proofs().collect();
        for job in inner.kept.core.jobs() {
            let action = match job.clone() {
                QemuJob::Map { job, object, at, offset, length } => {
                    GuestAction::Map { job, object, at, offset, length }
                }
                QemuJob::Unmap { ranges, asked } => GuestAction::Unmap { ranges, asked },
            };
            inner.order(&action, true);
        }
        // Who died may have taken a kick and not looked at the queue.
        for (key, beside) in &inner.kept.said {
            if let (VhostSetting::Kick(_), Some(kick)) = (key, beside.first()) {
                // A counter that is full wakes as well.
                let _ = rustix::io::write(kick, &1_u64.to_ne_bytes());
            }
        }
        self.perform(inner, proofs);
    }

    /// Waits until queues that another process served were looked at, so that what they had is answered.
    pub(super) fn wait_taken_up(&self) {
        let inherited = self.inherited.lock().unwrap_or_else(PoisonError::into_inner);
        let waits = |inherited: &mut [bool; _]| inherited.contains(&true);
        drop(self.taken_up.wait_timeout_while(inherited, GONE, waits));
    }

    /// Whether this is the serving process' successor and QEMU has done the first job, and how.
    pub(super) fn settle(&self) -> std::io::Result<Option<bool>> {
        use std::io::{Read, Write};

        use crate::journal::frontend::{HEAD, VhostHead, probe};
        let channel = {
            let inner = self.lock();
            let fds = inner.kept.said.get(&VhostSetting::BackendChannel);
            fds.and_then(|fds| fds.first()).map(OwnedFd::try_clone).transpose()?
        };
        let Some(channel) = channel else { return Ok(None) };
        let mut channel = UnixStream::from(channel);
        let (question, its_answer) = probe();
        channel.write_all(&question)?;
        let mut first = None;
        loop {
            let mut answer = [0; HEAD + 8];
            channel.read_exact(&mut answer)?;
            let head = VhostHead::of(&answer).ok_or(std::io::ErrorKind::InvalidData)?;
            if head.length != 8 {
                return Err(std::io::ErrorKind::InvalidData.into());
            }
            if head.request == its_answer {
                return Ok(first);
            }
            first = Some(answer.ends_with(&[0; 8]));
        }
    }
}
