//! Taking functions from their drivers, and giving them back.
//!
//! What is to be given back is noted in a file before anything is changed, so that it can be done after a crash
//! too: by who takes the function next, or by the command. The notes are in a folder that is empty after the
//! machine was started anew (`/run`), as are the kernel's bindings. Who changes any of it has a lock.

mod lock;

use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::process::Command;

use serde::{Deserialize, Serialize};

use crate::container;
use crate::error::{VfioError, file};
use crate::facts::{Facts, PciAddress, Sysfs, is_vfio};
use crate::taker::TakerProcess;
use lock::NotesLock;

/// The driver that hands functions to programs.
pub const DRIVER: &str = "vfio-pci";
/// The part of VFIO that has to do with most IOMMUs.
const TYPE1: &str = "vfio_iommu_type1";
/// Where the notes of this machine are.
pub const NOTES: &str = "/run/rackbus-lent";

/// What is to be done to give a function back.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Binding {
    /// PCI address of the function.
    pub address: PciAddress,
    /// What it is, in a few words for people.
    pub kind: String,
    /// The driver that it goes back to; without one it is left without.
    pub former: Option<String>,
    /// How many virtual functions were made of it; it stays with its own driver then.
    pub virtual_functions: u16,
    /// Who took it: the node's host and rack, or the command.
    pub taker: String,
    /// The process that did; none in notes of older versions.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub process: Option<TakerProcess>,
}

/// A function that was taken, and what there is to undo.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TakenFunction {
    /// What is to be done to give it back.
    pub binding: Binding,
    change: Change,
}

/// What taking a function has changed.
#[derive(Debug, Clone, PartialEq, Eq)]
enum Change {
    /// Nothing: it was bound to `vfio-pci`, and no note of it was there.
    Nothing,
    /// Who has it: it was taken already, by this note.
    Taker(Binding),
    /// Its own driver has released it, and `vfio-pci` has it.
    Driver,
}

/// Takes functions and gives them back, and knows which are taken.
#[derive(Debug, Clone)]
pub struct Bindings {
    sysfs: Sysfs,
    notes: PathBuf,
}

impl Bindings {
    /// Those of this machine.
    pub fn here() -> Bindings {
        Bindings { sysfs: Sysfs::here(), notes: PathBuf::from(NOTES) }
    }

    /// Those of a tree, with notes in a folder.
    pub fn of(sysfs: Sysfs, notes: &Path) -> Bindings {
        Bindings { sysfs, notes: notes.to_owned() }
    }

    /// Where the kernel's facts are read.
    pub fn sysfs(&self) -> &Sysfs {
        &self.sysfs
    }

    /// Loads the driver and the IOMMU's part of VFIO, where they are not there. Whether they are is found when a
    /// function is taken and opened.
    pub fn load_driver(&self) {
        for (module, there) in
            [(DRIVER, self.sysfs.driver(DRIVER).is_dir()), (TYPE1, self.sysfs.has_module(TYPE1))]
        {
            if !there {
                // It may be built into the kernel; what is wrong is said when it is needed.
                let _ = Command::new("modprobe").args(["-q", module]).status();
            }
        }
    }

    /// Takes a function from its driver, for `taker`. What is taken already stays so; what somebody else bound to
    /// `vfio-pci` is used as it is, and nothing is noted of it. With `force`, what uses it is not looked at.
    ///
    /// # Errors
    /// [`VfioError`]; what was changed is taken back then. [`VfioError::TakenBy`] when another taker has it that still
    /// runs; what one has left behind that ended is taken over.
    pub fn take(
        &self,
        address: PciAddress,
        taker: &str,
        force: bool,
    ) -> Result<TakenFunction, VfioError> {
        if self.is_left_as_it_is(address, taker)? {
            return self.take_alone(address, taker, force);
        }
        let _alone = NotesLock::take(&self.notes)?;
        self.take_alone(address, taker, force)
    }

    /// Whether taking a function changes nothing, so that nobody has to be waited for: somebody else bound it, who noted
    /// nothing, or this process has taken it. A node that is restarted in place takes what is in use.
    fn is_left_as_it_is(&self, address: PciAddress, taker: &str) -> Result<bool, VfioError> {
        let driver = self.sysfs.facts(address)?.driver;
        let process = TakerProcess::this();
        let is_own = |note: &Binding| note.taker == taker && note.process == process;
        let noted = self.note(address)?;
        Ok(driver.as_deref().is_some_and(is_vfio) && noted.as_ref().is_none_or(is_own))
    }

