//! A rack of machines that stand for physical hosts: the first has a drive and an IOMMU, and a bridge (NTB) in software
//! to each of the others; all of them run nodes, which a control plane on the first one joins over a network.

use std::path::{Path, PathBuf};
use std::time::Duration;

use crate::agent::RunningCommand;
use crate::error::io;
use crate::metal::programs;
use crate::metal::{
    BareMetalMachine, BridgeProcess, FILES, MemoryFiles, NetworkCable, SharedNetwork,
};
use crate::{Assets, CommandOutput, GuestRelease, Result, VmError, VmIommu};

/// What scripts in the machines begin with: `rackbus` is found, and `until_ok COMMAND` waits up to half a minute for a
/// command to succeed.
pub const PRELUDE: &str = r#"
    set -e
    cd /tmp
    export PATH=/mnt/files/bin:$PATH XDG_STATE_HOME=/tmp/state
    until_ok() { n=0; until "$@" >/dev/null 2>&1; do n=$((n + 1)); [ $n -lt 600 ] || return 1; sleep 0.05; done; }
"#;

/// The name that the lender's drive has in the rack file: QEMU's, a function of the machine.
pub const DRIVE: &str = "d0";
/// The name of the lender's drive that rackbus models.
pub const MODELLED: &str = "m0";
const MODELLED_SIZE: &str = "64 MiB";
/// The name of the lender's accelerator, which has one function: `vf1`.
pub const ACCELERATOR: &str = "a0";
/// Serial numbers of the drive that is lent, and of the one that stays with the lender.
const SERIALS: [&str; 2] = ["metal0", "metal1"];
/// Lists the addresses of a machine's NTBs, in the order in which they were plugged in.
const NTBS: &str = "lspci -D -d 8086:201c | cut -d' ' -f1";
/// How long a daemon may run: as long as the machines do.
const FOR_EVER: Duration = Duration::from_secs(365 * 86400);
/// The port of the control plane.
const CONTROL: u16 = 7420;
/// What the module is loaded with. Machines that are translated miss heartbeats when this one is busy.
const MODULE: &str = "rackbus silence_ms=2000";

/// A rack to boot.
#[derive(Debug, Clone)]
pub struct BareMetalSpec {
    /// The `rackbus` program, which the bridges are started with and the machines get.
    pub program: PathBuf,
    /// More programs of this machine for those machines, where `/mnt/files/run NAME` runs one.
    pub programs: Vec<PathBuf>,
    /// The hosts, the lender first, and what they run.
    pub hosts: Vec<(String, GuestRelease)>,
    /// The network that joins them is 10.78.`subnet`.0/24.
    pub subnet: u8,
    /// Bytes of the lender's drive.
    pub drive: u64,
    /// Whether the lender has another drive like it, for its own kernel.
    pub with_local_drive: bool,
}

/// A rack whose machines run. They end when it is dropped.
#[derive(Debug)]
pub struct BareMetalRack {
    machines: Vec<BareMetalMachine>,
    cables: Vec<NetworkCable>,
    /// Where the lender is on the network.
    address: String,
    bridges: Vec<BridgeProcess>,
    _network: SharedNetwork,
}

