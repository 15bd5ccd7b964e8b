//! Stock programs that tests run: whether they are there, and what they print.

use std::ffi::OsString;
use std::path::{Path, PathBuf};
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

/// Where programs are looked for: those that `scripts/setup programs` has put into the cache, and then this host's.
pub fn path() -> OsString {
    let set = |name| std::env::var_os(name).filter(|value| !value.is_empty());
    let home = || set("HOME").map(|home| Path::new(&home).join(".cache"));
    let own = || set("XDG_CACHE_HOME").map(PathBuf::from).or_else(home);
    let cache = set("RACKBUS_CACHE").map(PathBuf::from).or_else(|| Some(own()?.join("rackbus")));
    let usual = set("PATH").unwrap_or_default();
    let all = cache.map(|cache| cache.join("programs/run")).into_iter();
    std::env::join_paths(all.chain(std::env::split_paths(&usual))).unwrap_or(usual)
}

/// Whether a program is there; says so if not.
pub fn has(program: &str) -> bool {
    let look = format!("command -v {program}");
    let found = Command::new("sh").args(["-c", &look]).env("PATH", path()).output();
    let found = found.unwrap().status.success();
    if !found {
        super::not_tested(&format!("{program} is not here; `scripts/setup programs` has it"));
    }
    found
}
