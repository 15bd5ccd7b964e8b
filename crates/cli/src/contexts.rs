//! Contexts: racks that this user has logged in to, each with where its control planes are and the user's certificate.
//!
//! They are in the user's configuration directory, `$XDG_CONFIG_HOME/rackbus` or `~/.config/rackbus`, readable by the
//! user alone. The one that is named (`--context`, or the environment) is used; else the rack of this machine that is
//! named; else the current context, if there is one. A certificate that has half of its time behind it is renewed when
//! it is used.

use std::fs;
use std::path::{Path, PathBuf};
use std::time::{Duration, UNIX_EPOCH};

use rackbus_control::ControlClient;
use rackbus_control::leadership::election::Member;
use rackbus_identity::{
    CertificateRequest, Certified, Credentials, CredentialsError, write_private,
};
use rustix::fs::FlockOperation;
use rustix::io::Errno;
use serde::{Deserialize, Serialize};

use crate::Common;
use crate::output::Failure;
use crate::paths::make_private;
use crate::remote::address_of;

/// The environment variable with the name of the context that commands use.
pub const CONTEXT: &str = "RACKBUS_CONTEXT";
/// The rack of this machine, where a context is named.
pub const LOCAL: &str = "local";
/// How long a renewal may take that does not hinder anybody.
const RENEWAL: Duration = Duration::from_secs(5);
/// What is done about a certificate that is of no more use.
pub const AGAIN: &str =
    "ask an administrator for a token (`rackbus token --user NAME --role ROLE`), and log in again";

/// A rack that the user has logged in to.
#[derive(Debug, Clone)]
pub struct RackContext {
    /// The name that the user gave it, which is that of its folder.
    pub name: String,
    folder: PathBuf,
    /// What is noted of the rack.
    pub noted: Noted,
}

/// What is noted of a rack beside the certificate.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Noted {
    /// Name of the rack.
    pub rack: String,
    /// Its control planes, each as `HOST:PORT`.
    pub control_planes: Vec<String>,
}

impl Noted {
    /// Notes the control planes that there are, after those that the user named.
    pub fn learn(&mut self, members: &[Member]) {
        for address in members.iter().filter_map(|member| address_of(&member.url).ok()) {
            if !self.control_planes.contains(&address) {
                self.control_planes.push(address);
            }
        }
    }
}

/// Where contexts are kept.
#[derive(Debug, Clone)]
pub struct ContextStore {
    folder: PathBuf,
}

impl ContextStore {
    /// The contexts of the user who runs this process.
    ///
    /// # Errors
    /// When the user has no directory for them.
    pub fn own() -> Result<ContextStore, Failure> {
        let var = |name| std::env::var_os(name).filter(|v| !v.is_empty()).map(PathBuf::from);
        let base = var("XDG_CONFIG_HOME").or_else(|| var("HOME").map(|home| home.join(".config")));
        let none = || Failure::new("you have no configuration directory", "set HOME");
        Ok(ContextStore { folder: base.ok_or_else(none)?.join("rackbus") })
    }

    fn of(&self, name: &str) -> PathBuf {
        self.folder.join("contexts").join(name)
    }

    /// The names of all, in order.
    pub fn names(&self) -> Vec<String> {
        let entries = fs::read_dir(self.folder.join("contexts")).into_iter().flatten().flatten();
        // Without this there is none: it may be about to be made.
        let whole = entries.filter(|entry| entry.path().join("context.json").exists());
        let names = whole.filter_map(|entry| entry.file_name().into_string().ok());
        let mut names: Vec<String> = names.filter(|name| check_name(name).is_ok()).collect();
        names.sort();
        names
    }

    /// The one that is used where none is named.
    ///
    /// # Errors
    /// When that cannot be read, or names none: what was meant for another rack is not done to that of this machine.
    pub fn current(&self) -> Result<Option<String>, Failure> {
        let path = self.folder.join("current");
        let wrong = |cause: String| {
            let remedy = "choose one anew: `rackbus context use NAME`, or `local`";
            Failure::new(format!("{}: {cause}", path.display()), remedy)
        };
        let name = match fs::read_to_string(&path) {
            Ok(name) => name.trim().to_owned(),
            Err(cause) if cause.kind() == std::io::ErrorKind::NotFound => return Ok(None),
            Err(cause) => return Err(wrong(cause.to_string())),
        };
        match check_name(&name).is_ok() && self.of(&name).join("context.json").exists() {
            true => Ok(Some(name)),
            false => Err(wrong(format!("there is no context {name:?}"))),
        }
    }

