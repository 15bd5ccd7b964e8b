//! What operations cost on this machine's processors, measured.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use rackbus_qos::{EngineProfile, Point};
use rackbus_spec::accel::{OPERATIONS, Operation, OperationStatus};
use zeroize::Zeroizing;

use super::clock::thread_ns;
use super::engines::{Context, OperationRequest};
use super::pipeline::Pipeline;
use super::scratch::Scratch;

/// What is in the messages that are measured.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Content {
    /// All bytes are zero, which compresses best.
    Zeroes,
    /// Words, as a log or a page has them.
    Text,
    /// Random bytes, which do not compress.
    Noise,
    /// Of each [`PARTS`] stretches of 64 bytes so many are random, and the others zero.
    Mixed(u8),
}

/// Into how many parts [`Content::Mixed`] is divided.
pub const PARTS: u8 = 16;

/// The kinds of content that a device measures when it starts.
pub const CONTENTS: [Content; 3] = [Content::Zeroes, Content::Text, Content::Noise];

/// Sizes that a device measures when it starts, in bytes.
const SIZES: [usize; 3] = [64, 4096, 65_536];
/// Rounds of a measurement at least: the first ones find nothing in the caches.
const ROUNDS: u32 = 5;
/// For how long it measures each, at least.
const SHORT: Duration = Duration::from_micros(300);

/// The operations that tenants can rent: those on contexts, and waiting, are the function's own.
pub fn rentable() -> impl Iterator<Item = Operation> {
    let managed = [Operation::CreateContext, Operation::DestroyContext, Operation::Wait];
    OPERATIONS.into_iter().filter(move |operation| !managed.contains(operation))
}

/// Profiles of all operations, by name. Takes some tenths of a second.
pub fn measure_all() -> BTreeMap<String, EngineProfile> {
    let measured = rentable().filter_map(|operation| {
        let points = CONTENTS.into_iter().flat_map(|content| of_content(operation, content));
        let profile = EngineProfile::new(points.collect()).ok()?;
        Some((operation.name().to_owned(), profile))
    });
    measured.collect()
}

/// Costs of one content by size. Small messages of it have other ratios than large ones (a header, a
/// digest), and are still of one kind: that of the largest.
fn of_content(operation: Operation, content: Content) -> Vec<Point> {
    let sizes = SIZES.into_iter();
    let points = sizes.filter_map(|size| measure(operation, size, content, SHORT).ok());
    let points: Vec<Point> = points.collect();
    let ratio = points.last().map_or(0, |point| point.ratio);
    points.into_iter().map(|point| Point { ratio, ..point }).collect()
}

/// Measures one operation on messages that were `size` bytes, or become so where it reverses another,
/// for `length` of processor time at least.
///
/// # Errors
/// The status with which the operation ended.
pub fn measure(
    operation: Operation,
    size: usize,
    content: Content,
    length: Duration,
) -> Result<Point, OperationStatus> {
    let context = context(operation);
    let message = message(operation, size, content, context.as_ref())?;
    let mut scratch = Scratch::default();
    let mut run = || run(operation, &message, context.as_ref(), &mut scratch, &mut |_| {});
    let mut written = run()?;
    let (mut best, mut count, mut rounds) = (f64::MAX, 1u32, 0);
    let begun = thread_ns();
    let length = length.as_nanos() as u64;
    // The least of some rounds: what others on the processor do only adds.
    loop {
        let before = thread_ns();
        for _ in 0..count {
            written = run()?;
        }
        let passed = thread_ns().saturating_sub(before);
        if passed < 20_000 && count < 1 << 20 {
            // Shorter than what the clock itself takes.
            count *= 2;
            continue;
        }
        best = best.min(passed as f64 / f64::from(count));
        rounds += 1;
        if rounds >= ROUNDS && thread_ns().saturating_sub(begun) >= length {
            break;
        }
    }
    let ratio = (written as f64 * 1000.0 / message.len().max(1) as f64).min(f64::from(u32::MAX));
    Ok(Point { message: message.len() as u64, ratio: ratio as u32, cost_ns: best.max(1.0) })
}

