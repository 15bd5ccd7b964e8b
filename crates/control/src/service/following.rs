//! The rack file is another one while the rack runs.
//!
//! Devices join and leave by requests of their own, of which each is answered when its node has done it. A file is
//! followed when that has happened: it then lists the devices as the rack has them, and what else it says of the rack
//! (compositions, hosts) holds from then on. Hosts that it lists no more leave with all they have, and are refused where
//! somebody else is concerned; new ones are known, and join when their nodes are heard.

use std::collections::BTreeSet;

use rackbus_lease::{CompositionRecord, HostInUse, Record};

use super::compositions::live;
use super::sections::DescribedDevice;
use super::writer::NewRackFile;
use super::{Inventory, Service, WriterRequest, WriterShared, problem};
use crate::api::{ApiError, EventKind, RackStatus};
use crate::blocking::blocking;
use crate::events::{Draft, left_the_rack};
use crate::offers::SectionState;

/// Bytes of the longest rack file that is followed.
const LONGEST_FILE: usize = 1 << 20;

impl WriterShared {
    /// Whether the rack, as it is, can be that of a file that lists `after`.
    pub(super) fn check_follows(&self, after: &Inventory) -> Result<(), ApiError> {
        let before = self.inventory();
        if after.rack != before.rack {
            let error =
                format!("this is rack {}, and the file is that of {}", before.rack, after.rack);
            let help = "stop the rack with `rackbus down` and start it with that file";
            return Err(problem("contradiction", error, help));
        }
        self.check_devices_follow(&before, after)?;
        self.check_compositions_follow(&before, after)
    }

    fn check_devices_follow(&self, before: &Inventory, after: &Inventory) -> Result<(), ApiError> {
        let known = self.known();
        let refused = |(host, device): &(String, String), error: &str, help: &str| {
            Err(problem("contradiction", format!("{host}/{device} {error}"), help))
        };
        let gone = |key| {
            let section = self.section(&known, key);
            section.is_none_or(|it| it.state == SectionState::Withdrawn)
        };
        // With their hosts, devices come and go.
        let stays =
            |key: &&(String, String)| before.hosts.contains(&key.0) && after.hosts.contains(&key.0);
        for (key, is) in before.sections.iter().filter(|(key, _)| stays(key)) {
            let same = |it: &DescribedDevice| it.text == is.text && it.functions == is.functions;
            match after.sections.get(key) {
                Some(wanted) if same(wanted) => {}
                None if !is.listed || gone(key) => {}
                Some(_) => {
                    return refused(
                        key,
                        "is described otherwise than it is",
                        "withdraw it, have the rack follow a file without it, and offer it first",
                    );
                }
                None => return refused(key, "is not in the file", "withdraw it first"),
            }
        }
        let mut listed = after.sections.keys().filter(stays);
        match listed.find(|key| !before.sections.contains_key(*key)) {
            Some(key) => refused(key, "is not in the rack", "offer it first"),
            None => Ok(()),
        }
    }

    fn check_compositions_follow(
        &self,
        before: &Inventory,
        after: &Inventory,
    ) -> Result<(), ApiError> {
        let known = self.known();
        let goes = before.compositions.iter().filter(|it| !after.compositions.contains(it));
        for composition in goes {
            if let Some(lease) = live(&known, composition).first() {
                let (name, function) = (&composition.name, &lease.function);
                let error = format!("{function} of the composition {name} is borrowed");
                let help = format!("return it first: `rackbus composition return {name}`");
                return Err(problem("held", error, &help));
            }
        }
        let saved = |it: &&CompositionRecord| known.compositions.contains_key(&it.name);
        if let Some(composition) = after.compositions.iter().find(saved) {
            let name = &composition.name;
            let error = format!("a composition {name} was saved beside those of the rack file");
            let help = format!("remove it first: `rackbus composition remove {name}`");
            return Err(problem("exists", error, &help));
        }
        Ok(())
    }
}

/// How hosts come and go with a file.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct HostsChange {
    /// Those that the file has no more.
    pub left: BTreeSet<String>,
    /// Those that it has for the first time.
    pub joined: BTreeSet<String>,
}

impl HostsChange {
    pub(super) fn between(before: &Inventory, after: &Inventory) -> HostsChange {
        let only = |one: &Inventory, other: &Inventory| {
            one.hosts.iter().filter(|host| !other.hosts.contains(host)).cloned().collect()
        };
        HostsChange { left: only(before, after), joined: only(after, before) }
    }

    /// The host that leaves with a record, as it is noted.
    pub(super) fn host_that_left(record: &Record) -> Option<String> {
        match record {
            Record::HostRemoved { host } => Some(host.clone()),
            _ => None,
        }
    }

    /// What is told of it.
    pub(super) fn events(&self) -> Vec<Draft> {
        let told = |host: &String, text| Draft::of_host(EventKind::Access, Some(host), text);
        let left = self.left.iter().map(|host| told(host, left_the_rack(host)));
        let joined =
            self.joined.iter().map(|host| told(host, format!("host {host} joined the rack")));
        left.chain(joined).collect()
    }
}

/// The refusal of a host's leaving, as it is answered.
pub(super) fn host_in_use(refused: &HostInUse) -> ApiError {
    let error = format!("a host that the file has no more is in use: {refused}");
    let (holder, lease) = match refused {
        HostInUse::Lends { borrower, lease, .. } => (Some(borrower.clone()), Some(*lease)),
        HostInUse::Borrows { host, lease, .. } => (Some(host.clone()), Some(*lease)),
        HostInUse::Shares { .. } | HostInUse::Composed { .. } => (None, None),
    };
    ApiError { holder, lease, ..problem("held", error, "end that first; nothing was changed") }
}

impl Service {
    /// Has the rack be that of a file with this text, which lists its devices as they are now; how it is then. Hosts that
    /// it has no more leave the rack in the same step. To follow the same file again changes nothing.
    ///
    /// # Errors
    /// [`ApiError`], which says what differs; nothing changes then.
    pub async fn follow_file(&self, text: String) -> Result<RackStatus, ApiError> {
        let Some(read_file) = self.shared.read_file.clone() else {
            let error = "this control plane's rack stays that of the file it was started with";
            let help = "start the control plane and then the nodes with the changed file";
            return Err(problem("bad_request", error.to_owned(), help));
        };
        if text.len() > LONGEST_FILE {
            let error = format!("a rack file has at most {LONGEST_FILE} bytes");
            return Err(problem("bad_request", error, "describe fewer devices"));
        }
        let parsed = blocking(move || {
            let read = read_file(&text);
            read(&[]).map(|inventory| NewRackFile { inventory, read })
        });
        let file = parsed.await.map_err(|error| {
            problem("bad_request", error, "the book's chapter on the rack file has all keys")
        })?;
        self.writing.ask(|answer| WriterRequest::FollowFile { file, answer }).await??;
        Ok(self.status())
    }
}
