//! The Debian package on a machine as people have them: installed by dpkg, its control plane and node are started, killed,
//! reloaded and stopped by systemd, with all that their units keep from them.

use std::path::{Path, PathBuf};
use std::process::Command;

use rackbus_e2e::{CheckFailure, Result, SystemGuest, ensure};

/// What makes the package.
const SCRIPT: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../../scripts/package");
/// The settings of a rack of one machine, as the book has them.
const SETTINGS: &str = r#"set -e
cat >/etc/rackbus/rack.toml <<'END'
name = "lab"

[hosts.alpha.devices.nvme0]
kind = "nvme"
size = "16 MiB"
END
cd /etc/rackbus
sed -i 's/^RACKBUS_LISTEN=.*/RACKBUS_LISTEN=127.0.0.1:7420/' control.env
sed -i 's/^RACKBUS_HOST=.*/RACKBUS_HOST=alpha/' node.env
sed -i 's|^RACKBUS_JOIN=.*|RACKBUS_JOIN=https://127.0.0.1:7420|' node.env
sed -i 's|^RACKBUS_NODE_ARGS=.*|RACKBUS_NODE_ARGS=--token-file /etc/rackbus/token|' node.env
"#;
/// As root's shell reaches the control plane of this machine.
const RACKBUS: &str = "rackbus --run-dir /run/rackbus/control";

/// Makes the package of the programs beside this one.
fn package(folder: &Path) -> Result<PathBuf> {
    let program = std::env::current_exe()?;
    let built = program.parent().ok_or_else(|| CheckFailure("it has no folder".to_owned()))?;
    let mut make = Command::new(SCRIPT);
    let made = make.arg(built).arg(folder).env("PACKAGE_COMPRESSION", "none").output()?;
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).trim().to_owned();
    ensure!(made.status.success(), "{SCRIPT}: {}", text(&made.stderr));
    Ok(text(&made.stdout).into())
}

/// Number of the main process of a unit that runs.
fn main_process(machine: &SystemGuest, unit: &str) -> Result<String> {
    machine.run(&format!("systemctl show -p MainPID --value {unit}"))
}

/// Installs the package and has systemd run a rack of one machine: what is lent outlives a reload of the node and a restart
/// of the control plane, a node that is killed is started again, and the package's removal ends both.
pub fn units(dir: &Path) -> Result<()> {
    std::fs::create_dir_all(dir)?;
    let mut machine = SystemGuest::start_alone(dir, "machine")?;
    let package = package(dir)?;
    machine.booted()?;
    machine.copy(&package, "/root/rackbus.deb")?;
    // The guest's other files were not installed by dpkg, so it knows of none that this one depends on.
    machine.run("dpkg --force-depends -i /root/rackbus.deb && rm /root/rackbus.deb")?;
    machine.run(SETTINGS)?;
    machine.run(&format!(
        "systemctl enable --now rackbus-control && {RACKBUS} token alpha >/etc/rackbus/token"
    ))?;
    // The units say when they are ready.
    machine.run("systemctl enable --now rackbus-node && systemctl is-active rackbus-node")?;
    machine.run(&format!("{RACKBUS} borrow alpha/nvme0 --for alpha"))?;
    let node = main_process(&machine, "rackbus-node")?;
    // It is needed once.
    machine.run("rm /etc/rackbus/token")?;
    machine.run("sed -i 's/^RACKBUS_NODE_ARGS=.*/RACKBUS_NODE_ARGS=/' /etc/rackbus/node.env")?;
    machine.run("systemctl reload rackbus-node")?;
    let after = main_process(&machine, "rackbus-node")?;
    ensure!(node == after, "the node was process {node} and is {after} after a reload");
    machine.run("systemctl restart rackbus-control")?;
    let leases = machine.run(&format!("{RACKBUS} leases"))?;
    ensure!(leases.contains("active"), "what was lent has ended:\n{leases}");
    killed(&machine)?;
    machine.run(&format!("{RACKBUS} borrow alpha/nvme0 --for alpha"))?;
    machine.run(&format!("{RACKBUS} return alpha/nvme0"))?;
    let denied =
        machine.run("journalctl -b --no-pager -u rackbus-node -u rackbus-control -p warning")?;
    ensure!(!denied.contains("denied") && !denied.contains("Operation not permitted"), "{denied}");
    machine.run("dpkg -r rackbus && ! systemctl is-active rackbus-node rackbus-control")?;
    machine.run("test -d /var/lib/rackbus/control && test -d /var/lib/rackbus/node")?;
    machine.run("dpkg --purge rackbus && test ! -e /var/lib/rackbus").map(drop)
}

/// A node that is killed is started again by itself.
fn killed(machine: &SystemGuest) -> Result<()> {
    machine.run(
        "systemctl kill -s KILL --kill-whom=main rackbus-node
        for i in $(seq 300); do
            [ \"$(systemctl show -p NRestarts --value rackbus-node)\" = 1 ] &&
                systemctl is-active -q rackbus-node && exit
            sleep 0.2
        done
        systemctl status rackbus-node; exit 1",
    )?;
    Ok(())
}
