//! What a tenant asks for: an engine, how fast, and the messages that the rate is meant for.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

/// What a rate counts.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum RateUnit {
    /// Bytes that go into the engine.
    Bytes,
    /// Operations, whatever their size.
    Operations,
}

/// So much each second.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Rate {
    /// Bytes or operations each second.
    pub per_second: u64,
    /// Which of the two.
    pub unit: RateUnit,
}

/// A tenant's service level.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ServiceLevel {
    /// Name of the engine.
    pub engine: String,
    /// What the tenant gets whenever it asks for so much, with messages of `message` bytes. 0 for a
    /// share of what others leave.
    pub min: Rate,
    /// What it gets at most, in the same unit.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub max: Option<u64>,
    /// Size of the messages that `min` is meant for, in bytes.
    pub message: u64,
    /// Output in thousandths of the input that `min` is meant for.
    pub ratio: u32,
    /// How much may come at once beyond the rates, in the unit of `min`.
    pub burst: u64,
    /// Share of what is left when all minima are met, 1 to 1000.
    pub weight: u32,
    /// Bytes each second into the engine, at most.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ingress: Option<u64>,
    /// Bytes each second out of the engine, at most.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub egress: Option<u64>,
    /// The largest message, in bytes.
    pub largest: u64,
}

/// Why a text is no service level.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error(
    "{what}; a service level is `ENGINE RATE [max RATE] [message SIZE] [ratio PERMILLE] [burst SIZE] \
         [weight N] [in RATE] [out RATE] [largest SIZE]`, as in `aes256gcm 4 Gbit/s` or \
         `zstd 20000 op/s message 64KiB weight 2`"
)]
pub struct LevelError {
    what: String,
}

fn wrong<T>(what: impl Into<String>) -> Result<T, LevelError> {
    Err(LevelError { what: what.into() })
}

/// Message size where nothing is said.
const MESSAGE: u64 = 4096;
/// The largest message where nothing is said, and the largest that can be asked for.
pub const LARGEST: u64 = 1 << 20;
/// The greatest weight that can be asked for.
pub const HEAVIEST: u32 = 1000;
/// A burst of so many of the minimum is a second of it: it is not greater.
pub(crate) const BURSTS: u64 = 10;
/// The greatest rate: so that it can be multiplied by any time.
const FASTEST: u64 = 1 << 50;

impl ServiceLevel {
    /// A level that asks for `min` of `engine` and leaves everything else as usual.
    pub fn new(engine: &str, min: Rate) -> ServiceLevel {
        ServiceLevel {
            engine: engine.to_owned(),
            min,
            max: None,
            message: MESSAGE,
            ratio: 1000,
            burst: 0,
            weight: 1,
            ingress: None,
            egress: None,
            largest: LARGEST,
        }
    }

    /// Operations each second that `min` is.
    pub fn operations(&self) -> f64 {
        match self.min.unit {
            RateUnit::Operations => self.min.per_second as f64,
            RateUnit::Bytes => self.min.per_second as f64 / self.message.max(1) as f64,
        }
    }

    /// Bytes each second that `min` takes into the engine, and out of it.
    pub fn directions(&self) -> (f64, f64) {
        let ingress = self.operations() * self.message as f64;
        (ingress, ingress * f64::from(self.ratio) / 1000.0)
    }

    /// The longest burst that there may be. It comes before all others' minima, whatever these are; in bytes it is as
    /// much engine time as messages of this size take, however many that are.
    fn longest_burst(&self) -> u64 {
        let one = match (self.min.unit, self.min.per_second) {
            (_, 0) => return u64::MAX,
            (RateUnit::Bytes, _) => self.message,
            (RateUnit::Operations, _) => 1,
        };
        one.max(self.min.per_second / BURSTS)
    }

    /// Reads a level that was accepted before, maybe by an earlier version, which let bursts be longer: it is kept, with
    /// as long a burst as there may be now.
    ///
    /// # Errors
    /// As of [`from_str`](str::parse), but for the burst.
    pub fn accepted(text: &str) -> Result<ServiceLevel, LevelError> {
        let level = ServiceLevel::read(text)?;
        let burst = level.burst.min(level.longest_burst());
        let level = ServiceLevel { burst, ..level };
        level.check()?;
        Ok(level)
    }

