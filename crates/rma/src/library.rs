//! libfabric itself, loaded at run time.

use std::ffi::{CStr, CString, c_char, c_int, c_void};
use std::ops::Range;
use std::ptr::null_mut;
use std::sync::OnceLock;

use rackbus_memory::guard;

use crate::RmaError;
use crate::abi::{FabricAttr, FidFabric, Info};

/// Names another file than the system's `libfabric.so.1`.
pub const LIBRARY_ENV: &str = "RACKBUS_LIBFABRIC";

type GetInfo = unsafe extern "C" fn(
    u32,
    *const c_char,
    *const c_char,
    u64,
    *const Info,
    *mut *mut Info,
) -> c_int;

/// The functions that libfabric exports; all others are found by its objects.
#[derive(Debug)]
pub struct Library {
    pub(crate) getinfo: GetInfo,
    pub(crate) dupinfo: unsafe extern "C" fn(*const Info) -> *mut Info,
    pub(crate) freeinfo: unsafe extern "C" fn(*mut Info),
    pub(crate) fabric:
        unsafe extern "C" fn(*mut FabricAttr, *mut *mut FidFabric, *mut c_void) -> c_int,
    strerror: unsafe extern "C" fn(c_int) -> *const c_char,
    version: u32,
}

static LOADED: OnceLock<Result<Library, String>> = OnceLock::new();

/// The highest signal number.
const SIGNALS: c_int = 64;

impl Library {
    /// Loads it, once for the process.
    ///
    /// # Errors
    /// [`RmaError::Library`] when it is not there.
    pub fn load() -> Result<&'static Library, RmaError> {
        let loaded = LOADED.get_or_init(|| {
            let name = std::env::var(LIBRARY_ENV).unwrap_or_else(|_| "libfabric.so.1".to_owned());
            keep_signals(|| {
                let library = Library::open(&name)?;
                // Providers set themselves up with the first question, and some take signals.
                let mut found = null_mut();
                // SAFETY: no hints are needed, and `found` takes the answer.
                let status = unsafe {
                    (library.getinfo)(
                        crate::abi::VERSION,
                        std::ptr::null(),
                        std::ptr::null(),
                        0,
                        std::ptr::null(),
                        &raw mut found,
                    )
                };
                if status == 0 && !found.is_null() {
                    // SAFETY: the list is the library's, and nobody else has it.
                    unsafe { (library.freeinfo)(found) };
                }
                Ok(library)
            })
        });
        loaded.as_ref().map_err(|cause| RmaError::Library(cause.clone()))
    }

    /// Its version, major and minor.
    pub fn version(&self) -> (u32, u32) {
        (self.version >> 16, self.version & 0xffff)
    }

    fn open(name: &str) -> Result<Library, String> {
        let path = CString::new(name).map_err(|_| "its name has a zero byte".to_owned())?;
        // SAFETY: the name ends with zero. The library's constructors are those of a shared library of the system.
        let handle = unsafe { libc::dlopen(path.as_ptr(), libc::RTLD_NOW | libc::RTLD_LOCAL) };
        if handle.is_null() {
            // SAFETY: called after a failure, by the thread that saw it.
            let cause = unsafe { libc::dlerror() };
            if cause.is_null() {
                return Err(format!("{name} is not there"));
            }
            // SAFETY: it is a string that stays until the next call of this thread.
            return Err(unsafe { CStr::from_ptr(cause) }.to_string_lossy().into_owned());
        }
        let symbol = |name: &CStr| {
            // SAFETY: the handle is that of a loaded library, which is never unloaded.
            let found = unsafe { libc::dlsym(handle, name.as_ptr()) };
            (!found.is_null()).then_some(found).ok_or_else(|| format!("it has no {name:?}"))
        };
        let (getinfo, dupinfo) = (symbol(c"fi_getinfo")?, symbol(c"fi_dupinfo")?);
        let (freeinfo, fabric) = (symbol(c"fi_freeinfo")?, symbol(c"fi_fabric")?);
        let (version, strerror) = (symbol(c"fi_version")?, symbol(c"fi_strerror")?);
        // SAFETY: the symbols have these types in every version of the library's interface that has its name.
        let library = unsafe {
            let version: unsafe extern "C" fn() -> u32 = std::mem::transmute(version);
            Library {
                getinfo: std::mem::transmute::<*mut c_void, GetInfo>(getinfo),
                dupinfo: std::mem::transmute::<
                    *mut c_void,
                    unsafe extern "C" fn(*const Info) -> *mut Info,
                >(dupinfo),
                freeinfo: std::mem::transmute::<*mut c_void, unsafe extern "C" fn(*mut Info)>(
                    freeinfo,
                ),
                fabric: std::mem::transmute::<
                    *mut c_void,
                    unsafe extern "C" fn(
                        *mut FabricAttr,
                        *mut *mut FidFabric,
                        *mut c_void,
                    ) -> c_int,
                >(fabric),
                strerror: std::mem::transmute::<
                    *mut c_void,
                    unsafe extern "C" fn(c_int) -> *const c_char,
                >(strerror),
                version: version(),
            }
        };
        if library.version < crate::abi::VERSION {
            let (major, minor) = library.version();
            return Err(format!(
                "it is version {major}.{minor}, and 1.17 is the oldest that is used"
            ));
        }
        Ok(library)
    }

    /// What a call says by its negative result.
    pub(crate) fn explain(&self, call: &'static str, status: isize) -> RmaError {
        let number = c_int::try_from(status.unsigned_abs()).unwrap_or(c_int::MAX);
        // SAFETY: it takes any number.
        let text = unsafe { (self.strerror)(number) };
        let cause = if text.is_null() {
            format!("error {number}")
        } else {
            // SAFETY: it is a string that stays.
            unsafe { CStr::from_ptr(text) }.to_string_lossy().into_owned()
        };
        RmaError::Call { call, cause }
    }

    /// `status` when it is no error.
    pub(crate) fn check(&self, call: &'static str, status: c_int) -> Result<c_int, RmaError> {
        if status < 0 { Err(self.explain(call, status as isize)) } else { Ok(status) }
    }
}

