//! rackbus link.
