//! What parts are like: links of a length, hosts that differ, roots and devices that bound what passes, drives
//! whose jobs do not all take the same.

use crate::lab::{flow, link, rate, run, tried, two_hosts};

fn one(memory: &str, more: &str) -> String {
    format!(
        "name = \"one\"\n[hosts.near]\niommu = false\nmemory = \"{memory}\"\n[hosts.near.devices.gpu0]\n\
         kind = \"gpu\"\n[hosts.near.devices.gpu1]\nkind = \"gpu\"\n[hosts.near.devices.nvme0]\n\
         kind = \"nvme\"\nsize = \"1 TiB\"\n[hosts.near.devices.nvme1]\nkind = \"nvme\"\nsize = \"1 TiB\"\n{more}"
    )
}

fn moves(kind: &str, to: &str, size: &str, depth: u32) -> String {
    format!(
        "[flows.a]\nkind = \"{kind}\"\nfrom = \"near/gpu0\"\nto = \"{to}\"\nsize = \"{size}\"\n\
         depth = {depth}\n"
    )
}

#[test]
fn a_longer_link_takes_longer() {
    let latency = |length: &str| {
        let more = link("near", "near/gpu0", 4, 16) + &format!("length = \"{length}\"\n");
        flow(&run(&one("8 GiB", &more), &moves("read", "near", "64 B", 1)), "a").latency_ns.mean
    };
    // There and back, 5 ns a metre.
    let more = latency("12 m") - latency("2 m");
    assert!((more - 100.0).abs() < 0.01, "{more}");
    let refused =
        tried(&one("8 GiB", &(link("near", "near/gpu0", 4, 16) + "length = \"2\"\n")), "");
    let said = refused.unwrap_err();
    assert!(said.starts_with("rack.toml:19:10: `length` is 2, which is no length"), "{said}");
}

#[test]
fn hosts_differ_and_are_named() {
    let latency = |rack: &str, to: &str| {
        let results = run(rack, &moves("read", to, "64 B", 1));
        let hosts: Vec<String> = results.hosts.iter().map(|host| host.profile.clone()).collect();
        (flow(&results, "a").latency_ns.mean, hosts.join(" "))
    };
    let plain = two_hosts(false);
    let mixed = plain.replace("[hosts.far]\n", "[hosts.far]\nprofile = \"desktop\"\n");
    assert_eq!(latency(&plain, "far").1, "sapphire-rapids sapphire-rapids");
    assert_eq!(latency(&mixed, "far").1, "sapphire-rapids desktop");
    assert!(latency(&mixed, "far").0 < latency(&plain, "far").0 - 100.0);
    assert_eq!(latency(&mixed, "near").0, latency(&plain, "near").0);
    let slow = plain + "[timing.hosts.far.root]\nlatency = \"1200 ns\"\n";
    let [before, after] = [&mixed, &slow].map(|rack| latency(rack, "near").0);
    assert_eq!(before, after);
    assert!(latency(&slow, "far").0 > 1_000.0 + latency(&mixed, "far").0);
    let wrong = mixed.replace("\"desktop\"", "\"laptop\"");
    let said = tried(&wrong, &moves("read", "far", "64 B", 1)).unwrap_err();
    assert!(said.contains("there is no profile `laptop`") && said.contains("`genoa`"), "{said}");
}

#[test]
fn requests_below_4_gib_have_short_headers() {
    let more = link("near", "near/gpu0", 3, 4);
    let of = |memory| rate(&run(&one(memory, &more), &moves("write", "near", "64 B", 32)), "a");
    let ratio = of("4 GiB") / of("8 GiB");
    assert!((ratio - 88.0 / 84.0).abs() < 0.002, "{ratio}");
}

#[test]
fn a_root_bounds_writes_from_port_to_port() {
    let rack = one("8 GiB", "[timing]\nprofile = \"xeon-e5-v4\"\n");
    let results = run(&rack, &moves("write", "near/gpu1", "64 KiB", 8));
    assert_eq!(flow(&results, "a").bottleneck, "near/root: peer writes");
    assert!((rate(&results, "a") / 7.1e9 - 1.0).abs() < 0.01);
    // Reads that wait behind them keep their order, and writes to memory are not bound.
    let results = run(&rack, &moves("write", "near", "64 KiB", 8));
    assert!(rate(&results, "a") > 40e9);
}

#[test]
fn a_device_makes_so_many_packets() {
    let rack = one("8 GiB", "[timing.device]\npacket_gap = \"20 ns\"\n");
    for (size, packet) in [("64 B", 64.0), ("64 KiB", 256.0)] {
        let results = run(&rack, &moves("write", "near", size, 32));
        assert!((rate(&results, "a") / (packet / 20e-9) - 1.0).abs() < 0.01, "{size}");
    }
    let rack = one("8 GiB", "[timing.device]\nwrite_gap = \"20 ns\"\n");
    for (kind, least, most) in [("write", 3.16e9, 3.24e9), ("read", 10e9, 60e9)] {
        let results = run(&rack, &moves(kind, "near", "64 B", 256));
        assert!((least..most).contains(&rate(&results, "a")), "{kind} {}", rate(&results, "a"));
    }
}

