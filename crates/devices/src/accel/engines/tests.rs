//! Engines against published vectors, against other programs, and against input that is cut anyhow.

use std::io::Write;
use std::process::{Command, Stdio};

use lz4_flex::frame::{BlockMode, BlockSize, FrameEncoder, FrameInfo};
use proptest::prelude::*;
use zeroize::Zeroizing;

use super::*;

fn bytes(hex: &str) -> Vec<u8> {
    let digit = |at: usize| u8::from_str_radix(&hex[at..at + 2], 16).unwrap();
    (0..hex.len()).step_by(2).map(digit).collect()
}

fn context(operation: Operation, data: &[u8]) -> Arc<Context> {
    Arc::new(Context::new(operation, &Zeroizing::new(data.to_vec())).unwrap())
}

/// Feeds `input` in pieces of `piece` bytes, with room for `room` bytes in each step.
fn run(
    operation: Operation,
    request: &OperationRequest<'_>,
    input: &[u8],
    (piece, room): (usize, usize),
) -> Result<Vec<u8>, OperationStatus> {
    run_with(&mut Spare::default(), operation, request, input, (piece, room))
}

/// The same with these spare engines, to which its own goes afterwards.
fn run_with(
    spare: &mut Spare,
    operation: Operation,
    request: &OperationRequest<'_>,
    input: &[u8],
    (piece, room): (usize, usize),
) -> Result<Vec<u8>, OperationStatus> {
    let mut engine = begin(operation, request, spare)?;
    let (mut start, mut end) = (0, piece.min(input.len()));
    let (mut out, mut space) = (Vec::new(), vec![0; room]);
    for _ in 0..10_000_000 {
        let last = end == input.len();
        let step = engine.step(&input[start..end], last, &mut space)?;
        assert!(step.read <= end - start && step.written <= room, "{operation:?}: {step:?}");
        start += step.read;
        out.extend_from_slice(&space[..step.written]);
        if step.finished {
            spare.put(operation, engine);
            return Ok(out);
        }
        if step.read == 0 && step.written == 0 || start == end {
            if last && step.read == 0 && step.written == 0 {
                return Err(OperationStatus::CorruptInput);
            }
            end = (end + piece).min(input.len());
        }
    }
    panic!("{operation:?} does not end");
}

fn whole(
    operation: Operation,
    request: &OperationRequest<'_>,
    input: &[u8],
) -> Result<Vec<u8>, OperationStatus> {
    run(operation, request, input, (1 << 20, 4096))
}

