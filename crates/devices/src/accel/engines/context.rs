//! What a tenant keeps in the accelerator: keys and compiled patterns.

use std::fmt;

use aes::Aes256Enc;
use aes::cipher::KeyInit;
use rackbus_memory::wiping::WipeFreed;
use rackbus_spec::accel::{Operation, OperationStatus};
use regex_automata::hybrid::dfa::DFA;
use zeroize::{Zeroize, Zeroizing};

use super::aws_lc::{CounterKey, GcmKey};
use super::regex;

/// A context. What is in it is wiped when it is dropped.
pub enum Context {
    /// A key, as AES uses it.
    Key(Box<CipherKey>),
    /// Patterns, compiled into one automaton.
    Patterns(Patterns),
}

/// Patterns, compiled into one automaton. It is wiped as it is freed, wherever that is.
pub struct Patterns(Option<Box<DFA>>);

impl Patterns {
    /// The automaton, which is there until this is dropped.
    pub fn automaton(&self) -> Option<&DFA> {
        self.0.as_deref()
    }
}

impl Drop for Patterns {
    fn drop(&mut self) {
        let _wiping = WipeFreed::begin();
        self.0 = None;
    }
}

impl fmt::Debug for Context {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Context::Key(_) => "Key",
            Context::Patterns(_) => "Patterns",
        })
    }
}

/// A key of 32 bytes, expanded for each library. All of them wipe theirs.
pub struct CipherKey {
    /// For GCM of messages that are done in parts.
    pub cipher: Aes256Enc,
    /// For GCM of whole messages.
    pub gcm: GcmKey,
    /// For counter mode, in whatever parts.
    pub counter: CounterKey,
}

impl CipherKey {
    /// The key that these bytes are. What that left on the stack is wiped.
    fn new(data: &[u8]) -> Result<Box<CipherKey>, OperationStatus> {
        let key = CipherKey::make(data);
        wipe_stack();
        key
    }

    #[inline(never)]
    fn make(data: &[u8]) -> Result<Box<CipherKey>, OperationStatus> {
        let wrong = OperationStatus::InvalidField;
        let cipher = Aes256Enc::new_from_slice(data).map_err(|_| wrong)?;
        let (gcm, counter) = (GcmKey::new(data), CounterKey::new(data));
        Ok(Box::new(CipherKey { cipher, gcm: gcm.ok_or(wrong)?, counter: counter.ok_or(wrong)? }))
    }
}

/// Overwrites what expanding and moving keys left on this thread's stack, below its caller.
#[inline(never)]
pub fn wipe_stack() {
    let mut below = [0u8; 64 << 10];
    below.zeroize();
}

impl Context {
    /// A context for `operation`, of what a tenant sent: 32 bytes of a key, or patterns, one a line.
    ///
    /// # Errors
    /// The status that creating it ends with.
    pub fn new(
        operation: Operation,
        data: &Zeroizing<Vec<u8>>,
    ) -> Result<Context, OperationStatus> {
        // Patterns are compiled by way of copies of their text.
        let _wiping = WipeFreed::begin();
        match operation {
            Operation::Aes256Ctr | Operation::Aes256GcmSeal | Operation::Aes256GcmOpen => {
                Ok(Context::Key(CipherKey::new(data)?))
            }
            Operation::RegexScan => {
                let automaton = regex::compile(data).map(Box::new)?;
                Ok(Context::Patterns(Patterns(Some(automaton))))
            }
            _ => Err(OperationStatus::InvalidOperation),
        }
    }
}
