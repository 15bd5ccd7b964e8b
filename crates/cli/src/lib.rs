//! rackbus cli.
