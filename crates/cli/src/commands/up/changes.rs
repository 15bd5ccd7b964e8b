//! `rackbus up` of a rack that is up: what changed in its file.

use std::path::Path;

use rackbus_control::ControlClient;
use rackbus_control::offers::{OfferRequest, RackSection, SectionState};
use rackbus_devices::RackDevice;
use toml::Table;

use crate::commands::{offers, read_text};
use crate::output::{Failure, Output};
use crate::paths::{self, RunningRack};

/// What is to be done so that the rack is as its file says.
#[derive(Debug, Default, PartialEq, Eq)]
struct Changes {
    /// Devices that are not listed any more, or are described otherwise, `HOST/DEVICE`.
    withdrawn: Vec<String>,
    /// Devices that join; those that the rack was started with have no section.
    offered: Vec<OfferRequest>,
}

impl Changes {
    /// What is to be done, for people: a line for each device.
    fn lines(&self) -> Vec<String> {
        let joins = |device: &String| self.offered.iter().any(|it| it.device == *device);
        let leave = self.withdrawn.iter().map(|device| match joins(device) {
            true => format!("{device} is described otherwise: it leaves the rack and joins anew"),
            false => format!("{device} is not in the file any more: it leaves the rack"),
        });
        let new = self.offered.iter().filter(|it| !self.withdrawn.contains(&it.device));
        leave.chain(new.map(|it| format!("{} is new: it joins the rack", it.device))).collect()
    }
}

/// Makes the rack that runs in `run_dir` one of `file`, which describes `devices`, as far as that can be done while it
/// runs. What is known to be impossible is refused before anything changes; what fails on the way leaves what was done.
pub async fn apply(
    run_dir: &Path,
    file: &Path,
    devices: &[RackDevice],
    output: &Output,
) -> Result<(), Failure> {
    let text = read_text(file)?;
    let mut running = paths::running(run_dir)?;
    let others = others(&running.text()?, &text);
    if !others.is_empty() {
        let error = format!("this cannot change while the rack runs: {}", others.join(", "));
        return Err(Failure::new(error, "stop the rack with `rackbus down` and start it again"));
    }
    let client = ControlClient::new(&rackbus_node::control_socket(run_dir));
    let known = client.sections().await?;
    let wanted = offers::sections(devices, &text);
    if let Some(device) = listed_otherwise(&known, &wanted) {
        let error = format!("the rack was started with another {device}; nothing was changed");
        return Err(Failure::new(error, "stop the rack with `rackbus down` and start it again"));
    }
    let changes = between(&known, &running.joined, &wanted);
    let devices = client.devices().await?;
    let leaves = |function: &str| {
        let section = known.iter().find(|it| it.functions.iter().any(|name| name == function));
        section.is_some_and(|it| changes.withdrawn.contains(&it.device))
    };
    let used = devices.iter().find(|it| it.holder.is_some() && leaves(&it.function));
    if let Some((used, holder)) = used.and_then(|it| Some((it, it.holder.as_ref()?))) {
        let error = format!("{} leaves the rack, and is lent to {holder}", used.function);
        return Err(Failure::new(error, "wait until it is returned; nothing was changed"));
    }
    let lines = changes.lines();
    match lines.is_empty() {
        true => output.progress("the rack is up, and as the file says"),
        false => lines.iter().for_each(|line| output.progress(line)),
    }
    let mut followed = Following { client: &client, running: &mut running, run_dir, output };
    let outcome = followed.follow(&changes).await;
    if outcome.is_err() {
        followed.put_back(&known, &changes).await;
    }
    outcome?;
    super::status::show(&client, output).await
}

/// A rack that becomes as its file says, and the note of what of it an earlier file listed.
struct Following<'a> {
    client: &'a ControlClient,
    running: &'a mut RunningRack,
    run_dir: &'a Path,
    output: &'a Output,
}

impl Following<'_> {
    /// First all that leaves: a device that is described otherwise may take what another one had, its file for example.
    async fn follow(&mut self, changes: &Changes) -> Result<(), Failure> {
        for device in &changes.withdrawn {
            self.withdraw(device).await?;
        }
        for request in &changes.offered {
            self.offer(request).await?;
        }
        Ok(())
    }

    /// Offers what was to become another device and did not, as what it was: a drive's file of another size, for example,
    /// is refused, and the next ones of the file are not to leave the rack for that.
    async fn put_back(&mut self, known: &[RackSection], changes: &Changes) {
        let Ok(now) = self.client.sections().await else { return };
        let is_there = |device: &str| now.iter().any(|it| it.device == device && was_there(it));
        for request in changes.offered.iter().filter(|it| !is_there(&it.device)) {
            let before = known.iter().find(|it| it.device == request.device && was_there(it));
            let Some(before) = before else { continue };
            let again = OfferRequest { section: Some(before.section.clone()), ..request.clone() };
            let said = match self.offer(&again).await {
                Ok(()) => "as it was before".to_owned(),
                Err(failure) => format!("out of the rack: {}", failure.error),
            };
            self.output.progress(&format!("{}: {said}", request.device));
        }
    }

    async fn withdraw(&mut self, device: &str) -> Result<(), Failure> {
        let (host, name) = device.split_once('/').unwrap_or_default();
        self.client.withdraw(host, name, false).await?;
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

fn was_there(section: &RackSection) -> bool {
    matches!(section.state, SectionState::Offered | SectionState::Joining)
}

/// A device that the rack was started with, and that the file describes otherwise now: it cannot become another one while
/// the rack runs, as its description is that of the rack's own file.
fn listed_otherwise<'a>(
    known: &'a [RackSection],
    wanted: &rackbus_control::service::Sections,
) -> Option<&'a str> {
    let differs = |it: &&RackSection| {
        let (host, device) = it.device.split_once('/').unwrap_or_default();
        let wanted = wanted.get(&(host.to_owned(), device.to_owned()));
        it.listed && wanted.is_some_and(|wanted| wanted.text != it.section)
    };
    known.iter().find(differs).map(|it| it.device.as_str())
}

