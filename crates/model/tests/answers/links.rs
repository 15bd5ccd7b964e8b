//! A part that no link is written for is joined as if by an ample one: its packets wait, take turns and are
//! split like all others.

use proptest::prelude::*;

use crate::lab::{link, rate, run, two_hosts};

fn beside(size: &str, depth: u32) -> String {
    format!(
        "duration = \"1 ms\"\n\
         [flows.read]\nkind = \"read\"\nfrom = \"near/gpu0\"\nto = \"far\"\nsize = \"4 KiB\"\ndepth = 32\n\
         [flows.write]\nkind = \"write\"\nfrom = \"near/gpu0\"\nto = \"far\"\nsize = \"{size}\"\n\
         depth = {depth}\n"
    )
}

fn near(one: f64, other: f64) -> bool {
    (one / other - 1.0).abs() < 0.02
}

#[test]
fn writes_of_a_part_without_a_link_do_not_pile_up_before_its_reads() {
    let rack = two_hosts(false);
    let linked = rack.clone() + &link("near", "near/gpu0", 5, 16);
    for (size, depth) in [("64 KiB", 4), ("1 MiB", 4), ("4 MiB", 16)] {
        let [bare, with] = [&rack, &linked].map(|rack| {
            let results = run(rack, &beside(size, depth));
            [rate(&results, "read"), rate(&results, "write")]
        });
        assert!(with[0] > 1e9, "{with:?}");
        assert!(near(bare[0], with[0]) && near(bare[1], with[1]), "{size}: {bare:?} {with:?}");
    }
}

#[test]
fn a_root_splits_reads_whether_or_not_links_are_written() {
    let workload = "duration = \"500 us\"\n[flows.read]\nkind = \"read\"\nfrom = \"near/gpu0\"\nto = \"far\"\n\
                    size = \"64 KiB\"\ndepth = 4\n";
    let bare = "name = \"bare\"\n[hosts.near.devices.gpu0]\nkind = \"gpu\"\n[hosts.far]\n\
                [fabric.adapters.near-ntb]\nhost = \"near\"\n[fabric.adapters.far-ntb]\nhost = \"far\"\n"
        .to_owned()
        + &link("near-ntb", "far-ntb", 4, 8);
    let parts = [("near", "near/gpu0"), ("near", "near-ntb"), ("far", "far-ntb")];
    let mut rates = Vec::new();
    for mask in 0..8 {
        let written = parts.iter().enumerate().filter(|(nth, _)| mask >> nth & 1 == 1);
        let links: String = written.map(|(_, (a, b))| link(a, b, 5, 16)).collect();
        let results = run(&(bare.clone() + &links), workload);
        rates.push(rate(&results, "read"));
        assert_eq!(results.flows[0].bottleneck, "near/root: split reads");
    }
    assert!(rates.iter().all(|rate| near(*rate, rates[7])), "{rates:?}");
}

#[test]
fn hops_without_links_show_load_and_are_traced() {
    let rack =
        "name = \"one\"\n[hosts.near]\niommu = false\n[hosts.near.devices.gpu0]\nkind = \"gpu\"\n";
    let workload =
        "[flows.write]\nkind = \"write\"\nfrom = \"near/gpu0\"\nto = \"near\"\ndepth = 8\n";
    let results = run(rack, workload);
    for (a, b) in [("near/root", "near/gpu0"), ("near/root", "near/memory")] {
        let link = results.links.iter().find(|link| link.ends == [a, b]).unwrap();
        assert!(link.there + link.back > 0.05, "{link:?}");
    }
    let parsed = rackbus_fabric::rack::Rack::parse("rack.toml", rack).unwrap();
    let timing = rackbus_model::timing::read_for("rack.toml", rack, &parsed).unwrap();
    let flows = rackbus_model::workload::parse("workload.toml", workload).unwrap();
    let steps = rackbus_model::workload::trace(&parsed, &timing, &flows, "write").unwrap().steps;
    let passed = |from: &str, to: &str| steps.iter().any(|step| step.from == from && step.to == to);
    assert!(passed("near/gpu0", "near/root") && passed("near/root", "near/memory"), "{steps:?}");
}

/// A host: whether its IOMMU is on, its devices' links (`None` leaves one out), and its adapter's.
type Host = (bool, Vec<Option<(u8, u8)>>, Option<(u8, u8)>);

fn speeds() -> impl Strategy<Value = (u8, u8)> {
    (3u8..=5, prop::sample::select(vec![4u8, 8, 16]))
}

