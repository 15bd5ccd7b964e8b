//! Memory of one's own: what a device or a processor has without crossing the fabric, and bytes of steps whose
//! flow does not say how many count.

use crate::lab::{flow, rate, run, shared, tried, two_hosts};

fn near(one: f64, other: f64) -> bool {
    (one / other - 1.0).abs() < 0.01
}

fn moves(kind: &str, keys: &[(&str, &str)]) -> String {
    let keys: String = keys.iter().map(|(key, end)| format!("{key} = \"{end}\"\n")).collect();
    format!("[flows.a]\nkind = \"{kind}\"\n{keys}size = \"64 KiB\"\ndepth = 8\n")
}

/// With an IOMMU, a device's copy from its own memory once went up to the root complex and back, and got an eighth of
/// what the device's write gets.
#[test]
fn a_device_reaches_its_own_memory_without_the_fabric() {
    for iommu in [false, true] {
        let rack = two_hosts(iommu);
        for (kind, keys, copy) in [
            (
                "write",
                [("from", "near/gpu0"), ("to", "far")],
                [("from", "near/gpu0"), ("to", "far")],
            ),
            (
                "read",
                [("from", "near/gpu0"), ("to", "far")],
                [("from", "far"), ("to", "near/gpu0")],
            ),
        ] {
            let plain = run(&rack, &moves(kind, &keys));
            let copied =
                run(&rack, &moves("copy", &[&[("by", "near/gpu0")][..], &copy[..]].concat()));
            let [one, other] = [&plain, &copied].map(|results| rate(results, "a"));
            assert!(near(one, other), "iommu {iommu}, {kind}: {one} against {other}");
        }
        let inside = run(&rack, &moves("write", &[("from", "near/gpu0"), ("to", "near/gpu0")]));
        assert_eq!(flow(&inside, "a").hops, 0);
        assert!(inside.links.iter().all(|link| link.there + link.back == 0.0));
    }
}

/// They were once answered as uncached accesses: 125 MB/s of reads, and 120 MB/s of a copy to another host.
#[test]
fn a_processors_accesses_of_its_own_memory_are_refused() {
    let rack = two_hosts(true);
    for workload in [
        moves("read", &[("from", "near"), ("to", "near")]),
        moves("write", &[("from", "near"), ("to", "near")]),
        moves("write", &[("from", "near"), ("to", "near@0x10000")]),
        moves("request", &[("from", "near"), ("to", "near")]),
        moves("copy", &[("by", "near"), ("from", "near"), ("to", "far")]),
        "[flows.a]
kind = \"steps\"
steps = [{ load = \"8 B\", from = \"near\", to = \"near\" }]
"
        .to_owned(),
    ] {
        let said = tried(&rack, &workload).unwrap_err();
        let expected =
            "`near` reaches its own memory by its caches, which are not modelled; name another end";
        assert!(said.starts_with(expected), "{said}");
    }
}

/// A job of steps once counted for 4 KiB, whatever they moved.
#[test]
fn a_job_of_steps_counts_for_what_its_steps_move() {
    let rack = two_hosts(false);
    let steps = |size: &str, steps: &str| {
        format!("[flows.a]\nkind = \"steps\"\n{size}depth = 2\nsteps = [{steps}]\n")
    };
    let read = "{ read = \"8 KiB\", from = \"near/gpu0\", to = \"far\" }";
    let copy = "{ copy = \"4 KiB\", by = \"near/gpu0\", from = \"far\", to = \"near\" }";
    for (moved, bytes) in [
        (read.to_owned(), 8192.0),
        (copy.to_owned(), 4096.0),
        (format!("{{ each = 3, apart = \"8 KiB\", steps = [{read}] }}"), 24576.0),
        (format!("{{ together = [[{read}], [{copy}]] }}"), 12288.0),
    ] {
        let found = run(&rack, &steps("", &moved));
        let jobs = 1e9 / flow(&found, "a").latency_ns.mean * 2.0;
        assert!((rate(&found, "a") / (jobs * bytes) - 1.0).abs() < 0.05, "{moved}");
        assert!(near(flow(&found, "a").jobs_per_second * bytes, rate(&found, "a")), "{moved}");
        let level = &shared(&rack, &steps("", &moved)).flows[0];
        let counts = level.bytes_per_second.zip(level.jobs_per_second);
        assert!(counts.is_none_or(|(rate, jobs)| near(jobs * bytes, rate)), "{moved}");
    }
    let said = run(&rack, &steps("size = \"1 KiB\"\n", read));
    assert!(near(flow(&said, "a").jobs_per_second * 1024.0, rate(&said, "a")));
}

/// Such a flow once had a rate of bytes.
#[test]
fn steps_that_move_nothing_have_jobs_and_no_bytes() {
    let rack = two_hosts(false);
    let workload = "[flows.a]\nkind = \"steps\"\ndepth = 2\nsteps = [{ wait = \"1 us\" }]\n";
    let found = run(&rack, workload);
    assert_eq!(rate(&found, "a"), 0.0);
    assert!(near(flow(&found, "a").jobs_per_second, 2e6), "{:?}", flow(&found, "a"));
    assert_eq!(flow(&found, "a").doubt, None);
    let level = &shared(&rack, workload).flows[0];
    assert_eq!((level.fair_bytes_per_second, level.bytes_per_second), (0.0, Some(0.0)));
    let jobs = [level.jobs_per_second.unwrap(), level.fair_jobs_per_second];
    assert!(jobs.iter().all(|jobs| near(*jobs, 2e6)), "{level:?}");
    let random = workload.replace("depth = 2", "random = true\npoisson = \"1 us\"");
    assert_eq!(rate(&run(&rack, &random), "a"), 0.0);
    let said = tried(&rack, &workload.replace("depth = 2", "rate = \"1 GB/s\"")).unwrap_err();
    let expected = "workload.toml:3:8: `rate` is given, and no bytes move; give `depth`, `every` or `poisson`, or a `size`";
    assert!(said.starts_with(expected), "{said}");
}
