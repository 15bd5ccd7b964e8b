//! Sizes and durations as people write them.

/// Units of size, largest first.
const UNITS: [(&str, u64); 8] = [
    ("TiB", 1 << 40),
    ("GiB", 1 << 30),
    ("MiB", 1 << 20),
    ("KiB", 1 << 10),
    ("TB", 1_000_000_000_000),
    ("GB", 1_000_000_000),
    ("MB", 1_000_000),
    ("KB", 1_000),
];

/// What a size may be, for messages.
pub const SIZES: &str = "write a number of bytes, or a whole number and KiB, MiB, GiB, TiB, KB, MB, GB or TB: \"512 MiB\"";

/// What a duration may be, for messages.
pub(crate) const DURATIONS: &str = "write a whole number and ms, s or min: \"15 s\"";

/// What a precise duration may be, for messages.
pub(crate) const PRECISE: &str = "write a number and ps, ns, us, ms or s: \"3.52 us\"";

/// What a rate may be, for messages.
pub(crate) const RATES: &str = "write a number and B/s, KB/s, MB/s, GB/s or TB/s: \"12.8 GB/s\"";

/// Bytes in `"512 MiB"`.
pub fn parse_size(text: &str) -> Option<u64> {
    let (number, unit) = split(text)?;
    match unit {
        "" | "B" => Some(number),
        _ => UNITS.iter().find(|(name, _)| *name == unit)?.1.checked_mul(number),
    }
}

/// Milliseconds in `"15 s"`.
pub(crate) fn parse_duration_ms(text: &str) -> Option<u64> {
    let (number, unit) = split(text)?;
    let factor = match unit {
        "ms" => 1,
        "s" => 1000,
        "min" => 60_000,
        _ => return None,
    };
    number.checked_mul(factor)
}

/// Picoseconds in `"3.52 us"`.
pub(crate) fn parse_picoseconds(text: &str) -> Option<u64> {
    let (number, unit) = text.split_once(' ')?;
    let factor = match unit.trim() {
        "ps" => 1,
        "ns" => 1_000,
        "us" => 1_000_000,
        "ms" => 1_000_000_000,
        "s" => 1_000_000_000_000,
        _ => return None,
    };
    decimal(number, factor)
}

/// Bytes per second in `"12.8 GB/s"`.
pub(crate) fn parse_rate(text: &str) -> Option<u64> {
    let (number, unit) = text.split_once(' ')?;
    let factor = match unit.trim() {
        "B/s" => 1,
        "KB/s" => 1_000,
        "MB/s" => 1_000_000,
        "GB/s" => 1_000_000_000,
        "TB/s" => 1_000_000_000_000,
        _ => return None,
    };
    decimal(number, factor)
}

/// What a length may be, for messages.
pub(crate) const LENGTHS: &str = "write a number and mm, cm or m, up to 1000 m: \"2.5 m\"";

/// A length in millimetres.
pub(crate) fn parse_length(text: &str) -> Option<u64> {
    let (number, unit) = text.split_once(' ')?;
    let factor = match unit.trim() {
        "mm" => 1,
        "cm" => 10,
        "m" => 1_000,
        _ => return None,
    };
    decimal(number, factor)
}

/// A decimal number of units, in whole parts of `factor`; finer digits are refused.
fn decimal(number: &str, factor: u64) -> Option<u64> {
    let (whole, fraction) = number.split_once('.').unwrap_or((number, "0"));
    let digits = |text: &str| !text.is_empty() && text.bytes().all(|b| b.is_ascii_digit());
    if !digits(whole) || !digits(fraction) || fraction.len() > 12 {
        return None;
    }
    let scale = 10u64.pow(fraction.len() as u32);
    let parts = u128::from(fraction.parse::<u64>().ok()?) * u128::from(factor);
    if !parts.is_multiple_of(u128::from(scale)) {
        return None;
    }
    let whole = whole.parse::<u64>().ok()?.checked_mul(factor)?;
    whole.checked_add((parts / u128::from(scale)) as u64)
}

fn split(text: &str) -> Option<(u64, &str)> {
    let end = text.find(|c: char| !c.is_ascii_digit()).unwrap_or(text.len());
    let (number, unit) = text.split_at(end);
    Some((number.parse().ok()?, unit.trim()))
}

/// Bytes as people read them: exact in the largest binary unit that divides them (`1 GiB`).
pub fn format_size(bytes: u64) -> String {
    whole(bytes, &UNITS[..4])
}

/// Bytes per second as people write rates, exactly.
pub fn format_rate(bytes: u64) -> String {
    whole(bytes, &UNITS[4..]) + "/s"
}

fn whole(bytes: u64, units: &[(&str, u64)]) -> String {
    let unit = units.iter().find(|(_, factor)| bytes >= *factor && bytes.is_multiple_of(*factor));
    match unit {
        Some((name, factor)) => format!("{} {name}", bytes / factor),
        None => format!("{bytes} B"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn precise_values_are_exact_or_refused() {
        assert_eq!(parse_picoseconds("3.52 us"), Some(3_520_000));
        assert_eq!(parse_picoseconds("0.001 ns"), Some(1));
        assert_eq!(parse_rate("12.8 GB/s"), Some(12_800_000_000));
        for wrong in ["-1 ns", "1", "1.5 ps", ".5 ns", "1e3 ns", "1 h", "20000000 s"] {
            assert_eq!(parse_picoseconds(wrong), None, "{wrong}");
        }
    }
}
