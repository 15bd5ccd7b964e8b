//! An IOMMU domain of this process: what functions of it reach.
//!
//! A container begins empty, and its functions reach what is mapped into it and nothing else. What they reach
//! is memory of this process that nobody has references into ([`RangeTarget`]); the kernel pins its pages. A
//! mapping ends when it is unmapped, or with the container: on return nothing is reached through it any more.

use std::collections::BTreeMap;
use std::fs::File;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use rackbus_memory::{Access, MappedRegisters, Region, SharedMemory};
use rustix::io::Errno;
use rustix::process::{Resource, getrlimit};

use crate::error::{VfioError, file, refused};
use crate::facts::{Facts, Sysfs};
use crate::kernel;
use crate::usable::usable;

/// Where VFIO's files are.
const FOLDER: &str = "/dev/vfio";

/// What a range of a container leads to: memory that is reached by raw copies only, or registers.
#[derive(Debug, Clone)]
pub enum RangeTarget {
    /// A mapped file of somebody's.
    Memory(Arc<Region>),
    /// Registers of a function of this machine: whoever is in the container reaches that function's BAR.
    Registers(Arc<MappedRegisters>),
    /// Bytes of such registers, from an offset on.
    PartOfRegisters(Arc<MappedRegisters>, usize, u64),
}

impl RangeTarget {
    /// `length` bytes of registers from `offset` on; `None` where there are not so many.
    pub fn part(registers: &Arc<MappedRegisters>, offset: u64, length: u64) -> Option<RangeTarget> {
        let (_, whole) = registers.span();
        let end = offset.checked_add(length)?;
        let offset = usize::try_from(offset).ok().filter(|_| end <= whole as u64)?;
        Some(RangeTarget::PartOfRegisters(registers.clone(), offset, length))
    }

    /// Where it is in this process, and its bytes.
    fn span(&self) -> (usize, u64) {
        match self {
            RangeTarget::Memory(region) => (region.whole().as_ptr() as usize, region.len() as u64),
            RangeTarget::Registers(registers) => {
                let (at, length) = registers.span();
                (at, length as u64)
            }
            RangeTarget::PartOfRegisters(registers, offset, length) => {
                (registers.span().0 + offset, *length)
            }
        }
    }
}

impl From<Arc<Region>> for RangeTarget {
    fn from(region: Arc<Region>) -> RangeTarget {
        RangeTarget::Memory(region)
    }
}

impl From<&SharedMemory> for RangeTarget {
    fn from(memory: &SharedMemory) -> RangeTarget {
        RangeTarget::Memory(memory.region().clone())
    }
}

impl From<Arc<MappedRegisters>> for RangeTarget {
    fn from(registers: Arc<MappedRegisters>) -> RangeTarget {
        RangeTarget::Registers(registers)
    }
}

/// A mapping: its bytes and what they lead to. `None` where another process mapped it, of whose memory the kernel keeps
/// the pages.
type MappedRange = (u64, Option<RangeTarget>);

/// An IOMMU domain, for the functions of one user.
#[derive(Debug)]
pub struct Container {
    /// By number. Closed before the container; VFIO lets a group be opened once.
    groups: Mutex<BTreeMap<u32, Arc<File>>>,
    file: File,
    /// What is mapped, by first address.
    mapped: Mutex<BTreeMap<u64, MappedRange>>,
    /// Nothing is mapped any more.
    revoked: AtomicBool,
    /// Another process made it, and may have mapped what this one was not told of.
    inherited: bool,
}

fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

fn open(path: &Path) -> io::Result<File> {
    File::options().read(true).write(true).open(path)
}

/// Says that VFIO itself is missing.
fn missing(path: PathBuf) -> impl FnOnce(io::Error) -> VfioError {
    move |cause| match cause.kind() {
        io::ErrorKind::NotFound => VfioError::NoVfio { path, cause },
        _ => VfioError::File { path, cause },
    }
}

impl Container {
    /// A container without functions or mappings.
    ///
    /// # Errors
    /// When the kernel has no VFIO.
    pub fn new() -> Result<Container, VfioError> {
        let path = Path::new(FOLDER).join("vfio");
        let file = open(&path).map_err(missing(path.clone()))?;
        let known = kernel::has_iommu(&file, kernel::TYPE1_V2);
        match known.map_err(refused("the version", path.display()))? {
            true => Ok(Container {
                groups: Mutex::default(),
                file,
                mapped: Mutex::default(),
                revoked: AtomicBool::new(false),
                inherited: false,
            }),
            false => Err(VfioError::NoType1),
        }
    }

