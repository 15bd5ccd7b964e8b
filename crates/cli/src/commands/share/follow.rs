//! Follows the turns of a share: tells of them, or runs a program in each.

use std::ffi::OsString;
use std::time::Duration;

use rackbus_control::client::JsonLines;
use rackbus_control::shares::{Share, ShareSpec, ShareState};
use rackbus_control::{ControlClient, ControlClientError};
use rustix::process::{Pid, Signal, kill_process};
use tokio::process::{Child, Command};

use super::state;
use crate::output::{Failure, Output};
use crate::process::EndRequests;

/// Where the program finds its turn's socket.
const SOCKET: &str = "RACKBUS_SOCKET";
/// How long a program may take to end when its turns are over.
const GRACE: Duration = Duration::from_secs(10);
/// How long until a control plane that is gone is looked for again.
const AGAIN: Duration = Duration::from_millis(100);

/// How a share stands, whenever that changes; also over restarts of the control plane.
struct ShareFollower<'a> {
    client: &'a ControlClient,
    share: u64,
    lines: Option<JsonLines<Share>>,
}

impl<'a> ShareFollower<'a> {
    fn of(client: &'a ControlClient, share: u64) -> Self {
        ShareFollower { client, share, lines: None }
    }

    /// How it stands now; nothing when it takes no more turns.
    async fn next(&mut self) -> Result<Option<Share>, Failure> {
        loop {
            match &mut self.lines {
                Some(lines) => match lines.next().await {
                    Some(share) => return Ok(Some(share)),
                    None => self.lines = None,
                },
                None => match self.client.turns(self.share).await {
                    Ok(lines) => self.lines = Some(lines),
                    Err(ControlClientError::Refused(error)) if error.code == "unknown_share" => {
                        return Ok(None);
                    }
                    // It may be started again; what it says that is there does not change.
                    Err(error)
                        if error.is_lost()
                            || matches!(error, ControlClientError::Unreachable { .. }) =>
                    {
                        tokio::time::sleep(AGAIN).await;
                    }
                    Err(error) => return Err(error.into()),
                },
            }
        }
    }
}

/// Tells of a share's turns until it takes no more.
pub(super) async fn follow(
    client: &ControlClient,
    share: u64,
    output: &Output,
) -> Result<(), Failure> {
    // One that there never was is wrong usage.
    let shares = client.shares().await?;
    if !shares.iter().any(|it| it.share == share) {
        let error = format!("there is no share {share}");
        return Err(Failure::new(error, "`rackbus share list` lists them"));
    }
    let mut turns = ShareFollower::of(client, share);
    while let Some(share) = turns.next().await? {
        if output.is_json() {
            output.line(&serde_json::to_string(&share).unwrap_or_default());
        } else {
            output.line(&told(&share));
        }
        if output.is_unheard() {
            break;
        }
    }
    Ok(())
}

fn told(share: &Share) -> String {
    let (word, _) = state(share.state);
    let seconds = share.allowance_ms as f64 / 1e3;
    match share.state {
        ShareState::Waiting => {
            let ahead = share.ahead.unwrap_or_default();
            format!("{word}: {ahead} before it, then {seconds:.1} s")
        }
        ShareState::Turn => {
            let socket = share.socket.as_deref().unwrap_or_default();
            format!("{word}: {} for {seconds:.1} s, socket {socket}", share.function)
        }
        ShareState::Asked => format!("{word}: it is to release {}", share.function),
        ShareState::Coming => format!("{word}: {} is being lent", share.function),
    }
}

/// A program that runs in a turn.
struct Running {
    child: Child,
    /// The lease that the turn is.
    lease: Option<u64>,
    asked: bool,
}

impl Running {
    fn start(command: &[OsString], share: &Share) -> Result<Running, Failure> {
        let [program, arguments @ ..] = command else {
            return Err(Failure::usage("no program is named", "name one after `--`"));
        };
        let mut started = Command::new(program);
        started.args(arguments).kill_on_drop(true);
        started.env(SOCKET, share.socket.as_deref().unwrap_or_default());
        let child = started.spawn().map_err(|cause| {
            let error = format!("{}: {cause}", program.display());
            Failure::new(error, "name a program that can be run")
        })?;
        Ok(Running { child, lease: share.lease, asked: false })
    }

