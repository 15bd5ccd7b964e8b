//! The functions of one drive, each with a part of it: what the rack file says of them.

use std::sync::Arc;

use rackbus_fabric::rack::format_size;
use rackbus_fabric::text::{Named, Parsed, SIZES, Section, wrong};

use super::super::backing::SharedFile;
use super::super::limits::LimitDelays;
use super::super::parts::ALIGNMENT;
use super::{DrivePart, DriveSection, MIB, is_serial, limits};

/// Functions of a drive at most.
const MOST: usize = 64;

const NAMES: &str = "functions are numbered without a gap: [...functions.vf1], [...functions.vf2]";

/// Reads `functions` of `drive`: parts that hold for all what the drive's section says beside.
pub fn read(drive: &DriveSection, keys: &Section<'_>) -> Parsed<Vec<DriveSection>> {
    let tables = keys.tables("functions")?;
    if tables.is_empty() || tables.len() > MOST {
        let what = format!("device {} has {} functions", drive.function, tables.len());
        return wrong(keys.place("functions"), what, format!("it has 1 to {MOST}"));
    }
    if keys.get("serial").is_some() {
        let what = format!("device {} has functions", drive.function);
        return wrong(keys.place("serial"), what, "`serial` is written to each of them");
    }
    let mut parts = Vec::new();
    for number in 1..=tables.len() {
        let name = format!("vf{number}");
        let Some(table) = tables.iter().find(|table| table.name == name) else {
            let other = tables.iter().find(|table| !is_one_of(table.name, tables.len()));
            let (span, other) = other
                .map_or((keys.place("functions"), ""), |table| (table.span.clone(), table.name));
            return wrong(span, format!("there is `{other}` and no `{name}`"), NAMES);
        };
        parts.push((name, table, size(drive, table)?));
    }
    let all: u64 = parts.iter().map(|(_, _, size)| *size).fold(0, u64::saturating_add);
    if all > drive.size {
        let (all, has) = (format_size(all), format_size(drive.size));
        let what = format!("the functions of {} have {all} together", drive.function);
        return wrong(keys.place("functions"), what, format!("the drive has {has}"));
    }
    let sizes = parts.iter().map(|(name, _, size)| (name.clone(), *size)).collect();
    let shared = Arc::new(SharedFile::new(sizes, drive.size, drive.block_size));
    let part = |(name, table, size): (String, &Named<'_>, u64)| {
        let keys = section(drive, table)?;
        let own = limits(&keys)?;
        let mut limits = drive.limits;
        limits.bytes = own.bytes.or(limits.bytes);
        limits.operations = own.operations.or(limits.operations);
        let function = format!("{}.{name}", drive.function);
        let serial = match keys.text("serial", super::SERIALS)? {
            Some((text, _)) if is_serial(text) => text.to_owned(),
            Some((text, span)) => {
                return wrong(span, format!("`{text}` is no serial number"), super::SERIALS);
            }
            None => super::default_serial(&function),
        };
        let (drive_name, shared) = (drive.function.clone(), shared.clone());
        let part = Some(DrivePart { drive: drive_name, name, shared });
        let delays = LimitDelays::default();
        Ok(DriveSection { function, size, serial, limits, delays, part, ..drive.clone() })
    };
    parts.into_iter().map(part).collect()
}

fn is_one_of(name: &str, count: usize) -> bool {
    (1..=count).any(|number| name == format!("vf{number}"))
}

fn section<'a>(drive: &DriveSection, table: &Named<'a>) -> Parsed<Section<'a>> {
    let place = format!("function {}.{}", drive.function, table.name);
    Section::new(table.table, table.span.clone(), place, &["size", "rate", "operations", "serial"])
}

fn size(drive: &DriveSection, table: &Named<'_>) -> Parsed<u64> {
    let keys = section(drive, table)?;
    let size = keys.require("size", keys.size("size", MIB, drive.size)?, SIZES)?;
    if !size.is_multiple_of(ALIGNMENT) {
        let what = format!("`size` is {}", format_size(size));
        return wrong(keys.place("size"), what, format!("it is a multiple of {ALIGNMENT} bytes"));
    }
    Ok(size)
}

#[cfg(test)]
mod tests {
    use crate::class::parse_rack;
    use crate::place::Folders;

    const DRIVE: &str =
        "name = \"lab\"\n[hosts.alpha.devices.nvme0]\nkind = \"nvme\"\nsize = \"8 MiB\"\n";