#[test]
fn results_are_those_that_were_published() {
    // NIST SP 800-38A, section F.5.5.
    let key = bytes("603deb1015ca71be2b73aef0857d77811f352c073b6108d72d9810a30914dff4");
    let key = context(Operation::Aes256Ctr, &key);
    let nonce = bytes("f0f1f2f3f4f5f6f7f8f9fafbfcfdfeff").try_into().unwrap();
    let request = OperationRequest {
        nonce,
        context: Some(&key),
        associated: 0,
        ..OperationRequest::default()
    };
    let plain = bytes("6bc1bee22e409f96e93d7e117393172aae2d8a571e03ac9c9eb76fac45af8e51");
    let expected = bytes("601ec313775789a5b7a7f504bbf3d228f443e3ca4d62b59aca84e990cacaf5c5");
    assert_eq!(whole(Operation::Aes256Ctr, &request, &plain).unwrap(), expected);

    // The GCM specification of McGrew and Viega, test case 16.
    let key = bytes("feffe9928665731c6d6a8f9467308308feffe9928665731c6d6a8f9467308308");
    let key = context(Operation::Aes256GcmSeal, &key);
    let mut nonce = [0; 16];
    nonce[..12].copy_from_slice(&bytes("cafebabefacedbaddecaf888"));
    let request = OperationRequest {
        nonce,
        context: Some(&key),
        associated: 20,
        ..OperationRequest::default()
    };
    let associated = bytes("feedfacedeadbeeffeedfacedeadbeefabaddad2");
    let plain = bytes(
        "d9313225f88406e5a55909c5aff5269a86a7a9531534f7da2e4c303d8a318a72\
         1c3c0c95956809532fcf0e2449a6b525b16aedf5aa0de657ba637b39",
    );
    let sealed = bytes(
        "522dc1f099567d07f47f37a32a84427d643a8cdcbfe5c0c97598a2bd2555d1aa\
         8cb08e48590dbb3da7b08b1056828838c5f61e6393ba7a0abcc9f66276fc6ece0f4e1768cddf8853bb2d551b",
    );
    let message = [&associated[..], &plain].concat();
    assert_eq!(whole(Operation::Aes256GcmSeal, &request, &message).unwrap(), sealed);
    let message = [&associated[..], &sealed].concat();
    assert_eq!(whole(Operation::Aes256GcmOpen, &request, &message).unwrap(), plain);

    let none = OperationRequest::default();
    for (operation, input, expected) in [
        // FIPS 180-2, section B.1.
        (
            Operation::Sha256,
            "abc",
            "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad",
        ),
        // FIPS 202, NIST's example of SHA3-512.
        (
            Operation::Sha3_512,
            "abc",
            "b751850b1a57168a5693cd924b6b096e08f621827444f70d884f5d0240d2712e\
          10e116e9192af3c91a7ec57647e3934057340b4cf408d5a56592f8274eec53f0",
        ),
        // BLAKE3's test vectors.
        (Operation::Blake3, "", "af1349b9f5f9a1a6a0404dea36dcc9499bcb25c9adc112b7cc9a93cae41f3262"),
        // The check value of the CRC catalogue, little-endian.
        (Operation::Crc32c, "123456789", "839206e3"),
        // RFC 1951, section 3.2.4: a stored block.
        (Operation::Inflate, "\u{1}\u{3}\u{0}", ""),
    ] {
        let result = whole(operation, &none, input.as_bytes());
        if expected.is_empty() {
            assert_eq!(result, Err(OperationStatus::CorruptInput));
        } else {
            assert_eq!(result.unwrap(), bytes(expected), "{operation:?}");
        }
    }
    assert_eq!(whole(Operation::Inflate, &none, &bytes("010300fcff616263")).unwrap(), b"abc");
}

/// A block that is empty may be anywhere in a frame, and is not its end.
#[test]
fn a_frame_is_over_at_its_end_and_not_at_an_empty_block() {
    let (none, mut spare) = (OperationRequest::default(), Spare::default());
    let out = whole(Operation::Lz4Compress, &none, b"behind").unwrap();
    // The magic number, FLG, BD and the descriptor's checksum; then an empty block that is stored.
    let (head, blocks) = out.split_at(7);
    for empty in [1, 5] {
        let frame = [head, &[0, 0, 0, 0x80].repeat(empty), blocks].concat();
        for cut in [(1 << 20, 4096), (3, 700)] {
            let back = run_with(&mut spare, Operation::Lz4Decompress, &none, &frame, cut);
            assert_eq!(back.as_deref(), Ok(&b"behind"[..]), "{empty} empty blocks");
            let next = run_with(&mut spare, Operation::Lz4Decompress, &none, &out, cut);
            assert_eq!(next.as_deref(), Ok(&b"behind"[..]), "what follows {empty} empty blocks");
        }
    }
    // Nor does the size of one frame's blocks have a part in what the next one is.
    let theirs = FrameInfo::new().block_size(BlockSize::Max4MB).block_mode(BlockMode::Linked);
    let mut large = FrameEncoder::with_frame_info(theirs, Vec::new());
    large.write_all(&message()).unwrap();
    for (frame, expected) in [(large.finish().unwrap(), message()), (out, b"behind".to_vec())] {
        let back = run_with(&mut spare, Operation::Lz4Decompress, &none, &frame, (1 << 20, 4096));
        assert!(back == Ok(expected));
    }
}

