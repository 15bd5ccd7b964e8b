//! The timing of a rack: how long its parts take, and what they hold. The `[timing]` section of a rack
//! file sets it; what it does not set has the defaults given here.
//!
//! ```toml
//! [timing.switch]
//! latency = "115 ns"
//!
//! [timing.parts."lab/gpu0"]
//! tags = 64
//! ```
//!
//! What a host's processor brings (root complex, IOMMU, memory, cores) is in *profiles*, a file each in
//! `profiles/` with the source of every value; a host names one, `[hosts.lab] profile = "genoa"`, and has
//! [`profiles::USUAL`] otherwise. Rack files can add profiles of their own under `[timing.profiles.NAME]`.

mod file;
mod host;
pub mod measured;
pub mod profiles;

use std::collections::BTreeMap;

use rackbus_fabric::rack::{DeclaredFunction, Rack};
use rackbus_fabric::text::FileError;
use rackbus_fabric::topology::ComponentKind;

use crate::time::Time;

pub use file::parse;
pub use host::{CpuTiming, HostTiming, IommuTiming, MemoryTiming, RootTiming};

/// Reads the timing of the rack whose file is `text`.
///
/// # Errors
/// [`FileError`] for the first thing that is wrong.
pub fn read_for(file: &str, text: &str, rack: &Rack) -> Result<Timing, FileError> {
    let mut parts: Vec<(String, ComponentKind)> = Vec::new();
    for host in &rack.hosts {
        let own = [
            ("root", ComponentKind::RootComplex),
            ("memory", ComponentKind::Memory),
            ("ntb", ComponentKind::Ntb),
        ];
        parts.extend(own.map(|(part, kind)| (format!("{}/{part}", host.name), kind)));
        let function = |device: &DeclaredFunction| format!("{}/{}", host.name, device.function());
        let functions = host.devices.iter().map(function);
        parts.extend(functions.map(|name| (name, ComponentKind::Device)));
    }
    if let Some(physical) = &rack.fabric {
        let adapters = physical.adapters.iter().map(|adapter| &adapter.name);
        parts.extend(adapters.map(|name| (name.clone(), ComponentKind::Ntb)));
        parts.extend(physical.switches.iter().map(|switch| {
            let kind = if switch.cxl { ComponentKind::CxlSwitch } else { ComponentKind::Switch };
            (switch.name.clone(), kind)
        }));
        let memories = physical.memories.iter().map(|memory| &memory.name);
        parts.extend(memories.map(|name| (name.clone(), ComponentKind::CxlMemory)));
    }
    let parts: Vec<(&str, ComponentKind)> =
        parts.iter().map(|(name, kind)| (name.as_str(), *kind)).collect();
    let mut timing = parse(file, text, &parts)?;
    for link in rack.fabric.iter().flat_map(|physical| &physical.links) {
        if let Some(millimetres) = link.length {
            let there = LinkTiming::travel(millimetres);
            timing.lengths.insert(link.ends.clone(), there);
        }
    }
    Ok(timing)
}

/// How long all parts of a rack take.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Timing {
    /// What all links have in common; their generation and lanes are the rack file's.
    pub link: LinkTiming,
    /// Switches that have no values of their own in `parts`.
    pub switch: SwitchTiming,
    /// Non-transparent bridges that have no values of their own in `parts`.
    pub ntb: NtbTiming,
    /// Hosts that name no profile and have no values of their own.
    pub host: HostTiming,
    /// The others, by name.
    pub hosts: BTreeMap<String, HostTiming>,
    /// Links of a length that the rack file tells, by their ends: how long a bit takes.
    pub lengths: BTreeMap<[String; 2], Time>,
    /// Devices, and their DMA engines.
    pub device: DeviceTiming,
    /// Whether the file says what the MPS is, which is [`DeviceTiming::mps`].
    pub mps_stated: bool,
    /// CXL memory, its switches, and the ports of hosts.
    pub cxl: CxlTiming,
    /// Parts by name that differ from others of their kind.
    pub parts: BTreeMap<String, PartTiming>,
    /// What software takes, by names that workloads give its steps.
    pub software: BTreeMap<String, Time>,
    /// What parts consume, in milliwatts, by name.
    pub power: BTreeMap<String, u64>,
}

impl Default for Timing {
    fn default() -> Self {
        Timing::with(profiles::usual().clone())
    }
}

impl Timing {
    /// All as usual, but for the hosts.
    fn with(host: HostTiming) -> Timing {
        Timing {
            link: LinkTiming::default(),
            switch: SwitchTiming::default(),
            ntb: NtbTiming::default(),
            host,
            hosts: BTreeMap::new(),
            lengths: BTreeMap::new(),
            device: DeviceTiming::default(),
            mps_stated: false,
            cxl: CxlTiming::default(),
            parts: BTreeMap::new(),
            software: BTreeMap::new(),
            power: BTreeMap::new(),
        }
    }

