//! Which interrupts a borrowed function is shown with in its VM, as agreed between who starts the
//! VM and the node that serves the function: a note beside the function's socket.
//!
//! QEMU up to 11.1 ends with a failed assertion when a function with MSI-X is unplugged, so MSI is
//! what a function has unless the VM's QEMU was seen to bear it ([`unplugs_msix`]), or its user
//! asked for MSI-X anyway. Then the function is never unplugged while the VM runs.

use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use serde_json::{Value, json};

use crate::error::io;
use crate::{Assets, Qmp, Result, VmError};

/// How long a QEMU that only unplugs a function may take.
const PROBE: Duration = Duration::from_secs(10);

/// The interrupts that a function is shown with.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum InterruptChoice {
    /// MSI, or the pin: the function can be unplugged at any time.
    #[default]
    Msi,
    /// MSI-X, in a QEMU that unplugs such a function.
    Msix,
    /// MSI-X, in a QEMU that would end: the function stays plugged in until the VM ends.
    MsixKept,
}

impl InterruptChoice {
    /// With a QEMU that [bears](unplugs_msix) that such a function is unplugged or not, for a user
    /// who asks for MSI-X or does not.
    #[must_use]
    pub fn choose(bears: bool, asked: bool) -> InterruptChoice {
        match (bears, asked) {
            (true, _) => InterruptChoice::Msix,
            (false, true) => InterruptChoice::MsixKept,
            (false, false) => InterruptChoice::Msi,
        }
    }

    /// Notes for the node that serves `socket` how the function is shown to who opens it next.
    ///
    /// # Errors
    /// When the note cannot be written.
    pub fn note(self, socket: &Path) -> Result<()> {
        let path = note(socket);
        let text = match self {
            InterruptChoice::Msi => {
                forget(socket);
                return Ok(());
            }
            InterruptChoice::Msix => "msix",
            InterruptChoice::MsixKept => "msix kept",
        };
        fs::write(&path, text).map_err(io("write", &path))
    }

    /// What was noted for `socket`.
    #[must_use]
    pub fn noted(socket: &Path) -> InterruptChoice {
        match fs::read_to_string(note(socket)).as_deref() {
            Ok("msix") => InterruptChoice::Msix,
            Ok("msix kept") => InterruptChoice::MsixKept,
            _ => InterruptChoice::Msi,
        }
    }
}

/// Forgets what was noted for a socket that is no more.
pub fn forget(socket: &Path) {
    // Mostly there is none.
    let _ = fs::remove_file(note(socket));
}

fn note(socket: &Path) -> PathBuf {
    socket.with_extension("interrupts")
}

/// Whether this user's QEMU bears that a function with MSI-X is unplugged: found out once for each
/// QEMU, and kept in the cache. A QEMU that cannot be asked counts as one that does not, this time.
/// `serve` serves such a function at a socket until what it gives is dropped.
///
/// # Errors
/// When set-up has not been run, or the cache cannot be written.
pub fn unplugs_msix<S>(
    assets: &Assets,
    serve: impl FnOnce(&Path) -> std::io::Result<S>,
) -> Result<bool> {
    let qemu = assets.qemu()?;
    let meta = fs::metadata(&qemu).map_err(io("look at", &qemu))?;
    let answer = answer_of(assets, &meta);
    match fs::read_to_string(&answer).as_deref() {
        Ok("yes") => return Ok(true),
        Ok("no") => return Ok(false),
        _ => {}
    }
    tracing::info!("finding out whether this QEMU unplugs functions with MSI-X (once)");
    // In a folder of the user's own: others may make one that has this name where all may.
    let dir = answer.with_file_name(format!("msix-probe-{}", std::process::id()));
    fs::create_dir_all(&dir).map_err(io("make", &dir))?;
    let socket = dir.join("function.sock");
    let served = serve(&socket).map_err(io("serve", &socket));
    let outcome = served.and_then(|_served| probe(&qemu, &dir, &socket));
    let _ = fs::remove_dir_all(&dir);
    let unplugs = match outcome {
        Ok(unplugs) => unplugs,
        Err(error) => {
            tracing::warn!(%error, "could not find out whether this QEMU unplugs functions with MSI-X");
            return Ok(false);
        }
    };
    fs::write(&answer, if unplugs { "yes" } else { "no" }).map_err(io("write", &answer))?;
    Ok(unplugs)
}

