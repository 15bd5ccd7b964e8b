//! The nodes of a rack whose hosts come and go: those that stay are restarted in place with the new file, which their users
//! notice as a pause; new ones are started, and those of hosts that left end.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::time::Duration;

use rackbus_control::ControlClient;
use rackbus_control::api::LeaseStage;
use rackbus_control::node::RestartRequest;
use rackbus_fabric::rack::Rack;

use super::hosts::HostChanges;
use super::{StartedProcess, ready, start_node};
use crate::commands::restart::NotRestarted;
use crate::commands::{down, restart};
use crate::output::{Failure, Output, duration};
use crate::paths::RunningRack;
use crate::process;

/// How often a node is asked to go on that is busy, and the pause in between.
const ATTEMPTS: usize = 10;
const AGAIN: Duration = Duration::from_millis(200);

/// What is said where something is refused before anything changes.
const UNCHANGED: &str = "nothing was changed";

/// The nodes of a running rack.
pub struct RackNodes<'a> {
    run_dir: &'a Path,
    client: &'a ControlClient,
    output: &'a Output,
    /// As which they go on: this one.
    program: PathBuf,
    /// Those that were started here.
    children: Vec<StartedProcess>,
    /// The hosts whose nodes are among these.
    begun: BTreeSet<String>,
    /// Those that may go on with the new file: they were asked to, and have not refused.
    asked: BTreeSet<String>,
}

