//! AWS-LC by its C functions. They take addresses, so that they may read a tenant's memory where it is, and counter mode may
//! write there too, which saves the copies that a library takes that wants slices.
//!
//! Others change that memory meanwhile, and that is sound:
//!
//! * No Rust reference to it exists: an address and a length go from a [`DmaSlice`], which has checked them and keeps
//!   the memory mapped, to code in C and assembly. Memory that somebody truncates is replaced under it as under any
//!   other access.
//! * What these functions do next, how much they read and where they write depends on lengths and keys alone, never on the
//!   bytes: whatever those become, the same memory is accessed.
//! * Each byte of a text that is sealed or hashed is read once. What is sealed goes to memory of the engine first: on some
//!   processors its tag is computed of what is read back, and nobody else may have changed that. Nothing that has a
//!   tag is opened from here: that would be read twice, and what is deciphered has to be what was authenticated.
#![allow(unsafe_code)] // C functions, and addresses in memory of which no Rust reference may exist

use std::ffi::c_uint;
use std::mem::MaybeUninit;
use std::ptr;

use aws_lc_sys as aws_lc;
use rackbus_memory::DmaSlice;
use zeroize::Zeroize;

/// Bytes of a key, of a block and a tag, and of GCM's nonce.
const KEY: usize = 32;
pub const BLOCK: usize = 16;
pub const NONCE: usize = 12;

