//! What a thread that is an engine has for itself.

use std::sync::OnceLock;

use rackbus_memory::copy::own_caches;
use rackbus_memory::wiping::WipeFreed;

use zeroize::Zeroize;

use super::clock::EngineClock;
use super::engines::{LEAST_ROOM, Portion, Spare};

/// Memory of a thread that is an engine, which no operation leaves anything in that a later one puts out.
#[derive(Debug)]
pub struct Scratch {
    /// Where output is before it goes to the tenant's memory.
    pub out: Vec<u8>,
    /// Engines that wait for their next operation.
    pub spare: Spare,
    /// What measures what operations took.
    pub clock: EngineClock,
}

impl Default for Scratch {
    fn default() -> Scratch {
        let (spare, clock) = (Spare::default(), EngineClock::default());
        Scratch { out: vec![0; Portion::Message.room()], spare, clock }
    }
}

impl Scratch {
    /// Nothing of what was done stays.
    pub fn wipe(&mut self) {
        let _wiping = WipeFreed::begin();
        self.out.as_mut_slice().zeroize();
        self.spare.wipe();
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        self.wipe();
    }
}

impl Portion {
    /// Bytes that an engine is fed next of the `left` that there are. A short rest goes along: a message of just this
    /// size with its tag, or with what is authenticated only, is done at once.
    pub fn next(self, left: usize) -> usize {
        if left <= self.bytes() + LEAST_ROOM { left } else { self.bytes() }
    }

    /// Bytes that an engine is fed at once.
    pub fn bytes(self) -> usize {
        static BYTES: OnceLock<[usize; 3]> = OnceLock::new();
        // The smallest caches of processors that there are, where the system does not say.
        let [small, whole, message] = *BYTES.get_or_init(|| {
            let [first, second] = own_caches();
            portions(first.max(32 << 10), second.max(256 << 10))
        });
        match self {
            Portion::Small => small,
            Portion::Whole => whole,
            Portion::Message => message,
        }
    }

    /// Bytes that an engine has room for where it puts out what comes of that: a rest that goes along, and a tag, make
    /// it longer.
    pub fn room(self) -> usize {
        self.bytes().max(Portion::Whole.bytes()) + 2 * LEAST_ROOM
    }
}

/// What is fed at once, by the sizes of the first and the second cache. A small portion is in the first one four times:
/// in both messages, and on its way in and out, with as much again for what is brought near and for the engine. A whole
/// one leaves most of the second cache to others; a message is larger than that where to do it in parts costs more than
/// the cache does.
fn portions(first: usize, second: usize) -> [usize; 3] {
    let down = |bytes: usize| 1 << bytes.ilog2();
    let whole = down(second / 16);
    [down(first / 8), whole, whole.max(256 << 10)]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn portions_are_by_the_caches() {
        assert_eq!(portions(32 << 10, 256 << 10), [4 << 10, 16 << 10, 256 << 10]);
        assert_eq!(portions(48 << 10, 2 << 20), [4 << 10, 128 << 10, 256 << 10]);
        let [small, whole] = [Portion::Small, Portion::Whole].map(Portion::bytes);
        assert!(small >= 4 << 10 && small <= whole);
        assert_eq!(
            [0, small, small + 16].map(|left| Portion::Small.next(left)),
            [0, small, small + 16]
        );
        assert_eq!(Portion::Small.next(2 * small), small);
    }
}
