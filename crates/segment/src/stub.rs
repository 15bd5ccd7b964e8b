//! To be replaced by `fabric::pool` and `fabric::sharing`.
use crate::message::Share;
/// Room.
#[derive(Debug)]
pub struct Extents {
    size: u64,
    used: std::collections::BTreeMap<u64, u64>,
}
impl Extents {
    /// New.
    pub fn new(size: u64) -> Self {
        Extents { size, used: Default::default() }
    }
    /// Free bytes.
    pub fn free_bytes(&self) -> u64 {
        self.size - self.used.values().sum::<u64>()
    }
    /// Takes.
    pub fn allocate(&mut self, size: u64) -> Option<u64> {
        let size = size.next_multiple_of(4096);
        let mut at = 0;
        for (start, length) in &self.used {
            if at + size <= *start {
                break;
            }
            at = start + length;
        }
        if at.checked_add(size)? > self.size {
            return None;
        }
        self.used.insert(at, size);
        Some(at)
    }
    /// Gives back.
    pub fn free(&mut self, offset: u64, _size: u64) {
        self.used.remove(&offset);
    }
}
/// Rules.
#[derive(Debug, Clone, Default)]
pub struct Rules(Vec<(std::ops::RangeInclusive<u32>, String, Share)>);
impl Rules {
    /// Allowed.
    pub fn allowed(&self, _owner: &str, id: u32, host: &str) -> Share {
        self.0.iter().rev().find(|r| r.0.contains(&id) && r.1 == host).map_or(Share::Write, |r| r.2)
    }
    /// Sets.
    pub fn set(
        &mut self,
        _owner: &str,
        ids: std::ops::RangeInclusive<u32>,
        host: &str,
        share: Share,
    ) {
        self.0.push((ids, host.to_owned(), share));
    }
}
