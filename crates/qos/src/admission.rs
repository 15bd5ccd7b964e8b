//! Which service levels can be kept together.
//!
//! A level needs engine time (its operations, at what the profile says one costs) and bytes in each
//! direction. What is needed by all minima together is at most what there is, less a part that is
//! never promised, so that those without a minimum are served too and an estimate may err. The rule
//! is that of committed rates in a tree of shapers: no more than the parent's remainder. Who is
//! refused is told what would fit.

use std::collections::BTreeMap;

use crate::SECOND;
use crate::level::{LevelError, Rate, ServiceLevel};
use crate::profile::EngineProfile;
use crate::room::{self, LevelNeed, LevelRoom, ResourcesLeft};
use crate::sharing::Shaping;
use crate::tenant::TenantShare;

/// What the engines of a device can do.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Capacity {
    /// Nanoseconds of engine time that there are each second: of engines that work at the same time, each of which does
    /// operations of every kind.
    pub engine_ns: u64,
    /// Bytes each second into the device, where that is what bounds it.
    pub ingress: Option<u64>,
    /// Bytes each second out of it.
    pub egress: Option<u64>,
}

impl Capacity {
    /// Of so many engines, each with a processor of its own; nothing else bounds what they do.
    pub fn of(workers: u32) -> Capacity {
        Capacity { engine_ns: u64::from(workers) * SECOND, ingress: None, egress: None }
    }
}

/// Thousandths of each resource that are never promised.
pub const RESERVE: u32 = 50;

/// What bounds a level.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Resource {
    /// Time of the engines, of which each second has one second for each engine.
    EngineTime,
    /// Bytes into the device.
    Ingress,
    /// Bytes out of the device.
    Egress,
}

impl std::fmt::Display for Resource {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Resource::EngineTime => "engine time",
            Resource::Ingress => "bandwidth into the device",
            Resource::Egress => "bandwidth out of the device",
        })
    }
}

/// Why a level is not promised.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum LevelRefused {
    /// The level that is asked for contradicts itself.
    #[error(transparent)]
    Level(#[from] LevelError),
    /// The device does not shape what its tenants send, so that it can keep no level.
    #[error(
        "its traffic is not shaped (`shaping = \"off\"` in the rack file), and no level can be kept; ask for none, or for another accelerator"
    )]
    Unshaped,
    /// The device has no such engine.
    #[error("there is no engine `{engine}`; there are {there}")]
    Engine {
        /// The name that was asked for.
        engine: String,
        /// The names that there are.
        there: String,
    },
    /// Beside what is promised already, it cannot be kept.
    #[error(
        "{asked} of {engine} with messages of {message} B is more {what} than is left; {fits} would fit"
    )]
    TooMuch {
        /// The minimum that was asked for.
        asked: Rate,
        /// Name of the engine that is asked for.
        engine: String,
        /// The size of the messages, in bytes.
        message: u64,
        /// What it is too much of.
        what: Resource,
        /// The largest minimum that could be kept.
        fits: Rate,
    },
}

impl LevelRefused {
    /// The largest minimum that could be kept, where that is what `said`, the text of a refusal, ends with.
    pub fn offered(said: &str) -> Option<Rate> {
        let (before, _) = said.rsplit_once(FITS)?;
        before.rsplit_once("; ")?.1.parse().ok()
    }

    /// The largest minimum that could be kept, where the level is too much.
    pub fn fits(&self) -> Option<Rate> {
        match self {
            LevelRefused::TooMuch { fits, .. } => Some(*fits),
            _ => None,
        }
    }
}

/// What a refusal says after the largest minimum that could be kept.
const FITS: &str = " would fit";

/// The levels that are promised, by who has them.
#[derive(Debug, Clone)]
pub struct LevelAdmission {
    capacity: Capacity,
    profiles: BTreeMap<String, EngineProfile>,
    promised: BTreeMap<u64, (ServiceLevel, LevelNeed)>,
    shaping: Shaping,
    /// What is promised before anybody comes for it.
    reserved: Option<Reserved>,
}

