//! `rackbus accel experiment` and `rackbus accel profile`: what programs get of them, and what people look at.

use std::process::{Command, Output};

use serde_json::Value;

fn accel(arguments: &[&str]) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_rackbus"));
    command.arg("accel").args(arguments).output().unwrap()
}

fn experiment(arguments: &[&str]) -> Output {
    accel(&[&["experiment"], arguments].concat())
}

#[test]
fn a_profile_is_measured_and_drawn_by_size_and_by_ratio() {
    let folder = tempfile::tempdir().unwrap();
    let [by_size, by_ratio] =
        ["size.svg", "ratio.svg"].map(|name| folder.path().join(name).display().to_string());
    let options = ["--json", "--picture", &by_size, "--ratio-picture", &by_ratio];
    let output = accel(&[&["profile", "lz4", "unlz4"], &options[..]].concat());
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let measured: Value = serde_json::from_slice(&output.stdout).unwrap();
    let ratios = |operation: &str| -> Vec<u64> {
        let all = measured.as_array().unwrap().iter();
        let mixed = all.filter(|it| it["content"] == "mixed" && it["operation"] == operation);
        mixed.map(|it| it["ratio"].as_u64().unwrap()).collect()
    };
    // What compresses worse leaves more, and what it is made of again gives less for each byte.
    let (packed, unpacked) = (ratios("lz4"), ratios("unlz4"));
    assert!(packed.len() == 9 && packed.is_sorted(), "{packed:?}");
    assert!(unpacked.len() == 9 && unpacked.is_sorted_by(|a, b| a >= b), "{unpacked:?}");
    for file in [by_size, by_ratio] {
        let picture = std::fs::read_to_string(file).unwrap();
        assert!(picture.contains("unlz4") && picture.contains("throughput"), "{picture}");
    }
    let output = accel(&["profile", "sha256", "--ratio-picture", "/tmp/unused.svg"]);
    assert_eq!(output.status.code(), Some(2));
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

/// The least and the greatest figure of a row of the book's table: `0.29 to 4.78`, or one for both.
fn range(text: &str) -> [f64; 2] {
    let mut ends = text.split(" to ").map(|end| end.trim().parse::<f64>().unwrap());
    let least = ends.next().unwrap();
    [least, ends.next().unwrap_or(least)]
}

/// A figure of the book has two digits behind the point, or one from ten on.
fn is_as_stated(found: f64, stated: f64) -> bool {
    (found - stated).abs() <= if stated < 10.0 { 0.0051 } else { 0.051 }
}

#[test]
fn the_book_says_what_each_experiment_finds_without_shaping_and_with_it() {
    let book = include_str!("../../../docs/book/src/accelerators.md");
    let table = book.split("| N | observation | without shaping | shaped |").nth(1).unwrap();
    let rows = table.lines().skip(2).take_while(|line| line.starts_with('|'));
    let rows: Vec<Vec<&str>> = rows.map(|row| row.split('|').map(str::trim).collect()).collect();
    assert_eq!(rows.len(), 12);
    for observation in 1..=10 {
        let number = observation.to_string();
        let rows: Vec<&Vec<&str>> = rows.iter().filter(|row| row[1] == number).collect();
        let output = experiment(&[&number, "--json"]);
        let told: Value = serde_json::from_slice(&output.stdout).unwrap();
        // In the engine and then on the bus, where it is run on both.
        let told = told.as_array().unwrap();
        assert_eq!(told.len(), rows.len(), "observation {number}");
        for (row, found) in rows.iter().zip(told) {
            for (way, stated) in [("off", row[3]), ("on", row[4])] {
                let cases = found["cases"].as_array().unwrap().iter();
                let figures: Vec<f64> = cases.map(|case| case[way].as_f64().unwrap()).collect();
                let least = figures.iter().copied().fold(f64::MAX, f64::min);
                let most = figures.iter().copied().fold(f64::MIN, f64::max);
                let [stated_least, stated_most] = range(stated);
                let fits = is_as_stated(least, stated_least) && is_as_stated(most, stated_most);
                assert!(fits, "observation {number}, {way}: {least} to {most}, not {stated}");
            }
        }
    }
}

#[test]
fn an_experiment_that_there_is_not_and_a_folder_that_there_is_not_are_wrong_usage() {
    assert_eq!(experiment(&["11"]).status.code(), Some(2));
    let output = experiment(&["4", "--pictures", "/nowhere/at/all"]);
    assert_eq!(output.status.code(), Some(2));
    let said = String::from_utf8(output.stderr).unwrap();
    assert!(said.contains("name a folder that there is"), "{said}");
}
