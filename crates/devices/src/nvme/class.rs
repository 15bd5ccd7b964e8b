//! NVMe drives as a class: what the rack file says of one, and what follows from it.

mod functions;

use std::os::fd::OwnedFd;
use std::path::PathBuf;
use std::sync::Arc;

use rackbus_fabric::rack::{
    DeviceCapability, DeviceSection, FunctionLimit, FunctionTiming, LimitCounts, format_rate,
    format_size,
};
use rackbus_fabric::text::{Parsed, SIZES, Section, wrong};
use rackbus_memory::InheritedEnd;
use rackbus_pci::{Function, MediumAccess};
use rackbus_qos::RateLimit;
use rackbus_spec::nvme::CLASS_CODE;

use super::backing::{FilePart, SharedFile};
use super::buffer;
use super::config::{BackingConfig, NvmeConfig};
use super::controller::Nvme;
use super::identify::{DEVICE_ID, MAX_TRANSFER, VENDOR_ID};
use super::limits::{LEAST, LimitDelays, Limits};
use super::medium;
use crate::class::{Class, DeviceConfig, FrontError, PciIdentity};
use crate::lost::Lost;
use crate::place::{DataLocation, Folders, digest};

/// Operations in a second that a limit may name at most.
const MOST_OPERATIONS: u64 = 1_000_000_000;
const MIB: u64 = 1 << 20;
const TIB: u64 = 1 << 40;

/// The class `nvme`: drives with one namespace over a file, memory or nothing.
#[derive(Debug)]
pub struct DriveClass;

impl Class for DriveClass {
    fn name(&self) -> &'static str {
        medium::CLASS
    }

    fn pci_identity(&self) -> Option<PciIdentity> {
        let [_, class @ ..] = CLASS_CODE.to_be_bytes();
        Some(PciIdentity::new(VENDOR_ID, DEVICE_ID, class))
    }

    fn capabilities(&self) -> &'static [DeviceCapability] {
        &[DeviceCapability::Blocks]
    }

    fn read(&self, section: &DeviceSection<'_>) -> Parsed<Option<Arc<dyn DeviceConfig>>> {
        let keys = section.keys(KEYS)?;
        if keys.get("functions").is_some() {
            // They are lent, not the drive.
            return Ok(None);
        }
        Ok(Some(Arc::new(DriveSection::read(section.function(), &keys)?)))
    }

    fn virtual_functions(&self, section: &DeviceSection<'_>) -> Parsed<Vec<Arc<dyn DeviceConfig>>> {
        let keys = section.keys(KEYS)?;
        if keys.get("functions").is_none() {
            return Ok(Vec::new());
        }
        let drive = DriveSection::read(section.function(), &keys)?;
        let parts = functions::read(&drive, &keys)?;
        Ok(parts.into_iter().map(|part| Arc::new(part) as Arc<dyn DeviceConfig>).collect())
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
        Ok(Box::new(match access {
            MediumAccess::Handles(handles) => medium::front(description, handles, lost)?,
            MediumAccess::Carried(carried) => medium::front_carried(description, carried, lost)?,
        }))
    }

    fn front_again(
        &self,
        description: &str,
        end: InheritedEnd,
        lost: Lost,
    ) -> Result<Box<dyn Function>, FrontError> {
        Ok(Box::new(medium::front_again(description, end, lost)?))
    }
}

const KEYS: &[&str] = &[
    "kind",
    "size",
    "block_size",
    "backing",
    "serial",
    "rate",
    "operations",
    "buffer",
    "persistent",
    "persistent_file",
    "functions",
];

/// A drive as the rack file describes it.
#[derive(Debug, Clone, PartialEq, Eq)]
struct DriveSection {
    function: String,
    size: u64,
    block_size: u32,
    place: DataLocation,
    serial: String,
    /// Bytes of the controller memory buffer; 0 for none.
    buffer: u64,
    persistent: Option<Persistent>,
    limits: Limits,
    delays: LimitDelays,
    /// It is a part of this drive.
    part: Option<DrivePart>,
}

/// The persistent memory region of a drive.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Persistent {
    /// Length of the region in bytes.
    size: u64,
    /// The file that has the bytes; `None` for one in the state directory.
    file: Option<PathBuf>,
}

/// Which part of which drive a function is.
#[derive(Debug, Clone)]
struct DrivePart {
    /// The drive's name in the rack: `alpha/nvme0`.
    drive: String,
    /// The function's among those of the drive: `vf1`.
    name: String,
    shared: Arc<SharedFile>,
}