#[derive(Debug, Clone)]
struct Reserved {
    level: ServiceLevel,
    need: LevelNeed,
    /// Who has it now.
    taken: Option<u64>,
}

impl LevelAdmission {
    /// Nothing promised yet by a device with this capacity and these engines.
    pub fn new(capacity: Capacity, profiles: BTreeMap<String, EngineProfile>) -> LevelAdmission {
        let (promised, shaping) = (BTreeMap::new(), Shaping::On);
        LevelAdmission { capacity, profiles, promised, shaping, reserved: None }
    }

    /// The same of a device that shapes, or of one that does not, which promises nothing.
    pub fn with_shaping(self, shaping: Shaping) -> LevelAdmission {
        LevelAdmission { shaping, ..self }
    }

    /// Promises `level` to whoever [takes](LevelAdmission::take_reserved) it: nobody else is promised what it needs.
    ///
    /// # Errors
    /// [`LevelRefused`]; what was reserved before still is.
    pub fn reserve(&mut self, level: &ServiceLevel) -> Result<(), LevelRefused> {
        let (need, _) = self.fits(None, level)?;
        self.reserved = Some(Reserved { level: level.clone(), need, taken: None });
        Ok(())
    }

    /// The level that is reserved, unless somebody else has it.
    pub fn reserved_for(&self, holder: u64) -> Option<&ServiceLevel> {
        let free = |reserved: &&Reserved| reserved.taken.is_none_or(|taken| taken == holder);
        self.reserved.as_ref().filter(free).map(|reserved| &reserved.level)
    }

    /// Promises `holder` what is reserved, in the place of what that has, until it is
    /// [released](LevelAdmission::release) or has another level. None where nothing is reserved, or somebody has it.
    pub fn take_reserved(&mut self, holder: u64) -> Option<TenantShare> {
        let reserved = self.reserved.as_mut()?;
        if reserved.taken.is_some_and(|taken| taken != holder) {
            return None;
        }
        reserved.taken = Some(holder);
        let Reserved { level, need, .. } = reserved.clone();
        let cost_ns = self.profiles.get(&level.engine)?.cost_ns(level.message, level.ratio);
        let share = TenantShare::of(&level, cost_ns);
        self.promised.insert(holder, (level, need));
        Some(share)
    }

    /// What the engines' operations cost, by operation.
    pub fn profiles(&self) -> &BTreeMap<String, EngineProfile> {
        &self.profiles
    }

    /// What `holder` was promised.
    pub fn level(&self, holder: u64) -> Option<&ServiceLevel> {
        self.promised.get(&holder).map(|(level, _)| level)
    }

    /// Promises `level` to `holder`, in the place of what that has.
    ///
    /// # Errors
    /// [`LevelRefused`]; what the holder had, it still has.
    pub fn admit(
        &mut self,
        holder: u64,
        level: &ServiceLevel,
    ) -> Result<TenantShare, LevelRefused> {
        let (need, share) = self.fits(Some(holder), level)?;
        self.give_up_reserved(holder);
        self.promised.insert(holder, (level.clone(), need));
        Ok(share)
    }

    /// Promises `level` to a `holder` that was promised it before: what was measured since, and made it dearer, is not to
    /// the holder's disadvantage. Where all that is promised does not fit then, nothing more is promised until it does.
    ///
    /// # Errors
    /// [`LevelRefused`] where no device with these engines keeps it; what the holder had, it still has.
    pub fn keep(&mut self, holder: u64, level: &ServiceLevel) -> Result<TenantShare, LevelRefused> {
        let (need, cost_ns) = room::need(&self.profiles, self.shaping, level)?;
        self.give_up_reserved(holder);
        self.promised.insert(holder, (level.clone(), need));
        Ok(TenantShare::of(level, cost_ns))
    }

