//! How a function of the API is exported.

/// Defines functions of the API, each under three names: its own; `_SISCI_PUBLIC_FUNC_ST_` and
/// `_SISCI_PUBLIC_FUNC_MT_` before it, which programs were linked with that were built against
/// headers that map names so, single-threaded and multi-threaded.
///
/// `api! { "C-unwind"; … }` defines functions that a thread may be cancelled in, wherever it is
/// (`PTHREAD_CANCEL_ASYNCHRONOUS`): it then leaves them by unwinding. They must not hold anything.
macro_rules! api {
    ($(#[$meta:meta])* fn $($rest:tt)*) => {
        api! { "C"; $(#[$meta])* fn $($rest)* }
    };
    ($abi:literal; $($(#[$meta:meta])* fn $name:ident($($arg:ident: $type:ty),* $(,)?) $(-> $ret:ty)? $body:block)*) => {$(
        $(#[$meta])*
        ///
        /// # Safety
        /// Pointers are null or lead to what the headers say.
        // SAFETY: the name is the SISCI API's, and there once.
        #[unsafe(no_mangle)]
        #[allow(non_snake_case, clippy::too_many_arguments)]
        pub unsafe extern $abi fn $name($($arg: $type),*) $(-> $ret)? $body

        const _: () = {
            // SAFETY: as above.
            #[unsafe(export_name = concat!("_SISCI_PUBLIC_FUNC_ST_", stringify!($name)))]
            #[allow(non_snake_case, clippy::too_many_arguments)]
            unsafe extern $abi fn single_threaded($($arg: $type),*) $(-> $ret)? {
                // SAFETY: the same promises.
                unsafe { $name($($arg),*) }
            }
            // SAFETY: as above.
            #[unsafe(export_name = concat!("_SISCI_PUBLIC_FUNC_MT_", stringify!($name)))]
            #[allow(non_snake_case, clippy::too_many_arguments)]
            unsafe extern $abi fn multi_threaded($($arg: $type),*) $(-> $ret)? {
                // SAFETY: the same promises.
                unsafe { $name($($arg),*) }
            }
        };
    )*};
}
