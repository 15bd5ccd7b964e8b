//! `rackbus guest serve`: the helper of one VM. `vm run --fabric` and `vm args --fabric` start it.
//!
//! It is a process of its own, so that it outlives restarts of the node: a VM whose helper is gone goes on
//! with what is mapped, and waits for ever for anything new.

use std::path::{Path, PathBuf};
use std::time::Duration;

use rackbus_node::segments::SOCKET;

use crate::Common;
use crate::output::Failure;
use crate::{log, paths, process};

/// How long QEMU may take to connect, when it is started right afterwards.
const CONNECTED: Duration = Duration::from_secs(60);
/// How often a helper that waits for a VM looks whether its rack is still there.
const LOOK: Duration = Duration::from_secs(2);

/// Serve a VM's device.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// Where QEMU connects
    #[arg(long)]
    socket: PathBuf,
    /// The host of the rack that the guest is
    #[arg(long)]
    host: String,
    /// Serve one VM after the other, as long as the rack is up
    #[arg(long)]
    again: bool,
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
        loop {
            let (socket, place) = (self.socket.clone(), node.clone());
            let serving =
                tokio::task::spawn_blocking(move || rackbus_guest::serve(&socket, &place));
            tokio::select! {
                outcome = serving => self.ended(outcome)?,
                () = self.not_wanted(&run_dir) => break,
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

    fn ended(
        &self,
        outcome: Result<
            Result<rackbus_guest::Served, rackbus_guest::ServeError>,
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

    /// Waits until no VM will come, or its rack is gone before one has. Where a VM has connected, the
    /// socket is gone, and this waits for ever.
    async fn not_wanted(&self, run_dir: &Path) {
        if !self.again {
            tokio::time::sleep(CONNECTED).await;
            while !self.socket.exists() {
                tokio::time::sleep(LOOK).await;
            }
            return;
        }
        loop {
            tokio::time::sleep(LOOK).await;
            if self.socket.exists() && !is_up(run_dir) {
                return;
            }
        }
    }
}

fn is_up(run_dir: &Path) -> bool {
    run_dir.join("rack.json").exists()
}
