//! The C headers are good C and C++, and say the numbers that compiled programs have inside of them.

use std::path::Path;
use std::process::Command;

/// Compiles `tests/c/headers.c`, whose checks are the compiler's, and demands no warning.
fn compile(compiler: &str, standard: &str, language: &str) {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let output = Command::new(compiler)
        .args([standard, "-Wall", "-Wextra", "-Werror", "-pedantic", "-fsyntax-only"])
        .arg("-I")
        .arg(root.join("include"))
        .args(["-x", language])
        .arg(root.join("tests/c/headers.c"))
        .output()
        .unwrap_or_else(|error| panic!("{compiler}: {error}; install a C and a C++ compiler"));
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
}

#[test]
fn headers_are_c99() {
    compile("gcc", "-std=c99", "c");
}

#[test]
fn headers_are_cpp11() {
    compile("g++", "-std=c++11", "c++");
}
