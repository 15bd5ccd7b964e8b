//! CRC-32C: four bytes, little-endian. Where the processor has an instruction for it, that reads the tenant's memory
//! itself: to copy the input first takes as long again.
#![allow(unsafe_code)] // raw reads: no Rust slice of memory that others change may exist

use rackbus_memory::DmaSlice;
use rackbus_spec::accel::OperationStatus;

use super::{EngineStep, OperationRequest, Portion, RunningOperation};

#[derive(Debug, Default)]
pub struct Crc32c(u32);

impl RunningOperation for Crc32c {
    fn step(
        &mut self,
        input: &[u8],
        last: bool,
        out: &mut [u8],
    ) -> Result<EngineStep, OperationStatus> {
        self.0 = crc32c::crc32c_append(self.0, input);
        let mut written = 0;
        if last {
            out[..4].copy_from_slice(&self.0.to_le_bytes());
            written = 4;
        }
        Ok(EngineStep { read: input.len(), written, finished: last })
    }

    fn takes_memory(&self) -> bool {
        is_instruction()
    }

    fn take(&mut self, input: DmaSlice<'_>) {
        #[cfg(target_arch = "x86_64")]
        if is_instruction() {
            // SAFETY: the processor has the instruction, and the slice is mapped as long as it is there.
            self.0 = unsafe { x86::append(self.0, input.as_ptr(), input.len()) };
            return;
        }
        let mut part = [0; 4096];
        for at in (0..input.len()).step_by(part.len()) {
            let from = input.part(at, part.len().min(input.len() - at));
            let count = from.map_or(0, |from| from.copy_to(&mut part));
            self.0 = crc32c::crc32c_append(self.0, &part[..count]);
        }
    }

    fn portion(&self) -> Portion {
        Portion::Whole
    }

    fn renew(&mut self, _: &OperationRequest<'_>) -> bool {
        self.0 = 0;
        true
    }
}

#[cfg(target_arch = "x86_64")]
fn is_instruction() -> bool {
    is_x86_feature_detected!("sse4.2")
}

#[cfg(not(target_arch = "x86_64"))]
fn is_instruction() -> bool {
    false
}

#[cfg(target_arch = "x86_64")]
mod x86 {
    use std::arch::x86_64::{_mm_crc32_u8, _mm_crc32_u64};
    use std::sync::OnceLock;

    /// What so many zero bytes behind a message make of its checksum: linear, so that it is put together of what they
    /// make of each of its bytes.
    struct Zeroes {
        bytes: usize,
        of: [[u32; 256]; 4],
    }

    impl Zeroes {
        fn new(bytes: usize) -> Zeroes {
            let bit = |nth: usize| crc32c::crc32c_combine(1 << nth, 0, bytes);
            let bits: [u32; 32] = std::array::from_fn(bit);
            let byte = |place: usize, value: usize| {
                let of_bit =
                    |nth: usize| if value >> nth & 1 != 0 { bits[8 * place + nth] } else { 0 };
                (0..8).map(of_bit).fold(0, |all, one| all ^ one)
            };
            let of = std::array::from_fn(|place| std::array::from_fn(|value| byte(place, value)));
            Zeroes { bytes, of }
        }

        #[inline]
        fn behind(&self, checksum: u64) -> u64 {
            let bytes = (checksum as u32).to_le_bytes();
            let all = self.of.iter().zip(bytes).map(|(of, byte)| of[usize::from(byte)]);
            all.fold(0, |all, one| all ^ one).into()
        }
    }

    /// The instruction has a latency of three: three parts are done at a time, long ones and then short ones.
    fn parts() -> &'static [Zeroes; 2] {
        static PARTS: OnceLock<[Zeroes; 2]> = OnceLock::new();
        PARTS.get_or_init(|| [2048, 256].map(Zeroes::new))
    }

    /// The checksum of what had `checksum`, and `length` bytes behind it. Each byte is read once.
    ///
    /// # Safety
    /// The bytes are mapped, and the processor has the instruction. Others may change the bytes meanwhile.
    #[target_feature(enable = "sse4.2")]
    pub unsafe fn append(checksum: u32, start: *const u8, length: usize) -> u32 {
        let mut sum = u64::from(!checksum);
        let mut at = 0;
        // SAFETY: what is read is within the bytes, of any alignment.
        let load = |at: usize| unsafe { start.add(at).cast::<u64>().read_unaligned() };
        // A message shorter than that has no parts.
        let zeroes: &[Zeroes] = if length < 3 * 256 { &[] } else { parts() };
        for part in zeroes {
            while length - at >= 3 * part.bytes {
                let [mut second, mut third] = [0; 2];
                for from in (at..at + part.bytes).step_by(8) {
                    sum = _mm_crc32_u64(sum, load(from));
                    second = _mm_crc32_u64(second, load(from + part.bytes));
                    third = _mm_crc32_u64(third, load(from + 2 * part.bytes));
                }
                sum = part.behind(part.behind(sum) ^ second) ^ third;
                at += 3 * part.bytes;
            }
        }
        while length - at >= 8 {
            sum = _mm_crc32_u64(sum, load(at));
            at += 8;
        }
        let mut sum = sum as u32;
        for at in at..length {
            // SAFETY: as above.
            sum = _mm_crc32_u8(sum, unsafe { start.add(at).read() });
        }
        !sum
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use rackbus_memory::SharedMemory;

    use super::*;

    proptest! {
        /// What reads memory itself has the library's result, wherever the message is and however it is cut.
        #[test]
        fn checksums_of_memory_are_the_librarys(
            start in 0usize..20, lengths in proptest::collection::vec(0usize..10_000, 1..4),
        ) {
            let memory = SharedMemory::create("checksum", 64 << 10).unwrap();
            let message: Vec<u8> = (0..60_000u32).map(|n| (n.wrapping_mul(0x9e37_79b9) >> 13) as u8).collect();
            memory.whole().copy_from(&message);
            let (mut engine, mut at) = (Crc32c::default(), start);
            for length in lengths {
                engine.take(memory.whole().part(at, length).unwrap());
                at += length;
            }
            let mut out = [0; 4];
            let step = engine.step(&[], true, &mut out).unwrap();
            prop_assert!(step.finished && step.written == 4);
            prop_assert_eq!(u32::from_le_bytes(out), crc32c::crc32c(&message[start..at]));
        }
    }
}
