//! What changed of devices and compositions in the file of a rack that is up.

use std::collections::{BTreeMap, BTreeSet};

use rackbus_control::offers::{OfferRequest, RackSection, SectionState};
use rackbus_control::service::Sections;
use rackbus_devices::class::parse_rack;
use serde::Serialize;
use toml::{Table, Value};

/// The name that errors have for a file without what is to join.
const INTERIM: &str = "the file without the devices that join";

/// What becomes of a part of the rack.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum ChangeKind {
    /// The file has it, and the rack has not.
    Added,
    /// The rack has it by an earlier file, and this one has not.
    Removed,
    /// The file describes it otherwise than it is.
    Changed,
}

/// What kind of part of the rack changes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum ChangedPart {
    /// A device with all of its functions.
    Device,
    /// A composition of the file.
    Composition,
    /// A host, with all that it has.
    Host,
    /// A section of the file that is followed as a whole: `fabric`, `timing` or `share`.
    Section,
}

impl ChangedPart {
    /// Its word for tables, as in JSON.
    pub fn word(self) -> &'static str {
        match self {
            ChangedPart::Device => "device",
            ChangedPart::Composition => "composition",
            ChangedPart::Host => "host",
            ChangedPart::Section => "section",
        }
    }
}

/// One change, as it is shown.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct FileChange {
    /// What kind of part it is.
    pub part: ChangedPart,
    /// Its name: `HOST/DEVICE`, that of the composition or of the host, or the section's key.
    pub name: String,
    /// What becomes of it.
    pub change: ChangeKind,
}

impl FileChange {
    /// The same for people.
    pub fn line(&self) -> String {
        let name = &self.name;
        match (self.part, self.change) {
            (ChangedPart::Device, ChangeKind::Changed) => {
                format!("{name} is described otherwise: it leaves the rack and joins anew")
            }
            (ChangedPart::Device, ChangeKind::Removed) => {
                format!("{name} is not in the file any more: it leaves the rack")
            }
            (ChangedPart::Device, ChangeKind::Added) => format!("{name} is new: it joins the rack"),
            (ChangedPart::Host, ChangeKind::Removed) => {
                format!(
                    "host {name} is not in the file any more: it leaves the rack, and its node ends"
                )
            }
            (ChangedPart::Host, _) => format!("host {name} is new: its node is started"),
            (ChangedPart::Section, _) => format!("`{name}` is described otherwise"),
            (ChangedPart::Composition, ChangeKind::Changed) => {
                format!("composition {name} is described otherwise")
            }
            (ChangedPart::Composition, ChangeKind::Removed) => {
                format!("composition {name} is not in the file any more")
            }
            (ChangedPart::Composition, ChangeKind::Added) => format!("composition {name} is new"),
        }
    }
}

/// What is to be done so that the rack is as its file says.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Changes {
    /// Devices that are not listed any more, or are described otherwise, `HOST/DEVICE`.
    pub withdrawn: Vec<String>,
    /// Devices that join, or join anew.
    pub offered: Vec<OfferRequest>,
    /// Compositions that differ, by name.
    pub compositions: Vec<(String, ChangeKind)>,
}

impl Changes {
    /// What is to be done: one for each device and composition.
    pub fn all(&self) -> Vec<FileChange> {
        let joins = |device: &String| self.offered.iter().any(|it| it.device == *device);
        let device = |name: &String, change| FileChange {
            part: ChangedPart::Device,
            name: name.clone(),
            change,
        };
        let leave = self.withdrawn.iter().map(|name| {
            device(name, if joins(name) { ChangeKind::Changed } else { ChangeKind::Removed })
        });
        let new = self.offered.iter().filter(|it| !self.withdrawn.contains(&it.device));
        let join = new.map(|it| device(&it.device, ChangeKind::Added));
        let compositions = self.compositions.iter().map(|(name, change)| FileChange {
            part: ChangedPart::Composition,
            name: name.clone(),
            change: *change,
        });
        leave.chain(join).chain(compositions).collect()
    }
}

/// Whether the rack has the device, or is about to.
pub fn was_there(section: &RackSection) -> bool {
    matches!(section.state, SectionState::Offered | SectionState::Joining)
}

/// What leads from the devices that are `known` to those that `after` lists, and from its compositions `before` to the
/// new ones. `joined` are devices that an earlier file listed beside the ones that the control plane knows to be listed;
/// what others offered at run time is left alone.
pub fn between(
    known: &[RackSection],
    joined: &[String],
    before: &str,
    (wanted, after): (&Sections, &str),
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
    let (before, after) = (compositions(before), compositions(after));
    let names: BTreeSet<&String> = before.keys().chain(after.keys()).collect();
    for name in names {
        let change = match (before.get(name), after.get(name)) {
            (Some(old), Some(new)) if old == new => continue,
            (Some(_), Some(_)) => ChangeKind::Changed,
            (Some(_), None) => ChangeKind::Removed,
            (None, _) => ChangeKind::Added,
        };
        changes.compositions.push((name.clone(), change));
    }
    changes
}

