//! libFuzzer around one target of `crates/fuzz`: the one that RACKBUS_FUZZ_TARGET names.
#![no_main]

use std::sync::LazyLock;

use rackbus_fuzz::{Target, target};

static TARGET: LazyLock<&Target> = LazyLock::new(|| {
    let name = std::env::var("RACKBUS_FUZZ_TARGET").unwrap_or_default();
    target(&name).unwrap_or_else(|| panic!("RACKBUS_FUZZ_TARGET is `{name}`, which is no target"))
});

libfuzzer_sys::fuzz_target!(|data: &[u8]| (TARGET.run)(data));
