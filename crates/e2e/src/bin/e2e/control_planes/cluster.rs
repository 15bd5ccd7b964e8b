//! Three machines with a member of etcd and a control plane each, and two hosts, set up by the commands of the book's
//! chapter.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use rackbus_e2e::machines::MachineTestbed;
use rackbus_e2e::rack::beside;
use rackbus_e2e::{CheckFailure, RackProcesses, Result, ensure};
use rackbus_vm::Assets;
use serde_json::Value;

/// The rack file of these machines.
const RACK: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/control-planes.toml");
/// The chapter that says how this is set up.
const CHAPTER: &str =
    concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/book/src/high-availability.md");
/// The machines of the chapter.
pub const CONTROLS: [&str; 3] = ["c1", "c2", "c3"];
pub const HOSTS: [&str; 2] = ["alpha", "beta"];
/// How long something may take to be there (again).
const PATIENCE: Duration = Duration::from_secs(30);

/// The machines, with what runs on them.
pub struct ControlCluster {
    // Before the testbed: its end is theirs as well.
    running: BTreeMap<String, Child>,
    testbed: MachineTestbed,
    /// The chapter's commands of a shell, by what they begin with.
    book: String,
}

impl ControlCluster {
    /// All of it, up, with the leader on the machine where etcd's leader is.
    pub fn start() -> Result<ControlCluster> {
        let testbed = MachineTestbed::bare(RACK.as_ref(), &CONTROLS)?;
        let book = fs::read_to_string(CHAPTER)?;
        let mut cluster = ControlCluster { running: BTreeMap::new(), testbed, book };
        cluster.certify()?;
        for machine in CONTROLS {
            cluster.begin_etcd(machine)?;
        }
        let first = cluster.etcd_leader()?;
        cluster.begin_control(first)?;
        ensure!(cluster.leader(&[])? == first, "another one leads than the only one");
        for machine in CONTROLS.iter().filter(|machine| **machine != first) {
            cluster.begin_control(machine)?;
        }
        cluster.wait(first, "one of three", |status| {
            status["members"].as_array().is_some_and(|all| all.len() == CONTROLS.len())
        })?;
        for host in HOSTS {
            cluster.join(first, host)?;
        }
        cluster.on(first)?.wait_hosts(&HOSTS)?;
        Ok(cluster)
    }

    /// Makes the certificates of the chapter, and gives each machine its files.
    fn certify(&self) -> Result<()> {
        let folder = self.testbed.dir().join("certificates");
        fs::create_dir(&folder)?;
        let recipe = self.commands("openssl req -x509")?;
        let made = Command::new("sh").args(["-ec", &recipe]).current_dir(&folder).output()?;
        let said = String::from_utf8_lossy(&made.stderr);
        ensure!(made.status.success(), "the chapter's certificates are not made: {said}");
        for machine in CONTROLS {
            let own = self.folder(machine);
            for file in ["ca.pem", "etcd.pem", "etcd.key", "control.pem", "control.key"] {
                fs::copy(folder.join(file), own.join(file))?;
            }
            fs::copy(RACK, own.join("rack.toml"))?;
        }
        Ok(())
    }

    /// The chapter's commands that begin so.
    fn commands(&self, begin: &str) -> Result<String> {
        let found = self.book.split("```\n").find(|block| block.starts_with(begin));
        found.map(str::to_owned).ok_or_else(|| CheckFailure(format!("the chapter has no {begin}")))
    }

    /// What the chapter has for `c1`, for another one, in the folder of that.
    fn commands_on(&self, machine: &str, begin: &str, program: &Path) -> Result<String> {
        let folder = self.folder(machine).display().to_string();
        let (name, rest) = begin.split_once(' ').unwrap_or((begin, ""));
        let text = self.commands(begin)?.replacen(name, &program.display().to_string(), 1);
        ensure!(text.contains(rest), "{begin} is not what is run: {text}");
        let mut text = text.replace("/etc/rackbus", &folder);
        text = text.replace("/var/lib/etcd/lab", &format!("{folder}/etcd"));
        for own in ["--name ", "--advertise ", "--advertise-client-urls https://"] {
            text = text.replace(&format!("{own}c1"), &format!("{own}{machine}"));
        }
        let peer = "--initial-advertise-peer-urls https://";
        text = text.replace(&format!("{peer}c1"), &format!("{peer}{machine}"));
        Ok(format!("cd {folder}; exec {text}"))
    }

