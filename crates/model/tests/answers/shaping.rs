//! Tenants that devices and switches shape, with the keys that users have.

use proptest::prelude::*;

use crate::lab::{flow, link, rate, run, tried};

/// A host with two GPUs and a drive below one switch, which is linked to it by Gen4 x8.
fn rack() -> String {
    let mut rack = "name = \"one\"\n[hosts.near]\niommu = false\n[fabric.switches.board]\nhost = \"near\"\n\
                    [hosts.near.devices.gpu0]\nkind = \"gpu\"\n[hosts.near.devices.gpu1]\nkind = \"gpu\"\n\
                    [hosts.near.devices.nvme0]\nkind = \"nvme\"\nsize = \"1 TiB\"\n"
        .to_owned();
    rack += &link("near", "board", 4, 8);
    for device in ["gpu0", "gpu1", "nvme0"] {
        rack += &link("board", &format!("near/{device}"), 4, 8);
    }
    rack
}

fn moves(name: &str, tenant: &str, kind: &str, device: &str, more: &str) -> String {
    format!(
        "[flows.{name}]\nkind = \"{kind}\"\ntenant = \"{tenant}\"\nfrom = \"near/{device}\"\nto = \"near\"\n{more}\n"
    )
}

fn two(kind: &str, [one, other]: [&str; 2], more: &str) -> String {
    "duration = \"2 ms\"\n".to_owned()
        + &moves("a", "shop", kind, one, more)
        + &moves("b", "lab", kind, other, more)
}

fn shares(part: &str, shop: &str, lab: &str) -> String {
    format!("[shaping.\"{part}\".shop]\n{shop}\n[shaping.\"{part}\".lab]\n{lab}\n")
}

fn ratio(workload: &str) -> (f64, f64) {
    let results = run(&rack(), workload);
    let [one, other] = ["a", "b"].map(|name| rate(&results, name));
    (one / other, one + other)
}

#[test]
fn a_device_gives_tenants_what_they_weigh() {
    for (kind, sizes) in
        [("write", ["64 KiB"; 2]), ("read", ["4 KiB"; 2]), ("write", ["1 KiB", "64 KiB"])]
    {
        // Deep enough for short jobs to wait at the device, too.
        let of = |nth: usize| format!("size = \"{}\"\ndepth = 512", sizes[nth]);
        let flows = "duration = \"2 ms\"\n".to_owned()
            + &moves("a", "shop", kind, "gpu0", &of(0))
            + &moves("b", "lab", kind, "gpu0", &of(1));
        let (_, all) = ratio(&flows);
        for weight in [1.0, 3.0] {
            let (ratio, shaped) =
                ratio(&(flows.clone() + &shares("near/gpu0", &format!("weight = {weight}"), "")));
            // A message's cost is its time on what it uses most: short ones have more around their bytes.
            assert!((ratio / weight - 1.0).abs() < 0.1, "{kind} {sizes:?} {weight}: {ratio}");
            assert!(shaped > 0.9 * all, "{kind} {sizes:?} {weight}: {shaped} of {all}");
        }
    }
}

#[test]
fn a_device_keeps_to_a_tenants_rate_and_gives_others_the_rest() {
    let flows = two("write", ["gpu0"; 2], "size = \"16 KiB\"\ndepth = 64");
    let results = run(&rack(), &(flows + &shares("near/gpu0", "rate = \"2 GB/s\"", "")));
    assert!((rate(&results, "a") / 2e9 - 1.0).abs() < 0.05, "{}", rate(&results, "a"));
    assert!(rate(&results, "b") > 11e9, "{}", rate(&results, "b"));
    assert_eq!(flow(&results, "a").bottleneck, "near/gpu0: rate of shop");
    assert_ne!(flow(&results, "b").bottleneck, "near/gpu0: rate of lab");
}

#[test]
fn operations_are_counted_by_jobs() {
    let flow = |name: &str, tenant: &str| {
        format!(
            "[flows.{name}]\nkind = \"nvme-read\"\nhost = \"near\"\ndevice = \"near/nvme0\"\ntenant = \"{tenant}\"\n\
             depth = 64\nrandom = true\nservice = {{ lognormal = \"10 us\", sigma = 0.15 }}\n"
        )
    };
    let flows = "duration = \"5 ms\"\n".to_owned() + &flow("a", "shop") + &flow("b", "lab");
    let results = run(&rack(), &(flows + &shares("near/nvme0", "operations = 100000", "")));
    let [one, other] = ["a", "b"].map(|name| crate::lab::flow(&results, name).jobs_per_second);
    assert!((one / 1e5 - 1.0).abs() < 0.03, "{one}");
    assert!(other > 1e6, "{other}");
}

