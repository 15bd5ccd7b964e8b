//! How a function is reset.
//!
//! The kernel tries a function's own ways in an order of its choice (function-level reset, the power states, the
//! bus where nothing else is on it). Where it has none, the bus is reset with all that is on it, if all that is
//! in the same hands.

use std::fmt;

/// What was reset, and by what.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ResetMethod {
    /// Function-level reset (PCIe base 6.0, section 6.6.2), or its older kind for conventional PCI.
    FunctionLevel,
    /// A way that the kernel knows for this very device, or its firmware has.
    DeviceSpecific,
    /// From D3hot to D0 (PCIe base 6.0, section 5.3.1.4).
    PowerManagement,
    /// The bus, with all that is on it.
    Bus,
    /// The function's own, and the kernel does not say which.
    Own,
}

impl ResetMethod {
    /// What the kernel uses for a function of these methods, as its `reset_method` has them.
    pub(crate) fn of_kernel(methods: &[String]) -> ResetMethod {
        match methods.first().map(String::as_str) {
            Some("flr" | "af_flr") => ResetMethod::FunctionLevel,
            Some("device_specific" | "acpi") => ResetMethod::DeviceSpecific,
            Some("pm") => ResetMethod::PowerManagement,
            Some("bus" | "cxl_bus") => ResetMethod::Bus,
            _ => ResetMethod::Own,
        }
    }
}

impl fmt::Display for ResetMethod {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            ResetMethod::FunctionLevel => "function-level reset",
            ResetMethod::DeviceSpecific => "the device's own reset",
            ResetMethod::PowerManagement => "reset by power management",
            ResetMethod::Bus => "bus reset",
            ResetMethod::Own => "reset by the kernel's choice",
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_method_is_the_one_that_is_used() {
        let of = |methods: &[&str]| {
            ResetMethod::of_kernel(
                &methods.iter().map(|word| (*word).to_owned()).collect::<Vec<_>>(),
            )
        };
        assert_eq!(of(&["flr", "bus"]), ResetMethod::FunctionLevel);
        assert_eq!(of(&["device_specific", "flr"]), ResetMethod::DeviceSpecific);
        assert_eq!(of(&["pm", "bus"]), ResetMethod::PowerManagement);
        assert_eq!(of(&["bus"]), ResetMethod::Bus);
        assert_eq!(of(&[]), ResetMethod::Own);
    }
}
