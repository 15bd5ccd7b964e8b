//! `rackbus up` of a rack that is up: what changed in its file.

use std::path::Path;

use rackbus_control::ControlClient;
use rackbus_control::offers::{OfferRequest, RackSection, SectionState};
use rackbus_devices::RackDevice;
use toml::Table;

use crate::commands::{offers, read_text};
use crate::output::{Failure, Output};
use crate::paths;

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
    let changes = between(&known, &running.joined, &offers::sections(devices, &text));
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
    let Changes { withdrawn, offered } = changes;
    for device in withdrawn {
        let (host, name) = device.split_once('/').unwrap_or_default();
        client.withdraw(host, name, false).await?;
        running.joined.retain(|joined| *joined != device);
        running.note(run_dir)?;
        output.progress(&format!("{device}: out of the rack"));
    }
    for request in offered {
        // Noted before: where this ends in between, the device is still one of the file's.
        running.joined.push(request.device.clone());
        running.note(run_dir)?;
        let before = known.iter().find(|it| it.device == request.device && was_there(it));
        if let Err(error) = client.offer(&request).await {
            match before {
                Some(before) => offer_as_before(&client, &request, before, output).await,
                None => {
                    running.joined.retain(|joined| *joined != request.device);
                    running.note(run_dir)?;
                }
            }
            return Err(error.into());
        }
        output.progress(&format!("{}: joined the rack", request.device));
    }
    super::status::show(&client, output).await
}

/// Offers a device as what it was, where it cannot become another one: a drive's file of another size, for example, is
/// refused.
async fn offer_as_before(
    client: &ControlClient,
    request: &OfferRequest,
    before: &RackSection,
    output: &Output,
) {
    let again = OfferRequest { section: Some(before.section.clone()), ..request.clone() };
    let said = match client.offer(&again).await {
        Ok(_) => "as it was before",
        Err(_) => "out of the rack",
    };
    output.progress(&format!("{}: {said}", request.device));
}

fn was_there(section: &RackSection) -> bool {
    matches!(section.state, SectionState::Offered | SectionState::Joining)
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
        let other = changes(&BEFORE.replace("1 MiB", "2 MiB"));
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