    /// As [`take`](Bindings::take), by who has the notes for itself.
    fn take_alone(
        &self,
        address: PciAddress,
        taker: &str,
        force: bool,
    ) -> Result<TakenFunction, VfioError> {
        let facts = self.sysfs.check(address)?;
        let known = self.check_taker(address, taker)?.filter(|note| note.virtual_functions == 0);
        let bound = facts.driver.as_deref().is_some_and(is_vfio);
        let process = TakerProcess::this();
        if let (Some(known), true) = (&known, bound) {
            let binding = Binding { taker: taker.to_owned(), process, ..known.clone() };
            self.write_note(&binding)?;
            return Ok(TakenFunction { binding, change: Change::Taker(known.clone()) });
        }
        if !force && !bound {
            self.sysfs.check_unused(address)?;
        }
        let binding = Binding {
            address,
            kind: facts.kind().to_owned(),
            former: facts.driver.clone().filter(|driver| !is_vfio(driver)),
            virtual_functions: 0,
            taker: taker.to_owned(),
            process,
        };
        if bound {
            return Ok(TakenFunction { binding, change: Change::Nothing });
        }
        self.write_note(&binding)?;
        let outcome = self.bind(&facts);
        if outcome.is_err() {
            // Its own driver gets it again, as far as that is possible; the first error is what is told.
            let _ = self.give_back_alone(address);
        }
        outcome.map(|()| TakenFunction { binding, change: Change::Driver })
    }

    /// Undoes what taking a function has changed, and nothing else: one that was taken before stays with who had it.
    ///
    /// # Errors
    /// When somebody has it open, or its driver does not take it. The note stays then, so that it can be tried again.
    pub fn undo(&self, taken: TakenFunction) -> Result<(), VfioError> {
        let _alone = NotesLock::take(&self.notes)?;
        self.undo_alone(taken)
    }

    fn undo_alone(&self, taken: TakenFunction) -> Result<(), VfioError> {
        let address = taken.binding.address;
        match taken.change {
            Change::Nothing => Ok(()),
            Change::Taker(before) => self.write_note(&before),
            Change::Driver => match self.check_free(address) {
                Err(busy @ VfioError::Busy { .. }) => Err(busy),
                // Whatever else is wrong, nobody is waited for.
                _ => self.give_back_alone(address).map(drop),
            },
        }
    }

    /// What is noted of a function that `taker` may have: nobody took it, or `taker` itself, or who did has ended and
    /// does not use it.
    fn check_taker(&self, address: PciAddress, taker: &str) -> Result<Option<Binding>, VfioError> {
        let note = self.note(address)?;
        if let Some(other) = note.as_ref().filter(|note| note.taker != taker) {
            let runs = other.process.is_some_and(|process| process.is_running());
            if runs || matches!(self.check_free(address), Err(VfioError::Busy { .. })) {
                return Err(VfioError::TakenBy { address, taker: other.taker.clone() });
            }
        }
        Ok(note)
    }

    fn bind(&self, facts: &Facts) -> Result<(), VfioError> {
        let Facts { address, driver, .. } = facts;
        if !self.sysfs.driver(DRIVER).is_dir() {
            let cause = io::ErrorKind::NotFound.into();
            return Err(VfioError::NoVfio { path: self.sysfs.driver(DRIVER), cause });
        }
        self.write(*address, "driver_override", DRIVER)?;
        if let Some(driver) = driver {
            self.unbind(*address, driver)?;
        }
        self.probe(*address)?;
        self.expect(*address, DRIVER)
    }

    /// Gives a function back to the driver that it was taken from, and removes what was made of it. One that was
    /// not taken stays as it is.
    ///
    /// # Errors
    /// When its driver does not take it. The note stays then, so that it can be tried again.
    pub fn give_back(&self, address: PciAddress) -> Result<Option<Binding>, VfioError> {
        let _alone = NotesLock::take(&self.notes)?;
        self.give_back_alone(address)
    }

    fn give_back_alone(&self, address: PciAddress) -> Result<Option<Binding>, VfioError> {
        let Some(binding) = self.note(address)? else { return Ok(None) };
        if binding.virtual_functions > 0 {
            self.remove_virtual(&binding)?;
        } else {
            self.rebind(&binding)?;
        }
        self.forget(address)?;
        Ok(Some(binding))
    }

