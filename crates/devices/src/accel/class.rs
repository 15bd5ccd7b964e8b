//! Accelerators as a class: what the rack file says of one, and what follows from it.

use std::os::fd::OwnedFd;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use rackbus_fabric::rack::{DeviceCapability, DeviceSection, FunctionTiming, TurnTiming};
use rackbus_fabric::text::{Parsed, wrong};
use rackbus_memory::InheritedEnd;
use rackbus_pci::{Function, MediumAccess};
use rackbus_qos::{LevelRoom, ServiceLevel, Shaping, TenantId};
use rackbus_spec::accel::{CLASS_CODE, DEVICE_ID, VENDOR_ID};

use super::CLASS;
use super::function::Accelerator;
use super::pool::{EnginePool, PoolOptions};
use crate::class::{Class, DeviceConfig, FrontError, LentTo, PciIdentity};
use crate::lost::Lost;
use crate::place::{Folders, digest};

/// Functions of a device at most.
const MOST_FUNCTIONS: u64 = 64;
/// Engines of a device at most.
const MOST_WORKERS: u64 = 256;
/// Engine time of a turn, in picoseconds, from and to.
const SLICES: (u64, u64) = (10_000_000, 10_000_000_000);

/// The keys of an accelerator.
const KEYS: &[&str] = &["kind", "functions", "workers", "slice", "shaping", "level", "provider"];

/// The class of accelerators. One without `functions` is known to the timing model only.
#[derive(Debug)]
pub struct AcceleratorClass;

impl Class for AcceleratorClass {
    fn name(&self) -> &'static str {
        CLASS
    }

    fn pci_identity(&self) -> Option<PciIdentity> {
        Some(PciIdentity::new(VENDOR_ID, DEVICE_ID, CLASS_CODE))
    }

    fn capabilities(&self) -> &'static [DeviceCapability] {
        &[DeviceCapability::Engines]
    }

    fn state_version(&self) -> Option<u32> {
        Some(super::saved::VERSION)
    }

    fn front(
        &self,
        description: &str,
        access: MediumAccess,
        lost: Lost,
    ) -> Result<Box<dyn Function>, FrontError> {
        super::front(description, access, lost)
    }

    fn front_again(
        &self,
        description: &str,
        end: InheritedEnd,
        lost: Lost,
    ) -> Result<Box<dyn Function>, FrontError> {
        super::front_again(description, end, lost)
    }

    fn read(&self, _section: &DeviceSection<'_>) -> Parsed<Option<Arc<dyn DeviceConfig>>> {
        // Its functions are lent, not the device.
        Ok(None)
    }

    fn virtual_functions(&self, section: &DeviceSection<'_>) -> Parsed<Vec<Arc<dyn DeviceConfig>>> {
        let keys = section.keys(KEYS)?;
        let functions = keys.count("functions", 1, MOST_FUNCTIONS)?;
        let workers = keys.count("workers", 1, MOST_WORKERS)?;
        let slice = keys.picoseconds("slice", SLICES.1)?;
        if slice.is_some_and(|slice| slice < SLICES.0) {
            return wrong(keys.place("slice"), "`slice` is too short", "it is from 10 us to 10 ms");
        }
        let level = |key: &'static str, what: &'static str| match keys.text(key, what)? {
            None => Ok(None),
            Some((text, span)) => match text.parse::<ServiceLevel>() {
                Ok(level) => Ok(Some(level)),
                Err(error) => wrong(span, error.to_string(), what),
            },
        };
        let (level, provider) = (level("level", LEVEL)?, level("provider", PROVIDER)?);
        let shaping = match keys.text("shaping", SHAPING)? {
            None | Some(("on", _)) => Shaping::On,
            Some(("off", _)) => Shaping::Off,
            Some((other, span)) => return wrong(span, format!("`shaping` is {other}"), SHAPING),
        };
        let promised = ["level", "provider"].into_iter().find(|key| keys.get(key).is_some());
        if let (Shaping::Off, Some(key)) = (shaping, promised) {
            let what = format!("`{key}` cannot be kept with shaping = \"off\"");
            return wrong(keys.place(key), what, "leave out one of the two");
        }
        let Some(functions) = functions else {
            let engines = ["workers", "slice", "shaping", "level", "provider"];
            return match engines.into_iter().find(|key| keys.get(key).is_some()) {
                Some(key) => wrong(
                    keys.place(key),
                    format!("device {} has no `functions`", section.function()),
                    "write functions = 4, as many as may be lent at the same time",
                ),
                None => Ok(Vec::new()),
            };
        };
        let usual = PoolOptions::default();
        let slice_ns = slice.map_or(usual.slice_ns, |slice| slice / 1000);
        let workers = workers.map_or(usual.workers, |workers| workers as u32);
        let pool = EnginePool::new(PoolOptions { workers, slice_ns, provider, shaping });
        let function = |number: u64| {
            let name = format!("{}.vf{number}", section.function());
            let tenant = TenantId(number as u32);
            let (level, promised) = (level.clone(), Mutex::default());
            Arc::new(AcceleratorFunction { name, tenant, level, promised, pool: pool.clone() })
                as Arc<dyn DeviceConfig>
        };
        Ok((1..=functions).map(function).collect())
    }
}

