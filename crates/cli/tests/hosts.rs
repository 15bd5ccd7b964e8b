//! Hosts to programs: their node ids, their memory in the rack's address space, and running
//! something as if on one of them.

mod support;

use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;

use support::{Rack, THREE_HOSTS};

const MARLIN: &str =
    concat!(env!("CARGO_MANIFEST_DIR"), "/../../examples/testbeds/marlin-pool.toml");

#[test]
fn node_ids_are_numbers_for_scripts_and_a_table_for_people() {
    let rack = Rack::described(&THREE_HOSTS.replace("[hosts.beta]", "[hosts.beta]\nnode_id = 64"));
    let file = rack.file();
    assert_eq!(rack.good(&["node-id", "beta", "--file", &file]), "64\n");
    assert_eq!(rack.json(&["node-id", "beta", "--file", &file])["node_id"], 64);
    let table = rack.good(&["node-id", "--file", &file]);
    let lines: Vec<Vec<&str>> = table.lines().map(|it| it.split_whitespace().collect()).collect();
    assert_eq!(lines[1..], [["alpha", "4"], ["beta", "64"], ["gamma", "8"]]);
    let all = rack.json(&["node-id", "--file", &file]);
    assert_eq!((&all[2]["host"], &all[2]["node_id"]), (&"gamma".into(), &8.into()));
    let told = rack.bad(2, &["node-id", "delta", "--file", &file]);
    assert!(told.contains("no host delta; its hosts are alpha, beta, gamma"), "{told}");
    assert!(rack.bad(1, &["node-id"]).contains("rackbus up"), "no rack runs");
}

#[test]
fn the_memory_map_is_marlins() {
    let rack = Rack::described("");
    let table = rack.good(&["mem", "map", "--file", MARLIN]);
    let line = table.lines().find(|line| line.starts_with("ch2 ")).unwrap();
    let cells: Vec<&str> = line.split_whitespace().collect();
    assert_eq!(cells, ["ch2", "12", "0x0000001800000000", "0x0000002000000000", "32", "GiB"]);
    let all = rack.json(&["mem", "map", "--file", MARLIN]);
    let first = &all[0];
    assert_eq!((&first["host"], &first["base"]), (&"mh".into(), &(32u64 << 30).into()));
    assert_eq!((&first["end"], &first["size"]), (&(64u64 << 30).into(), &(32u64 << 30).into()));
    assert_eq!(all.as_array().unwrap().len(), 50);
}

#[test]
fn a_program_runs_on_a_host() {
    let rack = Rack::up(THREE_HOSTS);
    assert_eq!(rack.good(&["node-id", "gamma"]), "12\n", "of the rack that runs");
    assert_eq!(rack.json(&["mem", "map"])[1]["host"], "beta");
    let show = "echo $RACKBUS_HOST $RACKBUS_RUN_DIR; exit 7";
    let shown = rack.run(&["on", "beta", "--", "sh", "-c", show]);
    let expected = format!("beta {}\n", rack.run_dir().display());
    assert_eq!(String::from_utf8(shown.stdout).unwrap(), expected);
    assert_eq!(shown.status.code(), Some(7), "it ends as the program does");
    let told = rack.bad(2, &["on", "delta", "--", "true"]);
    assert!(told.contains("no host delta"), "{told}");
    assert!(rack.bad(1, &["on", "beta", "--", "/nowhere/program"]).contains("/nowhere/program"));
    assert_eq!(rack.run(&["on", "beta"]).status.code(), Some(2), "no program");
}

/// The library is looked for around the binary, so an installation is made around a second name of
/// it.
#[test]
fn a_program_on_a_host_finds_the_library() {
    let rack = Rack::up(THREE_HOSTS);
    let tree = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let [bin, lib64, lib] = ["bin", "lib64", "lib"].map(|name| tree.path().join(name));
    std::fs::create_dir(&bin).unwrap();
    let program = bin.join("rackbus");
    std::fs::hard_link(env!("CARGO_BIN_EXE_rackbus"), &program).unwrap();
    let search = |before: Option<&str>| {
        let mut command = std::process::Command::new(&program);
        command.args(["on", "beta", "--", "sh", "-c", "echo $LD_LIBRARY_PATH"]);
        command.env("RACKBUS_RUN_DIR", rack.run_dir()).env_remove("LD_LIBRARY_PATH");
        command.envs(before.map(|before| ("LD_LIBRARY_PATH", before)));
        String::from_utf8(command.output().unwrap().stdout).unwrap().trim().to_owned()
    };
    let has = |folder: &Path| {
        std::fs::create_dir_all(folder).unwrap();
        std::fs::write(folder.join("libsisci.so"), "").unwrap();
        folder.display().to_string()
    };
    assert_eq!(search(Some("/other")), "/other", "there is none");
    for folder in [&lib, &lib64, &bin] {
        let folder = has(folder);
        assert_eq!(search(None), folder);
        assert_eq!(search(Some("/other")), format!("{folder}:/other"));
    }
}

/// Processes of the same user can connect to a node's link, but only nodes speak for hosts there.
#[test]
fn a_process_that_is_no_node_acts_for_no_host() {
    let rack = Rack::up(THREE_HOSTS);
    let lease = rack.borrow("alpha/nvme0", "beta");
    let function = format!(
        r#"{{"function":{{"device":"nvme0","lease":{},"epoch":{}}}}}"#,
        lease.lease, lease.epoch
    );
    for from in ["beta", "gamma", "alpha", "../beta", ""] {
        for service in [r#""segments""#, &function] {
            let mut peer = UnixStream::connect(rack.run_dir().join("alpha/link.sock")).unwrap();
            let hello = format!(
                r#"{{"version":1,"rack":"lab","from":"{from}","to":"alpha","service":{service}}}"#
            );
            let length = u32::try_from(hello.len()).unwrap().to_le_bytes();
            peer.write_all(&[&length, hello.as_bytes()].concat()).unwrap();
            let (mut length, mut answer) = ([0; 4], Vec::new());
            peer.read_exact(&mut length).unwrap();
            let length = u32::from_le_bytes(length) as u64;
            peer.take(length).read_to_end(&mut answer).unwrap();
            let answer = String::from_utf8(answer).unwrap();
            assert!(answer.contains("refused"), "{from} {service}: {answer}");
        }
    }
    // The node of beta is let in.
    support::open(&lease).read(0, &mut [0; 512]).unwrap();
}
