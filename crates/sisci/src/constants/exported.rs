//! The constants as data. Programs that were compiled against other headers do not have these numbers
//! inside of them: they read them from the library, from a variable per constant.
#![allow(unsafe_code)]

use super::for_each_constant;

/// Prefix of a variable's name in the library.
pub const PREFIX: &str = "_SISCI_PUBLIC_CONST_";

/// Exports a variable for each constant.
macro_rules! export {
    ($($name:ident = $value:expr;)*) => {
        $(
            // SAFETY: the prefix is the SISCI library's own, and each name is there once.
            #[unsafe(export_name = concat!("_SISCI_PUBLIC_CONST_", stringify!($name)))]
            pub static $name: u32 = super::$name;
        )*
    };
}
for_each_constant!(export);

/// Two constants whose variables have another name than they.
// SAFETY: as above.
#[unsafe(export_name = "_SISCI_PUBLIC_CONST_SCI_Q_SCI_Q_ADAPTER_PHYS_MEM_NODEID")]
pub static PHYS_MEM_NODEID: u32 = super::SCI_Q_ADAPTER_PHYS_MEM_NODEID;
/// See [`PHYS_MEM_NODEID`].
// SAFETY: as above.
#[unsafe(export_name = "_SISCI_PUBLIC_CONST_SCI_Q_SCI_Q_ADAPTER_PHYS_MBX_NODEID")]
pub static PHYS_MBX_NODEID: u32 = super::SCI_Q_ADAPTER_PHYS_MBX_NODEID;
/// And one that was exported without the beginning of its name.
// SAFETY: as above.
#[unsafe(export_name = "_SISCI_PUBLIC_CONST_WRITE_BACK_CACHE_MAP")]
pub static WRITE_BACK_CACHE_MAP: u32 = super::SCI_FLAG_WRITE_BACK_CACHE_MAP;