    /// Has `name` used where none is named; or none.
    ///
    /// # Errors
    /// When that cannot be written, or there is no such context.
    pub fn set_current(&self, name: Option<&str>) -> Result<(), Failure> {
        let path = self.folder.join("current");
        let Some(name) = name else {
            return match fs::remove_file(&path) {
                Err(cause) if cause.kind() != std::io::ErrorKind::NotFound => {
                    Err(unwritable(&path, &cause))
                }
                _ => Ok(()),
            };
        };
        self.get(name)?;
        write_private(&path, name).map_err(|cause| unwritable(&path, &cause))
    }

    /// The context of this name.
    ///
    /// # Errors
    /// When there is none, or it cannot be read.
    pub fn get(&self, name: &str) -> Result<RackContext, Failure> {
        check_name(name)?;
        let folder = self.of(name);
        let path = folder.join("context.json");
        let text = match fs::read(&path) {
            Ok(text) => text,
            Err(cause) if cause.kind() == std::io::ErrorKind::NotFound => {
                let known = self.names().join(", ");
                let remedy = match known.is_empty() {
                    true => "log in: `rackbus login https://control:7420 --token-file FILE`".into(),
                    false => format!("there are {known}; `rackbus login` makes another"),
                };
                return Err(Failure::usage(format!("there is no context {name}"), remedy));
            }
            Err(cause) => return Err(unreadable(&path, &cause.to_string())),
        };
        let noted = noted_of(&path, &text)?;
        Ok(RackContext { name: name.to_owned(), folder, noted })
    }

    /// Makes the folder for them, so that it is known early where that cannot be.
    ///
    /// # Errors
    /// Why not.
    pub fn prepare(&self) -> Result<(), Failure> {
        make_private(&self.folder)
    }

    /// Keeps a context, in the place of one of the same name.
    ///
    /// # Errors
    /// When that cannot be written.
    pub fn put(
        &self,
        name: &str,
        noted: Noted,
        credentials: &Credentials,
    ) -> Result<RackContext, Failure> {
        check_name(name)?;
        let folder = self.of(name);
        make_private(&self.folder)?;
        make_private(&folder)?;
        let context = RackContext { name: name.to_owned(), folder, noted };
        let _lock = context.lock(FlockOperation::LockExclusive)?;
        // Who had the lock may have removed it.
        make_private(&context.folder)?;
        // What it is known by comes last: without it there is no context.
        credentials.save(&context.folder).map_err(unusable)?;
        context.note()?;
        Ok(context)
    }

    /// Forgets a context, with its certificate and key.
    ///
    /// # Errors
    /// When there is none, or it cannot be removed.
    pub fn remove(&self, name: &str) -> Result<(), Failure> {
        check_name(name)?;
        let folder = self.of(name);
        if !folder.exists() {
            return self.get(name).map(drop);
        }
        if fs::read_to_string(self.folder.join("current")).is_ok_and(|it| it.trim() == name) {
            self.set_current(None)?;
        }
        // What is noted of it may be damaged, and is not needed for this.
        let _lock = lock(&folder, FlockOperation::LockExclusive)?;
        fs::remove_dir_all(&folder).map_err(|cause| unwritable(&folder, &cause))
    }
}

/// Whether this can be the name of a context, and so of a folder.
///
/// # Errors
/// That it cannot.
pub fn check_name(name: &str) -> Result<(), Failure> {
    let plain = |c: char| c.is_ascii_alphanumeric() || "._-".contains(c);
    let good = (1..=64).contains(&name.len()) && name.chars().all(plain) && !name.starts_with('.');
    match good && name != LOCAL {
        true => Ok(()),
        false => Err(Failure::usage(
            format!("{name:?} cannot be the name of a context"),
            "take up to 64 letters, digits, dots, underscores and hyphens, and not `local`",
        )),
    }
}

