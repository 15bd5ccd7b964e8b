//! States that programs of this and of earlier versions wrote, in files beside the tests which continue from them.
//!
//! There is one file of each version that can be read, `NAME-VERSION.json`. A file is never changed: a new version adds
//! one. `RACKBUS_UPDATE=1` makes a test write the file of the newest version from what it has just saved, where there is
//! none; a file that is there stays as it is.
//!
//! A state whose fields change while its version stays would be refused by programs that know this version, or misread.
//! So what is saved now is compared with the file of its version: both have the same fields, of the same kinds.

use std::collections::BTreeSet;
use std::path::PathBuf;

use serde_json::Value;

/// The files of the states of one kind.
#[derive(Debug, Clone)]
pub struct StoredStates {
    folder: PathBuf,
    name: &'static str,
    newest: u32,
}

impl StoredStates {
    /// Those of `name` in `folder`, which this program writes in version `newest`.
    pub fn new(folder: impl Into<PathBuf>, name: &'static str, newest: u32) -> StoredStates {
        StoredStates { folder: folder.into(), name, newest }
    }

    fn path(&self, version: u32) -> PathBuf {
        self.folder.join(format!("{}-{version}.json", self.name))
    }

    /// What a program of `version` wrote.
    ///
    /// # Panics
    /// When there is no such file.
    pub fn read(&self, version: u32) -> String {
        let path = self.path(version);
        std::fs::read_to_string(&path).unwrap_or_else(|error| {
            panic!(
                "{}: {error}; RACKBUS_UPDATE=1 writes that of the newest version",
                path.display()
            )
        })
    }

    /// Compares what was `saved` just now with the file of its version.
    ///
    /// # Panics
    /// When one of them has a field that the other has not, or one of another kind.
    pub fn compare(&self, saved: &[u8]) {
        let now: Value = serde_json::from_slice(saved).expect("a state is JSON");
        let path = self.path(self.newest);
        if std::env::var_os("RACKBUS_UPDATE").is_some() && !path.exists() {
            let text = serde_json::to_string_pretty(&now).expect("it was read just now");
            std::fs::write(&path, text + "\n").expect("the file can be written");
        }
        let was = serde_json::from_str(&self.read(self.newest)).expect("a stored state is JSON");
        let (now, was) = (fields(&now), fields(&was));
        let added: Vec<_> = now.difference(&was).collect();
        let missing: Vec<_> = was.difference(&now).collect();
        assert!(
            added.is_empty() && missing.is_empty(),
            "{} version {} is written with {added:?} and without {missing:?}: if this is meant, raise \
             the version, let the older one be read, and add a file with RACKBUS_UPDATE=1",
            self.name,
            self.newest,
        );
    }
}

/// The fields of a value, each with where it is and its kind. All elements of an array are in the same place.
fn fields(value: &Value) -> BTreeSet<String> {
    fn add(value: &Value, place: &str, fields: &mut BTreeSet<String>) {
        let kind = match value {
            Value::Object(inside) => {
                inside.iter().for_each(|(name, it)| add(it, &format!("{place}.{name}"), fields));
                "fields"
            }
            Value::Array(inside) => {
                inside.iter().for_each(|it| add(it, &format!("{place}[]"), fields));
                "list"
            }
            Value::Null => "nothing",
            Value::Bool(_) => "truth",
            Value::Number(_) => "number",
            Value::String(_) => "text",
        };
        fields.insert(format!("{place}: {kind}"));
    }
    let mut all = BTreeSet::new();
    add(value, "", &mut all);
    all
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_state_with_other_fields_is_not_the_one_of_its_version() {
        let name = format!("rackbus-stored-{}", std::process::id());
        let folder = std::env::temp_dir().join(name);
        std::fs::create_dir_all(&folder).unwrap();
        let was =
            r#"{"version": 2, "queues": [{"head": 1, "on": true}, {"head": 2, "on": false}]}"#;
        std::fs::write(folder.join("state-2.json"), was).unwrap();
        let states = StoredStates::new(&folder, "state", 2);
        let compared = |now: &str| {
            std::panic::catch_unwind(|| states.compare(now.as_bytes()))
                .map_err(|panic| panic.downcast_ref::<String>().cloned().unwrap())
        };
        compared(r#"{"version": 2, "queues": [{"head": 7, "on": true}]}"#).unwrap();
        for (now, said) in [
            (r#"{"version": 2, "queues": [{"head": 1, "on": 1}]}"#, ".queues[].on: number"),
            (r#"{"version": 2, "queues": [{"head": 1}]}"#, "without [\".queues[].on: truth\"]"),
            (
                r#"{"version": 2, "queues": [{"head": 1, "on": true, "tail": 1}]}"#,
                "with [\".queues[].tail: number\"]",
            ),
        ] {
            let refused = compared(now).unwrap_err();
            assert!(refused.contains(said), "{refused}");
        }
        std::fs::remove_dir_all(&folder).unwrap();
    }
}
