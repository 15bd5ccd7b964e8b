//! Network cards as a class: what the rack file says of one, and what follows from it.

use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use rackbus_fabric::rack::{
    DeviceCapability, DeviceSection, FunctionLimit, FunctionTiming, LimitCounts, PortRules,
};
use rackbus_fabric::text::{Parsed, Section, wrong};
use rackbus_memory::InheritedEnd;
use rackbus_net::{MacAddress, PortOptions};
use rackbus_pci::{Function, MediumAccess};
use rackbus_qos::{Rate, RateUnit};
use rackbus_spec::virtio::net::{CLASS_CODE, DEVICE_TYPE};
use rackbus_spec::virtio::{DEVICE_ID_BASE, VENDOR_ID};

use super::counters::NicCounters;
use super::function::{Nic, NicOptions};
use super::{CLASS, MOST_PAIRS};
use crate::class::{Class, DeviceConfig, FrontError, PciIdentity};
use crate::lost::Lost;
use crate::place::Folders;

/// Functions of a device at most.
const MOST_FUNCTIONS: u64 = 64;
/// Bytes of a burst: one of the longest frames at least.
const BURSTS: (u64, u64) = (64 << 10, 1 << 30);
/// Without `burst`: what goes in so many parts of a second.
const BURST_PARTS: u64 = 200;

/// The class of network cards. One without `functions` is known to the timing model only.
#[derive(Debug)]
pub struct NicClass;

const KEYS: &[&str] = &[
    "kind",
    "functions",
    "queues",
    "mac",
    "rate",
    "burst",
    "vlan",
    "vlans",
    "learned_addresses",
    "anti_spoofing",
    "packed_rings",
    "function",
];
const OWN_KEYS: &[&str] = &[
    "mac",
    "rate",
    "burst",
    "vlan",
    "vlans",
    "learned_addresses",
    "anti_spoofing",
    "packed_rings",
];

impl Class for NicClass {
    fn name(&self) -> &'static str {
        CLASS
    }

    fn pci_identity(&self) -> Option<PciIdentity> {
        Some(PciIdentity::new(VENDOR_ID, DEVICE_ID_BASE + DEVICE_TYPE, CLASS_CODE))
    }

    fn capabilities(&self) -> &'static [DeviceCapability] {
        &[DeviceCapability::Port]
    }

    fn state_version(&self) -> Option<u32> {
        Some(super::saved::VERSION)
    }

    fn front(
        &self,
        description: &str,
        access: MediumAccess,
        lost: Lost,
    ) -> Result<Box<dyn Function>, FrontError> {
        super::medium::front(description, access, lost)
    }

    fn front_again(
        &self,
        description: &str,
        end: InheritedEnd,
        lost: Lost,
    ) -> Result<Box<dyn Function>, FrontError> {
        super::medium::front_again(description, end, lost)
    }

    fn read(&self, _section: &DeviceSection<'_>) -> Parsed<Option<Arc<dyn DeviceConfig>>> {
        // Its functions are lent, not the device.
        Ok(None)
    }

    fn virtual_functions(&self, section: &DeviceSection<'_>) -> Parsed<Vec<Arc<dyn DeviceConfig>>> {
        let keys = section.keys(KEYS)?;
        let device = section.function();
        let Some(functions) = keys.count("functions", 1, MOST_FUNCTIONS)? else {
            return match KEYS[1..].iter().find(|key| keys.get(key).is_some()) {
                Some(key) => wrong(
                    keys.place(key),
                    format!("device {device} has no `functions`"),
                    "write functions = 4, as many as may be lent at the same time",
                ),
                None => Ok(Vec::new()),
            };
        };
        let pairs = keys.count("queues", 1, MOST_PAIRS.into())?.unwrap_or(4) as u16;
        let base = mac(&keys)?;
        let common = Own::read(&keys)?;
        let mut all: Vec<(NicOptions, PortOptions)> = Vec::new();
        for number in 1..=functions {
            let name = format!("{device}.vf{number}");
            let mac = match base {
                None => None,
                Some(base) => match beyond(base, number - 1) {
                    Some(mac) => Some(mac),
                    None => return wrong(keys.place("mac"), "there are too few addresses", MAC),
                },
            };
            all.push(common.clone().function(name, pairs, mac));
        }
        for entry in keys.tables("function")? {
            let place = format!("{device}.{}", entry.name);
            let found = all.iter().position(|(options, _)| options.name == place);
            let Some(index) = found else {
                let what = format!("{device} has no function `{}`", entry.name);
                return wrong(entry.span, what, format!("there are vf1 to vf{functions}"));
            };
            let keys = Section::new(entry.table, entry.span.clone(), place, OWN_KEYS)?;
            let own = Own::read(&keys)?.or(&common);
            let (NicOptions { name, .. }, port) = all[index].clone();
            all[index] = own.function(name, pairs, mac(&keys)?.or(port.mac));
            check(&all[index], &keys)?;
        }
        all.iter().try_for_each(|function| check(function, &keys))?;
        let function = |(options, port): (NicOptions, PortOptions)| {
            Arc::new(NicFunction { options, port, counters: Arc::default() })
                as Arc<dyn DeviceConfig>
        };
        Ok(all.into_iter().map(function).collect())
    }
}

