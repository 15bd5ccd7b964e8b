//! Engines one behind the other.

use zeroize::Zeroizing;

use super::super::engines::{Context, OperationRequest, begin};
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
    chain.push(Operation::Aes256GcmOpen, open, Vec::new());
    chain.push(Operation::Inflate, second, Vec::new());
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