#[test]
fn empty_messages_one_after_the_other_are_each_a_frame() {
    let (none, mut spare) = (OperationRequest::default(), Spare::default());
    for message in ["", "", "a", "", ""] {
        let cut = (1 << 20, 4096);
        let out = run_with(&mut spare, Operation::Lz4Compress, &none, message.as_bytes(), cut);
        let back = whole(Operation::Lz4Decompress, &none, &out.unwrap());
        assert_eq!(back.as_deref(), Ok(message.as_bytes()));
    }
}

/// More of the message may follow: what is before it in a chain has not found it authentic until its end.
#[test]
fn a_deflated_stream_is_over_at_the_end_of_the_message_and_nothing_is_behind_it() {
    let none = OperationRequest::default();
    let deflated = whole(Operation::Deflate, &none, b"abc").unwrap();
    for (behind, expected) in [(&b""[..], Ok(true)), (b"?", Err(OperationStatus::CorruptInput))] {
        let mut engine = begin(Operation::Inflate, &none, &mut Spare::default()).unwrap();
        let mut out = [0; 4096];
        let step = engine.step(&deflated, false, &mut out).unwrap();
        assert_eq!((&out[..step.written], step.finished), (&b"abc"[..], false));
        let step = engine.step(behind, true, &mut out);
        assert_eq!(step.map(|step| step.finished), expected);
    }
}

/// A scan that is used again searches for its own context's patterns, from the beginning of the message on.
#[test]
fn a_scan_after_another_one_finds_what_a_new_one_finds() {
    let contexts = [&b"ab\nb$"[..], b"a+"].map(|patterns| context(Operation::RegexScan, patterns));
    let mut spare = Spare::default();
    for (nth, text) in ["ab", "b", "aab", "", "abab"].iter().cycle().take(20).enumerate() {
        let context = Some(&contexts[usize::from(nth % 5 == 4)]);
        let request = OperationRequest { context, ..OperationRequest::default() };
        let expected = whole(Operation::RegexScan, &request, text.as_bytes());
        let cut = (1, 4096);
        let found = run_with(&mut spare, Operation::RegexScan, &request, text.as_bytes(), cut);
        assert!(expected.is_ok() && found == expected, "{text} as the {nth}th");
    }
}

/// What a program of this machine puts out for `input`; nothing where there is no such program.
fn through(program: &str, args: &[&str], input: &[u8]) -> Option<Vec<u8>> {
    let mut command = Command::new(program);
    command.args(args).stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::null());
    let Ok(mut child) = command.spawn() else {
        println!("{program} is not there");
        return None;
    };
    let mut stdin = child.stdin.take().unwrap();
    std::thread::scope(|scope| {
        // One that reads nothing ends with an error, which is looked at below.
        scope.spawn(move || drop(stdin.write_all(input)));
        let output = child.wait_with_output().unwrap();
        assert!(output.status.success(), "{program} {args:?}: {}", output.status);
        Some(output.stdout)
    })
}

fn message() -> Vec<u8> {
    (0..300_000u32).flat_map(|n| (n / 7).to_le_bytes()).collect()
}

/// Where this machine has the libraries' programs.
#[test]
fn other_programs_read_what_is_put_out_and_the_reverse() {
    let (message, none) = (message(), OperationRequest::default());
    for (operation, back, program) in [
        (Operation::ZstdCompress, Operation::ZstdDecompress, "zstd"),
        (Operation::Lz4Compress, Operation::Lz4Decompress, "lz4"),
    ] {
        let out = whole(operation, &none, &message).unwrap();
        let Some(again) = through(program, &["-q", "-c", "-d"], &out) else { continue };
        assert!(again == message, "{program}: {} bytes", again.len());
        let theirs = through(program, &["-q", "-c", "-1"], &message).unwrap();
        assert!(whole(back, &none, &theirs).unwrap() == message, "{program}");
    }
}

