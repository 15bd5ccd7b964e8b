//! A node on a machine of its own: it joins a rack whose control plane is elsewhere, and is known by its
//! certificate from then on.
//!
//! What this machine's other commands ask at the run directory's `control.sock` is passed on to the control
//! plane, as this host: they are the same as where the whole rack runs on one machine.

use std::collections::HashMap;
use std::ffi::OsString;
use std::net::{SocketAddr, ToSocketAddrs, UdpSocket};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError, RwLock};
use std::time::Duration;

use rackbus_control::api::HostStatus;
use rackbus_control::leaders::Leaders;
use rackbus_control::leadership::election::Member;
use rackbus_control::machines::{JoinRequest, forward, tls_of};
use rackbus_control::node::listen;
use rackbus_control::{ControlClient, certificates};
use rackbus_devices::class::parse_rack;
use rackbus_fabric::rack::Rack;
use rackbus_identity::{
    CertificateRequest, Credentials, Renewed, RevocationList, Revocations, Subject, Token,
    joining_config, now, write_private,
};
use rackbus_link::tcp::TcpLink;
use rackbus_node::InheritedNode;

use tokio::sync::watch;

use super::renewal::renew;
use super::succession::RackSource;
use crate::Common;
use crate::commands::misread;
use crate::output::Failure;
use crate::paths::{self, RunningRack};
use crate::process;
use crate::remote::{OTHER_TOKEN, address_of, not_reached};

/// How long the control plane may take to say where others are.
const LOCATING: Duration = Duration::from_secs(2);
/// Between two looks where the control planes are.
const FOLLOW: Duration = Duration::from_secs(10);
/// The file of the state directory in which it is noted what is revoked.
const REVOKED: &str = "revoked.json";
/// What is done about a certificate that is refused.
pub(super) const AGAIN: &str =
    "remove identity.pem from the state directory, and join with a new token";
/// The file of the state directory in which that is noted.
const NOTED: &str = "control-planes.json";

/// How a node joins a rack of several machines.
#[derive(Debug, clap::Args)]
pub struct JoinArgs {
    /// Join the rack whose control plane is there: `https://control:7420`; or each of several, of which one leads.
    /// Others of them that the node hears of are noted in its state directory.
    #[arg(long, value_name = "URL,…", value_delimiter = ',')]
    join: Vec<String>,
    /// The file with the token to join with, which `rackbus token` makes; needed the first time only.
    #[arg(long, value_name = "FILE", requires = "join")]
    token_file: Option<PathBuf>,
    /// Where other nodes reach this one.
    #[arg(long, value_name = "ADDRESS:PORT", default_value = "0.0.0.0:7421", requires = "join")]
    listen: SocketAddr,
    /// What other nodes are told of that, where it is not the address by which the control plane is reached.
    #[arg(long, value_name = "HOST:PORT", requires = "join")]
    advertise: Option<String>,
    /// Where the certificate and the drives in files are kept.
    #[arg(long, value_name = "DIR", env = paths::STATE_DIR)]
    state_dir: Option<PathBuf>,
}

/// A host that has joined.
pub struct JoinedHost {
    pub run_dir: PathBuf,
    pub link: TcpLink,
    /// The arguments with which another process goes on.
    pub again: Vec<OsString>,
    credentials: Renewed,
    revocations: Revocations,
    control: Arc<Leaders>,
    state_dir: PathBuf,
    /// Where this machine's commands ask.
    requests: Option<UnixListener>,
}

