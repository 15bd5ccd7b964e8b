//! What can go wrong with a VM, each with its cause and what to do about it.

use std::path::PathBuf;
use std::time::Duration;

/// A VM could not be started, reached or changed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum VmError {
    /// A file that set-up makes is not there.
    #[error("{what} is missing at {}: run 'make setup' in the rackbus source (or scripts/setup)", path.display())]
    NotSetUp {
        /// What kind of thing is missing: QEMU, a kernel, an image.
        what: &'static str,
        /// Where it was looked for.
        path: PathBuf,
    },
    /// An argument that QEMU or the registry cannot take.
    #[error("{0}")]
    Invalid(String),
    /// A file or process operation failed.
    #[error("cannot {action} {}: {source}", path.display())]
    Io {
        /// What was tried, as a verb.
        action: &'static str,
        /// The file, folder or socket that was to be used.
        path: PathBuf,
        /// The error that the system gave.
        source: std::io::Error,
    },
    /// QEMU ended when it should not have.
    #[error("the VM '{name}' ended ({status}): {tail}")]
    Ended {
        /// The VM's name on its host.
        name: String,
        /// QEMU's exit status or signal, for people.
        status: String,
        /// The last lines of QEMU's own log.
        tail: String,
    },
    /// Something did not happen in time.
    #[error("{what} did not happen within {} ms", limit.as_millis())]
    TimedOut {
        /// What did not come in time.
        what: String,
        /// How long it was awaited.
        limit: Duration,
    },
    /// QEMU answered a command with an error.
    #[error("QEMU refused {command}: {message}")]
    Refused {
        /// Name of the QMP command that was refused.
        command: String,
        /// QEMU's description of the error.
        message: String,
    },
    /// A peer spoke otherwise than its protocol says.
    #[error("unexpected answer from {peer}: {detail}")]
    Protocol {
        /// Who answered: QEMU, or the guest's agent.
        peer: &'static str,
        /// What of the answer cannot be read.
        detail: String,
    },
    /// No VM has that name.
    #[error("no VM named '{name}' on host '{host}' (see 'rackbus vm list')")]
    NoSuchVm {
        /// The name asked for.
        name: String,
        /// The host it was looked for on.
        host: String,
    },
    /// A VM of that name runs already.
    #[error(
        "a VM named '{0}' already runs: stop it ('rackbus vm stop {0}') or choose another --name"
    )]
    Exists(String),
    /// As many commands as can run at the same time run in the guest.
    #[error(
        "the agent in the guest of VM '{0}' is busy with as many commands as it takes at a time"
    )]
    AgentBusy(String),
    /// The guest could not be asked to switch itself off, and goes on.
    #[error(
        "the guest of VM '{name}' could not be asked to switch itself off, and goes on: {cause}"
    )]
    NotAsked {
        /// The VM's name on its host.
        name: String,
        /// Why it could not be asked.
        cause: Box<VmError>,
    },
    /// Every hot-plug port of the VM is taken.
    #[error("the VM '{0}' has no free hot-plug port: start it with more (--spare-ports)")]
    NoFreePort(String),
    /// The VM was started without room for more memory.
    #[error("the VM '{0}' was started without room for more memory: start it with --max-memory")]
    FixedMemory(String),
}

/// Makes an I/O failure say what was tried, on what.
pub(crate) fn io<'a>(
    action: &'static str,
    path: &'a std::path::Path,
) -> impl Fn(std::io::Error) -> VmError + 'a {
    move |source| VmError::Io { action, path: path.to_owned(), source }
}
