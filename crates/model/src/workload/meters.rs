//! What functions may do in a second, as their classes read it from the rack file: a job begins when its lender would begin
//! with it.

use std::collections::BTreeSet;

use rackbus_fabric::rack::{FunctionTiming, LimitCounts, Rack};
use rackbus_qos::{Metered, OperationMeter, RateLimit};

use super::scripts::Run;
use crate::assembly::End;
use crate::engine::{FlowId, MeterId, Step, Used};
use crate::flow::rack::uneven;

/// The meters of a function that the rack file bounds.
#[derive(Debug)]
pub(super) struct FunctionMeters {
    /// Which bytes each counts.
    meters: Vec<(LimitCounts, MeterId)>,
    /// Bytes that one operation moves at most.
    longest: u64,
}

impl Run {
    /// Makes the meters of functions. Of a flow that lasts the rate in the long run is asked for: what comes to a function of
    /// such a flow finds no burst that was saved before. What comes in bursts, or as a trace has it, finds all of it.
    pub(super) fn add_meters(&mut self, rack: &Rack) {
        let workload = self.workload();
        let lasting = workload.flows.iter().filter(|flow| uneven(flow, workload).is_none());
        let lasting: BTreeSet<String> =
            lasting.flat_map(|flow| flow.kind.ends()).map(str::to_owned).collect();
        for (name, declared) in rack.functions() {
            let FunctionTiming { limits, longest, .. } = &declared.timing;
            let name = name.to_string();
            let Ok(end) = self.assembly.end(&name) else { continue };
            let of = |counts| {
                let limit = limits.iter().find(|limit| limit.counts == counts)?;
                Some(RateLimit { rate: limit.rate, burst: limit.burst })
            };
            let meters = [
                (LimitCounts::Bytes, of(LimitCounts::Operations)),
                (LimitCounts::BytesRead, None),
                (LimitCounts::BytesWritten, None),
            ];
            let world = &mut self.assembly.world;
            let meters = meters.into_iter().filter_map(|(counts, operations)| {
                let meter = match lasting.contains(&name) {
                    true => OperationMeter::used_up(of(counts), operations),
                    false => OperationMeter::full(of(counts), operations),
                };
                (!meter.is_unlimited()).then(|| (counts, world.add_meter(meter)))
            });
            let meters: Vec<_> = meters.collect();
            if !meters.is_empty() {
                let longest = longest.unwrap_or(u64::MAX);
                self.meters.insert(end, FunctionMeters { meters, longest });
            }
        }
    }

    /// The steps by which what an end reads and writes by its DMA counts against the limits that it has.
    pub(super) fn metered(&self, end: End, [read, written]: [u64; 2]) -> Vec<Step> {
        let Some(FunctionMeters { meters, longest }) = self.meters.get(&end) else {
            return Vec::new();
        };
        // An operation moves bytes one way.
        let operations = read.div_ceil(*longest) + written.div_ceil(*longest);
        let steps = meters.iter().filter_map(|(counts, meter)| {
            let bytes = match counts {
                LimitCounts::BytesRead => Some(read).filter(|bytes| *bytes > 0)?,
                LimitCounts::BytesWritten => Some(written).filter(|bytes| *bytes > 0)?,
                LimitCounts::Bytes | LimitCounts::Operations => read.saturating_add(written),
            };
            Some(Step::Spend { meter: *meter, bytes, operations: operations.max(1) })
        });
        steps.collect()
    }

    /// What a limit of a function is called.
    pub(crate) fn limit_name(&self, meter: MeterId, metered: Metered) -> String {
        let has = |of: &FunctionMeters| of.meters.iter().any(|(_, other)| *other == meter);
        let end = self.meters.iter().find(|(_, of)| has(of)).map(|(end, _)| *end);
        let function = end.map(|end| self.assembly.end_name(end)).unwrap_or_default();
        let key = match metered {
            Metered::Bytes => "rate",
            Metered::Operations => "operations",
        };
        format!("{function}: {key} in the rack file")
    }

    /// By limit that a queue of a flow counts against: the share of what came that was used, and the share of the time for
    /// which it was waited for.
    pub(super) fn limits_of(&self, queue: FlowId) -> Vec<(String, f64, f64)> {
        let world = &self.assembly.world;
        let meters = world.used_by(queue).into_iter().filter_map(|used| match used {
            Used::Meter(meter) => Some(meter),
            _ => None,
        });
        let limits =
            meters.flat_map(|meter| [Metered::Bytes, Metered::Operations].map(|of| (meter, of)));
        let found = limits.filter_map(|(meter, of)| {
            let used = world.metered_share(meter, of)?;
            Some((self.limit_name(meter, of), used, world.held_share(meter, of)))
        });
        found.collect()
    }
}
