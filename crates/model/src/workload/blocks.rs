//! Traces of block I/O as text: what was read and written, when, and how many bytes. Three formats:
//!
//! * `fio-iolog`: what fio writes with `write_iolog`, version 2 or 3. Times of lines, and of version 2 those of
//!   `wait` actions, are in microseconds: "Wait for `offset` microseconds", relative to the wait before (fio's HOWTO,
//!   "Trace file format v2"). A wait has a length that tells nothing, as all I/O actions have one, or none;
//! * `fio-log`: fio's logs of each I/O (`write_lat_log`, `write_bw_log` or `write_iops_log` without
//!   `log_avg_msec`): milliseconds, a value, the direction, bytes. I/Os of the same millisecond are spread
//!   evenly over it;
//! * `blkparse`: the default lines of blkparse(1), of which what was queued (`Q`) counts, or what was issued
//!   (`D`) where nothing was queued.
//!
//! Where on the drive the bytes are is read and checked, and of no use to the model.

use std::ops::Range;

use rackbus_fabric::text::{FileError, Parsed, wrong};

use crate::time::Time;

/// Bytes of a block I/O at most: 1 GiB.
const MOST: u64 = 1 << 30;
/// Bytes of a sector, as Linux counts them.
const SECTOR: u64 = 512;

/// The formats that are read.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Format {
    /// fio's `write_iolog`, versions 2 and 3.
    FioIolog,
    /// fio's log of each I/O's latency, bandwidth or number.
    FioLog,
    /// What blkparse prints when it is told nothing else.
    Blkparse,
}

/// The formats by their names in a workload.
pub(super) const FORMATS: [(&str, Format); 3] =
    [("fio-iolog", Format::FioIolog), ("fio-log", Format::FioLog), ("blkparse", Format::Blkparse)];

/// A read or write of a trace.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct BlockIo {
    /// When it came, from the first one on.
    pub at: Time,
    /// Whether it is a write.
    pub write: bool,
    /// Bytes that it reads or writes, from 1 to 1 GiB.
    pub bytes: u64,
}

/// A trace of block I/O.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct BlockTrace {
    /// Its reads and writes by the time at which they came; of equals, in the file's order. At least one.
    pub ios: Vec<BlockIo>,
    /// What was neither read nor write: flushes, discards, syncs.
    pub left_out: u64,
    /// Whether the file tells when they came.
    pub timed: bool,
}

impl BlockTrace {
    /// From its first I/O to its last.
    pub fn length(&self) -> Time {
        self.ios.last().map_or(Time::ZERO, |io| io.at)
    }

    /// Bytes of an I/O on average, at least 1.
    pub fn mean_bytes(&self) -> u64 {
        let all: u64 = self.ios.iter().map(|io| io.bytes).sum();
        (all / (self.ios.len() as u64).max(1)).max(1)
    }

    /// What comes from `skip` on, which is then its beginning.
    pub(super) fn skip(&mut self, skip: Time) {
        self.ios.retain(|io| io.at >= skip);
        let first = self.ios.first().map_or(Time::ZERO, |io| io.at);
        self.ios.iter_mut().for_each(|io| io.at = io.at.since(first));
    }
}

/// Reads a trace's `text`; `file` is its name, for messages. Without a format, its first line tells which.
///
/// # Errors
/// [`FileError`] for the first line that is none of the format, and for a trace of nothing.
pub fn parse(file: &str, format: Option<Format>, text: &str) -> Result<BlockTrace, FileError> {
    read(format, text).map_err(|problem| problem.locate(file, text))
}

fn read(format: Option<Format>, text: &str) -> Parsed<BlockTrace> {
    let format = match format {
        Some(format) => format,
        None => guess(text)?,
    };
    let mut trace = match format {
        Format::FioIolog => iolog(text)?,
        Format::FioLog => log(text)?,
        Format::Blkparse => blkparse(text)?,
    };
    if trace.ios.is_empty() {
        return wrong(0..0, "the trace has no read and no write", "give one of block I/O");
    }
    trace.ios.sort_by_key(|io| io.at);
    trace.skip(Time::ZERO);
    Ok(trace)
}

