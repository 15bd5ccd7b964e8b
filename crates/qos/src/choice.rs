//! Which of several devices is asked for a service level first: a decision about values, for whoever lends the devices
//! of many hosts. The device itself decides whether it keeps the level.

use std::cmp::Ordering;

use crate::admission::LevelRefused;
use crate::level::ServiceLevel;
use crate::room::LevelRoom;

/// A function of a device that may be asked.
#[derive(Debug, Clone, PartialEq)]
pub struct CandidateFunction {
    /// Its name, which the caller knows it by.
    pub name: String,
    /// Whether nobody has it.
    pub free: bool,
    /// The level that is promised for it in the device's [room](CandidateDevice::room).
    pub counted: Option<ServiceLevel>,
    /// The level that whoever has it was promised since, or is being promised.
    pub promised: Option<ServiceLevel>,
}

/// A device that may be asked, with all of its functions.
#[derive(Debug, Clone, PartialEq)]
pub struct CandidateDevice {
    /// Name of the device, by which equal ones are ordered.
    pub name: String,
    /// Its functions, in the order in which they are lent.
    pub functions: Vec<CandidateFunction>,
    /// What it could promise when it last said so; none where that is not known.
    pub room: Option<LevelRoom>,
}

/// What a device is expected to say.
#[derive(Debug, Clone, PartialEq)]
pub enum Outlook {
    /// It keeps the level. So many of the level's operations each second could be promised beside it; of a level without
    /// a minimum, so many would be its part of them.
    Keeps(f64),
    /// Nothing is known of it.
    Unknown,
    /// By what is known of it, its admission refuses the level, for this reason.
    Refuses(LevelRefused),
}

/// A device in the order in which they are asked.
#[derive(Debug, Clone, PartialEq)]
pub struct RankedDevice {
    /// Name of the device, as in [`CandidateDevice`].
    pub name: String,
    /// Its free functions, in the order in which they are asked for.
    pub functions: Vec<String>,
    /// What it is expected to say.
    pub outlook: Outlook,
}

/// The devices with a free function, in the order in which they are asked for `level`: first those that keep it, where
/// most is left for its engine then; then those of which nothing is known; last those that are expected to refuse,
/// the largest offer first. Among equals the order is that of their names.
pub fn rank(level: &ServiceLevel, devices: Vec<CandidateDevice>) -> Vec<RankedDevice> {
    let mut ranked: Vec<RankedDevice> =
        devices.into_iter().filter_map(|device| look_at(level, device)).collect();
    ranked.sort_by(|a, b| better(&a.outlook, &b.outlook).then_with(|| a.name.cmp(&b.name)));
    ranked
}

/// What a device is expected to say; nothing where none of its functions is free.
fn look_at(level: &ServiceLevel, device: CandidateDevice) -> Option<RankedDevice> {
    let CandidateDevice { name, functions, mut room } = device;
    if let Some(room) = &mut room {
        for function in functions.iter().filter(|function| !function.free) {
            // Said later than the room was.
            if let Some(promised) = &function.promised
                && function.counted.as_ref() != Some(promised)
            {
                function.counted.iter().for_each(|counted| room.release(counted));
                room.promise(promised);
            }
        }
    }
    let in_use = functions.iter().filter(|function| !function.free).count();
    let outlook = |function: &CandidateFunction| match &room {
        None => Outlook::Unknown,
        Some(room) => match room.after(level, function.counted.as_ref()) {
            // All that have no minimum have parts of what is left.
            Ok(more) if level.min.per_second == 0 => Outlook::Keeps(more / (in_use + 1) as f64),
            Ok(more) => Outlook::Keeps(more),
            Err(refused) => Outlook::Refuses(refused),
        },
    };
    let free = functions.iter().filter(|function| function.free);
    let mut free: Vec<(Outlook, String)> =
        free.map(|function| (outlook(function), function.name.clone())).collect();
    free.sort_by_key(|(outlook, _)| class(outlook));
    let outlook = free.first()?.0.clone();
    let functions = free.into_iter().map(|(_, name)| name).collect();
    Some(RankedDevice { name, functions, outlook })
}

/// The kinds of outlooks, the best first.
fn class(outlook: &Outlook) -> u8 {
    match outlook {
        Outlook::Keeps(_) => 0,
        Outlook::Unknown => 1,
        Outlook::Refuses(LevelRefused::TooMuch { .. }) => 2,
        Outlook::Refuses(_) => 3,
    }
}

