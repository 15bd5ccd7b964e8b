//! rackbus fabric.
