//! What each block of a drive may hold, as far as its users know (pure).
//!
//! A block holds what was acknowledged last, or what was asked for since and never answered. What was read once is
//! what it holds. Whoever has a newer epoch has the drive alone: what an older one hears late decides nothing.

use std::collections::BTreeMap;

/// Bytes of a block of the model.
pub const BLOCK: usize = 4096;
/// Blocks that are used of each drive.
pub const BLOCKS: usize = 256;

/// The content that a drive must have, by all writes that were acknowledged.
#[derive(Debug, Default)]
pub struct DriveModel {
    /// The newest epoch that has used it.
    epoch: u64,
    blocks: BTreeMap<usize, Block>,
}

/// A block; 0 stands for what was there at first, zeroes.
#[derive(Debug, Default)]
struct Block {
    last: u64,
    /// Written, and not answered.
    perhaps: Vec<u64>,
}

impl DriveModel {
    /// Whether nobody with a newer epoch has come since.
    pub fn is_current(&mut self, epoch: u64) -> bool {
        self.epoch = self.epoch.max(epoch);
        self.epoch == epoch
    }

    /// A write is about to begin, unless somebody newer has come.
    pub fn begin(&mut self, epoch: u64, block: usize, value: u64) -> bool {
        let current = self.is_current(epoch);
        if current {
            self.blocks.entry(block).or_default().perhaps.push(value);
        }
        current
    }

    /// A write was acknowledged.
    pub fn written(&mut self, epoch: u64, block: usize, value: u64) {
        if self.is_current(epoch) {
            self.blocks.insert(block, Block { last: value, perhaps: Vec::new() });
        }
    }

    /// A block was read.
    pub fn read(&mut self, epoch: u64, block: usize, data: &[u8]) -> Result<(), String> {
        if !self.is_current(epoch) {
            return Ok(());
        }
        self.found(epoch, block, value_of(block, data)?)
    }

    /// A block was read, and held `found`.
    pub fn found(&mut self, epoch: u64, block: usize, found: u64) -> Result<(), String> {
        if !self.is_current(epoch) {
            return Ok(());
        }
        let known = self.blocks.entry(block).or_default();
        if found != known.last && !known.perhaps.contains(&found) {
            return Err(format!("block {block} holds {found}, and should hold {known:?}"));
        }
        *known = Block { last: found, perhaps: Vec::new() };
        Ok(())
    }
}

/// What a block holds that `value` was written to: each eight bytes tell both and where they are.
pub fn content(block: usize, value: u64) -> Vec<u8> {
    let word = |at: u64| (value << 24 | (block as u64) << 12 | at).to_le_bytes();
    (0..BLOCK as u64 / 8).flat_map(word).collect()
}

/// The value that a block holds.
fn value_of(block: usize, data: &[u8]) -> Result<u64, String> {
    if data.iter().all(|byte| *byte == 0) {
        return Ok(0);
    }
    let first: [u8; 8] = data.first_chunk().copied().ok_or("it has no bytes")?;
    let value = u64::from_le_bytes(first) >> 24;
    match data == content(block, value) {
        true => Ok(value),
        false => Err(format!("block {block} holds parts of several writes, or of another block")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_block_holds_what_was_acknowledged_or_is_not_known() {
        let mut model = DriveModel::default();
        assert!(model.begin(1, 3, 10));
        model.written(1, 3, 10);
        assert!(model.begin(1, 3, 11));
        // Lost on the way: either is right, and then it is what was found.
        assert!(model.read(2, 3, &content(3, 10)).is_ok());
        assert!(model.read(2, 3, &content(3, 11)).is_err());
        assert!(model.read(2, 4, &content(3, 10)).is_err());
        assert!(model.read(2, 5, &vec![0; BLOCK]).is_ok());
        assert!(model.read(2, 3, &vec![0; BLOCK]).is_err());
    }

    #[test]
    fn what_an_older_epoch_hears_late_decides_nothing() {
        let mut model = DriveModel::default();
        assert!(model.begin(1, 3, 10));
        assert!(model.is_current(2));
        model.written(1, 3, 10);
        assert!(!model.begin(1, 3, 12));
        assert!(model.read(2, 3, &vec![0; BLOCK]).is_ok());
        assert!(model.read(2, 3, &content(3, 10)).is_err());
    }

    #[test]
    fn blocks_written_in_part_are_found() {
        let mut data = content(3, 10);
        data[2048..].copy_from_slice(&content(3, 11)[2048..]);
        assert!(DriveModel::default().read(1, 3, &data).is_err());
    }
}
