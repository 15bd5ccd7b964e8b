//! A machine outside of the rack: a network namespace at the other end of an uplink's cable. Making it takes root.

use std::process::Command;

use rackbus_e2e::{Result, ensure};

/// The uplink of the rack file.
const UPLINK: &str = "rbe2e0";
const NAMESPACE: &str = "rackbus-e2e-outside";

/// The machine. It ends with this, and its cable with it.
pub struct OutsideMachine;

impl OutsideMachine {
    /// Its addresses, in the rack's subnets.
    pub const ADDRESS: &str = "10.77.200.1";
    /// The same by IPv6.
    pub const ADDRESS_6: &str = "fd72:6163:6b62::200:1";

    /// Makes it, with a cable that carries packets of up to `mtu` bytes.
    ///
    /// # Errors
    /// When `ip` fails.
    pub fn new(mtu: u16) -> Result<OutsideMachine> {
        let mtu = mtu.to_string();
        // What a run left that was killed: mostly there is nothing.
        let _ = ip(&["link", "delete", UPLINK]);
        let _ = ip(&["netns", "delete", NAMESPACE]);
        ip(&["netns", "add", NAMESPACE])?;
        let outside = OutsideMachine;
        let cable = ["type", "veth", "peer", "name", "far0", "mtu", &mtu, "netns", NAMESPACE];
        ip(&[&["link", "add", UPLINK, "mtu", &mtu][..], &cable].concat())?;
        ip(&["link", "set", UPLINK, "up"])?;
        for address in
            [format!("{}/16", OutsideMachine::ADDRESS), format!("{}/64", OutsideMachine::ADDRESS_6)]
        {
            let nodad: &[&str] = if address.contains(':') { &["nodad"] } else { &[] };
            let add = ["-n", NAMESPACE, "addr", "add", &address, "dev", "far0"];
            ip(&[&add[..], nodad].concat())?;
        }
        ip(&["-n", NAMESPACE, "link", "set", "far0", "up"])?;
        Ok(outside)
    }

    /// What runs a program there.
    #[must_use]
    pub fn command(&self, program: &str, arguments: &[&str]) -> Command {
        let mut command = Command::new("ip");
        command.args(["netns", "exec", NAMESPACE, program]).args(arguments);
        command
    }
}

impl Drop for OutsideMachine {
    fn drop(&mut self) {
        // The uplink goes with the other end of its cable.
        let _ = ip(&["netns", "delete", NAMESPACE]);
    }
}

fn ip(arguments: &[&str]) -> Result<()> {
    let output = Command::new("ip").args(arguments).output()?;
    let said = String::from_utf8_lossy(&output.stderr);
    ensure!(output.status.success(), "ip {}: {}", arguments.join(" "), said.trim());
    Ok(())
}