/// gzip's format is a head (RFC 1952), raw deflate, a checksum and the length.
#[test]
fn gzip_reads_what_deflate_puts_out_and_the_reverse() {
    const HEAD: [u8; 10] = [0x1f, 0x8b, 8, 0, 0, 0, 0, 0, 0, 255];
    let (message, none) = (message(), OperationRequest::default());
    let mut sum = flate2::Crc::new();
    sum.update(&message);
    let mut file = HEAD.to_vec();
    file.extend(whole(Operation::Deflate, &none, &message).unwrap());
    file.extend(sum.sum().to_le_bytes());
    file.extend(sum.amount().to_le_bytes());
    let Some(again) = through("gzip", &["-d", "-c"], &file) else { return };
    assert!(again == message, "{} bytes", again.len());
    let theirs = through("gzip", &["-n", "-c"], &message).unwrap();
    let deflated = &theirs[HEAD.len()..theirs.len() - 8];
    assert!(whole(Operation::Inflate, &none, deflated).unwrap() == message);
}

#[test]
fn other_programs_compute_the_same_digests() {
    let (message, none) = (message(), OperationRequest::default());
    for (operation, program, args) in [
        (Operation::Sha256, "sha256sum", &[][..]),
        (Operation::Sha256, "openssl", &["dgst", "-sha256", "-r"]),
        (Operation::Sha3_512, "openssl", &["dgst", "-sha3-512", "-r"]),
        (Operation::Blake3, "b3sum", &[]),
    ] {
        for message in [&message[..], &message[..1], b""] {
            let Some(said) = through(program, args, message) else { continue };
            let hex: String = whole(operation, &none, message)
                .unwrap()
                .iter()
                .map(|b| format!("{b:02x}"))
                .collect();
            let said = String::from_utf8(said).unwrap();
            assert_eq!(said.split_whitespace().next(), Some(&*hex), "{program} {args:?}");
        }
    }
}

/// GCM is not among what openssl's command does; counter mode is what it is made of.
#[test]
fn openssl_encrypts_the_same_in_counter_mode() {
    let message = message();
    let key = context(Operation::Aes256Ctr, &[0xa5; 32]);
    // The counter runs over its last 64 bits, and over all of them.
    for nonce in
        [[0; 16], [0xff; 16], [0, 0, 0, 0, 0, 0, 0, 1, 255, 255, 255, 255, 255, 255, 255, 254]]
    {
        let request =
            OperationRequest { nonce, context: Some(&key), ..OperationRequest::default() };
        let hex: String = nonce.iter().map(|byte| format!("{byte:02x}")).collect();
        let args = ["enc", "-aes-256-ctr", "-nosalt", "-K", &"a5".repeat(32), "-iv", &hex];
        let Some(theirs) = through("openssl", &args, &message) else { return };
        assert!(whole(Operation::Aes256Ctr, &request, &message).unwrap() == theirs, "{hex}");
        // And from a place in the middle, as an operation goes on that was done in part.
        for done in [1, 16, 1000, 65_535] {
            let rest = whole(
                Operation::Aes256Ctr,
                &OperationRequest { done, ..request },
                &message[done..],
            );
            assert!(rest.unwrap() == theirs[done..], "{hex} from {done}");
        }
    }
}