fn guess(text: &str) -> Parsed<Format> {
    let Some(first) = lines(text).next() else {
        return wrong(0..0, "the trace is empty", "give one of block I/O");
    };
    if first.text.trim_start().starts_with("fio version ") {
        Ok(Format::FioIolog)
    } else if first.text.matches(',').count() >= 3 {
        Ok(Format::FioLog)
    } else if is_device(first.fields()[0]) {
        Ok(Format::Blkparse)
    } else {
        let what = "this is the first line of no trace that is known";
        let allowed = "traces are fio's (write_iolog, or a log of each I/O) or blkparse's; `format` tells which";
        wrong(first.span(first.text.trim()), what, allowed)
    }
}

/// A line that is not blank, and where it is.
#[derive(Clone, Copy)]
struct Line<'a> {
    at: usize,
    text: &'a str,
}

impl<'a> Line<'a> {
    fn fields(&self) -> Vec<&'a str> {
        self.text.split_whitespace().collect()
    }

    /// The place of a part of it in the file.
    fn span(&self, part: &str) -> Range<usize> {
        let inside = (part.as_ptr() as usize).saturating_sub(self.text.as_ptr() as usize);
        let from = self.at + inside.min(self.text.len());
        from..from + part.len()
    }

    fn number(&self, part: &str, allowed: &str) -> Parsed<u64> {
        match part.parse() {
            Ok(number) => Ok(number),
            Err(_) => wrong(self.span(part), format!("`{}` is no number", short(part)), allowed),
        }
    }

    fn bytes(&self, part: &str, unit: u64, allowed: &str) -> Parsed<u64> {
        let number = self.number(part, allowed)?;
        match number.checked_mul(unit).filter(|bytes| *bytes <= MOST) {
            Some(bytes) => Ok(bytes),
            None => wrong(self.span(part), format!("`{part}` is too much"), "at most 1 GiB"),
        }
    }

    /// The time of so many units, each of `unit` picoseconds.
    fn time(&self, part: &str, unit: u64, allowed: &str) -> Parsed<Time> {
        let number = self.number(part, allowed)?;
        match number.checked_mul(unit).filter(|ps| *ps < u64::MAX / 4) {
            Some(ps) => Ok(Time::from_ps(ps)),
            None => wrong(self.span(part), format!("`{part}` is too late"), "at most 50 days"),
        }
    }
}

/// A part of a line, for messages.
fn short(part: &str) -> String {
    part.chars().take(40).collect()
}

fn lines(text: &str) -> impl Iterator<Item = Line<'_>> {
    let mut at = 0;
    let all = text.split_inclusive('\n').map(move |line| {
        let here = at;
        at += line.len();
        Line { at: here, text: line.trim_end_matches(['\n', '\r']) }
    });
    all.filter(|line| !line.text.trim().is_empty())
}

const US: u64 = 1_000_000;
const MS: u64 = 1_000_000_000;

const IOLOG: &str = "lines are `[MICROSECONDS] FILE ACTION [OFFSET LENGTH]`, actions read, write, sync, datasync, \
                     sync_file_range, trim, add, open, close and, in version 2, wait";

