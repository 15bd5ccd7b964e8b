//! The cables of a testbed's machines, and what happens to one: it is pulled, as a whole or towards one other machine, it becomes
//! slow and loses packets, and it is mended.
//!
//! A machine's cable is a pair of interfaces: one in its own namespace, the other at the bridge. A slow cable has a
//! token bucket at both; what exceeds the bucket's short queue is dropped, as in a switch whose ports are full. Where a cable
//! is pulled towards one machine, that one drops what comes from there: one direction fails while the other works, and whoever
//! sends has no error by which to notice it.

use std::path::Path;

use serde_json::json;

use super::{Testbed, run};
use crate::output::{Failure, Output};

/// Kilobits a second of the slowest cable: a packet takes 120 ms.
const SLOWEST_KBIT: u32 = 100;
/// Kilobits a second of the fastest: tc(8) takes no queue of 20 ms of much more.
const FASTEST_KBIT: u32 = 4_000_000;
/// Milliseconds that a packet waits in a slow cable's queue before the next ones are dropped, where two have room.
const QUEUE_MS: u32 = 20;
/// Bytes of a packet with its header. Behind a slow cable an interface passes no larger ones on, to be cut later.
const PACKET: u64 = 1514;
/// What Linux has otherwise.
const LARGEST: &str = "65536";

/// Makes the machines' namespaces, and what joins them.
pub fn lay(testbed: &Testbed) -> Result<(), Failure> {
    let bridge = testbed.bridge();
    let ip = |args: &str| run("ip", &args.split(' ').collect::<Vec<_>>());
    ip(&format!("netns add {bridge}"))?;
    ip(&format!("-n {bridge} link add br0 type bridge"))?;
    ip(&format!("-n {bridge} link set br0 up"))?;
    for (number, machine) in testbed.machines.iter().enumerate() {
        let own = testbed.namespace(&machine.name);
        ip(&format!("netns add {own}"))?;
        ip(&format!("-n {bridge} link add p{number} type veth peer name eth0 netns {own}"))?;
        ip(&format!("-n {bridge} link set p{number} master br0"))?;
        ip(&format!("-n {bridge} link set p{number} up"))?;
        ip(&format!("-n {own} addr add {}/16 dev eth0", machine.address))?;
        ip(&format!("-n {own} link set lo up"))?;
        ip(&format!("-n {own} link set eth0 up"))?;
        // What a machine has for itself is looked up first otherwise, and dropped by no rule.
        ip(&format!("-n {own} rule add pref 100 lookup local"))?;
        ip(&format!("-n {own} rule delete pref 0"))?;
    }
    Ok(())
}

/// Pulls a machine's cable, or plugs it in again.
pub fn plug(dir: &Path, machine: &str, state: &str, output: &Output) -> Result<(), Failure> {
    let testbed = Testbed::load(dir)?;
    let (number, machine) = testbed.machine(machine)?;
    run("ip", &["-n", &testbed.bridge(), "link", "set", &format!("p{number}"), state])?;
    if state == "up" {
        clear(&testbed, number, &machine.name);
    }
    super::done(output, &machine.name, if state == "up" { "reached again" } else { "cut off" });
    Ok(())
}

/// From now on nothing that `machine` sends reaches `other`; what `other` sends arrives.
pub fn cut_towards(dir: &Path, machine: &str, other: &str, output: &Output) -> Result<(), Failure> {
    let testbed = Testbed::load(dir)?;
    let (number, from) = testbed.machine(machine)?;
    let (to_number, to) = testbed.machine(other)?;
    if number == to_number {
        let error = format!("{machine} needs no cable to reach itself");
        return Err(Failure::usage(error, "name two machines"));
    }
    // A second one would be refused.
    let _ = run("ip", &drops(&testbed.namespace(&to.name), "delete", &from.address));
    run("ip", &drops(&testbed.namespace(&to.name), "add", &from.address))?;
    let shown = json!({ "machine": from.name, "is": "cut off", "to": to.name });
    output.result(&shown, |o| o.line(&format!("{}: cut off towards {}", from.name, to.name)));
    Ok(())
}

/// From now on the cable passes so many kilobits a second in each direction, and drops what comes faster.
pub fn slow(dir: &Path, machine: &str, rate_kbit: u32, output: &Output) -> Result<(), Failure> {
    let testbed = Testbed::load(dir)?;
    let (number, machine) = testbed.machine(machine)?;
    let ends = ends(&testbed, number, &machine.name);
    let words = bucket(rate_kbit);
    let slowed = ends.iter().try_for_each(|(namespace, interface)| {
        let mut all = vec!["-n", namespace, "qdisc", "replace", "dev", interface, "root", "tbf"];
        all.extend(words.iter().map(String::as_str));
        segments(namespace, interface, &PACKET.to_string())?;
        run("tc", &all)
    });
    if slowed.is_err() {
        // A cable that is slow in one direction is nothing that was asked for.
        unlimit(&testbed, number, &machine.name);
    }
    slowed?;
    let shown = json!({ "machine": machine.name, "is": "slow", "kbit_per_second": rate_kbit });
    output.result(&shown, |o| o.line(&format!("{}: {rate_kbit} kbit/s", machine.name)));
    Ok(())
}

