//! Gives the library its own name, so that programs are bound to `libsisci.so` and not to the path
//! that they were linked with.

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
    println!("cargo::rustc-cdylib-link-arg=-Wl,-soname,libsisci.so");
}