    /// What `level` needs and is, if it can be kept in the place of what `holder` has.
    fn fits(
        &self,
        holder: Option<u64>,
        level: &ServiceLevel,
    ) -> Result<(LevelNeed, TenantShare), LevelRefused> {
        let (need, cost_ns) = room::need(&self.profiles, self.shaping, level)?;
        room::check(&need, &self.left(holder), level)?;
        Ok((need, TenantShare::of(level, cost_ns)))
    }

    /// What could still be promised, beside what is: as a value, for whoever chooses among devices.
    pub fn room(&self) -> LevelRoom {
        LevelRoom { shaping: self.shaping, left: self.left(None), profiles: self.profiles.clone() }
    }

    /// What `holder` was promised, it has no more.
    pub fn release(&mut self, holder: u64) {
        self.give_up_reserved(holder);
        self.promised.remove(&holder);
    }

    fn give_up_reserved(&mut self, holder: u64) {
        if let Some(reserved) = &mut self.reserved {
            reserved.taken = reserved.taken.filter(|taken| *taken != holder);
        }
    }

    /// Thousandths of the engines' time that could still be promised.
    pub fn engine_left(&self) -> u32 {
        (self.left(None).engine_ns / self.capacity.engine_ns.max(1) as f64 * 1000.0).max(0.0) as u32
    }

