//! What `scripts/install-sisci` installs: programs are built with it as SISCI's own makefiles do, and the
//! tools find the library.

mod support;

use std::path::Path;
use std::process::Command;

use support::text;

fn good(command: &mut Command) -> String {
    let output = command.output().unwrap_or_else(|error| panic!("{command:?}: {error}"));
    assert!(output.status.success(), "{command:?}: {}", text(&output));
    text(&output)
}

/// What a binary says of itself: its name, and those of what it needs.
fn dynamic(binary: &Path) -> String {
    good(Command::new("readelf").arg("-d").arg(binary))
}

#[test]
fn programs_need_the_library_by_its_name_wherever_it_was() {
    let folder = tempfile::tempdir().unwrap();
    let test = std::env::current_exe().unwrap();
    let library = test.parent().unwrap().join("libsisci.so");
    let name = "[libsisci.so]";
    assert!(dynamic(&library).lines().any(|it| it.contains("SONAME") && it.contains(name)));
    // Linked by its path, not by -lsisci.
    let (source, binary) = (folder.path().join("program.c"), folder.path().join("program"));
    std::fs::write(&source, "void SCITerminate(void);\nint main(void) { SCITerminate(); }\n")
        .unwrap();
    good(Command::new("gcc").arg("-o").arg(&binary).arg(&source).arg(&library));
    assert!(dynamic(&binary).lines().any(|it| it.contains("NEEDED") && it.contains(name)));
}

#[test]
fn programs_are_built_with_what_is_installed() {
    let folder = tempfile::tempdir().unwrap();
    let test = std::env::current_exe().unwrap();
    let install = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../scripts/install-sisci");
    good(
        Command::new(install)
            .arg("/opt/DIS")
            .env("DESTDIR", folder.path())
            .env("SISCI_LIB", test.parent().unwrap())
            .env("CARGO_TARGET_DIR", env!("CARGO_TARGET_TMPDIR"))
            // What is there is not built again.
            .env("CARGO", "false")
            .env_remove("MAKEFLAGS"),
    );
    let root = folder.path().join("opt/DIS");
    let source = folder.path().join("program.c");
    let program = "#include <sisci_api.h>\n#include <sisci_demolib.h>\n#include <stdio.h>\n\
                   int main(void) { return puts(SCIGetErrorString(SCI_ERR_BUSY)) < 0 || \
                   EndianSwap(1) != 1u << 24; }\n";
    std::fs::write(&source, program).unwrap();
    for (include, library) in [("include", "lib"), ("include/dis", "lib64")] {
        let binary = folder.path().join("program");
        let library = root.join(library);
        good(
            Command::new("gcc")
                .arg("-o")
                .arg(&binary)
                .arg(&source)
                .arg("-I")
                .arg(root.join(include))
                .arg(root.join("lib/demolib.a"))
                .arg("-L")
                .arg(&library)
                .arg("-lsisci"),
        );
        let said = good(Command::new(&binary).env("LD_LIBRARY_PATH", &library));
        assert!(said.contains("in use"), "{said}");
    }
    let help =
        good(Command::new(root.join("bin/scipp")).arg("-help").env_remove("LD_LIBRARY_PATH"));
    assert!(help.contains("scipp"), "{help}");
    for name in ["sisci", "rackbus-sisci"] {
        let file = root.join(format!("lib/pkgconfig/{name}.pc"));
        let said = std::fs::read_to_string(&file).unwrap();
        assert!(said.contains("prefix=/opt/DIS\n") && !said.contains('@'), "{said}");
    }
}

/// One command builds all that is installed, and the scripts that install it are told where it is.
#[test]
fn make_install_builds_once() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    let target = Path::new(env!("CARGO_TARGET_TMPDIR"));
    let commands = good(
        Command::new("make")
            .args(["--dry-run", "--no-print-directory", "install", "CARGO=cargo"])
            .current_dir(root)
            .env("CARGO_TARGET_DIR", target)
            .env_remove("MAKEFLAGS"),
    );
    let builds: Vec<&str> = commands.lines().filter(|line| line.contains("cargo ")).collect();
    assert_eq!(
        builds,
        ["cargo build --release -p rackbus-cli -p rackbus-sisci -p rackbus-accel-c"]
    );
    let built = target.join("release");
    for (library, script) in [("SISCI_LIB", "install-sisci"), ("ACCEL_LIB", "install-accel")] {
        let told = format!("{library}={} scripts/{script} ", built.display());
        assert!(commands.contains(&told), "{told:?} is not in:\n{commands}");
    }
}
