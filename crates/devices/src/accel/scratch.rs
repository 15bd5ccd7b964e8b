//! What a thread that is an engine has for itself.

use super::engines::Spare;
use super::job::CHUNK;

/// Memory of a thread that is an engine, which no operation leaves anything in that a later one puts out.
#[derive(Debug)]
pub struct Scratch {
    /// Where output is before it goes to the tenant's memory.
    pub out: Vec<u8>,
    /// Engines that wait for their next operation.
    pub spare: Spare,
}

impl Default for Scratch {
    fn default() -> Scratch {
        Scratch { out: vec![0; 2 * CHUNK], spare: Spare::default() }
    }
}
