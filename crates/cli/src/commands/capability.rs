//! Which functions something can be done with, whatever their class.

use rackbus_control::api::Device;
use rackbus_devices::class;
use rackbus_fabric::rack::DeviceCapability;

/// Whether a function has a capability. Older control planes say the class alone, of which this program knows it.
pub fn can(device: &Device, capability: DeviceCapability) -> bool {
    match &device.capabilities {
        Some(words) => words.iter().any(|word| word == capability.word()),
        None => class::capabilities(&device.kind).contains(&capability),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn device(kind: &str, capabilities: Option<&[&str]>) -> Device {
        let mut device = json!({
            "function": "alpha/d", "kind": kind, "detail": "", "state": "offered", "holder": null, "lease": null,
            "epoch": 0, "report": null,
        });
        if let Some(words) = capabilities {
            device["capabilities"] = json!(words);
        }
        serde_json::from_value(device).unwrap()
    }

    #[test]
    fn what_the_control_plane_says_counts_and_else_the_class() {
        let has = |device: &Device| can(device, DeviceCapability::Engines);
        assert!(has(&device("coprocessor", Some(&["telepathy", "engines"]))));
        assert!(!has(&device("accelerator", Some(&[]))));
        assert!(has(&device("accelerator", None)) && !has(&device("nvme", None)));
        assert!(!has(&device("coprocessor", None)));
    }
}