fn iolog(text: &str) -> Parsed<BlockTrace> {
    let mut all = lines(text);
    let version = match all.next() {
        Some(line) if line.text.trim() == "fio version 2 iolog" => 2,
        Some(line) if line.text.trim() == "fio version 3 iolog" => 3,
        Some(line) => {
            let what = "this is no first line of an iolog";
            return wrong(line.span(line.text), what, "it is `fio version 3 iolog`, or 2");
        }
        None => {
            return wrong(0..0, "the trace is empty", "its first line is `fio version 3 iolog`");
        }
    };
    let mut trace = BlockTrace { timed: version == 3, ..BlockTrace::default() };
    let mut now = Time::ZERO;
    for line in all {
        let fields = line.fields();
        let own = match version {
            3 => {
                now = line.time(fields[0], US, IOLOG)?;
                &fields[1..]
            }
            _ => &fields[..],
        };
        match *own {
            [_, "read" | "write", offset, length] => {
                line.number(offset, IOLOG)?;
                let bytes = line.bytes(length, 1, IOLOG)?;
                trace.add(BlockIo { at: now, write: own[1] == "write", bytes });
            }
            [_, "wait", span, ref length @ ..] if version == 2 && length.len() < 2 => {
                length.iter().try_for_each(|length| line.number(length, IOLOG).map(|_| ()))?;
                let span = line.time(span, US, IOLOG)?;
                let Some(later) = now.ps().checked_add(span.ps()).filter(|at| *at < u64::MAX / 4)
                else {
                    return wrong(line.span(own[2]), "the waits are too long", "at most 50 days");
                };
                trace.timed |= span > Time::ZERO;
                now = Time::from_ps(later);
            }
            [_, "sync" | "datasync" | "sync_file_range" | "trim", ..] => trace.left_out += 1,
            [_, "add" | "open" | "close"] => {}
            _ => {
                let what = format!("`{}` is no line of an iolog", short(line.text.trim()));
                return wrong(line.span(line.text.trim()), what, IOLOG);
            }
        }
    }
    Ok(trace)
}

const LOG: &str = "lines are `MILLISECONDS, VALUE, DIRECTION, BYTES[, OFFSET[, ...]]`, directions 0 (read), 1 \
                   (write) and 2 (trim)";

fn log(text: &str) -> Parsed<BlockTrace> {
    let mut trace = BlockTrace { timed: true, ..BlockTrace::default() };
    for line in lines(text) {
        let fields: Vec<&str> = line.text.split(',').map(str::trim).collect();
        let [ms, value, direction, bytes, ..] = fields[..] else {
            let what = format!("`{}` is no line of a log", short(line.text.trim()));
            return wrong(line.span(line.text.trim()), what, LOG);
        };
        let at = line.time(ms, MS, LOG)?;
        line.number(value, LOG)?;
        match direction {
            "2" => trace.left_out += 1,
            "0" | "1" => match line.bytes(bytes, 1, LOG)? {
                0 => {
                    let allowed = "run fio without `log_avg_msec`, so that each I/O has a line";
                    return wrong(line.span(bytes), "a line stands for several I/Os", allowed);
                }
                size => trace.add(BlockIo { at, write: direction == "1", bytes: size }),
            },
            _ => {
                let what = format!("`{}` is no direction", short(direction));
                return wrong(line.span(direction), what, LOG);
            }
        }
    }
    trace.ios.sort_by_key(|io| io.at);
    for same in trace.ios.chunk_by_mut(|one, other| one.at == other.at) {
        let apart = MS / same.len() as u64;
        for (nth, io) in same.iter_mut().enumerate() {
            io.at += Time::from_ps(apart * nth as u64);
        }
    }
    Ok(trace)
}

const BLKPARSE: &str = "lines are `MAJOR,MINOR CPU SEQUENCE SECONDS PID ACTION RWBS SECTOR + SECTORS [PROCESS]`, \
                        as blkparse writes them by default";

/// Whether a field is `MAJOR,MINOR`.
fn is_device(field: &str) -> bool {
    let number = |text: &str| !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit());
    field.split_once(',').is_some_and(|(major, minor)| number(major) && number(minor))
}