impl BareMetalRack {
    /// Boots the machines; the files of all are in `dir`, which is made.
    ///
    /// # Errors
    /// When set-up was not run for kernels, the network cannot be made (it takes root), or a machine does not boot.
    pub fn boot(assets: &Assets, spec: &BareMetalSpec, dir: &Path) -> Result<BareMetalRack> {
        let [(lender, _), _, ..] = &spec.hosts[..] else {
            return Err(VmError::Invalid("a rack has two hosts or more".into()));
        };
        let borrowers = &spec.hosts[1..];
        let memory = MemoryFiles::new()?;
        let sockets = dir.join("bridges");
        let bridge = |(other, _): &(String, GuestRelease)| {
            BridgeProcess::start(&spec.program, [lender, other], &memory, &sockets, &[])
        };
        let bridges: Vec<_> = borrowers.iter().map(bridge).collect::<Result<_>>()?;
        let mut network = SharedNetwork::new(spec.subnet)?;
        let (mut machines, mut cables) = (Vec::new(), Vec::new());
        for (number, (name, guest)) in spec.hosts.iter().enumerate() {
            let mut machine = bridges[number.saturating_sub(1)].machine(name, *guest);
            if number == 0 {
                bridges[1..].iter().for_each(|bridge| bridge.plug(&mut machine));
                machine.iommu = VmIommu::Translating;
                let drives = if spec.with_local_drive { &SERIALS[..] } else { &SERIALS[..1] };
                for serial in drives {
                    machine.devices.extend(drive(dir, serial, spec.drive)?);
                }
            }
            let files = dir.join("files").join(name);
            programs::collect(
                &files,
                &[std::slice::from_ref(&spec.program), &spec.programs].concat(),
            )?;
            let module = assets.kernel_module(*guest)?;
            std::fs::copy(&module, files.join("rackbus.ko")).map_err(io("copy", &module))?;
            let cable = network.cable()?;
            (machine.files, machine.cable) = (Some(files), Some(cable.clone()));
            machines.push(BareMetalMachine::start(assets, &machine, dir)?);
            cables.push(cable);
        }
        for machine in &mut machines {
            machine.booted()?;
            let wrapper = format!("#!/bin/sh\\nexec {FILES}/run rackbus \"$@\"\\n");
            machine.run(&format!(
                "mkdir -p {FILES}/bin && printf '{wrapper}' >{FILES}/bin/rackbus && chmod +x {FILES}/bin/rackbus"
            ))?;
        }
        for borrower in &mut machines[1..] {
            borrower.load(&[MODULE])?;
        }
        let address = cables[0].address().split('/').next().unwrap_or_default().to_owned();
        Ok(BareMetalRack { machines, cables, address, bridges, _network: network })
    }

    /// Writes the rack file, starts the control plane on the lender, and has all hosts join.
    ///
    /// # Errors
    /// When one does not.
    pub fn join(&mut self) -> Result<()> {
        let rack = self.rack_file()?;
        let (address, names) = (self.address.clone(), self.names());
        let lender = &mut self.machines[0];
        run(lender, &format!("cat >rack.toml <<'END'\n{rack}END"))?;
        let listen = format!("control rack.toml --listen {address}:{CONTROL}");
        daemon(lender, "control", &listen)?;
        run(lender, "until_ok rackbus status")?;
        for (number, name) in names.iter().enumerate() {
            let token = run(&mut self.machines[0], &format!("rackbus token {name}"))?;
            run(&mut self.machines[number], &format!("umask 077; echo '{token}' >token"))?;
            self.start_node(name)?;
        }
        let up = "up() { said=$(rackbus devices) && ! echo \"$said\" | grep -q -e absent -e unreachable; }; until_ok up";
        run(&mut self.machines[0], up).map(drop)
    }

    /// The rack file: the lender's devices, and where each host has its ends of the bridges.
    fn rack_file(&mut self) -> Result<String> {
        let names = self.names();
        let own = run(&mut self.machines[0], NTBS)?;
        let own: Vec<&str> = own.lines().collect();
        if own.len() + 1 != names.len() {
            let error = format!("{} has {} NTBs, not {}", names[0], own.len(), names.len() - 1);
            return Err(VmError::Invalid(error));
        }
        let drive = format!(
            "basename $(readlink -f $(dirname $(grep -l {} /sys/class/nvme/*/serial))/device)",
            SERIALS[0]
        );
        let drive = run(&mut self.machines[0], &drive)?;
        let lender = &names[0];
        let mut rack = format!(
            "name = \"metal\"\n[hosts.{lender}.devices.{DRIVE}]\nkind = \"vfio\"\naddress = \"{drive}\"\n\
             [hosts.{lender}.devices.{MODELLED}]\nkind = \"nvme\"\nsize = \"{MODELLED_SIZE}\"\n\
             [hosts.{lender}.devices.{ACCELERATOR}]\nkind = \"accelerator\"\nfunctions = 1\n"
        );
        for ((name, machine), near) in names.iter().zip(&mut self.machines).skip(1).zip(own) {
            let far = run(machine, NTBS)?;
            for (host, other, address) in [(lender, name, near), (name, lender, &*far)] {
                rack.push_str(&format!("[hosts.{host}.ntb.{other}]\naddress = \"{address}\"\n"));
            }
        }
        Ok(rack)
    }

    /// Starts the node of a host, which has its token. Returns when it answers.
    ///
    /// # Errors
    /// When it does not in time.
    pub fn start_node(&mut self, host: &str) -> Result<()> {
        let (number, address) = (self.number(host)?, self.address.clone());
        // The control plane has the usual folder on the lender.
        let run_dir = if number == 0 { "--run-dir /tmp/run" } else { "" };
        let node = format!(
            "{run_dir} node --host {host} --join https://{address}:{CONTROL} --token-file token"
        );
        let machine = &mut self.machines[number];
        // One that was killed has still to release its devices.
        let runs = "n=0; while [ -e node.pid ] && kill -0 $(cat node.pid) 2>/dev/null; do
                n=$((n + 1)); [ $n -lt 100 ] || { echo runs; break; }; sleep 0.05
            done";
        if run(machine, runs)? == "runs" {
            return Err(VmError::Invalid(format!("the node of {host} runs already")));
        }
        daemon(machine, "node", &node)?;
        run(machine, "until_ok rackbus devices").map(drop)
    }