    /// Refuses what contradicts itself.
    ///
    /// # Errors
    /// [`LevelError`], with what is wrong.
    pub fn check(&self) -> Result<(), LevelError> {
        if self.engine.is_empty() {
            return wrong("there is no engine");
        }
        if !(1..=LARGEST).contains(&self.largest) {
            return wrong(format!("a message has 1 to {LARGEST} bytes, not {}", self.largest));
        }
        if !(1..=self.largest).contains(&self.message) {
            let Self { message, largest, .. } = self;
            return wrong(format!("messages of {message} bytes are not within 1 to {largest}"));
        }
        if !(1..=HEAVIEST).contains(&self.weight) {
            return wrong(format!("a weight is from 1 to {HEAVIEST}, not {}", self.weight));
        }
        let min = self.min.per_second;
        let rates = [Some(min), self.max, self.ingress, self.egress];
        if rates.into_iter().flatten().any(|rate| rate > FASTEST) {
            return wrong("the rate is beyond all engines");
        }
        if [self.max, self.ingress, self.egress].contains(&Some(0)) {
            return wrong("a bound of 0 lets nothing through");
        }
        let (burst, most) = (self.burst, self.longest_burst());
        if burst > most {
            return wrong(format!("a burst of {burst} is more than {most}, a tenth of a second"));
        }
        if self.max.is_some_and(|max| max < min) {
            return wrong("the maximum is less than the minimum");
        }
        let (ingress, egress) = self.directions();
        for (bound, needed, name) in [(self.ingress, ingress, "in"), (self.egress, egress, "out")] {
            if bound.is_some_and(|bound| (bound as f64) < needed) {
                return wrong(format!("`{name}` is less than the minimum takes: {needed:.0} B/s"));
            }
        }
        Ok(())
    }
}

/// Bits each second by prefix, then bytes, then operations: the name, how many of the unit it is
/// (numerator and denominator), and the unit.
const RATES: [(&str, u64, u64, RateUnit); 10] = [
    ("Gbit/s", 1_000_000_000, 8, RateUnit::Bytes),
    ("Mbit/s", 1_000_000, 8, RateUnit::Bytes),
    ("kbit/s", 1000, 8, RateUnit::Bytes),
    ("GB/s", 1_000_000_000, 1, RateUnit::Bytes),
    ("MB/s", 1_000_000, 1, RateUnit::Bytes),
    ("kB/s", 1000, 1, RateUnit::Bytes),
    ("B/s", 1, 1, RateUnit::Bytes),
    ("Mop/s", 1_000_000, 1, RateUnit::Operations),
    ("kop/s", 1000, 1, RateUnit::Operations),
    ("op/s", 1, 1, RateUnit::Operations),
];