/// A name for the context of this rack, where the user gives none.
pub fn name_for(rack: &str) -> String {
    if check_name(rack).is_ok() {
        return rack.to_owned();
    }
    let plain = |c: char| if c.is_ascii_alphanumeric() || "._-".contains(c) { c } else { '-' };
    format!("rack-{}", rack.chars().take(40).map(plain).collect::<String>())
}

/// The context that a command means; none where it means the rack of this machine.
///
/// # Errors
/// When the one that is named is not there.
pub fn chosen(common: &Common) -> Result<Option<RackContext>, Failure> {
    match &common.context {
        Some(name) if name == LOCAL => Ok(None),
        Some(name) => ContextStore::own()?.get(name).map(Some),
        None if common.run_dir.is_some() || common.rack.is_some() => Ok(None),
        None => {
            let Ok(contexts) = ContextStore::own() else { return Ok(None) };
            contexts.current()?.map(|name| contexts.get(&name)).transpose()
        }
    }
}

/// Refuses a context that is named to a command that asks nodes of this machine.
///
/// # Errors
/// That one is named.
pub fn refuse_named(common: &Common) -> Result<(), Failure> {
    match common.context.as_deref() {
        None | Some(LOCAL) => Ok(()),
        Some(name) => Err(Failure::usage(
            format!("this works on the machine of a host only, and not by context {name}"),
            format!("do it there, without --context and {CONTEXT}"),
        )),
    }
}

impl RackContext {
    /// The certificate that is kept.
    ///
    /// # Errors
    /// When it cannot be read.
    pub fn credentials(&self) -> Result<Credentials, Failure> {
        let none = || unreadable(&self.folder, "it has no certificate");
        Credentials::load(&self.folder).map_err(unusable)?.ok_or_else(none)
    }

    /// A client of the rack's control plane, as the user; the certificate is renewed if it is time for that, or the rack has
    /// other authorities than it was made by.
    ///
    /// # Errors
    /// When the certificate is of no more use.
    pub async fn client(&self) -> Result<ControlClient, Failure> {
        let mut credentials = self.credentials()?;
        if credentials.is_over() {
            let Certified { until, .. } = credentials.certified();
            let error = format!(
                "your certificate for rack {} was good until {}",
                self.noted.rack,
                moment(*until)
            );
            return Err(Failure::new(error, AGAIN));
        }
        let of_rack = match credentials.is_due() {
            true => Vec::new(),
            false => self.authorities(&credentials).await,
        };
        if credentials.is_due() || !credentials.are_of(&of_rack) {
            // Where that fails, the one that there is does for now.
            match tokio::time::timeout(RENEWAL, self.renewed(&of_rack)).await {
                Ok(Ok(renewed)) => credentials = renewed.unwrap_or(credentials),
                Ok(Err(failure)) => self.not_renewed(&credentials, &failure.error),
                Err(_) => {
                    self.not_renewed(&credentials, "the control plane did not answer in time")
                }
            }
        }
        Ok(self.client_of(&credentials))
    }

    /// The authorities that the rack has now, as far as its control plane says that in time.
    async fn authorities(&self, credentials: &Credentials) -> Vec<String> {
        let client = self.client_of(credentials);
        let asked = tokio::time::timeout(RENEWAL, client.authorities()).await;
        asked.ok().and_then(Result::ok).unwrap_or_default()
    }

    fn client_of(&self, credentials: &Credentials) -> ControlClient {
        ControlClient::with_tls(&self.noted.control_planes, credentials.client().clone())
    }

    /// Says so. A command has one client, so it is said once.
    fn not_renewed(&self, credentials: &Credentials, cause: &str) {
        let until = moment(credentials.certified().until);
        eprintln!(
            "rackbus: your certificate for rack {}, good until {until}, could not be renewed: {cause}",
            self.noted.rack
        );
    }

    /// Keeps other processes from changing it until what is returned is dropped. Nothing where another one does, and
    /// this is not to wait for it.
    fn lock(&self, operation: FlockOperation) -> Result<Option<fs::File>, Failure> {
        lock(&self.folder, operation)
    }

