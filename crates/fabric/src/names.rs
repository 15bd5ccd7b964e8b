//! Names: of hosts and devices, and of functions (`alpha/nvme0`, `alpha/accel0.vf3`).

use std::fmt;
use std::str::FromStr;

/// The longest name of a host or device. Socket paths, which may have 107 bytes, are made of two.
pub(crate) const LONGEST: usize = 24;

/// What a name may be, for messages.
pub(crate) const ALLOWED: &str = "a name begins with a letter, goes on with letters, digits and `-`, all lower case, and has at \
     most 24 characters";

/// Whether `text` may name a rack, host, device, adapter or switch.
pub fn is_name(text: &str) -> bool {
    text.len() <= LONGEST
        && text.starts_with(|c: char| c.is_ascii_lowercase())
        && text.chars().all(|c| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '-')
}

/// A PCI function's name in the rack.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct FunctionName {
    /// The host that has it.
    pub host: String,
    /// The device's name on that host.
    pub device: String,
    /// Which virtual function of the device, from 1 as SR-IOV numbers them; `None` is the physical
    /// function.
    pub vf: Option<u16>,
}

impl fmt::Display for FunctionName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.host, self.device)?;
        match self.vf {
            Some(vf) => write!(f, ".vf{vf}"),
            None => Ok(()),
        }
    }
}

/// Not a function's name.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error(
    "`{0}` is no function's name; write HOST/DEVICE or HOST/DEVICE.vfN, for example alpha/nvme0"
)]
pub struct BadFunctionName(pub String);

impl FromStr for FunctionName {
    type Err = BadFunctionName;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let bad = || BadFunctionName(text.to_owned());
        let (host, rest) = text.split_once('/').ok_or_else(bad)?;
        let (device, vf) = match rest.split_once(".vf") {
            None => (rest, None),
            Some((device, number)) => {
                let vf: u16 = number.parse().map_err(|_| bad())?;
                // One name for one function: no `+1`, no `01`.
                if vf.to_string() != number {
                    return Err(bad());
                }
                (device, Some(vf))
            }
        };
        if !is_name(host) || !is_name(device) {
            return Err(bad());
        }
        Ok(FunctionName { host: host.to_owned(), device: device.to_owned(), vf })
    }
}
