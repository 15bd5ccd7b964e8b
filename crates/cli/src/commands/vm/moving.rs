//! `rackbus vm move`: a VM goes on at another host, with the functions that it has borrowed.
//!
//! It is switched off in order, and started again there. Its functions change hands in one step of the control plane:
//! the request for all of them waits first of all who wait before the guest is switched off, so nobody else gets one in
//! between. What fails after that leads back: the functions are borrowed for the former host again, and the VM is started
//! there.

use std::path::PathBuf;
use std::time::Duration;

use rackbus_control::api::Lease;
use rackbus_control::together::BorrowAllRequest;
use rackbus_control::{ControlClient, ControlClientError};
use rackbus_vm::{Assets, Boot, InterruptChoice, Vm, VmError, VmRecord, VmSpec, registry};
use tokio::task::JoinHandle;

use super::leases::{function, give_back_all, leases_of, show};
use super::memory::{check_host, check_room, plugged_mib};
use super::running::described;
use super::{Context, hold, joined};
use crate::output::Failure;
use crate::process::{self, EndRequests};

/// How long a guest may take to switch itself off.
const OFF: Duration = Duration::from_secs(60);
/// How long its functions may take to change hands.
const HAND_OVER: Duration = Duration::from_secs(60);
/// How long the control plane may take to say what the VM has, and to take the request for it.
const PREPARED: Duration = Duration::from_secs(15);
/// How long until a control plane that is gone is asked again.
const AGAIN: Duration = Duration::from_millis(100);

/// Arguments of `rackbus vm move`.
#[derive(Debug, clap::Args)]
pub struct MoveArgs {
    /// The VM, by the name that `rackbus vm list` shows
    name: String,
    /// The host that it goes to
    #[arg(long = "to", value_name = "HOST")]
    host: String,
}

/// A VM that is to move.
struct Moving<'a> {
    context: &'a Context<'a>,
    from: String,
    to: &'a str,
    spec: VmSpec,
    /// What it has borrowed, in the order in which it is plugged in.
    leases: Vec<Lease>,
    /// Its user asked for MSI-X.
    msix: bool,
    /// Under which the functions are asked for at the new host, however often.
    key: String,
    /// Where the variables of its firmware are until it is started.
    kept: Option<PathBuf>,
}

/// Moves a VM to another host. Who asks this process to end before the VM is switched off leaves it as it is. Later the move
/// comes to its end first: only this process knows how the VM is to be started, and its functions may be the new host's already.
pub async fn move_vm(args: &MoveArgs, context: &Context<'_>) -> Result<(), Failure> {
    let mut requests = EndRequests::listen();
    // Nobody else changes it, or takes the name while there is no VM that has it.
    let (record, _claim) = hold(context, &args.name)?;
    let prepared = async {
        // The VM's name is held: nobody stops it meanwhile.
        let checked = Moving::check(context, &record, &args.host);
        let moving = tokio::time::timeout(PREPARED, checked).await;
        let moving = moving.unwrap_or_else(|_| Err(unanswered(&args.name)))?;
        let waiting = moving.wait_first().await?;
        Ok::<_, Failure>((moving, waiting))
    };
    let (mut moving, waiting) = tokio::select! {
        biased;
        // What waits at the control plane goes with this process.
        () = requests.wait() => {
            return Err(Failure::new("interrupted", format!("VM {} goes on where it is", args.name)));
        }
        prepared = prepared => prepared?,
    };
    if let Err(failure) = moving.switch_off(&record, &args.name).await {
        waiting.abort();
        return Err(failure);
    }
    joined(tokio::task::spawn_blocking(move || Vm::attach(record).kill()).await)?;
    let mut former = moving.leases.clone();
    let outcome = match moving.hand_over(waiting).await {
        Ok(leases) => {
            former.extend(leases.iter().cloned());
            moving.start(moving.to, leases).await
        }
        Err(failure) => Err(failure),
    };
    let record = match outcome {
        Ok(record) => record,
        Err(failure) => return Err(moving.put_back(args, &former, &failure.error).await),
    };
    context.output.result(&described(&record), |o| {
        let names: Vec<&str> = moving.leases.iter().map(|it| it.function.as_str()).collect();
        let with = if names.is_empty() { "nothing".to_owned() } else { names.join(", ") };
        o.line(&format!(
            "VM {} moved from {} to {} with {with}",
            args.name, moving.from, args.host
        ));
    });
    match requests.is_asked().await {
        true => Err(Failure::new(
            format!("VM {} is moved: the request to end came too late", args.name),
            "move it back with `rackbus vm move`",
        )),
        false => Ok(()),
    }
}