    /// The next certificate, and where the control planes are now. Nothing where another process gets it just now.
    async fn renewed(&self, of_rack: &[String]) -> Result<Option<Credentials>, Failure> {
        let lock = self.lock(FlockOperation::NonBlockingLockExclusive)?;
        let Some(_lock) = lock else { return Ok(None) };
        let current = self.credentials()?;
        if !current.is_due() && current.are_of(of_rack) {
            return Ok(Some(current));
        }
        let client = self.client_of(&current);
        let request = CertificateRequest::new().map_err(unusable)?;
        let certificates = client.renew(request.text()).await?;
        let next = request.answered(&certificates);
        let next = next.map_err(unusable)?;
        // Who does not heed the lock, an older version say, may have logged in again or removed it meanwhile.
        let on_disk = self.credentials()?;
        if on_disk.certified().serial != current.certified().serial {
            return Ok(Some(on_disk));
        }
        next.save(&self.folder).map_err(unusable)?;
        // Where the control planes are is learned another time, where that fails.
        if let Ok(known) = client.control().await {
            self.learn_locked(&known.members)?;
        }
        Ok(Some(next))
    }

    /// Notes the control planes that there are, beside what is noted now.
    ///
    /// # Errors
    /// When that cannot be read or written.
    pub fn learn(&self, members: &[Member]) -> Result<(), Failure> {
        let _lock = self.lock(FlockOperation::LockExclusive)?;
        self.learn_locked(members)
    }

    fn learn_locked(&self, members: &[Member]) -> Result<(), Failure> {
        let path = self.folder.join("context.json");
        let text = fs::read(&path).map_err(|cause| unreadable(&path, &cause.to_string()))?;
        let before = noted_of(&path, &text)?;
        let mut noted = before.clone();
        noted.learn(members);
        match noted == before {
            true => Ok(()),
            false => RackContext { noted, ..self.clone() }.note(),
        }
    }

    fn note(&self) -> Result<(), Failure> {
        let path = self.folder.join("context.json");
        let text = serde_json::to_string_pretty(&self.noted).unwrap_or_default();
        write_private(&path, &text).map_err(|cause| unwritable(&path, &cause))
    }
}

/// Locks the context in `folder`, as [`RackContext::lock`] says.
fn lock(folder: &Path, operation: FlockOperation) -> Result<Option<fs::File>, Failure> {
    let path = folder.join("renewal");
    let lock = fs::File::options().create(true).append(true).open(&path);
    let lock = lock.map_err(|cause| unwritable(&path, &cause))?;
    match rustix::io::retry_on_intr(|| rustix::fs::flock(&lock, operation)) {
        Ok(()) => Ok(Some(lock)),
        Err(Errno::WOULDBLOCK) => Ok(None),
        Err(errno) => Err(unwritable(&path, &errno.into())),
    }
}

/// A moment in seconds since 1970, for people.
pub fn moment(seconds: u64) -> String {
    humantime::format_rfc3339_seconds(UNIX_EPOCH + Duration::from_secs(seconds)).to_string()
}

fn noted_of(path: &Path, text: &[u8]) -> Result<Noted, Failure> {
    serde_json::from_slice(text).map_err(|cause| unreadable(path, &cause.to_string()))
}

fn unreadable(path: &Path, cause: &str) -> Failure {
    let remedy = "remove it with `rackbus context remove`, and log in again";
    Failure::new(format!("{}: {cause}", path.display()), remedy)
}

fn unwritable(path: &Path, cause: &std::io::Error) -> Failure {
    Failure::new(format!("{}: {cause}", path.display()), "see to the folder")
}

/// Why a certificate cannot be used.
pub fn unusable(error: CredentialsError) -> Failure {
    Failure::new(error.to_string(), AGAIN)
}

#[cfg(test)]
mod tests {
    use rackbus_identity::{CertificateAuthority, Person, Role, Subject};

    use super::*;

    fn noted(rack: &str) -> Noted {
        Noted { rack: rack.to_owned(), control_planes: vec!["control:7420".to_owned()] }
    }

    fn credentials() -> Credentials {
        let ann = Person { user: "ann".to_owned(), role: Role::Reader };
        CertificateAuthority::generate("lab").unwrap().issue(&Subject::Person(ann)).unwrap()
    }

