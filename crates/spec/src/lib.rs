//! rackbus spec.
