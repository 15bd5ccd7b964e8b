//! Right and wrong rack files.

use super::*;

fn refused(text: &str) -> String {
    Rack::parse("rack.toml", text).unwrap_err().to_string()
}

#[test]
fn the_demonstration_file_is_right() {
    let text = include_str!("../../../../examples/demo/rack.toml");
    let rack = Rack::parse("examples/demo/rack.toml", text).unwrap();
    let names: Vec<&str> = rack.hosts.iter().map(|h| h.name.as_str()).collect();
    assert_eq!(names, ["alpha", "beta", "gamma"]);
    let functions: Vec<String> = rack.functions().map(|(name, _)| name.to_string()).collect();
    assert_eq!(functions, ["alpha/nvme0", "beta/nvme1"]);
}

#[test]
fn every_key_of_the_rack_file_is_read() {
    let text = r#"
        name = "lab"
        [control]
        lease_ttl = "4 s"
        return_grace = "500 ms"
        strict_ttl = true
        [hosts.zeta]
        node_id = 72
        memory = "64 GiB"
        export = "1 GiB"
        iommu = false
        [hosts.zeta.devices.disk]
        kind = "nvme"
        size = "1 TB"
        block_size = 4096
        backing = "/dev/sdb"
        serial = "S1"
        [hosts.eta]
        [[share]]
        host = "zeta"
        segments = [4711, "0x100-0x1ff"]
        with = ["eta"]
        access = "read"
        [[share]]
        host = "eta"
        segments = "*"
        with = "*"
        access = "write"
        [fabric.adapters.a]
        host = "zeta"
        [fabric.adapters.b]
        host = "eta"
        [fabric.switches.middle]
        [[fabric.links]]
        ends = ["a", "middle"]
        lanes = 16
        [[fabric.links]]
        ends = ["middle", "b"]
        generation = 5
    "#;
    let rack = Rack::parse("rack.toml", text).unwrap();
    assert_eq!(rack.hosts[0].name, "zeta", "the file's order");
    let control = ControlConfig { lease_ttl_ms: 4000, return_grace_ms: 500, strict_ttl: true };
    assert_eq!(rack.control, control);
    assert_eq!((rack.hosts[0].node_id, rack.hosts[0].export), (72, 1 << 30));
    let some = ShareRule {
        owner: "zeta".to_owned(),
        segments: vec![4711..=4711, 0x100..=0x1ff],
        with: With::Hosts(vec!["eta".to_owned()]),
        access: ShareAccess::Read,
    };
    let all = ShareRule {
        owner: "eta".to_owned(),
        segments: vec![0..=u32::MAX],
        with: With::All,
        access: ShareAccess::Write,
    };
    assert_eq!(rack.shares, [some, all]);
    assert_eq!(rack.hosts[0].devices[0].kind, "nvme");
    let fabric = rack.fabric.unwrap();
    assert_eq!((fabric.links[0].lanes, fabric.links[1].generation), (16, 5));
}

