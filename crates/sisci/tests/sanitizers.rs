//! The scenarios of `tests/c` again, with the C side watched by gcc's sanitizers: no program of them
//! touches memory that is not its own, relies on what C does not define, or has a data race.
//!
//! The library is built without them, as users have it. So each of them is shown to report what it
//! is there for, in a program that uses the library, with the same flags and options: a watcher
//! that sees nothing would be content with everything.

#[macro_use]
mod support;

use std::path::Path;

use support::{Build, Rack, text};

mod address {
    use crate::support::Build;

    scenarios!(Build::Address);
}

mod thread {
    use crate::support::Build;

    scenarios!(Build::Thread);
}

/// A program that connects to a segment of its own: `called` happens on the library's thread when
/// it is told so, and `after` once the program is connected.
fn program(called: &str, after: &str) -> String {
    format!(
        "#include \"scenario.h\"\n\
         #include <stdlib.h>\n\
         static int seen, told;\n\
         static sci_callback_action_t on_event(void *arg, sci_local_segment_t segment,\n\
             sci_segment_cb_reason_t reason, unsigned int node, unsigned int adapter,\n\
             sci_error_t status)\n\
         {{\n\
             CALLED();\n\
             (void)arg, (void)segment, (void)node, (void)adapter, (void)status;\n\
             if (reason == SCI_CB_CONNECT) {{\n\
                 {called}\n\
                 __atomic_store_n(&told, 1, __ATOMIC_SEQ_CST);\n\
             }}\n\
             return SCI_CALLBACK_CONTINUE;\n\
         }}\n\
         int main(int argc, char **argv)\n\
         {{\n\
             struct scenario scenario;\n\
             sci_local_segment_t own;\n\
             sci_remote_segment_t segment;\n\
             scenario_begin(&scenario, argc, argv);\n\
             TRY(SCICreateSegment(scenario.sd, &own, 1, 64, on_event, NULL, SCI_FLAG_USE_CALLBACK,\n\
                                  &error));\n\
             TRY(SCIPrepareSegment(own, 0, 0, &error));\n\
             TRY(SCISetSegmentAvailable(own, 0, 0, &error));\n\
             TRY(SCIConnectSegment(scenario.sd, &segment, scenario.local, 1, 0, NULL, NULL, SOON, 0,\n\
                                   &error));\n\
             {after}\n\
             AWAIT(__atomic_load_n(&told, __ATOMIC_SEQ_CST));\n\
             TRY(SCIDisconnectSegment(segment, 0, &error));\n\
             TRY(SCIRemoveSegment(own, 0, &error));\n\
             scenario_end(&scenario);\n\
             return seen == 2;\n\
         }}\n"
    )
}

/// Builds and runs a program; whether it succeeded, and what was reported.
fn run(build: Build, called: &str, after: &str) -> (bool, String) {
    let rack = Rack::of(build);
    let folder = tempfile::tempdir().unwrap();
    let (source, binary) = (folder.path().join("program.c"), folder.path().join("program"));
    std::fs::write(&source, program(called, after)).unwrap();
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let test = std::env::current_exe().unwrap();
    let library = test.parent().unwrap().display().to_string();
    let mut gcc = build.compiler();
    gcc.arg("-o").arg(&binary).arg(&source).arg(root.join("tests/c/scenario.c"));
    gcc.arg("-I").arg(root.join("include")).arg("-I").arg(root.join("tests/c"));
    gcc.args([&format!("-L{library}"), "-lsisci", &format!("-Wl,-rpath,{library}")]);
    let built = gcc.output().unwrap();
    assert!(built.status.success(), "{}", text(&built));
    let output = rack.on("alpha", &binary.display().to_string()).output().unwrap();
    (output.status.success(), text(&output))
}

/// The error is reported, in the program's own lines.
fn reported(build: Build, called: &str, after: &str, report: &str) {
    let (good, said) = run(build, called, after);
    assert!(!good && said.contains(report) && said.contains("program.c:"), "{report}: {said}");
}

#[test]
fn a_good_program_is_not_reported() {
    for build in [Build::Address, Build::Thread] {
        let (good, said) = run(build, "seen = 1;", "");
        assert!(good && said.is_empty(), "{build:?}: {said}");
    }
}

#[test]
fn memory_that_was_freed_is_reported() {
    let freed = "char *bytes = (char *)malloc(8); free(bytes); seen = bytes[argc];";
    reported(Build::Address, "", freed, "heap-use-after-free");
}

#[test]
fn what_c_does_not_define_is_reported() {
    let overflow = "seen = 0x7fffffff; seen += argc;";
    reported(Build::Address, "", overflow, "signed integer overflow");
}

#[test]
fn a_data_race_with_a_callback_is_reported() {
    reported(Build::Thread, "seen = 1;", "AWAIT(*(volatile int *)&seen);", "data race");
}
