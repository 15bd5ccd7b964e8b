//! The tools between two hosts, of one machine and of two: whoever is started first, they find each other, measure, and
//! end.

mod support;

use std::io::Write;

use serde_json::Value;
use support::{Rack, text};

/// Hosts of one machine, and hosts that are machines: the same programs run on both.
fn racks() -> [Rack; 2] {
    [Rack::start(), Rack::of_machines()]
}

/// Runs a tool as server on beta and as client on alpha; the client's rows.
fn run(rack: &Rack, tool: &str, server: &[&str], client: &[&str]) -> Vec<Value> {
    let tool = format!("bin/{tool}");
    let (mut on_beta, mut on_alpha) = (rack.on("beta", &tool), rack.on("alpha", &tool));
    on_beta.args(["-server", "-rn", "alpha"]).args(server);
    on_alpha.args(["-client", "-rn", "8", "-json"]).args(client);
    rows(&rack.both(on_beta, on_alpha)[1])
}

fn rows(output: &str) -> Vec<Value> {
    let rows = output.lines().filter(|line| line.starts_with('{'));
    rows.map(|line| serde_json::from_str(line).unwrap_or_else(|e| panic!("{e}: {line}"))).collect()
}

/// Each row's member, as a number.
fn column(rows: &[Value], name: &str) -> Vec<f64> {
    rows.iter().map(|row| row[name].as_f64().unwrap_or_else(|| panic!("{row}"))).collect()
}

#[test]
fn scibench2_measures_each_size() {
    for rack in racks() {
        for way in [&["-copymode", "s"][..], &["-copymode", "m"], &["-copymode", "d", "-pull"]] {
            let client = [&["-loops", "10", "-size", "64"], way].concat();
            let rows = run(&rack, "scibench2", &["-size", "64"], &client);
            assert_eq!(column(&rows, "bytes"), [4.0, 8.0, 16.0, 32.0, 64.0]);
            assert!(column(&rows, "us").iter().all(|us| *us > 0.0), "{rows:?}");
        }
    }
}

#[test]
fn scipp_measures_half_a_round_trip() {
    for rack in racks() {
        let rows = run(&rack, "scipp", &[], &["-loops", "50", "-size", "32", "-histogram"]);
        assert_eq!(column(&rows, "bytes"), [4.0, 8.0, 16.0, 32.0]);
        for row in &rows {
            let of = |name: &str| row[name].as_f64().unwrap();
            assert!(of("best_us") <= of("us") && of("us") <= of("worst_us"), "{row}");
        }
    }
}

#[test]
fn intr_bench_measures_interrupts_and_messages() {
    for rack in racks() {
        for data in [&[][..], &["-data", "1024"]] {
            let client = [&["-loops", "50", "-inner"], data].concat();
            assert_eq!(column(&run(&rack, "intr_bench", &[], &client), "loops"), [50.0]);
        }
    }
}

#[test]
fn dma_bench_measures_transfers() {
    for rack in racks() {
        for way in [&[][..], &["-pull", "-vector", "256"], &["-mem", "-async"]] {
            let client = [&["-loops", "3"], way].concat();
            let rows = run(&rack, "dma_bench", &["-size", "64K"], &client);
            assert!(!rows.is_empty());
            assert!(column(&rows, "us").iter().all(|us| *us > 0.0), "{rows:?}");
        }
    }
}

#[test]
fn segcopy_copies_a_file() {
    let folder = tempfile::tempdir().unwrap();
    let [from, to] = ["from", "to"].map(|name| folder.path().join(name).display().to_string());
    // Several rounds of the ring, and a part of a slot.
    let bytes: Vec<u8> = (0..1_500_007_u32).map(|n| (n ^ (n >> 7)) as u8).collect();
    std::fs::File::create(&from).unwrap().write_all(&bytes).unwrap();
    for rack in racks() {
        let rows = run(&rack, "segcopy", &["-file", &to], &["-file", &from]);
        assert_eq!(column(&rows, "bytes"), [1_500_007.0]);
        assert!(std::fs::read(&to).unwrap() == bytes, "the copy differs");
        std::fs::remove_file(&to).unwrap();
    }
}

#[test]
fn reflective_reaches_every_server() {
    for rack in racks() {
        let mut client = rack.on("alpha", "bin/reflective");
        client.args(["-client", "-nodes", "2", "-loops", "20", "-size", "1K", "-json"]);
        let mut servers = [("beta", "1"), ("gamma", "2")].map(|(host, rank)| {
            let mut server = rack.on(host, "bin/reflective");
            server.args(["-server", "-rank", rank, "-size", "1K"]);
            server
        });
        let mut second = servers[1].spawn().unwrap();
        let [first, _] = servers;
        let printed = rack.both(client, first);
        assert!(second.wait().unwrap().success());
        assert_eq!(rows(&printed[0]).len(), 9, "4 bytes to 1 KiB: {printed:?}");
    }
}

#[test]
fn tools_say_what_is_wrong() {
    let rack = Rack::start();
    let ended = |args: &[&str]| {
        let output = rack.on("alpha", "bin/scipp").args(args).output().unwrap();
        (output.status.code(), text(&output))
    };
    let (code, help) = ended(&["-help"]);
    assert!(code == Some(0) && help.contains("examples:") && help.contains("-rn NODE"), "{help}");
    for wrong in [
        &["-client"][..],
        &["-rn", "8"],
        &["-rn", "8", "-client", "-server"],
        &["-rn", "8", "-client", "-loops", "many"],
        &["-rn", "8", "-client", "-nonsense"],
        &["-rn", "8", "-client", "-size"],
    ] {
        let (code, told) = ended(wrong);
        assert!(code == Some(2) && told.contains("-help"), "{wrong:?}: {code:?} {told}");
    }
    let (code, told) = ended(&["-rn", "nobody", "-client"]);
    assert!(code == Some(1) && told.contains("nobody"), "{told}");
    let (code, told) = ended(&["-rn", "8", "-client", "-wait", "1"]);
    assert!(code == Some(1) && told.contains("segment 0x"), "nobody answers: {told}");
}

#[test]
fn the_books_first_program_is_built_and_runs() {
    let test = std::env::current_exe().unwrap();
    let library = test.parent().unwrap();
    let crates = concat!(env!("CARGO_MANIFEST_DIR"), "/..");
    let program = format!("{}/hello", env!("CARGO_TARGET_TMPDIR"));
    let built = std::process::Command::new("gcc")
        .args(["-std=c99", "-Wall", "-Wextra", "-Werror", "-pedantic", "-o", &program])
        .arg(format!("{crates}/../examples/sisci/hello.c"))
        .arg(format!("-I{crates}/sisci/include"))
        .arg(format!("-L{}", library.display()))
        .args(["-lsisci", &format!("-Wl,-rpath,{}", library.display())])
        .output()
        .unwrap();
    assert!(built.status.success(), "{}", text(&built));
    for rack in racks() {
        let (receiver, mut sender) = (rack.on("alpha", &program), rack.on("beta", &program));
        sender.arg("4");
        assert_eq!(rack.both(receiver, sender)[0], "received: stored by another host\n");
    }
}
