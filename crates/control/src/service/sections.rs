//! What the control plane does with devices that join and leave the running rack.
//!
//! The inventory is what the rack file lists, with what was offered since. It is read anew whenever that changes; that
//! a device can be as described is known before anything is decided.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use rackbus_lease::{Availability, DeviceChange, DeviceRefused};

use super::{Inventory, RackState, Service, WriterRequest, WriterShared, problem};
use crate::access::ApiPeer;
use crate::answers::KeyedChange;
use crate::api::ApiError;
use crate::blocking::blocking;
use crate::offers::{OfferRequest, RackSection, SectionState};

/// How long a node may take to have a device ready: its file may have to be made.
const OFFER_PATIENCE: Duration = Duration::from_secs(60);

/// Bytes of the longest description of a device that is offered, and the most devices that a host offers beside those
/// of the rack file.
const LONGEST_SECTION: usize = 16 << 10;
const MOST_DEVICES: usize = 256;

/// A device of the rack as the rack file describes it, or would.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct DescribedDevice {
    /// The TOML below the section's head.
    pub text: String,
    /// Names of its functions on its host.
    pub functions: Vec<String>,
    /// The rack file has it.
    pub listed: bool,
}

/// The devices of a rack by host and name.
pub type Sections = BTreeMap<(String, String), DescribedDevice>;

/// A device that was offered beside those of the rack file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct OfferedDevice {
    /// The host that has it.
    pub host: String,
    /// Name of the device on its host.
    pub device: String,
    /// The TOML below the section's head.
    pub section: String,
}

/// Reads the rack file again, with these devices beside its own. The error says what is wrong with them, for people.
pub type ReadRack = Arc<dyn Fn(&[OfferedDevice]) -> Result<Inventory, String> + Send + Sync>;

/// What reads the rack from the text of another rack file.
pub type ReadFile = Arc<dyn Fn(&str) -> ReadRack + Send + Sync>;

/// The devices beside the rack file's that nodes have, or are to have.
fn beside<'a>(changes: impl Iterator<Item = &'a DeviceChange>) -> Vec<OfferedDevice> {
    let offered = |change: &DeviceChange| {
        let (host, device) = (change.host.clone(), change.device.clone());
        let text = change.section.clone().or_else(|| change.was.clone())?;
        (!change.listed).then_some(OfferedDevice { host, device, section: text })
    };
    changes.filter_map(offered).collect()
}

/// What a rack file says of a device, and the names of its functions, as [`rackbus_lease::Authority::relist`] asks.
pub(super) fn listed_in<'a>(
    sections: &'a Sections,
    host: &str,
    device: &str,
) -> Option<(&'a str, &'a [String])> {
    let section = sections.get(&(host.to_owned(), device.to_owned()))?;
    Some((&section.text, &section.functions))
}

impl WriterShared {
    /// The inventory with the changes that are known. A device that cannot be read any more is left out.
    pub(super) fn read_inventory(&self, changes: &[DeviceChange]) -> Option<Inventory> {
        let read = self.reader()?;
        let mut devices = beside(changes.iter());
        if let Ok(inventory) = read(&devices) {
            return Some(inventory);
        }
        // The rack file, or this program, is another one than when they were offered.
        let mut good = Vec::new();
        for device in devices.drain(..) {
            let name = format!("{}/{}", device.host, device.device);
            good.push(device);
            if let Err(error) = read(&good) {
                tracing::error!(device = name, error, "a device is left out; withdraw it");
                good.pop();
            }
        }
        read(&good).ok()
    }

    pub(super) fn section(&self, known: &RackState, key: &(String, String)) -> Option<RackSection> {
        let inventory = self.inventory();
        let section = inventory.sections.get(key)?;
        let change = known.devices.get(key);
        let life = known.hosts.get(&key.0).map(|host| host.incarnation);
        let answered = |change: &DeviceChange| change.answer_in(life).is_some();
        let state = match change {
            None => SectionState::Offered,
            Some(it) if it.section.is_none() && answered(it) => SectionState::Withdrawn,
            Some(it) if it.section.is_none() => SectionState::Leaving,
            Some(it) if answered(it) && it.failure().is_none() => SectionState::Offered,
            Some(_) => SectionState::Joining,
        };
        let trouble = change.and_then(DeviceChange::failure).map(str::to_owned);
        let by_node = change.is_some_and(|change| change.by_node);
        Some(shown(key, section, by_node, state, trouble))
    }
}

