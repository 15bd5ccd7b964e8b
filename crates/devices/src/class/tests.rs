//! What a rack file says of devices, and what is so of each class of the registry.

use rackbus_fabric::rack::LimitCounts;
use rackbus_memory::Handles;
use rackbus_pci::{Endpoint, FunctionState, RestoreError};
use rackbus_qos::ServiceLevel;

use super::*;

fn refused(text: &str) -> String {
    parse_rack("rack.toml", text).unwrap_err().to_string()
}

#[test]
fn a_device_of_no_class_is_refused_where_it_is_and_with_the_classes_that_there_are() {
    let device = |keys: &str| format!("name = \"lab\"\n[hosts.alpha.devices.d]\n{keys}");
    let allowed = "`kind` is one of `nvme`, ";
    let said = refused(&device("kind = \"tape\"\n"));
    let expected = "rack.toml:3:8: there is no kind of device `tape`; ";
    assert!(said.starts_with(&format!("{expected}{allowed}")), "{said}");
    let said = refused(&device("size = 1\n"));
    let expected = "rack.toml:2:22: device alpha/d has no `kind`; ";
    assert!(said.starts_with(&format!("{expected}{allowed}")), "{said}");
    let said = refused(&device("kind = \"gpu\"\nsize = 1\n"));
    let expected = "rack.toml:4:1: unknown key `size` in device alpha/d; allowed are `kind`";
    assert_eq!(said, expected);
}

#[test]
fn two_devices_with_addresses_in_common_are_refused() {
    let rack = |first: &str, second: &str| {
        let card = |name: &str, mac: &str| {
            format!(
                "[hosts.{name}]\n[hosts.{name}.devices.n]\nkind = \"nic\"\nfunctions = 4\nmac = \"{mac}\"\n"
            )
        };
        format!("name = \"lab\"\n{}{}", card("alpha", first), card("beta", second))
    };
    let parsed = |text: &str| parse_rack("rack.toml", text).map(|_| ());
    assert!(parsed(&rack("52:54:00:00:00:00", "52:54:00:00:00:04")).is_ok());
    let said = refused(&rack("52:54:00:00:00:00", "52:54:00:00:00:03"));
    let expected = "rack.toml:9:8: alpha/n.vf4 and beta/n.vf1 have the same Ethernet address, 52:54:00:00:00:03;";
    assert!(said.starts_with(expected), "{said}");
    // A host's own.
    let alone = parse_rack("rack.toml", "name = \"lab\"\n[hosts.alpha]\n").unwrap().0;
    let own = Stations::of(&alone, &BTreeMap::new()).all()[0].mac.to_string();
    let said = refused(&rack(&own, "52:54:00:00:00:04"));
    assert!(said.contains("alpha and alpha/n.vf1 have the same Ethernet address"), "{said}");
}

#[test]
fn what_only_the_model_knows_is_read_and_not_played() {
    let text = "name = \"lab\"\n[hosts.a.devices.g]\nkind = \"gpu\"\n\
                [hosts.a.devices.n]\nkind = \"nvme\"\nsize = \"1 GiB\"\n";
    let (_, devices) = parse_rack("rack.toml", text).unwrap();
    let devices: Vec<_> =
        devices.iter().map(|d| (&*d.function, d.kind, d.config.is_some())).collect();
    assert_eq!(devices, [("a/g", "gpu", false), ("a/n", "nvme", true)]);
}

