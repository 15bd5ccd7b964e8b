//! What the rack file lets devices do in a second bounds them in `rackbus model`, as their classes read it.

use std::process::Command;

use serde_json::Value;

const DRIVE: &str = "[hosts.alpha.devices.nvme0]\nkind = \"nvme\"\nsize = \"1 GiB\"\n";
const CARD: &str = "[hosts.alpha.devices.nic0]\nkind = \"nic\"\nfunctions = 2\n";
const READS: &str = "kind = \"nvme-read\"\nhost = \"alpha\"\ndepth = 64\nrandom = true\n";

/// The first flow that `rackbus model run` answers with: its rate, and what holds it up.
fn answer(devices: &str, flow: &str, more: &[&str]) -> (f64, String) {
    let folder = tempfile::tempdir().unwrap();
    let write = |name: &str, text: String| {
        let path = folder.path().join(name);
        std::fs::write(&path, text).unwrap();
        path
    };
    let rack = write("rack.toml", format!("name = \"lab\"\n[hosts.alpha]\n{devices}"));
    let workload = write("workload.toml", format!("duration = \"4 ms\"\n[flows.a]\n{flow}"));
    let mut rackbus = Command::new(env!("CARGO_BIN_EXE_rackbus"));
    let output = rackbus
        .args(["model", "run", "--json"])
        .args([rack, workload])
        .args(more)
        .output()
        .unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let answer: Value = serde_json::from_slice(&output.stdout).unwrap();
    let flow = &answer["flows"][0];
    let rate = flow["bytes_per_second"].as_f64().unwrap();
    (rate, flow["bottleneck"].as_str().unwrap().to_owned())
}

fn near(found: f64, expected: f64) -> bool {
    (found / expected - 1.0).abs() < 0.02
}

#[test]
fn drives_and_their_functions_are_kept_to_their_rates_and_operations() {
    let parts = "rate = \"500 MB/s\"\n[hosts.alpha.devices.nvme0.functions]\nvf1 = { size = \"4 MiB\" }\n\
                 vf2 = { size = \"4 MiB\", operations = 20000 }\n";
    for (keys, function, size, expected, key) in [
        ("rate = \"500 MB/s\"\n", "nvme0", 4096, 500e6, "rate"),
        ("operations = 50000\n", "nvme0", 4096, 204.8e6, "operations"),
        (parts, "nvme0.vf1", 4096, 500e6, "rate"),
        (parts, "nvme0.vf2", 4096, 81.92e6, "operations"),
        (parts, "nvme0.vf2", 65536, 500e6, "rate"),
    ] {
        let flow = format!("{READS}device = \"alpha/{function}\"\nsize = {size}\n");
        let expected_name = format!("alpha/{function}: {key} in the rack file");
        for level in [&[][..], &["--flow-level"]] {
            let (rate, name) = answer(&format!("{DRIVE}{keys}"), &flow, level);
            assert!(near(rate, expected), "{function}, {level:?}: {rate}");
            assert_eq!(name, expected_name);
        }
    }
    let (free, _) = answer(DRIVE, &format!("{READS}device = \"alpha/nvme0\"\n"), &[]);
    assert!(free > 2e9, "{free}");
}

#[test]
fn network_functions_send_and_receive_within_their_rates() {
    let devices = format!(
        "{CARD}rate = \"8 Gbit/s\"\n[hosts.alpha.devices.nic0.function.vf2]\nrate = \"4 Gbit/s\"\n"
    );
    for (function, kind, expected) in
        [("vf1", "read", 1e9), ("vf1", "write", 1e9), ("vf2", "write", 500e6)]
    {
        let flow = format!(
            "kind = \"{kind}\"\nfrom = \"alpha/nic0.{function}\"\nto = \"alpha\"\ndepth = 32\n"
        );
        let (rate, name) = answer(&devices, &flow, &[]);
        assert!(near(rate, expected), "{function} {kind}: {rate}");
        assert_eq!(name, format!("alpha/nic0.{function}: rate in the rack file"));
    }
}