const MAC: &str =
    "`mac` is the first function's address, as in \"52:54:00:12:34:00\"; the others follow";
const RATE: &str = "`rate` is what a function may send and receive, as in \"1 Gbit/s\"";

/// Refuses a function that may use its own IP addresses only, and others' behind it.
fn check((options, port): &(NicOptions, PortOptions), keys: &Section<'_>) -> Parsed<()> {
    if port.anti_spoofing && port.rules.learned_addresses > 0 {
        return wrong(
            keys.place("learned_addresses"),
            format!("{} has `anti_spoofing` and `learned_addresses`", options.name),
            "leave one of them out: what is behind a bridge has IP addresses of its own",
        );
    }
    Ok(())
}

/// The address that is `count` behind another one.
fn beyond(mac: MacAddress, count: u64) -> Option<MacAddress> {
    let [a, b, c, low @ ..] = mac.0;
    let [x, y, z] = low;
    let number = u32::from_be_bytes([0, x, y, z]).checked_add(u32::try_from(count).ok()?)?;
    let [0, x, y, z] = number.to_be_bytes() else { return None };
    Some(MacAddress([a, b, c, x, y, z]))
}

fn mac(keys: &Section<'_>) -> Parsed<Option<MacAddress>> {
    let Some((text, span)) = keys.text("mac", MAC)? else { return Ok(None) };
    match text.parse::<MacAddress>() {
        Ok(mac) if mac.is_station() => Ok(Some(mac)),
        Ok(mac) => wrong(span, format!("{mac} is no station's address"), MAC),
        Err(error) => wrong(span, error.to_string(), MAC),
    }
}

/// What may be said of a device, for all of its functions, and of each.
#[derive(Debug, Clone, Default)]
struct Own {
    rate: Option<u64>,
    burst: Option<u64>,
    vlan: Option<u16>,
    vlans: Option<Vec<u16>>,
    learned_addresses: Option<u32>,
    anti_spoofing: Option<bool>,
    packed_rings: Option<bool>,
}

impl Own {
    fn read(keys: &Section<'_>) -> Parsed<Own> {
        let rate = match keys.text("rate", RATE)? {
            None => None,
            Some((text, span)) => match text.parse::<Rate>() {
                Ok(Rate { per_second, unit: RateUnit::Bytes }) if per_second > 0 => {
                    Some(per_second)
                }
                Ok(_) => return wrong(span, format!("{text} is no rate of bytes"), RATE),
                Err(error) => return wrong(span, error.to_string(), RATE),
            },
        };
        let burst = keys.size("burst", BURSTS.0, BURSTS.1)?;
        let (vlan, vlans, learned_addresses) = PortRules::read(keys)?;
        let anti_spoofing = keys.truth("anti_spoofing")?;
        let packed_rings = keys.truth("packed_rings")?;
        Ok(Own { rate, burst, vlan, vlans, learned_addresses, anti_spoofing, packed_rings })
    }

    fn or(self, common: &Own) -> Own {
        Own {
            rate: self.rate.or(common.rate),
            burst: self.burst.or(common.burst),
            vlan: self.vlan.or(common.vlan),
            vlans: self.vlans.or_else(|| common.vlans.clone()),
            learned_addresses: self.learned_addresses.or(common.learned_addresses),
            anti_spoofing: self.anti_spoofing.or(common.anti_spoofing),
            packed_rings: self.packed_rings.or(common.packed_rings),
        }
    }

