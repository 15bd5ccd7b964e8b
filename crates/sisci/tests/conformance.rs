//! The stories of `tests/c`, told in C and in C++ by processes on two hosts: what programs rely on.

mod support;

use support::{Rack, programs, text};

/// Runs a story that one process tells, as C and as C++.
fn alone(story: &str) {
    let rack = Rack::start();
    for variant in ["", "++"] {
        let output = rack.on("alpha", &format!("tests/{story}{variant}")).output().unwrap();
        assert!(output.status.success(), "{story}{variant}: {}", text(&output));
    }
}

/// Runs a story of two processes: one in C and one in C++, on two hosts, and both on one host.
fn together(story: &str) {
    let rack = Rack::start();
    for (owner_host, owner_node) in [("alpha", "4"), ("beta", "8")] {
        let mut owner = rack.on(owner_host, &format!("tests/{story}"));
        owner.args(["owner", "8"]);
        let mut peer = rack.on("beta", &format!("tests/{story}++"));
        peer.args(["peer", owner_node]);
        rack.both(owner, peer);
    }
}

/// One test for each story.
macro_rules! stories {
    ($how:ident: $($story:ident),*) => {$(
        #[test]
        fn $story() {
            $how(stringify!($story));
        }
    )*};
}

stories!(alone: headers, binary, library, handles, query, sharing);
stories!(together: segments, maps, segment_events, interrupts, data_interrupts, dma, copy, reflective);

/// A file without a test would never be told.
#[test]
fn every_story_is_told() {
    let source = include_str!("conformance.rs");
    for file in std::fs::read_dir(concat!(env!("CARGO_MANIFEST_DIR"), "/tests/c")).unwrap() {
        let name = file.unwrap().file_name().into_string().unwrap();
        let Some(story) = name.strip_suffix(".c").filter(|story| *story != "story") else {
            continue;
        };
        let told = source.lines().filter(|line| line.starts_with("stories!")).any(|line| {
            line.split(|c: char| c != '_' && !c.is_alphanumeric()).any(|word| word == story)
        });
        assert!(told, "{name} is told by no test");
        assert!(programs().join("tests").join(story).exists(), "{name} is not built");
    }
}
