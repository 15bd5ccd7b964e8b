//! Gives the library its own name, so that programs are bound to `librackbus_accel.so` and not to the path
//! that they were linked with.

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
    println!("cargo::rustc-cdylib-link-arg=-Wl,-soname,librackbus_accel.so");
}
