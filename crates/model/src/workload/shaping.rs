//! Shaping by tenant: what a device takes up next, and what a switch sends next, by weights and token buckets. Both are
//! the code of [`rackbus_qos`] that shapes lent accelerators.

use std::collections::BTreeMap;
use std::ops::Range;

use rackbus_fabric::ComponentKind;
use rackbus_fabric::text::{Parsed, Problem, Section, mismatch, subsection, wrong};
use rackbus_qos::{RateLimit, SharingSettings, TenantArbiter, TenantId, TenantShare};
use toml::de::DeValue;

use super::file::MOST_BYTES;
use super::scripts::{Failed, Run};
use super::{FlowKind, FlowSpec};
use crate::assembly::End;
use crate::engine::{Admitted, GateId, PacketShare, PartId, Script, Step};
use crate::flow::cost;
use crate::time::Time;

/// A device or switch that shapes, and what tenants may have of it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ShapedPart {
    /// The name of the device or switch.
    pub part: String,
    /// Where the file names it, for messages.
    pub place: Range<usize>,
    /// By the name of the tenant; who is not named has the share of [`ShapedTenant::default`].
    pub tenants: BTreeMap<String, ShapedTenant>,
}

/// What a tenant may have.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ShapedTenant {
    /// Its part of what is left, against the others' weights, from 1 to 1000.
    pub weight: u32,
    /// Bytes per second at most: of jobs at a device, of payload on each link of a switch each way.
    pub rate: Option<u64>,
    /// Bytes that may come at once beyond the rate.
    pub burst: u64,
    /// Jobs per second at most; for devices only.
    pub operations: Option<u64>,
    /// Where the file has it, for messages.
    pub place: Range<usize>,
}

impl Default for ShapedTenant {
    fn default() -> ShapedTenant {
        ShapedTenant { weight: 1, rate: None, burst: BURST, operations: None, place: 0..0 }
    }
}

const BURST: u64 = 64 << 10;
const HEAVIEST: u64 = rackbus_qos::level::HEAVIEST as u64;
const FORM: &str = "write [shaping.\"HOST/DEVICE\".TENANT] or [shaping.SWITCH.TENANT] with `weight`, `rate` or `burst`";

/// The section `shaping` of a workload.
pub(super) fn read(top: &Section<'_>, flows: &[FlowSpec]) -> Parsed<Vec<ShapedPart>> {
    let Some(value) = top.get("shaping") else { return Ok(Vec::new()) };
    let DeValue::Table(parts) = value.get_ref() else {
        return wrong(value.span(), mismatch("shaping", value.get_ref()), FORM);
    };
    let mut found = Vec::new();
    for (name, value) in parts {
        let DeValue::Table(entries) = value.get_ref() else {
            return wrong(value.span(), mismatch(name.get_ref(), value.get_ref()), FORM);
        };
        let mut tenants = BTreeMap::new();
        for (tenant, value) in entries {
            let tenant_name = tenant.get_ref().to_string();
            if !flows.iter().any(|flow| flow.tenant.as_deref() == Some(&tenant_name)) {
                let what = format!("no flow has the tenant `{tenant_name}`");
                return wrong(tenant.span(), what, "write `tenant` in the flows that are its");
            }
            if !matches!(value.get_ref(), DeValue::Table(_)) {
                return wrong(value.span(), mismatch(&tenant_name, value.get_ref()), FORM);
            }
            let keys = &["weight", "rate", "burst", "operations"];
            let own = subsection(value, &format!("tenant {tenant_name}"), keys)?;
            let share = ShapedTenant {
                weight: own.count("weight", 1, HEAVIEST)?.unwrap_or(1) as u32,
                rate: own.rate("rate")?,
                burst: own.size("burst", 1, MOST_BYTES)?.unwrap_or(BURST),
                operations: own.count("operations", 1, 1 << 40)?,
                place: tenant.span(),
            };
            tenants.insert(tenant_name, share);
        }
        let part = name.get_ref().to_string();
        found.push(ShapedPart { part, place: name.span(), tenants });
    }
    found.sort_by_key(|part| part.place.start);
    Ok(found)
}

/// A gate at a device, and what jobs come to it.
#[derive(Debug)]
pub(super) struct ShapedDevice {
    name: String,
    gate: GateId,
    shares: BTreeMap<u32, TenantShare>,
    /// Work that must be under way for the device to be busy all the time.
    window: Time,
}