/// The text of the file that holds until the devices that are `offered` have joined: the new one without them, and
/// without the compositions that differ or have functions of them. A process of the rack that starts meanwhile reads it.
///
/// # Errors
/// Why there is no such rack, for people: something else in the file names a device that joins.
pub fn interim(
    before: &Sections,
    (wanted, text): (&Sections, &str),
    changes: &Changes,
) -> Result<String, String> {
    let mut rack: Table = text.parse().unwrap_or_default();
    let mut joining = BTreeSet::new();
    for OfferRequest { device, .. } in &changes.offered {
        let (host, name) = device.split_once('/').unwrap_or_default();
        let key = (host.to_owned(), name.to_owned());
        let section = wanted.get(&key);
        if section.is_some() && section == before.get(&key) {
            // One of the file's that was withdrawn since.
            continue;
        }
        let functions = section.iter().flat_map(|it| &it.functions);
        joining.extend(functions.map(|function| format!("{host}/{function}")));
        let devices = ["hosts", host, "devices"]
            .iter()
            .try_fold(&mut rack, |table, key| table.get_mut(*key).and_then(Value::as_table_mut));
        if let Some(devices) = devices {
            devices.remove(name);
        }
    }
    let stays = |entry: &Value| {
        let differs = |name: &str| changes.compositions.iter().any(|(it, _)| it == name);
        let of_joining =
            |function: &Value| function.as_str().is_some_and(|it| joining.contains(it));
        let functions = entry.get("functions").and_then(Value::as_array);
        let name = entry.get("name").and_then(Value::as_str).unwrap_or_default();
        !differs(name) && !functions.is_some_and(|all| all.iter().any(of_joining))
    };
    if let Some(compositions) = rack.get_mut("composition").and_then(Value::as_array_mut) {
        compositions.retain(stays);
    }
    let text = toml::to_string(&rack).map_err(|error| error.to_string())?;
    match parse_rack(INTERIM, &text) {
        Ok(_) => Ok(text),
        Err(error) => Err(error.what),
    }
}

/// Names of the compositions that a file has.
pub fn composition_names(text: &str) -> BTreeSet<String> {
    compositions(text).into_keys().collect()
}

/// The compositions of a file, by name.
fn compositions(text: &str) -> BTreeMap<String, Value> {
    let rack: Table = text.parse().unwrap_or_default();
    let all = rack.get("composition").and_then(Value::as_array).cloned().unwrap_or_default();
    let named = |it: Value| Some((it.get("name")?.as_str()?.to_owned(), it));
    all.into_iter().filter_map(named).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::commands::offers;

    const BEFORE: &str =
        "name = \"lab\"\n[hosts.a.devices.n]\nkind = \"nvme\"\nsize = \"1 MiB\"\n[hosts.b]\n";
    const MORE: &str = "[hosts.b.devices.m]\nkind = \"nvme\"\nsize = \"2 MiB\"\n";
    const BOTH: &str = "[[composition]]\nname = \"c\"\nhost = \"b\"\nfunctions = [\"a/n\"]\n";

    fn sections(text: &str) -> Sections {
        let (_, devices) = parse_rack("rack.toml", text).unwrap();
        offers::sections(&devices, text)
    }

    fn known(text: &str) -> Vec<RackSection> {
        let shown = sections(text).into_iter().map(|((host, device), section)| RackSection {
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
        between(&known(BEFORE), &[], BEFORE, (&sections(after), after))
    }

    fn shown(after: &str) -> Vec<(String, ChangeKind)> {
        changes(after).all().into_iter().map(|it| (it.name, it.change)).collect()
    }

    #[test]
    fn devices_and_compositions_change_and_nothing_else_does() {
        assert_eq!(shown(BEFORE), []);
        let more = format!("{BEFORE}{MORE}");
        assert_eq!(shown(&more), [("b/m".to_owned(), ChangeKind::Added)]);
        let less = "name = \"lab\"\n[hosts.a]\n[hosts.b]\n";
        assert_eq!(shown(less), [("a/n".to_owned(), ChangeKind::Removed)]);
        let other = BEFORE.replace("1 MiB", "2 MiB");
        assert_eq!(shown(&other), [("a/n".to_owned(), ChangeKind::Changed)]);
        let composed = format!("{BEFORE}{BOTH}");
        assert_eq!(shown(&composed), [("c".to_owned(), ChangeKind::Added)]);
        let between = |after: &str| {
            between(&known(BEFORE), &[], &composed, (&sections(after), after)).compositions
        };
        assert_eq!(between(BEFORE), [("c".to_owned(), ChangeKind::Removed)]);
        let to_a = composed.replace("host = \"b\"", "host = \"a\"");
        assert_eq!(between(&to_a), [("c".to_owned(), ChangeKind::Changed)]);
    }

    #[test]
    fn until_devices_have_joined_the_file_is_one_without_them() {
        let after = format!(
            "{BEFORE}{MORE}{BOTH}[[composition]]\nname = \"d\"\nhost = \"a\"\nfunctions = [\"b/m\"]\n"
        );
        let before = format!("{BEFORE}{BOTH}");
        let wanted = sections(&after);
        let changes = between(&known(BEFORE), &[], &before, (&wanted, &after));
        let text = interim(&sections(&before), (&wanted, &after), &changes).unwrap();
        assert_eq!(sections(&text), sections(&before));
        assert_eq!(composition_names(&text), BTreeSet::from(["c".to_owned()]));
        // With a device goes the composition that has it.
        let other = before.replace("1 MiB", "2 MiB");
        let wanted = sections(&other);
        let changes = between(&known(BEFORE), &[], &before, (&wanted, &other));
        let text = interim(&sections(&before), (&wanted, &other), &changes).unwrap();
        assert_eq!((sections(&text), composition_names(&text)), Default::default());
    }
}
