//! Stock network programs in stock guests that have functions of a network card: `ping`, `iperf3`, `socat`, and `wrk` with
//! `nginx`, from guest to guest, between guests and hosts, and with a machine outside of the rack.
//!
//! The programs and their libraries are those of set-up (`scripts/setup programs`), the same in every guest and on hosts.

use std::os::unix::process::ExitStatusExt;
use std::path::Path;
use std::process::{Command, ExitStatus, Output};
use std::time::Duration;

use rackbus_e2e::rack::beside;
use rackbus_e2e::{CheckFailure, Guest, RackProcesses, Result, ensure, programs};
use rackbus_vm::Assets;
use rackbus_vm::agent::RunningCommand;
use serde_json::Value;

use crate::RackWithGuests;
use crate::nics::{FIND, FIRST, SECOND};
use crate::outside::OutsideMachine;
use crate::programs::HostProgram;

/// The addresses of the two guests' functions by IPv6.
const FIRST_6: &str = "fd72:6163:6b62::80:1";
const SECOND_6: &str = "fd72:6163:6b62::80:2";

/// Those of host alpha, to whose card the functions belong.
const HOST: &str = "10.77.0.1";
const HOST_6: &str = "fd72:6163:6b62::1";

/// What the cable outside carries, which is less than the rack's own MTU of 1500.
const MTU_OUTSIDE: u16 = 1400;

/// How long a program may take, on a machine whose guests are emulated.
const LIMIT: Duration = Duration::from_secs(120);

/// Bytes of payload that `ping` sends: none, around what fits into one packet of 1500, and up to the largest fragments.
const SIZES: &str = "0 1 1452 1453 1472 1473 9000 65000";

