//! Engines one behind the other.

use zeroize::Zeroizing;

use super::super::course;
use super::super::engines::{Context, OperationRequest, begin};
use super::super::scratch::Scratch;
use super::*;

/// An engine that has all that it needs before the one in front of it has found the message authentic.
struct Early;

impl RunningOperation for Early {
    fn step(&mut self, input: &[u8], _: bool, _: &mut [u8]) -> Result<EngineStep, OperationStatus> {
        Ok(EngineStep { read: input.len(), written: 0, finished: true })
    }
}

/// Opens `message` in front of `second`, fed up to `cut` and from there.
fn open_then(
    second: Box<dyn RunningOperation>,
    message: &[u8],
    cut: usize,
) -> Result<Vec<u8>, OperationStatus> {
    let key = Zeroizing::new(vec![7; 32]);
    let key = Arc::new(Context::new(Operation::Aes256GcmOpen, &key).unwrap());
    let request = OperationRequest { context: Some(&key), ..OperationRequest::default() };
    let open = begin(Operation::Aes256GcmOpen, &request, &mut Spare::default()).unwrap();
    let mut chain = Pipeline::default();
    chain.push(Operation::Aes256GcmOpen, open, EngineBuffer::default());
    chain.push(Operation::Inflate, second, EngineBuffer::default());
    let (mut opened, mut out) = (Vec::new(), vec![0; 64 << 10]);
    for (part, last) in [(&message[..cut], false), (&message[cut..], true)] {
        chain.feed(part.len(), last, |to| to.copy_from_slice(part));
        let progress = chain.pump(&mut out, &mut || true)?;
        opened.extend_from_slice(&out[..progress.written]);
        assert_eq!(progress.finished, last, "of {} bytes, {cut} at first", message.len());
    }
    Ok(opened)
}

#[test]
fn a_chain_is_finished_when_what_opens_its_message_is() {
    let none = OperationRequest::default();
    let engine = |operation, request: &_| begin(operation, request, &mut Spare::default()).unwrap();
    let mut out = [0; 4096];
    // One stored block (RFC 1951, section 3.2.4): of a length that is opened without what follows.
    let deflated = [&[1, 11, 0, !11, !0][..], b"hello world"].concat();
    let key = Zeroizing::new(vec![7; 32]);
    let key = Arc::new(Context::new(Operation::Aes256GcmSeal, &key).unwrap());
    let request = OperationRequest { context: Some(&key), ..none };
    let step = engine(Operation::Aes256GcmSeal, &request).step(&deflated, true, &mut out).unwrap();
    let sealed = out[..step.written].to_vec();
    // The stream is opened whole from the first part, as soon as another tag's length is behind it.
    let mut forged = sealed.clone();
    forged.extend([0; 16]);
    for cut in [1, deflated.len(), sealed.len()] {
        let again = || engine(Operation::Inflate, &none);
        if cut < sealed.len() {
            assert_eq!(open_then(again(), &sealed, cut).as_deref(), Ok(&b"hello world"[..]));
        }
        let outcome = open_then(again(), &forged, cut);
        assert!(outcome.is_err(), "{outcome:?}");
    }
    let mut forged = vec![0; 64];
    forged.extend([0; 16]);
    assert_eq!(open_then(Box::new(Early), &forged, 64), Err(OperationStatus::NotAuthentic));
}

/// Does `input` by a chain of these operations, with the engines that `scratch` has, to where there is room for so much.
fn run_chain(
    scratch: &mut Scratch,
    chain: &[Operation],
    input: &[u8],
    room: usize,
) -> Result<Vec<u8>, OperationStatus> {
    let memory = SharedMemory::create("chain-test", 1 << 20).unwrap();
    let part = |at, length| memory.whole().part(at, length).unwrap();
    part(0, input.len()).copy_from(input);
    let places = (part(0, input.len()), part(1 << 19, room));
    let Scratch { out, spare, .. } = scratch;
    let request = |nth| {
        let length = (nth == 0).then_some(input.len());
        OperationRequest { length, ..OperationRequest::default() }
    };
    let mut course = course::begin(|| Pipeline::begin(chain, request, spare), 0)?;
    // As an engine that is interrupted at some of the places where it can be.
    let mut asked = 0;
    let mut goes_on = || {
        asked += 1;
        asked % 3 != 0
    };
    let mut turns = (0..100_000).map(|_| course.go(&places, input.len(), out, &mut goes_on));
    let status = turns.find_map(|status| status);
    match status.expect("it does not end") {
        OperationStatus::Success => {
            let mut came = vec![0; course.written];
            part(1 << 19, came.len()).copy_to(&mut came);
            course.leave(spare);
            Ok(came)
        }
        status => Err(status),
    }
}