    /// What the processor of a host brings.
    pub fn of_host(&self, name: &str) -> &HostTiming {
        self.hosts.get(name).unwrap_or(&self.host)
    }

    /// What all hosts bring, to change it for all of them.
    pub fn every_host(&mut self) -> impl Iterator<Item = &mut HostTiming> {
        std::iter::once(&mut self.host).chain(self.hosts.values_mut())
    }

    /// What a software step of that name takes; no time when the file does not tell.
    pub fn software(&self, name: &str) -> Time {
        self.software.get(name).copied().unwrap_or(Time::ZERO)
    }
}

/// Propagation, credits and acknowledgements of links.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LinkTiming {
    /// How long a bit takes from end to end. Default 2 ns: 40 cm, at about 5 ns a metre.
    pub propagation: Time,
    /// From when a receiver has room again to when the sender knows, besides propagation. Default
    /// 100 ns; the specification (2.6.1.2) bounds it by tables of 100 to 1,000 symbol times.
    pub credit_return: Time,
    /// Packets for each acknowledgement the other way; 0: there are none. Default 2; the specification (3.6.3) lets
    /// receivers wait for one to three packets of the greatest size.
    pub acknowledge_every: u32,
    /// Packets for each update of credits the other way; 0: there are none. Default 2, as above.
    pub update_every: u32,
    /// What a receiver has room for, by class: packets, and bytes of payload; 0 for what keeps the link full
    /// over the time from a packet's being sent to its credits' coming back, as receivers are made
    /// ([`LinkTiming::room`]). Default 0. Endpoints and roots take any number of completions: they asked for
    /// them (specification 2.6.1).
    pub posted: (u32, u32),
    /// A receiver's room for read requests, in packets; 0 for ample, as above.
    pub nonposted: u32,
    /// A receiver's room for completions: packets, and bytes of payload; 0 for ample.
    pub completion: (u32, u32),
}

impl LinkTiming {
    /// How long a bit takes for a length: 5 ns a metre, two thirds of light's speed, as in copper and glass.
    pub fn travel(millimetres: u64) -> Time {
        Time::from_ps(millimetres * 5)
    }

    /// Packets and bytes of payload that a receiver has room for, `set` or what keeps a link of `rate` bytes
    /// per second full while packets delay for `delay`: twice what is on the way then, for packets of at least
    /// 16 bytes of payload and framing, and at least 64 packets and 16 KiB.
    pub fn room(&self, set: (u32, u32), rate: f64, delay: Time, propagation: Time) -> (u32, u32) {
        let away = (self.credit_return + propagation * 2 + delay).seconds();
        let bytes = (2.0 * rate * away) as u32;
        let packets = if set.0 == 0 { (bytes / 40).max(64) } else { set.0 };
        (packets, if set.1 == 0 { bytes.max(16 << 10) } else { set.1 })
    }
}

impl Default for LinkTiming {
    fn default() -> Self {
        LinkTiming {
            propagation: Time::from_ns(2),
            credit_return: Time::from_ns(100),
            acknowledge_every: 2,
            update_every: 2,
            posted: (0, 0),
            nonposted: 0,
            completion: (0, 0),
        }
    }
}

/// How long switches keep what they pass on.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SwitchTiming {
    /// From a packet's head coming to its going. Default 115 ns: data sheets of Gen3 switches tell
    /// 100 to 150 ns.
    pub latency: Time,
}

impl Default for SwitchTiming {
    fn default() -> Self {
        SwitchTiming { latency: Time::from_ns(115) }
    }
}

/// How NTBs behave. An access passes two, one of each host.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NtbTiming {
    /// From a packet's head coming to its going. Default 180 ns: Device Lending (2019, section 7.4)
    /// measured 350 to 370 ns for the pair.
    pub latency: Time,
    /// Added for requests, whose address and requester are translated. Default none: within the above.
    pub translation: Time,
    /// Added for completions, whose requester is translated back. Default none.
    pub completion_translation: Time,
}

impl Default for NtbTiming {
    fn default() -> Self {
        NtbTiming {
            latency: Time::from_ns(180),
            translation: Time::ZERO,
            completion_translation: Time::ZERO,
        }
    }
}

