//! Random racks as users write them, with links left out: one that is written where none was, and is ample, changes
//! no rate, however many flows compete.

use proptest::prelude::*;

use crate::lab::{link, run};

/// A link's generation of PCIe, and how many lanes it has.
type Speed = (u8, u8);

const AMPLE: Speed = (5, 16);

/// A host: whether its IOMMU is on; by device whether it is a drive, whether it is below the
/// switch, and its link; the links of switch and adapter. `None` leaves a switch or a link out.
#[derive(Debug, Clone)]
struct Host {
    iommu: bool,
    switch: Option<Speed>,
    devices: Vec<(bool, bool, Option<Speed>)>,
    adapter: Option<Speed>,
}

/// A flow: its kind, its ends by number, its size in units of 512 B, and how many jobs at a time.
type Moves = (u8, u8, u8, u64, u32);

fn speeds() -> impl Strategy<Value = Speed> {
    (3u8..=5, prop::sample::select(vec![4u8, 8, 16]))
}

fn hosts() -> impl Strategy<Value = Vec<Host>> {
    let written = || prop::option::weighted(0.4, speeds());
    let device = (prop::bool::weighted(0.3), any::<bool>(), written());
    let devices = prop::collection::vec(device, 1..4);
    let host = (any::<bool>(), prop::option::of(speeds()), devices, written());
    let host =
        host.prop_map(|(iommu, switch, devices, adapter)| Host { iommu, switch, devices, adapter });
    prop::collection::vec(host, 1..4)
}

fn flows() -> impl Strategy<Value = Vec<Moves>> {
    let size = 1u64..128;
    prop::collection::vec((0u8..5, any::<u8>(), any::<u8>(), size, 1u32..16), 1..6)
}

/// A rack file; of the links that are left out, those whose bit is set in `filled` are ample.
fn rack(hosts: &[Host], cables: &[Speed], mut filled: u32) -> String {
    let mut text = "name = \"random\"\n".to_owned();
    let (mut links, mut switches) = (String::new(), String::new());
    let mut join = |a: &str, b: &str, speed: Option<Speed>| {
        let more = (filled & 1 == 1).then_some(AMPLE);
        filled = filled.rotate_right(1);
        let speed = speed.or(more).into_iter();
        links.extend(speed.map(|(generation, lanes)| link(a, b, generation, lanes)));
    };
    for (nth, host) in hosts.iter().enumerate() {
        let name = format!("h{nth}");
        text += &format!("[hosts.{name}]\niommu = {}\n", host.iommu);
        let switch = format!("{name}-switch");
        if let Some(speed) = host.switch {
            switches += &format!("[fabric.switches.{switch}]\nhost = \"{name}\"\n");
            join(&name, &switch, Some(speed));
        }
        for (own, (drive, below, speed)) in host.devices.iter().enumerate() {
            let kind = if *drive { "nvme\"\nsize = \"1 GiB" } else { "gpu" };
            text += &format!("[hosts.{name}.devices.d{own}]\nkind = \"{kind}\"\n");
            let device = format!("{name}/d{own}");
            match *below && host.switch.is_some() {
                // A part below a switch has to be written, or it is at the root.
                true => join(&switch, &device, speed.or(Some(AMPLE))),
                false => join(&name, &device, *speed),
            }
        }
        join(&name, &format!("{name}-ntb"), host.adapter);
    }
    for nth in 0..hosts.len() {
        switches += &format!("[fabric.adapters.h{nth}-ntb]\nhost = \"h{nth}\"\n");
        for other in 0..nth {
            let cable = Some(cables[nth + other]);
            join(&format!("h{other}-ntb"), &format!("h{nth}-ntb"), cable);
        }
    }
    text + &switches + &links
}

fn workload(hosts: &[Host], flows: &[Moves]) -> String {
    let devices: Vec<(String, bool)> = hosts
        .iter()
        .enumerate()
        .flat_map(|(nth, host)| {
            let named = host.devices.iter().enumerate();
            named.map(move |(own, (drive, ..))| (format!("h{nth}/d{own}"), *drive))
        })
        .collect();
    let mut text = "duration = \"400 us\"\n".to_owned();
    for (nth, (kind, from, to, size, depth)) in flows.iter().enumerate() {
        let (from, drive) = &devices[usize::from(*from) % devices.len()];
        let host = format!("h{}", usize::from(*to) % hosts.len());
        let peers: Vec<&String> = devices
            .iter()
            .filter(|(name, drive)| name != from && !drive)
            .map(|(name, _)| name)
            .collect();
        // Devices beside it, or hosts, where it has none.
        let to = match peers.get(usize::from(*to) % peers.len().max(1)) {
            Some(peer) if kind % 2 == 1 => (*peer).clone(),
            _ => host.clone(),
        };
        let what = match kind {
            _ if *drive && *kind > 1 => {
                format!("kind = \"nvme-read\"\nhost = \"{host}\"\ndevice = \"{from}\"")
            }
            0 | 1 => format!("kind = \"write\"\nfrom = \"{from}\"\nto = \"{to}\""),
            2 | 3 => format!("kind = \"read\"\nfrom = \"{from}\"\nto = \"{to}\""),
            _ => format!("kind = \"copy\"\nby = \"{from}\"\nfrom = \"{host}\"\nto = \"{host}\""),
        };
        text += &format!("[flows.f{nth}]\n{what}\nsize = {}\ndepth = {depth}\n", size * 512);
    }
    text
}

/// How far the rates of two racks' flows are apart, at most.
fn apart(one: &[f64], other: &[f64]) -> f64 {
    let apart = one.iter().zip(other).map(|(one, other)| match one.max(*other) {
        0.0 => 0.0,
        most => (one - other).abs() / most,
    });
    apart.fold(0.0, f64::max)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(40))]

    #[test]
    fn an_ample_link_where_none_was_written_changes_no_rate(
        hosts in hosts(),
        cables in prop::collection::vec(speeds(), 4),
        flows in flows(),
        filled in any::<u32>(),
    ) {
        let workload = workload(&hosts, &flows);
        let rates = |filled| -> Vec<f64> {
            let results = run(&rack(&hosts, &cables, filled), &workload);
            results.flows.iter().map(|flow| flow.bytes_per_second).collect()
        };
        let bare = rates(0);
        for filled in [filled, u32::MAX] {
            let joined = rates(filled);
            prop_assert!(apart(&bare, &joined) < 0.02, "{bare:?} {joined:?}");
        }
    }
}
