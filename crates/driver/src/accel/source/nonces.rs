//! Nonces and counter blocks of a range that is cut into messages: none is used twice.

use rackbus_spec::accel::Operation;

use super::SourceError;
use crate::accel::MessageWork;

/// Blocks of AES, of which a counter block counts one each.
const AES_BLOCK: u64 = 16;

/// What is done with the message that begins `at` bytes behind the beginning of a range: AES-CTR counts on, as if the
/// range were one message. A counter block that is used twice gives away both texts.
pub(super) fn work_at<'a>(work: &MessageWork<'a>, at: u64) -> MessageWork<'a> {
    let mut work = *work;
    if work.stages.iter().any(|(operation, _)| *operation == Operation::Aes256Ctr) {
        let first = u128::from_be_bytes(work.nonce);
        work.nonce = first.wrapping_add((at / AES_BLOCK).into()).to_be_bytes();
    }
    work
}

/// Refuses what would use a nonce, or a counter block, for more than one message.
pub(super) fn check_nonces(stages: &[(Operation, u16)]) -> Result<(), SourceError> {
    use Operation::{Aes256Ctr, Aes256GcmOpen, Aes256GcmSeal, Copy};
    let operations = || stages.iter().map(|(operation, _)| *operation);
    if operations().any(|it| matches!(it, Aes256GcmSeal | Aes256GcmOpen)) {
        return Err(SourceError::Request(
            "each message that AES-GCM seals has a nonce of its own: ask for one message at a time",
        ));
    }
    // Behind what changes lengths, blocks of one message would be counted like those of the next.
    let behind = operations().skip_while(|it| *it == Copy).skip(1);
    match behind.into_iter().any(|it| it == Aes256Ctr) {
        true => Err(SourceError::Request(
            "AES-CTR counts the drive's bytes, so it is the first operation: ask for one message at a time",
        )),
        false => Ok(()),
    }
}