    /// The container that another process had, by its descriptors: its own, those of its groups by their numbers, and the
    /// first address and length of each of its mappings. These stay as they are, and the functions reach them meanwhile.
    ///
    /// # Errors
    /// When it is none.
    pub fn inherited(
        file: OwnedFd,
        groups: impl IntoIterator<Item = (u32, OwnedFd)>,
        mapped: impl IntoIterator<Item = (u64, u64)>,
    ) -> Result<Container, VfioError> {
        let file = File::from(file);
        let known = kernel::has_iommu(&file, kernel::TYPE1_V2);
        if !known.map_err(refused("the version", "a container that was passed on"))? {
            return Err(VfioError::NoType1);
        }
        let groups = groups.into_iter().map(|(number, group)| (number, Arc::new(group.into())));
        let mapped = mapped.into_iter().map(|(iova, length)| (iova, (length, None)));
        Ok(Container {
            groups: Mutex::new(groups.collect()),
            file,
            mapped: Mutex::new(mapped.collect()),
            revoked: AtomicBool::new(false),
            inherited: true,
        })
    }

    /// Copies of its own descriptor and of those of its groups, by their numbers, for a process that goes on with it.
    ///
    /// # Errors
    /// When this process has no descriptors left.
    pub fn descriptors(&self) -> io::Result<(OwnedFd, BTreeMap<u32, OwnedFd>)> {
        let copy = |(number, group): (u32, Arc<File>)| Ok((number, group.try_clone()?.into()));
        let groups = self.groups().into_iter().map(copy).collect::<io::Result<_>>()?;
        Ok((self.file.try_clone()?.into(), groups))
    }

    /// Adds the group of a function, unless it is there: its functions reach then what is mapped here.
    ///
    /// # Errors
    /// When somebody has it open, or others of it are in use by the kernel.
    pub(crate) fn add_group(&self, facts: &Facts) -> Result<Arc<File>, VfioError> {
        let group = facts.group.ok_or(VfioError::NoIommu(facts.address))?;
        let mut groups = locked(&self.groups);
        if let Some(file) = groups.get(&group) {
            return Ok(file.clone());
        }
        let file = open_group(group)?;
        let named = || format!("IOMMU group {group}");
        if !kernel::is_viable(&file).map_err(refused("the state", named()))? {
            // Names who is in the way, as far as sysfs knows.
            Sysfs::here().check(facts.address)?;
            return Err(refused("viability", named())(Errno::BUSY));
        }
        let first = groups.is_empty();
        match kernel::set_container(&file, &self.file) {
            Err(Errno::BUSY | Errno::INVAL) => return Err(VfioError::Busy { group }),
            set => set.map_err(refused("a container", named()))?,
        }
        if first {
            let kind = kernel::set_iommu(&self.file, kernel::TYPE1_V2);
            kind.map_err(refused("an IOMMU of type 1", named()))?;
        }
        let file = Arc::new(file);
        groups.insert(group, file.clone());
        Ok(file)
    }

    /// Releases the groups of which no function is open any more, so that others can have them. What is mapped stays,
    /// as long as a group is left.
    pub fn leave_idle_groups(&self) {
        locked(&self.groups).retain(|_, file| Arc::strong_count(file) > 1);
    }

    /// The groups that are in it.
    pub(crate) fn groups(&self) -> BTreeMap<u32, Arc<File>> {
        locked(&self.groups).clone()
    }

    /// Lets its functions reach `backing` from `iova` on. There must be a function in it already.
    ///
    /// # Errors
    /// When the addresses are taken or the IOMMU has none such, the memory cannot be pinned, or it was revoked.
    pub fn map(
        &self,
        iova: u64,
        backing: impl Into<RangeTarget>,
        access: Access,
    ) -> Result<(), VfioError> {
        let backing = backing.into();
        let length = backing.span().1;
        self.map_unexplained(iova, backing, access).map_err(|error| match error {
            VfioError::Unmappable { .. } => self.range_error(iova, length),
            other => other,
        })
    }

