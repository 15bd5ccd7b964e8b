//! rackbus node.
