//! Pairs of network namespaces that are joined by rackbus, or by a veth pair of the kernel's.

use std::path::Path;
use std::process::Command;

use rackbus_netdev::namespace;

use super::TrafficEnds;
use crate::BenchError;
use crate::rack::BenchRack;

/// A rack of two hosts with interfaces, while it lives.
pub struct NetworkRack {
    _rack: BenchRack,
    /// The namespaces of the hosts alpha and beta.
    pub pair: TrafficEnds,
}

impl NetworkRack {
    /// Starts it in `dir`; `None` when there is no `rackbus` to start it with.
    ///
    /// # Errors
    /// When it does not come up.
    pub fn start(dir: &Path, mtu: u16) -> Result<Option<NetworkRack>, BenchError> {
        let name = format!("bench{}", std::process::id());
        let text =
            format!("name = \"{name}\"\n[network]\nmtu = {mtu}\n[hosts.alpha]\n[hosts.beta]\n");
        let Some(rack) = BenchRack::start(dir, &text)? else { return Ok(None) };
        rack.net_up()?;
        let open = |host: &str| namespace::open(&format!("rackbus-{name}-{host}"));
        let failed = || BenchError::io("opening a host's namespace");
        let spaces = (open("alpha").map_err(failed())?, open("beta").map_err(failed())?);
        let carriers = rack.nodes(&["alpha", "beta"])?;
        let pair = TrafficEnds { spaces: Some(spaces), address: [10, 77, 0, 2].into(), carriers };
        Ok(Some(NetworkRack { _rack: rack, pair }))
    }
}

/// Two namespaces with a veth pair, while it lives.
pub struct Veth {
    names: [String; 2],
    /// The namespaces at its two ends.
    pub pair: TrafficEnds,
}

impl Veth {
    /// Makes it with iproute2.
    ///
    /// # Errors
    /// When the system refuses, or there is no `ip`.
    pub fn make(mtu: u16) -> Result<Veth, BenchError> {
        let names = ["c", "d"].map(|end| format!("rackbus-bench-{}-{end}", std::process::id()));
        let failed = || BenchError::io("making a namespace");
        let [a, b] = &names;
        let spaces =
            (namespace::create(a).map_err(failed())?, namespace::create(b).map_err(failed())?);
        let address = [10, 79, 0, 2].into();
        let pair = TrafficEnds { spaces: Some(spaces), address, carriers: Vec::new() };
        let veth = Veth { names: names.clone(), pair };
        ip(&format!("link add veth0 netns {a} type veth peer name veth0 netns {b}"))?;
        for (nth, name) in names.iter().enumerate() {
            ip(&format!("-n {name} address add 10.79.0.{}/24 dev veth0", nth + 1))?;
            ip(&format!("-n {name} link set veth0 mtu {mtu} up"))?;
        }
        Ok(veth)
    }
}

impl Drop for Veth {
    fn drop(&mut self) {
        for name in &self.names {
            let _ = namespace::remove(name);
        }
    }
}

/// Runs iproute2's `ip` with these arguments, separated by spaces.
///
/// # Errors
/// When it is not there, or refuses.
pub fn ip(arguments: &str) -> Result<(), BenchError> {
    let output = Command::new("ip").args(arguments.split(' ')).output();
    let output = output.map_err(BenchError::io("running ip"))?;
    if output.status.success() {
        return Ok(());
    }
    let complaint = String::from_utf8_lossy(&output.stderr);
    Err(BenchError::Peer(format!("ip {arguments}: {complaint}")))
}
