//! Taking functions from their drivers, and giving them back.
//!
//! What is to be given back is noted in a file before anything is changed, so that it can be done after a crash
//! too: by who takes the function next, or by the command. The notes are in a folder that is empty after the
//! machine was started anew (`/run`), as are the kernel's bindings.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::process::Command;

use serde::{Deserialize, Serialize};

use crate::container;
use crate::error::{VfioError, file};
use crate::facts::{Facts, PciAddress, Sysfs, is_vfio};

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
    /// [`VfioError`]; what was changed is taken back then.
    pub fn take(
        &self,
        address: PciAddress,
        taker: &str,
        force: bool,
    ) -> Result<Binding, VfioError> {
        let facts = self.sysfs.check(address)?;
        let known = self.note(address)?.filter(|note| note.virtual_functions == 0);
        let bound = facts.driver.as_deref().is_some_and(is_vfio);
        if let (Some(known), true) = (&known, bound) {
            let binding = Binding { taker: taker.to_owned(), ..known.clone() };
            self.write_note(&binding)?;
            return Ok(binding);
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
        };
        if bound {
            return Ok(binding);
        }
        self.write_note(&binding)?;
        let outcome = self.bind(&facts);
        if outcome.is_err() {
            // Its own driver gets it again, as far as that is possible; the first error is what is told.
            let _ = self.give_back(address);
        }
        outcome.map(|()| binding)
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
        let Some(binding) = self.note(address)? else { return Ok(None) };
        if binding.virtual_functions > 0 {
            self.remove_virtual(&binding)?;
        } else {
            self.rebind(&binding)?;
        }
        let path = self.note_path(address);
        fs::remove_file(&path).map_err(file(path))?;
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
    /// already stay.
    ///
    /// # Errors
    /// [`VfioError`]; what was changed is taken back then.
    pub fn make_virtual(
        &self,
        address: PciAddress,
        wanted: u16,
        taker: &str,
    ) -> Result<Vec<PciAddress>, VfioError> {
        let facts = self.sysfs.facts(address)?;
        if wanted == 0 || wanted > facts.virtual_total {
            return Err(VfioError::VirtualFunctions {
                address,
                total: facts.virtual_total,
                wanted,
            });
        }
        let binding = Binding {
            address,
            kind: facts.kind().to_owned(),
            former: facts.driver.clone(),
            virtual_functions: wanted,
            taker: taker.to_owned(),
        };
        self.write_note(&binding)?;
        let made = self.make(&facts, wanted, taker);
        if made.is_err() {
            let _ = self.give_back(address);
        }
        made
    }

    fn make(&self, facts: &Facts, wanted: u16, taker: &str) -> Result<Vec<PciAddress>, VfioError> {
        let address = facts.address;
        if facts.virtual_functions.len() != usize::from(wanted) {
            // A driver of this machine is not to take them first; and another number is made from none.
            self.write(address, "sriov_drivers_autoprobe", "0")?;
            if !facts.virtual_functions.is_empty() {
                self.write(address, "sriov_numvfs", "0")?;
            }
            self.write(address, "sriov_numvfs", &wanted.to_string())?;
        }
        let made = self.sysfs.facts(address)?.virtual_functions;
        for function in &made {
            self.take(*function, taker, false)?;
        }
        Ok(made)
    }

    fn remove_virtual(&self, binding: &Binding) -> Result<(), VfioError> {
        let facts = match self.sysfs.facts(binding.address) {
            Err(VfioError::NotFound(_)) => return Ok(()),
            facts => facts?,
        };
        for function in &facts.virtual_functions {
            // They vanish; nobody gets them back.
            let path = self.note_path(*function);
            match fs::remove_file(&path) {
                Err(cause) if cause.kind() != io::ErrorKind::NotFound => {
                    return Err(file(path)(cause));
                }
                _ => {}
            }
        }
        if !facts.virtual_functions.is_empty() {
            self.write(binding.address, "sriov_numvfs", "0")?;
        }
        self.write(binding.address, "sriov_drivers_autoprobe", "1")
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
mod tests {
    use super::*;
    use crate::facts::tests::Tree;

    /// A tree in which nothing happens when a file is written, as in a kernel that refuses everything.
    fn deaf() -> (Tree, Bindings) {
        let tree = Tree::new();
        tree.function("0000:03:00.0", "0x010802\n", 7, Some("nvme"));
        tree.write("sys/bus/pci/drivers/vfio-pci/unbind", "");
        let notes = tree.0.path().join("notes");
        let bindings = Bindings::of(tree.sysfs(), &notes);
        (tree, bindings)
    }

    fn rebound(tree: &Tree, driver: &str) {
        let link = tree.0.path().join("sys/devices/pci0000:00/0000:03:00.0/driver");
        fs::remove_file(&link).unwrap();
        std::os::unix::fs::symlink(tree.sysfs().driver(driver), link).unwrap();
    }

    fn text(tree: &Tree, path: &str) -> String {
        fs::read_to_string(tree.0.path().join(path)).unwrap()
    }

    #[test]
    fn a_function_whose_driver_does_not_release_it_is_refused_and_what_was_changed_is_taken_back() {
        let (tree, bindings) = deaf();
        let address = "03:00.0".parse().unwrap();
        let refused = bindings.take(address, "alpha", false).unwrap_err();
        let VfioError::NotBound { found, .. } = refused else { panic!("{refused}") };
        assert_eq!(found, "nvme");
        assert_eq!(text(&tree, "sys/devices/pci0000:00/0000:03:00.0/driver_override"), "\n");
        assert_eq!(text(&tree, "sys/bus/pci/drivers/nvme/unbind"), "0000:03:00.0");
        assert!(bindings.taken().unwrap().is_empty());
    }

    #[test]
    fn the_record_names_the_driver_to_go_back_to_also_for_another_process() {
        let (tree, bindings) = deaf();
        let address = "03:00.0".parse().unwrap();
        let facts = tree.sysfs().facts(address).unwrap();
        let taken = Binding {
            address,
            kind: facts.kind().to_owned(),
            former: facts.driver,
            virtual_functions: 0,
            taker: "alpha".to_owned(),
        };
        bindings.write_note(&taken).unwrap();
        rebound(&tree, "vfio-pci");
        let later = Bindings::of(tree.sysfs(), &tree.0.path().join("notes"));
        assert_eq!(later.taken().unwrap(), std::slice::from_ref(&taken));
        // Taking it again changes who has it, and nothing else.
        let again = later.take(address, "beta", false).unwrap();
        assert_eq!(again, Binding { taker: "beta".to_owned(), ..taken });
        // The driver does not take it: the note stays.
        assert!(matches!(later.give_back(address), Err(VfioError::NotBound { .. })));
        assert_eq!(later.taken().unwrap().len(), 1);
        rebound(&tree, "nvme");
        assert_eq!(later.give_back(address).unwrap().unwrap().former.as_deref(), Some("nvme"));
        assert!(later.taken().unwrap().is_empty());
        assert_eq!(later.give_back(address).unwrap(), None);
    }

    #[test]
    fn what_was_bound_to_vfio_before_stays_so() {
        let (tree, bindings) = deaf();
        rebound(&tree, "vfio-pci");
        let address = "03:00.0".parse().unwrap();
        assert_eq!(bindings.take(address, "alpha", false).unwrap().former, None);
        assert_eq!(bindings.give_back(address).unwrap(), None);
        assert_eq!(text(&tree, "sys/bus/pci/drivers/vfio-pci/unbind"), "");
    }

    #[test]
    fn virtual_functions_are_made_within_what_the_function_can_have() {
        let (tree, bindings) = deaf();
        let folder = "sys/devices/pci0000:00/0000:03:00.0";
        tree.write(&format!("{folder}/sriov_totalvfs"), "2\n");
        let address = "03:00.0".parse().unwrap();
        let refused = bindings.make_virtual(address, 3, "alpha").unwrap_err().to_string();
        assert!(refused.contains("can have 2 virtual functions, not 3"), "{refused}");
        assert_eq!(bindings.make_virtual(address, 2, "alpha").unwrap(), []);
        assert_eq!(text(&tree, &format!("{folder}/sriov_numvfs")), "2");
        assert_eq!(text(&tree, &format!("{folder}/sriov_drivers_autoprobe")), "0");
        bindings.give_back(address).unwrap();
        assert_eq!(text(&tree, &format!("{folder}/sriov_drivers_autoprobe")), "1");
    }
}
