//! What cannot be asked is refused, with a true reason.

use crate::lab::{link, run, shared, tried, two_hosts};

fn refused(rack: &str, workload: &str) -> String {
    tried(rack, workload).expect_err("it was answered")
}

const WRITE: &str = "[flows.a]\nkind = \"write\"\nfrom = \"near/gpu0\"\nto = \"far\"\n";

#[test]
fn a_loop_through_an_ntb_is_refused() {
    let board = "[fabric.switches.board]\nhost = \"near\"\n";
    let looped =
        two_hosts(false) + board + &link("near", "board", 4, 8) + &link("board", "near-ntb", 4, 8);
    assert!(refused(&looped, WRITE).contains("closes a loop"));
    let outer = "[fabric.switches.one]\n[fabric.switches.other]\n";
    let rack = "name = \"outer\"\n[hosts.near.devices.gpu0]\nkind = \"gpu\"\n[hosts.far]\n\
                [fabric.adapters.near-ntb]\nhost = \"near\"\n[fabric.adapters.far-ntb]\nhost = \"far\"\n";
    let star =
        rack.to_owned() + outer + &link("near-ntb", "one", 4, 8) + &link("far-ntb", "one", 4, 8);
    assert!(tried(&star, WRITE).is_ok());
    let twice = star.clone() + &link("one", "other", 4, 8) + &link("near-ntb", "other", 4, 8);
    assert!(refused(&twice, WRITE).contains("closes a loop"));
    let beside = star + &link("near-ntb", "far-ntb", 4, 8);
    assert!(refused(&beside, WRITE).contains("closes a loop"));
}

/// Two adapters of a host are no loop, as each has a side of its own; but which of them is taken was once not said.
#[test]
fn several_ways_between_hosts_are_told() {
    let rack = |more: &str| {
        let hosts: String = ["a", "b", "c"]
            .map(|host| format!("[hosts.{host}.devices.gpu0]\nkind = \"gpu\"\n"))
            .concat();
        let adapters: String = ["a", "b", "c"]
            .map(|host| {
                ["1", "2"]
                    .map(|nth| format!("[fabric.adapters.{host}{nth}]\nhost = \"{host}\"\n"))
                    .concat()
            })
            .concat();
        format!("name = \"three\"\n{hosts}[fabric.switches.top]\n{adapters}{more}")
    };
    let workload = "[flows.a]\nkind = \"write\"\nfrom = \"a/gpu0\"\nto = \"b\"\n";
    let notes = |links: &[(&str, &str)]| {
        let links: String = links.iter().map(|(a, b)| link(a, b, 4, 8)).collect();
        let (simulated, level) = (run(&rack(&links), workload), shared(&rack(&links), workload));
        assert_eq!(simulated.notes, level.notes);
        simulated.notes
    };
    let star = [("a1", "top"), ("b1", "top"), ("c1", "top")];
    assert!(notes(&star).is_empty());
    let ring = [("a1", "b2"), ("b1", "c2"), ("c1", "a2")];
    assert!(notes(&ring).is_empty());
    let twice = notes(&[&star[..], &[("a2", "top")]].concat());
    assert_eq!(twice.len(), 1);
    assert!(twice[0].starts_with("a and others are joined by a1 and a2: what moves"), "{twice:?}");
    let beside = notes(&[&star[..], &[("a2", "b2")]].concat());
    assert_eq!(beside.len(), 1);
    assert!(beside[0].starts_with("a and b are joined in several ways: what moves"), "{beside:?}");
}

#[test]
fn a_drives_flow_on_another_device_is_refused() {
    let workload = "[flows.a]\nkind = \"nvme-read\"\nhost = \"far\"\ndevice = \"near/gpu0\"\n";
    let said = refused(&two_hosts(false), workload);
    assert!(said.contains("`near/gpu0` is a gpu") && said.contains("nvme"), "{said}");
}

#[test]
fn a_part_that_cannot_be_an_end_is_called_what_it_is() {
    let board = "[fabric.switches.board]\nhost = \"near\"\n";
    let rack = two_hosts(false) + board + &link("near", "board", 4, 8);
    for (from, to) in [("near/gpu0", "board"), ("board", "far")] {
        let workload = format!("[flows.a]\nkind = \"write\"\nfrom = \"{from}\"\nto = \"{to}\"\n");
        let said = refused(&rack, &workload);
        assert!(said.contains("`board` is a switch"), "{said}");
    }
}