/// The model is told what each function's lender keeps to, those that inherit it from their device too.
#[test]
fn the_model_is_told_what_bounds_each_function() {
    let text = "name = \"lab\"\n[hosts.a.devices.b]\nkind = \"accelerator\"\nfunctions = 1\n\
                level = \"aes256gcm 1 Gbit/s max 2 Gbit/s out 4 Gbit/s\"\n\
                [hosts.a.devices.c]\nkind = \"accelerator\"\nfunctions = 1\n\
                level = \"zstd 10 kop/s max 20 kop/s\"\n\
                [hosts.a.devices.d]\nkind = \"nvme\"\nsize = \"1 GiB\"\nrate = \"500 MB/s\"\n\
                [hosts.a.devices.e]\nkind = \"nvme\"\nsize = \"1 GiB\"\nrate = \"200 MB/s\"\n\
                [hosts.a.devices.e.functions]\nvf1 = { size = \"4 MiB\" }\n\
                vf2 = { size = \"4 MiB\", rate = \"1 GB/s\", operations = 20000 }\n\
                [hosts.a.devices.m]\nkind = \"memory\"\nsize = \"1 GiB\"\n\
                [hosts.a.devices.n]\nkind = \"nic\"\nfunctions = 2\nrate = \"8 Gbit/s\"\n\
                [hosts.a.devices.n.function.vf2]\nburst = \"1 MiB\"\n\
                [hosts.a.devices.o]\nkind = \"nvme\"\nsize = \"1 GiB\"\n";
    let (rack, _) = parse_rack("rack.toml", text).unwrap();
    let told = rack.functions().map(|(name, function)| {
        let limits = function.timing.limits.iter();
        let limits = limits.map(|limit| (limit.counts, limit.rate, limit.burst));
        (name.to_string(), limits.collect::<Vec<_>>())
    });
    let (bytes, operations) = (LimitCounts::Bytes, LimitCounts::Operations);
    let (read, written) = (LimitCounts::BytesRead, LimitCounts::BytesWritten);
    let told: Vec<_> = told.collect();
    let both = |burst| vec![(read, 1_000_000_000, burst), (written, 1_000_000_000, burst)];
    // A drive's buckets hold what comes in 50 ms, a network function's what comes in 5 ms, unless it says `burst`.
    let expected = [
        ("a/b.vf1", vec![]),
        ("a/c.vf1", vec![]),
        ("a/d", vec![(bytes, 500_000_000, 25_000_000)]),
        ("a/e.vf1", vec![(bytes, 200_000_000, 10_000_000)]),
        ("a/e.vf2", vec![(bytes, 1_000_000_000, 50_000_000), (operations, 20_000, 1_000)]),
        ("a/m", vec![]),
        ("a/n.vf1", both(5_000_000)),
        ("a/n.vf2", both(1 << 20)),
        ("a/o", vec![]),
    ];
    assert_eq!(told, expected.map(|(name, limits)| (name.to_owned(), limits)));
    // Of an accelerator it is told the level, from which these follow.
    let levels =
        rack.functions().filter_map(|(_, function)| function.timing.turns.as_ref()?.level.clone());
    let expected = ["aes256gcm 1 Gbit/s max 2 Gbit/s out 4 Gbit/s", "zstd 10 kop/s max 20 kop/s"]
        .map(|level| level.parse::<ServiceLevel>().unwrap());
    let levels: Vec<ServiceLevel> = levels.map(|level| level.parse().unwrap()).collect();
    assert_eq!(levels, expected);
}

/// A new class is added here with what the rack file has to say of it at least.
const LEAST: [(&str, &[&str], &str); 4] = [
    ("nvme", &BACKINGS, "size = \"1 MiB\"\n"),
    ("memory", &BACKINGS, "size = \"1 MiB\"\nat_return = \"keep\"\n"),
    ("nic", &[""], "functions = 1\n"),
    ("accelerator", &[""], "functions = 1\n"),
];
const BACKINGS: [&str; 2] = ["backing = \"memory\"\n", "backing = \"file\"\n"];
/// A class, and what else the rack file says of it.
const PERSISTENT: &str = "nvme, persistent = \"1 MiB\"\n";

