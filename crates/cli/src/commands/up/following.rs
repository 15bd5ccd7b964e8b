//! `rackbus up` of a rack that is up: the rack becomes as its file says.
//!
//! All that can be known to be impossible is refused before anything changes. Then devices leave, hosts come and go
//! ([`RackNodes`]), and devices join; each step is noted first, so that another `rackbus up` goes on with what one that was
//! killed has left. What fails on the way is undone; the nodes of hosts that left end last, when nothing can fail any more.

use std::collections::BTreeSet;
use std::path::Path;

use rackbus_control::ControlClient;
use rackbus_control::api::HostState;
use rackbus_control::offers::{OfferRequest, RackSection, SectionState};
use rackbus_control::service::Sections;
use rackbus_devices::RackDevice;
use rackbus_devices::class::parse_rack;
use rackbus_fabric::rack::Rack;

use super::changes::{
    ChangeKind, Changes, FileChange, between, composition_names, interim, was_there,
};
use super::fixed::{self, ListedFile, others};
use super::hosts::{HostChanges, HostsKnown};
use super::nodes::RackNodes;
use crate::commands::{misread, offers, read_text};
use crate::output::{Cell, Failure, Output, Tone};
use crate::paths::{self, RunningRack};

/// What somebody does who wants more than a running rack can do.
const START_AGAIN: &str =
    "nothing was changed; stop the rack with `rackbus down` and start it again with this file";

/// Makes the rack that runs in `run_dir` one of `file`, which describes `rack` and `devices`, as far as that can be done
/// while it runs. What is known to be impossible is refused before anything changes; what fails on the way is undone.
pub async fn apply(
    run_dir: &Path,
    file: &Path,
    (rack, devices): (&Rack, &[RackDevice]),
    output: &Output,
) -> Result<(), Failure> {
    let text = read_text(file)?;
    let running = paths::running(run_dir)?;
    let client = ControlClient::new(&rackbus_node::control_socket(run_dir));
    let before = Before {
        text: running.text()?,
        joined: running.joined.clone(),
        behind: running.behind.clone(),
    };
    let (old_rack, old_devices) = parse_rack("the rack's file", &before.text).map_err(misread)?;
    let old = ListedFile { text: &before.text, rack: &old_rack, devices: &old_devices };
    let others = others(&old, &ListedFile { text: &text, rack, devices });
    if !others.is_empty() {
        let error = format!("this cannot change while the rack runs: {}", others.join(", "));
        return Err(Failure::new(error, START_AGAIN));
    }
    let mut nodes = RackNodes::new(run_dir, &client, output)?;
    let (hosts, stay) = host_changes(&client, run_dir, rack, &running).await?;
    let known = client.sections().await?;
    let of_staying = |device: &str| stay.contains(device.split('/').next().unwrap_or_default());
    let known: Vec<RackSection> =
        known.into_iter().filter(|section| of_staying(&section.device)).collect();
    let mut wanted = offers::sections(devices, &text);
    wanted.retain(|(host, _), _| stay.contains(host));
    let changes = between(&known, &before.joined, &before.text, (&wanted, &text));
    let interim = interim(&old.sections(), (&wanted, &text), &changes).map_err(|error| {
        let error = format!("a device that joins is named elsewhere in the file: {error}");
        Failure::new(error, START_AGAIN)
    })?;
    check(&client, &known, &changes, &interim).await?;
    nodes.check(&hosts, &text).await?;
    let sections = fixed::sections(&before.text, &text);
    let all: Vec<FileChange> =
        hosts.all().into_iter().chain(sections).chain(changes.all()).collect();
    match all.is_empty() && hosts.is_empty() {
        true => output.progress("the rack is up, and as the file says"),
        false => all.iter().for_each(|it| output.progress(&it.line())),
    }
    let plan = Plan { changes, hosts, interim, text };
    let mut following = Following { client: &client, running, run_dir, output };
    if let Err(failure) = following.follow(&plan, &mut nodes).await {
        following.undo(&plan, &known, &wanted, &before, &mut nodes).await;
        return Err(failure);
    }
    nodes.end(&plan.hosts, rack)?;
    output.result(&all, |o| {
        if !all.is_empty() {
            o.table(&["what", "name", "change"], all.iter().map(row).collect());
        }
    });
    match output.is_json() {
        true => Ok(()),
        false => crate::commands::status::show(&client, output).await,
    }
}

fn row(change: &FileChange) -> Vec<Cell> {
    let kind = match change.change {
        ChangeKind::Added => Cell("added".into(), Tone::Good),
        ChangeKind::Removed => Cell("removed".into(), Tone::Plain),
        ChangeKind::Changed => Cell("changed".into(), Tone::Plain),
    };
    vec![change.part.word().to_owned().into(), change.name.clone().into(), kind]
}

