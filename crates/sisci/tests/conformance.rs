//! The stories of `tests/c`, told in C and in C++ by processes on two hosts: what programs rely on.

#[macro_use]
mod support;

use support::{Build, programs};

stories!(Build::Plain);
stories!(Build::Plain, alone: forks, signals);

/// A file without a test would never be told.
#[test]
fn every_story_is_told() {
    let source = concat!(include_str!("support/stories.rs"), include_str!("conformance.rs"));
    for file in std::fs::read_dir(concat!(env!("CARGO_MANIFEST_DIR"), "/tests/c")).unwrap() {
        let name = file.unwrap().file_name().into_string().unwrap();
        let Some(story) = name.strip_suffix(".c").filter(|story| *story != "story") else {
            continue;
        };
        let told = source.lines().filter(|line| line.contains("stories!(")).any(|line| {
            line.split(|c: char| c != '_' && !c.is_alphanumeric()).any(|word| word == story)
        });
        assert!(told, "{name} is told by no test");
        assert!(programs(Build::Plain).join("tests").join(story).exists(), "{name} is not built");
    }
}
