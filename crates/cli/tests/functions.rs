//! One drive lent to several hosts: each function has a namespace of its own, within limits of its own.

mod support;

use rackbus_control::api::Lease;
use support::{Rack, open, pattern};

const RACK: &str = "name = \"lab\"\n[control]\nlease_ttl = \"10 s\"\nreturn_grace = \"2 s\"\n\
                    [hosts.alpha.devices.nvme0]\nkind = \"nvme\"\nsize = \"16 MiB\"\n\
                    [hosts.alpha.devices.nvme0.functions]\n\
                    vf1 = { size = \"4 MiB\" }\n\
                    vf2 = { size = \"8 MiB\", operations = 200 }\n\
                    [hosts.beta]\n[hosts.gamma]\n";

const BLOCK: usize = 4096;

fn borrow(rack: &Rack, function: &str, host: &str, isolation: &str) -> Lease {
    let borrow = ["borrow", function, "--for", host, "--isolation", isolation];
    serde_json::from_value(rack.json(&borrow)).unwrap()
}

#[test]
fn the_functions_of_one_drive_are_lent_to_different_hosts_and_keep_apart() {
    let mut rack = Rack::up(RACK);
    let said = rack.bad(1, &["borrow", "alpha/nvme0", "--for", "beta"]);
    assert!(said.contains("alpha/nvme0"), "{said}");
    let lease = borrow(&rack, "alpha/nvme0.vf1", "beta", "shared");
    let mut one = open(&lease);
    let other = borrow(&rack, "alpha/nvme0.vf2", "gamma", "strict");
    let mut two = open(&other);
    assert_eq!(one.info().blocks * u64::from(one.info().block_size), 4 << 20);
    assert_eq!(two.info().blocks * u64::from(two.info().block_size), 8 << 20);
    for lba in [0, 8, (4 << 20) / 512 - 8] {
        one.write(lba, &pattern(lba + 1, BLOCK), true).unwrap();
        two.write(lba, &pattern(lba + 2, BLOCK), true).unwrap();
    }
    one.write((4 << 20) / 512, &pattern(9, BLOCK), false)
        .expect_err("a write beyond its namespace");
    one.deallocate(8, 8).unwrap();
    let mut block = vec![0; BLOCK];
    one.read(8, &mut block).unwrap();
    assert_eq!(block, vec![0; BLOCK]);
    two.read(8, &mut block).unwrap();
    assert_eq!(block, pattern(10, BLOCK));

    // A node that continues in place keeps its functions; one that died finds their data where it was.
    rack.restart_in_place("alpha");
    two.read(0, &mut block).unwrap();
    assert_eq!(block, pattern(2, BLOCK));
    one.read(0, &mut block).unwrap();
    assert_eq!(block, pattern(1, BLOCK));
    drop((one, two));
    rack.give_back(&lease);
    rack.give_back(&other);
    rack.process(Some("alpha")).crash();
    rack.restart(Some("alpha"));
    rack.wait_up(&["alpha", "beta", "gamma"]);
    let mut one = open(&borrow(&rack, "alpha/nvme0.vf1", "gamma", "shared"));
    let last = (4 << 20) / 512 - 8;
    one.read(last, &mut block).unwrap();
    assert_eq!(block, pattern(last + 1, BLOCK));
}

#[test]
fn a_functions_limit_holds_wherever_its_front_runs_and_what_waits_is_counted() {
    let rack = Rack::up(RACK);
    for isolation in ["shared", "strict"] {
        let lease = borrow(&rack, "alpha/nvme0.vf2", "beta", isolation);
        let mut drive = open(&lease);
        let mut block = vec![0; BLOCK];
        let begun = std::time::Instant::now();
        // 200 each second, of which ten come at once.
        for _ in 0..110 {
            drive.read(0, &mut block).unwrap();
        }
        let took = begun.elapsed().as_secs_f64();
        assert!(took > 0.45, "{isolation}: 110 operations took {took} s");
        drop(drive);
        rack.give_back(&lease);
    }
    rack.wait(async |client| {
        let devices = client.devices().await.ok()?;
        let device = devices.into_iter().find(|device| device.function == "alpha/nvme0.vf2")?;
        device.report.filter(|report| report.shaping.get("delayed").is_some_and(|count| *count > 1))
    });
    let listed = rack.good(&["devices"]);
    assert!(listed.contains("8 MiB, 512 B blocks, file, 200 op/s"), "{listed}");
}
