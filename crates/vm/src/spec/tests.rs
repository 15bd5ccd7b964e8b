//! Tests of the arguments that QEMU is started with.

use super::*;

fn spec() -> VmSpec {
    let boot = Boot::Kernel { kernel: "/k".into(), initrd: None, append: String::new() };
    let mut spec = VmSpec::new("one", Path::new("/run/r/beta/vms/one"), boot);
    spec.accel = Some(Acceleration::Tcg);
    spec
}

#[test]
fn every_function_has_a_port_of_its_own_and_memory_is_shared() {
    let mut spec = spec();
    for name in ["alpha/nvme0", "gamma/nvme1"] {
        spec.functions.push(FunctionSpec { name: name.into(), socket: "/run/s".into() });
    }
    let args = spec.args(&Assets::of_user()).expect("args");
    let ports = args.iter().filter(|a| a.starts_with("pcie-root-port,")).count();
    assert_eq!(ports, 2 + usize::from(DEFAULT_SPARE_PORTS));
    let devices: Vec<Value> = args
        .iter()
        .filter_map(|a| serde_json::from_str(a).ok())
        .filter(|v: &Value| v["driver"] == "vfio-user-pci")
        .collect();
    assert_eq!(devices.len(), 2);
    assert_eq!(devices[0]["bus"], "port0");
    assert_eq!(devices[1]["bus"], "port1");
    assert_ne!(device_id("a-b/c"), device_id("a/b-c"));
    assert_eq!(devices[1]["id"], "fn-gamma_nvme1");
    let memory: Value = args
        .iter()
        .filter_map(|a| serde_json::from_str(a).ok())
        .find(|v: &Value| v["id"] == "ram")
        .expect("the memory object");
    assert_eq!((&memory["share"], &memory["size"]), (&json!(true), &json!(512 << 20)));
}

#[test]
fn a_machine_has_one_iommu_and_it_translates_no_dma() {
    let iommus = |extra: &[&str]| {
        let mut spec = spec();
        spec.extra = extra.iter().map(|a| (*a).to_owned()).collect();
        let args = spec.args(&Assets::of_user()).expect("args");
        let all: Vec<String> = args.into_iter().filter(|a| a.contains("-iommu")).collect();
        all
    };
    assert_eq!(iommus(&[]), [REMAPPER]);
    for own in ["intel-iommu,intremap=on,caching-mode=on", "virtio-iommu-pci", REMAPPER] {
        assert_eq!(iommus(&["-device", own]), [own]);
    }
    assert!(own_vm_args(256, None, false, &[], None).contains(&REMAPPER.to_owned()));
}

#[test]
fn memory_is_there_from_the_beginning_where_that_is_asked_for() {
    let asked = |args: &[String]| args.iter().any(|it| it.contains("prealloc"));
    let mut spec = spec();
    assert!(!asked(&spec.args(&Assets::of_user()).expect("args")));
    spec.prealloc = true;
    assert!(asked(&spec.args(&Assets::of_user()).expect("args")));
    assert!(asked(&own_vm_args(256, None, true, &[], None)));
    assert!(!asked(&own_vm_args(256, None, false, &[], None)));
}

#[test]
fn a_guest_shares_memory_by_a_device_that_is_there_from_the_start() {
    let device = |args: Vec<String>| {
        let mut all = args.into_iter().filter(|a| a.starts_with("vhost-user-test-device-pci,"));
        all.next().is_some_and(|a| a.contains("virtio-id=26") && !a.contains("bus="))
    };
    let mut spec = spec();
    assert!(!device(spec.args(&Assets::of_user()).expect("args")));
    spec.fabric = Some("/run/r/f,1.sock".into());
    let args = spec.args(&Assets::of_user()).expect("args");
    assert!(args.contains(&format!("socket,id={FABRIC_ID},path=/run/r/f,,1.sock")));
    assert!(device(args));
    assert!(device(own_vm_args(256, None, false, &[], Some(Path::new("/run/s")))));
}

#[test]
fn what_qemu_cannot_take_is_refused_with_a_reason() {
    let refused = |change: fn(&mut VmSpec)| {
        let mut spec = spec();
        change(&mut spec);
        spec.args(&Assets::of_user()).expect_err("refused").to_string()
    };
    assert!(refused(|s| s.name = "a/b".into()).contains("VM name"));
    assert!(refused(|s| s.memory_mib = 1).contains("128M"));
    assert!(
        refused(|s| s.extra = vec!["-device".into(), "intel-iommu,intremap=on".into()])
            .contains("dma-translation")
    );
    assert!(
        refused(|s| s.extra = vec![r#"{"driver": "intel-iommu", "intremap": true}"#.into()])
            .contains("dma-translation")
    );
    assert!(refused(|s| s.cpus = 0).contains("processors"));
    assert!(refused(|s| s.spare_ports = 60).contains("at most 28"));
    assert!(
        refused(|s| s.dir = format!("/{}", "x".repeat(100)).into()).contains("RACKBUS_RUN_DIR")
    );
}