fn shown(
    (host, device): &(String, String),
    section: &DescribedDevice,
    by_node: bool,
    state: SectionState,
    trouble: Option<String>,
) -> RackSection {
    RackSection {
        device: format!("{host}/{device}"),
        functions: section.functions.iter().map(|name| format!("{host}/{name}")).collect(),
        section: section.text.clone(),
        listed: section.listed,
        by_node,
        state,
        trouble,
    }
}

impl Service {
    /// The devices of the rack, each as a whole.
    pub fn sections(&self) -> Vec<RackSection> {
        let (known, inventory) = (self.shared.known(), self.shared.inventory());
        inventory.sections.keys().filter_map(|key| self.shared.section(&known, key)).collect()
    }

    /// Offers a device and waits until its node has it ready. Asked again with the same idempotency key, one that was
    /// withdrawn since stays so.
    ///
    /// # Errors
    /// [`ApiError`]; the rack has no such device then.
    pub async fn offer(
        &self,
        request: &OfferRequest,
        peer: &ApiPeer,
        idempotency_key: Option<String>,
    ) -> Result<RackSection, ApiError> {
        let id = super::function_id(&request.device)?;
        let key = (id.host, id.device);
        self.shared.check_host(&key.0)?;
        self.check_device_of(&key.0, peer).await?;
        if request.section.is_some() {
            peer.describes_devices()?;
        }
        let section = self.described(&key, request.section.as_deref()).await?;
        let there = self.shared.section(&self.shared.known(), &key);
        let same =
            |it: &RackSection| it.state == SectionState::Offered && it.section == section.text;
        if let Some(there) = there.filter(same) {
            return Ok(there);
        }
        let change = DeviceChange {
            host: key.0.clone(),
            device: key.1.clone(),
            number: 0,
            functions: section.functions.clone(),
            section: Some(section.text.clone()),
            was: None,
            listed: section.listed,
            by_node: request.by_node,
            answer: None,
        };
        let deadline = tokio::time::Instant::now() + OFFER_PATIENCE;
        self.wait_gone(&key, deadline).await;
        let keyed = KeyedChange::new(idempotency_key, "offer", request);
        let ask = |answer| WriterRequest::Offer { change, keyed, answer };
        let asked = self.writing.ask(ask).await?;
        let number = asked.map_err(refused)?;
        let answer = self.shared.wait(deadline, |known| {
            let life = known.hosts.get(&key.0).map(|host| host.incarnation);
            let offered =
                |change: &&DeviceChange| change.number >= number && change.section.is_some();
            match known.devices.get(&key).filter(offered) {
                // By somebody else, meanwhile: that has an answer of its own.
                None => Some(Err("it was withdrawn".to_owned())),
                Some(change) => change.answer_in(life).cloned(),
            }
        });
        match answer.await {
            Some(Ok(())) => {}
            Some(Err(reason)) => {
                self.forget(&key, number, deadline).await;
                let error = format!("{} cannot be offered: {reason}", request.device);
                return Err(problem("failed", error, "see to the cause, and offer it again"));
            }
            None => {
                let error = format!(
                    "{} is not ready after {OFFER_PATIENCE:?}; its node goes on trying",
                    request.device
                );
                let remedy = "`rackbus devices` tells when it is, `rackbus withdraw` ends it";
                return Err(problem("timeout", error, remedy));
            }
        }
        let shown = self.shared.section(&self.shared.known(), &key);
        Ok(shown.unwrap_or_else(|| shown_now(&key, &section)))
    }