    /// Asks it to release the function.
    fn ask(&mut self) {
        let pid = self.child.id().and_then(|pid| i32::try_from(pid).ok()).and_then(Pid::from_raw);
        if let Some(pid) = pid.filter(|_| !self.asked) {
            self.asked = true;
            // An error means that it has ended.
            let _ = kill_process(pid, Signal::TERM);
        }
    }

    /// Has it end: it is asked, and killed when it takes too long, or when this process is asked to end once more.
    async fn end(mut self, requests: &mut EndRequests) {
        self.ask();
        tokio::select! {
            _ = tokio::time::timeout(GRACE, self.child.wait()) => {}
            () = requests.wait() => {}
        }
        // An error means that it has ended.
        let _ = self.child.kill().await;
    }
}

/// Takes turns, and runs the program in each of them, until it has done its work.
pub(super) async fn run(
    client: &ControlClient,
    spec: &ShareSpec,
    command: &[OsString],
    output: &Output,
) -> Result<(), Failure> {
    let mut requests = EndRequests::listen();
    let share = client.join_share(spec).await?;
    output.progress(&format!("share {}: takes turns on {}", share.share, share.function));
    let mut running = None;
    let outcome = tokio::select! {
        outcome = in_turns(client, share.share, command, &mut running, output) => outcome,
        () = requests.wait() => Err(Failure::new("interrupted", "run it again")),
    };
    if let Some(running) = running {
        output.progress("waiting for the program to end");
        running.end(&mut requests).await;
    }
    match client.leave_share(share.share).await {
        Ok(_) => outcome,
        // It has left, as it was told before.
        Err(ControlClientError::Refused(refused)) if refused.code == "unknown_share" => outcome,
        Err(error) => outcome.and(Err(error.into())),
    }
}

/// Runs the program in each turn; one that still runs when this ends is left in `running`.
async fn in_turns(
    client: &ControlClient,
    share: u64,
    command: &[OsString],
    running: &mut Option<Running>,
    output: &Output,
) -> Result<(), Failure> {
    let mut turns = ShareFollower::of(client, share);
    // How it stands, as last told; while a program ends, its share may have its next turn already.
    let mut last: Option<Share> = None;
    loop {
        let ended = async {
            match running.as_mut() {
                Some(running) => running.child.wait().await,
                None => std::future::pending().await,
            }
        };
        tokio::select! {
            status = ended => {
                let Some(Running { lease, mut asked, .. }) = running.take() else { continue };
                let failed = |error: String| Failure::new(error, "see what it says");
                let status = status.map_err(|cause| failed(cause.to_string()))?;
                if !asked && status.success() {
                    return Ok(());
                }
                if !asked {
                    // It may have failed because its function was lost, before that was told here.
                    let now = has_turn(client, share, lease).await?;
                    asked = !now;
                }
                if !asked {
                    return Err(failed(format!("the program ended its turn with {status}")));
                }
                let next = last.as_ref().filter(|it| is_turn(it) && it.lease != lease);
                if let Some(next) = next {
                    *running = Some(Running::start(command, next)?);
                }
            }
            stands = turns.next() => {
                let Some(stands) = stands? else {
                    let error = format!("share {share} takes no more turns");
                    return Err(Failure::new(error, "`rackbus events` tells why"));
                };
                output.progress(&told(&stands));
                match running.as_mut() {
                    None if is_turn(&stands) => {
                        *running = Some(Running::start(command, &stands)?);
                    }
                    Some(running)
                        if !is_turn(&stands) || stands.lease != running.lease =>
                    {
                        running.ask();
                    }
                    _ => {}
                }
                last = Some(stands);
            }
        }
    }
}

fn is_turn(share: &Share) -> bool {
    share.state == ShareState::Turn
}

/// Whether a lease still is a share's turn, as soon as the control plane can tell.
async fn has_turn(client: &ControlClient, share: u64, lease: Option<u64>) -> Result<bool, Failure> {
    loop {
        match client.shares().await {
            Ok(shares) => {
                let stands = shares.iter().find(|it| it.share == share);
                return Ok(stands.is_some_and(|it| is_turn(it) && it.lease == lease));
            }
            Err(error @ ControlClientError::Refused(_)) => return Err(error.into()),
            Err(_) => tokio::time::sleep(AGAIN).await,
        }
    }
}
