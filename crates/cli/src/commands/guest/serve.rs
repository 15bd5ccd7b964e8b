//! `rackbus guest serve`: the helper of one VM. `vm run --fabric` and `vm args --fabric` start it.
//!
//! It is a process of its own, so that it outlives restarts of the node, and has a standby, which goes on
//! when it dies: a VM that nobody serves goes on with what is mapped, and waits for ever for anything new.

use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use rackbus_node::segments::SOCKET;

use crate::Common;
use crate::output::Failure;
use crate::{log, paths, process};

/// How long QEMU may take to connect, when it is started right afterwards.
const CONNECTED: Duration = Duration::from_secs(60);
/// How often a helper that waits for a VM looks whether its rack is still there.
const LOOK: Duration = Duration::from_secs(2);

/// Serve a VM's device.
#[derive(Debug, Clone, clap::Args)]
pub struct Args {
    /// The socket that QEMU connects to
    #[arg(long)]
    socket: PathBuf,
    /// The host of the rack that the guest is
    #[arg(long)]
    host: String,
    /// Serve one VM after the other, as long as the rack is up
    #[arg(long)]
    again: bool,
    /// Follow the process that serves, at standard input, and go on when it dies
    #[arg(long)]
    standby: bool,
    /// The file that stderr goes to, which is exchanged when it has grown
    #[arg(long, value_name = "FILE")]
    log: Option<PathBuf>,
}

impl Args {
    pub async fn run(&self, common: &Common) -> Result<(), Failure> {
        process::detach();
        log::start(self.log.as_deref());
        process::make_room();
        let run_dir = paths::find_run_dir(common)?;
        let node = run_dir.join(&self.host).join(SOCKET);
        let helper = self.helper(&run_dir, node);
        let mut follow = self.standby;
        loop {
            let helper = helper.clone();
            // Whoever follows another process has its VM already.
            let connected = Arc::new(AtomicBool::new(follow));
            let (here, follows) = (connected.clone(), std::mem::take(&mut follow));
            let serving = tokio::task::spawn_blocking(move || match follows {
                true => follow_and_serve(helper),
                false => rackbus_guest::serve(helper, || here.store(true, Ordering::Release)),
            });
            tokio::select! {
                outcome = serving => self.ended(outcome)?,
                () = self.not_wanted(&run_dir, &connected) => break,
            }
            if !self.again || !is_up(&run_dir) {
                break;
            }
        }
        // A socket that nobody listens at any more.
        let _ = std::fs::remove_file(&self.socket);
        // Whoever waits for QEMU would wait on.
        std::process::exit(0);
    }

    /// What serving takes; a standby is this program once more, with the same arguments.
    fn helper(&self, run_dir: &Path, node: PathBuf) -> rackbus_guest::StandbyStart {
        let (args, run_dir) = (self.clone(), run_dir.to_owned());
        let start = move |stdin: OwnedFd| -> std::io::Result<Child> {
            let mut command = Command::new("/proc/self/exe");
            // As the program is called, and not as the link is.
            command.arg0("rackbus");
            command.args(["guest", "serve", "--standby", "--host", &args.host]);
            command.arg("--socket").arg(&args.socket).arg("--run-dir").arg(&run_dir);
            if args.again {
                command.arg("--again");
            }
            if let Some(log) = &args.log {
                command.arg("--log").arg(log);
            }
            command.stdin(Stdio::from(stdin)).spawn()
        };
        rackbus_guest::StandbyStart { socket: self.socket.clone(), node, start: Arc::new(start) }
    }

    fn ended(
        &self,
        outcome: Result<
            Result<rackbus_guest::ServingEnd, rackbus_guest::ServeError>,
            tokio::task::JoinError,
        >,
    ) -> Result<(), Failure> {
        let failed = |error: String| Failure::new(error, "start the VM again");
        match outcome {
            Ok(Ok(_)) => Ok(()),
            Ok(Err(error)) => Err(failed(error.to_string())),
            Err(error) => Err(failed(error.to_string())),
        }
    }

    /// Waits until no VM will come, or its rack is gone before one has. Where one has come, it waits for
    /// ever.
    async fn not_wanted(&self, run_dir: &Path, connected: &AtomicBool) {
        let begun = Instant::now();
        loop {
            tokio::time::sleep(LOOK).await;
            let late = !self.again && begun.elapsed() > CONNECTED;
            if !connected.load(Ordering::Acquire) && (late || !is_up(run_dir)) {
                return;
            }
        }
    }
}

/// Follows the process at standard input; what comes after it is served here.
fn follow_and_serve(
    helper: rackbus_guest::StandbyStart,
) -> Result<rackbus_guest::ServingEnd, rackbus_guest::ServeError> {
    let failed = |cause| {
        let what = "standard input".to_owned();
        rackbus_guest::ServeError::System { what, cause }
    };
    let from = std::io::stdin().as_fd().try_clone_to_owned().map_err(failed)?;
    match rackbus_guest::stand_by(helper, from, || {})? {
        Some(served) => Ok(served),
        // Another one is in its place.
        None => std::process::exit(0),
    }
}

fn is_up(run_dir: &Path) -> bool {
    run_dir.join("rack.json").exists()
}
