//! Sizes on the command line: as in the rack file, or short.

use rackbus_fabric::text::parse_size;

/// Bytes in `4096`, `64K`, `64M`, `2G`, or `"64 MiB"` as the rack file has it.
///
/// # Errors
/// What it may be.
pub fn parse(text: &str) -> Result<u64, String> {
    let digits = text.trim_end_matches(|c: char| !c.is_ascii_digit());
    let factor: u64 = match &text[digits.len()..] {
        "K" => 1 << 10,
        "M" => 1 << 20,
        "G" => 1 << 30,
        "T" => 1 << 40,
        _ => {
            let allowed = || "write it as 4096, 64K, 64M, 2G or \"64 MiB\"".to_owned();
            return parse_size(text).ok_or_else(allowed);
        }
    };
    let number: Option<u64> = digits.parse().ok();
    let size = number.and_then(|number| number.checked_mul(factor));
    size.ok_or_else(|| "it is larger than any size".to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_written_short_or_as_in_the_rack_file() {
        for (text, size) in [
            ("0", 0),
            ("512", 512),
            ("64K", 64 << 10),
            ("2G", 2 << 30),
            ("3 MiB", 3 << 20),
            ("1 GB", 1_000_000_000),
        ] {
            assert_eq!(parse(text), Ok(size), "{text}");
        }
        for text in
            ["", "K", "-1", "1.5M", "64 furlongs", "99999999999999999999", "999999999999999T"]
        {
            assert!(parse(text).is_err(), "{text}");
        }
    }
}
