//! Functions of the machine itself, which its owner's node hands out by VFIO: what the rack file says of one.

use std::os::fd::OwnedFd;
use std::sync::Arc;

use rackbus_fabric::rack::DeviceSection;
use rackbus_fabric::text::{Parsed, Section, wrong};
use rackbus_pci::Function;
use rackbus_vfio::PciAddress;

use crate::class::{Class, DeviceConfig};
use crate::place::Folders;

/// Name of the class.
const CLASS: &str = "vfio";
const KEYS: &[&str] = &["kind", "address", "functions", "bars"];

/// The class of functions of the machine.
#[derive(Debug)]
pub struct PhysicalClass;

impl Class for PhysicalClass {
    fn name(&self) -> &'static str {
        CLASS
    }

    fn read(&self, section: &DeviceSection<'_>) -> Parsed<Option<Arc<dyn DeviceConfig>>> {
        let keys = section.keys(KEYS)?;
        Ok(Some(Arc::new(read(&keys)?)))
    }

    fn virtual_functions(&self, section: &DeviceSection<'_>) -> Parsed<Vec<Arc<dyn DeviceConfig>>> {
        let whole = read(&section.keys(KEYS)?)?;
        let part = |number| Arc::new(PhysicalFunction { number: Some(number), ..whole.clone() });
        let numbers = 1..=whole.functions.unwrap_or(0);
        Ok(numbers.map(|number| part(number) as Arc<dyn DeviceConfig>).collect())
    }
}

/// A function of the machine that is lent.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PhysicalFunction {
    /// Where it is, or the function that its virtual functions are made of.
    pub address: PciAddress,
    /// How many virtual functions are made of it.
    pub functions: Option<u16>,
    /// The number of this one, from 1 on.
    pub number: Option<u16>,
    /// Whether its user may map its BARs.
    pub mapped: bool,
}

fn read(section: &Section<'_>) -> Parsed<PhysicalFunction> {
    let found = section.text("address", ADDRESS)?;
    let (text, place) = section.require("address", found, ADDRESS)?;
    let Ok(address) = text.parse() else {
        return wrong(place, format!("`address` is {text:?}"), ADDRESS);
    };
    let functions = section.count("functions", 1, MOST_FUNCTIONS)?;
    let mapped = match section.text("bars", BARS)? {
        None | Some(("mapped", _)) => true,
        Some(("trapped", _)) => false,
        Some((word, place)) => return wrong(place, format!("`bars` is {word:?}"), BARS),
    };
    let functions = functions.and_then(|count| u16::try_from(count).ok());
    Ok(PhysicalFunction { address, functions, number: None, mapped })
}

impl DeviceConfig for PhysicalFunction {
    fn detail(&self) -> String {
        let bars = if self.mapped { "" } else { ", BARs trapped" };
        match self.number {
            Some(number) => format!("virtual function {number} of {}{bars}", self.address),
            None => format!("{}{bars}", self.address),
        }
    }

    fn model(&self, _folders: &Folders) -> std::io::Result<Box<dyn Function>> {
        Err(std::io::Error::other("this function is the machine's own"))
    }

    fn resume(
        &self,
        folders: &Folders,
        _medium: Vec<OwnedFd>,
    ) -> std::io::Result<Box<dyn Function>> {
        self.model(folders)
    }

    fn physical(&self) -> Option<PhysicalFunction> {
        Some(self.clone())
    }
}

/// The most virtual functions that are made of one: as many as have numbers on one bus.
const MOST_FUNCTIONS: u64 = 255;
const ADDRESS: &str =
    "`address` is where the function is, as `lspci -D` shows it (\"0000:03:00.0\")";
const BARS: &str = "`bars` is \"mapped\" (its user reaches its registers itself) or \"trapped\" (through the node, \
                    which can take them away at any moment)";

#[cfg(test)]
mod tests {
    use crate::class::parse_rack;

    fn section(keys: &str) -> String {
        format!("name = \"lab\"\n[hosts.a.devices.d]\nkind = \"vfio\"\n{keys}")
    }

    #[test]
    fn a_section_is_refused_where_it_is_wrong() {
        for (keys, said) in [
            ("", "rack.toml:2:18: "),
            ("address = \"03:00\"\n", "rack.toml:4:11: `address` is \"03:00\"; "),
            ("address = \"03:00.0\"\nfunctions = 0\n", "rack.toml:5:13: "),
            ("address = \"03:00.0\"\nbars = \"maybe\"\n", "rack.toml:5:8: `bars` is \"maybe\"; "),
            ("address = \"03:00.0\"\nsize = 1\n", "rack.toml:5:1: unknown key `size`"),
        ] {
            let refused = parse_rack("rack.toml", &section(keys)).unwrap_err().to_string();
            assert!(refused.starts_with(said), "{keys}: {refused}");
        }
    }

    #[test]
    fn virtual_functions_are_lent_in_the_place_of_their_function() {
        let described = |keys: &str| {
            let (_, devices) = parse_rack("rack.toml", &section(keys)).unwrap();
            let detail = |config: std::sync::Arc<dyn crate::DeviceConfig>| config.detail();
            let shown =
                |d: crate::RackDevice| (d.function, d.config.map(detail).unwrap_or_default());
            devices.into_iter().map(shown).collect::<Vec<_>>()
        };
        let one = described("address = \"3:0.0\"\nbars = \"trapped\"\n");
        assert_eq!(one, [("a/d".to_owned(), "0000:03:00.0, BARs trapped".to_owned())]);
        let two = described("address = \"03:00.0\"\nfunctions = 2\n");
        let function = |n| (format!("a/d.vf{n}"), format!("virtual function {n} of 0000:03:00.0"));
        assert_eq!(two, [function(1), function(2)]);
    }
}
