//! Two hosts whose nodes speak through an NTB: programs share memory and trigger interrupts, and what one says to the other goes
//! through the bridge. The hosts are machines with stock kernels and an IOMMU each.

use std::path::Path;
use std::time::Duration;

use rackbus_e2e::metal::{ENDS, bridge_address, start_bridge};
use rackbus_e2e::rack::beside;
use rackbus_e2e::{Result, ensure, sisci};
use rackbus_vm::agent::RunningCommand;
use rackbus_vm::metal::{BridgeProcess, FILES, programs};
use rackbus_vm::{Assets, BareMetalMachine, GuestRelease, SharedNetwork, VmIommu};

use crate::metal::{begin, run, start_node, wrap};

/// The network that joins the machines.
const SUBNET: u8 = 22;
const HOSTS: [&str; 2] = ["alpha", "beta"];
/// What is tried: both sides have an interrupt, which they wait for, and the server's segment has what the client wants. Where a
/// machine has one processor, tools that poll leave the nodes none.
const TOOL: &str = "intr_bench";
/// How long a tool may take under TCG on a busy machine.
const LIMIT: Duration = Duration::from_secs(200);

struct LinkedHosts {
    bridge: BridgeProcess,
    machines: [BareMetalMachine; 2],
    /// Where the control plane is.
    control: String,
    _switch: SharedNetwork,
}

/// Boots the machines and has the hosts join a rack in which an NTB is for their link.
fn start(dir: &Path) -> Result<LinkedHosts> {
    let bridge = start_bridge(&dir.join("bridge"), &[])?;
    let tools = sisci::install_in(dir)?.join("bin");
    let files = dir.join("files");
    programs::collect(&files, &[tools.join(TOOL), beside("rackbus")?])?;
    wrap(&files.join("bin"), "rackbus")?;
    let mut switch = SharedNetwork::new(SUBNET)?;
    let cables = [switch.cable()?, switch.cable()?];
    let address = cables[0].address();
    let address = address.split('/').next().unwrap_or_default().to_owned();
    let assets = Assets::of_user();
    let boot = |(end, cable)| {
        let mut spec = bridge.machine(end, GuestRelease::Bookworm);
        (spec.iommu, spec.files, spec.cable) =
            (VmIommu::Translating, Some(files.clone()), Some(cable));
        BareMetalMachine::start(&assets, &spec, bridge.dir())
    };
    let [near, far] = cables;
    let mut machines = [boot((ENDS[0], near))?, boot((ENDS[1], far))?];
    let mut rack = "name = \"linked\"\n".to_owned();
    for (end, machine) in machines.iter_mut().enumerate() {
        machine.booted()?;
        let (host, peer, ntb) = (HOSTS[end], HOSTS[1 - end], bridge_address(machine)?);
        rack.push_str(&format!("[hosts.{host}.ntb.{peer}]\naddress = \"{ntb}\"\nuse = \"link\"\n"));
    }
    let [lead, _] = &mut machines;
    run(lead, &format!("cat >rack.toml <<'END'\n{rack}END"))?;
    let control = "rackbus --run-dir /tmp/control";
    begin(
        lead,
        "control.log",
        &format!("{control} control /tmp/rack.toml --listen {address}:7420"),
    )?;
    run(lead, &format!("until_ok {control} status"))?;
    let mut hosts = LinkedHosts { bridge, machines, control: address, _switch: switch };
    for (end, host) in HOSTS.into_iter().enumerate() {
        // Neither is printed.
        let token = hosts.machines[0].run(&format!("{FILES}/bin/{control} token {host}"))?;
        hosts.machines[end].run(&format!("umask 077; echo '{token}' >/tmp/token"))?;
        hosts.node(end)?;
    }
    Ok(hosts)
}

impl LinkedHosts {
    /// Starts the node of a host, which takes the NTB by VFIO.
    fn node(&mut self, end: usize) -> Result<()> {
        run(&mut self.machines[end], "modprobe vfio-pci")?;
        start_node(&mut self.machines[end], HOSTS[end], &self.control)
    }

    /// Waits until a host's node says so of the NTB.
    fn wait_until(&mut self, end: usize, up: u8) -> Result<()> {
        let (host, peer) = (HOSTS[end], HOSTS[1 - end]);
        let is = format!(
            "is() {{ rackbus metrics {host} | grep -q 'link_ntb_up{{host=\"{peer}\"}} {up}'; }}; until_ok is"
        );
        run(&mut self.machines[end], &is).map(drop)
    }

    /// A counter of a host's node, of what this host did.
    fn counted(&mut self, end: usize, counter: &str) -> Result<u64> {
        let (host, own) = (HOSTS[end], "by=\"this host\"");
        let line = format!(
            "rackbus metrics {host} | grep 'link_ntb_{counter}_total{{.*{own}' | sed 's/.* //'"
        );
        let said = run(&mut self.machines[end], &line)?;
        Ok(said.trim().parse().unwrap_or(0))
    }