#[test]
fn what_is_wrong_is_named_with_its_place_and_what_is_allowed() {
    let head = "name = \"lab\"\n[hosts.alpha.devices.nvme0]\nkind = \"nvme\"\n";
    let cases = [
        ("[hosts.alpha]\n".to_owned(), "rack.toml:1:1: the rack file has no `name`"),
        ("name = \"lab\"\n".to_owned(), "the rack has no host"),
        ("name = \"Lab\"\n".to_owned(), "rack.toml:1:8: `Lab` is no name"),
        ("name = \"lab\"\n[hosts.a.b]\n".to_owned(), "unknown key `b` in host a"),
        (
            "name = \"lab\"\nhots = 1\n".to_owned(),
            "rack.toml:2:1: unknown key `hots` in the rack file; did you mean `hosts`?",
        ),
        (
            "name = \"lab\"\n[hosts.alpha.devices.d]\nsize = 1\n".to_owned(),
            "rack.toml:2:22: device alpha/d has no `kind`",
        ),
        (
            "name = \"lab\"\n[hosts.alpha.devices.d]\nkind = 5\n".to_owned(),
            "rack.toml:3:8: `kind` is the number 5",
        ),
        (format!("{head}size = \"1 GiB\"\n[hosts.alpha.devices.nvme0]"), "rack.toml:5:"),
        (
            format!("{head}size = \"1 GiB\"\n[fabric.adapters.x]\nhost = \"omega\""),
            "there is no host `omega`; `host` is one of `alpha`",
        ),
        (
            format!("{head}size = \"1 GiB\"\n[control]\nlease_ttl = \"1 h\""),
            "`lease_ttl` is no duration",
        ),
        (
            format!("{head}[control]\nstrict_ttl = true\nlease_ttl = \"2 s\""),
            "`lease_ttl` is 2 s; it is from 3000 ms to 3600 s",
        ),
        (
            format!(
                "{head}size = \"1 GiB\"\n[hosts.beta]\n[fabric.adapters.x]\nhost = \"beta\"\n[[fabric.links]]\nends = [\"x\", \"alpha/nvme0\"]"
            ),
            "x and alpha/nvme0 cannot be joined",
        ),
        (
            format!("{head}size = \"1 GiB\"\n[fabric.adapters.alpha]\nhost = \"alpha\""),
            "rack.toml:5:18: `alpha` names two parts",
        ),
        ("name = ".to_owned(), "rack.toml:1:"),
        (
            "name = \"lab\"\nhosts = 3\n".to_owned(),
            "`hosts` is the number 3; write a table: [hosts.NAME]",
        ),
    ];
    for (text, expected) in cases {
        let error = refused(&text);
        assert!(error.contains(expected), "{text:?}\n gives {error}\n not {expected}");
    }
}

/// What a class's reader finds wrong has its place; each device is read once, in the file's order.
#[test]
fn what_a_class_finds_wrong_with_its_keys_has_a_place() {
    let text = "name = \"lab\"\n[hosts.b.devices.x]\nkind = \"tape\"\nreels = 2\n\
                [hosts.a.devices.y]\nkind = \"tape\"\nreals = 2\n";
    let mut seen = Vec::new();
    let error = Rack::parse_with("rack.toml", text, |section| {
        seen.push(section.function().to_owned());
        section.keys(&["kind", "reels"])?.count("reels", 1, 4).map(|_| DeviceFacts::default())
    });
    let said = error.unwrap_err().to_string();
    let expected = "rack.toml:7:1: unknown key `reals` in device a/y; did you mean `reels`?";
    assert!(said.starts_with(expected), "{said}");
    assert_eq!(seen, ["b/x", "a/y"]);
}

#[test]
fn function_names_are_read_as_written() {
    for good in ["alpha/nvme0", "a/b.vf0", "alpha-2/accel0.vf65535"] {
        assert_eq!(good.parse::<FunctionName>().unwrap().to_string(), good);
    }
    for bad in [
        "alpha",
        "/nvme0",
        "alpha/",
        "a/b/c",
        "a/b.vf",
        "a/b.vf01",
        "a/b.vf70000",
        "A/b",
        "a/..",
        "a/b.vf+1",
    ] {
        assert!(bad.parse::<FunctionName>().is_err(), "{bad}");
    }
}

proptest::proptest! {
    #[test]
    fn no_text_makes_it_panic(text in "[ -~\n\u{e4}]{0,200}") {
        let _ = Rack::parse("rack.toml", &text);
    }
}

#[test]
fn windows_and_modelled_devices_are_read() {
    let text = "name = \"lab\"\n[hosts.a.devices.gpu0]\nkind = \"gpu\"\n[hosts.b]\n\
                [[fabric.windows]]\nhost = \"a\"\nat = \"64 GiB\"\nsize = \"1 GiB\"\nto = \"b\"\n";
    let rack = Rack::parse("rack.toml", text).unwrap();
    let (_, gpu) = rack.functions().next().unwrap();
    assert_eq!(gpu.kind, "gpu");
    let window = &rack.fabric.as_ref().unwrap().windows[0];
    assert_eq!((window.at, window.size, window.address), (64 << 30, 1 << 30, 0));
    let wrong = text.replace("to = \"b\"", "to = \"c\"");
    let error = Rack::parse("rack.toml", &wrong).unwrap_err().to_string();
    assert!(error.starts_with("rack.toml:9:6: there is no host `c`"), "{error}");
}

