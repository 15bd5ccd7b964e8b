//! What a device could still promise, and the rule of admission: in one place for the device, which decides, and for
//! whoever chooses among several devices before one of them is asked.

use std::collections::BTreeMap;

use crate::admission::{LevelRefused, Resource};
use crate::level::{Rate, RateUnit, ServiceLevel};
use crate::profile::EngineProfile;
use crate::sharing::Shaping;

/// What one level needs each second.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub(crate) struct LevelNeed {
    pub engine_ns: f64,
    pub ingress: f64,
    pub egress: f64,
}

/// What of a device is promised to nobody, each second.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct ResourcesLeft {
    /// Nanoseconds of engine time.
    pub engine_ns: f64,
    /// Bytes into the device; none where that does not bound it.
    pub ingress: Option<f64>,
    /// Bytes out of the device; none where that does not bound it.
    pub egress: Option<f64>,
}

impl ResourcesLeft {
    /// The same when `need` is promised, too.
    pub(crate) fn without(self, need: &LevelNeed) -> ResourcesLeft {
        ResourcesLeft {
            engine_ns: self.engine_ns - need.engine_ns,
            ingress: self.ingress.map(|left| left - need.ingress),
            egress: self.egress.map(|left| left - need.egress),
        }
    }

    /// The same when `need` is promised no more.
    fn with(self, need: &LevelNeed) -> ResourcesLeft {
        let LevelNeed { engine_ns, ingress, egress } = *need;
        self.without(&LevelNeed { engine_ns: -engine_ns, ingress: -ingress, egress: -egress })
    }
}

/// What `level` needs, and the engine time of one of its operations in nanoseconds.
pub(crate) fn need(
    profiles: &BTreeMap<String, EngineProfile>,
    shaping: Shaping,
    level: &ServiceLevel,
) -> Result<(LevelNeed, f64), LevelRefused> {
    if shaping == Shaping::Off {
        return Err(LevelRefused::Unshaped);
    }
    level.check()?;
    let Some(profile) = profiles.get(&level.engine) else {
        let there: Vec<_> = profiles.keys().map(String::as_str).collect();
        let there = there.join(", ");
        return Err(LevelRefused::Engine { engine: level.engine.clone(), there });
    };
    let cost_ns = profile.cost_ns(level.message, level.ratio);
    let (ingress, egress) = level.directions();
    Ok((LevelNeed { engine_ns: level.operations() * cost_ns, ingress, egress }, cost_ns))
}

/// Whether `level`, which needs `need`, can be kept with what is left.
pub(crate) fn check(
    need: &LevelNeed,
    left: &ResourcesLeft,
    level: &ServiceLevel,
) -> Result<(), LevelRefused> {
    let mut least: Option<(f64, Resource)> = None;
    for (needed, left, what) in [
        (need.engine_ns, Some(left.engine_ns), Resource::EngineTime),
        (need.ingress, left.ingress, Resource::Ingress),
        (need.egress, left.egress, Resource::Egress),
    ] {
        let Some(left) = left else { continue };
        let part = left / needed.max(f64::MIN_POSITIVE);
        // Also where too much is promised, who needs nothing has it.
        if needed > left.max(0.0) && least.is_none_or(|(least, _)| part < least) {
            least = Some((part, what));
        }
    }
    let Some((part, what)) = least else { return Ok(()) };
    let per_second = (level.min.per_second as f64 * part.max(0.0)).floor() as u64;
    Err(LevelRefused::TooMuch {
        asked: level.min,
        engine: level.engine.clone(),
        message: level.message,
        what,
        fits: rounded(Rate { per_second, unit: level.min.unit }),
    })
}

/// A rate that can be written down and asked for: rounded down to three digits.
fn rounded(rate: Rate) -> Rate {
    // In bits, for bytes are written so.
    let bits = if rate.unit == RateUnit::Bytes { 8 } else { 1 };
    let value = rate.per_second.saturating_mul(bits);
    let step = 10u64.pow(value.checked_ilog10().unwrap_or(0).saturating_sub(2));
    Rate { per_second: value / step * step / bits, unit: rate.unit }
}

/// What a device could still promise: its admission at one moment, as a value.
#[derive(Debug, Clone, PartialEq)]
pub struct LevelRoom {
    /// Whether it shapes; a device that does not promises nothing.
    pub shaping: Shaping,
    /// What is promised to nobody.
    pub left: ResourcesLeft,
    /// What its operations cost, by name.
    pub profiles: BTreeMap<String, EngineProfile>,
}