/// Engine time of a device that is one tenant's at a time.
const SLICE_NS: u64 = 1_000;
/// Jobs that are let through together, at most.
const BATCH: usize = 32;
/// Bytes of a piece of a job, which a device lets through at a time: of the size that most commands have.
const PIECE: u64 = 16 << 10;

impl Run {
    /// The number of a tenant; 0 is that of flows without one.
    pub(super) fn tenant(&self, name: Option<&str>) -> u32 {
        name.and_then(|name| self.tenants.get(name)).copied().unwrap_or(0)
    }

    /// Lets switches shape, and makes the gates of devices that do.
    pub(super) fn add_shaping(&mut self) -> Result<(), Failed> {
        for shaped in self.workload().shaping.clone() {
            let refused = |what: String, allowed: &str, span: &Range<usize>| {
                let span = span.clone();
                Err(Failed::Wrong(Problem { span, what, allowed: allowed.to_owned() }))
            };
            let topology = self.assembly.topology();
            if topology.host_named(&shaped.part).is_some() {
                let what = format!("`{}` is a host", shaped.part);
                return refused(what, "devices and switches shape", &shaped.place);
            }
            let Some(id) = topology.named(&shaped.part) else {
                return refused(
                    format!("the rack has no `{}`", shaped.part),
                    "name a device, HOST/DEVICE, or a switch",
                    &shaped.place,
                );
            };
            match topology.component(id).kind {
                ComponentKind::Device => self.shape_device(End::Device(id), &shaped),
                ComponentKind::Switch => {
                    let counted = shaped.tenants.values().find(|share| share.operations.is_some());
                    if let Some(share) = counted {
                        let what = "`operations` is given for a switch".to_owned();
                        return refused(what, "a switch shapes bytes: give `rate`", &share.place);
                    }
                    self.shape_switch(self.assembly.part(id), &shaped);
                }
                kind => {
                    let what = format!("`{}` is a {kind}", shaped.part);
                    return refused(what, "devices and switches shape", &shaped.place);
                }
            }
        }
        Ok(())
    }

    fn shape_device(&mut self, device: End, shaped: &ShapedPart) {
        let gate = self.gate(&format!("shaping of {}", shaped.part));
        let mut shares = BTreeMap::from([(0, TenantShare::default())]);
        for flow in &self.workload().flows {
            shares.insert(self.tenant(flow.tenant.as_deref()), TenantShare::default());
        }
        let named = shaped.tenants.iter().map(|(name, share)| (self.tenant(Some(name)), share));
        // Of a workload that only some flows are taken of, others' tenants are not there.
        for (tenant, share) in named.filter(|(tenant, _)| *tenant > 0) {
            let limit = |(rate, burst)| RateLimit { rate, burst };
            let of = TenantShare {
                weight: share.weight,
                ingress: share.rate.map(|rate| limit((rate, share.burst))),
                operations: share.operations.map(|rate| limit((rate, BATCH as u64))),
                ..TenantShare::default()
            };
            shares.insert(tenant, of);
        }
        let name = shaped.part.clone();
        self.shaped.insert(device, ShapedDevice { name, gate, shares, window: Time::ZERO });
    }

    fn shape_switch(&mut self, part: PartId, shaped: &ShapedPart) {
        let shares: BTreeMap<u32, PacketShare> = shaped
            .tenants
            .iter()
            .map(|(tenant, share)| {
                let rate = share.rate.map(|rate| (rate, share.burst));
                (self.tenant(Some(tenant)), PacketShare { weight: share.weight, rate })
            })
            .filter(|(tenant, _)| *tenant > 0)
            .collect();
        let world = &mut self.assembly.world;
        let ids: Vec<_> = world.direction_ids().filter(|id| world.ends_of(*id).0 == part).collect();
        ids.into_iter().for_each(|id| world.shape(id, shares.clone()));
    }