#[test]
fn a_switch_gives_tenants_what_they_weigh() {
    for kind in ["write", "read"] {
        let flows = two(kind, ["gpu0", "gpu1"], "size = \"64 KiB\"\ndepth = 4");
        let (_, all) = ratio(&flows);
        for weight in [1.0, 4.0] {
            let (ratio, shaped) =
                ratio(&(flows.clone() + &shares("board", &format!("weight = {weight}"), "")));
            if kind == "write" {
                assert!((ratio / weight - 1.0).abs() < 0.05, "{weight}: {ratio}");
            } else {
                // What comes back is not in the switch's queue for long: what was asked for decides.
                assert!(ratio >= 0.95, "{weight}: {ratio}");
            }
            assert!(shaped > 0.98 * all, "{kind} {weight}: {shaped} of {all}");
        }
    }
}

#[test]
fn a_switch_keeps_to_a_tenants_rate_and_gives_others_the_rest() {
    for kind in ["write", "read"] {
        let flows = two(kind, ["gpu0", "gpu1"], "size = \"64 KiB\"\ndepth = 4");
        let shaped = flows + &shares("board", "rate = \"1 GB/s\"\nburst = \"4 KiB\"", "");
        let results = run(&rack(), &shaped);
        assert!((rate(&results, "a") / 1e9 - 1.0).abs() < 0.03, "{kind} {}", rate(&results, "a"));
        assert!(flow(&results, "a").bottleneck == "board: rate of shop");
        if kind == "write" {
            // Those that come by another link do not wait behind them.
            assert!(rate(&results, "b") > 10e9, "{}", rate(&results, "b"));
        }
    }
}

#[test]
fn what_cannot_be_shaped_is_refused_with_its_place() {
    let flows = two("write", ["gpu0", "gpu1"], "");
    let cases = [
        ("[shaping.near.shop]\nweight = 2", "`near` is a host"),
        ("[shaping.sw.shop]\nweight = 2", "the rack has no `sw`"),
        ("[shaping.board.other]\nweight = 2", "no flow has the tenant `other`"),
        ("[shaping.board.shop]\noperations = 2", "`operations` is given for a switch"),
        ("[shaping.board.shop]\nweight = 0", "`weight` is 0"),
        ("[shaping.board.shop]\nweigth = 1", "unknown key `weigth`"),
        ("[shaping]\nboard = 3", "`board` is the number 3"),
    ];
    for (text, expected) in cases {
        let said = tried(&rack(), &(flows.clone() + text)).unwrap_err();
        assert!(said.contains(expected), "{said}");
    }
    let steps = "[flows.a]\nkind = \"steps\"\ntenant = \"shop\"\nsteps = [{ write = \"64 B\", from = \"near/gpu0\", to = \"near\" }]\n\
                 [shaping.\"near/gpu0\".shop]\nweight = 2\n";
    let said = tried(&rack(), steps).unwrap_err();
    assert!(said.contains("`near/gpu0` shapes"), "{said}");
}

fn share() -> impl Strategy<Value = (u32, Option<u64>)> {
    (1u32..20, prop::option::of(1u64..20_000))
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(30))]

    /// Whatever the shares, all jobs end, and no tenant gets more than its rate and burst.
    #[test]
    fn shaping_loses_nothing_and_keeps_rates(
        at_device in any::<bool>(),
        of in [share(), share()],
        kinds in [any::<bool>(), any::<bool>()],
        size in 1u64..20_000,
    ) {
        let names = ["shop", "lab"];
        let part = if at_device { "near/gpu0" } else { "board" };
        let mut workload = "warmup = \"0 ns\"\nduration = \"40 ms\"\n".to_owned();
        for (nth, name) in names.iter().enumerate() {
            let kind = if kinds[nth] { "read" } else { "write" };
            workload += &moves(["a", "b"][nth], name, kind, "gpu0", &format!("size = {size}\ndepth = 8\ncount = 200"));
        }
        for (name, (weight, rate)) in names.iter().zip(of) {
            let rate = rate.map_or(String::new(), |mb| format!("rate = \"{mb} MB/s\"\nburst = \"1 KiB\"\n"));
            workload += &format!("[shaping.\"{part}\".{name}]\nweight = {weight}\n{rate}");
        }
        let results = run(&rack(), &workload);
        for (nth, (_, rate)) in of.into_iter().enumerate() {
            let flow = &results.flows[nth];
            let bytes = flow.bytes_per_second * results.seconds;
            let most = rate.map_or(f64::MAX, |mb| mb as f64 * 1e6 * results.seconds + 1024.0 + (size as f64).max(32.0 * 256.0));
            prop_assert!(bytes <= most, "{bytes} of {most}");
            let enough = 200.0 * size as f64 <= rate.map_or(f64::MAX, |mb| mb as f64 * 1e6 * results.seconds * 0.9);
            prop_assert!(!enough || kinds[0] != kinds[1] || flow.jobs == 200, "{} {rate:?}", flow.jobs);
        }
    }
}
