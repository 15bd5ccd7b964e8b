//! A guest as people have them shares memory: Debian with systemd in a QEMU of its user's own. Its host has another
//! guest, and the two are as far apart as two hosts.

use rackbus_e2e::{Guest, RackProcesses, Result, SystemGuest, ensure};

use crate::segments::{ExchangeSide, between};

/// The host of the rack that it is, and the one that it runs on: with the second guest of [`crate::segments::GUESTS`].
pub const SYSTEM: (&str, &str) = ("system", "gamma");
/// What runs programs there: nobody.
pub const AS_NOBODY: &str = "setpriv --reuid=65534 --regid=65534 --clear-groups";
/// Where the tools are.
pub const TOOLS: &str = "/opt/DIS/bin";

/// The library is installed by SSH, its programs share memory with the other guest of the same host and with a host as
/// no user in particular, and do so again after a reboot with nothing done.
pub fn installed_by_ssh(
    rack: &RackProcesses,
    mut system: SystemGuest,
    neighbour: &mut Guest,
    folder: &str,
) -> Result<()> {
    system.booted()?;
    let (destination, options) = (system.destination(), system.options());
    let mut install = vec!["guest", "install", "--from", folder, "--ssh", &destination];
    install.extend(options.iter().flat_map(|option| ["--ssh-option", option]));
    rack.json(&install)?;
    let rounds = "-loops 200 -size 64";
    between(
        ExchangeSide::System(&system),
        ExchangeSide::Guest(neighbour),
        "scipp",
        rounds,
        folder,
    )?;
    between(
        ExchangeSide::Guest(neighbour),
        ExchangeSide::System(&system),
        "scipp",
        rounds,
        folder,
    )?;
    between(
        ExchangeSide::System(&system),
        ExchangeSide::Guest(neighbour),
        "intr_bench",
        "-loops 20",
        folder,
    )?;
    between(
        ExchangeSide::System(&system),
        ExchangeSide::Guest(neighbour),
        "dma_bench",
        "-loops 3",
        folder,
    )?;
    system.reboot()?;
    let state = system.run("systemctl is-active run-rackbus.mount")?;
    ensure!(state == "active", "the rack is not mounted after a reboot: {state}");
    between(
        ExchangeSide::Guest(neighbour),
        ExchangeSide::System(&system),
        "scipp",
        rounds,
        folder,
    )?;
    between(ExchangeSide::Host(rack), ExchangeSide::System(&system), "scipp", rounds, folder)
}
