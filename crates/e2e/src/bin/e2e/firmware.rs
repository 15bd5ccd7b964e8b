//! A guest that boots from a borrowed drive, by UEFI: kernel, initial RAM file system and root file system lie
//! on it, as on the drive of any machine.

use std::io::{Cursor, Write};
use std::path::Path;
use std::time::Duration;

use fatfs::{FileSystem, FormatVolumeOptions, FsOptions, format_volume};
use rackbus_driver::{Drive, DriveOptions};
use rackbus_e2e::{CheckFailure, Guest, RackProcesses, Result, ensure};
use rackbus_vm::{Assets, GuestRelease as Release, registry};

use crate::RackWithGuests;

/// Blocks of the drive, in bytes.
const BLOCK: usize = 512;

/// Where the first partition begins, in blocks: as partitioning tools align it.
const FIRST: usize = 2048;

/// Blocks of the EFI system partition: 64 MiB.
const SYSTEM: usize = (64 << 20) / BLOCK;

/// What the firmware's shell runs when it finds nothing else to boot: Linux by its EFI stub. A variable that the shell
/// keeps in the firmware's non-volatile variables (UEFI Shell 2.2, section 5.3, `set`) tells the system whether it has
/// been there before.
const STARTUP: &str = "if x%rackbus%x == xx then\r\n\
                       set rackbus 1\r\n\
                       fs0:\\vmlinuz.efi {LINUX} rackbus.boot=first\r\n\
                       else\r\n\
                       fs0:\\vmlinuz.efi {LINUX} rackbus.boot=again\r\n\
                       endif\r\n";

/// The kernel's command line.
const LINUX: &str = "initrd=\\initrd console=ttyS0 quiet mitigations=off panic=-1 \
                     rackbus.tools=/dev/nvme0n1p2";

/// Puts a system on a drive, and boots a guest from it on another host, which then goes on at a third, where its firmware
/// has kept its variables.
pub fn boots(world: &mut RackWithGuests) -> Result<()> {
    let rack = &world.rack;
    let lease = rack.json(&["borrow", "alpha/nvme0", "--for", "beta"])?;
    let socket = lease["socket"].as_str().unwrap_or_default();
    install(Path::new(socket))?;
    rack.json(&["return", &lease["lease"].to_string()])?;

    let boot = ["--boot", "alpha/nvme0"];
    let mut guest = Guest::start_by(rack, "uefi", "gamma", &boot, &[], &[])?;
    guest.booted()?;
    let root =
        guest.run("findmnt -n -o SOURCE / && ls -d /sys/firmware/efi && lsblk -n -d -o NAME")?;
    let words: Vec<&str> = root.split_whitespace().collect();
    ensure!(words == ["/dev/nvme0n1p2", "/sys/firmware/efi", "nvme0n1"], "it booted from {root}");
    // All that it runs comes from there.
    guest.run("sha256sum /usr/bin/* >/dev/null")?;
    guest.run("grep rackbus.boot=first /proc/cmdline")?;
    std::thread::scope(|scope| {
        let moved = scope.spawn(|| rack.json(&["vm", "move", "uefi", "--to", "beta"]));
        // Nobody in this guest listens for the power button, which is pressed when the function is waited for.
        let waits = |rack: &RackProcesses| {
            rack.device("alpha/nvme0").ok().filter(|device| device["waiting"].as_u64() > Some(0))
        };
        rack.wait("the VM's move", Duration::from_secs(60), waits)?;
        let off = guest.begin("sleep 1; sync; poweroff -f", Duration::from_secs(20));
        let moved = moved.join().map_err(|_| CheckFailure("the move panicked".to_owned()))?;
        off.and(moved.map(drop))
    })?;
    let mut guest = Guest::attach(registry::find(rack.run_dir(), "beta", "uefi")?);
    guest.booted()?;
    guest.run("grep rackbus.boot=again /proc/cmdline")?;
    guest.stop(rack)
}

/// Writes a partition table, an EFI system partition and a root file system, as an installer would.
fn install(socket: &Path) -> Result<()> {
    let files = Assets::of_user().guest(Release::Trixie)?;
    let root = std::fs::read(&files.tools)?;
    let mut system = vec![0; SYSTEM * BLOCK];
    format_volume(Cursor::new(&mut system), FormatVolumeOptions::new())?;
    {
        let volume = FileSystem::new(Cursor::new(&mut system), FsOptions::new())?;
        let folder = volume.root_dir();
        folder.create_file("vmlinuz.efi")?.write_all(&std::fs::read(&files.kernel)?)?;
        folder.create_file("initrd")?.write_all(&std::fs::read(&files.initrd)?)?;
        folder
            .create_file("startup.nsh")?
            .write_all(STARTUP.replace("{LINUX}", LINUX).as_bytes())?;
    }
    let mut drive = Drive::open(socket, DriveOptions { depth: 4, data: 1 << 20 })?;
    let second = FIRST + SYSTEM;
    let table =
        partition_table(&[(0xef, FIRST, SYSTEM), (0x83, second, root.len().div_ceil(BLOCK))]);
    for (mut block, data) in [(0, &table[..]), (FIRST, &system), (second, &root)] {
        for chunk in data.chunks(1 << 20) {
            drive.write(block as u64, chunk, false)?;
            block += chunk.len() / BLOCK;
        }
    }
    Ok(drive.flush()?)
}

/// A master boot record with partitions by type, first block and number of blocks (UEFI 2.10, section
/// 5.2.1).
fn partition_table(partitions: &[(u8, usize, usize)]) -> [u8; BLOCK] {
    let mut table = [0; BLOCK];
    for (number, (kind, first, count)) in partitions.iter().enumerate() {
        let entry = &mut table[446 + 16 * number..][..16];
        entry[4] = *kind;
        entry[8..12].copy_from_slice(&(*first as u32).to_le_bytes());
        entry[12..16].copy_from_slice(&(*count as u32).to_le_bytes());
    }
    table[510..].copy_from_slice(&[0x55, 0xaa]);
    table
}
