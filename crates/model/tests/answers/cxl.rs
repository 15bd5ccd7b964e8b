//! CXL memory: what a processor's loads and stores of a device's, or a pool's, memory take.

use rackbus_model::wire::Wire;

use crate::lab::{flow, link, rate, run, tried};

/// Hosts `a` and `b`, a memory of `bandwidth`, and what joins them.
fn pool(links: &str, bandwidth: &str) -> String {
    format!(
        "name = \"pool\"\n[hosts.a]\n[hosts.b]\n[hosts.a.devices.gpu0]\nkind = \"gpu\"\n[fabric.switches.fan]\n\
         cxl = true\n[fabric.memories.pool]\nsize = \"1 TiB\"\n{links}[timing.cxl]\nbandwidth = \"{bandwidth}\"\n\
         loads = 512\n"
    )
}

fn direct(generation: u8, lanes: u8) -> String {
    pool(&link("a", "pool", generation, lanes), "400 GB/s")
}

fn moves(kind: &str, from: &str, size: &str) -> String {
    format!(
        "duration = \"500 us\"\n[flows.cores]\nkind = \"{kind}\"\nfrom = \"{from}\"\nto = \"pool\"\nsize = \"{size}\"\n\
         depth = 64\n"
    )
}

#[test]
fn a_lone_load_takes_what_its_parts_take() {
    let load = "[flows.load]\nkind = \"read\"\nfrom = \"a\"\nto = \"pool\"\nsize = \"64 B\"\n";
    let took = |rack: &str| flow(&run(rack, load), "load").latency_ns.mean;
    let near = took(&direct(5, 8));
    let said = run(&direct(5, 8), load).unvalidated.join("; ");
    assert!(
        said.contains(
            "load: CXL memory's parts are estimates that were held against no measurement"
        ),
        "{said}"
    );
    // From core to mesh 40, twice a port of 25, 70 in the device, 2 of cable each way, and slots on the wire.
    let (wire, memory) = (Wire::cxl(5, 8), 64.0 / 400e9 * 1e9);
    let slots = (wire.time(16) + wire.time(64)).ns();
    let expected = 40.0 + 2.0 * 25.0 + 70.0 + 2.0 * 2.0 + memory + slots;
    assert!((near - expected).abs() < 1.0, "{near} of {expected}");
    // Memory of one's own is some 80 ns nearer (Pond, ASPLOS 2023: 70 to 90), a switch 70 ns further.
    assert!((150.0..185.0).contains(&near), "{near}");
    let links = link("a", "fan", 5, 8) + &link("fan", "pool", 5, 8) + &link("b", "fan", 5, 8);
    let far = took(&pool(&links, "400 GB/s"));
    assert!((far - near - 74.0).abs() < 3.0, "{far} and {near}");
}

#[test]
fn flits_carry_what_their_slots_leave() {
    // Five slots of 16 B for a line of 64, in flits of 64 and 68 B, or of 240 and 256 B.
    for (generation, share) in [(5, 64.0 / 80.0 * 64.0 / 68.0), (6, 64.0 / 80.0 * 240.0 / 256.0)] {
        let raw = match generation {
            5 => 32e9 * 8.0 / 8.0 * 128.0 / 130.0,
            _ => 64e9 * 8.0 / 8.0,
        };
        for kind in ["read", "write"] {
            let results = run(&direct(generation, 8), &moves(kind, "a", "4 KiB"));
            let got = rate(&results, "cores") / (raw * share);
            assert!((got - 1.0).abs() < 0.02, "Gen{generation} {kind}: {got}");
        }
    }
    let both = moves("read", "a", "4 KiB")
        + &moves("write", "a", "4 KiB")
            .replace("duration = \"500 us\"\n", "")
            .replace("cores", "stores");
    let results = run(&direct(5, 8), &both);
    // Both directions carry data, and slots for what goes the other way.
    let sum = rate(&results, "cores") + rate(&results, "stores");
    assert!(sum > 1.5 * 32e9 * share_of_lines() && sum < 2.0 * 32e9 * share_of_lines(), "{sum}");
}

/// Of a direction's bytes, those of data when each line has a slot and another line's message comes back.
fn share_of_lines() -> f64 {
    64.0 / 80.0 * 64.0 / 68.0 * 128.0 / 130.0
}