const LEVEL: &str = "`level` is what each function is promised, as in \"aes256gcm 4 Gbit/s\"";

const SHAPING: &str =
    "`shaping` is \"on\", or \"off\" for queue pairs that take turns, whoever has them";

const PROVIDER: &str =
    "`provider` is what the device's own host is promised, as in \"deflate 200 Mbit/s\"";

/// A virtual function as the rack file describes it. All of a device have its pool.
#[derive(Debug)]
struct AcceleratorFunction {
    name: String,
    tenant: TenantId,
    level: Option<ServiceLevel>,
    /// What its user was promised, which a model that is made anew has too.
    promised: Mutex<Promised>,
    pool: Arc<EnginePool>,
}

#[derive(Debug, Default)]
struct Promised {
    /// The level that was asked for.
    asked: Option<ServiceLevel>,
    /// The host that has the device is the user: without a level it takes what is reserved for it.
    own: bool,
}

/// A level that the control plane has accepted.
fn parsed(level: Option<&str>) -> Result<Option<ServiceLevel>, String> {
    level.map(ServiceLevel::accepted).transpose().map_err(|error| error.to_string())
}

impl AcceleratorFunction {
    fn promised(&self) -> MutexGuard<'_, Promised> {
        self.promised.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The function's model, which continues with the files of an earlier life where there are any.
    fn make(&self, medium: Vec<OwnedFd>) -> std::io::Result<Accelerator> {
        let serial = digest(&self.name);
        let promised = self.promised();
        let level = promised.asked.as_ref().or(self.level.as_ref());
        // What somebody was promised is kept, whatever operations are measured to cost now.
        let kept = level.filter(|_| promised.asked.is_some() || !medium.is_empty());
        let asked = if kept.is_some() { None } else { level };
        let made = Accelerator::new(&self.pool, self.tenant, asked, serial);
        let mut function = made.map_err(std::io::Error::other)?;
        if let Some(level) = kept
            && let Err(reason) = self.pool.keep_level(self.tenant, level)
        {
            // Who goes on keeps the function, with a share of what is left.
            let _ = self.pool.set_level(self.tenant, None);
            tracing::error!(function = self.name, %reason, "a guaranteed service level cannot be kept any more");
        }
        function.bring(medium);
        if promised.own && promised.asked.is_none() {
            self.pool.set_own(self.tenant);
        }
        Ok(function)
    }
}

impl DeviceConfig for AcceleratorFunction {
    fn detail(&self) -> String {
        let engines = match self.pool.options().workers {
            1 => "1 engine".to_owned(),
            workers => format!("{workers} engines"),
        };
        match (&self.level, self.pool.options().shaping) {
            (Some(level), _) => format!("{engines}, {level}"),
            (None, Shaping::On) => format!("{engines}, shared"),
            (None, Shaping::Off) => format!("{engines}, not shaped"),
        }
    }

    /// Its device's engines, which all functions have in common.
    fn timing(&self) -> FunctionTiming {
        let jobs = Some(self.pool.options().workers);
        let turns = TurnTiming {
            slice_ns: self.pool.options().slice_ns,
            granule: super::pool::GRANULE,
            shaped: self.pool.options().shaping == Shaping::On,
            level: self.level.as_ref().map(ServiceLevel::to_string),
        };
        FunctionTiming { jobs, turns: Some(turns), ..FunctionTiming::default() }
    }