    /// The same for who asks for as many mappings as it likes: what is [unmappable](VfioError::Unmappable) is refused without a
    /// report of what could be mapped.
    ///
    /// # Errors
    /// As of [`map`](Container::map).
    pub fn map_unexplained(
        &self,
        iova: u64,
        backing: impl Into<RangeTarget>,
        access: Access,
    ) -> Result<(), VfioError> {
        let backing = backing.into();
        let (at, length) = backing.span();
        let mut mapped = locked(&self.mapped);
        if self.revoked.load(Ordering::Relaxed) {
            return Err(VfioError::Revoked);
        }
        match kernel::map(&self.file, iova, (at, length), access) {
            Ok(()) => {}
            Err(Errno::NOMEM) => {
                let limit = getrlimit(Resource::Memlock).current.unwrap_or(u64::MAX);
                return Err(VfioError::LockedMemory { length, limit });
            }
            Err(Errno::NOSPC) => return Err(VfioError::TooManyMappings),
            Err(Errno::INVAL | Errno::EXIST) => return Err(VfioError::Unmappable { iova, length }),
            Err(errno) => return Err(refused("a mapping", format!("{iova:#x}"))(errno)),
        }
        mapped.insert(iova, (length, Some(backing)));
        Ok(())
    }

    fn range_error(&self, iova: u64, length: u64) -> VfioError {
        let ranges = kernel::iova_ranges(&self.file).unwrap_or_default();
        let mapped = locked(&self.mapped);
        let taken = mapped.iter().map(|(at, (length, _))| (*at, at + (length - 1)));
        VfioError::Range { iova, length, usable: usable(ranges, taken) }
    }

    /// Takes the mappings that lie inside of a range away; on return none of its functions reaches them.
    ///
    /// # Errors
    /// When there is none, or one lies inside in part; nothing changes then.
    pub fn unmap(&self, iova: u64, length: u64) -> Result<(), VfioError> {
        let wrong = VfioError::NotMapped { iova, length };
        let mut mapped = locked(&self.mapped);
        if self.revoked.load(Ordering::Relaxed) {
            return Err(VfioError::Revoked);
        }
        let Some(inside) = inside(&mapped, iova, length) else { return Err(wrong) };
        for at in inside {
            if let Some((length, _)) = mapped.get(&at) {
                let unmapped = kernel::unmap(&self.file, at, *length);
                unmapped.map_err(refused("the end of a mapping", format!("{at:#x}")))?;
                mapped.remove(&at);
            }
        }
        Ok(())
    }

    /// Takes every mapping away, for good: nothing is mapped any more from then on. From any thread, however its functions
    /// are; a mapping that is being made comes to its end first.
    ///
    /// # Errors
    /// When the kernel refuses, with its first refusal; what it refused stays mapped, and nothing else.
    pub fn revoke(&self) -> Result<(), VfioError> {
        let mut mapped = locked(&self.mapped);
        // Read under the same lock.
        self.revoked.store(true, Ordering::Relaxed);
        // What this process was told of it may be less than there is, or something else.
        if self.inherited && kernel::unmap_all(&self.file).is_ok() {
            mapped.clear();
            return Ok(());
        }
        take_all(&mut mapped, |at, length| kernel::unmap(&self.file, at, length).map(drop))
    }

    /// Whether everything was [taken away](Container::revoke).
    pub fn is_revoked(&self) -> bool {
        let _mapped = locked(&self.mapped);
        self.revoked.load(Ordering::Relaxed)
    }

    /// What is mapped: the first address and length of each.
    pub fn ranges(&self) -> Vec<(u64, u64)> {
        locked(&self.mapped).iter().map(|(at, (length, _))| (*at, *length)).collect()
    }

    /// How many mappings there are, and their bytes.
    pub fn mapped(&self) -> (usize, u64) {
        let mapped = locked(&self.mapped);
        (mapped.len(), mapped.values().map(|(length, _)| length).sum())
    }
}

impl Drop for Container {
    fn drop(&mut self) {
        // Whoever was given a function's file keeps the kernel's container with it. What is not unmapped now ends
        // with that.
        let _ = self.revoke();
    }
}

impl AsFd for Container {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.file.as_fd()
    }
}

/// Whether a group is free: nobody has it, a function of it, or registers of one mapped.
///
/// # Errors
/// [`VfioError::Busy`] when somebody has.
pub fn check_free(group: u32) -> Result<(), VfioError> {
    open_group(group).map(drop)
}

fn open_group(group: u32) -> Result<File, VfioError> {
    let path = Path::new(FOLDER).join(group.to_string());
    match open(&path) {
        Err(cause) if cause.raw_os_error() == Some(Errno::BUSY.raw_os_error()) => {
            Err(VfioError::Busy { group })
        }
        Err(cause) if cause.kind() == io::ErrorKind::NotFound => {
            Err(VfioError::NoVfio { path, cause })
        }
        opened => opened.map_err(file(path)),
    }
}

