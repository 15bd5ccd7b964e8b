//! The book says what is so: its links lead somewhere, every command has its place in it, and the
//! rack files it shows are read.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::process::Command;

use rackbus_devices::class::parse_rack;
use rackbus_model::{timing, workload};

fn source() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/book/src")
}

fn chapter(name: &str) -> String {
    std::fs::read_to_string(source().join(name)).unwrap()
}

/// What stands between `](` and `)`, without the part after `#`.
fn links(text: &str) -> impl Iterator<Item = &str> {
    let ends = text.split("](").skip(1).filter_map(|rest| rest.split(')').next());
    ends.filter(|link| !link.contains("://")).filter_map(|link| link.split('#').next())
}

/// The fenced blocks of this language.
fn blocks<'a>(text: &'a str, language: &str) -> Vec<&'a str> {
    let fence = format!("```{language}\n");
    text.split(&fence).skip(1).filter_map(|rest| rest.split("```").next()).collect()
}

fn chapters() -> BTreeSet<String> {
    let entries = std::fs::read_dir(source()).unwrap().flatten();
    let names = entries.map(|entry| entry.file_name().into_string().unwrap());
    names.filter(|name| name.ends_with(".md") && name != "SUMMARY.md").collect()
}

#[test]
fn every_chapter_is_in_the_summary_and_every_link_leads_somewhere() {
    let summary = chapter("SUMMARY.md");
    let listed: BTreeSet<String> = links(&summary).map(str::to_owned).collect();
    assert_eq!(listed, chapters());
    for name in &listed {
        for link in links(&chapter(name)).filter(|link| !link.is_empty()) {
            assert!(source().join(link).exists(), "{name} links to {link}");
        }
    }
    let original = source().join("../../lending.svg");
    let (copy, original) = (source().join("lending.svg"), std::fs::read(original).unwrap());
    assert_eq!(std::fs::read(copy).unwrap(), original, "the drawing is another one");
}

#[test]
fn every_command_is_described() {
    let text = chapter("commands.md");
    let mut described = 0;
    let mut groups: Vec<Vec<String>> = vec![Vec::new()];
    while let Some(before) = groups.pop() {
        for name in commands(&before) {
            let command = [&before[..], std::slice::from_ref(&name)].concat();
            let words = command.join(" ");
            // On its own, or where its group is described.
            let own = text.contains(&format!("## `rackbus {words}"));
            let group = section(&text, &before.join(" "));
            let called = format!("`rackbus {words}");
            let among = [format!("`{name}`"), format!("`{name} "), called];
            let described_there = !before.is_empty() && among.iter().any(|it| group.contains(it));
            assert!(own || described_there, "nothing on `rackbus {words}`");
            described += 1;
            groups.push(command);
        }
    }
    assert!(described > 60, "only {described} commands were found");
}

/// What the chapter says of a group of commands, up to the next heading.
fn section<'a>(text: &'a str, words: &str) -> &'a str {
    let heading = format!("## `rackbus {words}`");
    let from = text.split_once(&heading).map_or("", |(_, from)| from);
    from.split_once("\n#").map_or(from, |(section, _)| section)
}

/// The commands of a group; none where these words are no group.
fn commands(group: &[String]) -> Vec<String> {
    let help = Command::new(env!("CARGO_BIN_EXE_rackbus")).args(group).arg("--help").output();
    let help = String::from_utf8(help.unwrap().stdout).unwrap();
    let listed = help.split_once("Commands:\n").map_or("", |(_, listed)| listed).lines();
    let names = listed
        .take_while(|line| !line.is_empty())
        .filter(|line| line.starts_with("  ") && !line.starts_with("   "))
        .filter_map(|line| line.split_whitespace().next());
    names.filter(|name| *name != "help").map(str::to_owned).collect()
}

#[test]
fn every_rack_file_is_read() {
    let mut count = 0;
    for name in chapters() {
        for block in blocks(&chapter(&name), "toml") {
            let (rack, _) = parse_rack(&name, block).unwrap();
            timing::read_for(&name, block, &rack).unwrap();
            count += 1;
        }
        for block in blocks(&chapter(&name), "toml,workload") {
            let trace = "fio version 3 iolog\n0 /dev/x read 0 4096\n".to_owned();
            let beside = |file: &str| Ok((file.to_owned(), trace.clone()));
            workload::parse_with(&name, block, &beside).unwrap();
        }
    }
    assert!(count > 1, "the book shows {count} rack files");
}
