//! What `scripts/fuzz` counts as a run, with programs in the places of cargo, of the tool and of the fuzzer.

use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::{Command, Output};

/// A program that is this script.
fn program(path: &Path, script: &str) {
    std::fs::create_dir_all(path.parent().unwrap()).unwrap();
    std::fs::write(path, format!("#!/bin/sh\n{script}\n")).unwrap();
    std::fs::set_permissions(path, std::fs::Permissions::from_mode(0o755)).unwrap();
}

/// Runs the script for two targets, of which the fuzzer says for the second `stats` at its end.
fn fuzz(name: &str, stats: &str) -> Output {
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("fuzz-{name}"));
    let rustc = Command::new("rustc").arg("-vV").output().unwrap();
    let version = String::from_utf8(rustc.stdout).unwrap();
    let host = version.lines().find_map(|line| line.strip_prefix("host: ")).unwrap();
    program(&folder.join("cargo"), ":");
    program(&folder.join("debug/rackbus-fuzz"), "[ $1 != list ] || printf 'one\\nother\\n'");
    let good = "stat::number_of_executed_units: 5";
    let fuzzer = format!("case $RACKBUS_FUZZ_TARGET in one) echo '{good}' ;; *) {stats} ;; esac");
    program(&folder.join("fuzz").join(host).join("release/rackbus-libfuzzer"), &fuzzer);
    Command::new(Path::new(env!("CARGO_MANIFEST_DIR")).join("../../scripts/fuzz"))
        .env("CARGO", folder.join("cargo"))
        .env("CARGO_TARGET_DIR", &folder)
        .env("RACKBUS_CACHE", folder.join("cache"))
        .output()
        .unwrap()
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

#[test]
fn a_target_of_which_no_input_was_run_fails() {
    for (name, stats) in [("silent", ":"), ("none", "echo stat::number_of_executed_units: 0")] {
        let failed = fuzz(name, stats);
        assert_eq!(failed.status.code(), Some(1), "{}", text(&failed.stdout));
        let said = text(&failed.stderr);
        assert!(said.contains("fuzz: other, no input was run, see "), "{said}");
    }
}

#[test]
fn inputs_of_all_targets_are_counted() {
    let done = fuzz("good", "echo stat::number_of_executed_units: 7");
    assert_eq!(done.status.code(), Some(0), "{}", text(&done.stderr));
    assert!(text(&done.stdout).ends_with("fuzz: ok, 12 executions\n"));
}

#[test]
fn what_is_found_is_told_with_the_command_that_runs_it_again() {
    let finds = "echo 'artifact_prefix; Test unit written to /found/crash-1'; exit 77";
    let failed = fuzz("found", finds);
    assert_eq!(failed.status.code(), Some(1), "{}", text(&failed.stdout));
    let said = text(&failed.stderr);
    let replay = "fuzz: other FAILED; replay it with:\n  \
        cargo run -p rackbus-fuzz -- replay other /found/crash-1\n";
    assert!(said.contains(replay), "{said}");
    assert!(!text(&failed.stdout).contains("fuzz: ok"));
}

#[test]
fn a_fuzzer_that_fails_by_itself_names_no_input() {
    let failed = fuzz("broken", "echo 'ParseDictionaryFile: error in line 2'; exit 1");
    assert_eq!(failed.status.code(), Some(1), "{}", text(&failed.stdout));
    let said = text(&failed.stderr);
    assert!(said.contains("fuzz: other FAILED, and by no input; see "), "{said}");
    assert!(!said.contains("replay"), "{said}");
}