/// Ends mappings by `unmap`. Those that it refuses stay, and the first of them is told: the others end all the same.
fn take_all(
    mapped: &mut BTreeMap<u64, MappedRange>,
    unmap: impl Fn(u64, u64) -> Result<(), Errno>,
) -> Result<(), VfioError> {
    let mut first = None;
    mapped.retain(|at, (length, _)| {
        let ended = unmap(*at, *length);
        let refusal = ended.map_err(refused("the end of a mapping", format!("{at:#x}"))).err();
        let stays = refusal.is_some();
        first = first.take().or(refusal);
        stays
    });
    first.map_or(Ok(()), Err)
}

/// The mappings inside of a range, by their first addresses; `None` when there is none or one is cut.
fn inside(mapped: &BTreeMap<u64, MappedRange>, iova: u64, length: u64) -> Option<Vec<u64>> {
    let last = iova.checked_add(length.checked_sub(1)?)?;
    let touched: Vec<(u64, u64)> = mapped
        .range(..=last)
        .map(|(at, (length, _))| (*at, at + (length - 1)))
        .filter(|(_, end)| *end >= iova)
        .collect();
    let whole = touched.iter().all(|(at, end)| *at >= iova && *end <= last);
    (whole && !touched.is_empty()).then(|| touched.into_iter().map(|(at, _)| at).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_part_of_registers_is_inside_of_them() {
        let memory = SharedMemory::create("test", 0x4000).unwrap();
        let registers = Arc::new(MappedRegisters::map(memory.as_fd(), 0x4000).unwrap());
        let (start, _) = registers.span();
        let span =
            |offset, length| RangeTarget::part(&registers, offset, length).map(|it| it.span());
        assert_eq!(span(0x1000, 0x3000), Some((start + 0x1000, 0x3000)));
        for (offset, length) in [(0x1000, 0x3001), (0x4000, 1), (u64::MAX, 1), (1, u64::MAX)] {
            assert_eq!(span(offset, length), None, "{offset:#x}+{length:#x}");
        }
    }

    #[test]
    fn a_mapping_that_cannot_be_ended_keeps_no_other() {
        let memory = SharedMemory::create("test", 0x1000).unwrap();
        let mapping = || (0x1000, Some(RangeTarget::from(&memory)));
        let at = [0x1000, 0x4000, 0x8000, 0x9000];
        let mut mapped: BTreeMap<_, _> = at.into_iter().map(|at| (at, mapping())).collect();
        let refuses = |at, _| match at {
            0x1000 => Err(Errno::BUSY),
            0x8000 => Err(Errno::INVAL),
            _ => Ok(()),
        };
        let refused = take_all(&mut mapped, refuses).unwrap_err();
        assert!(matches!(refused, VfioError::Refused { cause: Errno::BUSY, .. }), "{refused}");
        assert!(mapped.keys().eq(&[0x1000, 0x8000]), "{:x?}", mapped.keys());
        take_all(&mut mapped, |_, _| Ok(())).unwrap();
        assert!(mapped.is_empty());
    }

    /// A file is none whatever it is named like, and nothing is done to it.
    #[test]
    fn only_the_kernels_container_is_gone_on_with() {
        let memory = SharedMemory::create("vfio", 0x1000).unwrap();
        let file = memory.as_fd().try_clone_to_owned().unwrap();
        let refused = Container::inherited(file, [], [(0, 0x1000)]).unwrap_err();
        assert!(matches!(refused, VfioError::Refused { .. }), "{refused}");
    }

    #[test]
    fn a_range_takes_whole_mappings_or_nothing() {
        let memory = SharedMemory::create("test", 0x2000).unwrap();
        let mapped = BTreeMap::from([
            (0x1000, (0x2000, Some(RangeTarget::from(&memory)))),
            (0x4000, (0x2000, Some(RangeTarget::from(&memory)))),
        ]);
        assert_eq!(inside(&mapped, 0, 0x10000), Some(vec![0x1000, 0x4000]));
        assert_eq!(inside(&mapped, 0x1000, 0x2000), Some(vec![0x1000]));
        for (iova, length) in
            [(0x2000, 0x1000), (0, 0x2000), (0x3000, 0x1000), (0, 0), (u64::MAX, 2)]
        {
            assert_eq!(inside(&mapped, iova, length), None, "{iova:#x}+{length:#x}");
        }
    }
}
