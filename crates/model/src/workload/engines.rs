//! The engines of accelerators, which functions share as their class says in the rack file: by service levels, or
//! without.

use std::collections::BTreeMap;
use std::ops::Range;

use rackbus_fabric::rack::{Rack, TurnTiming};
use rackbus_fabric::text::{Parsed, Problem, Section, mismatch, wrong};
use rackbus_qos::admission::RESERVE;
use rackbus_qos::{
    Guarantee, LevelError, MessageRoundRobin, RateUnit, SECOND, ServiceLevel, SharingSettings,
    TenantArbiter, TenantId, TenantShare,
};
use toml::de::DeValue;

use super::scripts::{Failed, Run};
use super::{FlowKind, FlowSpec};
use crate::assembly::End;
use crate::engine::{Arrivals, Decides};
use crate::flow::rack::uneven;

/// The bytes at whose multiples messages are interrupted, and who gives out the engines.
pub(super) type EnginePolicy = (u64, Box<dyn Decides>);

/// A service level that a workload gives to a function, as a lease may.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct FunctionLevel {
    /// The function, as in `alpha/accel0.vf1`.
    pub function: String,
    /// What it is promised, and what it may have at most.
    pub level: ServiceLevel,
    /// Where the file has it, for messages.
    pub place: Range<usize>,
}

/// The section `levels` of a workload.
pub(super) fn read(top: &Section<'_>) -> Parsed<Vec<FunctionLevel>> {
    const FORM: &str =
        "write [levels] with \"HOST/DEVICE.vfN\" = \"ENGINE RATE …\" for each function";
    let Some(value) = top.get("levels") else { return Ok(Vec::new()) };
    let DeValue::Table(entries) = value.get_ref() else {
        return wrong(value.span(), mismatch("levels", value.get_ref()), FORM);
    };
    let mut found = Vec::new();
    for (name, value) in entries {
        let DeValue::String(text) = value.get_ref() else {
            return wrong(value.span(), mismatch(name.get_ref(), value.get_ref()), FORM);
        };
        match text.parse::<ServiceLevel>() {
            Ok(level) => {
                let function = name.get_ref().to_string();
                found.push(FunctionLevel { function, level, place: name.span() });
            }
            Err(error) => return wrong(value.span(), error.to_string(), FORM),
        }
    }
    Ok(found)
}

impl Run {
    /// Who gives out so many engines of a device whose functions take turns, by number in the order of `functions`.
    pub(super) fn engines(
        &mut self,
        functions: &[(End, &TurnTiming)],
        engines: u32,
    ) -> Result<Option<EnginePolicy>, Failed> {
        let Some((_, first)) = functions.first() else { return Ok(None) };
        let TurnTiming { slice_ns, granule, shaped, .. } = **first;
        if !shaped {
            return Ok(Some((0, Box::new(MessageRoundRobin::default()))));
        }
        let settings = SharingSettings { slice_ns, workers: engines, ..SharingSettings::default() };
        let mut arbiter = TenantArbiter::new(settings);
        let mut needed = 0.0;
        for ((end, turns), nth) in functions.iter().zip(0..) {
            let (id, share) = (TenantId(nth), self.engine_share(*end, turns)?);
            arbiter.set(id, share, 0);
            needed += share.guarantee.map_or(0.0, |guarantee| guarantee.engine.rate as f64);
            if share.guarantee.is_some_and(|guarantee| self.asks_for_all(*end, &guarantee)) {
                arbiter.use_up_guarantee(id, 0);
            }
        }
        let needed = needed / (f64::from(engines) * SECOND as f64);
        // What a running rack's admission promises at most, where the device's own host is promised nothing.
        let most = f64::from(1000 - RESERVE) / 1000.0;
        if needed > most {
            let names: Vec<_> =
                functions.iter().map(|(end, _)| self.assembly.end_name(*end)).collect();
            self.tell(format!(
                "what is promised to {} needs {needed:.2} of the engines' time, with what messages cost here: a running rack \
                 promises {most:.2} of it at most",
                names.join(" and ")
            ));
        }
        Ok(Some((granule, Box::new(arbiter))))
    }

