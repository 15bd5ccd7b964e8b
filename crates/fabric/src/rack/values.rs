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
pub(super) const SIZES: &str = "write a number of bytes, or a whole number and KiB, MiB, GiB, TiB, KB, MB, GB or TB: \"512 MiB\"";

/// What a duration may be, for messages.
pub(super) const DURATIONS: &str = "write a whole number and ms, s or min: \"15 s\"";

/// Bytes in `"512 MiB"`.
pub(super) fn parse_size(text: &str) -> Option<u64> {
    let (number, unit) = split(text)?;
    match unit {
        "" | "B" => Some(number),
        _ => UNITS.iter().find(|(name, _)| *name == unit)?.1.checked_mul(number),
    }
}

/// Milliseconds in `"15 s"`.
pub(super) fn parse_duration_ms(text: &str) -> Option<u64> {
    let (number, unit) = split(text)?;
    let factor = match unit {
        "ms" => 1,
        "s" => 1000,
        "min" => 60_000,
        _ => return None,
    };
    number.checked_mul(factor)
}

fn split(text: &str) -> Option<(u64, &str)> {
    let end = text.find(|c: char| !c.is_ascii_digit()).unwrap_or(text.len());
    let (number, unit) = text.split_at(end);
    Some((number.parse().ok()?, unit.trim()))
}

/// Bytes as people read them: exact in the largest binary unit that divides them (`1 GiB`).
pub fn format_size(bytes: u64) -> String {
    let unit =
        UNITS[..4].iter().find(|(_, factor)| bytes >= *factor && bytes.is_multiple_of(*factor));
    match unit {
        Some((name, factor)) => format!("{} {name}", bytes / factor),
        None => format!("{bytes} B"),
    }
}
