//! How many jobs a device works on at a time: what the workload says, else what its class does.

use crate::lab::{flow, run};

const RACK: &str = "name = \"lab\"\n[hosts.near]\n[hosts.near.devices.c]\nkind = \"coprocessor\"\n\
                    [hosts.near.devices.g]\nkind = \"gpu\"\n";

/// Name of the flow to a function.
fn name(function: &str) -> String {
    function.replace('.', "-")
}

/// Many jobs of 10 us each on a function.
fn jobs(function: &str, more: &str) -> String {
    format!(
        "[flows.{}]\nkind = \"ring\"\nhost = \"near\"\ndevice = \"near/{function}\"\n\
         service = \"10 us\"\ndepth = 32\nsize = \"64 B\"\n{more}",
        name(function)
    )
}

/// How many are done at a time, and by what they are held up.
fn at_a_time(workload: &str, function: &str) -> (f64, String) {
    let results = run(RACK, &format!("duration = \"4 ms\"\n{workload}"));
    let found = flow(&results, &name(function));
    (found.jobs_per_second * 10e-6, found.bottleneck.clone())
}

#[test]
fn a_class_says_how_many_jobs_its_devices_work_on() {
    let near = |found: f64, expected: f64| (found / expected - 1.0).abs() < 0.02;
    let (found, bottleneck) = at_a_time(&jobs("g", ""), "g");
    assert!(near(found, 1.0), "{found}");
    assert_eq!(bottleneck, "near/g: medium");
    let (found, bottleneck) = at_a_time(&jobs("c.vf1", ""), "c.vf1");
    assert!(near(found, 4.0), "{found}");
    assert_eq!(bottleneck, "near/c: medium");
    let (found, _) = at_a_time(&jobs("c.vf1", "units = 2\n"), "c.vf1");
    assert!(near(found, 2.0), "what the workload says counts: {found}");
    // All functions of the device have its units in common.
    let both = jobs("c.vf1", "") + &jobs("c.vf2", "");
    for function in ["c.vf1", "c.vf2"] {
        let (found, bottleneck) = at_a_time(&both, function);
        assert!(near(found, 2.0), "{function}: {found}");
        assert_eq!(bottleneck, "near/c: medium");
    }
}