impl JoinArgs {
    /// Joins as `host`; `None` where the rack runs on one machine. What the rack is, is noted in the run
    /// directory.
    pub async fn join(&self, host: &str, common: &Common) -> Result<Option<JoinedHost>, Failure> {
        if self.join.is_empty() {
            return Ok(None);
        }
        let named = self.join.iter().map(|url| address_of(url)).collect::<Result<Vec<_>, _>>()?;
        let state_dir = paths::state_dir(self.state_dir.as_deref(), &format!("{host}.node"))?;
        paths::make_private(&state_dir)?;
        let mut control = named.clone();
        control.extend(noted(&state_dir).into_iter().filter(|it| !named.contains(it)));
        let credentials = match Credentials::load(&state_dir).map_err(unusable)? {
            Some(credentials) if !credentials.is_over() => credentials,
            _ => {
                let credentials = self.first(host, &control).await?;
                credentials.save(&state_dir).map_err(unusable)?;
                credentials
            }
        };
        check_subject(&credentials, host, &state_dir)?;
        let client = ControlClient::with_tls(&control, credentials.client().clone());
        let text = client.rack_file().await.map_err(|error| not_reached(error, AGAIN))?;
        let file = state_dir.join("rack.toml");
        let (rack, _) = parse_rack(&file.display().to_string(), &text).map_err(misread)?;
        let run_dir = paths::make_run_dir(common, &rack.name)?;
        paths::check_lengths(&rack, &run_dir)?;
        // A node that runs there uses what is noted: nothing is changed where there is one, of whatever host.
        check_alone(&run_dir, host)?;
        paths::make_private(&run_dir.join(host))?;
        let pid_file = process::pid_file(&run_dir, Some(host));
        drop(process::hold(&pid_file, process::runs_already(&format!("the node of {host}")))?);
        std::fs::write(&file, &text).map_err(|cause| not_written(&file, &cause))?;
        let text = None;
        let (rack_name, joined, behind) = (rack.name.clone(), Vec::new(), Vec::new());
        let known = RunningRack {
            rack: rack_name,
            file,
            state_dir: state_dir.clone(),
            text,
            joined,
            behind,
            low_latency: false,
        };
        known.note(&run_dir)?;
        let advertised = match &self.advertise {
            Some(advertised) => advertised.clone(),
            None => own_address(&control, self.listen)?.to_string(),
        };
        let place = (run_dir, state_dir);
        self.joined(&rack, advertised, control, credentials, place).map(Some)
    }

    /// Goes on in the place of another process, which had joined the rack `from` there. Nobody is asked: the control
    /// planes may be out of reach.
    pub fn again(
        &self,
        host: &str,
        common: &Common,
        from: &RackSource,
    ) -> Result<Option<JoinedHost>, Failure> {
        let Some(advertised) = self.advertise.clone().filter(|_| !self.join.is_empty()) else {
            return Ok(None);
        };
        let (rack, _) = from.parse()?;
        let state_dir = from.state_dir.clone();
        let mut control =
            self.join.iter().map(|url| address_of(url)).collect::<Result<Vec<_>, _>>()?;
        let more: Vec<String> =
            noted(&state_dir).into_iter().filter(|it| !control.contains(it)).collect();
        control.extend(more);
        let credentials = own_credentials(host, &state_dir)?;
        let place = (paths::find_run_dir(common)?, state_dir);
        self.joined(&rack, advertised, control, credentials, place).map(Some)
    }

    /// The host of `rack` with these credentials, whose control planes are at `control`.
    fn joined(
        &self,
        rack: &Rack,
        advertised: String,
        control: Vec<String>,
        credentials: Credentials,
        (run_dir, state_dir): (PathBuf, PathBuf),
    ) -> Result<JoinedHost, Failure> {
        let credentials = Arc::new(RwLock::new(credentials));
        let control = Arc::new(Leaders::new(control, tls_of(&credentials)));
        let listen = self.listen.to_string();
        // Keys are renewed by another connection, which takes a moment in which nothing may be held.
        let with_ktls = rack.links.ktls && rack.links.hold_ms > 0;
        let link = TcpLink::new(&rack.name, &listen, &advertised, credentials.clone());
        let revocations = noted_revocations(&state_dir)?;
        let link = link.with_revocations(revocations.clone()).with_ktls(with_ktls);
        locate_others(&link, &control);
        let mut again = vec!["--join".into(), self.join.join(",").into()];
        again.extend(["--listen".into(), listen.into(), "--advertise".into(), advertised.into()]);
        let requests = None;
        Ok(JoinedHost {
            run_dir,
            link,
            again,
            credentials,
            revocations,
            control,
            state_dir,
            requests,
        })
    }

