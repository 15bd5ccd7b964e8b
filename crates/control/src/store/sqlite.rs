//! The state of a single control plane: an SQLite file.
//!
//! The version of its layout is SQLite's `user_version`. A file of an older version is upgraded in
//! place when it is opened, in one transaction; one of a newer version is left alone.
//!
//! It has private keys of certificate authorities: only its owner may read it, and what SQLite keeps beside it.

use std::ffi::c_int;
use std::io::{Error, ErrorKind};
use std::os::unix::fs::{OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::time::Duration;

use rusqlite::backup::Backup;
use rusqlite::{Connection, Transaction, params};
use serde::Serialize;
use serde::de::DeserializeOwned;

use super::{Commit, Store, StoreError, StoredState};
use crate::register::RegisterChange;

/// Version of the file's layout: how many upgrades it has had.
pub const LAYOUT: i64 = UPGRADES.len() as i64;

/// What makes a file of each version from one of the version before. The first begins an empty file.
const UPGRADES: [&str; 8] = [
    "CREATE TABLE rack (name TEXT NOT NULL);
     CREATE TABLE record (key TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID;",
    // Records of a kind that the version before does not know: the number of the next lease.
    "",
    "CREATE TABLE answer (key TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID;
     CREATE TABLE event (id INTEGER PRIMARY KEY, value TEXT NOT NULL);",
    // Records of a kind that the version before does not know: compositions.
    "",
    // The term in which the control plane speaks to nodes; where the state has gone, if it has.
    "CREATE TABLE term (value INTEGER NOT NULL);
     INSERT INTO term VALUES (0);
     CREATE TABLE moved (place TEXT NOT NULL);",
    // Certificates that were given out, and what is revoked.
    "CREATE TABLE certificate (key TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID;",
    // Entries of a kind that the version before does not know: certificate authorities that took the place of the first one.
    "",
    // Entries that the version before would write anew without what is new in them: for which key a certificate is.
    "",
];

/// Between two tries to copy a file that somebody else locks.
const COPY_PAUSE: Duration = Duration::from_millis(10);

/// A store in one SQLite file, open for as long as this lives.
#[derive(Debug)]
pub struct Sqlite {
    path: PathBuf,
    connection: Connection,
}

impl Sqlite {
    /// Opens the state of `rack` at `path`, or begins it.
    ///
    /// # Errors
    /// [`StoreError`]; the file is unchanged then.
    pub fn open(path: &Path, rack: &str) -> Result<Sqlite, StoreError> {
        let store = Sqlite::open_any(path, rack)?;
        match store.moved()? {
            None => Ok(store),
            Some(to) => Err(StoreError::Moved { place: path.display().to_string(), to }),
        }
    }

    /// The same, wherever the state may have gone.
    ///
    /// # Errors
    /// [`StoreError`]; the file is unchanged then.
    pub fn open_any(path: &Path, rack: &str) -> Result<Sqlite, StoreError> {
        let sqlite = |cause| StoreError::Sqlite { path: path.to_owned(), cause };
        keep_private(path)?;
        let mut connection = Connection::open(path).map_err(sqlite)?;
        connection.execute_batch("PRAGMA busy_timeout = 2000;").map_err(sqlite)?;
        let transaction = connection.transaction().map_err(sqlite)?;
        upgrade(&transaction, path, rack)?;
        transaction.commit().map_err(sqlite)?;
        // FULL: a commit is on disk when it returns, also in write-ahead mode.
        let pragmas = "PRAGMA journal_mode = WAL; PRAGMA synchronous = FULL;";
        connection.execute_batch(pragmas).map_err(sqlite)?;
        Ok(Sqlite { path: path.to_owned(), connection })
    }

    /// The state at `path`, wherever it may have gone, as it is at one moment: a copy in memory, so that a file of an older
    /// version stays one of that version, for those who use it.
    ///
    /// # Errors
    /// [`StoreError`].
    pub fn copied(path: &Path) -> Result<Sqlite, StoreError> {
        let sqlite = |cause| StoreError::Sqlite { path: path.to_owned(), cause };
        let rack = Sqlite::rack(path)?;
        let file = Connection::open(path).map_err(sqlite)?;
        let mut connection = Connection::open_in_memory().map_err(sqlite)?;
        let copy = Backup::new(&file, &mut connection).map_err(sqlite)?;
        copy.run_to_completion(c_int::MAX, COPY_PAUSE, None).map_err(sqlite)?;
        drop(copy);
        let transaction = connection.transaction().map_err(sqlite)?;
        upgrade(&transaction, path, &rack)?;
        transaction.commit().map_err(sqlite)?;
        Ok(Sqlite { path: path.to_owned(), connection })
    }

    /// Closes it with all of it in the file itself, and nothing in a log beside it.
    ///
    /// # Errors
    /// [`StoreError`]; then something of it may be in the log.
    pub fn close(self) -> Result<(), StoreError> {
        let sqlite = |cause| StoreError::Sqlite { path: self.path.clone(), cause };
        let checkpoint = "PRAGMA wal_checkpoint(TRUNCATE)";
        let busy: i64 =
            self.connection.query_row(checkpoint, [], |row| row.get(0)).map_err(sqlite)?;
        if busy != 0 {
            let code = rusqlite::ffi::Error::new(rusqlite::ffi::SQLITE_BUSY);
            let text = "somebody else has it open".to_owned();
            return Err(sqlite(rusqlite::Error::SqliteFailure(code, Some(text))));
        }
        self.connection.close().map_err(|(_, cause)| sqlite(cause))
    }

    fn sqlite(&self, cause: rusqlite::Error) -> StoreError {
        StoreError::Sqlite { path: self.path.clone(), cause }
    }

    /// Name of the rack whose state is in the file.
    ///
    /// # Errors
    /// [`StoreError`].
    pub fn rack(path: &Path) -> Result<String, StoreError> {
        let sqlite = |cause| StoreError::Sqlite { path: path.to_owned(), cause };
        let file = Connection::open(path).map_err(sqlite)?;
        file.query_row("SELECT name FROM rack", [], |row| row.get(0)).map_err(sqlite)
    }

    /// Whether nothing was ever lent or offered.
    ///
    /// # Errors
    /// [`StoreError`].
    pub fn is_empty(&self) -> Result<bool, StoreError> {
        let count = self.connection.query_row("SELECT COUNT(*) FROM record", [], |row| row.get(0));
        count.map(|count: i64| count == 0).map_err(|cause| self.sqlite(cause))
    }

    /// Where the state has gone, if it has.
    ///
    /// # Errors
    /// [`StoreError`].
    pub fn moved(&self) -> Result<Option<String>, StoreError> {
        let place = "SELECT place FROM moved";
        match self.connection.query_row(place, [], |row| row.get(0)) {
            Ok(to) => Ok(Some(to)),
            Err(rusqlite::Error::QueryReturnedNoRows) => Ok(None),
            Err(cause) => Err(self.sqlite(cause)),
        }
    }

    /// Notes that the state has gone to `place`: it is not opened any more.
    ///
    /// # Errors
    /// [`StoreError`].
    pub fn leave(&mut self, place: &str) -> Result<(), StoreError> {
        let left = self.connection.execute("INSERT INTO moved VALUES (?1)", [place]);
        left.map(drop).map_err(|cause| self.sqlite(cause))
    }

    fn term(&self) -> Result<u64, StoreError> {
        let found = self.connection.query_row("SELECT value FROM term", [], |row| row.get(0));
        found.map(|term: i64| term.unsigned_abs()).map_err(|cause| self.sqlite(cause))
    }

    fn read(&self) -> Result<StoredState, StoreError> {
        Ok(StoredState {
            term: self.term()?,
            records: self.values("record", "key")?,
            answers: self.values("answer", "key")?,
            certificates: self.values("certificate", "key")?,
            events: self.values("event", "id")?,
        })
    }

    /// All values of a table, by key.
    fn values<T: DeserializeOwned>(&self, table: &str, key: &str) -> Result<Vec<T>, StoreError> {
        let sqlite = |cause| self.sqlite(cause);
        let text = format!("SELECT CAST({key} AS TEXT), value FROM {table} ORDER BY {key}");
        let mut statement = self.connection.prepare(&text).map_err(sqlite)?;
        let row = |row: &rusqlite::Row<'_>| Ok((row.get(0)?, row.get(1)?));
        let rows = statement.query_map([], row).map_err(sqlite)?;
        let mut values = Vec::new();
        for row in rows {
            let (key, value): (String, String) = row.map_err(sqlite)?;
            values.push(serde_json::from_str(&value).map_err(|cause| StoreError::Value {
                path: self.path.clone(),
                key: format!("{table} {key}"),
                cause,
            })?);
        }
        Ok(values)
    }
}

/// Has the file at `path` be its owner's alone, before anything is in it. SQLite gives the files that it makes beside it the same
/// mode; those that an older version left there get it here. A database in memory, by SQLite's name for one, has no file.
fn keep_private(path: &Path) -> Result<(), StoreError> {
    if path == Path::new(":memory:") {
        return Ok(());
    }
    let private = |path: &Path| {
        let mode = std::fs::metadata(path)?.permissions().mode();
        match mode & 0o077 {
            0 => Ok(()),
            _ => std::fs::set_permissions(path, PermissionsExt::from_mode(mode & 0o700)),
        }
    };
    let refused = |path: PathBuf| move |cause: Error| StoreError::NotPrivate { path, cause };
    let made = std::fs::File::options().write(true).create_new(true).mode(0o600).open(path);
    match made {
        Err(cause) if cause.kind() != ErrorKind::AlreadyExists => {
            return Err(refused(path.to_owned())(cause));
        }
        _ => {}
    }
    private(path).map_err(refused(path.to_owned()))?;
    for path in [beside(path, "-wal"), beside(path, "-shm")] {
        match private(&path) {
            Err(cause) if cause.kind() != ErrorKind::NotFound => return Err(refused(path)(cause)),
            _ => {}
        }
    }
    Ok(())
}

/// The file that SQLite keeps beside the one at `path`, by what its name ends with.
pub(super) fn beside(path: &Path, end: &str) -> PathBuf {
    let mut name = path.as_os_str().to_owned();
    name.push(end);
    name.into()
}

/// Brings the file to today's layout.
fn upgrade(transaction: &Transaction<'_>, path: &Path, rack: &str) -> Result<(), StoreError> {
    let sqlite = |cause| StoreError::Sqlite { path: path.to_owned(), cause };
    let version = "PRAGMA user_version";
    let found: i64 = transaction.query_row(version, [], |row| row.get(0)).map_err(sqlite)?;
    let done = match usize::try_from(found) {
        Ok(done) if done <= UPGRADES.len() => done,
        _ => return Err(StoreError::Newer { path: path.to_owned(), found }),
    };
    if done > 0 {
        let name = "SELECT name FROM rack";
        let found: String = transaction.query_row(name, [], |row| row.get(0)).map_err(sqlite)?;
        if found != rack {
            return Err(StoreError::OtherRack { path: path.to_owned(), found });
        }
    }
    for step in &UPGRADES[done..] {
        transaction.execute_batch(step).map_err(sqlite)?;
    }
    if done == 0 {
        transaction.execute("INSERT INTO rack VALUES (?1)", [rack]).map_err(sqlite)?;
    }
    if (1..UPGRADES.len()).contains(&done) {
        tracing::info!(path = %path.display(), from = found, to = LAYOUT, "state file upgraded");
    }
    if done < UPGRADES.len() {
        // A version that knows less would not understand what is stored from now on.
        transaction.pragma_update(None, "user_version", LAYOUT).map_err(sqlite)?;
    }
    Ok(())
}

impl Store for Sqlite {
    fn load(&mut self) -> Result<StoredState, StoreError> {
        // All of one moment, whoever writes meanwhile.
        self.connection.execute_batch("BEGIN").map_err(|cause| self.sqlite(cause))?;
        let state = self.read();
        self.connection.execute_batch("COMMIT").map_err(|cause| self.sqlite(cause))?;
        state
    }

    fn begin(&mut self) -> Result<u64, StoreError> {
        self.raise_term(0)
    }

    fn raise_term(&mut self, above: u64) -> Result<u64, StoreError> {
        let term = self.term()?.max(above).min(i64::MAX as u64 - 1) + 1;
        let set = self.connection.execute("UPDATE term SET value = ?1", [term as i64]);
        set.map_err(|cause| self.sqlite(cause))?;
        Ok(term)
    }

    fn commit(&mut self, commit: &Commit) -> Result<(), StoreError> {
        if commit.is_empty() {
            return Ok(());
        }
        let path = self.path.clone();
        let sqlite = |cause| StoreError::Sqlite { path: path.clone(), cause };
        let transaction = self.connection.transaction().map_err(sqlite)?;
        let delete = |table: &str, key: &str| {
            let text = format!("DELETE FROM {table} WHERE key = ?1");
            transaction.prepare_cached(&text)?.execute([key]).map(drop)
        };
        let put = |table: &str, key: &dyn rusqlite::ToSql, value: String| {
            let text = format!("INSERT OR REPLACE INTO {table} VALUES (?1, ?2)");
            transaction.prepare_cached(&text)?.execute(params![key, value]).map(drop)
        };
        for record in &commit.records {
            let key = record.key();
            match record.removes() {
                true => delete("record", &key).map_err(sqlite)?,
                false => put("record", &key, text(&path, &key, record)?).map_err(sqlite)?,
            }
        }
        for answer in &commit.answers {
            let value = text(&path, &answer.key, answer)?;
            put("answer", &answer.key, value).map_err(sqlite)?;
        }
        for key in &commit.forgotten_keys {
            delete("answer", key).map_err(sqlite)?;
        }
        for change in &commit.certificates {
            match change {
                RegisterChange::Put(entry) => {
                    let (key, value) = (entry.key(), text(&path, &entry.key(), entry)?);
                    put("certificate", &key, value).map_err(sqlite)?;
                }
                RegisterChange::Forget(entry) => {
                    delete("certificate", &entry.key()).map_err(sqlite)?
                }
            }
        }
        for event in &commit.events {
            let id = i64::try_from(event.id).unwrap_or(i64::MAX);
            put("event", &id, text(&path, "event", event)?).map_err(sqlite)?;
        }
        for id in &commit.forgotten_events {
            let id = i64::try_from(*id).unwrap_or(i64::MAX);
            transaction.execute("DELETE FROM event WHERE id = ?1", [id]).map_err(sqlite)?;
        }
        if commit.first_event > 0 {
            let first = i64::try_from(commit.first_event).unwrap_or(i64::MAX);
            let text = "DELETE FROM event WHERE id < ?1";
            transaction.execute(text, [first]).map_err(sqlite)?;
        }
        transaction.commit().map_err(sqlite)
    }
}

fn text(path: &Path, key: &str, value: &impl Serialize) -> Result<String, StoreError> {
    serde_json::to_string(value).map_err(|cause| StoreError::Value {
        path: path.to_owned(),
        key: key.to_owned(),
        cause,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A file as an older version left it: its schema, its rows and its number.
    fn landed(path: &Path, dump: &str) {
        Connection::open(path).unwrap().execute_batch(dump).unwrap();
    }

    fn layout(path: &Path) -> i64 {
        let file = Connection::open(path).unwrap();
        file.query_row("PRAGMA user_version", [], |row| row.get(0)).unwrap()
    }

    /// What a file of each older version has: records, answers and events, and the term.
    ///
    /// Those from version 3 on were made from that of version 2 by the upgrades up to theirs, and then have what the
    /// control planes of their version stored, as these wrote it.
    const OLDER: [(i64, &str, [usize; 3], u64); 7] = [
        (1, include_str!("../../tests/layouts/1.sql"), [5, 0, 0], 0),
        (2, include_str!("../../tests/layouts/2.sql"), [6, 0, 0], 0),
        (3, include_str!("../../tests/layouts/3.sql"), [6, 3, 3], 0),
        (4, include_str!("../../tests/layouts/4.sql"), [7, 2, 3], 0),
        (5, include_str!("../../tests/layouts/5.sql"), [8, 2, 4], 7),
        (6, include_str!("../../tests/layouts/6.sql"), [8, 2, 4], 7),
        (7, include_str!("../../tests/layouts/7.sql"), [8, 2, 4], 7),
    ];

    #[test]
    fn files_of_older_versions_are_upgraded_in_place() {
        let folder = tempfile::tempdir().unwrap();
        assert_eq!(OLDER.map(|(version, ..)| version), std::array::from_fn(|at| at as i64 + 1));
        assert_eq!(OLDER.len() as i64, LAYOUT - 1, "a file of the version before is to be added");
        for (version, dump, counts, term) in OLDER {
            let path = folder.path().join(format!("{version}.db"));
            landed(&path, dump);
            assert_eq!(layout(&path), version);
            let refused = Sqlite::open(&path, "lab").unwrap_err();
            assert!(matches!(refused, StoreError::OtherRack { .. }), "{refused}");
            assert_eq!(layout(&path), version, "a refused file is left alone");
            let mut store = Sqlite::open(&path, "demo").unwrap();
            let state = store.load().unwrap();
            let found = [state.records.len(), state.answers.len(), state.events.len()];
            assert_eq!((found, state.term), (counts, term), "{version}: {state:?}");
            assert_eq!(state.certificates.is_empty(), version < 6, "{version}: {state:?}");
            assert_eq!(layout(&path), LAYOUT);
            let commit = Commit {
                records: state.records.clone(),
                answers: state.answers.clone(),
                events: state.events.clone(),
                ..Commit::default()
            };
            store.commit(&commit).unwrap();
            assert_eq!(store.begin().unwrap(), term + 1);
            drop(store);
            let again = Sqlite::open(&path, "demo").unwrap().load().unwrap();
            assert_eq!(again.records, state.records);
            assert_eq!((again.answers, again.events), (state.answers, state.events));
        }
    }

    /// The modes of the file and of those beside it, by what their names end with.
    fn modes(path: &Path) -> [u32; 3] {
        ["", "-wal", "-shm"].map(|end| {
            let found = std::fs::metadata(beside(path, end)).unwrap();
            found.permissions().mode() & 0o777
        })
    }

    #[test]
    fn a_database_in_memory_leaves_no_file() {
        Sqlite::open(Path::new(":memory:"), "lab").unwrap();
        assert!(!Path::new(":memory:").exists());
    }

    #[test]
    fn only_its_owner_may_read_a_file_and_those_beside_it() {
        rustix::process::umask(rustix::fs::Mode::from_raw_mode(0o022));
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("control.db");
        let open = Sqlite::open(&path, "demo").unwrap();
        assert_eq!(modes(&path), [0o600; 3]);
        // As an older version left them; somebody has them open still.
        for end in ["", "-wal", "-shm"] {
            let mode = PermissionsExt::from_mode(0o644);
            std::fs::set_permissions(beside(&path, end), mode).unwrap();
        }
        drop(Sqlite::open(&path, "demo").unwrap());
        assert_eq!(modes(&path), [0o600; 3]);
        drop(open);
    }

    #[test]
    fn a_file_of_a_newer_version_is_refused_and_left_alone() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("state.db");
        drop(Sqlite::open(&path, "demo").unwrap());
        for newer in [LAYOUT + 1, -1] {
            let file = Connection::open(&path).unwrap();
            file.pragma_update(None, "user_version", newer).unwrap();
            drop(file);
            let before = std::fs::read(&path).unwrap();
            let refused = Sqlite::open(&path, "demo").unwrap_err().to_string();
            assert!(refused.contains("newer version of rackbus"), "{refused}");
            assert!(refused.contains("state directory"), "it says what to do: {refused}");
            assert_eq!(std::fs::read(&path).unwrap(), before);
        }
    }
}
