//! A device with engines that is asked for by its service level, of whatever class: what a request says, what nodes say that their devices could
//! still promise, and what is answered where none keeps the level.

use std::collections::BTreeMap;

use rackbus_qos::{EngineProfile, LevelRoom, Point, ProfileError, ResourcesLeft, Shaping};
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// Asks for whichever accelerator keeps a service level.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct AcceleratorChoice {
    /// The service level that its lender is to promise: `aes256gcm 4 Gbit/s`.
    pub level: String,
}

/// What an accelerator with a free function said to a level that it does not keep.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct AcceleratorOffer {
    /// Name of the accelerator, `HOST/DEVICE`: `alpha/accel0`.
    pub device: String,
    /// The largest level of the kind that was asked for that it would keep; nothing where it keeps none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub fits: Option<String>,
    /// Why it does not keep what was asked for, for people.
    pub reason: String,
}

/// What an accelerator could still promise, beside what it has promised.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(default)]
pub struct AcceleratorRoom {
    /// Whether it shapes what its tenants send; one that does not promises nothing.
    pub shaped: bool,
    /// Nanoseconds of engine time that are left of each second.
    pub engine_ns: u64,
    /// Bytes each second into the device that are left; nothing where that does not bound it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub ingress: Option<u64>,
    /// Bytes each second out of the device that are left; nothing where that does not bound it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub egress: Option<u64>,
    /// What operations cost, by their names.
    pub engines: BTreeMap<String, Vec<EngineCost>>,
}

/// What one operation on a message of one size costs, as it was measured.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct EngineCost {
    /// Bytes of the message.
    pub message: u64,
    /// Bytes that came out, in thousandths of those that went in.
    pub ratio: u32,
    /// Engine time of the operation, in picoseconds.
    pub cost_ps: u64,
}

/// Engines of a device, and points of an engine's profile, that a node may tell of at most.
const MOST: usize = 64;

impl AcceleratorRoom {
    /// The same of what a device says.
    pub fn of(room: &LevelRoom) -> AcceleratorRoom {
        let whole = |left: f64| left.max(0.0) as u64;
        let cost = |point: Point| {
            let Point { message, ratio, cost_ns } = point;
            EngineCost { message, ratio, cost_ps: (cost_ns * 1e3) as u64 }
        };
        let engines = room.profiles.iter().map(|(name, profile)| {
            (name.clone(), profile.points().into_iter().map(cost).collect())
        });
        AcceleratorRoom {
            shaped: room.shaping == Shaping::On,
            engine_ns: whole(room.left.engine_ns),
            ingress: room.left.ingress.map(whole),
            egress: room.left.egress.map(whole),
            engines: engines.collect(),
        }
    }

    /// Whether it is no more than a device has.
    pub(crate) fn is_bounded(&self) -> bool {
        self.engines.len() <= MOST && self.engines.values().all(|points| points.len() <= MOST)
    }

    /// The room that this tells of.
    ///
    /// # Errors
    /// [`ProfileError`] where costs are none.
    pub(crate) fn room(&self) -> Result<LevelRoom, ProfileError> {
        let point = |cost: &EngineCost| {
            let EngineCost { message, ratio, cost_ps } = *cost;
            Point { message, ratio, cost_ns: cost_ps as f64 / 1e3 }
        };
        let profile = |(name, costs): (&String, &Vec<EngineCost>)| {
            let profile = EngineProfile::new(costs.iter().map(point).collect())?;
            Ok((name.clone(), profile))
        };
        let left = ResourcesLeft {
            engine_ns: self.engine_ns as f64,
            ingress: self.ingress.map(|left| left as f64),
            egress: self.egress.map(|left| left as f64),
        };
        Ok(LevelRoom {
            shaping: if self.shaped { Shaping::On } else { Shaping::Off },
            left,
            profiles: self.engines.iter().map(profile).collect::<Result<_, ProfileError>>()?,
        })
    }
}

/// Name of the device that has a function: `alpha/accel0` of `alpha/accel0.vf3`, `nvme0` of `nvme0`.
pub fn device_of(function: &str) -> &str {
    function.split_once(".vf").map_or(function, |(device, _)| device)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_a_device_says_is_understood() {
        let point = |message| Point { message, ratio: 1000, cost_ns: message as f64 * 0.25 };
        let profile = EngineProfile::new([64, 4096].map(point).to_vec()).unwrap();
        let left = ResourcesLeft { engine_ns: 7e8, ingress: Some(5e9), egress: None };
        let profiles = BTreeMap::from([("copy".to_owned(), profile)]);
        let room = LevelRoom { shaping: Shaping::On, left, profiles };
        let said = AcceleratorRoom::of(&room);
        let text = serde_json::to_string(&said).unwrap();
        let heard: AcceleratorRoom = serde_json::from_str(&text).unwrap();
        assert_eq!(heard.room().unwrap(), room);
        // Of a device that has promised more than it has now, nothing is left.
        let less = ResourcesLeft { engine_ns: -1.0, ..left };
        assert_eq!(AcceleratorRoom::of(&LevelRoom { left: less, ..room }).engine_ns, 0);
        let cost = |cost_ps| vec![EngineCost { message: 64, ratio: 1000, cost_ps }];
        let wrong = AcceleratorRoom { engines: [("copy".to_owned(), cost(0))].into(), ..said };
        assert!(wrong.room().is_err() && wrong.is_bounded());
        let many = (0..=MOST).map(|number| (number.to_string(), Vec::new())).collect();
        assert!(!AcceleratorRoom { engines: many, ..wrong }.is_bounded());
    }

    #[test]
    fn functions_belong_to_devices() {
        assert_eq!(device_of("alpha/accel0.vf3"), "alpha/accel0");
        assert_eq!(device_of("alpha/nvme0"), "alpha/nvme0");
    }
}