/// Both ends of a machine's cable: namespace and interface.
fn ends(testbed: &Testbed, number: usize, machine: &str) -> [(String, String); 2] {
    [(testbed.namespace(machine), "eth0".to_owned()), (testbed.bridge(), format!("p{number}"))]
}

/// Takes away what [`slow`] has done, as far as it has.
fn unlimit(testbed: &Testbed, number: usize, machine: &str) {
    for (namespace, interface) in ends(testbed, number, machine) {
        let _ = run("tc", &["-n", &namespace, "qdisc", "delete", "dev", &interface, "root"]);
        let _ = segments(&namespace, &interface, LARGEST);
    }
}

/// Takes away what [`slow`] and [`cut_towards`] have done, as far as they have.
fn clear(testbed: &Testbed, number: usize, machine: &str) {
    unlimit(testbed, number, machine);
    let address = &testbed.machines[number].address;
    for other in testbed.machines.iter().filter(|other| other.name != machine) {
        let _ = run("ip", &drops(&testbed.namespace(&other.name), "delete", address));
    }
}

/// What has ip(8) add or delete the rule by which the machine with this namespace drops what comes from `address`.
fn drops<'a>(namespace: &'a str, action: &'a str, address: &'a str) -> [&'a str; 11] {
    ["-n", namespace, "rule", action, "pref", "10", "iif", "eth0", "from", address, "blackhole"]
}

/// The largest packet that an interface passes on, in bytes.
fn segments(namespace: &str, interface: &str, largest: &str) -> Result<(), Failure> {
    run("ip", &["-n", namespace, "link", "set", "dev", interface, "gso_max_size", largest])
}

/// The token bucket of a slow cable, as tc(8) takes it.
fn bucket(rate_kbit: u32) -> [String; 6] {
    let in_ms = |ms: u32| u64::from(rate_kbit) * u64::from(ms) / 8;
    let pairs = [
        ("rate", format!("{rate_kbit}kbit")),
        // What passes at once: what a millisecond brings, or a fast cable would be slower than it says.
        ("burst", format!("{}b", in_ms(1).max(2 * PACKET))),
        ("limit", format!("{}b", in_ms(QUEUE_MS).max(2 * PACKET))),
    ];
    let mut words = pairs.into_iter().flat_map(|(name, value)| [name.to_owned(), value]);
    std::array::from_fn(|_| words.next().unwrap_or_default())
}

/// Kilobits a second in `500 kbit/s`, `10 Mbit/s` or `1 Gbit/s`.
///
/// # Errors
/// What it may be.
pub fn parse_rate(text: &str) -> Result<u32, String> {
    let allowed = || format!("write it as \"10 Mbit/s\", from {SLOWEST_KBIT} kbit/s to 4 Gbit/s");
    let unit_at = text.find(|c: char| !c.is_ascii_digit()).ok_or_else(allowed)?;
    let (number, unit) = text.split_at(unit_at);
    let factor = match unit.trim() {
        "kbit/s" => 1,
        "Mbit/s" => 1000,
        "Gbit/s" => 1_000_000,
        _ => return Err(allowed()),
    };
    let rate = number.parse::<u32>().ok().and_then(|number| number.checked_mul(factor));
    rate.filter(|rate| (SLOWEST_KBIT..=FASTEST_KBIT).contains(rate)).ok_or_else(allowed)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rates_have_a_unit_and_bounds() {
        let good = [("100 kbit/s", 100), ("10 Mbit/s", 10_000), ("4Gbit/s", 4_000_000)];
        for (text, kbit) in good {
            assert_eq!(parse_rate(text), Ok(kbit), "{text}");
        }
        for text in
            ["", "10", "Mbit/s", "99 kbit/s", "0 Gbit/s", "5 Gbit/s", "1.5 Mbit/s", "10 MB/s"]
        {
            assert!(parse_rate(text).is_err(), "{text}");
        }
    }

    #[test]
    fn the_queue_of_a_slow_cable_is_short() {
        // 10 Mbit/s for 20 ms are 25,000 bytes, and 1 Gbit/s for 1 ms are 125,000.
        assert_eq!(bucket(1_000_000)[3], "125000b");
        let words = bucket(10_000);
        assert_eq!(
            words.each_ref().map(String::as_str),
            ["rate", "10000kbit", "burst", "3028b", "limit", "25000b"]
        );
    }
}