    /// Ends the node of a host at once, as a crash would.
    ///
    /// # Errors
    /// When it does not run.
    pub fn kill_node(&mut self, host: &str) -> Result<()> {
        let machine = self.machine(host)?;
        run(machine, "kill -KILL $(cat node.pid)").map(drop)
    }

    /// Has the cable of a host plugged in or pulled.
    ///
    /// # Errors
    /// When there is no such host.
    pub fn set_cable(&self, host: &str, plugged_in: bool) -> Result<()> {
        self.cables[self.number(host)?].set(plugged_in)
    }

    /// The names of the hosts, the lender first.
    #[must_use]
    pub fn names(&self) -> Vec<String> {
        self.machines.iter().map(|machine| machine.name().to_owned()).collect()
    }

    /// The virtual machine that stands for `host`.
    ///
    /// # Errors
    /// When there is no such host.
    pub fn machine(&mut self, host: &str) -> Result<&mut BareMetalMachine> {
        let number = self.number(host)?;
        Ok(&mut self.machines[number])
    }

    /// All machines, the lender's first.
    pub fn machines(&mut self) -> &mut [BareMetalMachine] {
        &mut self.machines
    }

    /// The bridges of the lender to each of the others, in their order.
    #[must_use]
    pub fn bridges(&self) -> &[BridgeProcess] {
        &self.bridges
    }

    fn number(&self, host: &str) -> Result<usize> {
        let found = self.machines.iter().position(|machine| machine.name() == host);
        found.ok_or_else(|| {
            let names = self.names().join(", ");
            VmError::Invalid(format!("there is no host '{host}': there are {names}"))
        })
    }

    /// Starts a script on a host that may take up to `limit`; [`PRELUDE`] is before it.
    ///
    /// # Errors
    /// When there is no such host, or its machine has gone.
    pub fn begin(&mut self, host: &str, script: &str, limit: Duration) -> Result<RunningCommand> {
        self.machine(host)?.begin(&format!("{PRELUDE}{script}"), limit)
    }

    /// Runs a command on a host, which may fail.
    ///
    /// # Errors
    /// When there is no such host, or its machine has gone.
    pub fn exec(&mut self, host: &str, script: &str, limit: Duration) -> Result<CommandOutput> {
        self.begin(host, script, limit)?.wait()
    }
}

/// Runs a script with [`PRELUDE`] before it, which must succeed, and gives what it wrote.
///
/// # Errors
/// When it fails: with what it wrote.
pub fn run(machine: &mut BareMetalMachine, script: &str) -> Result<String> {
    machine.run(&format!("{PRELUDE}{script}"))
}

/// Starts a daemon, with what it writes and its process id in files. One that ends with an error is started again: a
/// handshake may take a machine that is translated longer than a peer waits. One that is killed is not.
fn daemon(machine: &mut BareMetalMachine, name: &str, arguments: &str) -> Result<()> {
    let script = format!(
        "set +e
        status=1
        while [ $status = 1 ]; do
            sh -c 'echo $$ >{name}.pid; exec {FILES}/run rackbus {arguments}' >>{name}.log 2>&1
            status=$?
            sleep 1
        done"
    );
    machine.begin(&format!("{PRELUDE}{script}"), FOR_EVER)?;
    Ok(())
}

/// A drive of the lender's: QEMU's, which copies through a buffer of its own where DMA goes to another function.
fn drive(dir: &Path, serial: &str, bytes: u64) -> Result<[String; 4]> {
    std::fs::create_dir_all(dir).map_err(io("make", dir))?;
    let medium = dir.join(format!("{serial}.img"));
    let file = std::fs::File::create(&medium).map_err(io("create", &medium))?;
    file.set_len(bytes).map_err(io("extend", &medium))?;
    let medium = format!("driver=file,node-name={serial},filename={}", medium.display());
    let device = format!("nvme,serial={serial},drive={serial},x-max-bounce-buffer-size=33554432");
    Ok(["-blockdev".to_owned(), medium, "-device".to_owned(), device])
}
