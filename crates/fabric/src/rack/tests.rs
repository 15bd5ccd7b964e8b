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
fn everything_can_be_said() {
    let text = r#"
        name = "lab"
        [control]
        lease_ttl = "2 s"
        return_grace = "500 ms"
        [hosts.zeta]
        memory = "64 GiB"
        iommu = false
        [hosts.zeta.devices.disk]
        kind = "nvme"
        size = "1 TB"
        block_size = 4096
        backing = "/dev/sdb"
        serial = "S1"
        [hosts.eta]
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
    assert_eq!(rack.control, Control { lease_ttl_ms: 2000, return_grace_ms: 500 });
    let DeviceKind::Nvme(disk) = &rack.hosts[0].devices[0].kind else { panic!("a drive") };
    assert_eq!((disk.size, disk.block_size), (1_000_000_000_000, 4096));
    assert_eq!(disk.backing, Backing::Path("/dev/sdb".into()));
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
            format!("{head}sise = 1"),
            "rack.toml:4:1: unknown key `sise` in device alpha/nvme0; did you mean `size`?",
        ),
        (head.to_owned(), "rack.toml:2:22: device alpha/nvme0 has no `size`"),
        (
            format!("{head}size = \"1 KiB\""),
            "rack.toml:4:8: `size` is 1 KiB; it is from 1 MiB to 64 TiB",
        ),
        (format!("{head}size = \"lots\""), "`size` is no size"),
        (format!("{head}size = 18446744073709551616"), "`size` is no size"),
        (format!("{head}size = \"99999999 TiB\""), "`size` is no size"),
        (format!("{head}size = 1048577"), "multiple of the block size"),
        (format!("{head}size = -5"), "`size` is no size"),
        (
            format!("{head}size = \"1 GiB\"\nblock_size = 1024"),
            "rack.toml:5:14: `block_size` is 1024; a block has 512 or 4096 bytes",
        ),
        (format!("{head}size = \"1 GiB\"\nbacking = \"memry\""), "there is no backing `memry`"),
        (format!("{head}size = \"1 GiB\"\nserial = \"äöü\""), "is no serial number"),
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
            "name = \"lab\"\n[hosts.alpha.devices.d]\nkind = \"tape\"\n".to_owned(),
            "rack.toml:3:8: there is no kind of device `tape`; `kind` is one of `nvme`, `gpu`, `nic`, `accelerator`, `dma`",
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

#[test]
fn serial_numbers_differ() {
    let device = |host: &str| {
        let text = format!(
            "name = \"lab\"\n[hosts.{host}.devices.a-rather-long-name]\nkind = \"nvme\"\nsize = \"1 GiB\""
        );
        let rack = Rack::parse("rack.toml", &text).unwrap();
        let DeviceKind::Nvme(nvme) = &rack.hosts[0].devices[0].kind else { panic!("a drive") };
        nvme.serial.clone()
    };
    assert_ne!(device("alpha"), device("alphb"));
    assert!(device("alpha").len() <= 20);
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
    assert_eq!(gpu.kind.word(), "gpu");
    let window = &rack.fabric.as_ref().unwrap().windows[0];
    assert_eq!((window.at, window.size, window.address), (64 << 30, 1 << 30, 0));
    let wrong = text.replace("to = \"b\"", "to = \"c\"");
    let error = Rack::parse("rack.toml", &wrong).unwrap_err().to_string();
    assert!(error.starts_with("rack.toml:9:6: there is no host `c`"), "{error}");
    let wrong = text.replace("\"gpu\"", "\"gpu\"\nsize = \"1 GiB\"");
    assert!(Rack::parse("rack.toml", &wrong).is_err());
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
