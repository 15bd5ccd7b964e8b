//! The way outside of a rack: two uplinks to one network beyond it, which is a bridge in a namespace of its own.
//! Making interfaces takes root: without it the test says so and ends.

mod support;

use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::process::Command;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use rustix::process::Signal;
use support::programs::has;
use support::{PATIENCE, Rack, programs};

/// An address outside, and the same for IPv6.
const OUTSIDE: [&str; 2] = ["10.77.200.1", "fd72:6163:6b62::ffff"];

/// What is outside: two interfaces of this machine lead to one bridge.
struct Beyond {
    namespace: String,
    interfaces: [String; 2],
}

fn ip(args: &[&str]) {
    let output = Command::new("ip").args(args).output().unwrap();
    assert!(output.status.success(), "ip {args:?}: {}", String::from_utf8_lossy(&output.stderr));
}

/// Whether this process may make interfaces; says so if not.
fn may() -> bool {
    let is_root = rustix::process::geteuid().is_root();
    if !is_root {
        support::not_tested("making network interfaces takes root");
    }
    is_root && has("ip") && has("ping")
}

impl Beyond {
    fn new() -> Option<Beyond> {
        if !may() {
            return None;
        }
        // Tests of one process run beside each other.
        static COUNT: AtomicU32 = AtomicU32::new(0);
        let (own, count) = (std::process::id(), COUNT.fetch_add(1, Ordering::Relaxed));
        let namespace = format!("rackbus-beyond-{own}-{count}");
        let interfaces = [0, 1].map(|nth| format!("u{own}n{count}{nth}"));
        let beyond = Beyond { namespace, interfaces };
        ip(&["netns", "add", &beyond.namespace]);
        let inside = |args: &[&str]| ip(&[&["-n", &beyond.namespace], args].concat());
        // It would have that of one of its ports otherwise, and others keep for a while what they know of it.
        inside(&["link", "add", "br0", "address", "0e:77:00:00:00:01", "type", "bridge"]);
        (0..2).for_each(|nth| beyond.lay(nth));
        inside(&["addr", "add", &format!("{}/16", OUTSIDE[0]), "dev", "br0"]);
        inside(&["-6", "addr", "add", &format!("{}/64", OUTSIDE[1]), "dev", "br0", "nodad"]);
        inside(&["link", "set", "br0", "up"]);
        Some(beyond)
    }

    /// Makes an interface that leads there.
    fn lay(&self, nth: usize) {
        let (near, far) = (&self.interfaces[nth], format!("far{nth}"));
        let pair = ["link", "add", near, "type", "veth", "peer", "name", &far];
        ip(&[&pair[..], &["netns", &self.namespace]].concat());
        ip(&["link", "set", near, "up"]);
        ip(&["-n", &self.namespace, "link", "set", &far, "master", "br0", "up"]);
    }

    fn cable(&self, nth: usize, state: &str) {
        ip(&["-n", &self.namespace, "link", "set", &format!("far{nth}"), state]);
    }
}

impl Drop for Beyond {
    fn drop(&mut self) {
        let _ = Command::new("ip").args(["netns", "del", &self.namespace]).output();
    }
}

struct Lab {
    rack: Rack,
    name: String,
}

impl Lab {
    /// What each uplink does.
    fn uplinks(&self) -> Vec<String> {
        let all = self.rack.json(&["net", "status"]);
        let hosts = all.as_array().unwrap().iter();
        let states = hosts.filter_map(|host| host["uplinks"].as_object());
        states.flatten().map(|(_, state)| state.as_str().unwrap().to_owned()).collect()
    }

    fn wait_uplinks(&self, expected: &[&str]) {
        let deadline = Instant::now() + PATIENCE;
        while self.uplinks() != expected {
            assert!(Instant::now() < deadline, "{:?}{}", self.uplinks(), self.rack.logs());
            std::thread::sleep(Duration::from_millis(20));
        }
    }