/// Does `what`, which loads a library, and puts back what that changed of what the process does about signals: providers
/// take some for themselves, which this process needs (a fault in memory that a peer truncated is handled by
/// [`rackbus_memory::guard`]). Handlers that other threads of the process set meanwhile stay.
fn keep_signals<T>(what: impl FnOnce() -> T) -> T {
    // Its handler is among those that are put back, also where memory is mapped for the first time meanwhile.
    guard::catch_signals();
    let before: Vec<_> =
        (1..=SIGNALS).filter_map(|signal| Some((signal, action(signal, None)?))).collect();
    let code = code();
    let result = what();
    for (signal, before) in &before {
        put_back(*signal, before, &code);
    }
    // A provider may have taken a signal that the guard took meanwhile.
    guard::catch_signals();
    result
}

/// What is done about a signal, and `change` from now on.
fn action(signal: c_int, change: Option<&libc::sigaction>) -> Option<libc::sigaction> {
    // SAFETY: an action of zeroes is one, and it is overwritten.
    let mut action: libc::sigaction = unsafe { std::mem::zeroed() };
    let change = change.map_or(std::ptr::null(), std::ptr::from_ref);
    // SAFETY: `change` is none, or one that there was.
    (unsafe { libc::sigaction(signal, change, &raw mut action) } == 0).then_some(action)
}

/// Has `before` done about a signal again, unless that is so, or code of before handles it, which a thread of this process
/// chose meanwhile.
fn put_back(signal: c_int, before: &libc::sigaction, code: &[Range<usize>]) {
    let stays = |now: &libc::sigaction| {
        let same = (now.sa_sigaction, now.sa_flags) == (before.sa_sigaction, before.sa_flags);
        same || code.iter().any(|range| range.contains(&now.sa_sigaction))
    };
    if action(signal, None).is_none_or(|now| stays(&now)) {
        return;
    }
    // A thread may have come in between.
    if let Some(now) = action(signal, Some(before)).filter(stays) {
        action(signal, Some(&now));
    }
}