#[test]
fn a_loop_of_links_is_refused() {
    let text = "name = \"lab\"\n[hosts.a]\n[fabric.switches.s]\nhost = \"a\"\n[fabric.switches.t]\nhost = \"a\"\n\
                [[fabric.links]]\nends = [\"a\", \"s\"]\n[[fabric.links]]\nends = [\"s\", \"t\"]\n\
                [[fabric.links]]\nends = [\"t\", \"a\"]\n";
    let error = Rack::parse("rack.toml", text).unwrap_err().to_string();
    assert!(error.starts_with("rack.toml:11:1: the link from t to a closes a loop"), "{error}");
    let twice = text.replace("[\"t\", \"a\"]", "[\"t\", \"s\"]");
    assert!(Rack::parse("rack.toml", &twice).is_err());
}

#[test]
fn hosts_have_node_ids_and_export_their_memory() {
    let read = |text: &str| Rack::parse("rack.toml", text).unwrap();
    let rack = read(
        "name = \"lab\"\n[hosts.c]\n[hosts.b]\nnode_id = 8\n[hosts.a]\nmemory = \"1 GB\"\n[hosts.d]\n",
    );
    let ids: Vec<u32> = rack.hosts.iter().map(|host| host.node_id).collect();
    assert_eq!(ids, [4, 8, 12, 16]);
    assert_eq!(rack.hosts[0].export, rack.hosts[0].memory);
    assert_eq!(rack.hosts[2].export, 1_000_000_000 / 4096 * 4096);

    let most = |hosts: u32| {
        let hosts: String = (0..hosts).map(|nth| format!("[hosts.h{nth}]\n")).collect();
        format!("name = \"lab\"\n{hosts}")
    };
    let ids: Vec<u32> = read(&most(16_382)).hosts.iter().map(|host| host.node_id).collect();
    assert!(!ids.contains(&252));
    assert_eq!((ids[61], ids[62], ids[16_381]), (248, 256, 65_532));
    assert!(refused(&most(16_383)).contains("16384:8: there is no node id left for host h16382"));
}

#[test]
fn wrong_node_ids_exports_and_shares_are_named_with_their_place() {
    let host = |key: &str| format!("name = \"lab\"\n[hosts.a]\n{key}\n[hosts.b]\nnode_id = 4");
    let share = |of: &str, segments: &str, with: &str, access: &str| {
        format!(
            "name = \"lab\"\n[hosts.a]\n[hosts.b]\n[[share]]\nhost = {of}\nsegments = {segments}\nwith = {with}\naccess = {access}\n"
        )
    };
    let cases = [
        (host("node_id = 252"), "rack.toml:3:11: `node_id` is 252; a node id is a multiple of 4"),
        (host("node_id = 6"), "`node_id` is 6; a node id is a multiple of 4 from 4 to 65532"),
        (host("node_id = 0"), "`node_id` is 0;"),
        (host("node_id = 65536"), "`node_id` is 65536;"),
        (host("node_id = \"four\""), "`node_id` is a string;"),
        (host("node_id = 4"), "rack.toml:5:11: hosts a and b have node id 4;"),
        (host("export = \"5 GiB\""), "3:10: `export` is 5 GiB; it is from 0 B to 4 GiB"),
        (host("export = 5000"), "`export` is 5000 B; memory is exported in pages of 4 KiB"),
        (
            share("\"c\"", "1", "\"*\"", "\"read\""),
            "5:8: there is no host `c`; `host` is one of `a`, `b`",
        ),
        (
            share("\"a\"", "-1", "\"*\"", "\"read\""),
            "6:12: `segments` is the number -1; write \"*\" for all",
        ),
        (share("\"a\"", "[1, \"9-x\"]", "\"*\"", "\"read\""), "6:16: `9-x` is no segment id"),
        (share("\"a\"", "\"9-+10\"", "\"*\"", "\"read\""), "`9-+10` is no segment id"),
        (share("\"a\"", "\"0x20-0x10\"", "\"*\"", "\"read\""), "no segment is from 32 to 16"),
        (share("\"a\"", "[]", "\"*\"", "\"read\""), "`segments` names none"),
        (share("\"a\"", "4294967296", "\"*\"", "\"read\""), "`segments` is the number 4294967296"),
        (
            share("\"a\"", "1", "\"b\"", "\"read\""),
            "7:8: `with` is a string; write \"*\" for every host, or an array of `a`, `b`",
        ),
        (share("\"a\"", "1", "[\"c\"]", "\"read\""), "7:9: there is no host `c`"),
        (share("\"a\"", "1", "[]", "\"read\""), "`with` names no host"),
        (
            share("\"a\"", "1", "\"*\"", "\"all\""),
            "8:10: there is no access `all`; `access` is one of `read`",
        ),
        (
            "name = \"lab\"\n[hosts.a]\n[share]\nhost = \"a\"".to_owned(),
            "`share` is a table; write [[share]]",
        ),
        (
            "name = \"lab\"\n[hosts.a]\n[[share]]\nhost = \"a\"".to_owned(),
            "3:1: share has no `segments`",
        ),
    ];
    for (text, expected) in cases {
        let error = refused(&text);
        assert!(error.contains(expected), "{text:?}\n gives {error}\n not {expected}");
    }
}

