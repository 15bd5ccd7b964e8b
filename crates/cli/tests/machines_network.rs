//! The rack's network where hosts are machines: stock programs in the namespaces of three hosts, whose nodes have nothing in
//! common but TLS. Making interfaces takes root: without it the tests say so and end.

mod support;

use std::path::Path;
use std::process::{Command, Output, Stdio};
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal};
use serde_json::Value;
use support::machines::{Machine, Machines, free_port};
use support::programs::has;
use support::relay::Relay;
use support::{PATIENCE, Process, programs};

const HOSTS: [&str; 3] = ["alpha", "beta", "gamma"];

/// Machines of a rack of a name that no other has: network namespaces are this machine's.
struct Lab {
    rack: Machines,
    hosts: [Machine; 3],
    /// Between beta's machine and those that connect to it.
    relay: Relay,
    name: String,
}

impl Lab {
    /// Machines whose hosts have interfaces; `None` without the right to.
    fn up(test: &str, network: &str) -> Option<Lab> {
        if !rustix::process::geteuid().is_root() || !Path::new("/dev/net/tun").exists() {
            support::not_tested("making network interfaces takes root and /dev/net/tun");
            return None;
        }
        let name = format!("m{}{test}", std::process::id());
        let rack = Machines::start(&format!(
            "name = \"{name}\"\n[network]\n{network}\n[hosts.alpha]\n[hosts.beta]\n[hosts.gamma]\n"
        ));
        let listen = format!("127.0.0.1:{}", free_port());
        let relay = Relay::start(listen.clone());
        let hosts = HOSTS.map(|host| {
            let (mut machine, token) = (rack.machine(host), rack.token(host));
            match host {
                "beta" => {
                    let advertised = ["--advertise", &relay.address()];
                    rack.node_at(&mut machine, host, &listen, &advertised, Some(&token));
                }
                _ => rack.node(&mut machine, host, Some(&token)),
            }
            machine
        });
        let lab = Lab { rack, hosts, relay, name };
        for machine in &lab.hosts {
            let up = machine.json(&["net", "up"]);
            assert_eq!(
                up.as_array().unwrap().len(),
                1,
                "a machine has its own interface alone: {up}"
            );
        }
        Some(lab)
    }

    fn machine(&self, host: &str) -> &Machine {
        &self.hosts[HOSTS.iter().position(|it| *it == host).unwrap()]
    }

    fn command(&self, host: &str, program: &[&str]) -> Command {
        self.machine(host).command(&[&["on", host, "--"], program].concat())
    }

    fn try_on(&self, host: &str, program: &[&str]) -> Output {
        self.command(host, program).output().unwrap()
    }

    /// Runs a program on a host, which must succeed; what it printed.
    fn on(&self, host: &str, program: &[&str]) -> String {
        let output = self.try_on(host, program);
        assert!(output.status.success(), "{program:?}: {output:?}{}", self.logs());
        String::from_utf8(output.stdout).unwrap()
    }

    fn logs(&self) -> String {
        self.hosts.each_ref().map(Machine::log).join("\n---\n")
    }

    fn peer(&self, port: &str, peer: &str) -> Value {
        let all = self.machine(port).json(&["net", "status"]);
        let peers = all[0]["ports"][0]["peers"].as_array().unwrap().clone();
        peers.into_iter().find(|it| it["peer"] == peer).unwrap_or_default()
    }

    fn eventually(&self, what: &str, mut holds: impl FnMut() -> bool) {
        let deadline = Instant::now() + PATIENCE;
        while !holds() {
            assert!(Instant::now() < deadline, "{what}{}", self.logs());
            std::thread::sleep(Duration::from_millis(20));
        }
    }

    /// What a client of `iperf3` says.
    fn iperf3(&self, host: &str, arguments: &[&str]) -> Value {
        let (program, mut answer) = ([&["iperf3", "-J"], arguments].concat(), None);
        self.eventually("the server of iperf3 takes a client", || {
            answer = programs::iperf3_answer(&self.try_on(host, &program));
            answer.is_some()
        });
        answer.unwrap()
    }

    /// An answer comes, to one of several at least: the first may be too early.
    fn ping(&self, from: &str, to: &str, more: &[&str]) {
        let program = [&["ping", "-c", "1", "-W", "2", "-q"], more, &[to]].concat();
        self.eventually(&format!("{program:?} is not answered"), || {
            self.try_on(from, &program).status.success()
        });
    }
}

impl Drop for Lab {
    fn drop(&mut self) {
        for (host, machine) in HOSTS.iter().zip(&self.hosts) {
            machine.run(&["net", "down"]);
            let name = format!("rackbus-{}-{host}", self.name);
            let _ = Command::new("ip").args(["netns", "del", &name]).output();
        }
    }
}

