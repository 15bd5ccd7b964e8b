//! Classes of devices, and which there are.
//!
//! A class is a folder beside this file and a line in [`CLASSES`]: what the rack file may say of its
//! devices, how they are described, how their models are made, what the timing model is told of them, and the
//! front that runs at a borrower. Whoever lends, borrows or lists devices asks here and names no class.

mod levels;

use std::collections::BTreeMap;
use std::fmt::Debug;
use std::ops::Range;
use std::os::fd::OwnedFd;
use std::sync::Arc;

use rackbus_fabric::rack::{
    DeviceCapability, DeviceFacts, DeviceSection, FunctionTiming, Rack, RackError, format_size,
};
use rackbus_fabric::text::{Parsed, list, wrong};
use rackbus_memory::InheritedEnd;
use rackbus_net::PortOptions;
use rackbus_net::addressing::{Station, Stations};
use rackbus_pci::{Function, MediumAccess};
use rackbus_qos::LevelRoom;

pub use levels::{LentTo, no_levels};

use crate::lost::Lost;
use crate::upstream::{UpstreamClass, UpstreamServer};
use crate::vfio::{PhysicalClass, PhysicalFunction};
use crate::{Folders, accel, memory, nic, nvme};

/// All classes: those that a node plays, those that only the timing model knows, functions that other programs
/// serve, and those of the machine itself. What the timing model needs to know of a device, the rack file says of it as a part of the
/// fabric, whatever its class, and [`DeviceConfig::timing`] of what only its class can read.
pub const CLASSES: &[&dyn Class] = &[
    &nvme::DriveClass,
    &memory::MemoryClass,
    &Modelled("gpu"),
    &nic::NicClass,
    &accel::AcceleratorClass,
    &Modelled("dma"),
    &UpstreamClass,
    &PhysicalClass,
];

/// A class of devices.
pub trait Class: Sync {
    /// Its name: the word in the rack file, and on the link for its media.
    fn name(&self) -> &'static str;

    /// What PCI knows its functions by, where that is the same for all of them.
    fn pci_identity(&self) -> Option<PciIdentity> {
        None
    }

    /// What can be done with its functions by parts of rackbus that know no class. They ask for the capability and not
    /// for the class.
    fn capabilities(&self) -> &'static [DeviceCapability] {
        &[]
    }

    /// Reads what the rack file says of a device. `None`: the timing model knows it, and no host on
    /// this machine can play it.
    ///
    /// # Errors
    /// [`Problem`](rackbus_fabric::text::Problem), with its place, for what is wrong.
    fn read(&self, section: &DeviceSection<'_>) -> Parsed<Option<Arc<dyn DeviceConfig>>>;

    /// The version of the state that its devices are saved with; `None` where none is ever run.
    fn state_version(&self) -> Option<u32> {
        None
    }

    /// Reads the virtual functions of a device, in the order of their numbers from 1 on. A device that
    /// has any is not lent itself.
    ///
    /// # Errors
    /// As [`read`](Class::read).
    fn virtual_functions(
        &self,
        _section: &DeviceSection<'_>,
    ) -> Parsed<Vec<Arc<dyn DeviceConfig>>> {
        Ok(Vec::new())
    }

    /// The front of a medium of this class that another node has, as it described it and by the
    /// access that it gave; `lost` says when that node is gone.
    ///
    /// # Errors
    /// [`FrontError`].
    fn front(
        &self,
        _description: &str,
        _access: MediumAccess,
        _lost: Lost,
    ) -> Result<Box<dyn Function>, FrontError> {
        Err(FrontError::None(self.name().to_owned()))
    }

    /// The front that continues where an earlier life of it was saved, which gave `end`. Nothing is taken
    /// from the medium until the front is restored.
    ///
    /// # Errors
    /// As [`front`](Class::front).
    fn front_again(
        &self,
        description: &str,
        end: InheritedEnd,
        lost: Lost,
    ) -> Result<Box<dyn Function>, FrontError> {
        self.front(description, MediumAccess::Handles(end.into_handles()), lost)
    }
}

/// What PCI knows a function by, without asking it.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct PciIdentity {
    /// Vendor ID that functions of the class show; 0 where that is not known here.
    pub vendor_id: u16,
    /// Device ID that they show; 0 where that is not known here.
    pub device_id: u16,
    /// Class code: base class, sub-class and programming interface, from bit 23 on down.
    pub class: u32,
}

impl PciIdentity {
    /// Of functions with this class code, base class first.
    pub(crate) fn new(vendor_id: u16, device_id: u16, [base, sub, interface]: [u8; 3]) -> Self {
        PciIdentity { vendor_id, device_id, class: u32::from_be_bytes([0, base, sub, interface]) }
    }
}

/// What PCI knows functions of class `class` by; nothing where that differs from one to another.
pub fn pci_identity(class: &str) -> Option<PciIdentity> {
    find(class)?.pci_identity()
}