    fn shaping(&self) -> Vec<(&'static str, u64)> {
        let Some(usage) = self.pool.usage(self.tenant) else { return Vec::new() };
        let kept = self.pool.kept(self.tenant).unwrap_or_default();
        vec![
            ("engine_ns", usage.engine_ns),
            ("guaranteed_ns", usage.guaranteed_ns),
            ("ingress_bytes", usage.ingress),
            ("egress_bytes", usage.egress),
            ("turns", usage.turns),
            ("split", usage.split),
            ("batched", usage.batched),
            ("throttled", usage.throttled),
            ("throttled_ns", usage.throttled_ns),
            ("promised", kept.promised),
            ("delivered", kept.delivered),
            ("windows", kept.windows),
            ("violations", kept.violations),
        ]
    }

    fn level(&self) -> Option<String> {
        self.pool.level(self.tenant).map(|level| level.to_string())
    }

    fn room(&self) -> Option<LevelRoom> {
        self.pool.room()
    }

    fn set_level(&self, level: Option<&str>, to: LentTo) -> Result<(), String> {
        let (asked, own) = (parsed(level)?, to == LentTo::Owner);
        let mut promised = self.promised();
        let taken = own && asked.is_none() && self.pool.begin_own(self.tenant);
        let level = asked.as_ref().or(self.level.as_ref());
        let set = if taken { Ok(()) } else { self.pool.begin(self.tenant, level) };
        if set.is_err() && to == LentTo::Nobody {
            // What the former user was promised is free in any case.
            let _ = self.pool.begin(self.tenant, None);
        }
        if set.is_ok() || to == LentTo::Nobody {
            *promised = Promised { asked, own };
            self.pool.hold_level(self.tenant, promised.asked.is_some());
        }
        set.map_err(|refused| refused.to_string())
    }

    fn change_level(&self, level: Option<&str>) -> Result<(), String> {
        let asked = parsed(level)?;
        let mut promised = self.promised();
        let taken = promised.own && asked.is_none() && self.pool.set_own(self.tenant);
        let level = asked.as_ref().or(self.level.as_ref());
        let held = [self.pool.level(self.tenant), promised.asked.clone()];
        let set = match level {
            _ if taken => Ok(()),
            // It has that already, or had it before the model was made anew, and keeps it.
            Some(level) if held.iter().flatten().any(|held| held == level) => {
                self.pool.keep_level(self.tenant, level)
            }
            level => self.pool.set_level(self.tenant, level),
        };
        if set.is_ok() {
            promised.asked = asked;
            self.pool.hold_level(self.tenant, promised.asked.is_some());
        }
        set.map_err(|refused| refused.to_string())
    }

    fn resume_level(&self, level: Option<&str>, to: LentTo) -> Result<(), String> {
        let (asked, own) = (parsed(level)?, to == LentTo::Owner);
        *self.promised() = Promised { asked, own };
        self.change_level(level)
    }

    fn is_separable(&self) -> bool {
        true
    }

    fn is_carried(&self) -> bool {
        true
    }

    fn is_polled(&self) -> bool {
        true
    }

    fn model(&self, _folders: &Folders) -> std::io::Result<Box<dyn Function>> {
        self.make(Vec::new()).map(|function| Box::new(function) as _)
    }

    fn resume(
        &self,
        _folders: &Folders,
        medium: Vec<OwnedFd>,
    ) -> std::io::Result<Box<dyn Function>> {
        self.make(medium).map(|function| Box::new(function) as _)
    }
}

#[cfg(test)]
mod tests {
    use crate::class::parse_rack;

    #[test]
    fn the_model_is_told_of_the_engines_that_the_rack_file_names() {
        for (keys, jobs) in [("workers = 3\n", 3), ("", 1)] {
            let text = format!(
                "name = \"lab\"\n[hosts.a.devices.c]\nkind = \"accelerator\"\nfunctions = 2\n{keys}"
            );
            let (rack, _) = parse_rack("rack.toml", &text).unwrap();
            let told: Vec<_> = rack.functions().map(|(_, it)| it.timing.jobs).collect();
            assert_eq!(told, [Some(jobs); 2]);
        }
    }
}