#[test]
fn hosts_share_a_pool_and_its_memory_bounds_them() {
    let links = link("a", "fan", 5, 16) + &link("b", "fan", 5, 16) + &link("fan", "pool", 5, 16);
    let rack = pool(&links, "20 GB/s");
    let workload = moves("read", "a", "4 KiB")
        + "[flows.other]\nkind = \"read\"\nfrom = \"b\"\nto = \"pool\"\nsize = \"4 KiB\"\ndepth = 64\n";
    let results = run(&rack, &workload);
    for name in ["cores", "other"] {
        let share = rate(&results, name) / 20e9;
        assert!((share - 0.5).abs() < 0.03, "{name}: {share}");
        assert_eq!(flow(&results, name).bottleneck, "pool: memory bandwidth");
    }
    // A core with few lines under way gets what Little's law gives it.
    let few = rack.replace("loads = 512", "loads = 16");
    let results = run(&few, &moves("read", "a", "64 KiB").replace("depth = 64", "depth = 1"));
    let bound = 16.0 * 64.0 / 200e-9;
    let got = rate(&results, "cores");
    assert!((0.75 * bound..1.25 * bound).contains(&got), "{got} of {bound}");
}

#[test]
fn what_cannot_be_is_refused() {
    let gpu = tried(&direct(5, 8), &moves("write", "a/gpu0", "4 KiB")).unwrap_err();
    assert!(gpu.contains("`a/gpu0` does not reach the CXL memory `pool`"), "{gpu}");
    let far = tried(&direct(5, 8), &moves("read", "b", "4 KiB")).unwrap_err();
    assert!(far.contains("no way leads from `b` to `pool`"), "{far}");
    let asks = tried(
        &direct(5, 8),
        &moves("read", "a", "4 KiB")
            .replace("from = \"a\"\nto = \"pool\"", "from = \"pool\"\nto = \"a\""),
    );
    assert!(asks.unwrap_err().contains("`pool` makes no requests"));
    let inside = direct(5, 8).replace("cxl = true", "cxl = true\nhost = \"a\"");
    let inside = tried(&inside, &moves("read", "a", "4 KiB")).unwrap_err();
    assert!(inside.starts_with("rack.toml:8:8: the CXL switch fan is in a host"), "{inside}");
    let joined = pool(&(link("a", "pool", 5, 8) + &link("pool", "a/gpu0", 5, 8)), "1 GB/s");
    let joined = tried(&joined, &moves("read", "a", "4 KiB")).unwrap_err();
    assert!(joined.contains("cannot be joined"), "{joined}");
}

/// A step's load or store of a pool was once made as one of a register: uncached, and with what a processor takes to issue it twice.
#[test]
fn steps_reach_cxl_memory_as_flows_do() {
    let rack = direct(5, 8);
    for (kind, step) in [("read", "load"), ("read", "read"), ("write", "store"), ("write", "write")]
    {
        let one = format!(
            "[flows.a]\nkind = \"{kind}\"\nfrom = \"a\"\nto = \"pool\"\nsize = \"4 KiB\"\n"
        );
        let other = format!(
            "[flows.a]\nkind = \"steps\"\nsteps = [{{ {step} = \"4 KiB\", from = \"a\", to = \"pool\" }}]\n"
        );
        let [flow_took, step_took] =
            [one, other].map(|workload| flow(&run(&rack, &workload), "a").latency_ns.mean);
        // A flow has its core's way to the port, whatever it moves.
        assert!((flow_took - step_took).abs() < 41.0, "{step}: {flow_took} and {step_took}");
    }
}

#[test]
fn a_processor_copies_within_cxl_memory_and_not_between_that_and_something_else() {
    let rack = direct(5, 8);
    let copy = |from: &str, to: &str| {
        format!(
            "[flows.a]\nkind = \"copy\"\nby = \"a\"\nfrom = \"{from}\"\nto = \"{to}\"\nsize = \"64 KiB\"\n"
        )
    };
    let within = run(&rack, &copy("pool", "pool"));
    // Both ways of the link at once: what a read alone has.
    let read = run(&rack, &moves("read", "a", "64 KiB").replace("cores", "a"));
    assert!(rate(&within, "a") > 0.5 * rate(&read, "a"), "{}", rate(&within, "a"));
    for (from, to) in [("pool", "a/gpu0"), ("a/gpu0", "pool")] {
        let said = tried(&rack, &copy(from, to)).unwrap_err();
        assert!(
            said.contains("a processor's copy between CXL memory and other parts is not modelled"),
            "{said}"
        );
    }
}