fn hosts() -> impl Strategy<Value = Vec<Host>> {
    let device = || prop::option::weighted(0.4, speeds());
    let host = (any::<bool>(), prop::collection::vec(device(), 1..3), device());
    prop::collection::vec(host, 2..4)
}

/// A rack file; of the links that are left out, those whose bit is set in `filled` are ample ones.
fn rack(hosts: &[Host], cables: &[(u8, u8)], mut filled: u32) -> String {
    let mut text = "name = \"random\"\n".to_owned();
    let mut links = String::new();
    for (nth, (iommu, devices, adapter)) in hosts.iter().enumerate() {
        let host = format!("h{nth}");
        text += &format!("[hosts.{host}]\niommu = {iommu}\n");
        let mut join = |name: &str, speed: Option<(u8, u8)>| {
            let ample = (filled & 1 == 1).then_some((5, 16));
            filled >>= 1;
            let speed = speed.or(ample).into_iter();
            links.extend(speed.map(|(generation, lanes)| link(&host, name, generation, lanes)));
        };
        for (own, speed) in devices.iter().enumerate() {
            text += &format!("[hosts.{host}.devices.d{own}]\nkind = \"gpu\"\n");
            join(&format!("{host}/d{own}"), *speed);
        }
        join(&format!("{host}-ntb"), *adapter);
    }
    for nth in 0..hosts.len() {
        text += &format!("[fabric.adapters.h{nth}-ntb]\nhost = \"h{nth}\"\n");
        for other in 0..nth {
            let (generation, lanes) = cables[nth + other];
            links += &link(&format!("h{other}-ntb"), &format!("h{nth}-ntb"), generation, lanes);
        }
    }
    text + &links
}

/// A flow: whether it reads, its ends by number, its size in KiB, and how many jobs at a time.
type Moves = (bool, u8, u8, u64, u32);

fn workload(hosts: &[Host], flows: &[Moves]) -> String {
    let devices = hosts.iter().enumerate();
    let devices: Vec<String> = devices
        .flat_map(|(nth, host)| (0..host.1.len()).map(move |own| format!("h{nth}/d{own}")))
        .collect();
    let mut text = "duration = \"400 us\"\n".to_owned();
    for (nth, (reads, from, to, size, depth)) in flows.iter().enumerate() {
        let kind = if *reads { "read" } else { "write" };
        let from = &devices[usize::from(*from) % devices.len()];
        let to = format!("h{}", usize::from(*to) % hosts.len());
        text += &format!(
            "[flows.f{nth}]\nkind = \"{kind}\"\nfrom = \"{from}\"\nto = \"{to}\"\nsize = \"{size} KiB\"\n\
             depth = {depth}\n"
        );
    }
    text
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(30))]

    #[test]
    fn an_ample_link_where_none_was_written_changes_no_rate(
        hosts in hosts(),
        cables in prop::collection::vec(speeds(), 4),
        flows in prop::collection::vec((any::<bool>(), any::<u8>(), any::<u8>(), 1u64..64, 1u32..16), 1..5),
        filled in any::<u32>(),
    ) {
        let workload = workload(&hosts, &flows);
        let rates = |rack: String| -> Vec<f64> {
            run(&rack, &workload).flows.iter().map(|flow| flow.bytes_per_second).collect()
        };
        let bare = rates(rack(&hosts, &cables, 0));
        for filled in [filled, u32::MAX] {
            let joined = rates(rack(&hosts, &cables, filled));
            prop_assert!(bare.iter().zip(&joined).all(|(one, other)| near(*one, *other)), "{bare:?} {joined:?}");
        }
    }
}

/// Three flows of one device once fell into a step in which the third never had a tag.
#[test]
fn no_flow_of_a_device_starves_another() {
    let rack =
        "name = \"one\"\n[hosts.near]\niommu = false\n[hosts.near.devices.gpu0]\nkind = \"gpu\"\n";
    let flow = |name: &str, kind: &str, size: &str, depth: u32| {
        format!(
            "[flows.{name}]\nkind = \"{kind}\"\nfrom = \"near/gpu0\"\nto = \"near\"\nsize = \"{size}\"\n\
             depth = {depth}\n"
        )
    };
    let workload = "duration = \"400 us\"\n".to_owned()
        + &flow("a", "write", "2 KiB", 10)
        + &flow("b", "read", "4 KiB", 5)
        + &flow("c", "read", "1 KiB", 9);
    let results = run(rack, &workload);
    let [one, other] = ["b", "c"].map(|name| rate(&results, name));
    assert!(other > one / 4.0, "{one} {other}");
}