impl PartialEq for DrivePart {
    fn eq(&self, other: &DrivePart) -> bool {
        (&self.drive, &self.name) == (&other.drive, &other.name)
    }
}

impl Eq for DrivePart {}

impl DriveSection {
    fn read(function: &str, section: &Section<'_>) -> Parsed<DriveSection> {
        let size = section.require("size", section.size("size", MIB, 64 * TIB)?, SIZES)?;
        let block_size = match section.number("block_size", BLOCKS)? {
            None => 512,
            Some((512, _)) => 512,
            Some((4096, _)) => 4096,
            Some((other, span)) => return wrong(span, format!("`block_size` is {other}"), BLOCKS),
        };
        if size % u64::from(block_size) != 0 {
            let what = format!("`size` is {}", format_size(size));
            let allowed = format!("it is a multiple of the block size, {block_size} bytes");
            return wrong(section.place("size"), what, allowed);
        }
        let place = match section.text("backing", BACKINGS)? {
            None => DataLocation::State,
            Some((text, span)) => match DataLocation::parse(text) {
                Some(place) => place,
                None => return wrong(span, format!("there is no backing `{text}`"), BACKINGS),
            },
        };
        let serial = match section.text("serial", SERIALS)? {
            None => default_serial(function),
            Some((text, _)) if is_serial(text) => text.to_owned(),
            Some((text, span)) => {
                return wrong(span, format!("`{text}` is no serial number"), SERIALS);
            }
        };
        let buffer = own_memory(section, "buffer", "a controller memory buffer")?;
        let persistent = persistent(section)?;
        let (function, limits) = (function.to_owned(), limits(section)?);
        let (delays, part) = (LimitDelays::default(), None);
        Ok(DriveSection {
            function,
            size,
            block_size,
            place,
            serial,
            buffer,
            persistent,
            limits,
            delays,
            part,
        })
    }

    fn config(&self, folders: &Folders) -> NvmeConfig {
        NvmeConfig {
            block_size: self.block_size,
            backing: self.backing(folders),
            buffer: self.buffer,
            persistent: self.persistent.as_ref().map_or(0, |region| region.size),
            persistent_file: self.persistent_file(folders),
            limits: self.limits,
            delays: self.delays.clone(),
            ..NvmeConfig::memory(self.size, &self.serial)
        }
    }

    /// The file of its persistent memory region.
    fn persistent_file(&self, folders: &Folders) -> Option<PathBuf> {
        let device = self.function.rsplit('/').next().unwrap_or(&self.function);
        Some(match &self.persistent.as_ref()?.file {
            Some(path) => folders.rack.join(path),
            None => folders.state.join(format!("{device}.pmr")),
        })
    }

    fn backing(&self, folders: &Folders) -> BackingConfig {
        let drive = self.part.as_ref().map_or(&self.function, |part| &part.drive);
        match (self.place.file(drive, folders), &self.part) {
            (Some(path), Some(part)) => BackingConfig::Part(FilePart {
                shared: part.shared.clone(),
                path,
                notes: notes(drive, folders),
                name: part.name.clone(),
            }),
            (Some(path), None) => BackingConfig::File(path),
            (None, _) if self.place == DataLocation::Null => BackingConfig::Null,
            (None, _) => BackingConfig::Memory,
        }
    }
}

/// The file that says which part of a drive each of its functions has.
fn notes(drive: &str, folders: &Folders) -> PathBuf {
    let device = drive.rsplit('/').next().unwrap_or(drive);
    folders.state.join(format!("{device}.parts.json"))
}

/// `buffer` or `persistent` of a drive: `key`, which is the size of `what`.
fn own_memory(section: &Section<'_>, key: &'static str, what: &str) -> Parsed<u64> {
    let (least, most) = (*buffer::SIZES.start(), *buffer::SIZES.end());
    let Some(size) = section.size(key, least, most)? else { return Ok(0) };
    if size.is_power_of_two() {
        return Ok(size);
    }
    let said = format!("`{key}` is {}", format_size(size));
    wrong(section.place(key), said, format!("{what} has a power of two of bytes"))
}

