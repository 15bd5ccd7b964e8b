//! A guest as people have them: Debian with systemd, in a QEMU that somebody starts by hand, reached by SSH.

use std::fs::File;
use std::net::{Ipv4Addr, SocketAddrV4, TcpListener};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::sync::atomic::{AtomicU8, Ordering};
use std::time::{Duration, Instant};

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD as BASE64;
use rackbus_vm::{Assets, GuestRelease};

use crate::{CheckFailure, RackProcesses, Result, ensure};

/// How long it may take to boot under TCG on a busy machine: it starts some fifty units.
const BOOT: Duration = Duration::from_secs(400);

/// The guest that `scripts/system-guest` builds, while its QEMU runs.
#[derive(Debug)]
pub struct SystemGuest {
    name: String,
    qemu: Child,
    /// Where its SSH server is reached.
    place: SocketAddrV4,
    key: PathBuf,
    /// Where its logs are.
    folder: PathBuf,
}

/// A port of this machine at an address of its own: one that was free is nobody else's before QEMU listens there.
fn own_place() -> Result<SocketAddrV4> {
    static COUNT: AtomicU8 = AtomicU8::new(1);
    let [_, _, upper, lower] = std::process::id().to_be_bytes();
    let own = Ipv4Addr::new(127, 1 + upper % 250, lower, COUNT.fetch_add(1, Ordering::Relaxed));
    let port = TcpListener::bind((own, 0))?.local_addr()?.port();
    Ok(SocketAddrV4::new(own, port))
}

impl SystemGuest {
    /// Starts one with what `rackbus vm args` prints for the guest that is the host `name` of the rack, on `host`. It
    /// boots meanwhile, and what it writes to its drive is gone with its QEMU.
    ///
    /// # Errors
    /// Set-up has not been run, there is no SSH client, or QEMU does not start.
    pub fn start(rack: &RackProcesses, name: &str, host: &str) -> Result<SystemGuest> {
        let printed = rack.json(&["vm", "args", "--host", host, "--fabric", name])?;
        let printed = printed["arguments"].as_array().into_iter().flatten();
        let printed: Vec<&str> = printed.filter_map(serde_json::Value::as_str).collect();
        SystemGuest::spawn(rack.run_dir(), name, &printed)
    }

    /// Starts one that belongs to no rack, whose logs come to `folder`; else as [`start`](SystemGuest::start).
    ///
    /// # Errors
    /// As [`start`](SystemGuest::start).
    pub fn start_alone(folder: &Path, name: &str) -> Result<SystemGuest> {
        SystemGuest::spawn(folder, name, &["-machine", "q35", "-m", "1G"])
    }

    fn spawn(folder: &Path, name: &str, arguments: &[&str]) -> Result<SystemGuest> {
        let assets = Assets::of_user();
        let files = assets.guest(GuestRelease::Trixie)?;
        let root = assets.cache().join("guests/system/root.ext4");
        let key = folder.join(format!("{name}.key"));
        let place = own_place()?;
        let append = format!(
            "console=ttyS0 quiet init=/sbin/init \
             systemd.set_credential_binary=ssh.authorized_keys.root:{}",
            BASE64.encode(new_key(&key)?)
        );
        let drive = format!("file={},if=virtio,format=raw,snapshot=on", root.display());
        let network = format!("user,id=net,restrict=on,hostfwd=tcp:{place}-:22");
        let console = format!("file:{}", folder.join(format!("{name}.log")).display());
        let qemu = Command::new(assets.qemu()?)
            .args(["-nodefaults", "-display", "none", "-accel", assets.accel()?.name()])
            .args(["-cpu", "max", "-smp", "2"])
            .args(arguments)
            .arg("-kernel")
            .arg(files.kernel)
            .arg("-initrd")
            .arg(files.initrd)
            .args(["-append", &append, "-drive", &drive, "-serial", &console])
            .args(["-netdev", &network, "-device", "virtio-net-pci,netdev=net,romfile="])
            .stdin(Stdio::null())
            .stderr(File::create(folder.join(format!("{name}.qemu.log")))?)
            .spawn()?;
        let (name, folder) = (name.to_owned(), folder.to_owned());
        Ok(SystemGuest { name, qemu, place, key, folder })
    }

