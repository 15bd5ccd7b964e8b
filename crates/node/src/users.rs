//! Ends leases with the VM that used them: a VM that powered off, was quit or crashed gives nothing
//! back by itself. A QEMU that somebody starts by hand is such a VM where that was [noted](rackbus_vm::lasting) beside
//! the function's socket. A program may come again, and its lease stays.

use std::collections::BTreeMap;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use rackbus_control::{ControlClient, ControlClientError, lease_span};
use rackbus_vm::{ProcessName, lasting, registry};
use rustix::event::{PollFd, PollFlags, poll};
use rustix::io::Errno;
use rustix::process::{Pid, PidfdFlags, pidfd_open};
use serde::{Deserialize, Serialize};
use tracing::Instrument;

/// How long until a control plane that does not answer is asked again: at first, and at most.
pub(crate) const AGAIN: [Duration; 2] = [Duration::from_millis(100), Duration::from_secs(5)];

/// What a QEMU that somebody started by hand is called; no VM has a name like this.
const BY_HAND: &str = "a QEMU started by hand";
/// What a command is called that borrows for a VM which it is about to start.
const STARTER: &str = "a command that starts a VM";

/// A VM of this host that uses a borrowed function, or did until it ended.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct VmUser {
    /// The VM's name on this host; of a process that has none, what it is called for people.
    pub vm: String,
    /// Process id of its QEMU.
    pub process: u32,
    /// When that process began: another one of the same id is not the VM. `None` when that could not be seen.
    pub birth: Option<u64>,
}

impl VmUser {
    /// The VM `vm` that this process runs now.
    pub fn new(vm: String, process: u32) -> Self {
        VmUser { vm, process, birth: registry::birth(process) }
    }

