//! The control plane's memory: an SQLite file with the records of the lending protocol.
//!
//! A change is on disk before anybody is told of it: one transaction for all records of a step,
//! synchronised. A control plane that is killed at any point finds, when it returns, a state that
//! it has been in.

use std::path::{Path, PathBuf};

use rackbus_lease::Record;
use rusqlite::{Connection, params};

/// Version of the file's layout, kept in SQLite's `user_version`.
const LAYOUT: i64 = 2;
/// The layout before, whose records are a part of today's.
const BEFORE: i64 = 1;

/// Why the state could not be read or stored.
#[derive(Debug, thiserror::Error)]
pub enum StoreError {
    /// The file, as SQLite sees it.
    #[error("{path}: {cause}")]
    Sqlite {
        /// The file.
        path: PathBuf,
        /// What is wrong.
        cause: rusqlite::Error,
    },
    /// The file is of a version that is not known here.
    #[error(
        "{path} has layout {found}, this version knows {LAYOUT}; use the version that wrote it"
    )]
    Layout {
        /// The file.
        path: PathBuf,
        /// Its layout.
        found: i64,
    },
    /// The file belongs to another rack.
    #[error("{path} is the state of rack {found}; give this rack a state directory of its own")]
    OtherRack {
        /// The file.
        path: PathBuf,
        /// Whose it is.
        found: String,
    },
    /// A record does not make sense.
    #[error("{path}: record {key} cannot be read: {cause}")]
    Record {
        /// The file.
        path: PathBuf,
        /// The record.
        key: String,
        /// What is wrong.
        cause: serde_json::Error,
    },
}

/// The open file.
#[derive(Debug)]
pub struct Store {
    path: PathBuf,
    connection: Connection,
}

impl Store {
    /// Opens the state of `rack` at `path`, or begins it.
    ///
    /// # Errors
    /// [`StoreError`]; the file is unchanged then.
    pub fn open(path: &Path, rack: &str) -> Result<Store, StoreError> {
        let sqlite = |cause| StoreError::Sqlite { path: path.to_owned(), cause };
        let connection = Connection::open(path).map_err(sqlite)?;
        // FULL: a commit is on disk when it returns, also in write-ahead mode.
        let pragmas =
            "PRAGMA journal_mode = WAL; PRAGMA synchronous = FULL; PRAGMA busy_timeout = 2000;";
        connection.execute_batch(pragmas).map_err(sqlite)?;
        let found: i64 =
            connection.query_row("PRAGMA user_version", [], |row| row.get(0)).map_err(sqlite)?;
        match found {
            0 => {
                let begin = format!(
                    "BEGIN;
                     CREATE TABLE rack (name TEXT NOT NULL);
                     CREATE TABLE record (key TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID;
                     PRAGMA user_version = {LAYOUT};"
                );
                connection.execute_batch(&begin).map_err(sqlite)?;
                connection.execute("INSERT INTO rack VALUES (?1)", [rack]).map_err(sqlite)?;
                connection.execute_batch("COMMIT").map_err(sqlite)?;
            }
            LAYOUT | BEFORE => {
                let found: String = connection
                    .query_row("SELECT name FROM rack", [], |r| r.get(0))
                    .map_err(sqlite)?;
                if found != rack {
                    return Err(StoreError::OtherRack { path: path.to_owned(), found });
                }
                // A version that knows less would not understand what is stored from now on.
                connection.pragma_update(None, "user_version", LAYOUT).map_err(sqlite)?;
            }
            found => return Err(StoreError::Layout { path: path.to_owned(), found }),
        }
        Ok(Store { path: path.to_owned(), connection })
    }

    /// Everything that was stored.
    ///
    /// # Errors
    /// [`StoreError`].
    pub fn load(&self) -> Result<Vec<Record>, StoreError> {
        let sqlite = |cause| self.sqlite(cause);
        let mut statement =
            self.connection.prepare("SELECT key, value FROM record").map_err(sqlite)?;
        let rows = statement
            .query_map([], |row| Ok((row.get::<_, String>(0)?, row.get::<_, String>(1)?)))
            .map_err(sqlite)?;
        let mut records = Vec::new();
        for row in rows {
            let (key, value) = row.map_err(sqlite)?;
            records.push(serde_json::from_str(&value).map_err(|cause| StoreError::Record {
                path: self.path.clone(),
                key,
                cause,
            })?);
        }
        Ok(records)
    }

    /// Stores records, all or none; on return they are on disk.
    ///
    /// # Errors
    /// [`StoreError`]; nothing is stored then.
    pub fn save(&mut self, records: &[Record]) -> Result<(), StoreError> {
        if records.is_empty() {
            return Ok(());
        }
        let path = &self.path;
        let sqlite = |cause| StoreError::Sqlite { path: path.clone(), cause };
        let transaction = self.connection.transaction().map_err(sqlite)?;
        for record in records {
            let key = record.key();
            if matches!(record, Record::Forgotten { .. }) {
                transaction.execute("DELETE FROM record WHERE key = ?1", [key]).map_err(sqlite)?;
                continue;
            }
            let value = serde_json::to_string(record).map_err(|cause| StoreError::Record {
                path: path.clone(),
                key: key.clone(),
                cause,
            })?;
            transaction
                .execute("INSERT OR REPLACE INTO record VALUES (?1, ?2)", params![key, value])
                .map_err(sqlite)?;
        }
        transaction.commit().map_err(sqlite)
    }

    fn sqlite(&self, cause: rusqlite::Error) -> StoreError {
        StoreError::Sqlite { path: self.path.clone(), cause }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rackbus_lease::HostRecord;

    #[test]
    fn what_is_stored_is_found_again() {
        let folder = std::env::temp_dir().join(format!("rackbus-store-{}", std::process::id()));
        std::fs::create_dir_all(&folder).unwrap();
        let path = folder.join("state.db");
        let record = |incarnation| {
            let (host, address) = ("alpha".to_owned(), "here".to_owned());
            Record::Host(HostRecord { host, incarnation, address })
        };
        let mut store = Store::open(&path, "demo").unwrap();
        store.save(&[record(1)]).unwrap();
        store.save(&[record(2)]).unwrap();
        drop(store);
        assert_eq!(Store::open(&path, "demo").unwrap().load().unwrap(), [record(2)]);
        assert!(matches!(Store::open(&path, "lab"), Err(StoreError::OtherRack { .. })));
        // What the version before wrote is read, and not by it any more.
        let set = |version: i64| {
            let file = Connection::open(&path).unwrap();
            file.pragma_update(None, "user_version", version).unwrap();
        };
        set(BEFORE);
        assert_eq!(Store::open(&path, "demo").unwrap().load().unwrap(), [record(2)]);
        let version = Connection::open(&path).unwrap();
        let version = version.query_row("PRAGMA user_version", [], |row| row.get::<_, i64>(0));
        assert_eq!(version.unwrap(), LAYOUT);
        set(LAYOUT + 1);
        assert!(matches!(Store::open(&path, "demo"), Err(StoreError::Layout { .. })));
        std::fs::remove_dir_all(&folder).unwrap();
    }
}
