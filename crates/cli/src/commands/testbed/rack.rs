//! Which rack a testbed is of: that of a file, or one of so many machines.

use std::path::Path;

use rackbus_devices::class::parse_rack;
use rackbus_fabric::rack::Rack;
use rackbus_identity::Subject;

use super::{BRIDGE_MACHINE, CONTROL_MACHINE, NAMES};
use crate::commands::{misread, read_text};
use crate::output::Failure;

/// The book's example, in which the first host has a drive. What others there are is written after that.
const EXAMPLE: &str = include_str!("../../../../../examples/machines/rack.toml");
/// The example's second host, before which all of the first one is.
const SECOND: &str = "[hosts.beta]";

/// The rack that `asked` names, by the number of its machines or as a file, with its file's text.
///
/// # Errors
/// Wrong usage, where there is no such file, it is no rack file, or there cannot be so many machines.
pub fn asked_for(asked: &Path) -> Result<(Rack, String), Failure> {
    let is_number = |text: &&str| !text.is_empty() && text.bytes().all(|it| it.is_ascii_digit());
    let number = asked.to_str().filter(is_number);
    let text = match number {
        Some(number) => of_machines(number)?,
        None => read_text(asked)?,
    };
    let (rack, _) = parse_rack(&asked.display().to_string(), &text).map_err(misread)?;
    Ok((rack, text))
}

/// The names of a testbed's machines: that of the control plane, or those of `bare` where there are any, then the hosts'.
///
/// # Errors
/// Wrong usage, where one is the testbed's own, cannot be a machine's name, or is there twice.
pub fn machine_names(rack: &Rack, bare: &[String]) -> Result<Vec<String>, Failure> {
    let reserved = [CONTROL_MACHINE, BRIDGE_MACHINE];
    if let Some(host) = rack.hosts.iter().find(|host| reserved.contains(&host.name.as_str())) {
        let error = format!("a machine of the testbed itself is named {}", host.name);
        return Err(Failure::usage(error, "give the host another name"));
    }
    let hosts = rack.hosts.iter().map(|host| host.name.clone());
    if bare.is_empty() {
        return Ok([CONTROL_MACHINE.to_owned()].into_iter().chain(hosts).collect());
    }
    let mut names: Vec<String> = Vec::new();
    for name in bare {
        let is_taken = names.contains(name)
            || reserved.contains(&name.as_str())
            || rack.hosts.iter().any(|host| host.name == *name);
        if is_taken || !Subject::Node(name.clone()).is_valid() {
            let error = format!("no further machine can be named {name:?}");
            let remedy =
                "use lower-case letters, digits and `-`, and no name of another machine or host";
            return Err(Failure::usage(error, remedy));
        }
        names.push(name.clone());
    }
    names.extend(hosts);
    Ok(names)
}

/// The text of a rack file with so many hosts.
fn of_machines(number: &str) -> Result<String, Failure> {
    let count = number.parse().ok().filter(|count| (2..=NAMES.len()).contains(count));
    let count: usize = count.ok_or_else(|| {
        let error = format!("a testbed of {number} machines cannot be made by their number");
        let remedy = format!(
            "name 2 to {}, or a rack file with its hosts; a file of that name is ./{number}",
            NAMES.len()
        );
        Failure::usage(error, remedy)
    })?;
    let first = EXAMPLE.split(SECOND).next().unwrap_or_default();
    let first = first.replace("name = \"machines\"", "name = \"testbed\"");
    let others = NAMES[1..count].iter().map(|name| format!("[hosts.{name}]\n"));
    Ok(first + &others.collect::<String>())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_number_is_a_rack_of_so_many_machines_of_which_the_first_has_a_drive() {
        for count in 2..=NAMES.len() {
            let (rack, text) = asked_for(Path::new(&count.to_string())).unwrap();
            let names: Vec<&str> = rack.hosts.iter().map(|host| host.name.as_str()).collect();
            assert_eq!(names, NAMES[..count], "{text}");
            let drives: Vec<usize> = rack.hosts.iter().map(|host| host.devices.len()).collect();
            assert_eq!((drives[0], drives[1..].iter().sum::<usize>()), (1, 0), "{text}");
            assert_eq!(rack.name, "testbed");
        }
        for wrong in ["0", "1", "9", "99999999999999999999999"] {
            let refused = asked_for(Path::new(wrong)).unwrap_err();
            assert!(refused.usage && refused.remedy.contains("2 to 8"), "{refused:?}");
        }
    }

    #[test]
    fn bare_machines_have_names_of_their_own() {
        let (rack, _) = asked_for(Path::new("2")).unwrap();
        let named = |bare: &[&str]| {
            machine_names(&rack, &bare.iter().map(|it| (*it).to_owned()).collect::<Vec<_>>())
        };
        assert_eq!(named(&[]).unwrap(), ["control", "alpha", "beta"]);
        assert_eq!(named(&["c1", "c2"]).unwrap(), ["c1", "c2", "alpha", "beta"]);
        for wrong in [&["c1", "c1"][..], &["alpha"], &["control"], &["bridge"], &["C1"], &[""]] {
            assert!(named(wrong).unwrap_err().usage, "{wrong:?}");
        }
    }

    #[test]
    fn what_is_no_number_is_a_file() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("3");
        std::fs::write(&file, "name = \"lab\"\n[hosts.alpha]\n").unwrap();
        let (rack, _) = asked_for(&file).unwrap();
        assert_eq!((rack.name.as_str(), rack.hosts.len()), ("lab", 1));
        assert!(asked_for(&folder.path().join("missing.toml")).unwrap_err().usage);
    }
}