    /// How often a host's node lost the other one.
    fn losses(&mut self, end: usize) -> Result<u64> {
        let line = format!(
            "rackbus metrics {} | grep '^rackbus_link_ntb_losses_total' | sed 's/.* //'",
            HOSTS[end]
        );
        let said = run(&mut self.machines[end], &line)?;
        Ok(said.trim().parse()?)
    }

    /// Runs the tool, whose server is on beta and whose client is on alpha.
    fn tool(&mut self, arguments: &str) -> Result<()> {
        let id = |machine: &mut BareMetalMachine, host: &str| {
            let id = machine.run(&format!("{FILES}/bin/rackbus node-id {host}"))?;
            Ok::<_, rackbus_e2e::CheckFailure>(id.trim().to_owned())
        };
        let [near, far] = &mut self.machines;
        let ids = [id(near, HOSTS[0])?, id(near, HOSTS[1])?];
        let start = |machine: &mut BareMetalMachine, peer: &str, rest: &str| {
            let script = format!("{FILES}/run {TOOL} -rn {peer} {rest}");
            Ok::<RunningCommand, rackbus_e2e::CheckFailure>(machine.begin(&script, LIMIT)?)
        };
        let server = start(far, &ids[0], "-server")?;
        let client = start(near, &ids[1], &format!("-client {arguments}"))?;
        for running in [client, server] {
            let output = running.wait()?;
            let (said, errors) = (output.text(), String::from_utf8_lossy(&output.stderr));
            ensure!(output.ok(), "{TOOL}: status {}: {said} {errors}", output.status);
            said.lines().for_each(|line| println!("           {TOOL}: {line}"));
        }
        Ok(())
    }
}

/// Programs of both hosts share memory and ring each other, by the bridge; nodes are restarted in place; a host that dies is
/// noticed, and is there again.
pub fn shared(dir: &Path) -> Result<()> {
    let mut hosts = start(dir)?;
    let outcome =
        used(&mut hosts).and_then(|()| restarted(&mut hosts)).and_then(|()| lost(&mut hosts));
    if outcome.is_err() {
        println!("{}", hosts.bridge.counters()?);
        for machine in &mut hosts.machines {
            println!("{}", machine.run("tail -n 40 /tmp/*.log; dmesg | tail -n 30")?);
        }
    }
    outcome
}

fn used(hosts: &mut LinkedHosts) -> Result<()> {
    hosts.wait_until(0, 1)?;
    hosts.wait_until(1, 1)?;
    let before = hosts.bridge.counters()?;
    hosts.tool("-loops 3")?;
    hosts.tool("-loops 3 -data 1024")?;
    let after = hosts.bridge.counters()?;
    println!("           {after}");
    for (end, name) in ["a", "b"].into_iter().enumerate() {
        let more = |what: &str| {
            after[name][what].as_u64().unwrap_or(0) - before[name][what].as_u64().unwrap_or(0)
        };
        let bytes = hosts.counted(end, "bytes")?;
        // At most eight bytes are stored at once.
        ensure!(bytes > 1000 && more("window1_writes") > bytes / 16, "{bytes} bytes: {after}");
        ensure!(
            more("interrupts") > 0 && hosts.counted(end, "doorbells")? > 0,
            "no doorbell: {after}"
        );
        ensure!(after[name]["window1_reads"] == 0, "a load crossed the bridge: {after}");
        ensure!(after[name]["dropped"] == before[name]["dropped"], "stores were dropped: {after}");
    }
    Ok(())
}

/// Each node closes its NTB and goes on in place with the NTB opened anew, and the peer is not left to find that out.
fn restarted(hosts: &mut LinkedHosts) -> Result<()> {
    for (end, host) in HOSTS.into_iter().enumerate() {
        // The nodes here are run by a loader of their own, which is no program to go on as.
        let losses = hosts.losses(1 - end)?;
        let restart = format!("rackbus --json restart {host} --program {FILES}/bin/rackbus");
        let said = run(&mut hosts.machines[end], &restart)?;
        ensure!(said.contains("\"restarts\": 1") || said.contains("\"restarts\":1"), "{said}");
        // The NTB was up before, too, and the node that was restarted has said that it goes.
        let found = hosts.losses(1 - end)? - losses;
        ensure!(found > 0, "the NTB was not closed for the restart of {host}");
        hosts.wait_until(0, 1)?;
        hosts.wait_until(1, 1)?;
        hosts.tool("-loops 1")?;
    }
    Ok(())
}

fn lost(hosts: &mut LinkedHosts) -> Result<()> {
    run(&mut hosts.machines[1], "pkill -KILL -f 'rackbus node'")?;
    hosts.wait_until(0, 0)?;
    hosts.node(1)?;
    hosts.wait_until(0, 1)?;
    hosts.wait_until(1, 1)?;
    hosts.tool("-loops 1")
}