const SIZES: [(&str, u64); 4] = [("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10), ("B", 1)];

impl FromStr for Rate {
    type Err = LevelError;

    fn from_str(text: &str) -> Result<Rate, LevelError> {
        let unit = |(name, ..): &&(&str, u64, u64, RateUnit)| text.ends_with(name);
        let Some((name, times, over, unit)) = RATES.iter().find(unit).copied() else {
            return wrong(format!(
                "`{text}` is no rate; write it as 4 Gbit/s, 500 MB/s or 20 kop/s"
            ));
        };
        let number = text[..text.len() - name.len()].trim();
        match number.parse::<f64>() {
            Ok(number) if (0.0..1e15).contains(&number) => {
                let per_second = (number * times as f64 / over as f64).round() as u64;
                Ok(Rate { per_second, unit })
            }
            _ => wrong(format!("`{number}` is no number of {name}")),
        }
    }
}

impl fmt::Display for Rate {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let of_unit = |entry: &&(&str, u64, u64, RateUnit)| entry.3 == self.unit;
        let value = |times: u64, over: u64| self.per_second as f64 * over as f64 / times as f64;
        // In bits, as rates of networks and engines are sold.
        let usual = RATES.iter().filter(of_unit).filter(|entry| !entry.0.contains("B/"));
        let mut usual = usual.peekable();
        while let Some((name, times, over, _)) = usual.next() {
            if value(*times, *over) >= 1.0 || usual.peek().is_none() {
                let shown = format!("{:.3}", value(*times, *over));
                let shown = shown.trim_end_matches('0').trim_end_matches('.');
                return write!(f, "{shown} {name}");
            }
        }
        Ok(())
    }
}

fn size(text: &str) -> Result<u64, LevelError> {
    let (name, times) = SIZES.iter().find(|(name, _)| text.ends_with(name)).unwrap_or(&("", 1));
    match text[..text.len() - name.len()].trim().parse::<u64>() {
        Ok(number) => match number.checked_mul(*times) {
            Some(size) => Ok(size),
            None => wrong(format!("{text} is too large")),
        },
        Err(_) => wrong(format!("`{text}` is no size; write it as 4096 or 64 KiB")),
    }
}

fn show_size(size: u64) -> String {
    let whole = |(_, times): &&(&str, u64)| size >= *times && size.is_multiple_of(*times);
    match SIZES.iter().find(whole) {
        Some((name, times)) => format!("{} {name}", size / times),
        None => format!("{size} B"),
    }
}

const KEYS: [&str; 8] = ["max", "message", "ratio", "burst", "weight", "in", "out", "largest"];

impl FromStr for ServiceLevel {
    type Err = LevelError;

    fn from_str(text: &str) -> Result<ServiceLevel, LevelError> {
        let level = ServiceLevel::read(text)?;
        level.check()?;
        Ok(level)
    }
}

impl ServiceLevel {
    /// What a text says, contradictions included.
    fn read(text: &str) -> Result<ServiceLevel, LevelError> {
        let mut words = text.split_whitespace().peekable();
        let engine = words.next().unwrap_or_default();
        let mut value = || {
            let mut value = String::new();
            while let Some(word) = words.next_if(|word| !KEYS.contains(word)) {
                value.push_str(word);
            }
            (value, words.next())
        };
        let (min, mut key) = value();
        let min: Rate = match min.as_str() {
            "" => return wrong("there is no rate"),
            rate => rate.parse()?,
        };
        let mut level = ServiceLevel::new(engine, min);
        let mut largest = None;
        while let Some(name) = key {
            let text;
            (text, key) = value();
            let rate = |unit: RateUnit| match text.parse::<Rate>()? {
                rate if rate.unit == unit => Ok(rate.per_second),
                _ => wrong(format!("`{name} {text}` is in another unit than it should be")),
            };
            match name {
                "max" => level.max = Some(rate(min.unit)?),
                "in" => level.ingress = Some(rate(RateUnit::Bytes)?),
                "out" => level.egress = Some(rate(RateUnit::Bytes)?),
                "message" => level.message = size(&text)?,
                "burst" => level.burst = size(&text)?,
                "largest" => largest = Some(size(&text)?),
                "ratio" | "weight" => {
                    let Ok(number) = text.parse() else {
                        return wrong(format!("`{text}` is no number"));
                    };
                    *(if name == "ratio" { &mut level.ratio } else { &mut level.weight }) = number;
                }
                _ => {}
            }
        }
        level.largest = largest.unwrap_or(level.largest);
        Ok(level)
    }
}

impl fmt::Display for ServiceLevel {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let usual = ServiceLevel::new(&self.engine, self.min);
        write!(f, "{} {}", self.engine, self.min)?;
        if let Some(max) = self.max {
            write!(f, " max {}", Rate { per_second: max, unit: self.min.unit })?;
        }
        write!(f, " message {}", show_size(self.message))?;
        if self.ratio != usual.ratio {
            write!(f, " ratio {}", self.ratio)?;
        }
        if self.burst != usual.burst {
            write!(f, " burst {}", self.burst)?;
        }
        if self.weight != usual.weight {
            write!(f, " weight {}", self.weight)?;
        }
        for (name, bound) in [("in", self.ingress), ("out", self.egress)] {
            if let Some(per_second) = bound {
                write!(f, " {name} {}", Rate { per_second, unit: RateUnit::Bytes })?;
            }
        }
        if self.largest != usual.largest {
            write!(f, " largest {}", show_size(self.largest))?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_level_is_what_was_written() {
        let level: ServiceLevel = "aes256gcm 4 Gbit/s".parse().unwrap();
        let min = Rate { per_second: 500_000_000, unit: RateUnit::Bytes };
        assert_eq!(level, ServiceLevel::new("aes256gcm", min));
        let text = "zstd 20 kop/s max 40 kop/s message 64 KiB ratio 300 burst 64 weight 2 in 11 Gbit/s \
                    out 4 Gbit/s largest 128 KiB";
        let level: ServiceLevel = text.parse().unwrap();
        assert_eq!(level.to_string(), text);
        assert_eq!(level.to_string().parse(), Ok(level.clone()));
        assert_eq!(
            (level.min.per_second, level.max, level.message),
            (20_000, Some(40_000), 65_536)
        );
        assert_eq!((level.ingress, level.egress), (Some(1_375_000_000), Some(500_000_000)));
        let json = serde_json::to_string(&level).unwrap();
        assert_eq!(serde_json::from_str::<ServiceLevel>(&json).unwrap(), level);
    }

    /// A lease of an earlier version goes on with its minimum.
    #[test]
    fn a_level_that_was_accepted_before_is_kept_with_a_shorter_burst() {
        let text = "deflate 1 B/s message 1 B burst 1 MiB";
        text.parse::<ServiceLevel>().unwrap_err();
        let kept = ServiceLevel::accepted(text).unwrap();
        assert_eq!((kept.burst, kept.min.per_second), (1, 1));
        assert_eq!(kept.to_string().parse(), Ok(kept));
        ServiceLevel::accepted("deflate 0").unwrap_err();
    }

    #[test]
    fn what_is_no_level_is_refused_with_what_is_wrong() {
        for (text, expected) in [
            ("", "there is no rate"),
            ("aes256gcm", "there is no rate"),
            ("aes256gcm 4", "`4` is no rate"),
            ("aes256gcm x Gbit/s", "`x` is no number of Gbit/s"),
            ("aes256gcm -4 Gbit/s", "is no number of Gbit/s"),
            ("aes256gcm 4 Gbit/s max 2 Gbit/s", "the maximum is less"),
            ("aes256gcm 4 Gbit/s max 2 op/s", "in another unit"),
            ("aes256gcm 4 Gbit/s max 2 Gbit/s max", "is no rate"),
            ("aes256gcm 4 Gbit/s message 2 MiB", "not within 1 to 1048576"),
            ("aes256gcm 4 Gbit/s weight 0", "a weight is from 1"),
            ("aes256gcm 4 Gbit/s in 3 Gbit/s", "`in` is less than the minimum takes: 500000000"),
            ("aes256gcm 4 Gbit/s ratio x", "`x` is no number"),
            ("aes256gcm 1e14 Gbit/s", "beyond all engines"),
            ("aes256gcm 0 Gbit/s max 0 Gbit/s", "a bound of 0"),
            ("aes256gcm 1 kbit/s burst 1000 GiB", "burst of 1073741824000 is more than 4096,"),
            // As much engine time as a million messages of a byte take.
            ("deflate 1 B/s message 1 B burst 1 MiB", "a burst of 1048576 is more than 1,"),
            ("deflate 80 kbit/s message 1 B burst 1001", "a burst of 1001 is more than 1000,"),
            ("zstd 1 kop/s burst 101", "a burst of 101 is more than 100,"),
        ] {
            let said = text.parse::<ServiceLevel>().unwrap_err().to_string();
            assert!(said.contains(expected), "{text:?} gives {said}");
            assert!(said.contains("as in `aes256gcm 4 Gbit/s`"), "{said}");
        }
    }
}
