//! Functions that this host has in turns: a path at which each turn's socket appears, and waiting for a turn's user.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use rackbus_lease::{LeaseId, TurnOf};

use super::{BorrowedFunctions, Open};
use crate::turns::LeaseUse;

/// How often it is looked whether a user has released the function.
const LOOK: Duration = Duration::from_millis(5);

/// Where the socket of a share's turn appears, a symbolic link, and disappears when the turn is over.
pub fn turn_path(folder: &Path, share: u64) -> PathBuf {
    folder.join(format!("share-{share}.sock"))
}

impl BorrowedFunctions {
    /// The leases that are turns.
    pub fn turns(&self) -> Vec<LeaseId> {
        let all = self.all();
        let turns = all.iter().filter(|(_, open)| open.grant.turn.is_some());
        turns.map(|(lease, _)| *lease).collect()
    }

    /// The share whose turn a lease is.
    pub fn turn(&self, lease: LeaseId) -> Option<TurnOf> {
        self.all().get(&lease)?.grant.turn.clone()
    }

    /// Whether a lease is in use, or was.
    pub fn use_of(&self, lease: LeaseId) -> LeaseUse {
        self.all().get(&lease).map_or(LeaseUse::Unused, |open| open.use_of())
    }

    /// Waits until nobody uses a lease any more, while `left` says that there is time.
    pub fn await_user(&self, lease: LeaseId, left: impl Fn() -> Duration) {
        if left().is_zero() {
            return;
        }
        let has_user = || self.user(lease).is_some_and(|(_, user)| user.is_some());
        while has_user() {
            if left().is_zero() {
                tracing::warn!(
                    lease,
                    "the turn's user did not release the function in time: it is taken away"
                );
                return;
            }
            std::thread::sleep(LOOK);
        }
    }

    /// Has the turn's socket appear where its users look for it.
    pub(super) fn show_turn(&self, open: &Arc<Open>) {
        let Some(turn) = &open.grant.turn else { return };
        let path = turn_path(&self.folder, turn.share);
        // Whoever looks finds the former turn's, or this one's.
        let new = path.with_extension("new");
        let _ = std::fs::remove_file(&new);
        let shown = std::os::unix::fs::symlink(&open.path, &new)
            .and_then(|()| std::fs::rename(&new, &path));
        if let Err(error) = shown {
            tracing::warn!(path = %path.display(), %error, "the share's own path to a turn's socket could not be made");
        }
    }

    /// Takes that away, unless a later turn has it.
    pub(super) fn hide_turn(&self, open: &Arc<Open>) {
        let Some(turn) = &open.grant.turn else { return };
        let path = turn_path(&self.folder, turn.share);
        if std::fs::read_link(&path).is_ok_and(|to| to == open.path) {
            // Somebody else may have removed it.
            let _ = std::fs::remove_file(&path);
        }
    }
}
