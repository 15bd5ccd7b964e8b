//! Accelerators as a class: what the rack file says of one, and what follows from it.

use std::os::fd::OwnedFd;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use rackbus_fabric::rack::DeviceSection;
use rackbus_fabric::text::{Outcome, wrong};
use rackbus_pci::Function;
use rackbus_qos::{ServiceLevel, TenantId};

use super::CLASS;
use super::function::Accelerator;
use super::pool::{Pool, PoolOptions};
use crate::class::{Class, DeviceConfig};
use crate::place::{Folders, digest};

/// Functions of a device at most.
const MOST_FUNCTIONS: u64 = 64;
/// Engines of a device at most.
const MOST_WORKERS: u64 = 256;
/// Engine time of a turn, in picoseconds, from and to.
const SLICES: (u64, u64) = (10_000_000, 10_000_000_000);

/// The class of accelerators. One without `functions` is known to the timing model only.
#[derive(Debug)]
pub struct AcceleratorClass;

impl Class for AcceleratorClass {
    fn name(&self) -> &'static str {
        CLASS
    }

    fn state_version(&self) -> Option<u32> {
        Some(super::saved::VERSION)
    }

    fn read(&self, _section: &DeviceSection<'_>) -> Outcome<Option<Arc<dyn DeviceConfig>>> {
        // Its functions are lent, not the device.
        Ok(None)
    }

    fn virtual_functions(
        &self,
        section: &DeviceSection<'_>,
    ) -> Outcome<Vec<Arc<dyn DeviceConfig>>> {
        let keys = section.keys(&["kind", "functions", "workers", "slice", "level"])?;
        let functions = keys.count("functions", 1, MOST_FUNCTIONS)?;
        let workers = keys.count("workers", 1, MOST_WORKERS)?;
        let slice = keys.picoseconds("slice", SLICES.1)?;
        if slice.is_some_and(|slice| slice < SLICES.0) {
            return wrong(keys.place("slice"), "`slice` is too short", "it is from 10 us to 10 ms");
        }
        let level = match keys.text("level", LEVEL)? {
            None => None,
            Some((text, span)) => match text.parse::<ServiceLevel>() {
                Ok(level) => Some(level),
                Err(error) => return wrong(span, error.to_string(), LEVEL),
            },
        };
        let Some(functions) = functions else {
            let engines = ["workers", "slice", "level"];
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
        let pool = Pool::new(PoolOptions { workers, slice_ns });
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

/// A virtual function as the rack file describes it. All of a device have its pool.
#[derive(Debug)]
struct AcceleratorFunction {
    name: String,
    tenant: TenantId,
    level: Option<ServiceLevel>,
    /// The level that its user was promised, which a model that is made anew has too.
    promised: Mutex<Option<ServiceLevel>>,
    pool: Arc<Pool>,
}

impl AcceleratorFunction {
    fn promised(&self) -> MutexGuard<'_, Option<ServiceLevel>> {
        self.promised.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The function's model, which goes on with `medium` where there is one.
    fn make(&self, medium: Option<OwnedFd>) -> std::io::Result<Accelerator> {
        let serial = digest(&self.name);
        let promised = self.promised();
        let level = promised.as_ref().or(self.level.as_ref());
        let mut function = Accelerator::new(&self.pool, self.tenant, level, serial)
            .map_err(std::io::Error::other)?;
        function.medium = medium;
        Ok(function)
    }
}

impl DeviceConfig for AcceleratorFunction {
    fn detail(&self) -> String {
        let engines = match self.pool.options().workers {
            1 => "1 engine".to_owned(),
            workers => format!("{workers} engines"),
        };
        match &self.level {
            Some(level) => format!("{engines}, {level}"),
            None => format!("{engines}, shared"),
        }
    }

    fn shaping(&self) -> Vec<(&'static str, u64)> {
        let Some(usage) = self.pool.usage(self.tenant) else { return Vec::new() };
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
        ]
    }

    fn set_level(&self, level: Option<&str>) -> Result<(), String> {
        let asked = level.map(str::parse::<ServiceLevel>).transpose();
        let asked = asked.map_err(|error| error.to_string())?;
        let mut promised = self.promised();
        let level = asked.as_ref().or(self.level.as_ref());
        let set = self.pool.set_level(self.tenant, level).map_err(|refused| refused.to_string());
        if set.is_ok() || asked.is_none() {
            *promised = asked;
        }
        set
    }

    fn model(&self, _folders: &Folders) -> std::io::Result<Box<dyn Function>> {
        self.make(None).map(|function| Box::new(function) as _)
    }

    fn resume(
        &self,
        _folders: &Folders,
        medium: Vec<OwnedFd>,
    ) -> std::io::Result<Box<dyn Function>> {
        self.make(medium.into_iter().next()).map(|function| Box::new(function) as _)
    }
}