    fn function(
        self,
        name: String,
        pairs: u16,
        mac: Option<MacAddress>,
    ) -> (NicOptions, PortOptions) {
        let Own { rate, burst, vlan, vlans, learned_addresses, anti_spoofing, packed_rings } = self;
        let packed_rings = packed_rings.unwrap_or(true);
        let rules = PortRules { vlan, vlans, learned_addresses: learned_addresses.unwrap_or(0) };
        let burst = |rate: u64| burst.unwrap_or((rate / BURST_PARTS).clamp(BURSTS.0, BURSTS.1));
        let rate = rate.map(|rate| (rate, burst(rate)));
        let anti_spoofing = anti_spoofing.unwrap_or(false);
        let address = mac.unwrap_or_else(|| MacAddress::derived(&name));
        let options = NicOptions { name, pairs, mac: address, rate, packed_rings };
        (options, PortOptions { mac: Some(address), rules, anti_spoofing })
    }
}

/// A virtual function as the rack file describes it.
#[derive(Debug)]
struct NicFunction {
    options: NicOptions,
    port: PortOptions,
    counters: Arc<NicCounters>,
}

impl NicFunction {
    fn make(&self, folders: &Folders) -> std::io::Result<Nic> {
        let port = folders.network.as_ref().map(|network| network.port(&self.options.name));
        Ok(Nic::new(&self.options, port.transpose()?, self.counters.clone()))
    }
}

impl DeviceConfig for NicFunction {
    fn detail(&self) -> String {
        let NicOptions { pairs, mac, rate, .. } = &self.options;
        let queues = match pairs {
            1 => "1 queue pair".to_owned(),
            pairs => format!("{pairs} queue pairs"),
        };
        let mut detail = format!("virtio-net, {mac}, {queues}");
        if let Some((rate, _)) = rate {
            detail += &format!(", {}", bits(*rate));
        }
        if !self.options.packed_rings {
            detail += ", split rings";
        }
        let PortRules { vlan, vlans, learned_addresses } = &self.port.rules;
        if let Some(vlan) = vlan {
            detail += &format!(", VLAN {vlan}");
        }
        if let Some(vlans) = vlans.as_ref().filter(|vlans| !vlans.is_empty()) {
            let vlans: Vec<String> = vlans.iter().map(u16::to_string).collect();
            detail += &format!(", tagged VLANs {}", vlans.join(" "));
        }
        if *learned_addresses > 0 {
            detail += &format!(", {learned_addresses} addresses behind it");
        }
        detail
    }

    /// What it sends is read from its user's memory, what it receives is written there.
    fn timing(&self) -> FunctionTiming {
        let limits = self.options.rate.into_iter().flat_map(|(rate, burst)| {
            [LimitCounts::BytesRead, LimitCounts::BytesWritten].map(|counts| FunctionLimit {
                counts,
                rate,
                burst,
            })
        });
        FunctionTiming { limits: limits.collect(), ..FunctionTiming::default() }
    }

    fn port(&self) -> Option<PortOptions> {
        Some(self.port.clone())
    }

    fn shaping(&self) -> Vec<(&'static str, u64)> {
        let get = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        let counters = &self.counters;
        vec![
            ("filtered", get(&counters.filtered)),
            ("too_large", get(&counters.too_large)),
            ("no_buffers", get(&counters.no_buffers)),
            ("no_queue", get(&counters.no_queue)),
            ("not_cut", get(&counters.not_cut)),
            ("not_sent", get(&counters.not_sent)),
            ("throttled", get(&counters.throttled)),
            ("faults", get(&counters.faults)),
        ]
    }

    fn is_separable(&self) -> bool {
        true
    }

    fn is_carried(&self) -> bool {
        true
    }

    fn model(&self, folders: &Folders) -> std::io::Result<Box<dyn Function>> {
        self.make(folders).map(|nic| Box::new(nic) as _)
    }

    /// The frames that lie in its port are the network's.
    fn resume(&self, folders: &Folders, files: Vec<OwnedFd>) -> std::io::Result<Box<dyn Function>> {
        let mut nic = self.make(folders)?;
        nic.inherited.files = files;
        Ok(Box::new(nic))
    }
}