    pub fn begin_etcd(&mut self, machine: &str) -> Result<()> {
        let etcd = Assets::of_user().cache().join("etcd/run/etcd");
        ensure!(etcd.exists(), "no {}: `scripts/setup etcd` makes it", etcd.display());
        let script = self.commands_on(machine, "etcd --name c1", &etcd)?;
        self.begin(machine, "etcd", &script)
    }

    pub fn begin_control(&mut self, machine: &str) -> Result<()> {
        let script = self.commands_on(machine, "rackbus control rack.toml", &beside("rackbus")?)?;
        self.begin(machine, "control", &script)
    }

    /// Has a host join with a token, by the control planes that the chapter names.
    fn join(&mut self, control: &str, host: &str) -> Result<()> {
        let token = self.on(control)?.json(&["token", host])?;
        let file = self.folder(host).join("token");
        fs::write(&file, token["token"].as_str().unwrap_or_default())?;
        let rackbus = beside("rackbus")?;
        let script = format!(
            "exec {} node --host {host} --join https://c1:7420,https://c2:7420 --token-file {}",
            rackbus.display(),
            file.display()
        );
        self.begin(host, "node", &script)
    }

    fn begin(&mut self, machine: &str, what: &str, script: &str) -> Result<()> {
        let log = self.folder(machine).join(format!("{what}.log"));
        let log = File::options().create(true).append(true).open(log)?;
        let mut command = self.testbed.script(machine, script);
        let child = command.stdout(log.try_clone()?).stderr(log).spawn()?;
        self.running.insert(format!("{machine} {what}"), child);
        Ok(())
    }

    /// Kills a machine's member of etcd, or its control plane.
    pub fn kill(&mut self, machine: &str, what: &str) -> Result<()> {
        let found = self.running.remove(&format!("{machine} {what}"));
        let mut child =
            found.ok_or_else(|| CheckFailure(format!("{machine} has no {what} running")))?;
        child.kill()?;
        child.wait()?;
        Ok(())
    }

    pub fn folder(&self, machine: &str) -> PathBuf {
        self.testbed.dir().join(machine)
    }

    /// The rack as it is seen on a machine.
    pub fn on(&self, machine: &str) -> Result<RackProcesses> {
        self.testbed.on(machine)
    }

    /// `rackbus` with these words on a machine, in the background: it may wait for what does not come.
    pub fn ask(&self, machine: &str, words: &str) -> Result<Asked> {
        let script = format!("exec {} {words}", beside("rackbus")?.display());
        let mut command = self.testbed.script(machine, &script);
        let child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn()?;
        Ok(Asked(Some(child)))
    }

    /// A command of the testbed about cables.
    pub fn cable(&self, words: &[&str]) -> Result<()> {
        self.testbed.run(words)
    }

    /// Nothing passes between these machines, in either direction.
    pub fn part(&self, machine: &str, others: &[&str]) -> Result<()> {
        for other in others {
            self.cable(&["cut", machine, "--to", other])?;
            self.cable(&["cut", other, "--to", machine])?;
        }
        Ok(())
    }

    /// All cables are as they were.
    pub fn mend(&self) -> Result<()> {
        CONTROLS.iter().chain(&HOSTS).try_for_each(|machine| self.cable(&["mend", machine]))
    }

    /// What a control plane says of itself and the others.
    pub fn status(&self, machine: &str) -> Result<Value> {
        self.on(machine)?.json(&["control", "status"])
    }

