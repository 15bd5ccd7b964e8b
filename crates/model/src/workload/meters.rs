//! What functions may do in a second, as their classes read it from the rack file: a job begins when its lender would begin
//! with it.

use std::collections::BTreeMap;

use rackbus_fabric::rack::{FunctionLimit, FunctionTiming, LimitCounts, Rack};
use rackbus_qos::{Metered, OperationMeter, RateLimit, ServiceLevel, TenantShare};

use super::scripts::{Failed, Run};
use crate::assembly::End;
use crate::engine::{Arrivals, FlowId, MeterId, Step, Used};
use crate::flow::rack::uneven;
use crate::time::Time;

/// The meters of a function that the rack file bounds.
#[derive(Debug)]
pub(super) struct FunctionMeters {
    /// Which bytes each counts.
    meters: Vec<(LimitCounts, MeterId)>,
    /// Bytes that one operation moves at most.
    longest: u64,
}

/// What a level lets a function have at most.
fn level_limits(level: &ServiceLevel) -> Vec<FunctionLimit> {
    // What an operation costs bounds only what is guaranteed.
    let TenantShare { operations, ingress, egress, .. } = TenantShare::of(level, 0.0);
    let limits = [
        (LimitCounts::BytesRead, ingress),
        (LimitCounts::BytesWritten, egress),
        (LimitCounts::Operations, operations),
    ];
    let limits = limits.into_iter().filter_map(|(counts, limit)| {
        limit.map(|RateLimit { rate, burst }| FunctionLimit { counts, rate, burst })
    });
    limits.collect()
}

/// What the flows of a run ask of a meter.
#[derive(Debug, Default)]
struct AskedOfMeter {
    /// Bytes and operations each second, of those that last.
    rates: [f64; 2],
    /// When the first of all begins.
    begin: Option<Time>,
}

impl Run {
    /// Makes the meters of functions. Their bursts are saved up.
    pub(super) fn add_meters(&mut self, rack: &Rack) -> Result<(), Failed> {
        for (name, declared) in rack.functions() {
            let FunctionTiming { limits, longest, turns, .. } = &declared.timing;
            let Ok(end) = self.assembly.end(&name.to_string()) else { continue };
            let mut limits = limits.clone();
            if let Some(turns) = turns
                && let Some(level) = self.level_of(end, turns)?
            {
                limits.extend(level_limits(&level));
            }
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
                let meter = OperationMeter::full(of(counts), operations);
                (!meter.is_unlimited()).then(|| (counts, world.add_meter(meter)))
            });
            let meters: Vec<_> = meters.collect();
            if !meters.is_empty() {
                self.metered_ends.extend(meters.iter().map(|(_, meter)| (*meter, end)));
                let longest = longest.unwrap_or(u64::MAX);
                self.meters.insert(end, FunctionMeters { meters, longest });
            }
        }
        Ok(())
    }

    /// Where flows that last ask together for all that a limit lets through, or for whatever they get, they have used up
    /// its burst long ago: it begins without. Of what asks for less, and of what comes in bursts or as a trace has it, the
    /// burst is saved up.
    pub(super) fn use_up_meters(&mut self) {
        let mut asked: BTreeMap<MeterId, AskedOfMeter> = BTreeMap::new();
        for (spec, queues, _) in self.flows() {
            let workload = self.workload();
            let jobs = match spec.arrivals {
                _ if uneven(spec, workload).is_some() => 0.0,
                Arrivals::Depth(_) => f64::INFINITY,
                Arrivals::Every(span) | Arrivals::Poisson(span) => 1.0 / span.seconds(),
                Arrivals::Traced => 0.0,
            };
            for (meter, of_job) in queues.iter().flat_map(|it| self.assembly.world.spent_by(*it)) {
                let asked = asked.entry(meter).or_default();
                asked.begin = Some(asked.begin.map_or(spec.begin, |begin| begin.min(spec.begin)));
                for (sum, amount) in asked.rates.iter_mut().zip(of_job) {
                    // Endlessly many jobs that take nothing take nothing.
                    *sum += if amount > 0 { jobs * amount as f64 } else { 0.0 };
                }
            }
        }
        let world = &mut self.assembly.world;
        for (meter, AskedOfMeter { rates, begin }) in asked {
            let all = [Metered::Bytes, Metered::Operations].into_iter().zip(rates);
            let mut limits =
                all.filter_map(|(of, asked)| Some((world.metered_rate(meter, of)?, asked)));
            if limits.any(|(rate, asked)| asked >= rate as f64) {
                world.use_up(meter, begin.unwrap_or_default());
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
        let end = self.metered_ends.get(&meter);
        let function = end.map(|end| self.assembly.end_name(*end)).unwrap_or_default();
        let key = match metered {
            Metered::Bytes => "rate",
            Metered::Operations => "operations",
        };
        let given = end.and_then(|end| self.given_level(*end)).is_some();
        let place = if given { "of its level" } else { "in the rack file" };
        format!("{function}: {key} {place}")
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

#[cfg(test)]
mod tests {
    use super::*;

    /// They hold what comes in 20 ms.
    #[test]
    fn a_level_bounds_what_goes_in_and_comes_out_or_operations() {
        let limits = |level: &str| {
            let limits = level_limits(&level.parse().unwrap()).into_iter();
            limits.map(|limit| (limit.counts, limit.rate, limit.burst)).collect::<Vec<_>>()
        };
        let (read, written) = (LimitCounts::BytesRead, LimitCounts::BytesWritten);
        assert_eq!(
            limits("aes256gcm 1 Gbit/s max 2 Gbit/s out 4 Gbit/s"),
            [(read, 250_000_000, 5_000_000), (written, 500_000_000, 10_000_000)]
        );
        let operations = LimitCounts::Operations;
        assert_eq!(limits("zstd 10 kop/s max 20 kop/s"), [(operations, 20_000, 400)]);
        assert_eq!(limits("zstd 10 kop/s"), []);
    }
}