/// What devices answer and how their DMA engines ask.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DeviceTiming {
    /// The most bytes of a packet (MPS). Default 256. All parts of a rack have the same.
    pub mps: u32,
    /// The most bytes of a packet of its DMA engine's writes, from 64 on, where those are less than the MPS. Default 0: the MPS.
    pub payload: u32,
    /// The most bytes of a read request (MRRS). Default 512.
    pub mrrs: u32,
    /// Read requests under way at a time. Default 256: eight-bit tags, which devices have since PCIe 3.0 and Linux turns on
    /// where both ends can (`pci_configure_extended_tags`); PCIe specification 5.0, 7.5.3.4.
    pub tags: u32,
    /// Packets that may wait for the link. Default 2.
    pub window: u32,
    /// From an access to its registers or memory to the answer. Default 50 ns.
    pub latency: Time,
    /// Bytes per second of its memory. Default 100 GB/s.
    pub bandwidth: u64,
    /// Between two messages of a queue pair. Default none.
    pub message: Time,
    /// From one packet that its DMA engine makes to the next, at least. Default none.
    pub packet_gap: Time,
    /// From one packet of its DMA engine's writes to the next packet that it makes, where that is longer than `packet_gap`:
    /// an engine that fetches what it writes first. Default none.
    pub write_gap: Time,
    /// What comes to the gap after the last packet of each write of its DMA engine. Default none.
    pub write_setup: Time,
    /// Reads from addresses that are no multiple of it are cut at every multiple. Default 0: never.
    pub alignment: u32,
    /// Bytes that a queue pair moves before it is another's turn. Default 0: a packet.
    pub turn: u32,
    /// Bytes per second that its engine moves in all. Default 0: what the link lets through.
    pub engine: u64,
}

impl Default for DeviceTiming {
    fn default() -> Self {
        DeviceTiming {
            mps: 256,
            payload: 0,
            mrrs: 512,
            tags: 256,
            window: 2,
            latency: Time::from_ns(50),
            bandwidth: 100_000_000_000,
            message: Time::ZERO,
            packet_gap: Time::ZERO,
            write_gap: Time::ZERO,
            write_setup: Time::ZERO,
            alignment: 0,
            turn: 0,
            engine: 0,
        }
    }
}

/// How long CXL.mem takes. Estimates, after what Pond (Li and others, ASPLOS 2023) tells: memory of a device that is
/// joined directly takes 70 to 90 ns more than a host's own, a switch some 70 ns more there and back. A lone load comes to
/// 168 ns with them; of four real devices in five servers it took 140 to 410 ns (Liu and others, ASPLOS 2025).
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CxlTiming {
    /// From a core's mesh to the link, and from the link to the mesh. Default 25 ns.
    pub port: Time,
    /// Of a switch, each way, head to head. Default 35 ns.
    pub switch: Time,
    /// From a request's coming to its data's going: controller and DRAM. Default 70 ns.
    pub latency: Time,
    /// Bytes per second of a device's memory. Default 38.4 GB/s: a channel of DDR5-4800.
    pub bandwidth: u64,
    /// Lines of 64 bytes that a core reads at a time. Default 48: the second-level cache's misses of Intel's
    /// Golden Cove (optimization manual).
    pub loads: u32,
}

impl Default for CxlTiming {
    fn default() -> Self {
        CxlTiming {
            port: Time::from_ns(25),
            switch: Time::from_ns(35),
            latency: Time::from_ns(70),
            bandwidth: 38_400_000_000,
            loads: 48,
        }
    }
}

/// How a part differs from others of its kind: what is `None` is as theirs.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct PartTiming {
    /// Latency of the part, as its kind means it.
    pub latency: Option<Time>,
    /// An NTB's translation of requests.
    pub translation: Option<Time>,
    /// An NTB's translation of completions.
    pub completion_translation: Option<Time>,
    /// The most bytes of a packet of a device's writes, a power of two from 64 on; 0: the MPS.
    pub payload: Option<u32>,
    /// The most bytes of a device's read request, a power of two.
    pub mrrs: Option<u32>,
    /// Read requests of a device that may be under way.
    pub tags: Option<u32>,
    /// Packets of a device that may wait for the link.
    pub window: Option<u32>,
    /// Bytes per second of a device's memory, or a host's.
    pub bandwidth: Option<u64>,
    /// Between two messages of a device's queue pair.
    pub message: Option<Time>,
    /// From one packet of a device's DMA engine to the next.
    pub packet_gap: Option<Time>,
    /// From one packet of a device's writes to its next packet.
    pub write_gap: Option<Time>,
    /// What comes to the gap after the last packet of each write.
    pub write_setup: Option<Time>,
    /// Bytes at whose multiples a device cuts reads that miss them; 0: never.
    pub alignment: Option<u32>,
    /// Bytes of a device's queue pair's turn.
    pub turn: Option<u32>,
    /// Bytes per second of a device's engine.
    pub engine: Option<u64>,
}
