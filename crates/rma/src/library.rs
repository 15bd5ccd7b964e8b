//! libfabric itself, loaded at run time.

use std::ffi::{CStr, CString, c_char, c_int, c_void};
use std::ptr::null_mut;
use std::sync::OnceLock;

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

/// Does `what`, and puts back what the process does about signals: providers take some for themselves, which this
/// process needs (a fault in memory that a peer truncated is handled by `rackbus_memory::guard`).
fn keep_signals<T>(what: impl FnOnce() -> T) -> T {
    let actions: Vec<_> = (1..=SIGNALS)
        .filter_map(|signal| {
            // SAFETY: an action of zeroes is one, and it is overwritten.
            let mut action: libc::sigaction = unsafe { std::mem::zeroed() };
            // SAFETY: it asks and changes nothing.
            let asked = unsafe { libc::sigaction(signal, std::ptr::null(), &raw mut action) };
            (asked == 0).then_some((signal, action))
        })
        .collect();
    let result = what();
    for (signal, action) in &actions {
        // SAFETY: the action is the one that there was.
        unsafe { libc::sigaction(*signal, action, null_mut()) };
    }
    result
}