#[test]
fn stock_programs_of_different_machines_talk_over_the_link() {
    let Some(lab) = Lab::up("talk", "queues = 2\nmtu = 65521") else { return };
    if !has("ping") || !has("iperf3") || !has("socat") || !has("sha256sum") {
        return;
    }
    for size in ["0", "1472", "9000", "65000"] {
        lab.ping("alpha", "10.77.0.2", &["-s", size]);
        lab.ping("beta", "fd72:6163:6b62::3", &["-s", size]);
    }
    lab.ping("gamma", "10.77.0.2", &["-M", "do", "-s", "65493"]);
    assert_eq!(lab.peer("alpha", "beta")["way"], "TLS");

    let mut server = lab.command("beta", &["iperf3", "-s", "--forceflush"]);
    let mut server = server.stdout(Stdio::null()).spawn().unwrap();
    for (to, more) in [("10.77.0.2", &["-P", "1"][..]), ("fd72:6163:6b62::2", &["-P", "4", "-R"])] {
        let answer = lab.iperf3("alpha", &[&["-n", "40M", "-c", to], more].concat());
        let end = &answer["end"];
        assert!(end["sum_sent"]["bytes"].as_u64() >= Some(40_000_000), "{end}");
    }
    let datagrams = ["-u", "-P", "4", "-b", "20M", "-n", "1M", "-c", "10.77.0.2"];
    let answer = lab.iperf3("alpha", &datagrams);
    for stream in answer["end"]["streams"].as_array().unwrap() {
        assert_eq!(stream["udp"]["out_of_order"], 0, "{stream}");
    }
    // Large segments crossed in one piece: the more a sender has at a time, the larger they are, which is little on a busy
    // machine.
    let sent = || {
        let peer = lab.peer("alpha", "beta");
        (peer["sent"].as_u64().unwrap(), peer["sent_bytes"].as_u64().unwrap())
    };
    let mut before = (0, 0);
    lab.eventually("segments do not cross in one piece", || {
        let (frames, bytes) = sent();
        let is_large = bytes - before.1 > 3000 * (frames - before.0);
        if !is_large {
            before = (frames, bytes);
            lab.iperf3("alpha", &["-n", "40M", "-c", "10.77.0.2"]);
        }
        is_large
    });
    let _ = server.kill();
    let _ = server.wait();
    // Also where none of the nodes is.
    lab.eventually("the control plane's machine does not show the network", || {
        let rows = lab.rack.control.json(&["top"])["network"].clone();
        let is_row = |row: &&Value| row["port"] == "alpha" && row["peer"] == "beta";
        let row = rows.as_array().and_then(|rows| rows.iter().find(is_row).cloned());
        row.is_some_and(|row| row["seconds"].as_f64() > Some(0.0) && row["ring_bytes"] != 0)
    });

    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("data");
    let data: Vec<u8> =
        (0..64u32 << 20).map(|at| (at.wrapping_mul(2_654_435_761) >> 13) as u8).collect();
    std::fs::write(&file, &data).unwrap();
    let receive = "socat -u TCP-LISTEN:7001,reuseaddr - | sha256sum";
    let receiver =
        lab.command("beta", &["sh", "-c", receive]).stdout(Stdio::piped()).spawn().unwrap();
    let path = file.display();
    let send = format!("socat -u FILE:{path} TCP:10.77.0.2:7001,retry=200,interval=0.05");
    lab.on("gamma", &["sh", "-c", &send]);
    let arrived = receiver.wait_with_output().unwrap().stdout;
    let sent = Command::new("sha256sum").arg(&file).output().unwrap().stdout;
    assert_eq!(arrived[..64], sent[..64]);
}

#[test]
fn a_machine_that_stands_still_or_is_cut_off_stops_nobody_and_comes_back_by_itself() {
    let Some(mut lab) = Lab::up("death", "") else { return };
    if !has("ping") {
        return;
    }
    lab.ping("alpha", "10.77.0.2", &[]);
    lab.relay.kill();
    lab.ping("alpha", "10.77.0.2", &[]);
    assert!(lab.peer("alpha", "beta")["opened"].as_u64() >= Some(2));

    let beta = Process::of(Pid::from_child(lab.hosts[1].process()));
    beta.signal(Signal::STOP);
    // What is for it is dropped; others are not waited for.
    lab.on("alpha", &["sh", "-c", "ping -q -f -c 200 -W 1 -s 60000 10.77.0.2 > /dev/null; true"]);
    lab.ping("alpha", "10.77.0.3", &[]);
    lab.eventually("nothing was dropped", || {
        let drops = lab.peer("alpha", "beta")["drops"].clone();
        let of = |cause: &str| drops[cause].as_u64().unwrap_or(0);
        of("full") + of("down") > 0
    });
    beta.signal(Signal::CONT);
    lab.ping("alpha", "10.77.0.2", &[]);

    lab.hosts[1].restart_in_place("beta");
    lab.ping("alpha", "10.77.0.2", &[]);
    lab.ping("beta", "10.77.0.1", &[]);
    lab.hosts[1].crash();
    lab.ping("alpha", "10.77.0.3", &[]);
    lab.eventually("its ring stays", || lab.peer("alpha", "beta")["rings"] == 0);
}
