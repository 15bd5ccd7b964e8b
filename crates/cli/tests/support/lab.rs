//! A rack of three hosts with network interfaces, and stock programs in their namespaces. Making interfaces takes root.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::Read;
use std::path::Path;
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

use serde_json::Value;

use super::{PATIENCE, Rack, programs};

/// A rack of a name that no other has: network namespaces are the machine's.
pub struct Lab {
    /// The processes of the rack that the hosts belong to.
    pub rack: Rack,
    /// What it is called; part of the names of its namespaces.
    pub name: String,
}

impl Lab {
    /// A running rack whose hosts have interfaces; `None` without the right to.
    pub fn up(test: &str, network: &str) -> Option<Lab> {
        if !may_make_interfaces() {
            return None;
        }
        let name = format!("t{}{test}", std::process::id());
        let rack = Rack::up(&format!(
            "name = \"{name}\"\n[network]\n{network}\n[hosts.alpha]\n[hosts.beta]\n[hosts.gamma]\n"
        ));
        rack.good(&["net", "up"]);
        Some(Lab { rack, name })
    }

    /// The command that runs a program on a host.
    pub fn command(&self, host: &str, program: &[&str]) -> Command {
        self.rack.command(&[&["on", host, "--"], program].concat())
    }

    /// Runs a program on a host, which must succeed; what it printed.
    pub fn on(&self, host: &str, program: &[&str]) -> String {
        let output = self.try_on(host, program);
        let text = format!("{output:?}");
        assert!(output.status.success(), "{program:?}: {text}{}", self.rack.logs());
        String::from_utf8(output.stdout).unwrap()
    }

    /// Runs a program on a host, which may fail.
    pub fn try_on(&self, host: &str, program: &[&str]) -> Output {
        self.command(host, program).output().unwrap()
    }

    /// Starts a program on a host; returns when it has printed something, as servers do that listen.
    pub fn serve(&self, host: &str, program: &[&str]) -> Server {
        let mut command = self.command(host, program);
        let mut child = command.stdout(Stdio::piped()).stderr(Stdio::null()).spawn().unwrap();
        let output = child.stdout.as_mut().unwrap();
        assert!(output.read(&mut [0; 64]).unwrap() > 0, "{program:?} says nothing");
        Server(child)
    }

    /// What a client of `iperf3` says.
    pub fn iperf3(&self, host: &str, arguments: &[&str]) -> Value {
        let (program, mut answer) = ([&["iperf3", "-J"], arguments].concat(), None);
        eventually("the server of iperf3 takes a client", &self.rack, || {
            answer = programs::iperf3_answer(&self.try_on(host, &program));
            answer.is_some()
        });
        answer.unwrap()
    }

    /// The network namespace of a host, in which this process can have sockets.
    pub fn namespace(&self, host: &str) -> File {
        rackbus_netdev::namespace::open(&format!("rackbus-{}-{host}", self.name)).unwrap()
    }

    /// Frames that ports of `host` dropped, by cause, of whomever they were for.
    pub fn drops(&self, host: &str) -> BTreeMap<String, u64> {
        let mut all = BTreeMap::new();
        let status = self.rack.json(&["net", "status", host]);
        for port in status[0]["ports"].as_array().unwrap() {
            let peers = port["peers"].as_array().unwrap().iter().map(|peer| &peer["drops"]);
            for drops in peers.chain([&port["drops"]]) {
                for (cause, count) in drops.as_object().into_iter().flatten() {
                    *all.entry(cause.clone()).or_default() += count.as_u64().unwrap();
                }
            }
        }
        all
    }

    /// What the status of the port `port` says of its exchange with `peer`.
    pub fn peer(&self, port: &str, peer: &str) -> Value {
        let all = self.rack.json(&["net", "status", port]);
        let peers = all[0]["ports"][0]["peers"].as_array().unwrap().clone();
        peers.into_iter().find(|it| it["peer"] == peer).unwrap_or_default()
    }
}

impl Drop for Lab {
    fn drop(&mut self) {
        self.rack.run(&["net", "down"]);
        for host in ["alpha", "beta", "gamma"] {
            let name = format!("rackbus-{}-{host}", self.name);
            let _ = Command::new("ip").args(["netns", "del", &name]).output();
        }
    }
}

/// A program that is ended with this.
pub struct Server(pub Child);

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Whether this process may make interfaces; says so if not.
pub fn may_make_interfaces() -> bool {
    let may = rustix::process::geteuid().is_root() && Path::new("/dev/net/tun").exists();
    if !may {
        super::not_tested("making network interfaces takes root and /dev/net/tun");
    }
    may
}

/// Looks until something holds.
///
/// # Panics
/// With what the nodes logged, when it does not for long.
pub fn eventually(what: &str, rack: &Rack, mut holds: impl FnMut() -> bool) {
    let deadline = Instant::now() + PATIENCE;
    while !holds() {
        assert!(Instant::now() < deadline, "{what}{}", rack.logs());
        std::thread::sleep(Duration::from_millis(20));
    }
}

/// An answer comes; where the first packet was too early for a busy machine to have opened the way, to the next.
pub fn ping(lab: &Lab, from: &str, to: &str, more: &[&str]) {
    let program = [&["ping", "-c", "1", "-W", "5", "-q"], more, &[to]].concat();
    eventually(&format!("{program:?} is not answered"), &lab.rack, || {
        lab.try_on(from, &program).status.success()
    });
}