/// A rate of bytes per second as people read that of a network.
fn bits(rate: u64) -> String {
    let bits = rate as f64 * 8.0;
    let (value, unit) = match rate {
        ..125_000 => (bits / 1e3, "kbit/s"),
        125_000..125_000_000 => (bits / 1e6, "Mbit/s"),
        _ => (bits / 1e9, "Gbit/s"),
    };
    format!("{value} {unit}")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::class::parse_rack;

    fn read(keys: &str) -> Result<Vec<String>, String> {
        let head = "name = \"lab\"\n[hosts.alpha.devices.nic0]\nkind = \"nic\"\n";
        let parsed = parse_rack("rack.toml", &format!("{head}{keys}"));
        let (_, devices) = parsed.map_err(|error| error.to_string())?;
        let shown = devices.iter().map(|device| {
            let detail = device.config.as_ref().map_or("modelled".to_owned(), |c| c.detail());
            format!("{}: {detail}", device.function)
        });
        Ok(shown.collect())
    }

    #[test]
    fn a_card_without_functions_is_known_to_the_timing_model_only() {
        assert_eq!(read("").unwrap(), ["alpha/nic0: modelled"]);
    }

    #[test]
    fn each_function_has_the_keys_of_the_card_and_its_own() {
        let keys = "functions = 3\nqueues = 1\nmac = \"52:54:00:00:00:ff\"\nrate = \"1 Gbit/s\"\n\
                    [hosts.alpha.devices.nic0.function.vf2]\nvlan = 7\nrate = \"2.5 Mbit/s\"\npacked_rings = false\n\
                    [hosts.alpha.devices.nic0.function.vf3]\nmac = \"02:00:00:00:00:01\"\n";
        let expected = [
            "alpha/nic0.vf1: virtio-net, 52:54:00:00:00:ff, 1 queue pair, 1 Gbit/s",
            "alpha/nic0.vf2: virtio-net, 52:54:00:00:01:00, 1 queue pair, 2.5 Mbit/s, split rings, VLAN 7",
            "alpha/nic0.vf3: virtio-net, 02:00:00:00:00:01, 1 queue pair, 1 Gbit/s",
        ];
        assert_eq!(read(keys).unwrap(), expected);
        let several = &read("functions = 1").unwrap()[0];
        let mac = MacAddress::derived("alpha/nic0.vf1");
        assert_eq!(several, &format!("alpha/nic0.vf1: virtio-net, {mac}, 4 queue pairs"));
    }

    #[test]
    fn what_cannot_be_is_refused_with_its_place() {
        let table = "functions = 1\n[hosts.alpha.devices.nic0.function.";
        for (keys, expected) in [
            ("queues = 2", "rack.toml:4:10: device alpha/nic0 has no `functions`; write"),
            ("functions = 65", "rack.toml:4:13: `functions` is 65; "),
            ("functions = 1\nqueues = 17", "rack.toml:5:10: `queues` is 17; "),
            ("functions = 1\nmac = \"x\"", "rack.toml:5:7: \"x\" is no Ethernet address"),
            (
                "functions = 1\nmac = \"ff:ff:ff:ff:ff:ff\"",
                "rack.toml:5:7: ff:ff:ff:ff:ff:ff is no station's address",
            ),
            ("functions = 2\nmac = \"02:00:00:ff:ff:ff\"", "rack.toml:5:7: there are too few"),
            ("functions = 1\nrate = \"fast\"", "rack.toml:5:8: `fast` is no rate"),
            ("functions = 1\nrate = \"9 op/s\"", "rack.toml:5:8: 9 op/s is no rate of bytes"),
            ("functions = 1\nburst = \"1 KiB\"", "rack.toml:5:9: `burst` is 1 KiB; it is from"),
            ("functions = 1\npacked_rings = 1", "rack.toml:5:16: `packed_rings`"),
            ("functions = 1\nvlan = 4095", "rack.toml:5:8: `vlan` is 4095"),
            ("functions = 1\nlevel = 1", "rack.toml:5:1: unknown key `level`"),
            (&format!("{table}vf2]"), "rack.toml:5:36: alpha/nic0 has no function `vf2`; there"),
            (&format!("{table}vf1]\nqueues = 1"), "rack.toml:6:1: unknown key `queues` in alpha/"),
        ] {
            let said = read(keys).unwrap_err();
            assert!(said.starts_with(expected), "{keys:?}\n gives {said}\n not   {expected}");
        }
    }
}