fn unanswered(name: &str) -> Failure {
    let error =
        format!("the control plane has not taken the request within {} s", PREPARED.as_secs());
    Failure::new(error, format!("VM {name} goes on where it is; see `rackbus control status`"))
}

impl<'a> Moving<'a> {
    /// Switches the VM off, or leaves it as it is; its firmware's variables are kept as firmware and system left them.
    async fn switch_off(&mut self, record: &VmRecord, name: &str) -> Result<(), Failure> {
        let kept = record.keep_variables().map_err(|error| {
            let error = format!("VM {name} is not moved: {error}");
            Failure::new(error, "move it when the cause is gone")
        })?;
        let mut vm = Vm::attach(record.clone());
        let off = joined(tokio::task::spawn_blocking(move || vm.power_off(OFF)).await)?;
        if let Err(error) = off {
            // It has them itself, where it goes on.
            kept.map(std::fs::remove_file);
            if matches!(error, VmError::AgentBusy(_) | VmError::NotAsked { .. }) {
                return Err(error.into());
            }
            return Err(Failure::new(
                format!(
                    "VM {name} is not moved: {error}; its guest was asked to switch itself off, and may still do so"
                ),
                format!(
                    "see its console.log; once it is off, start it at {} with `rackbus vm run`; while it goes on, it can be moved",
                    self.from
                ),
            ));
        }
        if let Some(path) = kept {
            let variables = std::fs::read(&path).map_err(|error| {
                let error =
                    format!("VM {name} is off and not moved: its firmware's variables: {error}");
                Failure::new(error, "start it with `rackbus vm run` when the cause is gone")
            })?;
            (self.kept, self.spec.variables) = (Some(path), Some(variables));
        }
        Ok(())
    }

    /// Ends what it had, and has what it gets at the new host, for which `waiting` asks.
    async fn hand_over(
        &self,
        waiting: JoinHandle<Result<Vec<Lease>, ControlClientError>>,
    ) -> Result<Vec<Lease>, Failure> {
        // Without effect where the control plane is away for long: whoever borrows below tries it again.
        let ended = tokio::time::timeout(HAND_OVER, self.end(&self.leases)).await;
        if !matches!(ended, Ok(Ok(()))) {
            waiting.abort();
        }
        match waiting.await {
            Ok(Ok(leases)) => Ok(leases),
            Ok(Err(error)) if !is_lost(&error) => Err(error.into()),
            // A control plane that is away for long has forgotten who waited.
            _ => self.borrow(self.to, &self.key, &self.leases).await,
        }
    }

    /// Starts it where it was, since it could not be moved because of `error`; what to tell the user.
    async fn put_back(&self, args: &MoveArgs, former: &[Lease], error: &str) -> Failure {
        let back = match self.borrow(&self.from, &ControlClient::new_key(), former).await {
            Ok(leases) => self.start(&self.from, leases).await,
            Err(failure) => Err(failure),
        };
        let (name, from) = (&args.name, &self.from);
        match back {
            Ok(_) => {
                let error =
                    format!("VM {name} is not moved and was started at {from} again: {error}");
                Failure::new(error, format!("see to the cause at {}, and move it again", args.host))
            }
            Err(back) => {
                let error = format!(
                    "VM {name} is not moved: {error}; nor could it be started at {from} again: {}",
                    back.error
                );
                let kept = self.kept.as_ref().map_or_else(String::new, |path| {
                    format!("; the variables of its firmware are in {}", path.display())
                });
                let remedy = format!("start it with `rackbus vm run` when the cause is gone{kept}");
                Failure::new(error, remedy)
            }
        }
    }

