//! Memory between engines. What it had is zeroed before it is freed: what an operation had there that failed, or was given up
//! in the middle, is kept for nobody, and deciphered text may be among it.

use std::ops::{Deref, DerefMut};

use zeroize::Zeroize;

/// Memory for an engine's input. It only grows.
#[derive(Debug, Default)]
pub struct EngineBuffer(Vec<u8>);

impl EngineBuffer {
    /// Makes it `length` bytes long at least; what it has stays, and zeroes are behind that.
    #[inline]
    pub fn grow(&mut self, length: usize) {
        if self.0.len() < length {
            if self.0.capacity() < length {
                self.move_to(length);
            }
            self.0.resize(length, 0);
        }
    }

    /// Takes other memory, for `length` bytes.
    #[cold]
    fn move_to(&mut self, length: usize) {
        let mut larger = Vec::with_capacity(length.max(2 * self.0.len()));
        larger.extend_from_slice(&self.0);
        *self = EngineBuffer(larger);
    }

    /// Zeroes all of it.
    pub fn wipe(&mut self) {
        self.0.as_mut_slice().zeroize();
    }
}

impl Drop for EngineBuffer {
    fn drop(&mut self) {
        self.wipe();
    }
}

impl Deref for EngineBuffer {
    type Target = [u8];

    #[inline]
    fn deref(&self) -> &[u8] {
        &self.0
    }
}

impl DerefMut for EngineBuffer {
    #[inline]
    fn deref_mut(&mut self) -> &mut [u8] {
        &mut self.0
    }
}