    fn left(&self, but: Option<u64>) -> ResourcesLeft {
        let of = |whole: f64| whole * f64::from(1000 - RESERVE) / 1000.0;
        let whole = ResourcesLeft {
            engine_ns: of(self.capacity.engine_ns as f64),
            ingress: self.capacity.ingress.map(|whole| of(whole as f64)),
            egress: self.capacity.egress.map(|whole| of(whole as f64)),
        };
        let others = self.promised.iter().filter(|(holder, _)| Some(**holder) != but);
        // What somebody else has of what is reserved is among these.
        let free = |reserved: &&Reserved| reserved.taken.is_none() || reserved.taken == but;
        let reserved = self.reserved.iter().filter(free).map(|reserved| &reserved.need);
        let needs = others.map(|(_, (_, need))| need).chain(reserved);
        needs.fold(whole, |left, need| left.without(need))
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::level::RateUnit;
    use crate::profile::Point;

    fn profiles() -> BTreeMap<String, EngineProfile> {
        dearer(1.0)
    }

    /// The same where operations were measured to cost so many times as much.
    fn dearer(times: f64) -> BTreeMap<String, EngineProfile> {
        let profile = |fixed: f64, byte: f64| {
            let cost = |message: u64| (fixed + message as f64 * byte) * times;
            let point = |message| Point { message, ratio: 1000, cost_ns: cost(message) };
            EngineProfile::new([64, 4096, 65_536].map(point).to_vec()).unwrap()
        };
        let named = [("aes256gcm", profile(100.0, 0.2)), ("deflate", profile(2000.0, 8.0))];
        named.map(|(name, profile)| (name.to_owned(), profile)).into()
    }

    fn admission() -> LevelAdmission {
        LevelAdmission::new(Capacity::of(2), profiles())
    }

    fn level(text: &str) -> ServiceLevel {
        text.parse().unwrap()
    }

    #[test]
    fn what_is_refused_says_what_fits_and_that_is_accepted() {
        let mut admission = admission();
        admission.admit(1, &level("deflate 800 Mbit/s message 64 KiB")).unwrap();
        let asked = level("deflate 2 Gbit/s message 4 KiB");
        let refused = admission.admit(2, &asked).unwrap_err();
        let LevelRefused::TooMuch { fits, what: Resource::EngineTime, .. } = &refused else {
            panic!("{refused}");
        };
        let said = refused.to_string();
        let embedded = format!("its lender could not lend it: {said}; see the status");
        assert_eq!(LevelRefused::offered(&embedded), Some(*fits));
        assert_eq!(refused.fits(), Some(*fits));
        assert_eq!(LevelRefused::offered("there is no engine `lzma`; there are copy"), None);
        assert!(said.starts_with("2 Gbit/s of deflate with messages of 4096 B is more"), "{said}");
        let more = Rate { per_second: fits.per_second * 101 / 100, ..*fits };
        assert!(admission.admit(2, &ServiceLevel { min: more, ..asked.clone() }).is_err());
        let share = admission.admit(2, &ServiceLevel { min: *fits, ..asked }).unwrap();
        assert!(share.guarantee.is_some());
        assert!(admission.engine_left() < 10, "{}", admission.engine_left());
    }

    #[test]
    fn a_level_is_changed_in_its_own_place_and_kept_when_the_change_is_refused() {
        let mut admission = admission();
        admission.admit(1, &level("deflate 1 Gbit/s")).unwrap();
        admission.admit(1, &level("deflate 1.5 Gbit/s")).unwrap();
        assert!(admission.admit(1, &level("deflate 9 Gbit/s")).is_err());
        assert_eq!(admission.level(1), Some(&level("deflate 1.5 Gbit/s")));
        admission.release(1);
        assert_eq!((admission.level(1), admission.engine_left()), (None, 950));
        let unknown = admission.admit(1, &level("lzma 1 Gbit/s")).unwrap_err().to_string();
        assert_eq!(unknown, "there is no engine `lzma`; there are aes256gcm, deflate");
    }

    #[test]
    fn what_is_reserved_is_sold_to_nobody_and_there_whenever_it_is_taken() {
        let mut admission = admission();
        admission.reserve(&level("deflate 1 Gbit/s weight 7")).unwrap();
        assert!(admission.reserve(&level("deflate 9 Gbit/s")).is_err());
        let refused = admission.admit(1, &level("deflate 1.5 Gbit/s")).unwrap_err();
        let LevelRefused::TooMuch { fits, .. } = refused else { panic!("{refused}") };
        admission.admit(1, &ServiceLevel { min: fits, ..level("deflate 1.5 Gbit/s") }).unwrap();
        let share = admission.take_reserved(2).unwrap();
        assert_eq!((share.weight, share.guarantee.is_some()), (7, true));
        assert_eq!((admission.take_reserved(3), admission.reserved_for(3)), (None, None));
        // Whoever has it and wants another level competes for that one like everybody.
        assert!(admission.admit(2, &level("deflate 900 Mbit/s")).is_err());
        assert_eq!(admission.level(2), Some(&level("deflate 1 Gbit/s weight 7")));
        admission.release(2);
        assert!(admission.admit(4, &level("deflate 900 Mbit/s")).is_err());
        assert!(admission.take_reserved(3).is_some());
        admission.admit(3, &level("deflate 0 Gbit/s weight 2")).unwrap();
        assert!(admission.reserved_for(5).is_some());
    }

    /// A node begins anew while its functions are in use, and measures its engines again.
    #[test]
    fn what_was_promised_is_kept_when_operations_are_measured_to_be_dearer() {
        let (sold, small) = (level("deflate 1.6 Gbit/s"), level("deflate 1 kbit/s"));
        admission().admit(1, &sold).unwrap();
        let mut again = LevelAdmission::new(Capacity::of(2), dearer(1.2));
        assert!(again.admit(1, &sold).is_err(), "it fits");
        let share = again.keep(1, &sold).unwrap();
        assert!(share.guarantee.is_some() && again.level(1) == Some(&sold));
        // Too much is promised: nobody is promised more, except nothing.
        assert_eq!(again.engine_left(), 0);
        let refused = again.admit(2, &small).unwrap_err();
        assert_eq!(refused.fits().map(|fits| fits.per_second), Some(0), "{refused}");
        assert!(again.room().after(&small, None).is_err());
        again.admit(2, &level("deflate 0 Gbit/s weight 2")).unwrap();
        // Whoever has it may have less.
        assert!(again.admit(1, &sold).is_err());
        again.admit(1, &level("deflate 1.2 Gbit/s")).unwrap();
        again.admit(2, &small).unwrap();
        assert!(matches!(again.keep(1, &level("lzma 1 Gbit/s")), Err(LevelRefused::Engine { .. })));
        assert_eq!(again.level(1), Some(&level("deflate 1.2 Gbit/s")));
        let mut unshaped = admission().with_shaping(Shaping::Off);
        assert_eq!(unshaped.keep(1, &sold), Err(LevelRefused::Unshaped));
    }

    #[test]
    fn a_device_that_does_not_shape_promises_nothing() {
        let mut admission = admission().with_shaping(Shaping::Off);
        for text in ["deflate 1 op/s", "deflate 0 Gbit/s weight 2"] {
            assert_eq!(admission.admit(1, &level(text)).unwrap_err(), LevelRefused::Unshaped);
            assert_eq!(admission.reserve(&level(text)), Err(LevelRefused::Unshaped));
        }
        let reason = LevelRefused::Unshaped.to_string();
        assert!(
            reason.contains("shaping = \"off\"") && reason.contains("ask for none"),
            "{reason}"
        );
        assert!(admission.take_reserved(1).is_none() && admission.level(1).is_none());
    }

    /// A level without a minimum promises nothing, and is a part of what is left.
    #[test]
    fn a_weight_alone_is_always_admitted() {
        let mut admission = admission();
        admission.admit(1, &level("deflate 1.6 Gbit/s")).unwrap();
        let share = admission.admit(2, &level("aes256gcm 0 Gbit/s weight 30")).unwrap();
        assert_eq!((share.guarantee, share.weight), (None, 30));
        let heavy = ServiceLevel { weight: 1001, ..level("aes256gcm 0 Gbit/s") };
        let refused = admission.admit(3, &heavy).unwrap_err().to_string();
        assert!(refused.starts_with("a weight is from 1 to 1000, not 1001"), "{refused}");
    }

    #[test]
    fn each_direction_bounds_what_is_promised() {
        let capacity =
            Capacity { ingress: Some(1_000_000_000), egress: Some(125_000_000), ..Capacity::of(8) };
        let mut admission = LevelAdmission::new(capacity, profiles());
        let refused = admission.admit(1, &level("aes256gcm 4 Gbit/s")).unwrap_err();
        assert!(
            matches!(refused, LevelRefused::TooMuch { what: Resource::Egress, .. }),
            "{refused}"
        );
        admission.admit(1, &level("aes256gcm 4 Gbit/s ratio 10")).unwrap();
        let refused = admission.admit(2, &level("aes256gcm 4 Gbit/s ratio 10")).unwrap_err();
        assert!(
            matches!(refused, LevelRefused::TooMuch { what: Resource::Ingress, .. }),
            "{refused}"
        );
        assert!(refused.to_string().ends_with("3.6 Gbit/s would fit"), "{refused}");
    }

    proptest! {
        /// Whatever is asked for in whatever order: all minima together never need more time than is
        /// promised at most.
        #[test]
        fn no_more_is_promised_than_there_is(
            asked in prop::collection::vec((0u64..6, any::<bool>(), 1u64..1 << 30, 6u32..17), 1..40),
        ) {
            let mut admission = admission();
            for (holder, deflate, per_second, size) in asked {
                let engine = if deflate { "deflate" } else { "aes256gcm" };
                let min = Rate { per_second, unit: RateUnit::Bytes };
                let message = 1 << size;
                let _ = admission.admit(holder, &ServiceLevel { message, ..ServiceLevel::new(engine, min) });
                let need = |level: &ServiceLevel| {
                    let cost = admission.profiles()[&level.engine].cost_ns(level.message, level.ratio);
                    level.operations() * cost
                };
                let needed: f64 = (0..6).filter_map(|holder| admission.level(holder)).map(need).sum();
                prop_assert!(needed <= 1.9e9 * (1.0 + 1e-9), "{needed}");
            }
        }
    }
}
