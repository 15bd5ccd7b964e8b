//! What `scripts/sim` runs, and what it says of failures, with a program in the place of cargo that says what cargo would.

use std::collections::BTreeSet;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

fn folder_of(name: &str) -> PathBuf {
    Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("sim-{name}"))
}

/// The arguments of `cargo test` by which the simulations of all crates say that they are run.
fn simulations() -> BTreeSet<String> {
    let crates = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
    let all = std::fs::read_dir(crates).unwrap().map(|entry| entry.unwrap());
    let mut paths: Vec<PathBuf> =
        all.filter(|entry| entry.file_name() != "seeds").map(|entry| entry.path()).collect();
    let mut found = BTreeSet::new();
    while let Some(path) = paths.pop() {
        if path.is_dir() {
            paths.extend(std::fs::read_dir(path).unwrap().map(|entry| entry.unwrap().path()));
        } else if path.extension().is_some_and(|extension| extension == "rs") {
            let source = std::fs::read_to_string(path).unwrap();
            let texts = source.split('"').filter(|text| text.starts_with("-p rackbus-"));
            found.extend(texts.map(str::to_owned));
        }
    }
    found
}

/// Runs the script with a cargo that runs one seed of each simulation, and for the property tests of the crate qos does
/// what `properties` says.
fn sim(name: &str, properties: &str) -> Output {
    let folder = folder_of(name);
    std::fs::create_dir_all(&folder).unwrap();
    let cargo = folder.join("cargo");
    let asked = folder.join("asked");
    // None of a run before.
    let _ = std::fs::remove_file(&asked);
    let asked = asked.display();
    let text = format!(
        "#!/bin/sh\necho \"$*\" >>'{asked}'\n\
         case \"$*\" in\n*rackbus-qos\\ --lib*) {properties} ;;\n*) echo 'seeds left: 1 of 1, about 1 min'; echo 'seeds run: 1' ;;\nesac\n"
    );
    std::fs::write(&cargo, text).unwrap();
    std::fs::set_permissions(&cargo, std::fs::Permissions::from_mode(0o755)).unwrap();
    let root: PathBuf = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    Command::new(root.join("scripts/sim"))
        .current_dir(&root)
        .env("CARGO", &cargo)
        .env("CARGO_TARGET_DIR", &folder)
        .env("RACKBUS_SEEDS", "1")
        .output()
        .unwrap()
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

#[test]
fn a_property_that_fails_is_named_with_the_command_that_runs_it_alone() {
    let log = "\n\
        running 2 tests\n.F\nfailures:\n\n---- shares::are_fair stdout ----\n\n    thread panicked\n    word\n\n\
        failures:\n    shares::are_fair\n\ntest result: FAILED. 1 passed; 1 failed\n\n\
        error: test failed, to rerun pass `-p rackbus-qos --test isolation`";
    let failed = sim("property", &format!("echo '{log}'; exit 101"));
    assert_eq!(failed.status.code(), Some(1));
    let said = text(&failed.stderr);
    let replay = "FAILED; replay it with:\n  \
        cargo test -p rackbus-qos --test isolation -- --exact shares::are_fair\n";
    assert!(said.ends_with(replay), "{said}");
}

#[test]
fn property_tests_that_fail_before_any_runs_are_named_by_their_crate() {
    let failed = sim("build", "echo 'error: could not compile'; exit 101");
    assert_eq!(failed.status.code(), Some(1));
    let said = text(&failed.stderr);
    assert!(said.ends_with("replay it with:\n  cargo test -p rackbus-qos, see above\n"), "{said}");
}

/// Each by the arguments that a failure of it prints: the command that replays a seed is the one that ran it.
#[test]
fn every_simulation_of_the_workspace_is_run() {
    let done = sim("all", ":");
    assert_eq!(done.status.code(), Some(0), "{}", text(&done.stderr));
    let asked = std::fs::read_to_string(folder_of("all").join("asked")).unwrap();
    let arguments = asked.lines().filter_map(|line| {
        line.strip_prefix("test --profile sim --quiet ")?.strip_suffix(" -- --nocapture")
    });
    let run: BTreeSet<String> = arguments.map(str::to_owned).collect();
    assert_eq!(run, simulations());
}

#[test]
fn seeds_that_were_run_are_counted() {
    let done = sim("good", ":");
    assert_eq!(done.status.code(), Some(0), "{}", text(&done.stderr));
    let said = text(&done.stdout);
    let simulations = said.lines().filter(|line| line.ends_with(", 1 seeds")).count();
    assert!(said.ends_with(&format!("sim: ok, {simulations} seeds\n")), "{said}");
    let left = said.lines().filter(|line| line.ends_with(", seeds left: 1 of 1, about 1 min"));
    assert_eq!(left.count(), simulations, "{said}");
}