    fn rebind(&self, binding: &Binding) -> Result<(), VfioError> {
        let address = binding.address;
        let facts = match self.sysfs.facts(address) {
            // It was pulled out.
            Err(VfioError::NotFound(_)) => return Ok(()),
            facts => facts?,
        };
        // An empty line takes the override away.
        self.write(address, "driver_override", "\n")?;
        match facts.driver {
            Some(driver) if is_vfio(&driver) => self.unbind(address, &driver)?,
            // Somebody else gave it to a driver already.
            Some(_) => return Ok(()),
            None => {}
        }
        let Some(former) = &binding.former else { return Ok(()) };
        self.probe(address)?;
        self.expect(address, former)
    }

    /// Makes virtual functions of a function, and takes them; it stays with its own driver. As many as there are
    /// already stay. Another number of them is removed first, unless one is in use.
    ///
    /// # Errors
    /// [`VfioError`]; what was changed is taken back then, and virtual functions that were there are there again.
    pub fn make_virtual(
        &self,
        address: PciAddress,
        wanted: u16,
        taker: &str,
    ) -> Result<Vec<PciAddress>, VfioError> {
        let _alone = NotesLock::take(&self.notes)?;
        let facts = self.sysfs.facts(address)?;
        if wanted == 0 || wanted > facts.virtual_total {
            return Err(VfioError::VirtualFunctions {
                address,
                total: facts.virtual_total,
                wanted,
            });
        }
        let noted = self.check_taker(address, taker)?;
        let are_there = facts.virtual_functions.len() == usize::from(wanted);
        if !are_there {
            for function in &facts.virtual_functions {
                self.check_removable(*function, taker)?;
            }
        }
        self.write_note(&Binding {
            address,
            kind: facts.kind().to_owned(),
            former: facts.driver.clone(),
            virtual_functions: wanted,
            taker: taker.to_owned(),
            process: TakerProcess::this(),
        })?;
        let mut taken = Vec::new();
        let made = match are_there {
            true => Ok(()),
            false => self.make(&facts, wanted),
        };
        let made = made.and_then(|()| self.take_virtual(address, taker, &mut taken));
        if made.is_err() {
            // As far as that is possible; the first error is what is told.
            for function in taken.into_iter().filter(|_| are_there) {
                let _ = self.undo_alone(function);
            }
            let unmade = if are_there { Ok(()) } else { self.unmake(&facts, noted.as_ref()) };
            let _ = unmade.and_then(|()| match &noted {
                Some(note) => self.write_note(note),
                None => self.forget(address),
            });
        }
        made
    }

    /// Refuses when a virtual function must not vanish: somebody has it, or this machine uses it.
    fn check_removable(&self, function: PciAddress, taker: &str) -> Result<(), VfioError> {
        self.check_taker(function, taker)?;
        match self.check_free(function) {
            Err(busy @ VfioError::Busy { .. }) => Err(busy),
            _ => self.sysfs.check_unused(function),
        }
    }

    fn make(&self, facts: &Facts, wanted: u16) -> Result<(), VfioError> {
        let address = facts.address;
        // A driver of this machine is not to take them first; and another number is made from none.
        self.write(address, "sriov_drivers_autoprobe", "0")?;
        if !facts.virtual_functions.is_empty() {
            self.write(address, "sriov_numvfs", "0")?;
        }
        self.write(address, "sriov_numvfs", &wanted.to_string())
    }

    /// Takes all virtual functions of a function, as long as that succeeds.
    fn take_virtual(
        &self,
        address: PciAddress,
        taker: &str,
        taken: &mut Vec<TakenFunction>,
    ) -> Result<Vec<PciAddress>, VfioError> {
        let made = self.sysfs.facts(address)?.virtual_functions;
        for function in &made {
            taken.push(self.take_alone(*function, taker, false)?);
        }
        Ok(made)
    }

    /// Has a function have as many virtual functions as it had `before`, with the drivers that they had.
    fn unmake(&self, before: &Facts, noted: Option<&Binding>) -> Result<(), VfioError> {
        let (address, number) = (before.address, before.virtual_functions.len());
        let facts = self.sysfs.facts(address)?;
        let is_other = facts.virtual_functions.len() != number;
        if is_other {
            self.drop_virtual(&facts)?;
        }
        let were_made_here = noted.is_some_and(|note| note.virtual_functions > 0);
        self.write(address, "sriov_drivers_autoprobe", if were_made_here { "0" } else { "1" })?;
        if is_other && number > 0 {
            self.write(address, "sriov_numvfs", &number.to_string())?;
        }
        Ok(())
    }

    fn remove_virtual(&self, binding: &Binding) -> Result<(), VfioError> {
        let facts = match self.sysfs.facts(binding.address) {
            Err(VfioError::NotFound(_)) => return Ok(()),
            facts => facts?,
        };
        self.drop_virtual(&facts)?;
        self.write(binding.address, "sriov_drivers_autoprobe", "1")
    }