/// Which lines have a match of which pattern.
#[test]
fn grep_finds_the_same_lines() {
    const PATTERNS: [&str; 10] = [
        "needle",
        "^GET /[a-z]+ ",
        "[0-9]{3,}$",
        "(?i)error|warn(ing)?",
        "\\b10\\.[0-9]{1,3}\\.0\\b",
        "a.c.e",
        "x*yz+",
        "(ab|ba){2,3}c?",
        "^$",
        "\\x09[[:upper:]]",
    ];
    let words = [
        "needle",
        "GET /index ",
        " GET /a ",
        "1234",
        "12",
        "ERROR",
        "Warning",
        "10.7.0",
        "10.7.05",
        "abcde",
        "a\nc",
        "xxyzz",
        "yz",
        "ababbac",
        "abc",
        "\tX",
        "\tx",
        "\n",
        "\n\n",
        "é",
        "\r",
    ];
    let mut state = 7u32;
    let text: String = std::iter::repeat_with(|| {
        state = state.wrapping_mul(0x0019_660d).wrapping_add(0x3c6e_f35f);
        words[(state >> 16) as usize % words.len()]
    })
    .take(20_000)
    .collect();
    let text = text.trim_end();
    // Of the whole message, where a line begins and ends is what the engine is asked for by `(?m)`, and `\b` is of ASCII.
    let ours = PATTERNS.map(|pattern| format!("(?m-u){pattern}")).join("\n");
    let patterns = context(Operation::RegexScan, ours.as_bytes());
    let request = OperationRequest { context: Some(&patterns), ..OperationRequest::default() };
    let matches = whole(Operation::RegexScan, &request, text.as_bytes()).unwrap();
    let breaks: Vec<usize> = text.match_indices('\n').map(|(at, _)| at).collect();
    let line_of = |place: usize| breaks.partition_point(|at| *at < place) + 1;
    let mut found = vec![std::collections::BTreeSet::new(); PATTERNS.len()];
    for one in matches.chunks_exact(16) {
        let [pattern, place] =
            [0, 8].map(|at| u64::from_le_bytes(one[at..at + 8].try_into().unwrap()) as usize);
        found[pattern].insert(line_of(place));
    }
    for (nth, pattern) in PATTERNS.iter().enumerate() {
        let Some(said) = through("grep", &["-anP", "--", pattern], text.as_bytes()) else { return };
        let number = |line: &[u8]| {
            let digits = line.split(|byte| *byte == b':').next().unwrap();
            std::str::from_utf8(digits).unwrap().parse::<usize>().unwrap()
        };
        let lines = said.split(|byte| *byte == b'\n').filter(|line| !line.is_empty()).map(number);
        assert!(found[nth].iter().copied().eq(lines), "{pattern}: {} lines", found[nth].len());
        assert!(!found[nth].is_empty());
    }
}

/// Bytes that compress somewhat: a few letters, and every so often what was there before.
fn mixed(seed: u64, length: usize, repeats: u64) -> Vec<u8> {
    let (mut state, mut message) = (seed, Vec::with_capacity(length));
    while message.len() < length {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
        let back = (state >> 40) as usize % (message.len() + 1);
        if (state >> 20).is_multiple_of(repeats) && back > 0 {
            let end = (message.len() - back + (state >> 60) as usize * 40).min(message.len());
            message.extend_from_within(message.len() - back..end);
        } else {
            message.push((state >> 59) as u8);
        }
    }
    message.truncate(length);
    message
}

