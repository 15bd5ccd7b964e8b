//! What the library is to the process that it is in: each test runs itself again, as a process of its own.

use std::path::Path;
use std::process::{Command, ExitStatus, Stdio};

use sisci::constants::errors::{SCI_ERR_NO_LINK_ACCESS, SCI_ERR_OK};
use sisci::library::SCIInitialize;

/// Says that this is the process that a test has run.
const ROLE: &str = "RACKBUS_TEST_ROLE";

/// Whether this is the test's other process.
fn is_other() -> bool {
    std::env::var_os(ROLE).is_some()
}

/// Runs a test of this file once more, with another run directory.
fn again(test: &str, run_dir: &Path, errors: Stdio) -> ExitStatus {
    let mut command = Command::new(std::env::current_exe().unwrap());
    // What is captured goes nowhere that could be full.
    command.args(["--exact", test, "--nocapture"]).stdout(Stdio::null()).stderr(errors);
    command.env(ROLE, "1").env("RACKBUS_RUN_DIR", run_dir).env("RACKBUS_HOST", "alpha");
    command.status().unwrap()
}

fn initialize() -> u32 {
    let mut error = SCI_ERR_OK;
    // SAFETY: `error` can be written to.
    unsafe { SCIInitialize(0, &raw mut error) };
    error
}

#[test]
fn a_full_standard_error_output_is_no_end_of_the_program() {
    if is_other() {
        std::process::exit(i32::from(initialize() != SCI_ERR_NO_LINK_ACCESS));
    }
    let full = std::fs::File::options().write(true).open("/dev/full").unwrap();
    let test = "a_full_standard_error_output_is_no_end_of_the_program";
    let status = again(test, Path::new("/nonexistent"), full.into());
    assert!(status.success(), "{status}");
}