/// `persistent` and `persistent_file` of a drive.
fn persistent(section: &Section<'_>) -> Parsed<Option<Persistent>> {
    let size = own_memory(section, "persistent", "a persistent memory region")?;
    let file = match section.text("persistent_file", PERSISTENT_FILES)? {
        None => None,
        Some((path, span)) if size == 0 => {
            let what = format!("`persistent_file` is `{path}`");
            return wrong(span, what, "it is the file of a region whose size `persistent` says");
        }
        Some((path, _)) if path.contains('/') && section.get("functions").is_none() => {
            Some(PathBuf::from(path))
        }
        Some((path, span)) => {
            return wrong(span, format!("`persistent_file` is `{path}`"), PERSISTENT_FILES);
        }
    };
    Ok((size > 0).then_some(Persistent { size, file }))
}

/// `rate` and `operations` of a drive or one of its functions.
fn limits(section: &Section<'_>) -> Parsed<Limits> {
    let bytes = section.rate("rate")?;
    if let Some(rate) = bytes.filter(|rate| Some(*rate) < LEAST.bytes) {
        let what = format!("`rate` is {}", format_rate(rate));
        return wrong(section.place("rate"), what, "it is 10 MB/s or more");
    }
    let operations = section.count("operations", LEAST.operations.unwrap_or(1), MOST_OPERATIONS)?;
    Ok(Limits { bytes, operations })
}

impl DeviceConfig for DriveSection {
    fn is_separable(&self) -> bool {
        true
    }

    fn is_carried(&self) -> bool {
        true
    }

    fn is_polled(&self) -> bool {
        // A read of one of such a drive's registers is a barrier.
        self.persistent.is_none()
    }

    fn detail(&self) -> String {
        let (size, block) = (format_size(self.size), self.block_size);
        let mut text = format!("{size}, {block} B blocks, {}", self.place);
        if self.buffer > 0 {
            text += &format!(", {} memory buffer", format_size(self.buffer));
        }
        if let Some(region) = &self.persistent {
            text += &format!(", {} persistent memory", format_size(region.size));
        }
        if let Some(bytes) = self.limits.bytes {
            text += &format!(", {}", format_rate(bytes));
        }
        if let Some(operations) = self.limits.operations {
            text += &format!(", {operations} op/s");
        }
        text
    }

    fn timing(&self) -> FunctionTiming {
        let [bytes, operations] = self.limits.buckets();
        let limit = |counts, limit: Option<RateLimit>| {
            limit.map(|RateLimit { rate, burst }| FunctionLimit { counts, rate, burst })
        };
        let limits = [limit(LimitCounts::Bytes, bytes), limit(LimitCounts::Operations, operations)];
        let limits = limits.into_iter().flatten().collect();
        FunctionTiming { limits, longest: Some(MAX_TRANSFER), ..FunctionTiming::default() }
    }

    fn shaping(&self) -> Vec<(&'static str, u64)> {
        match self.limits == Limits::default() {
            true => Vec::new(),
            false => vec![("delayed", self.delays.count())],
        }
    }

    fn model(&self, folders: &Folders) -> std::io::Result<Box<dyn Function>> {
        let model = Nvme::new(&self.config(folders)).map_err(std::io::Error::other)?;
        Ok(Box::new(model))
    }

    fn resume(
        &self,
        folders: &Folders,
        medium: Vec<OwnedFd>,
    ) -> std::io::Result<Box<dyn Function>> {
        let model = Nvme::resume(&self.config(folders), medium).map_err(std::io::Error::other)?;
        Ok(Box::new(model))
    }
}

const BLOCKS: &str = "a block has 512 or 4096 bytes";
const BACKINGS: &str = "`backing` is \"file\" (kept in the state directory), \"memory\", \"null\", or \
                        a path with a `/` in it (\"./disk.img\", \"/dev/sdb\")";
const PERSISTENT_FILES: &str = "`persistent_file` is a path with a `/` in it (\"./pmr.img\"); the functions of a \
                               drive have theirs in the state directory";
const SERIALS: &str = "a serial number has 1 to 20 printable ASCII characters";

fn is_serial(text: &str) -> bool {
    (1..=20).contains(&text.len()) && text.bytes().all(|b| (0x20..0x7f).contains(&b))
}

/// A serial number made of the function's name: the name where it fits, else a digest of it, so
/// that no two drives of a rack have the same (guests make `/dev/disk/by-id` names of it).
fn default_serial(function: &str) -> String {
    let plain = function.replace('/', "-");
    if plain.len() <= 20 {
        return plain;
    }
    format!("{}-{:016x}", &plain[..3], digest(function))
}

#[cfg(test)]
mod tests {
    use std::path::PathBuf;

    use super::*;
    use crate::class::parse_rack;
    use rackbus_fabric::rack::{DeviceFacts, Rack};