/// Where the process has code; nothing where the system does not tell.
fn code() -> Vec<Range<usize>> {
    let maps = std::fs::read_to_string("/proc/self/maps").unwrap_or_default();
    let range = |line: &str| {
        let (range, rest) = line.split_once(' ')?;
        let (from, to) = range.split_once('-').filter(|_| rest.get(2..3) == Some("x"))?;
        Some(usize::from_str_radix(from, 16).ok()?..usize::from_str_radix(to, 16).ok()?)
    };
    maps.lines().filter_map(range).collect()
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsFd;

    use rackbus_memory::{Access, Region};
    use rustix::fs::MemfdFlags;

    use super::*;

    /// Set in a process that does nothing else: what is known of signals is the whole process's.
    const ALONE: &str = "RACKBUS_TEST_SIGNALS";

    /// Who runs this test again, by itself.
    fn runs_alone(test: &str) -> bool {
        if std::env::var_os(ALONE).is_some() {
            return true;
        }
        let ended = std::process::Command::new(std::env::current_exe().unwrap())
            .args(["--exact", test, "--nocapture", "--test-threads=1"])
            .env(ALONE, "1")
            .output()
            .unwrap();
        let said = String::from_utf8_lossy(&ended.stdout);
        // One of another name would be none.
        assert!(ended.status.success() && said.contains("1 passed"), "{ended:?}");
        false
    }

    fn set(signal: c_int, handler: usize) {
        // SAFETY: an action of zeroes is one; the signals of these tests are never raised.
        unsafe {
            let mut action: libc::sigaction = std::mem::zeroed();
            action.sa_sigaction = handler;
            assert_eq!(libc::sigaction(signal, &raw const action, null_mut()), 0);
        }
    }

    fn handler_of(signal: c_int) -> usize {
        // SAFETY: it asks and changes nothing.
        unsafe {
            let mut action: libc::sigaction = std::mem::zeroed();
            assert_eq!(libc::sigaction(signal, std::ptr::null(), &raw mut action), 0);
            action.sa_sigaction
        }
    }

    extern "C" fn nothing(_: c_int) {}

    #[test]
    fn memory_that_is_mapped_while_the_library_is_loaded_is_guarded() {
        if !runs_alone(
            "library::tests::memory_that_is_mapped_while_the_library_is_loaded_is_guarded",
        ) {
            return;
        }
        let file = rustix::fs::memfd_create("first", MemfdFlags::CLOEXEC).unwrap();
        rustix::fs::ftruncate(&file, 4096).unwrap();
        let region = keep_signals(|| {
            let map = || Region::map(file.as_fd(), 0, 4096, Access::READ | Access::WRITE).unwrap();
            let region = std::thread::scope(|scope| scope.spawn(map).join().unwrap());
            // A provider takes the signal after that.
            set(libc::SIGBUS, 0x1000);
            region
        });
        rustix::fs::ftruncate(&file, 0).unwrap();
        region.whole().copy_from(&[1; 4096]);
        assert!(region.truncated());
    }

    #[test]
    fn what_the_library_changed_is_put_back_and_what_the_program_did_meanwhile_stays() {
        if !runs_alone(
            "library::tests::what_the_library_changed_is_put_back_and_what_the_program_did_meanwhile_stays",
        ) {
            return;
        }
        set(libc::SIGUSR1, nothing as *const () as usize);
        // Whoever started this process may have it ignore them.
        for signal in [libc::SIGTERM, libc::SIGINT] {
            set(signal, libc::SIG_DFL);
        }
        keep_signals(|| {
            // Where no code is that was there before, as that of a library that is loaded now.
            for signal in [libc::SIGUSR1, libc::SIGTERM] {
                set(signal, 0x1000);
            }
            set(libc::SIGINT, libc::SIG_IGN);
            let other = std::thread::spawn(|| {
                set(libc::SIGUSR2, nothing as *const () as usize);
            });
            other.join().unwrap();
        });
        assert_eq!(handler_of(libc::SIGUSR1), nothing as *const () as usize);
        assert_eq!(handler_of(libc::SIGTERM), libc::SIG_DFL);
        assert_eq!(handler_of(libc::SIGINT), libc::SIG_DFL);
        assert_eq!(handler_of(libc::SIGUSR2), nothing as *const () as usize);
    }
}