    /// Its process, to wait for; `None` when it has ended.
    fn watched(&self) -> Result<Option<OwnedFd>, Errno> {
        let pid = i32::try_from(self.process).ok().and_then(Pid::from_raw).ok_or(Errno::INVAL)?;
        match pidfd_open(pid, PidfdFlags::empty()) {
            // Looked at last: a process that began then is the one that was opened.
            Ok(process) => Ok((!self.is_other(registry::birth(self.process))).then_some(process)),
            Err(Errno::SRCH) => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// Whether a process of its id that began then is another one. What cannot be seen is no reason to think so: a VM that
    /// runs would lose what it uses.
    fn is_other(&self, birth: Option<u64>) -> bool {
        birth.zip(self.birth).is_some_and(|(found, own)| found != own)
    }

    /// Whether it is the VM that this process runs now.
    pub fn is(&self, process: u32) -> bool {
        self.process == process && !self.is_other(registry::birth(process))
    }
}

/// Watches the VMs of one host.
#[derive(Debug)]
pub struct Users {
    run_dir: PathBuf,
    host: String,
    client: ControlClient,
    runtime: tokio::runtime::Handle,
    watched: Arc<WatchedVms>,
}

impl Users {
    /// For the VMs of `host` in the rack's run directory. To be called inside of a tokio runtime.
    pub fn new(run_dir: &Path, host: &str, client: ControlClient) -> Self {
        let runtime = tokio::runtime::Handle::current();
        let watched = Arc::default();
        Users { run_dir: run_dir.to_owned(), host: host.to_owned(), client, runtime, watched }
    }

    /// The name of the VM that the function at `socket` is meant for, if it is one.
    pub fn vm_of(&self, socket: &Path) -> Option<String> {
        registry::noted_with(&self.run_dir, &self.host, socket)
    }

    /// The process that uses the function at `socket`, if the lease is to end with it.
    pub fn user_of(&self, socket: &Path, process: u32) -> Option<VmUser> {
        let by_hand = || lasting::ends_with_user(socket).then(|| BY_HAND.to_owned());
        Some(VmUser::new(self.vm_of(socket).or_else(by_hand)?, process))
    }

    /// The VM that has the function at `socket` and runs, whether or not it has opened that.
    pub fn running_vm(&self, socket: &Path) -> Option<VmUser> {
        let vms = registry::list(&self.run_dir, &self.host).unwrap_or_default();
        let has = |all: &[registry::Plugged]| all.iter().any(|plugged| plugged.socket == socket);
        let mut vms = vms.into_iter().filter(|vm| vm.noted().is_ok_and(|all| has(&all)));
        vms.find(registry::VmRecord::alive).map(|vm| VmUser::new(vm.name, vm.pid))
    }

    /// The process that is about to start what will use a function; `None` where its name is of another machine's processes,
    /// or of none.
    pub fn starter(name: &str) -> Option<VmUser> {
        let name = name.parse::<ProcessName>().ok().filter(ProcessName::is_known_here)?;
        let (vm, process, birth) = (STARTER.to_owned(), name.process, Some(name.birth));
        Some(VmUser { vm, process, birth })
    }

    /// `user` uses the function of `lease`, or did: the lease is returned when the VM has ended, unless `lease_ended` says
    /// then that there is nothing to return. One thread waits for a VM, however many leases it uses one after the other.
    pub fn watch(
        &self,
        lease: u64,
        user: &VmUser,
        lease_ended: impl Fn() -> bool + Send + Sync + 'static,
    ) {
        let ended: SharedLeaseEnded = Arc::new(lease_ended);
        let key = (user.process, user.birth);
        let others = self.watched.add(key, lease, ended);
        if let Some(others) = others {
            self.watched.drop_ended(key, others);
        } else if let Err(error) = self.wait_for(user) {
            let VmUser { vm, process, .. } = user;
            tracing::warn!(vm, process, %error, "the VM cannot be watched: its leases stay");
            self.watched.take(key);
        }
    }

    /// Starts the thread that waits for a VM.
    fn wait_for(&self, user: &VmUser) -> std::io::Result<()> {
        let ended = user.watched()?;
        let (user, client, runtime) = (user.clone(), self.client.clone(), self.runtime.clone());
        let watched = self.watched.clone();
        let wait = move || {
            let outcome = ended.as_ref().map_or(Ok(()), wait_readable);
            let VmUser { vm, process, birth } = user;
            let leases = watched.take((process, birth));
            if let Err(error) = outcome {
                let leases: Vec<u64> = leases.into_keys().collect();
                tracing::warn!(vm, process, ?leases, %error, "the VM cannot be watched: its leases stay");
                return;
            }
            for (lease, lease_ended) in leases {
                let span = lease_span(lease);
                let _about = span.enter();
                if !lease_ended() {
                    tracing::info!(user = vm, lease, "it has ended; what it borrowed goes back");
                    let client = client.clone();
                    let returned = async move { give_back(&client, lease, &*lease_ended).await };
                    runtime.spawn(returned.instrument(span.clone()));
                }
            }
        };
        std::thread::Builder::new().name("vm watch".into()).spawn(wait).map(drop)
    }
}

/// Whether a lease has ended or has another user, for the thread that waits for its VM and for who drops what has ended.
type SharedLeaseEnded = Arc<dyn Fn() -> bool + Send + Sync>;

/// The leases that one VM uses, or did last.
type WatchedLeases = BTreeMap<u64, SharedLeaseEnded>;

/// A process, and when it began.
type ProcessKey = (u32, Option<u64>);

/// The leases that VMs use, of each process that a thread waits for.
#[derive(Default)]
struct WatchedVms(Mutex<BTreeMap<ProcessKey, WatchedLeases>>);

impl std::fmt::Debug for WatchedVms {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("WatchedVms").finish_non_exhaustive()
    }
}

impl WatchedVms {
    fn lock(&self) -> MutexGuard<'_, BTreeMap<ProcessKey, WatchedLeases>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Adds a lease of a process. The other leases of that; `None` where no thread waits for the process yet.
    fn add(&self, key: ProcessKey, lease: u64, ended: SharedLeaseEnded) -> Option<WatchedLeases> {
        let mut all = self.lock();
        let known = all.get(&key).cloned();
        all.entry(key).or_default().insert(lease, ended);
        known
    }

