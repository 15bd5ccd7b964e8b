//! Axes: units, scales, and few round ticks.

/// What an axis or a value counts, and so how it is written.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Unit {
    /// As it is, with this unit behind it: `3.2 W`. May be empty.
    Plain(String),
    /// Bytes, in powers of 1024: `4 KiB`.
    Bytes,
    /// Bytes per second, in powers of 1000: `3.2 GB/s`.
    BytesPerSecond,
    /// Nanoseconds, written as fits: `850 ps`, `1.25 us`.
    Nanoseconds,
    /// A part of 1: `63 %`.
    Share,
}

impl Unit {
    /// Names of multiples, least first.
    fn multiples(&self) -> &[(f64, &str)] {
        match self {
            Unit::Plain(_) => &[],
            Unit::Bytes => {
                &[(1.0, "B"), (1024.0, "KiB"), (1048576.0, "MiB"), (1073741824.0, "GiB")]
            }
            Unit::BytesPerSecond => &[(1.0, "B/s"), (1e3, "kB/s"), (1e6, "MB/s"), (1e9, "GB/s")],
            Unit::Nanoseconds => &[(1e-3, "ps"), (1.0, "ns"), (1e3, "us"), (1e6, "ms"), (1e9, "s")],
            Unit::Share => &[(0.01, "%")],
        }
    }

    /// The greatest multiple that leaves `value` a whole part, and its name.
    pub(super) fn multiple(&self, value: f64) -> (f64, &str) {
        let value = value.abs() * (1.0 + 1e-9);
        let multiples = self.multiples();
        let fitting = multiples.iter().rev().find(|(of, _)| value >= *of);
        let usual = || multiples.iter().find(|(of, _)| *of == 1.0).or(multiples.first());
        match (self, fitting.or_else(usual)) {
            (Unit::Plain(name), _) => (1.0, name),
            (_, Some(&found)) => found,
            (_, None) => (1.0, ""),
        }
    }

    /// `value` with three digits and its unit.
    pub fn text(&self, value: f64) -> String {
        // Zero needs no multiple, and 999.6 ns are 1 us.
        let (of, _) = self.multiple(value);
        let (of, name) = self.multiple(round(value / of) * of);
        format!("{} {name}", digits(value / of)).trim_end().to_owned()
    }
}

/// Rounds to three significant digits.
fn round(value: f64) -> f64 {
    format!("{value:.2e}").parse().unwrap_or(value)
}

/// Three digits, or all of a whole number that has more; no zeros at the end of a fraction.
pub(super) fn digits(value: f64) -> String {
    let rounded = round(value);
    let decimals = match rounded.abs() {
        size if size >= 100.0 || size == 0.0 => 0,
        size if size >= 10.0 => 1,
        size if size >= 1.0 => 2,
        size => (2.0 - size.log10().floor()).min(6.0) as usize,
    };
    let text = format!("{value:.decimals$}");
    let text = if decimals > 0 { text.trim_end_matches('0').trim_end_matches('.') } else { &text };
    if text == "-0" { "0".to_owned() } else { text.to_owned() }
}

/// How values are laid out along an axis.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Scale {
    /// Equal distances stand for equal differences.
    Linear,
    /// Doublings evenly; positive values only.
    Log2,
    /// Powers of ten evenly; positive values only.
    Log10,
    /// Shares below 1: 90 %, 99 % and 99.9 % evenly, so that a tail has room.
    Nines,
}

impl Scale {
    /// Where a value is, in the scale's own steps; `None` when it is nowhere.
    pub(super) fn at(self, value: f64) -> Option<f64> {
        let at = match self {
            Scale::Linear => value,
            Scale::Log2 => value.log2(),
            Scale::Log10 => value.log10(),
            Scale::Nines => -(1.0 - value).log10(),
        };
        at.is_finite().then_some(at)
    }
}

/// An axis. Its range is that of the values; linear axes begin at zero unless values are far from
/// it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Axis {
    /// What it measures, without the unit.
    pub label: String,
    /// What its values are counted in, for the labels.
    pub unit: Unit,
    /// How they are laid out.
    pub scale: Scale,
}