#[test]
fn a_chain_that_is_used_again_puts_out_what_a_new_one_does() {
    use Operation::{
        Blake3, Copy, Crc32c, Deflate, Inflate, Lz4Compress, Sha3_512, Sha256, ZstdCompress,
        ZstdDecompress,
    };
    const ROOM: usize = 1 << 19;
    let chains: [&[Operation]; 9] = [
        &[Copy],
        &[Crc32c],
        &[Blake3],
        &[Lz4Compress],
        &[Lz4Compress, Lz4Compress],
        &[Copy, Copy, Sha256],
        &[ZstdCompress, ZstdDecompress, Sha3_512],
        &[Deflate, Inflate],
        &[Deflate, Crc32c, Copy],
    ];
    let noise = |count: u32| (0..count).map(|n| (n.wrapping_mul(0x9e37_79b9) >> 24) as u8);
    let messages = [vec![], b"short".to_vec(), vec![7; 200_000], noise(150_000).collect()];
    for chain in chains {
        let alone = |message: &Vec<u8>| {
            let out = run_chain(&mut Scratch::default(), chain, message, ROOM);
            out.unwrap_or_else(|status| panic!("{chain:?}: {status}"))
        };
        let expected = messages.each_ref().map(alone);
        for (first, second) in (0..16).map(|pair| (pair / 4, pair % 4)) {
            let mut scratch = Scratch::default();
            for nth in [first, second, first] {
                let out = run_chain(&mut scratch, chain, &messages[nth], ROOM);
                assert!(out.as_ref() == Ok(&expected[nth]), "{chain:?} of {first} and {second}");
                let kept = scratch.spare.take_pipeline();
                assert!(kept.all(|operation, _| chain.contains(&operation)) && !kept.is_empty());
                scratch.spare.put_pipeline(kept);
            }
            // One that ended before its output did leaves nothing, and neither does another chain.
            assert_eq!(
                run_chain(&mut scratch, chain, &messages[3], 1),
                Err(OperationStatus::OutputTooSmall)
            );
            run_chain(&mut scratch, &[Lz4Compress, Crc32c], &messages[first], ROOM).unwrap();
            let out = run_chain(&mut scratch, chain, &messages[second], ROOM);
            assert!(out.as_ref() == Ok(&expected[second]), "{chain:?} of {first} and {second}");
        }
    }
}

/// Of engines that are kept with what is between them, and of those that are kept alone.
#[test]
fn what_is_between_engines_is_wiped_when_a_tenant_goes() {
    const MESSAGE: &[u8] = b"what the tenant before has sent";
    for then in [&[Operation::Sha256][..], &[Operation::Copy, Operation::Aes256Ctr]] {
        let mut scratch = Scratch::default();
        run_chain(&mut scratch, &[Operation::Copy, Operation::Sha256], MESSAGE, 64).unwrap();
        // Of the second kind there is no key, so that its chain ends before it is kept.
        let _ = run_chain(&mut scratch, then, MESSAGE, 64);
        scratch.wipe();
        assert!(scratch.spare.take_pipeline().is_empty());
        let left: Vec<_> = std::iter::repeat_with(|| scratch.spare.take_buffer())
            .take_while(|buffer| !buffer.is_empty())
            .collect();
        assert!(!left.is_empty(), "nothing is kept");
        assert!(left.iter().all(|buffer| buffer.iter().all(|byte| *byte == 0)), "{left:?}");
    }
}