    /// Waits until the node of a device that is being withdrawn has released it, or is not there to do so.
    async fn wait_gone(&self, key: &(String, String), deadline: tokio::time::Instant) {
        let gone = |known: &RackState| {
            let life = known.hosts.get(&key.0).map(|host| host.incarnation);
            let change = known.devices.get(key).filter(|change| change.section.is_none());
            let answered = |change: &DeviceChange| change.answer_in(life).is_some();
            (change.is_none_or(answered) || !known.listens(&key.0)).then_some(())
        };
        // Whatever came of it, the writer decides.
        self.shared.wait(deadline, gone).await;
    }

    /// What is to be offered, read as the rack file would be.
    async fn described(
        &self,
        key: &(String, String),
        text: Option<&str>,
    ) -> Result<DescribedDevice, ApiError> {
        let name = format!("{}/{}", key.0, key.1);
        let inventory = self.shared.inventory();
        let known = inventory.sections.get(key);
        match (known, text) {
            (Some(known), None) => return Ok(known.clone()),
            (Some(known), Some(text)) if known.text == text => return Ok(known.clone()),
            (Some(known), Some(_)) if known.listed => {
                let error = format!("the rack file has another {name}");
                return Err(problem("exists", error, "give this one another name"));
            }
            (_, Some(_)) => {}
            (None, None) => {
                let error = format!("the rack has no {name}");
                return Err(problem(
                    "bad_request",
                    error,
                    "say what it is, kind = \"nvme\" and so on",
                ));
            }
        }
        let Some(read) = self.shared.reader() else {
            let error = "this control plane's devices are fixed".to_owned();
            return Err(problem("bad_request", error, "list it in the rack file"));
        };
        if text.is_some_and(|text| text.len() > LONGEST_SECTION) {
            let error = format!("{name} is described in more than {LONGEST_SECTION} bytes");
            return Err(problem("bad_request", error, "leave out what is no key"));
        }
        let changes = self.shared.known().devices.clone();
        let beside_file = |it: &&DeviceChange| it.host == key.0 && !it.listed;
        if changes.values().filter(beside_file).count() >= MOST_DEVICES {
            let error = format!("{} offers {MOST_DEVICES} devices already", key.0);
            return Err(problem("exists", error, "withdraw one, or list devices in the rack file"));
        }
        let mut devices = beside(changes.values());
        devices.retain(|it| (&it.host, &it.device) != (&key.0, &key.1));
        let (host, device) = key.clone();
        let section = text.unwrap_or_default().to_owned();
        devices.push(OfferedDevice { host, device, section });
        // A rack file and all that is offered beside it take their time to be read.
        let inventory = blocking(move || read(&devices)).await.map_err(|error| {
            problem("bad_request", error, "the book's chapter on the rack file has all keys")
        })?;
        inventory.sections.get(key).cloned().ok_or_else(|| {
            problem("bad_request", format!("{name} makes no sense"), "give it another name")
        })
    }

    /// Takes an offer back that its node could not take on, unless somebody made another one, and waits until the rack has
    /// no such device.
    async fn forget(&self, key: &(String, String), number: u64, deadline: tokio::time::Instant) {
        let change = self.shared.known().devices.get(key).cloned();
        let its = |it: &DeviceChange| it.number >= number && it.failure().is_some() && !it.listed;
        let Some(change) = change.filter(its) else { return };
        let change = DeviceChange { was: change.section.clone(), ..change };
        let ask = |answer| WriterRequest::Withdraw { change, force: false, keyed: None, answer };
        if let Err(error) = self.writing.ask(ask).await {
            tracing::warn!(error = error.error, "a device that failed cannot be removed");
            return;
        }
        self.wait_gone(key, deadline).await;
    }

    /// Whether a request is repeated whose change was made.
    ///
    /// # Errors
    /// [`ApiError`] where its key belongs to another one.
    pub(crate) async fn was_made(&self, keyed: &Option<KeyedChange>) -> Result<bool, ApiError> {
        let Some(keyed) = keyed.clone() else { return Ok(false) };
        self.writing.ask(|answer| WriterRequest::WasMade { keyed, answer }).await
    }