/// Whether the QEMU that runs as this process was [found](unplugs_msix) to bear that by this user; nobody is asked.
#[must_use]
pub fn is_known_to_unplug_msix(assets: &Assets, pid: u32) -> bool {
    let known = |meta: fs::Metadata| fs::read_to_string(answer_of(assets, &meta)).ok();
    let answer = fs::metadata(format!("/proc/{pid}/exe")).ok().and_then(known);
    answer.as_deref() == Some("yes")
}

/// Where it is kept what was found out about this program.
fn answer_of(assets: &Assets, program: &fs::Metadata) -> PathBuf {
    let (inode, size, changed) = (program.ino(), program.size(), program.mtime());
    assets.cache().join(format!("msix-unplug-{inode}-{size}-{changed}"))
}

/// Plugs the function into a QEMU whose machine does not run, and unplugs it.
fn probe(qemu: &Path, dir: &Path, socket: &Path) -> Result<bool> {
    let path = dir.join("qmp.sock");
    let qmp = format!("unix:{},server=on,wait=off", path.display());
    let log = fs::File::create(dir.join("qemu.log")).map_err(io("write", dir))?;
    let child = Command::new(qemu)
        .args(["-nodefaults", "-no-user-config", "-display", "none", "-accel", "tcg", "-S"])
        .args(["-machine", "q35,memory-backend=ram", "-m", "64M", "-qmp", &qmp])
        .args(["-object", "memory-backend-memfd,id=ram,size=64M,share=on"])
        // Nobody in there would answer ACPI's request.
        .args(["-global", "ICH9-LPC.acpi-pci-hotplug-with-bridge-support=off"])
        .args(["-device", "pcie-root-port,id=port0,chassis=1,slot=1"])
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(log)
        .spawn()
        .map_err(io("start", qemu))?;
    let mut child = Ending(child);
    let deadline = Instant::now() + PROBE;
    let mut qmp = loop {
        match Qmp::connect(&path) {
            Ok(qmp) => break qmp,
            Err(error) if Instant::now() >= deadline || child.has_ended() => return Err(error),
            Err(_) => std::thread::sleep(Duration::from_millis(10)),
        }
    };
    qmp.command("device_add", &crate::spec::device("probe", socket, "port0"))?;
    let id = crate::spec::device_id("probe");
    let gone = |name: &str, data: &Value| name == "DEVICE_DELETED" && data["device"] == *id;
    let removed = qmp
        .command("device_del", &json!({"id": id}))
        .and_then(|_| qmp.event("the removal of a function", PROBE, gone))
        // What is left of it is freed after that.
        .and_then(|_| qmp.command("query-status", &json!({})));
    match removed {
        Ok(_) => Ok(true),
        Err(VmError::TimedOut { what, limit }) => Err(VmError::TimedOut { what, limit }),
        // The connection broke: it ended, or is about to.
        Err(error) => {
            while Instant::now() < deadline {
                if child.has_ended() {
                    return Ok(false);
                }
                std::thread::sleep(Duration::from_millis(10));
            }
            Err(error)
        }
    }
}

/// A process that does not outlive its use.
struct Ending(Child);

impl Ending {
    fn has_ended(&mut self) -> bool {
        matches!(self.0.try_wait(), Ok(Some(_)))
    }
}