#[test]
fn wrong_compositions_are_named_with_their_place() {
    let composition = |keys: &str| {
        let hosts = "name = \"lab\"\n[hosts.a.devices.d]\nkind = \"gpu\"\n[hosts.b]\n";
        format!("{hosts}[[composition]]\n{keys}")
    };
    for (keys, said) in [
        ("host = \"b\"", "5:1: composition has no `name`"),
        ("name = \"x y\"", "6:8: `x y` is no name"),
        ("name = \"x\"\nhost = \"c\"", "7:8: there is no host `c`; `host` is one of `a`, `b`"),
        ("name = \"x\"\nhost = \"b\"\nfunctions = []", "8:13: `functions` names none"),
        ("name = \"x\"\nhost = \"b\"\nfunctions = [1]", "8:14: `functions` is the number 1"),
        ("name = \"x\"\nhost = \"b\"\nfunctions = [\"a/e\"]", "8:13: there is no function `a/e`"),
        (
            "name = \"x\"\nhost = \"b\"\nfunctions = [\"a/d\", \"a/d\"]",
            "8:13: `a/d` is named twice",
        ),
        (
            "name = \"x\"\nhost = \"b\"\nfunctions = [\"a/d\"]\nisolation = \"none\"",
            "9:13: `isolation` is none",
        ),
        (
            "name = \"x\"\nhost = \"b\"\nfunctions = [\"a/d\"]\n[[composition]]\n\
             name = \"x\"\nhost = \"a\"\nfunctions = [\"a/d\"]",
            "10:8: there is a composition `x` already",
        ),
    ] {
        let error = Rack::parse("rack.toml", &composition(keys)).unwrap_err().to_string();
        assert!(error.contains(said), "{keys}: {error}");
    }
    let text = composition("name = \"x\"\nhost = \"b\"\nfunctions = [\"a/d\"]");
    let rack = Rack::parse("rack.toml", &text).unwrap();
    assert_eq!(rack.compositions[0].functions, ["a/d"]);
}

