//! What of a rack cannot change while it runs: everything but devices, compositions, hosts that come and go, and what the
//! control plane alone goes by.

use std::collections::{BTreeMap, BTreeSet};

use rackbus_control::service::Sections;
use rackbus_devices::RackDevice;
use rackbus_devices::class;
use rackbus_fabric::rack::Rack;
use rackbus_net::{Station, Stations};
use toml::{Table, Value};

use super::changes::{ChangeKind, ChangedPart, FileChange};
use crate::commands::offers;

/// The sections by which nothing but the control plane's answers (`rackbus path`) and the timing model go.
const DESCRIPTIONS: [&str; 2] = ["fabric", "timing"];
/// The rules that every node has: they follow where hosts come or go, since all nodes go on anew then.
const RULES: &str = "share";

/// A rack file that was read.
#[derive(Debug)]
pub struct ListedFile<'a> {
    /// The file as it was read, which errors point into.
    pub text: &'a str,
    /// What is in it.
    pub rack: &'a Rack,
    /// Its devices, with those of classes that only the timing model has.
    pub devices: &'a [RackDevice],
}

impl ListedFile<'_> {
    /// The devices that can be lent, and what it says of each.
    pub fn sections(&self) -> Sections {
        offers::sections(self.devices, self.text)
    }

    /// The names of its hosts.
    pub fn hosts(&self) -> BTreeSet<String> {
        self.rack.hosts.iter().map(|host| host.name.clone()).collect()
    }

    /// The network functions of hosts that stay and how they are described, in the order that gives them their addresses.
    fn ports(&self, stays: impl Fn(&str) -> bool) -> Vec<(String, Option<String>)> {
        let sections = self.sections();
        let has_port = |it: &&RackDevice| it.config.as_ref().is_some_and(|it| it.port().is_some());
        let key = |it: &RackDevice| {
            let (host, device) = it.section.split_once('/')?;
            Some((host.to_owned(), device.to_owned()))
        };
        let listed = self.devices.iter().filter(has_port);
        let listed = listed.filter(|it| key(it).is_some_and(|(host, _)| stays(&host)));
        let text = |it: &RackDevice| Some(sections.get(&key(it)?)?.text.clone());
        listed.map(|it| (it.function.clone(), text(it))).collect()
    }

    /// The stations of hosts that stay, in the order of the file.
    fn stations(&self, stays: impl Fn(&str) -> bool) -> Vec<Station> {
        let all = Stations::of(self.rack, &class::ports(self.devices));
        all.all().iter().filter(|it| stays(&it.host)).cloned().collect()
    }
}

/// What of the rack cannot change while it runs, and differs, for people: nothing where `after` can be followed.
pub fn others(before: &ListedFile<'_>, after: &ListedFile<'_>) -> Vec<String> {
    let (old, new) = (before.hosts(), after.hosts());
    let moved: BTreeSet<String> = old.symmetric_difference(&new).cloned().collect();
    let mut differ = differing_keys(before.text, after.text, &moved);
    differ.extend(moved_numbers(before.rack, after.rack));
    differ.extend(moved_addresses(before, after, &moved));
    differ
}

/// The sections that differ and are followed as they are.
pub fn sections(before: &str, after: &str) -> Vec<FileChange> {
    let [before, after] = [before, after].map(|text| text.parse::<Table>().unwrap_or_default());
    let followed = DESCRIPTIONS.into_iter().chain([RULES]);
    let changed = followed.filter(|key| before.get(*key) != after.get(*key));
    let section = |key: &str| FileChange {
        part: ChangedPart::Section,
        name: key.to_owned(),
        change: ChangeKind::Changed,
    };
    changed.map(section).collect()
}

/// Hosts that stay and would have another node id, which programs know them by.
fn moved_numbers(before: &Rack, after: &Rack) -> Vec<String> {
    let moved = after.hosts.iter().filter_map(|host| {
        let is = before.host(&host.name)?.node_id;
        (is != host.node_id).then(|| {
            format!("the node id of host {}, which `node_id = {is}` would keep", host.name)
        })
    });
    moved.collect()
}

