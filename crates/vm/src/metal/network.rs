//! A network of machines: a bridge of this host's with a TAP device for each machine, so that they reach each other
//! and this host by IP.

use std::process::{Command, Stdio};

use crate::{Result, VmError};

/// A network; it goes when it is dropped. Needs root.
#[derive(Debug)]
pub struct SharedNetwork {
    bridge: String,
    subnet: u8,
    taps: Vec<String>,
}

/// An interface's place in a network.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NetworkCable {
    tap: String,
    subnet: u8,
    number: u8,
}

fn ip(args: &str) -> Result<()> {
    let output = Command::new("ip").args(args.split(' ')).stdin(Stdio::null()).output();
    let output = output.map_err(|cause| VmError::Invalid(format!("ip: {cause}")))?;
    if output.status.success() {
        return Ok(());
    }
    let said = String::from_utf8_lossy(&output.stderr);
    Err(VmError::Invalid(format!("ip {args}: {} (networks need root)", said.trim())))
}

impl SharedNetwork {
    /// A network of the machines of this process, 10.78.`subnet`.0/24; this host is number 1 in it.
    ///
    /// # Errors
    /// When it cannot be made: it takes root.
    pub fn new(subnet: u8) -> Result<SharedNetwork> {
        let bridge = format!("rb{}-{subnet}", std::process::id());
        ip(&format!("link add {bridge} type bridge"))?;
        let switch = SharedNetwork { bridge, subnet, taps: Vec::new() };
        ip(&format!("addr add 10.78.{subnet}.1/24 dev {}", switch.bridge))?;
        ip(&format!("link set {} up", switch.bridge))?;
        Ok(switch)
    }

    /// A place for a machine; its number is 2 for the first.
    ///
    /// # Errors
    /// When there are 200, or no device is available.
    pub fn cable(&mut self) -> Result<NetworkCable> {
        let number = u8::try_from(self.taps.len() + 2).ok().filter(|number| *number < 202);
        let number = number.ok_or_else(|| VmError::Invalid("over 200 machines".into()))?;
        let tap = format!("{}-{number}", self.bridge);
        ip(&format!("tuntap add dev {tap} mode tap"))?;
        self.taps.push(tap.clone());
        ip(&format!("link set {tap} master {} up", self.bridge))?;
        Ok(NetworkCable { tap, subnet: self.subnet, number })
    }
}

impl Drop for SharedNetwork {
    fn drop(&mut self) {
        for device in self.taps.iter().chain([&self.bridge]) {
            // What is left over is seen by `ip link`; nobody can do better here.
            let _ = ip(&format!("link delete {device}"));
        }
    }
}

impl NetworkCable {
    /// The machine's address, with the length of the network's.
    #[must_use]
    pub fn address(&self) -> String {
        format!("10.78.{}.{}/24", self.subnet, self.number)
    }

    /// Has it plugged in, or pulled.
    ///
    /// # Errors
    /// When the network is gone.
    pub fn set(&self, plugged_in: bool) -> Result<()> {
        let state = if plugged_in { "up" } else { "down" };
        ip(&format!("link set {} {state}", self.tap))
    }

    /// QEMU's arguments for the machine's interface.
    pub(super) fn args(&self) -> Vec<String> {
        let NetworkCable { tap, subnet, number } = self;
        let device = format!(
            "virtio-net-pci,netdev=cable,romfile=,mac=52:54:00:78:{subnet:02x}:{number:02x}"
        );
        [
            "-netdev",
            &format!("tap,id=cable,ifname={tap},script=no,downscript=no"),
            "-device",
            &device,
        ]
        .map(str::to_owned)
        .to_vec()
    }
}