/// Of a device with virtual functions those are lent, and not the device.
#[test]
fn compositions_name_the_functions_that_are_lent() {
    let file = |function: &str| {
        format!(
            "name = \"lab\"\n[hosts.a.devices.d]\nkind = \"gpu\"\n[hosts.b]\n[[composition]]\n\
             name = \"x\"\nhost = \"b\"\nfunctions = [\"a/{function}\"]\n"
        )
    };
    let capabilities = &[DeviceCapability::Blocks];
    let timing = [3, 4].map(|jobs| FunctionTiming { jobs: Some(jobs), ..Default::default() });
    let facts = DeviceFacts { virtual_functions: 2, capabilities, timing: timing.to_vec() };
    let with =
        |function: &str| Rack::parse_with("rack.toml", &file(function), |_| Ok(facts.clone()));
    let rack = with("d.vf2").unwrap();
    assert_eq!(rack.compositions[0].functions, ["a/d.vf2"]);
    let can = |rack: &Rack, capability| rack.hosts[0].devices[0].can(capability);
    assert_eq!(can(&rack, DeviceCapability::Blocks), Some(true));
    assert_eq!(can(&rack, DeviceCapability::Engines), Some(false));
    let timing_of = |rack: &Rack, nth: usize| rack.hosts[0].devices[nth].timing.clone();
    assert_eq!([0, 1].map(|nth| timing_of(&rack, nth)), timing);
    // Nobody asked the classes.
    let rack = Rack::parse("rack.toml", &file("d.vf2")).unwrap();
    assert_eq!(can(&rack, DeviceCapability::Blocks), None);
    assert_eq!(timing_of(&rack, 0), FunctionTiming::default());
    for wrong in ["d", "d.vf0", "d.vf3", "d.vfx"] {
        let error = with(wrong).unwrap_err().to_string();
        assert!(error.contains(&format!("there is no function `a/{wrong}`")), "{error}");
    }
    // Who knows nothing of classes reads such a file as well.
    let without = |function: &str| Rack::parse("rack.toml", &file(function));
    assert!(without("d.vf2").is_ok() && without("d").is_ok());
    assert!(without("d.vf0").is_err() && without("e.vf1").is_err());
}

#[test]
fn bridges_to_other_hosts_are_read_or_refused_where_they_are_wrong() {
    let file = |ntb: &str| format!("name = \"lab\"\n[hosts.a]\n{ntb}[hosts.b]\n");
    let text = file("[hosts.a.ntb.b]\naddress = \"0000:05:00.0\"\n");
    let rack = Rack::parse("rack.toml", &text).unwrap();
    assert_eq!(rack.hosts[0].ntbs["b"], "0000:05:00.0");
    assert!(rack.hosts[1].ntbs.is_empty());
    let of_link = |of: &str, to: &str| {
        format!("[hosts.{of}.ntb.{to}]\naddress = \"0000:05:00.0\"\nuse = \"link\"\n")
    };
    let both = format!("{}{}", of_link("a", "b"), of_link("b", "a"));
    let rack = Rack::parse("rack.toml", &file(&both)).unwrap();
    assert!(rack.hosts.iter().all(|host| host.ntbs.is_empty()));
    assert_eq!(rack.hosts[1].link_ntbs["a"], "0000:05:00.0");
    let one_way = of_link("a", "b");
    let other_use =
        format!("{one_way}[hosts.b.ntb.a]\naddress = \"05:00.0\"\nuse = \"functions\"\n");
    let twice = format!("{both}[hosts.a.ntb.c]\naddress = \"0000:05:00.0\"\n");
    // The same function, as it may be written, too.
    let other_name = ("c]\naddress = \"0000:05:00.0", "c]\naddress = \"5:0.0");
    for (ntb, said) in [
        (&*one_way, "the NTB of a to b is for the link, and b's is not"),
        (&*twice, "is named twice; an NTB leads to one host, and has one use"),
        (&twice.replace(other_name.0, other_name.1), "is named twice; an NTB leads"),
        (&*other_use, "write [hosts.b.ntb.a] with use = \"link\", too"),
        (
            "[hosts.a.ntb.b]\naddress = \"05:00.0\"\nuse = \"both\"\n",
            "rack.toml:5:7: `use` is \"both\"; ",
        ),
        ("[hosts.a.ntb.b]\n", "rack.toml:3:"),
        ("[hosts.a.ntb.b]\naddress = \"05\"\n", "rack.toml:4:11: `address` is \"05\"; "),
        ("[hosts.a.ntb.b]\naddress = \"05:00.8\"\n", "rack.toml:4:11: `address` is \"05:00.8\"; "),
        ("[hosts.a.ntb.c]\naddress = \"05:00.0\"\n", "the NTB of a leads to `c`; "),
        ("[hosts.a.ntb.a]\naddress = \"05:00.0\"\n", "the NTB of a leads to `a`; "),
    ] {
        let error = Rack::parse("rack.toml", &file(ntb)).unwrap_err().to_string();
        assert!(error.contains(said), "{error}");
    }
}