/// The table "Front and medium" of ARCHITECTURE.md: for each class, whether its front runs at a borrower of the
/// same machine, at one of another machine, and whether it can be in a host's own PCI tree. What the configuration
/// says, the model does.
#[test]
fn the_front_of_each_class_runs_where_its_medium_is_available() {
    const PLACES: [(&str, bool, bool, bool); 7] = [
        ("nvme", true, true, true),
        (PERSISTENT, true, true, false),
        ("memory", true, true, false),
        ("nic", true, true, false),
        ("accelerator", true, true, true),
        ("upstream", false, false, false),
        ("vfio", false, false, true),
    ];
    let folder = tempfile::tempdir().unwrap();
    let network = Arc::new(rackbus_net::LocalNetwork::new([]));
    let folders = Folders::new(folder.path(), folder.path()).with_network(network);
    for (named, at_borrower, on_another_machine, in_host) in PLACES {
        let (class, more) = named.split_once(", ").unwrap_or((named, ""));
        let least = LEAST.iter().find(|(name, ..)| *name == class);
        let keys = match class {
            "upstream" => "socket = \"./d.sock\"\n",
            "vfio" => "address = \"0000:03:00.0\"\n",
            _ => least.unwrap().2,
        };
        let text = format!("name = \"lab\"\n[hosts.a.devices.d]\nkind = \"{class}\"\n{keys}{more}");
        let (_, devices) = parse_rack("rack.toml", &text).unwrap();
        let config = devices[0].config.clone().unwrap();
        let places = (config.is_separable(), config.is_carried());
        assert_eq!(places, (at_borrower, on_another_machine), "{named}");
        assert_eq!(config.has_windows(), in_host, "{named}");
        if least.is_some() {
            let mut endpoint = Endpoint::new(config.model(&folders).unwrap());
            assert_eq!(endpoint.serve_medium(None).is_ok(), at_borrower, "{class}");
        }
    }
    let named: Vec<&str> = PLACES.iter().map(|(class, ..)| *class).collect();
    let missing = CLASSES.iter().map(|class| class.name()).find(|name| {
        // Classes that only the timing model knows have no front.
        !["gpu", "dma"].contains(name) && !named.contains(name)
    });
    assert_eq!(missing, None, "a class is not in the table");
}

/// Whoever runs a device of whatever class can hand it over to another process.
#[test]
fn a_device_of_every_class_goes_on_from_its_state_once() {
    let folder = tempfile::tempdir().unwrap();
    let folders = Folders::new(folder.path(), folder.path());
    let mut classes: Vec<&str> = Vec::new();
    for (class, backings, keys) in LEAST {
        for backing in backings {
            let text =
                format!("name = \"lab\"\n[hosts.a.devices.d]\nkind = \"{class}\"\n{backing}{keys}");
            let (_, devices) = parse_rack("rack.toml", &text).unwrap();
            let config = devices[0].config.clone().unwrap();
            let mut first = Endpoint::new(config.model(&folders).unwrap());
            let saved = first.save().unwrap();
            drop(first);
            let state = FunctionState::from_bytes(&saved.state.to_bytes().unwrap()).unwrap();
            let copies = |fds: &[OwnedFd]| fds.iter().map(|fd| fd.try_clone().unwrap()).collect();
            let go_on_with = |medium| {
                let model = config.resume(&folders, medium);
                let model = model.map_err(|error| RestoreError::Invalid(error.to_string()))?;
                let mut next = Endpoint::new(model);
                next.restore(&state, copies(&saved.descriptors))
            };
            if !saved.medium.is_empty() {
                let without = go_on_with(Vec::new());
                assert!(without.is_err(), "{class} with {backing} goes on without its medium");
            }
            let go_on = || go_on_with(copies(&saved.medium));
            go_on().unwrap_or_else(|error| panic!("{class} with {backing}: {error}"));
            assert!(matches!(go_on(), Err(RestoreError::Taken)));
        }
        classes.push(class);
    }
    assert_eq!(state_versions().map(|(class, _)| class).collect::<Vec<_>>(), classes);
}

#[test]
fn a_front_of_no_class_is_refused() {
    for class in ["tape", "gpu"] {
        let front = front(class, "{}", MediumAccess::Handles(Handles::new()), Lost::new(|| {}));
        let said = front.err().expect("there is none").to_string();
        assert_eq!(said, format!("there is no front for a medium of class {class:?}"));
    }
}