impl<'a> RackNodes<'a> {
    /// Those of the rack that runs in `run_dir`.
    pub fn new(
        run_dir: &'a Path,
        client: &'a ControlClient,
        output: &'a Output,
    ) -> Result<RackNodes<'a>, Failure> {
        let program = std::env::current_exe().map_err(|cause| {
            Failure::new(format!("this program: {cause}"), "start it by its path")
        })?;
        let (begun, asked) = (BTreeSet::new(), BTreeSet::new());
        Ok(RackNodes { run_dir, client, output, program, children: Vec::new(), begun, asked })
    }

    /// The hosts whose nodes run.
    pub fn living(run_dir: &Path) -> BTreeSet<String> {
        process::living(run_dir).into_iter().filter_map(|process| process.host).collect()
    }

    fn request(&self, text: &str) -> RestartRequest {
        RestartRequest { rack: Some(text.to_owned()), ..RestartRequest::of(self.program.clone()) }
    }

    /// Refuses changes of which is known that they would fail.
    pub async fn check(&self, hosts: &HostChanges, text: &str) -> Result<(), Failure> {
        self.check_leases(&hosts.gone()).await?;
        self.check_gone(hosts).await?;
        for host in &hosts.followed {
            let obstacle = restart::obstacle(self.run_dir, host, self.request(text));
            if let Some(refused) = obstacle.await? {
                let error = format!(
                    "hosts change, and the node of {host} cannot follow: {}",
                    refused.error
                );
                return Err(Failure::new(error, format!("{}; {UNCHANGED}", refused.remedy)));
            }
        }
        Ok(())
    }

    /// Refuses that hosts leave while a VM runs there, or processes have something of their nodes.
    pub async fn check_gone(&self, hosts: &HostChanges) -> Result<(), Failure> {
        for host in &hosts.gone() {
            if let Some(vm) = rackbus_vm::registry::list(self.run_dir, host)?.first() {
                let error = format!("host {host} leaves the rack, and VM {} runs on it", vm.name);
                let remedy = format!("stop it with `rackbus vm stop {}`, {UNCHANGED}", vm.name);
                return Err(Failure::new(error, remedy));
            }
            if !RackNodes::living(self.run_dir).contains(host) {
                continue;
            }
            // What keeps it from being restarted is what others would lose with it.
            let request = RestartRequest::of(self.program.clone());
            let obstacle = match restart::obstacle(self.run_dir, host, request).await {
                // It has ended meanwhile, and with it what others had of it.
                Err(_) if !RackNodes::living(self.run_dir).contains(host) => None,
                answer => answer?,
            };
            if let Some(refused) = obstacle {
                let error = format!("host {host} leaves the rack: {}", refused.error);
                return Err(Failure::new(error, format!("end that first; {UNCHANGED}")));
            }
        }
        Ok(())
    }

    /// Whether anybody has something of hosts that leave, or these of others.
    async fn check_leases(&self, left: &BTreeSet<String>) -> Result<(), Failure> {
        let refused = |host: &str, what: String, remedy: &str| {
            let error = format!("host {host} leaves the rack, and {what}");
            Err(Failure::new(error, format!("{remedy}; {UNCHANGED}")))
        };
        let leases = self.client.leases(false).await?;
        let live = leases.iter().filter(|lease| lease.stage != LeaseStage::Ended);
        for lease in live {
            let (function, borrower) = (&lease.function, &lease.borrower);
            let remedy = "wait until it is returned, or return it with `rackbus return`";
            if left.contains(&lease.lender) {
                return refused(&lease.lender, format!("{function} is lent to {borrower}"), remedy);
            }
            if left.contains(borrower) {
                return refused(borrower, format!("{function} is lent to it"), remedy);
            }
        }
        let concerned = |function: &str, borrower: &str| {
            let lender = function.split('/').next().unwrap_or_default();
            left.iter().find(|host| *host == lender || *host == borrower)
        };
        for share in self.client.shares().await? {
            if let Some(host) = concerned(&share.function, &share.borrower) {
                let what = format!("{} takes turns on {}", share.borrower, share.function);
                return refused(host, what, "end that with `rackbus share leave`");
            }
        }
        for composition in self.client.compositions().await?.iter().filter(|it| !it.in_rack_file) {
            let functions = composition.functions.iter();
            let mut named = functions.filter_map(|it| concerned(it, &composition.borrower));
            if let Some(host) = named.next() {
                let name = &composition.name;
                let remedy = format!("remove it with `rackbus composition remove {name}`");
                return refused(host, format!("the saved composition {name} names it"), &remedy);
            }
        }
        Ok(())
    }

    /// Has the nodes do their steps, each of which is noted: those that stay first, so that they let new ones in.
    pub async fn follow(
        &mut self,
        hosts: &HostChanges,
        text: &str,
        running: &mut RunningRack,
    ) -> Result<(), Failure> {
        // One that was started since it was looked which nodes run may have read the file of before.
        let late = hosts.late(&RackNodes::living(self.run_dir));
        for host in hosts.followed.union(&late) {
            self.asked.insert(host.clone());
            self.restart(host, text).await?;
            self.done(host, running)?;
        }
        for host in &hosts.started {
            self.children.push(start_node(host, self.run_dir, running.low_latency)?);
            self.begun.insert(host.clone());
        }
        let all: BTreeSet<String> = hosts.followed.union(&hosts.started).cloned().collect();
        if !all.is_empty() {
            // Those that went on, too, connect to the control plane anew.
            ready(self.client, &all, &mut self.children, self.output).await?;
        }
        for host in &hosts.started {
            self.output.progress(&format!("the node of {host} runs"));
            self.done(host, running)?;
        }
        Ok(())
    }

    fn done(&self, host: &str, running: &mut RunningRack) -> Result<(), Failure> {
        running.behind.retain(|behind| behind != host);
        running.note(self.run_dir)
    }

    /// Has a node go on with a file of this text. One that is busy for a moment is asked again.
    async fn restart(&mut self, host: &str, text: &str) -> Result<(), Failure> {
        let mut attempts = 1;
        let process = loop {
            match restart::restart(self.run_dir, host, self.request(text)).await {
                Ok(process) => break process,
                Err(NotRestarted::Unchanged(failure)) if attempts == ATTEMPTS => {
                    self.asked.remove(host);
                    return Err(failure);
                }
                Err(NotRestarted::Unchanged(_)) => attempts += 1,
                Err(NotRestarted::Silent(failure)) => return Err(failure),
            }
            tokio::time::sleep(AGAIN).await;
        };
        let pause = duration(process.pause_us as f64);
        self.output.progress(&format!("the node of {host} knows the new hosts after {pause}"));
        Ok(())
    }

    /// Ends the nodes of hosts that left `rack`, and removes what they leave in the run directory, also what an `up` that
    /// was killed has not removed.
    pub fn end(&self, hosts: &HostChanges, rack: &Rack) -> Result<(), Failure> {
        let gone = hosts.gone();
        for process in process::living(self.run_dir) {
            let Some(host) = process.host.as_ref().filter(|host| gone.contains(*host)) else {
                continue;
            };
            if !process.end() {
                let error = format!(
                    "the node of {host} was killed and has not ended (process {})",
                    process.pid()
                );
                let remedy = "it waits in the kernel, most likely for storage; see to that, then run `rackbus up` again";
                return Err(Failure::new(error, remedy));
            }
            self.output.progress(&format!("the node of {host} has ended"));
        }
        let living = RackNodes::living(self.run_dir);
        let entries = std::fs::read_dir(self.run_dir).into_iter().flatten().flatten();
        let names = entries.filter_map(|entry| entry.file_name().into_string().ok());
        let is_node = |host: &String| process::pid_file(self.run_dir, Some(host)).exists();
        names
            .filter(|host| is_node(host) && rack.host(host).is_none() && !living.contains(host))
            .for_each(|host| down::clean_host(self.run_dir, &rack.name, &host));
        Ok(())
    }

    /// Which nodes may go on with the new file, or were started here.
    pub fn touched(&self) -> BTreeSet<String> {
        self.begun.union(&self.asked).cloned().collect()
    }

    /// Ends the nodes that were started here.
    pub fn end_started(&mut self, rack: &str) {
        for (name, mut child, _) in std::mem::take(&mut self.children).into_iter().rev() {
            self.output.progress(&format!("stopping {name}"));
            process::end_child(&mut child);
        }
        self.begun.iter().for_each(|host| down::clean_host(self.run_dir, rack, host));
    }

    /// Has the nodes that may go on with the new file go on with that of before, all that can; `behind` are the hosts that
    /// were to follow before that.
    pub async fn take_back(
        &mut self,
        text: &str,
        behind: &[String],
        running: &mut RunningRack,
    ) -> Result<(), Failure> {
        running.behind = behind.to_vec();
        running.behind.extend(self.asked.iter().filter(|it| !behind.contains(it)).cloned());
        running.note(self.run_dir)?;
        let living = RackNodes::living(self.run_dir);
        let mut first = Ok(());
        for host in std::mem::take(&mut self.asked) {
            // One that does not run reads the file when it is started.
            let restarted = match living.contains(&host) {
                true => self.restart(&host, text).await,
                false if behind.contains(&host) => continue,
                false => Ok(()),
            };
            match restarted {
                Ok(()) => self.done(&host, running)?,
                Err(failure) => first = first.and(Err(failure)),
            }
        }
        first
    }
}