/// A station of the rack's network, or one outside, on which scripts can be run.
enum Place<'a> {
    Guest(&'a mut Guest),
    /// Host alpha of this rack.
    Host(&'a RackProcesses),
    Outside(&'a OutsideMachine),
}

impl Place<'_> {
    /// Runs a script there to its end.
    fn run(&mut self, script: &str) -> Result<Output> {
        let script = format!("PATH={}:$PATH\n{script}", self.programs());
        match self {
            Place::Guest(guest) => {
                let said = guest.begin(&script, LIMIT)?.wait()?;
                let status = ExitStatus::from_raw(said.status << 8);
                Ok(Output { status, stdout: said.stdout, stderr: said.stderr })
            }
            Place::Host(rack) => rack.output(&["on", "alpha", "--", "bash", "-c", &script]),
            Place::Outside(outside) => Ok(outside.command("bash", &["-c", &script]).output()?),
        }
    }

    /// Runs a script that must succeed, and gives what it printed.
    fn good(&mut self, script: &str) -> Result<String> {
        let output = self.run(script)?;
        let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
        ensure!(
            output.status.success(),
            "{script}: {} {}",
            text(&output.stdout),
            text(&output.stderr)
        );
        Ok(text(&output.stdout))
    }

    /// The folder of the programs there.
    fn programs(&self) -> String {
        match self {
            Place::Guest(_) => "/tmp/programs/run".to_owned(),
            _ => Assets::of_user().cache().join("programs/run").display().to_string(),
        }
    }
}

/// Two guests of two kernels and two hosts, each with a function of alpha's card.
pub fn everywhere(world: &mut RackWithGuests) -> Result<()> {
    if !rustix::process::geteuid().is_root() {
        println!("           left out: interfaces of hosts take root");
        return Ok(());
    }
    let rack = &world.rack;
    let disk = programs::disk_of(rack, &Assets::of_user().cache().join("programs"))?;
    let mut first = start(rack, "first", "beta", "bookworm", "alpha/nic0.vf1", &disk)?;
    let mut second = start(rack, "second", "gamma", "trixie", "alpha/nic0.vf2", &disk)?;
    ready(&mut first, [FIRST, FIRST_6])?;
    ready(&mut second, [SECOND, SECOND_6])?;
    has_packed_rings(&mut first, true)?;
    has_packed_rings(&mut second, false)?;
    let outside = OutsideMachine::new(MTU_OUTSIDE)?;
    rack.json(&["net", "up", "alpha"])?;

    let to_second = [SECOND, SECOND_6];
    between(&mut Place::Guest(&mut first), &mut Place::Guest(&mut second), to_second)?;
    between(&mut Place::Guest(&mut first), &mut Place::Host(rack), [HOST, HOST_6])?;
    between(&mut Place::Host(rack), &mut Place::Guest(&mut second), to_second)?;
    let far = [OutsideMachine::ADDRESS, OutsideMachine::ADDRESS_6];
    // What is sent from then on fits, answers included.
    path_mtu(&mut Place::Guest(&mut first), far)?;
    path_mtu(&mut Place::Guest(&mut second), far)?;
    between(&mut Place::Guest(&mut first), &mut Place::Outside(&outside), far)?;
    between(&mut Place::Outside(&outside), &mut Place::Guest(&mut second), to_second)?;
    web(&mut [Place::Guest(&mut first), Place::Host(rack), Place::Outside(&outside)], &mut second)?;

    let faults = |function: &str| -> Result<Option<u64>> {
        Ok(rack.device(function)?["report"]["shaping"]["faults"].as_u64())
    };
    for function in ["alpha/nic0.vf1", "alpha/nic0.vf2"] {
        let counted = faults(function)?;
        ensure!(counted == Some(0), "{function}: a guest's driver broke its device: {counted:?}");
    }
    rack.json(&["net", "down"])?;
    first.stop(rack)?;
    second.stop(rack)
}

fn start(
    rack: &RackProcesses,
    name: &str,
    host: &str,
    release: &str,
    function: &str,
    disk: &Path,
) -> Result<Guest> {
    let disk = programs::qemu_arguments(disk);
    let more: Vec<&str> = ["--"].into_iter().chain(disk.iter().map(String::as_str)).collect();
    Guest::start_with(rack, name, host, release, &[function], &more)
}

/// Unpacks the programs, and gives the function's interface its addresses.
fn ready(guest: &mut Guest, [address, address_6]: [&str; 2]) -> Result<()> {
    guest.booted()?;
    guest.run(&programs::unpack("/dev/vdb"))?;
    let script = format!(
        "{FIND}
         # wrk asks for 480 MB, of which it touches little.
         echo 1 >/proc/sys/vm/overcommit_memory
         ip link set lo up
         echo 0 >/proc/sys/net/ipv6/conf/$interface/accept_dad
         ip link set $interface up
         ip addr add {address}/16 dev $interface
         ip -6 addr add {address_6}/64 dev $interface
         for try in $(seq 400); do [ \"$(cat /sys/class/net/$interface/carrier)\" = 1 ] && exit; sleep 0.05; done
         exit 1"
    );
    guest.run(&script).map(drop)
}

/// Whether a guest's driver has accepted packed rings: it does where they are offered, which the rack file decides.
fn has_packed_rings(guest: &mut Guest, expected: bool) -> Result<()> {
    // The features that the driver has accepted, lowest first; VIRTIO_F_RING_PACKED is the 35th.
    let said = guest
        .run("cut -c 35 $(ls -d /sys/bus/pci/devices/*/virtio*/net | head -n 1)/../features")?;
    let said = said.trim();
    let wanted = if expected { "1" } else { "0" };
    ensure!(said == wanted, "packed rings are {said}, not {wanted}");
    Ok(())
}

/// All kinds of packets from one place to the other, which has these addresses.
fn between(from: &mut Place<'_>, to: &mut Place<'_>, addresses: [&str; 2]) -> Result<()> {
    for address in addresses {
        // The first one may have to find its way.
        let ping = format!("ping -q -c 2 -W 10 {address}");
        from.good(&format!(
            "{ping} && for size in {SIZES}; do ping -q -c 1 -W 10 -s $size {address} || exit 1; done"
        ))?;
    }
    let server = Server::start(to, "exec iperf3 -s --forceflush")?;
    let [to_4, to_6] = addresses;
    streams(from, to_4, "-P 1")?;
    streams(from, to_4, "-P 16")?;
    streams(from, to_6, "-P 2 -R")?;
    for address in addresses {
        let answer = iperf3(from, &format!("-u -P 4 -b 5M -n 500K -c {address}"))?;
        let streams = answer["end"]["streams"].as_array().cloned().unwrap_or_default();
        ensure!(streams.len() == 4, "{address}: {} streams: {answer}", streams.len());
        for udp in streams.iter().map(|stream| &stream["udp"]) {
            let [packets, lost] = ["packets", "lost_packets"].map(|of| udp[of].as_u64());
            ensure!(udp["out_of_order"] == 0, "{address}: out of order: {udp}");
            // Some may be lost where a guest has no time; they are counted.
            ensure!(
                packets.zip(lost).is_some_and(|(all, lost)| 2 * lost < all),
                "{address}: {udp}"
            );
        }
    }
    server.stop(to)?;
    file(from, to, to_6)
}

/// What `iperf3` hands to a socket at a time. Some of many streams may send no more before all have sent enough together.
const BLOCK: u64 = 128 << 10;

/// Streams by TCP of 8 MB in all.
fn streams(from: &mut Place<'_>, to: &str, how: &str) -> Result<()> {
    let end = iperf3(from, &format!("-n 8M {how} -c {to}"))?["end"].clone();
    let sent = end["sum_sent"]["bytes"].as_u64().unwrap_or(0);
    // What is under way when the receiver is asked is not in its figure: of many streams that can be most of it.
    let streams = end["streams"].as_array().map_or(&[][..], Vec::as_slice);
    let bytes = |stream: &Value, end: &str| stream[end]["bytes"].as_u64();
    let came = |stream: &Value| {
        let ends = bytes(stream, "sender").zip(bytes(stream, "receiver"));
        ends.is_some_and(|(sent, received)| sent <= BLOCK || received > 0)
    };
    let whole = sent >= 8_000_000 && !streams.is_empty() && streams.iter().all(came);
    ensure!(whole, "{to} {how}: {end}");
    Ok(())
}

/// What a client of `iperf3` says. Its server takes one at a time, and listens anew some time after that: who came meanwhile
/// is refused or cut off before any stream is connected, and comes again.
fn iperf3(from: &mut Place<'_>, arguments: &str) -> Result<Value> {
    let mut refused = String::new();
    for _ in 0..100 {
        let output = from.run(&format!("iperf3 -J {arguments}"))?;
        let answer: Value = serde_json::from_slice(&output.stdout).unwrap_or_default();
        let error = answer["error"].as_str().unwrap_or_default();
        if !error.is_empty() && answer["start"]["connected"].as_array().is_some_and(Vec::is_empty) {
            refused = error.to_owned();
            std::thread::sleep(Duration::from_millis(100));
            continue;
        }
        let good = output.status.success() && answer.is_object() && error.is_empty();
        ensure!(good, "iperf3 {arguments}: {output:?}");
        return Ok(answer);
    }
    Err(CheckFailure(format!("iperf3 {arguments}: its server takes nobody: {refused}")))
}

/// A file through a connection of `socat`: the same bytes come.
fn file(from: &mut Place<'_>, to: &mut Place<'_>, address: &str) -> Result<()> {
    let receive = "socat -u TCP6-LISTEN:7005,reuseaddr - | sha256sum";
    let server = Server::start(to, receive)?;
    let sent = from.good(&format!(
        "head -c 16000000 /dev/urandom >/tmp/sent; sha256sum </tmp/sent
         socat -u FILE:/tmp/sent TCP6:[{address}]:7005,retry=200,interval=0.05 && rm /tmp/sent"
    ))?;
    let came = server.finish()?;
    ensure!(sent.trim() == came.trim(), "to {address} went {sent}, and {came} came");
    Ok(())
}

/// A guest is told what the way outside carries, by both protocols.
fn path_mtu(from: &mut Place<'_>, addresses: [&str; 2]) -> Result<()> {
    for address in addresses {
        // The first one finds its way; the next has 1428 or 1448 bytes, which the rack carries and the cable does not.
        from.good(&format!("ping -q -c 2 -W 10 {address}"))?;
        let said = from.run(&format!("ping -c 1 -W 10 -M do -s 1400 {address}"))?;
        let said = String::from_utf8_lossy(&said.stdout).to_lowercase().replace(' ', "");
        let told = format!("mtu={MTU_OUTSIDE}");
        ensure!(said.contains(&told), "{address}: nobody says {told}: {said}");
    }
    Ok(())
}

/// A web server in a guest, with many connections of clients at once, kept and made anew for each request.
fn web(clients: &mut [Place<'_>], guest: &mut Guest) -> Result<()> {
    let settings = "daemon on; master_process off; user root; error_log stderr; pid /tmp/web/pid;
        events { worker_connections 256; }
        http { access_log off; client_body_temp_path /tmp/web; proxy_temp_path /tmp/web;
        fastcgi_temp_path /tmp/web; uwsgi_temp_path /tmp/web; scgi_temp_path /tmp/web;
        server { listen 80; listen [::]:80; root /tmp/web; keepalive_requests 1000; } }";
    let mut server = Place::Guest(guest);
    server.good(&format!(
        "mkdir -p /tmp/web && [ -s /etc/passwd ] || echo root:x:0:0::/root:/bin/sh >/etc/passwd
         [ -s /etc/group ] || echo root:x:0: >/etc/group
         cat >/tmp/web/nginx.conf <<'END'\n{settings}\nEND
         head -c 30000 /dev/urandom >/tmp/web/page
         exec nginx -p /tmp/web -c /tmp/web/nginx.conf >/tmp/web/log 2>&1 </dev/null"
    ))?;
    for client in clients {
        for (address, how) in [(SECOND, ""), ("[fd72:6163:6b62::80:2]", "-H 'Connection: close'")] {
            let said = client.good(&format!(
                "wrk -t 1 -c 16 -d 2 --timeout 60s {how} http://{address}:80/page"
            ))?;
            let requests = said.lines().find_map(|line| line.trim().split_once(" requests in "));
            let answered = requests.is_some_and(|(count, _)| count.parse().unwrap_or(0) > 0);
            let failed = said.contains("errors") || said.contains("Non-2xx");
            ensure!(answered && !failed, "{address} {how}: {said}");
        }
    }
    server.good("kill $(cat /tmp/web/pid)").map(drop)
}

/// A server that runs beside what is asked of it.
enum Server {
    Guest(RunningCommand),
    /// On this machine, in a namespace; it is killed when this is dropped.
    Here(HostProgram),
}

impl Server {
    fn start(place: &mut Place<'_>, script: &str) -> Result<Server> {
        let path = place.programs();
        let script = format!("PATH={path}:$PATH\n{script}");
        match place {
            Place::Guest(guest) => {
                let script = format!("echo $$ >/tmp/server.pid\n{script}");
                Ok(Server::Guest(guest.begin(&script, 3 * LIMIT)?))
            }
            Place::Host(rack) => {
                let mut command = Command::new(beside("rackbus")?);
                command.env("RACKBUS_RUN_DIR", rack.run_dir());
                command.args(["on", "alpha", "--", "bash", "-c", &script]);
                Ok(Server::Here(HostProgram::start(command)?))
            }
            Place::Outside(outside) => {
                Ok(Server::Here(HostProgram::start(outside.command("bash", &["-c", &script]))?))
            }
        }
    }

    /// Ends it before it has ended by itself, and waits until it is gone where it runs in a guest.
    fn stop(self, place: &mut Place<'_>) -> Result<()> {
        if let (Server::Guest(running), Place::Guest(guest)) = (self, place) {
            guest.run("kill $(cat /tmp/server.pid)")?;
            running.wait()?;
        }
        Ok(())
    }

    /// What it printed, once it has ended by itself.
    fn finish(self) -> Result<String> {
        match self {
            Server::Guest(running) => {
                let said = running.wait()?;
                ensure!(said.ok(), "a server ended: {said:?}");
                Ok(said.text())
            }
            Server::Here(program) => program.end(),
        }
    }
}
