//! What the rack file says of an accelerator, and the levels that its functions' users are promised.

use super::*;
use crate::class::{DeviceConfig, LentTo, parse_rack};

#[test]
fn what_the_rack_file_says_is_read_or_refused_with_its_place() {
    let read = |keys: &str| {
        let head = "name = \"lab\"\n[hosts.alpha.devices.accel0]\nkind = \"accelerator\"\n";
        let parsed = parse_rack("rack.toml", &format!("{head}{keys}"));
        let shown = parsed.map(|(rack, devices)| {
            let names = rack.functions().map(|(name, _)| name.to_string());
            let listed = devices.iter().map(|device| device.function.clone());
            assert!(names.eq(listed), "the functions of rack and devices differ");
            let last = devices.last().unwrap();
            let detail = last.config.as_ref().map_or("modelled".to_owned(), |c| c.detail());
            format!("{}: {detail}", last.function)
        });
        shown.unwrap_or_else(|error| error.to_string())
    };
    assert_eq!(read(""), "alpha/accel0: modelled");
    assert_eq!(read("functions = 3"), "alpha/accel0.vf3: 1 engine, shared");
    let all = "functions = 2\nworkers = 2\nslice = \"100 us\"\nlevel = \"sha256 1 Gbit/s\"";
    assert_eq!(read(all), "alpha/accel0.vf2: 2 engines, sha256 1 Gbit/s message 4 KiB");
    let off = "functions = 2\nshaping = \"off\"";
    assert_eq!(read(off), "alpha/accel0.vf2: 1 engine, not shaped");
    for (keys, expected) in [
        (
            "functions = 1\nshaping = \"off\"\nlevel = \"sha256 1 Gbit/s\"",
            "rack.toml:6:9: `level` cannot be kept with shaping = \"off\"; leave out one of the two",
        ),
        (
            "functions = 1\nprovider = \"sha256 1 Gbit/s\"\nshaping = \"off\"",
            "rack.toml:5:12: `provider` cannot be kept with shaping",
        ),
        ("functions = 1\nshaping = \"no\"", "rack.toml:5:11: `shaping` is no; `shaping` is \"on\""),
        ("shaping = \"off\"", "rack.toml:4:11: device alpha/accel0 has no `functions`"),
        ("functions = 0", "rack.toml:4:13: `functions` is 0; `functions` is a whole number from 1"),
        ("workers = 2", "rack.toml:4:11: device alpha/accel0 has no `functions`"),
        (
            "functions = 1\nslice = \"1 us\"",
            "rack.toml:5:9: `slice` is too short; it is from 10 us",
        ),
        ("functions = 1\nslice = \"1 s\"", "rack.toml:5:9: `slice` is 1 s; it is at most 10000 us"),
        ("functions = 1\nlevel = \"fast\"", "rack.toml:5:9: there is no rate; a service level is"),
        ("functions = 1\nsize = 1", "rack.toml:5:1: unknown key `size`"),
        ("functions = 1\nprovider = \"sha256\"", "rack.toml:5:12: there is no rate"),
    ] {
        let said = read(keys);
        assert!(said.contains(expected), "{keys:?}\n gives {said}\n not {expected}");
    }
}

/// A function whose model failed and is made anew while its borrower has it.
#[test]
fn a_model_that_is_made_anew_has_the_level_that_its_user_was_promised() {
    let rack =
        "name = \"lab\"\n[hosts.alpha.devices.accel0]\nkind = \"accelerator\"\nfunctions = 2";
    let (_, devices) = parse_rack("rack.toml", rack).unwrap();
    let [first, second] = [0, 1].map(|number| devices[number].config.clone().unwrap());
    let folders = crate::Folders::new("/nowhere", "/nowhere");
    let model = first.model(&folders).unwrap();
    let refused = first.set_level(Some("sha256 1000000 Gbit/s"), LentTo::Borrower).unwrap_err();
    let fits = refused.split("; ").nth(1).unwrap().replace(" would fit", "");
    let level = format!("sha256 {fits}");
    first.set_level(Some(&level), LentTo::Borrower).unwrap();
    let _other = second.model(&folders).unwrap();
    drop(model);
    // It is not sold while there is no model, either.
    second.set_level(Some(&level), LentTo::Borrower).unwrap_err();
    let model = first.model(&folders).unwrap();
    assert_eq!(first.level().as_deref().map(|it| it.starts_with(&level)), Some(true));
    second.set_level(Some(&level), LentTo::Borrower).unwrap_err();
    // The lease has ended, and so has the promise.
    first.set_level(None, LentTo::Nobody).unwrap();
    second.set_level(Some(&level), LentTo::Borrower).unwrap();
    drop(model);
    first.model(&folders).unwrap();
}