fn blkparse(text: &str) -> Parsed<BlockTrace> {
    let (mut queued, mut issued) = [(); 2].map(|()| BlockTrace::default()).into();
    let mut device: Option<&str> = None;
    for line in lines(text) {
        let fields = line.fields();
        if !is_device(fields[0]) {
            // What it adds up at the end.
            if fields[0].starts_with("CPU") || fields[0] == "Total" {
                break;
            }
            let what = format!("`{}` is no line of blkparse", short(line.text.trim()));
            return wrong(line.span(line.text.trim()), what, BLKPARSE);
        }
        let [of, _, _, seconds, _, action, rest @ ..] = &fields[..] else {
            return wrong(line.span(line.text.trim()), "the line is too short", BLKPARSE);
        };
        let trace: &mut BlockTrace = match *action {
            "Q" => &mut queued,
            "D" => &mut issued,
            _ => continue,
        };
        let [rwbs, place @ ..] = rest else {
            return wrong(line.span(line.text.trim()), "the line is too short", BLKPARSE);
        };
        if *device.get_or_insert(of) != *of {
            let what = format!("a second device, `{of}`, beside `{}`", device.unwrap_or_default());
            return wrong(line.span(of), what, "give the trace of one device (blkparse -i DEVICE)");
        }
        let at = seconds_of(&line, seconds)?;
        let direction = rwbs.bytes().find(|byte| b"RWDN".contains(byte));
        let write = match direction {
            Some(b'R') => false,
            Some(b'W') => true,
            _ => {
                trace.left_out += 1;
                continue;
            }
        };
        match place {
            [sector, "+", sectors, ..] => {
                line.number(sector, BLKPARSE)?;
                let bytes = line.bytes(sectors, SECTOR, BLKPARSE)?;
                trace.add(BlockIo { at, write, bytes });
            }
            // A flush is a write of nothing.
            _ if write => trace.left_out += 1,
            _ => return wrong(line.span(rwbs), "a read of nothing", BLKPARSE),
        }
    }
    let trace = if queued.ios.is_empty() { issued } else { queued };
    Ok(BlockTrace { timed: true, ..trace })
}

/// Seconds and nanoseconds, as `12.000345678`.
fn seconds_of(line: &Line<'_>, field: &str) -> Parsed<Time> {
    let (whole, part) = field.split_once('.').unwrap_or((field, "0"));
    let seconds = line.time(whole, 1_000 * MS, BLKPARSE)?;
    let digits: String = part.chars().chain("000000000000".chars()).take(12).collect();
    match digits.parse::<u64>() {
        Ok(ps) if part.len() <= 12 => Ok(seconds + Time::from_ps(ps)),
        _ => wrong(line.span(field), format!("`{}` is no time", short(field)), BLKPARSE),
    }
}

