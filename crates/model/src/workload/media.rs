//! What devices work on at a time, and what that is called.

use std::collections::{BTreeMap, BTreeSet};

use rackbus_fabric::rack::{DeviceCapability, FunctionName, Rack};
use rackbus_fabric::text::Problem;

use super::FlowKind;
use super::scripts::{Failed, Run};
use crate::assembly::End;
use crate::engine::ResourceId;

/// Jobs that a drive works on at a time where nothing else is said.
const DRIVE_JOBS: u32 = 64;

impl Run {
    /// What devices work on at a time: as many jobs as the flow says that says most, or, where one says nothing, the device's
    /// class. Functions of a device whose class says that have its units in common.
    pub(super) fn add_media(&mut self, rack: &Rack) -> Result<(), Failed> {
        let functions: BTreeMap<String, _> =
            rack.functions().map(|(name, declared)| (name.to_string(), (name, declared))).collect();
        let mut wholes = BTreeMap::new();
        let mut devices: BTreeMap<String, End> = BTreeMap::new();
        let mut most: BTreeMap<End, (u32, BTreeSet<End>)> = BTreeMap::new();
        for spec in &self.workload().flows {
            let FlowKind::Ring { device, units, drive, .. } = &spec.kind else { continue };
            let function = functions.get(device);
            let other = function.filter(|(_, it)| it.can(DeviceCapability::Blocks) == Some(false));
            if let Some((_, declared)) = other.filter(|_| *drive) {
                let what = format!("`{device}` is a {}", declared.kind);
                let span = spec.places.ends.get(1).cloned().unwrap_or(0..0);
                let allowed = "flows of kind nvme-read and nvme-write are for NVMe drives".into();
                return Err(Failed::Wrong(Problem { span, what, allowed }));
            }
            let Ok(end) = self.assembly.end(device) else { continue };
            let of_class = function.and_then(|(name, declared)| {
                let whole = FunctionName { vf: None, ..name.clone() };
                Some((whole.to_string(), declared.timing.jobs?))
            });
            let jobs = of_class.as_ref().map(|(_, jobs)| *jobs);
            let units = units.or(jobs).unwrap_or(if *drive { DRIVE_JOBS } else { 1 });
            let name = of_class.map_or(device.clone(), |(whole, _)| whole);
            wholes.insert(device.clone(), name.clone());
            let of_device = most.entry(*devices.entry(name).or_insert(end)).or_default();
            of_device.0 = of_device.0.max(units);
            of_device.1.insert(end);
        }
        self.devices = wholes;
        for (units, ends) in most.into_values() {
            let turns = ends.iter().filter_map(|end| {
                let (_, declared) = functions.get(&self.assembly.end_name(*end))?;
                Some((*end, declared.timing.turns.as_ref()?))
            });
            let turns: Vec<_> = turns.collect();
            let medium = match self.engines(&turns, units)? {
                None => self.assembly.world.add_resource(units),
                Some((granule, policy)) => {
                    let tenants = turns.iter().zip(0..).map(|((end, _), nth)| (*end, nth));
                    self.engine_tenants.extend(tenants);
                    self.assembly.world.add_shared_resource(units, granule, policy)
                }
            };
            self.media.extend(ends.into_iter().map(|end| (end, medium)));
        }
        Ok(())
    }

    /// What is known of a unit's name: that of steps, or of the device whose medium it is.
    pub(crate) fn unit_name(&self, unit: ResourceId) -> Option<String> {
        let medium = self.media.iter().find(|(_, medium)| **medium == unit);
        let medium = medium.map(|(end, _)| self.medium_name(&self.assembly.end_name(*end)));
        let named = self.units.iter().find(|(_, other)| **other == unit);
        medium.or_else(|| named.map(|(name, _)| name.clone()))
    }

    /// What the medium of a function is called: by its device where all functions of that have it in common.
    pub(super) fn medium_name(&self, function: &str) -> String {
        let device = self.devices.get(function).map_or(function, String::as_str);
        format!("{device}: medium")
    }
}