    /// Whether a packet comes back, within some attempts.
    fn ping(&self, host: &str, more: &[&str], to: &str) -> bool {
        let args = [&["on", host, "--", "ping", "-q", "-c", "1", "-W", "2"], more, &[to]].concat();
        (0..10).any(|_| self.rack.run(&args).status.success())
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

#[test]
fn hosts_reach_what_is_outside_by_the_first_uplink_that_works() {
    let Some(beyond) = Beyond::new() else { return };
    let name = format!("u{}", std::process::id());
    let [first, second] = &beyond.interfaces;
    let rack = Rack::up(&format!(
        "name = \"{name}\"\n[network]\nmtu = 9000\nuplinks = [\"alpha/{first}\", \"beta/{second}\"]\n\
         [hosts.alpha]\n[hosts.beta]\n[hosts.gamma]\n"
    ));
    rack.good(&["net", "up"]);
    let lab = Lab { rack, name };
    lab.wait_uplinks(&["active", "standby"]);
    for to in OUTSIDE {
        // Large packets go in pieces after their sender was told what fits.
        for size in ["56", "4000"] {
            assert!(lab.ping("gamma", &["-s", size], to), "{size} to {to}{}", lab.rack.logs());
        }
    }
    // What may not be cut and does not fit never comes back.
    let args = ["on", "gamma", "--", "ping", "-q", "-c", "1", "-W", "1", "-M", "do", "-s", "4000"];
    let refused = lab.rack.run(&[&args[..], &[OUTSIDE[0]]].concat());
    assert!(!refused.status.success());

    beyond.cable(0, "down");
    lab.wait_uplinks(&["down", "active"]);
    assert!(lab.ping("gamma", &[], OUTSIDE[0]), "by the second uplink{}", lab.rack.logs());
    beyond.cable(0, "up");
    lab.wait_uplinks(&["active", "standby"]);
    lab.rack.process(Some("alpha")).signal(Signal::STOP);
    assert!(lab.ping("gamma", &[], OUTSIDE[0]), "with the first one frozen{}", lab.rack.logs());
    lab.rack.process(Some("alpha")).signal(Signal::CONT);
    lab.wait_uplinks(&["active", "standby"]);
    assert!(lab.ping("gamma", &[], OUTSIDE[0]), "when it goes on{}", lab.rack.logs());
    let begun = Instant::now();
    // Too shortly each time to be found frozen.
    while lab.uplinks() != ["resting", "active"] {
        lab.rack.process(Some("alpha")).signal(Signal::STOP);
        std::thread::sleep(Duration::from_millis(700));
        lab.rack.process(Some("alpha")).signal(Signal::CONT);
        std::thread::sleep(Duration::from_millis(200));
        assert!(begun.elapsed() < PATIENCE, "{:?}{}", lab.uplinks(), lab.rack.logs());
    }
    assert!(lab.ping("gamma", &[], OUTSIDE[0]), "while it rests{}", lab.rack.logs());
    lab.wait_uplinks(&["active", "standby"]);
    lab.rack.process(Some("alpha")).crash();
    assert!(
        lab.ping("gamma", &[], OUTSIDE[0]),
        "with the first one's host dead{}",
        lab.rack.logs()
    );
}

#[test]
fn frames_of_an_uplink_may_come_by_af_xdp() {
    let Some(beyond) = Beyond::new() else { return };
    let name = format!("x{}", std::process::id());
    let [first, second] = &beyond.interfaces;
    let rack = Rack::up(&format!(
        "name = \"{name}\"\n[network]\nuplinks = [\"alpha/{first}\", \"beta/{second}\"]\n\
         uplink_mode = \"xdp\"\n[hosts.alpha]\n[hosts.beta]\n[hosts.gamma]\n"
    ));
    rack.good(&["net", "up"]);
    let lab = Lab { rack, name };
    lab.wait_uplinks(&["active", "standby"]);
    let status = lab.rack.json(&["net", "status", "alpha"]);
    assert_eq!(status[0]["uplink_ways"][format!("alpha/{first}")], "AF_XDP, copied", "{status}");
    for to in OUTSIDE {
        for size in ["56", "4000"] {
            assert!(lab.ping("gamma", &["-s", size], to), "{size} to {to}{}", lab.rack.logs());
        }
    }
    // A stream: segments are cut here, and checksums that the other side left out are found.
    let inside = |name: &str| rackbus_netdev::namespace::open(name).unwrap();
    let (gamma, outside) =
        (inside(&format!("rackbus-{}-gamma", lab.name)), inside(&beyond.namespace));
    let listen = || TcpListener::bind("10.77.200.1:0");
    let listener = rackbus_netdev::namespace::within(&outside, listen).unwrap();
    let at = listener.local_addr().unwrap();
    let connect = move || TcpStream::connect_timeout(&at, PATIENCE);
    let near = rackbus_netdev::namespace::within(&gamma, connect).unwrap();
    let (far, _) = listener.accept().unwrap();
    let data: Vec<u8> = (0..2_000_000u32).map(|it| ((it * 7) >> 3) as u8).collect();
    for (mut from, mut to) in [(&near, &far), (&far, &near)] {
        std::thread::scope(|scope| {
            scope.spawn(|| from.write_all(&data).unwrap());
            let mut came = vec![0; data.len()];
            to.read_exact(&mut came).unwrap();
            assert!(came == data);
        });
    }
    beyond.cable(0, "down");
    lab.wait_uplinks(&["down", "active"]);
    assert!(lab.ping("gamma", &[], OUTSIDE[0]), "by the second uplink{}", lab.rack.logs());
}

/// Two racks whose uplinks are the two ends of one cable, a trunk with VLAN 7; and what is behind a bridge of a host.
#[test]
fn a_vlan_goes_on_outside_with_tags_and_nothing_of_it_elsewhere() {
    if !may() {
        return;
    }
    let own = std::process::id();
    let [near, far, container] = ["a", "b", "c"]
        .map(|it| format!("{it}{own}"))
        .map(|it| it.chars().take(15).collect::<String>());
    ip(&["link", "add", &near, "type", "veth", "peer", "name", &far]);
    ip(&["link", "set", &near, "up"]);
    ip(&["link", "set", &far, "up"]);
    let _cable = Cable(near.clone(), container.clone());
    let lab = |text: String| {
        let name = text.split('"').nth(1).unwrap().to_owned();
        let rack = Rack::up(&text);
        rack.good(&["net", "up"]);
        let lab = Lab { rack, name };
        lab.wait_uplinks(&["active"]);
        lab
    };
    let first = lab(format!(
        "name = \"p{own}\"\n[network]\nuplinks = [\"alpha/{near}\"]\nuplink_vlans = [7]\n\
         [network.host.beta]\nvlan = 7\nlearned_addresses = 1\n[network.host.gamma]\nvlan = 9\n\
         [hosts.alpha]\n[hosts.beta]\n[hosts.gamma]\n"
    ));
    let second = lab(format!(
        "name = \"q{own}\"\n[network]\nuplinks = [\"alpha/{far}\"]\nuplink_vlans = [7]\n\
         [network.host.alpha]\nvlan = 7\n[hosts.alpha]\nnode_id = 80\n[hosts.beta]\nnode_id = 84\n"
    ));
    // In the VLAN with tags outside and without them at both ends; and without the VLAN.
    let (seven, none) = ("10.77.0.20", "10.77.0.21");
    for size in ["56", "4000"] {
        assert!(first.ping("beta", &["-s", size], seven), "{size}{}", first.rack.logs());
    }
    assert!(first.ping("alpha", &[], none), "{}", first.rack.logs());
    for (host, to) in [("alpha", seven), ("beta", none), ("gamma", seven), ("gamma", "10.77.0.2")] {
        let args = ["on", host, "--", "ping", "-q", "-c", "1", "-W", "1", to];
        assert!(!first.rack.run(&args).status.success(), "{host} reaches {to}");
    }
    // A container behind a bridge that the host's interface is in.
    let beta = format!("rackbus-p{own}-beta");
    let inside = |args: &[&str]| ip(&[&["-n", &beta], args].concat());
    ip(&["netns", "add", &container]);
    inside(&["link", "add", "br0", "type", "bridge"]);
    inside(&["link", "set", "rackbus0", "master", "br0"]);
    inside(&["link", "add", "c0", "type", "veth", "peer", "name", "c1", "netns", &container]);
    inside(&["link", "set", "c0", "master", "br0", "up"]);
    inside(&["link", "set", "br0", "up"]);
    let mac = "02:00:00:00:77:01";
    ip(&["-n", &container, "link", "set", "c1", "address", mac, "up"]);
    ip(&["-n", &container, "addr", "add", "10.77.99.1/16", "dev", "c1"]);
    assert!(second.ping("alpha", &[], "10.77.99.1"), "{}", first.rack.logs());
    let status = first.rack.json(&["net", "status", "beta"]);
    let port = &status[0]["ports"][0];
    assert_eq!((&port["vlan"], &port["learned"][0]["mac"]), (&7.into(), &mac.into()), "{port}");
    // With another address there are too many behind the port.
    ip(&["-n", &container, "link", "set", "c1", "address", "02:00:00:00:77:02"]);
    let args = ["netns", "exec", &container, "ping", "-q", "-c", "1", "-W", "1", seven];
    let mut ping = Command::new("ip");
    assert!(!ping.args(args).env("PATH", programs::path()).status().unwrap().success());
    // A node tells of its counts now and then.
    let begun = Instant::now();
    let status = || first.rack.json(&["net", "status", "beta"]);
    while status()[0]["ports"][0]["drops"]["spoofed"].as_u64().is_none_or(|count| count == 0) {
        assert!(begun.elapsed() < PATIENCE, "{}", status());
        std::thread::sleep(Duration::from_millis(20));
    }
}

/// A pair of interfaces, and a namespace; taken away with this.
struct Cable(String, String);

impl Drop for Cable {
    fn drop(&mut self) {
        let _ = Command::new("ip").args(["link", "del", &self.0]).output();
        let _ = Command::new("ip").args(["netns", "del", &self.1]).output();
    }
}

#[test]
fn an_uplink_that_is_not_there_is_refused_and_nothing_stays() {
    if !may() {
        return;
    }
    let name = format!("v{}", std::process::id());
    let text =
        format!("name = \"{name}\"\n[network]\nuplinks = [\"alpha/none7\"]\n[hosts.alpha]\n");
    let lab = Lab { rack: Rack::up(&text), name };
    let said = lab.rack.bad(1, &["net", "up"]);
    assert!(said.contains("there is no network interface \"none7\""), "{said}");
    let status = lab.rack.json(&["net", "status"]);
    assert_eq!(status[0]["up"], false, "{status}");
}

#[test]
fn a_host_that_comes_back_without_one_of_its_uplinks_uses_the_other_one() {
    let Some(beyond) = Beyond::new() else { return };
    let name = format!("w{}", std::process::id());
    let [first, second] = &beyond.interfaces;
    let rack = Rack::up(&format!(
        "name = \"{name}\"\n[network]\nuplinks = [\"alpha/{first}\", \"alpha/{second}\"]\n\
         [hosts.alpha]\n[hosts.beta]\n"
    ));
    rack.good(&["net", "up"]);
    let mut lab = Lab { rack, name };
    lab.wait_uplinks(&["active", "standby"]);
    lab.rack.process(Some("alpha")).crash();
    ip(&["link", "delete", first]);
    lab.rack.restart(Some("alpha"));
    lab.wait_uplinks(&["down", "active"]);
    assert!(lab.ping("beta", &[], OUTSIDE[0]));
    // An interface of that name is one that nobody has a socket for.
    beyond.lay(0);
    lab.wait_uplinks(&["active", "standby"]);
    assert!(lab.ping("beta", &[], OUTSIDE[0]));
    // A test bed of the same rack would have the same interfaces.
    let folder = tempfile::tempdir().unwrap();
    let said = lab
        .rack
        .bad(1, &["testbed", "up", &lab.rack.file(), "--dir", folder.path().to_str().unwrap()]);
    assert!(said.contains("has a network on this machine already"), "{said}");
    assert!(lab.ping("beta", &[], OUTSIDE[0]));
}
