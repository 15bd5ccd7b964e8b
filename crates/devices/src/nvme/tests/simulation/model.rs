//! What NVMe promises, per block: which content a read may give, and which may be there after a
//! loss of power.

use super::disk::BLOCKS;

/// A content: the number of the write that made it; 0 for zeroes.
pub type WriteNumber = u64;

#[derive(Debug, Clone)]
struct Write {
    version: WriteNumber,
    begun: u64,
    /// `None` while it may still happen.
    ended: Option<u64>,
    succeeded: bool,
    durable: bool,
    /// Since when it is known that the block has another content.
    gone: Option<u64>,
}

/// The promises on every block. Times are positions in the order of events.
#[derive(Debug)]
pub struct Promises {
    blocks: Vec<Vec<Write>>,
}

impl Write {
    /// Content that is there for certain from `at` on, and can be lost no more.
    fn settled(version: WriteNumber, at: u64) -> Write {
        let (begun, ended) = (at, Some(at));
        Write { version, begun, ended, succeeded: true, durable: true, gone: None }
    }

    /// Whether `self` comes after `other` in every order that is allowed.
    fn follows(&self, other: &Write) -> bool {
        other.ended.is_some_and(|ended| self.succeeded && self.begun > ended)
    }
}

impl Promises {
    pub fn new() -> Promises {
        Promises { blocks: vec![vec![Write::settled(0, 0)]; BLOCKS] }
    }

    /// A write of `version` to `block` was submitted.
    pub fn begun(&mut self, block: usize, version: WriteNumber, at: u64) {
        let (ended, succeeded, durable) = (None, false, false);
        let begun = at;
        self.blocks[block].push(Write { version, begun, ended, succeeded, durable, gone: None });
    }

    /// The write of `version` submitted at `begun` ended, or was given up for good.
    pub fn ended(&mut self, block: usize, begun: u64, succeeded: bool, durable: bool, at: u64) {
        let writes = &mut self.blocks[block];
        let Some(index) = writes.iter().position(|write| write.begun == begun) else { return };
        let write = &mut writes[index];
        (write.ended, write.succeeded) = (Some(at), succeeded);
        write.durable |= durable;
    }

    /// A flush that was submitted at `begun` succeeded.
    pub fn flushed(&mut self, begun: u64) {
        for write in self.blocks.iter_mut().flatten() {
            write.durable |= write.succeeded && write.ended.is_some_and(|ended| ended < begun);
        }
    }

    /// What a read of `block` between `begun` and `ended` may give.
    fn readable(&self, block: usize, begun: u64, ended: u64) -> impl Iterator<Item = &Write> {
        let writes = &self.blocks[block];
        writes.iter().filter(move |write| {
            write.gone.is_none_or(|gone| begun < gone)
                && write.begun < ended
                && !writes.iter().any(|later| {
                    later.follows(write) && later.ended.is_some_and(|ended| ended < begun)
                })
        })
    }

    /// Whether a read of `block` between `begun` and `ended` may give something else than `version`.
    pub fn may_differ(&self, block: usize, version: WriteNumber, begun: u64, ended: u64) -> bool {
        self.readable(block, begun, ended).any(|write| write.version != version)
    }

    /// A read between `begun` and `ended` gave `version`.
    pub fn read(
        &mut self,
        block: usize,
        version: WriteNumber,
        begun: u64,
        ended: u64,
    ) -> Result<(), String> {
        if !self.readable(block, begun, ended).any(|write| write.version == version) {
            let writes = &self.blocks[block];
            return Err(format!("block {block} gave {version}; its writes were {writes:?}"));
        }
        for write in &mut self.blocks[block] {
            let over = write.ended.is_some_and(|ended| ended < begun);
            if write.version != version && over {
                write.gone = Some(write.gone.map_or(ended, |gone| gone.min(ended)));
            }
        }
        Ok(())
    }

    /// A read with FUA between `begun` and `ended` gave `version`: it was made durable first (NVM Express base 1.4,
    /// section 6.9).
    pub fn read_durably(&mut self, block: usize, version: WriteNumber, begun: u64, ended: u64) {
        let given = self.readable(block, begun, ended).filter(|write| write.version == version);
        // Several writes may have given the same content; then it is not known which one was read.
        let [write] = given.map(|write| write.begun).collect::<Vec<_>>()[..] else { return };
        for write in self.blocks[block].iter_mut().filter(|it| it.begun == write) {
            write.durable = true;
        }
    }

    /// Whether `version` may be what is left of `block` after a loss of power.
    fn may_survive(&self, block: usize, version: WriteNumber) -> Result<(), String> {
        let writes = &self.blocks[block];
        let allowed = writes.iter().any(|write| {
            write.version == version
                && !writes.iter().any(|later| later.durable && later.follows(write))
        });
        match allowed {
            true => Ok(()),
            false => Err(format!(
                "block {block} has {version}, but something newer was durable: {writes:?}"
            )),
        }
    }

    /// The power was lost at `at` and `block` has `version`.
    pub fn survived(&mut self, block: usize, version: WriteNumber, at: u64) -> Result<(), String> {
        self.may_survive(block, version)?;
        self.blocks[block] = vec![Write::settled(version, at)];
        Ok(())
    }

    /// The system could not write `block` back and forgot it: it has `version` again.
    pub fn reverted(&mut self, block: usize, version: WriteNumber, at: u64) -> Result<(), String> {
        self.may_survive(block, version)?;
        for write in self.blocks[block].iter_mut().filter(|write| write.ended.is_some()) {
            write.gone = Some(write.gone.map_or(at, |gone| gone.min(at)));
        }
        self.blocks[block].push(Write::settled(version, at));
        Ok(())
    }
}