    /// Withdraws a device and waits until its node has released it, if that is there. Asked again with the same
    /// idempotency key, one that was offered again since stays in the rack; of one that is gone since, its name is answered.
    ///
    /// # Errors
    /// [`ApiError`], which names the holder when there is one.
    pub async fn withdraw(
        &self,
        host: &str,
        device: &str,
        force: bool,
        idempotency_key: Option<String>,
    ) -> Result<RackSection, ApiError> {
        let key = (host.to_owned(), device.to_owned());
        let inventory = self.shared.inventory();
        // One that cannot be read any more is known by what was asked for it.
        let left_out = || {
            let change = self.shared.known().devices.get(&key).cloned()?;
            let text = change.section.or(change.was)?;
            Some(DescribedDevice { text, functions: change.functions, listed: change.listed })
        };
        let keyed = KeyedChange::new(idempotency_key, "withdraw", &(&key, force));
        let Some(section) = inventory.sections.get(&key).cloned().or_else(left_out) else {
            if self.was_made(&keyed).await? {
                let gone = DescribedDevice::default();
                return Ok(shown(&key, &gone, false, SectionState::Withdrawn, None));
            }
            let error = format!("the rack has no device {host}/{device}");
            let whole = inventory.sections.iter().find(|((at, _), section)| {
                at == host && section.functions.iter().any(|function| function == device)
            });
            let remedy = match whole {
                Some(((at, whole), _)) => {
                    format!("it is a function of {at}/{whole}: withdraw that")
                }
                None => "`rackbus devices` lists the functions".to_owned(),
            };
            return Err(problem("unknown_function", error, &remedy));
        };
        let change = DeviceChange {
            host: host.to_owned(),
            device: device.to_owned(),
            number: 0,
            functions: section.functions.clone(),
            section: None,
            was: Some(section.text.clone()),
            listed: section.listed,
            by_node: false,
            answer: None,
        };
        let ask = |answer| WriterRequest::Withdraw { change, force, keyed, answer };
        self.writing.ask(ask).await?.map_err(refused)?;
        let patience = self.return_patience(None);
        let deadline = tokio::time::Instant::now() + patience;
        let done = self.shared.wait(deadline, |known| {
            let life = known.hosts.get(host).map(|host| host.incarnation);
            let gone = known
                .devices
                .get(&key)
                .is_none_or(|change| change.section.is_some() || change.answer_in(life).is_some());
            let in_use = section.functions.iter().any(|name| {
                let id = rackbus_lease::FunctionId { host: host.to_owned(), device: name.clone() };
                let state = known.functions.get(&id).map(|record| &record.state);
                matches!(state, Some(Availability::Lent { .. } | Availability::Revoking { .. }))
            });
            (gone || !known.listens(host) && !in_use).then_some(gone)
        });
        let Some(gone) = done.await else {
            let error = format!("{host}/{device} is not released after {patience:?}");
            let remedy =
                "it is withdrawn as soon as it is; `rackbus status` tells how the nodes are";
            return Err(problem("timeout", error, remedy));
        };
        let state = if gone { SectionState::Withdrawn } else { SectionState::Leaving };
        Ok(shown(&key, &section, false, state, None))
    }
}

fn shown_now(key: &(String, String), section: &DescribedDevice) -> RackSection {
    shown(key, section, false, SectionState::Offered, None)
}

fn refused(refused: DeviceRefused) -> ApiError {
    let error = refused.to_string();
    match refused {
        DeviceRefused::Exists(_) => problem("exists", error, "give this one another name"),
        DeviceRefused::Leaving(_) => problem("returning", error, "try again in a moment"),
        DeviceRefused::Held { borrower, lease, .. } => ApiError {
            holder: Some(borrower),
            lease: Some(lease),
            ..problem("held", error, "wait until it is returned, or end the lease with --force")
        },
        DeviceRefused::Shared { .. } => {
            problem("shared", error, "wait until they have left, or end their turns with --force")
        }
        DeviceRefused::Host(_) => {
            problem("silent", error, "see whether its node runs: `rackbus status`")
        }
    }
}