/// What leads from the devices that are `known` to those that are `wanted`. `joined` are those that an earlier file listed
/// beside the ones that the rack was started with; what others offered at run time is left alone.
fn between(
    known: &[RackSection],
    joined: &[String],
    wanted: &rackbus_control::service::Sections,
) -> Changes {
    let mut changes = Changes::default();
    let named = |name: &str| {
        let (host, device) = name.split_once('/').unwrap_or_default();
        wanted.get(&(host.to_owned(), device.to_owned()))
    };
    let there = |it: &&RackSection| was_there(it);
    for section in known.iter().filter(there) {
        match named(&section.device) {
            Some(wanted) if wanted.text == section.section => {}
            Some(_) => changes.withdrawn.push(section.device.clone()),
            None if section.listed || joined.contains(&section.device) => {
                changes.withdrawn.push(section.device.clone())
            }
            None => {}
        }
    }
    for ((host, device), section) in wanted {
        let device = format!("{host}/{device}");
        let has = |it: &RackSection| it.device == device && it.section == section.text;
        if !known.iter().filter(there).any(has) {
            let section = Some(section.text.clone());
            changes.offered.push(OfferRequest { device, section, by_node: false });
        }
    }
    changes
}

/// What of two rack files differs besides devices.
fn others(before: &str, after: &str) -> Vec<String> {
    let without_devices = |text: &str| {
        let mut rack: Table = text.parse().unwrap_or_default();
        let hosts = rack.get_mut("hosts").and_then(|hosts| hosts.as_table_mut());
        for (_, host) in hosts.into_iter().flatten() {
            host.as_table_mut().map(|host| host.remove("devices"));
        }
        rack
    };
    let (before, after) = (without_devices(before), without_devices(after));
    let hosts =
        |rack: &Table| rack.get("hosts").and_then(|it| it.as_table()).cloned().unwrap_or_default();
    let mut differ = differing(&before, &after);
    if differ.iter().any(|key| key == "hosts") {
        differ.retain(|key| key != "hosts");
        let own = differing(&hosts(&before), &hosts(&after));
        differ.extend(own.into_iter().map(|host| format!("hosts.{host}")));
    }
    differ
}

/// The keys whose values differ.
fn differing(before: &Table, after: &Table) -> Vec<String> {
    let keys = before.keys().chain(after.keys().filter(|key| !before.contains_key(*key)));
    keys.filter(|key| before.get(*key) != after.get(*key)).cloned().collect()
}

#[cfg(test)]
mod tests {
    use rackbus_devices::class::parse_rack;

    use super::*;

    const BEFORE: &str =
        "name = \"lab\"\n[hosts.a.devices.n]\nkind = \"nvme\"\nsize = \"1 MiB\"\n[hosts.b]\n";

    fn known(text: &str) -> Vec<RackSection> {
        let (_, devices) = parse_rack("rack.toml", text).unwrap();
        let sections = offers::sections(&devices, text);
        let shown = sections.into_iter().map(|((host, device), section)| RackSection {
            device: format!("{host}/{device}"),
            functions: Vec::new(),
            section: section.text,
            listed: true,
            by_node: false,
            state: SectionState::Offered,
            trouble: None,
        });
        shown.collect()
    }

    fn changes(after: &str) -> Changes {
        let (_, devices) = parse_rack("rack.toml", after).unwrap();
        between(&known(BEFORE), &[], &offers::sections(&devices, after))
    }

    #[test]
    fn devices_join_and_leave_and_nothing_else_changes() {
        assert_eq!(changes(BEFORE), Changes::default());
        let more = format!("{BEFORE}[hosts.b.devices.m]\nkind = \"nvme\"\nsize = \"2 MiB\"\n");
        let found = changes(&more);
        assert_eq!(found.withdrawn, Vec::<String>::new());
        assert_eq!(found.offered[0].device, "b/m");
        assert!(others(BEFORE, &more).is_empty());
        let less = "name = \"lab\"\n[hosts.a]\n[hosts.b]\n";
        assert_eq!(changes(less).withdrawn, ["a/n"]);
        let joined = |text: &str| {
            let known = known(text).into_iter().map(|it| RackSection { listed: false, ..it });
            known.collect::<Vec<_>>()
        };
        let (_, devices) = parse_rack("rack.toml", &BEFORE.replace("1 MiB", "2 MiB")).unwrap();
        let wanted = offers::sections(&devices, &BEFORE.replace("1 MiB", "2 MiB"));
        assert_eq!(listed_otherwise(&known(BEFORE), &wanted), Some("a/n"));
        assert_eq!(listed_otherwise(&joined(BEFORE), &wanted), None);
        let other = between(&joined(BEFORE), &[], &wanted);
        assert_eq!(
            (&other.withdrawn[..], &other.offered[0].device[..]),
            (&["a/n".into()][..], "a/n")
        );
        let lines = other.lines();
        assert!(lines.len() == 1 && lines[0].contains("joins anew"), "{lines:?}");
    }

    #[test]
    fn what_is_no_device_is_named() {
        assert_eq!(others(BEFORE, &format!("{BEFORE}[hosts.c]\n")), ["hosts.c"]);
        assert_eq!(
            others(BEFORE, &format!("{BEFORE}[control]\nlease_ttl = \"3 s\"\n")),
            ["control"]
        );
    }
}