    /// The device that takes up a flow's jobs, where it shapes.
    pub(super) fn shaping_device(
        &self,
        spec: &FlowSpec,
        ends: &[End],
    ) -> Result<Option<End>, Failed> {
        let shapes = |end: &End| self.shaped.contains_key(end);
        let nth = match &spec.kind {
            FlowKind::Write { .. } | FlowKind::Read { .. } | FlowKind::Copy { .. } => 0,
            FlowKind::Ring { .. } => 1,
            FlowKind::Request { .. } | FlowKind::Steps { .. } | FlowKind::AllReduce { .. } => {
                let Some(nth) = ends.iter().position(shapes) else { return Ok(None) };
                let span = spec.places.ends.get(nth).cloned().unwrap_or(0..0);
                let what = format!("`{}` shapes", self.assembly.end_name(ends[nth]));
                let allowed = "devices shape flows of the kinds write, read, copy, ring, nvme-read, nvme-write and \
                               trace; let a switch shape, or take the device out of `shaping`";
                return Err(Failed::Wrong(Problem { span, what, allowed: allowed.to_owned() }));
            }
        };
        Ok(ends.get(nth).copied().filter(shapes))
    }

    /// Lets a job's steps from `from` on begin when the device that shapes lets it through: a job that counts for
    /// `bytes`, of a flow's queue.
    pub(super) fn admit(
        &mut self,
        device: End,
        (spec, queue): (&FlowSpec, u16),
        script: &mut Script,
        (from, bytes): (usize, u64),
    ) {
        let addresses = crate::engine::Addresses::sequential(0, bytes.next_multiple_of(64));
        let (busy, unloaded) = cost::alone(&self.assembly.world, addresses, &script[from..]);
        let tenant = self.tenant(spec.tenant.as_deref());
        let Some(shaped) = self.shaped.get_mut(&device) else { return };
        let cost = Time::from_ps(busy as u64);
        // A job, and what the way there and back takes besides, twice: others' traffic makes it longer.
        let window = Time::from_ps(2 * unloaded as u64).since(Time::from_ps(busy as u64));
        shaped.window = shaped.window.max(window);
        let admitted = Admitted { tenant, queue, ingress: bytes, egress: 0, cost };
        script.insert(from, Step::Enter(shaped.gate, admitted));
    }

    /// Bytes that a device which shapes lets through of a flow's job at a time: all of it where jobs are counted.
    pub(super) fn piece(&self, device: End, spec: &FlowSpec) -> u64 {
        let tenant = self.tenant(spec.tenant.as_deref());
        let share = self.shaped.get(&device).and_then(|shaped| shaped.shares.get(&tenant));
        let counted = share.is_some_and(|share| share.operations.is_some());
        if counted { u64::MAX } else { PIECE }
    }

    /// The gate of a device that shapes.
    pub(super) fn shaping_gate(&self, device: End) -> Option<GateId> {
        self.shaped.get(&device).map(|shaped| shaped.gate)
    }

    /// Sets what decides at the gates, when it is known what comes there.
    pub(super) fn set_shares(&mut self) {
        for shaped in self.shaped.values() {
            // Costs are of the device's time, of which there is one second in each.
            let settings =
                SharingSettings { slice_ns: SLICE_NS, workers: 1, batch: BATCH, least_ns: 1 };
            let mut arbiter = TenantArbiter::new(settings);
            for (tenant, share) in &shaped.shares {
                arbiter.set(TenantId(*tenant), *share, 0);
            }
            let world = &mut self.assembly.world;
            world.set_policy(shaped.gate, usize::MAX, Box::new(arbiter));
            world.set_window(shaped.gate, shaped.window);
        }
    }

    /// The part whose rate for its tenant holds a flow back for at least this share of the time.
    pub(super) fn held_by_rate(
        &self,
        spec: &FlowSpec,
        directions: &[crate::engine::DirectionId],
        least: f64,
    ) -> Option<String> {
        let name = spec.tenant.as_deref()?;
        let (tenant, world) = (self.tenant(Some(name)), &self.assembly.world);
        let of = |part: &str| Some(format!("{part}: rate of {name}"));
        let ends = spec.kind.ends().into_iter();
        for end in ends.filter_map(|end| self.assembly.end(end).ok()) {
            let Some(shaped) = self.shaped.get(&end) else { continue };
            if world.throttled_share(shaped.gate, tenant) >= least {
                return of(&shaped.name);
            }
        }
        let held = directions.iter().find(|id| world.shaped_share(**id, tenant) >= least)?;
        of(self.assembly.name(world.ends_of(*held).0))
    }
}
