//! A job, followed from hop to hop.

use rackbus_fabric::rack::Rack;

use super::Workload;
use super::results::HostProfile;
use super::scripts::{Failed, Run};
use crate::engine::{Arrivals, PacketClass, Passage};
use crate::time::Time;
use crate::timing::Timing;

/// A packet's passage in a trace.
#[derive(Debug, Clone, PartialEq, serde::Serialize)]
pub struct TraceStep {
    /// The name of the part that sends it.
    pub from: String,
    /// The name of the part that it comes to.
    pub to: String,
    /// What it is: `MRd 512 B`.
    pub packet: String,
    /// Its number, from 0 in the order of making; it keeps it from hop to hop.
    pub number: u64,
    /// When it was ready to go, its first bit went and its last bit came, in nanoseconds.
    pub ready_ns: f64,
    /// When its first bit was sent.
    pub begin_ns: f64,
    /// When its last bit had arrived.
    pub end_ns: f64,
}

/// A job, followed from hop to hop.
#[derive(Debug, Clone, PartialEq)]
pub struct Traced {
    /// Its packets' passages, in the order in which they were sent.
    pub steps: Vec<TraceStep>,
    /// How long it took.
    pub took: Time,
    /// What the hosts are taken to be.
    pub hosts: Vec<HostProfile>,
}

/// The first job of the flow of that name, alone in the rack, hop by hop.
///
/// # Errors
/// [`Failed`].
pub fn trace(
    rack: &Rack,
    timing: &Timing,
    workload: &Workload,
    flow: &str,
) -> Result<Traced, Failed> {
    let mut alone = workload.clone();
    alone.flows.retain(|spec| spec.name == flow);
    for spec in &mut alone.flows {
        (spec.arrivals, spec.queues, spec.count) = (Arrivals::Depth(1), 1, 1);
        (spec.begin, spec.end, spec.bursts) = (Time::ZERO, Time::MAX, None);
    }
    alone.shaping.clear();
    (alone.warmup, alone.duration) = (Time::ZERO, Time::MAX);
    let mut run = Run::new(rack, timing, &alone)?;
    run.assembly.world.keep_trace();
    run.go(100_000_000)?;
    let took = run.flows().next().and_then(|(_, queues, _)| queues.first().copied());
    let took = took.map_or(Time::ZERO, |id| run.assembly.world.flow(id).latency.mean());
    let steps = run.assembly.world.trace().iter().map(|passage| run.step(passage)).collect();
    Ok(Traced { steps, took, hosts: run.hosts() })
}

impl Run {
    fn step(&self, passage: &Passage) -> TraceStep {
        let (from, to) = self.assembly.world.ends_of(passage.direction);
        let kind = match passage.class {
            PacketClass::Posted => "MWr",
            PacketClass::NonPosted => "MRd",
            PacketClass::Completion => "CplD",
        };
        TraceStep {
            from: self.assembly.name(from).to_owned(),
            to: self.assembly.name(to).to_owned(),
            packet: format!("{kind} {} B", passage.bytes),
            number: passage.packet,
            ready_ns: passage.ready.ns(),
            begin_ns: passage.begin.ns(),
            end_ns: passage.end.ns(),
        }
    }
}