/// Whether a device with the outlook `a` is asked before one with `b`.
fn better(a: &Outlook, b: &Outlook) -> Ordering {
    class(a).cmp(&class(b)).then_with(|| match (a, b) {
        (Outlook::Keeps(a), Outlook::Keeps(b)) => b.total_cmp(a),
        (Outlook::Refuses(a), Outlook::Refuses(b)) => {
            let fits = |refused: &LevelRefused| refused.fits().map(|rate| rate.per_second);
            fits(b).cmp(&fits(a))
        }
        _ => Ordering::Equal,
    })
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::admission::{Capacity, LevelAdmission};
    use crate::profile::{EngineProfile, Point};
    use crate::sharing::Shaping;

    /// What a device with so many engines, each of which copies a byte in `cost` nanoseconds, says.
    fn admission(engines: u32, cost: f64) -> LevelAdmission {
        let point = |message| Point { message, ratio: 1000, cost_ns: cost * message as f64 };
        let profile = EngineProfile::new([64, 4096, 65_536].map(point).to_vec()).unwrap();
        LevelAdmission::new(Capacity::of(engines), [("copy".to_owned(), profile)].into())
    }

    fn level(text: &str) -> ServiceLevel {
        text.parse().unwrap()
    }

    fn function(name: &str, free: bool) -> CandidateFunction {
        CandidateFunction { name: name.to_owned(), free, counted: None, promised: None }
    }

    fn device(name: &str, room: Option<LevelRoom>) -> CandidateDevice {
        let functions = vec![function("vf1", true), function("vf2", true)];
        CandidateDevice { name: name.to_owned(), functions, room }
    }

    fn names(ranked: &[RankedDevice]) -> Vec<&str> {
        ranked.iter().map(|device| device.name.as_str()).collect()
    }

    #[test]
    fn the_device_with_most_room_for_the_engine_comes_first_and_equal_ones_by_name() {
        let asked = level("copy 1 Gbit/s");
        let devices = vec![
            device("one", Some(admission(1, 1.0).room())),
            device("silent", None),
            device("fast", Some(admission(1, 0.25).room())),
            device("two", Some(admission(2, 1.0).room())),
            device("also", Some(admission(1, 1.0).room())),
            device("off", Some(admission(9, 1.0).with_shaping(Shaping::Off).room())),
            device("slow", Some(admission(1, 100.0).room())),
            device("slower", Some(admission(1, 200.0).room())),
        ];
        let ranked = rank(&asked, devices);
        let order = ["fast", "two", "also", "one", "silent", "slow", "slower", "off"];
        assert_eq!(names(&ranked), order);
        assert!(matches!(&ranked[5].outlook, Outlook::Refuses(LevelRefused::TooMuch { .. })));
        assert_eq!(ranked[7].outlook, Outlook::Refuses(LevelRefused::Unshaped));
    }

    #[test]
    fn what_was_promised_since_the_device_said_what_is_left_counts() {
        let asked = level("copy 1 Gbit/s");
        let promised = |counted| CandidateFunction {
            promised: Some(asked.clone()),
            counted,
            ..function("vf1", false)
        };
        let mut busy = device("a", Some(admission(1, 1.0).room()));
        busy.functions[0] = promised(None);
        let idle = device("b", Some(admission(1, 1.0).room()));
        assert_eq!(names(&rank(&asked, vec![busy.clone(), idle.clone()])), ["b", "a"]);
        // What the device has counted is not counted twice.
        busy.functions[0] = promised(Some(asked.clone()));
        assert_eq!(names(&rank(&asked, vec![busy, idle])), ["a", "b"]);
    }

    #[test]
    fn what_the_rack_file_promises_for_a_function_is_replaced() {
        let (own, asked) = (level("copy 6 Gbit/s"), level("copy 4 Gbit/s"));
        let mut admission = admission(1, 1.0);
        admission.admit(2, &own).unwrap();
        let mut only = device("a", Some(admission.room()));
        only.functions[1].counted = Some(own);
        let ranked = rank(&asked, vec![only.clone()]);
        assert_eq!(ranked[0].functions, ["vf2", "vf1"]);
        assert!(matches!(ranked[0].outlook, Outlook::Keeps(_)));
        // While somebody has that one, the level does not fit.
        only.functions[1].free = false;
        let ranked = rank(&asked, vec![only.clone()]);
        assert!(matches!(ranked[0].outlook, Outlook::Refuses(_)), "{ranked:?}");
        only.functions[0].free = false;
        assert_eq!(rank(&asked, vec![only]), []);
    }

    #[test]
    fn levels_without_a_minimum_spread_over_devices() {
        let asked = level("copy 0 Gbit/s weight 2");
        let mut busy = device("a", Some(admission(3, 1.0).room()));
        busy.functions[0].free = false;
        let idle = device("b", Some(admission(2, 1.0).room()));
        assert_eq!(names(&rank(&asked, vec![busy, idle])), ["b", "a"]);
    }

    proptest! {
        /// Whatever the devices have promised, and in whatever order they come: the first one keeps the level if any
        /// does, no other one that keeps it has more left, and the order is the same.
        #[test]
        fn the_first_keeps_the_level_if_any_does(
            devices in prop::collection::vec((1u32..4, 1u32..40, 0u64..120_000_000, any::<bool>()), 1..8),
            per_second in 0u64..200_000_000,
        ) {
            let asked = ServiceLevel { min: crate::Rate { per_second, ..level("copy 1 B/s").min }, ..level("copy 1 B/s") };
            let mut admissions = Vec::new();
            for (engines, cost, promised, _) in &devices {
                let mut admission = admission(*engines, f64::from(*cost));
                let _ = admission.admit(1, &level(&format!("copy {promised} B/s")));
                admissions.push(admission);
            }
            let candidates: Vec<_> = admissions.iter().zip(&devices).enumerate()
                .map(|(number, (admission, (.., known)))| {
                    device(&number.to_string(), known.then(|| admission.room()))
                }).collect();
            let ranked = rank(&asked, candidates.clone());
            prop_assert_eq!(ranked.len(), candidates.len());
            let room = |admission: &LevelAdmission| admission.room().after(&asked, None).ok();
            let known = admissions.iter().zip(&devices).filter(|(_, (.., known))| *known);
            let most = known.filter_map(|(admission, _)| room(admission)).fold(None, |most: Option<f64>, more| {
                Some(most.map_or(more, |most| most.max(more)))
            });
            match &ranked[0].outlook {
                Outlook::Keeps(more) => prop_assert_eq!(Some(*more), most),
                _ => prop_assert_eq!(most, None),
            }
            prop_assert_eq!(rank(&asked, candidates.into_iter().rev().collect()), ranked);
        }
    }
}
