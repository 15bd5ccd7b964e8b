//! rackbus control.
