//! Numbers for sessions, none of them ever given twice on a host: locks in shared memory tell by
//! them who is dead.
//!
//! A number is a *generation* in its upper bits, and 16 bits below (`attach::locks` writes both
//! into a lock). Each life of a node takes a range of generations that begins behind that of the
//! life before, which it finds in a file, and not before the clock's: so neither a clock that goes
//! back nor a restart within a second repeats a number, nor does a file that was lost.

use std::io::ErrorKind;
use std::path::Path;
use std::time::{SystemTime, UNIX_EPOCH};

use rackbus_segment::SessionId;

/// The file in the host's folder that holds the first generation of the next life.
const FILE: &str = "sessions.next";

/// Generations that one life has: 2^28 sessions.
const GENERATIONS: u64 = 4096;

/// Of one life of a node. The default has none.
#[derive(Debug, Default)]
pub struct Numbers {
    next: u64,
    end: u64,
}

impl Numbers {
    /// Of a life that begins now, whose host has this folder.
    ///
    /// # Errors
    /// When the folder cannot be written to, or the file was not written by a node.
    pub fn of_new_life(folder: &Path, now: SystemTime) -> std::io::Result<Numbers> {
        let path = folder.join(FILE);
        let stored = match std::fs::read_to_string(&path) {
            Ok(text) => text.trim().parse::<u64>().map_err(|_| {
                let text = format!("{} holds no number; remove it", path.display());
                std::io::Error::new(ErrorKind::InvalidData, text)
            })?,
            Err(error) if error.kind() == ErrorKind::NotFound => 0,
            Err(error) => return Err(error),
        };
        let clock = now.duration_since(UNIX_EPOCH).unwrap_or_default().as_secs();
        let first = stored.max(clock) & u64::from(u32::MAX);
        let end = first + GENERATIONS;
        // Complete or not there: a half number would be a lower one.
        let new = folder.join(format!("{FILE}.new"));
        std::fs::write(&new, end.to_string())?;
        std::fs::rename(&new, &path)?;
        Ok(Numbers { next: first << 16 | 1, end: end << 16 })
    }

    /// The next one; `None` when this life has given out all of its own.
    pub fn next(&mut self) -> Option<SessionId> {
        let number = Some(self.next).filter(|next| *next < self.end)?;
        self.next += 1;
        Some(SessionId(number))
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn a_restarted_node_repeats_no_number() {
        let folder = tempfile::tempdir().unwrap();
        // At once, at the same second, after the clock went back, and long after.
        let mut last = SessionId(0);
        for second in [1_000_000, 1_000_000, 996_400, 1_003_600, 2_000_000] {
            let now = UNIX_EPOCH + Duration::from_secs(second);
            let mut numbers = Numbers::of_new_life(folder.path(), now).unwrap();
            for _ in 0..100_000 {
                let number = numbers.next().unwrap();
                assert!(number > last, "{number:?} after {last:?}");
                last = number;
            }
        }
    }

    #[test]
    fn without_its_file_a_node_gives_no_numbers() {
        assert_eq!(Numbers::default().next(), None);
        let mut last = Numbers { next: 7, end: 8 };
        assert_eq!((last.next(), last.next()), (Some(SessionId(7)), None));
    }

    #[test]
    fn a_file_of_somebody_else_is_not_guessed_at() {
        let folder = tempfile::tempdir().unwrap();
        std::fs::write(folder.path().join(FILE), "soon").unwrap();
        assert!(Numbers::of_new_life(folder.path(), UNIX_EPOCH).is_err());
    }
}
