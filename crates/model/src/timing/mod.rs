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

mod file;

use std::collections::BTreeMap;

use rackbus_fabric::rack::Rack;
use rackbus_fabric::text::FileError;

use crate::time::Time;

pub use file::parse;

/// Reads the timing of the rack whose file is `text`.
///
/// # Errors
/// [`FileError`] for the first thing that is wrong.
pub fn read_for(file: &str, text: &str, rack: &Rack) -> Result<Timing, FileError> {
    let mut names: Vec<String> = Vec::new();
    for host in &rack.hosts {
        names.extend(["root", "memory", "ntb"].map(|part| format!("{}/{part}", host.name)));
        names.extend(host.devices.iter().map(|device| format!("{}/{}", host.name, device.name)));
    }
    if let Some(physical) = &rack.fabric {
        names.extend(physical.adapters.iter().map(|adapter| adapter.name.clone()));
        names.extend(physical.switches.iter().map(|switch| switch.name.clone()));
    }
    let names: Vec<&str> = names.iter().map(String::as_str).collect();
    parse(file, text, &names)
}

/// All of it.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Timing {
    /// Links.
    pub link: LinkTiming,
    /// Switches.
    pub switch: SwitchTiming,
    /// Non-transparent bridges.
    pub ntb: NtbTiming,
    /// Root complexes.
    pub root: RootTiming,
    /// IOMMUs, in hosts that have one.
    pub iommu: IommuTiming,
    /// Memory of hosts, and memory that hosts share.
    pub memory: MemoryTiming,
    /// Processors.
    pub cpu: CpuTiming,
    /// Devices, and their DMA engines.
    pub device: DeviceTiming,
    /// Parts by name that differ from others of their kind.
    pub parts: BTreeMap<String, PartTiming>,
    /// What software takes, by names that workloads give its steps.
    pub software: BTreeMap<String, Time>,
    /// What parts consume, in milliwatts, by name.
    pub power: BTreeMap<String, u64>,
}

impl Timing {
    /// What a software step of that name takes; no time when the file does not tell.
    pub fn software(&self, name: &str) -> Time {
        self.software.get(name).copied().unwrap_or(Time::ZERO)
    }
}

/// How links behave.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LinkTiming {
    /// How long a bit takes from end to end. Default 2 ns: 40 cm, at about 5 ns a metre.
    pub propagation: Time,
    /// From when a receiver has room again to when the sender knows, besides propagation. Default
    /// 100 ns; the specification (2.6.1.2) bounds it by tables of 100 to 1,000 symbol times.
    pub credit_return: Time,
    /// Packets for each acknowledgement the other way. Default 2; the specification (3.6.3) lets
    /// receivers wait for one to three packets of the greatest size.
    pub acknowledge_every: u32,
    /// Packets for each update of credits the other way. Default 2, as above.
    pub update_every: u32,
    /// What a receiver has room for, by class: packets, and bytes of payload. Default 64 packets and
    /// 16 KiB of writes, 64 requests, 64 packets and 16 KiB of completions. Endpoints and roots take
    /// any number of completions: they asked for them (specification 2.6.1).
    pub posted: (u32, u32),
    /// Of requests: packets.
    pub nonposted: u32,
    /// Of completions.
    pub completion: (u32, u32),
}

impl Default for LinkTiming {
    fn default() -> Self {
        LinkTiming {
            propagation: Time::from_ns(2),
            credit_return: Time::from_ns(100),
            acknowledge_every: 2,
            update_every: 2,
            posted: (64, 16 << 10),
            nonposted: 64,
            completion: (64, 16 << 10),
        }
    }
}

/// How switches behave.
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

/// How root complexes behave.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RootTiming {
    /// For requests on their way from the processor, to memory, or from port to port. Default 70 ns.
    pub latency: Time,
    /// For completions on such ways. Default 10 ns.
    pub completion_latency: Time,
    /// The most bytes of a read request that passes from port to port; longer ones are split. 0 passes
    /// them as they are. Default 64: Device Lending (2019, section 7.1), Xeon E5.
    pub split: u32,
    /// Such requests under way at a time. Default 32.
    pub trackers: u32,
    /// Completions of a split request are combined to so many bytes; 0 passes them as they come.
    /// Default 0: Device Lending (2019) saw the pieces, and says nothing of completions.
    pub combine: u32,
}

impl Default for RootTiming {
    fn default() -> Self {
        RootTiming {
            latency: Time::from_ns(70),
            completion_latency: Time::from_ns(10),
            split: 64,
            trackers: 32,
            combine: 0,
        }
    }
}

