//! Memory functions as a class: what the rack file says of one, and what follows from it.

use std::os::fd::OwnedFd;
use std::sync::Arc;

use rackbus_fabric::rack::{DeviceSection, format_size};
use rackbus_fabric::text::{Parsed, SIZES, Section, wrong};
use rackbus_memory::InheritedEnd;
use rackbus_pci::{Function, MediumAccess};

use super::CLASS;
use super::function::{CLASS_CODE, DEVICE_ID, MemoryFunction, VENDOR_ID};
use super::medium::RemoteMemory;
use super::span::{AtReturn, MemorySpan, SpanError};
use crate::class::{Class, DeviceConfig, FrontError, PciIdentity};
use crate::lost::Lost;
use crate::place::{DataLocation, Folders, digest};

/// The class of functions whose BAR is a span of memory.
#[derive(Debug)]
pub struct MemoryClass;

impl Class for MemoryClass {
    fn name(&self) -> &'static str {
        CLASS
    }

    fn pci_identity(&self) -> Option<PciIdentity> {
        Some(PciIdentity::new(VENDOR_ID, DEVICE_ID, CLASS_CODE))
    }

    fn read(&self, section: &DeviceSection<'_>) -> Parsed<Option<Arc<dyn DeviceConfig>>> {
        let keys = section.keys(&["kind", "size", "backing", "at_return"])?;
        Ok(Some(Arc::new(MemorySection::read(section.function(), &keys)?)))
    }

    fn state_version(&self) -> Option<u32> {
        Some(super::function::VERSION)
    }

    fn front(
        &self,
        description: &str,
        access: MediumAccess,
        lost: Lost,
    ) -> Result<Box<dyn Function>, FrontError> {
        match access {
            // Memory that is mapped is loaded from and stored into without asking; there is nothing to give up.
            MediumAccess::Handles(handles) => {
                Ok(Box::new(MemoryFunction::front(description, handles)?))
            }
            MediumAccess::Carried(carried) => {
                Ok(Box::new(RemoteMemory::carried(description, carried, lost)?))
            }
        }
    }

    fn front_again(
        &self,
        description: &str,
        end: InheritedEnd,
        lost: Lost,
    ) -> Result<Box<dyn Function>, FrontError> {
        match end.session {
            None => Ok(Box::new(MemoryFunction::front(description, end.into_handles())?)),
            Some(_) => Ok(Box::new(RemoteMemory::again(description, end, lost)?)),
        }
    }
}

/// A memory function as the rack file describes it.
#[derive(Debug, Clone, PartialEq, Eq)]
struct MemorySection {
    function: String,
    size: u64,
    place: DataLocation,
    at_return: AtReturn,
}

impl MemorySection {
    fn read(function: &str, section: &Section<'_>) -> Parsed<MemorySection> {
        let size = section.require("size", section.size("size", 1 << 20, 64 << 40)?, SIZES)?;
        if !size.is_power_of_two() {
            let what = format!("`size` is {}", format_size(size));
            return wrong(section.place("size"), what, "a BAR's size is a power of two");
        }
        let place = match section.text("backing", BACKINGS)? {
            None => DataLocation::Memory,
            Some((text, span)) => {
                match DataLocation::parse(text).filter(|place| *place != DataLocation::Null) {
                    Some(place) => place,
                    None => return wrong(span, format!("there is no backing `{text}`"), BACKINGS),
                }
            }
        };
        let at_return = match section.text("at_return", AT_RETURN)? {
            None | Some(("zero", _)) => AtReturn::Zero,
            Some(("keep", _)) => AtReturn::Keep,
            Some((other, span)) => {
                return wrong(span, format!("`at_return` is {other}"), AT_RETURN);
            }
        };
        Ok(MemorySection { function: function.to_owned(), size, place, at_return })
    }

    fn span(&self, folders: &Folders) -> Result<MemorySpan, SpanError> {
        match self.place.file(&self.function, folders) {
            Some(path) => MemorySpan::file(&path, self.size, self.at_return),
            None => MemorySpan::memory(self.size, self.at_return),
        }
    }
}

impl DeviceConfig for MemorySection {
    fn is_separable(&self) -> bool {
        true
    }

    fn is_carried(&self) -> bool {
        true
    }

    fn detail(&self) -> String {
        let kept = match self.at_return {
            AtReturn::Zero => "zeroed",
            AtReturn::Keep => "kept",
        };
        format!("{}, {}, {kept} at return", format_size(self.size), self.place)
    }

    fn model(&self, folders: &Folders) -> std::io::Result<Box<dyn Function>> {
        let span = self.span(folders).map_err(refused)?;
        Ok(Box::new(MemoryFunction::new(span, digest(&self.function))?))
    }

    fn resume(
        &self,
        folders: &Folders,
        mut medium: Vec<OwnedFd>,
    ) -> std::io::Result<Box<dyn Function>> {
        let path = self.place.file(&self.function, folders);
        let exchange = medium.split_off(MemorySpan::file_count(path.is_some()).min(medium.len()));
        let span = MemorySpan::again(path.as_deref(), self.size, self.at_return, medium);
        let mut function = MemoryFunction::new(span.map_err(refused)?, digest(&self.function))?;
        function.inherited.files = exchange;
        Ok(Box::new(function))
    }
}

fn refused(error: SpanError) -> std::io::Error {
    std::io::Error::other(format!("memory function: {error}"))
}

const BACKINGS: &str = "`backing` is \"memory\", \"file\" (kept in the state directory), or a path with \
                        a `/` in it (\"./ram.img\", \"/mnt/dax/ram.img\")";
const AT_RETURN: &str = "`at_return` is \"zero\" or \"keep\"";
