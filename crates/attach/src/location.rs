//! Which host this process is on, and where its node is.

use std::path::{Path, PathBuf};

use crate::private::{NotPrivate, check_private, run_base_with};

/// The rack's run directory.
pub const RUN_DIR: &str = "RACKBUS_RUN_DIR";
/// Environment variable with the name of the host that a program runs on.
pub const HOST: &str = "RACKBUS_HOST";

/// A host of a rack, as seen from a process on it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Location {
    /// The rack's run directory.
    pub run_dir: PathBuf,
    /// Name of the host that the program runs on.
    pub host: String,
}

/// Why it is not known where the process is.
#[derive(Debug, thiserror::Error)]
pub enum LocationError {
    /// No rack runs on this machine.
    #[error("no rack runs on this machine (looked in {}); start one with `rackbus up`", .0.display())]
    NoRack(PathBuf),
    /// Several hosts or racks run here, and nobody said which is meant.
    #[error(
        "{what} run on this machine: {names}; start the program with `rackbus on HOST -- …`, or set {var}"
    )]
    Several {
        /// `several hosts`, `several racks`.
        what: &'static str,
        /// The names of the hosts that are running, separated by commas.
        names: String,
        /// The variable to set.
        var: &'static str,
    },
    /// The folder of racks, or the rack's, may be somebody else's.
    #[error("{0}; see that it is yours alone (chmod go-w), or choose another with {RUN_DIR}")]
    NotPrivate(#[from] NotPrivate),
}

impl Location {
    /// What the environment says (`RACKBUS_RUN_DIR`, `RACKBUS_HOST`); what it leaves out is looked for: the one
    /// rack, the one host that runs on this machine.
    ///
    /// # Errors
    /// [`LocationError`] when there is none, or more than one.
    pub fn from_environment() -> Result<Location, LocationError> {
        let var = |name| std::env::var_os(name).filter(|value| !value.is_empty());
        let run_dir = match var(RUN_DIR) {
            Some(dir) => PathBuf::from(dir),
            None => {
                let base = run_base_with(|base| !holding(base, "rack.json").is_empty());
                check_private(&base)?;
                only(&base, "rack.json", "several racks", RUN_DIR)?
            }
        };
        // Whose node it is that is found there, somebody else must not choose.
        check_private(&run_dir)?;
        let host = match var(HOST) {
            Some(host) => host.to_string_lossy().into_owned(),
            None => {
                let folder = only(&run_dir, "segments.sock", "several hosts", HOST)?;
                folder.file_name().unwrap_or_default().to_string_lossy().into_owned()
            }
        };
        Ok(Location { run_dir, host })
    }

    /// The socket of the host's node.
    pub fn socket(&self) -> PathBuf {
        self.run_dir.join(&self.host).join("segments.sock")
    }
}

/// Where a process finds its node.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum NodeAddress {
    /// By the socket of its node, on a host.
    Host(Location),
    /// In a virtual machine, through the file system that is mounted in this folder.
    Guest(PathBuf),
}

impl NodeAddress {
    /// What the environment says, as [`Location::from_environment`]; where it does not say anything and a
    /// rack's file system is mounted, this is a virtual machine.
    ///
    /// # Errors
    /// As there.
    pub fn from_environment() -> Result<NodeAddress, LocationError> {
        let said = |name| std::env::var_os(name).is_some_and(|value| !value.is_empty());
        if !said(RUN_DIR)
            && let Some(folder) = crate::guest::find()
        {
            return Ok(NodeAddress::Guest(folder));
        }
        Location::from_environment().map(NodeAddress::Host)
    }
}

impl From<&Location> for NodeAddress {
    fn from(location: &Location) -> NodeAddress {
        NodeAddress::Host(location.clone())
    }
}

/// The folders in `dir` that hold a file of the name `mark`, in order.
fn holding(dir: &Path, mark: &str) -> Vec<PathBuf> {
    let entries = std::fs::read_dir(dir).into_iter().flatten().flatten();
    let mut found: Vec<PathBuf> =
        entries.map(|entry| entry.path()).filter(|path| path.join(mark).exists()).collect();
    found.sort();
    found
}

/// The only folder in `dir` that has a file `mark`.
fn only(
    dir: &Path,
    mark: &str,
    what: &'static str,
    var: &'static str,
) -> Result<PathBuf, LocationError> {
    match holding(dir, mark).as_slice() {
        [one] => Ok(one.clone()),
        [] => Err(LocationError::NoRack(dir.to_owned())),
        several => {
            let names: Vec<_> = several
                .iter()
                .filter_map(|path| path.file_name())
                .map(|name| name.to_string_lossy())
                .collect();
            Err(LocationError::Several { what, names: names.join(", "), var })
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::{PermissionsExt, symlink};

    /// The environment is the process': the test runs itself with each.
    #[test]
    fn a_run_directory_that_others_can_change_is_not_believed() {
        const PLACE: &str = "RACKBUS_TEST_PLACE";
        if std::env::var_os(PLACE).is_some() {
            let error = Location::from_environment().unwrap_err();
            assert!(matches!(error, LocationError::NotPrivate(_)), "{error}");
            return;
        }
        let folder = std::env::temp_dir().join(format!("rackbus-place-{}", std::process::id()));
        let open = folder.join("rackbus");
        std::fs::create_dir_all(open.join("lab")).unwrap();
        std::fs::write(open.join("lab/rack.json"), "{}").unwrap();
        std::fs::set_permissions(&open, std::fs::Permissions::from_mode(0o777)).unwrap();
        let link = folder.join("link");
        symlink(&folder, &link).unwrap();
        for (name, value) in [(RUN_DIR, &open), (RUN_DIR, &link), ("XDG_RUNTIME_DIR", &folder)] {
            let mut again = std::process::Command::new(std::env::current_exe().unwrap());
            again.args([
                "--exact",
                "location::tests::a_run_directory_that_others_can_change_is_not_believed",
            ]);
            again.env_remove(RUN_DIR).env(HOST, "alpha").env(PLACE, "1").env(name, value);
            assert!(again.status().unwrap().success(), "{name} {}", value.display());
        }
        std::fs::remove_dir_all(&folder).unwrap();
    }
}