impl LevelRoom {
    /// How many more of the level's operations each second could be promised beside it, if it can be kept; in the place
    /// of `instead`, which is promised already.
    ///
    /// # Errors
    /// [`LevelRefused`], with what would fit.
    pub fn after(
        &self,
        level: &ServiceLevel,
        instead: Option<&ServiceLevel>,
    ) -> Result<f64, LevelRefused> {
        let (need, cost_ns) = need(&self.profiles, self.shaping, level)?;
        let left = instead.map_or(self.left, |instead| self.left_without(instead));
        check(&need, &left, level)?;
        let left = left.without(&need);
        let (message, output) =
            (level.message as f64, level.message as f64 * f64::from(level.ratio) / 1000.0);
        let directions = [(left.ingress, message), (left.egress, output)];
        let of = |(left, bytes): (Option<f64>, f64)| Some(left? / bytes.max(f64::MIN_POSITIVE));
        let least = directions.into_iter().filter_map(of).fold(left.engine_ns / cost_ns, f64::min);
        Ok(least.max(0.0))
    }

    /// Promises `level`, whether that can be kept or not: somebody has been promised it already.
    pub fn promise(&mut self, level: &ServiceLevel) {
        if let Ok((need, _)) = need(&self.profiles, self.shaping, level) {
            self.left = self.left.without(&need);
        }
    }

    /// What was promised as `level` is free.
    pub fn release(&mut self, level: &ServiceLevel) {
        self.left = self.left_without(level);
    }

    /// What is left when `level` is promised no more.
    fn left_without(&self, level: &ServiceLevel) -> ResourcesLeft {
        match need(&self.profiles, self.shaping, level) {
            Ok((need, _)) => self.left.with(&need),
            Err(_) => self.left,
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::admission::{Capacity, LevelAdmission};
    use crate::profile::Point;

    fn admission() -> LevelAdmission {
        let profile = |cost: f64| {
            let point = |message| Point { message, ratio: 1000, cost_ns: cost * message as f64 };
            EngineProfile::new([64, 4096, 65_536].map(point).to_vec()).unwrap()
        };
        let named = [("copy", profile(0.5)), ("deflate", profile(8.0))];
        let named = named.map(|(name, profile)| (name.to_owned(), profile));
        let capacity = Capacity { ingress: Some(3_000_000_000), ..Capacity::of(2) };
        LevelAdmission::new(capacity, named.into())
    }

    fn level(engine: &str, per_second: u64) -> ServiceLevel {
        ServiceLevel::new(engine, Rate { per_second, unit: RateUnit::Bytes })
    }

    proptest! {
        /// Whatever was promised before: the value says of each level what the device decides, and of how much more
        /// there is, that this can be promised and a little more cannot.
        #[test]
        fn the_value_says_what_the_device_decides(
            before in prop::collection::vec((any::<bool>(), 1u64..200_000_000), 0..8),
            deflate in any::<bool>(), per_second in 1u64..3_000_000_000,
        ) {
            let mut admission = admission();
            let engine = |deflate: bool| if deflate { "deflate" } else { "copy" };
            for (holder, (deflate, per_second)) in (0..).zip(before) {
                let _ = admission.admit(holder, &level(engine(deflate), per_second));
            }
            let asked = level(engine(deflate), per_second);
            let said = admission.room().after(&asked, None);
            let decided = admission.clone().admit(100, &asked);
            prop_assert_eq!(said.as_ref().err(), decided.as_ref().err());
            if let Ok(more) = said {
                admission.admit(100, &asked).unwrap();
                let bytes = |part: f64| (more * part) as u64 * asked.message;
                prop_assert!(admission.clone().admit(101, &level(&asked.engine, bytes(0.99))).is_ok());
                let beyond = bytes(1.01) + 2 * asked.message;
                prop_assert!(admission.admit(101, &level(&asked.engine, beyond)).is_err());
            }
        }
    }

    #[test]
    fn what_is_replaced_is_free_for_what_comes_instead() {
        let mut admission = admission();
        let (half, most) = (level("deflate", 130_000_000), level("deflate", 230_000_000));
        let mut room = admission.room();
        admission.admit(1, &half).unwrap();
        room.promise(&half);
        assert_eq!(room, admission.room());
        assert!(room.after(&most, None).is_err());
        assert!(room.after(&most, Some(&half)).is_ok());
        room.release(&half);
        assert!(room.after(&most, None).is_ok());
        room.promise(&level("lzma", 1));
        let unknown = room.after(&level("lzma", 1), None).unwrap_err();
        assert_eq!(unknown.to_string(), "there is no engine `lzma`; there are copy, deflate");
    }
}