    /// The first certificate, for a token.
    async fn first(&self, host: &str, control: &[String]) -> Result<Credentials, Failure> {
        let remedy = "make a token with `rackbus token HOST` where the control plane runs, and name its file \
                      with --token-file";
        let Some(path) = &self.token_file else {
            let error = format!("{host} has no certificate of this rack that is good");
            return Err(Failure::usage(error, remedy));
        };
        let text = std::fs::read_to_string(path)
            .map_err(|cause| Failure::usage(format!("{}: {cause}", path.display()), remedy))?;
        let token: Token = text
            .parse()
            .map_err(|error| Failure::usage(format!("{}: {error}", path.display()), remedy))?;
        let request = CertificateRequest::new().map_err(unusable)?;
        let asked = JoinRequest {
            host: host.to_owned(),
            token: token.to_string(),
            request: request.text().to_owned(),
        };
        let client = ControlClient::with_tls(control, joining_config(&token));
        let certificates =
            client.join(&asked).await.map_err(|error| not_reached(error, OTHER_TOKEN))?;
        request.answered(&certificates).map_err(unusable)
    }
}

/// The certificate of `host` that is in `state_dir`: with it, another process goes on as its node.
pub fn own_credentials(host: &str, state_dir: &Path) -> Result<Credentials, Failure> {
    let credentials = Credentials::load(state_dir).map_err(unusable)?;
    let credentials =
        credentials.filter(|credentials| !credentials.is_over()).ok_or_else(|| {
            let error = format!("{} has no certificate that is good", state_dir.display());
            Failure::new(error, AGAIN)
        })?;
    check_subject(&credentials, host, state_dir)?;
    Ok(credentials)
}

fn check_subject(credentials: &Credentials, host: &str, state_dir: &Path) -> Result<(), Failure> {
    if *credentials.subject() == Subject::Node(host.to_owned()) {
        return Ok(());
    }
    let error = format!("{} has the certificate of {}", state_dir.display(), credentials.subject());
    Err(Failure::usage(error, "name another --state-dir, or that host"))
}

impl JoinedHost {
    /// Listens to this machine's commands, at the socket that the process before did or a new one.
    ///
    /// # Errors
    /// When it cannot be made.
    pub fn listen(&mut self, inherited: Option<&mut InheritedNode>) -> Result<(), Failure> {
        let socket = rackbus_node::control_socket(&self.run_dir);
        let taken = inherited.map(InheritedNode::take_requests).transpose();
        let listener = taken.and_then(|taken| match taken.flatten() {
            Some(taken) => Ok(taken.into()),
            None => listen(&socket),
        });
        self.requests = Some(listener.map_err(|cause| not_listened(&socket, &cause))?);
        Ok(())
    }

    /// That socket once more, for the process that goes on; `None` where nobody listens.
    ///
    /// # Errors
    /// When the process has no descriptors left.
    pub fn requests(&self) -> Result<Option<OwnedFd>, Failure> {
        let copy = self.requests.as_ref().map(|it| it.as_fd().try_clone_to_owned()).transpose();
        copy.map_err(|cause| not_written(&rackbus_node::control_socket(&self.run_dir), &cause))
    }

    /// Passes on what this machine's commands ask, and renews the certificate, until the process ends.
    ///
    /// # Errors
    /// When the socket cannot be made, or fails.
    pub async fn serve(self) -> Result<(), Failure> {
        let socket = rackbus_node::control_socket(&self.run_dir);
        let listener = self.requests.map_or_else(|| listen(&socket), Ok);
        let listener = listener.map_err(|cause| not_listened(&socket, &cause))?;
        tokio::spawn(follow(self.control.clone(), self.state_dir.clone()));
        let folder = self.state_dir.clone();
        let own = self.credentials.read().unwrap_or_else(PoisonError::into_inner).clone();
        let authorities = watch::Sender::new(own.authorities().to_vec());
        let told = authorities.subscribe();
        let following = certificates::follow(
            ControlClient::of(self.control.clone()),
            self.revocations,
            authorities,
            move |list| note_revocations(&folder, list),
        );
        tokio::spawn(following);
        let renewing = renew(self.credentials, self.control.clone(), self.state_dir, told);
        tokio::spawn(renewing);
        let forwarded = forward(listener, self.control).await;
        forwarded.map_err(|cause| not_written(&socket, &cause))
    }
}