/// How IOMMUs behave.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct IommuTiming {
    /// Translations in the cache. Default 64: Neugebauer and others (SIGCOMM 2018) found the throughput
    /// to drop past that many pages.
    pub entries: u32,
    /// Bytes of a page. Default 4 KiB.
    pub page: u64,
    /// A translation that is in the cache. Default none: within the root's latency.
    pub hit: Time,
    /// One that is not. Default 330 ns: the same authors' measure.
    pub walk: Time,
    /// Walks at a time. Default 6.
    pub walkers: u32,
}

impl Default for IommuTiming {
    fn default() -> Self {
        IommuTiming {
            entries: 64,
            page: 4096,
            hit: Time::ZERO,
            walk: Time::from_ns(330),
            walkers: 6,
        }
    }
}

/// How memory behaves.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MemoryTiming {
    /// From a request's coming to its data's going, or a write's being seen. Default 60 ns.
    pub latency: Time,
    /// Bytes per second. Default 25.6 GB/s: two channels of DDR3-1600.
    pub bandwidth: u64,
    /// The most bytes of a completion. Default 0: the MPS.
    pub completion: u32,
    /// Added to a write of less than a cache line, whose line is read first. Default none.
    pub partial_write: Time,
}

impl Default for MemoryTiming {
    fn default() -> Self {
        MemoryTiming {
            latency: Time::from_ns(60),
            bandwidth: 25_600_000_000,
            completion: 0,
            partial_write: Time::ZERO,
        }
    }
}

/// How processors behave.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CpuTiming {
    /// Bytes of a write-combining buffer: stores to a window leave in packets of these. Default 64.
    pub line: u32,
    /// The least time from one to the next. Default 10 ns.
    pub fill: Time,
    /// How many may wait for the root. Default 10: line fill buffers of Intel cores.
    pub window: u32,
    /// From an uncached load or store to its packet, and from a completion to the register.
    /// Default 40 ns.
    pub issue: Time,
    /// From a byte's landing in memory to its being seen by a loop that polls it. Default 40 ns.
    pub poll: Time,
    /// A call of the copying routine and the flush of its buffers. Default 50 ns.
    pub copy_call: Time,
    /// Reads of windows under way at a time. Default 1: uncached loads wait for each other.
    pub loads: u32,
    /// From an interrupt's coming to its handler. Default 1 us.
    pub interrupt: Time,
}

impl Default for CpuTiming {
    fn default() -> Self {
        CpuTiming {
            line: 64,
            fill: Time::from_ns(10),
            window: 10,
            issue: Time::from_ns(40),
            poll: Time::from_ns(40),
            copy_call: Time::from_ns(50),
            loads: 1,
            interrupt: Time::from_us(1),
        }
    }
}

/// How devices behave.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DeviceTiming {
    /// The most bytes of a packet (MPS). Default 256. All parts of a rack have the same.
    pub mps: u32,
    /// The most bytes of a read request (MRRS). Default 512.
    pub mrrs: u32,
    /// Read requests under way at a time. Default 32: five-bit tags.
    pub tags: u32,
    /// Packets that may wait for the link. Default 2.
    pub window: u32,
    /// From an access to its registers or memory to the answer. Default 50 ns.
    pub latency: Time,
    /// Bytes per second of its memory. Default 100 GB/s.
    pub bandwidth: u64,
    /// Between two messages of a queue pair. Default none.
    pub message: Time,
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
            mrrs: 512,
            tags: 32,
            window: 2,
            latency: Time::from_ns(50),
            bandwidth: 100_000_000_000,
            message: Time::ZERO,
            alignment: 0,
            turn: 0,
            engine: 0,
        }
    }
}

/// How a part differs from others of its kind: what is `None` is as theirs.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct PartTiming {
    /// Its latency.
    pub latency: Option<Time>,
    /// An NTB's translation of requests.
    pub translation: Option<Time>,
    /// An NTB's translation of completions.
    pub completion_translation: Option<Time>,
    /// A device's MRRS.
    pub mrrs: Option<u32>,
    /// A device's tags.
    pub tags: Option<u32>,
    /// Packets of a device that may wait for the link.
    pub window: Option<u32>,
    /// Bytes per second of a device's memory, or a host's.
    pub bandwidth: Option<u64>,
    /// Between two messages of a device's queue pair.
    pub message: Option<Time>,
    /// A device's alignment.
    pub alignment: Option<u32>,
    /// Bytes of a device's queue pair's turn.
    pub turn: Option<u32>,
    /// Bytes per second of a device's engine.
    pub engine: Option<u64>,
}
