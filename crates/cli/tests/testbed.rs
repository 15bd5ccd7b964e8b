//! `rackbus testbed up`: machines on this one that have nothing in common but a network and programs. Making them takes root:
//! without it the tests say so and end.

mod support;

use std::path::Path;
use std::process::{Command, Output};

use support::not_tested;
use support::programs::has;

/// A testbed, which ends with this.
struct Testbed {
    dir: tempfile::TempDir,
}

impl Testbed {
    /// With so many machines; `None` where none can be made.
    fn up(number: &str) -> Option<Testbed> {
        if !rustix::process::geteuid().is_root() {
            not_tested("making network namespaces takes root");
            return None;
        }
        if !["ip", "unshare", "nsenter"].into_iter().all(has) {
            return None;
        }
        let dir = tempfile::Builder::new().prefix("rb-").tempdir_in("/tmp").unwrap();
        let testbed = Testbed { dir };
        let output = testbed.run(&["up", number]);
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(output.status.success(), "{said}");
        Some(testbed)
    }

    fn run(&self, args: &[&str]) -> Output {
        let mut command = Command::new(env!("CARGO_BIN_EXE_rackbus"));
        command.args(["testbed", "--dir"]).arg(self.dir.path()).args(args).output().unwrap()
    }

    /// Runs a script on a machine, which must succeed; what it printed.
    fn on(&self, machine: &str, script: &str) -> String {
        let output = self.run(&["on", machine, "--", "sh", "-ec", script]);
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(output.status.success(), "{machine}: {script}: {said}");
        String::from_utf8(output.stdout).unwrap()
    }
}

impl Drop for Testbed {
    fn drop(&mut self) {
        // There may be none, where it was not started.
        let _ = self.run(&["down"]);
    }
}

#[test]
fn machines_by_number_are_a_rack_and_have_no_file_in_common() {
    let Some(testbed) = Testbed::up("3") else { return };
    let rackbus = env!("CARGO_BIN_EXE_rackbus");
    let hosts = testbed.on("gamma", &format!("{rackbus} status --json"));
    let hosts: serde_json::Value = serde_json::from_str(&hosts).unwrap();
    let names: Vec<&str> =
        hosts["hosts"].as_array().unwrap().iter().map(|it| it["host"].as_str().unwrap()).collect();
    assert_eq!(names, ["alpha", "beta", "gamma"]);
    testbed.on("beta", &format!("{rackbus} borrow alpha/nvme0 --for beta"));
    testbed.on("beta", &format!("{rackbus} return alpha/nvme0"));

    let home = std::env::var("HOME").unwrap();
    let own = testbed.dir.path().display().to_string();
    for place in ["/tmp", "/dev/shm", "/run/rackbus", &home, &own] {
        let name = format!("rackbus-of-one-{}", std::process::id());
        let file = Path::new(place).join(&name);
        let shown = file.display();
        testbed.on("alpha", &format!("echo alpha >{shown}; test \"$(cat {shown})\" = alpha"));
        for other in ["beta", "control"] {
            testbed.on(other, &format!("test ! -e {shown}"));
        }
        assert!(!file.exists(), "{shown} of alpha is a file of this machine");
        // Nor has a machine what is left there here.
        std::fs::write(&file, "here").unwrap();
        let seen = testbed.run(&["on", "beta", "--", "test", "-e", file.to_str().unwrap()]);
        std::fs::remove_file(&file).unwrap();
        assert_eq!(seen.status.code(), Some(1), "beta sees {shown}");
    }
    // A machine's own folder is the way to give it files.
    std::fs::write(testbed.dir.path().join("beta/given"), "here").unwrap();
    assert_eq!(testbed.on("beta", &format!("cat {own}/beta/given")), "here");
    let others = testbed.on("beta", &format!("ls {own}"));
    assert_eq!(others.trim(), "beta", "of the testbed's folders");
    // They know each other by their names.
    testbed.on("beta", "grep -qx '10.66.0.2 alpha' /etc/hosts");
    let wrong = testbed.run(&["up", "9"]);
    let said = String::from_utf8_lossy(&wrong.stderr);
    assert!(wrong.status.code() == Some(2) && said.contains("name 2 to 8"), "{said}");
}
