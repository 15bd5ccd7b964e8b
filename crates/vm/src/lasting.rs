//! Whether a lease lasts longer than the process that uses its function, as agreed between who borrowed it and the node
//! that serves the function: a note beside the function's socket.
//!
//! What is borrowed for a program stays lent when that ends, for the next one. What is borrowed for a QEMU that somebody
//! starts by hand ends with that: nobody knows its end but the node, and nobody else would return it.

use std::fs;
use std::path::{Path, PathBuf};

use crate::Result;
use crate::error::io;

/// Notes for the node that serves `socket` that its lease ends with the process that uses it.
///
/// # Errors
/// When the note cannot be written.
pub fn end_with_user(socket: &Path) -> Result<()> {
    let path = note(socket);
    fs::write(&path, "").map_err(io("write", &path))
}

/// Whether the lease of `socket` ends with the process that uses it.
#[must_use]
pub fn ends_with_user(socket: &Path) -> bool {
    note(socket).exists()
}

/// Forgets what was noted for a socket that is no more.
pub fn forget(socket: &Path) {
    // Mostly there is none.
    let _ = fs::remove_file(note(socket));
}

fn note(socket: &Path) -> PathBuf {
    socket.with_extension("ends")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_noted_of_a_lease_is_of_its_socket_alone() {
        let dir = std::env::temp_dir().join(format!("rackbus-lasting-{}", std::process::id()));
        fs::create_dir_all(&dir).expect("folder");
        let [socket, other] = ["nvme0.7.sock", "nvme0.8.sock"].map(|name| dir.join(name));
        assert!(!ends_with_user(&socket));
        end_with_user(&socket).expect("note");
        assert!(ends_with_user(&socket) && !ends_with_user(&other));
        forget(&socket);
        assert!(!ends_with_user(&socket));
        fs::remove_dir_all(&dir).expect("clean up");
    }
}
