//! The scenarios of `tests/c`, run in C and in C++ by processes on two hosts: what programs rely on.

#[macro_use]
mod support;

use support::{Build, programs};

scenarios!(Build::Plain);
scenarios!(Build::Plain, alone: forks, signals);

/// A file without a test would never be run.
#[test]
fn every_scenario_has_a_test() {
    let source = concat!(
        include_str!("support/scenarios.rs"),
        include_str!("conformance.rs"),
        // On whole nodes, by its name.
        "scenarios!(devices);"
    );
    for file in std::fs::read_dir(concat!(env!("CARGO_MANIFEST_DIR"), "/tests/c")).unwrap() {
        let name = file.unwrap().file_name().into_string().unwrap();
        let Some(scenario) = name.strip_suffix(".c").filter(|scenario| *scenario != "scenario")
        else {
            continue;
        };
        let tested = source.lines().filter(|line| line.contains("scenarios!(")).any(|line| {
            line.split(|c: char| c != '_' && !c.is_alphanumeric()).any(|word| word == scenario)
        });
        assert!(tested, "{name} is run by no test");
        assert!(
            programs(Build::Plain).join("tests").join(scenario).exists(),
            "{name} is not built"
        );
    }
}