    /// Drops those of the leases that have ended, so that a VM which takes turns for months has no more here than it uses.
    /// They are asked while nothing is locked: each answers under a lock of its own.
    fn drop_ended(&self, key: ProcessKey, mut leases: WatchedLeases) {
        leases.retain(|_, ended| ended());
        let mut all = self.lock();
        let Some(known) = all.get_mut(&key) else { return };
        // One that was added again meanwhile has not ended.
        known.retain(|lease, now| !leases.get(lease).is_some_and(|it| Arc::ptr_eq(it, now)));
    }

    /// Takes all leases of a process out: from now on no thread waits for it.
    fn take(&self, key: ProcessKey) -> WatchedLeases {
        self.lock().remove(&key).unwrap_or_default()
    }
}

/// Waits for a process to end: its descriptor is readable then.
fn wait_readable(process: &OwnedFd) -> rustix::io::Result<()> {
    loop {
        match poll(&mut [PollFd::new(process, PollFlags::IN)], None) {
            Err(Errno::INTR) => {}
            outcome => return outcome.map(drop),
        }
    }
}

/// Whether a refusal with this code leaves open what becomes of a request: the control plane could not store it, ends,
/// does not lead while no other one does, or is not reached by who passes it on.
pub(crate) fn is_open(code: &str) -> bool {
    matches!(code, "not_stored" | "ending" | "not_the_leader" | "unreachable")
}

/// Returns a lease. While the control plane does not answer, it is asked again.
pub(crate) async fn give_back(client: &ControlClient, lease: u64, lease_ended: impl Fn() -> bool) {
    let [mut wait, most] = AGAIN;
    while !lease_ended() {
        match client.give_back(lease).await {
            Ok(_) => return,
            Err(ControlClientError::Refused(refused)) if !is_open(&refused.code) => {
                // It has ended otherwise meanwhile, or is ending.
                tracing::debug!(lease, error = refused.error, "not returned");
                return;
            }
            Err(error) => tracing::debug!(lease, %error, "not returned yet"),
        }
        tokio::time::sleep(wait).await;
        wait = (wait * 2).min(most);
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use std::io::{BufRead, BufReader, Read, Write};
    use std::os::unix::net::{UnixListener, UnixStream};
    use std::process::{Child, Command, Stdio};

    use super::*;

    const LEASE: u64 = 7;
    const NOT_STORED: &str = r#"{"code":"not_stored","error":"no room","remedy":"make room"}"#;
    const NOBODY_LEADS: &str =
        r#"{"code":"not_the_leader","error":"nobody leads","remedy":"wait"}"#;
    const UNREACHABLE: &str =
        r#"{"code":"unreachable","error":"no control plane","remedy":"wait"}"#;
    const OVER: &str = r#"{"code":"over","error":"it is over","remedy":"nothing"}"#;
    const RETURNED: &str = r#"{"lease":7,"function":"alpha/nvme0","lender":"alpha",
        "borrower":"beta","epoch":1,"stage":"closing","socket":null,"reason":"returned",
        "returned":false,"since_ms":1,"until_ms":null}"#;

    /// What stands for a VM: it waits until its input ends.
    fn vm() -> Child {
        Command::new("cat").stdin(Stdio::piped()).stdout(Stdio::null()).spawn().unwrap()
    }

    /// A host with a VM that has a function at the socket that is returned.
    fn host(run_dir: &Path) -> PathBuf {
        let socket = run_dir.join("nvme0.7.sock");
        let notes = registry::vms_dir(run_dir, "beta").join("vm1/functions");
        std::fs::create_dir_all(&notes).unwrap();
        std::fs::write(notes.join("fn-x"), format!("alpha/nvme0\n{}", socket.display())).unwrap();
        socket
    }

    /// The user that `process` is, which has the function at the socket.
    fn vm_user(users: &Users, socket: &Path, process: &Child) -> VmUser {
        VmUser::new(users.vm_of(socket).expect("it is a VM"), process.id())
    }

    /// Answers a request; what was asked.
    fn answer(stream: UnixStream, status: u16, body: &str) -> String {
        answer_with_key(stream, status, body).0
    }

    /// Answers requests, each by what comes next; what was asked, and under which keys.
    pub(crate) fn answer_all(
        listener: &UnixListener,
        answers: &[(u16, &str)],
    ) -> Vec<(String, String)> {
        let answer = |(status, body): &(u16, &str)| {
            answer_with_key(listener.accept().unwrap().0, *status, body)
        };
        answers.iter().map(answer).collect()
    }

    /// The same, and the idempotency key.
    fn answer_with_key(stream: UnixStream, status: u16, body: &str) -> (String, String) {
        let mut reader = BufReader::new(&stream);
        let (mut asked, mut length, mut key) = (String::new(), 0, String::new());
        reader.read_line(&mut asked).unwrap();
        loop {
            let mut line = String::new();
            reader.read_line(&mut line).unwrap();
            let line = line.trim().to_ascii_lowercase();
            if let Some(number) = line.strip_prefix("content-length:") {
                length = number.trim().parse().unwrap();
            } else if let Some(given) = line.strip_prefix("idempotency-key:") {
                key = given.trim().to_owned();
            } else if line.is_empty() {
                break;
            }
        }
        reader.read_exact(&mut vec![0; length]).unwrap();
        let length = body.len();
        write!(&stream, "HTTP/1.1 {status} X\r\ncontent-length: {length}\r\n\r\n{body}").unwrap();
        (asked, key)
    }

    #[tokio::test(flavor = "multi_thread")]
    async fn what_a_vm_had_is_returned_until_that_is_stored_when_the_vm_ends() {
        let folder = tempfile::tempdir().unwrap();
        let socket = host(folder.path());
        let path = folder.path().join("control.sock");
        let users = Users::new(folder.path(), "beta", ControlClient::new(&path));
        let mut vm = vm();
        users.watch(LEASE, &vm_user(&users, &socket, &vm), || false);
        drop(vm.stdin.take());
        // Nobody answers at first: then it cannot be stored, or passed on to who could; then it is.
        tokio::time::sleep(AGAIN[0] / 2).await;
        let listener = UnixListener::bind(&path).unwrap();
        let (heard, asked) = std::sync::mpsc::channel();
        std::thread::spawn(move || {
            let answers =
                [(503, NOT_STORED), (502, UNREACHABLE), (421, NOBODY_LEADS), (200, RETURNED)];
            for (status, body) in answers {
                heard.send(answer(listener.accept().unwrap().0, status, body)).unwrap();
            }
        });
        let next = || asked.recv_timeout(Duration::from_secs(20)).expect("it is not asked again");
        let asked = [next(), next(), next(), next()];
        assert!(asked.iter().all(|line| line.starts_with("DELETE /v1/leases/7 ")), "{asked:?}");
        vm.wait().unwrap();
    }

    /// The node's process was replaced meanwhile.
    #[tokio::test(flavor = "multi_thread")]
    async fn what_a_vm_had_that_has_ended_before_it_is_watched_is_returned() {
        let folder = tempfile::tempdir().unwrap();
        let socket = host(folder.path());
        let path = folder.path().join("control.sock");
        let listener = UnixListener::bind(&path).unwrap();
        let users = Users::new(folder.path(), "beta", ControlClient::new(&path));
        let mut vm = vm();
        drop(vm.stdin.take());
        vm.wait().unwrap();
        users.watch(LEASE, &vm_user(&users, &socket, &vm), || false);
        let asked = tokio::task::spawn_blocking(move || {
            answer(listener.accept().unwrap().0, 200, RETURNED)
        });
        assert!(asked.await.unwrap().starts_with("DELETE /v1/leases/7 "));
    }

    /// How many descriptors of `process` this process has: one for each that waits for its end.
    fn waiting_for(process: u32) -> usize {
        let own = format!("Pid:\t{process}");
        let names = std::fs::read_dir("/proc/self/fdinfo").unwrap();
        // A descriptor of another test may be closed meanwhile.
        let texts = names.filter_map(|entry| std::fs::read_to_string(entry.ok()?.path()).ok());
        texts.filter(|text| text.lines().any(|line| line == own)).count()
    }

    /// The leases of all VMs, in order.
    fn leases_of(users: &Users) -> Vec<u64> {
        users.watched.lock().values().flat_map(BTreeMap::keys).copied().collect()
    }

    /// A VM that takes turns has another lease each time, and runs for months.
    #[tokio::test(flavor = "multi_thread")]
    async fn one_descriptor_waits_for_a_vm_that_had_many_leases() {
        let folder = tempfile::tempdir().unwrap();
        let socket = host(folder.path());
        let path = folder.path().join("control.sock");
        let listener = UnixListener::bind(&path).unwrap();
        let users = Users::new(folder.path(), "beta", ControlClient::new(&path));
        let mut vm = vm();
        let user = vm_user(&users, &socket, &vm);
        for lease in 1..=100 {
            // It attaches twice by each, and all but the last two end.
            for _ in 0..2 {
                users.watch(lease, &user, move || lease < 99);
            }
        }
        assert_eq!(waiting_for(vm.id()), 1);
        assert_eq!(leases_of(&users), [99, 100]);
        // All that it still has is returned when it ends, and nothing else.
        drop(vm.stdin.take());
        let asked = tokio::task::spawn_blocking(move || {
            [(); 2].map(|()| answer(listener.accept().unwrap().0, 200, RETURNED))
        });
        let mut asked = asked.await.unwrap();
        asked.sort();
        assert!(asked[0].starts_with("DELETE /v1/leases/100 "), "{asked:?}");
        assert!(asked[1].starts_with("DELETE /v1/leases/99 "), "{asked:?}");
        assert!(leases_of(&users).is_empty());
        vm.wait().unwrap();
    }

    #[tokio::test(flavor = "multi_thread")]
    async fn what_is_over_is_not_returned_again() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("control.sock");
        let listener = UnixListener::bind(&path).unwrap();
        let client = ControlClient::new(&path);
        let answered = std::thread::spawn({
            let listener = listener.try_clone().unwrap();
            move || answer(listener.accept().unwrap().0, 409, OVER)
        });
        give_back(&client, LEASE, || false).await;
        answered.join().unwrap();
        // Or when that is known here.
        give_back(&client, LEASE, || true).await;
        listener.set_nonblocking(true).unwrap();
        assert!(listener.accept().is_err(), "it was returned again");
    }