/// A network function of a host that stays and differs, or would have another address, which all hosts know.
fn moved_addresses(
    before: &ListedFile<'_>,
    after: &ListedFile<'_>,
    moved: &BTreeSet<String>,
) -> Option<String> {
    let stays = |host: &str| !moved.contains(host);
    let (old, new) = (before.ports(stays), after.ports(stays));
    if old != new {
        let changed = new.iter().find(|it| !old.contains(it));
        let function = changed.or(old.iter().find(|it| !new.contains(it))).or(new.first());
        let name = function.map_or("", |(name, _)| name);
        return Some(format!("{name}, a network function, whose addresses all hosts know"));
    }
    let old: BTreeMap<String, Station> =
        before.stations(stays).into_iter().map(|it| (it.name.clone(), it)).collect();
    let moves = |it: &Station| {
        let is = old.get(&it.name)?;
        let same = (is.mac, is.address()) == (it.mac, it.address());
        (!same).then(|| format!("the address of {}, which all hosts know", it.name))
    };
    // Hosts have theirs by their node ids, of which is said so.
    after.stations(stays).iter().filter(|it| it.name != it.host).find_map(moves)
}

/// What of two rack files differs besides what can be followed where the hosts that `moved` come or go.
fn differing_keys(before: &str, after: &str, moved: &BTreeSet<String>) -> Vec<String> {
    let (before, after) = (fixed_part(before, moved), fixed_part(after, moved));
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

/// A rack file without what can be followed.
fn fixed_part(text: &str, moved: &BTreeSet<String>) -> Table {
    let mut rack: Table = text.parse().unwrap_or_default();
    rack.remove("composition");
    DESCRIPTIONS.iter().for_each(|key| drop(rack.remove(*key)));
    if !moved.is_empty() {
        rack.remove(RULES);
    }
    if let Some(hosts) = rack.get_mut("hosts").and_then(Value::as_table_mut) {
        hosts.retain(|host, _| !moved.contains(host));
        for (_, host) in hosts.iter_mut() {
            let Some(host) = host.as_table_mut() else { continue };
            host.remove("devices");
            // Its value is compared, wherever it comes from.
            host.remove("node_id");
            without(host, "ntb", moved);
        }
    }
    if let Some(network) = rack.get_mut("network").and_then(Value::as_table_mut) {
        without(network, "host", moved);
        if let Some(uplinks) = network.get_mut("uplinks").and_then(Value::as_array_mut) {
            let host = |it: &Value| it.as_str()?.split('/').next().map(str::to_owned);
            uplinks.retain(|it| host(it).is_none_or(|host| !moved.contains(&host)));
            if uplinks.is_empty() {
                network.remove("uplinks");
            }
        }
        if network.is_empty() {
            rack.remove("network");
        }
    }
    rack
}

/// Takes the hosts that move out of a table of hosts, and that where nothing is left.
fn without(table: &mut Table, key: &str, moved: &BTreeSet<String>) {
    let Some(hosts) = table.get_mut(key).and_then(Value::as_table_mut) else { return };
    hosts.retain(|host, _| !moved.contains(host));
    if hosts.is_empty() {
        table.remove(key);
    }
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

    fn unchangeable(before: &str, after: &str) -> Vec<String> {
        let (old, new) =
            (parse_rack("rack.toml", before).unwrap(), parse_rack("rack.toml", after).unwrap());
        let before = ListedFile { text: before, rack: &old.0, devices: &old.1 };
        others(&before, &ListedFile { text: after, rack: &new.0, devices: &new.1 })
    }

    /// Both ways, which is what happens to whoever undoes it.
    fn can_be_followed(one: &str, other: &str) {
        assert_eq!(unchangeable(one, other), [""; 0], "{one}\n{other}");
        assert_eq!(unchangeable(other, one), [""; 0], "{other}\n{one}");
    }

    #[test]
    fn devices_and_compositions_can_change() {
        let more = "[hosts.b.devices.m]\nkind = \"nvme\"\nsize = \"2 MiB\"\n";
        let both = "[[composition]]\nname = \"c\"\nhost = \"b\"\nfunctions = [\"a/n\"]\n";
        can_be_followed(BEFORE, &format!("{BEFORE}{more}{both}"));
    }

    #[test]
    fn what_cannot_change_is_named() {
        let control = format!("{BEFORE}[control]\nlease_ttl = \"3 s\"\n");
        assert_eq!(unchangeable(BEFORE, &control), ["control"]);
        let share =
            "[[share]]\nhost = \"a\"\nsegments = \"*\"\nwith = [\"b\"]\naccess = \"read\"\n";
        assert_eq!(unchangeable(BEFORE, &format!("{BEFORE}{share}")), ["share"]);
        let smaller = BEFORE.replace("[hosts.b]", "[hosts.b]\nmemory = \"64 MiB\"");
        assert_eq!(unchangeable(BEFORE, &smaller), ["hosts.b"]);
        // Also beside a host that comes.
        assert_eq!(unchangeable(BEFORE, &format!("{smaller}[hosts.c]\n")), ["hosts.b"]);
        let nic = format!("{BEFORE}[hosts.b.devices.net]\nkind = \"nic\"\nfunctions = 1\n");
        for (one, other) in [(BEFORE, &nic[..]), (&nic, BEFORE)] {
            let named = unchangeable(one, other);
            assert!(named.len() == 1 && named[0].contains("b/net"), "{named:?}");
        }
    }

    #[test]
    fn hosts_come_and_go_with_what_names_them() {
        can_be_followed(BEFORE, &format!("{BEFORE}[hosts.c]\nmemory = \"1 GiB\"\n"));
        let rules =
            "[[share]]\nhost = \"a\"\nsegments = \"*\"\nwith = [\"c\"]\naccess = \"read\"\n";
        let network = "[network.host.c]\nvlan = 7\n";
        can_be_followed(BEFORE, &format!("{BEFORE}[hosts.c]\n{rules}{network}"));
        let ntb =
            |from: &str, to: &str| format!("[hosts.{from}.ntb.{to}]\naddress = \"0000:05:00.0\"\n");
        let both = format!("{}{}", ntb("b", "c"), ntb("c", "b"));
        can_be_followed(BEFORE, &format!("{BEFORE}[hosts.c]\n{both}"));
        let nic = "[hosts.c.devices.net]\nkind = \"nic\"\nfunctions = 2\n";
        can_be_followed(BEFORE, &format!("{BEFORE}{nic}"));
    }

    #[test]
    fn the_numbers_and_addresses_of_hosts_that_stay_stay() {
        // Hosts have their numbers by their order.
        let two =
            |one: &str, other: &str| format!("name = \"lab\"\n[hosts.{one}]\n[hosts.{other}]\n");
        let moved = unchangeable(&two("a", "b"), &two("b", "a"));
        assert_eq!(moved.len(), 2, "{moved:?}");
        assert!(moved[1].starts_with("the node id of host a"), "{moved:?}");
        let first_leaves = "name = \"lab\"\n[hosts.b]\n";
        assert_eq!(unchangeable(&two("a", "b"), first_leaves).len(), 1);
        // Where the file says the number, that it had by its order until then, it is the same.
        can_be_followed(&two("a", "b"), &format!("{first_leaves}node_id = 8\n"));
        let nic =
            |host: &str| format!("[hosts.{host}.devices.net]\nkind = \"nic\"\nfunctions = 1\n");
        let before = format!("name = \"lab\"\n{}{}", nic("a"), nic("b"));
        let after = format!("name = \"lab\"\n[hosts.b]\nnode_id = 8\n{}", nic("b"));
        assert_eq!(
            unchangeable(&before, &after),
            ["the address of b/net.vf1, which all hosts know"]
        );
    }

    #[test]
    fn a_physical_fabric_is_followed() {
        let fabric = "[fabric.adapters.a-ntb]\nhost = \"a\"\n";
        can_be_followed(BEFORE, &format!("{BEFORE}{fabric}"));
        let changes = sections(BEFORE, &format!("{BEFORE}{fabric}"));
        assert_eq!(changes.iter().map(|it| &it.name[..]).collect::<Vec<_>>(), ["fabric"]);
        assert_eq!(sections(BEFORE, BEFORE), []);
    }
}