    /// Removes the virtual functions that a function has. They vanish; nobody gets them back.
    fn drop_virtual(&self, facts: &Facts) -> Result<(), VfioError> {
        for function in &facts.virtual_functions {
            self.forget(*function)?;
        }
        match facts.virtual_functions.is_empty() {
            true => Ok(()),
            false => self.write(facts.address, "sriov_numvfs", "0"),
        }
    }

    /// What is taken, in the order of the addresses.
    ///
    /// # Errors
    /// When the notes cannot be read.
    pub fn taken(&self) -> Result<Vec<Binding>, VfioError> {
        let entries = match fs::read_dir(&self.notes) {
            Ok(entries) => entries,
            Err(cause) if cause.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
            Err(cause) => return Err(file(&self.notes)(cause)),
        };
        let address = |entry: fs::DirEntry| {
            entry.file_name().to_str()?.strip_suffix(".json")?.parse::<PciAddress>().ok()
        };
        let mut addresses: Vec<PciAddress> = entries.flatten().filter_map(address).collect();
        addresses.sort();
        let notes = addresses.into_iter().map(|address| self.note(address));
        notes.filter_map(Result::transpose).collect()
    }

    /// Refuses while a program has a function open, or registers of one mapped: to unbind it would wait for that.
    ///
    /// # Errors
    /// [`VfioError::Busy`].
    pub fn check_free(&self, address: PciAddress) -> Result<(), VfioError> {
        let Ok(facts) = self.sysfs.facts(address) else { return Ok(()) };
        for address in std::iter::once(address).chain(facts.virtual_functions) {
            let facts = self.sysfs.facts(address)?;
            let group = facts.group.filter(|_| facts.driver.as_deref().is_some_and(is_vfio));
            group.map_or(Ok(()), container::check_free)?;
        }
        Ok(())
    }

    fn note_path(&self, address: PciAddress) -> PathBuf {
        self.notes.join(format!("{address}.json"))
    }

    /// What was noted of a function.
    ///
    /// # Errors
    /// When the note is there and cannot be read.
    pub fn note(&self, address: PciAddress) -> Result<Option<Binding>, VfioError> {
        let path = self.note_path(address);
        let text = match fs::read(&path) {
            Ok(text) => text,
            Err(cause) if cause.kind() == io::ErrorKind::NotFound => return Ok(None),
            Err(cause) => return Err(file(path)(cause)),
        };
        serde_json::from_slice(&text).map(Some).map_err(|error| file(path)(error.into()))
    }

    fn forget(&self, address: PciAddress) -> Result<(), VfioError> {
        let path = self.note_path(address);
        match fs::remove_file(&path) {
            Err(cause) if cause.kind() != io::ErrorKind::NotFound => Err(file(path)(cause)),
            _ => Ok(()),
        }
    }

    fn write_note(&self, binding: &Binding) -> Result<(), VfioError> {
        fs::create_dir_all(&self.notes).map_err(file(&self.notes))?;
        let path = self.note_path(binding.address);
        let text = serde_json::to_vec(binding).map_err(|error| file(&path)(error.into()))?;
        // Whole or not at all, whenever this process ends.
        let new = path.with_extension("new");
        fs::write(&new, text).map_err(file(&new))?;
        fs::rename(&new, &path).map_err(file(&path))
    }

    fn write(&self, address: PciAddress, name: &str, text: &str) -> Result<(), VfioError> {
        let path = self.sysfs.function(address).join(name);
        fs::write(&path, text).map_err(file(path))
    }

    fn unbind(&self, address: PciAddress, driver: &str) -> Result<(), VfioError> {
        let path = self.sysfs.driver(driver).join("unbind");
        fs::write(&path, address.to_string()).map_err(file(path))
    }

    /// Has the kernel look for a driver. What does not want it is found out by looking.
    fn probe(&self, address: PciAddress) -> Result<(), VfioError> {
        let path = self.sysfs.probe();
        match fs::write(&path, address.to_string()) {
            Err(cause) if cause.kind() == io::ErrorKind::PermissionDenied => Err(file(path)(cause)),
            _ => Ok(()),
        }
    }

    fn expect(&self, address: PciAddress, wanted: &str) -> Result<(), VfioError> {
        match self.sysfs.facts(address)?.driver {
            Some(driver) if driver == wanted => Ok(()),
            found => Err(VfioError::NotBound {
                address,
                wanted: wanted.to_owned(),
                found: found.unwrap_or_else(|| "no driver".to_owned()),
            }),
        }
    }
}

#[cfg(test)]
mod tests;