    #[test]
    fn contexts_are_kept_used_and_removed() {
        let folder = tempfile::tempdir().unwrap();
        let contexts = ContextStore { folder: folder.path().join("rackbus") };
        assert!(contexts.names().is_empty() && contexts.current().unwrap().is_none());
        assert!(contexts.get("lab").unwrap_err().remedy.contains("rackbus login"));
        contexts.put("lab", noted("lab"), &credentials()).unwrap();
        contexts.put("other", noted("lab2"), &credentials()).unwrap();
        assert_eq!(contexts.names(), ["lab", "other"]);
        assert_eq!(contexts.get("lab").unwrap().noted, noted("lab"));
        contexts.set_current(Some("lab")).unwrap();
        assert_eq!(contexts.current().unwrap().as_deref(), Some("lab"));
        assert!(contexts.set_current(Some("none")).is_err());
        contexts.remove("lab").unwrap();
        let current = contexts.current().unwrap();
        assert_eq!((current, contexts.names()), (None, vec!["other".to_owned()]));
        assert!(contexts.remove("lab").is_err());
        contexts.set_current(None).unwrap();
    }

    #[test]
    fn a_damaged_context_hides_no_other_one_and_can_be_removed() {
        let folder = tempfile::tempdir().unwrap();
        let contexts = ContextStore { folder: folder.path().join("rackbus") };
        contexts.put("lab", noted("lab"), &credentials()).unwrap();
        contexts.put("short", noted("short"), &credentials()).unwrap();
        fs::write(contexts.of("short").join("context.json"), "{").unwrap();
        fs::create_dir(contexts.of("begun")).unwrap();
        assert_eq!(contexts.names(), ["lab", "short"]);
        assert!(contexts.get("short").is_err());
        contexts.remove("short").unwrap();
        contexts.remove("begun").unwrap();
        assert_eq!(contexts.names(), ["lab"]);
    }

    /// A command that was meant for another rack would else be carried out on this machine's.
    #[test]
    fn a_current_context_that_cannot_be_read_or_is_not_there_is_not_taken_for_none() {
        let folder = tempfile::tempdir().unwrap();
        let contexts = ContextStore { folder: folder.path().join("rackbus") };
        contexts.put("lab", noted("lab"), &credentials()).unwrap();
        contexts.set_current(Some("lab")).unwrap();
        let current = contexts.folder.join("current");
        fs::write(&current, "gone").unwrap();
        assert!(contexts.current().unwrap_err().error.contains("no context"));
        fs::remove_file(&current).unwrap();
        fs::create_dir(&current).unwrap();
        assert!(contexts.current().is_err());
    }

    #[test]
    fn what_is_kept_is_its_users_alone() {
        use std::os::unix::fs::PermissionsExt;
        let folder = tempfile::tempdir().unwrap();
        let contexts = ContextStore { folder: folder.path().join("rackbus") };
        let context = contexts.put("lab", noted("lab"), &credentials()).unwrap();
        let mode = |path: &Path| fs::metadata(path).unwrap().permissions().mode() & 0o777;
        assert_eq!(mode(&context.folder), 0o700);
        for file in ["identity.pem", "context.json"] {
            assert_eq!(mode(&context.folder.join(file)), 0o600, "{file}");
        }
    }

    #[test]
    fn a_name_of_a_context_is_one_of_a_folder() {
        for bad in ["", "..", ".hidden", "a/b", "local", "a b", &"a".repeat(65)] {
            assert!(check_name(bad).is_err(), "{bad}");
        }
        assert!(check_name("lab-2.example").is_ok());
        assert_eq!(name_for("lab-2"), "lab-2");
        for rack in ["", "..", ".hidden", "a/b", "local", "ä b", &"a".repeat(65)] {
            assert!(check_name(&name_for(rack)).is_ok(), "{rack}");
        }
    }

    #[test]
    fn control_planes_are_learned_once() {
        let mut noted = noted("lab");
        let member =
            |url: &str| Member { id: url.into(), url: url.into(), version: "0.1.0".into(), pid: 1 };
        let members =
            [member("https://control:7420"), member("https://other:7420"), member("(a restore)")];
        noted.learn(&members);
        noted.learn(&members);
        assert_eq!(noted.control_planes, ["control:7420", "other:7420"]);
    }
}
