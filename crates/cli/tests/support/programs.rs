//! Stock programs that tests run: whether they are there, and what they print.

use std::process::{Command, Output};

use serde_json::Value;

/// The answer of a client of `iperf3 -J`; `None` when its server did not take it, which takes one at a time, and listens
/// again only some time after the one before has ended. The client may end with success even then.
///
/// # Panics
/// When it failed for another reason.
pub fn iperf3_answer(output: &Output) -> Option<Value> {
    let answer: Value = serde_json::from_slice(&output.stdout).unwrap_or_default();
    let error = answer["error"].as_str().unwrap_or_default();
    if error.contains("Connection refused") || error.contains("the server is busy") {
        return None;
    }
    assert!(output.status.success() && answer.is_object() && error.is_empty(), "{output:?}");
    Some(answer)
}

/// Whether a program is there; says so if not.
pub fn has(program: &str) -> bool {
    let found = Command::new("sh").args(["-c", &format!("command -v {program}")]).output();
    let found = found.unwrap().status.success();
    if !found {
        eprintln!("skipped: {program} is not installed");
    }
    found
}