/// Does one message, and tells `each` of what comes out at a time; all bytes that came out.
fn run(
    operation: Operation,
    message: &[u8],
    context: Option<&Arc<Context>>,
    scratch: &mut Scratch,
    each: &mut dyn FnMut(&[u8]),
) -> Result<usize, OperationStatus> {
    let request =
        OperationRequest { context, length: Some(message.len()), ..OperationRequest::default() };
    let Scratch { out, spare, .. } = scratch;
    let mut pipeline = Pipeline::begin(&[operation], |_| request, spare)?;
    let portion = pipeline.portion();
    let room = portion.room().min(out.len());
    let out = &mut out[..room];
    let whole = pipeline.whole(
        message.len(),
        out,
        |_| None,
        |head, text| {
            let (first, rest) = message.split_at(head.len());
            head.copy_from_slice(first);
            text.copy_from_slice(rest);
        },
    )?;
    if let Some(written) = whole {
        each(&out[..written]);
        pipeline.leave(spare);
        return Ok(written);
    }
    let (mut read, mut written) = (0, 0);
    loop {
        let progress = pipeline.pump(out, &mut || true)?;
        written += progress.written;
        each(&out[..progress.written]);
        if progress.finished {
            pipeline.leave(spare);
            return Ok(written);
        }
        if progress.hungry {
            let count = portion.next(message.len() - read);
            let last = read + count == message.len();
            pipeline.feed(count, last, |to| to.copy_from_slice(&message[read..read + count]));
            read += count;
        }
    }
}

/// The patterns that scans are measured with, one a line.
pub const PATTERNS: &[u8] = b"error [0-9]+\nGET /[a-z]+\n(foo|bar)baz";

fn context(operation: Operation) -> Option<Arc<Context>> {
    let data: &[u8] = match operation {
        Operation::RegexScan => PATTERNS,
        _ => &[7; 32],
    };
    Context::new(operation, &Zeroizing::new(data.to_vec())).ok().map(Arc::new)
}

/// A message for `operation` of `size` bytes, or what becomes of so many where it reverses another; nothing where
/// that fails.
pub fn sample(operation: Operation, size: usize, content: Content) -> Vec<u8> {
    let context = context(operation);
    message(operation, size, content, context.as_ref()).unwrap_or_default()
}

/// A message for `operation`: what it reverses is done first.
fn message(
    operation: Operation,
    size: usize,
    content: Content,
    context: Option<&Arc<Context>>,
) -> Result<Vec<u8>, OperationStatus> {
    let plain = plain(size, content);
    let forward = match operation {
        Operation::Inflate => Operation::Deflate,
        Operation::ZstdDecompress => Operation::ZstdCompress,
        Operation::Lz4Decompress => Operation::Lz4Compress,
        Operation::Aes256GcmOpen => Operation::Aes256GcmSeal,
        _ => return Ok(plain),
    };
    let mut message = Vec::new();
    let mut scratch = Scratch::default();
    run(forward, &plain, context, &mut scratch, &mut |some| message.extend_from_slice(some))?;
    Ok(message)
}

fn plain(size: usize, content: Content) -> Vec<u8> {
    const WORDS: [&str; 8] =
        ["error 17 ", "GET /index ", "the ", "quick ", "host=alpha ", "200 ", "queue ", "\n"];
    let mut state = 0x9e37_79b9_7f4a_7c15u64;
    let mut next = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        state
    };
    let mut data = Vec::with_capacity(size + 16);
    while data.len() < size {
        match content {
            Content::Zeroes => data.push(0),
            Content::Noise => data.extend_from_slice(&next().to_le_bytes()),
            Content::Mixed(random) => {
                let nth = (data.len() / 64 % usize::from(PARTS)) as u8;
                let word = if nth < random { next() } else { 0 };
                data.extend_from_slice(&word.to_le_bytes());
            }
            Content::Text => data.extend_from_slice(WORDS[(next() % 8) as usize].as_bytes()),
        }
    }
    data.truncate(size);
    data
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What it cannot measure, admission would not know of.
    #[test]
    fn every_operation_is_measured_at_every_size_with_every_content() {
        for operation in rentable() {
            for size in [64, 4096, 65_536, 262_144] {
                for content in CONTENTS {
                    let point = measure(operation, size, content, Duration::ZERO);
                    let point = point.unwrap_or_else(|status| {
                        panic!("{} of {size} B, {content:?}: {status}", operation.name())
                    });
                    assert!(point.message > 0 && point.cost_ns >= 1.0);
                }
            }
        }
    }

    /// In parts the same takes several times as long.
    #[test]
    fn a_message_of_256_kib_is_encrypted_and_decrypted_at_once() {
        for operation in [Operation::Aes256GcmSeal, Operation::Aes256GcmOpen] {
            let size = super::super::engines::Portion::Message.bytes();
            let message = sample(operation, size, Content::Noise);
            let (context, mut scratch) = (context(operation), Scratch::default());
            let mut outputs = Vec::new();
            let mut each = |out: &[u8]| outputs.extend((!out.is_empty()).then_some(out.len()));
            let written =
                run(operation, &message, context.as_ref(), &mut scratch, &mut each).unwrap();
            assert_eq!(outputs, [written], "{}", operation.name());
        }
    }
}