/// Notes where the control planes are, so that this node finds them again when those that it was told of are gone.
async fn follow(control: Arc<Leaders>, state_dir: PathBuf) {
    loop {
        if let Ok(status) = ControlClient::of(control.clone()).control().await {
            let address = |member: &Member| address_of(&member.url).ok();
            let known: Vec<String> = status.members.iter().filter_map(address).collect();
            control.learn(known.iter().cloned());
            if !known.is_empty() && known != noted(&state_dir) {
                let text = serde_json::to_string(&known).unwrap_or_default();
                let path = state_dir.join(NOTED);
                let to = path.clone();
                let written = tokio::task::spawn_blocking(move || std::fs::write(to, text)).await;
                if let Ok(Err(error)) = written {
                    tracing::warn!(%error, path = %path.display(), "the control planes' addresses cannot be written down");
                }
            }
        }
        tokio::time::sleep(FOLLOW).await;
    }
}

/// The addresses of control planes that were noted.
fn noted(state_dir: &Path) -> Vec<String> {
    let text = std::fs::read_to_string(state_dir.join(NOTED)).unwrap_or_default();
    let noted: Vec<String> = serde_json::from_str(&text).unwrap_or_default();
    noted.into_iter().filter(|it| address_of(&format!("https://{it}")).is_ok()).collect()
}

/// What was revoked when that was last heard: a node that is started while no control plane is reached knows it.
fn noted_revocations(state_dir: &Path) -> Result<Revocations, Failure> {
    let (revocations, path) = (Revocations::default(), state_dir.join(REVOKED));
    let unreadable = |cause: &dyn std::fmt::Display| {
        let error = format!("{}: {cause}", path.display());
        Failure::new(error, "see to the file: it says what was revoked")
    };
    let text = match std::fs::read(&path) {
        Ok(text) => text,
        // Nothing was.
        Err(cause) if cause.kind() == std::io::ErrorKind::NotFound => return Ok(revocations),
        Err(cause) => return Err(unreadable(&cause)),
    };
    // Who cannot say what was revoked lets nobody in.
    let list: RevocationList = serde_json::from_slice(&text).map_err(|error| unreadable(&error))?;
    let _ = revocations.learn(&list, now());
    Ok(revocations)
}

fn note_revocations(state_dir: &Path, list: &RevocationList) {
    let (path, text) = (state_dir.join(REVOKED), serde_json::to_string(list).unwrap_or_default());
    if let Err(error) = write_private(&path, &text) {
        tracing::error!(%error, path = %path.display(), "the list of revocations cannot be written");
    }
}

/// Other hosts' nodes are where the control plane says.
fn locate_others(link: &TcpLink, control: &Arc<Leaders>) {
    let runtime = tokio::runtime::Handle::current();
    let (client, known) = (ControlClient::of(control.clone()), Mutex::new(HashMap::new()));
    link.locate_by(move |host| {
        let asked = async { tokio::time::timeout(LOCATING, client.status()).await };
        let status = runtime.block_on(asked);
        let mut known = known.lock().unwrap_or_else(PoisonError::into_inner);
        match status {
            Ok(Ok(status)) => {
                let of = |it: HostStatus| it.address.map(|address| (it.host, address));
                *known = status.hosts.into_iter().filter_map(of).collect();
            }
            // Where they were last is better than nothing.
            Ok(Err(error)) => {
                tracing::warn!(%error, "the control plane cannot be asked where {host} is")
            }
            Err(_) => tracing::warn!("the control plane does not say where {host} is"),
        }
        known.get(host).cloned()
    });
}