#[test]
fn the_network_is_the_default_one_or_what_the_file_says() {
    let rack = Rack::parse("rack.toml", "name = \"lab\"\n[hosts.alpha]\n").unwrap();
    assert_eq!(rack.network, Network::default());
    assert_eq!((rack.network.mtu, rack.network.queues), (1500, 1));
    let text = "name = \"lab\"\n[network]\nsubnet = \"192.168.4.0/24\"\nsubnet6 = \"fd00:1::/64\"\n\
                mtu = 65521\nqueues = 4\nuplinks = [\"alpha/eth1\"]\n[hosts.alpha]\n";
    let network = Rack::parse("rack.toml", text).unwrap().network;
    assert_eq!(network.subnet, Subnet { address: [192, 168, 4, 0].into(), prefix: 24 });
    assert_eq!(network.subnet6.address, "fd00:1::".parse::<std::net::Ipv6Addr>().unwrap());
    assert_eq!((network.mtu, network.queues), (65_521, 4));
    let uplink = Uplink { host: "alpha".to_owned(), interface: "eth1".to_owned() };
    assert_eq!(network.uplinks, [uplink]);
    assert_eq!((network.uplink_vlans, network.flood_limit), (None, 100_000));
    let text = "name = \"lab\"\n[network]\nuplink_vlans = [9, 7, 9]\nflood_limit = 500\n\
                [network.host.alpha]\nvlan = 7\nvlans = []\nlearned_addresses = 8\n[hosts.alpha]\n";
    let network = Rack::parse("rack.toml", text).unwrap().network;
    assert_eq!((network.uplink_vlans, network.flood_limit), (Some(vec![7, 9]), 500));
    let rules = PortRules { vlan: Some(7), vlans: Some(Vec::new()), learned_addresses: 8 };
    assert_eq!(network.hosts, BTreeMap::from([("alpha".to_owned(), rules)]));
}

#[test]
fn a_network_that_cannot_be_is_refused_with_what_is_allowed() {
    for (line, expected) in [
        ("subnet = \"10.77.0.0\"", "`10.77.0.0` is no network"),
        ("subnet = \"10.77.0.1/16\"", "`10.77.0.1/16` has bits of a station"),
        ("subnet = \"10.0.0.0/30\"", "`subnet` is no such network"),
        ("subnet = \"0.0.0.0/33\"", "has a prefix longer than 32 bits"),
        ("subnet = \"fd00::/64\"", "`subnet` is no such network"),
        ("subnet6 = \"10.77.0.0/16\"", "`subnet6` is no such network"),
        ("subnet6 = \"fd00::/48\"", "`subnet6` is no such network"),
        ("subnet = \"10.0.0.0/28\"", "`subnet` has addresses for the node ids up to 28"),
        ("mtu = 1000", "mtu"),
        ("mtu = 65522", "mtu"),
        ("queues = 0", "queues"),
        ("vlan = 1", "unknown key `vlan`"),
        ("uplink_mode = \"dpdk\"", "there is no uplink mode `dpdk`"),
        ("uplink_vlans = [4095]", "`uplink_vlans` has 4095"),
        ("uplink_vlans = 7", "`uplink_vlans`"),
        ("flood_limit = 1", "`flood_limit` is 1"),
        ("host.beta.vlan = 7", "there is no host `beta`"),
        ("host.alpha.vlan = 0", "`vlan` is 0"),
        ("host.alpha.learned_addresses = 2000", "`learned_addresses` is 2000"),
        ("uplinks = [\"eth1\"]", "`eth1` is no interface of a host"),
        ("uplinks = [\"beta/eth1\"]", "there is no host `beta`"),
        ("uplinks = [\"alpha/eth 1\"]", "`eth 1` is no name of a network interface"),
        ("uplinks = [\"alpha/e\", \"alpha/e\"]", "`alpha/e` is there twice"),
    ] {
        let text = format!("name = \"lab\"\n[hosts.alpha]\nnode_id = 400\n[network]\n{line}\n");
        let said = refused(&text);
        assert!(said.contains(expected) && said.starts_with("rack.toml:5:"), "{line}: {said}");
    }
}