    /// The name of the host that it is.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Where `ssh` reaches it.
    #[must_use]
    pub fn destination(&self) -> String {
        format!("ssh://root@{}", self.place)
    }

    /// The options that `ssh` needs for it.
    #[must_use]
    pub fn options(&self) -> [String; 5] {
        [
            format!("IdentityFile={}", self.key.display()),
            // It is another machine each time.
            "StrictHostKeyChecking=no".to_owned(),
            "UserKnownHostsFile=/dev/null".to_owned(),
            "BatchMode=yes".to_owned(),
            "ConnectTimeout=20".to_owned(),
        ]
    }

    /// A command that runs a script in the guest.
    #[must_use]
    pub fn command(&self, script: &str) -> Command {
        let mut command = Command::new("ssh");
        command.args(self.options().iter().flat_map(|option| ["-o", option]));
        command.args(["-q", "-T", "--", &self.destination(), script]);
        command.stdin(Stdio::null());
        command
    }

    /// Runs a script that must succeed, and gives what it wrote.
    ///
    /// # Errors
    /// When the guest is not reached or the script fails: with what it wrote.
    pub fn run(&self, script: &str) -> Result<String> {
        let output = self.command(script).output()?;
        let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).trim().to_owned();
        let (said, errors) = (text(&output.stdout), text(&output.stderr));
        let (name, status) = (&self.name, output.status);
        ensure!(status.success(), "guest {name}: {status} of\n{script}\n{said}\n{errors}");
        Ok(said)
    }

    /// Copies a file of this machine to `to` in the guest.
    ///
    /// # Errors
    /// When the guest is not reached, or has no room.
    pub fn copy(&self, file: &Path, to: &str) -> Result<()> {
        let mut copy = self.command(&format!("cat >{to}"));
        let output = copy.stdin(File::open(file)?).output()?;
        let errors = String::from_utf8_lossy(&output.stderr);
        ensure!(output.status.success(), "guest {}: copying to {to}: {errors}", self.name);
        Ok(())
    }

    /// Waits until somebody can log in, and gives the number of this boot.
    ///
    /// # Errors
    /// When nobody can in time, or QEMU ends.
    pub fn booted(&mut self) -> Result<String> {
        self.after("")
    }

    /// Reboots it in order, and waits until somebody can log in again.
    ///
    /// # Errors
    /// As [`booted`](SystemGuest::booted).
    pub fn reboot(&mut self) -> Result<()> {
        let before = self.booted()?;
        // The connection may end before the answer.
        let _: Output = self.command("systemctl reboot").output()?;
        self.after(&before).map(drop)
    }

    /// Waits until somebody can log in after the boot of this number.
    fn after(&mut self, before: &str) -> Result<String> {
        let begun = Instant::now();
        loop {
            if let Some(status) = self.qemu.try_wait()? {
                let log = self.folder.join(format!("{}.qemu.log", self.name));
                let said = std::fs::read_to_string(log).unwrap_or_default();
                return Err(CheckFailure(format!("QEMU of {} ended: {status}: {said}", self.name)));
            }
            match self.run("cat /proc/sys/kernel/random/boot_id") {
                Ok(boot) if boot != before => return Ok(boot),
                outcome => ensure!(
                    begun.elapsed() < BOOT,
                    "{} does not boot within {BOOT:?}: {outcome:?}",
                    self.name
                ),
            }
            std::thread::sleep(Duration::from_millis(200));
        }
    }
}

impl Drop for SystemGuest {
    fn drop(&mut self) {
        // It may have ended.
        let _ = self.qemu.kill();
        let _ = self.qemu.wait();
    }
}

/// Makes a key at `path`, and gives its public part.
fn new_key(path: &Path) -> Result<Vec<u8>> {
    let mut made = Command::new("ssh-keygen");
    made.args(["-q", "-t", "ed25519", "-N", "", "-f"]).arg(path);
    let made = made.output().map_err(|cause| CheckFailure(format!("ssh-keygen: {cause}")))?;
    ensure!(made.status.success(), "ssh-keygen: {}", String::from_utf8_lossy(&made.stderr));
    Ok(std::fs::read(path.with_extension("key.pub"))?)
}
