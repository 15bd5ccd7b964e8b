//! The devices that a host has from a file of its own, and offers when its node is there.

use std::collections::BTreeMap;
use std::path::Path;
use std::time::Duration;

use rackbus_control::offers::OfferRequest;
use rackbus_control::{ControlClient, ControlClientError};
use rackbus_devices::RackDevice;
use toml::{Table, Value};

use crate::commands::offers;
use crate::output::Failure;

/// Between two tries to reach the control plane.
const AGAIN: Duration = Duration::from_millis(500);

/// Refusals that pass: the control plane, its store, or this node is on the way.
const PASSES: [&str; 7] =
    ["silent", "unreachable", "not_the_leader", "ending", "not_stored", "timeout", "returning"];

/// The devices of a file, by name.
pub type OwnDevices = BTreeMap<String, OwnDevice>;

/// A device of a file.
#[derive(Debug)]
pub struct OwnDevice {
    /// The text below the head of its section.
    section: String,
    /// Its functions, at least one.
    pub functions: Vec<RackDevice>,
}

/// Reads the file, whose devices are those of `host` in the rack of which `rack` is the file.
///
/// # Errors
/// What is wrong with it.
pub fn read(file: &Path, rack: &str, host: &str) -> Result<OwnDevices, Failure> {
    let wrong = |error: String| {
        let error = format!("{}: {error}", file.display());
        Failure::usage(error, "it has sections [devices.NAME], with the keys of the rack file")
    };
    let text = std::fs::read_to_string(file).map_err(|cause| wrong(cause.to_string()))?;
    let table: Table = text.parse().map_err(|error: toml::de::Error| wrong(error.to_string()))?;
    if let Some(key) = table.keys().find(|key| *key != "devices") {
        return Err(wrong(format!("there is no key `{key}`")));
    }
    let mut devices = OwnDevices::new();
    for (name, section) in table.get("devices").and_then(Value::as_table).into_iter().flatten() {
        let section = section.as_table().ok_or_else(|| wrong(format!("`{name}` is no section")))?;
        let section = toml::to_string(section).map_err(|error| wrong(error.to_string()))?;
        let functions = offers::device(rack, host, name, &section).map_err(wrong)?;
        if functions.is_empty() {
            return Err(wrong(format!("{name} has no function")));
        }
        devices.insert(name.clone(), OwnDevice { section, functions });
    }
    Ok(devices)
}

/// Offers the devices, and withdraws those that an earlier life of the node had from its file and that are not in it
/// any more. The control plane is waited for; what it refuses is logged.
pub async fn offer(client: ControlClient, host: String, devices: OwnDevices) {
    let known = loop {
        match client.sections().await {
            Ok(known) => break known,
            Err(error) => tracing::debug!(%error, "devices are offered when it answers"),
        }
        tokio::time::sleep(AGAIN).await;
    };
    let own = known.iter().filter(|section| section.by_node);
    let gone = own.filter_map(|section| section.device.strip_prefix(&format!("{host}/")));
    for device in gone.filter(|device| !devices.contains_key(*device)) {
        say(device, until_heard(|| client.withdraw(&host, device, true)).await);
    }
    for (device, OwnDevice { section, .. }) in devices {
        let name = format!("{host}/{device}");
        let former = known.iter().find(|it| it.by_node && it.device == name);
        if former.is_some_and(|former| former.section != section) {
            say(&device, until_heard(|| client.withdraw(&host, &device, true)).await);
        }
        let request = OfferRequest { device: name, section: Some(section), by_node: true };
        say(&device, until_heard(|| client.offer(&request)).await);
    }
}

fn say<T>(device: &str, outcome: Result<T, ControlClientError>) {
    if let Err(error) = outcome {
        tracing::error!(device, %error, "the file of this host's devices is not followed");
    }
}

/// Asks until the control plane answers and knows this node.
async fn until_heard<T, F>(ask: impl Fn() -> F) -> Result<T, ControlClientError>
where
    F: Future<Output = Result<T, ControlClientError>>,
{
    loop {
        match ask().await {
            Err(ControlClientError::Unreachable { .. }) => {}
            Err(error) if error.is_lost() => {}
            Err(ControlClientError::Refused(refused))
                if PASSES.contains(&refused.code.as_str()) => {}
            answered => return answered,
        }
        tokio::time::sleep(AGAIN).await;
    }
}
