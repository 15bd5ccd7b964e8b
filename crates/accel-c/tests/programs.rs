//! C programs on the header and the library, with an accelerator that this process serves.

use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};

use rackbus_devices::accel::{Accelerator, EnginePool, PoolOptions};
use rackbus_devices::nvme::{Nvme, NvmeConfig};
use rackbus_pci::engine::EngineOptions;
use rackbus_pci::vfio_user::{LocalFunction, serve_function};
use rackbus_qos::TenantId;
use rackbus_spec::accel::{OPERATIONS, Operation};

fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

/// Where the libraries are: beside this program.
fn libraries() -> PathBuf {
    let test = std::env::current_exe().unwrap();
    test.parent().unwrap().to_owned()
}

fn good(command: &mut Command) -> Output {
    let output = command.output().unwrap_or_else(|error| panic!("{command:?}: {error}"));
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{command:?}: {}: {said}", output.status);
    output
}

/// Compiles a program, as C99 or C++11, without a warning.
fn compile(source: &str, to: &Path, library: &[&str]) -> PathBuf {
    let program = to.join(Path::new(source).file_stem().unwrap());
    let warnings = ["-Wall", "-Wextra", "-Werror", "-pedantic"];
    good(
        Command::new("cc")
            .arg("-std=c99")
            .args(warnings)
            .arg("-I")
            .arg(root().join("include"))
            .arg("-o")
            .arg(&program)
            .arg(root().join(source))
            .arg("-L")
            .arg(libraries())
            .args(library),
    );
    program
}

fn serve(socket: &Path) -> LocalFunction {
    let pool = EnginePool::new(PoolOptions::default());
    let model = Accelerator::new(&pool, TenantId(1), None, 1).unwrap();
    serve_function(Box::new(model), socket, EngineOptions::default()).unwrap()
}

#[test]
fn the_header_is_c99_and_cpp11() {
    for (compiler, standard, language) in [("cc", "-std=c99", "c"), ("c++", "-std=c++11", "c++")] {
        let header = root().join("include/rackbus_accel.h");
        good(
            Command::new(compiler)
                .args([standard, "-Wall", "-Wextra", "-Werror", "-pedantic", "-fsyntax-only"])
                .args(["-x", language])
                .arg(header),
        );
    }
}

#[test]
fn a_program_is_told_of_its_mistakes_and_does_its_requests() {
    let folder = tempfile::tempdir().unwrap();
    let socket = folder.path().join("accel.sock");
    let _served = serve(&socket);
    let program = compile("tests/c_program.c", folder.path(), &["-lrackbus_accel"]);
    let drive = folder.path().join("drive.sock");
    let model = Nvme::new(&NvmeConfig::memory(4 << 20, "M1")).unwrap();
    let _drive = serve_function(Box::new(model), &drive, EngineOptions::default()).unwrap();
    let mut run = Command::new(program);
    good(run.arg(&socket).arg(&drive).env("LD_LIBRARY_PATH", libraries()));
}

/// With the static library, which needs what the compiler says that Rust's own library needs.
#[test]
fn the_example_seals_and_opens_what_it_is_given() {
    let folder = tempfile::tempdir().unwrap();
    let socket = folder.path().join("accel.sock");
    let _served = serve(&socket);
    let library = ["-l:librackbus_accel.a", "-lpthread", "-ldl", "-lm", "-lgcc_s"];
    let program = compile("examples/seal.c", folder.path(), &library);
    let text: Vec<u8> = (0..300_000u32).flat_map(|n| (n / 7).to_le_bytes()).collect();
    for (length, blocks) in [(0, 0), (1, 1), (65_536, 1), (65_537, 2), (1_200_000, 19)] {
        let mut command = Command::new(&program);
        let piped = command.arg(&socket).stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut child = piped.spawn().unwrap();
        child.stdin.take().unwrap().write_all(&text[..length]).unwrap();
        let output = child.wait_with_output().unwrap();
        assert!(output.status.success(), "{length}: {output:?}");
        let said = String::from_utf8(output.stdout).unwrap();
        assert!(said.starts_with(&format!("{blocks} blocks, {length} bytes")), "{said}");
    }
}

#[test]
fn programs_are_built_with_what_is_installed() {
    let folder = tempfile::tempdir().unwrap();
    good(
        Command::new(root().join("../../scripts/install-accel"))
            .arg("/opt/rackbus")
            .env("DESTDIR", folder.path())
            .env("ACCEL_LIB", libraries()),
    );
    let installed = folder.path().join("opt/rackbus");
    let program = folder.path().join("seal");
    good(
        Command::new("cc")
            .arg("-o")
            .arg(&program)
            .arg(root().join("examples/seal.c"))
            .arg("-I")
            .arg(installed.join("include"))
            .arg("-L")
            .arg(installed.join("lib"))
            .arg("-lrackbus_accel"),
    );
    let mut run = Command::new(program);
    let output = run.env("LD_LIBRARY_PATH", installed.join("lib")).output().unwrap();
    assert_eq!(output.status.code(), Some(2), "{output:?}");
    let said = std::fs::read_to_string(installed.join("lib/pkgconfig/rackbus-accel.pc")).unwrap();
    assert!(said.contains("prefix=/opt/rackbus\n") && !said.contains('@'), "{said}");
}

/// What the header says of operations and statuses is what the interface has.
#[test]
fn the_headers_numbers_are_the_interfaces() {
    let header = std::fs::read_to_string(root().join("include/rackbus_accel.h")).unwrap();
    let number = |name: &str| {
        let line = header.lines().find_map(|line| line.strip_prefix(&format!("#define {name} ")));
        line.and_then(|rest| rest.split_whitespace().next()?.parse::<u16>().ok())
    };
    // Those on contexts have functions of their own, and the memory that one waits for is not the library's.
    let own = [Operation::CreateContext, Operation::DestroyContext, Operation::Wait];
    for operation in OPERATIONS.iter().filter(|operation| !own.contains(operation)) {
        let name = operation.name().replace('-', "_").to_uppercase();
        let found = number(&format!("RACKBUS_ACCEL_{name}"));
        assert_eq!(found, Some(*operation as u16), "{name}");
    }
    for status in rackbus_spec::accel::STATUSES {
        let debug = format!("{status:?}");
        let mut name = String::new();
        for (at, letter) in debug.char_indices() {
            if at > 0 && letter.is_uppercase() {
                name.push('_');
            }
            name.extend(letter.to_uppercase());
        }
        assert_eq!(number(&format!("RACKBUS_ACCEL_{name}")), Some(status as u16), "{name}");
    }
    assert_eq!(number("RACKBUS_ACCEL_STAGES"), Some(rackbus_spec::accel::STAGES as u16));
}