    fn functions(keys: &str) -> Result<Vec<String>, String> {
        let text = format!("{DRIVE}{keys}");
        let (_, devices) = parse_rack("rack.toml", &text).map_err(|error| error.to_string())?;
        let line = |device: &crate::class::RackDevice| {
            format!("{}: {}", device.function, device.config.as_ref().unwrap().detail())
        };
        Ok(devices.iter().map(line).collect())
    }

    #[test]
    fn each_function_has_a_size_and_the_limits_of_the_drive_unless_it_has_its_own() {
        let keys = "rate = \"200 MB/s\"\n[hosts.alpha.devices.nvme0.functions]\n\
                    vf2 = { size = \"4 MiB\", operations = 5000 }\n\
                    vf1 = { size = \"2 MiB\", rate = \"1 GB/s\" }\n";
        let expected = [
            "alpha/nvme0.vf1: 2 MiB, 512 B blocks, file, 1 GB/s",
            "alpha/nvme0.vf2: 4 MiB, 512 B blocks, file, 200 MB/s, 5000 op/s",
        ];
        assert_eq!(functions(keys).unwrap(), expected);
    }

    #[test]
    fn what_is_wrong_with_functions_is_named_with_its_place() {
        let table = |keys: &str| format!("[hosts.alpha.devices.nvme0.functions]\n{keys}");
        let cases = [
            (table(""), "device alpha/nvme0 has 0 functions; it has 1 to 64"),
            (
                table("vf2 = { size = \"1 MiB\" }"),
                "6:1: there is `vf2` and no `vf1`; functions are",
            ),
            (table("one = { size = \"1 MiB\" }"), "6:1: there is `one` and no `vf1`"),
            (table("vf1 = { }"), "function alpha/nvme0.vf1 has no `size`"),
            (table("vf1 = { size = \"9 MiB\" }"), "`size` is 9 MiB; it is from 1 MiB to 8 MiB"),
            (table("vf1 = { size = 1050000 }"), "it is a multiple of 4096 bytes"),
            (
                table("vf1 = { size = \"5 MiB\" }\nvf2 = { size = \"4 MiB\" }"),
                "the functions of alpha/nvme0 have 9 MiB together; the drive has 8 MiB",
            ),
            (
                table("vf1 = { size = \"1 MiB\", rate = \"9 MB/s\" }"),
                "`rate` is 9 MB/s; it is 10 MB/s or more",
            ),
            (table("vf1 = { size = \"1 MiB\", ops = 4 }"), "unknown key `ops`"),
            (table("vf1 = 4"), "`vf1` is the number 4"),
        ];
        for (keys, expected) in cases {
            let said = functions(&keys).unwrap_err();
            assert!(said.contains(expected), "{keys:?}\n gives {said}\n not {expected}");
        }
    }

    #[test]
    fn functions_have_parts_of_one_file_that_nobody_else_can_have_and_parts_stay() {
        let dir = tempfile::tempdir().unwrap();
        let folders = Folders::new(dir.path(), dir.path());
        let devices = |functions: &str| {
            let text = format!("{DRIVE}[hosts.alpha.devices.nvme0.functions]\n{functions}");
            parse_rack("rack.toml", &text).unwrap().1
        };
        let model = |devices: &[crate::class::RackDevice], index: usize| {
            devices[index].config.as_ref().unwrap().model(&folders).map(drop)
        };
        let two = "vf1 = { size = \"2 MiB\" }\nvf2 = { size = \"4 MiB\" }\n";
        let first = devices(two);
        let one = first[0].config.as_ref().unwrap().model(&folders).unwrap();
        model(&first, 1).unwrap();
        assert_eq!(std::fs::metadata(dir.path().join("nvme0.img")).unwrap().len(), 8 << 20);
        let said = model(&devices(two), 0).unwrap_err().to_string();
        assert!(said.contains("is used by another process"), "{said}");
        drop(one);
        model(&devices(two), 1).unwrap();
        let said = model(&devices("vf1 = { size = \"3 MiB\" }"), 0).unwrap_err().to_string();
        assert!(
            said.contains("vf1 cannot grow from 2097152 to 3145728 bytes: 0 bytes are free"),
            "{said}"
        );
        let said = model(&devices("vf1 = { size = \"1 MiB\" }"), 0).unwrap_err().to_string();
        assert!(
            said.contains("parts do not become smaller; to give up a function's data"),
            "{said}"
        );
        let grown = devices("vf1 = { size = \"2 MiB\" }\nvf2 = { size = \"6 MiB\" }\n");
        model(&grown, 1).unwrap();
    }
}