/// Which hosts come and go, and the names of those that stay: the control plane says which there are.
async fn host_changes(
    client: &ControlClient,
    run_dir: &Path,
    rack: &Rack,
    running: &RunningRack,
) -> Result<(HostChanges, BTreeSet<String>), Failure> {
    let status = client.status().await?;
    let before: BTreeSet<String> = status.hosts.into_iter().map(|it| it.host).collect();
    let after: BTreeSet<String> = rack.hosts.iter().map(|host| host.name.clone()).collect();
    let living = RackNodes::living(run_dir);
    let behind = running.behind.iter().cloned().collect();
    let known = HostsKnown { before: &before, after: &after, living: &living, behind: &behind };
    Ok((HostChanges::between(known), before.intersection(&after).cloned().collect()))
}

/// Refuses changes of which is known that they would fail.
async fn check(
    client: &ControlClient,
    known: &[RackSection],
    changes: &Changes,
    interim: &str,
) -> Result<(), Failure> {
    let leaves = |function: &str| {
        let section = known.iter().find(|it| it.functions.iter().any(|name| name == function));
        section.is_some_and(|it| changes.withdrawn.contains(&it.device))
    };
    let devices = client.devices().await?;
    let used = devices.iter().find(|it| it.holder.is_some() && leaves(&it.function));
    if let Some((used, holder)) = used.and_then(|it| Some((it, it.holder.as_ref()?))) {
        let error = format!("{} leaves the rack, and is lent to {holder}", used.function);
        return Err(Failure::new(error, "wait until it is returned; nothing was changed"));
    }
    if let Some(share) = client.shares().await?.into_iter().find(|it| leaves(&it.function)) {
        let error =
            format!("{} leaves the rack, and {} takes turns on it", share.function, share.borrower);
        return Err(Failure::new(error, "wait until it is free; nothing was changed"));
    }
    let offered = changes.offered.iter().map(|it| &it.device);
    let hosts: BTreeSet<&str> =
        offered.chain(&changes.withdrawn).filter_map(|it| Some(it.split_once('/')?.0)).collect();
    let status = client.status().await?;
    let down =
        status.hosts.iter().find(|it| hosts.contains(&it.host[..]) && it.state != HostState::Up);
    if let Some(host) = down {
        let error = format!("devices of {} change, and its node is not up", host.host);
        return Err(Failure::new(error, "see `rackbus status`; nothing was changed"));
    }
    check_compositions(client, changes, interim).await
}

async fn check_compositions(
    client: &ControlClient,
    changes: &Changes,
    interim: &str,
) -> Result<(), Failure> {
    let stay = composition_names(interim);
    for composition in client.compositions().await? {
        let name = &composition.name;
        let comes = |(it, _): &(String, ChangeKind)| it == name;
        if !composition.in_rack_file && changes.compositions.iter().any(comes) {
            let error = format!("a composition {name} was saved beside those of the rack file");
            let remedy =
                format!("remove it with `rackbus composition remove {name}`; nothing was changed");
            return Err(Failure::new(error, remedy));
        }
        if let Some(lease) = composition.leases.first()
            && composition.in_rack_file
            && !stay.contains(name)
        {
            let error =
                format!("composition {name} changes, and {} of it is borrowed", lease.function);
            let remedy =
                format!("return it with `rackbus composition return {name}`; nothing was changed");
            return Err(Failure::new(error, remedy));
        }
    }
    Ok(())
}

/// What is to be done so that the rack is as its file says.
struct Plan {
    changes: Changes,
    hosts: HostChanges,
    /// The file until the devices that join have joined.
    interim: String,
    text: String,
}

impl Plan {
    /// The file with which the nodes of a rack go on whose hosts change.
    fn first_text(&self) -> &str {
        match self.changes.offered.is_empty() {
            true => &self.text,
            false => &self.interim,
        }
    }
}

/// What the rack's file was, which devices beside it were an earlier file's, and which nodes were behind it.
struct Before {
    text: String,
    joined: Vec<String>,
    behind: Vec<String>,
}

/// A rack that becomes as its file says, and the note of what of it an earlier file listed.
struct Following<'a> {
    client: &'a ControlClient,
    running: RunningRack,
    run_dir: &'a Path,
    output: &'a Output,
}