/// Where others reach who listens at `listen`, if they reach it as the control plane does.
fn own_address(control: &[String], listen: SocketAddr) -> Result<SocketAddr, Failure> {
    if !listen.ip().is_unspecified() {
        return Ok(listen);
    }
    let towards = |control: &str| -> std::io::Result<Option<SocketAddr>> {
        let same = |to: &SocketAddr| to.is_ipv4() == listen.is_ipv4();
        let Some(to) = control.to_socket_addrs()?.find(same) else { return Ok(None) };
        let any: SocketAddr = if to.is_ipv4() { ([0; 4], 0).into() } else { ([0; 16], 0).into() };
        // No packet is sent: the system says which way one would take.
        let socket = UdpSocket::bind(any)?;
        socket.connect(to)?;
        socket.local_addr().map(Some)
    };
    let mut failed = None;
    for address in control {
        match towards(address) {
            Ok(Some(own)) => return Ok(SocketAddr::new(own.ip(), listen.port())),
            Ok(None) => {}
            Err(cause) => failed = Some((address, cause)),
        }
    }
    Err(match failed {
        // A name that is not known now may be known in a moment.
        Some((control, cause)) => Failure::new(
            format!("this machine's address towards {control} is not known: {cause}"),
            "see to the name and the network, or name the address with --advertise",
        ),
        None => Failure::usage(
            format!("no control plane has an address of the family of {listen}"),
            "name the address with --advertise; --listen [::]:7421 listens for IPv6",
        ),
    })
}

pub(super) fn unusable(error: rackbus_identity::CredentialsError) -> Failure {
    Failure::new(error.to_string(), AGAIN)
}

/// Refuses a run directory in which the control plane, or the node of another host than `host`, runs: commands there are for
/// that one.
fn check_alone(run_dir: &Path, host: &str) -> Result<(), Failure> {
    let mut living = process::living(run_dir).into_iter();
    let other = living.find(|it| it.host.as_deref() != Some(host));
    let Some(other) = other else { return Ok(()) };
    let what = other.host.map_or("the control plane".to_owned(), |it| format!("the node of {it}"));
    Err(Failure::new(format!("{what} runs in {} already", run_dir.display()), paths::OWN_RUN_DIR))
}

fn not_listened(socket: &Path, cause: &std::io::Error) -> Failure {
    match cause.kind() {
        // It says which socket.
        std::io::ErrorKind::AddrInUse => Failure::new(cause.to_string(), paths::OWN_RUN_DIR),
        _ => not_written(socket, cause),
    }
}

fn not_written(path: &Path, cause: &std::io::Error) -> Failure {
    Failure::new(format!("{}: {cause}", path.display()), "see to the folder")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_address_that_is_named_is_the_one_that_others_are_told() {
        let listen = "127.0.0.1:7421".parse().unwrap();
        let control = ["127.0.0.1:1".to_owned()];
        assert_eq!(own_address(&control, listen).unwrap(), listen);
        let any = "0.0.0.0:7421".parse().unwrap();
        assert_eq!(own_address(&control, any).unwrap(), listen);
        // One that has none of the same family, or that is not resolved, does not keep the next from being tried.
        let several = ["[::1]:1", "without-a-port", "127.0.0.1:1"].map(str::to_owned);
        assert_eq!(own_address(&several, any).unwrap(), listen);
        assert!(!own_address(&several[..2], any).unwrap_err().usage, "a name may be known later");
        assert!(own_address(&several[..1], any).unwrap_err().usage);
    }

    #[test]
    fn what_was_revoked_is_known_or_the_node_does_not_start() {
        let folder = tempfile::tempdir().unwrap();
        assert!(noted_revocations(folder.path()).is_ok());
        let path = folder.path().join(REVOKED);
        std::fs::write(&path, "no list").unwrap();
        assert!(noted_revocations(folder.path()).is_err());
        std::fs::remove_file(&path).unwrap();
        std::fs::create_dir(&path).unwrap();
        assert!(noted_revocations(folder.path()).is_err());
    }
}
