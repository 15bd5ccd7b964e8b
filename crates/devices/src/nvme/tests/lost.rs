//! Data that a real medium does not take, by the real io_uring: a loop device whose file has no room. The kernel reports
//! such a loss once and counts what was lost as clean, which the simulation of the storage path only imitates.

use std::path::{Path, PathBuf};
use std::process::Command;

use super::*;

/// Bytes of the drive, and what its medium has room for at first.
const SIZE: usize = 16 << 20;
const ROOM: &str = "size=4m";
/// Bytes of one command.
const PIECE: usize = 8192;
const BLOCK: usize = 512;

/// A file system in memory with a file, and a loop device over that.
struct LoopDevice {
    folder: tempfile::TempDir,
    device: PathBuf,
}

/// What a command says; why it failed.
fn run(command: &mut Command) -> Result<String, String> {
    let output = command.output().map_err(|error| format!("{command:?}: {error}"))?;
    let said = |bytes: &[u8]| String::from_utf8_lossy(bytes).trim().to_owned();
    match output.status.success() {
        true => Ok(said(&output.stdout)),
        false => Err(format!("{command:?}: {}", said(&output.stderr))),
    }
}

impl LoopDevice {
    /// One whose file has less room than it is long.
    fn with_little_room() -> Result<LoopDevice, String> {
        let folder = tempfile::tempdir().map_err(|error| error.to_string())?;
        run(Command::new("mount").args(["-t", "tmpfs", "-o", ROOM, "rackbus"]).arg(folder.path()))?;
        let mut made = LoopDevice { folder, device: PathBuf::new() };
        let file = std::fs::File::create(made.file()).map_err(|error| error.to_string())?;
        file.set_len(SIZE as u64).map_err(|error| error.to_string())?;
        made.device =
            run(Command::new("losetup").args(["--find", "--show"]).arg(made.file()))?.into();
        Ok(made)
    }

    fn file(&self) -> PathBuf {
        self.folder.path().join("medium")
    }

    /// Gives the file all the room that it needs.
    fn make_room(&self) {
        let path = self.folder.path();
        run(Command::new("mount").args(["-o", "remount,size=64m"]).arg(path)).unwrap();
    }
}

impl Drop for LoopDevice {
    fn drop(&mut self) {
        // What cannot be taken down is said; the test has ended by then.
        let detached = match self.device == Path::new("") {
            true => Ok(String::new()),
            false => run(Command::new("losetup").arg("--detach").arg(&self.device)),
        };
        let unmounted = run(Command::new("umount").arg("--lazy").arg(self.folder.path()));
        for error in [detached.err(), unmounted.err()].into_iter().flatten() {
            eprintln!("{error}");
        }
    }
}

fn drive(device: &LoopDevice) -> TestHost {
    let mut host = TestHost::plain(&NvmeConfig::file(&device.device, 0, "LOOP"));
    host.enable();
    host.create_pair(1, ENTRIES);
    host
}

/// Writes the first `length` bytes with this byte; the page cache takes them.
fn write(host: &mut TestHost, length: usize, byte: u8) {
    for at in (0..length).step_by(PIECE) {
        let status = host.write_blocks((at / BLOCK) as u64, &[byte; PIECE]);
        assert_eq!(status, Status::SUCCESS, "{at:#x}");
    }
}

fn flush(host: &mut TestHost) -> Status {
    host.status(1, transfer(IoOpcode::Flush, 0, BLOCK, 0))
}

fn read(host: &mut TestHost) -> Vec<u8> {
    let pieces = (0..SIZE).step_by(PIECE);
    pieces.flat_map(|at| host.read_blocks((at / BLOCK) as u64, PIECE)).collect()
}

#[test]
fn flushes_fail_after_a_loss_until_the_drive_is_opened_anew_and_shows_what_its_medium_has() {
    if !rustix::process::geteuid().is_root() {
        return eprintln!("not tested: a loop device takes root");
    }
    let device = match LoopDevice::with_little_room() {
        Ok(device) => device,
        Err(why) => return eprintln!("not tested: there is no loop device: {why}"),
    };
    let medium = || std::fs::read(device.file()).unwrap();
    let mut host = drive(&device);
    write(&mut host, 1 << 20, 1);
    assert_eq!(flush(&mut host), Status::SUCCESS);
    assert!(medium()[..1 << 20].iter().all(|byte| *byte == 1));

    // More than there is room for.
    write(&mut host, SIZE, 2);
    assert_ne!(flush(&mut host), Status::SUCCESS, "what was lost is acknowledged");
    assert_ne!(flush(&mut host), Status::SUCCESS, "a loss is reported once");
    device.make_room();
    assert_ne!(flush(&mut host), Status::SUCCESS, "what was lost is not there by now");
    write(&mut host, PIECE, 3);
    assert_ne!(flush(&mut host), Status::SUCCESS, "what was lost is not there by now");
    drop(host);

    // What the drive holds is known again, and what is flushed from now on is there.
    let mut host = drive(&device);
    let held = read(&mut host);
    assert!(held == medium(), "the drive shows what its medium has not");
    assert!(held.contains(&0), "nothing was lost");
    write(&mut host, SIZE, 4);
    assert_eq!(flush(&mut host), Status::SUCCESS);
    assert!(medium().iter().all(|byte| *byte == 4));
}
