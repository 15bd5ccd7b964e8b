//! A soak as a program: what it is called with, and what it says at the end.

use std::path::Path;
use std::process::ExitCode;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use crate::Result;

/// Seconds of a soak that says no other number.
const SECONDS: u64 = 600;

/// Runs a soak as the program with this name: `PROGRAM DIR [SECONDS [SEED]]`. The last line is `soak: ok` and what was
/// done, or how to have it again with the same choices.
pub fn run_as_program(
    program: &str,
    run: impl FnOnce(&Path, Duration, u64) -> Result<String>,
) -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let number = |at: usize| arguments.get(at).map(|text| text.parse::<u64>());
    let (Some(dir), Some(Ok(seconds)), Some(Ok(seed))) =
        (arguments.first(), number(1).or(Some(Ok(SECONDS))), number(2).or_else(|| Some(Ok(now()))))
    else {
        eprintln!("usage: {program} DIR [SECONDS [SEED]]");
        return ExitCode::from(2);
    };
    println!("soak: {seconds} s, seed {seed}");
    match run(Path::new(dir), Duration::from_secs(seconds), seed) {
        Ok(done) => {
            println!("soak: ok, {done}");
            ExitCode::SUCCESS
        }
        Err(failure) => {
            eprintln!(
                "soak: FAILED: {failure}\nagain, with the same choices: {program} {dir} {seconds} {seed}"
            );
            ExitCode::FAILURE
        }
    }
}

fn now() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs())
}
