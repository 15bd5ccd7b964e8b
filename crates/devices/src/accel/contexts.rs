//! What a tenant keeps in its function: keys and patterns, by the handles that descriptors name.

use std::collections::BTreeMap;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;

use rackbus_memory::SharedMemory;
use rackbus_spec::accel::{Operation, OperationStatus};
use serde::{Deserialize, Serialize};
use zeroize::Zeroizing;

use super::CONTEXTS;
use super::engines::{Context, wipe_stack};

/// Contexts with patterns at most: each keeps an automaton.
const PATTERNS: usize = 16;
/// Bytes that a context is made of at most: of patterns without case, 64 KiB would take many seconds.
pub const LARGEST_CONTEXT: u32 = 16 << 10;

/// All contexts of a function.
#[derive(Debug, Default)]
pub struct Contexts {
    kept: BTreeMap<u16, KeptContext>,
}

/// A context, and what it is made of again in another process.
struct KeptContext {
    context: Arc<Context>,
    of: Operation,
    made_of: Zeroizing<Vec<u8>>,
}

impl std::fmt::Debug for KeptContext {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        self.context.fmt(f)
    }
}

/// What a context is when it goes on elsewhere; what it is made of is not written down, but in memory beside.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ContextState {
    handle: u16,
    /// The number of the operation that it is for.
    operation: u8,
    length: u32,
}

impl Contexts {
    /// The context of this handle.
    pub fn get(&self, handle: u16) -> Option<Arc<Context>> {
        self.kept.get(&handle).map(|kept| kept.context.clone())
    }

    /// Makes a context for `of`; its handle.
    ///
    /// # Errors
    /// The status that creating it ends with.
    pub fn create(
        &mut self,
        of: Operation,
        made_of: Zeroizing<Vec<u8>>,
    ) -> Result<u16, OperationStatus> {
        let handle = (1..=CONTEXTS).find(|handle| !self.kept.contains_key(handle));
        let handle = handle.ok_or(OperationStatus::NoRoom)?;
        self.insert(handle, of, made_of).map(|()| handle)
    }

    fn insert(
        &mut self,
        handle: u16,
        of: Operation,
        made_of: Zeroizing<Vec<u8>>,
    ) -> Result<(), OperationStatus> {
        let patterns = self.kept.values().filter(|kept| kept.of == Operation::RegexScan).count();
        if of == Operation::RegexScan && patterns >= PATTERNS {
            return Err(OperationStatus::NoRoom);
        }
        let context = Arc::new(Context::new(of, &made_of)?);
        self.kept.insert(handle, KeptContext { context, of, made_of });
        Ok(())
    }

    /// Wipes a context; false where there is none.
    pub fn destroy(&mut self, handle: u16) -> bool {
        self.kept.remove(&handle).is_some()
    }

    /// Wipes all of them.
    pub fn clear(&mut self) {
        self.kept.clear();
        wipe_stack();
    }

    /// All of them as values, and memory with what they are made of, which is the reader's to wipe.
    ///
    /// # Errors
    /// When there is no memory.
    pub fn save(&self) -> std::io::Result<(Vec<ContextState>, OwnedFd)> {
        let bytes: usize = self.kept.values().map(|kept| kept.made_of.len()).sum();
        let memory = SharedMemory::create("accel-contexts", bytes.max(1) as u64);
        let memory = memory.map_err(std::io::Error::other)?;
        let (mut at, mut states) = (0, Vec::new());
        for (handle, kept) in &self.kept {
            if let Some(part) = memory.whole().part(at, kept.made_of.len()) {
                part.copy_from(&kept.made_of);
            }
            at += kept.made_of.len();
            let (operation, length) = (kept.of as u8, kept.made_of.len() as u32);
            states.push(ContextState { handle: *handle, operation, length });
        }
        Ok((states, memory.descriptor()?))
    }

    /// The contexts of a saved state. The memory with what they are made of is wiped.
    ///
    /// # Errors
    /// What is wrong with it.
    pub fn restore(states: &[ContextState], memory: OwnedFd) -> Result<Contexts, &'static str> {
        let size = rustix::fs::fstat(memory.as_fd()).map_err(|_| "the contexts' memory")?.st_size;
        let size = u64::try_from(size).unwrap_or(0);
        let memory = SharedMemory::adopt(memory, size).map_err(|_| "the contexts' memory")?;
        let (mut contexts, mut at) = (Contexts::default(), 0);
        for ContextState { handle, operation, length } in states {
            let of = Operation::from_number(*operation).ok_or("a context of no operation")?;
            let known = (1..=CONTEXTS).contains(handle) && !contexts.kept.contains_key(handle);
            if !known || *length > LARGEST_CONTEXT {
                return Err("a context");
            }
            let mut made_of = Zeroizing::new(vec![0; *length as usize]);
            let part = memory.whole().part(at, made_of.len()).ok_or("what a context is made of")?;
            part.copy_to(&mut made_of);
            at += made_of.len();
            contexts.insert(*handle, of, made_of).map_err(|_| "what a context is made of")?;
        }
        memory.whole().fill(0);
        Ok(contexts)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn key(byte: u8) -> Zeroizing<Vec<u8>> {
        Zeroizing::new(vec![byte; 32])
    }

    #[test]
    fn contexts_go_on_elsewhere_under_their_handles_and_leave_nothing_behind() {
        let mut contexts = Contexts::default();
        let handles: Vec<u16> =
            (1..4).map(|n| contexts.create(Operation::Aes256Ctr, key(n)).unwrap()).collect();
        let patterns = Zeroizing::new(b"a+b".to_vec());
        let scan = contexts.create(Operation::RegexScan, patterns).unwrap();
        assert!(contexts.destroy(handles[1]) && !contexts.destroy(handles[1]));
        let (states, memory) = contexts.save().unwrap();
        let look = SharedMemory::adopt(memory.try_clone().unwrap(), 67).unwrap();
        let again = Contexts::restore(&states, memory).unwrap();
        for (handle, there) in [(handles[0], true), (handles[1], false), (scan, true), (99, false)]
        {
            assert_eq!(again.get(handle).is_some(), there, "{handle}");
        }
        let mut left = [1; 67];
        look.whole().copy_to(&mut left);
        assert_eq!(left, [0; 67]);
    }

    #[test]
    fn states_that_cannot_be_are_refused() {
        let mut contexts = Contexts::default();
        contexts.create(Operation::Aes256Ctr, key(1)).unwrap();
        let (states, memory) = contexts.save().unwrap();
        let state = &states[0];
        for wrong in [
            vec![ContextState { handle: 0, ..state.clone() }],
            vec![ContextState { handle: CONTEXTS + 1, ..state.clone() }],
            vec![ContextState { operation: 99, ..state.clone() }],
            vec![ContextState { operation: Operation::Sha256 as u8, ..state.clone() }],
            vec![ContextState { length: 33, ..state.clone() }],
            vec![ContextState { length: 31, ..state.clone() }],
            vec![ContextState { length: u32::MAX, ..state.clone() }],
            vec![state.clone(), ContextState { handle: 1, ..state.clone() }],
        ] {
            let memory = memory.try_clone().unwrap();
            assert!(Contexts::restore(&wrong, memory).is_err(), "{wrong:?}");
        }
        let other = std::fs::File::open("/dev/null").unwrap();
        assert!(Contexts::restore(&states, other.into()).is_err());
    }
}
