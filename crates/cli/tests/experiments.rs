//! `rackbus accel experiment`: what programs get of it, and what people look at.

use std::process::{Command, Output};

use serde_json::Value;

fn experiment(arguments: &[&str]) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_rackbus"));
    command.args(["accel", "experiment"]).args(arguments).output().unwrap()
}

#[test]
fn an_experiment_is_told_to_programs_and_drawn_for_people() {
    let folder = tempfile::tempdir().unwrap();
    let output = experiment(&["3", "--json", "--pictures", folder.path().to_str().unwrap()]);
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let told: Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(told[0]["observation"], 3, "{told}");
    let cases = told[0]["cases"].as_array().unwrap();
    assert_eq!(cases.len(), 3, "{told}");
    let picture = std::fs::read_to_string(folder.path().join("observation-3.svg")).unwrap();
    for case in cases {
        let name = case["name"].as_str().unwrap();
        let of = |way: &str| case[way].as_f64().unwrap();
        assert!(picture.contains(name), "{name} is not drawn");
        assert!(of("off") > 1.2 && (0.95..1.05).contains(&of("on")), "{case}");
    }
    let text = experiment(&["3"]);
    let text = String::from_utf8(text.stdout).unwrap();
    assert!(text.contains("compression and decompression"), "{text}");
}

#[test]
fn an_experiment_that_there_is_not_and_a_folder_that_there_is_not_are_wrong_usage() {
    assert_eq!(experiment(&["11"]).status.code(), Some(2));
    let output = experiment(&["4", "--pictures", "/nowhere/at/all"]);
    assert_eq!(output.status.code(), Some(2));
    let said = String::from_utf8(output.stderr).unwrap();
    assert!(said.contains("name a folder that there is"), "{said}");
}