/// What can be done with functions of class `class`; nothing with those of one that there is not.
pub fn capabilities(class: &str) -> &'static [DeviceCapability] {
    find(class).map_or(&[], |class| class.capabilities())
}

/// A device as the rack file describes it.
pub trait DeviceConfig: Debug + Send + Sync {
    /// What it is, in a few words for people: `1 GiB, 512 B blocks, memory`.
    fn detail(&self) -> String;

    /// Makes its model, which finds its files in `folders`.
    ///
    /// # Errors
    /// When what it is made of cannot be obtained.
    fn model(&self, folders: &Folders) -> std::io::Result<Box<dyn Function>>;

    /// What the timing model is to know of it, made of the same values that its model and its medium keep to. Without limits
    /// nothing bounds it.
    fn timing(&self) -> FunctionTiming {
        FunctionTiming::default()
    }

    /// What a shaper did for its user, by name; all of it only grows.
    fn shaping(&self) -> Vec<(&'static str, u64)> {
        Vec::new()
    }

    /// The service level that its user was promised.
    fn level(&self) -> Option<String> {
        None
    }

    /// What its device, with all of its functions, could still promise; nothing for a class without levels.
    fn room(&self) -> Option<LevelRoom> {
        None
    }

    /// Another user comes, or nobody: promises it this service level, or what the rack file says.
    ///
    /// # Errors
    /// Why not, and what could be promised instead.
    fn set_level(&self, level: Option<&str>, _to: LentTo) -> Result<(), String> {
        no_levels(level)
    }

    /// Promises its user another service level from now on, or what the rack file says. One that cannot be kept
    /// changes nothing; the one that it has is kept in any case.
    ///
    /// # Errors
    /// As [`set_level`](DeviceConfig::set_level).
    fn change_level(&self, level: Option<&str>) -> Result<(), String> {
        no_levels(level)
    }

    /// A user continues with a model that was [resumed](DeviceConfig::resume): promises it this service level, which it
    /// had before, whether it fits now or not. What it waits for is done.
    ///
    /// # Errors
    /// Why no such level can be kept.
    fn resume_level(&self, level: Option<&str>, _to: LentTo) -> Result<(), String> {
        no_levels(level)
    }

    /// What the rack file says of its port, if it has one in its lender's network.
    fn port(&self) -> Option<PortOptions> {
        None
    }

    /// Whether its front can run at the borrower, apart from its medium, as strict isolation needs it.
    fn is_separable(&self) -> bool {
        false
    }

    /// Whether that borrower may be another machine: all that its front asks of the medium are operations,
    /// which a link can carry.
    fn is_carried(&self) -> bool {
        false
    }

    /// Whether its registers can be memory that it looks at ([`rackbus_pci::polled`]), as it takes to be lent through an
    /// NTB's window.
    fn is_polled(&self) -> bool {
        false
    }

    /// Whether it can appear in another host's own PCI tree, where an NTB leads there: a function of the machine does, and
    /// a model whose registers can be polled.
    fn has_windows(&self) -> bool {
        self.physical().is_some() || self.is_polled()
    }

    /// Makes the model that continues where an earlier life of it was saved, which gave `medium`.
    /// Nothing of that life is under way with the medium any more.
    ///
    /// # Errors
    /// As [`model`](DeviceConfig::model), and when `medium` is not what it needs.
    fn resume(&self, folders: &Folders, medium: Vec<OwnedFd>)
    -> std::io::Result<Box<dyn Function>>;

    /// The server of a function that another program runs, which then has no model here.
    fn upstream(&self, _folders: &Folders) -> Option<UpstreamServer> {
        None
    }

    /// The function of the machine that it is, which then has no model here.
    fn physical(&self) -> Option<PhysicalFunction> {
        None
    }
}

