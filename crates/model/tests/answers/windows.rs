//! Rates count bytes as they move, whatever the length of jobs, and say how sure they are.

use rackbus_model::wire::Wire;

use crate::lab::{flow, link, rate, run};

/// A device that writes to its host over Gen3 x8, a payload of 512 at a time.
fn rack() -> String {
    let rack = "name = \"one\"\n[hosts.near]\niommu = false\nmemory = \"64 GiB\"\n\
                [hosts.near.devices.gpu0]\nkind = \"gpu\"\n[timing.device]\nmps = \"512 B\"\n";
    rack.to_owned() + &link("near", "near/gpu0", 3, 8)
}

fn writes(size: &str, duration: &str) -> String {
    format!(
        "duration = \"{duration}\"\n[flows.write]\nkind = \"write\"\nfrom = \"near/gpu0\"\nto = \"near\"\n\
         size = \"{size}\"\ndepth = 2\n"
    )
}

#[test]
fn a_rate_does_not_depend_on_the_length_of_jobs() {
    let full = Wire::pcie(3, 8).rate() * 512.0 / 536.0;
    for size in ["4 KiB", "1 MiB", "4 MiB", "16 MiB", "64 MiB"] {
        let results = run(&rack(), &writes(size, "2 ms"));
        let rate = rate(&results, "write");
        assert!((rate / full - 1.0).abs() < 0.01, "{size}: {rate} of {full}");
        let flow = flow(&results, "write");
        let confidence = flow.confidence.unwrap();
        assert!(confidence < 0.01, "{size}: {confidence}");
        // No job of 16 MiB ends within 2 ms: its latency is not known, and that is said.
        let doubt = flow.doubt.as_deref().unwrap_or_default();
        let none = doubt.starts_with("no job ended, so latencies are not known");
        assert_eq!(flow.jobs == 0, none, "{size}: {doubt}");
        // Of few, the rate is known all the same.
        assert_eq!(flow.jobs < 100, !doubt.is_empty(), "{size}: {doubt}");
    }
}

/// Of two jobs, once both were the p99, without a word.
#[test]
fn the_slowest_of_few_jobs_is_told_to_be_no_p99() {
    let doubt = |size: &str, duration: &str| {
        let results = run(&rack(), &writes(size, duration));
        let flow = flow(&results, "write");
        assert!((2..100).contains(&flow.jobs));
        (flow.latency_ns.least < flow.latency_ns.greatest, flow.doubt.clone())
    };
    let (vary, few) = doubt("1 MiB", "2 ms");
    let few = few.unwrap_or_default();
    let told = few.ends_with("so p99 is the slowest of them; make `duration` longer");
    assert!(vary && told, "{few}");
    // Where all take the same time, each of them is.
    assert_eq!(doubt("64 KiB", "200 us"), (false, None));
}

#[test]
fn a_window_that_is_too_short_to_tell_says_so() {
    let workload = "duration = \"100 us\"\n[flows.write]\nkind = \"write\"\nfrom = \"near/gpu0\"\n\
                    to = \"near\"\nsize = \"4 KiB\"\npoisson = \"20 us\"\n";
    let few = run(&rack(), workload);
    assert!(flow(&few, "write").doubt.as_deref().unwrap_or_default().contains("longer"));
    let many = run(&rack(), &workload.replace("100 us", "300 ms"));
    assert_eq!(flow(&many, "write").doubt, None);
    let rate = rate(&many, "write");
    let confidence = flow(&many, "write").confidence.unwrap();
    let expected = 4096.0 / 20e-6;
    assert!((rate / expected - 1.0).abs() < 2.0 * confidence, "{rate} of {expected}: {confidence}");
    assert!((0.005..0.05).contains(&confidence), "{confidence}");
}

#[test]
fn bytes_of_steps_add_up_to_the_jobs() {
    let rack = "name = \"one\"\n[hosts.near]\niommu = false\n[hosts.near.devices.nvme0]\nkind = \"nvme\"\n\
                size = \"1 GiB\"\n";
    for kind in ["nvme-read", "nvme-write"] {
        let workload = format!(
            "duration = \"20 ms\"\nwarmup = \"0 ns\"\n[flows.io]\nkind = \"{kind}\"\nhost = \"near\"\n\
             device = \"near/nvme0\"\nsize = \"4 KiB\"\ndepth = 4\ncount = 100\n"
        );
        let results = run(rack, &workload);
        assert_eq!(flow(&results, "io").jobs, 100);
        let bytes = rate(&results, "io") * results.seconds;
        assert!((bytes - 409_600.0).abs() < 1.0, "{bytes}");
    }
}