/// Where a text is that is to be sealed.
pub enum SealedText<'a> {
    /// In the place of what comes out: so many bytes.
    InPlace(usize),
    /// In memory that nobody changes.
    Own(&'a [u8]),
    /// In memory of a tenant's, who may change it meanwhile.
    There(DmaSlice<'a>),
}

/// A key of AES-256-GCM, expanded. It is wiped when it is dropped.
pub struct GcmKey(Box<aws_lc::EVP_AEAD_CTX>);

// SAFETY: its pointer is to a constant of the library's, and nothing changes it until it is dropped: the library says that
// threads may use one at the same time.
unsafe impl Send for GcmKey {}
// SAFETY: as above.
unsafe impl Sync for GcmKey {}

impl GcmKey {
    /// The key that these 32 bytes are; nothing of any other length.
    pub fn new(key: &[u8]) -> Option<GcmKey> {
        if key.len() != KEY {
            return None;
        }
        // SAFETY: all zeroes are a context of the library's that is not begun. The key is as long as is said, and the
        // context is where it stays.
        unsafe {
            aws_lc::CRYPTO_library_init();
            let mut context = GcmKey(Box::new(MaybeUninit::zeroed().assume_init()));
            let kind = aws_lc::EVP_aead_aes_256_gcm();
            let (start, none) = (key.as_ptr(), ptr::null_mut());
            let made = aws_lc::EVP_AEAD_CTX_init(&mut *context.0, kind, start, KEY, BLOCK, none);
            (made == 1).then_some(context)
        }
    }

    /// Seals a text to the beginning of `out`, and puts its tag behind that: so many bytes. `None` where there is no room.
    pub fn seal(
        &self,
        nonce: &[u8; NONCE],
        head: &[u8],
        text: SealedText<'_>,
        out: &mut [u8],
    ) -> Option<usize> {
        let to = out.as_mut_ptr();
        let (from, length) = match text {
            SealedText::InPlace(length) => (to.cast_const(), length),
            SealedText::Own(text) => (text.as_ptr(), text.len()),
            SealedText::There(text) => (text.as_ptr().cast_const(), text.len()),
        };
        if out.len() < length.checked_add(BLOCK)? {
            return None;
        }
        let mut tag_length = 0;
        // SAFETY: the text is a slice, the beginning of `out`, or mapped as long as its slice is there, and then others may
        // change it. There is room for as much and the tag in `out`, and the others are slices.
        let sealed = unsafe {
            aws_lc::EVP_AEAD_CTX_seal_scatter(
                &raw const *self.0,
                to,
                to.add(length),
                &mut tag_length,
                BLOCK,
                nonce.as_ptr(),
                NONCE,
                from,
                length,
                ptr::null(),
                0,
                head.as_ptr(),
                head.len(),
            )
        };
        (sealed == 1 && tag_length == BLOCK).then_some(length + BLOCK)
    }

    /// Opens a text in place, behind which is its tag. False where it is not authentic, and nothing is left of it then.
    pub fn open(&self, nonce: &[u8; NONCE], head: &[u8], sealed: &mut [u8]) -> bool {
        let Some((text, tag)) = sealed.split_last_chunk_mut::<BLOCK>() else { return false };
        let (place, length) = (text.as_mut_ptr(), text.len());
        // SAFETY: all of them are slices, and the text is written where it is read.
        let opened = unsafe {
            aws_lc::EVP_AEAD_CTX_open_gather(
                &raw const *self.0,
                place,
                nonce.as_ptr(),
                NONCE,
                place,
                length,
                tag.as_ptr(),
                BLOCK,
                head.as_ptr(),
                head.len(),
            )
        };
        opened == 1
    }
}

impl Drop for GcmKey {
    fn drop(&mut self) {
        // SAFETY: what was begun is ended, and all zeroes are one that is not begun.
        unsafe {
            aws_lc::EVP_AEAD_CTX_cleanup(&mut *self.0);
            ptr::write_bytes(&raw mut *self.0, 0, 1);
        }
        std::hint::black_box(&raw mut *self.0);
    }
}

/// A key of AES-256, expanded for counter mode. It is wiped when it is dropped.
pub struct CounterKey(Box<aws_lc::AES_KEY>);

impl CounterKey {
    /// The key that these 32 bytes are; nothing of any other length.
    pub fn new(key: &[u8]) -> Option<CounterKey> {
        if key.len() != KEY {
            return None;
        }
        // SAFETY: the key is as long as is said.
        unsafe {
            aws_lc::CRYPTO_library_init();
            let mut expanded = CounterKey(Box::new(aws_lc::AES_KEY { rd_key: [0; 60], rounds: 0 }));
            let bits = 8 * KEY as c_uint;
            let made = aws_lc::AES_set_encrypt_key(key.as_ptr(), bits, &mut *expanded.0);
            (made == 0).then_some(expanded)
        }
    }
}

impl Drop for CounterKey {
    fn drop(&mut self) {
        self.0.rd_key.zeroize();
    }
}

/// How far a message in counter mode is, with a 128-bit big-endian counter (NIST SP 800-38A).
pub struct CounterState {
    block: [u8; BLOCK],
    /// The last block of the key stream, and how much of it was used.
    mask: [u8; BLOCK],
    used: c_uint,
}

impl CounterState {
    /// Behind `done` bytes of a message whose first counter block is `first`.
    pub fn new(key: &CounterKey, first: [u8; BLOCK], done: usize) -> CounterState {
        let block = u128::from_be_bytes(first).wrapping_add((done / BLOCK) as u128);
        let mut state = CounterState { block: block.to_be_bytes(), mask: [0; BLOCK], used: 0 };
        let (none, mut nowhere) = ([0; BLOCK], [0; BLOCK]);
        state.apply(key, &none[..done % BLOCK], &mut nowhere);
        nowhere.zeroize();
        state
    }

    /// Applies the key stream to what follows: as many bytes as both have.
    pub fn apply(&mut self, key: &CounterKey, input: &[u8], out: &mut [u8]) -> usize {
        let count = input.len().min(out.len());
        // SAFETY: so many bytes are inside of both.
        unsafe { self.apply_raw(key, input.as_ptr(), out.as_mut_ptr(), count) };
        count
    }

    /// The same from memory to memory, which may be one.
    pub fn apply_there(&mut self, key: &CounterKey, input: DmaSlice<'_>, out: DmaSlice<'_>) {
        let count = input.len().min(out.len());
        // SAFETY: so many bytes are mapped at both as long as the slices are there, and others may change them.
        unsafe { self.apply_raw(key, input.as_ptr(), out.as_ptr(), count) };
    }

    /// # Safety
    /// `count` bytes are mapped at both addresses.
    unsafe fn apply_raw(&mut self, key: &CounterKey, from: *const u8, to: *mut u8, count: usize) {
        let CounterState { block, mask, used } = self;
        // SAFETY: as promised; the others are as long as the library wants them.
        unsafe {
            let (block, mask) = (block.as_mut_ptr(), mask.as_mut_ptr());
            aws_lc::AES_ctr128_encrypt(from, to, count, &raw const *key.0, block, mask, used);
        }
    }
}

impl Drop for CounterState {
    fn drop(&mut self) {
        self.mask.zeroize();
    }
}

/// SHA-256 of what it was given so far. It is wiped when it is dropped.
pub struct Sha256State(aws_lc::SHA256_CTX);

impl Default for Sha256State {
    fn default() -> Sha256State {
        // SAFETY: all zeroes are numbers and bytes, and the library makes its beginning of them.
        unsafe {
            aws_lc::CRYPTO_library_init();
            let mut state = Sha256State(MaybeUninit::zeroed().assume_init());
            aws_lc::SHA256_Init(&mut state.0);
            state
        }
    }
}

impl Sha256State {
    /// Adds what follows in a message, in memory that nobody changes.
    pub fn add(&mut self, input: &[u8]) {
        // SAFETY: the bytes are a slice.
        unsafe { aws_lc::SHA256_Update(&mut self.0, input.as_ptr().cast(), input.len()) };
    }

    /// Adds what follows where it is.
    pub fn add_from(&mut self, input: DmaSlice<'_>) {
        // SAFETY: they are mapped as long as the slice is there, and others may change them.
        unsafe {
            aws_lc::SHA256_Update(&mut self.0, input.as_ptr().cast_const().cast(), input.len())
        };
    }

    /// The digest; it is as one that was just begun afterwards.
    pub fn finish(&mut self) -> [u8; 32] {
        let mut digest = [0; 32];
        // SAFETY: the digest is as long as the library puts out.
        unsafe { aws_lc::SHA256_Final(digest.as_mut_ptr(), &mut self.0) };
        *self = Sha256State::default();
        digest
    }
}

impl Drop for Sha256State {
    fn drop(&mut self) {
        self.0.h.zeroize();
        self.0.data.zeroize();
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicBool, Ordering};

    use aes::Aes256Enc;
    use aes::cipher::{KeyInit, StreamCipher};
    use ctr::cipher::InnerIvInit;
    use proptest::prelude::*;
    use rackbus_memory::SharedMemory;

    use super::*;

    const SIZE: usize = 64 << 10;

    /// Whoever changes a text while it is sealed has the tag of what came out: each byte is read once.
    #[test]
    fn what_is_sealed_of_a_text_that_changes_is_authentic() {
        let key = GcmKey::new(&[5; KEY]).unwrap();
        let memory = SharedMemory::create("changing", SIZE as u64).unwrap();
        let over = AtomicBool::new(false);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                let mut bytes = (0..=u8::MAX).cycle();
                while !over.load(Ordering::Relaxed) {
                    memory.whole().fill(bytes.next().unwrap_or(0));
                }
            });
            let authentic = (0..400usize).all(|nth| {
                let length = SIZE - nth;
                let mut out = vec![0; length + BLOCK];
                let text = SealedText::There(memory.whole().part(0, length).unwrap());
                let sealed = key.seal(&[3; NONCE], b"head", text, &mut out);
                sealed == Some(length + BLOCK) && key.open(&[3; NONCE], b"head", &mut out)
            });
            over.store(true, Ordering::Relaxed);
            assert!(authentic);
        });
    }

    fn message() -> Vec<u8> {
        (0..SIZE as u32).map(|n| (n.wrapping_mul(0x9e37_79b9) >> 13) as u8).collect()
    }

    proptest! {
        /// From memory to memory, cut anyhow, and behind what was done in an earlier life: as another library has it, also
        /// where the counter's lower half runs over.
        #[test]
        fn counter_mode_between_memories_is_the_same_as_by_another_library(
            first in prop_oneof![any::<u128>(), (u128::MAX - 300)..=u128::MAX, Just(u128::from(u64::MAX) - 7)],
            lengths in prop::collection::vec(0usize..10_000, 1..5), done in 0usize..500, start in 0usize..20,
        ) {
            let (first, message) = (first.to_be_bytes(), message());
            let total: usize = done + lengths.iter().sum::<usize>();
            let mut expected = message[..total].to_vec();
            let cipher = Aes256Enc::new(&[5; KEY].into());
            let core = ctr::CtrCore::inner_iv_init(cipher, &first.into());
            ctr::Ctr128BE::<Aes256Enc>::from_core(core).apply_keystream(&mut expected);
            let [from, to] = ["from", "to"].map(|name| SharedMemory::create(name, SIZE as u64 * 2).unwrap());
            from.whole().part(start, SIZE).unwrap().copy_from(&message);
            let key = CounterKey::new(&[5; KEY]).unwrap();
            let mut state = CounterState::new(&key, first, done);
            let mut at = done;
            for length in lengths {
                let (input, out) = (from.whole(), to.whole());
                let parts = (input.part(start + at, length), out.part(at, length));
                state.apply_there(&key, parts.0.unwrap(), parts.1.unwrap());
                at += length;
            }
            let mut found = vec![0; total - done];
            to.whole().part(done, total - done).unwrap().copy_to(&mut found);
            prop_assert!(found == expected[done..]);
            // In the place of what went in.
            let place = from.whole().part(start + done, total - done).unwrap();
            CounterState::new(&key, first, done).apply_there(&key, place, place);
            place.copy_to(&mut found);
            prop_assert!(found == expected[done..]);
        }

        /// A text that is sealed where it is, is sealed as one in the place of what comes out, and opened again.
        #[test]
        fn a_text_is_sealed_where_it_is_as_anywhere_else(length in 0usize..20_000, start in 0usize..20, head in 0usize..40) {
            let (message, key) = (message(), GcmKey::new(&[5; KEY]).unwrap());
            let memory = SharedMemory::create("text", SIZE as u64).unwrap();
            memory.whole().copy_from(&message);
            let (nonce, head) = ([3; NONCE], &message[SIZE - head..]);
            let text = &message[start..start + length];
            let sealed = Some(length + BLOCK);
            let [mut there, mut apart, mut here] = [(); 3].map(|()| vec![0; length + BLOCK]);
            let place = SealedText::There(memory.whole().part(start, length).unwrap());
            prop_assert_eq!(key.seal(&nonce, head, place, &mut there), sealed);
            prop_assert_eq!(key.seal(&nonce, head, SealedText::Own(text), &mut apart), sealed);
            here[..length].copy_from_slice(text);
            prop_assert_eq!(key.seal(&nonce, head, SealedText::InPlace(length), &mut here), sealed);
            prop_assert!(there == here && there == apart);
            prop_assert!(key.open(&nonce, head, &mut here));
            prop_assert!(&here[..length] == text);
            there[length / 2] ^= 1;
            prop_assert!(!key.open(&nonce, head, &mut there));
            // No room for the tag.
            let longer = SealedText::InPlace(length + 1);
            prop_assert_eq!(key.seal(&nonce, head, longer, &mut here), None);
        }

        #[test]
        fn a_digest_of_memory_is_that_of_the_same_bytes(cut in 0usize..SIZE, start in 0usize..20) {
            let message = message();
            let memory = SharedMemory::create("digest", SIZE as u64).unwrap();
            memory.whole().copy_from(&message);
            let (mut there, mut here) = (Sha256State::default(), Sha256State::default());
            let cut = cut.max(start);
            there.add_from(memory.whole().part(start, cut - start).unwrap());
            there.add(&message[cut..]);
            here.add(&message[start..]);
            let digest = here.finish();
            prop_assert_eq!(there.finish(), digest);
            // As one that was just begun.
            here.add(&message[start..]);
            prop_assert_eq!(here.finish(), digest);
        }
    }
}