    /// What a function has of its device's engines. What it may have at most is kept where its jobs begin.
    fn engine_share(&self, end: End, turns: &TurnTiming) -> Result<TenantShare, Failed> {
        let Some(level) = self.level_of(end, turns)? else { return Ok(TenantShare::default()) };
        // The flow whose messages are most like those that the level is meant for tells what these cost.
        let costs = self.works_of(end).filter_map(|spec| {
            let FlowKind::Ring { input, service, .. } = &spec.kind else { return None };
            let scale = if *input > 0 { level.message as f64 / *input as f64 } else { 1.0 };
            Some((input.abs_diff(level.message), service.mean().ns() * scale))
        });
        let cost_ns = costs.min_by_key(|(far, _)| *far).map_or(0.0, |(_, cost)| cost);
        let TenantShare { guarantee, weight, .. } = TenantShare::of(&level, cost_ns);
        Ok(TenantShare { guarantee, weight, ..TenantShare::default() })
    }

    /// The level of a function: what the workload gives to it, else what the rack file does.
    pub(super) fn level_of(
        &self,
        end: End,
        turns: &TurnTiming,
    ) -> Result<Option<ServiceLevel>, Failed> {
        if let Some(level) = self.given_level(end) {
            return Ok(Some(level.clone()));
        }
        let level = turns.level.as_ref().map(|text| text.parse()).transpose();
        level.map_err(|error: LevelError| {
            let what = format!("the level of {}: {error}", self.assembly.end_name(end));
            let allowed = "see `level` in the rack file".to_owned();
            Failed::Wrong(Problem { span: 0..0, what, allowed })
        })
    }

    /// The level that the workload gives to a function.
    pub(super) fn given_level(&self, end: End) -> Option<&ServiceLevel> {
        let name = self.assembly.end_name(end);
        let mut levels = self.workload().levels.iter();
        levels.find(|level| level.function == name).map(|level| &level.level)
    }

    /// Refuses levels of what has no engines that are shared by them.
    pub(super) fn check_levels(&self, rack: &Rack) -> Result<(), Failed> {
        let functions: BTreeMap<String, _> =
            rack.functions().map(|(name, declared)| (name.to_string(), declared)).collect();
        for FunctionLevel { function, place, .. } in &self.workload().levels {
            let turns = functions.get(function).map(|declared| declared.timing.turns.as_ref());
            let what = match turns {
                None => format!("the rack has no function `{function}`"),
                Some(None) => format!("`{function}` has no engines that levels are for"),
                Some(Some(turns)) if !turns.shaped => {
                    format!("no level can be kept at `{function}`: its device does not shape")
                }
                Some(Some(_)) => continue,
            };
            let allowed = "name functions of accelerators that shape, as in \"alpha/accel0.vf1\"";
            let problem = Problem { span: place.clone(), what, allowed: allowed.to_owned() };
            return Err(Failed::Wrong(problem));
        }
        Ok(())
    }

    /// Whether flows that last ask a function together for all of its minimum, or for whatever they get: then nothing of it
    /// is saved up, as after a long time. As of limits.
    fn asks_for_all(&self, end: End, guarantee: &Guarantee) -> bool {
        let asked = self.works_of(end).map(|spec| {
            let FlowKind::Ring { input, .. } = &spec.kind else { return 0.0 };
            let units = if guarantee.unit == RateUnit::Bytes { *input as f64 } else { 1.0 };
            match spec.arrivals {
                _ if uneven(spec, self.workload()).is_some() => 0.0,
                Arrivals::Depth(_) => f64::INFINITY,
                Arrivals::Every(span) | Arrivals::Poisson(span) => {
                    f64::from(spec.queues) * units / span.seconds()
                }
                Arrivals::Traced => 0.0,
            }
        });
        asked.sum::<f64>() >= guarantee.units.rate as f64
    }

    /// The flows whose jobs a function works on.
    fn works_of(&self, end: End) -> impl Iterator<Item = &FlowSpec> {
        self.workload().flows.iter().filter(move |spec| self.works_at(spec) == Some(end))
    }

    /// The function whose device works on a flow's jobs.
    fn works_at(&self, spec: &FlowSpec) -> Option<End> {
        let FlowKind::Ring { device, .. } = &spec.kind else { return None };
        self.assembly.end(device).ok()
    }

    /// Whether flows of other functions use the same engines as a flow, in turns: its part is then decided turn by turn.
    pub(crate) fn shares_engines(&self, spec: &FlowSpec) -> bool {
        let Some(end) = self.works_at(spec) else { return false };
        let other = |spec: &FlowSpec| {
            let other = self.works_at(spec).filter(|other| *other != end);
            other.is_some_and(|other| self.media.get(&other) == self.media.get(&end))
        };
        self.engine_tenants.contains_key(&end) && self.workload().flows.iter().any(other)
    }
}