/// With the five-bit tags of twenty years ago, which were the default once, half of that.
#[test]
fn a_gpu_of_today_reads_what_its_link_carries() {
    let rack = one("512 GiB", &link("near", "near/gpu0", 5, 16));
    let results = run(&rack, &moves("read", "near", "1 MiB", 4));
    assert!(rate(&results, "a") > 50e9, "{}", rate(&results, "a"));
    assert_eq!(flow(&results, "a").bottleneck, "near/root to near/gpu0");
}

fn drives(more: &str) -> String {
    let flow = |name: &str, device: &str| {
        format!(
            "[flows.{name}]\nkind = \"nvme-read\"\nhost = \"near\"\ndevice = \"near/{device}\"\nrandom = true\n\
             depth = 4\n{more}"
        )
    };
    "duration = \"20 ms\"\n".to_owned() + &flow("a", "nvme0") + &flow("b", "nvme1")
}

#[test]
fn drives_do_not_all_take_the_same_and_an_iommu_makes_none_faster() {
    let off = one("8 GiB", "");
    let on = off.replace("iommu = false", "iommu = true");
    for service in ["", "service = { exponential = \"10 us\" }\n"] {
        let [on, off] = [&on, &off].map(|rack| run(rack, &drives(service)));
        let latency = &flow(&off, "a").latency_ns;
        assert!(latency.p99 > 1.1 * latency.p50, "{latency:?}");
        let (on, off) = (flow(&on, "a"), flow(&off, "a"));
        let sure = 1.0 + off.confidence.unwrap() + on.confidence.unwrap();
        assert!(on.bytes_per_second < off.bytes_per_second * sure);
        assert_eq!(run(&one("8 GiB", ""), &drives(service)).flows[0].latency_ns, off.latency_ns);
    }
    let fixed = run(&off, &drives("service = \"10 us\"\n"));
    let latency = &flow(&fixed, "a").latency_ns;
    assert!(latency.p99 < 1.05 * latency.p50, "{latency:?}");
}

#[test]
fn a_reader_that_thinks_between_jobs_asks_less_often() {
    let of = |think: &str| {
        let workload = moves("read", "near", "64 B", 1) + think;
        flow(&run(&one("8 GiB", ""), &("duration = \"4 ms\"\n".to_owned() + &workload)), "a")
            .clone()
    };
    let (busy, calm) = (of(""), of("think = \"10 us\"\n"));
    let between = 1e9 / calm.jobs_per_second - 1e9 / busy.jobs_per_second;
    assert!((between - 10_000.0).abs() < 50.0, "{between}");
    assert!((calm.latency_ns.mean - busy.latency_ns.mean).abs() < 1.0);
    let open = moves("read", "near", "64 B", 1).replace("depth = 1", "rate = \"1 MB/s\"")
        + "think = \"1 us\"\n";
    assert!(tried(&one("8 GiB", ""), &open).unwrap_err().contains("do not wait for each other"));
}

#[test]
fn queues_in_the_lenders_memory_spare_the_way_there_and_back() {
    let rack = two_hosts(false)
        .replace("gpu0]\nkind = \"gpu\"", "nvme0]\nkind = \"nvme\"\nsize = \"1 GiB\"");
    let latency = |queues: &str| {
        let workload = format!(
            "[flows.a]\nkind = \"nvme-read\"\nhost = \"far\"\ndevice = \"near/nvme0\"\n\
             service = \"10 us\"\nqueues_in = \"{queues}\"\n"
        );
        flow(&run(&rack, &workload), "a").latency_ns.mean
    };
    // A read over two NTBs of 180 ns each way, and the far root and memory instead of the near ones.
    let less = latency("host") - latency("lender");
    assert!((700.0..1500.0).contains(&less), "{less}");
}

#[test]
fn steps_wait_for_each_other() {
    let workload = "[units]\ncpu = 1\n[flows.a]\nkind = \"steps\"\nsize = \"64 B\"\ndepth = 2\nsteps = [\n\
                    { use = \"cpu\", time = \"10 us\" },\n\
                    { hold = \"cpu\", steps = [ { wait = \"5 us\" } ] },\n\
                    { each = 3, apart = \"64 B\", steps = [ { write = \"64 B\", from = \"near/gpu0\", to = \"near\" } ] },\n\
                    { load = \"8 B\", from = \"near\", to = \"near/gpu0\" },\n]\n";
    let results = run(&one("8 GiB", ""), workload);
    // The unit is what bounds them: 15 us for each job.
    assert!((flow(&results, "a").jobs_per_second * 15e-6 - 1.0).abs() < 0.05);
    let refused = |from: &str, to: &str| {
        tried(&one("8 GiB", ""), &workload.replacen(from, to, 1)).unwrap_err()
    };
    assert!(refused("near/gpu0", "near/gpu9").contains("the rack has no `near/gpu9`"));
    assert!(refused("wait =", "use = \"cpu\", wait =").contains("a step does one thing"));
    assert!(refused("each = 3", "each = 0").contains("`each` is 0"));
}
