//! Shared memory, where the machine is busy.

use std::time::Instant;

use rackbus_attach::{AttachError, Refusal};

use super::PATIENCE;

/// What a node answers that is asked for something of another one's: again where the other one has not answered in the time
/// that its node gives it, which are three seconds, whatever is asked for.
pub fn answered<T>(ask: impl Fn() -> Result<T, AttachError>) -> Result<T, AttachError> {
    let begun = Instant::now();
    loop {
        match ask() {
            Err(AttachError::Refused(Refusal::NotResponding)) if begun.elapsed() < PATIENCE => {}
            answer => return answer,
        }
    }
}