impl Following<'_> {
    /// First all that leaves: a device that is described otherwise may take what another one had, its file for example.
    async fn follow(&mut self, plan: &Plan, nodes: &mut RackNodes<'_>) -> Result<(), Failure> {
        let Plan { changes, hosts, text, .. } = plan;
        self.running.behind = hosts.behind();
        for device in &changes.withdrawn {
            self.withdraw(device).await?;
        }
        if !changes.offered.is_empty() || !hosts.is_empty() {
            self.be_of(plan.first_text()).await?;
        }
        nodes.follow(hosts, plan.first_text(), &mut self.running).await?;
        // Somebody may have begun to use them since it was looked.
        nodes.check_gone(hosts).await?;
        for request in &changes.offered {
            self.offer(request).await?;
        }
        self.be_of(text).await?;
        // The control plane knows that the file lists them.
        self.running.joined.clear();
        self.running.note(self.run_dir)
    }

    /// What the rack's processes take for its file from now on.
    async fn be_of(&mut self, text: &str) -> Result<(), Failure> {
        self.running.text = Some(text.to_owned());
        self.running.note(self.run_dir)?;
        self.client.follow_file(text).await?;
        Ok(())
    }

    /// Makes the rack what it was `before`: what joined leaves, and what left joins. A drive's file of another size, for
    /// example, is refused by its node, and the next ones of the file are not to leave the rack for that.
    async fn undo(
        &mut self,
        plan: &Plan,
        known: &[RackSection],
        wanted: &Sections,
        before: &Before,
        nodes: &mut RackNodes<'_>,
    ) {
        // Noted first: where this ends in between, another `up` has them follow the file that is noted then, whichever.
        let touched = nodes.touched().into_iter();
        let more = touched.filter(|host| !self.running.behind.contains(host));
        let more: Vec<String> = more.collect();
        self.running.behind.extend(more);
        let mut undone = self.running.note(self.run_dir);
        nodes.end_started(&self.running.rack);
        if undone.is_ok() {
            undone = self.try_undo(known, &plan.changes, wanted, before).await;
        }
        if undone.is_ok() {
            undone = nodes.take_back(&before.text, &before.behind, &mut self.running).await;
        }
        if let Err(failure) = undone {
            let error = format!(
                "not all is as before: {}; `rackbus up` with a file that can be followed goes on from here",
                failure.error
            );
            self.output.progress(&error);
        }
    }

    async fn try_undo(
        &mut self,
        known: &[RackSection],
        changes: &Changes,
        wanted: &Sections,
        before: &Before,
    ) -> Result<(), Failure> {
        let now = self.client.sections().await?;
        let was = |device: &str| known.iter().find(|it| it.device == device && was_there(it));
        for section in now.iter().filter(|it| was_there(it)) {
            let (host, device) = section.device.split_once('/').unwrap_or_default();
            let new = wanted.get(&(host.to_owned(), device.to_owned()));
            let came = changes.offered.iter().any(|it| it.device == section.device)
                && new.is_some_and(|it| it.text == section.section);
            if came && was(&section.device).is_none_or(|it| it.section != section.section) {
                self.withdraw(&section.device).await?;
            }
        }
        for section in changes.withdrawn.iter().filter_map(|device| was(device)) {
            let request = OfferRequest {
                device: section.device.clone(),
                section: Some(section.section.clone()),
                by_node: false,
            };
            self.offer(&request).await?;
            self.output.progress(&format!("{}: as it was before", section.device));
        }
        self.be_of(&before.text).await?;
        self.running.joined.clone_from(&before.joined);
        self.running.note(self.run_dir)
    }

    async fn withdraw(&mut self, device: &str) -> Result<(), Failure> {
        let (host, name) = device.split_once('/').unwrap_or_default();
        let withdrawn = self.client.withdraw(host, name, false).await?;
        if withdrawn.state != SectionState::Withdrawn {
            let error = format!("the node of {host} is gone, and has not released {device}");
            return Err(Failure::new(error, "start that node, and `rackbus up` again"));
        }
        self.running.joined.retain(|joined| joined != device);
        self.running.note(self.run_dir)?;
        self.output.progress(&format!("{device}: out of the rack"));
        Ok(())
    }

    async fn offer(&mut self, request: &OfferRequest) -> Result<(), Failure> {
        let OfferRequest { device, .. } = request;
        // Noted before: where this ends in between, the device is still one of the file's.
        self.running.joined.push(device.clone());
        self.running.note(self.run_dir)?;
        if let Err(error) = self.client.offer(request).await {
            self.running.joined.retain(|joined| joined != device);
            self.running.note(self.run_dir)?;
            return Err(error.into());
        }
        self.output.progress(&format!("{device}: joined the rack"));
        Ok(())
    }
}
