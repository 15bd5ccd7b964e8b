//! Service levels of a rack of real processes: changed while they are used, kept for the device's own host, and on
//! record.

mod support;

use std::path::Path;
use std::time::{Duration, Instant};

use rackbus_driver::accel::{Accel, AccelOptions, MessageWork};
use rackbus_spec::accel::Operation;
use serde_json::Value;
use support::{PATIENCE, Rack};

fn rack(keys: &str) -> Rack {
    Rack::up(&format!(
        "name = \"lab\"\n[control]\nlease_ttl = \"10 s\"\nreturn_grace = \"2 s\"\n\
         [hosts.alpha.devices.accel0]\nkind = \"accelerator\"\nfunctions = 2\n{keys}\n[hosts.beta]\n"
    ))
}

fn open(lease: &Value) -> Accel {
    let options = AccelOptions { depth: 32, ..AccelOptions::default() };
    Accel::open(Path::new(lease["socket"].as_str().unwrap()), PATIENCE, options).unwrap()
}

/// Has so many megabytes checksummed, and waits for them.
fn use_it(accel: &mut Accel, megabytes: usize) {
    let stages = [(Operation::Crc32c, 0)];
    let work = MessageWork { stages: &stages, ..MessageWork::default() };
    let descriptor = accel.describe(&work, (0, 64 << 10), (1 << 20, 4)).unwrap();
    for _ in 0..megabytes {
        for _ in 0..16 {
            accel.push(0, &descriptor).unwrap();
        }
        accel.ring(0).unwrap();
        for _ in 0..16 {
            assert_eq!(accel.wait(0).unwrap().status, 0);
        }
    }
}

/// What `rackbus accel list` says of a function, when that is as wanted.
fn listed(rack: &Rack, function: &str, is: impl Fn(&Value) -> bool) -> Value {
    let begun = Instant::now();
    loop {
        let list = rack.json(&["accel", "list"]);
        let of = list.as_array().unwrap().iter().find(|of| of["function"] == function).unwrap();
        if is(of) {
            return of.clone();
        }
        assert!(begun.elapsed() < PATIENCE, "{of:#}");
        std::thread::sleep(Duration::from_millis(50));
    }
}

fn events(rack: &Rack) -> Vec<String> {
    let events = rack.json(&["events"]);
    let text = |event: &Value| event["text"].as_str().unwrap().to_owned();
    events.as_array().unwrap().iter().map(text).collect()
}

#[test]
fn a_level_is_changed_while_it_is_used_refused_with_what_fits_and_on_record() {
    let mut rack = rack("");
    let level = "crc32c 80 Mbit/s message 64 KiB";
    let lease = rack.json(&["borrow", "--accel", level, "--for", "beta"]);
    let mut accel = open(&lease);
    use_it(&mut accel, 1);
    rack.good(&["accel", "level", "1", level]);
    let said = rack.good(&["accel", "level", "1", "crc32c 160 Mbit/s message 64 KiB"]);
    assert!(
        said.contains("beta has `crc32c 160 Mbit/s message 64 KiB` of alpha/accel0.vf1"),
        "{said}"
    );
    // Whoever uses it continues.
    use_it(&mut accel, 1);
    assert_eq!(rack.json(&["leases"])[0]["level"], "crc32c 160 Mbit/s message 64 KiB");
    let refused = rack.bad(1, &["accel", "level", "alpha/accel0.vf1", "crc32c 90000 Gbit/s"]);
    assert!(refused.contains("would fit"), "{refused}");
    assert!(refused.contains("`crc32c 160 Mbit/s message 64 KiB` stays in force"), "{refused}");
    assert_eq!(rack.json(&["leases"])[0]["level"], "crc32c 160 Mbit/s message 64 KiB");
    let refused = rack.bad(1, &["accel", "level", "1", "fast"]);
    assert!(refused.contains("there is no rate"), "{refused}");
    rack.bad(1, &["accel", "level", "7", "none"]);
    rack.bad(1, &["accel", "level", "alpha/accel0.vf2", "none"]);
    // The level outlives the control plane.
    rack.process(None).crash();
    rack.restart(None);
    rack.wait_up(&["alpha", "beta"]);
    let report = listed(&rack, "alpha/accel0.vf1", |of| {
        of["report"]["lease"]["shaping"]["ingress_bytes"].as_u64() >= Some(2 << 20)
    });
    assert_eq!(report["report"]["level"], "crc32c 160 Mbit/s message 64 KiB");
    use_it(&mut accel, 1);
    rack.good(&["accel", "level", "1", "none"]);
    listed(&rack, "alpha/accel0.vf1", |of| of["report"]["level"].is_null());
    drop(accel);
    rack.good(&["return", "1"]);
    let told = events(&rack);
    let one = |what: &str| {
        assert_eq!(told.iter().filter(|text| text.contains(what)).count(), 1, "{told:#?}")
    };
    one("beta has the level `crc32c 160 Mbit/s message 64 KiB` of alpha/accel0.vf1 from now on");
    one("beta was refused the level `crc32c 90000 Gbit/s` of alpha/accel0.vf1");
    one("what lease 1 of alpha/accel0.vf1 used: 48 operations (0 failed) took 3.1 MB in");
    let metrics = rack.good(&["metrics", "alpha"]);
    let counter = "rackbus_function_shaping_total{function=\"alpha/accel0.vf1\",host=\"alpha\",role=\"lender\",what=\"violations\"}";
    assert!(metrics.contains(counter), "{metrics}");
}

/// The device's own host is a tenant, and what is kept for it nobody else gets.
#[test]
fn the_devices_own_host_has_the_level_that_is_kept_for_it() {
    let own = "crc32c 80 Mbit/s message 64 KiB weight 3";
    let rack = rack(&format!("provider = \"{own}\""));
    let lease = rack.json(&["borrow", "alpha/accel0.vf1", "--for", "alpha"]);
    listed(&rack, "alpha/accel0.vf1", |of| of["report"]["level"] == own);
    use_it(&mut open(&lease), 1);
    rack.json(&["borrow", "alpha/accel0.vf2", "--for", "beta"]);
    listed(&rack, "alpha/accel0.vf2", |of| {
        of["state"] == "lent" && of["report"]["level"].is_null()
    });
    rack.good(&["return", &lease["lease"].to_string()]);
    listed(&rack, "alpha/accel0.vf1", |of| of["report"]["level"].is_null());
}
