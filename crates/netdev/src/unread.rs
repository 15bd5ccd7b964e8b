//! Frames that an interface was to send and that nobody read in time: the kernel keeps so many for each queue of a TAP
//! device, and drops what comes when these are there.
//!
//! They are counted by the interface alone, of all of its queues together. The file that has the count shows the
//! interfaces of the network namespace that it was opened in, wherever it is read afterwards.
//!
//! Source of the columns: Linux, `net/core/net-procfs.c`.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;

/// The interfaces of the calling thread's network namespace, with what each counted.
const TABLE: &str = "/proc/thread-self/net/dev";

/// What is behind an interface's name: eight columns of what it received, and eight of what it sent, of which the fourth has
/// the frames that were dropped.
const SEND_DROPS: usize = 8 + 3;

/// Bytes of the table that are read at most: some hundred interfaces.
const MOST_BYTES: usize = 64 << 10;

/// The count of an interface. It keeps the namespace of the interface.
#[derive(Debug)]
pub struct UnreadFrames {
    table: File,
    name: String,
}

impl UnreadFrames {
    /// That of the interface `name` in the network namespace of the calling thread.
    ///
    /// # Errors
    /// What the system says.
    pub fn open(name: &str) -> io::Result<UnreadFrames> {
        Ok(UnreadFrames { table: File::open(TABLE)?, name: name.to_owned() })
    }

    /// Frames since the interface was made; `None` where it is gone, or the kernel does not say.
    pub fn count(&self) -> Option<u64> {
        let mut text = Vec::new();
        let mut part = [0; 4096];
        while text.len() < MOST_BYTES {
            match self.table.read_at(&mut part, text.len() as u64) {
                Ok(0) => break,
                Ok(read) => text.extend_from_slice(&part[..read]),
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(_) => return None,
            }
        }
        send_drops(&String::from_utf8_lossy(&text), &self.name)
    }
}

/// The frames for sending that the interface `name` dropped, by a table of all interfaces.
fn send_drops(table: &str, name: &str) -> Option<u64> {
    let mut columns = table.lines().filter_map(|line| line.split_once(':'));
    let (_, own) = columns.find(|(interface, _)| interface.trim() == name)?;
    own.split_whitespace().nth(SEND_DROPS)?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_frames_of_one_interface_are_found_among_those_of_others() {
        let table = "Inter-|   Receive                      |  Transmit\n \
                     face |bytes    packets errs drop fifo frame compressed multicast|bytes    packets errs drop\n    \
                     lo: 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16\n\
                     rackbus0:4242 22 23 24 25 26 27 28 29 30 31 9000 33 34 35 36\n\
                     rackbus01: 1 2 3 4 5 6 7 8 9 10 11 77 13 14 15 16\n";
        assert_eq!(send_drops(table, "rackbus0"), Some(9000));
        assert_eq!(send_drops(table, "lo"), Some(12));
        assert_eq!(send_drops(table, "rackbus"), None);
        assert_eq!(send_drops("rackbus0: 1 2 3\n", "rackbus0"), None);
    }

    #[test]
    fn the_kernel_has_such_a_table_and_no_interface_that_nobody_made() {
        assert!(UnreadFrames::open("lo").unwrap().count().is_some());
        assert_eq!(UnreadFrames::open("rackbus-none").unwrap().count(), None);
    }
}