impl Drop for Ending {
    fn drop(&mut self) {
        // An error means that it has ended, which is what is wanted.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

#[cfg(test)]
mod tests {
    use std::io::{BufRead, BufReader, Write};
    use std::os::unix::fs::PermissionsExt;
    use std::os::unix::net::UnixListener;

    use super::*;

    #[test]
    fn what_is_noted_beside_a_socket_is_read_there() {
        let dir = std::env::temp_dir().join(format!("rackbus-interrupts-{}", std::process::id()));
        fs::create_dir_all(&dir).expect("folder");
        let socket = dir.join("nvme0.7.sock");
        for noted in [InterruptChoice::Msix, InterruptChoice::MsixKept, InterruptChoice::Msi] {
            noted.note(&socket).expect("note");
            assert_eq!(InterruptChoice::noted(&socket), noted);
            assert_eq!(InterruptChoice::noted(&dir.join("nvme0.8.sock")), InterruptChoice::Msi);
        }
        InterruptChoice::Msix.note(&socket).expect("note");
        forget(&socket);
        assert_eq!(InterruptChoice::noted(&socket), InterruptChoice::Msi);
        fs::remove_dir_all(&dir).expect("clean up");
    }

    #[test]
    fn msix_is_chosen_for_a_qemu_that_can_unplug_it_or_on_request_and_kept() {
        assert_eq!(InterruptChoice::choose(false, false), InterruptChoice::Msi);
        assert_eq!(InterruptChoice::choose(false, true), InterruptChoice::MsixKept);
        assert_eq!(
            [false, true].map(|asked| InterruptChoice::choose(true, asked)),
            [InterruptChoice::Msix; 2]
        );
    }

    /// What stands for QEMU: this program, as the script in the cache starts it.
    #[test]
    #[ignore = "a part of the other tests, which start it"]
    fn plays_qemu() {
        let Ok(args) = std::env::var("PLAYED_ARGUMENTS") else { return };
        let manner = std::env::var("PLAYED_MANNER").expect("manner");
        let socket = args.split("unix:").nth(1).and_then(|rest| rest.split(',').next());
        let listener = UnixListener::bind(socket.expect("a socket")).expect("bind");
        let mut stream = listener.accept().expect("accept").0;
        let lines = BufReader::new(stream.try_clone().expect("clone")).lines();
        let mut say = |text: &str| stream.write_all(format!("{text}\n").as_bytes());
        say(r#"{"QMP": {}}"#).expect("greet");
        for line in lines.map_while(std::result::Result::ok) {
            let asked = |command: &str| line.contains(&format!("\"{command}\""));
            match manner.as_str() {
                "refuses" if asked("device_add") => say(r#"{"error": {"desc": "no"}}"#),
                "ends" if asked("device_del") => return,
                "ends late" if asked("query-status") => return,
                _ => say(r#"{"return": {}}"#),
            }
            .expect("answer");
            if asked("device_del") {
                let event = json!({"event": "DEVICE_DELETED", "data": {"device": "fn-probe"}});
                say(&event.to_string()).expect("tell");
            }
        }
    }

    /// A cache with a QEMU of this manner, other than the one before.
    fn install(cache: &Path, manner: &str) {
        let folder = cache.join("qemu/run");
        fs::create_dir_all(&folder).expect("folder");
        let (new, qemu) = (folder.join("new"), folder.join("qemu-system-x86_64"));
        let program = std::env::current_exe().expect("this program");
        let part = "--exact interrupts::tests::plays_qemu --ignored --nocapture";
        let script = format!(
            "#!/bin/sh\nPLAYED_MANNER='{manner}' PLAYED_ARGUMENTS=\"$*\" exec {} {part}\n",
            program.display()
        );
        fs::write(&new, script).expect("script");
        fs::set_permissions(&new, fs::Permissions::from_mode(0o755)).expect("mode");
        fs::rename(new, qemu).expect("rename");
    }

    #[test]
    fn a_qemu_is_probed_once_for_unplugging_msix() {
        let cache = std::env::temp_dir().join(format!("rackbus-probe-{}", std::process::id()));
        let assets = Assets::in_folder(&cache);
        let mut asked = 0;
        let mut bears = || {
            let serve = |_: &Path| {
                asked += 1;
                Ok(())
            };
            let bears = unplugs_msix(&assets, serve).expect("a writable cache");
            (bears, std::mem::take(&mut asked))
        };
        for (manner, answer) in [("unplugs", true), ("ends", false), ("ends late", false)] {
            install(&cache, manner);
            assert_eq!(bears(), (answer, 1), "{manner}");
            assert_eq!(bears(), (answer, 0), "{manner}: it is known");
        }
        // One that cannot be asked bears nothing this time, and is asked again.
        install(&cache, "refuses");
        assert_eq!([bears(), bears()], [(false, 1); 2]);
        fs::remove_dir_all(&cache).expect("clean up");
        assert!(matches!(unplugs_msix(&assets, |_| Ok(())), Err(VmError::NotSetUp { .. })));
    }
}