/// What a device asked an adapter once began at the root complex, as if the device were part of it.
#[test]
fn a_device_reaches_the_adapter_of_its_host_by_the_links_between_them() {
    let rack = two_hosts(false) + &link("near", "near/gpu0", 3, 4);
    let to_adapter = "[flows.a]\nkind = \"write\"\nfrom = \"near/gpu0\"\nto = \"near-ntb\"\n";
    let results = run(&rack, to_adapter);
    assert_eq!(results.flows[0].hops, 1);
    let own = results.links.iter().find(|link| link.ends == ["near/root", "near/gpu0"]).unwrap();
    assert!(own.back > 0.1, "{own:?}");
    // Below one switch it reaches it directly, but with an IOMMU.
    let below = |iommu| {
        let rack = two_hosts(iommu).replacen(
            &link("near", "near-ntb", 4, 8),
            &("[fabric.switches.board]\nhost = \"near\"\n".to_owned()
                + &link("near", "board", 4, 8)
                + &link("board", "near-ntb", 4, 8)
                + &link("board", "near/gpu0", 4, 8)),
            1,
        );
        run(&rack, to_adapter).flows[0].hops
    };
    assert_eq!([below(false), below(true)], [1, 3]);
}

#[test]
fn an_adapters_registers_are_its_hosts_own() {
    for from in ["far", "far/gpu1"] {
        let rack = two_hosts(false) + "[hosts.far.devices.gpu1]\nkind = \"gpu\"\n";
        let workload =
            format!("[flows.a]\nkind = \"write\"\nfrom = \"{from}\"\nto = \"near-ntb\"\n");
        let said = refused(&rack, &workload);
        let expected = format!(
            "`{from}` does not reach the registers of `near-ntb`, which is another host's; name an adapter of its own host"
        );
        assert!(said.contains(&expected), "{said}");
    }
}

/// Keys that do nothing for such a part were once accepted without a word.
#[test]
fn a_part_has_the_keys_of_its_kind() {
    let board = "[fabric.switches.board]\nhost = \"near\"\n";
    let rack = two_hosts(false) + board + &link("near", "board", 4, 8);
    for (part, key, allowed) in [
        ("board", "tags = 4", "`latency`"),
        (
            "near-ntb",
            "bandwidth = \"1 GB/s\"",
            "`latency`, `translation`, `completion_translation`",
        ),
        ("near/root", "engine = \"1 GB/s\"", "`latency`"),
        ("near/memory", "mrrs = 512", "`latency`, `bandwidth`"),
        ("near/gpu0", "translation = \"1 ns\"", "`latency`, `bandwidth`, `mps`,"),
    ] {
        let said = refused(&format!("{rack}[timing.parts.\"{part}\"]\n{key}\n"), WRITE);
        assert!(said.contains(&format!("in timing.parts.{part}; ")), "{said}");
        assert!(said.contains(&format!("llowed are {allowed}")), "{said}");
    }
}

#[test]
fn a_workload_that_lasts_no_time_is_refused_for_that() {
    let said = refused(&two_hosts(false), &format!("duration = \"0 ns\"\n{WRITE}"));
    assert!(said.starts_with("workload.toml:1:12: `duration` is 0 ps; it is"), "{said}");
}

/// A key that this kind of flow does not have is no suggestion.
#[test]
fn a_key_of_its_own_kind_is_suggested() {
    let said = refused(&two_hosts(false), &WRITE.replace("from", "form"));
    assert!(said.contains("unknown key `form` in flow a; did you mean `from`?"), "{said}");
    assert!(!said.contains("descriptor"), "{said}");
}

/// Such a flow once ran until the simulation had taken all events that it may.
#[test]
fn steps_of_no_time_are_refused() {
    let steps = |steps: &str| format!("[flows.a]\nkind = \"steps\"\nsteps = [{steps}]\n");
    for none in [
        "{ wait = \"0 ns\" }",
        "{ use = \"cpu\", time = \"0 ns\" }, { hold = \"cpu\", steps = [{ wait = \"0 ns\" }] }",
        "{ together = [[{ wait = \"0 ns\" }], [{ each = 3, steps = [{ wait = \"0 ns\" }] }]] }",
    ] {
        let said = refused(&two_hosts(false), &steps(none));
        assert!(said.contains("a job of these steps takes no time"), "{said}");
    }
    let some = "{ wait = \"0 ns\" }, { together = [[{ wait = \"1 us\" }]] }";
    assert!(tried(&two_hosts(false), &steps(some)).is_ok());
}
