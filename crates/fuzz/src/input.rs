//! A fuzzer's bytes as choices, one after the other. When they are used up, every choice is 0 and
//! [`Input::is_empty`] says so.

/// What is left of an input.
#[derive(Debug, Clone, Copy)]
pub struct Input<'a>(&'a [u8]);

impl<'a> Input<'a> {
    /// Input that nothing was taken from yet.
    pub fn new(data: &'a [u8]) -> Self {
        Input(data)
    }

    /// Whether nothing is left.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Bytes that were not taken yet.
    pub fn rest(&self) -> &'a [u8] {
        self.0
    }

    /// The next bytes; fewer when there are no more.
    pub fn bytes(&mut self, count: usize) -> &'a [u8] {
        let (taken, left) = self.0.split_at(count.min(self.0.len()));
        self.0 = left;
        taken
    }

    fn array<const N: usize>(&mut self) -> [u8; N] {
        let taken = self.bytes(N);
        let mut out = [0; N];
        out[..taken.len()].copy_from_slice(taken);
        out
    }

    /// Takes a byte; zero when none is left.
    pub fn u8(&mut self) -> u8 {
        self.array::<1>()[0]
    }

    /// A number of 16 bits, little endian, as all of them.
    pub fn u16(&mut self) -> u16 {
        u16::from_le_bytes(self.array())
    }

    /// A number of 32 bits.
    pub fn u32(&mut self) -> u32 {
        u32::from_le_bytes(self.array())
    }

    /// A number of 64 bits.
    pub fn u64(&mut self) -> u64 {
        u64::from_le_bytes(self.array())
    }

    /// A number that is mostly small, sometimes at an edge and sometimes anything: its first byte
    /// says what.
    pub fn number(&mut self) -> u64 {
        match self.u8() {
            small @ 0..=0xe7 => small.into(),
            0xe8..=0xf3 => self.u16().into(),
            0xf4..=0xf7 => self.u32().into(),
            0xf8..=0xfb => 1u64.checked_shl(self.u8().into()).unwrap_or(0).wrapping_sub(1),
            0xfc => u64::MAX - u64::from(self.u8()),
            _ => self.u64(),
        }
    }

    /// Bytes behind a length of one byte.
    pub fn short(&mut self) -> &'a [u8] {
        let length = self.u8();
        self.bytes(length.into())
    }
}