/// An axis with its range and ticks.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Laid {
    scale: Scale,
    from: f64,
    to: f64,
    /// Where, and what stands there.
    pub ticks: Vec<(f64, String)>,
    /// What is measured and, where the ticks do not say so, in which unit.
    pub caption: String,
}

impl Laid {
    /// Where a value is along the axis, from 0 to 1.
    pub fn part(&self, value: f64) -> Option<f64> {
        Some((self.scale.at(value)? - self.from) / (self.to - self.from))
    }
}

impl Axis {
    /// An axis of that label, unit and scale.
    pub fn new(label: impl Into<String>, unit: Unit, scale: Scale) -> Axis {
        Axis { label: label.into(), unit, scale }
    }

    /// Lays it out for `values`; `whole` to begin and end at a tick, and linear scales at zero.
    pub(super) fn lay(&self, values: impl Iterator<Item = f64>, whole: bool) -> Laid {
        let (mut from, mut to) = (f64::INFINITY, f64::NEG_INFINITY);
        for value in values.filter_map(|value| self.scale.at(value)) {
            (from, to) = (from.min(value), to.max(value));
        }
        if from > to {
            (from, to) = (0.0, 1.0);
        }
        if self.scale == Scale::Linear && from > 0.0 && (whole || from < 0.25 * to) {
            from = 0.0;
        }
        if to - from < 1e-9 * to.abs().max(1e-9) {
            (from, to) = if from == 0.0 { (0.0, 1.0) } else { (from.min(0.0), to.max(0.0)) };
        }
        match self.scale {
            Scale::Linear => self.linear(from, to, whole),
            Scale::Nines => self.nines(from, to),
            Scale::Log2 => self.logarithmic(from, to, whole, &powers(from, to, f64::exp2)),
            Scale::Log10 if to - from >= 1.5 => {
                self.logarithmic(from, to, whole, &powers(from, to, |at| 10f64.powf(at)))
            }
            // Not two powers of ten in sight: 1, 2, 5, 10, 20 and so on.
            Scale::Log10 => {
                let between = |power: i32| [1.0, 2.0, 5.0].map(|times| times * 10f64.powi(power));
                let powers = from.floor() as i32 - 1..=to.ceil() as i32;
                self.logarithmic(from, to, whole, &powers.flat_map(between).collect::<Vec<_>>())
            }
        }
    }

    fn linear(&self, from: f64, to: f64, whole: bool) -> Laid {
        let (of, name) = self.unit.multiple(from.abs().max(to.abs()));
        let step = round_step((to - from) / of / 5.0) * of;
        let (first, last) = match whole {
            true => ((from / step + 1e-9).floor(), (to / step - 1e-9).ceil()),
            false => ((from / step - 1e-9).ceil(), (to / step + 1e-9).floor()),
        };
        let ticks: Vec<f64> =
            (0..=(last - first) as usize).map(|i| (first + i as f64) * step).collect();
        let (from, to) = if whole { (first * step, last * step) } else { (from, to) };
        let caption =
            if name.is_empty() { self.label.clone() } else { format!("{}, {name}", self.label) };
        let ticks = ticks.into_iter().map(|tick| (tick, digits(tick / of))).collect();
        Laid { scale: self.scale, from, to, ticks, caption }
    }

    /// At most eight of `ticks`, each with its own unit.
    fn logarithmic(&self, mut from: f64, mut to: f64, whole: bool, ticks: &[f64]) -> Laid {
        let at = |value: f64| self.scale.at(value).unwrap_or(0.0);
        if whole {
            let below = ticks.iter().map(|&tick| at(tick)).filter(|tick| *tick <= from + 1e-9);
            let above = ticks.iter().map(|&tick| at(tick)).filter(|tick| *tick >= to - 1e-9);
            (from, to) = (below.fold(f64::MIN, f64::max), above.fold(f64::MAX, f64::min));
        }
        let inside = |tick: &&f64| at(**tick) >= from - 1e-9 && at(**tick) <= to + 1e-9;
        let ticks: Vec<f64> = ticks.iter().filter(inside).copied().collect();
        let each = ticks.len().div_ceil(8).max(1);
        let (own, caption) = match &self.unit {
            Unit::Plain(name) if !name.is_empty() => {
                (Unit::Plain(String::new()), format!("{}, {name}", self.label))
            }
            unit => (unit.clone(), self.label.clone()),
        };
        let ticks = ticks.into_iter().step_by(each).map(|tick| (tick, own.text(tick))).collect();
        Laid { scale: self.scale, from, to, ticks, caption }
    }