    /// The process with that id now began later than the VM.
    #[tokio::test(flavor = "multi_thread")]
    async fn what_a_vm_had_is_returned_although_another_process_has_its_id() {
        let folder = tempfile::tempdir().unwrap();
        let socket = host(folder.path());
        let path = folder.path().join("control.sock");
        let listener = UnixListener::bind(&path).unwrap();
        let users = Users::new(folder.path(), "beta", ControlClient::new(&path));
        let mut other = vm();
        let mut user = vm_user(&users, &socket, &other);
        user.birth = user.birth.map(|birth| birth - 1);
        users.watch(LEASE, &user, || false);
        let asked = tokio::task::spawn_blocking(move || {
            answer(listener.accept().unwrap().0, 200, RETURNED)
        });
        assert!(asked.await.unwrap().starts_with("DELETE /v1/leases/7 "));
        drop(other.stdin.take());
        other.wait().unwrap();
    }

    /// Nodes of this version and later ones read it.
    #[test]
    fn a_vm_is_written_down_as_it_is_read() {
        let text = r#"{"vm":"vm1","process":12,"birth":34}"#;
        let vm: VmUser = serde_json::from_str(text).unwrap();
        assert_eq!(vm, VmUser { vm: "vm1".into(), process: 12, birth: Some(34) });
        assert_eq!(serde_json::to_string(&vm).unwrap(), text);
    }

    #[test]
    fn the_socket_of_a_program_is_no_vms() {
        let folder = tempfile::tempdir().unwrap();
        host(folder.path());
        let runtime = tokio::runtime::Runtime::new().unwrap();
        let _entered = runtime.enter();
        let users =
            Users::new(folder.path(), "beta", ControlClient::new(&folder.path().join("none")));
        assert_eq!(users.vm_of(&folder.path().join("nvme0.8.sock")), None);
    }
}
