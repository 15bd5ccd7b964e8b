//! The Debian package has what it should, its program runs, and systemd takes its units. It is made of what tests are
//! built from.

mod support;

use std::path::{Path, PathBuf};
use std::process::Command;

/// Runs a program, which must succeed; what it printed.
fn run(command: &mut Command) -> String {
    let output = command.output().unwrap_or_else(|error| panic!("{command:?}: {error}"));
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{command:?}: {errors}");
    String::from_utf8(output.stdout).unwrap()
}

fn has(program: &str) -> bool {
    Command::new(program).arg("--version").output().is_ok()
}

fn top() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

/// Makes the package of what is in `built`, in `folder`; where it is.
fn package(built: &Path, folder: &Path) -> PathBuf {
    let mut make = Command::new(top().join("scripts/package"));
    make.arg(built).arg(folder);
    // Of a fixed age, whatever is committed meanwhile.
    make.env("PACKAGE_COMPRESSION", "none").env("SOURCE_DATE_EPOCH", "1700000000");
    run(&mut make).trim().into()
}

/// The folder with what was built, among it the libraries.
fn built() -> PathBuf {
    let folder = Path::new(env!("CARGO_BIN_EXE_rackbus")).parent().unwrap().to_owned();
    let cargo = std::env::var_os("CARGO").unwrap_or("cargo".into());
    let mut build = Command::new(cargo);
    // What this test's cargo says about this package: build scripts that look at it would run anew, and what depends on
    // them would be built anew, here and when cargo is called next.
    for (name, _) in std::env::vars_os() {
        let name = name.to_string_lossy().into_owned();
        if ["CARGO_PKG_", "CARGO_MANIFEST_", "CARGO_PRIMARY_"].iter().any(|it| name.starts_with(it))
        {
            build.env_remove(&name);
        }
    }
    // As a whole, with the features that the tests have built the dependencies with.
    build.args(["build", "--workspace", "--all-targets"]);
    run(build.env("CARGO_TARGET_DIR", folder.parent().unwrap()).current_dir(top()));
    folder
}

#[test]
fn the_package_has_programs_libraries_units_and_settings() {
    if !has("dpkg-deb") {
        support::not_tested("there is no dpkg-deb here");
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let built = built();
    let made = package(&built, folder.path());
    let name = made.file_name().unwrap().to_str().unwrap();
    assert!(name.starts_with(&format!("rackbus_{}_", env!("CARGO_PKG_VERSION"))), "{name}");
    let dpkg = |what: &str| run(Command::new("dpkg-deb").arg(what).arg(&made));
    let info = dpkg("--info");
    for line in ["Package: rackbus", "Depends: libc6", "conffiles", "postinst"] {
        assert!(info.contains(line), "{line} is not in {info}");
    }
    let contents = dpkg("--contents");
    for (mode, file) in [
        ("-rwxr-xr-x root/root", "./usr/bin/rackbus"),
        ("-rwxr-xr-x root/root", "./usr/lib/libsisci.so"),
        ("-rwxr-xr-x root/root", "./usr/lib/librackbus_accel.so"),
        ("-rw-r--r-- root/root", "./usr/include/dis/sisci_api.h"),
        ("-rw-r--r-- root/root", "./usr/include/rackbus_accel.h"),
        ("-rw-r--r-- root/root", "./usr/lib/systemd/system/rackbus-control.service"),
        ("-rw-r--r-- root/root", "./usr/lib/systemd/system/rackbus-node.service"),
        ("-rw-r----- root/root", "./etc/rackbus/control.env"),
        ("-rw-r----- root/root", "./etc/rackbus/node.env"),
        ("-rw-r--r-- root/root", "./usr/share/man/man1/rackbus.1.gz"),
        ("-rw-r--r-- root/root", "./usr/share/man/man1/rackbus-borrow.1.gz"),
        ("-rw-r--r-- root/root", "./usr/share/bash-completion/completions/rackbus"),
        ("-rw-r--r-- root/root", "./usr/share/doc/rackbus/copyright"),
    ] {
        let found = contents.lines().find(|line| line.split_whitespace().last() == Some(file));
        let found = found.unwrap_or_else(|| panic!("{file} is not in {contents}"));
        assert!(found.starts_with(mode), "{found}");
    }
    assert!(!contents.contains("usr/local"), "{contents}");

    // Made again it is the same, to the byte.
    let other = tempfile::tempdir().unwrap();
    let again = package(&built, other.path());
    let (first, second) = (std::fs::read(&made).unwrap(), std::fs::read(again).unwrap());
    assert!(first == second, "the same files make another package");

    let root = folder.path().join("root");
    run(Command::new("dpkg-deb").arg("--extract").arg(&made).arg(&root));
    let program = root.join("usr/bin/rackbus");
    let version = run(Command::new(&program).arg("--version"));
    assert_eq!(version.trim(), concat!("rackbus ", env!("CARGO_PKG_VERSION")));
    run(Command::new(&program).args(["node-id", "--help"]));

    if !has("systemd-analyze") {
        support::not_tested("there is no systemd-analyze here");
        return;
    }
    for unit in ["rackbus-control.service", "rackbus-node.service"] {
        let path = root.join("usr/lib/systemd/system").join(unit);
        let text = std::fs::read_to_string(&path).unwrap();
        // The program is not installed where the unit names it.
        let text = text.replace("/usr/bin/rackbus", program.to_str().unwrap());
        std::fs::write(&path, text).unwrap();
        let mut verify = Command::new("systemd-analyze");
        let output = verify.args(["verify", "--man=no"]).arg(&path).output().unwrap();
        let said = String::from_utf8_lossy(&output.stderr);
        let own: Vec<&str> = said.lines().filter(|line| line.contains("rackbus")).collect();
        assert!(own.is_empty(), "{own:#?}");
    }
}

/// The units start what there is: their arguments are those of the program.
#[test]
fn the_units_arguments_are_known_to_the_program() {
    for (unit, words, values) in [
        ("control", vec!["control"], vec![("${RACKBUS_LISTEN}", "127.0.0.1:0")]),
        (
            "node",
            vec!["node"],
            vec![("${RACKBUS_HOST}", "beta"), ("${RACKBUS_JOIN}", "https://c:1")],
        ),
    ] {
        let text = std::fs::read_to_string(
            top().join("packaging").join(format!("rackbus-{unit}.service")),
        );
        let text = text.unwrap();
        let line = text.lines().find_map(|line| line.strip_prefix("ExecStart=")).unwrap();
        let mut args: Vec<String> = line.split_whitespace().skip(1).map(str::to_owned).collect();
        assert_eq!(args[..1], words);
        args.retain(|arg| !arg.starts_with("$RACKBUS"));
        for arg in &mut args {
            if let Some((_, value)) = values.iter().find(|(name, _)| name == arg) {
                *arg = (*value).to_owned();
            }
        }
        assert!(args.iter().all(|arg| !arg.contains('$')), "{args:?}");
        // With what says that the words are understood, and nothing is done.
        args.push("--help".to_owned());
        run(Command::new(env!("CARGO_BIN_EXE_rackbus")).args(&args));
        for named in ["/etc/rackbus/", "/run/rackbus/", "/var/lib/rackbus/"] {
            assert!(text.contains(named), "{unit} does not name {named}");
        }
    }
}