impl BlockTrace {
    /// Adds an I/O; one of no bytes is left out, as a flush is.
    fn add(&mut self, io: BlockIo) {
        match io.bytes {
            0 => self.left_out += 1,
            _ => self.ios.push(io),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn io(ns: u64, write: bool, bytes: u64) -> BlockIo {
        BlockIo { at: Time::from_ns(ns), write, bytes }
    }

    #[test]
    fn all_formats_are_told_apart_and_read() {
        let cases = [
            (
                "fio version 3 iolog\n5 /dev/sda add\n5 /dev/sda open\n10 /dev/sda write 8192 4096\n\
                 12 /dev/sda sync 0 0\n30 /dev/sda read 0 512\n31 /dev/sda close\n",
                vec![io(0, true, 4096), io(20_000, false, 512)],
                1,
            ),
            (
                "fio version 2 iolog\n/dev/sda add\n/dev/sda open\n/dev/sda read 0 4096\n\
                 /dev/sda wait 150\n/dev/sda trim 0 4096\n/dev/sda write 4096 1024\n",
                vec![io(0, false, 4096), io(150_000, true, 1024)],
                1,
            ),
            // fio's own lines have four fields.
            (
                "fio version 2 iolog\n/dev/sda read 0 4096\n/dev/sda wait 150 0\n/dev/sda wait 50 7\n\
                 /dev/sda write 4096 1024\n",
                vec![io(0, false, 4096), io(200_000, true, 1024)],
                0,
            ),
            (
                "1, 8100, 0, 4096, 0, 0\n3, 9100, 1, 8192, 4096, 0\r\n3, 9000, 0, 512, 0, 0\n\
                 4, 1, 2, 4096, 0, 0\n",
                vec![io(0, false, 4096), io(2_000_000, true, 8192), io(2_500_000, false, 512)],
                1,
            ),
            (
                "  8,0    3        1     0.000000000   697  G   W 223490 + 8 [kjournald]\n\
                 \x20 8,0    3        2     0.000001829   697  Q   R 223490 + 8 [kjournald]\n\
                 \x20 8,0    3        3     0.000002197   697  Q  WS 223498 + 16 [kjournald]\n\
                 \x20 8,0    3        4     0.000002300   697  Q FWS [kjournald]\n\
                 \x20 8,0    3        5     0.000002400   697  Q   D 0 + 64 [fstrim]\n\
                 \x20 8,0    3        6     0.000003000   697  D   R 223490 + 24 [kjournald]\n\
                 \x20 8,0    3        0     0.000000000     0  m   N cfq workload slice:300\n\
                 CPU3 (8,0):\n Reads Queued: 1, 4KiB\n",
                vec![io(0, false, 4096), io(368, true, 8192)],
                2,
            ),
            (
                "259,0 0 1 1.5 7 D W 0 + 1 [x]\n259,0 0 2 2.25 7 C W 0 + 1 [0]\n",
                vec![io(0, true, 512)],
                0,
            ),
        ];
        for (text, ios, left_out) in cases {
            let trace = parse("t", None, text).unwrap();
            assert_eq!((&trace.ios, trace.left_out), (&ios, left_out), "{text}");
            assert!(trace.timed);
        }
        let untimed = "fio version 2 iolog\nx read 0 4096\nx read 4096 4096\n";
        assert!(!parse("t", None, untimed).unwrap().timed);
    }

    #[test]
    fn what_is_wrong_is_named_with_its_place() {
        let cases = [
            ("", "t:1:1: the trace is empty"),
            ("\n hello\n", "t:2:2: this is the first line of no trace"),
            ("fio version 3 iolog\n", "t:1:1: the trace has no read and no write"),
            ("fio version 3 iolog\nx x read 0 1\n", "t:2:1: `x` is no number"),
            ("fio version 3 iolog\n1 x read 0\n", "t:2:1: `1 x read 0` is no line of an iolog"),
            ("fio version 3 iolog\n1 x read 0 2000000000\n", "t:2:12: `2000000000` is too much"),
            ("fio version 2 iolog\nx wait 99999999999999\n", "t:2:8: `99999999999999` is too late"),
            ("fio version 2 iolog\nx wait 1 y\n", "t:2:10: `y` is no number"),
            ("fio version 2 iolog\nx wait 1 2 3\n", "t:2:1: `x wait 1 2 3` is no line of an iolog"),
            ("fio version 3 iolog\n1 x wait 1 0\n", "t:2:1: `1 x wait 1 0` is no line of an iolog"),
            ("1, 2, 0, 0\n", "t:1:10: a line stands for several I/Os"),
            ("1, 2, 5, 4096\n", "t:1:7: `5` is no direction"),
            ("1, 2, 0, 4096\n1 2\n", "t:2:1: `1 2` is no line of a log"),
            ("8,0 1 1 0.1 1 Q R 0 + 8\n8,16 1 1 0.1 1 Q R 0 + 8\n", "t:2:1: a second device"),
            ("8,0 1 1 x 1 Q R 0 + 8\n", "t:1:9: `x` is no number"),
            ("8,0 1 1 0.1\n", "t:1:1: the line is too short"),
            ("8,0 1 1 0.1 1 Q R 0 + 8\nrubbish\n", "t:2:1: `rubbish` is no line of blkparse"),
        ];
        for (text, expected) in cases {
            let error = parse("t", None, text).unwrap_err().to_string();
            assert!(error.starts_with(expected), "{error}\n{expected}");
        }
    }
}