    /// Waits until one of the control planes leads, and all others say that it does; what that one says.
    pub fn agreed(&self) -> Result<Value> {
        let begun = Instant::now();
        loop {
            let all: Vec<Value> =
                CONTROLS.into_iter().filter_map(|machine| self.status(machine).ok()).collect();
            let leader = all.iter().find(|status| status["leads"] == true);
            let is_same = |it: &Value| Some(&it["leader"]) == leader.map(|it| &it["leader"]);
            let leads = all.iter().filter(|status| status["leads"] == true).count();
            if let Some(leader) = leader
                && leads == 1
                && all.len() == CONTROLS.len()
                && all.iter().all(is_same)
            {
                return Ok(leader.clone());
            }
            ensure!(begun.elapsed() < PATIENCE, "they do not agree: {all:?} {}", self.logs());
            std::thread::sleep(Duration::from_millis(20));
        }
    }

    /// Waits until one of the control planes leads, other than these.
    pub fn leader(&self, not: &[&str]) -> Result<&'static str> {
        let begun = Instant::now();
        loop {
            for machine in CONTROLS.into_iter().filter(|machine| !not.contains(machine)) {
                if self.status(machine).is_ok_and(|status| status["leads"] == true) {
                    return Ok(machine);
                }
            }
            ensure!(begun.elapsed() < PATIENCE, "nobody leads: {}", self.logs());
            std::thread::sleep(Duration::from_millis(20));
        }
    }

    /// Waits until a control plane says so of itself.
    pub fn wait(&self, machine: &str, what: &str, is: impl Fn(&Value) -> bool) -> Result<Value> {
        let begun = Instant::now();
        loop {
            let status = self.status(machine);
            match status {
                Ok(status) if is(&status) => return Ok(status),
                _ if begun.elapsed() < PATIENCE => {}
                other => {
                    let text = format!("{machine}: not {what}: {other:?}; {}", self.logs());
                    return Err(CheckFailure(text));
                }
            }
            std::thread::sleep(Duration::from_millis(20));
        }
    }

    /// The machine whose member of etcd became the leader last, by what the members log.
    fn etcd_leader(&self) -> Result<&'static str> {
        let begun = Instant::now();
        loop {
            let terms = CONTROLS.into_iter().filter_map(|machine| {
                let log = fs::read_to_string(self.folder(machine).join("etcd.log")).ok()?;
                let term = log.rsplit_once(" became leader at term ")?.1;
                let digits = term.split(|c: char| !c.is_ascii_digit()).next()?;
                Some((digits.parse::<u64>().ok()?, machine))
            });
            if let Some((_, machine)) = terms.max() {
                return Ok(machine);
            }
            ensure!(begun.elapsed() < PATIENCE, "etcd has no leader: {}", self.logs());
            std::thread::sleep(Duration::from_millis(20));
        }
    }

    /// The last lines that the processes have logged.
    pub fn logs(&self) -> String {
        let mut text = String::new();
        for name in self.running.keys() {
            let Some((machine, what)) = name.split_once(' ') else { continue };
            let log = self.folder(machine).join(format!("{what}.log"));
            let log = fs::read_to_string(log).unwrap_or_default();
            let lines: Vec<&str> = log.lines().collect();
            let last = &lines[lines.len().saturating_sub(12)..];
            text += &format!("\nthe end of {name}'s log:\n  {}", last.join("\n  "));
        }
        text
    }
}

impl Drop for ControlCluster {
    fn drop(&mut self) {
        for child in self.running.values_mut() {
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}

/// A command that was begun, and is ended with this.
pub struct Asked(Option<Child>);

impl Asked {
    /// Ends it. Whether it had ended with success before; what it said.
    pub fn end(mut self) -> Result<(bool, String)> {
        let mut child = self.0.take().ok_or_else(|| CheckFailure("it was ended".to_owned()))?;
        let had_ended = child.try_wait()?.is_some_and(|status| status.success());
        let _ = child.kill();
        let output = child.wait_with_output()?;
        let said = [&output.stdout[..], &output.stderr].map(String::from_utf8_lossy).concat();
        Ok((had_ended, said))
    }
}

impl Drop for Asked {
    fn drop(&mut self) {
        if let Some(child) = &mut self.0 {
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}
