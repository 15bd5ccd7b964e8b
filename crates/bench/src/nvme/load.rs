//! What is asked of a drive: sizes, depths, and where.

/// The load that one client puts on a drive.
#[derive(Debug, Clone, Copy)]
pub struct ClientLoad {
    /// Bytes of each operation.
    pub bytes: usize,
    /// Operations that are kept under way.
    pub depth: u16,
    /// Writes instead of reads.
    pub write: bool,
    /// At random places, or one after the other.
    pub random: bool,
}

impl ClientLoad {
    pub(crate) const fn new(bytes: usize, depth: u16, write: bool, random: bool) -> ClientLoad {
        ClientLoad { bytes, depth, write, random }
    }

    /// The places of a store of `size` bytes, one after the other or by xorshift.
    pub fn offsets(&self, size: u64) -> impl FnMut() -> u64 + use<> {
        let (slots, bytes, random) = (size / self.bytes as u64, self.bytes as u64, self.random);
        let (mut state, mut sequence) = (88_172_645_463_325_252u64, 0u64);
        move || {
            let slot = if random {
                state ^= state << 13;
                state ^= state >> 7;
                state ^= state << 17;
                state
            } else {
                sequence += 1;
                sequence
            };
            slot % slots * bytes
        }
    }
}

pub(super) const READ_1: ClientLoad = ClientLoad::new(4096, 1, false, true);

pub(super) const READ_32: ClientLoad = ClientLoad::new(4096, 32, false, true);

pub(super) const WRITE_1: ClientLoad = ClientLoad::new(4096, 1, true, true);

pub(super) const WRITE_32: ClientLoad = ClientLoad::new(4096, 32, true, true);

pub(super) const SEQUENTIAL: ClientLoad = ClientLoad::new(128 << 10, 1, false, false);

pub(super) const SEQUENTIAL_8: ClientLoad = ClientLoad::new(128 << 10, 8, false, false);

pub(super) const SEQUENTIAL_WRITE_8: ClientLoad = ClientLoad::new(128 << 10, 8, true, false);

/// Memory for data that serves every load.
pub(crate) const DATA: usize = 8 * (128 << 10);