    /// Whether it can be moved at all: what is refused here changes nothing.
    async fn check(
        context: &'a Context<'a>,
        record: &VmRecord,
        to: &'a str,
    ) -> Result<Moving<'a>, Failure> {
        let VmRecord { name, host: from, .. } = record;
        let memory = record.memory_mib.saturating_add(plugged_mib(record)?);
        check_host(context, to, memory)?;
        let refused = |error: String, help: &str| Err(Failure::new(error, help));
        if from == to {
            return refused(format!("VM {name} runs on {to} already"), "name another host");
        }
        check_room(context, to, memory, "stop a VM of that host, or name another host")?;
        if record.fabric {
            let error = format!("VM {name} shares memory with the rack, which ends when it does");
            return refused(error, "stop it, and run it on the other host with --fabric");
        }
        let node = process::living(&context.run_dir);
        if !node.iter().any(|living| living.host.as_deref() == Some(to)) {
            let error = format!(
                "the node of {to} does not run on this machine: what VM {name} boots from, and its disks, are files here"
            );
            return refused(error, "stop it, bring its disks to that machine, and run it there");
        }
        let mut spec = record.spec().map_err(|error| {
            Failure::new(
                format!("VM {name} cannot be started anew: {error}"),
                "stop it, and run it on the other host",
            )
        })?;
        // It begins with what was plugged in meanwhile.
        spec.memory_mib = memory;
        check_files(&spec)?;
        let mut leases = leases_of(context, record).await?;
        let order = |lease: &Lease| {
            let known = spec.functions.iter().position(|it| it.name == lease.function);
            known.unwrap_or(usize::MAX)
        };
        leases.sort_by_key(order);
        check_leases(record, &leases)?;
        let devices = context.client.devices().await?;
        let waited = devices.iter().find(|device| {
            device.waiting > 0 && leases.iter().any(|lease| lease.function == device.function)
        });
        if let Some(device) = waited {
            let error = format!("{} requests wait for {}", device.waiting, device.function);
            return refused(error, "they come first; move the VM when they have had it");
        }
        let kept = |lease: &Lease| {
            let socket = lease.socket.as_deref().unwrap_or_default();
            InterruptChoice::noted(socket.as_ref()) == InterruptChoice::MsixKept
        };
        let msix = leases.iter().any(kept);
        Ok(Moving {
            context,
            from: from.clone(),
            to,
            spec,
            leases,
            msix,
            key: ControlClient::new_key(),
            kept: None,
        })
    }

    fn request(&self, host: &str) -> BorrowAllRequest {
        BorrowAllRequest {
            functions: self.leases.iter().map(|lease| lease.function.clone()).collect(),
            borrower: host.to_owned(),
            placement: self.leases.first().map(|lease| lease.placement).unwrap_or_default(),
            group: self.leases.first().and_then(|lease| lease.group.clone()),
            vm: None,
            wait_ms: Some(u64::try_from((OFF + HAND_OVER).as_millis()).unwrap_or(u64::MAX)),
            priority: u8::MAX,
        }
    }

    /// Has all functions asked for at the new host, before they are free; returns when that request waits.
    async fn wait_first(
        &self,
    ) -> Result<JoinHandle<Result<Vec<Lease>, ControlClientError>>, Failure> {
        let (client, request) = (self.context.client.clone(), self.request(self.to));
        let key = self.key.clone();
        let mut asked = tokio::spawn(async move {
            if request.functions.is_empty() {
                return Ok(Vec::new());
            }
            client.borrow_together(&request, &key).await
        });
        let deadline = tokio::time::Instant::now() + PREPARED;
        loop {
            let devices = tokio::time::timeout_at(deadline, self.context.client.devices()).await;
            let devices = match devices {
                Ok(devices) => devices?,
                // What it has answered is looked at.
                Err(_) if asked.is_finished() => Vec::new(),
                Err(_) => {
                    asked.abort();
                    return Err(unanswered(&self.spec.name));
                }
            };
            let waits = |lease: &Lease| {
                devices.iter().any(|it| it.function == lease.function && it.waiting > 0)
            };
            if self.leases.iter().all(waits) {
                return Ok(asked);
            }
            if let Ok(ended) = tokio::time::timeout(AGAIN, &mut asked).await {
                let name = &self.spec.name;
                return match joined(ended)? {
                    // Nobody has them any more: the VM ends by itself.
                    Ok(leases) => {
                        give_back_all(self.context, &leases).await;
                        let error = format!("VM {name} has released its functions");
                        Err(Failure::new(error, "see `rackbus vm list`, and try again"))
                    }
                    Err(error) => {
                        let failure = Failure::from(error);
                        let error = format!("VM {name} is not moved: {}", failure.error);
                        Err(Failure { error, ..failure })
                    }
                };
            }
        }
    }

    /// Borrows all functions for a host, as soon as they are available. An answer that was lost is asked for again
    /// under the same key. What is left of `former` leases is given back before: the request would wait for it.
    async fn borrow(&self, host: &str, key: &str, former: &[Lease]) -> Result<Vec<Lease>, Failure> {
        let request = self.request(host);
        if request.functions.is_empty() {
            return Ok(Vec::new());
        }
        let asked = async {
            loop {
                let asked = async {
                    self.end(former).await?;
                    self.context.client.borrow_together(&request, key).await
                };
                match asked.await {
                    Ok(leases) => return Ok(leases),
                    Err(error) if is_lost(&error) => tokio::time::sleep(AGAIN).await,
                    Err(error) => return Err(error.into()),
                }
            }
        };
        let late = || {
            let error = format!("the control plane does not lend them to {host}");
            Err(Failure::new(error, "see `rackbus status`"))
        };
        tokio::time::timeout(OFF + HAND_OVER, asked).await.unwrap_or_else(|_| late())
    }

    /// Ends those of its former leases that still go on, as soon as the control plane is there.
    async fn end(&self, former: &[Lease]) -> Result<(), ControlClientError> {
        loop {
            match self.end_once(former).await {
                Err(error) if is_lost(&error) => tokio::time::sleep(AGAIN).await,
                outcome => return outcome,
            }
        }
    }

    async fn end_once(&self, former: &[Lease]) -> Result<(), ControlClientError> {
        let live = self.context.client.leases(false).await?;
        for lease in live.iter().filter(|it| former.iter().any(|had| had.lease == it.lease)) {
            match self.context.client.give_back(lease.lease).await {
                Err(error) if is_lost(&error) => return Err(error),
                // Where it is refused, it has ended, or does: the request waits for the function.
                _ => {}
            }
        }
        Ok(())
    }

    /// Starts the VM at a host with what it has borrowed there; gives that back where it does not start.
    async fn start(&self, host: &str, leases: Vec<Lease>) -> Result<VmRecord, Failure> {
        let mut spec = self.spec.clone();
        spec.dir = registry::vms_dir(&self.context.run_dir, host).join(&spec.name);
        let lease = |name: &str| leases.iter().find(|lease| lease.function == name);
        let order = self.leases.iter().filter_map(|had| lease(&had.function));
        // What was plugged in later had one of the spare ports.
        let ports = spec.functions.len() + usize::from(spec.spare_ports);
        spec.functions = order.filter_map(function).collect();
        spec.spare_ports = u8::try_from(ports.saturating_sub(spec.functions.len())).unwrap_or(0);
        spec.console = rackbus_vm::Console::Socket;
        let started = async {
            show(&leases, self.msix).await?;
            let launch = move || Vm::launch(&Assets::of_user(), &spec);
            Ok(joined(tokio::task::spawn_blocking(launch).await)??.record().clone())
        };
        let outcome: Result<VmRecord, Failure> = started.await;
        match &outcome {
            Ok(_) => {
                // It has them in its folder now.
                let _ = self.kept.as_ref().map(std::fs::remove_file);
            }
            Err(_) => give_back_all(self.context, &leases).await,
        }
        outcome
    }
}

