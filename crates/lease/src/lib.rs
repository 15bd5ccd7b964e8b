//! rackbus lease.
