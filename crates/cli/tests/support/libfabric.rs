//! Tests that need libfabric: without it they say so and pass, unless `RACKBUS_LIBFABRIC` names one.

use rackbus_rma::{LIBRARY_ENV, Library};

/// Whether it is here.
///
/// # Panics
/// When one is named that cannot be loaded.
pub fn is_here() -> bool {
    match Library::load() {
        Ok(_) => true,
        Err(error) if std::env::var_os(LIBRARY_ENV).is_some() => panic!("{error}"),
        Err(error) => {
            println!("left out: {error}");
            false
        }
    }
}
