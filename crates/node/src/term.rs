//! The newest term of a leader that this node was spoken to in, also by former lives of it.

use std::io::{self, Write};
use std::path::PathBuf;

/// The newest term, and the file that keeps it.
#[derive(Debug, Clone)]
pub struct NewestTerm {
    path: PathBuf,
    newest: u64,
}

/// Greater than every term: none is new enough.
const UNKNOWN: u64 = u64::MAX;

impl NewestTerm {
    /// What the file has; 0 where there is none. Where it cannot be read, no term is new enough: a leader that was
    /// replaced must not be obeyed.
    pub fn open(path: PathBuf) -> NewestTerm {
        let newest = match std::fs::read_to_string(&path) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(0),
            Err(error) => Err(error.to_string()),
            Ok(text) => text.trim().parse().map_err(|_| "it has no number".to_owned()),
        };
        let newest = newest.unwrap_or_else(|error| {
            tracing::error!(
                path = %path.display(),
                error,
                "the newest term of a control plane is not known, so none is obeyed; put it right, or remove the file \
                 if no control plane was ever replaced"
            );
            UNKNOWN
        });
        NewestTerm { path, newest }
    }

    /// The newest term that was heard; 0 before any.
    pub fn newest(&self) -> u64 {
        self.newest
    }

    /// Whether the newest term is known. Where its file cannot be read, no control plane is obeyed.
    pub fn is_known(&self) -> bool {
        self.newest != UNKNOWN
    }

    /// Whether what is said in `term` may be taken: no later one is known. A later one is kept before that is said.
    ///
    /// # Errors
    /// When it cannot be kept; then nothing of it may be taken.
    pub fn take(&mut self, term: u64) -> io::Result<bool> {
        if term > self.newest {
            let new = self.path.with_extension("new");
            let mut file = std::fs::File::create(&new)?;
            writeln!(file, "{term}")?;
            file.sync_all()?;
            std::fs::rename(&new, &self.path)?;
            if let Some(folder) = self.path.parent() {
                std::fs::File::open(folder)?.sync_all()?;
            }
            self.newest = term;
        }
        Ok(term == self.newest)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_earlier_term_is_refused_also_after_a_restart() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("control.term");
        let mut term = NewestTerm::open(path.clone());
        assert!(term.take(0).unwrap(), "a control plane that knows of no terms");
        assert!(term.take(3).unwrap() && term.take(3).unwrap());
        assert!(!term.take(2).unwrap() && !term.take(0).unwrap());
        let mut again = NewestTerm::open(path);
        assert_eq!(again.newest(), 3);
        assert!(!again.take(2).unwrap() && again.take(4).unwrap());
    }

    #[test]
    fn no_term_is_taken_where_the_newest_cannot_be_read() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("control.term");
        std::fs::write(&path, "no number").unwrap();
        let mut term = NewestTerm::open(path.clone());
        assert!(!term.is_known() && !term.take(3).unwrap());
        std::fs::write(&path, "3\n").unwrap();
        assert!(NewestTerm::open(path).is_known());
    }

    #[test]
    fn what_cannot_be_kept_is_not_taken() {
        let folder = tempfile::tempdir().unwrap();
        let mut term = NewestTerm::open(folder.path().join("none/control.term"));
        assert!(term.take(3).is_err() && term.newest() == 0);
    }
}