/// Whether asking again may give the answer.
fn is_lost(error: &ControlClientError) -> bool {
    match error {
        ControlClientError::Refused(refused) => refused.code == "ending",
        _ => true,
    }
}

/// Whether what it boots from is there.
fn check_files(spec: &VmSpec) -> Result<(), Failure> {
    let files = match &spec.boot {
        Boot::Guest(_) | Boot::Firmware => Vec::new(),
        Boot::Kernel { kernel, initrd, .. } => {
            std::iter::once(kernel).chain(initrd).cloned().collect()
        }
        Boot::Disk(image) => vec![image.clone()],
    };
    for file in files.into_iter().chain(spec.folder.clone()) {
        if let Err(cause) = std::fs::metadata(&file) {
            let (name, file) = (&spec.name, file.display());
            let error = format!("VM {name} could not be started again: {file}: {cause}");
            return Err(Failure::new(error, "put the file back where it was"));
        }
    }
    Ok(())
}

/// Whether what a VM has can be borrowed by another host on the same terms.
fn check_leases(record: &VmRecord, leases: &[Lease]) -> Result<(), Failure> {
    let VmRecord { name, host: from, .. } = record;
    let refused = |error: String, help: &str| Err(Failure::new(error, help));
    if leases.iter().any(|lease| lease.share.is_some()) {
        let error = format!("VM {name} takes turns on a function, as one of {from}");
        return refused(
            error,
            "leave the share first: rackbus share leave, and join for the other host",
        );
    }
    if leases.iter().any(|lease| lease.level.is_some()) {
        let error = format!("VM {name} has a function with a service level");
        return refused(error, "stop it, and run it on the other host");
    }
    if leases.iter().any(|lease| lease.placement != leases[0].placement) {
        let error = format!("the functions of VM {name} are borrowed on different terms");
        return refused(error, "stop it, and run it on the other host");
    }
    Ok(())
}