    /// The one drive of a rack whose host and device have these names, with these keys.
    fn read(host: &str, device: &str, keys: &str) -> Result<DriveSection, String> {
        let text =
            format!("name = \"lab\"\n[hosts.{host}.devices.{device}]\nkind = \"nvme\"\n{keys}");
        // The registry says the same.
        let parsed = parse_rack("rack.toml", &text).map(drop).map_err(|error| error.to_string());
        let mut drive = None;
        let rack = Rack::parse_with("rack.toml", &text, |section| {
            let keys = section.keys(KEYS)?;
            drive = Some(DriveSection::read(section.function(), &keys)?);
            Ok(DeviceFacts::default())
        });
        assert_eq!(rack.map(drop).map_err(|error| error.to_string()), parsed);
        parsed.map(|()| drive.expect("there is one"))
    }

    #[test]
    fn every_key_of_a_drive_is_read() {
        let keys = "size = \"1 TB\"\nblock_size = 4096\nbacking = \"/dev/sdb\"\nserial = \"S1\"";
        let drive = read("zeta", "disk", keys).unwrap();
        assert_eq!(drive.detail(), "976562500 KiB, 4096 B blocks, /dev/sdb");
        let folders = Folders::new("/state", "/rack");
        let config = drive.config(&folders);
        let path = PathBuf::from("/dev/sdb");
        let expected = NvmeConfig { block_size: 4096, ..NvmeConfig::file(path, drive.size, "S1") };
        assert_eq!(config, expected);
        let file = |backing: &str| {
            let keys = format!("size = \"1 MiB\"\nbacking = \"{backing}\"");
            let config = read("zeta", "disk", &keys).unwrap().config(&folders);
            match config.backing {
                BackingConfig::File(path) => path.display().to_string(),
                other => format!("{other:?}"),
            }
        };
        let files = ["file", "./disk.img", "memory", "null"].map(file);
        assert_eq!(files, ["/state/disk.img", "/rack/./disk.img", "Memory", "Null"]);
    }

    #[test]
    fn what_is_wrong_is_named_with_its_place_and_what_is_allowed() {
        let cases = [
            (
                "sise = 1",
                "rack.toml:4:1: unknown key `sise` in device alpha/nvme0; did you mean `size`?",
            ),
            ("", "rack.toml:2:22: device alpha/nvme0 has no `size`"),
            ("size = \"1 KiB\"", "rack.toml:4:8: `size` is 1 KiB; it is from 1 MiB to 64 TiB"),
            ("size = \"lots\"", "`size` is no size"),
            ("size = 18446744073709551616", "`size` is no size"),
            ("size = \"99999999 TiB\"", "`size` is no size"),
            ("size = 1048577", "multiple of the block size"),
            ("size = -5", "`size` is no size"),
            (
                "size = \"1 GiB\"\nblock_size = 1024",
                "rack.toml:5:14: `block_size` is 1024; a block has 512 or 4096 bytes",
            ),
            ("size = \"1 GiB\"\nbacking = \"memry\"", "there is no backing `memry`"),
            ("size = \"1 GiB\"\nserial = \"äöü\"", "is no serial number"),
            (
                "size = \"1 GiB\"\nbuffer = \"4 KiB\"",
                "rack.toml:5:10: `buffer` is 4 KiB; it is from 64 KiB to 64 GiB",
            ),
            ("size = \"1 GiB\"\nbuffer = \"96 KiB\"", "a power of two of bytes"),
            (
                "size = \"1 GiB\"\npersistent = \"96 KiB\"",
                "a persistent memory region has a power of two",
            ),
            ("size = \"1 GiB\"\npersistent_file = \"./p\"", "whose size `persistent` says"),
            (
                "size = \"1 GiB\"\npersistent = \"1 MiB\"\npersistent_file = \"p\"",
                "`persistent_file` is `p`; `persistent_file` is a path with a `/` in it",
            ),
        ];
        for (keys, expected) in cases {
            let error = read("alpha", "nvme0", keys).unwrap_err();
            assert!(error.contains(expected), "{keys:?}\n gives {error}\n not {expected}");
        }
    }

    #[test]
    fn serial_numbers_differ() {
        let serial =
            |host: &str| read(host, "a-rather-long-name", "size = \"1 GiB\"").unwrap().serial;
        assert_ne!(serial("alpha"), serial("alphb"));
        assert!(serial("alpha").len() <= 20);
    }
}
