//! The C headers are good C and C++, say the numbers that compiled programs have inside of them, and
//! agree with the library's own numbers.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use sisci::constants::errors::{ERRORS, SCI_ERR_NO_SUCH_INTNO, SISCI_ERR_MASK};
use sisci::constants::{CONSTANTS, ENUMERATORS};

fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

/// Compiles `tests/c/headers.c`, whose checks are the compiler's, and demands no warning.
fn compile(compiler: &str, standard: &str, language: &str) {
    let output = Command::new(compiler)
        .args([standard, "-Wall", "-Wextra", "-Werror", "-pedantic", "-fsyntax-only"])
        .arg("-I")
        .arg(root().join("include"))
        .args(["-x", language])
        .arg(root().join("tests/c/headers.c"))
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

fn number(word: &str) -> Option<u32> {
    let word = word.trim_end_matches('U');
    match word.strip_prefix("0x") {
        Some(digits) => u32::from_str_radix(digits, 16).ok(),
        None => word.parse().ok(),
    }
}

fn header(name: &str) -> String {
    let path: PathBuf = root().join("include").join(name);
    fs::read_to_string(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}

/// What a header defines as a number, or as another name of one.
fn macros(name: &str) -> BTreeMap<String, u32> {
    let mut found = BTreeMap::new();
    for line in header(name).lines() {
        let mut words = line.split_whitespace();
        if let (Some("#define"), Some(name), Some(value)) =
            (words.next(), words.next(), words.next())
            && let Some(value) = number(value).or_else(|| found.get(value).copied())
        {
            found.insert(name.to_owned(), value);
        }
    }
    found
}

/// The enumerators of a header, those of errors with their mask.
fn enumerators(name: &str) -> BTreeMap<String, u32> {
    let mut found = BTreeMap::new();
    for line in header(name).lines().filter(|line| line.starts_with("    ")) {
        if let Some((name, value)) = line.trim().split_once(" = ") {
            let end = value.find([',', ' ', ')']).unwrap_or(value.len());
            let mask = if value.contains("| SISCI_ERR_MASK") { SISCI_ERR_MASK } else { 0 };
            let value = number(value[..end].trim_start_matches('('));
            found.insert(name.to_owned(), value.expect("a number") | mask);
        }
    }
    found
}

fn table(pairs: &[(&str, u32)]) -> BTreeMap<String, u32> {
    pairs.iter().map(|&(name, value)| (name.to_owned(), value)).collect()
}

#[test]
fn flags_and_queries_agree() {
    let mut c = macros("sisci_api_macros.h");
    c.append(&mut macros("dis_types.h"));
    assert_eq!(c, table(CONSTANTS));
}

#[test]
fn enums_agree() {
    let mut c = enumerators("sisci_types.h");
    c.append(&mut enumerators("dis_types.h"));
    assert_eq!(c, table(ENUMERATORS));
}

#[test]
fn errors_agree() {
    assert_eq!(macros("sisci_error.h")["SISCI_ERR_MASK"], SISCI_ERR_MASK);
    let mut c = enumerators("sisci_error.h");
    assert_eq!(c.remove("SCI_ERR_NO_SUCH_INTNO"), Some(SCI_ERR_NO_SUCH_INTNO));
    let rust: BTreeMap<_, _> =
        ERRORS.iter().map(|error| (error.name.to_owned(), error.code)).collect();
    assert_eq!(c, rust);
    assert_eq!(rust.len(), ERRORS.len(), "an error is listed twice");
}