/// Why a front could not be made.
#[derive(Debug, thiserror::Error)]
pub enum FrontError {
    /// The class has none, or there is no such class.
    #[error("there is no front for a medium of class {0:?}")]
    None(String),
    /// The medium's description is none.
    #[error("the medium's description: {0}")]
    Description(#[from] serde_json::Error),
    /// What was offered is not fit.
    #[error(transparent)]
    Exchange(#[from] rackbus_memory::ExchangeError),
    /// What should lead to the medium does not, or is not all there.
    #[error("what leads to the medium: {0}")]
    Handles(#[from] rackbus_memory::HandleError),
    /// It would take more memory of its host than that has.
    #[error(
        "the device has {} of memory of its own, which would be this host's, and the rack file gives this host {}; \
         borrow it without strict isolation, or give the host more `memory`",
        format_size(*.asked),
        format_size(*.most)
    )]
    TooMuchMemory {
        /// Bytes that the device's lender says that it has.
        asked: u64,
        /// Bytes that the front's host has by the rack file.
        most: u64,
    },
    /// The device cannot be shown.
    #[error(transparent)]
    Device(std::io::Error),
}

/// The front of a medium of class `class`; see [`Class::front`].
///
/// # Errors
/// [`FrontError`].
pub fn front(
    class: &str,
    description: &str,
    access: MediumAccess,
    lost: Lost,
) -> Result<Box<dyn Function>, FrontError> {
    match find(class) {
        Some(class) => class.front(description, access, lost),
        None => Err(FrontError::None(class.to_owned())),
    }
}

/// The front of a medium of class `class`, which continues; see [`Class::front_again`].
///
/// # Errors
/// [`FrontError`].
pub fn front_again(
    class: &str,
    description: &str,
    end: InheritedEnd,
    lost: Lost,
) -> Result<Box<dyn Function>, FrontError> {
    match find(class) {
        Some(class) => class.front_again(description, end, lost),
        None => Err(FrontError::None(class.to_owned())),
    }
}

/// A device of a rack, as its class read it.
#[derive(Debug, Clone)]
pub struct RackDevice {
    /// Its name in the rack: `alpha/nvme0`.
    pub function: String,
    /// The section of the rack file that describes it, `alpha/accel0` of `alpha/accel0.vf1`.
    pub section: String,
    /// Name of its class, which the rack file has as `kind`.
    pub kind: &'static str,
    /// What it is; `None` where only the timing model knows it.
    pub config: Option<Arc<dyn DeviceConfig>>,
}

/// Reads a rack file and all of its devices, in the order of the hosts and of the devices of each.
///
/// # Errors
/// As [`Rack::parse`], and for devices of a class that there is not, or that are wrongly described.
pub fn parse_rack(file: &str, text: &str) -> Result<(Rack, Vec<RackDevice>), RackError> {
    let names: Vec<&str> = CLASSES.iter().map(|class| class.name()).collect();
    let allowed = format!("`kind` is one of {}", list(&names));
    let (mut devices, mut places) = (Vec::new(), BTreeMap::new());
    let rack = Rack::parse_with(file, text, |section| {
        let (kind, span) = section.kind(&allowed)?;
        let Some(class) = find(kind) else {
            return wrong(span, format!("there is no kind of device `{kind}`"), allowed.clone());
        };
        let (function, kind) = (section.function().to_owned(), class.name());
        let of = || function.clone();
        places.insert(of(), span);
        let config = class.read(section)?;
        let virtual_functions = class.virtual_functions(section)?;
        let lent = virtual_functions.iter().chain(&config).map(|config| config.timing());
        let timing = lent.collect();
        for (number, config) in (1..).zip(&virtual_functions) {
            let name = format!("{function}.vf{number}");
            let config = Some(config.clone());
            devices.push(RackDevice { function: name, section: of(), kind, config });
        }
        if virtual_functions.is_empty() {
            devices.push(RackDevice { function: of(), section: of(), kind, config });
        }
        Ok(DeviceFacts {
            virtual_functions: virtual_functions.len() as u16,
            capabilities: class.capabilities(),
            timing,
        })
    })?;
    check_addresses(&rack, &devices, &places).map_err(|problem| problem.locate(file, text))?;
    Ok((rack, devices))
}

/// Refuses a device with an Ethernet address that something else in the rack has. `places` has where the sections of devices
/// are, by their names.
fn check_addresses(
    rack: &Rack,
    devices: &[RackDevice],
    places: &BTreeMap<String, Range<usize>>,
) -> Parsed<()> {
    let stations = Stations::of(rack, &ports(devices));
    let Some((one, other)) = stations.with_one_address() else { return Ok(()) };
    let section = |name: &str| devices.iter().find(|it| it.function == name).map(|it| &it.section);
    let place = |station: &Station| places.get(section(&station.name)?).cloned();
    wrong(
        place(other).or_else(|| place(one)).unwrap_or_default(),
        format!("{} and {} have the same Ethernet address, {}", one.name, other.name, one.mac),
        "`mac` is the first of a range that nothing else in the rack has an address of",
    )
}

/// The ports that devices have in the rack's network, by the functions that they are for.
pub fn ports(devices: &[RackDevice]) -> BTreeMap<String, PortOptions> {
    let port =
        |device: &RackDevice| Some((device.function.clone(), device.config.as_ref()?.port()?));
    devices.iter().filter_map(port).collect()
}

/// The classes whose devices are run, each with the version of the state that they are saved with.
pub fn state_versions() -> impl Iterator<Item = (&'static str, u32)> {
    CLASSES.iter().filter_map(|class| Some((class.name(), class.state_version()?)))
}

fn find(name: &str) -> Option<&'static dyn Class> {
    CLASSES.iter().find(|class| class.name() == name).copied()
}

/// A class that only the timing model knows. It has no keys of its own.
struct Modelled(&'static str);

impl Class for Modelled {
    fn name(&self) -> &'static str {
        self.0
    }

    fn read(&self, section: &DeviceSection<'_>) -> Parsed<Option<Arc<dyn DeviceConfig>>> {
        section.keys(&["kind"]).map(|_| None)
    }
}

#[cfg(test)]
mod tests;
