//! What a tenant says to an accelerator: descriptors, and messages for each engine.

use std::sync::Arc;

use rackbus_devices::accel::check;
use rackbus_devices::accel::engines::{Context, LEAST_ROOM, OperationRequest, Spare, begin};
use rackbus_spec::accel::{DESCRIPTOR_SIZE, Descriptor, Operation};
use zerocopy::{FromBytes, IntoBytes};
use zeroize::Zeroizing;

/// Bytes that an engine may put out before it must have ended.
const MOST: usize = 1 << 22;

/// A descriptor, and the message that it is about.
pub fn run(data: &[u8]) {
    let Some((head, message)) = data.split_at_checked(DESCRIPTOR_SIZE) else { return };
    let Ok(descriptor) = Descriptor::read_from_bytes(head) else { return };
    if let Ok(plan) = check(&descriptor) {
        assert!(!plan.operations().is_empty(), "a plan without operations");
        assert!(descriptor.associated <= descriptor.input_length, "more than the input");
    }
    let Some(operation) = Operation::from_number(descriptor.stages[0]) else { return };
    // Half of the message is patterns, or its beginning a key.
    let (made_of, message) = message.split_at(message.len() / 2);
    let made_of = match operation {
        Operation::RegexScan => made_of.to_vec(),
        _ => vec![descriptor.nonce[0]; 32],
    };
    let context = Context::new(operation, &Zeroizing::new(made_of)).ok().map(Arc::new);
    let associated = descriptor.associated.min(message.len() as u32);
    let request = OperationRequest {
        nonce: descriptor.nonce,
        associated,
        context: context.as_ref(),
        ..OperationRequest::default()
    };
    let piece = usize::from(descriptor.id).max(1);
    let room = LEAST_ROOM + usize::from(descriptor.contexts[1]);
    let mut spare = Spare::default();
    let first = put_out(operation, &request, (message, piece), room, &mut spare);
    // What an engine had of the message before has no part in what comes out.
    let again = put_out(operation, &request, (message, piece), room, &mut spare);
    assert!(first.is_none() || first == again, "{operation:?} differs the second time");
}

/// What an operation puts out for a message, of which it is fed a piece more whenever it needs more; nothing where it does not
/// end well. The engine waits for the next one then.
fn put_out(
    operation: Operation,
    request: &OperationRequest<'_>,
    (message, piece): (&[u8], usize),
    room: usize,
    spare: &mut Spare,
) -> Option<Vec<u8>> {
    let mut engine = begin(operation, request, spare).ok()?;
    let (mut out, mut all) = (vec![0; room], Vec::new());
    let (mut start, mut end) = (0, piece.min(message.len()));
    while all.len() < MOST {
        let last = end == message.len();
        let step = engine.step(&message[start..end], last, &mut out).ok()?;
        assert!(step.read <= end - start && step.written <= out.len(), "{operation:?}: {step:?}");
        start += step.read;
        all.extend_from_slice(&out[..step.written]);
        if step.finished {
            spare.put(operation, engine);
            return Some(all);
        }
        let idle = step.read == 0 && step.written == 0;
        if idle && last {
            return None;
        }
        if idle || start == end {
            end = (end + piece).min(message.len());
        }
    }
    None
}

/// A message for each operation.
pub fn seeds() -> Vec<Vec<u8>> {
    let of = |operation: Operation| {
        let stages = [operation as u8, 0, 0, 0];
        let descriptor = Descriptor { id: 100, stages, input_length: 64, ..Descriptor::default() };
        [descriptor.as_bytes(), b"(a|b)+c\n[0-9]{2,5}", b"aaaaaaaaaabbbabc 1234 \x03\x00"].concat()
    };
    rackbus_spec::accel::OPERATIONS.map(of).to_vec()
}