/// As after a restart in which operations are measured to be dearer: what was sold is more than there is.
#[test]
fn a_level_that_was_promised_is_kept_though_no_more_of_it_would_fit() {
    let (configs, models) = functions("");
    let [first, second, third] = &configs[..] else { panic!("there are three") };
    let most = fits(&first.set_level(Some(TOO_MUCH), LentTo::Borrower).unwrap_err());
    first.set_level(Some(&most), LentTo::Borrower).unwrap();
    second.set_level(Some(&most), LentTo::Borrower).unwrap_err();
    second.resume_level(Some(&most), LentTo::Borrower).unwrap();
    let has =
        |config: &Arc<dyn DeviceConfig>| config.level().is_some_and(|it| it.starts_with(&most));
    assert!(has(first) && has(second), "{:?}", second.level());
    // Who attaches again with it, and whose model is made anew, has it too.
    second.change_level(Some(&most)).unwrap();
    drop(models);
    let folders = crate::Folders::new("/nowhere", "/nowhere");
    let models: Vec<_> = configs.iter().map(|config| config.model(&folders).unwrap()).collect();
    assert!(has(first) && has(second), "{:?}", second.level());
    // Nothing more is promised, until there is room for it.
    third.set_level(Some("sha256 8 Mbit/s"), LentTo::Borrower).unwrap_err();
    first.set_level(None, LentTo::Nobody).unwrap();
    third.set_level(Some("sha256 0 Mbit/s weight 2"), LentTo::Borrower).unwrap();
    second.change_level(Some("sha256 8 Mbit/s")).unwrap();
    third.change_level(Some("sha256 8 Mbit/s")).unwrap();
    drop(models);
}

type Configs = Vec<Arc<dyn DeviceConfig>>;

/// Functions of an accelerator with these keys, each with its model, and what of `sha256` fits beside what is promised.
fn functions(keys: &str) -> (Configs, Vec<Box<dyn Function>>) {
    let rack = format!(
        "name = \"lab\"\n[hosts.alpha.devices.accel0]\nkind = \"accelerator\"\nfunctions = 3\n{keys}"
    );
    let (_, devices) = parse_rack("rack.toml", &rack).unwrap();
    let configs: Vec<_> = devices.iter().map(|device| device.config.clone().unwrap()).collect();
    let folders = crate::Folders::new("/nowhere", "/nowhere");
    let models = configs.iter().map(|config| config.model(&folders).unwrap()).collect();
    (configs, models)
}

const TOO_MUCH: &str = "sha256 1000000 Gbit/s";

fn fits(refused: &str) -> String {
    format!("sha256 {}", refused.split("; ").nth(1).unwrap().replace(" would fit", ""))
}

#[test]
fn a_level_is_changed_while_it_is_used_and_a_refused_one_changes_nothing() {
    let (configs, _models) = functions("");
    let [first, second, _] = &configs[..] else { panic!("there are three") };
    first.set_level(Some("sha256 8 Mbit/s"), LentTo::Borrower).unwrap();
    let most = fits(&first.change_level(Some(TOO_MUCH)).unwrap_err());
    assert_eq!(first.level().unwrap(), "sha256 8 Mbit/s message 4 KiB");
    first.change_level(Some(&most)).unwrap();
    second.set_level(Some(&most), LentTo::Borrower).unwrap_err();
    first.change_level(Some("sha256 8 Mbit/s")).unwrap();
    second.set_level(Some("sha256 80 Mbit/s"), LentTo::Borrower).unwrap();
    first.change_level(None).unwrap();
    assert_eq!(first.level(), None);
}

/// Nothing is promised by a device that does not shape; who borrows without a level has it.
#[test]
fn a_level_on_an_accelerator_that_does_not_shape_is_refused_with_the_reason() {
    let (configs, mut models) = functions("shaping = \"off\"");
    for level in ["sha256 8 Mbit/s", "sha256 0 Mbit/s weight 2"] {
        let refused = configs[0].set_level(Some(level), LentTo::Borrower).unwrap_err();
        assert!(refused.contains("shaping = \"off\""), "{refused}");
        configs[0].change_level(Some(level)).unwrap_err();
    }
    configs[0].set_level(None, LentTo::Borrower).unwrap();
    configs[1].set_level(None, LentTo::Owner).unwrap();
    assert_eq!((configs[0].level(), configs[1].level()), (None, None));
    // What is counted, is counted all the same.
    assert!(configs[0].shaping().contains(&("violations", 0)));
    models.clear();
}

/// The host that has the device does its own work like another tenant, whose level is kept for it.
#[test]
fn what_is_kept_for_the_devices_own_host_is_sold_to_nobody() {
    let own = "crc32c 8 Mbit/s message 4 KiB weight 3";
    let (configs, models) = functions(&format!("provider = \"{own}\""));
    let [first, second, third] = &configs[..] else { panic!("there are three") };
    let most = fits(&first.set_level(Some(TOO_MUCH), LentTo::Borrower).unwrap_err());
    first.set_level(Some(&most), LentTo::Borrower).unwrap();
    assert_eq!(second.level(), None);
    second.set_level(None, LentTo::Owner).unwrap();
    third.set_level(None, LentTo::Owner).unwrap();
    assert_eq!((second.level().as_deref(), third.level()), (Some(own), None), "the first has it");
    // A model that is made anew for the same user has it too, and so has who asked for another level meanwhile.
    drop(models);
    let folders = crate::Folders::new("/nowhere", "/nowhere");
    let models: Vec<_> = configs.iter().map(|config| config.model(&folders).unwrap()).collect();
    assert_eq!(second.level().as_deref(), Some(own));
    second.change_level(Some(TOO_MUCH)).unwrap_err();
    second.change_level(Some("crc32c 0 Gbit/s weight 2")).unwrap();
    third.change_level(None).unwrap();
    assert_eq!(third.level().as_deref(), Some(own), "it was free");
    third.set_level(None, LentTo::Nobody).unwrap();
    second.change_level(None).unwrap();
    assert_eq!(second.level().as_deref(), Some(own));
    drop(models);
}
