//! rackbus memory.