proptest! {
    /// An engine that was used before puts out what a new one does, also of a message of which it knows the length, and
    /// after one that failed.
    #[test]
    fn an_engine_that_is_used_again_puts_out_what_a_new_one_does(
        messages in proptest::collection::vec(
            (proptest::collection::vec(0u8..4, 0..5000), any::<bool>(), any::<bool>()), 1..8,
        ),
    ) {
        let mut spare = Spare::default();
        for (message, known, damage) in messages {
            for (there, back) in [
                (Operation::Deflate, Operation::Inflate),
                (Operation::ZstdCompress, Operation::ZstdDecompress),
                (Operation::Lz4Compress, Operation::Lz4Decompress),
            ] {
                let length = known.then_some(message.len());
                let request = OperationRequest { length, ..OperationRequest::default() };
                let cut = (1000, 700);
                let out = run_with(&mut spare, there, &request, &message, cut).unwrap();
                prop_assert_eq!(&out, &run(there, &request, &message, cut).unwrap());
                if damage {
                    let half = &out[..out.len() / 2];
                    let none = OperationRequest::default();
                    prop_assert!(run_with(&mut spare, back, &none, half, cut).is_err());
                }
                let again = run_with(&mut spare, back, &OperationRequest::default(), &out, cut);
                prop_assert_eq!(again.as_ref(), Ok(&message), "{:?}", back);
            }
            for hash in [Operation::Sha256, Operation::Sha3_512, Operation::Blake3, Operation::Crc32c] {
                let none = OperationRequest::default();
                let out = run_with(&mut spare, hash, &none, &message, (1000, 700));
                prop_assert_eq!(out, run(hash, &none, &message, (5000, 700)), "{:?}", hash);
            }
        }
    }

    /// What compressors put out is the same however their input is cut: how much of a message an engine does at a time
    /// depends on what others want of it.
    #[test]
    fn compressed_messages_do_not_depend_on_how_they_are_cut(
        seed: u64, length in prop_oneof![0usize..2000, 0usize..400_000], repeats in 1u64..200,
        piece in prop_oneof![1usize..9000, 1usize..300_000], room in LEAST_ROOM..40_000, known: bool,
    ) {
        let message = mixed(seed, length, repeats);
        let length = known.then_some(message.len());
        let request = OperationRequest { length, ..OperationRequest::default() };
        for operation in [Operation::Deflate, Operation::ZstdCompress, Operation::Lz4Compress] {
            let out = run(operation, &request, &message, (piece, room)).unwrap();
            let expected = whole(operation, &request, &message).unwrap();
            prop_assert!(out == expected, "{:?}: {} and {} bytes", operation, out.len(), expected.len());
        }
    }

    /// What was compressed and then truncated is not taken for a shorter message, wherever it ends.
    #[test]
    fn truncated_input_is_refused(
        message in proptest::collection::vec(0u8..4, 0..400), known: bool,
    ) {
        for (there, back) in [
            (Operation::Deflate, Operation::Inflate),
            (Operation::ZstdCompress, Operation::ZstdDecompress),
            (Operation::Lz4Compress, Operation::Lz4Decompress),
        ] {
            let length = known.then_some(message.len());
            let request = OperationRequest { length, ..OperationRequest::default() };
            let out = run(there, &request, &message, (1000, 700)).unwrap();
            for end in 0..out.len() {
                let outcome = run(back, &OperationRequest::default(), &out[..end], (1000, 700));
                prop_assert!(outcome.is_err(), "{:?} takes {} of {} bytes", back, end, out.len());
            }
        }
    }

    /// However input is cut and however little room there is, the result is the same, and what
    /// reverses an operation does.
    #[test]
    fn results_do_not_depend_on_how_input_is_cut(
        seed: u64, length in 0usize..20_000, piece in 1usize..9000, room in LEAST_ROOM..9000,
    ) {
        let mut state = seed;
        let message: Vec<u8> = (0..length).map(|n| {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            if n % 3 == 0 { (state >> 60) as u8 } else { b'a' }
        }).collect();
        let key = context(Operation::Aes256Ctr, &[3; 32]);
        let patterns = context(Operation::RegexScan, b"a+\n\\x00.\n[^a]a$");
        let of = |operation: Operation| match operation {
            Operation::RegexScan => &patterns,
            _ => &key,
        };
        for operation in super::super::profile::rentable() {
            let request = OperationRequest { context: Some(of(operation)), ..OperationRequest::default() };
            let reverses = matches!(
                operation,
                Operation::Aes256GcmOpen | Operation::Inflate | Operation::ZstdDecompress
                    | Operation::Lz4Decompress
            );
            if reverses {
                // What was not put out by the other direction ends somehow, and soon.
                let _ = run(operation, &request, &message, (piece, room));
                continue;
            }
            let out = run(operation, &request, &message, (piece, room)).unwrap();
            let back = match operation {
                Operation::Deflate => Operation::Inflate,
                Operation::ZstdCompress => Operation::ZstdDecompress,
                Operation::Lz4Compress => Operation::Lz4Decompress,
                Operation::Aes256GcmSeal => Operation::Aes256GcmOpen,
                _ => {
                    prop_assert_eq!(&out, &whole(operation, &request, &message).unwrap());
                    continue;
                }
            };
            let again = run(back, &request, &out, (piece, room));
            prop_assert_eq!(again.as_ref(), Ok(&message), "{:?}", back);
            let mut changed = out.clone();
            let at = seed as usize % changed.len();
            changed[at] ^= 1 << (seed % 8);
            let damaged = run(back, &request, &changed, (piece, room));
            prop_assert!(back != Operation::Aes256GcmOpen || damaged == Err(OperationStatus::NotAuthentic));
        }
    }
}