    fn nines(&self, from: f64, to: f64) -> Laid {
        let (from, to) = (from.min(0.0), to.max(2.0));
        let all = [0.0, 0.5, 0.9, 0.99, 0.999, 0.9999, 0.99999, 0.999999];
        let names = ["0 %", "50 %", "90 %", "99 %", "99.9 %", "99.99 %", "99.999 %", "99.9999 %"];
        let ticks = all.into_iter().zip(names.map(str::to_owned));
        let inside = |tick: &(f64, String)| self.scale.at(tick.0).is_some_and(|at| at <= to + 1e-9);
        let ticks = ticks.filter(inside).collect();
        Laid { scale: self.scale, from, to, ticks, caption: self.label.clone() }
    }
}

/// Powers around a range.
fn powers(from: f64, to: f64, power: impl Fn(f64) -> f64) -> Vec<f64> {
    let (first, last) = ((from + 1e-9).floor(), (to - 1e-9).ceil());
    (0..=(last - first) as usize).map(|i| power(first + i as f64)).collect()
}

/// The first of 1, 2, 5, 10, 20 and so on that is at least about `least`.
fn round_step(least: f64) -> f64 {
    let power = 10f64.powf(least.log10().floor());
    let times = [1.0, 2.0, 5.0].into_iter().find(|times| times * power >= least * 0.95);
    times.unwrap_or(10.0) * power
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ticks(axis: (Unit, Scale), values: &[f64], whole: bool) -> Vec<String> {
        let axis = Axis::new("", axis.0, axis.1);
        axis.lay(values.iter().copied(), whole).ticks.into_iter().map(|tick| tick.1).collect()
    }

    #[test]
    fn values_have_three_digits_and_a_fitting_unit() {
        let text = |unit: Unit, value| unit.text(value);
        assert_eq!(text(Unit::Nanoseconds, 0.85), "850 ps");
        assert_eq!(text(Unit::Nanoseconds, 999.6), "1 us");
        assert_eq!(text(Unit::Nanoseconds, 20_184.0), "20.2 us");
        assert_eq!(text(Unit::Nanoseconds, 0.0), "0 ns");
        assert_eq!(text(Unit::Bytes, 4096.0), "4 KiB");
        assert_eq!(text(Unit::BytesPerSecond, 3.2e9), "3.2 GB/s");
        assert_eq!(text(Unit::Share, 0.634), "63.4 %");
        assert_eq!(text(Unit::Plain("W".into()), 1234.0), "1234 W");
        assert_eq!(text(Unit::Plain(String::new()), -0.0), "0");
    }

    #[test]
    fn ticks_are_few_and_round() {
        let bytes = ticks((Unit::Bytes, Scale::Log2), &[64.0, 1048576.0], false);
        assert_eq!(bytes.join(" "), "64 B 256 B 1 KiB 4 KiB 16 KiB 64 KiB 256 KiB 1 MiB");
        let time = ticks((Unit::Nanoseconds, Scale::Log10), &[130.0, 45_000.0], true);
        assert_eq!(time.join(" "), "100 ns 1 us 10 us 100 us");
        let time = ticks((Unit::Nanoseconds, Scale::Log10), &[13.0, 45.0], true);
        assert_eq!(time.join(" "), "10 ns 20 ns 50 ns");
        let rate = ticks((Unit::BytesPerSecond, Scale::Linear), &[1.2e9, 6.3e9], true);
        assert_eq!(rate.join(" "), "0 2 4 6 8");
        let one = ticks((Unit::Nanoseconds, Scale::Linear), &[700.0], true);
        assert_eq!(one.join(" "), "0 200 400 600 800");
        assert_eq!(ticks((Unit::Share, Scale::Linear), &[], true).join(" "), "0 20 40 60 80 100");
    }
}
